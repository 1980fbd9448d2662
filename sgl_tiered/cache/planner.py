"""Load, recompute, or compute the front while the back is read.

Every choice is by predicted seconds until the request's pass has ended. MemServe's
factors (section 5.3) enter so: prompt length and cached ratio through the pass over
what is left, location through each tier's link and what waits for it, batch size
through the pass and the loads of the requests admitted before into the same pass, page
size through the layout. SGLang admits one request after the other, so the decision for
a batch is made as its sequence: each request sees what the ones before it take.

What is weighed, for the first ``m`` of ``n`` found pages:

- a load before admission (disk): wait for the link, then latency and bytes;
- a load to the device (host, CXL): where it runs layer by layer under the pass, the
  longer of both plus the last layer's computation, else the sum. Where the link is the
  longer, there is a best ``m`` inside the run: its first pages come while the pages
  after them are computed;
- with ``can_split``, for pages on disk: a pass over the front at once, until it meets
  the back, which is read from its end; then a pass over the rest.

Pages that are held as activations cost the link their own bytes, and the device time to
rebuild KV from them, layer by layer as they come: the longer of the two counts.

The overhead of a pass is paid either way and cancels; a split pays it twice. No
constant says how few pages are not worth a load: it follows from the link's latency.

Waiting for a link costs the request that waits. A pass costs all that wait for the
device: where there are such, a second of it counts ``compute_weight`` times, that of a
load which it waits for as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import UInt8s, count_act
from sgl_tiered.cost.model import CostModel

__all__ = ["IDLE", "Choice", "Going", "PassFacts", "Planner", "Way", "weight_among"]

CHEAPER_LOAD = "loading is cheaper"
CHEAPER_RECOMPUTE = "recomputing is cheaper"
CHEAPER_SPLIT = "computing the front while the back is read is cheaper"
ALWAYS = "load_policy is always"
NEVER = "load_policy is never"
TRIAL = "recomputing seems cheaper, and a trial of the load is due"

_TRIAL_FACTOR = 4.0
"""A trial may be predicted to take this many times what it saves, and no more."""
_TRIAL_SHARE = 0.1
"""And this share of the pass over the whole prompt: it has to teach, not to hurt."""
_MOST_WEIGHT = 4
"""Of computing against waiting: nobody waits for a read longer than for so many times
what it saves."""
_MARGIN = 0.95
"""A plan is left, or a prompt split, where that is predicted to be 5 % faster: the
predictions are not better than that, and a split occupies the device."""


@dataclass(frozen=True, slots=True)
class PassFacts:
    """What is known of the links, and of the pass that a request would join.

    Attributes:
        wait_s: seconds until what was asked before has come over each link.
        compute_s: predicted time of the pass over what was admitted into it before.
        load_s: predicted time of the loads to the device admitted into it before.
        can_split: the engine can run a pass over the front of this prompt alone.
    """

    wait_s: Mapping[TierId, float] = field(default_factory=dict)
    compute_s: float = 0.0
    load_s: float = 0.0
    can_split: bool = False


IDLE = PassFacts()


def weight_among(num_waiting: int, *, is_busy: bool) -> float:
    """Return the weight of computing for one of the requests that wait.

    All that wait are held up by what is computed for one of them, and where the device
    has work meanwhile, nobody is held up by a wait for a link. The bound keeps that
    wait in proportion to what it saves.

    Args:
        num_waiting: requests in the queue, this one included.
        is_busy: the device has other work than what waits.
    """
    return float(min(max(num_waiting, 1), _MOST_WEIGHT)) if is_busy else 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """How many pages to load, and what it was weighed against.

    Attributes:
        num_pages: pages to load from the front of the run; 0 means recompute.
        load_s: predicted time of the load; of all found pages where ``num_pages`` is 0.
        recompute_s: predicted time to compute the same tokens.
        reason: one clause.
        wait_s: predicted time until the links are free for this load, part of neither.
        split_at: pages of the run that are loaded from memory or computed, in a pass of
            their own, before those from here on are loaded; 0 for no split.
        total_s: predicted time until the pass over the prompt has ended.
        alternative_s: the same without any load.
        rank_s: what it is chosen by: ``total_s``, time on the device weighted.
    """

    num_pages: int
    load_s: float
    recompute_s: float
    reason: str
    wait_s: float = 0.0
    split_at: int = 0
    total_s: float = 0.0
    alternative_s: float = 0.0
    rank_s: float = 0.0


class Way(IntEnum):
    """What to do about a read that has not ended when its request could run."""

    WAIT = 0
    SPLIT = 1
    GO = 2


@dataclass(frozen=True, slots=True)
class Going:
    """What to do now about a read under way.

    Attributes:
        way: wait for the rest, compute the front meanwhile, or go without the rest.
        compute_pages: with ``SPLIT``, pages to compute until both should meet.
        wait_s, go_s: predicted time until the prompt is computed either way.
    """

    way: Way
    compute_pages: int
    wait_s: float
    go_s: float


class Planner:
    """Chooses by predicted time, but for trials of a link that looks slow.

    Depends on nothing but its arguments, the costs, the weight of computing and the
    number of earlier choices.

    Args:
        cost: seconds to load and to recompute.
        layout: bytes and tokens of a page.
        load_policy: ``auto``, ``always`` or ``never``.
        overlaps: loads to the device run under the pass, layer by layer.
        act_page_bytes: bytes of a page as activations.
    """

    def __init__(
        self,
        cost: CostModel,
        layout: PageLayout,
        load_policy: str,
        *,
        overlaps: bool = False,
        act_page_bytes: int = 0,
    ) -> None:
        self._cost = cost
        self._layout = layout
        self._act_page_bytes = act_page_bytes
        self._load_policy = load_policy
        self._overlaps = overlaps
        self._compute_weight = 1.0
        # Of the bytes of pages in memory, what the load in question brings. Pages on
        # disk are read whole.
        self.load_share = 1.0

    @property
    def compute_weight(self) -> float:
        """What a second of computing counts, in seconds of one request's waiting.

        Set before a pass is put together, by ``weight_among``.
        """
        return self._compute_weight

    @compute_weight.setter
    def compute_weight(self, weight: float) -> None:
        assert weight >= 1.0, f"a second of computing takes one, not {weight}"
        self._compute_weight = weight

    @property
    def load_policy(self) -> str:
        """``auto``, ``always`` or ``never``; may be changed between two choices."""
        return self._load_policy

    @load_policy.setter
    def load_policy(self, policy: str) -> None:
        self._load_policy = policy

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._layout.page_tokens

    @property
    def may_leave(self) -> bool:
        """Whether predictions decide, and not a policy that always loads."""
        return self._load_policy == "auto"

    def load_s(self, tier: TierId, num_pages: int, num_act: int = 0) -> float:
        """Return the predicted time of a load of pages from one tier.

        Args:
            tier: the disk is read by whole slots, whatever they hold.
            num_pages: all of them.
            num_act: those of them that are activations.
        """
        whole = num_pages * self._layout.page_bytes
        if tier is TierId.DISK:
            return self._cost.load_s(tier, whole)
        if num_act:
            whole -= num_act * (self._layout.page_bytes - self._act_page_bytes)
        return self._cost.load_s(tier, int(self.load_share * whole))

    def rebuild_s(self, num_act: int) -> float:
        """Return the predicted time to rebuild pages, all layers."""
        if not num_act or self._cost.rebuild is None:
            return 0.0
        tokens = num_act * self._layout.page_tokens
        return self._layout.num_layers * self._cost.rebuild.kv_gen.seconds(tokens)

    def direct_s(
        self,
        tiers: UInt8s,
        kinds: UInt8s | None = None,
        staged: TierId | None = None,
    ) -> float:
        """Return the predicted time of loads from memory, and of rebuilding under them.

        Args:
            tiers: of each page.
            kinds: what each page is held as; None for KV.
            staged: whose link pages of the disk come over; None leaves them out.
        """
        load_s = 0.0
        for number, num_pages in enumerate(np.bincount(tiers).tolist()):
            tier = staged if number == TierId.DISK else TierId(number)
            if num_pages and tier is not None:
                num_act = 0 if kinds is None else count_act(kinds[tiers == number])
                load_s += self.load_s(tier, num_pages, num_act)
        return max(load_s, self.rebuild_s(count_act(kinds)))

    def compute_s(self, first_page: int, num_pages: int) -> float:
        """Return the predicted time of a pass over pages."""
        page = self._layout.page_tokens
        return self._cost.recompute_s(first_page * page, num_pages * page)

    def pass_s(self, compute_s: float, load_s: float) -> float:
        """Return the time of a pass with loads to the device."""
        if not self._overlaps:
            return compute_s + load_s
        # The last layer is computed once it has come; what is before that is hidden.
        last_layer_s = compute_s / self._layout.num_layers
        return max(compute_s, load_s + last_layer_s if load_s else 0.0)

    def service_s(
        self,
        tiers: UInt8s,
        first_page: int,
        num_tokens: int,
        kinds: UInt8s | None = None,
    ) -> float:
        """Return the time of a pass for one request alone, all its reads done.

        Args:
            tiers: of the pages that it loads; what came from disk is copied to the
                device from the first memory tier.
            first_page: pages of the prompt that the device has.
            num_tokens: tokens of the whole prompt.
            kinds: what each page is held as; None for KV.
        """
        page = self._layout.page_tokens
        load_s = self.direct_s(tiers, kinds, min(self._cost.tiers))
        done = (first_page + len(tiers)) * page
        new = max(num_tokens - done, 1)
        return self.pass_s(self._cost.recompute_s(done, new), load_s)

    def pages_within(self, first_page: int, most: int, seconds: float) -> int:
        """Return how many pages can be computed in this time, at least one."""

        def too_long(pages: int) -> bool:
            return self.compute_s(first_page, pages) > seconds

        return max(1, _first_true(too_long, 1, most + 1) - 1)

    def choose(
        self,
        tiers: UInt8s,
        first_page: int,
        num_tokens: int,
        facts: PassFacts = IDLE,
        *,
        may_try: bool = True,
        kinds: UInt8s | None = None,
    ) -> Choice:
        """Decide for one run.

        Args:
            tiers: fastest ready tier of each found page, at least one.
            first_page: pages of the prompt that the device already has.
            num_tokens: tokens of the whole prompt.
            facts: of the links and of the pass.
            may_try: a trial of a link may be chosen; not where nothing is to follow.
            kinds: uint8, what each page is held as; None for KV.
        """
        run = _Run(self, tiers, first_page, num_tokens, facts, kinds)
        best = last = run.choice(0, CHEAPER_RECOMPUTE)
        start = 0
        for num_pages in _run_ends(tiers):
            last = run.choice(num_pages, CHEAPER_LOAD)
            if last.rank_s < best.rank_s:
                best = last
            inside = run.best_inside(start, num_pages) if self._overlaps else None
            if inside is not None and inside.rank_s < best.rank_s:
                best = inside
            start = num_pages
        if self._load_policy == "always":
            return _named(last, last.num_pages, ALWAYS)
        if self._load_policy == "never":
            return _named(last, 0, NEVER)
        if facts.can_split:
            split = run.split()
            if split is not None and split.rank_s < _MARGIN * best.rank_s:
                return split
        if may_try and best.num_pages < last.num_pages:
            trial = self._trial(run, tiers, best.num_pages)
            if trial is not None:
                return trial
        if not best.num_pages:
            return _named(last, 0, CHEAPER_RECOMPUTE)
        return best

    def judge(
        self,
        *,
        first_page: int,
        num_pages: int,
        num_ready: int,
        num_missing: int,
        num_tokens: int,
        left_s: float,
        can_split: bool,
        busy_s: float = 0.0,
    ) -> Going:
        """Decide what to do while a read is under way and its request could run.

        Args:
            first_page: pages of the prompt before the plan.
            num_pages: pages of the plan.
            num_ready: leading pages of it that can be loaded at once, or are done.
            num_missing: pages after them up to the last one that is to be read.
            num_tokens: tokens of the whole prompt.
            left_s: predicted time until the rest has been read.
            can_split: a pass over a part of the prompt may be run.
            busy_s: predicted time of the pass that it would join, without it.
        """
        page = self._layout.page_tokens
        first, last = first_page + num_ready, first_page + num_pages
        total = max(num_tokens, last * page + 1)
        rest_s = self._cost.recompute_s(last * page, total - last * page)
        wait_s = max(left_s, busy_s) + rest_s
        go_s = busy_s + self._cost.recompute_s(first * page, total - first * page)
        if num_missing < num_pages - num_ready:
            # What lies behind has come and will be loaded either way.
            go_s = busy_s + self.compute_s(first, num_missing) + rest_s
        # Computing weighs more than waiting; what comes of it is told unweighted.
        extra = self._compute_weight - 1.0
        wait_rank_s = wait_s + extra * rest_s
        go_rank_s = go_s + extra * (go_s - busy_s)
        missing = num_missing
        if can_split and missing:

            def behind(pages: int) -> bool:
                share = (missing - pages) / missing
                return busy_s + self.compute_s(first, pages) >= left_s * share

            pages = _first_true(behind, 1, missing)
            front_s = busy_s + self.compute_s(first, pages)
            split_s = max(front_s, left_s * (missing - pages) / missing) + rest_s
            split_s += extra * (front_s - busy_s + rest_s)
            if pages < missing and split_s < _MARGIN * min(wait_rank_s, go_rank_s):
                return Going(Way.SPLIT, pages, wait_s, go_s)
        way = Way.GO if go_rank_s < _MARGIN * wait_rank_s else Way.WAIT
        return Going(way, 0, wait_s, go_s)

    def _trial(self, run: _Run, tiers: UInt8s, num_best: int) -> Choice | None:
        """Return a load of a few pages from a link that looks slow, where one is due.

        They are loaded although it seems the slower way, or nothing would ever correct
        a figure from a bad moment.
        """
        whole_s = run.choice(0, TRIAL).total_s

        def too_dear(num_pages: int) -> bool:
            choice = run.choice(num_pages, TRIAL)
            return choice.load_s > _TRIAL_SHARE * whole_s

        most = _first_true(too_dear, num_best + 1, len(tiers) + 1) - 1
        if most <= num_best:
            return None
        trial = run.choice(most, TRIAL)
        if trial.load_s > _TRIAL_FACTOR * trial.recompute_s:
            return None
        if not self._cost.trial_due(TierId(int(tiers[num_best]))):
            return None
        return trial


class _Run:
    """The found run of one prompt, and what its beginnings would cost."""

    def __init__(
        self,
        planner: Planner,
        tiers: UInt8s,
        first_page: int,
        num_tokens: int,
        facts: PassFacts,
        kinds: UInt8s | None = None,
    ) -> None:
        self._planner = planner
        self._tiers = tiers
        # Without activations there is nothing to count.
        self._kinds = kinds if count_act(kinds) else None
        self._first = first_page
        self._facts = facts
        self._page = planner._layout.page_tokens
        # One token at least is computed after any hit: its logits are needed.
        self._total = max(num_tokens, (first_page + len(tiers)) * self._page + 1)
        self._present = [TierId(tier) for tier in sorted(set(tiers.tolist()))]
        self._extra = planner.compute_weight - 1.0
        self._whole_s = self._pass_s(0)
        self._none_s = planner.pass_s(facts.compute_s + self._whole_s, facts.load_s)

    def choice(self, num_pages: int, reason: str) -> Choice:
        """Return the cost of loading the first pages and computing the rest."""
        direct_s = before_s = wait_s = 0.0
        if num_pages:
            part = self._tiers[:num_pages]
            for tier in self._present:
                num = int(np.count_nonzero(part == tier))
                if not num:
                    continue
                num_act = 0
                if self._kinds is not None:
                    num_act = count_act(self._kinds[:num_pages][part == tier])
                load_s = self._planner.load_s(tier, num, num_act)
                queue_s = self._facts.wait_s.get(tier, 0.0)
                wait_s += queue_s
                if tier is TierId.DISK:
                    before_s += load_s
                else:
                    direct_s += load_s
            if self._kinds is not None:
                num_act = count_act(self._kinds[:num_pages])
                direct_s = max(direct_s, self._planner.rebuild_s(num_act))
        rest_s = self._pass_s(num_pages)
        busy_s, load_s = self._facts.compute_s, self._facts.load_s
        start_s = 0.0
        if before_s:
            # It misses the pass that is being put together, and has one of its own.
            start_s = max(wait_s + before_s, busy_s)
            busy_s = load_s = 0.0
        pass_s = self._planner.pass_s(busy_s + rest_s, load_s + direct_s)
        total_s = start_s + pass_s
        held_s = pass_s - self._planner.pass_s(busy_s, load_s)
        return Choice(
            num_pages,
            before_s + direct_s,
            self._whole_s - rest_s,
            reason,
            wait_s,
            0,
            total_s,
            self._none_s,
            total_s + self._extra * held_s,
        )

    def best_inside(self, start: int, stop: int) -> Choice | None:
        """Return the best load of a part of a run, where the link is the longer."""
        if self._tiers[stop - 1] == TierId.DISK:
            return None

        def link_bound(num_pages: int) -> bool:
            found = self.choice(num_pages, CHEAPER_LOAD)
            compute_s = self._facts.compute_s + self._pass_s(num_pages)
            return found.load_s + self._facts.load_s > compute_s

        if not link_bound(stop):
            return None
        inside = _first_true(link_bound, start + 1, stop)
        return self.choice(inside, CHEAPER_LOAD) if start < inside < stop else None

    def split(self) -> Choice | None:
        """Return the cost of computing a front until it meets the read of the back."""
        is_disk = self._tiers == TierId.DISK
        if not is_disk.any():
            return None
        num = len(self._tiers)
        lead = int(is_disk.argmax())
        after = np.concatenate([np.cumsum(is_disk[::-1])[::-1], [0]])
        planner, first = self._planner, self._first + lead
        queue_s = self._facts.wait_s.get(TierId.DISK, 0.0)

        def read_s(begin: int) -> float:
            return queue_s + planner.load_s(TierId.DISK, int(after[begin]))

        def meets(pages: int) -> bool:
            front_s = self._facts.compute_s + planner.compute_s(first, pages)
            return front_s >= read_s(lead + pages)

        pages = _first_true(meets, 1, num - lead)
        begin = lead + pages
        if begin >= num:
            return None
        whole = self.choice(num, CHEAPER_SPLIT)
        front_s = planner.compute_s(first, pages) + self._facts.compute_s
        direct_s = 0.0
        if not planner._overlaps:
            direct_s = planner.direct_s(self._tiers, self._kinds)
        rest_s = self._pass_s(num)
        total_s = max(front_s, read_s(begin)) + rest_s + direct_s
        held_s = front_s - self._facts.compute_s + rest_s + direct_s
        return Choice(
            num,
            planner.load_s(TierId.DISK, int(after[begin])) + direct_s,
            whole.recompute_s,
            CHEAPER_SPLIT,
            queue_s,
            begin,
            total_s,
            self._none_s,
            total_s + self._extra * held_s,
        )

    def _pass_s(self, num_loaded: int) -> float:
        done = (self._first + num_loaded) * self._page
        return self._planner._cost.recompute_s(done, self._total - done)


def _named(choice: Choice, num_pages: int, reason: str) -> Choice:
    return Choice(
        num_pages,
        choice.load_s,
        choice.recompute_s,
        reason,
        choice.wait_s,
        0,
        choice.total_s if num_pages else choice.alternative_s,
        choice.alternative_s,
    )


def _first_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least number in [low, high) for which it holds, else ``high``.

    ``holds`` must not become false again.
    """
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _run_ends(tiers: UInt8s) -> list[int]:
    """Return after how many pages each run of equal tiers ends."""
    # bytes.lstrip finds the end of a run in C, faster than array comparisons.
    rest = tiers.tobytes()
    ends = []
    while rest:
        rest = rest.lstrip(rest[:1])
        ends.append(len(tiers) - len(rest))
    return ends
