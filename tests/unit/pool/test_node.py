"""Nodes over real sockets, a real registry file and the kernel's copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from sgl_tiered.cli.main import main
from sgl_tiered.core.addresses import slots_of
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError, TransportUnavailableError
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.pool import registry_url
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.etcd_registry import EtcdRegistry
from sgl_tiered.pool.layouts import KVShape, Shard
from sgl_tiered.pool.local_registry import LocalRegistry
from sgl_tiered.pool.membership import InstanceKind, Lease
from sgl_tiered.pool.node import NodeConfig, PoolNode
from sgl_tiered.pool.registry_url import LEADER, ROUTERS, local_path, open_registry
from sgl_tiered.pool.table_store import TableStore
from sgl_tiered.tiers.region import RegionTier
from sgl_tiered.transport.base import TransferStatus
from sgl_tiered.transport.by_name import open_transport
from sgl_tiered.transport.keys import load_keyring, make_keys
from sgl_tiered.transport.loopback import open_loopback
from sgl_tiered.transport.process import Process

SHAPE = KVShape(num_layers=2, num_heads=2, head_bytes=16, page_tokens=4)
(SHARD,) = Shard.split(SHAPE, 1, 1)
LAYOUT = SHARD.layout(SHAPE)
PROMPT = np.arange(24, dtype=np.int32)
PATIENCE_S = 60.0


class Array:
    """A region that is a plain array."""

    def __init__(self, num_rows: int) -> None:
        self.array = np.zeros((num_rows, LAYOUT.page_bytes), np.uint8)

    def close(self) -> None:
        """Nothing to close."""


def store(lease: Lease) -> TableStore:
    """A store of 32 blocks in host memory."""
    host = TierId.HOST
    return TableStore(
        lease.instance,
        LAYOUT,
        {host: 32},
        {host: LRUPolicy()},
        SystemClock(),
        {host: RegionTier(host, Array(32))},
        lease.incarnation,
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The registry of this test."""
    return f"file:{tmp_path / 'pool.json'}"


@pytest.fixture
def start(url: str) -> Iterator[Callable[..., PoolNode]]:
    """What makes a node, which is closed with the test."""
    with ExitStack() as stack:

        def start(name: str, **more: object) -> PoolNode:
            try:
                transport = open_loopback(grace_s=1.0)
            except TransportUnavailableError as error:
                pytest.skip(f"not run: {error}")
            stack.callback(transport.close)
            settings = {"ttl_s": 30.0, **more}
            config = NodeConfig(name, url, **settings)  # type: ignore[arg-type]
            node = PoolNode(config, SHAPE, store, transport)
            stack.callback(node.close)
            return node

        yield start


def until(is_so: Callable[[], bool], *nodes: PoolNode) -> None:
    """Let nodes do what there is to do, woken by their descriptors alone."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s
        for node in nodes:
            if node.wait(0.001):
                node.poll()


def acquainted(*nodes: PoolNode) -> None:
    """Let all know all, and where their memory is."""
    until(
        lambda: all(
            sum(bool(m.memory) for m in n.view.members) == len(nodes) for n in nodes
        ),
        *nodes,
    )


def hold(node: PoolNode) -> np.ndarray:
    """Keep random pages of the prompt; return their bytes."""
    blocks = node.pool.alloc_mem(6, BlockType.HOST)
    assert blocks is not None
    memory = node.store.memory(TierId.HOST)
    assert memory is not None
    rng = np.random.default_rng(1)
    memory[slots_of(blocks)] = rng.integers(0, 256, (6, LAYOUT.page_bytes), np.uint8)
    assert node.pool.insert(PROMPT, blocks).num_inserted == 6
    return memory[slots_of(blocks)]


def fetched(one: PoolNode, two: PoolNode) -> np.ndarray:
    """Have the second fetch the prompt from the first; return what arrived."""
    blocks = two.pool.alloc_mem(6, BlockType.HOST)
    assert blocks is not None
    fetch = two.pool.fetch(one.instance, PROMPT, blocks)
    until(lambda: fetch.status is not TransferStatus.RUNNING, one, two)
    assert fetch.num_blocks == 6, fetch.error
    memory = two.store.memory(TierId.HOST)
    assert memory is not None
    return memory[slots_of(blocks)]


def test_a_prefix_is_found_and_fetched(start: Callable[..., PoolNode]) -> None:
    """Each is woken by what the other does."""
    one, two = start("one"), start("two")
    acquainted(one, two)
    wanted = hold(one)
    search = two.pool.locate(PROMPT, timeout_s=PATIENCE_S)
    until(lambda: search.is_over, one, two)
    assert search.held[one.instance].num_pages == 6
    assert (fetched(one, two) == wanted).all()
    until(lambda: one.pool.is_idle and two.pool.is_idle, one, two)


def test_a_registry_that_hangs_holds_no_owner(start: Callable[..., PoolNode]) -> None:
    """Leases and views are other threads' business: pages go on as long as it hangs."""
    one, two = start("one"), start("two")
    acquainted(one, two)
    wanted = hold(one)
    is_open, callers = threading.Event(), set()

    def held(call: Callable[..., object]) -> Callable[..., object]:
        def wait_and_call(*args: object, **kwargs: object) -> object:
            callers.add(threading.current_thread().name)
            assert is_open.wait(10 * PATIENCE_S)
            return call(*args, **kwargs)

        return wait_and_call

    for node in (one, two):
        for name in ("join", "leave", "renew", "view", "watch", "drain"):
            setattr(node._registry, name, held(getattr(node._registry, name)))
    until(lambda: bool(callers), one, two)
    done: list[np.ndarray] = []

    def own() -> None:
        for _ in range(100):
            one.poll()
            two.poll()
            one.state()
        done.append(fetched(one, two))

    owner = threading.Thread(target=own, name="owner", daemon=True)
    owner.start()
    owner.join(2 * PATIENCE_S)
    assert not is_open.is_set()
    is_open.set()
    assert done, "the owner waits for the registry"
    assert (done[0] == wanted).all()
    assert "owner" not in callers


