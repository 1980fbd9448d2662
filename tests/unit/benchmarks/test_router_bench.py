"""The comparison of routers: its loads, what it asks again, and its figures."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from against import intervals
from against.model import TOKEN_BYTES
from routers import arms, loads, report
from routers.playing import Asking
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest

from tests.unit.benchmarks.played import answer_all


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw few times: what is drawn from is the same in every document."""
    monkeypatch.setattr(intervals, "NUM_DRAWS", 20)


def schedule(num_requests: int) -> list[RequestRecord]:
    drawn = answer_all(loads.draw(7, num_requests))
    return loads.cut(drawn, num_requests)


def test_pools_hold_a_quarter_of_the_working_set() -> None:
    """Three devices together, and three hosts together: 22 to 28 % of the load's."""
    records = schedule(loads.NUM_REQUESTS)
    assert Counter(loads.kind_of(r.key) for r in records) == dict.fromkeys(
        loads.KINDS, loads.NUM_REQUESTS // 3
    )
    size = loads.working_set(records, arms.PAGE)
    pools = (arms.NUM_SERVERS - 1) * arms.POOL_TOKENS
    assert 0.22 < pools / size < 0.28
    assert max(len(r.prompt) + len(r.output) for r in records) < arms.POOL_TOKENS


def test_kinds_are_mixed_and_their_working_sets_add_up() -> None:
    """No two sessions have one name, and kinds share nothing."""
    records = schedule(loads.NUM_REQUESTS)
    assert len({record.key for record in records}) == len(records)
    apart = [
        loads.working_set([r for r in records if loads.kind_of(r.key) == kind], 16)
        for kind in loads.KINDS
    ]
    assert sum(apart) == loads.working_set(records, 16)
    first = [r.key for r in records if r.key.endswith(".t0")][:20]
    assert {loads.kind_of(key) for key in first} == set(loads.KINDS)
    with pytest.raises(ValueError, match="equal parts"):
        loads.draw(7, 100)


def test_the_working_set_counts_a_shared_page_once() -> None:
    """Two prompts with one beginning have it once; behind another one it is new."""

    def record(key: str, prompt: tuple[int, ...]) -> RequestRecord:
        return RequestRecord(key, 0, prompt, 0.0, 0.0)

    first, second, third = (1,) * 4, (2,) * 4, (3,) * 4
    shared = [record("a", first + second), record("b", first + third)]
    assert loads.working_set(shared, 4) == 12
    moved = [record("a", first + second), record("b", third + second)]
    assert loads.working_set(moved, 4) == 16


def test_a_script_sends_what_plain_sglang_was_sent() -> None:
    """Whatever is answered, prompts and lengths are the reference's, with pauses."""
    told = schedule(90)
    sessions = loads.scripts(told, [float(n + 1) for n in range(len(told))])
    assert all(session.think_s == 0.0 for session in sessions)
    longest = max(sessions, key=lambda session: session.num_turns)
    assert longest.num_turns > 1
    longest.next_request()
    longest.record_answer(())
    assert longest.think_s > 0.0
    again = answer_all(loads.scripts(told, loads.draw_pauses(told, 7)))
    assert {(r.key, r.prompt, len(r.output)) for r in again} == {
        (r.key, r.prompt, len(r.output)) for r in told
    }


def test_pauses_are_around_the_mean_of_their_kind() -> None:
    """A user of a chat reads longer than one of a document."""
    records = schedule(loads.NUM_REQUESTS)
    pauses_s = loads.draw_pauses(records, 7)
    assert pauses_s == loads.draw_pauses(records, 7)
    for kind in loads.KINDS:
        own = [
            pause
            for r, pause in zip(records, pauses_s, strict=True)
            if loads.kind_of(r.key) == kind
        ]
        assert sum(own) / len(own) == pytest.approx(loads.PAUSES_S[kind], rel=0.35)


