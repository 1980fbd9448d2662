"""Before each decode step: who takes part, and which layers leave or come back.

Who has the better claim to the device is decided in `policies/layers`, which the
simulator shares. Here SGLang's requests become its facts, and its word moves layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.engines.sglang.layered.admission import LayerAdmission
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.engines.sglang.layered.facts import LayerFacts
from sgl_tiered.engines.sglang.layered.forecasting import LayerForecast
from sgl_tiered.policies.layers.allotment import allotted_layers
from sgl_tiered.policies.layers.retention import retained_layers
from sgl_tiered.policies.layers.turns import TurnPlan, Turns

__all__ = ["DecodeTurns"]


class DecodeTurns:
    """Chooses for one scheduler.

    Args:
        driver: of the pool.
        admission: makes room.
        policy: decides.
        facts: read for it.
        forecast: says what will be left.
    """

    def __init__(
        self,
        driver: LayerDriver,
        admission: LayerAdmission,
        policy: Turns,
        facts: LayerFacts,
        forecast: LayerForecast,
    ) -> None:
        layout = driver.plan.layout
        self._driver = driver
        self._admission = admission
        self._policy = policy
        self._facts = facts
        self._forecast = forecast
        # Those of the last choice that had no room.
        self._late: Sequence[int] = ()
        self._num_layers = layout.num_layers
        self._usable = driver.plan.num_layer_pages - 2 * driver.plan.half_pages
        self._page_tokens = layout.page_tokens
        self._masks = _masks(layout.num_layers)

    def choose(self, reqs: Sequence[Any]) -> list[int]:
        """Return the positions of those that decode next, ascending.

        Who is to end takes part, as an abort is carried out in a step. Empty while
        nobody has room, for as long as there are stores, which read what could leave:
        one that does not end is given up (``TieredRuntime``).

        Args:
            reqs: SGLang's running requests, first come first.
        """
        self._driver.manager.poll()
        self._admission.see(reqs)
        reading = self._facts.read(reqs)
        room = self._facts.turn_room(reading)
        facts = self._facts.turns(reqs, reading, room)
        plan = self._policy.choose(facts, room)
        decode = self._with_room(reqs, plan)
        if decode is None:
            # No step, so nobody is left out of one, and all turns stay as they are.
            self._driver.held()
            return []
        decode = decode or set(range(len(reqs)))
        self._move(reqs, plan, self._begun(reqs, decode))
        # Layers go to the host before a coming step would wait for their room.
        self._forecast.relieve(
            [reqs[n] for n in plan.order],
            [reqs[n] for n in sorted(decode)],
            reading.room,
            self._admission.relieve,
        )
        self._facts.note(reqs, decode, reading.now_s)
        self._driver.paused([r.rid for n, r in enumerate(reqs) if n not in decode])
        return sorted(decode)

    def waits(self) -> bool:
        """Return whether somebody had no room at the last choice that may come yet.

        It is to be asked where those who were left out would decode all the same.
        """
        waits = bool(self._late) and bool(self._driver.stores)
        if waits:
            self._driver.held()
        return waits

    def _with_room(self, reqs: Sequence[Any], plan: TurnPlan) -> set[int] | None:
        """Return those of ``plan``, and who is to end, that have room to go on.

        None where nobody has, and stores are to be waited for.
        """
        self._late = ()
        ending = {n for n, req in enumerate(reqs) if req.to_finish is not None}
        decode = ending | set(plan.decode)
        # Who is to end first: nobody else gives back as much.
        order = sorted(plan.order, key=lambda n: n not in ending)
        begins = [n for n in order if n in decode and self._begins_page(reqs[n])]
        wanted = len(begins) * self._num_layers
        if wanted and not self._admission.make_room(wanted):
            left = self._admission.room() // self._num_layers
            self._late = late = begins[max(left, 0) :]
            if len(late) == len(decode):
                # What a store reads cannot leave until the store has ended.
                if self._driver.stores:
                    return None
                # One goes on: room for it was kept at its admission.
                self._late = late = late[1:]
            decode.difference_update(late)
        return decode

    def _begun(self, reqs: Sequence[Any], decode: set[int]) -> int:
        """Return the layer-pages of pages that those who decode begin."""
        return sum(self._begins_page(reqs[n]) for n in decode) * self._num_layers

    def _begins_page(self, req: Any) -> bool:
        return bool(req.kv.kv_committed_len % self._page_tokens == 0)

    def _move(self, reqs: Sequence[Any], plan: TurnPlan, begun: int) -> None:
        """Give the device to those with the best claims; others' layers leave.

        Args:
            reqs: all that run.
            plan: of their turns.
            begun: layer-pages that the step takes, which nothing returns to.
        """
        manager, admission = self._driver.manager, self._admission
        claims, fixed = [], 0
        for n in plan.claims:
            if admission.may_leave(reqs[n]):
                claims.append(reqs[n])
            else:
                fixed += admission.whole_pages(reqs[n]) * self._num_layers
        # Each has a page that is written, or will begin one, in all layers; and Eq. 5.
        others = fixed + len(reqs) * self._num_layers
        others += self._forecast.reserve([reqs[n] for n in plan.decode])
        allotted = allotted_layers(
            self._num_layers,
            [admission.whole_pages(req) for req in claims],
            self._usable - others,
        )
        rids = [req.rid for req in claims]
        wanted = []
        for rid, num, num_held in zip(
            rids, allotted, manager.num_held(rids), strict=True
        ):
            if num:
                wanted.append(rid)
            if num == num_held:
                # Which layers these are follows from their number, here as elsewhere.
                continue
            held, kept = manager.held(rid), self._masks[num]
            if (held & ~kept).any():
                manager.release(rid, held & ~kept)
            if (kept & ~held).any():
                manager.hold(rid, kept)
        most: int | None = None
        for rid in wanted:
            missing = manager.missing(rid)
            if not missing:
                continue
            if begun and most is None:
                # Only now: to count the room takes longer than all the rest.
                most = max(admission.room() - begun, 0)
            queued = manager.pull(rid, most)
            if most is not None:
                most -= queued
            if queued < missing:
                # Cached pages stand in its way until they are on the host.
                manager.push(missing - queued)
                break


def _masks(num_layers: int) -> list[npt.NDArray[np.bool_]]:
    """Return which layers stay where so many do: bool [num_layers], by their number."""
    masks = []
    for num in range(num_layers + 1):
        kept = np.zeros(num_layers, np.bool_)
        kept[list(retained_layers(num_layers, num))] = True
        masks.append(kept)
    return masks