def test_a_node_says_how_it_is(start: Callable[..., PoolNode]) -> None:
    """As JSON values."""
    one = start("one", kind=InstanceKind.PREFILL, endpoints={"http": "x:1"})
    state = one.state()
    assert state["lease_left_s"] > 0
    assert not any(state["under_way"].values())
    assert state["media"]["host"]["free"] == 32
    (member,) = state["members"]
    assert member["kind"] == "prefill"
    assert member["endpoints"]["http"] == "x:1"
    assert member["endpoints"]["control"].startswith("tcp://127.0.0.1:")
    assert Process.named(member["endpoints"]["process"]) == Process.own()


def test_those_without_the_key_are_not_heard(
    start: Callable[..., PoolNode], tmp_path: Path
) -> None:
    """One pair for all, or a list; who has neither gets nothing, and is told why."""
    for name in ("ours", "listed", "foreign"):
        (tmp_path / name).mkdir()
        make_keys(tmp_path / name / "pool.key")
    ours, listed = (
        load_keyring(tmp_path / name).keys.public for name in ("ours", "listed")
    )
    (tmp_path / "ours" / "admitted").write_text(f"{listed}\n")
    (tmp_path / "listed" / "admitted").write_text(f"{ours}\n")
    foreign = load_keyring(tmp_path / "foreign").keys.public
    (tmp_path / "foreign" / "admitted").write_text(f"{ours}\n{foreign}\n")
    one = start("one", keys=tmp_path / "ours")
    two = start("two", keys=tmp_path / "listed")
    three, four = start("three", keys=tmp_path / "foreign"), start("four")
    acquainted(one, two, three, four)
    wanted = hold(one)
    assert (fetched(one, two) == wanted).all()
    for other in (three, four):
        search = other.pool.locate(PROMPT, ids=[one.instance])
        until(lambda search=search: search.is_over, one, other)
        assert search.held == {}

    def trouble(node: PoolNode) -> str:
        members = {m["name"]: m for m in node.state()["members"]}
        return str(members["one"]["trouble"])

    until(lambda: trouble(three) != "", one, three)
    assert "does not admit our key" in trouble(three)
    assert "does not admit our key" in trouble(four)


def test_beyond_loopback_there_must_be_keys(start: Callable[..., PoolNode]) -> None:
    """Said before anything is joined."""
    with pytest.raises(ConfigError, match="no keys"):
        start("one", host="0.0.0.0")


def test_a_name_taken_by_another_is_left_to_it(start: Callable[..., PoolNode]) -> None:
    """The first one stays out and says why, and comes back when the name is free."""
    one = start("one", ttl_s=1.0)
    other = start("one", ttl_s=1.0)
    until(lambda: "another process" in one.state()["trouble"], one, other)
    assert other.incarnation == 2
    other.close()
    until(lambda: one.incarnation == 3 and not one.state()["trouble"], one)
    assert one.pool.incarnation == 3


def test_two_versions_share_a_registry(
    start: Callable[..., PoolNode], url: str
) -> None:
    """Those of this one work; entries of others, and odd ones, end no thread."""
    one = start("one", ttl_s=1.0)
    registry = open_registry(url)
    assert isinstance(registry, LocalRegistry)
    later = {
        "name": "later",
        "instance": 7,
        "incarnation": 1,
        "kind": "encode",
        "endpoints": {},
        "draining": False,
    }
    # As the version before this one writes it: without keys and memory.
    former = {**later, "name": "former", "instance": 8, "kind": "prefill"}
    former["endpoints"] = {"control": "tcp://127.0.0.1:9"}
    odd = {**later, "name": "odd", "instance": 9, "kind": "prefill", "memory": "{"}
    with registry._state() as state:
        for entry in (later, former, odd):
            state["members"][str(entry["instance"])] = entry
            state["ends_s"][str(entry["instance"])] = 1e18
    two = start("two", ttl_s=1.0)
    until(
        lambda: all(
            {m.name for m in node.view.members} == {"one", "two", "former", "odd"}
            for node in (one, two)
        ),
        one,
        two,
    )
    wanted = hold(one)
    assert (fetched(one, two) == wanted).all()
    search = two.pool.locate(PROMPT, ids=[8, 9])
    until(lambda: search.is_over, one, two)
    assert search.held == {}
    ends_s = two.pool.lease_ends_s
    until(lambda: two.pool.lease_ends_s > ends_s, one, two)
    assert two.incarnation == 1
    assert two.state()["refused"]["entry"] > 0


