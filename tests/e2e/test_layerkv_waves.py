"""Layer-wise KV with many requests in flight: the batches of plain SGLang, its bits.

Prompts join while others decode, in waves whose batches are the same on both servers
(``waves.py``), on a device that holds a fraction of them. Layers are pushed out, pulled
back, and streamed for whole batches. First of all a broken staging, in such batches.
"""

import asyncio
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.gate import (
    Spread,
    measure_spread,
    negative_control,
    widest_spread,
)
from sgl_tiered_workloads.sessions import replay
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
    Mix,
    WaveRun,
    compare_singly,
    compare_waves,
    draw_episode,
    run_planned,
    run_waves,
)

from tests.e2e.e2e_support import PATIENCE_S, drop, settle, stats

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

PAGE, CHUNK = 16, 8_192
"""No prompt is cut by so large a chunk: its bits follow from what the cache gives."""
POOL_TOKENS, REFERENCE_POOL_TOKENS = 1_440, 32_768
TIGHT_POOL_TOKENS = 720
"""Of a wave's eight running requests it holds about four."""
HALF_TOKENS = 320
"""Of one layer, in each half of the staging memory."""
FLAGS = (
    *CPU_FLAGS,
    "--chunked-prefill-size",
    str(CHUNK),
    "--max-running-requests=8",
    *STEP_FLAGS,
)
LAYERKV = (
    "--tiered-layerkv=on",
    # Few logical pages, so that much comes back from the tier below.
    "--tiered-layerkv-host-size=8MB",
    # Keys and values of two heads of 32, two bytes each, two halves.
    f"--tiered-layerkv-staging-size={HALF_TOKENS * 2 * 2 * 32 * 2 * 2}",
    "--tiered-load-policy=always",
)
STREAM = (
    "--tiered-layerkv-decode=stream",
    "--tiered-layerkv-retain=1",
    # So that other threads copy than the one that computes.
    "--tiered-emulate=host:bandwidth=100MB",
)
PAUSE = (
    "--tiered-layerkv-decode=pause",
    "--tiered-layerkv-retain=auto",
    # A prompt of 200 tokens takes 20 ms of the link, many times a step.
    "--tiered-emulate=host:bandwidth=10MB",
)
MIX = Mix(PAGE, 128, HALF_TOKENS, (HALF_TOKENS + 1, HALF_TOKENS + 160))
DOOMED = replace(MIX, num_doomed=3)
NUM_FORCED, NUM_FREE = 2, 2
FLOOR = Spread(max_logprob=0.05, mean_logprob=0.005, max_gap=0.05, num_tokens=0)
LEAST_EXACT = 0.75
"""Of the output tokens: a prompt may be held for a step, where others lack room."""
TRIES = 4


@pytest.fixture(scope="module")
def episodes():
    """Episodes whose batches are forced, then those with requests to be aborted."""
    generator = np.random.default_rng(62)
    mixes = [MIX] * NUM_FORCED + [DOOMED] * NUM_FREE
    return [draw_episode(mix, generator, f"e{n}") for n, mix in enumerate(mixes)]


@pytest.fixture(scope="module")
def plain(servers, model, episodes):
    """Plain SGLang's answers to each episode, and how to compare with them."""
    return play_plain(servers, model, episodes)


def play_plain(servers, model, episodes):
    """Send episodes to plain SGLang; return its answers."""
    device = Device(model, REFERENCE_POOL_TOKENS, PAGE, FLAGS)
    server = servers.get(plain_spec(device, "plain-waves"))
    log = StepLog(server.log_path)

    async def play():
        runs, alone = [], []
        async with StreamingClient(server.url, timeout_s=PATIENCE_S) as client:
            for episode in episodes:
                order = sum(map(len, runs))
                runs.append(await run_waves(server, client, episode, order, log))
                await asyncio.to_thread(server.flush_cache)
                for run in runs[-1]:
                    again = await client.run_sequential(replay(run.records))
                    alone.append(WaveRun(tuple(again)))
        return runs, alone

    runs, alone = asyncio.run(play())
    servers.stop()
    together = [run for one in runs for run in one]
    moved = measure_spread(flat(together), flat(alone))
    spread = widest_spread([moved, FLOOR])
    single = compare_singly(together, alone, page_size=PAGE, spread=spread)
    return Plain(runs, spread, single.passed and single.num_exact > 0)


def flat(runs):
    """Return the records of waves."""
    return [record for run in runs for record in run.records]


