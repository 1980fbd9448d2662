"""Tier peer on real servers: a prefix computed on one is pulled by the other.

Two servers of one pool, on one machine. What one answers with KV of the other must be
what plain SGLang answers; the gate must turn red where pulled pages are spoiled after
their checks (the negative control); and what is spoiled on its way must be caught by
the checks and computed. Loads are forced (``always``), so that nothing depends on how
fast the machine is.
"""

import asyncio
import json
import os
import signal
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.gate import check_equality, negative_control
from sgl_tiered_workloads.server import SglangServer, free_port
from sgl_tiered_workloads.sessions import random_tokens, replay
from sgl_tiered_workloads.systems import CPU_FLAGS, MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from sgl_tiered.router.config import RouterConfig
from sgl_tiered.router.front import Router
from tests.e2e.e2e_support import (
    PATIENCE_S,
    START_TIMEOUT_S,
    Case,
    drop,
    edge,
    sequential,
    settle,
    stats,
    wait_until,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16, overlap=False)
POOL_TOKENS = 2_048
FAULTS = {"SGL_TIERED_ALLOW_FAULTS": "1"}


class Pair:
    """Two servers of one pool: ``a`` computes, ``b`` pulls.

    Args:
        folder: for registry, logs and disks.
        model: what they serve.
        dress: makes of a server's spec what is started.
    """

    def __init__(self, folder, model, dress=lambda spec: spec):
        self.dress = dress
        self.folder = folder
        self.registry = f"file:{folder / 'pool'}"
        self.model = model
        self.num_disks = 0
        self.a = self.start("a")
        try:
            self.b = self.start("b")
        except BaseException:
            self.a.stop()
            raise

    def start(self, name, flags=()):
        """Start a server of the pool; each start of ``a`` has an empty disk."""
        ports = Ports()
        events = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports.take()}",
            "replay_endpoint": f"tcp://*:{ports.take()}",
        }
        tiers = Tiers(100 * MB)
        if name == "a":
            self.num_disks += 1
            tiers = Tiers(100 * MB, self.folder / f"disk-{self.num_disks}", 200 * MB)
        spec = tiered_spec(
            CASE.device(self.model, POOL_TOKENS),
            tiers,
            f"peer-{name}",
            (
                *CPU_FLAGS[:1],
                "--tiered-load-policy=always",
                f"--tiered-pool={self.registry}",
                f"--tiered-pool-name={name}",
                "--tiered-pool-transport=loopback",
                f"--kv-events-config={json.dumps(events)}",
                *flags,
            ),
            FAULTS,
        )
        server = SglangServer(
            self.dress(spec), self.folder / name, free_port(None), START_TIMEOUT_S
        )
        server.start()
        return server

    def stop(self):
        """Stop both, whatever their state."""
        for server in (self.a, self.b):
            server.stop()


@pytest.fixture(scope="module")
def pair(servers, reference, model, tmp_path_factory):
    """Two servers; the one of other tests is stopped, as places are few."""
    reference(CASE)
    servers.stop()
    pair = Pair(tmp_path_factory.mktemp("pool"), model)
    try:
        wait_until(lambda: len(members(pair.b)) == 2, "both are in the pool")
        yield pair
    finally:
        pair.stop()


def members(server):
    return stats(server)["pool"]["members"]


def prompt(seed, num_tokens=400):
    rng = np.random.default_rng(seed)
    return [int(t) for t in random_tokens(rng, num_tokens, VOCAB_TOKENS)]


