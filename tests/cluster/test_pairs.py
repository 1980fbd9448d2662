"""A prefill, a decode and a colocated server behind two routers, in every caching mode.

Requests go to the pair; where one of it is struck, to the colocated server.
After each fault the pair serves again. Bytes go over what ``auto`` finds here.
"""

from __future__ import annotations

import pytest
from sgl_tiered_workloads.cluster.members import (
    COLOCATED,
    DECODE,
    PREFILL,
    new_member,
    tiered,
)
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.cluster.running import Cluster, router
from sgl_tiered_workloads.systems import MB

from tests.cluster.cluster_support import (
    ROUTER_FLAGS,
    answered_by,
    assert_right,
    play,
    settled,
    storm,
    struck,
    transferred,
    under_way,
    up,
)
from tests.e2e.e2e_support import wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

MODES = (0, 1, 2, 3)
HOST_BYTES = 64 * MB
ROUTERS = ("router0", "router1")
SIDES = (PREFILL, DECODE)


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: f"caching{mode}")
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def cluster(running, device, mode, tmp_path_factory):
    """The three servers are named after their kinds."""
    logs = tmp_path_factory.mktemp(f"caching{mode}")

    def make():
        ports = Ports()
        handover = tiered(mode, f"file:{logs / 'pool'}", HOST_BYTES)
        members = [
            new_member(device, PREFILL, PREFILL, ports, handover=handover),
            new_member(device, DECODE, DECODE, ports, handover=handover),
            new_member(device, COLOCATED, COLOCATED, ports),
        ]
        words = [each.word(f"http://127.0.0.1:{each.port}") for each in members]
        routers = [
            router(words, ports.take(), logs, flags=ROUTER_FLAGS, name=name)
            for name in ROUTERS
        ]
        return Cluster(members, logs, behind=routers, ports=ports)

    return running(f"caching{mode}", make)


@pytest.fixture(autouse=True)
def whole(cluster, plain):
    """Before and after each test all is there, the pair serves and nothing is left."""
    settled(cluster)
    yield
    record = next(iter(plain.by_key.values()))
    wait_until(lambda: answered_by(cluster, record)[0] == DECODE, "the pair serves")
    settled(cluster)


def test_answers_are_plains(cluster, plain, mode):
    """Without a fault every session's answers are a plain server's. What is cached is
    not sent: the second round sends as much as the first, or less from mode 2 on."""
    sent = [transferred(cluster)]
    for _ in range(2):
        played = play(cluster.routers, plain)
        assert_right(plain, played)
        assert not played.broken
        sent.append(transferred(cluster))
    first, second = sent[1] - sent[0], sent[2] - sent[1]
    assert first > 0
    if mode >= 2:
        assert second < first
    else:
        assert second == first


@pytest.mark.parametrize("side", SIDES)
def test_killed_under_load(cluster, plain, side):
    """One of the pair dies with transfers under way, and comes back."""
    played = struck(
        cluster, plain, side, lambda: cluster.kill(side), lambda: cluster.restart(side)
    )
    assert_right(plain, played)


@pytest.mark.parametrize("side", SIDES)
def test_stopped_under_load(cluster, plain, side):
    """One of the pair falls silent with transfers under way, and goes on when its
    requests have long been answered elsewhere."""
    played = struck(
        cluster, plain, side, lambda: cluster.pause(side), lambda: cluster.resume(side)
    )
    assert_right(plain, played)


def test_the_other_kind_killed(cluster, plain):
    """The colocated server dies while nothing needs it: the pair serves on."""
    cluster.kill(COLOCATED)
    try:
        played = play(cluster.routers, plain)
        assert_right(plain, played)
        assert not played.broken
    finally:
        cluster.restart(COLOCATED)


def test_a_router_killed(cluster, plain):
    """Clients go to the other replica; the pair ends what the dead one had begun."""
    url, other = cluster.routers

    def fault():
        wait_until(lambda: under_way(url, PREFILL) > 0, "the router has work")
        cluster.kill(ROUTERS[0])
        wait_until(lambda: under_way(other, DECODE) > 0, "the other router has work")
        cluster.restart(ROUTERS[0])
        wait_until(lambda: up(url, DECODE), "the first one knows the pair again")

    played = storm(cluster.routers, plain, fault)
    assert_right(plain, played, router_struck=True)
