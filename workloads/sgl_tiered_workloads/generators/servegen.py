"""Requests as ServeGen's clients send them: each client its own process and lengths.

In each window a client sends as many requests as its rate says, with gaps of the
window's family and shape, scaled to fill the window. Prompts share nothing: the data
have no content.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl_tiered_workloads.generators.base import Scene
from sgl_tiered_workloads.generators.replay import replay_trace
from sgl_tiered_workloads.params import Params
from sgl_tiered_workloads.traces.base import Int64s, Trace, TraceRequest
from sgl_tiered_workloads.traces.servegen import (
    Float64s,
    RateWindow,
    ServeGenClient,
    read_servegen,
)
from sgl_tiered_workloads.workload import Workload

__all__ = ["servegen", "servegen_trace"]

_NO_IDS: Int64s = np.empty(0, dtype=np.int64)


def servegen(params: Params, scene: Scene) -> Workload:
    """Make ``servegen`` from the client data ``path`` (archive or folder).

    Parameters: ``start_s`` and ``duration_s`` of the service's day, ``rate_scale`` of
    every client's rate.

    Raises:
        WorkloadError: a parameter is wrong, or nobody sends in that time.
        TraceError: the file cannot be used.
    """
    start_s = params.number("start_s", 0.0)
    duration_s = params.number("duration_s", 3600.0, above=True)
    found = servegen_trace(
        read_servegen(params.path("path")),
        start_s=start_s,
        duration_s=duration_s,
        rate_scale=params.number("rate_scale", 1.0, above=True),
        generator=scene.generator,
    )
    if not found.requests:
        raise params.wrong("duration_s", "a time in which a client sends", duration_s)
    return replay_trace("servegen", found, params, scene, timed=True)


def servegen_trace(
    clients: Sequence[ServeGenClient],
    *,
    start_s: float,
    duration_s: float,
    rate_scale: float,
    generator: np.random.Generator,
) -> Trace:
    """Draw the requests of a stretch of time; times count from its start."""
    drawn: list[tuple[float, int, int]] = []
    for client in clients:
        for window in client.rates:
            begin_s = max(window.start_s, start_s)
            end_s = min(window.start_s + client.window_s, start_s + duration_s)
            if window.rate_per_s <= 0 or begin_s >= end_s:
                continue
            rate_per_s = window.rate_per_s * rate_scale
            times_s = _renewals(window, rate_per_s, end_s - begin_s, generator)
            lengths = client.lengths_at(window.start_s)
            count = len(times_s)
            inputs = generator.choice(
                lengths.input_tokens, count, p=lengths.input_share
            )
            outputs = generator.choice(
                lengths.output_tokens, count, p=lengths.output_share
            )
            drawn.extend(
                zip(
                    (times_s + (begin_s - start_s)).tolist(),
                    inputs.tolist(),
                    outputs.tolist(),
                    strict=True,
                )
            )
    drawn.sort()
    requests = tuple(
        TraceRequest(arrival_s, prompt, output, _NO_IDS, serial=serial)
        for serial, (arrival_s, prompt, output) in enumerate(drawn)
    )
    return Trace("servegen", 0, requests)


def _renewals(
    window: RateWindow,
    rate_per_s: float,
    duration_s: float,
    generator: np.random.Generator,
) -> Float64s:
    # The count is fixed to the rate first: a bursty renewal process that starts with
    # an arrival would send far more than its rate in a window of ten minutes.
    expected = rate_per_s * duration_s
    count = int(expected) + int(generator.random() < expected % 1.0)
    if window.family == "Gamma":
        gaps = generator.gamma(window.shape, 1.0, count + 1)
    else:
        gaps = generator.weibull(window.shape, count + 1)
    total = gaps.sum()
    if not total > 0:
        # Gaps of a tiny shape can all vanish: one burst, anywhere.
        return np.full(count, generator.uniform(0.0, duration_s))
    times_s: Float64s = np.cumsum(gaps)[:-1] * (duration_s / total)
    return times_s
