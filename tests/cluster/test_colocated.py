"""Two colocated servers behind two routers: killed, stopped, cut off, and back again.

One server stands behind a forwarder, so that the path to it can be cut while it runs.
"""

from __future__ import annotations

import asyncio
import urllib.error

import pytest
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.cluster.members import COLOCATED, new_member
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.cluster.running import Cluster, forwarder, router
from sgl_tiered_workloads.harness.control import answer_with_swapped_pages, swappable

from tests.cluster.cluster_support import (
    PAGE,
    ROUTER_FLAGS,
    Played,
    accounts,
    answered_by,
    assert_right,
    play,
    settled,
    storm,
    struck,
    under_way,
    up,
)
from tests.e2e.e2e_support import wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

LEFT, RIGHT, PATH = "left", "right", "path"
ROUTERS = ("router0", "router1")


@pytest.fixture(scope="module")
def cluster(running, device, tmp_path_factory):
    """Left behind a forwarder, right in the open, two routers that share nothing."""
    ports = Ports()
    logs = tmp_path_factory.mktemp("colocated")
    members = [new_member(device, COLOCATED, name, ports) for name in (LEFT, RIGHT)]
    entrance = ports.take()
    path = forwarder(entrance, members[0].port, logs, PATH)
    words = [
        members[0].word(f"http://127.0.0.1:{entrance}"),
        members[1].word(f"http://127.0.0.1:{members[1].port}"),
    ]
    routers = [
        router(words, ports.take(), logs, flags=ROUTER_FLAGS, name=name)
        for name in ROUTERS
    ]

    def make():
        return Cluster(members, logs, services=[path], behind=routers, ports=ports)

    return running("colocated", make)


@pytest.fixture(autouse=True)
def whole(cluster):
    """After each test everything runs and nothing is left over."""
    yield
    settled(cluster)


def test_answers_are_plains(cluster, plain):
    """Without a fault every session's answers are a plain server's, and a prefix is
    found where it was computed."""
    played = play(cluster.routers, plain, num_rounds=2)
    assert_right(plain, played)
    assert not played.broken
    again = played.answered[len(plain.by_key) :]
    assert sum(record.cached_tokens for record in again) > 0


def test_the_comparison_can_fail(cluster, plain):
    """Two answers, each with a page of the other's prompt in it, turn it red."""
    pair = swappable(list(plain.by_key.values()), PAGE)
    assert pair is not None
    first, second, page = pair

    async def run():
        async with StreamingClient(cluster.routers[0]) as client:
            return await answer_with_swapped_pages(client, first, second, page, PAGE)

    wrong = asyncio.run(run())
    assert all(record.error is None for record in wrong)
    with pytest.raises(AssertionError, match="RED"):
        assert_right(plain, Played(answered=wrong))


def test_killed_under_load(cluster, plain):
    """A server is killed with requests under way: those that had not begun to stream go
    to the other one, and it serves again after its restart."""
    played = struck(
        cluster, plain, LEFT, lambda: cluster.kill(LEFT), lambda: cluster.restart(LEFT)
    )
    assert_right(plain, played)


def test_stopped_under_load(cluster, plain):
    """A server falls silent with requests under way, and goes on later."""
    played = struck(
        cluster, plain, LEFT, lambda: cluster.pause(LEFT), lambda: cluster.resume(LEFT)
    )
    assert_right(plain, played)


def test_a_port_dropped(cluster, plain):
    """The path to a server refuses connections while the server itself runs on."""
    played = struck(
        cluster, plain, LEFT, lambda: cluster.kill(PATH), lambda: cluster.restart(PATH)
    )
    assert_right(plain, played)
    assert cluster.servers[LEFT].exit_code() is None


def test_a_port_silent(cluster, plain):
    """The path to a server swallows all that is sent."""
    played = struck(
        cluster, plain, LEFT, lambda: cluster.pause(PATH), lambda: cluster.resume(PATH)
    )
    assert_right(plain, played)


def test_a_router_killed(cluster, plain):
    """Clients of a killed router go to the other replica, which knows nothing of it;
    what had not begun to stream is asked again there, and nothing is left running."""
    url = cluster.routers[0]

    def fault():
        wait_until(lambda: under_way(url, LEFT) > 0, "the router has work")
        cluster.kill(ROUTERS[0])
        other = cluster.routers[1]
        wait_until(
            lambda: under_way(other, LEFT) + under_way(other, RIGHT) > 0,
            "the other router has work",
        )
        cluster.restart(ROUTERS[0])

    played = storm(cluster.routers, plain, fault)
    assert played.failed_over or played.broken
    assert_right(plain, played, router_struck=True)


def test_a_router_stopped(cluster, plain):
    """A router that is stopped and goes on has lost nothing."""
    url = cluster.routers[0]

    def fault():
        wait_until(lambda: under_way(url, LEFT) > 0, "the router has work")
        cluster.pause(ROUTERS[0])
        idle = [cluster.servers[name] for name in (LEFT, RIGHT)]
        wait_until(
            lambda: all(accounts(server)[:2] == (0, 0) for server in idle),
            "the servers have answered what they had",
        )
        cluster.resume(ROUTERS[0])

    played = storm(cluster.routers, plain, fault)
    assert_right(plain, played)
    assert not played.broken


def test_killed_between_until_nobody_is_left(cluster, plain):
    """A server is killed while nothing runs, and nobody notices; with both gone a
    request is refused, and it is served when they are back."""
    url = cluster.routers[0]
    cluster.kill(RIGHT)
    try:
        played = play(cluster.routers, plain, num_rounds=2)
        assert_right(plain, played)
        assert not played.broken
        cluster.kill(LEFT)
        for name in (LEFT, RIGHT):
            wait_until(lambda n=name: not up(url, n), f"{name} is taken for down")
        with pytest.raises(urllib.error.HTTPError) as told:
            answered_by(cluster, next(iter(plain.by_key.values())))
        assert told.value.code == 503
    finally:
        for name in (RIGHT, LEFT):
            cluster.restart(name)
    assert_right(plain, play(cluster.routers, plain))
