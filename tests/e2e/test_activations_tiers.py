"""Pages kept as activations on their way through the tiers below, on a real server.

Down with an offload, up from host memory and from disk, and over a restart: the answer
stays that of the computed prompt, and the link is paid for activations.
"""

import contextlib
import urllib.parse

import numpy as np
import pytest
from sgl_tiered_workloads.systems import MB, Device, Tiers, tiered_spec

from tests.e2e.e2e_support import PATIENCE_S, drop, edge, settle, stats
from tests.e2e.test_activations import LAYERKV, mha  # noqa: F401 - a fixture
from tests.e2e.test_layerkv_waves import FLAGS, PAGE, POOL_TOKENS

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

NUM_PAGES, ANSWER_TOKENS = 12, 12


@pytest.fixture(scope="module", params=[0.5, pytest.param(1, marks=pytest.mark.full)])
def share(request):
    """Of the pages that are kept as activations."""
    return request.param


@pytest.fixture(scope="module")
def spec(mha, share, tmp_path_factory):  # noqa: F811 - the fixture
    """A server with host memory and a disk below."""
    disk = tmp_path_factory.mktemp("disk") / "tier"
    device = Device(mha, POOL_TOKENS, PAGE, FLAGS)
    flags = (*LAYERKV, f"--tiered-activations={share}")
    tiers = Tiers(32 * MB, disk, 64 * MB)
    env = {"SGL_TIERED_ALLOW_FAULTS": "1"}
    return tiered_spec(device, tiers, f"act-tiers-{share}", flags, env)


def prompt():
    """Twelve pages, and a token that is computed in any case."""
    generator = np.random.default_rng(7)
    return generator.integers(10, 200, NUM_PAGES * PAGE + 1).tolist()


def ask(server):
    """Return answer, tokens by tier and the decision of one request."""
    answer = server.generate(prompt(), ANSWER_TOKENS)
    rid = urllib.parse.quote(answer["meta_info"]["id"], safe="")
    told = server.get(f"/tiered/explain/{rid}")
    return answer["output_ids"], told


@contextlib.contextmanager
def faults(server, text):
    """Switch faults of tiers on, and off again."""
    for query in (text, ""):
        encoded = urllib.parse.urlencode({"emulate": query})
        server.post(f"/tiered/faults?{encoded}", {}, PATIENCE_S)
        if query:
            yield


def check(told, source, share):
    """All pages came, from one tier; return how many of them as activations."""
    assert told["tokens"] == {source: NUM_PAGES * PAGE, "computed": 1}, told
    decision = told["decision"]
    kinds = {"rebuild": 0, "load": 0}
    for span in decision["spans"]:
        kinds[span["action"]] += span["pages"]
    num_act = kinds["rebuild"]
    assert num_act + kinds["load"] == NUM_PAGES
    # What had no room while it was captured is KV.
    assert NUM_PAGES * share / 2 < num_act <= NUM_PAGES * share
    assert f"; rebuild {num_act} pages: {num_act} from {source}" in decision["reason"]
    return num_act


def test_activations_go_down_and_come_up(servers, spec, share):
    """Through host memory, through the disk, and over a restart: one answer."""
    server = servers.get(spec)
    computed, _ = ask(server)
    settle(server)
    before = stats(server)
    drop(server, "device")
    from_host, told = ask(server)
    num_act = check(told, "host", share)
    assert from_host == computed
    after = settle(server)
    # Of a page half as many bytes cross the link as activations.
    whole = after["media"]["host"]["slot_bytes"]
    moved = edge(after, "host->device", "bytes") - edge(before, "host->device", "bytes")
    assert moved == (NUM_PAGES - num_act) * whole + num_act * whole / 2
    drop(server, "device", "host")
    from_disk, told = ask(server)
    assert check(told, "disk", share) == num_act
    assert from_disk == computed
    settle(server)
    server = servers.restart(spec)
    again, told = ask(server)
    assert check(told, "disk", share) == num_act
    assert again == computed
    assert sum(stats(server)["cache"]["pages_bad"].values()) == 0


@pytest.mark.parametrize(
    ("tier", "fault"),
    [
        ("host", "host:fault=error/load/times=1"),
        ("disk", "disk:fault=error/load"),
        ("disk", "disk:fault=corrupt/load"),
    ],
)
def test_activations_that_come_broken_are_computed(servers, spec, tier, fault):
    """A read that fails, and one whose bytes are wrong: the answer stays the same.

    A fault of the host may strike once only: layers would go over it as well.
    """
    server = servers.get(spec)
    server.flush_cache()
    computed, _ = ask(server)
    settle(server)
    drop(server, "device", *(["host"] if tier == "disk" else []))
    before = stats(server)
    with faults(server, fault):
        again, told = ask(server)
        after = stats(server)
    struck = [
        sum(one["media"][tier]["faults_struck"].values()) for one in (before, after)
    ]
    assert struck[1] > struck[0]
    assert again == computed
    if tier == "disk":
        # Known before the request ran: it was computed as it came.
        assert told["tokens"]["computed"] > 1, told
    else:
        # Computed into the pages that were waiting for it, under the request.
        name = "tokens_repaired"
        repaired = after["counters"][name] - before["counters"].get(name, 0)
        assert repaired == NUM_PAGES * PAGE
    settle(server)
    # What was computed instead is kept, and right where it lies.
    drop(server, "device")
    again, _ = ask(server)
    assert again == computed
