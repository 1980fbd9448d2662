"""Load or recompute: how much of what was found is worth bringing.

The candidates are the beginnings of the found run that end where the tier changes
(inside one tier every further page costs less to load than the pages before it, and
more to recompute). For each, the time saved is that of the pass over the whole rest
of the prompt minus that of the pass over what would be left, so the overhead of a
pass, which is paid either way, cancels. No constant says how few pages are not worth
a load: it follows from the link's latency.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import UInt8s
from sgl_tiered.cost.model import CostModel

__all__ = ["Choice", "Planner"]

CHEAPER_LOAD = "loading is cheaper"
CHEAPER_RECOMPUTE = "recomputing is cheaper"
ALWAYS = "load_policy is always"
NEVER = "load_policy is never"
TRIAL = "recomputing seems cheaper, and a trial of the load is due"

_TRIAL_FACTOR = 4.0
"""A trial may be predicted to take this many times what it saves, and no more."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How many pages to load, and what it was weighed against.

    Attributes:
        num_pages: pages to load from the front of the run; 0 means recompute.
        load_s: predicted time of the load; of all found pages where ``num_pages`` is 0.
        recompute_s: predicted time to compute the same tokens.
        reason: one clause.
    """

    num_pages: int
    load_s: float
    recompute_s: float
    reason: str


class Planner:
    """Chooses by predicted time, but for trials of a link that looks slow.

    Depends on nothing but its arguments, the costs and the number of earlier choices.

    Args:
        cost: seconds to load and to recompute.
        layout: bytes and tokens of a page.
        load_policy: ``auto``, ``always`` or ``never``.
    """

    def __init__(self, cost: CostModel, layout: PageLayout, load_policy: str) -> None:
        self._cost = cost
        self._layout = layout
        self._load_policy = load_policy

    def choose(self, tiers: UInt8s, first_page: int, num_tokens: int) -> Choice:
        """Decide for one run.

        Args:
            tiers: fastest ready tier of each found page, at least one.
            first_page: pages of the prompt that the device already has.
            num_tokens: tokens of the whole prompt.
        """
        page_tokens = self._layout.page_tokens
        page_bytes = self._layout.page_bytes
        first_token = first_page * page_tokens
        # One token at least is computed after any hit: its logits are needed.
        total = max(num_tokens, first_token + len(tiers) * page_tokens + 1)
        recompute_s = self._cost.recompute_s
        whole_s = recompute_s(first_token, total - first_token)

        bytes_from: dict[TierId, int] = {}
        start = 0
        best = Choice(0, 0.0, 0.0, CHEAPER_RECOMPUTE)
        last = best
        for num_pages in _run_ends(tiers):
            tier = TierId(int(tiers[num_pages - 1]))
            bytes_from[tier] = (
                bytes_from.get(tier, 0) + (num_pages - start) * page_bytes
            )
            start = num_pages
            load_s = 0.0
            for source, num_bytes in bytes_from.items():
                load_s += self._cost.load_s(source, num_bytes)
            loaded = first_token + num_pages * page_tokens
            saved_s = whole_s - recompute_s(loaded, total - loaded)
            last = Choice(num_pages, load_s, saved_s, CHEAPER_LOAD)
            if saved_s - load_s > best.recompute_s - best.load_s:
                best = last
        if self._load_policy == "always":
            return Choice(last.num_pages, last.load_s, last.recompute_s, ALWAYS)
        if self._load_policy == "never":
            return Choice(0, last.load_s, last.recompute_s, NEVER)
        if best.num_pages < last.num_pages and self._is_trial(last, tiers):
            return Choice(last.num_pages, last.load_s, last.recompute_s, TRIAL)
        if not best.num_pages:
            return Choice(0, last.load_s, last.recompute_s, CHEAPER_RECOMPUTE)
        return best

    def _is_trial(self, whole: Choice, tiers: UInt8s) -> bool:
        """Whether to load all that was found although it seems the slower way."""
        if whole.load_s > _TRIAL_FACTOR * whole.recompute_s:
            return False
        return self._cost.trial_due(TierId(int(tiers[-1])))


def _run_ends(tiers: UInt8s) -> list[int]:
    """Return after how many pages each run of equal tiers ends."""
    # bytes.lstrip finds the end of a run in C, faster than array comparisons.
    rest = tiers.tobytes()
    ends = []
    while rest:
        rest = rest.lstrip(rest[:1])
        ends.append(len(tiers) - len(rest))
    return ends
