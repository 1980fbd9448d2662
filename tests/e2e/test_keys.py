"""The operator's key on a real server: what changes it, or tells of its tenants."""

import json
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec

from tests.e2e.e2e_support import PATIENCE_S, Case

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CALLS = ("POST /tiered/drop?tier=host", "GET /tiered/explain?last=1")
ADMIN = "operators-key"


@pytest.fixture
def server(servers, model):
    """A server that only operators need a key for."""
    flags = ("--admin-api-key", ADMIN, "--enable-metrics")
    spec = tiered_spec(Case(16).device(model), Tiers(64 * MB), "keys", flags)
    # By its command line: a fork has imported prometheus_client before SGLang chose
    # where several processes count, so that none of this one's counts would be shown.
    return servers.get(replace(spec, fork=False))


def asked(server, call, **headers):
    """Return the status of a call, and what it answers."""
    method, path = call.split(" ")
    request = urllib.request.Request(server.url + path, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_only_the_operator_drops_and_explains(server):
    """As SGLang's own ``/flush_cache``; requests and the stats need no key."""
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
    assert server.post("/generate", body)["meta_info"]["prompt_tokens"] == 3
    key = {"Authorization": f"Bearer {ADMIN}"}
    for call in (*CALLS, "POST /flush_cache"):
        assert asked(server, call)[0] == 401, call
        assert asked(server, call, Authorization="Bearer wrong")[0] == 401, call
        assert asked(server, call, **key)[0] == 200, call
    assert asked(server, "GET /tiered/stats")[0] == 200


def test_a_browsers_page_drops_nothing(server):
    """Though the browser may have the key; and SGLang's metrics count it."""
    page = {"Origin": "https://elsewhere.example"}
    key = {"Authorization": f"Bearer {ADMIN}"}
    for call in CALLS:
        status, told = asked(server, call, **key, **page)
        assert status == 403, call
        assert "without a browser" in json.dumps(told)
    metrics = asked(server, "GET /metrics")[1]
    assert 'sgl_tiered:http_refusals_total{reason="origin"} 2.0' in metrics
