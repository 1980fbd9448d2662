"""Every registry keeps the same promises: ids, incarnations, leases, leaders, views."""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.errors import ConfigError, TransportUnavailableError
from sgl_tiered.pool.etcd_registry import EtcdRegistry
from sgl_tiered.pool.local_registry import LocalRegistry
from sgl_tiered.pool.membership import InstanceKind, Lease, Registry

PREFILL = InstanceKind.PREFILL
TTL_S = 2.0


class Kit:
    """The promises; a subclass says how to make a registry and how to let it age."""

    @pytest.fixture
    def make(self) -> Callable[[], Registry]:
        raise NotImplementedError

    def wait(self, seconds: float) -> None:
        raise NotImplementedError

    def put_entry(self, registry: Registry, instance: int, entry: object) -> None:
        """Write an entry as another version may."""
        raise NotImplementedError

    def get_entry(self, registry: Registry, instance: int) -> object:
        """Read one as it stands."""
        raise NotImplementedError

    def test_names_keep_their_id_and_count_their_starts(
        self, make: Callable[[], Registry]
    ) -> None:
        """The first start has number 1; another name has another id."""
        one, other = make(), make()
        first = one.join("p0", PREFILL, {"http": "127.0.0.1:1"})
        second = other.join("p1", PREFILL, {})
        again = other.join("p0", InstanceKind.DECODE, {"http": "127.0.0.1:2"})
        assert first.incarnation == second.incarnation == 1
        assert (again.instance, again.incarnation) == (first.instance, 2)
        assert first.instance != second.instance
        member = one.view().member(first.instance)
        assert member is not None
        assert member.kind is InstanceKind.DECODE
        assert member.endpoints == {"http": "127.0.0.1:2"}
        assert not one.renew(first), "its successor has ended it"
        assert other.renew(again)

    def test_a_lease_ends_unless_it_is_renewed(
        self, make: Callable[[], Registry]
    ) -> None:
        """The other one stays, and the name counts on."""
        registry = make()
        idle = registry.join("idle", PREFILL, {})
        busy = registry.join("busy", PREFILL, {})
        for _ in range(4):
            self.wait(TTL_S / 2)
            assert registry.renew(busy)
        members = [member.name for member in registry.view().members]
        assert members == ["busy"]
        assert not registry.renew(idle)
        assert not registry.drain(idle)
        assert registry.join("idle", PREFILL, {}).incarnation == 2

    def test_leaving_and_draining_are_seen(self, make: Callable[[], Registry]) -> None:
        """Every change makes the version grow, and nothing else does."""
        registry = make()
        lease = registry.join("p0", PREFILL, {})
        before = registry.view()
        assert registry.view() == before
        assert registry.drain(lease)
        after = registry.view()
        assert after.version > before.version
        assert [member.draining for member in after.members] == [True]
        assert registry.renew(lease)
        registry.leave(lease)
        registry.leave(lease)
        assert registry.view().members == ()
        assert not registry.renew(lease)

    def test_there_is_one_leader_until_its_lease_ends(
        self, make: Callable[[], Registry]
    ) -> None:
        """Then another one can have the role."""
        one, other = make(), make()
        first = one.join("p0", PREFILL, {})
        second = other.join("p1", PREFILL, {})
        assert one.lead("scheduler", first)
        assert one.lead("scheduler", first)
        assert not other.lead("scheduler", second)
        leader = other.leader("scheduler")
        assert leader is not None
        assert leader.name == "p0"
        one.leave(first)
        assert other.leader("scheduler") is None
        assert other.lead("scheduler", second)
        assert other.lead("janitor", second)
        restarted = other.join("p1", PREFILL, {})
        assert other.lead("scheduler", restarted), "its former start leads no more"

    def test_a_watch_tells_of_changes(self, make: Callable[[], Registry]) -> None:
        """None in time without one; also what came before the watch began."""
        registry, other = make(), make()
        version = registry.view().version
        assert registry.watch(version, 0.2) is None
        other.join("p0", PREFILL, {})
        view = registry.watch(version, 5.0)
        assert view is not None
        assert [member.name for member in view.members] == ["p0"]
        assert view.version > version

    def test_a_look_is_a_view_that_may_fail(self, make: Callable[[], Registry]) -> None:
        """Where there is an answer, the two are equal."""
        registry = make()
        registry.join("p0", PREFILL, {})
        assert registry.look() == registry.view()

    def test_notes_outlive_leases_and_the_last_write_wins(
        self, make: Callable[[], Registry]
    ) -> None:
        """Each write has another version, and what was written since is not erased."""
        one, other = make(), make()
        assert one.notes() == {}
        lease = one.join("p0", PREFILL, {})
        first = one.note("p0", "a")
        second = other.note("p0", "a")
        third = other.note("p1", "\N{SNOWMAN} {}")
        assert first is not None
        assert second is not None
        assert first.version != second.version
        one.leave(lease)
        assert one.notes() == {"p0": second, "p1": third}
        assert not one.erase("p0", first.version), "it was written since"
        assert one.erase("p0", second.version)
        assert not other.erase("p0", second.version), "it is gone"
        assert other.notes() == {"p1": third}
        with pytest.raises(ConfigError, match="letters"):
            one.note("a/b", "x")

    def test_notes_do_not_change_the_members(
        self, make: Callable[[], Registry]
    ) -> None:
        """Whoever watches them finds the same ones."""
        registry = make()
        lease = registry.join("p0", PREFILL, {})
        note = registry.note("p0", "a")
        assert note is not None
        assert registry.renew(lease)
        assert [member.name for member in registry.view().members] == ["p0"]

    def test_memory_is_published_under_a_lease(
        self, make: Callable[[], Registry]
    ) -> None:
        """It is seen as a change, and only who has the lease says it."""
        one, other = make(), make()
        former = one.join("p0", PREFILL, {"http": "x:1"})
        lease = one.join("p0", PREFILL, {"http": "x:1"})
        before = other.view()
        assert [member.memory for member in before.members] == [""]
        assert one.publish(lease, "{}")
        assert not one.publish(former, "else")
        after = other.view()
        assert after.version > before.version
        (member,) = after.members
        assert (member.memory, member.endpoints) == ("{}", {"http": "x:1"})
        assert other.drain(lease)
        assert [member.memory for member in one.view().members] == ["{}"]
        one.leave(lease)
        assert not one.publish(lease, "{}")

    @pytest.mark.parametrize(
        "entry",
        [
            {"kind": "encode", "name": "p7", "instance": 7, "incarnation": 1},
            {
                "kind": "prefill",
                "name": "p7",
                "instance": 7,
                "incarnation": "first",
                "endpoints": {},
            },
            {
                "kind": "prefill",
                "name": "p6",
                "instance": 6,
                "incarnation": 1,
                "endpoints": {},
            },
            {
                "kind": "prefill",
                "name": "p7",
                "instance": 7,
                "incarnation": 1,
                "endpoints": {"control": "tcp://h:" + "9" * 5000},
            },
            {
                "kind": "prefill",
                "name": "p7",
                "instance": 7,
                "incarnation": 1,
                "endpoints": {"control": "tcp://a..b:5", "http": "x:1"},
            },
            ["later"],
            None,
            "text",
            5,
        ],
        ids=lambda entry: type(entry).__name__,
    )
    def test_an_entry_of_another_version_is_passed_over(
        self, make: Callable[[], Registry], entry: object
    ) -> None:
        """The others are seen and work; it stays as it is."""
        one, other = make(), make()
        lease = one.join("p0", PREFILL, {})
        self.put_entry(one, 7, entry)
        for registry in (one, other):
            assert [m.name for m in registry.view().members] == ["p0"]
            found = registry.look()
            assert found is not None
            assert [m.name for m in found.members] == ["p0"]
        assert one.renew(lease)
        assert one.lead("scheduler", lease)
        assert other.leader("scheduler") is not None
        version = one.view().version
        other.join("p1", PREFILL, {})
        view = one.watch(version, 5.0)
        assert view is not None
        assert [m.name for m in view.members] == ["p0", "p1"]
        assert self.get_entry(one, 7) == entry

    def test_what_a_later_version_adds_is_kept(
        self, make: Callable[[], Registry]
    ) -> None:
        """An older one reads what it knows, and does not drop the rest."""
        one = make()
        lease = one.join("p0", PREFILL, {})
        entry = self.get_entry(one, lease.instance)
        assert isinstance(entry, dict)
        self.put_entry(one, lease.instance, {**entry, "further": [1]})
        assert [m.name for m in one.view().members] == ["p0"]
        assert one.drain(lease)
        found = self.get_entry(one, lease.instance)
        assert isinstance(found, dict)
        assert (found["further"], found["draining"]) == ([1], True)

    def test_a_bad_name_is_refused(self, make: Callable[[], Registry]) -> None:
        """It would be part of keys."""
        with pytest.raises(ConfigError, match="letters"):
            make().join("a/b", PREFILL, {})


