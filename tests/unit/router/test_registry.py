"""A router with a pool's registry: instances come, drain and go with their leases.

Its replicas follow each other, and one of them leads. The servers are fakes, the
registry is a real file.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import asynccontextmanager

import aiohttp
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.pool.local_registry import LocalRegistry
from sgl_tiered.pool.membership import InstanceKind
from sgl_tiered.router import discovery, following
from sgl_tiered.router.config import RouterConfig, parse_instance
from sgl_tiered.router.front import Router
from tests.unit.router.fake_servers import (
    FakePublisher,
    answer,
    begin,
    cluster,
    event,
    fast,
    hang,
    scenario,
    stored,
    until,
)

PROMPT = {"input_ids": list(range(16))}
STREAM = {**PROMPT, "stream": True}
TOKENS = list(range(100, 124))
COLOCATED = InstanceKind.COLOCATED
LEASE_S = 600.0
"""Of the servers: they are ended by hand."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pool"


@pytest.fixture
def pool(path):
    """The registry of the servers."""
    return LocalRegistry(path, ttl_s=LEASE_S)


def following_pool(path, **more):
    """Return settings of a router that follows a registry."""
    return fast(registry=f"file:{path}", lease_s=1.0, **more)


def joined(pool, server, kind=COLOCATED, **endpoints):
    """Take a lease for a fake server."""
    told = {"http": server.url, "events": "none", **endpoints}
    return pool.join(server.name, kind, told)


def names(router):
    return sorted(each.name for each in router.fleet)


def is_up(router, name):
    instance = router.fleet.get(name)
    return instance is not None and instance.is_up


def registry_of(state):
    return state["registry"]


@asynccontextmanager
async def replica(config, *instances):
    """Give another router, and a client of it."""
    router = Router(config, [parse_instance(each) for each in instances], seed=0)
    await router.start()
    try:
        url = f"http://127.0.0.1:{router.port}"
        async with aiohttp.ClientSession(url) as client:
            yield router, client
    finally:
        await router.close()


async def told(client, method, path, body=None):
    """Return an answer's body."""
    async with client.request(method, path, json=body) as response:
        assert response.status < 300, await response.text()
        return await response.json()


@scenario
async def test_servers_are_found_drained_and_removed_by_their_leases(path, pool):
    """Beside those that flags name; a new start is another one."""
    async with cluster("abp", following_pool(path), given="a") as c:
        router = c.router
        assert names(router) == ["a"]
        lease = joined(pool, c["b"])
        joined(pool, c["p"], InstanceKind.PREFILL, bootstrap="9001")
        await until(lambda: names(router) == ["a", "b", "p"])
        await until(lambda: all(each.is_up for each in router.fleet))
        prefill = router.fleet.get("p").config
        assert (prefill.kind, prefill.bootstrap_port) == ("prefill", 9001)
        shown = (await c.state())["instances"]
        sources = {name: each["source"] for name, each in shown.items()}
        assert sources == {"a": "flag", "b": "registry", "p": "registry"}
        served = {(await c.post({"text": f"{n}"}))[2]["served_by"] for n in range(4)}
        assert served == {"a", "b"}
        assert pool.drain(lease)
        await until(lambda: router.fleet.get("b").is_draining)
        told_b = (await c.post({}, "/router/instances/b/resume"))[2]
        assert told_b == {"name": "b", "up": True, "draining": True, "noted": True}
        for n in range(3):
            assert (await c.post({"text": f"{n}"}))[2]["served_by"] == "a"
        pool.leave(lease)
        await until(lambda: names(router) == ["a", "p"])
        joined(pool, c["b"])
        await until(lambda: is_up(router, "b"))
        assert not router.fleet.get("b").is_draining
        assert (await c.state())["instances"]["b"]["incarnation"] == 2


@scenario
async def test_with_its_lease_goes_what_it_held_and_who_waits_there(path, pool):
    """Requests before their first byte go elsewhere, a stream goes on to its end."""
    publisher = FakePublisher(has_replay=True)
    source = publisher.source
    told_a = {"events": source.endpoint, "replay": source.replay_endpoint}
    try:
        async with cluster("ab", following_pool(path), given="") as c:
            router, tree = c.router, c.router.fleet.trees["colocated"]
            lease = joined(pool, c["a"], **told_a)
            await publisher.publish(stored(TOKENS, 4))
            await until(lambda: len(tree) == 6)
            await until(lambda: is_up(router, "a"))
            go_on = asyncio.Event()

            async def slow(server, request, body):
                response = await begin(request)
                await response.write(event("first"))
                await go_on.wait()
                await response.write(event("last"))
                return response

            c["a"].scripted.append(slow)
            c["a"].behaviour = hang(b"")
            async with c.client.post("/generate", json=STREAM) as begun_at_a:
                assert begun_at_a.headers["X-Tiered-Instance"] == "a"
                waiting = asyncio.create_task(c.post(STREAM))
                await until(lambda: len(c["a"].seen) == 2)
                joined(pool, c["b"])
                await until(lambda: is_up(router, "b"))
                pool.leave(lease)
                code, headers, _ = await waiting
                assert (code, headers["X-Tiered-Instance"]) == (200, "b")
                assert names(router) == ["b"]
                assert {each.instance for each in tree.holders} == {"b"}
                go_on.set()
                assert (await begun_at_a.content.read()).endswith(event("last"))
    finally:
        await publisher.close()


