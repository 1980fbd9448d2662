"""Requests in flight together, in batches that are the same on every server.

A *wave* goes out as one HTTP request, when the server is idle: SGLang's scheduler
receives it in one message, and which of its requests a step computes follows from their
lengths and from ``--max-running-requests`` alone, not from time. So prompts join while
others decode, and still each step is the same on two servers, unless one of them lacks
room. `steps.py` tells from the logs whether it was so. Where all comes from a tier
below, no two requests of a wave begin alike: one would wait for the other's load.

An *episode* is a few waves on an emptied cache. Later requests repeat earlier ones,
lengthen what was answered, or branch off in the middle. All is drawn from a seed.

*Doomed* requests come on top, in a message of their own, and are aborted while the wave
runs. When that happens follows from time, so such waves are *free*, not forced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.gate import GateResult, Spread, check_equality
from sgl_tiered_workloads.lineage import page_keys
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.steps import Step, StepLog

__all__ = [
    "Episode",
    "Mix",
    "Wave",
    "WaveRequest",
    "WaveRun",
    "compare_singly",
    "compare_waves",
    "draw_episode",
    "run_planned",
    "run_waves",
    "unlike_waves",
]

_ABORT_POLL_S = 0.2
_DOOMED_TOKENS = 400
"""Of an answer that nobody waits for: it is aborted long before."""


@dataclass(frozen=True, slots=True)
class WaveRequest:
    """A request that may begin with what an earlier one left.

    Attributes:
        key: names it; unique in a schedule.
        tail: token ids behind that.
        max_new_tokens: length of the answer.
        base: key of the earlier one; empty for none.
        base_tokens: of its prompt and answer, from the front.
        abort_after_s: of a doomed one, from when it was sent.
    """

    key: str
    tail: tuple[int, ...]
    max_new_tokens: int
    base: str = ""
    base_tokens: int = 0
    abort_after_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.base_tokens + len(self.tail)

    def planned(self, texts: Mapping[str, tuple[int, ...]]) -> PlannedRequest:
        """Return it with its prompt.

        Args:
            texts: by key, the prompts of earlier ones, their answers behind them.
        """
        front = texts[self.base][: self.base_tokens] if self.base else ()
        assert len(front) == self.base_tokens, f"{self.key}: {self.base} is too short"
        return PlannedRequest(
            self.key, front + self.tail, self.max_new_tokens, self.abort_after_s
        )


@dataclass(frozen=True, slots=True)
class Wave:
    """What is sent together.

    Attributes:
        requests: in one message.
        doomed: in another, each to be aborted; their ``start_s`` says when.
        drops_device: a tiered server forgets the device level before.
    """

    requests: tuple[WaveRequest, ...]
    doomed: tuple[WaveRequest, ...] = ()
    drops_device: bool = False


@dataclass(frozen=True, slots=True)
class Episode:
    """Waves on a cache that was empty."""

    waves: tuple[Wave, ...]

    @property
    def is_forced(self) -> bool:
        """Whether nothing in it depends on time."""
        return not any(wave.doomed for wave in self.waves)

    @property
    def num_requests(self) -> int:
        """Requests whose answers are compared."""
        return sum(len(wave.requests) for wave in self.waves)


@dataclass(frozen=True, slots=True)
class Mix:
    """What is drawn from. Lengths in tokens, both ends included.

    Attributes:
        page_tokens: of a page.
        chunk_tokens: of a chunk of a prefill.
        most_tokens: of a prompt and its answer, those apart that are ``long``.
        long: lengths of prompts of which a wave has one at most; None for none.
        num_waves: of an episode.
        wave_size: requests of a wave.
        answer: lengths of answers.
        num_doomed: of each wave, at most; 0 for forced episodes.
        vocab_tokens: of the tokenizer.
    """

    page_tokens: int
    chunk_tokens: int
    most_tokens: int
    long: tuple[int, int] | None
    num_waves: tuple[int, int] = (2, 4)
    wave_size: tuple[int, int] = (4, 12)
    answer: tuple[int, int] = (1, 40)
    num_doomed: int = 0
    vocab_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class WaveRun:
    """What came of a wave.

    Attributes:
        records: of its requests, in the order sent.
        doomed: of its doomed ones.
        steps: batches that the server computed for it; empty if nobody looked.
    """

    records: tuple[RequestRecord, ...]
    doomed: tuple[RequestRecord, ...] = ()
    steps: tuple[Step, ...] = ()


def draw_episode(mix: Mix, generator: np.random.Generator, name: str) -> Episode:
    """Draw one episode; its requests' keys begin with ``name``."""
    drawer = _Drawer(mix, generator, name)
    return Episode(tuple(drawer.wave() for _ in range(drawer.between(mix.num_waves))))


