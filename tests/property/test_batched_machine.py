"""Transfers in any order of events: no memory is given back that is still in use."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.testing.scripted_library import ADDRESS, ScriptedLibrary, Ticket
from sgl_tiered.transport.base import Pieces, TransferStatus
from sgl_tiered.transport.batched import BatchedTransport

NUM_SLOTS = 24
SLOT_BYTES = 10
GRACE_S = 7.0
RUNNING = TransferStatus.RUNNING


class BatchedMachine(RuleBasedStateMachine):
    """A caller, a library, a peer that may vanish, and the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = ScriptedLibrary(max_in_flight=6, pieces_per_ticket=2)
        self.clock = ManualClock()
        self.transport = BatchedTransport(
            self.scripted, clock=self.clock, grace_s=GRACE_S, threaded=False
        )
        self.memory = np.zeros(NUM_SLOTS * 2 * SLOT_BYTES, np.uint8)
        self.region = self.transport.register(self.memory)
        self.peer = self.transport.connect(ADDRESS)
        self.transfers: list = []
        self.ended: dict[int, TransferStatus] = {}
        self.settled_at_s: dict[int, float] = {}

    @rule(
        slots=st.lists(st.integers(0, NUM_SLOTS - 1), max_size=9, unique=True),
        is_push=st.booleans(),
        timeout_s=st.sampled_from([1.0, 5.0, 50.0]),
    )
    def begin(self, slots: list[int], is_push: bool, timeout_s: float) -> None:
        """Slots are every other cell, so that no two pieces touch."""
        starts = np.array(slots, np.int64) * 2 * SLOT_BYTES
        pieces = Pieces(starts, starts, np.full(len(slots), SLOT_BYTES))
        move = self.transport.push if is_push else self.transport.pull
        transfer = move(self.peer, pieces, timeout_s=timeout_s)
        self.transfers.append((transfer, self.clock.now() + timeout_s))

    @rule(data=st.data(), status=st.sampled_from(list(TransferStatus)[1:3]))
    def settle(self, data: st.DataObject, status: TransferStatus) -> None:
        """The library ends one of its tickets, in any order."""
        running = self.scripted.running()
        if running:
            ticket = data.draw(st.sampled_from(running))
            ticket.status = status

    @rule()
    def pump(self) -> None:
        self.transport.pump()
        for ticket in self.scripted.tickets:
            if ticket.is_seen:
                self.settled_at_s.setdefault(id(ticket), self.clock.now())

    @rule(delta_s=st.sampled_from([0.5, 1.0, 6.9, 7.0, 30.0]))
    def wait(self, delta_s: float) -> None:
        self.clock.advance(delta_s)

    @rule()
    def lose(self) -> None:
        """From the next failure on the peer is gone; a new connection follows."""
        self.scripted.why_gone = "gone"

    @rule()
    def connect_again(self) -> None:
        if self.peer.lost:
            self.scripted.why_gone = ""
            self.peer = self.transport.connect(ADDRESS)

    @invariant()
    def deadlines_hold(self) -> None:
        now_s = self.clock.now()
        for transfer, deadline_s in self.transfers:
            assert transfer.poll() is not RUNNING or now_s < deadline_s

    @invariant()
    def an_end_is_final(self) -> None:
        for number, (transfer, _) in enumerate(self.transfers):
            status = transfer.poll()
            if status is not RUNNING:
                assert self.ended.setdefault(number, status) is status
            if status is TransferStatus.DONE:
                assert transfer.arrived.all()

    @invariant()
    def what_the_library_has_is_not_free(self) -> None:
        """A byte under way belongs to a running transfer, or it is held here."""
        in_use = set()
        for transfer, _ in self.transfers:
            if transfer.poll() is RUNNING:
                in_use |= set((transfer.pieces.local // (2 * SLOT_BYTES)).tolist())
        now_s = self.clock.now()
        for ticket in self.scripted.tickets:
            under_way = not ticket.is_seen
            settled_at_s = self.settled_at_s.get(id(ticket), now_s)
            in_grace = (
                ticket.status is TransferStatus.FAILED
                and now_s < settled_at_s + GRACE_S
            )
            if under_way or in_grace:
                offsets = self.offsets(ticket)
                held = self.transport.quarantine.held(
                    0, offsets, np.full(len(offsets), SLOT_BYTES)
                )
                slots = (offsets // (2 * SLOT_BYTES)).tolist()
                for slot, is_held in zip(slots, held, strict=True):
                    assert is_held or slot in in_use

    @invariant()
    def all_is_free_in_the_end(self) -> None:
        """Nothing is held on for longer than the library's last word and the grace."""
        if self.scripted.unseen() or any(
            t.poll() is RUNNING for t, _ in self.transfers
        ):
            return
        last_s = max(self.settled_at_s.values(), default=0.0)
        if self.clock.now() >= last_s + GRACE_S:
            assert self.transport.quarantine.num_held_bytes == 0

    def offsets(self, ticket: Ticket) -> np.ndarray:
        return ticket.local - self.region.address


TestBatched = BatchedMachine.TestCase
