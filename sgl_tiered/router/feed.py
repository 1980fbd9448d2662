"""Follows one publisher of KV events over ZeroMQ and keeps a holder's part of the tree.

Where numbers are missing, what we know of that holder may be wrong in both directions:
prefixes that are gone, prefixes that came. With a replay endpoint the missing batches
are asked for. Without one, or where its buffer no longer reaches back, the holder's
part is dropped and grows again from the events that follow; blocks whose prefix was
stored before are then orphans until they are stored anew. The same holds for a
subscriber that joins late, and for a publisher that broke the connection (it may have
begun anew).

A replay that did not come in time is asked for again, a second later, then after twice
as long each time, and at once when the publisher is connected to again: an idle
publisher makes no gap that would remind us. What was applied meanwhile is kept until
the answer begins; then the part is built anew, in order, from what the buffer has.

The subscriber connects: the publisher must bind (``tcp://*:PORT`` in SGLang's
``--kv-events-config``, or ``"bind": true``), or nobody ever meets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from sgl_tiered.router.events import EventError, apply, decode
from sgl_tiered.router.sequence import SequenceTracker, Verdict
from sgl_tiered.router.supervised import supervised
from sgl_tiered.router.tree import Holder, PromptTree

__all__ = ["EventFeed", "FeedCounts", "FeedSource"]

_LOG = logging.getLogger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)
_MAX_QUEUED = 64
"""Batches that wait in our socket; more wait at the publisher, in its own bound, beyond
which it drops them and we see a gap."""
_BLOCKS_PER_TURN = 512
"""Applied before requests get the loop again, a millisecond or two."""
_MAX_BATCH_BYTES = 64 * 2**20
"""Of a batch; a longer one ends the connection. A prompt of 400,000 tokens in pages
of one is told in as much."""
_MAX_AGAIN_S = 300.0
"""Between two tries: each holds up the events for ``replay_timeout_s``."""
_LOOK_S = 0.5
"""Between two looks at the clock while a replay is owed."""


@dataclass(frozen=True, slots=True)
class FeedSource:
    """Where events come from.

    Attributes:
        endpoint: of the publisher, as a subscriber connects to it.
        replay_endpoint: where missed batches can be asked for; None for nowhere.
        topic: prefix of the messages to take.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


@dataclass(slots=True)
class FeedCounts:
    """What happened on a feed since it began.

    Attributes:
        batches: applied, live or from a replay.
        gaps: numbers were missing.
        restarts: the publisher began anew, or may have.
        replays: gaps that a replay closed.
        drops: times that all known of the holder was dropped.
        malformed: batches that could not be read.
        unanswered: replays that did not come in time.
    """

    batches: int = 0
    gaps: int = 0
    restarts: int = 0
    replays: int = 0
    drops: int = 0
    malformed: int = 0
    unanswered: int = 0


