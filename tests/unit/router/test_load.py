"""What an instance has to do: its own report, and what has changed since."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.router.config import InstanceConfig
from sgl_tiered.router.instances import Instance, LoadReport
from tests.unit.router.fake_servers import answer, cluster, fast, scenario, until

MAX_AGE_S = 10.0


class Asked:
    """An instance that is asked for its load by hand."""

    def __init__(self) -> None:
        self.instance = Instance(InstanceConfig("a", "http://a"))
        self.now_s = 0.0

    def step(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def ask(self) -> float:
        self.instance.ask()
        return self.step()

    def told(self, asked_s: float, num: int, waiting: int = 0) -> None:
        report = LoadReport(asked_s, num, waiting)
        self.instance.take_report(report, self.step())

    def open(self, num_tokens: int = 100):
        return self.instance.open(self.step(), num_tokens)

    @property
    def load(self) -> tuple[int, int]:
        return self.instance.load(self.now_s, MAX_AGE_S)


def test_a_request_that_has_ended_weighs_no_more() -> None:
    """The report that saw it is still young; nobody waits where nobody is left."""
    a = Asked()
    ticket = a.open()
    a.told(a.ask(), 1, waiting=100)
    assert a.load == (100, 1)
    a.instance.close(ticket)
    assert a.load == (0, 0)


def test_requests_of_others_go_on_weighing() -> None:
    """Only ours are taken off, each once, and never more than were told."""
    a = Asked()
    tickets = [a.open() for _ in range(2)]
    a.told(a.ask(), 5, waiting=300)
    for ticket in tickets:
        a.instance.close(ticket)
        a.instance.close(ticket)
    assert a.load == (300, 3)
    later = a.open(40)
    assert a.load == (340, 4)
    a.instance.close(later)
    assert a.load == (300, 3), "it was in no report"
    a.told(a.ask(), 0)
    assert a.load == (0, 0)


def test_a_request_that_ends_while_the_server_is_asked_is_taken_off() -> None:
    """It may or may not be in the report; the next one knows."""
    a = Asked()
    ticket = a.open()
    asked_s = a.ask()
    a.instance.close(ticket)
    a.told(asked_s, 1)
    assert a.load == (0, 0)
    a.told(a.ask(), 1)
    assert a.load == (0, 1), "somebody else's, then"


def test_without_a_young_report_our_own_requests_are_all_that_is_known() -> None:
    """As for a server that tells no load."""
    a = Asked()
    a.open(7)
    assert a.load == (7, 1)
    a.told(a.ask(), 9, waiting=900)
    assert a.load == (900, 9)
    a.now_s += 2 * MAX_AGE_S
    assert a.load == (7, 1)
    a.instance.take_report(None, a.step())
    assert a.load == (7, 1)


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(0, 5))
def test_the_number_of_requests_is_exact_where_reports_take_no_time(
    steps, others
) -> None:
    """Ours that are open, and those of other replicas at the last report."""
    a, tickets, is_told = Asked(), [], False
    for step in steps:
        if step == 0 and tickets:
            a.instance.close(tickets.pop(len(tickets) // 2))
        elif step == 1:
            a.told(a.ask(), len(tickets) + others)
            is_told = True
        else:
            tickets.append(a.open())
        number = a.instance.load(a.now_s, float("inf"))[1]
        assert number == len(tickets) + (others if is_told else 0)


@given(
    st.lists(st.sampled_from(["open", "close", "ask", "look", "told"]), max_size=80),
    st.integers(0, 3),
)
def test_the_number_of_requests_is_off_by_those_that_began_or_ended_meanwhile(
    steps, others
) -> None:
    """While the server was asked, that is: nothing adds up from report to report."""
    a, tickets = Asked(), []
    asked_s, seen, num_meanwhile, bound = None, None, 0, None
    for step in steps:
        if step == "open":
            tickets.append(a.open())
            num_meanwhile += asked_s is not None
        elif step == "close" and tickets:
            a.instance.close(tickets.pop(0))
            num_meanwhile += asked_s is not None
        elif step == "ask" and asked_s is None:
            asked_s, seen, num_meanwhile = a.ask(), None, 0
        elif step == "look" and asked_s is not None and seen is None:
            seen = len(tickets) + others
        elif step == "told" and seen is not None:
            a.told(asked_s, seen)
            asked_s, seen, bound = None, None, num_meanwhile
        if bound is not None:
            number = a.instance.load(a.now_s, float("inf"))[1]
            assert abs(number - len(tickets) - others) <= bound


@pytest.mark.parametrize("is_stream", [False, True])
@scenario
async def test_the_next_turn_of_a_chat_goes_where_the_last_one_was(is_stream):
    """Though the last report saw that one run, and one counts more than the prefix.

    The report comes while the request runs, and none comes after it.
    """
    config = fast(load_interval_s=0.5, running_cost_tokens=1e6)
    async with cluster("ab", config) as c:
        for server in c.servers:
            server.loads = [{"num_running_reqs": 0}]
        tells_load(c, True)
        await until(lambda: all(each.report for each in c.router.fleet))

        async def seen_running(server, request, body):
            instance = c.router.fleet.get(server.name)
            server.loads = [{"num_running_reqs": 1}]
            await until(lambda: instance.report.num_requests == 1)
            tells_load(c, False)  # it is asked no more: that report stays
            server.loads = [{"num_running_reqs": 0}]
            return await answer(server, request, body)

        homes = set()
        for turn in range(4):
            for server in c.servers:
                server.behaviour = seen_running
            body = {"input_ids": list(range(16 + 4 * turn)), "stream": is_stream}
            _, headers, _ = await c.post(body)
            homes.add(headers["X-Tiered-Instance"])
            tells_load(c, True)
        assert len(homes) == 1


def tells_load(c, is_asked):
    """Let the router ask its servers for their loads, or not."""
    for instance in c.router.fleet:
        instance.tells_load = is_asked
