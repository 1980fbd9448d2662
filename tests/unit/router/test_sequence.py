"""Sequence numbers of a publisher."""

from __future__ import annotations

import pytest

from sgl_tiered.router.sequence import SequenceTracker, Verdict

APPLY, DUPLICATE, GAP, RESTART = Verdict


def judged(tracker: SequenceTracker, *numbers: int) -> list[Verdict]:
    """Judge each; apply what may be applied, resync by dropping."""
    verdicts = []
    for number in numbers:
        verdict = tracker.judge(number)
        verdicts.append(verdict)
        if verdict is RESTART:
            tracker.reset()
            tracker.judge(number)
        if verdict is not DUPLICATE:
            tracker.done(number)
    return verdicts


@pytest.mark.parametrize(
    ("numbers", "verdicts"),
    [
        ((0, 1, 2), [APPLY, APPLY, APPLY]),
        ((5, 6), [GAP, APPLY]),  # joined late
        ((0, 2, 3), [APPLY, GAP, APPLY]),
        ((0, 1, 0, 1), [APPLY, APPLY, RESTART, APPLY]),
        ((3, 3), [GAP, RESTART]),
    ],
)
def test_numbers_say_what_to_do(numbers: tuple[int, ...], verdicts: list[Verdict]):
    """In a row, late, with a hole, and begun anew."""
    assert judged(SequenceTracker(), *numbers) == verdicts


def test_what_a_replay_brought_is_not_applied_again() -> None:
    """Live batches that a replay overtook are duplicates, not a new publisher."""
    tracker = SequenceTracker()
    assert judged(tracker, 0) == [APPLY]
    assert tracker.judge(3) is GAP
    for number in (1, 2, 3, 4, 5):
        tracker.done(number)
    assert judged(tracker, 4, 5, 6) == [DUPLICATE, DUPLICATE, APPLY]


def test_a_broken_connection_makes_the_expected_number_suspect() -> None:
    """A publisher that began anew may have reached just that number."""
    tracker = SequenceTracker()
    judged(tracker, 0, 1)
    tracker.suspect()
    assert tracker.judge(2) is RESTART


def test_a_connection_before_the_first_batch_is_not_suspect() -> None:
    """There is nothing to lose yet."""
    tracker = SequenceTracker()
    tracker.suspect()
    assert tracker.judge(0) is APPLY
