"""What a run leaves behind: a record per request, decode segments, the event log.

Token times are not stored per token. A request's tokens come at the end of its prefill
and at the ends of the decode steps of the segments in which it took part; a segment is
a run of steps with one batch, whose step times grow linearly with the contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.stats import CacheStats
from sgl_tiered.core.plans import Bools
from sgl_tiered.sim.answers import LengthReport
from sgl_tiered.sim.events import EventLog

__all__ = ["DecodeSegment", "LayerCounts", "PrefillPass", "RequestRecord", "SimResult"]

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DecodeSegment:
    """Decode steps with one batch.

    Attributes:
        start_s: of the first step.
        first_s: length of the first step; each later one is ``growth_s`` longer.
        num_steps, batch: steps, and requests in each.
    """

    start_s: float
    first_s: float
    growth_s: float
    num_steps: int
    batch: int

    def seconds(self, num_steps: int) -> float:
        """Return the time of the first ``num_steps`` steps."""
        pairs = num_steps * (num_steps - 1) / 2
        return num_steps * self.first_s + self.growth_s * pairs

    def step_ends(self) -> Float64s:
        """Return the end of each step; float64 [num_steps], seconds."""
        steps = np.arange(1, self.num_steps + 1, dtype=np.float64)
        grown = self.growth_s * steps * (steps - 1) / 2
        return self.start_s + steps * self.first_s + grown


@dataclass(frozen=True, slots=True)
class PrefillPass:
    """One prefill pass: when, how much, and how long its loads held it up."""

    start_s: float
    end_s: float
    num_requests: int
    num_tokens: int
    loaded_bytes: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request.

    Attributes:
        request: index in the workload.
        arrival_s: when the client sent it.
        admitted_s: start of its first prefill pass.
        first_token_s, finished_s: at the client.
        num_prompt_tokens, num_output_tokens: lengths; the output as produced.
        device_tokens, host_tokens, disk_tokens: prompt tokens reused at the first
            admission, by source (``host`` stands for the first memory tier); the rest
            was computed.
        num_retractions: times it lost its pages.
        spans: ranges of decode segments in which it took part.
        resumed_s: tokens that came from the prefill after a retraction.
        aborted: it could not run; times are those of the refusal.
        cxl_tokens: reused like the others, from CXL memory below the host.
    """

    request: int
    arrival_s: float
    admitted_s: float
    first_token_s: float
    finished_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    num_retractions: int
    spans: tuple[tuple[int, int], ...]
    resumed_s: tuple[float, ...]
    aborted: bool
    cxl_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def queue_s(self) -> float:
        """Time before the first prefill pass."""
        return self.admitted_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.finished_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time between tokens; NaN for one token."""
        if self.num_output_tokens < 2:
            return float("nan")
        return (self.finished_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that no tier had."""
        reused = self.device_tokens + self.host_tokens + self.disk_tokens
        return self.num_prompt_tokens - reused - self.cxl_tokens


@dataclass(slots=True)
class LayerCounts:
    """What was done.

    Attributes:
        offloaded_bytes, streamed_bytes, returned_bytes: over the link: to the host; to
            the device for steps; to the device for good.
        stall_s: that prefill passes waited for the link; steps are not counted.
        num_pauses: times that somebody was made to wait.
    """

    offloaded_bytes: int = 0
    streamed_bytes: int = 0
    returned_bytes: int = 0
    stall_s: float = 0.0
    num_pauses: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SimResult:
    """A whole run.

    Attributes:
        records: one per request, in the workload's order.
        segments, passes: what the device did, in order of time.
        log: the events.
        end_s: end of the last request.
        num_retractions: pages lost to a full pool, in requests.
        peak_pages: most device pages held by requests and tree together.
        link_bytes: bytes moved, by link.
        cache: the cache's own counters; None without tiers.
        lengths: how well answers were foretold; None without a predictor.
        layers: what layer-wise memory moved; None without it.
    """

    records: tuple[RequestRecord, ...]
    segments: tuple[DecodeSegment, ...]
    passes: tuple[PrefillPass, ...]
    log: EventLog
    end_s: float
    num_retractions: int
    peak_pages: int
    link_bytes: dict[str, int]
    cache: CacheStats | None
    lengths: LengthReport | None = None
    layers: LayerCounts | None = None

    def token_times(self, record: RequestRecord) -> Float64s:
        """Return when each token of a request came; float64 [num_output_tokens]."""
        parts = [np.array([record.first_token_s, *record.resumed_s])]
        for first, stop in record.spans:
            parts += [segment.step_ends() for segment in self.segments[first:stop]]
        return np.sort(np.concatenate(parts))

    def completed(self) -> Bools:
        """Return which requests were not aborted."""
        return np.array([not record.aborted for record in self.records], np.bool_)
