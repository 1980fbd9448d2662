"""A crowded server: priorities that preempt, a tight pool, chunks beside decoding.

Plain SGLang answers the same requests one at a time, on a pool that holds everything.
"""

import re

import pytest
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec, tiered_spec

from tests.e2e.e2e_support import edge, pinned, settle
from tests.scenarios.scenario_support import (
    PAGE,
    PLAIN_POOL,
    Live,
    at_once,
    body,
    cached,
    counter,
    forget,
    prompt,
    same,
    same_tokens,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CHUNK = 64
FLAGS = (
    "--enable-priority-scheduling",
    "--max-running-requests=2",
    "--enable-mixed-chunk",
    f"--chunked-prefill-size={CHUNK}",
    # Admits more than the pool will hold when the answers are long.
    "--schedule-conservativeness=0.1",
    "--enable-metrics",
    "--sleep-on-idle",
)
POOL_TOKENS = 1024
"""Holds two requests whose answers are short, and not two with long answers."""
NUM_PAGES = 10
PROMPT_TOKENS = NUM_PAGES * PAGE + 3
LOW, HIGH = 1, 20
"""SGLang preempts for a difference above 10."""
PROMPTS = [prompt(700 + number, PROMPT_TOKENS) for number in range(4)]
LONG_ANSWER = 400
SHORT_ANSWER = 250
MAY_END = {"ignore_eos": False}
"""SGLang keeps room for the whole answer of a request that ignores the end token; only
others can outgrow the pool. The answers here have none."""


@pytest.fixture(scope="module")
def plain(servers, model):
    flags = ("--enable-priority-scheduling", "--sleep-on-idle")
    device = Device(model, PLAIN_POOL, PAGE, flags)
    server = servers.get(plain_spec(device, "plain-queue"))
    answers = [
        server.post(
            "/generate", body(tokens, LONG_ANSWER, priority=LOW, sampling=MAY_END)
        )
        for tokens in PROMPTS
    ]
    assert [len(one["output_ids"]) for one in answers] == [LONG_ANSWER] * len(PROMPTS)
    servers.stop()
    return answers


@pytest.fixture(scope="module")
def started(servers, model, plain, tmp_path_factory):
    tiers = Tiers(16 * MB, tmp_path_factory.mktemp("disk"), 64 * MB)
    flags = (
        "--tiered-load-policy=always",
        "--tiered-disk-admission=all",
        "--tiered-staging-size=8MB",
    )
    device = Device(model, POOL_TOKENS, PAGE, FLAGS)
    yield servers.restart(tiered_spec(device, tiers, "queue", flags))
    servers.stop()


@pytest.fixture(params=["host", "disk"])
def tier(request):
    return request.param


@pytest.fixture
def server(started, tier):
    """The server, with the prompts' pages on one tier alone."""
    settle(started)
    started.flush_cache()
    for tokens in PROMPTS:
        started.post("/generate", body(tokens, 1))
    forget(started, tier)
    return started


def test_preemption(server, plain, tier):
    """A request of high priority takes the place of one that answers from loaded pages.

    What it took away is computed or loaded again, and all answers are plain's.
    """
    num_tokens = (SHORT_ANSWER, SHORT_ANSWER, 40)
    low = [
        Live(server, body(tokens, count, priority=LOW)).begun()
        for tokens, count in zip(PROMPTS[:2], num_tokens, strict=False)
    ]
    high = Live(server, body(PROMPTS[2], num_tokens[2], priority=HIGH)).begun()
    preempted = [live.num_tokens < SHORT_ANSWER for live in low]
    answers = [live.join() for live in (*low, high)]
    assert any(preempted)
    assert sum(a["meta_info"]["num_retractions"] for a in answers[:2]) > 0
    assert cached(answers[2]) == {tier: NUM_PAGES * PAGE}
    same_tokens(plain, answers)
    assert pinned(settle(server)) == 0


def test_retraction(server, plain, tier):
    """Answers that outgrow the pool are taken back and go on as plain's."""
    before = counter(server, "sglang:num_retracted_requests_total")
    answers = at_once(
        server,
        [
            body(tokens, LONG_ANSWER, priority=LOW, sampling=MAY_END)
            for tokens in PROMPTS
        ],
    )
    same(PROMPTS, plain, answers)
    assert sum(a["meta_info"]["num_retractions"] for a in answers) > 0
    assert counter(server, "sglang:num_retracted_requests_total") > before
    state = settle(server)
    assert edge(state, "host->device") > 0
    assert edge(state, "disk->host") > 0 or tier == "host"
    assert pinned(state) == 0


def test_mixed_chunks(server, plain, tier):
    """Prompts that are computed in chunks beside answers, some pages of them loaded."""
    # Only requests without logprobs share a batch with a chunk.
    requests = [
        body((*tokens, *answer["output_ids"][:100]), 40, return_logprob=False)
        for tokens, answer in zip(PROMPTS, plain, strict=True)
    ]
    for request in requests:
        del request["top_logprobs_num"]
    logged = len(server.log_path.read_text())
    answers = at_once(server, requests)
    same_tokens(plain, answers, skipped=100)
    # A chunk is a token shorter for the answer that goes on beside it.
    shared = rf"#new-token: {CHUNK - 1}, .*#running-req: 1,"
    assert re.search(shared, server.log_path.read_text()[logged:])
    assert {cached(answer).get(tier) for answer in answers} == {NUM_PAGES * PAGE}
    assert pinned(settle(server)) == 0
