"""Conformance kit: what every ``Transport`` must do, between two real processes.

A transport's own tests subclass it and say how the transport is opened, by a function
without arguments that the other process can import too::

    class TestMyTransport(TransportKit):
        OPEN = "my_package.my_module:open_my_transport"

Deadlines in here are either far away, so that only a defect meets them, or expected to
be met, so that a slow machine changes nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from sgl_tiered.errors import TransportUnavailableError
from sgl_tiered.testing.transport_peer import (
    BLOCK_BYTES,
    PeerProcess,
    block_sums,
    fill,
    open_transport,
)
from sgl_tiered.transport.base import Peer, Pieces, Region, TransferStatus, Transport

__all__ = ["TransportKit", "random_pieces"]

Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]

DONE, FAILED = TransferStatus.DONE, TransferStatus.FAILED
TIMED_OUT = TransferStatus.TIMED_OUT


def random_pieces(
    num_bytes: int, count: int, max_bytes: int, rng: np.random.Generator
) -> Pieces:
    """Return pieces of random lengths at random places, apart from each other.

    Args:
        num_bytes: size of either memory.
        count: how many, at most ``num_bytes // max_bytes``.
        max_bytes: longest piece.
        rng: source of chance.
    """
    cells = num_bytes // max_bytes
    lengths = rng.integers(1, max_bytes + 1, count)
    slack = max_bytes - lengths
    places = [
        rng.permutation(cells)[:count] * max_bytes + rng.integers(0, slack + 1)
        for _ in range(2)
    ]
    return Pieces(places[0], places[1], lengths)


class TransportKit:
    """Subclass it, name the class ``Test...`` and set ``OPEN``."""

    OPEN: ClassVar[str] = ""
    """``MODULE:FUNCTION`` that opens a transport."""
    ENVIRONMENT: ClassVar[Mapping[str, str]] = {}
    """Set for both processes before anything is opened."""
    NUM_BYTES = 8 << 20
    FAR_S = 60.0
    NEAR_S = 0.5

    @pytest.fixture
    def transport(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
        """Open this process's end, or skip and say what is missing."""
        for name, value in self.ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
        try:
            transport = open_transport(self.OPEN)
        except TransportUnavailableError as error:
            pytest.skip(str(error))
        yield transport
        transport.close()

    @pytest.fixture
    def memory(self, transport: Transport) -> UInt8s:
        """Return registered memory of this process, filled."""
        memory = np.zeros(self.NUM_BYTES, np.uint8)
        region = transport.register(memory)
        assert region == Region(0, memory.ctypes.data, self.NUM_BYTES)
        fill(memory, seed=1)
        return memory

    @pytest.fixture(scope="class")
    @classmethod
    def processes(cls) -> Iterator[list[PeerProcess]]:
        """Keep the other process from test to test: its start takes seconds."""
        processes: list[PeerProcess] = []
        yield processes
        for process in processes:
            process.close()

    @pytest.fixture
    def process(
        self, transport: Transport, processes: list[PeerProcess]
    ) -> PeerProcess:
        """Return the other process, its memory filled."""
        while processes and processes[0].is_spent:
            processes.pop().close()
        if not processes:
            processes.append(self.start())
        processes[0].fill(2)
        return processes[0]

    @pytest.fixture
    def peer(self, transport: Transport, memory: UInt8s, process: PeerProcess) -> Peer:
        """Connect to it."""
        return transport.connect(process.address)

    def start(self) -> PeerProcess:
        """Start one more process."""
        return PeerProcess(self.OPEN, self.NUM_BYTES, self.ENVIRONMENT)

    def filled(self, seed: int) -> UInt8s:
        """Return what a memory holds after ``fill`` with this seed."""
        memory = np.zeros(self.NUM_BYTES, np.uint8)
        fill(memory, seed)
        return memory

    @pytest.mark.parametrize(("count", "max_bytes"), [(1, 700), (40, 65536), (300, 97)])
    def test_pushed_pieces_arrive_byte_for_byte(
        self,
        transport: Transport,
        peer: Peer,
        memory: UInt8s,
        process: PeerProcess,
        count: int,
        max_bytes: int,
    ) -> None:
        """The peer has the new bytes in the pieces and its old ones beside them."""
        rng = np.random.default_rng(count)
        pieces = random_pieces(self.NUM_BYTES, count, max_bytes, rng)
        transfer = transport.push(peer, pieces, timeout_s=self.FAR_S)
        assert transfer.wait() is DONE, transfer.error
        assert transfer.arrived.all()
        wanted = self.filled(2)
        _copy(pieces, memory, wanted)
        assert process.sums() == block_sums(wanted)
        assert not transport.quarantine.num_held_bytes

    @pytest.mark.parametrize(("count", "max_bytes"), [(1, 700), (40, 65536), (300, 97)])
    def test_pulled_pieces_arrive_byte_for_byte(
        self,
        transport: Transport,
        peer: Peer,
        memory: UInt8s,
        process: PeerProcess,
        count: int,
        max_bytes: int,
    ) -> None:
        """This process has the peer's bytes in the pieces; the peer keeps its own."""
        rng = np.random.default_rng(count)
        pieces = random_pieces(self.NUM_BYTES, count, max_bytes, rng)
        transfer = transport.pull(peer, pieces, timeout_s=self.FAR_S)
        assert transfer.wait() is DONE, transfer.error
        wanted = self.filled(1)
        back = replace(pieces, local=pieces.remote, remote=pieces.local)
        _copy(back, self.filled(2), wanted)
        assert block_sums(memory) == block_sums(wanted)
        assert process.sums() == block_sums(self.filled(2))

    def test_a_batch_longer_than_any_queue(
        self, transport: Transport, peer: Peer, process: PeerProcess
    ) -> None:
        """5,000 pieces that cannot be joined arrive, in two transfers at once."""
        starts = np.arange(5000, dtype=np.int64) * 1536
        lengths = np.full(5000, 512)
        one = transport.push(peer, Pieces(starts, starts, lengths), timeout_s=60)
        shifted = Pieces(starts, starts + 512, lengths)
        two = transport.push(peer, shifted, timeout_s=self.FAR_S)
        assert two.wait() is DONE, two.error
        assert one.wait() is DONE, one.error
        wanted = self.filled(2)
        for pieces in (one.pieces, two.pieces):
            _copy(pieces, self.filled(1), wanted)
        assert process.sums() == block_sums(wanted)

    def test_touching_pieces_arrive(
        self, transport: Transport, peer: Peer, process: PeerProcess
    ) -> None:
        """The whole memory in 4,096 pieces that touch on both sides."""
        lengths = np.full(4096, self.NUM_BYTES // 4096)
        starts = np.arange(4096) * lengths
        transfer = transport.push(
            peer, Pieces(starts, starts, lengths), timeout_s=self.FAR_S
        )
        assert transfer.wait() is DONE, transfer.error
        assert process.sums() == block_sums(self.filled(1))

    def test_no_pieces_are_done_at_once(self, transport: Transport, peer: Peer) -> None:
        """An empty batch is no error."""
        nothing = np.zeros(0, np.int64)
        transfer = transport.push(peer, Pieces(nothing, nothing, nothing))
        assert transfer.poll() is DONE
        assert transfer.arrived.tolist() == []

    def test_several_regions(
        self, transport: Transport, memory: UInt8s, process: PeerProcess
    ) -> None:
        """A piece may come from any region, also one registered later."""
        other = np.full(4096, 7, np.uint8)
        region = transport.register(other)
        assert region.number == 1
        assert [found.number for found in transport.address.regions] == [0, 1]
        peer = transport.connect(process.address)
        pieces = Pieces(np.array([0]), np.array([512]), np.array([4096]), 1, 0)
        assert transport.push(peer, pieces, timeout_s=self.FAR_S).wait() is DONE
        wanted = self.filled(2)
        wanted[512 : 512 + 4096] = 7
        assert process.sums() == block_sums(wanted)

    def test_pieces_outside_are_a_defect(
        self, transport: Transport, peer: Peer, process: PeerProcess
    ) -> None:
        """Nothing moves, on either side, and the message says which piece."""
        end = self.NUM_BYTES
        for local, remote, length, words in (
            (-1, 0, 8, "local piece 1"),
            (0, -1, 8, "remote piece 1"),
            (end - 7, 0, 8, "local piece 1"),
            (0, end - 7, 8, "remote piece 1"),
            (0, 2**62, 2**62, "piece 1"),
            (0, 0, 0, "piece of 0 bytes"),
        ):
            here, there, sizes = np.array([[0, 0, 8], [local, remote, length]]).T
            for move in (transport.push, transport.pull):
                with pytest.raises(ValueError, match=words):
                    move(peer, Pieces(here, there, sizes))
        with pytest.raises(ValueError, match="no remote region 1"):
            transport.push(peer, replace(Pieces.one(0, 0, 8), remote_region=1))
        assert process.sums() == block_sums(self.filled(2))

    def test_another_kind_of_peer_is_a_defect(
        self, transport: Transport, process: PeerProcess
    ) -> None:
        """Two transports of different kinds do not meet."""
        with pytest.raises(ValueError, match="speaks"):
            transport.connect(replace(process.address, kind="other"))

    @pytest.mark.parametrize("is_push", [True, False])
    def test_a_stopped_peer_ends_in_the_deadline(
        self, transport: Transport, peer: Peer, process: PeerProcess, is_push: bool
    ) -> None:
        """It is late, what was begun is held, and held it stays while it is stopped."""
        move = transport.push if is_push else transport.pull
        whole = Pieces.one(0, 0, self.NUM_BYTES)
        # Connected, so that what happens is not merely that nobody answers.
        assert move(peer, whole, timeout_s=self.FAR_S).wait() is DONE
        process.stop()
        transfer = move(peer, whole, timeout_s=self.NEAR_S)
        assert transfer.wait() is TIMED_OUT
        assert transfer.error
        assert not transfer.arrived.any()
        assert peer.lost == ""
        for quarantine in (transport.quarantine, peer.quarantine):
            held = quarantine.held(0, np.array([0]), np.array([1]))
            assert held.all()
        again = move(peer, whole, timeout_s=self.FAR_S)
        assert again.wait() is FAILED
        assert "quarantine" in again.error
        process.go_on()

    def test_a_peer_stopped_before_the_first_contact(
        self, transport: Transport, peer: Peer, process: PeerProcess
    ) -> None:
        """The deadline holds for connecting too, and others are not delayed by it."""
        piece = Pieces.one(0, 0, 4096)
        process.stop()
        late = transport.push(peer, piece, timeout_s=self.FAR_S)
        short = transport.push(peer, piece, timeout_s=self.NEAR_S)
        with self.start() as second:
            other = transport.connect(second.address)
            apart = Pieces.one(8192, 0, 4096)
            moved = transport.push(other, apart, timeout_s=self.FAR_S)
            assert moved.wait() is DONE, moved.error
            assert short.wait() is TIMED_OUT
            assert late.poll() is TransferStatus.RUNNING
        process.go_on()
        assert late.wait() is DONE, late.error

    @pytest.mark.parametrize("is_known", [True, False])
    def test_a_killed_peer_is_lost(
        self, transport: Transport, peer: Peer, process: PeerProcess, is_known: bool
    ) -> None:
        """A transfer fails, the loss is told once, and later ones fail at once."""
        whole = Pieces.one(0, 0, self.NUM_BYTES)
        if is_known:
            first = transport.push(peer, whole, timeout_s=self.FAR_S)
            assert first.wait() is DONE
        process.kill()
        transfer = transport.push(peer, whole, timeout_s=self.FAR_S)
        assert transfer.wait() is FAILED
        assert transfer.error
        self.wait_until_lost(transport, peer)
        assert [lost.address for lost in transport.take_lost()] == [process.address]
        assert transport.take_lost() == []
        again = transport.push(peer, whole, timeout_s=self.FAR_S)
        assert again.poll() is FAILED
        assert "lost" in again.error or "quarantine" in again.error

    def test_a_peer_killed_in_a_transfer_leaves_what_it_touched_in_quarantine(
        self, transport: Transport, peer: Peer, process: PeerProcess
    ) -> None:
        """Grace holds after the library's last word, on both sides."""
        whole = Pieces.one(0, 0, self.NUM_BYTES)
        assert transport.push(peer, whole, timeout_s=self.FAR_S).wait() is DONE
        process.stop()
        transfer = transport.pull(peer, whole, timeout_s=self.FAR_S)
        assert transfer.wait(self.NEAR_S) is TransferStatus.RUNNING
        process.kill()
        assert transfer.wait() is FAILED
        for quarantine in (transport.quarantine, peer.quarantine):
            assert quarantine.num_held_bytes == self.NUM_BYTES

    def test_a_returning_peer_is_another_one(
        self, transport: Transport, peer: Peer, process: PeerProcess
    ) -> None:
        """After a loss a new process is reached by its own address."""
        piece = Pieces.one(0, 0, 4096)
        process.kill()
        assert transport.push(peer, piece, timeout_s=self.FAR_S).wait() is FAILED
        transport.disconnect(peer)
        with self.start() as second:
            other = transport.connect(second.address)
            apart = Pieces.one(8192, 0, BLOCK_BYTES)
            assert transport.push(other, apart, timeout_s=self.FAR_S).wait() is DONE
            wanted = np.zeros(self.NUM_BYTES, np.uint8)
            _copy(apart, self.filled(1), wanted)
            assert second.sums() == block_sums(wanted)

    def test_disconnecting_fails_what_runs(
        self, transport: Transport, peer: Peer, process: PeerProcess
    ) -> None:
        """With the reason, and what is asked for later fails too."""
        piece = Pieces.one(0, 0, 4096)
        process.stop()
        transfer = transport.pull(peer, piece, timeout_s=self.FAR_S)
        transport.disconnect(peer)
        assert transfer.poll() is FAILED
        assert transfer.error == "disconnected"
        assert transport.pull(peer, piece).poll() is FAILED
        process.go_on()

    def test_another_connection_to_the_same_peer_outlives_the_first(
        self, transport: Transport, peer: Peer, process: PeerProcess
    ) -> None:
        """Disconnecting one of two ends that one only."""
        other = transport.connect(process.address)
        first = Pieces.one(0, 0, 4096)
        assert transport.push(peer, first, timeout_s=self.FAR_S).wait() is DONE
        transport.disconnect(peer)
        assert transport.pull(peer, first).poll() is FAILED
        second = Pieces.one(8192, 8192, 4096)
        for piece in (first, second):
            # The second one comes when whoever disconnects has done so.
            transfer = transport.push(other, piece, timeout_s=self.FAR_S)
            assert transfer.wait() is DONE, transfer.error
            time.sleep(0.1)

    def test_closing_twice(
        self, transport: Transport, peer: Peer, process: PeerProcess
    ) -> None:
        """What runs fails, and so does what is asked for later."""
        piece = Pieces.one(0, 0, 4096)
        process.stop()
        transfer = transport.push(peer, piece, timeout_s=self.FAR_S)
        transport.close()
        transport.close()
        assert transfer.poll() is FAILED
        assert transport.push(peer, piece).poll() is FAILED
        process.go_on()

    def wait_until_lost(self, transport: Transport, peer: Peer) -> None:
        """Keep transferring until the transport says that the peer is lost."""
        for turn in range(1, 1000):
            if peer.lost:
                return
            offset = np.array([turn * 64])
            piece = Pieces(offset, offset, np.array([1]))
            transport.push(peer, piece, timeout_s=self.FAR_S).wait()
            os.sched_yield()
        pytest.fail("a killed peer was never called lost")


def _copy(pieces: Pieces, source: UInt8s, target: UInt8s) -> None:
    rows = zip(pieces.local, pieces.remote, pieces.lengths, strict=True)
    for here, there, length in rows:
        target[there : there + length] = source[here : here + length]