@scenario
async def test_a_new_start_takes_nothing_over(path, pool):
    """Its lease follows the former one's at once: an incarnation with an empty part."""
    publisher = FakePublisher(has_replay=True)
    source = publisher.source
    told_a = {"events": source.endpoint, "replay": source.replay_endpoint}
    try:
        async with cluster("a", following_pool(path), given="") as c:
            tree = c.router.fleet.trees["colocated"]
            joined(pool, c["a"], **told_a)
            await until(lambda: c.router.fleet.get("a"))
            await publisher.publish(stored(TOKENS, 4))
            await until(lambda: len(tree) == 6)
            first = c.router.fleet.get("a")
            joined(pool, c["a"])
            await until(lambda: c.router.fleet.get("a") not in (None, first))
            assert len(tree) == 0
            assert (first.holders, first.tasks) == ([], [])
    finally:
        await publisher.close()


@scenario
async def test_an_instance_of_a_flag_stays_when_its_lease_ends(path, pool):
    """It may serve outside of the pool; what was known of its process is forgotten."""
    async with cluster("a", following_pool(path)) as c:
        lease = pool.join("its-name-there", COLOCATED, {"http": c["a"].url})
        await until(lambda: c.router.following.shown("a")["incarnation"] == 1)
        await c.post(PROMPT)
        tree = c.router.fleet.trees["colocated"]
        assert len(tree) == 4
        pool.leave(lease)
        await until(lambda: len(tree) == 0)
        assert names(c.router) == ["a"]
        await until(lambda: is_up(c.router, "a"))
        assert (await c.post(PROMPT))[0] == 200


@pytest.mark.parametrize("url", ["redis://h:1", "file:", "etcd://h", "etcd://h:x/p"])
def test_a_url_that_names_no_registry_is_refused_at_once(url):
    """It is the flag that is wrong, and no registry that may come."""
    with pytest.raises(ConfigError, match=r"--registry: .* write local, file:PATH or"):
        RouterConfig(registry=url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("etcd://127.0.0.1:1/p", "does not answer"),
        ("file:{folder}/missing/pool", "missing/pool"),
        ("file:{folder}/other.json", "is not one"),
    ],
)
@scenario
async def test_a_registry_that_cannot_be_used_is_said_and_the_flags_serve(
    url, says, tmp_path, caplog
):
    """Once in the log, and in the state as long as it lasts."""
    (tmp_path / "other.json").write_text('{"version": 1, "what": "else"}')
    url = url.format(folder=tmp_path)
    with caplog.at_level(logging.WARNING, "sgl_tiered.router.discovery"):
        async with cluster("a", fast(registry=url)) as c:
            assert (await c.post(PROMPT))[0] == 200

            async def is_told():
                return says in registry_of(await c.state())["trouble"]

            await until(is_told)
            shown = registry_of(await c.state())
            assert url in shown["trouble"]
            assert (shown["leader"], shown["leads"]) == (None, False)
            assert await c.metric("sgl_tiered_router_registry_up") == 0
            added = {"instance": "http://127.0.0.1:1,name=late,events=none"}
            code, _, answered = await c.post(added, "/router/instances")
            assert (code, answered["noted"]) == (201, False)
            assert registry_of(await c.state())["unnoted"] == ["late"]
    warnings = [each.message for each in caplog.records]
    assert len([each for each in warnings if url in each]) == len(set(warnings)) >= 1


@scenario
async def test_what_was_changed_meanwhile_is_noted_when_the_registry_comes(tmp_path):
    """And members that were there all the time are found."""
    path = tmp_path / "late" / "pool"
    async with cluster("ab", following_pool(path), given="a") as c:
        await c.post({}, "/router/instances/a/drain")
        assert registry_of(await c.state())["unnoted"] == ["a"]
        path.parent.mkdir()
        joined(LocalRegistry(path, ttl_s=LEASE_S), c["b"])
        await until(lambda: names(c.router) == ["a", "b"])

        async def is_noted():
            shown = registry_of(await c.state())
            return shown["unnoted"] == [] and shown["trouble"] == ""

        await until(is_noted)
        assert c.router.fleet.get("a").is_draining
        async with replica(following_pool(path), f"{c['a'].url},name=a") as (other, _):
            assert other.fleet.get("a").is_draining
        assert await c.metric("sgl_tiered_router_registry_up") == 1


