"""Two colocated servers in one pool: what one has computed, the other pulls.

The sessions are told to the left one; then rounds go to the right one, which forgets
all before each, so that every round pulls. It must answer right whatever becomes of the
left one or of the registry. A router knows of the two by the registry alone: after each
fault it must find them again, and it serves while the registry is gone.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sgl_tiered_workloads.cluster.members import COLOCATED, new_member
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.cluster.running import Cluster, etcd, router
from sgl_tiered_workloads.systems import MB, Tiers

from tests.cluster.cluster_support import (
    ROUTER_FLAGS,
    assert_right,
    emptied,
    play,
    settled,
    states,
    storm,
    struck,
)
from tests.e2e.e2e_support import wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

LEFT, RIGHT, REGISTRY = "left", "right", "etcd"
FLAGS = (*Tiers(64 * MB).flags, "--tiered-load-policy=always")
# Where make install puts it, or the system's.
UNPACKED = Path(__file__).parents[2] / ".cache/etcd/usr/bin/etcd"
ETCD = UNPACKED if UNPACKED.exists() else shutil.which("etcd")
REGISTRIES = (
    "file",
    pytest.param(
        "etcd",
        marks=pytest.mark.skipif(ETCD is None, reason="etcd is not installed"),
    ),
)


@pytest.fixture(scope="module", params=REGISTRIES)
def cluster(request, running, device, tmp_path_factory):
    """Left and right, and the registry where it is a process."""
    logs = tmp_path_factory.mktemp(f"peers-{request.param}")

    def make():
        ports = Ports()
        services = []
        url = f"file:{logs / 'pool'}"
        if request.param == "etcd":
            services = [etcd(ETCD, ports.take(), ports.take(), logs, logs / "etcd")]
            url = services[0].url + "/cluster-tests"
        members = []
        for name in (LEFT, RIGHT):
            flags = (*FLAGS, "--tiered-pool", url, "--tiered-pool-name", name)
            members.append(new_member(device, COLOCATED, name, ports, flags=flags))
        told = (*ROUTER_FLAGS, "--registry", url)
        front = router([], ports.take(), logs, flags=told)
        return Cluster(members, logs, services=services, behind=[front], ports=ports)

    return running(f"peers-{request.param}", make)


@pytest.fixture(autouse=True)
def whole(cluster):
    """Before and after each test both are in the pool, and nothing is left."""
    knows_the_other(cluster)
    settled(cluster)
    yield
    knows_the_other(cluster)
    settled(cluster)


def knows_the_other(cluster):
    """Wait until each of the two sees both in the registry."""
    for name in (LEFT, RIGHT):
        wait_until(
            lambda n=name: len(members_of(cluster, n)) == 2, f"{name} sees the other"
        )


def members_of(cluster, name):
    return states(cluster.servers[name], "tiered").get("pool", {}).get("members", [])


def told(cluster, plain):
    """Let the left one compute every session."""
    assert_right(plain, play([cluster.url(LEFT)], plain))


def pulled(played):
    """Return the prompt tokens that came from the peer."""
    return sum(record.cached_by_tier.get("peer", 0) for record in played.answered)


def stormed(cluster, plain, fault):
    """Play rounds at the right one, which forgets all before each."""
    right = cluster.servers[RIGHT]
    return storm(
        [cluster.url(RIGHT)], plain, fault, before_round=lambda: emptied(right)
    )


def pulls_again(cluster, plain):
    """Whether a round at the right one finds pages at the left one."""
    told(cluster, plain)
    emptied(cluster.servers[RIGHT])
    played = play([cluster.url(RIGHT)], plain)
    assert_right(plain, played)
    return pulled(played) > 0


def is_asked(cluster):
    """Whether the left one has served something of the pool since it was asked last."""
    pool = states(cluster.servers[RIGHT], "tiered").get("pool", {})
    return pool.get("pulls", {}).get("under_way", 0) > 0


def test_answers_are_plains(cluster, plain):
    """What is pulled gives the same answers as what is computed."""
    assert pulls_again(cluster, plain)


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_the_holder_struck(cluster, plain, fault):
    """The left one is gone, or silent, with pulls under way: the right one computes,
    and pulls again when it is back."""
    told(cluster, plain)

    def strike():
        wait_until(lambda: is_asked(cluster), "a pull is under way")
        if fault == "killed":
            cluster.kill(LEFT)
        else:
            cluster.pause(LEFT)
        wait_until(
            lambda: len(members_of(cluster, RIGHT)) == 1, "the left one's lease ends"
        )
        if fault == "killed":
            cluster.restart(LEFT)
        else:
            cluster.resume(LEFT)
        knows_the_other(cluster)

    played = stormed(cluster, plain, strike)
    assert_right(plain, played)
    assert not played.broken
    wait_until(lambda: pulls_again(cluster, plain), "the right one pulls again")


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_the_puller_struck(cluster, plain, fault):
    """The right one is gone, or silent, with pulls under way: the left one serves on,
    and what it lent is free again."""
    told(cluster, plain)

    def strike():
        wait_until(lambda: is_asked(cluster), "a pull is under way")
        if fault == "killed":
            cluster.kill(RIGHT)
        else:
            cluster.pause(RIGHT)
        wait_until(
            lambda: len(members_of(cluster, LEFT)) == 1, "the right one's lease ends"
        )
        assert_right(plain, play([cluster.url(LEFT)], plain))
        if fault == "killed":
            cluster.restart(RIGHT)
        else:
            cluster.resume(RIGHT)
        knows_the_other(cluster)

    played = stormed(cluster, plain, strike)
    # Nobody stands in front of the right one: its clients see it go.
    assert_right(plain, played, router_struck=True)
    wait_until(lambda: pulls_again(cluster, plain), "the right one pulls again")


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_the_registry_struck(cluster, plain, fault):
    """Without the registry both serve on; they find each other when it is back."""
    if REGISTRY not in cluster.services:
        pytest.skip("a file is the registry: there is no process to strike")
    told(cluster, plain)

    def strike():
        if fault == "killed":
            cluster.kill(REGISTRY)
        else:
            cluster.pause(REGISTRY)
        assert_right(plain, play([cluster.url(LEFT)], plain))
        assert_right(plain, play(cluster.routers, plain))
        if fault == "killed":
            cluster.restart(REGISTRY)
        else:
            cluster.resume(REGISTRY)
        knows_the_other(cluster)

    played = stormed(cluster, plain, strike)
    assert_right(plain, played)
    assert not played.broken
    wait_until(lambda: pulls_again(cluster, plain), "the right one pulls again")


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_server_behind_the_router_struck(cluster, plain, fault):
    """Its lease ends, so the router sends nothing there, and who waited there goes to
    the other one; a new start, or one that goes on, is found again."""
    if fault == "killed":
        ends = (lambda: cluster.kill(LEFT), lambda: cluster.restart(LEFT))
    else:
        ends = (lambda: cluster.pause(LEFT), lambda: cluster.resume(LEFT))
    assert_right(plain, struck(cluster, plain, LEFT, *ends))
