"""Sessions for the modelled cluster: the same for every test, by seed."""

from __future__ import annotations

import numpy as np
from cluster_model import ClusterRequest

__all__ = ["sessions"]


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
