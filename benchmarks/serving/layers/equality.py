"""Answers of layer-wise KV against plain SGLang's: many in flight, under pressure.

Each *arm* is a server with a small pool and its own settings: layers retained, who
decodes, staging memory, link. Episodes are drawn for it (``waves.py``): prompts shorter
than a page and longer than the staging memory, whole pages and chunks, prefixes of
prompts still computed, repeats and continuations of what was answered before, from the
device, from the host region and from the tier below.

Where everybody decodes (``stream``), plain SGLang and the arm compute the same batches:
their logs are compared step by step, and answers of equal steps bit by bit. Where some
wait (``pause``), or requests are aborted beside, batches differ by intention. Bits then
have to be equal where a request found equally much in the cache, no chunk cut its
prompt, and plain SGLang gives the same bits to it alone and in flight, which is tried
first; elsewhere answers may differ by what plain SGLang differs from itself.

A server that leaves one page in four out of what it streams has to be caught."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from movement.tools import drop, stats
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.gate import (
    GateResult,
    Spread,
    measure_spread,
    negative_control,
    widest_spread,
)
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerSpec, SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, replay
from sgl_tiered_workloads.steps import STEP_FLAGS, StepLog
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    MB,
    Device,
    Tiers,
    plain_spec,
    tiered_spec,
)
from sgl_tiered_workloads.waves import (
    Episode,
    Mix,
    WaveRun,
    compare_singly,
    compare_waves,
    draw_episode,
    run_planned,
    run_waves,
    unlike_waves,
)

__all__ = ["ARMS", "Arm", "compare_answers", "draw"]

PAGE, CHUNK, WHOLE = 16, 256, 8_192
LAYER_PAGE_BYTES = PAGE * 2 * 2 * 2 * 32
"""Of the tiny model: keys and values, two heads of 32, two bytes."""
REFERENCE_POOL_TOKENS = 65_536
RUNNING = 8
"""Requests in a decode step at most; waves are larger, so that later ones join."""
FLAGS = (*CPU_FLAGS, "--max-running-requests", str(RUNNING), *STEP_FLAGS)
LEAST_EXACT = 0.75
"""Of the output tokens of an arm's forced episodes: where a prompt lacks room for its
layers it is held for a step, and the rest of its wave runs in other batches."""
LEAST_EXACT_OF_ALL = 0.6
"""Of all requests, whatever the arm."""
LEAST_PER_ARM = 40
"""Requests that are worth starting a server for."""
FLOOR = Spread(max_logprob=0.05, mean_logprob=0.005, max_gap=0.05, num_tokens=0)
"""Of plain against itself: a small sample may show less than there is."""
SETTLED_S = 0.1
LAYER_FACTS = (
    "requests",
    "bytes_offloaded",
    "bytes_streamed",
    "bytes_pulled",
    "steps_paused",
)


@dataclass(frozen=True, slots=True)
class Arm:
    """A server, and what it is sent.

    Attributes:
        name: of the server.
        pool_tokens: of the device, staging memory included.
        half_pages: of the staging memory; a longer prompt keeps all its layers.
        flags: of LayerKV and the tiers.
        decode: ``stream`` or ``pause``.
        host_mb: of the region with a row for each logical page.
        chunk: tokens of a chunk; ``WHOLE`` cuts no prompt.
        num_doomed: requests to be aborted beside a wave, at most.
    """

    name: str
    pool_tokens: int
    half_pages: int
    flags: tuple[str, ...]
    decode: str = "stream"
    host_mb: int = 24
    chunk: int = CHUNK
    num_doomed: int = 3

    @property
    def mix(self) -> Mix:
        """Return what its forced episodes are drawn from."""
        half = self.half_pages * PAGE
        return Mix(PAGE, min(CHUNK, half // 2), half, (half + 1, half + 10 * PAGE))

    def spec(
        self,
        model: Path,
        name: str,
        flags: Sequence[str] = (),
        env: dict[str, str | None] | None = None,
    ) -> ServerSpec:
        """Return how to start it."""
        staging = 2 * self.half_pages * LAYER_PAGE_BYTES
        return tiered_spec(
            _device(model, self.pool_tokens, self.chunk),
            Tiers(32 * MB),
            name,
            (
                "--tiered-layerkv=on",
                f"--tiered-layerkv-host-size={self.host_mb}MB",
                f"--tiered-layerkv-staging-size={staging}",
                f"--tiered-layerkv-decode={self.decode}",
                "--tiered-load-policy=always",
                *self.flags,
                *flags,
            ),
            {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", **(env or {})},
        )


def _link(mb_per_s: int) -> str:
    return f"--tiered-emulate=host:bandwidth={mb_per_s}MB"


def _device(model: Path, pool_tokens: int, chunk: int) -> Device:
    flags = (*FLAGS, "--chunked-prefill-size", str(chunk))
    return Device(model, pool_tokens, PAGE, flags)


ARMS = (
    # The smallest pool, and few logical pages: much comes from the tier below.
    Arm("stream-1", 1_760, 20, ("--tiered-layerkv-retain=1", _link(100)), host_mb=8),
    Arm(
        "pause-0",
        1_280,
        20,
        ("--tiered-layerkv-retain=0", _link(10)),
        "pause",
        host_mb=8,
        chunk=WHOLE,
    ),
    # No link: the model's thread copies what it reads.
    Arm("stream-0", 3_200, 40, ("--tiered-layerkv-retain=0",), chunk=WHOLE),
    Arm(
        "pause-auto",
        2_560,
        40,
        ("--tiered-layerkv-retain=auto", _link(10)),
        "pause",
        chunk=WHOLE,
    ),
    Arm("stream-auto", 3_200, 40, ("--tiered-layerkv-retain=auto", _link(60))),
    # All is retained until there is no room.
    Arm("stream-4", 1_600, 20, ("--tiered-layerkv-retain=4", _link(200))),
)


@dataclass(frozen=True, slots=True)
class Work:
    """An episode, and plain SGLang's answers."""

    episode: Episode
    reference: tuple[WaveRun, ...]


