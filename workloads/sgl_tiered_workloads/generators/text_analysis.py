"""The Berkeley report's text analysis: templates with random bodies.

A set of n unique prefixes; each of k > n requests takes one of them at random and adds
a random body of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_tiered_workloads.generators.base import (
    SIXTEEN_USERS,
    Scene,
    make_arrivals,
    requests_workload,
)
from sgl_tiered_workloads.params import Params
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.workload import Workload

__all__ = ["TextAnalysis", "text_analysis", "text_analysis_requests"]


@dataclass(frozen=True, slots=True)
class TextAnalysis:
    """Sizes of a text analysis; the report gives the number of templates only.

    Attributes:
        num_prefixes: templates; 128 in the report.
        num_requests: more than templates.
        prefix_tokens: of each template.
        body_tokens: of each request's own text.
        answer_tokens: of each answer.
    """

    num_prefixes: int
    num_requests: int
    prefix_tokens: int
    body_tokens: int
    answer_tokens: int


def text_analysis_requests(
    shape: TextAnalysis, generator: np.random.Generator, vocab_tokens: int
) -> list[PlannedRequest]:
    """Return the requests; keys name the template and the request."""
    prefixes = [
        random_tokens(generator, shape.prefix_tokens, vocab_tokens)
        for _ in range(shape.num_prefixes)
    ]
    chosen = generator.integers(0, shape.num_prefixes, shape.num_requests).tolist()
    return [
        PlannedRequest(
            f"p{prefix}.r{number}",
            prefixes[prefix]
            + random_tokens(generator, shape.body_tokens, vocab_tokens),
            shape.answer_tokens,
        )
        for number, prefix in enumerate(chosen)
    ]


def text_analysis(params: Params, scene: Scene) -> Workload:
    """Make the workload ``text_analysis``.

    Raises:
        WorkloadError: a parameter is wrong.
    """
    prefixes = params.integer("num_prefixes", 128)
    shape = TextAnalysis(
        num_prefixes=prefixes,
        num_requests=params.integer("num_requests", 8 * prefixes, minimum=prefixes + 1),
        prefix_tokens=params.integer("prefix_tokens", 512),
        body_tokens=params.integer("body_tokens", 64),
        answer_tokens=params.integer("answer_tokens", 16),
    )
    requests = text_analysis_requests(shape, scene.generator, scene.vocab_tokens)
    arrivals = make_arrivals(params, SIXTEEN_USERS, len(requests), scene.generator)
    return requests_workload("text_analysis", requests, arrivals)
