"""First guesses of what loading and computing cost, measured when the server starts.

Takes about a second. The pages that it touches hold nothing yet; the disk slot that it
writes is forgotten again. The costs are refined by every real load and prefill. What a
calibration file says is not measured again.

Where a device has queues of its own, its events tell the times, and it is given as much
work at a time as in service: 256 scattered pages, products of 8192^3. What is smaller
measures launches, and the way of loading that is best for it is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import KEY_BYTES
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import PageRecords
from sgl_tiered.cost.calibrated import (
    calibrated_links,
    calibrated_prefill,
    calibrated_rebuild,
)
from sgl_tiered.cost.calibration import Calibration, TokensFit
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.cost.rebuild import RebuildCosts
from sgl_tiered.cost.regression import GUESSED
from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.pipelines.stream_pool import StreamPool, scattered
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.tiers.base import MemoryTier, Tier, TierIO

__all__ = ["common_costs", "measure_costs", "num_params"]

Int64s = npt.NDArray[np.int64]

_PROBE_PAGES = 32
_MATMUL_ROWS = 512
_MATMUL_WIDTH = 2048
_MATMUL_SCALE = 16
"""The first product is so many times smaller in each direction."""
_QUEUED_SIDES = (512, 1024, 2048, 4096, 8192)
"""Of square products on an accelerator: 8192^3 in bfloat16 takes an H100 1.5 ms."""
_QUEUED_PRODUCTS, _QUEUED_RUNS = 4, 3
"""Products that are timed together, and how often; the best counts."""
_BUDGET_S = 0.2
"""For each measurement: a start is a busy time, so the best of many runs counts."""
_MAX_RUNS = 1000
_MIN_TIME_S = 1e-6
_PASS_OVERHEAD_S = 5e-3
"""A pass over a single token: Python, sampling and the weights' bytes. A guess that the
first prefills replace."""


def measure_costs(
    *,
    model: torch.nn.Module,
    layout: PageLayout,
    attention_width: int,
    device: DevicePool,
    num_device_pages: int,
    host: MemoryTier,
    num_host_slots: int,
    cxl: MemoryTier | None,
    num_cxl_slots: int,
    disk: Tier | None,
    clock: Clock,
    calibration: Calibration | None = None,
    kv_gen: Callable[[], TokensFit | None] | None = None,
) -> tuple[CostModel, dict[str, float]]:
    """Measure links and compute; return the cost model and the raw figures.

    Args:
        model: the loaded model.
        layout: shape of a page.
        attention_width: query heads times head size.
        device: the pool, of which pages 1.. are free now.
        num_device_pages: pages of the pool.
        host: the host tier, empty.
        num_host_slots: of it, from the first on, that may be used now.
        cxl: the CXL tier, empty, or None.
        num_cxl_slots: of it, as for the host.
        disk: the disk tier, or None.
        clock: for the measurements.
        calibration: of this model; what it holds is used instead of a measurement.
        kv_gen: samples the rebuilding of a layer (``rebuild_probe.py``); None where
            nothing is kept as activations.

    Returns:
        The costs, and what was measured now, by name.
    """
    figures = _tune_loads(device, num_device_pages, host, num_host_slots)
    given = {TierId.HOST: host, TierId.CXL: cxl, TierId.DISK: disk}
    tiers = [tier for tier, medium in given.items() if medium is not None]
    links = {} if calibration is None else calibrated_links(calibration, tiers)
    prefill = None if calibration is None else calibrated_prefill(calibration)
    for tier, memory in ((TierId.HOST, host), (TierId.CXL, cxl)):
        if memory is not None and tier not in links:
            num_slots = num_host_slots if memory is host else num_cxl_slots
            rows, pages = _probe_numbers(device, num_device_pages, num_slots)
            links[tier] = _memory_link(
                figures, layout, device, memory, rows, pages, clock
            )
    if disk is not None and TierId.DISK not in links:
        num_pages = _num_probe_pages(num_device_pages, num_host_slots)
        links[TierId.DISK] = _disk_link(figures, layout, host, disk, num_pages, clock)
    if prefill is None:
        flops_per_s = _matmul_flops(next(model.parameters()), clock)
        figures["flops_per_s"] = flops_per_s
        prefill = PrefillCost(
            num_params=num_params(model),
            num_layers=layout.num_layers,
            attention_width=attention_width,
            flops_per_s=flops_per_s,
            overhead_s=_PASS_OVERHEAD_S,
        )
    rebuild = None if calibration is None else calibrated_rebuild(calibration)
    fit = None if rebuild is not None or kv_gen is None else kv_gen()
    if fit is not None:
        rebuild = _probed_rebuild(figures, layout, links[TierId.HOST], fit)
    return CostModel(prefill, links, rebuild), figures


def common_costs(cost: CostModel, agreement: Agreement) -> CostModel:
    """Return costs that start from rank 0's figures on every rank.

    Args:
        cost: as this rank has measured it; a single rank keeps it.
        agreement: between the ranks.
    """
    if not agreement.is_shared:
        return cost
    figures = agreement.first(cost.snapshot())
    prefill = PrefillCost.from_coefficients(
        figures["prefill.overhead_s"],
        figures["prefill.token_s"],
        figures["prefill.pair_s"],
        GUESSED,
    )
    return CostModel(
        prefill,
        {
            tier: LinkCost(
                figures[f"link.{tier.label}.latency_s"],
                figures[f"link.{tier.label}.bandwidth_bytes_per_s"],
            )
            for tier in cost.tiers
        },
        RebuildCosts.from_snapshot(figures),
    )


def _tune_loads(
    device: DevicePool, num_device_pages: int, host: MemoryTier, num_slots: int
) -> dict[str, float]:
    """Let a pool that loads in more than one way find out which is the better one."""
    if not isinstance(device, StreamPool):
        return {}
    rows, pages = _probe_numbers(device, num_device_pages, num_slots)
    if not len(pages):
        return {}
    device.warm(pages)
    return device.tune(host.region, rows, pages)


def _num_probe_pages(num_device_pages: int, num_slots: int) -> int:
    return min(_PROBE_PAGES, num_device_pages - 1, num_slots)


def _probe_numbers(
    device: DevicePool, num_device_pages: int, num_slots: int
) -> tuple[Int64s, Int64s]:
    """Return rows of a tier, and as many free pages: int64 [n] each."""
    if isinstance(device, StreamPool):
        rng = np.random.default_rng(0)
        return scattered(rng, range(num_slots), range(1, num_device_pages))
    rows = np.arange(_num_probe_pages(num_device_pages, num_slots), dtype=np.int64)
    return rows, rows + 1


def _memory_link(
    figures: dict[str, float],
    layout: PageLayout,
    device: DevicePool,
    memory: MemoryTier,
    rows: Int64s,
    pages: Int64s,
    clock: Clock,
) -> LinkCost:
    one, many = (
        _shortest(clock, partial(_load_s, clock, device, memory, rows[:n], pages[:n]))
        for n in (1, len(rows))
    )
    return _link(figures, memory.tier_id.label, layout, len(rows), one, many)


def _probed_rebuild(
    figures: dict[str, float], layout: PageLayout, link: LinkCost, fit: TokensFit
) -> RebuildCosts:
    """Return T_kv_gen as sampled, and T_load_kv by the link from the host."""
    figures["kv_gen_overhead_s"] = fit.overhead_s
    figures["kv_gen_token_s"] = fit.token_s
    figures["kv_gen_r2"] = fit.quality.r2
    line = link.snapshot()
    return RebuildCosts.probed(
        fit,
        line.latency_s,
        line.bandwidth_bytes_per_s,
        2 * layout.token_bytes,
        layout.num_layers,
    )


def _load_s(
    clock: Clock, device: DevicePool, memory: MemoryTier, rows: Int64s, pages: Int64s
) -> float:
    """Load all layers of pages and return the seconds of it, as a real load is timed.

    Where copies are queued they are the device's, and queueing's are nobody's.
    """
    begin_s, queued_s = clock.now(), 0.0
    arrivals = [
        device.load_layer(layer, memory.region, rows, pages)
        for layer in range(device.layout.num_layers)
    ]
    copies_s = sum(arrival.finish() for arrival in arrivals if arrival is not None)
    if isinstance(device, StreamPool):
        begin_s, queued_s = clock.now(), copies_s
    memory.charge(len(rows) * device.layout.page_bytes)
    return queued_s + clock.now() - begin_s


def _disk_link(
    figures: dict[str, float],
    layout: PageLayout,
    host: MemoryTier,
    disk: Tier,
    num_pages: int,
    clock: Clock,
) -> LinkCost:
    """Write probe pages behind everything that is kept, read them, forget them."""
    count = min(num_pages, disk.num_slots)
    rows = np.arange(count, dtype=np.int64)
    addresses = disk.num_slots - count + rows
    if disk.holds(addresses).any():
        # Full of pages from before: nothing is sacrificed for a measurement.
        figures["disk_bandwidth_bytes_per_s"] = 0.0
        return LinkCost(1e-3, 1e9)
    records = PageRecords(
        namespaces=np.zeros((count, KEY_BYTES), np.uint8),
        keys=np.zeros((count, KEY_BYTES), np.uint8),
        parents=np.zeros((count, KEY_BYTES), np.uint8),
        tokens=np.zeros((count, layout.page_tokens), np.int32),
        checksums=np.zeros(count, np.uint64),
        addresses=addresses,
    )
    disk.store(TierIO(addresses, host.region, rows, records))
    one, many = (
        _seconds(
            clock, lambda n=n: disk.load(TierIO(addresses[:n], host.region, rows[:n]))
        )
        for n in (1, count)
    )
    disk.forget(addresses)
    return _link(figures, "disk", layout, count, one, many)


def _link(
    figures: dict[str, float],
    name: str,
    layout: PageLayout,
    num_pages: int,
    one_s: float,
    many_s: float,
) -> LinkCost:
    num_bytes = max(num_pages - 1, 1) * layout.page_bytes
    bandwidth = num_bytes / max(many_s - one_s, _MIN_TIME_S)
    latency = max(one_s - layout.page_bytes / bandwidth, _MIN_TIME_S)
    figures[f"{name}_bandwidth_bytes_per_s"] = bandwidth
    figures[f"{name}_latency_s"] = latency
    return LinkCost(latency, bandwidth)


def _seconds(clock: Clock, work: Any) -> float:
    """Return the shortest of all runs that fit into the budget, at least three."""

    def timed() -> float:
        started = clock.now()
        work()
        return clock.now() - started

    return _shortest(clock, timed)


def _shortest(clock: Clock, timed: Callable[[], float]) -> float:
    """Do the same for what tells its seconds itself."""
    shortest, num_runs = float("inf"), 0
    begin = clock.now()
    while num_runs < 3 or clock.now() - begin < _BUDGET_S:
        shortest = min(shortest, timed())
        num_runs += 1
        if num_runs >= _MAX_RUNS:
            break
    return max(shortest, _MIN_TIME_S)


def _matmul_flops(like: torch.Tensor, clock: Clock) -> float:
    """Return the operations per second of a matrix product.

    It is the largest that fits into the budget: where torch has no kernel for the type,
    as for bfloat16 on a CPU without AVX-512, the large one takes a minute.
    """
    # Weights of other types are multiplied as these, once they have been made so.
    is_plain = like.dtype.is_floating_point and like.dtype.itemsize > 1
    like = torch.empty(
        0, dtype=like.dtype if is_plain else torch.bfloat16, device=like.device
    )
    if like.device.type != "cpu":
        return _queued_flops(like)
    scale = _MATMUL_SCALE
    while True:
        rows, width = _MATMUL_ROWS // scale, _MATMUL_WIDTH // scale
        left = torch.ones(rows, width, dtype=like.dtype, device=like.device)
        right = torch.ones(width, width, dtype=like.dtype, device=like.device)

        def product(left: torch.Tensor = left, right: torch.Tensor = right) -> None:
            float((left @ right)[0, 0])

        product()
        started = clock.now()
        product()
        # Twice as wide is eight times as much.
        is_last = scale == 1 or 8 * (clock.now() - started) > _BUDGET_S
        if is_last:
            return 2.0 * rows * width * width / _seconds(clock, product)
        scale //= 2


def _queued_flops(like: torch.Tensor) -> float:
    """Return the operations per second of the largest product on an accelerator.

    The largest up to 8192^3 that has room there and fits into the budget.
    """
    flops_per_s = 0.0
    try:
        with torch.cuda.device_of(like):
            for side in _QUEUED_SIDES:
                seconds = _queued_product_s(like, side)
                flops_per_s = 2.0 * side**3 / seconds
                # Twice as wide is eight times as much.
                if 8 * _QUEUED_PRODUCTS * seconds > _BUDGET_S:
                    break
    except torch.OutOfMemoryError:
        # At a start most of the memory is taken. The size before it has to do.
        if not flops_per_s:
            raise
    # What was taken for it is nobody's any more, also beside torch.
    torch.cuda.empty_cache()
    return flops_per_s


def _queued_product_s(like: torch.Tensor, side: int) -> float:
    """Return the seconds of one product of several that are queued, by the device."""
    left, right = (
        torch.randn(side, side, dtype=like.dtype, device=like.device) for _ in range(2)
    )
    out = torch.empty_like(left)

    def product() -> None:
        torch.matmul(left, right, out=out)

    # The first one chooses a kernel, and loads it.
    product()
    seconds: list[float] = []
    for _ in range(_QUEUED_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_QUEUED_PRODUCTS):
            product()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / _QUEUED_PRODUCTS)
    return max(min(seconds), _MIN_TIME_S)


def num_params(model: torch.nn.Module) -> int:
    """Count the parameters that every token is multiplied with.

    The embedding is looked up, not multiplied with.
    """
    sizes = [(int(p.numel()), p.dim()) for p in model.parameters()]
    embedding = max((size for size, dims in sizes if dims == 2), default=0)
    return max(sum(size for size, _ in sizes) - embedding, 1)
