"""Sparse KV on a real server: half of a reloaded prefix, and nobody else is touched.

Requests that refuse lossy KV, and all where everything is kept, get plain SGLang's very
bits; a reload for one that allows it takes about half of the rows; a choice that is
wrong on purpose moves the answers, so that the comparison can fail. SGLang's invariant
checker runs after each step of the scheduler and would end the server.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, plain_spec, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from sgl_tiered.cli import main as cli
from sgl_tiered.policies.sparsity.profile import FRACTIONS, SparsityProfile
from sgl_tiered.policies.sparsity.solver import HeldCurves, ratios_for_quality
from sgl_tiered.sparse.keep import RECENT, SINKS
from tests.e2e.e2e_support import PATIENCE_S, Case, drop, edge, settle, stats

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16, chunk_tokens=512, overlap=False)
POOL_TOKENS = 2_560
PREFIX, MORE = 512, 32
NUM_PROMPTS = 3
NUM_MIXED = 12
CHECKED = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
FLOOR = 0.05
"""What plain SGLang against itself may move a logprob by; see ``e2e_support``."""


def prompts(seed, num=NUM_PROMPTS, tokens=PREFIX + MORE):
    """Return random prompts."""
    rng = np.random.default_rng(seed)
    return [list(random_tokens(rng, tokens, VOCAB_TOKENS)) for _ in range(num)]


def generate(server, tokens, word=None, num_tokens=8):
    """Return an answer's tokens with their logprobs, and its ``meta_info``."""
    sampling = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    if word is not None:
        sampling["custom_params"] = {"tiered": {"lossy": word}}
    body = {
        "input_ids": tokens,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    answer = server.post("/generate", body)
    meta = answer["meta_info"]
    told = [(token, logprob) for logprob, token, *_ in meta["output_token_logprobs"]]
    assert len(told) == num_tokens, meta
    return told, meta


def two_turns(server, word=None, *, reload=True):
    """Let each prompt's beginning be computed, and then the whole with that reused.

    Returns:
        The answers to the beginnings, those to the wholes, and the latter's meta.
    """
    # In all tiers: a prompt that is computed by parts may be rounded otherwise.
    server.flush_cache()
    first, second, metas = [], [], []
    for tokens in prompts(1):
        first.append(generate(server, tokens[:PREFIX], word)[0])
        if reload:
            drop(server, "device")
        told, meta = generate(server, tokens, word)
        assert meta["cached_tokens"] == PREFIX, meta
        second.append(told)
        metas.append(meta)
        if reload:
            drop(server, "device")
    return first, second, metas


@pytest.fixture(scope="module")
def plain(servers, model):
    """Plain SGLang's answers to both turns, the first one's KV reused on the device."""
    device = CASE.device(model, POOL_TOKENS)
    server = servers.get(plain_spec(device, "plain-sparse"))
    answers = two_turns(server, reload=False)[:2]
    servers.stop()
    return answers


def sparse_spec(model, name, *flags, env=None, disk=None):
    """Return how to start a server that loads sparse for those who allow it."""
    device = CASE.device(model, POOL_TOKENS)
    every = ("--tiered-sparsity=load", "--tiered-load-policy=always", *flags)
    tiers = Tiers(64 * MB, disk, 0 if disk is None else 256 * MB)
    return tiered_spec(device, tiers, name, every, {**CHECKED, **(env or {})})


def sparse_server(servers, model, name, *flags, env=None):
    """Return such a server."""
    return servers.get(sparse_spec(model, name, *flags, env=env))


@pytest.fixture
def half(servers, model):
    """One that keeps half of each layer."""
    return sparse_server(servers, model, "sparse-half", "--tiered-sparsity-keep=0.5")


def moved(answers, others):
    """Return the largest change of a logprob at the answers' first tokens."""
    return max(
        abs(mine[0][1] - theirs[0][1]) if mine[0][0] == theirs[0][0] else float("inf")
        for mine, theirs in zip(answers, others, strict=True)
    )


@pytest.mark.full
def test_a_wrong_choice_moves_the_answers(servers, model, plain):
    """What is recent and what is read is dropped: the bits that others keep change."""
    server = sparse_server(
        servers,
        model,
        "sparse-wrong",
        "--tiered-fault-corrupt=keep",
        env={"SGL_TIERED_ALLOW_FAULTS": "1"},
    )
    first, second, metas = two_turns(server, "allow")
    assert first == plain[0], "nothing was dropped yet"
    assert all("sparsity" in meta["tiered"][0] for meta in metas)
    assert moved(second, plain[1]) > FLOOR
    # The same server, for those who refuse.
    assert two_turns(server, "refuse")[:2] == plain


def test_who_keeps_all_gets_plain_bits(servers, model, plain):
    """With a share of 1 for requests that allow lossy KV, and for those that refuse."""
    server = sparse_server(servers, model, "sparse-all", "--tiered-sparsity-keep=1.0")
    for word in ("allow", "refuse"):
        first, second, metas = two_turns(server, word)
        assert (first, second) == plain, word
        assert all("sparsity" not in meta["tiered"][0] for meta in metas)
    assert edge(stats(server), "host->device") > 0


def test_who_refuses_gets_plain_bits(half, plain):
    """And loads whole pages; so does who says nothing."""
    before = stats(half)["counters"]["sparsity_loads"]
    for word in ("refuse", None):
        assert two_turns(half, word)[:2] == plain
    assert stats(half)["counters"]["sparsity_loads"] == before


def test_a_reload_takes_half_of_the_rows(half, plain):
    """Rows on the device, bytes over the link and the report agree with each other."""
    (tokens,) = prompts(2, 1)
    used, moved_bytes, metas = {}, {}, {}
    for word in ("refuse", "allow"):
        generate(half, tokens[:PREFIX], word)
        drop(half, "device")
        state = stats(half)
        assert state["sparsity"]["rows_used"] == 0
        before = edge(state, "host->device", "bytes")
        metas[word] = generate(half, tokens, word)[1]
        state = settle(half)
        used[word] = state["sparsity"]["rows_used"]
        moved_bytes[word] = edge(state, "host->device", "bytes") - before
        drop(half, "device")
    assert "sparsity" not in metas["refuse"]["tiered"][0]
    told = metas["allow"]["tiered"][0]["sparsity"]
    assert metas["allow"]["cached_tokens"] == PREFIX
    assert metas["allow"]["cached_tokens_details"]["host"] == PREFIX
    assert told["tokens_loaded"] == PREFIX
    assert told["policy"] == "car"
    assert told["kept_share"] == 0.5
    assert used["refuse"] - used["allow"] == told["rows_dropped"]
    assert moved_bytes["refuse"] - moved_bytes["allow"] == told["bytes_saved"]
    assert 2 * moved_bytes["allow"] == moved_bytes["refuse"]


def test_later_turns_append_to_a_sparse_prefix(half):
    """On the device, and from the host once more: only what is whole was stored."""
    (tokens,) = prompts(3, 1, PREFIX + 8 * MORE)
    generate(half, tokens[:PREFIX], "allow")
    drop(half, "device")
    before = edge(stats(half), "device->host")
    for turn in range(1, 5):
        told, meta = generate(half, tokens[: PREFIX + turn * MORE], "allow")
        assert meta["cached_tokens"] == PREFIX + (turn - 1) * MORE
        assert all(np.isfinite(logprob) for _, logprob in told)
    state = settle(half)
    # A turn's own pages; its answer's tokens differ from what the next turn says.
    assert edge(state, "device->host") - before == 4 * MORE // 16
    assert state["sparsity"]["rows_dropped"] > 0
    drop(half, "device")
    meta = generate(half, tokens, "allow")[1]
    assert meta["cached_tokens_details"]["host"] == PREFIX + 4 * MORE
    assert meta["tiered"][0]["sparsity"]["kept_share"] < 0.7


def test_neither_side_sees_the_other(half):
    """A prompt that one side has is new to the other."""
    (tokens,) = prompts(4, 1)
    generate(half, tokens, "allow")
    assert generate(half, tokens, "refuse")[1]["cached_tokens"] == 0
    assert generate(half, tokens, "allow")[1]["cached_tokens"] > 0


def test_many_at_once_in_a_tight_pool(half):
    """Both sides, reloads, evictions, retractions: no leak, and every answer comes."""
    drop(half, "device")
    every = prompts(5, NUM_MIXED, 640)

    def ask(number):
        word = "refuse" if number % 3 == 0 else "allow"
        return generate(half, every[number % NUM_MIXED], word, num_tokens=24)[0]

    with ThreadPoolExecutor(NUM_MIXED) as threads:
        rounds = []
        for _ in range(3):
            rounds.append(list(threads.map(ask, range(NUM_MIXED))))
            drop(half, "device")
    state = settle(half)
    assert state["counters"]["sparsity_loads"] > 0
    assert state["sparsity"]["rows_used"] == 0
    assert state["sparsity"]["rows_dropped"] == 0


def whole_bytes(state):
    """Return the bytes of keys and values of the prefix, as the device has them."""
    return PREFIX * state["served"]["model"]["kv_bytes_per_token"]


def test_encoded_pages_are_loaded_sparse(servers, model, plain):
    """Kept tokens only are decoded, and paid for; who refuses is not touched."""
    server = sparse_server(servers, model, "sparse-int4", "--tiered-encoding=int4")
    assert two_turns(server, "refuse", reload=False)[:2] == plain
    assert edge(settle(server), "device->host") == 0

    first, second, metas = two_turns(server, "allow")
    assert first == plain[0], "nothing was altered yet"
    state = settle(server)
    for (_, logprob), meta in zip((told[0] for told in second), metas, strict=True):
        assert np.isfinite(logprob)
        ours = meta["tiered"][0]
        assert meta["cached_tokens_details"]["host"] == PREFIX
        assert ours["encoding"] == ours["sparsity"]["encoding"] == "int4"
        assert ours["sparsity"]["kept_share"] == 0.5
        both = ours["sparsity"]["bytes_loaded"] + ours["sparsity"]["bytes_saved"]
        ratio = state["served"]["encoding_ratio"]
        assert whole_bytes(state) / both == pytest.approx(ratio, rel=1e-3)
        # Less than all, and more than the tokens' share: keys' scales come as a whole.
        assert 0.5 < ours["sparsity"]["bytes_loaded"] / both < 0.8
    told = [meta["tiered"][0]["sparsity"]["bytes_loaded"] for meta in metas]
    assert edge(state, "host->device", "bytes") == sum(told)
    errors = state["encoding_error"]
    assert errors["pages_sampled"] > 0
    assert len(errors["keys_by_layer"]) == len(errors["values_by_layer"])
    for error in errors["keys_by_layer"] + errors["values_by_layer"]:
        assert 0 < error < 0.5


def test_tiers_hold_what_is_kept(servers, model, plain):
    """Rows are half as large, loads bring all of them, and later turns add to them."""
    server = sparse_server(servers, model, "sparse-store", "--tiered-sparsity=store")
    assert two_turns(server, "refuse", reload=False)[:2] == plain
    assert edge(settle(server), "device->host") == 0

    (tokens,) = prompts(6, 1)
    page_bytes = whole_bytes(settle(server)) * CASE.page_size // PREFIX
    # The last 64 tokens of a prompt are judged by the next turn.
    judged = PREFIX - 64
    generate(server, tokens[:PREFIX], "allow")
    state = settle(server)
    stored = edge(state, "device->host")
    assert stored == judged // CASE.page_size
    assert 2 * edge(state, "device->host", "bytes") == stored * page_bytes
    for found in (judged, judged + MORE):
        drop(server, "device")
        before = edge(stats(server), "host->device", "bytes")
        told, meta = generate(server, tokens, "allow")
        assert all(np.isfinite(logprob) for _, logprob in told)
        assert meta["cached_tokens_details"]["host"] == found
        ours = meta["tiered"][0]["sparsity"]
        assert ours["kept_share_by_layer"] == [0.5] * len(ours["kept_share_by_layer"])
        moved_bytes = edge(settle(server), "host->device", "bytes") - before
        assert moved_bytes == ours["bytes_loaded"] == ours["bytes_saved"]
        assert 2 * moved_bytes == found // CASE.page_size * page_bytes
    state = settle(server)
    assert state["sparsity"]["pages_stored"] == (judged + MORE) // CASE.page_size


@pytest.fixture
def profiled(servers, model, tmp_path_factory):
    """One with a profile whose layers need fewer tokens the higher they are."""
    config = json.loads((model / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    powers = np.linspace(0.9, 0.05, num_layers)[:, None]
    path = tmp_path_factory.getbasetemp() / "layers.json"
    SparsityProfile(
        model="by hand",
        fingerprint="",
        num_kv_heads=config["num_key_value_heads"],
        num_tokens=1,
        num_prompts=1,
        local_tokens=64,
        small_share=np.zeros((num_layers, config["num_attention_heads"])),
        fractions=np.array(FRACTIONS),
        held_by_top=np.array(FRACTIONS) ** powers,
    ).save(path)
    flags = (f"--tiered-sparsity-profile={path}", "--tiered-sparsity-budget=0.1")
    return sparse_server(servers, model, "sparse-profile", *flags)


def test_a_profile_gives_each_layer_its_share(profiled, plain):
    """Requests that refuse get plain bits; of the others low layers keep more."""
    assert two_turns(profiled, "refuse")[:2] == plain
    first, _, metas = two_turns(profiled, "allow")
    assert first == plain[0], "nothing was dropped yet"
    for meta in metas:
        told = meta["tiered"][0]["sparsity"]
        shares = told["kept_share_by_layer"]
        assert shares == sorted(shares, reverse=True)
        # The ends stay everywhere: 4 and 64 tokens.
        assert shares[0] > shares[-1] >= round(68 / PREFIX, 4)
        assert 0.0 < told["kept_share"] < 1.0
    state = stats(profiled)["sparsity"]
    assert state["policy"] == "car"
    np.testing.assert_allclose(state["kept_share_by_layer"], shares, atol=0.01)


BUDGET = 0.2
"""Of the long-range attention, what may be lost by the measured profile."""


@pytest.fixture(scope="module")
def profile_file(servers, model, tmp_path_factory):
    """A profile that ``sgl-tiered profile`` has measured on a server of the model."""
    folder = tmp_path_factory.mktemp("profile")
    server = servers.get(
        tiered_spec(CASE.device(model, POOL_TOKENS), Tiers(64 * MB), "to-profile")
    )
    lines, out = folder / "prompts.jsonl", folder / "measured.json"
    lines.write_text("".join(f"{json.dumps(tokens)}\n" for tokens in prompts(7)))
    flags = ["--url", server.url, "--prompts", str(lines), "--out", str(out)]
    assert cli.main(["profile", *flags]) == 0
    servers.stop()
    return out


@pytest.fixture
def measured(servers, model, profile_file):
    """A server that was given this file, and whose host tier breaks on order."""
    flags = (
        f"--tiered-sparsity-profile={profile_file}",
        f"--tiered-sparsity-budget={BUDGET}",
    )
    env = {"SGL_TIERED_ALLOW_FAULTS": "1"}
    return sparse_server(servers, model, "sparse-measured", *flags, env=env)


def test_a_measured_profile_is_kept_to(plain, profile_file, measured):
    """Each layer keeps what the solver asks for by the file; who refuses, all."""
    profile = SparsityProfile.load(profile_file)
    assert len(profile.fingerprint) == 32, "it is compared with the server's model"
    curves = HeldCurves.of_profile(profile)
    wanted = ratios_for_quality(curves, BUDGET, (SINKS + RECENT) / PREFIX)
    print("wanted:", wanted)
    assert np.ptp(wanted) > 0.05, "the layers have to differ for this to say anything"

    assert two_turns(measured, "refuse")[:2] == plain
    state = stats(measured)
    assert state["counters"]["sparsity_loads"] == 0
    first, _, metas = two_turns(measured, "allow")
    assert first == plain[0], "nothing was dropped yet"
    state = stats(measured)
    told = [meta["tiered"][0]["sparsity"] for meta in metas]
    for shares in (
        state["sparsity"]["kept_share_by_layer"],
        *(load["kept_share_by_layer"] for load in told),
    ):
        # A token more or less of a layer: shares are rounded to whole tokens.
        np.testing.assert_allclose(shares, wanted, atol=1.5 / PREFIX)
    counters = state["counters"]
    assert counters["sparsity_loads"] == NUM_PROMPTS
    for name in ("rows_dropped", "bytes_saved"):
        assert counters[f"sparsity_{name}"] == sum(load[name] for load in told) > 0


def test_a_load_that_breaks_is_computed_whole(plain, measured):
    """With plain's answer, all rows, and no word of dropped tokens; then as before."""
    tokens, answer = prompts(1)[0], plain[1][0]
    measured.flush_cache()
    generate(measured, tokens[:PREFIX], "allow")
    drop(measured, "device")
    before = stats(measured)["counters"]
    measured.post("/tiered/faults?emulate=host:fault=error/load", {}, PATIENCE_S)
    try:
        told, meta = generate(measured, tokens, "allow")
    finally:
        measured.post("/tiered/faults?emulate=", {}, PATIENCE_S)
    assert told == answer
    assert "sparsity" not in meta["tiered"][0]
    state = settle(measured)
    repaired = state["counters"]["tokens_repaired"]
    assert repaired - before.get("tokens_repaired", 0) == PREFIX
    assert state["counters"]["sparsity_loads"] == before["sparsity_loads"]
    assert state["sparsity"]["rows_dropped"] == 0
    drop(measured, "device")
    meta = generate(measured, tokens, "allow")[1]
    assert 0.0 < meta["tiered"][0]["sparsity"]["kept_share"] < 1.0
    drop(measured, "device")
    assert stats(measured)["sparsity"]["rows_used"] == 0


@pytest.mark.parametrize(
    "mode", ["load", pytest.param("store", marks=pytest.mark.full)]
)
def test_a_restart_with_a_disk(servers, model, plain, tmp_path, mode):
    """From disk comes what is kept; a new server knows nothing of what was read.

    So it loads whole pages whole, with plain's bits; and pages of which only some
    tokens are there, nobody knows which, are found by nobody.
    """
    spec = sparse_spec(
        model, f"sparse-disk-{mode}", f"--tiered-sparsity={mode}", disk=tmp_path / "kv"
    )
    server = servers.get(spec)
    tokens, answer = prompts(1)[0], plain[1][0]
    # Goes on otherwise: what is computed behind a sparse prefix is not plain either.
    other = tokens[:PREFIX] + prompts(8)[0][:MORE]
    generate(server, tokens[:PREFIX], "allow")
    stored = PREFIX if mode == "load" else PREFIX - RECENT
    drop(server, "device", "host")
    told, meta = generate(server, other, "allow")
    assert meta["cached_tokens_details"]["disk"] == meta["cached_tokens"] == stored
    assert meta["tiered"][0]["sparsity"]["kept_share"] == 0.5
    assert all(np.isfinite(logprob) for _, logprob in told)
    settle(server)

    server = servers.restart(spec)
    told, meta = generate(server, tokens, "refuse")
    assert (told, meta["cached_tokens"]) == (answer, 0)
    told, meta = generate(server, tokens, "allow")
    assert meta["cached_tokens"] == (PREFIX if mode == "load" else 0)
    assert "sparsity" not in meta["tiered"][0]
    assert told == answer
