"""Who may ask the router for what: paths by keys by flags, origins, hosts."""

from __future__ import annotations

import itertools

import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.router.access import Hosts
from sgl_tiered.router.config import RouterConfig, parse_instance
from tests.unit.router.fake_servers import cluster, fast, scenario

CLIENT, ADMIN = "client-key", "admin-key"
KEYS = {"none": None, "wrong": "wrong-key", "client": CLIENT, "admin": ADMIN}
FLAGS = {
    "none": {},
    "api": {"api_key": CLIENT},
    "admin": {"admin_api_key": ADMIN},
    "both": {"api_key": CLIENT, "admin_api_key": ADMIN},
}
OPEN = {"GET /health": 200, "HEAD /health": 200}
FOR_CLIENTS = {
    "POST /generate": 200,
    "POST /v1/completions": 200,
    "POST /v1/chat/completions": 200,
    "GET /v1/models": 200,
    "GET /model_info": 200,
    "GET /get_model_info": 200,
    "GET /metrics": 200,
    "GET /nothing": 404,
    "DELETE /generate": 405,
}
FOR_OPERATORS = {
    "GET /router/state": 200,
    "POST /router/instances/a/drain": 200,
    "POST /router/instances/a/resume": 200,
    "POST /router/instances": 400,  # without saying which
    "DELETE /router/instances/nobody": 404,
}
CLIENTS_MAY = {
    "none": set(KEYS),
    "api": {"client"},
    "admin": set(KEYS),
    "both": {"client", "admin"},
}
OPERATORS_MAY = {"none": set(KEYS), "api": set(), "admin": {"admin"}, "both": {"admin"}}
"""Where only clients have a key, nobody is an operator."""


def bearing(key):
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def asked(c, call, headers):
    """Return the status of a call, and what it says."""
    method, path = call.split(" ")
    body = {"input_ids": [1, 2, 3]} if method == "POST" else None
    async with c.client.request(method, path, json=body, headers=headers) as response:
        return response.status, await response.text()


@pytest.mark.parametrize("flags", FLAGS)
@scenario
async def test_who_may_call_what(flags):
    """Every path with every key under every set of flags; what is refused is counted,
    and reaches no server."""
    num_refused = 0
    async with cluster("a", fast(**FLAGS[flags])) as c:
        c["a"].told = dict.fromkeys(("/model_info", "/get_model_info"), "{}")
        for word, key in KEYS.items():
            for call, status in OPEN.items():
                assert (await asked(c, call, bearing(key)))[0] == status
            for call, status in FOR_CLIENTS.items():
                allowed = word in CLIENTS_MAY[flags]
                seen = await asked(c, call, bearing(key))
                assert seen[0] == (status if allowed else 401), (call, word, seen)
                num_refused += not allowed
            for call, status in FOR_OPERATORS.items():
                allowed = word in OPERATORS_MAY[flags]
                is_client = word == "client" and "api_key" in FLAGS[flags]
                refused = 403 if is_client else 401
                seen = await asked(c, call, bearing(key))
                assert seen[0] == (status if allowed else refused), (call, word, seen)
                num_refused += not allowed
        reasons = ("key", "admin_key")
        name = "sgl_tiered_router_refusals_total"
        counted = [await c.metric(name, reason=reason) for reason in reasons]
        assert sum(counted) == num_refused
        assert len(c["a"].seen) == 3 * len(CLIENTS_MAY[flags])


@scenario
async def test_every_path_is_in_the_matrix():
    """Who adds one says here who may call it."""
    calls = {*OPEN, *FOR_CLIENTS, *FOR_OPERATORS} - {"GET /nothing", "DELETE /generate"}
    listed = {tuple(call.split(" ")) for call in calls}
    async with cluster("a") as c:
        served = c.router.routes
    named = {(m, p.replace("{name}", "a")) for m, p in served if m != "HEAD"}
    assert named == {(m, p.replace("/nobody", "/a")) for m, p in listed if m != "HEAD"}


ORIGINS = {
    "same": None,
    "other port": "http://127.0.0.1:1",
    "other site": "https://elsewhere.example",
    "null": "null",
    "broken": "http://[",
}


@scenario
async def test_a_page_that_gave_its_name_our_address_reaches_nothing():
    """Its origin is the host that it calls, which is no reason to trust it."""
    async with cluster("a") as c:
        c["a"].told = dict.fromkeys(("/model_info", "/get_model_info"), "{}")
        sent = {"Origin": "http://elsewhere.example:1", "Host": "elsewhere.example:1"}
        for call in FOR_CLIENTS | FOR_OPERATORS:
            assert (await asked(c, call, sent))[0] == 403, call