class EventFeed:
    """One subscription; ``run`` lasts until it is cancelled.

    Args:
        tree: of the instance's kind.
        holder: whose events these are.
        source: where they come from.
        context: ZeroMQ's, shared by all feeds.
        on_count: called with the name of each count of ``FeedCounts`` as it grows.
        on_failure: called with the name of a task that failed and begins again.
        replay_timeout_s: bound on a replay as a whole, in seconds.
        again_s: from a replay that did not come to the next try, in seconds; doubled
            with each.
    """

    def __init__(
        self,
        tree: PromptTree,
        holder: Holder,
        source: FeedSource,
        context: zmq.asyncio.Context,
        *,
        on_count: Callable[[str], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
        replay_timeout_s: float = 5.0,
        again_s: float = 1.0,
    ) -> None:
        self.holder = holder
        self.source = source
        self.counts = FeedCounts()
        self.is_connected = False
        self._tree = tree
        self._context = context
        self._on_count = on_count
        self._on_failure = on_failure or (lambda task: None)
        self._replay_timeout_s = replay_timeout_s
        self._again_s = again_s
        self._wait_s = again_s
        self._due_s: float | None = None  # of the next try, by the loop's clock
        self._tracker = SequenceTracker()

    async def run(self) -> None:
        """Take events until cancelled, whatever a publisher sends."""
        await supervised("feed", self._run, self._failed)

    def _failed(self, task: str) -> None:
        self._on_failure(task)
        # What it was about to note is not known, nor what came since.
        self._drop()
        self._tracker.reset()

    async def _run(self) -> None:
        socket = self._context.socket(zmq.SUB)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, _MAX_QUEUED)
        socket.set(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
        socket.set(zmq.RECONNECT_IVL_MAX, 2000)
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        watch = asyncio.create_task(
            supervised("feed_monitor", lambda: self._watch(monitor), self._on_failure)
        )
        try:
            socket.setsockopt(zmq.SUBSCRIBE, self.source.topic.encode())
            socket.connect(self.source.endpoint)
            if self.source.replay_endpoint is not None:
                # What was published before is asked for at once, not at the next gap.
                await self._replay()
            while True:
                if self._due_s is not None and not await self._has_more(socket):
                    await self.catch_up()
                else:
                    await self.take(await socket.recv_multipart())
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
            socket.disable_monitor()
            socket.close(0)

    async def take(self, frames: list[bytes]) -> None:
        """Judge and apply one message: topic, number (8 bytes, big endian), batch."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self._count("malformed")
            self._drop()
            return
        sequence = int.from_bytes(frames[1], "big")
        verdict = self._tracker.judge(sequence)
        if verdict is Verdict.RESTART:
            self._count("restarts")
            self._drop()
            self._tracker.reset()
            verdict = self._tracker.judge(sequence)
        if verdict is Verdict.GAP:
            self._count("gaps")
            closed = await self._replay()
            if sequence <= self._tracker.applied:
                return
            if not closed or self._tracker.applied != sequence - 1:
                self._drop()
        if verdict is not Verdict.DUPLICATE:
            await self._apply(sequence, frames[2])

    async def catch_up(self) -> None:
        """Ask again for a replay that did not come."""
        is_whole = self.holder.is_complete and not self._tracker.is_suspect
        await self._replay(anew=not is_whole)

    @property
    def owes_replay(self) -> bool:
        """Whether a replay did not come, and is to be asked for again."""
        return self._due_s is not None

    async def _has_more(self, socket: zmq.asyncio.Socket) -> bool:
        """Wait for a message or for the next try; False when that is due."""
        now_s = asyncio.get_running_loop().time
        while self._due_s is not None and (left_s := self._due_s - now_s()) > 0:
            if await socket.poll(1 + int(1000 * min(left_s, _LOOK_S))):
                return True
        return False

    def disconnected(self) -> None:
        """Note that the publisher went away; whoever answers next may be new."""
        self._tracker.suspect()

    def state(self) -> dict[str, Any]:
        """Return what ``/router/state`` shows, as plain numbers and words."""
        return {
            "endpoint": self.source.endpoint,
            "replay": self.source.replay_endpoint,
            "connected": self.is_connected,
            "complete": self.holder.is_complete,
            "replay_owed": self.owes_replay,
            "sequence": self._tracker.applied,
            "orphans": self.holder.num_orphans,
            **asdict(self.counts),
        }

    async def _watch(self, monitor: Any) -> None:
        was_connected = False
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            # Both ends of an outage: what was queued before it may be read in between.
            if was_connected:
                self.disconnected()
            was_connected = True
            if self.is_connected and self._due_s is not None:
                self._wait_s = self._again_s
                self._due_s = asyncio.get_running_loop().time()

    async def _apply(self, sequence: int, payload: bytes) -> None:
        try:
            events = decode(payload)
        except EventError as error:
            # Once as a warning: who sends one batch like this sends many.
            level = logging.DEBUG if self.counts.malformed else logging.WARNING
            _LOG.log(level, "events of %s: %s", self.holder.instance, error)
            self._count("malformed")
            self._drop()
            events = []
        else:
            if sequence == 0:
                self.holder.is_complete = True
        num_blocks = 0
        for event in events:
            apply(self._tree, self.holder, event)
            num_blocks += len(getattr(event, "block_hashes", ()))
            if num_blocks >= _BLOCKS_PER_TURN:
                num_blocks = 0
                await asyncio.sleep(0)
        self._tracker.done(sequence)
        self._count("batches")

    async def _replay(self, *, anew: bool = False) -> bool:
        """Ask for what is missing; returns whether nothing is missing any more.

        What the buffer still has is applied in any case, after a drop if there is a
        hole in front of it.

        Args:
            anew: all that the buffer has is wanted, for a part of which something is
                missing; that part is dropped when the answer begins.
        """
        endpoint = self.source.replay_endpoint
        if endpoint is None:
            return False
        wanted = 0 if anew else self._tracker.applied + 1
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, _MAX_QUEUED)
        socket.set(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
        try:
            async with asyncio.timeout(self._replay_timeout_s):
                socket.connect(endpoint)
                await socket.send_multipart([b"", wanted.to_bytes(8, "big")])
                has_hole = False
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) < 4 or frames[2] == _END:
                        break
                    sequence = int.from_bytes(frames[2], "big")
                    if anew:
                        anew = False
                        self._drop()
                        self._tracker.rewind()
                    if sequence <= self._tracker.applied:
                        continue
                    if sequence != self._tracker.applied + 1:
                        has_hole = True
                        self._drop()
                    await self._apply(sequence, frames[3])
        except TimeoutError:
            self._owe(endpoint)
            return False
        finally:
            socket.close(0)
        self._wait_s = self._again_s
        # The end of a part whose front is missing: that front is still owed.
        if wanted == 0 or has_hole or self.holder.is_complete:
            self._due_s = None
        elif self._due_s is not None:
            self._due_s = asyncio.get_running_loop().time()
        if self._tracker.applied + 1 > wanted and not has_hole:
            self._count("replays")
            return True
        return has_hole

    def _owe(self, endpoint: str) -> None:
        """Note that a replay did not come, and when to ask for it again."""
        if self._due_s is None:
            _LOG.warning("no replay from %s: it is asked for again", endpoint)
        self._count("unanswered")
        self._due_s = asyncio.get_running_loop().time() + self._wait_s
        self._wait_s = min(2 * self._wait_s, _MAX_AGAIN_S)

    def _drop(self) -> None:
        """Forget what the holder holds; it grows again from what follows."""
        self._tree.clear(self.holder)
        self.holder.is_complete = False
        self._count("drops")

    def _count(self, name: str) -> None:
        setattr(self.counts, name, getattr(self.counts, name) + 1)
        if self._on_count is not None:
            self._on_count(name)