class TestLocalRegistry(Kit):
    """The file of one machine."""

    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], Registry]:
        self.clock = ManualClock(100.0)
        return lambda: LocalRegistry(
            tmp_path / "registry.json",
            ttl_s=TTL_S,
            clock=self.clock,
            pause=self.clock.advance,
        )

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def put_entry(self, registry: Registry, instance: int, entry: object) -> None:
        assert isinstance(registry, LocalRegistry)
        with registry._state() as state:
            state["members"][str(instance)] = entry
            state["ends_s"][str(instance)] = self.clock.now() + 100.0

    def get_entry(self, registry: Registry, instance: int) -> object:
        assert isinstance(registry, LocalRegistry)
        return registry._read()["members"][str(instance)]

    def test_a_reboot_ends_all_leases(
        self, make: Callable[[], Registry], tmp_path: Path
    ) -> None:
        """The clock has begun anew, so their ends mean nothing."""
        lease = make().join("p0", PREFILL, {})
        path = tmp_path / "registry.json"
        path.write_text(path.read_text().replace('"boot": "', '"boot": "former'))
        assert make().view().members == ()
        assert make().join("p0", PREFILL, {}).incarnation == lease.incarnation + 1

    def test_the_file_is_for_its_owner_only(
        self, make: Callable[[], Registry], tmp_path: Path
    ) -> None:
        """It and its lock."""
        make().join("p0", PREFILL, {})
        modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        assert modes == {0o600}

    def test_a_file_of_before_there_were_notes_is_read(
        self, make: Callable[[], Registry], tmp_path: Path
    ) -> None:
        """And one without any is written as it was then, for those who know of none."""
        registry = make()
        registry.join("p0", PREFILL, {})
        path = tmp_path / "registry.json"
        assert "notes" not in path.read_text()
        note = registry.note("p0", "a")
        assert note is not None
        assert make().notes() == {"p0": note}
        assert registry.erase("p0", note.version)
        assert "notes" not in path.read_text()

    def test_a_file_out_of_reach_is_no_answer(self, tmp_path: Path) -> None:
        """Values, but for the start."""
        registry = LocalRegistry(tmp_path / "gone" / "registry.json")
        assert registry.look() is None
        assert registry.notes() is None
        assert registry.note("p0", "a") is None
        assert not registry.erase("p0", 1)
        with pytest.raises(TransportUnavailableError, match="cannot be used"):
            registry.join("p0", PREFILL, {})

    @pytest.mark.parametrize("missing", ["read", "write"])
    def test_a_file_out_of_reach_for_now_is_no_answer_either(
        self,
        make: Callable[[], Registry],
        monkeypatch: pytest.MonkeyPatch,
        missing: str,
    ) -> None:
        """Too many open files, or no space or inode left: members stay known."""
        registry = make()
        lease, other = (registry.join(name, PREFILL, {}) for name in ("p0", "p1"))
        note, seen = registry.note("p0", "a"), registry.view()
        assert note is not None

        def fails(*args: object, **kwargs: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            if missing == "read":
                patch.setattr(Path, "read_bytes", fails)
            else:
                patch.setattr("tempfile.mkstemp", fails)
            self.wait(TTL_S / 2)
            assert not registry.renew(lease)
            assert not registry.drain(lease)
            assert not registry.publish(lease, "here")
            assert not registry.lead("first", lease)
            assert registry.note("p0", "b") is None
            assert not registry.erase("p0", note.version)
            registry.leave(other)
            self.wait(TTL_S)
            assert registry.look() is None
            assert registry.view() == seen
            assert registry.leader("first") is None
            assert registry.notes() is None
            with pytest.raises(TransportUnavailableError, match="No space left"):
                registry.join("p0", PREFILL, {})
        assert registry.view().members == ()
        assert registry.notes() == {"p0": note}

    def test_a_file_that_others_may_change_is_refused(self, tmp_path: Path) -> None:
        """They would say where KV is sent."""
        path = tmp_path / "open" / "registry.json"
        path.parent.mkdir()
        LocalRegistry(path).join("p0", PREFILL, {})
        path.chmod(0o622)
        with pytest.raises(ConfigError, match="not this user's alone"):
            LocalRegistry(path)
        path.chmod(0o600)
        path.parent.chmod(0o777)
        with pytest.raises(ConfigError, match="its folder"):
            LocalRegistry(path)
        path.parent.chmod(0o1777)
        assert len(LocalRegistry(path).view().members) == 1

    @pytest.mark.parametrize(
        "change",
        [
            {"names": {"p0": 5}},
            {"members": {"five": {}}},
            {"ends_s": {"0": "soon"}},
            {"leaders": {"a": [1]}},
            {"notes": {"a": 1}},
            {"view_version": -1},
        ],
    )
    def test_a_file_of_another_shape_is_refused(
        self, tmp_path: Path, change: dict[str, object]
    ) -> None:
        """In one sentence, and not by whatever reads it first."""
        path = tmp_path / "registry.json"
        LocalRegistry(path).join("p0", PREFILL, {})
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        with pytest.raises(ConfigError, match="is not one"):
            LocalRegistry(path)

    def test_a_file_with_a_time_that_is_no_number_is_refused(
        self, tmp_path: Path
    ) -> None:
        """NaN is no JSON; half of a file is none either."""
        path = tmp_path / "registry.json"
        LocalRegistry(path).join("p0", PREFILL, {})
        fields = json.loads(path.read_text())
        path.write_text(json.dumps({**fields, "ends_s": {"0": float("nan")}}))
        with pytest.raises(ConfigError, match="is not JSON"):
            LocalRegistry(path)

    def test_a_foreign_file_is_refused(self, tmp_path: Path) -> None:
        """And left alone."""
        path = tmp_path / "registry.json"
        path.write_text('{"version": 1, "what": "else"}')
        with pytest.raises(ConfigError, match="is not one"):
            LocalRegistry(path)
        assert "else" in path.read_text()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An etcd of our own; the URL of its gateway."""
    unpacked = Path(__file__).parents[2] / ".cache/etcd/usr/bin"
    program = shutil.which("etcd") or shutil.which("etcd", path=str(unpacked))
    if program is None:
        pytest.skip("not run: etcd is not installed (Debian: etcd-server)")
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        client, peer = one.getsockname()[1], other.getsockname()[1]
    folder = tmp_path_factory.mktemp("etcd")
    url = f"http://127.0.0.1:{client}"
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [
            program,
            f"--data-dir={folder / 'data'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
        ],
        stdout=log,
        stderr=log,
        env={**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine},
    )
    try:
        for _ in range(300):
            try:
                if httpx.get(f"{url}/health", timeout=1.0).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        else:
            pytest.fail(f"etcd does not start; see {folder / 'log'}")
        yield url
    finally:
        process.kill()
        process.wait()
        log.close()


class TestEtcdRegistry(Kit):
    """A real etcd, where its program is installed."""

    @pytest.fixture
    def make(
        self, etcd: str, request: pytest.FixtureRequest
    ) -> Iterator[Callable[[], Registry]]:
        pool = request.node.name[:100].replace("[", ".").replace("]", "")
        made: list[EtcdRegistry] = []

        def make() -> Registry:
            made.append(EtcdRegistry(etcd, pool=pool, ttl_s=TTL_S))
            return made[-1]

        yield make
        for registry in made:
            registry.close()

    def put_entry(self, registry: Registry, instance: int, entry: object) -> None:
        assert isinstance(registry, EtcdRegistry)
        put = registry._put(f"members/{instance}", json.dumps(entry))
        registry._post("kv/put", put["request_put"])

    def get_entry(self, registry: Registry, instance: int) -> object:
        assert isinstance(registry, EtcdRegistry)
        found = registry._get(f"members/{instance}")
        assert found is not None
        return json.loads(found["value"])

    def wait(self, seconds: float) -> None:
        # etcd ends leases within about half a second of their time.
        time.sleep(seconds + 0.2)

    def test_a_watch_hears_at_once(self, make: Callable[[], Registry]) -> None:
        """A change that comes while it waits."""
        registry, other = make(), make()
        version = registry.view().version
        thread = threading.Timer(0.3, other.join, ("p0", PREFILL, {}))
        thread.start()
        view = registry.watch(version, 20.0)
        thread.join()
        assert view is not None
        assert [member.name for member in view.members] == ["p0"]


class TestWithoutEtcd:
    """What happens while it does not answer."""

    @pytest.fixture
    def registry(self) -> Iterator[EtcdRegistry]:
        def refuse(request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("nobody listens", request=request)

        client = httpx.Client(transport=httpx.MockTransport(refuse))
        clock = ManualClock()
        registry = EtcdRegistry(
            "http://127.0.0.1:1", client=client, clock=clock, pause=clock.advance
        )
        yield registry
        registry.close()

    def test_it_says_so(self, registry: EtcdRegistry) -> None:
        """Values, but for the start."""
        with pytest.raises(TransportUnavailableError, match="does not answer"):
            registry.join("p0", PREFILL, {})
        assert registry.view().members == ()
        assert registry.watch(0, 5.0) is None
        assert registry.leader("scheduler") is None
        assert registry.look() is None
        assert registry.notes() is None
        assert registry.note("p0", "a") is None
        assert not registry.erase("p0", 1)

    @pytest.mark.parametrize(
        "odd",
        [
            "null",
            "[]",
            "5",
            "{",
            "{}",
            '{"result": null, "kvs": null, "header": null, "succeeded": null}',
            '{"result": [], "kvs": [5], "header": [], "ID": []}',
            '{"result": {"TTL": 1e999}, "kvs": [{"key": 1}], "header": {}}',
            '{"kvs": [{"key": "!", "value": "!"}], "header": {"revision": "x"}}',
            "[" * 100000,
        ],
    )
    def test_an_odd_answer_is_none(self, odd: str) -> None:
        """Whatever a gateway, or what stands in its place, says: values."""

        def say(request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, text=odd + "\n", request=request)

        client = httpx.Client(transport=httpx.MockTransport(say))
        clock = ManualClock()
        registry = EtcdRegistry(
            "http://127.0.0.1:1", client=client, clock=clock, pause=clock.advance
        )
        lease = Lease("p0", 0, 1, 3.0, "5")
        with pytest.raises((TransportUnavailableError, ConfigError)):
            registry.join("p0", PREFILL, {})
        for call in (
            lambda: registry.renew(lease),
            lambda: registry.drain(lease),
            lambda: registry.publish(lease, "{}"),
            lambda: registry.leave(lease),
            lambda: registry.watch(0, 1.0),
            lambda: registry.lead("scheduler", lease),
            lambda: registry.leader("scheduler"),
            lambda: registry.erase("p0", 1),
            lambda: registry.note("p0", "a"),
        ):
            assert not call()
        assert not registry.notes()
        assert registry.view().members == ()
        registry.close()

    def test_one_odd_entry_hides_no_other(self) -> None:
        """Whoever may write to etcd, and whatever: half text, half numbers."""

        def entry(number: int, value: bytes) -> dict[str, str]:
            key = f"/sgl-tiered/default/members/{number}".encode()
            return {
                "key": base64.b64encode(key).decode(),
                "value": base64.b64encode(value).decode(),
                "mod_revision": "1",
            }

        def member(number: int, control: str) -> dict[str, object]:
            return {
                "name": f"p{number}",
                "instance": number,
                "incarnation": 1,
                "kind": "prefill",
                "endpoints": {"control": control},
            }

        right = json.dumps(member(0, "tcp://10.0.0.1:5")).encode()
        odd = [
            b"\xff\xfe no text",
            json.dumps(member(2, "tcp://\ud800:5")).encode(),
            json.dumps(member(3, "tcp://h:" + "9" * 5000)).encode(),
            b'{"instance": ' + b"9" * 5000 + b"}",
        ]
        kvs = [entry(n, value) for n, value in enumerate([right, *odd])]
        revisions = ["5", "9" * 30, "9" * 5000]

        def say(request: httpx.Request) -> httpx.Response:
            told = {"kvs": kvs, "header": {"revision": revisions[0]}}
            return httpx.Response(200, json=told, request=request)

        client = httpx.Client(transport=httpx.MockTransport(say))
        registry = EtcdRegistry("http://127.0.0.1:1", client=client)
        found = registry.look()
        assert found is not None
        assert [each.name for each in found.members] == ["p0"]
        assert registry._incidents.counts == {"entry": 4}
        for _ in range(2):
            # Other ranks are told of a view as JSON, whose numbers have an end.
            del revisions[0]
            assert registry.look() is None
        registry.close()

    def test_an_outage_is_told_now_and_then(
        self, registry: EtcdRegistry, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Not with every renewal."""
        lease = Lease("p0", 0, 1, 3.0, "5")
        for _ in range(50):
            assert not registry.renew(lease)
            registry.view()
        warnings = [r for r in caplog.records if r.levelname == "WARNING"]
        assert len(warnings) == 1
        assert registry._incidents.counts == {"registry": 100}

    def test_a_short_lease_is_refused(self) -> None:
        """etcd would silently grant a longer one."""
        with pytest.raises(ConfigError, match="2 s at least"):
            EtcdRegistry("http://127.0.0.1:1", ttl_s=1.0)
