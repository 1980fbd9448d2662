"""KV events from a publisher on a socket, into a tree, into routing."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
import zmq.asyncio

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.routing.base import PLACES
from sgl_tiered.router import feed as feed_module
from sgl_tiered.router.config import parse_instance
from sgl_tiered.router.events import (
    Cleared,
    EventError,
    Removed,
    Stored,
    decode,
)
from sgl_tiered.router.feed import EventFeed, FeedSource
from sgl_tiered.router.fleet import sources_of
from sgl_tiered.router.front import Router
from sgl_tiered.router.tree import PromptTree, keys_of, root_key
from tests.unit.router.fake_servers import (
    FakePublisher,
    cluster,
    fast,
    scenario,
    stored,
    until,
)

PAGE = 4
TOKENS = list(range(100, 124))
msgpack = pytest.importorskip("msgspec").msgpack


def batch(*events: object) -> bytes:
    return msgpack.encode([1.5, list(events), 0])


def removed(pages: range, medium: str = "GPU") -> dict[str, object]:
    names = [hash(tuple(TOKENS[: PAGE * (page + 1)])) for page in pages]
    return {"type": "BlockRemoved", "block_hashes": names, "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


class Followed:
    """A feed without a socket: messages are handed to it one by one."""

    def __init__(self) -> None:
        self.tree = PromptTree()
        self.holder = self.tree.add_holder("a", PAGE)
        self.feed = EventFeed(
            self.tree, self.holder, FeedSource("tcp://127.0.0.1:1"), None
        )

    async def take(self, number: int, *events: object) -> None:
        await self.feed.take([b"", number.to_bytes(8, "big"), batch(*events)])

    @property
    def num_pages(self) -> int:
        keys = keys_of(root_key("tokens", PAGE), TOKENS, PAGE)
        match = self.tree.match(keys).get(self.holder.number)
        return match.num_confirmed if match else 0


def test_events_are_decoded() -> None:
    """The three kinds, with what SGLang puts into them."""
    blocks = {**stored(TOKENS[:8], PAGE, medium="CPU_PINNED"), "new_field": [1]}
    pairs = {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": 6,
        "token_ids": [[1, 2], [2, 3]],
        "block_size": 2,
        "cache_salt": "s",
        "lora_name": "l",
    }
    lone = {"type": "BlockRemoved", "block_hashes": [7]}
    first, second, third, fourth = decode(batch(blocks, pairs, lone, CLEARED))
    assert isinstance(first, Stored)
    assert (first.tier, first.tokens) == (TierId.HOST, tuple(TOKENS[:8]))
    assert second == Stored((7,), 6, (1, 2), 2, TierId.DEVICE, "l", "s")
    assert third == Removed((7,), TierId.DEVICE)
    assert fourth == Cleared()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.encode({"a": 1}),
        msgpack.encode([0.0]),
        batch(1),
        batch({"type": "Other", "block_hashes": []}),
        batch({"type": "BlockRemoved", "block_hashes": ["x"]}),
        batch({"type": "BlockRemoved", "block_hashes": [1], "medium": 1}),
        batch({**stored(TOKENS[:4], PAGE), "block_size": 0}),
        batch({**stored(TOKENS[:4], PAGE), "block_size": 3}),
        batch({**stored(TOKENS[:4], PAGE), "token_ids": [2**40] * 4}),
        batch({**stored(TOKENS[:4], PAGE), "parent_block_hash": "x"}),
        batch({**stored(TOKENS[:4], PAGE), "cache_salt": 1}),
        batch({**stored(TOKENS[:4], PAGE), "token_ids": None}),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    """A sentence, and no other kind of exception."""
    with pytest.raises(EventError):
        decode(payload)


@scenario
async def test_a_feed_follows_what_is_stored_and_removed():
    """Evictions are known, a medium at a time; a flush ends everything."""
    f = Followed()
    await f.take(0, stored(TOKENS, PAGE))
    assert (f.num_pages, f.holder.is_complete) == (6, True)
    await f.take(1, stored(TOKENS, PAGE, medium="CPU_PINNED"), removed(range(2, 6)))
    assert f.num_pages == 6
    await f.take(2, removed(range(4, 6), "CPU_PINNED"), removed(range(5), "UNHEARD OF"))
    assert f.num_pages == 4
    await f.take(3, CLEARED)
    assert (f.num_pages, len(f.tree)) == (0, 0)


@scenario
async def test_a_gap_without_a_replay_drops_and_rebuilds():
    """What came behind a lost prefix is an orphan until the prefix is stored anew."""
    f = Followed()
    await f.take(0, stored(TOKENS[:8], PAGE))
    await f.take(2, stored(TOKENS[:20], PAGE, first=4))
    assert (f.num_pages, f.holder.num_orphans) == (0, 1)
    assert not f.holder.is_complete
    assert (f.feed.counts.gaps, f.feed.counts.drops) == (1, 1)
    await f.take(3, stored(TOKENS[:16], PAGE))
    assert f.num_pages == 4
    await f.take(4, CLEARED)
    assert f.holder.is_complete


@scenario
async def test_a_publisher_that_begins_anew_is_noticed():
    """By its number, or because the connection broke before the expected one."""
    f = Followed()
    await f.take(0, stored(TOKENS, PAGE))
    await f.take(0, stored(TOKENS[:4], PAGE))
    assert (f.num_pages, f.feed.counts.restarts, f.holder.is_complete) == (1, 1, True)
    f.feed.disconnected()
    await f.take(1, stored(TOKENS[4:8], PAGE))
    assert f.num_pages == 0
    assert f.feed.counts.restarts == 2
    assert not f.holder.is_complete


@scenario
async def test_a_batch_that_cannot_be_read_drops():
    """Nobody knows what was in it."""
    f = Followed()
    await f.take(0, stored(TOKENS, PAGE))
    await f.take(1, {"type": "Other", "block_hashes": []})
    assert (f.num_pages, f.feed.counts.malformed) == (0, 1)
    await f.feed.take([b"", b"short", b""])
    await f.feed.take([b""])
    assert f.feed.counts.malformed == 3
    await f.take(2, stored(TOKENS, PAGE))
    assert f.num_pages == 6


@pytest.mark.parametrize(
    ("buffer", "num_pages", "drops"),
    [
        (1000, 6, 0),  # the replay closes the gap
        (2, 0, 1),  # the buffer begins after the gap
    ],
)
@scenario
async def test_a_gap_is_closed_by_a_replay(buffer, num_pages, drops):
    """And what the buffer no longer has is not made up."""
    publisher = FakePublisher(has_replay=True, buffer=buffer)
    context = zmq.asyncio.Context()
    f = Followed()
    replay = f"tcp://127.0.0.1:{publisher.replay_port}"
    source = FeedSource("tcp://127.0.0.1:1", replay)
    feed = EventFeed(f.tree, f.holder, source, context)
    try:
        batches = [stored(TOKENS[:8], PAGE), stored(TOKENS[:16], PAGE, first=2)]
        batches.append(stored(TOKENS, PAGE, first=4))
        for each in batches:
            await publisher.publish(each, is_lost=True)
        await feed.take([b"", bytes(8), batch(batches[0])])
        for number in (3, 4):  # 1 and 2 were lost
            await publisher.publish(removed(range(0)), is_lost=True)
            frames = [b"", number.to_bytes(8, "big"), batch(removed(range(0)))]
            await feed.take(frames)
        assert (f.num_pages, feed.counts.drops) == (num_pages, drops)
        assert feed.counts.gaps == 1
        assert feed.counts.replays == (drops == 0)
        assert feed.state()["sequence"] == 4
    finally:
        await publisher.close()
        context.destroy(linger=0)


@asynccontextmanager
async def following(source: FeedSource, again_s: float):
    """Give a feed that runs, and what it follows into; replays have little time."""
    f, context = Followed(), zmq.asyncio.Context()
    f.feed = EventFeed(
        f.tree, f.holder, source, context, replay_timeout_s=0.3, again_s=again_s
    )
    task = asyncio.create_task(f.feed.run())
    try:
        yield f
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


class BusyFeed(EventFeed):
    """Takes nothing before it may, as while a long batch is applied."""

    def __init__(self, *args, **fields):
        super().__init__(*args, **fields)
        self.may_go_on = asyncio.Event()
        self.num_large = 0

    async def take(self, frames):
        await self.may_go_on.wait()
        self.num_large += len(frames[2]) > LARGE
        await super().take(frames)


LARGE = 2**19
"""Bytes: more than the system holds for a socket of this kind."""
AT_PUBLISHER = 16
"""Batches for each feed that have not gone out."""


@scenario
async def test_events_that_nobody_takes_are_bounded(tmp_path):
    """What there is no room for is a gap that is counted; all goes on behind it."""
    tree, context = PromptTree(), zmq.asyncio.Context()
    source = FeedSource(f"ipc://{tmp_path}/events")
    busy, free = (
        kind(tree, tree.add_holder(name, PAGE), source, context)
        for name, kind in (("busy", BusyFeed), ("free", EventFeed))
    )
    publisher = context.socket(zmq.XPUB)
    publisher.set(zmq.XPUB_VERBOSE, 1)
    publisher.set(zmq.SNDHWM, AT_PUBLISHER)
    publisher.bind(source.endpoint)
    numbers = iter(range(10**6))

    async def publish(*events):
        number = next(numbers).to_bytes(8, "big")
        await publisher.send_multipart([b"", number, batch(*events)])

    large = {**removed(range(0)), "padding": bytes(LARGE)}
    room = feed_module._MAX_QUEUED
    tasks = [asyncio.create_task(each.run()) for each in (busy, free)]
    try:
        for _ in tasks:
            await publisher.recv()
        await publish(stored(TOKENS, PAGE))
        for number in range(4 * room):
            await publish(large)
            await until(lambda number=number: free.counts.batches == number + 2)
        assert (free.counts.gaps, len(free.holder.names)) == (0, 6)
        assert busy.counts.batches == 0
        busy.may_go_on.set()

        async def hears_again():
            await publish(stored(TOKENS, PAGE))
            return busy.counts.gaps

        await until(hears_again)
        # And one or two that are on their way.
        assert 0 < busy.num_large <= room + AT_PUBLISHER + 4
        assert busy.counts.drops == busy.counts.gaps
        assert not busy.holder.is_complete
        await until(lambda: len(busy.holder.names) == 6)
        await publish(removed(range(4, 6)))
        await until(lambda: len(busy.holder.names) == len(free.holder.names) == 4)
        assert free.counts.gaps == 0
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)


NEVER_S = 1e6


@scenario
async def test_a_first_replay_that_did_not_come_is_asked_for_again():
    """Though the publisher is idle, so that no gap reminds of it."""
    publisher = FakePublisher(has_replay=True)
    publisher.is_silent = True
    await publisher.publish(stored(TOKENS, PAGE), is_lost=True)
    try:
        async with following(publisher.source, again_s=0.05) as f:
            await until(lambda: f.feed.counts.unanswered >= 2)
            assert f.feed.state()["replay_owed"]
            publisher.is_silent = False
            await until(lambda: f.num_pages == 6)
            await until(lambda: not f.feed.owes_replay)
            assert f.holder.is_complete
            assert f.feed.counts.replays == 1
    finally:
        await publisher.close()


@scenario
async def test_what_came_meanwhile_is_kept_until_the_replay_comes():
    """Then all is built anew, in the order in which it happened."""
    publisher = FakePublisher(has_replay=True)
    publisher.is_silent = True
    await publisher.publish(stored(TOKENS[:16], PAGE), is_lost=True)
    other = list(range(900, 908))
    try:
        async with following(publisher.source, again_s=0.05) as f:
            await publisher.subscribed()
            await until(lambda: f.feed.is_connected)
            await publisher.publish(stored(TOKENS, PAGE, first=4))
            await publisher.publish(stored(other, PAGE), removed(range(3, 4)))
            await until(lambda: f.feed.counts.batches == 2)
            assert f.num_pages == 0  # orphans, but for the other prompt
            num_unanswered = f.feed.counts.unanswered
            await until(lambda: f.feed.counts.unanswered > num_unanswered)
            assert len(f.tree) == 2
            publisher.is_silent = False
            await until(lambda: f.num_pages == 3)
            assert f.holder.is_complete
            assert len(f.tree) == 2 + 5  # the fourth is gone, the two behind it not
            await publisher.publish(removed(range(2, 3)))
            await until(lambda: f.num_pages == 2)
            assert f.feed.counts.restarts == 0
    finally:
        await publisher.close()


@scenario
async def test_a_gap_that_is_closed_reminds_of_the_front_that_is_missing():
    """The endpoint answers again, so the front is asked for at once."""
    publisher = FakePublisher(has_replay=True)
    publisher.is_silent = True
    await publisher.publish(stored(TOKENS[:8], PAGE), is_lost=True)
    try:
        async with following(publisher.source, again_s=NEVER_S) as f:
            await publisher.subscribed()
            # A batch whose gap is not closed either; then the first try is long over.
            await until(lambda: f.feed.counts.unanswered == 1)
            await publisher.publish(stored(TOKENS[:16], PAGE, first=2))
            await until(lambda: f.feed.counts.unanswered == 2)
            publisher.is_silent = False
            await publisher.publish(stored(TOKENS[:20], PAGE, first=4), is_lost=True)
            await publisher.publish(stored(TOKENS, PAGE, first=5))
            await until(lambda: f.num_pages == 6)
            await until(lambda: not f.feed.owes_replay)
            assert f.holder.is_complete
    finally:
        await publisher.close()


@scenario
async def test_a_publisher_that_comes_late_is_asked_at_once(tmp_path):
    """When it is connected to, however long the next try is off."""
    source = FeedSource(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    async with following(source, again_s=NEVER_S) as f:
        await until(lambda: f.feed.counts.unanswered == 1)
        publisher = FakePublisher(source=source)
        try:
            await publisher.publish(stored(TOKENS, PAGE), is_lost=True)
            await until(lambda: f.num_pages == 6)
            assert f.holder.is_complete
        finally:
            await publisher.close()


@scenario
async def test_a_replay_brings_what_was_published_before():
    """A router that starts late need not wait for the next batch."""
    publisher = FakePublisher(has_replay=True)
    await publisher.publish(stored(TOKENS, PAGE), is_lost=True)
    try:
        async with cluster("a", words={"a": publisher.words}) as c:
            tree = c.router.fleet.trees["colocated"]
            await until(lambda: len(tree) == 6)
            await publisher.subscribed()
            feed = c.router.fleet.get("a").feeds[0]
            await until(lambda: feed.is_connected)
            await publisher.publish(removed(range(4, 6)))
            await until(lambda: len(tree) == 4)
            assert (feed.counts.drops, feed.holder.is_complete) == (0, True)
    finally:
        await publisher.close()


@scenario
async def test_events_over_a_socket_decide_where_a_request_goes():
    """Confirmed prefixes, by tier; after the eviction the other one is as good."""
    a, b = FakePublisher(), FakePublisher()
    words = {"a": a.words, "b": b.words}
    try:
        async with cluster("ab", words=words) as c:
            await a.subscribed()
            await b.subscribed()
            await b.publish(stored(TOKENS, PAGE, medium="CPU_PINNED"))
            tree = c.router.fleet.trees["colocated"]
            await until(lambda: len(tree) == 6)
            for number in range(3):
                body = {"input_ids": [*TOKENS, number]}
                _, headers, _ = await c.post(body)
                assert headers["X-Tiered-Instance"] == "b"
                assert headers["X-Tiered-Cached-Tokens"] == "24"
            shown = (await c.state())["instances"]["b"]
            assert shown["pages"]["host"] == 6
            assert shown["feeds"][0]["complete"]
            assert shown["feeds"][0]["sequence"] == 0
            await a.publish(stored(TOKENS[:8], PAGE))
            await until(lambda: len(c.router.fleet.get("a").holders[0].names) == 2)
            # b gives its copies up, and with them what was assumed of it
            await b.publish(removed(range(6), "CPU_PINNED"))
            await until(lambda: not c.router.fleet.get("b").holders[0].names)
            _, headers, _ = await c.post({"input_ids": TOKENS})
            assert headers["X-Tiered-Instance"] == "a"
            assert headers["X-Tiered-Cached-Tokens"] == "8"
    finally:
        await a.close()
        await b.close()


@scenario
async def test_replicas_share_nothing_and_agree():
    """Each follows the events by itself; both find the holder."""
    publisher = FakePublisher()
    try:
        async with cluster("ab", words={"b": publisher.words}) as c:
            words = [f"{s.url},name={s.name}" for s in c.servers]
            words[1] += publisher.words
            other = Router(fast(), [parse_instance(each) for each in words])
            await other.start()
            try:
                await publisher.subscribed()
                # Published until both have it: who subscribes late misses what was.
                for router in (c.router, other):
                    feed = router.fleet.get("b").feeds[0]
                    await until(lambda feed=feed: feed.is_connected)
                tree, second = (r.fleet.trees["colocated"] for r in (c.router, other))

                async def both_know():
                    await publisher.publish(stored(TOKENS, PAGE))
                    return len(tree) == len(second) == 6

                await until(both_know)
                for port in (c.router.port, other.port):
                    url = f"http://127.0.0.1:{port}/generate"
                    _, headers, _ = await c.post({"input_ids": TOKENS}, url)
                    assert headers["X-Tiered-Instance"] == "b"
            finally:
                await other.close()
    finally:
        await publisher.close()


@scenario
async def test_each_rank_of_an_instance_counts_for_it():
    """The longest prefix that one of them holds; they are not added up."""
    ranks = [FakePublisher(), FakePublisher()]
    words = {"b": "".join(rank.words for rank in ranks)}
    try:
        async with cluster("ab", words=words) as c:
            for rank in ranks:
                await rank.subscribed()
            await ranks[0].publish(stored(TOKENS[:8], PAGE))
            await ranks[1].publish(stored(TOKENS[:16], PAGE))
            tree = c.router.fleet.trees["colocated"]
            await until(lambda: len(tree) == 4)
            holders = c.router.fleet.get("b").holders
            await until(lambda: [len(h.names) for h in holders] == [2, 4])
            _, headers, _ = await c.post({"input_ids": TOKENS[:16]})
            assert headers["X-Tiered-Instance"] == "b"
            assert headers["X-Tiered-Cached-Tokens"] == "16"
    finally:
        for rank in ranks:
            await rank.close()


@scenario
async def test_who_holds_more_is_named_to_the_one_that_serves():
    """A loaded holder is passed over, and can be pulled from."""
    publisher = FakePublisher()
    try:
        async with cluster("ab", words={"a": publisher.words}) as c:
            await publisher.subscribed()
            await publisher.publish(stored(TOKENS, PAGE))
            await until(lambda: len(c.router.fleet.trees["colocated"]) == 6)
            c["a"].loads = [{"num_waiting_uncached_tokens": 9000}]
            c.router.fleet.get("a").tells_load = True
            await until(lambda: c.router.fleet.load(c.router.fleet.get("a"))[0] == 9000)
            _, headers, _ = await c.post({"input_ids": TOKENS})
            assert headers["X-Tiered-Instance"] == "b"
            assert c["b"].headers[0]["X-Tiered-Holders"] == (
                f"a={c['a'].url};tokens=24;tier=device"
            )
    finally:
        await publisher.close()


@scenario
async def test_a_server_is_asked_where_its_events_are():
    """``/server_info`` tells the port, and the server's own host replaces the star."""
    publisher = FakePublisher()
    try:
        async with cluster("a") as c:
            c["a"].info = {
                "kv_events": {
                    "publisher": "zmq",
                    "endpoint_host": "*",
                    "endpoint_port_base": publisher.port,
                    "topic": "",
                    "dp_size": 1,
                }
            }
            await publisher.subscribed()
            await publisher.publish(stored(TOKENS, PAGE))
            await until(lambda: len(c.router.fleet.trees["colocated"]) == 6)
    finally:
        await publisher.close()