async def run_waves(
    server: SglangServer,
    client: StreamingClient,
    episode: Episode,
    first_order: int,
    log: StepLog | None = None,
) -> list[WaveRun]:
    """Send an episode whose answers nobody knows yet, without its doomed requests.

    Args:
        server: idle; its cache is emptied.
        client: of that server.
        episode: to send.
        first_order: place of its first wave in the schedule.
        log: of the server, if the steps are to be told.

    Raises:
        RuntimeError: a request failed.
    """
    texts: dict[str, tuple[int, ...]] = {}
    runs = []
    await _empty(server, log)
    for place, wave in enumerate(episode.waves):
        planned: list[PlannedRequest] = []
        for request in wave.requests:
            # Of a neighbour only the prompt is known.
            planned.append(request.planned(texts))
            texts[request.key] = planned[-1].prompt
        run = await _send(server, client, planned, first_order + place, log)
        for record in run.records:
            if record.error is not None:
                raise RuntimeError(f"{server.spec.name}: {record.key}: {record.error}")
            texts[record.key] = record.prompt + record.output
        runs.append(run)
    return runs


async def run_planned(
    server: SglangServer,
    client: StreamingClient,
    episode: Episode,
    reference: Sequence[WaveRun],
    log: StepLog | None = None,
    drop: Callable[[], Awaitable[None]] | None = None,
    settle: Callable[[], Awaitable[None]] | None = None,
) -> list[WaveRun]:
    """Send an episode again, to another server, with the prompts of its first run.

    Args:
        server: idle; its cache is emptied.
        client: of that server.
        episode: to send.
        reference: what ``run_waves`` returned.
        log: of the server, if the steps are to be told.
        drop: lets it forget the device level, where the episode says so.
        settle: waits before each wave, for what the one before left under way.
    """
    texts: dict[str, tuple[int, ...]] = {}
    runs = []
    await _empty(server, log)
    for wave, known in zip(episode.waves, reference, strict=True):
        if settle is not None:
            await settle()
        if wave.drops_device and drop is not None:
            await drop()
        texts |= {record.key: record.prompt for record in known.records}
        doomed = [request.planned(texts) for request in wave.doomed]
        ending = asyncio.create_task(_send_doomed(server, client, doomed))
        planned = [
            PlannedRequest(record.key, record.prompt, len(record.output))
            for record in known.records
        ]
        run = await _send(server, client, planned, known.records[0].order, log)
        runs.append(WaveRun(run.records, tuple(await ending), run.steps))
        texts |= {r.key: r.prompt + r.output for r in known.records}
    return runs


def unlike_waves(
    reference: Sequence[WaveRun], answers: Sequence[WaveRun]
) -> dict[int, str]:
    """Return the places of waves whose batches differ, and where they first do."""
    unlike = {}
    for ours, theirs in zip(reference, answers, strict=True):
        if ours.steps == theirs.steps and ours.steps:
            continue
        pairs = zip_longest(ours.steps, theirs.steps)
        told = [(n, a, b) for n, (a, b) in enumerate(pairs) if a != b]
        where = "step {}: {} became {}".format(*told[0]) if told else "no steps told"
        unlike[ours.records[0].order] = where
    return unlike


