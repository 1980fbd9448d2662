"""A prefill, a decode and a colocated server behind two routers, in every caching mode.

Requests go to the pair; where one of it is struck, to the colocated server.
After each fault the pair serves again. Bytes go over what ``auto`` finds here.

Where a path is cut, the decode server reaches the prefill server by two forwarders: one
before its bootstrap port (heartbeats, and the question where its rank is), one before
the port of its rank (requests for KV, aborts). What goes the other way, bytes of KV and
their status, has ports that SGLang draws on the decode server, and is not cut.
"""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace

import pytest
from sgl_tiered_workloads.cluster.members import (
    COLOCATED,
    DECODE,
    PREFILL,
    new_member,
    tiered,
)
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.cluster.running import (
    Cluster,
    forwarder,
    read_json,
    router,
)
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
from tests.cluster.turns_support import as_their_mode_says
from tests.e2e.disagg_support import Pair
from tests.e2e.e2e_support import PATIENCE_S, wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

MODES = (0, 1, 2, 3)
HOST_BYTES = 64 * MB
ROUTERS = ("router0", "router1")
BOOTSTRAP, RANK = "bootstrap", "rank"
LOST = "Lost connection with prefill instance"
"""What SGLang's decode server logs after two heartbeats without an answer."""
FAULTS = (
    "path dropped",
    "path silent",
    "prefill killed",
    "decode killed",
    "prefill stopped",
    "decode stopped",
    "colocated killed",
    "router killed",
)
TURNS = {
    0: ("path dropped", "decode killed", "prefill stopped"),
    1: ("path silent", "prefill killed", "decode stopped"),
    2: ("path dropped", "prefill killed", "decode stopped", "colocated killed"),
    3: (
        "path silent",
        "prefill killed",
        "decode killed",
        "prefill stopped",
        "router killed",
    ),
}
"""The faults of each mode by default; ``--full`` has all in each."""


class Wired(Cluster):
    """A cluster whose decode server reaches the prefill server's rank by a forwarder.

    Only while it is ``wired``: a forwarder hides whether somebody is behind it.
    """

    def stop(self):
        """End everything."""
        self.unwire()
        super().stop()

    def wire(self):
        """Register a forwarder's port in place of the prefill rank's own."""
        entrance, rank = self.ports.take(), self._route(0)
        self._rank_port = rank["rank_port"]
        path = forwarder(entrance, self._rank_port, self.log_dir, RANK)
        self.services[RANK] = path
        path.start()
        self._register(entrance)

    def register_directly(self):
        """Register the prefill rank's own port again."""
        self._register(self._rank_port)

    def unwire(self):
        """End the forwarder, if there is one."""
        path = self.services.pop(RANK, None)
        if path is not None:
            path.stop(grace_s=1.0)

    def _register(self, port):
        rank, known = self._route(0), self._route(-1)
        fields = {
            **{f"{name}_size": 1 for name in _PARALLEL},
            **{f"{name}_rank": 0 for name in _PARALLEL},
            "rank_ip": rank["rank_ip"],
            "rank_port": port,
            "page_size": known["page_size"],
            "kv_cache_dtype": known["kv_cache_dtype"],
            "decode_allocation_policy": known["decode_allocation_policy"],
        }
        request = urllib.request.Request(
            self._bootstrap + "/route",
            data=json.dumps(fields).encode(),
            headers={"Content-Type": "application/json"},
            method="PUT",
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S):
            pass
        assert self._route(0)["rank_port"] == port

    @property
    def _bootstrap(self):
        """Address of the bootstrap server itself."""
        return f"http://127.0.0.1:{self.members[PREFILL].bootstrap_port}"

    def _route(self, number):
        """Ask the bootstrap server: with 0 where the rank is, with -1 what it is."""
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank")
        query = "&".join(f"{name}={number}" for name in (*names, "target_pp_rank"))
        return read_json(f"{self._bootstrap}/route?{query}")


_PARALLEL = ("attn_tp", "attn_cp", "attn_dp", "pp", "system_dp")


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: f"caching{mode}")
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def entrance():
    """The port before the bootstrap server, as decode servers are told it."""
    return Ports().take()


