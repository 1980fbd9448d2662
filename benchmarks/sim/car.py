"""CaR Figure 5: TTFT of a prompt recomputed, and of the same with its KV reloaded."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.core.ids import TierId
from sgl_tiered.sim.config import SchedulerConfig, ServerConfig, TierSetup
from sgl_tiered.sim.hardware import CXL, LinkSpeed, find_hardware
from sgl_tiered.sim.models import find_model
from sgl_tiered.sim.requests import WorkloadBuilder
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.times import times_of_profile

__all__ = ["MODELS", "ReloadPoint", "break_even_bytes_per_s", "figure_5"]

PAGE = 16
MODELS = {
    "OPT-6.7B": (1, 2_000),
    "OPT-13B": (1, 2_000),
    "OPT-30B": (4, 2_000),
    "Llama-2-7B": (1, 16_000),
    "Llama-2-13B": (2, 16_000),
}
"""Devices (what the weights and one longest prompt need) and the longest prompt."""


@dataclass(frozen=True)
class ReloadPoint:
    """One model and length."""

    model: str
    num_tokens: int
    recompute_s: float
    reload_s: float
    reload_serial_s: float

    @property
    def reduction(self) -> float:
        """Part of the recompute's TTFT that a layer-wise reload saves."""
        return 1.0 - self.reload_s / self.recompute_s

    @property
    def serial_reduction(self) -> float:
        """The same where the pass starts after the whole reload (no prefetcher)."""
        return 1.0 - self.reload_serial_s / self.recompute_s


def figure_5(link: LinkSpeed = CXL) -> list[ReloadPoint]:
    """Return points for all models at an eighth, a half and all of their length."""
    points = []
    for model, (ranks, longest) in MODELS.items():
        for length in (longest // 8, longest // 2, longest):
            cold = _ttft(model, ranks, length, link, "layerwise", warm=False)
            reload_s = _ttft(model, ranks, length, link, "layerwise", warm=True)
            serial_s = _ttft(model, ranks, length, link, "waiter", warm=True)
            points.append(ReloadPoint(model, length, cold, reload_s, serial_s))
    return points


def break_even_bytes_per_s(point: ReloadPoint, reduction: float) -> float:
    """Return the bandwidth at which a serial reload saves just ``reduction``."""
    ranks, _ = MODELS[point.model]
    num_bytes = find_model(point.model).kv_token_bytes / ranks * point.num_tokens
    return num_bytes / (point.recompute_s * (1.0 - reduction))


def _ttft(
    model_name: str, ranks: int, length: int, link: LinkSpeed, mode: str, *, warm: bool
) -> float:
    """Return the TTFT of a prompt whose pages were evicted to CXL memory, or not."""
    hardware, model = find_hardware("A100-40G"), find_model(model_name)
    builder = WorkloadBuilder(PAGE, keep_answers=False)
    prompt = builder.prefix("prompt", length // PAGE)
    first = builder.add(0.0, length, 1, prefix=prompt)
    # A prompt of the device's size takes the first one's place there.
    other = builder.add(0.0, length, 1, after=first, think_s=100.0)
    builder.add(0.0, length, 1, prefix=prompt, after=other, think_s=100.0)
    token_bytes = model.kv_token_bytes // ranks
    config = ServerConfig(
        times=times_of_profile(hardware, model, tensor_parallel=ranks),
        page_tokens=PAGE,
        num_layers=model.num_layers,
        kv_token_bytes=token_bytes,
        device_tokens=length + 4 * PAGE,
        tiers=(TierSetup(TierId.CXL, 4 * length * token_bytes, link, link),),
        scheduler=SchedulerConfig(chunk_tokens=0, max_prefill_tokens=length + 1),
        load_mode=mode,
        load_policy="always" if warm else "never",
    )
    record = simulate(config, builder.build("reload")).records[2]
    assert (record.host_tokens > 0) == warm, record
    return record.ttft_s
