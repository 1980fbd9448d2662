"""The driver keeps causal order in each session and lets sessions run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from sgl_tiered_workloads.arrivals import Arrivals, ClosedLoop, OpenLoop
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.driver import run_sessions, run_workload
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.turns import Session, Turn, TurnSession
from sgl_tiered_workloads.workload import Workload


class ScriptedClient:
    """Answers after a moment of virtual time with a token that counts requests.

    Its clock moves only when it answers or is slept on, so results do not depend on
    the machine: the event loop's own sleeps are shortened to a yield.
    """

    def __init__(self, service_s: float, broken: Sequence[str] = ()) -> None:
        self.service_s = service_s
        self.broken = broken
        self.running = 0
        self.most_running = 0
        self.sent: list[PlannedRequest] = []

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def send(self, request: PlannedRequest, order: int = 0) -> RequestRecord:
        started_s = self.now_s()
        self.sent.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.service_s)
        self.running -= 1
        failed = request.key in self.broken
        return RequestRecord(
            key=request.key,
            order=order,
            prompt=request.prompt,
            targeted_s=request.start_s,
            started_s=started_s,
            output=() if failed else (100 + order,),
            error="broken" if failed else None,
        )


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 100.0

    def time(self) -> float:
        return self._virtual_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._virtual_s = max(self._virtual_s, self._scheduled[0].when())
        super()._run_once()


def play(
    client: ScriptedClient, sessions: Sequence[Session], arrivals: Arrivals
) -> list[RequestRecord]:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(run_sessions(client, sessions, arrivals))
    finally:
        loop.close()


def chat(name: str, num_turns: int = 2, think_s: float = 0.0) -> TurnSession:
    return TurnSession(
        name, [Turn((number,), 1, think_s) for number in range(num_turns)]
    )


def test_a_turn_carries_the_answer_before_it_and_waits_for_the_pause() -> None:
    """Turn two leaves one service and one pause after turn one."""
    first, second = play(ScriptedClient(2.0), [chat("a", 2, 5.0)], OpenLoop((3.0,)))
    assert first.targeted_s == first.started_s == 103.0
    assert second.prompt == (0, 100, 1)
    assert second.targeted_s == second.started_s == 103.0 + 2.0 + 5.0


def test_open_loop_sessions_arrive_whatever_is_running() -> None:
    """Three sessions start at their times although none has been answered."""
    client = ScriptedClient(50.0)
    sessions = [chat(name, 1) for name in "abc"]
    records = play(client, sessions, OpenLoop((0.0, 1.0, 4.0)))
    assert client.most_running == 3
    assert [record.key for record in records] == ["a.t0", "b.t0", "c.t0"]
    assert [record.targeted_s for record in records] == [100.0, 101.0, 104.0]
    assert [record.order for record in records] == [0, 1, 2]


def test_a_closed_loop_keeps_its_users_busy_and_no_more() -> None:
    """Two users share five sessions, one request of each at a time."""
    client = ScriptedClient(1.0)
    records = play(client, [chat(name) for name in "abcde"], ClosedLoop(2))
    assert client.most_running == 2
    assert len(records) == 10
    for name in "abcde":
        turns = [record.key for record in records if record.key.startswith(name)]
        assert turns == [f"{name}.t0", f"{name}.t1"]


def test_a_failed_turn_ends_its_session_only() -> None:
    """The failed record is kept; other sessions go on."""
    client = ScriptedClient(1.0, broken=("a.t0",))
    records = play(client, [chat("a"), chat("b")], ClosedLoop(1))
    assert [record.key for record in records] == ["a.t0", "b.t0", "b.t1"]
    assert records[0].error == "broken"


def test_as_many_starts_as_sessions_are_needed() -> None:
    """A start without a session is an error, not a hang."""
    with pytest.raises(ValueError, match="2 starts for 1 session"):
        play(ScriptedClient(1.0), [chat("a")], OpenLoop((0.0, 1.0)))
    with pytest.raises(ValueError, match="2 arrivals for 1 starts"):
        Workload("w", OpenLoop((0.0, 1.0)), sessions=(chat("a"),))


def test_the_streaming_client_is_a_client() -> None:
    """Sessions run against a real client; an absent server is a failed record."""

    async def run() -> list[RequestRecord]:
        async with StreamingClient("http://127.0.0.1:9") as client:
            return await run_sessions(client, [chat("a"), chat("b")], ClosedLoop(2))

    records = asyncio.run(run())
    assert [record.key for record in records] == ["a.t0", "b.t0"]
    assert all(record.error for record in records)


def test_a_workload_of_requests_plays_as_sessions_of_one_turn() -> None:
    """Each record is seen once; single requests keep their keys and times."""
    requests = tuple(PlannedRequest(f"r{n}", (n,), 1) for n in range(3))
    workload = Workload("w", OpenLoop((0.0, 0.5, 0.5)), requests=requests)
    seen: list[str] = []
    loop = VirtualLoop()
    try:
        records = loop.run_until_complete(
            run_workload(ScriptedClient(1.0), workload, lambda r: seen.append(r.key))
        )
    finally:
        loop.close()
    assert workload.num_requests == 3
    assert [record.key for record in records] == ["r0", "r1", "r2"]
    assert sorted(seen) == ["r0", "r1", "r2"]
    assert [record.targeted_s for record in records] == [100.0, 100.5, 100.5]


def test_a_workload_has_requests_or_sessions() -> None:
    """Both, or neither, is an error."""
    with pytest.raises(ValueError, match="requests or sessions"):
        Workload("w", ClosedLoop(1))
    with pytest.raises(ValueError, match="requests or sessions"):
        Workload(
            "w",
            ClosedLoop(1),
            requests=(PlannedRequest("r", (1,), 1),),
            sessions=(chat("a"),),
        )
