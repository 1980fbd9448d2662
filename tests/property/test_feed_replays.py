"""Whatever is lost and whichever replays do not come, in the end the part is right.

A publisher stores and removes pages; some batches are lost on their way, and for a time
nobody answers replays. Once they are answered again, and one more batch has come, the
router believes of the holder exactly what the publisher has.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.router.feed import EventFeed, FeedSource
from sgl_tiered.router.tree import PromptTree, keys_of, root_key

PAGE = 2
NUM_PAGES = 4
PROMPTS = [[100 * row + at for at in range(PAGE * NUM_PAGES)] for row in range(3)]
END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """What a server holds, its batches, and replays as a ZeroMQ context gives them."""

    def __init__(self) -> None:
        self.held: set[tuple[int, int]] = set()
        self.buffer: list[bytes] = []
        self.is_silent = False

    def name(self, row: int, page: int) -> int:
        return 10 * row + page

    def store(self, row: int, first: int, end: int) -> None:
        self.held |= {(row, page) for page in range(first, end)}
        tokens = PROMPTS[row][first * PAGE : end * PAGE]
        self.publish(
            {
                "type": "BlockStored",
                "block_hashes": [self.name(row, page) for page in range(first, end)],
                "parent_block_hash": self.name(row, first - 1) if first else None,
                "token_ids": tokens,
                "block_size": PAGE,
                "medium": "GPU",
            }
        )

    def remove(self, row: int, page: int) -> None:
        self.held.discard((row, page))
        names = [self.name(row, page)]
        self.publish({"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"})

    def publish(self, *events: dict[str, Any]) -> None:
        self.buffer.append(msgspec.msgpack.encode([0.0, list(events), 0]))

    def frames(self, number: int) -> list[bytes]:
        return [b"", number.to_bytes(8, "big"), self.buffer[number]]

    def socket(self, kind: int) -> Publisher.Dealer:
        del kind
        return Publisher.Dealer(self)

    class Dealer:
        """One request for a replay."""

        def __init__(self, publisher: Publisher) -> None:
            self.publisher = publisher
            self.answers: list[list[bytes]] = []

        def set(self, option: int, value: int) -> None: ...

        def connect(self, endpoint: str) -> None: ...

        def close(self, linger: int) -> None: ...

        async def send_multipart(self, frames: list[bytes]) -> None:
            first = int.from_bytes(frames[1], "big")
            for number in range(first, len(self.publisher.buffer)):
                self.answers.append([b"", *self.publisher.frames(number)])
            self.answers.append([b"", b"", END, b""])

        async def recv_multipart(self) -> list[bytes]:
            if self.publisher.is_silent:
                await asyncio.Event().wait()
            return self.answers.pop(0)


def believed(tree: PromptTree, number: int) -> set[tuple[int, int]]:
    """Return the pages that the tree has of a holder."""
    root = root_key("tokens", PAGE)
    return {
        (row, page)
        for row, prompt in enumerate(PROMPTS)
        for page, key in enumerate(keys_of(root, prompt, PAGE))
        if key in tree._nodes and tree._nodes[key].places(number)
    }


STEPS = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 2), st.integers(0, NUM_PAGES - 1)),
    st.tuples(st.just("remove"), st.integers(0, 2), st.integers(0, NUM_PAGES - 1)),
    st.sampled_from([("silent",), ("answering",), ("again",), ("broken",)]),
)


@given(st.lists(st.tuples(STEPS, st.booleans()), max_size=25))
@settings(max_examples=60, deadline=None)
def test_the_part_is_right_once_replays_are_answered(steps) -> None:
    """Losses, time-outs, retries and broken connections in any order."""

    async def run() -> None:
        publisher, tree = Publisher(), PromptTree()
        holder = tree.add_holder("a", PAGE)
        feed = EventFeed(
            tree,
            holder,
            FeedSource("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"),
            publisher,
            replay_timeout_s=0.001,
        )

        async def deliver() -> None:
            await feed.take(publisher.frames(len(publisher.buffer) - 1))

        for (step, *where), is_lost in steps:
            if step == "store":
                row, end = where
                # A tree stores a page behind those in front of it only.
                first = 0
                while (row, first) in publisher.held:
                    first += 1
                if first > end:
                    continue
                publisher.store(row, first, end + 1)
            elif step == "remove":
                publisher.remove(*where)
            elif step == "broken":
                feed.disconnected()
                continue
            else:
                publisher.is_silent = step == "silent"
                if step == "again" and feed.owes_replay:
                    publisher.is_silent = False
                    await feed.catch_up()
                    assert not feed.owes_replay
                continue
            if not is_lost:
                await deliver()
        publisher.is_silent = False
        if feed.owes_replay:
            await feed.catch_up()
        publisher.publish()
        await deliver()
        assert holder.is_complete
        assert believed(tree, holder.number) == publisher.held

    asyncio.run(run())
