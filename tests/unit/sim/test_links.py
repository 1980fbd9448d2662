"""Links: bandwidth, latency, and what happens when several transfers share one."""

from __future__ import annotations

import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.events import EventQueue, Priority
from sgl_tiered.sim.links import Link


def ends(link: Link, queue: EventQueue, jobs: list[tuple[float, int]]) -> list[float]:
    """Submit (time, bytes) jobs and return when each ended."""
    ended = [0.0] * len(jobs)

    def submit(number: int, num_bytes: int) -> None:
        def on_end() -> None:
            ended[number] = queue.now()

        link.submit(num_bytes, on_end)

    for number, (time_s, num_bytes) in enumerate(jobs):
        queue.at(
            time_s,
            Priority.ARRIVAL,
            lambda number=number, num_bytes=num_bytes: submit(number, num_bytes),
        )
    queue.run()
    return ended


@pytest.mark.parametrize("discipline", ["fair", "fifo"])
def test_a_transfer_alone_takes_latency_plus_bytes(discipline: str) -> None:
    """Both disciplines agree on one transfer."""
    queue = EventQueue()
    link = Link("a>b", queue, 0.5, 100.0, discipline)
    assert ends(link, queue, [(1.0, 200)]) == [pytest.approx(3.5)]
    assert link.seconds(200) == pytest.approx(2.5)


def test_contention_halves_the_bandwidth() -> None:
    """Two equal transfers at once take twice as long, and end together."""
    queue = EventQueue()
    link = Link("a>b", queue, 0.0, 100.0)
    assert ends(link, queue, [(0.0, 300), (0.0, 300)]) == [pytest.approx(6.0)] * 2


def test_the_rest_of_a_transfer_runs_at_full_speed_again() -> None:
    """200 B and 100 B: the small one ends at 2 s, the large one at 3 s."""
    queue = EventQueue()
    link = Link("a>b", queue, 0.0, 100.0)
    assert ends(link, queue, [(0.0, 200), (0.0, 100)]) == [
        pytest.approx(3.0),
        pytest.approx(2.0),
    ]


def test_a_late_transfer_takes_its_part_from_then_on() -> None:
    """100 B alone for 0.5 s, then both share; 500 B are moved in 5 s in all."""
    queue = EventQueue()
    link = Link("a>b", queue, 0.0, 100.0)
    done = ends(link, queue, [(0.0, 100), (0.5, 400)])
    assert done == [pytest.approx(1.5), pytest.approx(5.0)]


def test_fifo_serves_one_after_the_other() -> None:
    """The second waits for the first, latency included."""
    queue = EventQueue()
    link = Link("a>b", queue, 0.1, 100.0, "fifo")
    done = ends(link, queue, [(0.0, 100), (0.0, 100), (0.0, 100)])
    assert done == pytest.approx([1.1, 2.2, 3.3])


def test_an_unknown_discipline_is_refused() -> None:
    """The error names it."""
    with pytest.raises(ConfigError, match="lifo"):
        Link("a>b", EventQueue(), 0.0, 1.0, "lifo")


def test_events_of_one_moment_run_by_priority_then_in_order() -> None:
    """(time, priority, sequence), and a cancelled event does not run."""
    queue = EventQueue()
    seen: list[str] = []
    queue.at(1.0, Priority.WAKE, lambda: seen.append("wake"))
    queue.at(1.0, Priority.TRANSFER, lambda: seen.append("first"))
    queue.at(1.0, Priority.TRANSFER, lambda: seen.append("second"))
    queue.at(0.5, Priority.WAKE, lambda: seen.append("early"))
    queue.at(0.7, Priority.WAKE, lambda: seen.append("never")).cancel()
    queue.run()
    assert seen == ["early", "first", "second", "wake"]
