"""Every ``--schedule-policy`` of SGLang over tiers: the order changes, answers do not.

Prompts of three families wait for two places, with their pages on disk. Plain SGLang
answers them one at a time. ``tests/e2e/test_schedule_policies.py`` has more on ``lpm``,
``tests/e2e/test_orders.py`` has our own orders.
"""

import re

import pytest
from sgl_tiered_workloads.server import ServerStartError
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec, tiered_spec

from tests.e2e.e2e_support import edge, pinned, settle
from tests.scenarios.scenario_support import (
    PAGE,
    PLAIN_POOL,
    at_once,
    body,
    cached,
    forget,
    prompt,
    same,
    start_plain,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

POLICIES = (
    "lpm",
    "random",
    "fcfs",
    "dfs-weight",
    "lof",
    "priority",
    "routing-key",
    "hrrn",
    "shortest-prefill-first",
)
FLAGS = (
    "--max-running-requests=2",
    "--chunked-prefill-size=128",
    "--sleep-on-idle",
)
NUM_FAMILIES, NUM_MEMBERS = 3, 5
SHARED_PAGES = 10


def requests():
    """Return prompts that share their beginnings by fives, and what is asked."""
    prompts, bodies = [], []
    for member in range(NUM_MEMBERS):
        for family in range(NUM_FAMILIES):
            shared = prompt(1000 + family, SHARED_PAGES * PAGE)
            own = prompt(1100 + 10 * family + member, (2 + 3 * member) * PAGE + family)
            prompts.append(shared + own)
            answer = 4 + 3 * ((family + member) % 4)
            key = f"k{family % 2}"
            bodies.append(body(prompts[-1], answer, routing_key=key))
    return prompts, bodies


@pytest.fixture(scope="module")
def plain(servers, model):
    """Plain SGLang's answers, one request at a time."""
    server = servers.get(plain_spec(Device(model, PLAIN_POOL, PAGE, FLAGS[2:]), "p"))
    answers = [server.post("/generate", one) for one in requests()[1]]
    servers.stop()
    return answers


def spec(model, disk, policy):
    """Return a server with tiers and a policy."""
    tiers = Tiers(1 * MB, disk, 64 * MB)
    flags = (
        f"--schedule-policy={policy}",
        "--tiered-load-policy=always",
        "--tiered-disk-admission=all",
        "--tiered-staging-size=8MB",
    )
    return tiered_spec(Device(model, 1024, PAGE, FLAGS), tiers, policy, flags)


def test_these_are_all_policies(servers, model, tmp_path):
    """A policy that SGLang comes to offer is to be tried here."""
    with pytest.raises(ServerStartError) as refused:
        servers.get(spec(model, tmp_path, "none"))
    choices = re.search(r"choose from ([^)]*)\)", refused.value.log_tail)
    assert choices is not None, refused.value.log_tail
    found = {name.strip(" '\"") for name in choices[1].split(",")}
    assert found == set(POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy(servers, model, plain, tmp_path, policy):
    """All at once, first cold, then from disk: plain's answers, and nothing pinned."""
    try:
        server = servers.restart(spec(model, tmp_path, policy))
    except ServerStartError:
        flags = (*FLAGS, f"--schedule-policy={policy}")
        device = Device(model, PLAIN_POOL, PAGE, flags)
        start_plain(servers, plain_spec(device, f"plain-{policy}"))
        servers.stop()
        raise
    prompts, bodies = requests()
    same(prompts, plain, at_once(server, bodies))
    before = settle(server)
    for _ in range(2):
        forget(server, "disk")
        answers = at_once(server, bodies)
        same(prompts, plain, answers)
        # At least one of each family; a read that takes too long is not waited for.
        tiers = [set(cached(answer)) for answer in answers]
        assert sum("disk" in one for one in tiers) >= NUM_FAMILIES
    after = settle(server)
    assert edge(after, "disk->host") > edge(before, "disk->host")
    assert pinned(after) == 0
    servers.stop()
