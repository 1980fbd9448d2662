"""Learns answer lengths from the answers that have ended.

LayerKV 3.1 divides lengths into percentile ranges, lets a trained model say which range
an answer falls into, and takes the lower bound of that range for N_future (Eq. 1) and
its median for releases (Eq. 5). Nothing is trained here. Lengths are counted in narrow
ranges (``ranges.py``) per context of a request: everything, the recent past, the class
of its prompt's length, the class of its allowance, its group, its group's last answers.
Each kind of context is an expert with a distribution of its own,

    p_e = (counts_e + k * p_all) / (n_e + k),      p_all likewise above a prior,

and a prediction is the mixture ``sum_e w_e p_e``, cut off at what is out already. The
weights follow how well each expert has foretold the answers so far,

    w_e <- (1 - s) * w_e p_e(seen) / sum_i w_i p_i(seen) + s / num_experts

(Bayes with the fixed share of Herbster and Warmuth, 1998), so the mixture is about as
good as the best expert, and changes sides when another becomes better. The range that
is predicted lies between two percentiles of the mixture: ``1 - coverage`` of the
answers may be shorter than its lower bound, and as many longer than its upper one.

Counts fade, each context's with a half-life of its own, so that drift is followed. An
answer that ended at its allowance tells only that it would have been at least so long:
its count is spread over the ranges from there on, in proportion to what was predicted
for them (redistribution to the right).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.length.base import LengthFacts, LengthPrediction, bounded
from sgl_tiered.policies.length.ranges import (
    MAX_LENGTH,
    NUM_RANGES,
    STARTS,
    Float64s,
    log_normal,
    range_of,
)

__all__ = ["EXPERTS", "MAX_CONTEXTS", "Expert", "OnlineLengths"]

MAX_CONTEXTS = 1024
"""Contexts that are kept, 2 kB each; the one that was met longest ago makes room."""

_PRIOR_MEDIAN_TOKENS = 200.0
_PRIOR_SIGMA = 1.3
"""Of chat: half of the answers between 83 and 480 tokens. Outweighed after a few."""
_PRIOR_WEIGHT = 2.0
_PARENT_WEIGHT = 8.0
"""Answers that a context must have seen to count as much as all answers."""
_SHARE = 0.005
"""Of the weights that goes to all experts alike with each answer."""
_RESCALE_AT = 1e12


@dataclass(frozen=True, slots=True)
class Expert:
    """A kind of context.

    Attributes:
        name: for reports.
        half_life: answers of one context after which a count weighs half.
        key: names the context of a request; None where the request has none.
        shape: what the context expects before it has seen anything, float64
            [NUM_RANGES]; without, what is known of all answers.
        trust: weight at the start, relative to the others'.
    """

    name: str
    half_life: float
    key: Callable[[LengthFacts], Hashable]
    shape: Callable[[LengthFacts], Float64s] | None = None
    trust: float = 1.0


EXPERTS = (
    Expert("all", 5_000.0, lambda facts: True),
    Expert("recent", 200.0, lambda facts: True),
    Expert("prompt", 1_000.0, lambda facts: range_of(facts.num_prompt_tokens) >> 2),
    Expert("allowance", 1_000.0, lambda facts: range_of(facts.max_new_tokens) >> 2),
    Expert("group", 500.0, lambda facts: facts.group or None),
    Expert("group's last", 4.0, lambda facts: facts.group or None),
)


class OnlineLengths:
    """Usable from the first request, when it knows no more than the prior.

    Args:
        coverage: share of answers that reach the lower bound, above 0.5.
        experts: kinds of contexts; the first one has one context, all requests.

    Raises:
        ConfigError: the coverage is no such share.
    """

    name = "online"

    def __init__(
        self, coverage: float = 0.9, experts: Sequence[Expert] = EXPERTS
    ) -> None:
        if not 0.5 < coverage < 1.0:
            raise ConfigError(
                "length_predictor",
                f"a coverage of {coverage}",
                "give a share above 0.5 and below 1",
            )
        self._quantiles = (1.0 - coverage, 0.5, coverage)
        self._experts = tuple(experts)
        total = sum(expert.trust for expert in self._experts)
        self._weights = [expert.trust / total for expert in self._experts]
        self._contexts: OrderedDict[tuple[int, Hashable], _Counts] = OrderedDict()
        # The counts of each context are a row, so that a mixture is one product; the
        # first row is what is known of all answers. An answer may add a context per
        # expert before old ones make room.
        num_rows = 1 + MAX_CONTEXTS + len(self._experts)
        self._table: Float64s = np.zeros((num_rows, NUM_RANGES))
        self._free = list(range(num_rows - 1, 0, -1))
        self._prior = log_normal(_PRIOR_MEDIAN_TOKENS, _PRIOR_SIGMA)
        self._all = _Counts(self._experts[0].half_life, np.zeros(NUM_RANGES))
        self._p_all: Float64s = self._table[0]
        self._p_all[:] = self._prior

    @property
    def weights(self) -> dict[str, float]:
        """How much each expert counts now; they add up to 1."""
        names = [expert.name for expert in self._experts]
        return dict(zip(names, self._weights, strict=True))

    @property
    def num_contexts(self) -> int:
        """Contexts that are kept, at most ``MAX_CONTEXTS``."""
        return len(self._contexts)

    def predict(self, facts: LengthFacts, num_done: int = 0) -> LengthPrediction:
        """Return percentiles of the mixture above ``num_done``; 240 ranges' work."""
        below = self._mixture(facts).cumsum()
        done = _share_up_to(below, num_done)
        left = below.item(-1) - done
        shares = [done + q * left for q in self._quantiles]
        places = below.searchsorted(shares).tolist()
        lower, median, upper = map(partial(_percentile, below), shares, places)
        return bounded(facts, num_done, lower, median, upper)

    def shares(
        self, facts: LengthFacts, edges: Sequence[int], num_done: int = 0
    ) -> list[float]:
        """Return how likely each class of lengths is.

        Args:
            facts: of the request.
            edges: rising; class i holds lengths from ``edges[i]`` to below
                ``edges[i + 1]``, the first one also what is shorter, the last one
                (``len(edges)`` classes) all from ``edges[-1]`` on.
            num_done: tokens that are out.

        Returns:
            One number per edge, which add up to 1.
        """
        below = self._mixture(facts).cumsum()
        done = _share_up_to(below, num_done)
        cuts = [max(_share_up_to(below, edge - 1), done) for edge in edges[1:]]
        cuts = [done, *cuts, max(below.item(-1), done)]
        left = max(cuts[-1] - done, 1e-300)
        return [(b - a) / left for a, b in pairwise(cuts)]

    def observe(self, facts: LengthFacts, num_output_tokens: int) -> None:
        """Count the answer in each of its contexts, and weigh the experts anew."""
        seen = range_of(max(num_output_tokens, 1))
        is_cut = num_output_tokens >= facts.max_new_tokens
        spread = self._mixture(facts)[seen:] if is_cut else None
        if spread is not None:
            spread = spread / spread.sum()
        for number, expert in enumerate(self._experts):
            own = self._own(number, expert, facts)
            chance = self._chance(own, expert, facts, seen, is_cut=is_cut)
            self._weights[number] *= chance
        self._balance()
        for number, expert in enumerate(self._experts):
            key = expert.key(facts)
            if key is None:
                continue
            counts = self._contexts.get((number, key))
            if counts is None:
                row = self._free.pop()
                counts = _Counts(expert.half_life, self._table[row], row)
                self._contexts[number, key] = counts
            self._contexts.move_to_end((number, key))
            counts.add(seen, spread)
        while len(self._contexts) > MAX_CONTEXTS:
            _, gone = self._contexts.popitem(last=False)
            gone.counts[:] = 0.0
            self._free.append(gone.row)
        self._all.add(seen, spread)
        self._p_all[:] = self._all.over(self._prior, _PRIOR_WEIGHT)

    def _own(self, number: int, expert: Expert, facts: LengthFacts) -> _Counts | None:
        key = expert.key(facts)
        return None if key is None else self._contexts.get((number, key))

    def _parent(self, expert: Expert, facts: LengthFacts) -> Float64s:
        if expert.shape is None or expert.key(facts) is None:
            return self._p_all
        return expert.shape(facts)

    def _mixture(self, facts: LengthFacts) -> Float64s:
        rows, scales, of_all = [0], [0.0], 0.0
        shaped = []
        for number, expert in enumerate(self._experts):
            of_parent = self._weights[number]
            key = expert.key(facts)
            own = None if key is None else self._contexts.get((number, key))
            if own is not None:
                scale = of_parent / (own.total + _PARENT_WEIGHT * own.unit)
                rows.append(own.row)
                scales.append(scale)
                of_parent = scale * _PARENT_WEIGHT * own.unit
            if expert.shape is None or key is None:
                of_all += of_parent
            else:
                shaped.append((of_parent, expert.shape(facts)))
        scales[0] = of_all
        # Row by row, as numpy adds them everywhere: no BLAS, whose order of sums is its
        # own, for all ranks have to predict alike.
        parts = self._table.take(rows, axis=0)
        parts *= np.array(scales)[:, None]
        mixed: Float64s = np.add.reduce(parts, axis=0)
        for weight, shape in shaped:
            mixed += weight * shape
        return mixed

    def _chance(
        self,
        own: _Counts | None,
        expert: Expert,
        facts: LengthFacts,
        seen: int,
        *,
        is_cut: bool,
    ) -> float:
        """Return what the expert gave the range that was seen, or all from it on."""
        parent = self._parent(expert, facts)
        chance = float(parent[seen:].sum() if is_cut else parent[seen])
        if own is None:
            return chance
        count = float(own.counts[seen:].sum() if is_cut else own.counts[seen])
        above = _PARENT_WEIGHT * own.unit
        return (count + above * chance) / (own.total + above)

    def _balance(self) -> None:
        total, even = sum(self._weights), 1.0 / len(self._weights)
        if not total > 0.0:
            self._weights = [even] * len(self._weights)
            return
        self._weights = [
            (1.0 - _SHARE) * weight / total + _SHARE * even for weight in self._weights
        ]


