"""What users ask for, over pages that lie on the device, in host memory or on disk.

Each scenario makes the same calls to plain SGLang and to a server with tiers.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec, tiered_spec

from tests.e2e.cpu_server import CPU_SERVER
from tests.e2e.e2e_support import PATIENCE_S, edge, pinned, settle, stats
from tests.scenarios.scenario_support import (
    PAGE,
    PLAIN_POOL,
    SPREAD,
    Live,
    at_once,
    body,
    cached,
    forget,
    prompt,
    same,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

FLAGS = ("--enable-return-hidden-states", "--sleep-on-idle")
TIERS = ("device", "host", "disk")
NUM_PAGES = 24
LONG = NUM_PAGES * PAGE + 5
EXACT = (1, 2, 7, 20)
"""Prompts of so many whole pages."""
SCHEMA = (
    '{"type": "object", "properties": {"ok": {"type": "boolean"}, '
    '"kind": {"enum": ["north", "south", "east"]}}, "required": ["ok", "kind"]}'
)
REGEX = "(red|green|blue)-[0-9]{3}"
MANY = 160
"""Tokens of an answer that is not over before a call meets it."""


def exact_pages(server, tier):
    """Ask prompts of whole pages twice, and once more with a token behind."""
    prompts = [prompt(100 + k, k * PAGE) for k in EXACT]
    for tokens in prompts:
        server.post("/generate", body(tokens))
    asked = [*prompts, *((*tokens, 77) for tokens in prompts)]
    answers = []
    for tokens in asked:
        forget(server, tier)
        answers.append(server.post("/generate", body(tokens)))
    return asked, answers


def prompt_logprobs(server, tier):
    """Ask for the logprobs of the prompt from several tokens on."""
    tokens = prompt(200, LONG)
    server.post("/generate", body(tokens))
    answers = []
    for first in (0, 10 * PAGE + 3, LONG - 1):
        forget(server, tier)
        answers.append(server.post("/generate", body(tokens, logprob_start_len=first)))
    return [tokens] * 3, answers


def several(server, tier):
    """Ask for three answers to one prompt."""
    tokens = prompt(300, LONG)
    server.post("/generate", body(tokens))
    forget(server, tier)
    answers = server.post("/generate", body(tokens, sampling={"n": 3}))
    return [tokens] * 3, answers


def hidden_states(server, tier):
    """Ask for the hidden states of what is computed."""
    tokens = prompt(400, LONG)
    server.post("/generate", body(tokens))
    forget(server, tier)
    return [tokens], [server.post("/generate", body(tokens, return_hidden_states=True))]


def grammars(server, tier):
    """Ask for answers that a schema, a regular expression or both prescribe."""
    tokens = [prompt(500 + number, LONG) for number in range(2)]
    rules = [{"json_schema": SCHEMA}, {"regex": REGEX}]
    for one in tokens:
        server.post("/generate", body(one, 1))
    forget(server, tier)
    return tokens, at_once(
        server,
        [
            body(one, 64, sampling={"ignore_eos": False, **rule})
            for one, rule in zip(tokens, rules, strict=True)
        ],
    )


SCENARIOS = (exact_pages, prompt_logprobs, several, hidden_states, grammars)


def long_answer(server):
    """Ask for a long answer."""
    return server.post("/generate", body(prompt(600, LONG), MANY))


@pytest.fixture(scope="module")
def plain(servers, model):
    """Plain SGLang's answers; the scenarios of each tier begin with an empty cache."""
    spec = plain_spec(Device(model, PLAIN_POOL, PAGE, FLAGS), "plain-answers")
    server = servers.get(spec)
    found = {}
    for ask in SCENARIOS:
        server.flush_cache()
        found[ask] = ask(server, "device")
    server.flush_cache()
    found[long_answer] = long_answer(server)
    servers.stop()
    return found


