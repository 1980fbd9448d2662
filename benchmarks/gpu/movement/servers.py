"""Real servers, with layer-wise KV and without: equal answers first, then times.

Plain SGLang answers chats with a pool that holds all of them. A server with
layer-wise KV and a small pool gets the same requests, one at a time, as often as
their layers have been pushed out by each other; its answers have to be equal, bit for
bit. Before that, one that leaves pages out of what it streams has to be caught. Then
many prompts at once go to both, with the same small pool.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sgl_tiered_workloads.client import StreamingClient, run_chat
from sgl_tiered_workloads.gate import (
    Spread,
    check_equality,
    measure_spread,
    negative_control,
    widest_spread,
)
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerSpec, SglangServer
from sgl_tiered_workloads.sessions import (
    ChatShape,
    PlannedRequest,
    chat_sessions,
    random_tokens,
    replay,
)
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

__all__ = ["CUDA_FLAGS", "layered_flags", "measure_servers", "what_is_missing"]

CUDA_FLAGS = (
    "--attention-backend",
    "flashinfer",
    "--disable-overlap-schedule",
    "--cuda-graph-backend-decode",
    "disabled",
    "--cuda-graph-backend-prefill",
    "disabled",
)
"""What layer-wise KV asks for; the plain server gets the same."""
CPU_FLAGS = ("--disable-overlap-schedule",)
# Heads of 128, which FlashInfer has kernels for.
MODEL = "wide"
PAGE_TOKENS = 16
POOL_TOKENS, LARGE_POOL_TOKENS = 2_560, 32_768
HOST_FACTOR = 3
STAGED_TOKENS = 640
SHAPE = ChatShape(
    num_sessions=8,
    num_turns=3,
    system_tokens=128,
    first_tokens=400,
    user_tokens=40,
    answer_tokens=10,
)
NUM_AT_ONCE, PROMPT_TOKENS, ANSWER_TOKENS = 24, 500, 64
# What cuBLAS may move where batches differ in height; bits are asked where they agree.
FLOOR = Spread(max_logprob=0.05, mean_logprob=0.005, max_gap=0.05, num_tokens=0)
_PATIENCE_S = 300.0


def what_is_missing(*, is_cuda: bool) -> str:
    """Return what servers need and this machine lacks; empty if nothing."""
    needed = ("sglang", "flashinfer") if is_cuda else ("sglang",)
    gone = [name for name in needed if importlib.util.find_spec(name) is None]
    return ", ".join(gone)


def layered_flags() -> tuple[str, ...]:
    """Return the flags of layer-wise KV where nothing is kept and all is streamed."""
    token_bytes = PRESETS[MODEL].kv_bytes_per_token
    host_bytes = HOST_FACTOR * POOL_TOKENS * token_bytes
    staging_bytes = 2 * STAGED_TOKENS * token_bytes // PRESETS[MODEL].num_layers
    return (
        "--tiered-layerkv=on",
        f"--tiered-layerkv-host-size={host_bytes}",
        f"--tiered-layerkv-staging-size={staging_bytes}",
        "--tiered-layerkv-retain=0",
        "--tiered-layerkv-decode=stream",
        "--tiered-load-policy=always",
    )


def measure_servers(
    out: Path, *, is_cuda: bool, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield one record, after answers were compared.

    Args:
        out: for the model and the servers' logs.
        is_cuda: serve with FlashInfer on CUDA; else on the CPU platform.
        repeats: of the prompts that go at once.

    Raises:
        AssertionError: an answer differs, a fault was not seen, or nothing streamed.
        ServerStartError: a server did not start; it says why.
    """
    model = make_model(MODEL, out / "models")
    flags = (*(CUDA_FLAGS if is_cuda else CPU_FLAGS), "--chunked-prefill-size=256")
    device = Device(model, POOL_TOKENS, PAGE_TOKENS, flags)
    tiers = Tiers(64 * MB)
    plain = plain_spec(device.with_pool(LARGE_POOL_TOKENS))
    with _started(plain, out) as server:
        chat, spread = _reference(server)
    broken = tiered_spec(
        device,
        tiers,
        "layerkv-broken",
        (*layered_flags(), "--tiered-fault-corrupt=staging"),
        {"SGL_TIERED_ALLOW_FAULTS": "1"},
    )
    with _started(broken, out) as server:
        negative_control({"staging": _judged(server, chat, spread)})
    with _started(tiered_spec(device, tiers, "layerkv", layered_flags()), out) as ours:
        result = _judged(ours, chat, spread)
        assert result.passed, result.summary()
        (state,) = ours.get("/tiered/stats", _PATIENCE_S)
        layers = state["layerkv"]
        assert layers["layerkv_bytes_streamed"] > 0, f"nothing was streamed: {layers}"
        layered = [_at_once(ours) for _ in range(repeats)]
        (state,) = ours.get("/tiered/stats", _PATIENCE_S)
    with _started(plain_spec(device, "plain-small"), out) as theirs:
        plainly = [_at_once(theirs) for _ in range(repeats)]
    yield {
        "kind": "servers",
        "way": "layerkv",
        "gate": result.summary(),
        "exact_fraction": result.exact_fraction,
        "layers": state["layerkv"],
        "probe": state["probe"],
        "layered": layered,
        "plain": plainly,
    }


def _started(spec: ServerSpec, out: Path) -> SglangServer:
    return SglangServer(spec, out / "logs")


def _reference(server: SglangServer) -> tuple[list[RequestRecord], Spread]:
    """Return plain SGLang's chats, and how far it is from itself."""
    sessions = chat_sessions(SHAPE, np.random.default_rng(5), VOCAB_TOKENS)

    async def talk() -> list[RequestRecord]:
        async with StreamingClient(server.url, timeout_s=_PATIENCE_S) as client:
            return await run_chat(client, sessions)

    server.flush_cache()
    chat = asyncio.run(talk())
    cold = []
    for request in replay(chat[::3]):
        server.flush_cache()
        cold += _sequential(server, [request])
    assert all(record.error is None for record in [*chat, *cold]), "plain has failed"
    return chat, widest_spread([measure_spread(chat[::3], cold), FLOOR])


def _judged(server: SglangServer, chat: Sequence[RequestRecord], spread: Spread) -> Any:
    answers = _sequential(server, replay(chat))
    return check_equality(chat, answers, page_size=PAGE_TOKENS, spread=spread)


def _sequential(
    server: SglangServer, requests: Sequence[PlannedRequest]
) -> list[RequestRecord]:
    async def run() -> list[RequestRecord]:
        async with StreamingClient(server.url, timeout_s=_PATIENCE_S) as client:
            return await client.run_sequential(requests)

    return asyncio.run(run())


def _at_once(server: SglangServer) -> dict[str, Any]:
    """Send prompts all at once; return seconds to the first token, and in all."""
    generator = np.random.default_rng(31)
    requests = [
        PlannedRequest(
            f"m{number}",
            random_tokens(generator, PROMPT_TOKENS, VOCAB_TOKENS),
            ANSWER_TOKENS,
        )
        for number in range(NUM_AT_ONCE)
    ]

    async def run() -> list[RequestRecord]:
        async with StreamingClient(server.url, timeout_s=_PATIENCE_S) as client:
            return await client.run_open_loop(requests)

    server.flush_cache()
    began = time.perf_counter()
    records = asyncio.run(run())
    total_s = time.perf_counter() - began
    assert all(record.error is None for record in records), "a request has failed"
    first = [record.token_times_s[0] - record.started_s for record in records]
    return {
        "ttft_s": first,
        "mean_ttft_s": statistics.mean(first),
        "total_s": total_s,
    }
