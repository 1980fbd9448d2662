"""What instances and clients send that nobody would: refused, counted, and over."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.router.bodies import Bodies
from sgl_tiered.router.events import EventError, apply, decode
from sgl_tiered.router.prompts import MAX_PAGES, PATHS, PromptKeys, read_prompt
from sgl_tiered.router.reading import Job, Reading, read_request
from sgl_tiered.router.supervised import supervised
from sgl_tiered.router.tree import PromptTree
from tests.unit.router.fake_servers import (
    FakePublisher,
    answer,
    cluster,
    fast,
    hang,
    scenario,
    status,
    stored,
    until,
)
from tests.unit.router.toy_tokenizers import Letters

REFUSALS = "sgl_tiered_router_refusals_total"
PROMPT = {"input_ids": list(range(16))}


@pytest.mark.parametrize(
    "text",
    [
        '{"loads":[{"num_running_reqs":1e999}]}',
        '{"loads":[{"num_waiting_uncached_tokens":1e300}]}',
        '{"loads":[{"num_waiting_reqs":-1e300}]}',
        '{"loads":[' + ",".join(['{"num_running_reqs":9e13}'] * 9) + "]}",
        "[" * 100_000,
        '{"loads"',
    ],
)
@scenario
async def test_a_load_that_cannot_be_takes_its_instance_out(text):
    """It is down, others serve; with an answer that can be believed it is up again."""
    async with cluster("ab") as c:
        instance = c.router.fleet.get("a")
        c["a"].told["/v1/loads"] = text
        instance.tells_load = True
        await until(lambda: not instance.is_up)
        assert (await c.post(PROMPT))[2]["served_by"] == "b"
        assert await c.metric(REFUSALS, reason="answer") >= 1
        c["a"].told["/v1/loads"] = '{"loads":[{"num_running_reqs":1}]}'
        await until(lambda: instance.is_up)
        await until(lambda: instance.report is not None)
        assert instance.report.num_requests == 1


@pytest.mark.parametrize(
    "token_ids", [[[1], 5], [[1], {"a": 1}], [[1], None], [["a"], [2]], [[1], "x"]]
)
@scenario
async def test_odd_tokens_in_events_end_nothing(token_ids):
    """The batch is counted as malformed, and the next one is applied."""
    publisher = FakePublisher()
    odd = {**stored([1, 2], 1), "token_ids": token_ids}
    try:
        async with cluster("a", words={"a": publisher.words}) as c:
            await publisher.subscribed()
            await publisher.publish(stored([8, 9], 1))
            feed = c.router.fleet.get("a").feeds[0]
            await until(lambda: feed.counts.batches == 1)
            await publisher.publish(odd)
            await until(lambda: feed.counts.malformed == 1)
            await publisher.publish(stored([3, 4], 1))
            await until(lambda: len(c.router.fleet.trees["colocated"]) == 2)
            what = {"instance": "a", "what": "malformed"}
            assert await c.metric("sgl_tiered_router_events_total", **what) == 1
    finally:
        await publisher.close()


ATOMS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
ODD = st.recursive(
    ATOMS | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = ("block_hashes", "token_ids", "parent_block_hash", "block_size", "medium")
FIELDS += ("lora_name", "cache_salt", "type")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
            st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3),
            st.integers(0, 3),
        ),
        max_size=5,
    )
)
def test_any_events_are_applied_or_malformed(made) -> None:
    """Well-formed ones with odd fields among them; lookups go on in either case."""
    tree = PromptTree()
    holder = tree.add_holder("a", 1)
    events = []
    for kind, odd, num in made:
        good = {
            "type": kind,
            "block_hashes": list(range(num)),
            "token_ids": list(range(num)),
            "parent_block_hash": None,
            "block_size": 1,
        }
        events.append({**good, **odd})
    try:
        for each in decode(msgspec.msgpack.encode([0.0, events, 0])):
            apply(tree, holder, each)
    except EventError:
        pass
    prompt = read_prompt("/generate", {"input_ids": [0, 1, 2]}, None)
    keys = PromptKeys(prompt, 4)
    matches = tree.find(keys.at(keys.page(holder.page_tokens)))
    keys.num_tokens(matches.pages, holder.page_tokens)


WORDS = ("text", "input_ids", "prompt", "messages", "tools", "chat_template_kwargs")
WORDS += ("cache_salt", "extra_key", "lora_path", "model", "user", "session_params")
BODIES = st.dictionaries(
    st.sampled_from(WORDS),
    st.recursive(
        ATOMS | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(("role", "content", "id", "thinking")),
                inner,
                max_size=3,
            )
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(
    st.sampled_from(PATHS),
    BODIES.map(json.dumps).map(str.encode) | st.binary(),
    st.booleans(),
)
def test_any_body_is_read_or_said_to_be_none(path, raw, has_tokenizer) -> None:
    """By a process, to which and from which it goes as bytes."""
    job = Job(path, (1, 4), 4)
    reading = read_request(job, raw, Letters() if has_tokenizer else None)
    sent = msgspec.msgpack.encode(reading)
    found = msgspec.msgpack.decode(sent, type=Reading)
    assert found.names == reading.names
    assert bool(found.trouble) == bool(reading.trouble)
    found.keys(4).at(4)


@given(st.binary(max_size=60))
def test_any_bytes_are_events_or_malformed(payload) -> None:
    """Nothing but ``EventError`` is raised."""
    with contextlib.suppress(EventError):
        decode(payload)


@scenario
async def test_a_task_that_fails_begins_again():
    """It is counted, and what it follows is marked down, whatever it stumbled over."""
    async with cluster("a") as c:
        fleet = c.router.fleet
        instance = fleet.get("a")

        async def fail(*args, **kwargs):
            raise SystemError("nobody thinks of this")

        fleet._probe = fail
        await until(lambda: not instance.is_up)
        del fleet._probe
        await until(lambda: instance.is_up)
        name = "sgl_tiered_router_task_failures_total"
        assert await c.metric(name, task="watch") >= 1


@scenario
async def test_whatever_ends_a_task_is_counted_and_the_task_goes_on():
    """It is begun anew until it is cancelled."""
    begun, counted = [], []
    goes_on = asyncio.Event()

    async def run():
        begun.append(len(begun))
        if len(begun) < 2:
            raise ZeroDivisionError
        goes_on.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(supervised("some", run, counted.append))
    await goes_on.wait()
    assert counted == ["some"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert begun == [0, 1]


@pytest.mark.parametrize("code", [400, 422, 500])
@pytest.mark.parametrize("is_stream", [False, True])
@scenario
async def test_what_is_refused_is_held_by_nobody(code, is_stream):
    """And what was assumed before stays: a refused request is no news."""
    async with cluster("a", fast(max_attempts=1)) as c:
        await c.post({"input_ids": [1] * 8})
        holder = c.router.fleet.get("a").holders[0]
        before = dict(holder.assumed)
        assert len(before) == 2
        c["a"].behaviour = status(code)
        sent = {"input_ids": [1] * 8 + [2] * 400, "stream": is_stream}
        assert (await c.post(sent))[0] == code
        if code != 500:  # which speaks of the instance: it may have lost all
            assert dict(holder.assumed) == before
        else:
            assert set(holder.assumed) <= set(before)
        assert len(c.router.fleet.trees["colocated"]) == len(holder.assumed)


@scenario
async def test_who_comes_next_follows_a_request_under_way():
    """What is on its way is assumed until the answer says more."""
    async with cluster("ab", fast(running_cost_tokens=0)) as c:
        for server in c.servers:
            server.behaviour = hang()
        sent = {"input_ids": [1] * 64, "stream": True}
        tasks = [asyncio.create_task(c.post({**sent, "rid": n})) for n in range(2)]
        await until(lambda: len(c["a"].seen) + len(c["b"].seen) == 2)
        assert {len(c["a"].seen), len(c["b"].seen)} == {0, 2}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_refused_prompts_drive_nothing_out() -> None:
    """What is on its way takes the room that is left, and gives it back."""
    tree = PromptTree(max_assumed=4)
    holder = tree.add_holder("a", 1)
    keys = [bytes([n]) for n in range(8)]
    tree.assume(holder, keys[:3], 1.0)
    added = tree.expect(holder, keys, 2.0)
    assert added == keys[3:4]
    assert list(holder.assumed) == keys[:4]
    tree.take_back(holder, added, 2.0)
    assert list(holder.assumed) == keys[:3]
    added = tree.expect(holder, keys, 3.0)
    tree.assume(holder, keys[3:4], 4.0)  # somebody else's was answered meanwhile
    tree.take_back(holder, added, 3.0)
    assert list(holder.assumed) == keys[:4]
    assert len(tree) == 4


@pytest.mark.parametrize("what", ["text", "input_ids", "messages"])
def test_a_long_prompt_counts_with_its_first_pages(what) -> None:
    """Its length is known all the same."""
    num = 5_000_000
    value = {
        "text": "x" * num,
        "input_ids": [1] * num,
        "messages": [{"role": "user", "content": "x" * num}],
    }[what]
    path = "/v1/chat/completions" if what == "messages" else "/generate"
    raw = json.dumps({what: value}).encode()
    reading = read_request(Job(path, (1,), 4), raw, None)
    (names,) = reading.names.values()
    assert len(names) == 16 * MAX_PAGES
    least = num if what == "input_ids" else num // 4
    assert reading.prompt.num_tokens >= least


@scenario
async def test_a_long_body_is_served_and_short_ones_beside_it():
    """It is read elsewhere; the loop goes round meanwhile."""
    async with cluster("a") as c:
        begun = asyncio.Event()
        rounds = 0

        async def go_round():
            nonlocal rounds
            while True:
                rounds += 1
                await c.post(PROMPT)
                begun.set()

        task = asyncio.create_task(go_round())
        await begun.wait()
        c["a"].behaviour = status(400)
        before = rounds
        data = io.BytesIO(json.dumps({"text": "x" * (20 * 2**20)}).encode())
        async with c.client.post("/generate", data=data) as response:
            assert response.status == 400
        assert rounds > before
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(c.router.fleet.get("a").holders[0].assumed) == 4


@pytest.mark.parametrize(
    ("data", "code", "reason", "says"),
    [
        (b'"' + b"x" * 2000, 413, "body_size", "longer than"),
        (b"{", 400, "body", "not JSON"),
        (b"[1]", 400, "body", "no JSON object"),
        (b"[" * 1000, 400, "body", "nested"),
        (b"\xff\xfe", 400, "body", "not JSON"),
        (gzip.compress(b"x" * 10_000, mtime=0), 413, "body_size", "longer than"),
        (b"no gzip", 400, "body_broken", "broken"),
    ],
)
@scenario
async def test_bodies_that_are_none_are_refused_in_a_sentence(data, code, reason, says):
    """And counted; no server sees them."""
    async with cluster("a", fast(max_body_bytes=1900)) as c:
        headers = {"Content-Type": "application/json"}
        if data[:2] == b"\x1f\x8b" or data == b"no gzip":
            headers["Content-Encoding"] = "gzip"
        path = "/v1/chat/completions"
        async with c.client.post(path, data=data, headers=headers) as response:
            told = await response.json()
        assert response.status == code, told
        assert says in told["error"]["message"]
        assert await c.metric(REFUSALS, reason=reason) == 1
        assert c["a"].seen == []
        outcome = {"path": path, "outcome": str(code)}
        assert await c.metric("sgl_tiered_router_requests_total", **outcome) == 1
        assert await c.metric("sgl_tiered_router_body_bytes") == 0


@scenario
async def test_bodies_of_all_requests_are_bounded():
    """One too many is refused; there is room again when one of them has ended."""
    config = fast(max_body_bytes=1500, max_held_bytes=2000)
    async with cluster("a", config) as c:
        c["a"].behaviour = hang()
        held = asyncio.create_task(c.post({"text": "x" * 1200}))
        await until(lambda: c["a"].seen)
        c["a"].behaviour = answer
        code, _, told = await c.post({"text": "y" * 1200})
        assert code == 503
        assert "MiB of bodies" in told["error"]["message"]
        assert await c.metric(REFUSALS, reason="bodies_held") == 1
        assert (await c.post({"text": "z"}))[0] == 200
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await until(lambda: c["a"].num_gone == 1)
        await until(
            lambda: (
                c.router.metrics.registry.get_sample_value(
                    "sgl_tiered_router_body_bytes"
                )
                == 0
            )
        )
        assert (await c.post({"text": "y" * 1200}))[0] == 200


@scenario
async def test_only_a_tenant_of_its_own_is_told_what_was_cached():
    """Without a salt the header would tell what others have asked."""
    async with cluster("a", fast(show_cached_tokens=False)) as c:
        for salt in (None, "mine"):
            for _ in range(2):
                body = {**PROMPT, "cache_salt": salt} if salt else PROMPT
                _, headers, _ = await c.post(body)
            assert headers.get("X-Tiered-Cached-Tokens") == ("16" if salt else None)
    async with cluster("a", fast(show_cached_tokens=True)) as c:
        assert (await c.post(PROMPT))[1]["X-Tiered-Cached-Tokens"] == "0"


def test_bodies_count_nothing_at_first() -> None:
    """Of what is held."""
    assert Bodies(1, 1, 1.0).num_bytes == 0
