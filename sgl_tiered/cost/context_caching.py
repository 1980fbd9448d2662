"""Does reusing cached KV pay for this batch? MemServe's context-caching cost model.

MemServe (section 5.3, Table 5, Figure 13) names five factors (prompt length, cached
ratio, where the cached KV is, batch size, page size), fits curves to measured times and
asks once per batch, since a batch acts like a longer prompt. It gives no equations.
Ours: request i of a batch B of b requests has s_i tokens, of which it reuses c_i, whole
pages of k tokens, and computes n_i = s_i - c_i, at least one. With at most C new tokens
in a pass it takes P = ceil(sum n_i / C) passes; request i is in p_i = ceil(n_i / C):

    compute(B) = t_message + t_pass P + t_request b + t_token sum n_i
                 + t_pair sum n_i (c_i + (n_i + 1) / 2)
                 + t_context sum (p_i c_i + n_i (p_i - 1) / 2)
    move_l(B)  = t_request_l b_l + t_token_l sum c_il + t_page_l sum c_il / k

where b_l requests reuse c_il tokens from place l. What comes before the pass (a disk, a
peer, memory without a copy stream) is added; what comes layer by layer under the pass
of L layers is hidden as far as the pass is longer:

    T(B) = sum_before move_l + max(compute, sum_under move_l + compute / L)

The device moves nothing. The ordinate of Figure 13 is 1 - T(reusing) / T(not reusing),
its abscissa sum c_i / sum s_i. Coefficients are fitted to measured times to first token
(``caching_fitting.py``), and kept with R2 in the calibration file.

**What is decided.** For each place whether the batch takes its KV from there, or
computes it: the set of places with the least T(B), the fewest places where it makes no
difference. A prompt's prefix may lie in several places; it is reused up to the first
one that is not taken. A place that nobody measured is never taken.

**The planner** (``cache/planner.py``) asks more often and knows more: for one request
at a time, at any page, with what waits for the links and what was admitted before into
the same pass (``PassFacts``). With b = 1, idle links and all found pages or none, its
``total_s`` is T(B) with t_message = t_request = t_context = 0, which a property test
holds both to; and loads that it accepts one after the other cost T(B) of them all. It
cannot see who comes *after* a request into the pass: a slow load alone is refused that
the whole batch would have hidden. That, and a decision about KV that is not here yet
(should it be sent back for the next turn? ``returning.py`` asks), is what this model
adds: ``ContextCaching.of_costs`` makes one from the planner's own refined figures.

Pure: no clock, no engine. A choice costs O(requests * 2^places).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.calibration import CachingFit, Calibration, FitQuality, LocationFit
from sgl_tiered.cost.model import CostModel

__all__ = ["CachedPrompt", "CachingChoice", "ContextCaching", "compute_features"]

_UNDER_THE_PASS = frozenset({TierId.HOST, TierId.CXL})
"""Places whose KV an engine with a copy stream brings layer by layer."""
_NOT_FITTED = FitQuality(0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """A prompt, and where the KV of its beginning is.

    Attributes:
        num_tokens: of the whole prompt.
        found: (place, tokens) from the first token on; places may come again.
    """

    num_tokens: int
    found: tuple[tuple[TierId, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CachingChoice:
    """What a batch should do about the KV that was found.

    Attributes:
        places: those to reuse KV from; the device is not named, it always is.
        reused_tokens: of each prompt, whole pages.
        seconds: predicted time to the last first token.
        none_s: the same if nothing were reused, not even on the device.
        all_s: the same if all that was found in measured places were.
    """

    places: frozenset[TierId]
    reused_tokens: tuple[int, ...]
    seconds: float
    none_s: float
    all_s: float

    @property
    def improvement(self) -> float:
        """The share of the time that reuse saves: the ordinate of Figure 13."""
        return 1.0 - self.seconds / self.none_s if self.none_s > 0 else 0.0


class ContextCaching:
    """Predicts the time of batches, and decides what they reuse.

    Args:
        fit: the coefficients.
        page_tokens: tokens of a page; only whole pages are reused.
        num_layers: of the model.
        chunk_tokens: most new tokens of a pass; None for no limit.
    """

    def __init__(
        self,
        fit: CachingFit,
        page_tokens: int,
        num_layers: int,
        chunk_tokens: int | None = None,
    ) -> None:
        assert page_tokens > 0, page_tokens
        assert num_layers > 0, num_layers
        self.fit = fit
        self.page_tokens = page_tokens
        self.num_layers = num_layers
        self.chunk_tokens = chunk_tokens
        tiers = {tier.label: tier for tier in TierId}
        self._places = {tiers[place.location]: place for place in fit.locations}

    @classmethod
    def calibrated(cls, calibration: Calibration) -> ContextCaching | None:
        """Return the model of a calibration file; None if it was not measured."""
        if calibration.caching is None:
            return None
        model = calibration.model
        return cls(
            calibration.caching,
            model.page_tokens,
            model.num_layers,
            model.chunk_tokens,
        )

    @classmethod
    def of_costs(
        cls,
        cost: CostModel,
        *,
        token_bytes: int,
        page_tokens: int,
        num_layers: int,
        chunk_tokens: int | None = None,
        overlaps: bool = False,
    ) -> ContextCaching:
        """Return the model by the planner's figures as they are now.

        Args:
            cost: its costs; a place is known if its link is.
            token_bytes: keys and values of a token over all layers.
            page_tokens, num_layers, chunk_tokens: as of the class.
            overlaps: loads from memory run under the pass.
        """
        prefill = cost.prefill
        places = []
        for tier in sorted(cost.tiers - {TierId.DEVICE}):
            latency_s, bytes_per_s = cost.link_figures(tier)
            places.append(
                LocationFit(
                    tier.label,
                    latency_s,
                    token_bytes / bytes_per_s,
                    0.0,
                    overlaps and tier in _UNDER_THE_PASS,
                    _NOT_FITTED,
                )
            )
        fit = CachingFit(
            message_s=0.0,
            pass_s=prefill.overhead_s,
            request_s=0.0,
            token_s=prefill.token_s,
            pair_s=prefill.pair_s,
            context_token_s=0.0,
            locations=tuple(places),
            quality=_NOT_FITTED,
        )
        return cls(fit, page_tokens, num_layers, chunk_tokens)

    @property
    def places(self) -> frozenset[TierId]:
        """Places that are known, without the device."""
        return frozenset(self._places)

    def seconds(
        self, batch: Sequence[CachedPrompt], places: Collection[TierId] | None = None
    ) -> float:
        """Return the predicted time to the last first token; 0 for an empty batch.

        Args:
            batch: prefilled together.
            places: to reuse KV from, besides the device; None for nothing at all.
        """
        if not batch:
            return 0.0
        new, contexts = [], []
        before_s = under_s = 0.0
        for prompt in batch:
            parts = [] if places is None else self._parts(prompt, places)
            context = sum(tokens for _, tokens in parts)
            contexts.append(context)
            new.append(prompt.num_tokens - context)
            tokens_from: dict[TierId, int] = {}
            for tier, tokens in parts:
                tokens_from[tier] = tokens_from.get(tier, 0) + tokens
            for tier, tokens in tokens_from.items():
                if tier is TierId.DEVICE:
                    continue
                place = self._places[tier]
                move_s = (
                    place.request_s
                    + place.token_s * tokens
                    + place.page_s * (tokens / self.page_tokens)
                )
                if place.overlaps:
                    under_s += move_s
                else:
                    before_s += move_s
        compute_s = self._compute_s(contexts, new)
        if under_s:
            compute_s = max(compute_s, under_s + compute_s / self.num_layers)
        return before_s + compute_s

    def decide(self, batch: Sequence[CachedPrompt]) -> CachingChoice:
        """Choose, once for the batch, from which places it reuses KV."""
        found = {tier for prompt in batch for tier, _ in prompt.found}
        known = sorted(found & self.places)
        options = [
            frozenset(chosen)
            for size in range(len(known) + 1)
            for chosen in itertools.combinations(known, size)
        ]
        times = [self.seconds(batch, option) for option in options]
        # The first of equal ones: the fewest places.
        best = times.index(min(times))
        return CachingChoice(
            places=options[best],
            reused_tokens=tuple(
                sum(tokens for _, tokens in self._parts(prompt, options[best]))
                for prompt in batch
            ),
            seconds=times[best],
            none_s=self.seconds(batch),
            all_s=times[-1],
        )

    def gain_s(
        self, prompt: CachedPrompt, better: tuple[tuple[TierId, int], ...]
    ) -> float:
        """Return the time that a prompt alone would save if its KV lay otherwise.

        For decisions about moving KV ahead of a use: what is gained, times the chance
        of the use, has to exceed what the move costs.

        Args:
            prompt: as it is.
            better: ``found`` as it would be.
        """
        moved = replace(prompt, found=better)
        return self.decide([prompt]).seconds - self.decide([moved]).seconds

    def break_even_ratio(
        self, num_tokens: int, place: TierId, num_requests: int = 1
    ) -> float | None:
        """Return the cached ratio from which on reuse from a place always pays.

        Args:
            num_tokens: of each prompt.
            place: where the KV is.
            num_requests: equal ones in the batch.

        Returns:
            A multiple of a page's share; None if not even a whole prompt pays.
        """
        whole = max(num_tokens - 1, 0) // self.page_tokens
        none_s = self.seconds([CachedPrompt(num_tokens)] * num_requests)
        least = None
        for num_pages in range(whole, 0, -1):
            prompt = CachedPrompt(num_tokens, ((place, num_pages * self.page_tokens),))
            if self.seconds([prompt] * num_requests, {place}) >= none_s:
                break
            least = num_pages * self.page_tokens / num_tokens
        return least if place is TierId.DEVICE or place in self._places else None

    def _parts(
        self, prompt: CachedPrompt, places: Collection[TierId]
    ) -> list[tuple[TierId, int]]:
        """Return what is reused from where: whole pages, and one token is computed."""
        most = max(prompt.num_tokens - 1, 0) // self.page_tokens * self.page_tokens
        parts = []
        start = stop = 0
        for tier, tokens in prompt.found:
            if tier is not TierId.DEVICE and not (
                tier in places and tier in self._places
            ):
                break
            stop += tokens
            end = min(stop // self.page_tokens * self.page_tokens, most)
            if end > start:
                parts.append((tier, end - start))
                start = end
        return parts

    def _compute_s(self, contexts: Sequence[int], new: Sequence[int]) -> float:
        fit = self.fit
        coefficients = (
            fit.message_s,
            fit.pass_s,
            fit.request_s,
            fit.token_s,
            fit.pair_s,
            fit.context_token_s,
        )
        features = compute_features(contexts, new, self.chunk_tokens)
        return sum(c * x for c, x in zip(coefficients, features, strict=True))


def compute_features(
    contexts: Sequence[int], new: Sequence[int], chunk_tokens: int | None
) -> tuple[float, ...]:
    """Return what the six coefficients of ``compute`` are multiplied with.

    Args:
        contexts: tokens that each request reuses.
        new: tokens that each computes.
        chunk_tokens: most new tokens of a pass; None for no limit.
    """

    def num_passes(tokens: int) -> int:
        return 1 if chunk_tokens is None else max(1, -(-tokens // chunk_tokens))

    pairs = read = 0.0
    for context, tokens in zip(contexts, new, strict=True):
        pairs += tokens * (context + (tokens + 1) / 2)
        # A later pass has the earlier ones as its context.
        passes = num_passes(tokens)
        read += passes * context + tokens * (passes - 1) / 2
    num_new = sum(new)
    return (
        1.0,
        float(num_passes(num_new)),
        float(len(new)),
        float(num_new),
        pairs,
        read,
    )