async def compare_answers(
    model: Path,
    logs: Path,
    first_port: int | None,
    say: Callable[[str], None],
    problems: list[str],
    num: int,
    seed: int = 31,
) -> dict[str, Any]:
    """Compare at least ``num`` answers over all arms.

    Args:
        model: the tiny one.
        logs: folder of the servers' logs.
        first_port: of the servers; None for any free ones.
        say: prints a line.
        problems: gets a sentence for each comparison that failed.
        num: requests.
        seed: of what is drawn.

    Returns:
        What was compared, in all and by arm.
    """
    runner = _Runner(model, logs, first_port, say)
    arms = ARMS[: max(num // LEAST_PER_ARM, 1)]
    share = -(-num // len(arms))
    drawn = [draw(arm, share, seed + place) for place, arm in enumerate(arms)]
    works: list[list[Work]] = [[] for _ in arms]
    spread = FLOOR
    has_equal_rows = True
    for chunk in sorted({arm.chunk for arm in arms}):
        mine = [n for n, arm in enumerate(arms) if arm.chunk == chunk]
        answered, alone = await runner.plain(chunk, [drawn[n] for n in mine])
        for n, some in zip(mine, answered, strict=True):
            works[n] = some
        together = _runs([work for some in answered for work in some])
        spread = widest_spread([spread, measure_spread(_flat(together), _flat(alone))])
        result = compare_singly(together, alone, page_size=PAGE, spread=spread)
        say(f"  plain alone and in flight, chunks of {chunk}: {result.summary()}")
        if chunk == WHOLE:
            has_equal_rows = result.passed and result.num_exact > 0
    caught = await runner.broken(arms[0], works[0], spread)
    say(f"  broken staging is caught: {caught.differences[0].reason}")
    found: dict[str, Any] = {
        "plain_spread": spread.max_logprob,
        "plain_rows_are_equal": has_equal_rows,
        "requests": 0,
        "exact": 0,
        "unlike_waves": 0,
        "differences": 0,
    }
    for arm, some in zip(arms, works, strict=True):
        results, facts = await runner.arm(
            arm, some, spread, singly=has_equal_rows and arm.chunk == WHOLE
        )
        for kind, result in results.items():
            found["requests"] += result.num_requests
            found["exact"] += result.num_exact
            found["differences"] += len(result.differences)
            said = f"{arm.name}, {kind}: {result.summary()}"
            say(f"  {said}")
            if not result.passed:
                problems.append(said)
            facts[kind] = result.summary().partition("\n")[0]
        found["unlike_waves"] += len(facts["unlike_waves"])
        found[arm.name] = facts
        say(f"    {facts}")
    if found["exact"] < LEAST_EXACT_OF_ALL * num:
        problems.append(
            f"equality: {found['exact']} answers compared bit for bit, of {num} asked"
        )
    pauses = any(arm.decode == "pause" for arm in arms)
    problems += [
        f"equality: {name} is 0 in all arms, so there was no pressure"
        for name in LAYER_FACTS
        if (pauses or name != "steps_paused")
        and not any(found[arm.name][name] for arm in arms)
    ]
    return found


def draw(arm: Arm, num: int, seed: int) -> list[Episode]:
    """Draw episodes of at least ``num`` requests; some have requests to be aborted."""
    generator = np.random.default_rng(seed)
    doomed = replace(arm.mix, num_doomed=arm.num_doomed)
    episodes: list[Episode] = []
    while sum(one.num_requests for one in episodes) < num:
        turn = len(episodes)
        is_free = turn % 4 == 3 if arm.decode == "stream" else turn % 2 == 1
        mix = doomed if is_free else arm.mix
        episodes.append(draw_episode(mix, generator, f"{arm.name}.{turn}"))
    return episodes


class _Runner:
    """Starts one server after the other."""

    def __init__(
        self,
        model: Path,
        logs: Path,
        first_port: int | None,
        say: Callable[[str], None],
    ) -> None:
        self._model = model
        self._logs = logs
        self._first_port = first_port
        self._say = say

    async def plain(
        self, chunk: int, drawn: Sequence[Sequence[Episode]]
    ) -> tuple[list[list[Work]], list[WaveRun]]:
        """Return episodes with plain SGLang's answers, and all of it one at a time."""
        device = _device(self._model, REFERENCE_POOL_TOKENS, chunk)
        spec = plain_spec(device, f"equal-plain-{chunk}")
        works: list[list[Work]] = []
        alone: list[WaveRun] = []
        order = 0
        async with self._served(spec) as (server, client, log):
            for episodes in drawn:
                works.append([])
                for episode in episodes:
                    runs = await run_waves(server, client, episode, order, log)
                    order += len(runs)
                    works[-1].append(Work(episode, tuple(runs)))
                    await asyncio.to_thread(server.flush_cache)
                    for run in runs:
                        requests = replay(run.records)
                        records = await client.run_sequential(requests)
                        alone.append(WaveRun(tuple(records)))
        return works, alone

    async def broken(
        self, arm: Arm, works: Sequence[Work], spread: Spread
    ) -> GateResult:
        """Demand that broken staging is caught, in the same batches as plain's."""
        some = [work for work in works if work.episode.is_forced][:2]
        spec = arm.spec(
            self._model,
            "equal-broken",
            ["--tiered-fault-corrupt=staging"],
            {"SGL_TIERED_ALLOW_FAULTS": "1"},
        )
        answers, _ = await self._play(spec, some)
        result = _forced(_runs(some), [run for one in answers for run in one], spread)
        negative_control({"broken staging": result})
        return result

    async def arm(
        self, arm: Arm, works: Sequence[Work], spread: Spread, *, singly: bool
    ) -> tuple[dict[str, GateResult], dict[str, Any]]:
        """Return what the gate says of an arm, and what its layers did.

        Args:
            arm: whose server is started.
            works: what it is sent.
            spread: of plain SGLang.
            singly: ask for equal bits in other batches than plain's as well.
        """
        spec = arm.spec(self._model, f"equal-{arm.name}")
        answers, facts = await self._play(spec, works)
        forced: tuple[list[WaveRun], list[WaveRun]] = ([], [])
        free: tuple[list[WaveRun], list[WaveRun]] = ([], [])
        for work, runs in zip(works, answers, strict=True):
            is_forced = work.episode.is_forced and arm.decode == "stream"
            ours, theirs = forced if is_forced else free
            ours += work.reference
            theirs += runs
        results: dict[str, GateResult] = {}
        facts["unlike_waves"] = []
        if forced[0]:
            results["forced"] = _forced(*forced, spread)
            unlike = unlike_waves(*forced)
            facts["unlike_waves"] = [f"{n}, {where}" for n, where in unlike.items()]
        if free[0] and singly:
            results["free, by request"] = compare_singly(
                *free, page_size=PAGE, spread=spread
            )
        elif free[0]:
            results["free, near ties"] = compare_waves(
                *free, page_size=PAGE, spread=spread, forced=False
            )
        return results, facts

    async def _play(
        self, spec: ServerSpec, works: Sequence[Work]
    ) -> tuple[list[list[WaveRun]], dict[str, Any]]:
        """Return the runs of each episode, and what the server's layers did."""
        runs: list[list[WaveRun]] = []
        async with self._served(spec) as (server, client, log):
            play = partial(
                run_planned,
                server,
                client,
                log=log,
                drop=partial(_drop, server),
                settle=partial(_settle, server),
            )
            for work in works:
                runs += [await play(work.episode, work.reference)]
            layers = (await asyncio.to_thread(stats, server))["layerkv"]
        facts = {name: layers[f"layerkv_{name}"] for name in LAYER_FACTS}
        facts["aborted"] = sum(
            record.error is not None
            for one in runs
            for run in one
            for record in run.doomed
        )
        return runs, facts

    @asynccontextmanager
    async def _served(
        self, spec: ServerSpec
    ) -> AsyncIterator[tuple[SglangServer, StreamingClient, StepLog]]:
        warm_up = PlannedRequest("warm", tuple(range(100, 300)), 4)
        with Fleet({spec.name: spec}, self._logs, self._first_port, self._say) as fleet:
            await fleet.only([spec.name], warm_up)
            server = fleet.servers[spec.name]
            async with StreamingClient(server.url) as client:
                started_s = time.monotonic()
                yield server, client, StepLog(server.log_path)
                self._say(f"  {spec.name}: {time.monotonic() - started_s:.0f} s")


async def _drop(server: SglangServer) -> None:
    """Make the server forget the device level."""
    await asyncio.to_thread(drop, server, "device")


async def _settle(server: SglangServer) -> None:
    """Let offloads end: pages that they read are no room."""
    before: Any = None
    while True:
        state = await asyncio.to_thread(stats, server)
        pinned = sum(int(tier["pinned"]) for tier in state["occupancy"].values())
        now = (state["edges"], state["occupancy"])
        if not pinned and now == before:
            break
        before = now
        await asyncio.sleep(SETTLED_S)


def _runs(works: Sequence[Work]) -> list[WaveRun]:
    return [run for work in works for run in work.reference]


def _flat(runs: Sequence[WaveRun]) -> list[RequestRecord]:
    return [record for run in runs for record in run.records]


def _forced(
    reference: Sequence[WaveRun], answers: Sequence[WaveRun], spread: Spread
) -> GateResult:
    return compare_waves(
        reference,
        answers,
        page_size=PAGE,
        spread=spread,
        min_exact_fraction=LEAST_EXACT,
    )
