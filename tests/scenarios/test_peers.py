"""Prompts of whole pages that another server of the pool has computed.

More on pulled pages is in ``tests/e2e/test_peer.py`` and ``tests/cluster``.
"""

from dataclasses import replace

import pytest
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, plain_spec

from tests.e2e.cpu_server import CPU_SERVER
from tests.e2e.e2e_support import drop, edge, pinned, settle, stats, wait_until
from tests.e2e.test_peer import Pair, members
from tests.e2e.test_weights import LORA_FLAGS, make_adapter
from tests.scenarios.scenario_support import (
    PAGE,
    PLAIN_POOL,
    SPREAD,
    body,
    cached,
    prompt,
    same,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

EXACT = (1, 2, 7, 20)
"""Prompts of so many whole pages."""
PROMPTS = [prompt(1300 + num_pages, num_pages * PAGE) for num_pages in EXACT]
ASKED = [*PROMPTS, *((*tokens, 77) for tokens in PROMPTS)]
FOUND = [(k - 1) * PAGE for k in EXACT] + [k * PAGE for k in EXACT]
SCORED = prompt(1350, 24 * PAGE + 5)
"""The prompt whose own logprobs are asked for."""
FROM = {0: 0, 10 * PAGE + 3: 10 * PAGE, len(SCORED) - 1: 24 * PAGE}
"""From which token on, and how many before it can be reused."""


def scored(first):
    """Return a request for the logprobs of the prompt from a token on."""
    return body(SCORED, logprob_start_len=first)


def input_logprobs(answer):
    """Return the prompt's logprobs; the first token of all has none."""
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]


@pytest.fixture(scope="module")
def plain(servers, model):
    """Plain SGLang's answers to prompts that it has computed before.

    First those to ``ASKED``, then those with logprobs of the prompt.
    """
    device = Device(model, PLAIN_POOL, PAGE, CPU_FLAGS)
    server = servers.get(plain_spec(device, "plain-peers"))
    for tokens in (*PROMPTS, SCORED):
        server.post("/generate", body(tokens))
    answers = [server.post("/generate", body(tokens)) for tokens in ASKED]
    with_logprobs = [server.post("/generate", scored(first)) for first in FROM]
    assert [cached(one).get("device", 0) for one in with_logprobs] == [*FROM.values()]
    servers.stop()
    return answers, with_logprobs


@pytest.fixture(scope="module")
def pair(plain, model, tmp_path_factory):
    """Two servers of one pool; the one called ``a`` has computed the prompts."""
    pair = Pair(tmp_path_factory.mktemp("pool"), model)
    try:
        wait_until(lambda: len(members(pair.b)) == 2, "both are in the pool")
        for tokens in (*PROMPTS, SCORED):
            pair.a.post("/generate", body(tokens))
        settle(pair.a)
        yield pair
    finally:
        pair.stop()


def ask_for_pulls(pair, held, bodies):
    """Ask B, which has no page, while A has them in one place; return the answers."""
    if held == "disk":
        drop(pair.a, "device", "host")
    answers = []
    for one in bodies:
        drop(pair.b, "device", "host")
        if held == "disk":
            # It read what the last answer was made of.
            drop(pair.a, "host")
        answers.append(pair.b.post("/generate", one))
    return answers


@pytest.mark.parametrize("held", ["memory", "disk"])
def test_prompts_of_whole_pages(pair, plain, held):
    """A prompt of k pages gets k - 1 of them, with a token behind it all k."""
    before = edge(settle(pair.b), "peer->host")
    answers = ask_for_pulls(pair, held, [body(tokens) for tokens in ASKED])
    same(ASKED, plain[0], answers)
    assert [cached(one) for one in answers] == [
        {"peer": count} if count else {} for count in FOUND
    ]
    after = settle(pair.b)
    assert edge(after, "peer->host") - before == sum(FOUND) // PAGE
    assert pinned(after) == 0
    wait_until(lambda: pinned(stats(pair.a)) == 0, "the holder has nothing lent")


@pytest.mark.parametrize("held", ["memory", "disk"])
def test_logprobs_of_the_prompt(pair, plain, held):
    """They are plain's, and what lies before the first one asked for is pulled."""
    before = edge(settle(pair.b), "peer->host")
    answers = ask_for_pulls(pair, held, [scored(first) for first in FROM])
    same([SCORED] * len(FROM), plain[1], answers)
    assert [cached(one) for one in answers] == [
        {"peer": count} if count else {} for count in FROM.values()
    ]
    for first, ours, theirs in zip(FROM, answers, plain[1], strict=True):
        mine, other = input_logprobs(ours), input_logprobs(theirs)
        assert len(mine) == len(other) == len(SCORED) - first
        num_none = other.count(None)
        assert mine[num_none:] == pytest.approx(
            other[num_none:], abs=1.5 * SPREAD.max_logprob
        )
    after = settle(pair.b)
    assert edge(after, "peer->host") - before == sum(FROM.values()) // PAGE
    assert pinned(after) == 0
    wait_until(lambda: pinned(stats(pair.a)) == 0, "the holder has nothing lent")


def with_adapters(spec, paths):
    """Return a server's specification with adapters, by name."""
    named = [f"{name}={path}" for name, path in paths.items()]
    flags = (*spec.flags, *LORA_FLAGS, "--lora-paths", *named)
    return replace(spec, flags=flags, program=CPU_SERVER)


def test_adapters_share_pages_by_their_weights(servers, model, tmp_path):
    """Pages of one adapter in two places are pulled; of two of one name not."""
    paths = {
        "a": {"poems": tmp_path / "a" / "poems", "sql": tmp_path / "a" / "sql"},
        "b": {"poems": tmp_path / "b" / "poems", "sql": tmp_path / "b" / "sql"},
    }
    seeds = {("a", "poems"): 0, ("b", "poems"): 0, ("a", "sql"): 1, ("b", "sql"): 2}
    for (where, name), seed in seeds.items():
        make_adapter(paths[where][name], seed)
    tokens = prompt(1400, 20 * PAGE + 1)

    def asked(server, name):
        return server.post("/generate", body(tokens, lora_path=name))

    device = Device(model, PLAIN_POOL, PAGE, CPU_FLAGS)
    spec = with_adapters(plain_spec(device, "plain-adapters"), paths["b"])
    server = servers.get(spec)
    wanted = {}
    for name in ("poems", "sql"):
        asked(server, name)
        wanted[name] = asked(server, name)
    assert wanted["poems"]["output_ids"] != wanted["sql"]["output_ids"]
    servers.stop()

    def dress(spec):
        return with_adapters(spec, paths[spec.name.removeprefix("peer-")])

    pair = Pair(tmp_path / "pool", model, dress)
    try:
        wait_until(lambda: len(members(pair.b)) == 2, "both are in the pool")
        for name in wanted:
            asked(pair.a, name)
        settle(pair.a)
        answers = {name: asked(pair.b, name) for name in wanted}
        assert cached(answers["poems"]) == {"peer": 20 * PAGE}
        assert cached(answers["sql"]) == {}
        # What was computed whole stands beside what was computed whole.
        drop(pair.b, "device")
        answers["sql"] = asked(pair.b, "sql")
        assert cached(answers["sql"]) == {"host": 20 * PAGE}
        same([tokens] * 2, list(wanted.values()), list(answers.values()))
        assert pinned(settle(pair.b)) == 0
    finally:
        pair.stop()
