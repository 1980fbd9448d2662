"""Answers of layer-wise KV against plain SGLang's, one request at a time.

Every layer-page that a request reads was streamed (nothing is retained), or some were
retained and some pulled back; lengths are mixed, some prompts share a prefix. The same
schedule on both servers, so bits have to be equal. A server that leaves one page in
four out of what it streams has to be caught.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.gate import (
    GateResult,
    Spread,
    check_equality,
    measure_spread,
    negative_control,
)
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerSpec
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    MB,
    Device,
    Tiers,
    plain_spec,
    tiered_spec,
)
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

__all__ = ["compare_answers"]

PAGE = 16
POOL_TOKENS, REFERENCE_POOL_TOKENS = 2_560, 131_072
ANSWER = 8
LAYERKV = (
    "--tiered-layerkv=on",
    "--tiered-layerkv-host-size=24MB",
    # A half holds one layer of 640 tokens of the tiny model.
    "--tiered-layerkv-staging-size=327680",
)
RETAINED = ("0", "1", "auto")
"""Layers that a prompt keeps on the device; the tiny model has four."""


async def compare_answers(
    model: Path,
    logs: Path,
    first_port: int | None,
    say: Callable[[str], None],
    problems: list[str],
    num: int,
) -> dict[str, str]:
    """Compare ``num`` answers for each number of retained layers.

    Args:
        model: the tiny one.
        logs: folder of the servers' logs.
        first_port: of the servers; None for any free ones.
        say: prints a line.
        problems: gets a sentence for each comparison that failed.
        num: requests.

    Returns:
        What the gate said, by retained layers.
    """
    requests = mixed(num)
    flags = (*CPU_FLAGS, "--chunked-prefill-size", "256")
    reference = Device(model, REFERENCE_POOL_TOKENS, PAGE, flags)
    small = Device(model, POOL_TOKENS, PAGE, flags)
    plain = await _answers(plain_spec(reference), logs, first_port, say, requests)
    again = await _answers(plain_spec(reference), logs, first_port, say, requests)
    spread = measure_spread(plain, again)
    broken = tiered_spec(
        small,
        Tiers(32 * MB),
        "layerkv-broken",
        (*_flags("0"), "--tiered-fault-corrupt=staging"),
        {"SGL_TIERED_ALLOW_FAULTS": "1"},
    )
    wrong = await _answers(broken, logs, first_port, say, requests[: max(num // 5, 12)])
    negative_control({"broken staging": _compared(plain[: len(wrong)], wrong, spread)})
    say("  broken staging is caught")
    found = {}
    for retained in RETAINED:
        spec = tiered_spec(
            small, Tiers(32 * MB), f"layerkv-{retained}", _flags(retained)
        )
        answers = await _answers(spec, logs, first_port, say, requests)
        result = _compared(plain, answers, spread)
        found[retained] = result.summary()
        say(f"  {retained} layers retained: {result.summary()}")
        if not result.passed:
            problems.append(f"{retained} layers retained: {result.summary()}")
    return found


def _flags(retained: str) -> tuple[str, ...]:
    return (
        *LAYERKV,
        f"--tiered-layerkv-retain={retained}",
        "--tiered-layerkv-decode=stream",
        "--tiered-load-policy=always",
    )


def _compared(
    plain: Sequence[RequestRecord], answers: Sequence[RequestRecord], spread: Spread
) -> GateResult:
    return check_equality(plain, answers, page_size=PAGE, spread=spread)


async def _answers(
    spec: ServerSpec,
    logs: Path,
    first_port: int | None,
    say: Callable[[str], None],
    requests: Sequence[PlannedRequest],
) -> list[RequestRecord]:
    """Serve the requests one after the other on a server of their own."""
    warm_up = PlannedRequest("warm", tuple(range(100, 300)), 4)
    with Fleet({spec.name: spec}, logs, first_port, say) as fleet:
        await fleet.only([spec.name], warm_up)
        await asyncio.to_thread(fleet.servers[spec.name].flush_cache)
        async with StreamingClient(fleet.servers[spec.name].url) as client:
            return await client.run_sequential(requests)


def mixed(num: int) -> list[PlannedRequest]:
    """Return prompts of 40 to 560 tokens; every fourth shares its first 200 tokens."""
    generator = np.random.default_rng(31)
    shared = random_tokens(generator, 200, VOCAB_TOKENS)
    requests = []
    for number in range(num):
        length = int(generator.integers(40, 560))
        tokens = random_tokens(generator, length, VOCAB_TOKENS)
        if number % 4 == 0:
            tokens = (shared + tokens)[:560]
        requests.append(PlannedRequest(f"m{number}", tokens, ANSWER))
    return requests
