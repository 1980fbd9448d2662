"""What share of answers a later prompt continues: the chance that keeping one pays.

An answer counts as continued once a prompt begins with all its whole pages, and as left
when so many ended after it that nothing waits for it any more. A prompt is looked up in
one walk over its tokens, however many answers are remembered: a running digest is
compared at each length that one of them has.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict

import numpy as np

from sgl_tiered.core.plans import Int32s

__all__ = ["ContinuedShare"]

_MOST = 1024
_TRUST = 16.0
"""Answers that count as continued before anything is known: at first all go back."""
_WINDOW = 1024.0
"""Answers after which older ones count half."""


class ContinuedShare:
    """Learned from answers that end and prompts that come; one thread.

    Args:
        most: answers remembered at a time.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._ended: OrderedDict[bytes, int] = OrderedDict()
        self._lengths: Counter[int] = Counter()
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
            self._ended.move_to_end(key)
            return
        self._ended[key] = len(tokens)
        self._lengths[len(tokens)] += 1
        if len(self._ended) > self._most:
            self._forget(next(iter(self._ended)))
            self._left += 1.0
            self._fade()

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
            if self._ended.get(key) == length:
                found.append(key)
        for key in found:
            self._forget(key)
            self._continued += 1.0
            self._fade()
        return bool(found)

    def clear(self) -> None:
        """Forget the answers: what they were is to be found no more."""
        self._ended.clear()
        self._lengths.clear()

    def _forget(self, key: bytes) -> None:
        length = self._ended.pop(key)
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]

    def _fade(self) -> None:
        if self._continued + self._left > _WINDOW:
            self._continued *= 0.5
            self._left *= 0.5


def _digest(namespace: bytes, tokens: Int32s) -> bytes:
    told = hashlib.blake2b(namespace, digest_size=16)
    told.update(np.ascontiguousarray(tokens).data)
    return told.digest()
