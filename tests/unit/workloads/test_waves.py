"""Waves are drawn within their limits, and sent twice with the same prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.gate import GateResult, Spread
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.steps import Step
from sgl_tiered_workloads.waves import (
    Episode,
    Mix,
    Wave,
    WaveRequest,
    WaveRun,
    compare_singly,
    compare_waves,
    draw_episode,
    run_planned,
    run_waves,
    unlike_waves,
)

MIX = Mix(page_tokens=16, chunk_tokens=64, most_tokens=200, long=(201, 300))
EPISODES = [
    draw_episode(replace(MIX, num_doomed=3), np.random.default_rng(seed), "e")
    for seed in range(30)
]


class FakeServer:
    """Answers with numbers that tell prompts apart; notes what it is asked."""

    def __init__(self, fails: str = "") -> None:
        self.asked: list[str] = []
        self.sent: list[list[PlannedRequest]] = []
        self.fails = fails
        self.spec = type("Spec", (), {"name": "fake"})()
        self._aborted: set[str] = set()

    def flush_cache(self) -> None:
        self.asked.append("flush")

    def post(self, path: str, body: Any) -> None:
        self.asked.append(path)
        self._aborted.add(body["rid"])

    async def send_batch(
        self, requests: Sequence[PlannedRequest], order: int = 0, *, named: bool = False
    ) -> list[RequestRecord]:
        self.sent.append(list(requests))
        while named and not {one.key for one in requests} <= self._aborted:
            await asyncio.sleep(0.001)
        return [
            RequestRecord(
                key=one.key,
                order=order,
                prompt=one.prompt,
                targeted_s=0.0,
                started_s=0.0,
                output=tuple(
                    (sum(one.prompt) + n) % 97 for n in range(one.max_new_tokens)
                ),
                error="no" if one.key == self.fails else None,
            )
            for one in requests
        ]

    @property
    def as_server(self) -> SglangServer:
        return cast(SglangServer, self)

    @property
    def as_client(self) -> StreamingClient:
        return cast(StreamingClient, self)


def test_what_is_drawn_is_a_function_of_the_seed() -> None:
    """The same seed gives the same episode, another one another."""
    first, again, other = (
        draw_episode(MIX, np.random.default_rng(seed), "e") for seed in (4, 4, 5)
    )
    assert first == again
    assert first != other


def test_requests_stay_within_the_limits() -> None:
    """One longer prompt a wave at most; keys are unique, and bases come before."""
    kinds = set()
    for episode in EPISODES:
        known: set[str] = set()
        for wave in episode.waves:
            over = 0
            for one in (*wave.requests, *wave.doomed):
                assert one.key not in known
                assert not one.base or one.base in known
                assert one.prompt_tokens >= 1
                known.add(one.key)
            for one in wave.requests:
                length = one.prompt_tokens + one.max_new_tokens
                over += length > MIX.most_tokens
                assert length <= 300 + 40
                kinds.add((bool(one.base), bool(one.tail), length > MIX.most_tokens))
            assert over <= 1
    # Fresh ones, lengthened ones, repeats, and long ones are all drawn.
    fresh, lengthened, repeated = (False, True), (True, True), (True, False)
    expected = {(*kind, False) for kind in (fresh, lengthened, repeated)}
    assert expected | {(False, True, True)} <= kinds


def test_only_doomed_requests_make_an_episode_free() -> None:
    """Where nothing depends on time, batches are forced."""
    request = WaveRequest("a", (1,), 1)
    assert Episode((Wave((request,)),)).is_forced
    assert not Episode((Wave((request,)), Wave((request,), (request,)))).is_forced


def test_no_two_of_a_forced_wave_load_the_same_pages() -> None:
    """One would wait for the other's load; beside doomed ones that happens."""
    alike = {True: 0, False: 0}
    for episode in EPISODES + [
        draw_episode(MIX, np.random.default_rng(seed), "e") for seed in range(30)
    ]:
        runs = asyncio.run(
            run_waves(FakeServer().as_server, FakeServer().as_client, episode, 0)
        )
        for wave, run in zip(episode.waves, runs, strict=True):
            prompts = [one.prompt for one in run.records if len(one.prompt) >= 16]
            pairs = len(prompts) - len({prompt[:16] for prompt in prompts})
            if wave.drops_device:
                alike[episode.is_forced] += pairs
            assert len(wave.requests) == len(run.records)
    assert alike[True] == 0 < alike[False]


@pytest.mark.parametrize("episode", EPISODES[:8])
def test_the_second_server_gets_the_prompts_of_the_first(episode: Episode) -> None:
    """Prompts that hold answers are those that were answered, on both servers."""
    plain, other = FakeServer(), FakeServer()
    dropped = []
    settled = []

    async def drop() -> None:
        dropped.append(len(other.sent))

    async def settle() -> None:
        settled.append(len(other.sent))

    async def run() -> tuple[Any, Any]:
        known = await run_waves(plain.as_server, plain.as_client, episode, 5)
        quick = Episode(
            tuple(
                replace(
                    wave,
                    doomed=tuple(replace(d, abort_after_s=0.0) for d in wave.doomed),
                )
                for wave in episode.waves
            )
        )
        return known, await run_planned(
            other.as_server, other.as_client, quick, known, drop=drop, settle=settle
        )

    known, again = asyncio.run(run())
    assert [run.records for run in known] == [run.records for run in again]
    assert [run.records[0].order for run in known] == list(
        range(5, 5 + len(episode.waves))
    )
    assert plain.asked == ["flush"]
    assert len(plain.sent) == len(episode.waves)
    assert [len(run.doomed) for run in again] == [len(w.doomed) for w in episode.waves]
    assert len(dropped) == sum(wave.drops_device for wave in episode.waves)
    assert len(settled) == len(episode.waves)
    assert settled == sorted(set(settled))
    assert settled[0] == 0
    assert other.asked.count("flush") == 1