@dataclass(frozen=True)
class Plain:
    """Plain SGLang's answers.

    Attributes:
        runs: of each episode.
        spread: of its answers, one at a time and in flight.
        has_equal_rows: on this machine a request's bits do not depend on its batch.
    """

    runs: list
    spread: Spread
    has_equal_rows: bool

    def forced_on(self, server, episodes):
        """Judge the first episodes on a server, whose batches are to be these.

        A slow machine holds a prompt for a step that was not held before, and what
        follows is in other batches. Then they are sent again: an answer that is wrong
        ends that, whatever its batch.
        """
        runs = self.runs[: len(episodes)]
        for _ in range(TRIES):
            result = self.forced(played(server, episodes, runs, forced=True))
            if len(result.differences) != 1 or result.exact_fraction >= LEAST_EXACT:
                break
        return result

    def forced(self, answers):
        """Judge the first episodes, whose batches were to be these."""
        reference = self.runs[: len(answers)]
        return compare_waves(
            [run for one in reference for run in one],
            [run for one in answers for run in one],
            page_size=PAGE,
            spread=self.spread,
            min_exact_fraction=LEAST_EXACT,
        )

    def free(self, reference, answers):
        """Judge episodes in other batches: by bits where that is right here."""
        judge = partial(compare_waves, forced=False)
        if self.has_equal_rows:
            judge = compare_singly
        return judge(
            [run for one in reference for run in one],
            [run for one in answers for run in one],
            page_size=PAGE,
            spread=self.spread,
        )


def played(server, episodes, reference, *, forced=False):
    """Send episodes to a server with layer-wise KV.

    Where the batches are to be forced, each wave waits for what the one before left
    under way; others begin beside it.
    """
    log = StepLog(server.log_path)

    async def forget():
        await asyncio.to_thread(drop, server, "device")

    async def end_offloads():
        # Pages that they read are no room: batches would follow from the link's speed.
        await asyncio.to_thread(settle, server)

    async def play():
        async with StreamingClient(server.url, timeout_s=PATIENCE_S) as client:
            return [
                await run_planned(
                    server,
                    client,
                    episode,
                    known,
                    log,
                    forget,
                    end_offloads if forced else None,
                )
                for episode, known in zip(episodes, reference, strict=True)
            ]

    return asyncio.run(play())


def layered(model, name, *flags, env=None, pool_tokens=POOL_TOKENS):
    """Return a server with layer-wise KV."""
    device = Device(model, pool_tokens, PAGE, FLAGS)
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", **(env or {})}
    return tiered_spec(device, Tiers(32 * MB), name, (*LAYERKV, *flags), env)


def moved(server, *names):
    """Assert that the layers of a server did all of this."""
    layers = stats(server)["layerkv"]
    for name in names:
        assert layers[f"layerkv_{name}"] > 0, name


@pytest.mark.full
def test_broken_staging_is_caught_in_full_batches(servers, model, episodes, plain):
    """The gate is red where one page in four is left out of what batches stream."""
    server = servers.get(
        layered(
            model,
            "waves-broken",
            *STREAM,
            "--tiered-fault-corrupt=staging",
            env={"SGL_TIERED_ALLOW_FAULTS": "1"},
        )
    )
    answers = played(server, episodes[:1], plain.runs[:1], forced=True)
    negative_control({"staging": plain.forced(answers)})


def test_streaming_gives_equal_bits_in_equal_batches(servers, model, episodes, plain):
    """Under pressure every step is plain's, and so is every bit of the answers."""
    server = servers.get(layered(model, "waves-stream", *STREAM))
    result = plain.forced_on(server, episodes[:NUM_FORCED])
    assert result.passed, result.summary()
    moved(server, "bytes_offloaded", "bytes_streamed", "bytes_pulled")


def test_aborts_in_full_batches_harm_nobody(servers, model, episodes, plain):
    """Those that share pages with what is aborted go on as if nothing had been."""
    server = servers.get(layered(model, "waves-stream", *STREAM))
    reference = plain.runs[NUM_FORCED:]
    answers = played(server, episodes[NUM_FORCED:], reference)
    result = plain.free(reference, answers)
    assert result.passed, result.summary()
    gone = [one for runs in answers for run in runs for one in run.doomed]
    assert any(record.error is not None for record in gone)


def test_pausing_gives_the_bits_that_plain_gives_in_any_batch(
    servers, model, episodes, plain
):
    """Who waits is computed in other batches; plain SGLang's spread is allowed at most.

    Bits have to be equal where plain SGLang's do not depend on the batch either.
    """
    server = servers.get(layered(model, "waves-pause", *PAUSE))
    result = plain.free(plain.runs, played(server, episodes, plain.runs))
    assert result.passed, result.summary()
    moved(server, "bytes_offloaded")


def test_who_does_not_fit_has_to_pause(servers, model, episodes, plain):
    """The same where pauses follow from the room and not from the machine's speed.

    With ``auto`` a prompt retains more where it is computed faster, down to no pause.
    """
    server = servers.get(
        layered(
            model,
            "waves-pause-tight",
            *PAUSE,
            "--tiered-layerkv-retain=1",
            pool_tokens=TIGHT_POOL_TOKENS,
        )
    )
    reference = plain.runs[:NUM_FORCED]
    result = plain.free(reference, played(server, episodes[:NUM_FORCED], reference))
    assert result.passed, result.summary()
    moved(server, "bytes_offloaded", "steps_paused")
