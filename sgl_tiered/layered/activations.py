"""Which new pages are kept as activations, and where those of a forward are captured.

A page's kind follows what the engine's chooser says, as far as there is room: a host
row of the kind, and places of the act area. A full page takes two places, for two
layers on their way to the host; one that is not full one for each layer. What lacks
room takes the other kind; a page that has room as neither is KV without a host row, and
stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.layered.base import ActChooser, ActPlan, LayerRoomError
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.kinds import PageKinds
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.layered.passes import Batch, Forward
from sgl_tiered.layered.room import RoomMaker
from sgl_tiered.layered.units import ActSource

__all__ = ["Activations", "Choice"]

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Kinds of the new pages of a batch.

    Attributes:
        is_act: bool [n], to be activations.
        rowless: bool [n], to be KV that stays on the device: they have no host row.
    """

    is_act: Bools
    rowless: Bools


class Activations:
    """Kinds of new pages, the act staging, and captures.

    Args:
        binding: whose pages have kinds.
        kinds: of them.
        plan: sizes.
        room: makes room in the act area.
        mover: copies; told which places serve what returns to stay.
        page_tokens: tokens in one page.
        choose: which of a request's new pages are to be activations.

    Attributes:
        source: of what is staged as activations.
    """

    def __init__(
        self,
        binding: LayerBinding,
        kinds: PageKinds,
        plan: ActPlan,
        room: RoomMaker,
        mover: LayerMover,
        page_tokens: int,
        choose: ActChooser,
    ) -> None:
        self._binding = binding
        self._kinds = kinds
        self._room = room
        self._mover = mover
        self._page_tokens = page_tokens
        self._choose = choose
        places = kinds.places
        halves = places.set_aside(plan.half_acts), places.set_aside(plan.half_acts)
        mover.use_up_acts(places.set_aside(plan.up_acts))
        self.source = ActSource(
            kinds.is_act, kinds.row, kinds.act, kinds.position, halves
        )

    def num_rowless(self, num_pages: int) -> int:
        """Return how many of so many new full pages would have no host row."""
        kv_rows, act_rows = self._kinds.num_free_rows
        if num_pages <= kv_rows:
            return 0
        fits = min(self._room.num_acts() // self._num_passing, act_rows)
        return max(num_pages - kv_rows - fits, 0)

    @property
    def _num_passing(self) -> int:
        """Places that a new full page takes, layer by layer on their way down."""
        num_layers = self._binding.num_layers
        return num_layers if self._mover.to_host.lasts else min(2, num_layers)

    def choose(self, batch: Batch) -> Choice:
        """Choose kinds, make room for them in the act area, and note positions.

        Nothing of the batch has begun; its new pages have no kind.
        """
        self._kinds.position[batch.pages] = batch.position * self._page_tokens
        wanted, places = self._wanted(batch), self._kinds.places
        choice, num_places = self._fit(batch, wanted, places.num_free)
        if not choice.rowless.any() and np.array_equal(choice.is_act, wanted):
            return choice
        # Room has to be looked for, and made.
        choice, num_places = self._fit(batch, wanted, self._room.num_acts())
        if choice.rowless.any() and self._mover.to_host.lasts:
            # What failed still has places: once more, as somebody waits for them.
            self._room.retry(needed=True)
            while self._mover.num_flights:
                self._mover.wait()
                self._room.collect()
            choice, num_places = self._fit(batch, wanted, self._room.num_acts())
        if num_places and not self._room.make_acts(num_places):
            # Copies to the host fail: what is free now has to do.
            choice, _ = self._fit(batch, wanted, places.num_free)
        return choice

    def enter(self, batch: Batch, choice: Choice) -> Int64s:
        """Give a batch's new pages their kinds; tails get their places at once.

        Those without a row are bound in all layers.

        Returns:
            int64 [n], new full pages of activations.
        """
        is_act = choice.is_act
        self._binding.new_kinds(batch.new_pages, is_act, choice.rowless)
        is_full = batch.is_full[batch.new]
        tails = batch.new_pages[is_act & ~is_full]
        num_layers = self._binding.num_layers
        layers = np.repeat(np.arange(num_layers), len(tails))
        self._kinds.bind(layers, np.tile(tails, num_layers))
        full: Int64s = batch.new_pages[is_act & is_full]
        return full

    def bind(self, forward: Forward, layer: int) -> None:
        """Give the full pages of a forward places to be captured in a layer.

        Raises:
            LayerRoomError: copies to the host failed, so that earlier layers still
                have the places.
        """
        pages, places = forward.passing_acts, self._kinds.places
        forward.num_captured = layer + 1
        if pages is None or not len(pages):
            return
        if places.num_free < len(pages):
            started_s = self._mover.clock.now()
            if not self._room.make_acts(len(pages)):
                # Once more, while somebody waits for them.
                self._room.retry(needed=True)
                if not self._room.make_acts(len(pages)):
                    missing = len(pages) - places.num_free
                    raise LayerRoomError(layer, missing, forward.owners(pages))
            forward.stall_s += self._mover.clock.now() - started_s
        self._kinds.bind(layer, pages)

    def _wanted(self, batch: Batch) -> Bools:
        """Return bool [n], the new pages that the chooser wants."""
        num = len(batch.requests)
        wanted = np.zeros(len(batch.new), np.bool_)
        if not len(wanted):
            return wanted
        old = (~batch.is_new).nonzero()[0]
        is_act = self._kinds.is_act[batch.pages[old]]
        owner = batch.request_of[old]
        acts = np.bincount(owner[is_act], minlength=num)
        kvs = np.bincount(owner[~is_act], minlength=num)
        counts = np.bincount(batch.request_of[batch.new], minlength=num)
        begins = np.cumsum(counts) - counts
        most = len(self.source.halves[0])
        for request in counts.nonzero()[0].tolist():
            begin, count = int(begins[request]), int(counts[request])
            num_acts = int(acts[request])
            mine = np.asarray(
                self._choose(num_acts, int(kvs[request]), count), np.bool_
            )
            # What one half of the act staging cannot hold is brought back each time.
            mine = mine & (np.cumsum(mine) <= most - num_acts)
            wanted[begin : begin + count] = mine
        return wanted

    def _fit(self, batch: Batch, wanted: Bools, budget: int) -> tuple[Choice, int]:
        """Return what fits, as ``choose`` does, and the places that it takes.

        Args:
            batch: whose new pages they are.
            wanted: bool [n].
            budget: places of the act area that can be had.
        """
        is_full = batch.is_full[batch.new]
        num_layers = self._binding.num_layers
        cost = np.where(is_full, self._num_passing, num_layers)
        # The cheap ones first.
        order = np.argsort(~is_full, kind="stable")
        kv_rows, act_rows = self._kinds.num_free_rows
        is_act = np.zeros(len(wanted), np.bool_)
        some = order[wanted[order]]
        fits = np.cumsum(cost[some]) <= budget
        is_act[some[fits][:act_rows]] = True
        lacking = len(is_act) - int(np.count_nonzero(is_act)) - kv_rows
        rowless = np.zeros(len(wanted), np.bool_)
        if lacking > 0:
            # No rows of KV are left: activations, whatever is wanted.
            left = budget - int(cost[is_act].sum())
            num_rows = act_rows - int(np.count_nonzero(is_act))
            some = order[~is_act[order]]
            some = some[np.cumsum(cost[some]) <= left][: min(lacking, num_rows)]
            is_act[some] = True
            lacking -= len(some)
            if lacking > 0:
                # The last in this order: tails stay in all layers for now anyway.
                rowless[order[~is_act[order]][-lacking:]] = True
        return Choice(is_act, rowless), int(cost[is_act].sum())
