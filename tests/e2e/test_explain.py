"""Explanations of a real engine: sources, waits, misses, ids and other tenants."""

import urllib.parse
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import Case, drop, settle, stats

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16, overlap=False)
POOL_TOKENS = 2_048
ASK = {"custom_params": {"tiered": {"explain": True}}}


@pytest.fixture
def server(servers, model):
    """A server with a host tier, two requests at a time at most."""
    device = CASE.device(model, POOL_TOKENS)
    flags = ("--max-running-requests", "2", "--tiered-load-policy", "always")
    return servers.get(tiered_spec(device, Tiers(200 * MB), "explain", flags))


@pytest.fixture
def prompt():
    def make(seed, num_tokens=400):
        return list(
            random_tokens(np.random.default_rng(seed), num_tokens, VOCAB_TOKENS)
        )

    return make


def generate(server, prompt, num_tokens=4, explain=False, **fields):
    """Return the answer's ``meta_info``."""
    body = {
        "input_ids": prompt,
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": num_tokens,
            "ignore_eos": True,
            **(ASK if explain else {}),
        },
        **fields,
    }
    return server.post("/generate", body)["meta_info"]


def explained(server, rid):
    return server.get("/tiered/explain/" + urllib.parse.quote(rid, safe=""))


def test_a_request_is_explained_in_its_answer_and_afterwards(server, prompt):
    """A new prompt, the same from the device, from the host, and after the host lost
    it: sources, edges and causes are the ones that happened."""
    tokens = prompt(1)
    new = generate(server, tokens, explain=True)
    told = new["tiered"][0]["explain"]
    assert told["rid"] == new["id"]
    assert told["tokens"] == {"computed": 400}
    assert [miss["cause"] for miss in told["missing"]] == ["never seen"]
    assert told["ttft"]["predicted_s"] > 0
    assert 0 < told["ttft"]["real_s"] <= told["total_s"]
    assert told["wait"]["total_s"] <= told["ttft"]["real_s"]
    settle(server)
    later = explained(server, new["id"])
    assert later["edges"]["device->host"]["bytes"] > 0
    assert later["decision"]["reason"]

    plain = generate(server, tokens)
    assert "explain" not in plain["tiered"][0]
    told = explained(server, plain["id"])
    assert told["tokens"] == {"device": 384, "computed": 16}
    assert told["missing"] == []

    drop(server, "device")
    told = explained(server, generate(server, tokens)["id"])
    assert told["tokens"] == {"host": 384, "computed": 16}
    loaded = told["edges"]["host->device"]
    assert loaded["bytes"] > 0
    assert loaded["s"] > 0

    drop(server, "device", "host")
    told = explained(server, generate(server, tokens)["id"])
    assert [(m["cause"], m["tier"]) for m in told["missing"]] == [("dropped", "host")]


def test_another_tenant_learns_nothing(server, prompt):
    """A prompt that another salt has, or has lost, is as new as any; with a salt of
    his own a sender learns of what he could have sent without."""
    tokens = prompt(2)
    generate(server, tokens, cache_salt="a")
    told = explained(server, generate(server, tokens, cache_salt="b")["id"])
    assert [miss["cause"] for miss in told["missing"]] == ["never seen"]
    told = explained(server, generate(server, tokens)["id"])
    assert [miss["cause"] for miss in told["missing"]] == ["never seen"]
    told = explained(server, generate(server, tokens, cache_salt="c")["id"])
    assert [miss["cause"] for miss in told["missing"]] == ["other namespace"]


def test_waits_are_told_by_reason(server, prompt):
    """Six at a time where two may run: each second of waiting has its reason, the slot
    or the pass or the pool, and the last ones and the slowest can be listed."""
    with ThreadPoolExecutor(6) as pool:
        prompts = [prompt(10 + number, 200) for number in range(6)]
        metas = list(pool.map(lambda tokens: generate(server, tokens, 48), prompts))
    told = [explained(server, meta["id"]) for meta in metas]
    for one in told:
        parts = one["wait"]["by_reason_s"]
        assert sum(parts.values()) == pytest.approx(one["wait"]["total_s"], abs=1e-5)
        assert parts.keys() <= {"slot", "pass", "budget"}
        assert one["wait"]["total_s"] <= one["ttft"]["real_s"]
    slowest = max(told, key=lambda one: one["ttft"]["real_s"])
    assert slowest["wait"]["by_reason_s"]["slot"] > 0
    ids = {meta["id"] for meta in metas}
    assert {one["rid"] for one in server.get("/tiered/explain?last=6")} == ids
    (one,) = server.get("/tiered/explain?slowest=1")
    assert one["ttft"]["real_s"] >= slowest["ttft"]["real_s"]


def test_ids_are_those_that_clients_see(server, prompt):
    """The id of an OpenAI answer, chat or not, and one that the client chose."""
    body = {"model": "m", "prompt": prompt(3, 64), "max_tokens": 2, "ignore_eos": True}
    answer = server.post("/v1/completions", body)
    assert explained(server, answer["id"])["prompt_tokens"] == 64
    generate(server, prompt(4, 64), rid="mine/7")
    assert explained(server, "mine/7")["prompt_tokens"] == 64
    with pytest.raises(RuntimeError, match="404"):
        explained(server, "nobody")
    assert "tiered_explain" not in stats(server)
