"""Loads under the forward, and offloads under prefill: what the overlap is worth.

Load: host memory behind a throttle, set so that bringing 2,000 cached tokens takes
0.25, 0.5, 1, 2 and 4 times as long as computing 2,000 new ones after them. Per setting,
in turns: the forward alone (the 2,000 on the device), the load alone (16 new tokens,
less the same with the 2,000 on the device), and both at once. The figure is the time of
both over ``max(load, forward)`` plus the first layer's load, medians each; bytes are
really copied, the throttle only adds the time that they would take.

Offload: prompts that never come again, on plain SGLang and with tiers, which offload
all of them, in turns: the median of the paired ratios of throughput. No throttle.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
from movement.ending import run_to_end
from movement.tools import Prompts, drop, interval, send, stats, wait_for_pages
from reuse.parts import pair_ratios, run_no_reuse
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.server import (
    ServerSpec,
    SglangServer,
)
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    Device,
    Tiers,
    plain_spec,
    tiered_spec,
)

PARTS = ("load", "offload")
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
CACHED_TOKENS = NEW_TOKENS = 2_000
FEW_TOKENS = 16
PAGE = 16
POOL_TOKENS = 16_384
HOST_BYTES = 600_000_000
HALF_WIDTH = 0.005
RUN_PROMPTS = 4
BENCH = PRESETS["bench"]
LOAD_BYTES = CACHED_TOKENS * BENCH.kv_bytes_per_token


class Bench:
    """One run of the bench."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = time.monotonic()
        self.prompts = Prompts(np.random.default_rng(5))

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    async def run(self) -> dict[str, Any]:
        """Measure the parts asked for and return the result."""
        model = await asyncio.to_thread(make_model, "bench", self.args.models.resolve())
        device = Device(model, POOL_TOKENS, flags=CPU_FLAGS)
        result: dict[str, Any] = {}
        if "load" in self.args.part:
            settings = await self._loads(device)
            worst = max(found["efficiency"] for found in settings.values())
            result |= {"pipeline_efficiency_worst": worst, "load": settings}
        if "offload" in self.args.part:
            found = await self._offloads(device)
            result |= {"offload_throughput_vs_off": found["ratio"], "offload": found}
        return result

    async def _loads(self, device: Device) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        forward_s = 0.0
        for ratio in self.args.ratio:
            if not forward_s:
                # How long a forward takes decides how slow the links are to be.
                with self._server(device, None) as server:
                    prefix = await self._prefix(server)
                    times = [
                        await self._with(server, prefix, NEW_TOKENS, on_device=True)
                        for _ in range(self.args.rounds)
                    ]
                forward_s = float(np.median(times))
                self.say(f"a forward over {NEW_TOKENS} new tokens: {forward_s:.3f} s")
            bandwidth = LOAD_BYTES / (ratio * forward_s)
            with self._server(device, bandwidth) as server:
                settings[f"{ratio:g}"] = await self._load(server, bandwidth)
        return settings

    def _server(self, device: Device, bandwidth: float | None) -> SglangServer:
        # Selective: the fresh tokens are seen once and so never take the link.
        flags: tuple[str, ...] = (
            "--tiered-load-policy",
            "always",
            "--tiered-write-policy",
            "selective",
        )
        if bandwidth is not None:
            flags += ("--tiered-emulate", f"host:bandwidth={bandwidth / 1e3:.0f}KB")
        spec: ServerSpec = tiered_spec(device, Tiers(HOST_BYTES), flags=flags)
        logs = self.args.out.resolve() / "logs"
        return SglangServer(spec, logs, self.args.first_port, say=self.say)

    async def _prefix(self, server: SglangServer) -> tuple[int, ...]:
        """Bring 2,000 tokens into host memory; return them."""
        await send(server, [self.prompts.after((), NEW_TOKENS, "warm")])
        prefix = self.prompts.tokens(CACHED_TOKENS)
        for _ in range(2):
            await send(server, [self.prompts.after(prefix, FEW_TOKENS, "fill")])
        await wait_for_pages(server, "host", CACHED_TOKENS // PAGE)
        return prefix

    async def _with(
        self,
        server: SglangServer,
        prefix: tuple[int, ...],
        num_new: int,
        *,
        on_device: bool,
    ) -> float:
        """Return the TTFT of a prompt whose prefix is on the device, or in the host."""
        if not on_device:
            await asyncio.to_thread(drop, server, "device")
        request = self.prompts.after(prefix, num_new, "measured")
        return (await send(server, [request]))[0]

    async def _load(self, server: SglangServer, bandwidth: float) -> dict[str, Any]:
        prefix = await self._prefix(server)
        times: dict[str, list[float]] = {}
        before = stats(server)
        for _ in range(self.args.rounds):
            # A load leaves its pages on the device for the request after it.
            for name, num_new, on_device in (
                ("both", NEW_TOKENS, False),
                ("forward", NEW_TOKENS, True),
                ("load and few", FEW_TOKENS, False),
                ("few", FEW_TOKENS, True),
            ):
                taken = await self._with(server, prefix, num_new, on_device=on_device)
                times.setdefault(name, []).append(taken)
        after = stats(server)
        moved = _loaded_bytes(after) - _loaded_bytes(before)
        assert moved == 2 * self.args.rounds * LOAD_BYTES, f"{moved} bytes were loaded"
        load_s = float(
            np.median(times["load and few"]) - np.median(times["few"]),
        )
        forward_s, both_s = (float(np.median(times[n])) for n in ("forward", "both"))
        ideal_s = max(load_s, forward_s) + load_s / BENCH.num_layers
        pairs = interval([both / ideal_s for both in times["both"]])
        self.say(
            f"load {load_s:.3f} s, forward {forward_s:.3f} s, both {both_s:.3f} s: "
            f"{both_s / ideal_s:.3f} of the ideal"
        )
        counters = after["counters"]
        return {
            "efficiency": both_s / ideal_s,
            "efficiency_low": pairs.low,
            "efficiency_high": pairs.high,
            "load_s": load_s,
            "forward_s": forward_s,
            "both_s": both_s,
            "emulated_bandwidth_bytes_per_s": bandwidth,
            "stall_s_per_load": counters["load_stall_s"] / (2 * self.args.rounds),
        }

    async def _offloads(self, device: Device) -> dict[str, Any]:
        specs = {
            "plain": plain_spec(device),
            "tiered": tiered_spec(device, Tiers(HOST_BYTES)),
        }
        logs = self.args.out.resolve() / "logs"
        with Fleet(specs, logs, self.args.first_port, self.say) as fleet:
            warm_up = PlannedRequest("warm", tuple(range(100, 1_700)), 4)
            await fleet.only(specs, warm_up)
            deadline_s = time.monotonic() + 60 * self.args.minutes
            rates, moved, _ = await run_no_reuse(
                fleet.servers,
                RUN_PROMPTS,
                self.args.min_pairs,
                self.args.max_pairs,
                HALF_WIDTH,
                lambda: time.monotonic() > deadline_s,
                self.say,
            )
        ratio = interval(pair_ratios(rates, "tiered"))
        return {
            "ratio": ratio.value,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "num_pairs": len(rates["tiered"]),
            "offloaded_bytes": moved["tiered"].get("device->host", 0),
        }


def _loaded_bytes(found: dict[str, Any]) -> int:
    edge = found["edges"].get("host->device")
    return 0 if edge is None else int(edge["bytes"])


def main() -> int:
    """Run the bench; 0 unless a server failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-pipeline"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--ratio", action="append", type=float)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--min-pairs", type=int, default=20)
    parser.add_argument("--max-pairs", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=12.0, help="of the pairs")
    parser.add_argument("--first-port", type=int, help="default: any free ports")
    args = parser.parse_args()
    args.part = args.part or list(PARTS)
    args.ratio = args.ratio or list(RATIOS)
    return run_to_end(Bench(args).run(), args.out)


if __name__ == "__main__":
    raise SystemExit(main())
