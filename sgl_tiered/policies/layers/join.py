"""Who is on the device decodes; the others join, first come first, when there is room.

A reading of LayerKV (papers: layerkv) other than ``StreamTurns``. Section 3.1.1 has, of
the forecast: "for decoding, any new request in the running queue will be included in
the batch if the available blocks are sufficient." So a prompt is computed at once, and
its request takes part in decode steps as soon as there is room for what they need of
it; its layers then come layer by layer (section 4). Nobody who decodes makes room for
another, as in vLLM, on which LayerKV is built.

Bound: none in seconds. All that wait before a request end, or are as far back as it is
served; so it waits no longer than the answers before it take. A short answer behind
long ones waits much longer than it runs, which is what ``PauseTurns`` is for.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl_tiered.policies.layers.turns import (
    TurnFacts,
    TurnPlan,
    TurnRoom,
    device_step_s,
)

__all__ = ["JoinTurns"]


class JoinTurns:
    """First come, first decoded, to the end of the answer."""

    name = "join"
    needs_targets = False

    def choose(self, running: Sequence[TurnFacts], room: TurnRoom) -> TurnPlan:
        """Return the residents and, in order, whose layers come within a step; O(n)."""
        decode = {n for n, one in enumerate(running) if not one.host_bytes}
        contexts = sum(running[n].context_tokens for n in decode)
        away = [n for n in range(len(running)) if n not in decode]
        link_s = 0.0
        for n in away:
            contexts += running[n].context_tokens
            link_s += running[n].host_bytes / room.bytes_per_s
            # Never nobody; else nobody behind one that has no room.
            if decode and link_s > room.step_s(len(decode) + 1, contexts):
                break
            decode.add(n)
        waiting = tuple(n for n in away if n not in decode)
        now = tuple(sorted(decode))
        order = (*now, *waiting)
        return TurnPlan(now, order, waiting, claims=order)

    def pace_s(self, num_running: int, context_tokens: int, room: TurnRoom) -> float:
        """Return the step of those that have room."""
        return device_step_s(num_running, context_tokens, room)