@pytest.fixture(scope="module")
def started(servers, model, plain, tmp_path_factory):
    tiers = Tiers(16 * MB, tmp_path_factory.mktemp("disk"), 64 * MB)
    flags = (
        "--tiered-load-policy=always",
        "--tiered-disk-admission=all",
        "--tiered-staging-size=8MB",
    )
    device = Device(model, 4096, PAGE, FLAGS)
    yield servers.restart(tiered_spec(device, tiers, "answers", flags))
    servers.stop()


@pytest.fixture
def server(started):
    settle(started)
    started.flush_cache()
    return started


def only_from(tier, answers, num_tokens):
    """Demand that so many prompt tokens came from a tier, and none from others."""
    for answer, count in zip(answers, num_tokens, strict=True):
        assert cached(answer) == ({tier: count} if count else {})


@pytest.mark.parametrize("tier", TIERS)
def test_prompts_of_whole_pages(server, plain, tier):
    """A prompt of k pages reuses k - 1 of them, with a token behind it all k."""
    asked, answers = exact_pages(server, tier)
    same(asked, plain[exact_pages][1], answers)
    want = [(k - 1) * PAGE for k in EXACT] + [k * PAGE for k in EXACT]
    only_from(tier, answers, want)
    only_from("device", plain[exact_pages][1], want)