def test_a_continuation_holds_the_answer() -> None:
    """What a later request begins with is prompt and answer of the earlier one."""
    episode = Episode(
        (
            Wave((WaveRequest("a", (3, 4), 4),)),
            Wave((WaveRequest("b", (9,), 2, "a", 5),)),
        )
    )
    server = FakeServer()
    first, second = asyncio.run(
        run_waves(server.as_server, server.as_client, episode, 0)
    )
    answer = first.records[0].output
    assert second.records[0].prompt == (3, 4, *answer[:3], 9)


STEPS = (
    Step("Prefill", (("new-seq", 1), ("new-token", 2))),
    Step("Decode", (("running-req", 1), ("queue-req", 0))),
)
PAGE = 2
SOME = Spread(max_logprob=0.05, mean_logprob=0.005, max_gap=0.05, num_tokens=1)
ALL_EQUAL = Spread(max_logprob=0.0, mean_logprob=0.0, max_gap=0.0, num_tokens=1)


def wave_run(
    order: int, steps: tuple[Step, ...] = STEPS, logprob: float = -1.0
) -> WaveRun:
    """Return a wave of one request."""
    record = RequestRecord(
        key=f"w{order}",
        order=order,
        prompt=(order, 1),
        targeted_s=0.0,
        started_s=0.0,
        output=(5,),
        top_logprobs=(((logprob, 5),),),
    )
    return WaveRun((record,), (), steps)


def test_waves_of_other_batches_are_told_with_their_first_step() -> None:
    """Also where one server computed more steps, or nobody looked."""
    other = (STEPS[0], Step("Decode", (("running-req", 2), ("queue-req", 0))))
    reference = [wave_run(0), wave_run(1), wave_run(2), wave_run(3, ())]
    answers = [
        wave_run(0),
        wave_run(1, other),
        wave_run(2, STEPS[:1]),
        wave_run(3, ()),
    ]
    assert unlike_waves(reference, answers) == {
        1: "step 1: Decode running-req 1, queue-req 0 became "
        "Decode running-req 2, queue-req 0",
        2: "step 1: Decode running-req 1, queue-req 0 became None",
        3: "no steps told",
    }


def test_only_waves_of_equal_batches_count_as_exact() -> None:
    """The others are compared by plain's spread; where that is nothing, by bits."""
    reference = [wave_run(0), wave_run(1)]
    other = [wave_run(0), wave_run(1, STEPS[:1])]

    def judge(answers: list[WaveRun], *, forced: bool = True) -> GateResult:
        return compare_waves(
            reference,
            answers,
            page_size=16,
            spread=ALL_EQUAL,
            forced=forced,
            min_exact_fraction=0.5,
        )

    assert judge(reference).num_exact == 2
    assert (judge(other).num_exact, judge(other).num_near) == (1, 1)
    assert judge(other).passed
    assert judge(other, forced=False).num_near == 2
    for answers in ([wave_run(0), wave_run(1, STEPS[:1], -1.0001)],):
        assert not judge(answers).passed
        assert not judge(answers, forced=False).passed


def test_by_request_bits_count_where_the_cache_gave_as_much() -> None:
    """Neither the wave's other requests nor its steps matter then."""
    reference = [wave_run(0), wave_run(1)]

    def judge(
        other: RequestRecord, doomed: tuple[RequestRecord, ...] = ()
    ) -> GateResult:
        answers = [wave_run(0, ()), WaveRun((other,), doomed)]
        return compare_singly(
            reference, answers, page_size=PAGE, spread=SOME, min_exact_fraction=0.1
        )

    same = reference[1].records[0]
    moved = replace(same, top_logprobs=(((-1.01, 5),),))
    assert (judge(same).num_exact, judge(same).passed) == (2, True)
    assert not judge(moved).passed
    # It found more there, or shares pages with what was aborted: rounding may differ.
    for result in (
        judge(replace(moved, cached_tokens=1)),
        judge(moved, (replace(same, key="doomed"),)),
    ):
        assert (result.num_exact, result.num_near, result.passed) == (1, 1, True)


def test_by_request_a_page_computed_beside_its_copy_is_not_exact() -> None:
    """The cache may give the later request the earlier one's page."""
    first = wave_run(0).records[0]
    second = replace(first, key="again", order=0)
    wave = WaveRun((first, second))
    result = compare_singly([wave], [wave], page_size=PAGE, spread=SOME)
    assert (result.num_exact, result.num_near) == (1, 1)


def test_a_failed_request_ends_the_first_run() -> None:
    """There is nothing to compare with."""
    episode = Episode((Wave((WaveRequest("a", (3, 4), 4),)),))
    server = FakeServer(fails="a")
    with pytest.raises(RuntimeError, match="fake: a: no"):
        asyncio.run(run_waves(server.as_server, server.as_client, episode, 0))
