"""Figures of one system, derived from records and from nothing else.

**Steady state.** The window of a repeat opens ``warmup_s`` after its start and closes
at the last targeted start, less ``cooldown_s``: before it caches and batches fill,
after it load can only fall. In a closed loop that last start is the moment from which
fewer requests run than asked. Latencies count the requests *targeted* within the
window, whenever they end; throughput counts what *arrived* within it, whoever asked for
it; goodput counts requests targeted within it. Windows of repeats are pooled.

**Times.** TTFT (first token), TPOT (mean gap after the first token; 0 for an answer of
one token), ITL (each gap; tokens of one event have a gap of 0) and E2E (last token) run
from the *actual* start. Client lag is the actual start less the targeted one: what the
client, not the server, made the user wait. Failed requests have no latency and meet no
SLO. Percentiles interpolate linearly. All times are in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sgl_tiered_workloads.harness.errors import RecordsError
from sgl_tiered_workloads.records import RequestRecord

__all__ = [
    "PERCENTILES",
    "Distribution",
    "Metrics",
    "Slos",
    "Window",
    "in_window",
    "measure",
    "span",
]

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Window:
    """How much of each repeat is not steady, in seconds from its ends."""

    warmup_s: float = 0.0
    cooldown_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Slos:
    """What a user accepts, in seconds; None where nothing was promised."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def given(self) -> dict[str, float]:
        """Return the promises that were made, by metric."""
        every = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        return {name: limit for name, limit in every.items() if limit is not None}

    def met(self, record: RequestRecord) -> dict[str, bool]:
        """Return which promises an answer kept; a failed one keeps none."""
        seen = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
        return {
            name: record.error is None and seen[name] <= limit
            for name, limit in self.given().items()
        }


@dataclass(frozen=True, slots=True)
class Distribution:
    """Count, mean and percentiles of samples; zeros without samples."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Distribution:
        """Summarise samples."""
        data = np.fromiter(samples, dtype=np.float64)
        if not data.size:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(data, PERCENTILES)
        return cls(
            int(data.size), float(data.mean()), float(p50), float(p90), float(p99)
        )


@dataclass(frozen=True, slots=True)
class Metrics:
    """One system's figures in steady state, over all repeats.

    Attributes:
        num_requests: targeted within the windows.
        num_errors: of those, without a whole answer.
        num_repeats: windows that were pooled.
        window_s: their total length.
        ttft_s, tpot_s, itl_s, e2e_s: latencies.
        lag_s: client lag.
        requests_per_s: whole answers that ended within the windows, per second.
        prompt_tokens_per_s: of requests whose first token came within the window.
        output_tokens_per_s: that arrived within it.
        goodput_per_s: requests that met every SLO; None without SLOs.
        attainment: share of requests that met every SLO; None without SLOs.
        attainment_by_slo: share that met each.
        prompt_tokens: of the window's answered requests.
        tokens_by_tier: of those, what each tier gave.
        hit_rate_by_tier: the same as shares of the prompt tokens.
    """

    num_requests: int
    num_errors: int
    num_repeats: int
    window_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    lag_s: Distribution
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float | None
    attainment: float | None
    attainment_by_slo: Mapping[str, float]
    prompt_tokens: int
    tokens_by_tier: Mapping[str, int]
    hit_rate_by_tier: Mapping[str, float]

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed."""
        return sum(self.hit_rate_by_tier.values())


def span(records: Sequence[RequestRecord], window: Window) -> tuple[float, float]:
    """Return the bounds of one repeat's window, in seconds of its clock.

    Raises:
        RecordsError: nothing of the repeat is steady.
    """
    if not records:
        raise RecordsError("A repeat without a request has no steady state.")
    begin_s = window.warmup_s
    end_s = max(record.targeted_s for record in records) - window.cooldown_s
    if len(records) == 1 or end_s == min(record.targeted_s for record in records):
        # All left at once: the run itself is all there is, if no more was asked.
        ends = [r.token_times_s[-1] for r in records if r.token_times_s]
        # The bound itself is out, and the last token shall be in.
        end_s = np.nextafter(max(ends, default=end_s), np.inf) - window.cooldown_s
    if end_s <= begin_s:
        raise RecordsError(
            f"The steady state would end at {end_s:.1f} s and begin at "
            f"{begin_s:.1f} s; shorten warmup_s and cooldown_s or send more requests."
        )
    return begin_s, float(end_s)


