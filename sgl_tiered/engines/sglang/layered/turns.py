"""Before each decode step: who takes part, and which layers leave or come back.

Who has the better claim to the device is decided in `policies/layers`, which the
simulator shares. Here SGLang's requests become its facts, and its word moves layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.streaming import StreamingCost
from sgl_tiered.engines.sglang.layered.admission import LayerAdmission
from sgl_tiered.engines.sglang.layered.cache import LayeredRuntime
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.policies.layers.allotment import allotted_layers
from sgl_tiered.policies.layers.pressure import Pressure
from sgl_tiered.policies.layers.retention import retained_layers
from sgl_tiered.policies.layers.turns import (
    PauseTurns,
    StreamTurns,
    TurnFacts,
    TurnPlan,
    TurnRoom,
    Turns,
)

__all__ = ["DecodeTurns"]

_NEVER_PAUSED = 1 << 30


@dataclass(slots=True)
class _Turn:
    """What is remembered of a running request.

    Attributes:
        last_s: when it last decoded, or was first seen.
        tokens: since it was last paused.
    """

    last_s: float
    tokens: int = _NEVER_PAUSED


class DecodeTurns:
    """Chooses for one scheduler.

    Args:
        driver: of the pool.
        runtime: knows the link.
        admission: makes room.
        cost: of a step; learns here.
        clock: of the runtime.
    """

    def __init__(
        self,
        driver: LayerDriver,
        runtime: LayeredRuntime,
        admission: LayerAdmission,
        cost: StreamingCost,
        clock: Clock,
    ) -> None:
        plan = driver.plan
        self._driver = driver
        self._runtime = runtime
        self._admission = admission
        self._cost = cost
        self._clock = clock
        self._num_layers = plan.layout.num_layers
        self._page_tokens = plan.layout.page_tokens
        self._layer_page_bytes = plan.layout.layer_page_bytes
        self._pressure = Pressure(self._num_layers, plan.num_layer_pages)
        pauses = plan.settings.decode == "pause"
        self._policy: Turns = PauseTurns() if pauses else StreamTurns()
        self._known: dict[str, _Turn] = {}

    def choose(self, reqs: Sequence[Any]) -> list[int]:
        """Return the positions of those that decode next, ascending; never none.

        Args:
            reqs: SGLang's running requests, first come first.
        """
        now_s = self._clock.now()
        self._driver.manager.poll()
        self._admission.see(reqs)
        away = self._driver.manager.away([req.rid for req in reqs])
        facts = [
            self._facts(req, int(num), now_s)
            for req, num in zip(reqs, away, strict=True)
        ]
        _, bytes_per_s = self._runtime.cost.link_figures(TierId.HOST)
        plan = self._policy.choose(
            facts,
            TurnRoom(
                self._cost.seconds,
                bytes_per_s,
                self._driver.manager.num_free * self._layer_page_bytes,
                byte_s=self._cost.byte_s,
            ),
        )
        decode = self._with_room(reqs, plan)
        self._move(reqs, plan)
        self._note(reqs, decode, now_s)
        return sorted(decode)

    def learn(
        self,
        batch: int,
        context_tokens: int,
        seconds: float,
        streamed_bytes: float,
    ) -> None:
        """Learn from a step; arguments as of ``StreamingCost``."""
        _, bytes_per_s = self._runtime.cost.link_figures(TierId.HOST)
        self._cost.observe(batch, context_tokens, seconds, streamed_bytes, bytes_per_s)

    def _facts(self, req: Any, away: int, now_s: float) -> TurnFacts:
        turn = self._known.setdefault(req.rid, _Turn(now_s))
        num_tokens = int(req.kv.kv_committed_len)
        num_pages = num_tokens // self._page_tokens
        held = num_pages * self._num_layers - away
        return TurnFacts(
            context_tokens=num_tokens,
            host_bytes=away * self._layer_page_bytes,
            device_bytes=max(held, 0) * self._layer_page_bytes,
            waited_s=now_s - turn.last_s,
            turn_tokens=turn.tokens,
        )

    def _with_room(self, reqs: Sequence[Any], plan: TurnPlan) -> set[int]:
        """Return those of ``plan`` who find room for a page that they begin."""
        decode = set(plan.decode)
        begins = [n for n in plan.order if n in decode and self._begins_page(reqs[n])]
        wanted = len(begins) * self._num_layers
        if wanted and not self._admission.make_room(wanted):
            left = self._admission.room() // self._num_layers
            late = begins[max(left, 0) :]
            # One goes on in any case: room for it was kept at its admission.
            if len(late) == len(decode):
                late = late[1:]
            decode.difference_update(late)
        return decode

    def _begins_page(self, req: Any) -> bool:
        return bool(req.kv.kv_committed_len % self._page_tokens == 0)

    def _move(self, reqs: Sequence[Any], plan: TurnPlan) -> None:
        """Give the device to those with the best claims; others' layers leave."""
        manager = self._driver.manager
        claims = [reqs[n] for n in plan.order if self._admission.may_leave(reqs[n])]
        # Each has a page that is written, or will begin one, in all layers.
        others = len(reqs) * self._num_layers + self._pressure.low
        others += sum(self._layer_pages(r) for r in reqs if r not in claims)
        allotted = allotted_layers(
            self._num_layers,
            [self._admission.whole_pages(req) for req in claims],
            manager.num_usable - others,
        )
        wanted = []
        for req, num in zip(claims, allotted, strict=True):
            held, kept = manager.held(req.rid), self._layers(num)
            if (held & ~kept).any():
                manager.release(req.rid, held & ~kept)
            if (kept & ~held).any():
                manager.hold(req.rid, kept)
            if num:
                wanted.append(req.rid)
        for rid in wanted:
            missing = manager.missing(rid)
            if not missing:
                continue
            queued = manager.pull(rid)
            if queued < missing:
                # Cached pages stand in its way until they are on the host.
                manager.push(missing - queued)
                break

    def _layer_pages(self, req: Any) -> int:
        return self._admission.whole_pages(req) * self._num_layers

    def _layers(self, num: int) -> npt.NDArray[np.bool_]:
        kept = np.zeros(self._num_layers, np.bool_)
        kept[list(retained_layers(self._num_layers, num))] = True
        return kept

    def _note(self, reqs: Sequence[Any], decode: set[int], now_s: float) -> None:
        known = {}
        for n, req in enumerate(reqs):
            turn = known[req.rid] = self._known[req.rid]
            if n in decode:
                turn.last_s = now_s
                turn.tokens += 1
            else:
                turn.tokens = 0
        self._known = known
        self._driver.paused([r.rid for n, r in enumerate(reqs) if n not in decode])