@scenario
async def test_a_killed_instance_holds_nothing():
    """Its port refuses, so its process is gone, and its memory with it."""
    publisher = FakePublisher()
    try:
        async with cluster("ab", words={"a": publisher.words}) as c:
            await publisher.subscribed()
            await publisher.publish(stored(TOKENS, PAGE))
            tree = c.router.fleet.trees["colocated"]
            await until(lambda: len(tree) == 6)
            await c["a"].kill()
            await until(lambda: len(tree) == 0)
            assert (await c.post({"input_ids": TOKENS}))[2]["served_by"] == "b"
    finally:
        await publisher.close()


@scenario
async def test_without_events_what_was_sent_is_assumed_for_a_time():
    """The paper's way: texts by characters, until the TTL is over."""
    async with cluster("ab", fast(ttl_s=100.0)) as c:
        clock = ManualClock()
        c.router.fleet._clock = clock
        homes = set()
        for number in range(4):
            text = "one prefix of some length, and then " + str(number)
            homes.add((await c.post({"text": text}))[2]["served_by"])
        assert len(homes) == 1
        assert len(c.router.fleet.trees["colocated"]) > 0
        shown = await c.state()
        assert shown["alphabet"] == "characters"
        (home,) = homes
        assert shown["instances"][home]["pages"]["assumed"] > 0
        clock.advance(1e9)
        c.router.fleet.expire()
        assert len(c.router.fleet.trees["colocated"]) == 0


@pytest.mark.parametrize(
    ("info", "host", "expected"),
    [
        (None, "h", []),
        ({"kv_events": None}, "h", []),
        ({"kv_events": {"publisher": "null"}}, "h", []),
        ({"kv_events": {"publisher": "zmq", "endpoint_port_base": "x"}}, "h", []),
        (
            {
                "kv_events": {
                    "publisher": "zmq",
                    "endpoint_port_base": 50,
                    "replay_endpoint_port_base": 60,
                    "dp_size": 2,
                    "topic": "kv",
                }
            },
            "::1",
            [
                FeedSource("tcp://[::1]:50", "tcp://[::1]:60", "kv"),
                FeedSource("tcp://[::1]:51", "tcp://[::1]:61", "kv"),
            ],
        ),
    ],
)
def test_sources_by_what_a_server_tells(info, host, expected) -> None:
    """One per data-parallel rank, at consecutive ports; anything odd is none."""
    assert list(sources_of(info, host)) == expected


def test_places_and_tiers_agree() -> None:
    """The words of the policies are those of the tiers."""
    assert PLACES[: len(TierId)] == tuple(tier.label for tier in TierId)
