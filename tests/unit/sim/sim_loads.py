"""Loads of the simulator's tests: the same for every test, by seed."""

from __future__ import annotations

import numpy as np

from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder

__all__ = ["PAGE", "chats"]

PAGE = 4


def chats(
    num_requests: int = 60,
    rate_per_s: float = 20.0,
    num_prefixes: int = 8,
    seed: int = 0,
    *,
    longest: int = 40,
) -> SimWorkload:
    """Return Poisson requests over shared prefixes, answers below ``longest``."""
    rng = np.random.default_rng(seed)
    builder = WorkloadBuilder(PAGE)
    now_s = 0.0
    for _ in range(num_requests):
        now_s += float(rng.exponential(1.0 / rate_per_s))
        prefix = builder.prefix(int(rng.integers(num_prefixes)), 10)
        prompt = 40 + int(rng.integers(1, 30))
        builder.add(now_s, prompt, int(rng.integers(1, longest)), prefix=prefix)
    return builder.build("chats")
