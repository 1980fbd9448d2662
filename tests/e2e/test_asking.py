"""A server that asks its own model for lengths, behind an API key.

The tiny model answers nonsense: that must be counted, and must change nothing. The key
is here because a server with one shows both at the price of one start.
"""

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from sgl_tiered.cli.explain import fetch
from tests.e2e.e2e_support import PATIENCE_S, Case, settle, stats, wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

KEY = "a-secret"
PROMPT_TOKENS = 200
ANSWER_TOKENS = 52
NUM_REQUESTS = 8
PATHS = ("/tiered/stats", "/tiered/explain?last=1", "/tiered/explain/mine")


@pytest.fixture(scope="module")
def server(servers, model):
    """Holds about five of the eight requests at a time."""
    flags = ("--tiered-length-predictor=llm", "--enable-metrics")
    device = Case(16, overlap=True).device(model)
    spec = tiered_spec(device, Tiers(20 * MB), "asking", flags=flags)
    return servers.get(replace(spec, api_key=KEY))


def generate(server, seed, num_tokens=ANSWER_TOKENS, **fields):
    prompt = random_tokens(np.random.default_rng(seed), PROMPT_TOKENS, VOCAB_TOKENS)
    body = {
        "input_ids": list(prompt),
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": num_tokens,
            "ignore_eos": True,
        },
        **fields,
    }
    return server.post("/generate", body)


def test_questions_are_asked_and_nobody_notices(server):
    """Eight requests where five fit: some are asked about, all are answered in full;
    questions reuse the prompts' KV, are billed, and appear nowhere as requests."""
    before = stats(server)["lengths"]["num_answers"]
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(
            pool.map(lambda seed: generate(server, seed), range(NUM_REQUESTS))
        )
    for answer in answers:
        assert answer["meta_info"]["completion_tokens"] == ANSWER_TOKENS

    def all_have_ended():
        told = stats(server)["lengths"]
        return not told["asking"]["num_open"] and not told["num_under_way"]

    wait_until(all_have_ended, "the questions have ended")
    state = stats(server)
    told, asking = state["lengths"], state["lengths"]["asking"]
    print(json.dumps(asking))
    assert told["num_answers"] == before + NUM_REQUESTS
    assert 0 < asking["num_asked"] <= NUM_REQUESTS
    replied = asking["num_asked"] - asking["num_failed"]
    assert replied > 0
    assert 0 < asking["output_tokens"] <= 12 * replied
    assert asking["prompt_tokens"] > PROMPT_TOKENS * replied
    # All whole pages of the prompt.
    assert asking["cached_tokens"] >= (PROMPT_TOKENS // 16) * 16 * replied
    assert asking["seconds"] > 0
    assert state["counters"]["length_asks"] == asking["num_asked"]
    # Published between passes, once a second at most.
    series = 'sgl_tiered:events_total{event="length_asks"}'
    wait_until(lambda: series in server.get("/metrics"), "the metrics tell of it")

    listed = server.get("/tiered/explain?last=100")
    assert {one["rid"] for one in listed} >= {a["meta_info"]["id"] for a in answers}
    assert not any(one["rid"].startswith("length-question") for one in listed)
    bills = [one["length_asked"] for one in listed if "length_asked" in one]
    assert len(bills) == asking["num_asked"]
    assert sum(bill["output_tokens"] for bill in bills) == asking["output_tokens"]
    log = server.log_path.read_text(errors="replace")
    assert "length-question" not in log
    # Other batches round differently; the first tokens are far from a tie.
    alone = generate(server, 0, 4)
    assert alone["output_ids"] == answers[0]["output_ids"][:4]
    # Nothing is left behind: the pool is free but for the tree.
    settle(server)
    server.flush_cache()


@pytest.mark.parametrize("path", PATHS)
def test_the_endpoints_demand_the_key(server, path):
    """Without it, and with another one, they say nothing; with it they answer."""
    for headers in ({}, {"Authorization": "Bearer another"}):
        request = urllib.request.Request(server.url + path, headers=headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=PATIENCE_S)
        with refused.value as answer:
            assert answer.code == 401
            assert "tokens" not in answer.read().decode()
    generate(server, 20, 2, rid="mine")
    told = fetch(server.url, path, KEY)
    assert json.dumps(told)


def test_chats_are_found_by_the_ids_that_clients_see(server):
    """The id of a chat's answer, whole or streamed, is the request's."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "How far is the moon?"}],
        "max_tokens": 4,
    }
    answer = server.post("/v1/chat/completions", body)
    told = server.get("/tiered/explain/" + answer["id"])
    assert told["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    text = server.post("/v1/chat/completions", {**body, "stream": True})
    chunk = json.loads(text.split("\n", 1)[0].removeprefix("data: "))
    assert server.get("/tiered/explain/" + chunk["id"])["rid"] == chunk["id"]
