"""Sequence numbers of one publisher of events: what to do with the next batch.

SGLang numbers its batches from 0 and drops what a subscriber is too slow for, or not
connected for. A tracker says whether the next one can be applied, was applied already
(a replay overtook it), leaves a gap, or comes from a publisher that began anew. Not
thread-safe; one owner.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["SequenceTracker", "Verdict"]


class Verdict(Enum):
    """What a batch's number says."""

    APPLY = "apply"
    DUPLICATE = "duplicate"
    GAP = "gap"
    RESTART = "restart"


class SequenceTracker:
    """The numbers of one publisher.

    Attributes:
        is_suspect: the connection broke since the last number that came live.
        applied: the last number that was applied; -1 before the first. A subscriber
            that joins late therefore begins with a gap, as it should.
    """

    def __init__(self) -> None:
        self.applied = -1
        self._live = -1
        self.is_suspect = False

    def reset(self) -> None:
        """Forget all numbers: a publisher of which nothing is known."""
        self.applied = -1
        self._live = -1
        self.is_suspect = False

    def rewind(self) -> None:
        """Note that nothing counts as applied: all is to come again, by a replay.

        What came live stays known, so that the next live number is none of a restart.
        """
        self.applied = -1

    def suspect(self) -> None:
        """Note that the connection broke, so that whoever comes next may be new.

        A publisher that began anew can have reached just the number that is expected;
        the number alone would then hide all that was lost.
        """
        self.is_suspect = self._live >= 0 or self.applied >= 0

    def judge(self, sequence: int) -> Verdict:
        """Return what to do with a batch that came live.

        After RESTART the caller resets; after GAP it resyncs; after APPLY it applies
        and calls ``done``.
        """
        if self.is_suspect or (0 <= sequence <= self._live):
            return Verdict.RESTART
        self._live = sequence
        if sequence <= self.applied:
            return Verdict.DUPLICATE
        return Verdict.APPLY if sequence == self.applied + 1 else Verdict.GAP

    def done(self, sequence: int) -> None:
        """Note that this batch was applied, live or from a replay."""
        self.applied = sequence