def test_two_users_of_a_document_are_one() -> None:
    """Their times are drawn together."""
    keys = [record.key for record in schedule(90)]
    users = Counter(loads.document_of(key) for key in keys)
    assert {users[name] for name in users if loads.kind_of(name) == "documents"} == {10}


def timed(key: str, sent_s: float, first_s: float) -> RequestRecord:
    return RequestRecord(key, 0, (1,), sent_s, sent_s, (first_s,), (1,))


def test_the_rate_counts_until_the_last_session_begins() -> None:
    """Then some users have nothing to do; a lost request counts for nothing."""
    records = [
        timed("chats-s0.t0", 10.0, 11.0),
        timed("chats-s0.t1", 12.0, 13.0),
        timed("chats-s1.t0", 14.0, 15.0),
        RequestRecord("chats-s2.t0", 0, (1,), 10.0, 10.0, error="gone"),
    ]
    assert loads.rate_of(records) == pytest.approx(2 / 4.0)


def test_who_waits_in_the_middle_and_at_the_end() -> None:
    """Sessions begin for 10 s; what waits from the sixth second is in neither part."""
    records = [
        timed("chats-s0.t0", 0.0, 0.0),
        timed("chats-s1.t0", 4.0, 5.0),
        timed("chats-s1.t1", 6.5, 7.5),
        timed("chats-s2.t0", 9.0, 20.0),
        timed("chats-s3.t0", 10.0, 30.0),
        RequestRecord("chats-s4.t0", 0, (1,), 8.0, 8.0, error="gone"),
    ]
    assert report.waiting(records) == {"middle": 0.5, "end": 0.5}


class Breaking:
    """A client whose streams break in a given way, a number of times."""

    def __init__(self, times: int, output: tuple[int, ...]) -> None:
        self.left = times
        self.output = output
        self.now = 0.0

    def now_s(self) -> float:
        return self.now

    async def send(self, request: PlannedRequest, order: int = 0) -> RequestRecord:
        began, self.now = self.now, self.now + 1.0
        error = None
        if self.left:
            self.left, error = self.left - 1, "gone"
        output = self.output if error else (1, 2)
        times = (self.now,) * len(output)
        return RequestRecord(
            request.key, order, request.prompt, 0.0, began, times, output, error=error
        )


def ask(client: Breaking) -> tuple[RequestRecord, int]:
    asking = Asking(client)  # type: ignore[arg-type]
    record = asyncio.run(asking.send(PlannedRequest("s0.t0", (1, 2), 2)))
    return record, asking.num_broken


def test_a_broken_stream_is_asked_for_again() -> None:
    """Its time runs from the first try, so that the break is paid for."""
    record, broken = ask(Breaking(1, (1,)))
    assert record.error is None
    assert broken == 1
    assert record.ttft_s == pytest.approx(2.0)


def test_a_lost_request_is_not_asked_for_again() -> None:
    """Before its first token that is what a router is there for."""
    record, broken = ask(Breaking(1, ()))
    assert record.error == "gone"
    assert broken == 0


def test_a_stream_that_always_breaks_is_lost() -> None:
    """After three tries."""
    record, broken = ask(Breaking(9, (1,)))
    assert record.error == "gone"
    assert broken == 3


def block(run: report.Run, factors: dict[str, float], **facts: Any) -> dict[str, Any]:
    """Make a record in which a router's times are its factor times the document's."""
    factor = factors.get(run.router, 1.0)
    return {
        **run._asdict(),
        "alone": True,
        "ttft_ms": {
            f"{kind}-s{n}": [factor * (10.0 + n), factor * 5.0]
            for kind in loads.KINDS
            for n in range(20)
        },
        "prompt_tokens": 1000,
        "waiting": {"middle": 1.0, "end": 2.0},
        "cached": {"device": 300, "host": 200},
        "lost": 0,
        "unsent": 3,
        "broken": 0,
        "evicted_tokens": 64,
        "added": "tiered3",
        "served": {"tiered0": 90, "tiered3": 10},
        "killed_s": 3.0,
        "added_s": 5.0,
        "wrong": 0,
        "judged": 40,
        **facts,
    }


