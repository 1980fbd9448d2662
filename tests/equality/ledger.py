"""Judges the answers of one world, and counts what they show.

Each answer stands beside plain SGLang's to the same prompt, and the gate judges all of
a world at once: it follows which pages were computed twice, so that bits are asked for
wherever both sides did the same computation, and allows plain SGLang's own spread
elsewhere. Whether an answer *is* equal bit for bit is counted apart from whether it has
to be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sgl_tiered_workloads.gate import (
    NegativeControlError,
    check_equality,
    negative_control,
)
from sgl_tiered_workloads.records import RequestRecord

from tests.cluster.cluster_support import begun
from tests.equality.plan import TIERS
from tests.equality.reference import PAGE, Reference

__all__ = ["Ledger", "Verdict", "is_caught", "tiers_of"]

SLACK = 2.0
"""As in the tests with free concurrency: batches are drawn anew in each world, and the
spread comes from one sample of them."""
_MAX_TOLD = 12


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of the answers of one world.

    Attributes:
        judged: answers, parts of broken streams not counted.
        compared: those that reused pages from below the device.
        exact: of the compared ones, equal bit for bit in tokens and logprobs.
        strict: answers of which that was demanded.
        parts: broken streams whose beginning was judged.
        wrong: answers that the gate does not accept.
        errors: requests that failed, though they must not.
        by_tier: compared answers by tier; one with pages of two tiers counts for both.
        exact_by_tier: exact ones of them.
        split: compared answers whose front was computed while their back was read.
        told: about each wrong answer and error, at most twelve.
    """

    judged: int
    compared: int
    exact: int
    strict: int
    parts: int
    wrong: int
    errors: int
    by_tier: dict[str, int]
    exact_by_tier: dict[str, int]
    split: int
    told: list[str]


@dataclass(frozen=True, slots=True)
class _Entry:
    """An answer beside plain SGLang's; ``is_part`` of a stream that broke off."""

    ours: RequestRecord
    theirs: RequestRecord
    is_part: bool = False

    @property
    def is_equal(self) -> bool:
        ours, theirs = self.ours, self.theirs
        return (ours.output, ours.top_logprobs) == (theirs.output, theirs.top_logprobs)


@dataclass(slots=True)
class Ledger:
    """The answers of one world, in the order in which they were asked for.

    Args:
        reference: plain SGLang's answers.
    """

    reference: Reference
    _entries: list[_Entry] = field(default_factory=list)
    _unlike: set[int] = field(default_factory=set)
    _errors: list[str] = field(default_factory=list)
    _asked: set[str] = field(default_factory=set)

    def add(
        self, phase: str, answers: Sequence[RequestRecord], *, like_plain: bool
    ) -> None:
        """Enter answers.

        Args:
            phase: names them in reports.
            answers: with the keys of the reference.
            like_plain: they were asked for one at a time, of a server that nothing was
                done to: computed as plain SGLang did, they have its bits.
        """
        for answer in answers:
            if answer.error is not None:
                self._errors.append(f"{phase}: {answer.key}: {answer.error}")
            else:
                self._enter(phase, self._known(answer), answer, like_plain=like_plain)
            # Of one that failed, some pages may be there nevertheless.
            self._asked.add(answer.key)

    def add_broken(self, phase: str, answers: Sequence[RequestRecord]) -> None:
        """Enter answers of a server that was killed: whole ones, and what had come."""
        whole = [answer for answer in answers if answer.error is None]
        self.add(phase, whole, like_plain=False)
        for answer in answers:
            if answer.error is not None and answer.output:
                ours, theirs = begun(self._known(answer), answer)
                self._enter(phase, ours, theirs, like_plain=False, is_part=True)
            self._asked.add(answer.key)

    def verdict(self) -> Verdict:
        """Judge all that was entered."""
        result = check_equality(
            [entry.ours for entry in self._entries],
            [entry.theirs for entry in self._entries],
            page_size=PAGE,
            spread=self.reference.spread,
            min_exact_fraction=0.0,
            slack=SLACK,
            unlike=self._unlike,
        )
        wrong: dict[str, str] = {}
        for found in result.differences if self._entries else ():
            wrong.setdefault(found.key, f"{found.key}: {found.reason}")
        whole = [entry for entry in self._entries if not entry.is_part]
        compared = [entry for entry in whole if tiers_of(entry.theirs)]
        exact = [entry for entry in compared if entry.is_equal]
        return Verdict(
            judged=len(whole),
            compared=len(compared),
            exact=len(exact),
            strict=result.num_exact,
            parts=len(self._entries) - len(whole),
            wrong=len(wrong),
            errors=len(self._errors),
            by_tier=_by_tier(compared),
            exact_by_tier=_by_tier(exact),
            split=sum(entry.theirs.is_split for entry in compared),
            told=[*wrong.values(), *self._errors][:_MAX_TOLD],
        )

    def _known(self, answer: RequestRecord) -> RequestRecord:
        """Return plain SGLang's answer, of the first time or of the later ones."""
        was_asked = answer.key in self._asked
        known = self.reference.warm if was_asked else self.reference.cold
        return known[answer.key]

    def _enter(
        self,
        phase: str,
        ours: RequestRecord,
        theirs: RequestRecord,
        *,
        like_plain: bool,
        is_part: bool = False,
    ) -> None:
        place = len(self._entries)
        named: dict[str, Any] = {"key": f"{place} {phase}: {ours.key}", "order": place}
        self._entries.append(
            _Entry(replace(ours, **named), replace(theirs, **named), is_part)
        )
        if not like_plain:
            self._unlike.add(place)


def tiers_of(record: RequestRecord) -> list[str]:
    """Return the tiers below the device that an answer has pages of."""
    return [tier for tier in TIERS if record.cached_by_tier.get(tier, 0) > 0]


def is_caught(
    reference: Reference, known: Sequence[RequestRecord], wrong: Sequence[RequestRecord]
) -> bool:
    """Return whether the gate sees that answers were made with wrong pages.

    By the rule that allows most: as if nothing had been computed alike.
    """
    result = check_equality(
        known,
        wrong,
        page_size=PAGE,
        spread=reference.spread,
        forced=False,
        slack=SLACK,
    )
    try:
        negative_control({"planted": result})
    except NegativeControlError:
        return False
    return True


def _by_tier(entries: Sequence[_Entry]) -> dict[str, int]:
    counts = Counter(tier for entry in entries for tier in tiers_of(entry.theirs))
    return {tier: counts[tier] for tier in TIERS if counts[tier]}