def test_threads_outlive_whatever_a_registry_does(
    start: Callable[..., PoolNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted and said, and the lease is kept when the registry is well again."""
    one = start("one", ttl_s=1.0)

    def fails(*args: object) -> object:
        raise RuntimeError("planted")

    with monkeypatch.context() as planted:
        for name in ("renew", "watch", "view"):
            planted.setattr(one._registry, name, fails)
        before = one.incidents.counts.get("registry", 0)
        until(lambda: one.incidents.counts.get("registry", 0) > before + 2, one)
        assert one.state()["trouble"]
    until(lambda: not one.state()["trouble"], one)
    other = start("other")
    acquainted(one, other)


def test_the_command_sees_and_drains(
    start: Callable[..., PoolNode], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """From another process, which has no lease."""
    one = start("one")
    assert main(["pool", "list", "--registry", url]) == 0
    assert "one: instance 0.1, colocated" in capsys.readouterr().out
    routers = open_registry(url, part=ROUTERS)
    first = routers.join("r1", InstanceKind.COLOCATED, {"http": "http://r1:1"})
    routers.join("r2", InstanceKind.COLOCATED, {"http": "http://r2:1"})
    assert routers.lead(LEADER, first)
    assert main(["pool", "list", "--registry", url]) == 0
    shown = capsys.readouterr().out
    assert "r1: router, leads, http=http://r1:1\nr2: router, http=" in shown
    assert main(["pool", "drain", "one", "--registry", url]) == 0
    until(lambda: one.state()["draining"], one)
    assert main(["pool", "state", "--registry", url]) == 0
    assert '"draining": true' in capsys.readouterr().out
    assert main(["pool", "drain", "two", "--registry", url]) == 2
    assert "no instance 'two'" in capsys.readouterr().err


def test_keys_are_made_and_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The secret is not shown."""
    folder = tmp_path / "keys"
    assert main(["pool", "keys", str(folder)]) == 0
    ring = load_keyring(folder)
    assert ring.admitted == {ring.keys.public}
    assert ring.keys.secret not in capsys.readouterr().out
    assert main(["pool", "keys", str(folder)]) == 2
    (folder / "admitted").write_text("short\n")
    with pytest.raises(ConfigError, match="no public key"):
        load_keyring(folder)


def test_registries_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, the user's own, or etcd; anything else is refused."""
    monkeypatch.setattr(registry_url.tempfile, "gettempdir", lambda: str(tmp_path))
    open_registry("local").join("one", InstanceKind.COLOCATED, {})
    file = open_registry(f"file:{local_path()}")
    assert [member.name for member in file.view().members] == ["one"]
    assert local_path().parent.stat().st_mode & 0o777 == 0o700
    etcd = open_registry("etcd://127.0.0.1:1,127.0.0.1:2/mine")
    assert isinstance(etcd, EtcdRegistry)
    assert etcd._urls == ("http://127.0.0.1:1/v3", "http://127.0.0.1:2/v3")
    assert etcd._prefix == "/sgl-tiered/mine/"
    etcd.close()
    part = open_registry("etcd://127.0.0.1:1/mine", part="routers")
    assert isinstance(part, EtcdRegistry)
    assert part._prefix == "/sgl-tiered/mine.routers/"
    part.close()
    beside = open_registry("local", part="routers")
    beside.join("r", InstanceKind.COLOCATED, {})
    assert [member.name for member in file.view().members] == ["one"]
    assert local_path().with_name("pool.json.routers").exists()
    for wrong in ("", "file:", "redis://x:1", "etcd://host", "etcd://a:1/b/c"):
        with pytest.raises(ConfigError, match="etcd://HOST:PORT"):
            open_registry(wrong)
    local_path().parent.chmod(0o755)
    with pytest.raises(ConfigError, match="alone"):
        open_registry("local")


def test_transports_by_name() -> None:
    """``auto`` takes one that works; a wrong name is refused."""
    transport = open_transport("auto", grace_s=7.0)
    assert transport.address.kind in ("mooncake", "nixl", "loopback")
    assert transport.quarantine.grace_s == 7.0
    transport.close()
    with pytest.raises(ConfigError, match="choose one of auto, mooncake"):
        open_transport("pigeon")