def in_window(records: Sequence[RequestRecord], window: Window) -> list[RequestRecord]:
    """Return the requests of one repeat that were targeted within its window.

    The request that ends the window is not in it: n gaps are n requests, so that the
    rate of what came is the rate at which it was sent.
    """
    begin_s, end_s = span(records, window)
    return [r for r in records if begin_s <= r.targeted_s < end_s]


def measure(records: Sequence[RequestRecord], window: Window, slos: Slos) -> Metrics:
    """Derive one system's figures.

    Args:
        records: of one system, all its repeats.
        window: what of each repeat is steady.
        slos: promises to count goodput by.

    Raises:
        RecordsError: nothing is steady, or no request of it was answered.
    """
    repeats: dict[int, list[RequestRecord]] = {}
    for record in records:
        repeats.setdefault(record.repeat, []).append(record)
    chosen: list[RequestRecord] = []
    window_s = output_tokens = 0.0
    prompt_tokens = ended = 0
    for every in repeats.values():
        begin_s, end_s = span(every, window)
        window_s += end_s - begin_s
        chosen.extend(in_window(every, window))
        ended += _ended_between(every, begin_s, end_s)
        prompt_tokens += _prompt_tokens_between(every, begin_s, end_s)
        output_tokens += _output_tokens_between(every, begin_s, end_s)
    answered = [record for record in chosen if record.error is None]
    if not answered:
        raise RecordsError("No request of the steady state was answered.")
    met = [slos.met(record) for record in chosen]
    good = sum(all(item.values()) for item in met) if slos.given() else None
    total = sum(record.num_prompt_tokens for record in answered)
    tiers = _tiers(answered)
    return Metrics(
        num_requests=len(chosen),
        num_errors=len(chosen) - len(answered),
        num_repeats=len(repeats),
        window_s=window_s,
        ttft_s=Distribution.of(r.ttft_s for r in answered),
        tpot_s=Distribution.of(r.tpot_s for r in answered),
        itl_s=Distribution.of(_gaps(answered)),
        e2e_s=Distribution.of(r.e2e_s for r in answered),
        lag_s=Distribution.of(r.client_lag_s for r in chosen),
        requests_per_s=ended / window_s,
        prompt_tokens_per_s=prompt_tokens / window_s,
        output_tokens_per_s=output_tokens / window_s,
        goodput_per_s=None if good is None else good / window_s,
        attainment=None if good is None else good / len(chosen),
        attainment_by_slo={
            name: sum(item[name] for item in met) / len(chosen) for name in slos.given()
        },
        prompt_tokens=total,
        tokens_by_tier=tiers,
        hit_rate_by_tier={t: n / total for t, n in tiers.items()} if total else {},
    )


def _ended_between(
    records: Iterable[RequestRecord], begin_s: float, end_s: float
) -> int:
    """Whole answers whose last token arrived between two moments."""
    return sum(
        r.error is None and begin_s <= r.token_times_s[-1] < end_s for r in records
    )


def _prompt_tokens_between(
    records: Sequence[RequestRecord], begin_s: float, end_s: float
) -> int:
    """Prompt tokens whose computation ended between two moments."""
    return sum(
        record.num_prompt_tokens
        for record in records
        if record.token_times_s and begin_s <= record.token_times_s[0] < end_s
    )


def _output_tokens_between(
    records: Sequence[RequestRecord], begin_s: float, end_s: float
) -> float:
    """Output tokens that arrived between two moments.

    Where a server tells fewer arrivals than tokens, each arrival stands for its share.
    """
    total = 0.0
    for record in records:
        if not record.token_times_s:
            continue
        arrived = sum(begin_s <= moment < end_s for moment in record.token_times_s)
        total += arrived * max(
            1.0, record.num_output_tokens / len(record.token_times_s)
        )
    return total


def _gaps(records: Iterable[RequestRecord]) -> Iterable[float]:
    for record in records:
        for earlier, later in pairwise(record.token_times_s):
            yield later - earlier


def _tiers(records: Iterable[RequestRecord]) -> dict[str, int]:
    """Cached tokens by tier; what no tier claims is ``unattributed``."""
    counted: Counter[str] = Counter()
    for record in records:
        claimed = {t: n for t, n in record.cached_by_tier.items() if n > 0}
        counted.update(claimed)
        counted["unattributed"] += record.cached_tokens - sum(claimed.values())
    return {tier: tokens for tier, tokens in counted.items() if tokens > 0}