def compare_waves(
    reference: Sequence[WaveRun],
    answers: Sequence[WaveRun],
    *,
    page_size: int,
    spread: Spread,
    forced: bool = True,
    min_exact_fraction: float = 1.0,
) -> GateResult:
    """Compare waves with plain SGLang's.

    Args:
        reference: of plain SGLang, with their steps.
        answers: the same waves on the server to judge.
        page_size: tokens per page, on both.
        spread: of plain SGLang against itself; what was not computed in the same
            batches may differ by as much. All moves of 0 ask for equal bits.
        forced: whether the batches were to be the same; those that were not do not
            count as compared exactly.
        min_exact_fraction: least share of output tokens to compare exactly.
    """
    return check_equality(
        [record for run in reference for record in run.records],
        [record for run in answers for record in run.records],
        page_size=page_size,
        spread=spread,
        forced=forced,
        min_exact_fraction=min_exact_fraction,
        unlike=unlike_waves(reference, answers) if forced else (),
    )


def compare_singly(
    reference: Sequence[WaveRun],
    answers: Sequence[WaveRun],
    *,
    page_size: int,
    spread: Spread,
    min_exact_fraction: float = 0.0,
) -> GateResult:
    """Compare waves request by request, whatever batches each was in.

    Bits are asked for where a request found equally much in the cache and reads pages
    that were computed once. That is right on machines where a row of a matrix product
    does not depend on the others (compare plain SGLang with itself first, one at a
    time), and where no budget cuts prompts: so large a ``--chunked-prefill-size`` that
    a pass takes all that waits.

    Args:
        reference: of plain SGLang.
        answers: the same waves on the server to judge.
        page_size: tokens per page, on both.
        spread: of plain SGLang against itself, for the other requests.
        min_exact_fraction: least share of output tokens to compare exactly.
    """
    ours: list[RequestRecord] = []
    theirs: list[RequestRecord] = []
    unlike: set[int] = set()
    seen: set[bytes] = set()
    touched: set[bytes] = set()
    for run, other in zip(reference, answers, strict=True):
        for record in other.doomed:
            touched.update(page_keys(record, page_size))
        for one, again in zip(run.records, other.records, strict=True):
            pages = page_keys(one, page_size)
            # A page computed beside another copy of it may be exchanged for that one.
            hit = min(one.cached_tokens, again.cached_tokens) // page_size
            whole = len(one.prompt) // page_size
            if not seen.isdisjoint(pages[hit:whole]) or not touched.isdisjoint(pages):
                unlike.add(len(ours))
            seen.update(pages[hit:])
            ours.append(replace(one, order=len(ours)))
            theirs.append(again)
    return check_equality(
        ours,
        theirs,
        page_size=page_size,
        spread=spread,
        min_exact_fraction=min_exact_fraction,
        unlike=unlike,
    )


async def _empty(server: SglangServer, log: StepLog | None) -> None:
    await asyncio.to_thread(server.flush_cache)
    if log is not None:
        log.take()


async def _send(
    server: SglangServer,
    client: StreamingClient,
    planned: Sequence[PlannedRequest],
    order: int,
    log: StepLog | None,
) -> WaveRun:
    records = tuple(await client.send_batch(planned, order))
    if log is None:
        return WaveRun(records)
    # The scheduler answers this behind its last step, which it has logged then.
    await asyncio.to_thread(server.server_info)
    return WaveRun(records, (), log.take())


async def _send_doomed(
    server: SglangServer, client: StreamingClient, doomed: Sequence[PlannedRequest]
) -> list[RequestRecord]:
    if not doomed:
        return []
    sent = asyncio.create_task(client.send_batch(doomed, named=True))
    waited_s = 0.0
    for request in sorted(doomed, key=lambda one: one.start_s):
        await asyncio.sleep(request.start_s - waited_s)
        waited_s = request.start_s
        await _abort(server, request)
    # An abort that came before its request did nothing.
    while not sent.done():
        for request in doomed:
            await _abort(server, request)
        await asyncio.sleep(_ABORT_POLL_S)
    return await sent


async def _abort(server: SglangServer, request: PlannedRequest) -> None:
    await asyncio.to_thread(server.post, "/abort_request", {"rid": request.key})