class _Counts:
    """Answers of one context per range; the next one counts ``unit``.

    A count fades because the later ones are larger: O(1) per answer. The counts are
    written where they are handed in, float64 [NUM_RANGES]: a row of the table.
    """

    __slots__ = ("counts", "growth", "row", "total", "unit")

    def __init__(self, half_life: float, counts: Float64s, row: int = 0) -> None:
        self.counts = counts
        self.row = row
        self.total = 0.0
        self.unit = 1.0
        self.growth = 2.0 ** (1.0 / half_life)

    def add(self, seen: int, spread: Float64s | None) -> None:
        """Count an answer in the range ``seen``, or spread it from there on."""
        if spread is None:
            self.counts[seen] += self.unit
        else:
            self.counts[seen:] += self.unit * spread
        self.total += self.unit
        self.unit *= self.growth
        if self.unit > _RESCALE_AT:
            self.counts /= self.unit
            self.total /= self.unit
            self.unit = 1.0

    def over(self, parent: Float64s, weight: float) -> Float64s:
        """Return the distribution above a parent that counts as ``weight`` answers."""
        above = weight * self.unit
        shares: Float64s = (self.counts + above * parent) / (self.total + above)
        return shares


def _share_up_to(below: Float64s, num_tokens: int) -> float:
    """Return the share of lengths up to ``num_tokens``, even within a range."""
    if num_tokens <= 0:
        return 0.0
    if num_tokens >= MAX_LENGTH:
        return below.item(-1)
    place = range_of(num_tokens)
    before = below.item(place - 1)
    width = STARTS[place + 1] - STARTS[place]
    share = (num_tokens + 1 - STARTS[place]) / width
    return before + (below.item(place) - before) * share


def _percentile(below: Float64s, share: float, place: int) -> int:
    """Return the length that ``share`` of the answers do not reach.

    Args:
        below: share of the answers up to the end of each range.
        share: as in ``below``.
        place: of the first range whose end reaches it.
    """
    place = min(place, NUM_RANGES - 1)
    before = below.item(place - 1) if place else 0.0
    width = STARTS[place + 1] - STARTS[place]
    within = (share - before) / max(below.item(place) - before, 1e-300)
    return STARTS[place] + min(int(within * width), width - 1)
