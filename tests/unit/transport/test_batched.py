"""Batches, deadlines, quarantine and lost peers, over a library that obeys the test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.testing.scripted_library import ADDRESS, ScriptedLibrary
from sgl_tiered.transport.base import Pieces, TransferStatus
from sgl_tiered.transport.batched import BatchedTransport
from sgl_tiered.transport.mooncake import MooncakeLibrary

DONE, FAILED = TransferStatus.DONE, TransferStatus.FAILED
RUNNING, TIMED_OUT = TransferStatus.RUNNING, TransferStatus.TIMED_OUT
GRACE_S = 60.0
NUM_BYTES = 1 << 22


class Rig:
    """A transport without a thread, and one peer."""

    def __init__(self, library: ScriptedLibrary | None = None) -> None:
        self.scripted = library or ScriptedLibrary()
        self.clock = ManualClock()
        self.transport = BatchedTransport(
            self.scripted, clock=self.clock, grace_s=GRACE_S, threaded=False
        )
        self.memory = np.zeros(NUM_BYTES, np.uint8)
        self.region = self.transport.register(self.memory)
        self.peer = self.transport.connect(ADDRESS)

    def push(self, pieces: Pieces, timeout_s: float = 5.0):
        return self.transport.push(self.peer, pieces, timeout_s=timeout_s)

    def pump(self, turns: int = 3) -> None:
        for _ in range(turns):
            self.transport.pump()

    def held(self, offset: int) -> tuple[bool, bool]:
        """Say whether a byte is held here and there, at the same offset."""
        found = [
            bool(quarantine.held(0, np.array([offset]), np.array([1]))[0])
            for quarantine in (self.transport.quarantine, self.peer.quarantine)
        ]
        return found[0], found[1]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def apart(count: int, length: int = 10) -> Pieces:
    """Return pieces that do not touch: piece i at 100 i on both sides."""
    starts = np.arange(count, dtype=np.int64) * 100
    return Pieces(starts, starts, np.full(count, length))


def test_addresses_are_offsets_in_the_regions(rig: Rig) -> None:
    """The library gets places in either process's memory."""
    rig.push(Pieces(np.array([5]), np.array([70]), np.array([9])))
    rig.pump()
    (ticket,) = rig.scripted.tickets
    assert ticket.is_push
    assert ticket.local.tolist() == [rig.region.address + 5]
    assert ticket.remote.tolist() == [ADDRESS.regions[0].address + 70]
    assert ticket.lengths.tolist() == [9]
    pulled = rig.transport.pull(rig.peer, apart(1))
    rig.scripted.settle(DONE)
    rig.pump()
    rig.scripted.settle(DONE)
    rig.pump()
    assert pulled.poll() is DONE
    assert not rig.scripted.tickets[1].is_push


def test_never_more_than_the_queue_takes(rig: Rig) -> None:
    """Ten pieces of two transfers pass a queue of four, in order."""
    one, two = rig.push(apart(7)), rig.push(apart(3))
    rig.pump()
    assert len(rig.scripted.tickets) == 4
    for _ in range(10):
        rig.scripted.settle(DONE, 1)
        rig.pump()
    assert one.poll() is DONE
    assert two.poll() is DONE
    order = [int(t.local[0]) - rig.region.address for t in rig.scripted.tickets]
    assert order == [0, 100, 200, 300, 400, 500, 600, 0, 100, 200]


def test_a_piece_that_hangs_does_not_hide_others() -> None:
    """However many are under way, each is asked for now and then."""
    rig = Rig(ScriptedLibrary(max_in_flight=40))
    late = rig.push(apart(30), timeout_s=1)
    rig.pump()
    rig.clock.advance(2)
    assert late.poll() is TIMED_OUT
    other = rig.push(Pieces.one(5000, 5000, 1))
    rig.pump()
    rig.scripted.tickets[-1].status = DONE
    rig.pump(40)
    assert other.poll() is DONE


def test_touching_pieces_travel_together(rig: Rig) -> None:
    """Only where both sides touch, up to 1 MiB; what arrives is told by piece."""
    size = 400_000
    local = np.array([0, 1, 2, 3, 5], np.int64) * size
    remote = np.array([0, 1, 2, 4, 6], np.int64) * size
    transfer = rig.push(Pieces(local, remote, np.full(5, size)))
    rig.pump()
    found = [int(t.lengths[0]) for t in rig.scripted.tickets]
    assert found == [3 * size, size, size]
    rig.scripted.settle(DONE, 1)
    rig.pump()
    assert transfer.arrived.tolist() == [True, True, True, False, False]
    many = Rig()
    lengths = np.full(16, 1 << 18)
    starts = np.arange(16) * lengths
    many.push(Pieces(starts, starts, lengths))
    many.pump()
    assert [int(t.lengths[0]) for t in many.scripted.tickets] == [1 << 20] * 4


