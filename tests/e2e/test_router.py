"""The router in front of real SGLang servers that publish KV events, one with tiers.

Each test has a router of its own, which joins late and catches up by a replay. What it
believes is compared with what the server says of each request (``cached_tokens``).
"""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.systems import Tiers, plain_spec, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.router.config import RouterConfig, parse_instance
from sgl_tiered.router.front import Router
from sgl_tiered.router.tree import keys_of, root_key
from tests.e2e.e2e_support import PATIENCE_S, POOL_TOKENS, Case, wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

PAGE = 16
PROMPT_TOKENS = 200  # not a multiple of the page: the last page is never a hit
HIT_TOKENS = PROMPT_TOKENS // PAGE * PAGE
WHOLE = (HIT_TOKENS // PAGE, 0, 0, 0, 0, 0)
"""Pages of a prompt by tier, all on the device."""


def publishing():
    """Return the flags of a publisher and a replay endpoint."""
    ports = Ports()
    told = {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.take()}",
        "replay_endpoint": f"tcp://*:{ports.take()}",
    }
    return ("--kv-events-config", json.dumps(told))


@pytest.fixture(scope="module")
def server(servers, model):
    """Plain SGLang with a publisher and a replay endpoint."""
    spec = plain_spec(Case(PAGE).device(model), "events", flags=publishing())
    return servers.get(spec)


@asynccontextmanager
async def routed(server, **others):
    """Give a router that knows all that the servers hold, and a client of it."""
    config = RouterConfig(
        port=0, load_interval_s=0.2, health_interval_s=60.0, show_cached_tokens=True
    )
    named = {"only": server, **others}
    instances = [
        parse_instance(f"{each.url},name={name}") for name, each in named.items()
    ]
    router = Router(config, instances)
    await router.start()
    try:
        url = f"http://127.0.0.1:{router.port}"
        async with aiohttp.ClientSession(url) as client:
            await until(lambda: all(is_complete(router, name) for name in named))
            yield router, client
    finally:
        await router.close()


def is_complete(router, name="only"):
    instance = router.fleet.get(name)
    holder = instance.holders[0]
    connected = bool(instance.feeds) and instance.feeds[0].is_connected
    return connected and holder.is_complete and holder.num_orphans == 0


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.05)


def prompt(seed):
    rng = np.random.default_rng(seed)
    return [int(token) for token in random_tokens(rng, PROMPT_TOKENS, VOCAB_TOKENS)]


def body(tokens, num_tokens=4, **fields):
    sampling = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"input_ids": tokens, "sampling_params": sampling, **fields}


def generate(server, tokens):
    return server.post("/generate", body(tokens))


async def ask(client, sent):
    """Return the tokens that the router saw cached, and the server's answer."""
    async with client.post("/generate", json=sent) as response:
        assert response.status == 200, await response.text()
        return int(response.headers["X-Tiered-Cached-Tokens"]), await response.json()


def believed(router, tokens, name="only"):
    """Return a prompt's pages by tier, as the router has them from events alone."""
    tree = router.fleet.trees["colocated"]
    tree.expire(float("inf"))
    holder = router.fleet.get(name).holders[0]
    match = tree.match(keys_of(root_key("tokens", PAGE), tokens, PAGE))
    found = match.get(holder.number)
    return None if found is None else found.pages


async def idle(router):
    """Wait until every server, asked from now on, has told that it is idle."""
    now_s = SystemClock().now()

    def is_idle(instance):
        report = instance.report
        is_new = report is not None and report.asked_s >= now_s
        return is_new and router.fleet.load(instance) == (0, 0)

    await until(lambda: all(is_idle(each) for each in router.fleet))


def test_what_the_router_believes_is_what_the_server_says(server):
    """Stored, evicted and flushed prefixes, by events alone."""

    async def run():
        # Complete once the server has published: who joins then is late.
        async with routed(server):
            pass
        async with routed(server) as (router, client):
            assert router.fleet.get("only").feeds[0].counts.replays == 1
            tree = router.fleet.trees["colocated"]
            num_prompts = 2 * POOL_TOKENS // PROMPT_TOKENS
            for seed in range(num_prompts):
                await ask(client, body(prompt(seed)))
            # Events come a while after answers, on a busy machine a long one.
            await until(
                lambda: (
                    believed(router, prompt(num_prompts - 1)) == WHOLE
                    and believed(router, prompt(0)) is None
                    and len(tree) <= POOL_TOKENS // PAGE
                )
            )
            # the first was evicted long ago; the last ones were not
            for seed, wanted in (
                (num_prompts - 1, HIT_TOKENS),
                (0, 0),
                (num_prompts - 2, HIT_TOKENS),
            ):
                seen, answer = await ask(client, body(prompt(seed)))
                assert seen == answer["meta_info"]["cached_tokens"] == wanted, seed
                await until(lambda seed=seed: believed(router, prompt(seed)) == WHOLE)
            await asyncio.to_thread(server.flush_cache)
            await until(lambda: len(tree) == 0)

    asyncio.run(run())


