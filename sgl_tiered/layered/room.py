"""Makes room on the device: what nobody needs goes first, and nothing is lost.

In this order: copies that no request wants kept and that are valid on host are dropped,
those of cached pages first, least recently used, then of the most recent requests; then
copies under way to the host are waited for; then full pages that nobody wants kept are
pushed there, in the same order. What a running request wants kept is never touched:
taking that back is a decision (``LayerManager.release``).

While copies to the host fail, one of them is tried from time to time, and the others
wait for that (``outage.py``), unless a forward lacks the room.

Activations go to the host whatever is kept. Those on the device that the host has as
well are dropped in the same order when the room of the act area is needed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.layered.base import LayerRoom
from sgl_tiered.layered.binding import Flight, LayerBinding
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.layered.requests import RequestBook

__all__ = ["RoomMaker"]

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Due:
    """Layer-pages that are to go to the host, and whose copy failed or was put off.

    Attributes:
        layer: of all of them.
        pages: int64 [n], logical.
        epochs: uint32 [n], of the pages then.
    """

    layer: int
    pages: Int64s
    epochs: npt.NDArray[np.uint32]


class RoomMaker:
    """Drops, pushes and waits, and takes note of copies that landed.

    Attributes:
        in_forward: bool [num_pages], pages that the forward under way reads or writes.
        layer: that it is in: earlier ones have been read. The number of layers while
            there is none.
    """

    def __init__(
        self, binding: LayerBinding, book: RequestBook, mover: LayerMover
    ) -> None:
        self._binding = binding
        self._book = book
        self._mover = mover
        self._due: deque[_Due] = deque()
        self.in_forward = np.zeros(binding.num_pages, np.bool_)
        self.layer = binding.num_layers

    def facts(self) -> LayerRoom:
        """Return what there is; O(layer-pages)."""
        binding = self._binding
        unkept = (binding.device >= 0) & (self._book.keep == 0) & binding.filled
        landing = unkept & ~binding.on_host & binding.copying & (binding.pinned == 0)
        # What cannot be pushed is promised to nobody.
        cached = self._pushable() & (not self._mover.to_host.lasts)
        return LayerRoom(
            free=binding.num_free,
            spare=int(np.count_nonzero(self._spare())),
            landing=int(np.count_nonzero(landing)),
            cached=int(np.count_nonzero(cached)),
            total=binding.num_physical,
        )

    def make(self, num_free: int) -> bool:
        """Make so many physical layer-pages free; False where that cannot be."""
        binding = self._binding
        self.collect()
        has_pushed = False
        while binding.num_free < num_free:
            self.drop(num_free - binding.num_free)
            missing = num_free - binding.num_free
            if missing <= 0:
                break
            if not self._mover.num_flights:
                # One try: what fails now would fail again at once.
                if has_pushed or not self.push(missing, needed=True):
                    return False
                has_pushed = True
            self._mover.wait()
            self.collect()
        return True

    def drop(self, count: int) -> None:
        """Release up to about so many copies that nobody wants kept."""
        layers, pages = self._coldest(self._spare(), count)
        if len(pages):
            self._binding.drop(layers, pages)

    def make_acts(self, num_free: int) -> bool:
        """Make so many places of the act area free; False where that cannot be."""
        kinds = self._binding.kinds
        assert kinds is not None, "no act area"
        self.collect()
        while kinds.places.num_free < num_free:
            self.drop_acts(num_free - kinds.places.num_free)
            if kinds.places.num_free >= num_free:
                break
            if not self._mover.num_flights:
                return False
            self._mover.wait()
            self.collect()
        return True

    def drop_acts(self, count: int) -> None:
        """Release up to about so many activations that the host has as well."""
        layers, pages = self._coldest(self._spare_acts(), count)
        if len(pages):
            self._binding.drop_acts(layers, pages)

    def num_acts(self) -> int:
        """Return the places for activations that ``make_acts`` could make free."""
        binding = self._binding
        assert binding.kinds is not None, "no act area"
        found = self._spare_acts()
        if not self._mover.to_host.lasts:
            landing = (binding.act >= 0) & binding.copying & ~binding.on_host
            found |= landing & (binding.pinned == 0)
        return binding.kinds.places.num_free + int(np.count_nonzero(found))

    def push(self, count: int, *, needed: bool = False) -> int:
        """Start copies to the host of what nobody wants kept; return how many.

        Args:
            count: layer-pages to begin with.
            needed: somebody waits for the room.
        """
        if self._mover.to_host.holds_back and not needed:
            return 0
        return self._send(*self._coldest(self._pushable(), count))

    def offload(self, layers: Bools, pages: Int64s, *, needed: bool = False) -> int:
        """Start copies to the host of what is not to be kept, and not there yet.

        Activations are to be there whatever is kept.

        Args:
            layers: bool [num_layers].
            pages: int64 [n], full ones, each once.
            needed: somebody waits for the room: not to be put off.

        Returns:
            Layer-pages whose copy was started.
        """
        binding = self._binding
        due = (binding.device[:, pages] >= 0) & binding.filled[:, pages]
        due &= ~binding.on_host[:, pages] & ~binding.copying[:, pages]
        due &= (self._book.keep[:, pages] == 0) & layers[:, None]
        due &= ~binding.rowless[pages]
        if binding.kinds is not None:
            due &= ~binding.is_act[pages]
            acts = (binding.act[:, pages] >= 0) & binding.filled[:, pages]
            acts &= ~binding.on_host[:, pages] & ~binding.copying[:, pages]
            due |= acts & layers[:, None]
        found, where = due.nonzero()
        if self._mover.to_host.holds_back and not needed:
            for layer in np.unique(found).tolist():
                some = pages[where[found == layer]]
                self._due.append(_Due(layer, some, binding.epoch[some]))
            return 0
        return self._send(found, pages[where])

    def collect(self) -> None:
        """Take note of copies that have ended."""
        for landing in self._mover.collect():
            flight = landing.flight
            landed = self._binding.arrive(flight, landing.ok)
            self._credit(flight, landed)
            if not flight.is_up and not landing.ok.all():
                left = ~landing.ok
                self._due.append(
                    _Due(flight.layer, flight.pages[left], flight.epochs[left])
                )

    def retry(self, *, needed: bool = False) -> None:
        """Start again what failed on its way to the host, if it is still to go.

        Args:
            needed: somebody waits for the room: all of it, and at once. Otherwise, as
                long as copies fail, one after each pause.
        """
        outage = self._mover.to_host
        if outage.holds_back and not needed:
            return
        for _ in range(len(self._due)):
            due = self._due.popleft()
            same = self._binding.epoch[due.pages] == due.epochs
            layers = np.zeros(self._binding.num_layers, np.bool_)
            layers[due.layer] = True
            num_sent = self.offload(layers, due.pages[same], needed=True)
            if num_sent and outage.lasts and not needed:
                return

    def settle(self, pages: Int64s) -> None:
        """Wait until no copy uses anything of these pages."""
        while self._binding.copying[:, pages].any():
            self._mover.wait()
            self.collect()

    def pull(self, layers: Bools, pages: Int64s, most: int) -> int:
        """Start copies from host to device, to stay there, as far as room is free."""
        binding = self._binding
        away = (binding.device[:, pages] < 0) & binding.on_host[:, pages]
        away &= ~binding.copying[:, pages] & layers[:, None]
        count = min(int(np.count_nonzero(away)), most)
        if count > binding.num_free:
            self.drop(count - binding.num_free)
            count = min(count, binding.num_free)
        found, where = away.nonzero()
        found, where = found[:count], where[:count]
        for layer in np.unique(found).tolist():
            for some in binding.by_kind(pages[where[found == layer]]):
                self._mover.start(binding.depart(layer, some, is_up=True))
        return count

    def _send(self, layers: Int64s, pages: Int64s) -> int:
        for layer in np.unique(layers).tolist():
            for some in self._binding.by_kind(pages[layers == layer]):
                self._mover.start(self._binding.depart(layer, some, is_up=False))
        return len(pages)

    def _spare(self) -> Bools:
        binding = self._binding
        spare: Bools = (binding.device >= 0) & binding.on_host & ~binding.copying
        spare &= (self._book.keep == 0) & (binding.pinned == 0)
        if self.layer < binding.num_layers:
            spare[self.layer :, self.in_forward] = False
        return spare

    def _spare_acts(self) -> Bools:
        binding = self._binding
        spare: Bools = (binding.act >= 0) & binding.on_host & ~binding.copying
        spare &= binding.pinned == 0
        if self.layer < binding.num_layers:
            spare[self.layer :, self.in_forward] = False
        return spare

    def _pushable(self) -> Bools:
        binding = self._binding
        cached: Bools = (binding.device >= 0) & ~binding.on_host & ~binding.copying
        cached &= (self._book.keep == 0) & binding.full & (binding.pinned == 0)
        cached &= ~binding.rowless
        return cached

    def _coldest(self, found: Bools, count: int) -> tuple[Int64s, Int64s]:
        """Return layers and pages of the coldest, whole pages, until they are enough.

        The cached ones before those in use, then by their last use; of those used in
        the same forward the pages of the most recent request first.
        """
        per_page = np.count_nonzero(found, axis=0)
        pages = per_page.nonzero()[0]
        book = self._book
        order = np.lexsort(
            (-book.owner[pages], book.last_used[pages], book.users[pages] > 0)
        )
        pages = pages[order]
        num_pages = int(np.searchsorted(np.cumsum(per_page[pages]), count)) + 1
        pages = pages[:num_pages]
        layers, where = found[:, pages].nonzero()
        return layers, pages[where]

    def forget_due(self, pages: Int64s) -> None:
        """Try no more what failed of pages whose KV was given up; same epoch."""
        for _ in range(len(self._due)):
            due = self._due.popleft()
            left = ~np.isin(due.pages, pages)
            if left.any():
                self._due.append(_Due(due.layer, due.pages[left], due.epochs[left]))

    def _credit(self, flight: Flight, landed: Bools) -> None:
        pages, is_up = flight.pages[landed], flight.is_up
        if flight.acts is not None:
            self._credit_acts(flight, landed)
            return
        serials, counts = np.unique(self._book.owner[pages], return_counts=True)
        for serial, count in zip(serials.tolist(), counts.tolist(), strict=True):
            record = self._book.by_serial(serial)
            if record is None:
                continue
            if is_up:
                record.layer_pages_pulled += count
            else:
                record.layer_pages_offloaded += count

    def _credit_acts(self, flight: Flight, landed: Bools) -> None:
        """Count what crossed the link, and the KV that did not have to."""
        assert flight.acts is not None
        pages = flight.pages[landed]
        if flight.is_up:
            crossed, unsent = flight.acts[landed] < 0, np.ones(len(pages), np.bool_)
        else:
            crossed = np.ones(len(pages), np.bool_)
            unsent = self._book.keep[flight.layer, pages] == 0
        owner = self._book.owner[pages]
        for serial in np.unique(owner).tolist():
            record = self._book.by_serial(serial)
            if record is None:
                continue
            count = int(np.count_nonzero(crossed & (owner == serial)))
            record.unsent += int(np.count_nonzero(unsent & (owner == serial)))
            if flight.is_up:
                record.acts_pulled += count
            else:
                record.acts_offloaded += count
