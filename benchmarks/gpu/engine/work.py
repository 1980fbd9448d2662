"""Conversations that share prefixes and go on, and the truth of their answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from engine.engine import Request
from engine.model import Model

__all__ = ["Conversations", "Talk", "num_wrong"]

_VOCABULARY = 32_000


@dataclass(frozen=True)
class Talk:
    """Lengths in tokens, each from the first to the second.

    Attributes:
        prefix: of what conversations share.
        turn: of what is asked each time.
        answer: at most.
        num_prefixes, num_kept: shared prefixes, and conversations that may go on.
        longest: of a prompt; a conversation beyond it ends.
    """

    prefix: tuple[int, int]
    turn: tuple[int, int]
    answer: tuple[int, int]
    num_prefixes: int
    num_kept: int
    longest: int


class Conversations:
    """Prompts; half of them continue what was answered before."""

    def __init__(self, talk: Talk, seed: int) -> None:
        self._talk, self._rng = talk, np.random.default_rng(seed)
        self._prefixes = [self._tokens(*talk.prefix) for _ in range(talk.num_prefixes)]
        self._kept: list[np.ndarray] = []
        self._number = 0

    def next(self) -> Request:
        """Return another request."""
        talk, rng = self._talk, self._rng
        history = self._prefixes[int(rng.integers(len(self._prefixes)))]
        if self._kept and rng.random() < 0.5:
            history = self._kept[int(rng.integers(len(self._kept)))]
        prompt = np.concatenate([history, self._tokens(*talk.turn)])[: talk.longest]
        self._number += 1
        most_new = int(rng.integers(talk.answer[0], talk.answer[1] + 1))
        return Request(f"r{self._number}", prompt.astype(np.int32), most_new)

    def took(self, request: Request) -> None:
        """Note an answer, so that its conversation may go on."""
        tokens = request.tokens
        if len(tokens) < self._talk.longest - self._talk.turn[1]:
            self._kept.append(tokens)
            if len(self._kept) > self._talk.num_kept:
                del self._kept[int(self._rng.integers(len(self._kept)))]

    def _tokens(self, least: int, most: int) -> np.ndarray:
        count = int(self._rng.integers(least, most + 1))
        return self._rng.integers(0, _VOCABULARY, count).astype(np.int32)


def num_wrong(model: Model, requests: list[Request]) -> int:
    """Return how many answers differ from those of prompts computed at once."""
    return sum(not _is_right(model, request) for request in requests)


def _is_right(model: Model, request: Request) -> bool:
    """Compare each step's state, given the tokens before it."""
    sequence = request.tokens[:-1].astype(np.int64)
    tokens = torch.from_numpy(sequence).to(model.device)
    states = model.recompute(tokens, len(request.answer))
    answer, digests = model.pick(states).tolist(), model.digest(states).tolist()
    return bool(answer == request.answer and digests == request.digests)