def generate(server, tokens, headers=None, **fields):
    """Return the answer's ``meta_info``."""
    sampling = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling, **fields}
    request = urllib.request.Request(
        server.url + "/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **(headers or {})},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.load(response)["meta_info"]


def pulled(records):
    return [record for record in records if record.cached_by_tier.get("peer", 0)]


def in_turns(pair, records):
    """Let the servers answer one request after the other, by turns.

    So the KV of each turn of a chat is on the other server, and each page is computed
    once, as on the reference.
    """
    answers = []
    for record, request in zip(records, replay(records), strict=True):
        server = (pair.a, pair.b)[len(answers) % 2]
        (answer,) = sequential(server, [request])
        settle(server)
        answers.append(replace(answer, order=record.order))
    return answers


def test_a_prefix_computed_on_one_is_pulled_by_the_other(pair, reference):
    """Equal to the bit to plain's answers; the report says that a peer had the KV."""
    plain = reference(CASE)
    answers = in_turns(pair, plain.chat)
    assert len(pulled(answers)) > len(answers) // 3, "too little came from the peer"
    result = check_equality(
        plain.chat,
        answers,
        page_size=CASE.page_size,
        spread=plain.spread,
        min_exact_fraction=0.5,
        must_cover=["peer"],
    )
    assert result.passed, result.summary()
    state = stats(pair.b)
    assert edge(state, "peer->host") > 0
    assert edge(state, "peer->host", "failed_pages") == 0
    assert state["tiers"]["peer"]["tokens_hit"] > 0
    told = generate(pair.b, prompt(1))["tiered"][0]["peer"]
    assert told["pages"] == 0
    assert told["reason"] == "no peer holds more of it"


def test_a_hint_names_the_holder(pair):
    """The router's header is enough: nobody is asked who holds anything."""
    tokens = prompt(7)
    generate(pair.a, tokens)
    settle(pair.a)
    asked = stats(pair.b)["counters"].get("peer_searches", 0)
    headers = {"X-Tiered-Holders": f"r0={pair.a.url};tokens={len(tokens)};tier=host"}
    told = generate(pair.b, tokens, headers)["tiered"][0]["peer"]
    assert (told["holder"], told["pages"]) == ("a", (len(tokens) - 1) // CASE.page_size)
    assert stats(pair.b)["counters"].get("peer_searches", 0) == asked


def test_a_router_finds_them_by_the_registry(pair):
    """What a server writes into its entry is enough to serve and to follow it."""
    # Two each: an idle server may publish the last one's events with its next work.
    for seed in (8, 9):
        for server in (pair.a, pair.b):
            generate(server, prompt(seed))

    async def run():
        router = Router(RouterConfig(port=0, registry=pair.registry))
        await router.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not is_found(router, "a") or not is_found(router, "b"):
                    await asyncio.sleep(0.05)
            front = SimpleNamespace(url=f"http://127.0.0.1:{router.port}")
            told = await asyncio.to_thread(generate, front, prompt(8))
            assert told["completion_tokens"] == 4
            for name, server in (("a", pair.a), ("b", pair.b)):
                config = router.fleet.get(name).config
                assert (config.url, config.kind) == (server.url, "colocated")
        finally:
            await router.close()

    asyncio.run(run())


def is_found(router, name):
    """Whether a server is up, and its events are followed from the first one on."""
    instance = router.fleet.get(name)
    if instance is None or not instance.is_up:
        return False
    (feed,) = instance.feeds
    return feed.is_connected and feed.holder.is_complete


def test_what_only_the_disk_of_a_peer_has_is_pulled(pair, reference):
    """A reads it for b, and the answers are plain's; a second time memory has it."""
    plain = reference(CASE)
    chosen = plain.chat[-3:]
    drop(pair.b, "device", "host")
    first = list(chosen[0].prompt)
    sequential(pair.a, replay(chosen))
    drop(pair.a, "device", "host")
    state = stats(pair.a)
    assert state["occupancy"]["disk"]["used"] > 0
    assert state["occupancy"]["host"]["used"] == 0
    before = edge(state, "disk->host")
    told = generate(pair.b, first)["tiered"][0]["peer"]
    assert told["pages"] == (len(first) - 1) // CASE.page_size
    assert told["disk_pages"] == told["pages"]
    assert edge(stats(pair.a), "disk->host") - before == told["disk_pages"]
    drop(pair.b, "device", "host")
    again = generate(pair.b, first)["tiered"][0]["peer"]
    assert (again["pages"], again["disk_pages"]) == (told["pages"], 0)
    drop(pair.b, "device", "host")
    drop(pair.a, "device", "host")
    answers = sequential(pair.b, replay(chosen))
    assert len(pulled(answers)) == len(chosen)
    result = check_equality(
        chosen,
        answers,
        page_size=CASE.page_size,
        spread=plain.spread,
        # Plain computed other parts of these prompts, so that bits differ.
        min_exact_fraction=0.0,
    )
    assert result.passed, result.summary()


def test_spoiled_pages_turn_the_gate_red(pair, reference):
    """The negative control: pulled pages that are wrong when they are loaded."""
    plain = reference(CASE)
    chosen = plain.chat[-6:]
    drop(pair.b, "device", "host")
    pair.b.post("/tiered/faults?emulate=host:fault=zero", {})
    try:
        answers = sequential(pair.b, replay(chosen))
    finally:
        pair.b.post("/tiered/faults?emulate=", {})
    assert pulled(answers), "nothing came from the peer, so nothing was spoiled"
    result = check_equality(
        chosen,
        answers,
        page_size=CASE.page_size,
        spread=plain.spread,
        min_exact_fraction=0.0,
    )
    negative_control({"zero": result})
    drop(pair.b, "device", "host")


def test_other_tenants_share_nothing(pair):
    """The same tokens under another salt are not pulled."""
    tokens = prompt(2)
    generate(pair.a, tokens, cache_salt="one")
    settle(pair.a)
    told = generate(pair.b, tokens, cache_salt="two")["tiered"][0]["peer"]
    assert told["pages"] == 0
    told = generate(pair.b, tokens, cache_salt="one")["tiered"][0]["peer"]
    assert (told["holder"], told["pages"]) == ("a", (len(tokens) - 1) // CASE.page_size)


def test_what_is_spoiled_on_its_way_is_caught(pair, reference):
    """The checks find it, the pages are computed, and the answers are plain's."""
    plain = reference(CASE)
    chosen = plain.chat[-3:]
    pair.a.stop()
    pair.a = pair.start("a", ["--tiered-fault-corrupt=peer"])
    wait_until(lambda: len(members(pair.b)) == 2, "both are in the pool")
    drop(pair.b, "device", "host")
    sequential(pair.a, replay(chosen))
    settle(pair.a)
    before = edge(stats(pair.b), "peer->host", "failed_pages")
    answers = sequential(pair.b, replay(chosen))
    assert not pulled(answers)
    state = stats(pair.b)
    assert edge(state, "peer->host", "failed_pages") > before, "nothing was sent"
    assert any("not those" in why for why in state["pool"]["pulls"]["not_pulled"])
    result = check_equality(
        chosen,
        answers,
        page_size=CASE.page_size,
        spread=plain.spread,
        min_exact_fraction=0.0,
    )
    assert result.passed, result.summary()


def serves_on_without_a(pair):
    """Kill a, and ask b while a is still in the pool and when it is out of it."""
    os.killpg(pair.a.pid, signal.SIGKILL)
    assert generate(pair.b, prompt(3))["tiered"][0]["peer"]["pages"] == 0
    wait_until(lambda: len(members(pair.b)) == 1, "the dead one is out of the pool")
    assert generate(pair.b, prompt(4))["completion_tokens"] == 4
    under_way = stats(pair.b)["pool"]["under_way"]
    assert under_way["num_requests"] == under_way["num_fetches"] == 0


def test_a_killed_peer_is_done_without(pair):
    """B serves on while a is dead and still in the pool, and when it is out of it."""
    serves_on_without_a(pair)
