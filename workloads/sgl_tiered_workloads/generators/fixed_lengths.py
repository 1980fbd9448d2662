"""LayerKV's sweeps: requests of one fixed length at a given rate.

LayerKV's Figure 1 has prompts of 128 to 16k tokens, 512 output tokens and 100 requests
at 1 request per second. One workload is one length; a sweep is several runs.
"""

from __future__ import annotations

from sgl_tiered_workloads.generators.base import Scene, make_arrivals, requests_workload
from sgl_tiered_workloads.params import Params
from sgl_tiered_workloads.sessions import no_reuse
from sgl_tiered_workloads.workload import Workload

__all__ = ["LAYERKV_LENGTHS", "fixed_lengths"]

LAYERKV_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Figure 1's axis: the paper names both ends, we double in between."""


def fixed_lengths(params: Params, scene: Scene) -> Workload:
    """Make ``fixed_lengths``: prompts of one length that share nothing.

    Parameters: ``prompt_tokens``, ``answer_tokens``, ``num_requests``.

    Raises:
        WorkloadError: a parameter is wrong.
    """
    requests = no_reuse(
        params.integer("num_requests", 100),
        params.integer("prompt_tokens"),
        params.integer("answer_tokens", 512),
        scene.generator,
        scene.vocab_tokens,
    )
    arrivals = make_arrivals(
        params,
        {"process": "poisson", "rate_per_s": 1.0},
        len(requests),
        scene.generator,
    )
    return requests_workload("fixed_lengths", requests, arrivals)
