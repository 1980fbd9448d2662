"""What the turns are told of SGLang's running requests: all that is read, read here.

Each step begins with a `Reading`: the clock, the link, the room, and how much of each
request is on the host alone. These are the only facts of a step that ranks could see
differently. The rest follows from them, from the requests, and from earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_tiered.core.clock import Clock
from sgl_tiered.cost.streaming import StreamingCost
from sgl_tiered.engines.sglang.decoders import Decoders
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.layered.base import LayerRoom
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.policies.layers.pressure import Pressure
from sgl_tiered.policies.layers.turns import TurnFacts, TurnRoom, Turns

__all__ = ["LayerFacts", "Reading"]

_NEVER_PAUSED = 1 << 30


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read before a step.

    Attributes:
        now_s: of the clock.
        room: of the device.
        bytes_per_s: of the link, host to device.
        away: layer-pages of each request that are on the host alone.
    """

    now_s: float
    room: LayerRoom
    bytes_per_s: float
    away: tuple[int, ...]


@dataclass(slots=True)
class _Turn:
    """What is remembered of a running request.

    Attributes:
        last_s: when it last decoded, or was first seen.
        tokens: since it was last paused.
    """

    last_s: float
    tokens: int = _NEVER_PAUSED


class LayerFacts:
    """Reads for one scheduler, and remembers who had a turn.

    Args:
        manager: of the layers.
        plan: sizes of the pool.
        policy: whose T_future the targets are judged by.
        decoders: targets and predicted lengths; None for no targets.
        cost: of a step.
        link: returns bytes per second, host to device.
        clock: of the runtime.
    """

    def __init__(
        self,
        manager: LayerManager,
        plan: LayerPlan,
        policy: Turns,
        decoders: Decoders | None,
        cost: StreamingCost,
        link: Callable[[], float],
        clock: Clock,
    ) -> None:
        layout = plan.layout
        self._manager = manager
        self._policy = policy
        self._decoders = decoders if policy.needs_targets else None
        self._cost = cost
        self._link = link
        self._clock = clock
        self._num_layers = layout.num_layers
        self._page_tokens = layout.page_tokens
        self._layer_page_bytes = layout.layer_page_bytes
        self._token_bytes = layout.page_bytes // layout.page_tokens
        self._device_tokens = plan.capacity // layout.num_layers * layout.page_tokens
        self._high = Pressure(layout.num_layers, plan.capacity).high
        self._known: dict[str, _Turn] = {}

    def read(self, reqs: Sequence[Any]) -> Reading:
        """Read what the step of these requests depends on."""
        away = self._manager.away([req.rid for req in reqs])
        return Reading(
            self._clock.now(), self._manager.room(), self._link(), tuple(away.tolist())
        )

    def turn_room(self, reading: Reading) -> TurnRoom:
        """Return what the requests share."""
        room = reading.room
        # What may return: not what the answers under way grow by.
        growth = len(reading.away) * self._num_layers
        spare = room.free + room.cached - self._high - growth
        return TurnRoom(
            self._cost.seconds,
            reading.bytes_per_s,
            max(spare, 0) * self._layer_page_bytes,
            self._device_tokens,
            self._token_bytes,
            byte_s=self._cost.byte_s,
            stream_share=self._cost.share,
            coming_bytes=self._manager.binding.num_adrift * self._layer_page_bytes,
        )

    def turns(
        self, reqs: Sequence[Any], reading: Reading, room: TurnRoom
    ) -> list[TurnFacts]:
        """Return what the policy is to know of each, targets included.

        Args:
            reqs: SGLang's running requests, those of the reading.
            reading: of this step.
            room: as ``turn_room`` returned it.
        """
        facts = [
            self._facts(req, away, reading.now_s)
            for req, away in zip(reqs, reading.away, strict=True)
        ]
        decoders = self._decoders
        if decoders is None:
            return facts
        step_s = None
        for n, req in enumerate(reqs):
            running = decoders.with_target(req, reading.now_s)
            if running is None:
                continue
            if step_s is None:
                contexts = sum(one.context_tokens for one in facts)
                step_s = self._policy.pace_s(1, contexts // len(facts), room)
            facts[n] = facts[n].with_target(running, step_s)
        return facts

    def pace_s(self, num_running: float, context_tokens: float) -> float:
        """Return the seconds of a token with so many running: Eq. 1's T_future.

        Args:
            num_running: requests, those that would be paused included.
            context_tokens: of all of them.
        """
        room = TurnRoom(
            self._cost.seconds,
            self._link(),
            device_tokens=self._device_tokens,
            token_bytes=self._token_bytes,
        )
        num_running = max(int(num_running), 1)
        return self._policy.pace_s(num_running, int(context_tokens), room)

    def note(self, reqs: Sequence[Any], decode: set[int], now_s: float) -> None:
        """Note who decodes in the step that comes.

        Args:
            reqs: all that run; others are forgotten.
            decode: positions.
            now_s: of the step's reading.
        """
        known = {}
        for n, req in enumerate(reqs):
            turn = known[req.rid] = self._known.get(req.rid) or _Turn(now_s)
            if n in decode:
                turn.last_s = now_s
                turn.tokens += 1
            else:
                turn.tokens = 0
        self._known = known

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