@scenario
async def test_a_page_of_another_origin_reaches_nothing():
    """A browser brings no key where none is needed: it must not be enough."""
    async with cluster("a") as c:
        c["a"].told = dict.fromkeys(("/model_info", "/get_model_info"), "{}")
        for word, origin in ORIGINS.items():
            sent = {"Origin": origin or f"http://127.0.0.1:{c.router.port}"}
            for call, status in (FOR_CLIENTS | FOR_OPERATORS).items():
                seen = await asked(c, call, sent)
                assert seen[0] == (status if word == "same" else 403), (call, word)
                assert word == "same" or "without a browser" in seen[1]
            assert (await asked(c, "GET /health", sent))[0] == 200
        assert len(c["a"].seen) == 3
        num = (len(ORIGINS) - 1) * len(FOR_CLIENTS | FOR_OPERATORS)
        name = "sgl_tiered_router_refusals_total"
        assert await c.metric(name, reason="origin") == num


@scenario
async def test_the_servers_key_is_sent_to_nobody_whom_no_flag_names():
    """Not to a host that an operator adds, nor where an instance points to."""
    config = fast(admin_api_key=ADMIN, instance_api_key="inner")
    async with cluster("ab", config, key=ADMIN, given="a") as c:
        for url in (
            f"http://localhost:{c['b'].port}",
            f"http://[::1]:{c['b'].port}",
            "http://10.1.2.3:30000",
            "http://elsewhere.example",
            f"{c['a'].url},name=x,events=tcp://10.1.2.3:5557",
        ):
            code, _, told = await c.post({"instance": url}, "/router/instances")
            assert code == 400
            assert "--allow-host" in told["error"]["message"]
        name = "sgl_tiered_router_refusals_total"
        assert await c.metric(name, reason="host") == 5
        assert set((await c.state())["instances"]) == {"a"}
        assert c["b"].asked == []
        # A redirection is no answer of the instance's.
        c["a"].redirects_to = c["b"].url
        async with c.client.get("/v1/models") as response:
            assert response.status == 302
        assert c["b"].asked == []


@pytest.mark.parametrize(
    ("allowed", "url", "is_let_in"),
    [
        ((), "http://127.0.0.1:1", True),
        ((), "http://[::1]:1", True),
        ((), "http://localhost:1,events=ipc:///tmp/x", True),
        ((), "http://given:9", True),
        ((), "http://GIVEN:9", True),
        ((), "http://2130706433:1", False),  # 127.0.0.1 for some
        ((), "http://localhost.example:1", False),
        ((), "http://10.0.0.1:1", False),
        ((), "http://127.0.0.1:1,events=tcp://10.0.0.1:5", False),
        ((), "http://127.0.0.1:1,events=tcp://[::1]:5,replay=tcp://h:6", False),
        (("10.0.0.0/8",), "http://10.0.0.1:1", True),
        (("10.0.0.0/8",), "http://11.0.0.1:1", False),
        (("10.0.0.1",), "http://10.0.0.1:1", True),
        (("fd00::/8",), "http://[fd00::1]:1", True),
        (("[fd00::1]:5",), "http://[fd00::1]:5", True),
        (("[fd00::1]:5",), "http://[fd00::1]:6", False),
        (("h",), "http://h:1", True),
        (("h",), "http://h.example:1", False),
        (("h:2",), "http://h:1", False),
        (("h:2",), "http://h:2", True),
    ],
)
def test_hosts_that_may_be_added(allowed, url, is_let_in) -> None:
    """What flags name, and this machine."""
    given = [parse_instance("http://given:1")]
    hosts = Hosts(RouterConfig(allow_hosts=allowed), given)
    assert bool(hosts.trouble(parse_instance(url))) is not is_let_in


def test_hosts_with_a_key_are_named_ones() -> None:
    """This machine has other users; who was in the registry stays known."""
    hosts = Hosts(RouterConfig(instance_api_key="k"), [])
    here, there = parse_instance("http://127.0.0.1:1"), parse_instance("http://h:1")
    assert hosts.trouble(here)
    assert hosts.trouble(there)
    hosts.name(["http://[", "http://h:7", "", "http://\N{ACCOUNT OF}.com"])
    assert not hosts.trouble(there)
    hosts = Hosts(RouterConfig(instance_api_key="k", allow_hosts=("127.0.0.1",)), [])
    assert not hosts.trouble(here)


@pytest.mark.parametrize(
    "word", ["", "http://h:1", "a b/c", "h:x", "u@h", "10.0.0.0/x"]
)
def test_a_host_that_is_none_is_refused(word) -> None:
    """At the start, in a sentence."""
    with pytest.raises(ConfigError, match="--allow-host"):
        Hosts(RouterConfig(allow_hosts=(word,)), [])


def test_keys_that_open_nothing_are_refused() -> None:
    """An empty one, and one for both."""
    for keys in itertools.product(("", "k"), repeat=2):
        with pytest.raises(ConfigError, match="key-file"):
            RouterConfig(api_key=keys[0], admin_api_key=keys[1])