@scenario
async def test_a_registry_that_goes_away_takes_nobody_along(path, pool):
    """Nor one that comes back and has forgotten everything."""
    async with cluster("ab", following_pool(path), given="") as c:
        for name in "ab":
            joined(pool, c[name])
        await until(lambda: names(c.router) == ["a", "b"])
        await until(lambda: all(each.is_up for each in c.router.fleet))
        whole = path.read_text()
        path.write_text("not ours")

        async def is_in_trouble():
            return registry_of(await c.state())["trouble"] != ""

        await until(is_in_trouble)
        assert names(c.router) == ["a", "b"]
        assert (await c.post(PROMPT))[0] == 200
        path.write_text(whole)
        await until(lambda: c.router.following.state()["trouble"] == "")
        path.unlink()
        forgotten = c.router.following.state
        await until(lambda: forgotten()["forgotten"] == ["a", "b"])
        assert names(c.router) == ["a", "b"]
        assert (await c.post(PROMPT))[0] == 200
        joined(pool, c["a"])
        await until(lambda: forgotten()["forgotten"] == ["b"])
        assert names(c.router) == ["a", "b"]
        await told(c.client, "DELETE", "/router/instances/b")
        await until(lambda: c.router.following.state()["leads"])
        c.router.following._discovery._tidy()
        own = LocalRegistry(path.with_name("pool.routers"))
        assert set(own.notes()) == {"b"}, "it is served on where nobody has removed it"
        assert names(c.router) == ["a"]


@scenario
async def test_a_registry_that_hangs_does_not_hold_up_requests(path, monkeypatch):
    """All its calls wait in threads, from the first on."""
    is_asked, go_on = threading.Event(), threading.Event()

    def hanging(url, part="", **more):
        del url, more
        is_asked.set()
        go_on.wait()
        return LocalRegistry(path.with_name(f"pool{part}"))

    monkeypatch.setattr(discovery, "open_registry", hanging)
    monkeypatch.setattr(following, "_START_S", 0.05)
    async with cluster("a", following_pool(path)) as c:
        try:
            assert is_asked.is_set()
            for _ in range(3):
                assert (await c.post(PROMPT))[0] == 200
            assert not registry_of(await c.state())["leads"]
        finally:
            go_on.set()
        await until(lambda: c.router.following.state()["leads"])


@scenario
async def test_replicas_follow_each_others_changes(path, pool):
    """Added, drained, resumed and removed at one, so at all, and at those to come."""
    async with cluster("abm", following_pool(path, name="one"), given="a") as c:
        joined(pool, c["m"])
        flag = f"{c['a'].url},name=a"
        config = following_pool(path, name="two")
        async with replica(config, flag) as (other, client):
            both = (c.router, other)
            added = {"instance": f"{c['b'].url},name=b,events=none"}
            answered = await told(client, "POST", "/router/instances", added)
            assert answered == {"name": "b", "up": True, "noted": True}
            await until(lambda: all(names(each) == ["a", "b", "m"] for each in both))
            for name in "abm":
                await told(client, "POST", f"/router/instances/{name}/drain", {})
                await until(lambda n=name: c.router.fleet.get(n).is_draining)
            for name in "abm":
                await told(c.client, "POST", f"/router/instances/{name}/resume", {})
                await until(lambda n=name: not other.fleet.get(n).is_draining)
            for name in "bma":
                await told(c.client, "DELETE", f"/router/instances/{name}")
                await until(lambda n=name: other.fleet.get(n) is None)
            async with replica(following_pool(path, name="three"), flag) as (third, _):
                assert names(third) == []
            again = {"instance": flag}
            await told(client, "POST", "/router/instances", again)
            await until(lambda: names(c.router) == ["a"])
            joined(pool, c["m"])  # another start
            await until(lambda: all(names(each) == ["a", "m"] for each in both))


