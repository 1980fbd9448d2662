"""What is sent: prefixes that come again with new tails, the same for every arm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens

__all__ = ["FULL", "NORMAL", "PAGE", "QUICK", "Scale", "Schedule"]

PAGE = 16
PREFIX_TOKENS, TAIL_TOKENS = 2_560, 32
ANSWER_TOKENS, GATE_ANSWER_TOKENS = 2, 8
_KINDS = ("alone", "gate", "hit", "room")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        hits: reloads that count, of each server.
        warm: reloads before them that do not count.
        repeats: servers of each arm, there and back.
        min_hits: reloads of an arm over all its servers; with fewer it has no figure.
        prefixes: that the reloads take in turn.
        alone: prompts computed on plain SGLang, to set the link by.
        gate_prefixes: prefixes of the answers that are compared.
        gate_turns: how often each of those comes again.
        room_prefixes: reloads whose rows on the device are counted.
        is_quick: a smoke run: no figure of it means anything.
    """

    hits: int
    warm: int
    repeats: int
    min_hits: int
    prefixes: int = 4
    alone: int = 5
    gate_prefixes: int = 4
    gate_turns: int = 2
    room_prefixes: int = 2
    is_quick: bool = False


NORMAL = Scale(hits=24, warm=4, repeats=2, min_hits=40)
FULL = Scale(hits=40, warm=4, repeats=4, min_hits=40)
QUICK = Scale(4, 1, 1, 1, 2, 2, 2, 1, 1, is_quick=True)


class Schedule:
    """Prompts of random tokens; equal arguments give equal prompts.

    Args:
        vocabulary: of the model.
        seed: of all prompts.
        prefix_tokens: whole pages.
        tail_tokens: new ones behind a prefix.
    """

    def __init__(
        self,
        vocabulary: int,
        seed: int = 0,
        prefix_tokens: int = PREFIX_TOKENS,
        tail_tokens: int = TAIL_TOKENS,
    ) -> None:
        if prefix_tokens % PAGE:
            raise ValueError(f"{prefix_tokens} tokens are no whole pages of {PAGE}")
        self.prefix_tokens = prefix_tokens
        self.tail_tokens = tail_tokens
        self._vocabulary = vocabulary
        self._seed = seed

    def request(self, kind: str, prefix: int, turn: int) -> PlannedRequest:
        """Return a prefix with a tail that no other request has.

        Args:
            kind: ``alone``, ``gate``, ``hit`` or ``room``; each has its own prefixes.
            prefix: its number.
            turn: the first, 0, brings the prefix in.
        """
        place = _KINDS.index(kind)
        drawn = self._draw(self.prefix_tokens, place, prefix)
        tail = self._draw(self.tail_tokens, place, prefix, turn + 1)
        num_new = GATE_ANSWER_TOKENS if kind == "gate" else ANSWER_TOKENS
        return PlannedRequest(f"{kind}.p{prefix}.t{turn}", drawn + tail, num_new)

    def turns(
        self, kind: str, num_prefixes: int, num_requests: int, first: int = 0
    ) -> list[PlannedRequest]:
        """Return requests over prefixes that come in turn, from number ``first`` on."""
        return [
            self.request(kind, number % num_prefixes, number // num_prefixes)
            for number in range(first, first + num_requests)
        ]

    def _draw(self, num_tokens: int, *which: int) -> tuple[int, ...]:
        generator = np.random.default_rng([self._seed, *which])
        return random_tokens(generator, num_tokens, self._vocabulary)
