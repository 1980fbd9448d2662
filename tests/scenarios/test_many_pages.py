"""Many tenants and many pages, with metrics on.

A real server computes some ten prompts a second here, so a test of two minutes takes
500 salts, not 100,000; the index itself is measured with millions elsewhere.
"""

import pytest
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec, tiered_spec

from tests.e2e.e2e_support import edge, pinned, settle
from tests.scenarios.scenario_support import (
    PAGE,
    PLAIN_POOL,
    at_once,
    body,
    cached,
    counter,
    forget,
    prompt,
    same,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

NUM_SALTS = 500
NUM_PAGES = 3
TOKENS = prompt(900, NUM_PAGES * PAGE + 1)
CHECKED = range(0, NUM_SALTS, 50)
FLAGS = ("--sleep-on-idle", "--enable-metrics")
AT_ONCE = 25


def fill(server):
    """Ask one prompt under every salt."""
    for first in range(0, NUM_SALTS, AT_ONCE):
        salts = range(first, first + AT_ONCE)
        answers = at_once(server, [body(TOKENS, 1, cache_salt=f"t{n}") for n in salts])
        for answer in answers:
            assert cached(answer) == {}, "a tenant saw another one's pages"


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_many_salts(servers, model, tmp_path, tier):
    """Each tenant finds its own pages below the device, and no one else's."""
    spec = plain_spec(Device(model, PLAIN_POOL, PAGE, FLAGS), "plain-salts")
    server = servers.get(spec)
    server.post("/generate", body(TOKENS))
    want = server.post("/generate", body(TOKENS))
    servers.stop()
    host = 64 * MB if tier == "host" else 2 * MB
    tiers = Tiers(host, tmp_path, 64 * MB)
    flags = (
        "--tiered-load-policy=always",
        "--tiered-disk-admission=all",
        "--tiered-staging-size=8MB",
    )
    device = Device(model, 2048, PAGE, FLAGS)
    server = servers.restart(tiered_spec(device, tiers, f"salts-{tier}", flags))
    fill(server)
    forget(server, tier)
    state = settle(server)
    assert state["occupancy"][tier]["used"] >= NUM_SALTS * NUM_PAGES
    answers = [
        server.post("/generate", body(TOKENS, cache_salt=f"t{n}")) for n in CHECKED
    ]
    assert [cached(a) for a in answers] == [{tier: NUM_PAGES * PAGE}] * len(answers)
    same([TOKENS] * len(answers), [want] * len(answers), answers)
    state = settle(server)
    assert pinned(state) == 0
    assert edge(state, "host->device") == len(answers) * NUM_PAGES
    # What the metrics say is what the statistics say.
    assert counter(server, "sglang:prompt_tokens_total") > NUM_SALTS * len(TOKENS)
    servers.stop()