def test_a_late_transfer_is_held_until_the_library_is_done_and_grace_is_over(
    rig: Rig,
) -> None:
    """What was begun and has not arrived is held; the rest is not."""
    transfer = rig.push(apart(6), timeout_s=5)
    rig.pump()
    rig.scripted.settle(DONE, 1)
    rig.pump()
    rig.clock.advance(4.9)
    assert transfer.poll() is RUNNING
    rig.clock.advance(0.2)
    assert transfer.poll() is TIMED_OUT
    assert "1 of 6" in transfer.error
    # Arrived; then four under way; then one that was never begun.
    expected = [False, True, True, True, True, False]
    assert [rig.held(100 * i)[0] for i in range(6)] == expected
    assert [rig.held(100 * i)[1] for i in range(6)] == expected
    rig.clock.advance(1000)
    rig.scripted.settle(DONE, 3)
    rig.pump()
    assert rig.held(100) == (True, True), "one piece is still with the library"
    rig.scripted.settle(DONE)
    rig.pump()
    rig.clock.advance(GRACE_S - 0.1)
    assert rig.held(100) == (True, True)
    rig.clock.advance(0.2)
    assert rig.held(100) == (False, False)
    assert transfer.poll() is TIMED_OUT, "a status is final"


def test_a_failed_piece_fails_the_transfer_and_holds_its_neighbours(rig: Rig) -> None:
    """Nothing more is submitted, and the loss of the peer is asked for."""
    transfer = rig.push(apart(6))
    rig.pump()
    rig.scripted.settle(FAILED, 1)
    rig.pump()
    assert transfer.poll() is FAILED
    assert len(rig.scripted.tickets) == 4
    assert rig.held(0) == (True, True)
    assert rig.held(300) == (True, True)
    assert rig.held(400) == (False, False)
    assert rig.peer.lost == ""


def test_what_is_held_cannot_be_used(rig: Rig) -> None:
    """On either side; other memory can."""
    rig.push(apart(1), timeout_s=1)
    rig.pump()
    rig.clock.advance(2)
    rig.pump()
    for local, remote in ((0, 500), (500, 0)):
        rows = (np.array([local]), np.array([remote]), np.array([1]))
        refused = rig.push(Pieces(*rows))
        assert refused.poll() is FAILED
        assert "quarantine" in refused.error
    fine = rig.push(Pieces(np.array([500]), np.array([500]), np.array([1])))
    assert fine.poll() is RUNNING


def test_a_refused_submission_holds_no_longer_than_grace(rig: Rig) -> None:
    """The library never had it, so its fence has passed at once."""
    rig.scripted.refuses = True
    transfer = rig.push(apart(2))
    rig.pump()
    assert transfer.poll() is FAILED
    assert rig.held(0) == (True, True)
    rig.clock.advance(GRACE_S)
    assert rig.held(0) == (False, False)


@pytest.mark.parametrize("when", ["submit", "check"])
def test_a_library_that_raises_keeps_the_memory_for_ever(rig: Rig, when: str) -> None:
    """Nobody knows what it still does; the pump lives on."""
    if when == "check":
        transfer = rig.push(apart(1))
        rig.transport.pump()
        rig.transport.pump()
        assert len(rig.scripted.tickets) == 1
    rig.scripted.raises = True
    if when == "submit":
        transfer = rig.push(apart(1))
    rig.pump()
    assert transfer.poll() is FAILED
    rig.scripted.raises = False
    rig.clock.advance(1e6)
    rig.pump()
    assert rig.held(0) == (True, True)
    other = rig.push(Pieces(np.array([500]), np.array([500]), np.array([1])))
    rig.pump()
    rig.scripted.settle(DONE)
    rig.pump()
    assert other.poll() is DONE


def test_a_peer_that_cannot_be_reached_is_lost() -> None:
    """Nothing is submitted, nothing is held, and the loss is told once."""
    rig = Rig(ScriptedLibrary(why_unreachable="refused"))
    transfer = rig.push(apart(2))
    rig.pump()
    assert transfer.poll() is FAILED
    assert rig.scripted.tickets == []
    assert rig.held(0) == (False, False)
    (lost,) = rig.transport.take_lost()
    assert (lost.address, lost.reason) == (ADDRESS, "refused")
    assert rig.transport.take_lost() == []
    assert "lost: refused" in rig.push(apart(1)).error


