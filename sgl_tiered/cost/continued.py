"""What share of answers a later prompt continues: the chance that keeping one pays.

An answer counts as continued once a prompt begins with all its whole pages, and as left
once it is older than those that were continued, by far; a later prompt sets that right.
An answer's age is the number of those that ended after it. A prompt is looked up in one
walk over its tokens, however many answers are remembered: a running digest is compared
at each length that one of them has.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, deque

import numpy as np

from sgl_tiered.core.plans import Int32s

__all__ = ["ContinuedShare"]

_MOST = 1024
_TRUST = 16.0
"""Answers that count as continued before anything is known: at first all go back."""
_WINDOW = 1024.0
"""Answers after which older ones count half."""
_FIRST_AGE = 8.0
"""Mean age of a continued answer, before one is known."""
_SHARE_OF_LAST = 1 / 8
_PATIENCE = 8.0
"""Times the mean age; of exponential ages one in 3,000 is older."""
_LEAST_PATIENCE = 16


class ContinuedShare:
    """Learned from answers that end and prompts that come; one thread.

    Args:
        most: answers remembered at a time.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        # By key, in the order of their ends: tokens, and the number of its end.
        self._ended: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._num_ended = 0
        # In that order: those that do not count as left yet, and perhaps some more.
        self._hoped: deque[tuple[bytes, int]] = deque()
        self._left_keys: set[bytes] = set()
        self._age = _FIRST_AGE
        self._continued = _TRUST
        self._left = 0.0

    @property
    def share(self) -> float:
        """Continued answers of all whose fate is known; 1 at first."""
        return self._continued / (self._continued + self._left)

    def ended(self, namespace: bytes, tokens: Int32s) -> None:
        """Note prompt and answer of a request, their whole pages.

        Args:
            namespace: digest of whose they are.
            tokens: int32 [n].
        """
        key = _digest(namespace, tokens)
        if key in self._ended:
            self._forget(key)
        self._num_ended += 1
        self._ended[key] = len(tokens), self._num_ended
        self._lengths[len(tokens)] += 1
        self._hoped.append((key, self._num_ended))
        self._give_up()
        if len(self._ended) > self._most:
            self._forget(next(iter(self._ended)))

    def asked(self, namespace: bytes, tokens: Int32s) -> bool:
        """Note a prompt; return whether it continues an answer.

        Args:
            namespace: digest of whose it is.
            tokens: int32 [n].
        """
        running = hashlib.blake2b(namespace, digest_size=16)
        found, start = [], 0
        for length in sorted(self._lengths):
            if length > len(tokens):
                break
            running.update(np.ascontiguousarray(tokens[start:length]).data)
            start = length
            key = running.digest()
            if self._ended.get(key, _NOBODY)[0] == length:
                found.append(key)
        for key in found:
            age = self._num_ended - self._ended[key][1]
            if key in self._left_keys:
                self._left = max(self._left - 1.0, 0.0)
            self._forget(key)
            self._age += (age - self._age) * _SHARE_OF_LAST
            self._continued += 1.0
            self._fade()
        return bool(found)

    def clear(self) -> None:
        """Forget the answers: what they were is to be found no more."""
        self._ended.clear()
        self._lengths.clear()
        self._hoped.clear()
        self._left_keys.clear()

    @property
    def _patience(self) -> float:
        """The age from which on an answer counts as left."""
        return min(max(_PATIENCE * self._age, _LEAST_PATIENCE), self._most)

    def _give_up(self) -> None:
        """Count as left what is too old by now."""
        while self._hoped and self._num_ended - self._hoped[0][1] >= self._patience:
            key, number = self._hoped.popleft()
            if self._ended.get(key, _NOBODY)[1] == number:
                self._left_keys.add(key)
                self._left += 1.0
                self._fade()

    def _forget(self, key: bytes) -> None:
        length, _ = self._ended.pop(key)
        self._left_keys.discard(key)
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]

    def _fade(self) -> None:
        if self._continued + self._left > _WINDOW:
            self._continued *= 0.5
            self._left *= 0.5


_NOBODY = -1, -1


def _digest(namespace: bytes, tokens: Int32s) -> bytes:
    told = hashlib.blake2b(namespace, digest_size=16)
    told.update(np.ascontiguousarray(tokens).data)
    return told.digest()