@pytest.fixture(scope="module")
def cluster(running, device, mode, entrance, tmp_path_factory):
    """The three servers are named after their kinds."""
    logs = tmp_path_factory.mktemp(f"caching{mode}")

    def make():
        ports = Ports()
        handover = tiered(mode, f"file:{logs / 'pool'}", HOST_BYTES)
        # The planner may find an answer of a page not worth a load, or a return.
        always = ("--tiered-load-policy", "always", "--tiered-pd-returns", "always")
        flags = always if mode == 3 else ()
        pair = [
            new_member(device, kind, kind, ports, handover=handover, flags=flags)
            for kind in (PREFILL, DECODE)
        ]
        members = [*pair, new_member(device, COLOCATED, COLOCATED, ports)]
        path = forwarder(entrance, pair[0].bootstrap_port, logs, BOOTSTRAP)
        told = [replace(pair[0], bootstrap_port=entrance), *members[1:]]
        words = [each.word(f"http://127.0.0.1:{each.port}") for each in told]
        routers = [
            router(words, ports.take(), logs, flags=ROUTER_FLAGS, name=name)
            for name in ROUTERS
        ]
        return Wired(members, logs, services=[path], behind=routers, ports=ports)

    return running(f"caching{mode}", make)


@pytest.fixture(params=FAULTS)
def fault(request, mode):
    """A fault whose turn it is in this mode."""
    if request.param not in TURNS[mode] and not request.config.getoption("--full"):
        pytest.skip("in this mode by --full only")
    return request.param


@pytest.fixture(autouse=True)
def whole(request, cluster, plain):
    """After each test all is there, the pair serves and nothing is left."""
    if "fault" in request.fixturenames:
        request.getfixturevalue("fault")
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


def test_a_session_turn_by_turn(cluster, turns, mode, entrance):
    """Answers are plain's, and either side has and sends just what its mode says."""
    pair = Pair(cluster.servers[PREFILL], cluster.servers[DECODE], entrance)
    as_their_mode_says(pair, mode, turns)


def test_under_a_fault(cluster, plain, fault):
    """One of the pair, its path or a router is gone or silent, with transfers under
    way: requests go elsewhere, and the pair serves again when it is back."""
    what, _, how = fault.partition(" ")
    if what == "path":
        assert_right(plain, with_path_cut(cluster, plain, how))
    elif what == "router":
        assert_right(plain, with_router_killed(cluster, plain), router_struck=True)
    elif what == "colocated":
        # Nothing needs it: nobody notices.
        cluster.kill(COLOCATED)
        try:
            played = play(cluster.routers, plain)
            assert_right(plain, played)
            assert not played.broken
        finally:
            cluster.restart(COLOCATED)
    elif how == "killed":
        played = struck(
            cluster,
            plain,
            what,
            lambda: cluster.kill(what),
            lambda: cluster.restart(what),
        )
        assert_right(plain, played)
    else:
        played = struck(
            cluster,
            plain,
            what,
            lambda: cluster.pause(what),
            lambda: cluster.resume(what),
        )
        assert_right(plain, played)


def with_path_cut(cluster, plain, how):
    """Cut decode's way to prefill until decode takes prefill for lost.

    It asks for the way again then: so it is led by the forwarder before, and not after.
    """
    url, decode = cluster.routers[0], cluster.servers[DECODE]
    record = next(iter(plain.by_key.values()))

    def until_lost(strike):
        def num_lost():
            return decode.log_path.read_text(errors="replace").count(LOST)

        before = num_lost()
        strike()
        wait_until(lambda: num_lost() > before, "prefill is taken for lost")

    def serves():
        return answered_by(cluster, record)[0] == DECODE

    def cut():
        for path in (BOOTSTRAP, RANK):
            cluster.kill(path) if how == "dropped" else cluster.pause(path)

    def fault():
        wait_until(lambda: under_way(url, DECODE) > 0, "the decode server has work")
        until_lost(cut)
        cluster.register_directly()
        for path in (BOOTSTRAP, RANK):
            cluster.restart(path) if how == "dropped" else cluster.resume(path)

    wait_until(serves, "the decode server knows the prefill server")
    until_lost(lambda: cluster.kill(BOOTSTRAP))
    cluster.wire()
    cluster.restart(BOOTSTRAP)
    try:
        wait_until(serves, "the decode server has found the way")
        return storm(cluster.routers, plain, fault)
    finally:
        cluster.unwire()


def with_router_killed(cluster, plain):
    """Clients go to the other replica; the pair ends what the dead one had begun."""
    url, other = cluster.routers

    def fault():
        wait_until(lambda: under_way(url, PREFILL) > 0, "the router has work")
        cluster.kill(ROUTERS[0])
        wait_until(lambda: under_way(other, DECODE) > 0, "the other router has work")
        cluster.restart(ROUTERS[0])
        wait_until(lambda: up(url, DECODE), "the first one knows the pair again")

    return storm(cluster.routers, plain, fault)
