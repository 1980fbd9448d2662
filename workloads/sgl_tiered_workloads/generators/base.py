"""What a generator is given, and the arrivals that its parameters ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sgl_tiered_workloads.arrivals import (
    Arrivals,
    ClosedLoop,
    OpenLoop,
    bursty_arrivals,
    even_arrivals,
    poisson_arrivals,
    trace_arrivals,
)
from sgl_tiered_workloads.params import Params
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.turns import Session
from sgl_tiered_workloads.workload import Workload

__all__ = [
    "ONE_AT_A_TIME",
    "SIXTEEN_USERS",
    "Encode",
    "Scene",
    "make_arrivals",
    "requests_workload",
    "sessions_workload",
    "think_times",
]

Encode = Callable[[str], Sequence[int]]
"""Text to token ids."""

ONE_AT_A_TIME: Mapping[str, Any] = {"process": "closed", "concurrency": 1}
SIXTEEN_USERS: Mapping[str, Any] = {"process": "closed", "concurrency": 16}
"""Default arrivals: no paper's rate fits every machine, a closed loop does."""

_PROCESSES = ("poisson", "bursty", "even", "trace", "closed")


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """What every generator is given besides its parameters.

    Attributes:
        seed: of the workload; also names the tokens of block ids.
        vocab_tokens: size of the model's vocabulary.
        generator: seeded with ``seed``.
        encode: text to token ids, all below ``vocab_tokens``.
    """

    seed: int
    vocab_tokens: int
    generator: np.random.Generator
    encode: Encode


def make_arrivals(
    params: Params,
    default: Mapping[str, Any],
    num_arrivals: int,
    generator: np.random.Generator,
    times_s: Sequence[float] | None = None,
) -> Arrivals:
    """Return the arrivals of the parameter table ``arrivals``.

    ``process`` is one of poisson (``rate_per_s``), bursty (``rate_per_s``, ``cv``),
    even (``rate_per_s``), trace (``slowdown``; where the data have times) and closed
    (``concurrency``).

    Raises:
        WorkloadError: the table is wrong.
    """
    table = params.table("arrivals", default)
    process = table.choice("process", _PROCESSES, "poisson")
    arrivals: Arrivals
    if process == "closed":
        arrivals = ClosedLoop(table.integer("concurrency"))
    elif process == "trace":
        if times_s is None:
            raise table.wrong("process", "another one: this data has no times", process)
        slowdown = table.number("slowdown", 1.0, above=True)
        arrivals = trace_arrivals(times_s, slowdown)
    else:
        rate_per_s = table.number("rate_per_s", above=True)
        if process == "poisson":
            arrivals = poisson_arrivals(rate_per_s, num_arrivals, generator)
        elif process == "even":
            arrivals = even_arrivals(rate_per_s, num_arrivals)
        else:
            cv = table.number("cv", above=True)
            arrivals = bursty_arrivals(rate_per_s, cv, num_arrivals, generator)
    table.finish()
    return arrivals


def requests_workload(
    name: str, requests: Sequence[PlannedRequest], arrivals: Arrivals
) -> Workload:
    """Return a workload of single requests, each with its arrival as ``start_s``."""
    if isinstance(arrivals, OpenLoop):
        requests = [
            replace(request, start_s=start_s)
            for request, start_s in zip(requests, arrivals.times_s, strict=True)
        ]
    return Workload(name, arrivals, requests=tuple(requests))


def sessions_workload(
    name: str, sessions: Sequence[Session], arrivals: Arrivals
) -> Workload:
    """Return a workload of causal sessions."""
    return Workload(name, arrivals, sessions=tuple(sessions))


def think_times(
    mean_s: float, num_turns: int, generator: np.random.Generator
) -> list[float]:
    """Return pauses before each turn, exponential; none before the first."""
    pauses_s = generator.exponential(mean_s, num_turns) if mean_s > 0 else None
    if pauses_s is None:
        return [0.0] * num_turns
    return [0.0, *pauses_s[1:].tolist()]
