"""Loads of the simulator's tests: the same for every test, by seed."""

from __future__ import annotations

import numpy as np

from sgl_tiered.sim.cluster import ClusterRequest
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder

__all__ = ["PAGE", "chats", "sessions"]

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


def sessions(seed: int, num_sessions: int) -> list[ClusterRequest]:
    """Return sessions of one to three turns over three beginnings."""
    rng = np.random.default_rng(seed)
    found: list[ClusterRequest] = []
    for session in range(num_sessions):
        tokens = np.array([session % 3] * 8, np.int32)
        after, at_s = -1, float(rng.uniform(0, 20))
        for _ in range(int(rng.integers(1, 4))):
            new = rng.integers(0, 99, int(rng.integers(1, 9))).astype(np.int32)
            answer = rng.integers(0, 99, int(rng.integers(1, 9))).astype(np.int32)
            tokens = np.concatenate([tokens, new])
            found.append(ClusterRequest(at_s, tokens, answer, f"s{session}", after))
            after = len(found) - 1
            tokens = np.concatenate([tokens, answer])
    return found
