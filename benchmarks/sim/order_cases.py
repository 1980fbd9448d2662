"""Servers and loads under which orders of the queue are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from sgl_tiered_workloads.traces.base import Trace
from sgl_tiered_workloads.traces.mooncake import read_mooncake
from sgl_tiered_workloads.traces.weka import read_weka

from sgl_tiered.cli.simulate_workload import from_trace
from sgl_tiered.core.ids import TierId
from sgl_tiered.sim.config import SchedulerConfig, ServerConfig, TierSetup
from sgl_tiered.sim.hardware import NVME, HardwareProfile, LinkSpeed, find_hardware
from sgl_tiered.sim.models import ModelShape, find_model
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder
from sgl_tiered.sim.spec import SimSpec
from sgl_tiered.sim.synthetic import shared_prefixes
from sgl_tiered.sim.times import times_of_profile

__all__ = ["Case", "shaken", "synthetic_cases", "trace_cases"]

PAGE = 16
GB = 1e9
MODEL = find_model("Llama-3.1-8B")
HARDWARE = find_hardware("H800")


@dataclass(frozen=True)
class Case:
    """One load on one server.

    Attributes:
        name: in tables.
        mixes_tiers: waiting requests have their prefixes in different tiers.
        chosen_on: parameters of the order were chosen on it.
        make: returns server and load for a seed.
        num_seeds: runs whose times are put together.
    """

    name: str
    mixes_tiers: bool
    chosen_on: bool
    make: Callable[[int], tuple[ServerConfig, SimWorkload]]
    num_seeds: int = 3


def server(
    device_tokens: int,
    host_tokens: int = 0,
    disk_tokens: int = 0,
    *,
    disk_read: LinkSpeed | None = None,
    chunk_tokens: int = 8_192,
    max_running: int = 256,
    hardware: HardwareProfile = HARDWARE,
    model: ModelShape = MODEL,
) -> ServerConfig:
    """Return a server with tiers of so many tokens."""
    size = model.kv_token_bytes
    tiers = []
    if host_tokens:
        tiers.append(
            TierSetup(TierId.HOST, host_tokens * size, hardware.host, hardware.host)
        )
    if disk_tokens:
        read = disk_read or NVME["read"]
        tiers.append(TierSetup(TierId.DISK, disk_tokens * size, read, NVME["write"]))
    return ServerConfig(
        times=times_of_profile(hardware, model),
        page_tokens=PAGE,
        num_layers=model.num_layers,
        kv_token_bytes=size,
        device_tokens=device_tokens,
        tiers=tuple(tiers),
        scheduler=SchedulerConfig(
            ignore_eos=True, chunk_tokens=chunk_tokens, max_running=max_running
        ),
    )


def text_analysis(
    rate_per_s: float, num_requests: int, clients: int = 0
) -> Callable[[int], tuple[ServerConfig, SimWorkload]]:
    """Return 128 prefixes of 512 tokens, bodies of 128, answers of 32.

    Device, host and disk hold 8, 32 and 128 prefixes; the device has room for eight
    bodies and answers as well. The disk is throttled so that a reload costs half of a
    recompute. Device and model are the Berkeley report's.
    """
    hardware, model = find_hardware("RTX-3090"), find_model("Llama-2-7B")
    prefix, body, output = 512, 128, 32
    own = -(-(body + output + PAGE) // PAGE) * PAGE
    compute_s = times_of_profile(hardware, model).prefill_s([(0, prefix)])
    speed = prefix * model.kv_token_bytes / (compute_s / 2)
    disk = LinkSpeed(speed, 80e-6, "throttled: a reload is half of a recompute")

    def make(seed: int) -> tuple[ServerConfig, SimWorkload]:
        load = shared_prefixes(
            num_requests,
            rate_per_s,
            128,
            prefix,
            body,
            output,
            PAGE,
            np.random.default_rng(seed),
            num_clients=clients,
            keep_bodies=False,
        )
        config = server(
            8 * (prefix + own),
            32 * prefix,
            128 * prefix,
            disk_read=disk,
            chunk_tokens=2_048,
            max_running=8,
            hardware=hardware,
            model=model,
        )
        return config, load

    return make


def chat(
    num_sessions: int, rate_per_s: float
) -> Callable[[int], tuple[ServerConfig, SimWorkload]]:
    """Return conversations of six turns over one of four system prompts.

    The device holds a tenth of what all of them leave behind, the host a half.
    """

    def make(seed: int) -> tuple[ServerConfig, SimWorkload]:
        rng = np.random.default_rng(seed)
        builder = WorkloadBuilder(PAGE)
        starts = np.cumsum(rng.exponential(1.0 / rate_per_s, size=num_sessions))
        for session, start_s in enumerate(starts.tolist()):
            system = int(rng.integers(4))
            shared = builder.prefix(("system", system), 1_024 // PAGE)
            own = int(rng.lognormal(6.5, 1.0))
            tokens, after = 1_024 + own, -1
            ids = np.concatenate([shared, builder.fresh(40_000 // PAGE)])
            for _ in range(6):
                tokens = min(tokens, 32_000)
                answer = int(np.clip(rng.lognormal(5.0, 0.8), 8, 1_024))
                after = builder.add(
                    start_s if after < 0 else 0.0,
                    tokens,
                    answer,
                    prefix=ids[: (tokens + answer - 1) // PAGE],
                    own_pages=False,
                    after=after,
                    think_s=float(rng.exponential(20.0)),
                )
                tokens += answer + int(np.clip(rng.lognormal(4.5, 1.0), 8, 4_096))
            del session
        return server(200_000, 1_000_000, 4_000_000), builder.build("chat")

    return make


def decode_pressure(
    rate_per_s: float, num_requests: int
) -> Callable[[int], tuple[ServerConfig, SimWorkload]]:
    """Return long answers that fill the pool, over prefixes that the host holds.

    Of 200 prefixes of 2,048 tokens the device has room for a dozen beside the running
    requests, the host for all.
    """

    def make(seed: int) -> tuple[ServerConfig, SimWorkload]:
        rng = np.random.default_rng(seed)
        builder = WorkloadBuilder(PAGE)
        arrivals = np.cumsum(rng.exponential(1.0 / rate_per_s, size=num_requests))
        ranks = np.arange(1, 201, dtype=np.float64) ** -0.7
        chosen = rng.choice(200, size=num_requests, p=ranks / ranks.sum())
        for arrival_s, which in zip(arrivals.tolist(), chosen.tolist(), strict=True):
            body = int(np.clip(rng.lognormal(5.0, 0.7), 16, 2_048))
            output = int(np.clip(rng.lognormal(6.2, 0.6), 32, 2_048))
            prefix = builder.prefix(which, 2_048 // PAGE)
            builder.add(arrival_s, 2_048 + body, output, prefix=prefix, own_pages=False)
        return server(100_000, 600_000, max_running=48), builder.build("decode")

    return make


def mixed_queue(
    rate_per_s: float, num_requests: int, long_share: float
) -> Callable[[int], tuple[ServerConfig, SimWorkload]]:
    """Return prompts of 16k tokens among short ones, half of them known to a tier.

    Long ones come from 40 documents of 15,360 tokens, short ones from 400 templates of
    512 tokens; the device holds a few documents, the host half of them, the disk all.
    """

    def make(seed: int) -> tuple[ServerConfig, SimWorkload]:
        rng = np.random.default_rng(seed)
        builder = WorkloadBuilder(PAGE)
        arrivals = np.cumsum(rng.exponential(1.0 / rate_per_s, size=num_requests))
        for arrival_s in arrivals.tolist():
            is_known = bool(rng.random() < 0.5)
            if rng.random() < long_share:
                prefix = builder.prefix(("long", int(rng.integers(40))), 15_360 // PAGE)
                length, output = 16_384, 128
            else:
                prefix = builder.prefix(("short", int(rng.integers(400))), 512 // PAGE)
                length, output = 512 + int(rng.integers(64, 512)), 128
            known = prefix if is_known else None
            builder.add(arrival_s, length, output, prefix=known)
        config = server(150_000, 400_000, 2_000_000)
        return config, builder.build("mixed")

    return make


def synthetic_cases(scale: float = 1.0) -> list[Case]:
    """Return the cases that need no trace; ``scale`` shortens them."""

    def n(num: int) -> int:
        return max(int(num * scale), 40)

    return [
        Case("text analysis, 5/s", True, False, text_analysis(5.0, n(4_000))),
        Case("text analysis, 7/s", True, True, text_analysis(7.0, n(4_000))),
        Case(
            "text analysis, 64 clients",
            True,
            False,
            text_analysis(float("inf"), n(4_000), clients=64),
        ),
        Case("chat", True, False, chat(n(800), 20.0)),
        Case(
            "decode pressure, host hits",
            True,
            True,
            decode_pressure(6.5, n(2_500)),
        ),
        Case("mixed, 10 % of 16k", True, True, mixed_queue(8.0, n(3_000), 0.1)),
        Case("mixed, 2 % of 16k", True, False, mixed_queue(18.0, n(3_000), 0.02)),
    ]


def trace_cases(mooncake: Path | None, weka: Path | None, scale: float) -> list[Case]:
    """Return the cases of the traces that are given; a seed is a window of the trace.

    Windows follow each other from the trace's beginning, as many as it has, up to
    three; the server is empty at the start of each.
    """
    cases = []
    if mooncake is not None:
        windows = _windows(read_mooncake(mooncake), max(int(4_000 * scale), 40))
        cases += [
            _trace_case("mooncake, 0.9/s", windows, 0.9),
            _trace_case("mooncake, 1.2/s", windows, 1.2),
        ]
    if weka is not None:
        trace = read_weka(weka, max_prompt_tokens=128_000)
        windows = _windows(trace, max(int(3_000 * scale), 40))
        cases.append(_trace_case("weka dev", windows, 1.0, sessions=True))
    return cases


def _windows(trace: Trace, num_requests: int) -> list[Trace]:
    """Return up to three windows of so many requests, each with a clock from 0."""
    windows = []
    num = min(max(len(trace.requests) // num_requests, 1), 3)
    for first in range(0, num * num_requests, num_requests):
        requests = trace.requests[first : first + num_requests]
        start_s = requests[0].arrival_s
        moved = [replace(r, arrival_s=r.arrival_s - start_s) for r in requests]
        windows.append(Trace(trace.name, trace.block_tokens, tuple(moved)))
    return windows


def _trace_case(
    name: str, windows: list[Trace], rate_per_s: float, *, sessions: bool = False
) -> Case:
    def make(seed: int) -> tuple[ServerConfig, SimWorkload]:
        spec = SimSpec(rate=rate_per_s, page_size=PAGE, sessions=sessions)
        config = server(412_000, 1_000_000, 8_000_000)
        return config, from_trace(windows[seed], spec)

    return Case(name, True, False, make, num_seeds=len(windows))


def shaken(load: SimWorkload, seed: int) -> SimWorkload:
    """Return the same load with every request sent up to a millisecond later.

    What changes then in a figure is chance: which requests share a pass, who is just
    before whom. A difference between two orders that is no larger says nothing.
    """
    late_s = np.random.default_rng(seed).uniform(0.0, 1e-3, size=len(load.requests))
    requests = tuple(
        replace(request, arrival_s=request.arrival_s + late)
        if request.after < 0
        else replace(request, think_s=request.think_s + late)
        for request, late in zip(load.requests, late_s.tolist(), strict=True)
    )
    return replace(load, requests=requests)
