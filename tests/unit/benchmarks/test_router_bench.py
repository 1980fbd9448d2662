"""The comparison of routers: its loads, what it asks again, and its figures."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from against.model import TOKEN_BYTES
from routers import arms, loads, report
from routers.playing import Asking
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest

from tests.unit.benchmarks.played import answer_all


@pytest.mark.parametrize("load", loads.LOADS)
def test_pools_hold_a_quarter_of_the_working_set(load: str) -> None:
    """Three devices together, and three hosts together: 22 to 28 % of each load's."""
    records = loads.cut(answer_all(loads.draw(load, 7, 300)), 300)
    assert len(records) == loads.NUM_REQUESTS
    size = loads.working_set(records, arms.PAGE)
    pools = (arms.NUM_SERVERS - 1) * arms.POOL_TOKENS
    assert 0.22 < pools / size < 0.28
    assert max(len(r.prompt) + len(r.output) for r in records) < arms.POOL_TOKENS


def test_the_working_set_counts_a_shared_page_once() -> None:
    """Two prompts with one beginning have it once; behind another one it is new."""

    def record(key: str, prompt: tuple[int, ...]) -> RequestRecord:
        return RequestRecord(key, 0, prompt, 0.0, 0.0)

    first, second, third = (1,) * 4, (2,) * 4, (3,) * 4
    shared = [record("a", first + second), record("b", first + third)]
    assert loads.working_set(shared, 4) == 12
    moved = [record("a", first + second), record("b", third + second)]
    assert loads.working_set(moved, 4) == 16


@pytest.mark.parametrize("load", loads.LOADS)
def test_a_script_sends_what_plain_sglang_was_sent(load: str) -> None:
    """Whatever is answered, prompts and lengths are the reference's, with pauses."""
    told = loads.cut(answer_all(loads.draw(load, 7, 30)), 30)
    pauses_s = [float(n + 1) for n in range(len(told))]
    sessions = loads.scripts(told, pauses_s)
    assert all(session.think_s == 0.0 for session in sessions)
    longest = max(sessions, key=lambda session: session.num_turns)
    assert longest.num_turns > 1
    longest.next_request()
    longest.record_answer(())
    assert longest.think_s > 0.0
    again = answer_all(loads.scripts(told, pauses_s))
    assert {(r.key, r.prompt, len(r.output)) for r in again} == {
        (r.key, r.prompt, len(r.output)) for r in told
    }


def test_two_users_of_a_document_are_one() -> None:
    """Their times are drawn together."""
    keys = {record.key for record in answer_all(loads.draw("documents", 7, 30))}
    users = Counter(loads.document_of(key) for key in keys)
    assert set(users.values()) == {10}


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


def block(
    load: str = "chats",
    share: float = report.SHARES[0],
    repeat: int = 0,
    *,
    backend: str = "tiered",
    factors: dict[str, float] | None = None,
    **counts: int,
) -> dict[str, Any]:
    """Make a block in which a router's times are its factor times the document's."""
    told = {}
    for name in arms.ROUTERS:
        factor = (factors or {}).get(name, 1.0)
        told[name] = {
            "ttft_ms": {
                f"s{n}": [factor * (10.0 + n), factor * 5.0] for n in range(20)
            },
            "prompt_tokens": 1000,
            "cached": {"device": 300, "host": 200},
            "lost": 0,
            "unsent": 3,
            "broken": 0,
            "evicted_tokens": 64,
            "wrong": 0,
            "judged": 40,
            **counts,
        }
    return {
        "backend": backend,
        "load": load,
        "share": share,
        "repeat": repeat,
        "alone": True,
        "arms": told,
    }


def test_figures_of_blocks() -> None:
    """The median over cells of ours over theirs; over the better of SGLang's two."""
    factors = {arms.SESSION: 2.0, arms.SGLANG[0]: 1.6, arms.SGLANG[1]: 1.25}
    blocks = [
        block(load, share, repeat, factors=factors)
        for load in loads.LOADS
        for share in report.SHARES
        for repeat in range(2)
    ]
    told = report.summary(blocks)
    assert told["router_p99_vs_session"] == pytest.approx(0.5)
    assert told["router_p99_vs_sglang_router"] == pytest.approx(0.8)
    assert told["router_p95_vs_sglang_router_interval"] == pytest.approx([0.8, 0.8])
    assert len(told["router_p99_vs_session_by_cell"]) == 6
    assert "router_hicache_p99_vs_session" not in told
    assert (told["evictions"], told["lost"], told["wrong"]) == (64, 0, 0)
    assert (told["blocks"], told["cells"], told["repeats_least"]) == (12, 6, 2)
    assert told["unsent_by_router"][arms.OURS] == 36
    assert told["complete"] is False
    assert report.is_right(told)
    json.dumps(told)
    lines = list(report.table(blocks))
    assert len(lines) == 1 + 6 * len(arms.ROUTERS)
    assert "50.0%" in lines[1]


@pytest.mark.parametrize("fault", ["wrong", "lost", "evicted_tokens"])
def test_what_must_not_be(fault: str) -> None:
    """A wrong answer, a lost one of ours, or pools that never were full."""
    value = 0 if fault == "evicted_tokens" else 1
    assert not report.is_right(report.summary([block(**{fault: value})]))


def test_five_repeats_of_all_cells_are_complete() -> None:
    """Both kinds of servers, three loads, two shares."""
    blocks = [
        block(load, share, repeat, backend=backend)
        for backend in arms.BACKENDS
        for load in loads.LOADS
        for share in report.SHARES
        for repeat in range(report.WANTED_REPEATS)
    ]
    told = report.summary(blocks)
    assert told["complete"] is True
    assert "router_hicache_p99_vs_session" in told


def test_the_least_measured_cell_is_next() -> None:
    """A call goes through all cells of one kind of servers, then of the other."""
    blocks: list[dict[str, Any]] = []
    seen = []
    for _ in range(24):
        (cell, repeat), *_ = report.next_cells(blocks, arms.BACKENDS, loads.LOADS)
        seen.append((cell[0], repeat))
        blocks.append(block(cell[1], cell[2], repeat, backend=cell[0]))
    wanted = [(backend, repeat) for repeat in range(2) for backend in arms.BACKENDS]
    assert seen == [each for each in wanted for _ in range(6)]
    assert (
        len({(b["backend"], b["load"], b["share"], b["repeat"]) for b in blocks}) == 24
    )


def test_a_lost_request_has_no_time() -> None:
    """It is counted elsewhere; its document stays, for the others' times of it."""
    records = [
        RequestRecord("s0.t0", 0, (1,) * 8, 0.0, 1.0, (1.5,), (1,)),
        RequestRecord("s1.t0", 1, (1,) * 8, 0.0, 1.0, error="gone"),
    ]
    told = report.arm_block(records, ["s0", "s1"])
    assert told == {"ttft_ms": {"s0": [500.0], "s1": []}, "prompt_tokens": 8}


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