def test_a_peer_that_goes_takes_its_transfers_with_it(rig: Rig) -> None:
    """One failed piece is enough to ask; all its transfers fail."""
    one, two = rig.push(apart(1)), rig.push(apart(9))
    rig.pump()
    rig.scripted.why_gone = "killed"
    rig.scripted.settle(FAILED, 1)
    rig.pump()
    assert one.poll() is FAILED
    assert two.poll() is FAILED
    assert "killed" in two.error
    assert rig.peer.lost == "killed"
    assert [lost.reason for lost in rig.transport.take_lost()] == ["killed"]


def test_a_forgotten_peer_leaves_when_the_library_is_done(rig: Rig) -> None:
    """Its quarantine goes on, and the link is closed after the last piece."""
    transfer = rig.push(apart(1))
    rig.pump()
    rig.transport.disconnect(rig.peer)
    rig.pump()
    assert transfer.poll() is FAILED
    assert rig.scripted.disconnected == []
    assert rig.held(0) == (True, True)
    rig.scripted.settle(DONE)
    rig.pump()
    assert rig.scripted.disconnected == ["peer"]
    assert rig.held(0) == (True, True)


def test_waiting_returns_when_asked_to(rig: Rig) -> None:
    """A wait of no time returns RUNNING, and one past the deadline TIMED_OUT."""
    transfer = rig.push(apart(1), timeout_s=5)
    assert transfer.wait(0.0) is RUNNING
    rig.clock.advance(6)
    assert transfer.wait() is TIMED_OUT
    assert rig.held(0) == (False, False), "it was never begun"


def test_memory_must_be_plain(rig: Rig) -> None:
    """Bytes in one row of memory, and at least one."""
    for memory in (
        np.zeros(4, np.int64),
        np.zeros((4, 4), np.uint8)[:, :2],
        np.zeros(0, np.uint8),
    ):
        with pytest.raises(ValueError, match="memory must be"):
            rig.transport.register(memory)


def test_the_address_grows_with_the_regions(rig: Rig) -> None:
    """Others see what is registered now."""
    rig.transport.register(np.zeros(10, np.uint8))
    address = rig.transport.address
    assert (address.kind, address.endpoint) == ("scripted", "me")
    assert address.metadata == b"metadata"
    assert [region.num_bytes for region in address.regions] == [NUM_BYTES, 10]


def test_closing_closes_the_library_once(rig: Rig) -> None:
    """And fails what runs."""
    transfer = rig.push(apart(1))
    rig.transport.close()
    rig.transport.close()
    assert transfer.poll() is FAILED
    assert rig.scripted.num_closed == 1


@pytest.mark.parametrize("rows", [([0], [0, 1], [1]), ([0], [0], [1, 2]), ([[0]],) * 3])
def test_pieces_have_one_shape(rows: tuple[list[int], ...]) -> None:
    """Three columns of one length."""
    with pytest.raises(ValueError, match="shape"):
        Pieces(*(np.array(row) for row in rows))


def test_pieces_can_be_cut() -> None:
    """A cut keeps regions, and counts its own bytes."""
    pieces = Pieces(np.arange(5), np.arange(5), np.arange(1, 6), 2, 3)
    part = pieces.cut(1, 3)
    assert (len(part), part.num_bytes) == (2, 5)
    assert (part.local_region, part.remote_region) == (2, 3)


def test_a_library_s_own_error_is_a_malformed_address(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever class it has: who connects knows one."""

    def refuses(address: object) -> str:
        raise RuntimeError("a library's own words")

    monkeypatch.setattr(rig.scripted, "connect", refuses)
    with pytest.raises(ValueError, match="takes no such address"):
        rig.transport.connect(ADDRESS)


@pytest.mark.parametrize(
    "endpoint", ["", "h", ":5", "h:", "h:x", f"h:{'9' * 200}", "h:\u00b2", "a\nb:5"]
)
def test_mooncake_is_asked_for_hosts_and_ports_only(endpoint: str) -> None:
    """It reads an endpoint in its own way."""
    library = object.__new__(MooncakeLibrary)
    assert library.connect(replace(ADDRESS, endpoint="10.0.0.1:5")) == "10.0.0.1:5"
    with pytest.raises(ValueError, match="is not host:port"):
        library.connect(replace(ADDRESS, endpoint=endpoint))
