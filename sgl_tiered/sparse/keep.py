"""Which tokens of a prefix stay, layer by layer, when it is loaded to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.errors import ConfigError

__all__ = ["KeepFacts", "KeepPolicy", "KeepShare", "KeepWrong"]

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

SINKS = 4
"""The first tokens of a prompt: attention rests there where it has nothing to read
(arXiv:2309.17453), and without them it goes astray."""
RECENT = 64
"""The last tokens before what is computed next: no query far off has judged them."""


@dataclass(frozen=True, slots=True, eq=False)
class KeepFacts:
    """What is known of a span of a prompt that is to be loaded.

    Attributes:
        first_token: position in the prompt of the span's first token.
        num_tokens: of the span.
        mass: float32 [num_layers, num_tokens], the mean share of their attention that
            later queries gave to a token; NaN where no query was asked.
    """

    first_token: int
    num_tokens: int
    mass: Float32s


class KeepPolicy(Protocol):
    """Chooses; a pure function of the facts."""

    def keep(self, facts: KeepFacts) -> list[Int64s]:
        """Return per layer the tokens of the span that stay, ascending, from 0."""
        ...


class KeepShare:
    """The same share of every layer: the tokens that attention read most.

    The first tokens of the prompt and the last of the span always stay, and so do
    those of which nothing is known, even where that is more than the share.

    Args:
        share: of a layer's tokens, above 0 and at most 1.
        sinks: first tokens of a prompt.
        recent: last tokens of a span.

    Raises:
        ConfigError: the share is outside.
    """

    def __init__(
        self, share: float, *, sinks: int = SINKS, recent: int = RECENT
    ) -> None:
        if not 0.0 < share <= 1.0:
            raise ConfigError(
                "the share of tokens to keep",
                f"is {share}",
                "give a number above 0 and at most 1",
            )
        self._share = share
        self._sinks = sinks
        self._recent = recent

    def keep(self, facts: KeepFacts) -> list[Int64s]:
        """Return per layer the tokens that stay; O(tokens) each."""
        num_tokens = facts.num_tokens
        place = np.arange(num_tokens)
        always = (facts.first_token + place < self._sinks) | (
            place >= num_tokens - self._recent
        )
        count = int(np.ceil(self._share * num_tokens))
        return [_best(np.where(always, np.inf, row), count) for row in facts.mass]


class KeepWrong:
    """Keeps what attention read least and drops what is recent: for tests only.

    A gate that a good choice passes has to fail with this one.

    Args:
        share: of a layer's tokens.
    """

    def __init__(self, share: float) -> None:
        self._share = share

    def keep(self, facts: KeepFacts) -> list[Int64s]:
        """Return per layer the first tokens of the span but the very first ones."""
        num_tokens = facts.num_tokens
        count = max(1, int(np.ceil(self._share * num_tokens)))
        mass = np.where(np.isnan(facts.mass), np.inf, facts.mass).copy()
        mass[:, -min(RECENT, num_tokens // 2) :] = np.inf
        chosen = np.argsort(mass, axis=1, kind="stable")[:, :count]
        return [np.sort(row).astype(np.int64) for row in chosen]


def _best(mass: Float32s, count: int) -> Int64s:
    """Return the places of the ``count`` largest values, and of all inf and NaN."""
    worth = np.where(np.isnan(mass), np.inf, mass)
    forced = np.isinf(worth)
    left = count - int(np.count_nonzero(forced))
    if left > 0 and left < int(np.count_nonzero(~forced)):
        rest = np.flatnonzero(~forced)
        # Stable, so that equal masses give the same choice everywhere.
        best = rest[np.argsort(-worth[rest], kind="stable")[:left]]
        forced[best] = True
    elif left > 0:
        forced[:] = True
    return np.flatnonzero(forced).astype(np.int64)
