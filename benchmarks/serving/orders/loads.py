"""Loads under which orders of the queue differ, scaled to a model that a CPU serves.

A load draws its prefixes once and gives as many requests per repeat as asked for, in
the order of their arrival; when they arrive is the bench's business. All prompts are
fixed token ids, so that every server gets the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from sgl_tiered_workloads.arrivals import poisson_arrivals
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

__all__ = ["BODY", "PREFIX", "Load", "at_rate", "mixed_loads", "text_analysis"]

PREFIX, BODY, ANSWER = 512, 128, 32
LONG_TOKENS = 4_096
"""A prompt of 16k tokens, scaled by four like the model's speed."""

Draw = Callable[[np.random.Generator, str, int], list[PlannedRequest]]


@dataclass(frozen=True, slots=True)
class Load:
    """A load by name.

    Attributes:
        name: in tables and keys.
        utilisation: its rate, as a share of what one server does in a closed loop.
        draw: (generator, name of the repeat, number) -> requests in order.
    """

    name: str
    utilisation: float
    draw: Draw


def at_rate(
    requests: Sequence[PlannedRequest],
    rate_per_s: float,
    generator: np.random.Generator,
) -> list[PlannedRequest]:
    """Return the requests with the times of a Poisson process."""
    times = poisson_arrivals(rate_per_s, len(requests), generator).times_s
    return [
        replace(request, start_s=start_s)
        for request, start_s in zip(requests, times, strict=True)
    ]


def mixed_loads(generator: np.random.Generator) -> list[Load]:
    """Return the loads that share one size of device and tiers."""
    return [
        Load("decode pressure, host hits", 0.9, _decode_pressure(generator)),
        Load("mixed queue, long prompts", 0.8, _mixed_queue(generator)),
        Load("chat", 0.85, _chat(generator)),
    ]


def text_analysis(generator: np.random.Generator, num_prefixes: int) -> Load:
    """Return the Berkeley report's text analysis: a random prefix, a random body."""
    prefixes = _draw_many(generator, num_prefixes, PREFIX)

    def draw(rng: np.random.Generator, name: str, num: int) -> list[PlannedRequest]:
        chosen = rng.integers(num_prefixes, size=num).tolist()
        return [
            PlannedRequest(
                f"{name}.{place}.p{which}", prefixes[which] + _tokens(rng, BODY), ANSWER
            )
            for place, which in enumerate(chosen)
        ]

    return Load("text analysis", 0.85, draw)


def _decode_pressure(generator: np.random.Generator) -> Draw:
    """Answers that fill the pool, over prefixes that the host holds."""
    prefixes = _draw_many(generator, 48, PREFIX)
    ranks = np.arange(1, 49, dtype=np.float64) ** -0.7

    def draw(rng: np.random.Generator, name: str, num: int) -> list[PlannedRequest]:
        chosen = rng.choice(48, size=num, p=ranks / ranks.sum()).tolist()
        bodies = np.clip(rng.lognormal(4.2, 0.6, num), 16, 256).astype(int).tolist()
        answers = np.clip(rng.lognormal(4.4, 0.6, num), 24, 256).astype(int).tolist()
        return [
            PlannedRequest(
                f"{name}.{place}", prefixes[which] + _tokens(rng, body), answer
            )
            for place, (which, body, answer) in enumerate(
                zip(chosen, bodies, answers, strict=True)
            )
        ]

    return draw


def _mixed_queue(generator: np.random.Generator) -> Draw:
    """One prompt of ten is long; half of all are known to some tier."""
    documents = _draw_many(generator, 8, LONG_TOKENS - 256)
    templates = _draw_many(generator, 60, 256)

    def draw(rng: np.random.Generator, name: str, num: int) -> list[PlannedRequest]:
        requests = []
        for place in range(num):
            is_known = rng.random() < 0.5
            if rng.random() < 0.1:
                known, length = documents[int(rng.integers(8))], LONG_TOKENS
            else:
                known = templates[int(rng.integers(60))]
                length = 256 + int(rng.integers(32, 256))
            prefix = known if is_known else ()
            prompt = prefix + _tokens(rng, length - len(prefix))
            requests.append(PlannedRequest(f"{name}.{place}", prompt, 16))
        return requests

    return draw


def _chat(generator: np.random.Generator) -> Draw:
    """Turns of conversations over one of four system prompts, between each other's.

    The answers that later prompts hold are drawn, not the model's own: otherwise two
    servers would soon get different prompts.
    """
    systems = _draw_many(generator, 4, 256)

    def draw(rng: np.random.Generator, name: str, num: int) -> list[PlannedRequest]:
        turns: list[tuple[float, PlannedRequest]] = []
        session = 0
        while len(turns) < 2 * num:
            prompt = systems[int(rng.integers(4))] + _tokens(
                rng, int(np.clip(rng.lognormal(5.0, 0.8), 32, 1_500))
            )
            # In units of one request's place in the order of arrival.
            place = float(rng.random() * 2 * num) - num
            for turn in range(5):
                key = f"{name}.s{session}.t{turn}"
                turns.append((place, PlannedRequest(key, prompt, 24)))
                prompt += _tokens(rng, 24 + int(rng.integers(16, 96)))
                place += float(rng.exponential(30.0)) + 8.0
            session += 1
        turns = sorted((t for t in turns if t[0] >= 0.0), key=lambda t: t[0])
        return [request for _, request in turns[:num]]

    return draw


def _draw_many(
    generator: np.random.Generator, num: int, length: int
) -> list[tuple[int, ...]]:
    return [_tokens(generator, length) for _ in range(num)]


def _tokens(generator: np.random.Generator, num_tokens: int) -> tuple[int, ...]:
    return random_tokens(generator, num_tokens, VOCAB_TOKENS)