FACTORS = {arms.SESSION: 2.0, arms.SGLANG[0]: 1.6, arms.SGLANG[1]: 1.25}


def every_run(backends: tuple[str, ...] = arms.BACKENDS) -> list[dict[str, Any]]:
    return [block(run, FACTORS) for run in report.runs_left([], backends)]


def test_figures_of_all_runs() -> None:
    """The median over rates of ours over theirs; over the better of SGLang's two."""
    blocks = every_run()
    told = report.summary(blocks)
    assert told["router_p99_vs_session"] == pytest.approx(0.5)
    assert told["router_p99_vs_sglang_router"] == pytest.approx(0.8)
    assert told["router_p95_vs_sglang_router_interval"] == pytest.approx([0.8, 0.8])
    assert set(told["router_p99_vs_session_by_rate"]) == {"0.45", "0.7"}
    by_kind = told["router_p99_vs_sglang_router_by_kind"]
    assert set(by_kind) == set(loads.KINDS)
    assert by_kind["chats"]["0.7"] == pytest.approx([0.8, 0.8, 0.8])
    assert told["router_hicache_p99_vs_session"] == pytest.approx(0.5)
    assert told["repeats"]["tiered 0.45"] == 5
    assert told["repeats"]["hicache 0.7"] == report.WANTED_REPEATS["hicache"]
    assert told["requests"]["tiered 0.7"] == 5 * 120
    assert told["runs"] == len(blocks) == 70
    assert told["unsent_by_router"][arms.OURS] == 3 * 14
    assert told["complete"] is True
    assert told["targets_missed"] == []
    json.dumps(told)
    lines = list(report.table(blocks))
    assert len(lines) == 1 + 4 * len(arms.ROUTERS) * (1 + len(loads.KINDS))
    assert "50.0%" in lines[1]


@pytest.mark.parametrize(
    ("target", "facts"),
    [
        ("wrong", {"wrong": 1}),
        ("lost", {"lost": 1}),
        ("evictions", {"evicted_tokens": 0}),
        ("kills", {"killed_s": None}),
        ("adds", {"added_s": None}),
        ("served_by_added", {"served": {"tiered3": 0}}),
    ],
)
@pytest.mark.parametrize("place", range(len(arms.ROUTERS)))
def test_what_must_not_be(place: int, target: str, facts: dict[str, Any]) -> None:
    """In one run of whichever router."""
    blocks = every_run(("tiered",))
    blocks[place] |= facts
    assert report.summary(blocks)["targets_missed"] == [target, "complete"]


def test_a_queue_that_grows_is_no_load_below_saturation() -> None:
    """In the mean over the repeats of a router at a rate."""
    blocks = every_run()
    own = [b for b in blocks if (b["router"], b["share"]) == (arms.SESSION, 0.7)]
    own[0]["waiting"] = {"middle": 1.0, "end": 4.0}
    assert report.summary(blocks)["targets_missed"] == []
    for each in own:
        each["waiting"] = {"middle": 1.0, "end": 4.0}
    told = report.summary(blocks)
    assert told["targets_missed"] == ["queues_grew"]
    assert f"tiered 0.7 {arms.SESSION}" in told["queues_grew"]
    assert told["waiting"][f"tiered 0.7 {arms.SESSION}"] == [1.0, 4.0]


@pytest.mark.parametrize(
    ("factors", "targets"),
    [
        ({arms.SESSION: 1.6}, ["router_p99_vs_session"]),
        ({arms.SGLANG[1]: 1.1}, ["router_p99_vs_sglang_router"]),
        (
            {arms.SGLANG[0]: 0.9},
            ["router_p99_vs_sglang_router", "router_p99_vs_sglang_router_interval"],
        ),
    ],
)
def test_a_router_that_is_not_ahead(
    factors: dict[str, float], targets: list[str]
) -> None:
    """Each ratio has its limit, and sglang-router's interval must end below 1."""
    made = FACTORS | factors
    blocks = [block(run, made) for run in report.runs_left([], arms.BACKENDS)]
    assert report.summary(blocks)["targets_missed"] == targets


