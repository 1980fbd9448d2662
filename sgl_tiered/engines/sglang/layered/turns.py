"""Before each decode step: who takes part, and which layers leave or come back.

Who has the better claim to the device is decided in `policies/layers`, which the
simulator shares. Here SGLang's requests become its facts, and its word moves layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.decode import DecodeCost
from sgl_tiered.engines.sglang.layered.admission import LayerAdmission
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.policies.layers.pressure import Pressure
from sgl_tiered.policies.layers.turns import (
    PauseTurns,
    StreamTurns,
    TurnFacts,
    TurnPlan,
    TurnRoom,
    Turns,
)

if TYPE_CHECKING:
    from sgl_tiered.engines.sglang.layered.cache import LayeredRuntime

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
        decode: time of a step, learned by whoever owns it.
        clock: of the runtime.
    """

    def __init__(
        self,
        driver: LayerDriver,
        runtime: LayeredRuntime,
        admission: LayerAdmission,
        decode: DecodeCost,
        clock: Clock,
    ) -> None:
        plan = driver.plan
        self._driver = driver
        self._runtime = runtime
        self._admission = admission
        self._decode = decode
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
        room = self._driver.manager.room()
        _, bytes_per_s = self._runtime.cost.link_figures(TierId.HOST)
        plan = self._policy.choose(
            facts,
            TurnRoom(
                self._decode.seconds, bytes_per_s, room.free * self._layer_page_bytes
            ),
        )
        decode = self._with_room(reqs, plan)
        self._move(reqs, facts, plan)
        self._note(reqs, decode, now_s)
        return sorted(decode)

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

    def _move(
        self, reqs: Sequence[Any], facts: Sequence[TurnFacts], plan: TurnPlan
    ) -> None:
        """Let layers leave for those who are due, and pull back what has room."""
        manager = self._driver.manager
        everything = np.ones(self._num_layers, np.bool_)
        for n in plan.yields:
            self._admission.release(reqs[n])
        away = [n for n in plan.order if facts[n].host_bytes and n not in plan.yields]
        if not away:
            return
        room = manager.room()
        growth = len(reqs) * self._num_layers
        left = self._pressure.surplus(room.free + room.spare + room.cached - growth)
        for n in away:
            wanted = facts[n].host_bytes // self._layer_page_bytes
            if wanted > left:
                # One request whole before the next: in part it would go on waiting.
                break
            manager.hold(reqs[n].rid, everything)
            queued = manager.pull(reqs[n].rid, wanted)
            if queued < wanted:
                # Cached pages stand in its way until they are on the host.
                manager.push(wanted - queued)
                break
            left -= wanted

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
