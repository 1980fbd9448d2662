"""TTFT and total time against prompt length, one request at a time.

CaR's Figure 1 measures cold prompts (one pass); its Figure 5 compares a reload with
computing the same prompt again, which is what a second pass over the same prompts
shows on a server whose device pool is smaller than the set.
"""

from __future__ import annotations

from sgl_tiered_workloads.generators.base import (
    ONE_AT_A_TIME,
    Scene,
    make_arrivals,
    requests_workload,
)
from sgl_tiered_workloads.generators.fixed_lengths import LAYERKV_LENGTHS
from sgl_tiered_workloads.params import Params
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.workload import Workload

__all__ = ["length_sweep"]


def length_sweep(params: Params, scene: Scene) -> Workload:
    """Make ``length_sweep``; keys are ``n<length>.r<repeat>.p<pass>``.

    Parameters: ``prompt_lengths``, ``num_repeats`` (other prompts of that length),
    ``num_passes`` over all prompts in the same order, ``answer_tokens``.

    Raises:
        WorkloadError: a parameter is wrong.
    """
    answer_tokens = params.integer("answer_tokens", 64)
    prompts = {
        f"n{length}.r{repeat}": random_tokens(
            scene.generator, length, scene.vocab_tokens
        )
        for repeat in range(params.integer("num_repeats", 3))
        for length in params.integers("prompt_lengths", LAYERKV_LENGTHS)
    }
    requests = [
        PlannedRequest(f"{key}.p{turn}", prompt, answer_tokens)
        for turn in range(params.integer("num_passes", 1))
        for key, prompt in prompts.items()
    ]
    arrivals = make_arrivals(params, ONE_AT_A_TIME, len(requests), scene.generator)
    return requests_workload("length_sweep", requests, arrivals)