def read(url, body=None):
    """Return an answer's headers and its parsed body."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return response.headers, json.load(response)


def test_texts_match_by_the_servers_tokenizer(server, model):
    """The command as a process: a text is tokenized as the server does it, and with
    nothing assumed (``--ttl 0``) the events alone must find its prefix."""
    command = [sys.executable, "-m", "sgl_tiered.cli.main", "router", "--port", "0"]
    command += ["--instance", f"{server.url},name=only", "--ttl", "0"]
    command += ["--tokenizer", str(model), "--show-cached-tokens"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split()[-1]
        text = "The same words again and again, in a row. " * 20
        sent = {"text": text, "sampling_params": body([])["sampling_params"]}
        _, answer = read(url + "/generate", sent)
        wanted = answer["meta_info"]["prompt_tokens"] // PAGE

        def knows_all():
            _, state = read(url + "/router/state")
            assert state["alphabet"] == "tokens"
            return state["instances"]["only"]["pages"]["device"] >= wanted

        wait_until(knows_all, "the events of the text")
        headers, answer = read(url + "/generate", sent)
        seen = int(headers["X-Tiered-Cached-Tokens"])
        assert seen == answer["meta_info"]["cached_tokens"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_streams_and_openai_paths_give_the_servers_tokens(server):
    """Byte for byte what the server would have said."""

    async def run():
        async with routed(server) as (_, client):
            plain = await asyncio.to_thread(generate, server, prompt(7))
            _, answer = await ask(client, body(prompt(7)))
            assert answer["output_ids"] == plain["output_ids"]
            sent = body(prompt(7), stream=True)
            async with client.post("/generate", json=sent) as response:
                events = (await response.read()).split(b"\n\n")
            assert events[-2:] == [b"data: [DONE]", b""]
            last = json.loads(events[-3].removeprefix(b"data: "))
            assert last["text"] == plain["text"]
            completion = {
                "model": "default",
                "prompt": prompt(7),
                "max_tokens": 4,
                "temperature": 0,
                "ignore_eos": True,
            }
            async with client.post("/v1/completions", json=completion) as response:
                told = await response.json()
            assert told["choices"][0]["text"] == plain["text"]

    asyncio.run(run())


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(server, is_stream):
    """The server stops computing long before the answer's length is reached."""

    async def run():
        async with routed(server) as (router, client):
            instance = router.fleet.get("only")
            sent = body(prompt(8), num_tokens=1200, stream=is_stream)
            task = asyncio.create_task(client.post("/generate", json=sent))
            await until(lambda: instance.report and instance.report.num_requests == 1)
            if is_stream:
                response = await task
                await response.content.readany()
                response.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: instance.report.num_requests == 0)
            assert instance.num_under_way == 0

    asyncio.run(run())


def test_a_prefix_in_host_memory_is_routed_to_its_holder(server, servers, model):
    """The device gave it up, the tiers' own events say who still has it, and where."""
    tiers = Tiers(host_bytes=64 * 2**20)
    flags = (*publishing(), "--tiered-load-policy", "always")
    device = Case(PAGE).device(model)
    spec = tiered_spec(device, tiers, "tier-events", flags)

    async def run(tiered):
        async with routed(server, tiered=tiered) as (router, client):
            sent = prompt(900)
            await asyncio.to_thread(generate, tiered, sent)
            for seed in range(901, 901 + 2 * POOL_TOKENS // PROMPT_TOKENS):
                await asyncio.to_thread(generate, tiered, prompt(seed))
            # An idle server publishes when it looks round next: wake it.
            async with asyncio.timeout(PATIENCE_S):
                while believed(router, sent, "tiered") != (0, *WHOLE[:-1]):
                    await asyncio.to_thread(generate, tiered, prompt(900 + 99))
            for _ in range(4):  # plain and idle, it would have every other turn
                # One request under way outweighs so short a prefix: rightly so.
                await idle(router)
                seen, answer = await ask(client, body(sent))
                assert seen == answer["meta_info"]["cached_tokens"] == HIT_TOKENS
            kept = router.fleet.get("tiered").feeds[0].counts
            assert (kept.malformed, kept.drops) == (0, 0)
            await asyncio.to_thread(tiered.flush_cache)
            await until(lambda: believed(router, sent, "tiered") is None)

    # Beside the plain one, which ``servers`` would end first.
    with SglangServer(spec, servers.log_dir) as tiered:
        asyncio.run(run(tiered))
