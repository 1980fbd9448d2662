"""Two ranks with sizes that nobody gave, and one rank on the folder of two."""

import os
from dataclasses import replace

import pytest
from sgl_tiered_workloads.server import ServerStartError
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec, tiered_spec

from tests.e2e.e2e_support import pinned, settle
from tests.scenarios.scenario_support import (
    PAGE,
    PLAIN_POOL,
    body,
    cached,
    forget,
    prompt,
    same,
)

CORES = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.e2e,
    pytest.mark.skipif(len(CORES) < 2, reason="each rank needs a core"),
]

NUM_PAGES = 20
PROMPTS = [prompt(950 + number, NUM_PAGES * PAGE + 7) for number in range(3)]
FLAGS = ("--sleep-on-idle", "--disable-overlap-schedule")
ALWAYS = ("--tiered-load-policy=always", "--tiered-disk-admission=all")


def on_two_ranks(spec):
    """Return the same server on two ranks, each on a core of its own."""
    env = {**spec.env, "SGLANG_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[1]}"}
    flags = (*spec.flags, "--tp-size=2")
    return replace(spec, name=f"{spec.name}-tp2", flags=flags, env=env)


def ask(server, tier):
    """Ask the prompts with their pages on one tier."""
    answers = []
    for tokens in PROMPTS:
        forget(server, tier)
        answers.append(server.post("/generate", body(tokens)))
    return answers


@pytest.fixture(scope="module")
def plain(servers, model):
    """Plain's answers, cold and again, with two ranks and with one."""
    spec = plain_spec(Device(model, PLAIN_POOL, PAGE, FLAGS), "plain-ranks")
    found = {}
    for number, one in ((2, on_two_ranks(spec)), (1, spec)):
        server = servers.get(one)
        found[number] = [ask(server, "device"), ask(server, "device")]
        servers.stop()
    return found


def test_two_ranks_with_default_sizes(servers, model, plain):
    """Without a size given, two ranks serve from their host tier as plain does."""
    flags = (*FLAGS, "--radix-cache-backend", "tiered", *ALWAYS[:1])
    device = Device(model, 2048, PAGE, flags)
    server = servers.get(on_two_ranks(plain_spec(device, "default-sizes")))
    same(PROMPTS, plain[2][0], ask(server, "device"))
    answers = ask(server, "host")
    same(PROMPTS, plain[2][1], answers)
    assert [cached(a) for a in answers] == [{"host": NUM_PAGES * PAGE}] * len(PROMPTS)
    assert pinned(settle(server)) == 0
    servers.stop()


def test_another_number_of_ranks_on_one_folder(servers, model, plain, tmp_path):
    """Two ranks find nothing of one rank's pages; then one rank is refused in a
    sentence, and what two ranks left is found by two."""
    tiers = Tiers(16 * MB, tmp_path, 64 * MB)
    one = tiered_spec(Device(model, 2048, PAGE, FLAGS), tiers, "folder", ALWAYS)
    from_disk = [{"disk": NUM_PAGES * PAGE}] * len(PROMPTS)
    for number, spec in ((1, one), (2, on_two_ranks(one))):
        server = servers.get(spec)
        cold = ask(server, "device")
        assert [cached(answer) for answer in cold] == [{}] * len(PROMPTS)
        same(PROMPTS, plain[number][0], cold)
        warm = ask(server, "disk")
        assert [cached(answer) for answer in warm] == from_disk
        same(PROMPTS, plain[number][1], warm)
        servers.stop()
    with pytest.raises(ServerStartError, match="--tp-size 2 keeps its pages in it"):
        servers.get(one)
    server = servers.restart(on_two_ranks(one))
    warm = ask(server, "disk")
    assert [cached(answer) for answer in warm] == from_disk
    same(PROMPTS, plain[2][1], warm)
    servers.stop()
