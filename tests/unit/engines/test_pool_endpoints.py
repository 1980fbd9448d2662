"""What a server of a pool writes into its entry, and what a router makes of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from sgl_tiered.engines.sglang.pooled.endpoints import endpoints_of
from sgl_tiered.pool.membership import InstanceKind, Member, member_fields, member_from
from sgl_tiered.router.feed import FeedSource
from sgl_tiered.router.wanted import config_of


def args(events=None, **more):
    told = None if events is None else json.dumps(events)
    return SimpleNamespace(**{"port": 30000, "kv_events_config": told, **more})


def zmq_events(**more):
    return {"publisher": "zmq", **more}


def test_a_prefill_server_is_known_from_its_entry_alone() -> None:
    """As a registry keeps it: kind, address, events, bootstrap port."""
    events = zmq_events(
        endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558", topic="kv"
    )
    told = endpoints_of(
        args(
            events,
            host="0.0.0.0",
            disaggregation_mode="prefill",
            disaggregation_bootstrap_port=9001,
        ),
        "10.0.0.5",
    )
    member = Member("p0", 3, 1, InstanceKind.PREFILL, told)
    config = config_of(member_from(json.loads(json.dumps(member_fields(member)))))
    assert (config.name, config.kind) == ("p0", "prefill")
    assert config.url == "http://10.0.0.5:30000"
    assert config.bootstrap_port == 9001
    assert config.sources == (
        FeedSource("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5558", "kv"),
    )


@pytest.mark.parametrize(
    ("host", "pool_host", "expected"),
    [
        ("127.0.0.1", "10.0.0.5", "http://127.0.0.1:30000"),
        ("0.0.0.0", "10.0.0.5", "http://10.0.0.5:30000"),
        (None, "127.0.0.1", "http://127.0.0.1:30000"),
        ("::", "fd00::1", "http://[fd00::1]:30000"),
        ("::1", "127.0.0.1", "http://[::1]:30000"),
    ],
)
def test_the_address_is_one_that_others_reach(host, pool_host, expected) -> None:
    """All addresses are the pool's own."""
    assert endpoints_of(args(host=host), pool_host)["http"] == expected
    tls = endpoints_of(args(host=host, ssl_certfile="c"), pool_host)["http"]
    assert tls == expected.replace("http", "https")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (None, {"events": "none"}),
        ({"publisher": "null"}, {"events": "none"}),
        (zmq_events(), {"events": "tcp://h:5557"}),
        # without a star SGLang connects, and nobody can subscribe
        (zmq_events(endpoint="tcp://10.0.0.9:1"), {"events": "none"}),
        (
            zmq_events(endpoint="tcp://127.0.0.1:1", bind=True),
            {"events": "tcp://127.0.0.1:1"},
        ),
        (zmq_events(endpoint="tcp://[::1]:1"), {"events": "tcp://[::1]:1"}),
        (zmq_events(endpoint="tcp://[::]:1"), {"events": "tcp://h:1"}),
        (zmq_events(endpoint="ipc:///run/x"), {"events": "none"}),
        (
            zmq_events(endpoint="tcp://*:1", replay_endpoint="tcp://127.0.0.1:2"),
            {"events": "tcp://h:1", "replay": "tcp://127.0.0.1:2"},
        ),
    ],
)
def test_events_are_told_where_a_subscriber_can_connect(events, expected) -> None:
    """And none is a word: the router need not ask."""
    told = endpoints_of(args(events, host="h"), "h")
    assert {name: told[name] for name in told if name != "http"} == expected
    assert config_of(Member("a", 0, 1, InstanceKind.COLOCATED, told)).name == "a"


def test_a_colocated_server_has_no_bootstrap_port() -> None:
    """SGLang has a default for all servers."""
    told = endpoints_of(
        args(disaggregation_mode="null", disaggregation_bootstrap_port=8998), "h"
    )
    assert "bootstrap" not in told
