"""A link shared by collectives and one swap, in exact time, without threads.

Both get half of the bandwidth while both are on it, as on PCIe. A collective becomes
ready some time after the one before it has ended, as in a forward. The swap asks the
guard before each sub-unit, and moves one at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.pipelines.contention import ContentionGuard, CountedCollectives


@dataclass
class Run:
    """What a run of the model saw.

    Attributes:
        delays_s: per collective, how much longer than alone it took.
        took_s: of the swap, from its first look to the end of its last sub-unit.
        idle_s: per sub-unit that waited, the link's idle time before it began.
        beside: sub-units that were begun while a collective was in flight.
    """

    delays_s: list[float] = field(default_factory=list)
    took_s: float = math.nan
    idle_s: list[float] = field(default_factory=list)
    beside: int = 0


def run_link(
    bytes_per_s: float,
    collectives: list[tuple[float, int]],
    sub_units: list[int],
    *,
    starts_s: float = 0.0,
    fraction: float = 0.25,
    max_wait_s: float = 1e6,
    guarded: bool = True,
) -> Run:
    """Run collectives (gap before in s, bytes) and a swap of sub-units (bytes)."""
    clock = ManualClock()
    watch = CountedCollectives(clock)
    guard = ContentionGuard(
        watch if guarded else None, clock, fraction=fraction, max_wait_s=max_wait_s
    )
    run = Run()
    coming, pieces = list(collectives), list(sub_units)
    ready_s = coming[0][0] if coming else math.inf
    asks_s = starts_s if pieces else math.inf
    on_link = begun = None  # bytes of the collective on the link, its token
    moving = None  # bytes of the sub-unit on the link
    began_s = waited_s = ended_s = 0.0
    while coming or pieces or on_link is not None or moving is not None:
        rate = bytes_per_s / ((on_link is not None) + (moving is not None) or 1)
        now_s = clock.now()
        times = [
            now_s + on_link / rate if on_link is not None else ready_s,
            now_s + moving / rate if moving is not None else asks_s,
        ]
        next_s = min(times)
        moved = (next_s - now_s) * rate
        clock.advance(max(next_s - now_s, 0.0))
        if on_link is not None:
            on_link -= moved
        if moving is not None:
            moving -= moved
        if times[0] <= times[1]:
            if on_link is None:
                on_link, began_s = float(coming[0][1]), clock.now()
                begun, ready_s = watch.begin(coming[0][1]), math.inf
            else:
                watch.end(begun)
                _, num_bytes = coming.pop(0)
                alone_s = num_bytes / bytes_per_s
                run.delays_s.append(clock.now() - began_s - alone_s)
                on_link, ended_s = None, clock.now()
                ready_s = clock.now() + coming[0][0] if coming else math.inf
        elif moving is not None:
            moving = None
            pieces.pop(0)
            asks_s, waited_s = clock.now() if pieces else math.inf, 0.0
            run.took_s = clock.now() - starts_s
        elif delay_s := guard.delay_s(waited_s):
            waited_s += delay_s
            asks_s = clock.now() + delay_s
        else:
            if waited_s and on_link is None:
                run.idle_s.append(clock.now() - ended_s)
            run.beside += on_link is not None
            moving, asks_s = float(pieces[0]), math.inf
    return run