def test_no_run_is_no_result() -> None:
    """Figures that are not there are missed, and so is what no run can show."""
    told = report.summary([])
    assert {"router_p99_vs_session", "evictions", "complete"} <= set(
        told["targets_missed"]
    )


def test_a_repeat_counts_when_all_routers_have_had_it() -> None:
    """Ratios are of the same documents, whenever a call ended."""
    blocks = every_run()[:13]
    told = report.summary(blocks)
    assert told["repeats"] == {"tiered 0.45": 1, "tiered 0.7": 1}
    assert told["router_p99_vs_session"] == pytest.approx(0.5)
    few = report.summary(blocks[:4])
    assert "router_p99_vs_session" not in few
    assert list(report.table(blocks[:4]))


def test_a_call_goes_on_where_another_ended() -> None:
    """The next run is the first that has no record."""
    every = report.runs_left([], arms.BACKENDS)
    blocks = [block(run, {}) for run in every]
    assert len(set(every)) == len(every)
    assert report.runs_left(blocks[:7], arms.BACKENDS) == every[7:]
    assert report.runs_left([*blocks[:3], *blocks[4:]], arms.BACKENDS) == [every[3]]
    assert [run.backend for run in every] == ["tiered"] * 50 + ["hicache"] * 20


def test_routers_take_turns_there_and_back() -> None:
    """In a repeat each is as far from its beginning as, at the other rate, its end."""
    runs = report.runs_left([], ("tiered",))
    firsts = set()
    for repeat in range(5):
        own = [run for run in runs if run.repeat == repeat]
        assert own == runs[10 * repeat : 10 * repeat + 10]
        names = [run.router for run in own]
        assert names == names[::-1]
        assert set(names[:5]) == set(arms.ROUTERS)
        firsts.add(names[0])
    assert firsts == set(arms.ROUTERS)


def test_a_lost_request_has_no_time() -> None:
    """It is counted elsewhere; its document stays, for the others' times of it."""
    records = [
        RequestRecord("s0.t0", 0, (1,) * 8, 0.0, 1.0, (1.5,), (1,)),
        RequestRecord("s1.t0", 1, (1,) * 8, 0.0, 1.0, error="gone"),
    ]
    told = report.arm_block(records, ["s0", "s1"])
    assert told["ttft_ms"] == {"s0": [500.0], "s1": []}
    assert told["prompt_tokens"] == 8


def test_both_kinds_of_servers_have_the_same_memory(tmp_path: Path) -> None:
    """The same device pool, and a host as large."""
    for kind in arms.BACKENDS:
        members = arms.servers(kind, tmp_path, Ports(1), tmp_path)
        assert len(members) == arms.NUM_SERVERS
        flags = members[0].spec.flags
        pool = flags[flags.index("--max-total-tokens") + 1]
        assert int(pool) == arms.POOL_TOKENS
        assert "--sleep-on-idle" in flags
        assert members[0].event_port is not None
        if kind == "hicache":
            assert flags[flags.index("--hicache-ratio") + 1] == "1"
        else:
            size = flags[flags.index("--tiered-host-size") + 1]
            assert int(size) == arms.POOL_TOKENS * TOKEN_BYTES


@pytest.mark.parametrize("name", arms.ROUTERS)
def test_a_router_begins_with_three_servers(name: str, tmp_path: Path) -> None:
    """The fourth is added later."""
    members = arms.servers("tiered", tmp_path, Ports(1), tmp_path)
    front = arms.Front.before(name, members[:-1], Ports(1), tmp_path, Path("python"))
    words = " ".join(front.service.command)
    assert f":{members[0].port}" in words
    assert f":{members[-1].port}" not in words
    policy = name.removeprefix("sglang-")
    assert f"--policy {policy}" in words
