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
WITH = {
    ("holder", "killed"): "file",
    ("holder", "stopped"): "etcd",
    ("puller", "killed"): "etcd",
    ("puller", "stopped"): "file",
}
"""The registry that a fault is tried with; ``--full`` tries it with both."""


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


@pytest.fixture(params=["killed", "stopped"])
def fault(request):
    """What becomes of who is struck."""
    return request.param


@pytest.fixture(params=["holder", "puller"])
def side(request, cluster, fault):
    """Who is struck, where it is this registry's turn."""
    if not request.config.getoption("--full") and ETCD is not None:
        wanted = WITH[request.param, fault]
        if (wanted == "etcd") != (REGISTRY in cluster.services):
            pytest.skip(f"by default with the registry {wanted}; with both by --full")
    return request.param


@pytest.fixture(autouse=True)
def whole(request, cluster):
    """Before and after each test both are in the pool, and nothing is left."""
    if "side" in request.fixturenames:
        request.getfixturevalue("side")
    knows_the_other(cluster)
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


def struck_until(cluster, name, fault, meanwhile):
    """Strike a server or the registry, and heal it when ``meanwhile`` is over."""
    if fault == "killed":
        cluster.kill(name)
    else:
        cluster.pause(name)
    meanwhile()
    if fault == "killed":
        cluster.restart(name)
    else:
        cluster.resume(name)
    knows_the_other(cluster)


def test_a_server_struck(cluster, plain, side, fault):
    """One is gone, or silent, with pulls under way: the other one serves on, what it
    has lent is free again, and pulls go on when the first is back."""
    told(cluster, plain)
    name, other = (LEFT, RIGHT) if side == "holder" else (RIGHT, LEFT)

    def meanwhile():
        wait_until(
            lambda: len(members_of(cluster, other)) == 1, f"the lease of {name} ends"
        )
        if side == "puller":
            assert_right(plain, play([cluster.url(LEFT)], plain))

    def strike():
        wait_until(lambda: is_asked(cluster), "a pull is under way")
        struck_until(cluster, name, fault, meanwhile)

    played = stormed(cluster, plain, strike)
    # Nobody stands in front of the right one: its clients see it go.
    assert_right(plain, played, router_struck=side == "puller")
    assert side == "puller" or not played.broken
    wait_until(lambda: pulls_again(cluster, plain), "the right one pulls again")


def test_the_registry_struck(cluster, plain, fault):
    """Without the registry, pulls under way, both serve on until long after their
    leases; they are in the pool and find each other when it is back."""
    if REGISTRY not in cluster.services:
        pytest.skip("a file is the registry: there is no process to strike")
    told(cluster, plain)

    def is_alone(name):
        pool = states(cluster.servers[name], "tiered")["pool"]
        return pool["trouble"] != "" and pool["lease_left_s"] == 0

    def meanwhile():
        for name in (LEFT, RIGHT):
            wait_until(lambda n=name: is_alone(n), f"the lease of {name} is over")
        assert_right(plain, play([cluster.url(LEFT)], plain))
        assert_right(plain, play(cluster.routers, plain))

    def strike():
        wait_until(lambda: is_asked(cluster), "a pull is under way")
        struck_until(cluster, REGISTRY, fault, meanwhile)

    played = stormed(cluster, plain, strike)
    assert_right(plain, played)
    assert not played.broken
    wait_until(lambda: pulls_again(cluster, plain), "the right one pulls again")
    for name in (LEFT, RIGHT):
        wait_until(
            lambda n=name: (
                states(cluster.servers[n], "tiered")["pool"]["trouble"] == ""
            ),
            f"{name} has no trouble",
        )


def test_a_server_behind_the_router_struck(cluster, plain, fault):
    """Its lease ends, so the router sends nothing there, and who waited there goes to
    the other one; a new start, or one that goes on, is found again."""
    if fault == "killed":
        ends = (lambda: cluster.kill(LEFT), lambda: cluster.restart(LEFT))
    else:
        ends = (lambda: cluster.pause(LEFT), lambda: cluster.resume(LEFT))
    assert_right(plain, struck(cluster, plain, LEFT, *ends))
