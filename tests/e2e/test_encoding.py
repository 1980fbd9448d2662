"""Encoded tiers of a real server: who allows lossy KV gets it, and nobody else does."""

from dataclasses import replace

import numpy as np
import pytest
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, plain_spec, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import (
    REFERENCE_POOL_TOKENS,
    Case,
    drop,
    edge,
    settle,
    stats,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16, overlap=False)
PROMPT_TOKENS, CACHED_TOKENS, NUM_PROMPTS = 600, 592, 4
BOUNDS = {"int8": 0.25, "int4": 3.0}
"""How far a logprob of an answer's token may be from plain SGLang's. Wide guesses: the
model's weights are random and made to hang on every page."""

ERRORS = {"int8": 0.05, "int4": 0.5}
"""How large the relative error of a layer's keys or values may be; wide as well."""


def prompts():
    generator = np.random.default_rng(21)
    return [
        list(random_tokens(generator, PROMPT_TOKENS, VOCAB_TOKENS))
        for _ in range(NUM_PROMPTS)
    ]


def answers(server, word=None, **wishes):
    """Return what is said to each prompt: ids, logprobs, tokens by tier, and more."""
    ours = wishes if word is None else {**wishes, "lossy": word}
    found = []
    for prompt in prompts():
        body = {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": 8,
                "ignore_eos": True,
                "custom_params": {"tiered": ours},
            },
            "return_logprob": True,
        }
        meta = server.post("/generate", body)["meta_info"]
        told = [
            (token, logprob) for logprob, token, *_ in meta["output_token_logprobs"]
        ]
        found.append((told, meta.get("cached_tokens_details") or {}, meta))
    return found


def said(found):
    return [told for told, _, _ in found]


def cached(found, tier):
    return [details.get(tier, 0) for _, details, _ in found]


def moves(found, reference):
    """Return how far logprobs are apart, up to the first other token of each answer."""
    apart = []
    for ours, theirs in zip(said(found), said(reference), strict=True):
        for (token, logprob), (other, wanted) in zip(ours, theirs, strict=True):
            if token != other:
                break
            apart.append(abs(logprob - wanted))
    return apart


@pytest.fixture(scope="module")
def plain(servers, model, may_fork):
    """Plain SGLang's answers: computed, and from its own cache."""
    device = CASE.device(model, REFERENCE_POOL_TOKENS)
    spec = replace(plain_spec(device, "plain-encoding"), fork=may_fork)
    server = servers.get(spec)
    server.flush_cache()
    return answers(server), answers(server)


@pytest.mark.parametrize(
    "encoding", ["int8", pytest.param("int4", marks=pytest.mark.full)]
)
def test_only_who_allows_it_is_given_lossy_kv(servers, model, plain, encoding):
    """One server and the same prompts: those who refuse get plain SGLang's bits from
    the device or from computing, before and after others got theirs from the host."""
    computed, reused = plain
    flags = ("--tiered-encoding", encoding, "--tiered-load-policy", "always")
    device = CASE.device(model, REFERENCE_POOL_TOKENS)
    server = servers.get(tiered_spec(device, Tiers(64 * MB), encoding, flags))

    # Who says nothing refuses: bits, and hits of the device, as from plain SGLang.
    assert said(answers(server)) == said(computed)
    again = answers(server, "refuse")
    assert said(again) == said(reused)
    assert cached(again, "device") == [CACHED_TOKENS] * NUM_PROMPTS
    state = settle(server)
    assert state["occupancy"]["host"]["used"] == 0
    assert edge(state, "device->host") == 0

    # Who allows it does not even share the device with them.
    first = answers(server, "allow")
    assert cached(first, "device") == [0] * NUM_PROMPTS
    assert said(first) == said(computed)
    state = settle(server)
    num_pages = edge(state, "device->host")
    assert num_pages >= NUM_PROMPTS * CACHED_TOKENS // CASE.page_size
    raw_bytes = state["served"]["model"]["kv_bytes_per_token"] * CASE.page_size
    ratio = num_pages * raw_bytes / edge(state, "device->host", "bytes")
    assert ratio == pytest.approx(state["served"]["encoding_ratio"], rel=1e-3)
    assert ratio >= {"int8": 1.8, "int4": 4.0}[encoding]
    errors = state["encoding_error"]
    assert errors["pages_sampled"] >= num_pages // 64
    for by_layer in (errors["keys_by_layer"], errors["values_by_layer"]):
        assert 0 < min(by_layer) <= max(by_layer) < ERRORS[encoding]

    # From the host it comes changed, by a little: that it comes changed at all shows
    # that these tests would see it.
    drop(server, "device")
    loaded = answers(server, "allow")
    assert cached(loaded, "host") == [CACHED_TOKENS] * NUM_PROMPTS
    assert {meta["tiered"][0]["encoding"] for *_, meta in loaded} == {encoding}
    apart = moves(loaded, reused)
    print(f"{encoding}: {len(apart)} logprobs, max {max(apart)}, mean {np.mean(apart)}")
    assert 0 < max(apart) < BOUNDS[encoding]

    # The decoded pages are on the device now, and those who refuse compute.
    exact = answers(server, "refuse", explain=True)
    assert said(exact) == said(computed)
    for _, details, meta in exact:
        assert details.get("host", 0) == details.get("device", 0) == 0
        missing = meta["tiered"][0]["explain"]["missing"]
        assert [(m["cause"], m["tokens"]) for m in missing] == [
            ("not allowed", CACHED_TOKENS)
        ]
    counters = stats(server)["counters"]
    assert counters["requests_allow_lossy"] >= 2 * NUM_PROMPTS
    assert counters["requests_refuse_lossy"] >= 3 * NUM_PROMPTS
