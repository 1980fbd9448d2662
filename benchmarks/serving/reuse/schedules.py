"""What is sent: schedules as data, the same for every system."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from sgl_tiered_workloads.sessions import (
    PlannedRequest,
    cyclic_working_set,
    no_reuse,
    random_tokens,
)
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

__all__ = [
    "FULL",
    "NORMAL",
    "PAGE_SIZE",
    "QUICK",
    "HitSchedule",
    "Scale",
    "fresh_run",
    "set_rounds",
]

PAGE_SIZE = 16
PROMPT_TOKENS = 2000
HIT_PROMPT_TOKENS = 6000
HIT_CACHED_TOKENS = 5984
"""The largest whole pages of 16 that leave a token to compute."""
ANSWER_TOKENS = 8
HIT_ANSWER_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        pools: working sets, in device pools.
        rounds: passes over each working set that may hit, after the first.
        host_pools: host memory of the systems without a disk, in device pools.
        beyond_pools: the working set beyond host memory.
        small_host_pools: that host memory.
        hits: hits of each kind per system.
    """

    pools: tuple[float, ...]
    rounds: int
    host_pools: int
    beyond_pools: float
    small_host_pools: int
    hits: int


NORMAL = Scale((4, 8), 1, 20, 8, 4, 54)
FULL = Scale((0.5, 4, 16), 5, 20, 16, 4, 200)
QUICK = Scale((0.5, 1.5), 1, 3, 2.5, 2, 6)


def set_rounds(
    pool_tokens: int, num_pools: float, num_rounds: int
) -> list[list[PlannedRequest]]:
    """Return passes over a working set; the first finds it cold."""
    generator = np.random.default_rng([1, round(num_pools * 100)])
    requests = cyclic_working_set(
        pool_tokens,
        num_pools,
        PROMPT_TOKENS,
        ANSWER_TOKENS,
        num_rounds,
        generator,
        VOCAB_TOKENS,
    )
    size = len(requests) // num_rounds
    return [requests[start : start + size] for start in range(0, len(requests), size)]


class HitSchedule:
    """Three long prompts in turn, so that two others pass between two uses of one.

    Two of them are more than the device pool: when a prompt comes again, nothing of it
    is left on the device. Plain SGLang, whose device hit is the baseline, gets one of
    them again and again.
    """

    def __init__(self, num_hits: int, kind: str) -> None:
        generator = np.random.default_rng(2)
        self._prompts = [
            random_tokens(generator, HIT_PROMPT_TOKENS, VOCAB_TOKENS) for _ in range(3)
        ]
        self._kind = kind
        self.num_hits = num_hits

    def cold(self) -> list[PlannedRequest]:
        """Return the requests that bring the prompts in, and one more use of each."""
        return [
            PlannedRequest(f"{name}.p{index}", prompt, HIT_ANSWER_TOKENS)
            for name in (f"{self._kind}.cold", f"{self._kind}.warm")
            for index, prompt in enumerate(self._prompts)
        ]

    def hit(self, number: int, same: bool = False) -> PlannedRequest:
        """Return a hit; ``same`` for the one prompt that stays on plain's device."""
        prompt = self._prompts[0 if same else number % 3]
        return PlannedRequest(f"{self._kind}.hit{number}", prompt, HIT_ANSWER_TOKENS)

    def every(self) -> list[PlannedRequest]:
        """Return all requests in order, for the reference."""
        return self.cold() + [self.hit(number) for number in range(self.num_hits)]


def fresh_run(number: int, num_prompts: int) -> list[PlannedRequest]:
    """Return one run of prompts that never come again."""
    generator = np.random.default_rng([3, number])
    requests = no_reuse(
        num_prompts, PROMPT_TOKENS, ANSWER_TOKENS, generator, VOCAB_TOKENS
    )
    return [replace(item, key=f"run{number}.{item.key}") for item in requests]