@pytest.mark.parametrize("tier", TIERS)
def test_logprobs_of_the_prompt(server, plain, tier):
    """They are plain's, and what lies before the first one asked for is reused."""
    asked, answers = prompt_logprobs(server, tier)
    same(asked, plain[prompt_logprobs][1], answers)
    only_from(tier, answers, [0, 10 * PAGE, NUM_PAGES * PAGE])
    for ours, theirs in zip(answers, plain[prompt_logprobs][1], strict=True):
        sides = [
            [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
            for answer in (ours, theirs)
        ]
        # The first token of all has none.
        assert len(sides[0]) == len(sides[1])
        first = sides[1].count(None)
        assert sides[0][first:] == pytest.approx(
            sides[1][first:], abs=1.5 * SPREAD.max_logprob
        )


@pytest.mark.parametrize("tier", TIERS)
def test_several_answers_to_one_prompt(server, plain, tier):
    """``n`` answers share what was loaded, and each is plain's."""
    before = settle(server)
    asked, answers = several(server, tier)
    same(asked, plain[several][1], answers)
    after = settle(server)
    moved = {
        name: edge(after, name) - edge(before, name)
        for name in ("host->device", "disk->host")
    }
    # Once for all three.
    assert moved["host->device"] == (0 if tier == "device" else NUM_PAGES)
    assert moved["disk->host"] == (NUM_PAGES if tier == "disk" else 0)
    for answer in answers:
        assert sum(cached(answer).values()) == NUM_PAGES * PAGE


@pytest.mark.parametrize("tier", TIERS)
def test_hidden_states(server, plain, tier):
    """They are plain's, of as many tokens: those that were computed."""
    asked, answers = hidden_states(server, tier)
    same(asked, plain[hidden_states][1], answers)
    only_from(tier, answers, [NUM_PAGES * PAGE])
    ours, theirs = (
        side[0]["meta_info"]["hidden_states"]
        for side in (answers, plain[hidden_states][1])
    )
    assert len(ours) == len(theirs) == 8
    for mine, other in zip(ours, theirs, strict=True):
        mine, other = np.asarray(mine), np.asarray(other)
        assert mine.shape == other.shape
        error = np.linalg.norm(mine - other) / np.linalg.norm(other)
        assert error < 0.05


@pytest.mark.parametrize("tier", TIERS)
def test_grammars(server, plain, tier):
    """A grammar's answers over loaded pages keep to it, and are plain's."""
    asked, answers = grammars(server, tier)
    same(asked, plain[grammars][1], answers)
    only_from(tier, answers, [NUM_PAGES * PAGE] * 2)
    assert re.fullmatch(REGEX, answers[1]["text"])


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_pause_and_continue(server, plain, tier, mode):
    """An answer over loaded pages that is paused in its middle goes on as plain's."""
    tokens = prompt(600, LONG)
    server.post("/generate", body(tokens, 1))
    forget(server, tier)
    live = Live(server, body(tokens, MANY)).begun()
    server.post("/pause_generation", {"mode": mode})
    at_pause = live.num_tokens
    server.post("/continue_generation", {})
    answer = live.join()
    assert at_pause < MANY
    same([tokens], [plain[long_answer]], [answer])
    assert answer["meta_info"]["num_retractions"] == (mode == "retract")
    if mode == "in_place":
        assert cached(answer) == {tier: NUM_PAGES * PAGE}
    assert pinned(settle(server)) == 0


def test_flush_and_drop_under_load(server, plain):
    """They are refused while it runs; with a time-out the flush waits for its end."""
    tokens = prompt(600, LONG)
    server.post("/generate", body(tokens, 1))
    forget(server, "disk")
    live = Live(server, body(tokens, MANY)).begun()
    with pytest.raises(RuntimeError, match="HTTP 400"):
        server.post("/flush_cache?timeout=0", {})
    with pytest.raises(RuntimeError, match="HTTP 409"):
        server.post("/tiered/drop?tier=host", {})
    assert live.num_tokens < MANY
    server.flush_cache(PATIENCE_S)
    answer = live.join()
    same([tokens], [plain[long_answer]], [answer])
    assert cached(answer) == {"disk": NUM_PAGES * PAGE}
    state = settle(server)
    assert pinned(state) == 0
    assert {tier["used"] for tier in state["occupancy"].values()} == {0}
    again = server.post("/generate", body(tokens, MANY))
    assert cached(again) == {}
    same([tokens], [plain[long_answer]], [again])


@pytest.mark.parametrize("is_read", [False, True], ids=["answering", "reading"])
def test_clear_under_load(server, plain, is_read):
    """The disk is cleared at once, while pages of it are read or answered from."""
    tokens = prompt(600, LONG)
    server.post("/generate", body(tokens, 1))
    forget(server, "disk")
    live = Live(server, body(tokens, MANY))
    if not is_read:
        live.begun()
    server.post("/hicache/storage-backend/clear", {})
    assert live.num_tokens < MANY
    answer = live.join()
    same([tokens], [plain[long_answer]], [answer])
    if not is_read:
        assert cached(answer) == {"disk": NUM_PAGES * PAGE}
    # What was computed since is kept; what was on disk alone is not. What is on its way
    # there would come after the clear.
    settle(server)
    server.post("/hicache/storage-backend/clear", {})
    forget(server, "disk")
    assert stats(server)["occupancy"]["disk"]["used"] == 0
    again = server.post("/generate", body(tokens, MANY))
    assert cached(again) == {}
    same([tokens], [plain[long_answer]], [again])
    assert pinned(settle(server)) == 0


def test_memory_is_released_and_resumed(servers, model, plain, tmp_path):
    """The release forgets all KV, also below the device; after the resume answers are
    plain's, and are reused from every tier."""
    servers.stop()
    device = Device(model, 4096, PAGE, FLAGS)
    tiers = Tiers(16 * MB, tmp_path, 64 * MB)
    flags = ("--tiered-load-policy=always", "--tiered-disk-admission=all")
    spec = tiered_spec(device, tiers, "released", flags)
    server = servers.get(replace(spec, program=CPU_SERVER))
    tokens = prompt(600, LONG)
    server.post("/generate", body(tokens, MANY))
    settle(server)
    for call in ("release", "resume"):
        asked = {"tags": ["kv_cache"]}
        server.post(f"/{call}_memory_occupation", asked)
    again = server.post("/generate", body(tokens, MANY))
    assert cached(again) == {}
    same([tokens], [plain[long_answer]], [again])
    for tier in TIERS:
        forget(server, tier)
        answer = server.post("/generate", body(tokens, MANY))
        assert cached(answer) == {tier: NUM_PAGES * PAGE}
        same([tokens], [plain[long_answer]], [answer])
    assert pinned(settle(server)) == 0
    servers.stop()
