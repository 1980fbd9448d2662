"""The decode phase of a batch: from everybody's first token to the first end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_tiered_workloads.records import RequestRecord

__all__ = ["LEAST_STEPS", "Window", "WindowError", "num_equal", "window_of"]

LEAST_STEPS = 8
"""In which all decode; fewer tell more of the edges than of a step."""


class WindowError(RuntimeError):
    """The requests were never, or hardly, all decoding at once."""


@dataclass(frozen=True, slots=True)
class Window:
    """The steps in which all requests of a batch decode.

    Attributes:
        seconds: from the last request's first token to the first last token.
        num_tokens: that arrived within, that at its begin not counted.
        num_steps: decode steps within.
    """

    seconds: float
    num_tokens: int
    num_steps: int

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second over the phase."""
        return self.num_tokens / self.seconds

    @property
    def step_s(self) -> float:
        """Mean time of a step of the whole batch."""
        return self.seconds / self.num_steps


def window_of(records: Sequence[RequestRecord]) -> Window:
    """Return the decode phase of requests that were sent together.

    Raises:
        WindowError: fewer than ``LEAST_STEPS`` steps have all of them.
    """
    begin_s = max(record.token_times_s[0] for record in records)
    first = min(records, key=lambda record: record.token_times_s[-1])
    end_s = first.token_times_s[-1]
    num_steps = _count(first, begin_s, end_s)
    if num_steps < LEAST_STEPS:
        raise WindowError(
            f"only {num_steps} steps have all of {len(records)} requests in them: the "
            "answers are too short for the time that the prompts take"
        )
    # Tokens of one step arrive one after the other: those of the last one count.
    late_s = end_s + (end_s - begin_s) / num_steps / 2
    num_tokens = sum(_count(record, begin_s, late_s) for record in records)
    return Window(end_s - begin_s, num_tokens, num_steps)


def num_equal(ours: Sequence[RequestRecord], theirs: Sequence[RequestRecord]) -> int:
    """Return how many answers have the same tokens, request by request."""
    return sum(
        one.output == other.output for one, other in zip(ours, theirs, strict=True)
    )


def _count(record: RequestRecord, begin_s: float, end_s: float) -> int:
    return sum(begin_s < time_s <= end_s for time_s in record.token_times_s)
