"""The engine under SGLang's transfer classes: raw addresses over our transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.errors import ConfigError
from sgl_tiered.serving.disagg.engine import FIRST_BYTES_PER_S, RawEngine, as_memory
from sgl_tiered.serving.disagg.opening import open_kv_transport
from sgl_tiered.testing.scripted_library import ADDRESS, ScriptedLibrary
from sgl_tiered.transport.base import Peer, PeerAddress, TransferStatus
from sgl_tiered.transport.batched import BatchedTransport
from sgl_tiered.transport.loopback import open_loopback

PATIENCE_S = 60.0
NUM_BYTES = 4096


class Side:
    """An engine over kernel copies, with the buffers that it registered."""

    def __init__(self, fill: int) -> None:
        self.engine = RawEngine(open_loopback(), SystemClock())
        # Not in the order of their addresses, like SGLang's K, V and other buffers.
        self.buffers = [np.full(NUM_BYTES, fill, np.uint8) for _ in range(3)]
        self.buffers.sort(key=lambda buffer: -buffer.ctypes.data)
        self.bases = [buffer.ctypes.data for buffer in self.buffers]
        self.engine.batch_register(self.bases, [NUM_BYTES] * 3)

    def knows(self, other: Side) -> str:
        session = other.engine.get_session_id()
        return self.engine.connect(session, other.engine.address_bytes())


@pytest.fixture
def sides() -> tuple[Side, Side]:
    here, there = Side(7), Side(0)
    assert here.knows(there) == ""
    return here, there


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_a_batch_over_several_buffers_arrives(sides: tuple[Side, Side]) -> None:
    """Each range lands where its address says, and nothing else is touched."""
    here, there = sides
    for number, buffer in enumerate(here.buffers):
        buffer[:] = np.arange(NUM_BYTES) % (200 + number)
    sources = [here.bases[0] + 5, here.bases[2], here.bases[0] + 100]
    targets = [there.bases[1] + 9, there.bases[2] + 64, there.bases[0]]
    lengths = [11, 4032, 1]
    session = there.engine.get_session_id()
    assert here.engine.batch_transfer_sync(session, sources, targets, lengths) == 0
    expected = [np.zeros(NUM_BYTES, np.uint8) for _ in range(3)]
    expected[1][9:20] = here.buffers[0][5:16]
    expected[2][64:] = here.buffers[2][:4032]
    expected[0][0] = here.buffers[0][100]
    for found, wanted in zip(there.buffers, expected, strict=True):
        assert (found == wanted).all()
    assert here.engine.num_bytes_pushed == sum(lengths)
    assert here.engine.is_settled(session)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_range_outside_is_refused(sides: tuple[Side, Side], side: str) -> None:
    """A batch with one byte outside what was registered writes nothing."""
    here, there = sides
    sources, targets = [here.bases[0]] * 2, [there.bases[0]] * 2
    # Behind the buffer that lies last, so that no other one begins there.
    (sources if side == "source" else targets)[1] = (
        max(here.bases if side == "source" else there.bases) + NUM_BYTES - 4
    )
    session = there.engine.get_session_id()
    assert here.engine.batch_transfer_sync(session, sources, targets, [5, 5]) == -1
    assert all((buffer == 0).all() for buffer in there.buffers)
    assert here.engine.num_failed == 1


def test_an_unknown_session_is_refused(sides: tuple[Side, Side]) -> None:
    """Nothing is sent to who did not register."""
    here, there = sides
    code = here.engine.batch_transfer_sync("x:1", here.bases[:1], there.bases[:1], [1])
    assert code == -1
    assert here.engine.send_probe("x:1") == -1


def test_memory_is_registered_once(sides: tuple[Side, Side]) -> None:
    """SGLang registers the same buffers again when it resumes."""
    here, _ = sides
    here.engine.batch_register(here.bases, [NUM_BYTES] * 3)
    told = msgspec.msgpack.decode(here.engine.address_bytes())
    assert len(told["regions"]) == 3


def test_what_is_no_address_is_said(sides: tuple[Side, Side]) -> None:
    """A malformed registration and another transport are clauses, no exceptions."""
    here, _ = sides
    assert here.engine.connect("a:1", b"\xc1 no message") != ""
    assert here.engine.connect("a:1", msgspec.msgpack.encode({"kind": 3})) != ""
    why = here.engine.connect("a:1", msgspec.msgpack.encode(ADDRESS))
    assert "scripted" in why
    assert "loopback" in why


def test_an_address_out_of_range_is_said(sides: tuple[Side, Side]) -> None:
    """Whatever a decode instance registers or names: a clause, and nothing is sent."""
    here, there = sides
    right = msgspec.msgpack.decode(there.engine.address_bytes())
    regions = right["regions"]
    for wrong in (
        right | {"regions": regions[1:]},
        right | {"regions": [regions[0] | {"num_bytes": -1}]},
        right | {"regions": [regions[0] | {"address": (1 << 63) - 1}]},
        right | {"endpoint": "x" * 300},
        right | {"endpoint": "1:2:3"},
        right | {"metadata": bytes(40)[:-1]},
        [],
    ):
        told = msgspec.msgpack.encode(wrong)
        assert here.engine.connect("odd:1", told)
    assert here.engine.connect("odd:1", b"\x91" * 100000)
    session = there.engine.get_session_id()
    for source, target, length in (
        (here.bases[0], (1 << 64) - 1, 8),
        (here.bases[0], (1 << 63) - 8, 8),
        (here.bases[0], there.bases[0], (1 << 63) - 1),
        (here.bases[0], there.bases[0], 0),
        (here.bases[0], there.bases[0], -8),
    ):
        assert (
            here.engine.batch_transfer_sync(session, [source], [target], [length]) == -1
        )
    assert not any(buffer.any() for buffer in there.buffers)


def test_a_session_ends_in_a_number(sides: tuple[Side, Side]) -> None:
    """SGLang shares its work by what follows the last colon."""
    names = {side.engine.get_session_id() for side in sides}
    assert len(names) == 2
    assert all(int(name.rsplit(":", 1)[1]) >= 0 for name in names)


class Ticking:
    """A clock that moves with every look at it."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now_s = step_s, 0.0

    def now(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def test_what_a_link_carries_is_learned_from_its_pushes(
    sides: tuple[Side, Side],
) -> None:
    """A failed one teaches nothing, and who is not known has the first guess."""
    _, there = sides
    here = Side(1)
    here.engine = RawEngine(open_loopback(), clock := Ticking(1e-6))
    here.engine.batch_register(here.bases, [NUM_BYTES] * 3)
    assert here.knows(there) == ""
    session = there.engine.get_session_id()
    first = here.engine.link_bytes_per_s([session])
    for sessions in ([], ["x:1"], [session]):
        carried = here.engine.link_bytes_per_s(sessions)
        assert carried == pytest.approx(FIRST_BYTES_PER_S)
    push = (session, here.bases[:1], there.bases[:1])
    assert here.engine.batch_transfer_sync(*push, [NUM_BYTES + 1]) == -1
    assert here.engine.link_bytes_per_s([session]) == first
    for size in (256, 1024, 4096) * 20:
        # A microsecond a byte.
        clock.step_s = size * 1e-6
        assert here.engine.batch_transfer_sync(*push, [size]) == 0
    assert here.engine.link_bytes_per_s([session]) < FIRST_BYTES_PER_S / 20


def test_what_failed_is_not_settled_before_the_library_is_done() -> None:
    """Until then nothing more is pushed there, and the peer is not tried again."""
    library = ScriptedLibrary()
    transport = BatchedTransport(library, grace_s=0.0)
    engine = RawEngine(transport, SystemClock(), timeout_s=PATIENCE_S)
    memory = np.zeros(NUM_BYTES, np.uint8)
    engine.batch_register([memory.ctypes.data], [NUM_BYTES])
    assert engine.connect("peer:1", msgspec.msgpack.encode(ADDRESS)) == ""
    here, there = memory.ctypes.data, ADDRESS.regions[0].address
    # Apart from each other, so that they are two pieces.
    batch = ([here, here + 500], [there, there + 500], [100, 100])
    with ThreadPoolExecutor(1) as other:
        code = other.submit(engine.batch_transfer_sync, "peer:1", *batch)
        until(lambda: len(library.tickets) == 2)
        library.settle(TransferStatus.FAILED, 1)
        assert code.result(PATIENCE_S) == -1
    assert not engine.is_settled("peer:1")
    assert engine.send_probe("peer:1") == -1
    assert engine.batch_transfer_sync("peer:1", *batch) == -1
    assert len(library.tickets) == 2, "a held range was pushed to"
    library.settle(TransferStatus.DONE)
    until(lambda: engine.is_settled("peer:1"))
    assert engine.send_probe("peer:1") == 0
    transport.close()


def test_a_lost_peer_is_connected_anew_when_it_is_probed() -> None:
    """A peer that seemed gone may be there: the next push finds out."""
    library = ScriptedLibrary(why_unreachable="nobody there")
    transport = BatchedTransport(library, grace_s=0.0)
    engine = RawEngine(transport, SystemClock(), timeout_s=5.0)
    memory = np.zeros(NUM_BYTES, np.uint8)
    engine.batch_register([memory.ctypes.data], [NUM_BYTES])
    engine.connect("peer:1", msgspec.msgpack.encode(ADDRESS))
    there = ADDRESS.regions[0].address
    batch = ([memory.ctypes.data], [there], [100])
    assert engine.batch_transfer_sync("peer:1", *batch) == -1
    assert engine.batch_transfer_sync("peer:1", *batch) == -1
    library.why_unreachable = ""
    assert engine.send_probe("peer:1") == 0
    pushed = transport.push
    seen = []

    def push(peer, pieces, **kwargs):
        seen.append(peer.lost)
        return pushed(peer, pieces, **kwargs)

    transport.push = push  # type: ignore[method-assign]
    library.raises = True  # It ends at once, by the library's exception.
    assert engine.batch_transfer_sync("peer:1", *batch) == -1
    assert seen == [""]
    transport.close()


def test_a_probe_that_takes_long_holds_up_no_other_session(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that does not answer is connected to while others are pushed to."""
    here, there = sides
    gone = Side(3)
    assert here.knows(gone) == ""
    lost, session = gone.engine.get_session_id(), there.engine.get_session_id()
    here.engine._sessions[lost].peer.why_lost = "it is gone"  # type: ignore[attr-defined]
    begun, goes_on = threading.Event(), threading.Event()
    connect = here.engine._transport.connect

    def slow(address: PeerAddress) -> Peer:
        begun.set()
        assert goes_on.wait(PATIENCE_S)
        return connect(address)

    monkeypatch.setattr(here.engine._transport, "connect", slow)
    with ThreadPoolExecutor(3) as other:
        probes = [other.submit(here.engine.send_probe, lost) for _ in range(2)]
        assert begun.wait(PATIENCE_S)
        ranges = [here.bases[0]], [there.bases[0]], [8]
        push = other.submit(here.engine.batch_transfer_sync, session, *ranges)
        try:
            assert push.result(5.0) == 0
        finally:
            goes_on.set()
        assert [probe.result(PATIENCE_S) for probe in probes] == [0, 0]
    assert not here.engine._sessions[lost].peer.lost
    ranges = [here.bases[0]], [gone.bases[0]], [8]
    assert here.engine.batch_transfer_sync(lost, *ranges) == 0


def test_a_batch_may_take_as_long_as_those_beside_it_need() -> None:
    """They share the link: its bytes and theirs, at the slowest, and what is due."""
    library = ScriptedLibrary()
    transport = BatchedTransport(library, grace_s=0.0)
    engine = RawEngine(transport, SystemClock(), timeout_s=PATIENCE_S)
    memory = np.zeros(NUM_BYTES, np.uint8)
    engine.batch_register([memory.ctypes.data], [NUM_BYTES])
    assert engine.connect("peer:1", msgspec.msgpack.encode(ADDRESS)) == ""
    here, there = memory.ctypes.data, ADDRESS.regions[0].address
    pushed, bounds_s = transport.push, []

    def push(peer, pieces, *, timeout_s):
        bounds_s.append(timeout_s)
        return pushed(peer, pieces, timeout_s=timeout_s)

    transport.push = push  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as other:
        codes = []
        for n, size in enumerate((1000, 500)):
            batch = [here + 1000 * n], [there + 1000 * n], [size]
            codes.append(other.submit(engine.batch_transfer_sync, "peer:1", *batch))
            until(lambda: len(library.tickets) == n + 1)  # noqa: B023
        library.settle(TransferStatus.DONE)
        assert [code.result(PATIENCE_S) for code in codes] == [0, 0]
        last = other.submit(engine.batch_transfer_sync, "peer:1", *batch)
        until(lambda: len(library.tickets) == 3)
        library.settle(TransferStatus.DONE)
        assert last.result(PATIENCE_S) == 0
    took_s = [bound_s - PATIENCE_S for bound_s in bounds_s]
    assert took_s == pytest.approx([1000 / 50e6, 1500 / 50e6, 500 / 50e6])
    transport.close()


def test_who_registers_again_is_not_connected_again(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name and address are known: a library may know a peer by no other name."""
    here, there = sides
    asked: list[PeerAddress] = []
    transport = here.engine._transport
    monkeypatch.setattr(transport, "connect", asked.append)
    monkeypatch.setattr(transport, "disconnect", asked.append)
    assert here.knows(there) == ""
    assert asked == []
    ranges = [here.bases[0]], [there.bases[0]], [8]
    session = there.engine.get_session_id()
    assert here.engine.batch_transfer_sync(session, *ranges) == 0


def test_memory_at_an_address_is_not_copied() -> None:
    """The array is the caller's bytes."""
    memory = np.zeros(10, np.uint8)
    as_memory(memory.ctypes.data, 10)[3] = 9
    assert memory.tolist() == [0, 0, 0, 9, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("asked", ["nixl", "loopback"])
@pytest.mark.parametrize(("devices", "on_device"), [("mlx5_0", False), (None, True)])
def test_a_device_and_cards_take_mooncake_only(asked, devices, on_device) -> None:
    """The others were made for main memory, and choose their links themselves."""
    with pytest.raises(ConfigError, match="--tiered-pd-transport"):
        open_kv_transport(asked, "127.0.0.1", devices, on_device=on_device)


def test_the_transport_that_was_asked_for() -> None:
    """On one machine the kernel's copies will do."""
    transport = open_kv_transport("loopback", "127.0.0.1", None, on_device=False)
    assert transport.address.kind == "loopback"
    transport.close()


def test_sessions_that_are_over_are_forgotten(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode instance that starts again and again leaves a bounded number behind."""
    here, there = sides
    monkeypatch.setattr("sgl_tiered.serving.disagg.engine._MOST_SESSIONS", 4)
    disconnected = []
    monkeypatch.setattr(here.engine._transport, "disconnect", disconnected.append)
    told, used = there.engine.address_bytes(), there.engine.get_session_id()
    for number in range(10):
        assert here.engine.connect(f"start:{number}", told) == ""
        # The one that still serves.
        ranges = [here.bases[0]], [there.bases[0]], [8]
        assert here.engine.batch_transfer_sync(used, *ranges) == 0
    assert list(here.engine._sessions) == ["start:7", "start:8", "start:9", used]
    assert len(disconnected) == 7


def test_sessions_that_only_register_push_out_none_that_serves(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reaches a port may register, as often as it likes."""
    here, there = sides
    monkeypatch.setattr("sgl_tiered.serving.disagg.engine._MOST_SESSIONS", 4)
    told, used = there.engine.address_bytes(), there.engine.get_session_id()
    ranges = [here.bases[0]], [there.bases[0]], [8]
    assert here.engine.batch_transfer_sync(used, *ranges) == 0
    for number in range(10):
        assert here.engine.connect(f"stranger:{number}", told) == ""
    assert here.engine.batch_transfer_sync(used, *ranges) == 0
    assert len(here.engine._sessions) == 4
