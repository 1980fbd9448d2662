"""SLO admission on a real engine: who is held is answered as if nobody was."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.gate import check_equality, measure_spread
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import (
    PATIENCE_S,
    Case,
    open_loop,
    pinned,
    sequential,
    settle,
    stats,
    wait_until,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

# With the overlap schedule, and prompts of several chunks.
CASE = Case(16, chunk_tokens=256)
POOL_TOKENS = 32_768
SETTINGS = {"slo": (), "mixed": ("--enable-mixed-chunk",)}
"""Flags of SGLang: chunks between decode steps, or together with them."""
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 20, 1_000, 8
GUARDED_TOKENS = 400
ATTEMPTS = 8


@pytest.fixture(params=["slo", pytest.param("mixed", marks=pytest.mark.full)])
def server(request, servers, model):
    """A server on which TTFT has a target and TPOT only where a request asks."""
    flags = SETTINGS[request.param]
    device = CASE.device(model, POOL_TOKENS)
    device = replace(device, flags=device.flags + flags)
    ours = ("--tiered-admission=slo", "--tiered-slo-ttft=30")
    return servers.get(tiered_spec(device, Tiers(64 * MB), request.param, ours))


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(31)
    return [
        PlannedRequest(
            f"s{i}",
            random_tokens(generator, PROMPT_TOKENS, VOCAB_TOKENS),
            ANSWER_TOKENS,
        )
        for i in range(NUM_PROMPTS)
    ]


def guarded(server, prompts, tpot_s):
    """Return the prompts' answers, sent while a request with a TPOT target decodes."""

    def num_steps():
        return stats(server)["admission"]["steps_observed"]

    before = num_steps()

    async def run():
        async with StreamingClient(server.url, timeout_s=PATIENCE_S) as client:
            shield = asyncio.create_task(
                asyncio.to_thread(shielded, server, prompts[0].prompt[:64], tpot_s)
            )
            await asyncio.to_thread(
                wait_until, lambda: num_steps() > before, "the guarded one decodes"
            )
            records = await client.run_open_loop(prompts)
            await shield
            return records

    return asyncio.run(run())


def shielded(server, prompt, tpot_s, **fields):
    """Send a request with a target of its own."""
    sampling = {
        "temperature": 0.0,
        "max_new_tokens": GUARDED_TOKENS,
        "ignore_eos": True,
        "custom_params": {"tiered": {"tpot_s": tpot_s}},
    }
    body = {"input_ids": list(prompt), "sampling_params": sampling, **fields}
    return server.post("/generate", body, PATIENCE_S)


def test_held_prompts_are_answered_like_others(server, prompts):
    """While one request's TPOT is guarded others wait, and get the same answers."""
    server.flush_cache()
    plain = sequential(server, prompts)
    assert stats(server)["admission"]["held"] == 0, "nobody decoded meanwhile"
    server.flush_cache()
    # In batches of other sizes, but not held: how much that alone changes.
    spread = measure_spread(plain, open_loop(server, prompts))
    assert stats(server)["admission"]["held"] == 0, "nobody has a TPOT target"
    for attempt in range(ATTEMPTS):
        server.flush_cache()
        # As it is lately: a machine that others load too has longer steps by turns.
        step_s = stats(server)["admission"]["step_s"]["batch_16"]
        records = guarded(server, prompts, step_s * (0.8 + attempt / 4))
        assert [record.error for record in records] == [None] * NUM_PROMPTS
        if stats(server)["admission"]["held"]:
            break
    state = settle(server)
    assert state["admission"]["held"] > 0
    assert state["admission"]["steps_observed"] > 0
    assert pinned(state) == 0
    result = check_equality(
        plain, records, page_size=16, spread=spread, forced=False, slack=2.0
    )
    assert result.passed, result.summary()


def test_targets_arrive_by_every_endpoint(server):
    """What is no time is counted, so the count tells that it came: /generate, the
    completions and the chat of the OpenAI endpoints."""
    before = stats(server)["admission"]["bad_targets"]
    wish = {"tiered": {"tpot_s": "soon"}}
    shielded(server, range(100, 164), "soon")
    common = {"model": "default", "max_tokens": 4, "custom_params": wish}
    server.post("/v1/completions", {"prompt": "a b c d", **common}, PATIENCE_S)
    chat = {"messages": [{"role": "user", "content": "a b c d"}], **common}
    server.post("/v1/chat/completions", chat, PATIENCE_S)
    assert stats(server)["admission"]["bad_targets"] == before + 3