@scenario
async def test_one_replica_leads_and_takes_away_what_is_over(path, pool):
    """Another one does when it is gone, also without a word."""
    own = LocalRegistry(path.with_name("pool.routers"))
    async with cluster("am", following_pool(path, name="one"), given="a") as c:
        await until(lambda: c.router.following.state()["leads"])
        async with replica(following_pool(path, name="two")) as (other, client):

            async def knows_both():
                shown = registry_of(await told(client, "GET", "/router/state"))
                return shown["replicas"] == ["one", "two"]

            await until(knows_both)
            shown = registry_of(await told(client, "GET", "/router/state"))
            assert (shown["leader"], shown["leads"]) == ("one", False)
            leader = {"replica": "one"}
            assert await c.metric("sgl_tiered_router_leader", **leader) == 1
            assert await c.metric("sgl_tiered_router_leads") == 1
            lease = joined(pool, c["m"])
            await until(lambda: names(c.router) == ["a", "m"])
            for name in "am":
                await told(c.client, "POST", f"/router/instances/{name}/drain", {})
            assert set(own.notes()) == {"a", "m"}
            pool.leave(lease)
            await until(lambda: set(own.notes()) == {"a"})  # its start is over
            await told(c.client, "POST", "/router/instances/a/resume", {})
            await until(lambda: own.notes() == {})
            # As if it was killed: it renews no more, and says nothing.
            silenced = c.router.following._discovery
            silenced._own = Silent(silenced._own)
            await until(lambda: other.following.state()["leads"])
            assert other.following.state()["leader"] == "two"
            assert not c.router.following.state()["leads"]


@scenario
async def test_a_thread_that_fails_begins_again(path, pool, monkeypatch):
    """It is told and counted, and what comes later is found all the same."""
    real, failed = discovery.Discovery._see, []

    def see(self, view):
        if not failed:
            failed.append(view)
            raise AssertionError("nobody thinks of this")
        real(self, view)

    monkeypatch.setattr(discovery.Discovery, "_see", see)
    async with cluster("a", following_pool(path), given="") as c:
        joined(pool, c["a"])
        await until(lambda: is_up(c.router, "a"))
        name = "sgl_tiered_router_task_failures_total"
        assert await c.metric(name, task="registry_watch") == 1
        assert not c.router.following.state()["trouble"]


@scenario
async def test_a_note_of_another_replica_brings_no_stranger(path):
    """Each replica asks its own flags who may be added; it says whom it left out."""
    stranger = {"instance": "http://10.1.2.3:30000,name=s,events=none"}
    lax = following_pool(path, allow_hosts=("10.0.0.0/8",), name="lax")
    async with (
        replica(lax) as (one, client),
        replica(following_pool(path, name="strict")) as (two, _),
    ):
        adding = asyncio.create_task(
            told(client, "POST", "/router/instances", stranger)
        )
        await until(lambda: names(one) == ["s"])
        await until(lambda: two.following.state()["left_out"])
        assert "--allow-host" in two.following.state()["left_out"][0]
        assert names(two) == []
        await one.fleet.remove(one.fleet.get("s"))
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)


class Silent:
    """A registry that a replica cannot reach any more."""

    def __init__(self, registry):
        self._registry = registry

    def __getattr__(self, name):
        negatives = {"renew": False, "lead": False, "erase": False}
        return lambda *args: negatives.get(name)


@scenario
async def test_a_leader_that_goes_is_followed_at_once(path):
    """It gives its lease back when it is closed."""
    config = following_pool(path, name="two")
    config_one = fast(registry=f"file:{path}", lease_s=LEASE_S, name="one")
    async with replica(config_one) as (one, _):
        await until(lambda: one.following.state()["leads"])
        async with replica(config) as (two, _):
            await until(lambda: two.following.state()["leader"] == "one")
            await one.close()
            await until(lambda: two.following.state()["leads"])


@scenario
async def test_two_replicas_of_one_name_are_told(path):
    """The first one stays out, and goes on serving."""
    config = following_pool(path, name="same")
    async with replica(config) as (one, _), replica(config) as (two, _):
        await until(lambda: "--name" in one.following.state()["trouble"])
        await until(lambda: two.following.state()["leads"])
        await until(lambda: not one.following.state()["leads"])


def test_a_wrong_name_is_refused() -> None:
    """It would be part of keys."""
    with pytest.raises(ConfigError, match="--name"):
        RouterConfig(name="a/b")


@pytest.mark.parametrize("name", ["a", "[::1]:30000", "a_5b_b", "_", "h:1", "x" * 50])
def test_any_name_of_an_instance_can_be_that_of_a_note(name) -> None:
    """And is read back; no two are one."""
    key = discovery._key(name)
    assert set(key) <= set("abcdefhx0123456789-_.:")
    assert discovery._name(key) == name


@scenario
async def test_without_a_registry_all_of_it_is_this_routers_own():
    """Nothing is noted, and answers say nothing of it."""
    async with cluster("a") as c:
        assert (await c.state())["registry"] is None
        c["a"].behaviour = answer
        drained = await told(c.client, "POST", "/router/instances/a/drain", {})
        assert drained == {"name": "a", "under_way": 0}
        assert (await c.post(PROMPT))[0] == 503
        await told(c.client, "POST", "/router/instances/a/resume", {})
        assert (await c.post(PROMPT))[0] == 200
