"""Prompts with LongAlign's lengths, 8k to 64k tokens.

Only the range is published, so lengths are drawn log-uniformly in it: a third of them
in each doubling, which leans to the short end as instruction data do. Nothing is
shared.
"""

from __future__ import annotations

import numpy as np

from sgl_tiered_workloads.generators.base import (
    ONE_AT_A_TIME,
    Scene,
    make_arrivals,
    requests_workload,
)
from sgl_tiered_workloads.params import Params
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.workload import Workload

__all__ = ["longalign"]


def longalign(params: Params, scene: Scene) -> Workload:
    """Make ``longalign``.

    Parameters: ``num_requests``, ``min_tokens``, ``max_tokens``, ``answer_tokens``.

    Raises:
        WorkloadError: a parameter is wrong.
    """
    num_requests = params.integer("num_requests", 100)
    shortest = params.integer("min_tokens", 8 * 1024)
    longest = params.integer("max_tokens", 64 * 1024, minimum=shortest)
    answer_tokens = params.integer("answer_tokens", 128)
    drawn = scene.generator.uniform(np.log(shortest), np.log(longest), num_requests)
    requests = [
        PlannedRequest(
            f"r{number}",
            random_tokens(scene.generator, length, scene.vocab_tokens),
            answer_tokens,
        )
        for number, length in enumerate(np.rint(np.exp(drawn)).astype(int).tolist())
    ]
    arrivals = make_arrivals(params, ONE_AT_A_TIME, num_requests, scene.generator)
    return requests_workload("longalign", requests, arrivals)
