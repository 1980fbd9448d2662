"""What a server pays for being in a pool, and what it gets from it.

Three servers: plain SGLang, one with tiers in a pool, and a peer in the same pool.
Prompts that never come again go to the first two in turns: the pool can only cost
there, as the peers are asked for every prompt. Then documents that the peer has
computed go to the second server, in turns with documents that nobody has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from movement.tools import Prompts, answered, interval
from parts.arms import PAGE, TIERS, device
from parts.loads import DOCUMENT_TOKENS
from reuse.parts import pair_ratios, run_no_reuse
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.cluster.members import COLOCATED, Member, new_member
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import SglangServer

__all__ = ["PEER", "POOLED", "SOLE", "measure_pooled", "pooled_members"]

SOLE, POOLED, PEER = "plain", "pooled", "peer"
RUN_PROMPTS, MIN_RUNS, MAX_RUNS, HALF_WIDTH = 6, 9, 15, 0.01
NUM_DOCUMENTS = 8


def pooled_members(model: Path, ports: Ports, pool: str) -> list[Member]:
    """Return the three servers."""
    flags = (*TIERS, "--tiered-pool", pool)
    shared = device(model)
    return [
        new_member(
            shared,
            COLOCATED,
            name,
            ports,
            flags=() if name == SOLE else (*flags, "--tiered-pool-name", name),
            events=False,
        )
        for name in (SOLE, POOLED, PEER)
    ]


async def measure_pooled(
    servers: Mapping[str, SglangServer],
    rng: np.random.Generator,
    say: Callable[[str], None],
    problems: list[str],
) -> dict[str, Any]:
    """Return throughput without reuse over plain's, and TTFT of pulled prompts.

    Args:
        servers: running, by name.
        rng: of the prompts.
        say: prints a line.
        problems: where what must not be is noted.
    """
    prompts = Prompts(rng)
    await _documents(servers, prompts, 2)  # The first ones connect and warm up.
    pair = {name: servers[name] for name in (SOLE, POOLED)}
    rates, _, records = await run_no_reuse(
        pair, RUN_PROMPTS, MIN_RUNS, MAX_RUNS, HALF_WIDTH, lambda: False, say
    )
    equal = check_equality(records[SOLE], records[POOLED], page_size=PAGE)
    if not equal.passed:
        problems.append(f"{POOLED}: {equal.summary()}")
    ratios = pair_ratios(rates, POOLED)
    told = interval(ratios)
    say(f"  no reuse: {told.value:.3f} of plain ({told.low:.3f} to {told.high:.3f})")
    pulled, computed = await _documents(servers, prompts, NUM_DOCUMENTS)
    shares = [record.cached_tokens / len(record.prompt) for record in pulled]
    if min(shares) < 0.5:
        problems.append(f"{POOLED}: a prompt that the peer has was not pulled")
    times = [[r.ttft_s for r in records] for records in (pulled, computed)]
    pulled_s, computed_s = (float(np.median(each)) for each in times)
    say(f"  pulled: TTFT {pulled_s:.3f} s, computed {computed_s:.3f} s")
    return {
        "pooled_no_reuse_vs_plain": told.value,
        "pooled_no_reuse_interval": [told.low, told.high],
        "pooled_no_reuse_runs": len(ratios),
        "pulled_ttft_vs_computed": pulled_s / computed_s,
    }


async def _documents(
    servers: Mapping[str, SglangServer], prompts: Prompts, count: int
) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """Send documents that the peer has, and as many that nobody has, in turns."""
    pulled, computed = [], []
    async with (
        StreamingClient(servers[PEER].url) as there,
        StreamingClient(servers[POOLED].url) as here,
    ):
        for number in range(count):
            known = prompts.after((), DOCUMENT_TOKENS, f"known{number}.t0")
            fresh = prompts.after((), DOCUMENT_TOKENS, f"fresh{number}.t0")
            answered(await there.send(known))
            await asyncio.sleep(0.5)  # Until the peer has offloaded it.
            pulled.append(answered(await here.send(known)))
            computed.append(answered(await here.send(fresh)))
    return pulled, computed
