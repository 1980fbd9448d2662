"""Whether what a tiered server answers is what plain SGLang answers."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sgl_tiered_workloads.gate import (
    Spread,
    check_equality,
    measure_spread,
    widest_spread,
)
from sgl_tiered_workloads.records import RequestRecord

from tests.scenarios.scenario_support import SPREAD
from tests.soak.load import ROUNDS_BACK, Kind, Planned
from tests.soak.servers import PAGE

__all__ = ["Judge", "note"]

_MAX_SHOWN = 10

Answers = Mapping[str, RequestRecord]


def note(text: str) -> None:
    """Say how far it is, and what is wrong."""
    print(text, file=sys.stderr, flush=True)


class Judge:
    """Compares the tiered server's answers with plain SGLang's, round by round.

    Attributes:
        wrong: differences that plain SGLang's own spread does not explain.
        judged: answers that were compared.
        errors: failed requests by server.
        reused: prompt tokens of the tiered server by the tier that had them.
        spread: how far plain SGLang was seen to be from itself; never less than what
            the scenarios allow it.
    """

    def __init__(self) -> None:
        self.wrong = self.judged = 0
        self.errors: Counter[str] = Counter()
        self.reused: Counter[str] = Counter()
        self.spread: Spread = SPREAD
        self._former: deque[Answers] = deque(maxlen=ROUNDS_BACK[1])

    def take(self, planned: Sequence[Planned], answers: Mapping[str, Answers]) -> None:
        """Take a round's answers.

        Args:
            planned: the round.
            answers: by server, then by id; ``plain`` and ``tiered`` are compared.
        """
        for name, found in answers.items():
            for record in found.values():
                if record.error is not None:
                    self.errors[name] += 1
                    if self.errors[name] <= _MAX_SHOWN:
                        note(f"{name}: {record.key}: {record.error}")
        plain, tiered = answers["plain"], answers["tiered"]
        whole = [each for each in planned if _is_whole(each, plain, tiered)]
        if not whole:
            return
        keys = [each.request.key for each in whole]
        for key in keys:
            self.reused.update(tiered[key].cached_by_tier)
        self._widen(whole, plain)
        result = check_equality(
            [plain[key] for key in keys],
            [tiered[key] for key in keys],
            page_size=PAGE,
            spread=self.spread,
            forced=False,
        )
        self.judged += len(keys)
        self.wrong += len(result.differences)
        if not result.passed:
            note(result.summary())
        self._former.append(plain)

    def _widen(self, whole: Sequence[Planned], plain: Answers) -> None:
        """Measure plain SGLang against itself on the prompts that came again."""
        known = {key: each for one in self._former for key, each in one.items()}
        pairs = [
            (known[each.again_of], plain[each.request.key])
            for each in whole
            if each.kind is Kind.AGAIN
            and each.again_of in known
            and known[each.again_of].error is None
        ]
        if pairs:
            before = [replace(old, key=new.key) for old, new in pairs]
            again = measure_spread(before, [new for _, new in pairs])
            self.spread = widest_spread([self.spread, again])


def _is_whole(planned: Planned, plain: Answers, tiered: Answers) -> bool:
    if not planned.is_answered:
        return False
    key = planned.request.key
    return plain[key].error is None and tiered[key].error is None
