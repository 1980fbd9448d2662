"""Figures of a run: percentiles, throughput, goodput, hits per tier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.sim.answers import LengthReport
from sgl_tiered.sim.records import SimResult

__all__ = ["Percentiles", "SimSummary", "Slo", "summarize"]

Float64s = npt.NDArray[np.float64]
_MAX_ITL_SAMPLES = 2_000_000
"""Gaps between tokens that are looked at; of longer runs every n-th request's."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that make a request good, 0 for none; LayerKV's by default."""

    ttft_s: float = 3.0
    tpot_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles in seconds; NaN where there were no values."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Float64s) -> Percentiles:
        """Return them for an array; NaNs in it are left out."""
        kept = values[~np.isnan(values)]
        if not len(kept):
            return cls(float("nan"), float("nan"), float("nan"), float("nan"))
        p50, p90, p99 = np.percentile(kept, [50, 90, 99]).tolist()
        return cls(float(kept.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class SimSummary:
    """A run in figures.

    Attributes:
        num_requests, num_aborted: requests, and those that could not run.
        duration_s: from the first arrival to the last end.
        ttft, tpot, itl, e2e, queue: of the requests that ran.
        requests_per_s, prompt_tokens_per_s, output_tokens_per_s: over the duration.
        hit_ratio: prompt tokens by source over all prompt tokens.
        slo_attainment: part of all requests within the limits.
        goodput_per_s: requests within the limits per second.
        busy: part of the duration in which the device computed or waited for a load.
        stall_s: time in which passes waited for loads.
        num_retractions: see ``SimResult``.
        link_bytes, lengths: see ``SimResult``.
    """

    num_requests: int
    num_aborted: int
    duration_s: float
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    e2e: Percentiles
    queue: Percentiles
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    hit_ratio: dict[str, float]
    slo_attainment: float
    goodput_per_s: float
    busy: float
    stall_s: float
    num_retractions: int
    link_bytes: dict[str, int]
    lengths: LengthReport | None = None

    @property
    def total_hit_ratio(self) -> float:
        """Prompt tokens that were not computed over all prompt tokens."""
        return sum(self.hit_ratio.values())


def summarize(result: SimResult, slo: Slo | None = None) -> SimSummary:
    """Return the figures of a run; O(tokens)."""
    slo = slo or Slo()
    ran = [record for record in result.records if not record.aborted]
    arrivals = [record.arrival_s for record in result.records]
    duration_s = max(result.end_s - min(arrivals, default=0.0), 1e-12)
    ttft = np.array([record.ttft_s for record in ran])
    tpot = np.array([record.tpot_s for record in ran])
    # One token has no TPOT: only its TTFT counts.
    late = (ttft > slo.ttft_s) & (slo.ttft_s > 0)
    slow = (tpot > slo.tpot_s) & (slo.tpot_s > 0)
    good = int(np.count_nonzero(~(late | slow)))
    num_prompt = sum(record.num_prompt_tokens for record in ran)
    num_output = sum(record.num_output_tokens for record in ran)
    sources = {
        "device": sum(record.device_tokens for record in ran),
        "host": sum(record.host_tokens for record in ran),
        "cxl": sum(record.cxl_tokens for record in ran),
        "disk": sum(record.disk_tokens for record in ran),
    }
    passes_s = sum(p.end_s - p.start_s for p in result.passes)
    segments_s = sum(s.seconds(s.num_steps) for s in result.segments)
    return SimSummary(
        num_requests=len(result.records),
        num_aborted=len(result.records) - len(ran),
        duration_s=duration_s,
        ttft=Percentiles.of(ttft),
        tpot=Percentiles.of(tpot),
        itl=Percentiles.of(_gaps(result)),
        e2e=Percentiles.of(np.array([record.e2e_s for record in ran])),
        queue=Percentiles.of(np.array([record.queue_s for record in ran])),
        requests_per_s=len(ran) / duration_s,
        prompt_tokens_per_s=num_prompt / duration_s,
        output_tokens_per_s=num_output / duration_s,
        hit_ratio={k: tokens / max(num_prompt, 1) for k, tokens in sources.items()},
        slo_attainment=good / max(len(result.records), 1),
        goodput_per_s=good / duration_s,
        busy=(passes_s + segments_s) / duration_s,
        stall_s=sum(p.stall_s for p in result.passes),
        num_retractions=result.num_retractions,
        link_bytes=dict(result.link_bytes),
        lengths=result.lengths,
    )


def _gaps(result: SimResult) -> Float64s:
    ran = [record for record in result.records if not record.aborted]
    num_gaps = sum(max(record.num_output_tokens - 1, 0) for record in ran)
    stride = -(-num_gaps // _MAX_ITL_SAMPLES) or 1
    parts = [np.diff(result.token_times(record)) for record in ran[::stride]]
    return np.concatenate(parts) if parts else np.zeros(0)