class _Drawer:
    """Draws the waves of one episode, one after the other."""

    def __init__(self, mix: Mix, generator: np.random.Generator, name: str) -> None:
        self._mix = mix
        self._generator = generator
        self._name = name
        self._num_drawn = 0
        # By key, how much of it a later request may begin with.
        self._before: dict[str, int] = {}
        # By key, the request whose first page it begins with.
        self._root: dict[str, str] = {}
        self._num_waves = 0

    def between(self, ends: tuple[int, int]) -> int:
        """Return a whole number between two, both included."""
        return int(self._generator.integers(ends[0], ends[1] + 1))

    def wave(self) -> Wave:
        """Draw the next wave."""
        mix = self._mix
        size = self.between(mix.wave_size)
        long_at = self.between((0, 2 * size - 1)) if mix.long is not None else -1
        drops = self._num_waves > 0 and self.between((0, 2)) == 0
        # Prompts of neighbours can be shared while they are computed.
        reach = dict(self._before)
        requests = []
        for place in range(size):
            one = self._long() if place == long_at else self._request(reach)
            requests.append(one)
            self._root[one.key] = one.key
            if one.base_tokens >= mix.page_tokens:
                self._root[one.key] = self._root[one.base]
            reach[one.key] = one.prompt_tokens
            if drops and not mix.num_doomed:
                # Else it would wait for as long as another's load of its pages takes.
                root = self._root[one.key]
                reach = {k: n for k, n in reach.items() if self._root[k] != root}
            if place != long_at:
                self._before[one.key] = one.prompt_tokens + one.max_new_tokens - 1
        doomed = [self._doomed(reach) for _ in range(self.between((0, mix.num_doomed)))]
        self._num_waves += 1
        return Wave(tuple(requests), tuple(doomed), drops)

    def _request(self, reach: Mapping[str, int]) -> WaveRequest:
        mix = self._mix
        answer = self.between(mix.answer)
        most = mix.most_tokens - answer
        kind = self.between((0, 9))
        if kind <= 5 and reach:
            return self._branch(reach, answer, most)
        if kind <= 7:
            length = self.between((2, min(4 * mix.page_tokens, most)))
        elif kind == 8:
            pages = self.between((1, most // mix.page_tokens - 1))
            length = pages * mix.page_tokens + self.between((-1, 1))
        else:
            length = self.between((min(mix.chunk_tokens, most // 2), most))
        return WaveRequest(self._key(), self._tokens(length), answer)

    def _branch(self, reach: Mapping[str, int], answer: int, most: int) -> WaveRequest:
        """Repeat an earlier request, lengthen it, or leave it somewhere."""
        keys = list(reach)
        base = keys[self.between((0, len(keys) - 1))]
        whole = min(reach[base], most)
        kind = self.between((0, 2))
        # Whole pages as well as parts of one.
        kept = whole if kind == 0 else self.between((1, whole))
        if kind == 2:
            kept = max(kept - kept % self._mix.page_tokens, 1)
        room = most - kept
        tail = self.between((0, min(room, 8 * self._mix.page_tokens)))
        return WaveRequest(self._key(), self._tokens(tail), answer, base, kept)

    def _long(self) -> WaveRequest:
        mix = self._mix
        assert mix.long is not None
        answer = self.between(mix.answer)
        return WaveRequest(self._key(), self._tokens(self.between(mix.long)), answer)

    def _doomed(self, reach: Mapping[str, int]) -> WaveRequest:
        """Draw one that is to be aborted, often over a prefix that others use."""
        mix = self._mix
        base, kept = "", 0
        if self.between((0, 1)):
            keys = list(reach)
            base = keys[self.between((0, len(keys) - 1))]
            kept = self.between((1, reach[base]))
        tail = self.between((1, max(mix.most_tokens // 2, 1)))
        return WaveRequest(
            self._key(),
            self._tokens(tail),
            _DOOMED_TOKENS,
            base,
            kept,
            float(self._generator.uniform(0.0, 0.6)),
        )

    def _key(self) -> str:
        self._num_drawn += 1
        return f"{self._name}.{self._num_drawn}"

    def _tokens(self, length: int) -> tuple[int, ...]:
        return random_tokens(self._generator, length, self._mix.vocab_tokens)
