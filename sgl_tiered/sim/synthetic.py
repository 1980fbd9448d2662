"""Workloads of the papers that need no trace: fixed lengths, lengths, shared prefixes.

Arrivals are Poisson; all chance comes from the generator that is handed in.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder

__all__ = ["fixed_lengths", "of_lengths", "shared_prefixes"]


def fixed_lengths(
    num_requests: int,
    rate_per_s: float,
    prompt_tokens: int,
    output_tokens: int,
    page_tokens: int,
    rng: np.random.Generator,
) -> SimWorkload:
    """Return equal requests that share nothing (LayerKV Figures 1 and 4)."""
    lengths = np.full(num_requests, prompt_tokens)
    outputs = np.full(num_requests, output_tokens)
    return of_lengths(lengths, outputs, rate_per_s, page_tokens, rng)


def of_lengths(
    prompts: npt.NDArray[np.integer],
    outputs: npt.NDArray[np.integer],
    rate_per_s: float,
    page_tokens: int,
    rng: np.random.Generator,
) -> SimWorkload:
    """Return requests of given lengths that share nothing (LayerKV Figure 6)."""
    builder = WorkloadBuilder(page_tokens)
    arrivals = np.cumsum(rng.exponential(1.0 / rate_per_s, size=len(prompts)))
    for arrival_s, prompt, output in zip(arrivals, prompts, outputs, strict=True):
        builder.add(float(arrival_s), int(prompt), int(output))
    return builder.build(f"{len(prompts)} requests at {rate_per_s:g}/s")


def shared_prefixes(
    num_requests: int,
    rate_per_s: float,
    num_prefixes: int,
    prefix_tokens: int,
    body_tokens: int,
    output_tokens: int,
    page_tokens: int,
    rng: np.random.Generator,
    *,
    num_clients: int = 0,
    keep_bodies: bool = True,
) -> SimWorkload:
    """Return the Berkeley report's text analysis: a random prefix, a random body.

    Args:
        num_requests: k of the report.
        rate_per_s: of Poisson arrivals; infinity sends all at once.
        num_prefixes: n of the report.
        prefix_tokens, body_tokens, output_tokens: lengths.
        page_tokens: tokens of a page.
        rng: chooses prefixes and gaps.
        num_clients: a closed loop of so many clients instead, each of which sends its
            next request when it has its answer; 0 for Poisson arrivals.
        keep_bodies: bodies and answers are cached like prefixes, as an engine does.
    """
    builder = WorkloadBuilder(page_tokens)
    gaps = rng.exponential(1.0, size=num_requests) / rate_per_s
    arrivals = np.zeros(num_requests) if num_clients else np.cumsum(gaps)
    chosen = rng.integers(num_prefixes, size=num_requests)
    num_pages = prefix_tokens // page_tokens
    for index, number in enumerate(chosen.tolist()):
        builder.add(
            float(arrivals[index]),
            prefix_tokens + body_tokens,
            output_tokens,
            prefix=builder.prefix(number, num_pages),
            own_pages=keep_bodies,
        )
    name = f"{num_prefixes} prefixes, {num_requests} requests"
    return builder.build(name, num_clients)
