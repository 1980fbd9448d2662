"""One server, and its tiers in all kinds of trouble: the short form.

Faults are switched on and off while it serves. The long form has every combination.
"""

import shutil

import psutil
import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.sessions import replay

from tests.e2e.e2e_support import PATIENCE_S, sequential, settle, stats, wait_until
from tests.faults.fault_support import (
    CASE,
    Prompts,
    assert_same,
    dropped_to,
    fault_spec,
    faults,
    struck,
    switch_faults,
    under_fault,
    used_again,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

SHORT = [
    ("host", "host:fault=error@0.3/load"),
    ("host", "host:fault=error/store"),
    ("host", "host:fault=hang/for=1"),
    ("disk", "disk:fault=error@0.5"),
    ("disk", "disk:fault=partial@0.5/load,fault=corrupt@0.5"),
    ("disk", "disk:fault=hang"),
    ("disk", "disk:fault=full"),
    ("disk", "disk:delay=0.1..0.5"),
]


@pytest.fixture(scope="module")
def prompts():
    return Prompts()


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("disk") / "kv"


@pytest.fixture(scope="module")
def spec(model, disk):
    return fault_spec(model, disk, "faults")


@pytest.fixture(scope="module")
def plain(reference):
    return reference(CASE)


@pytest.fixture
def server(servers, spec, plain):
    return servers.get(spec)


@pytest.mark.parametrize(("tier", "text"), SHORT, ids=[text for _, text in SHORT])
def test_served_on(server, plain, prompts, tier, text):
    """Under each fault all requests are answered right; afterwards the tier is used."""
    under_fault(server, plain, prompts, tier, text)


def test_broken_loads_are_computed(server, plain, prompts):
    """Where no page can be copied to the device none is used, and no request fails."""
    server.flush_cache()
    requests = prompts.take(4)
    cold = dropped_to(server, "host", requests)
    before = stats(server)["counters"].get("tokens_repaired", 0)
    with faults(server, "host:fault=error/load"):
        assert_same(plain, cold, sequential(server, requests))
        state = stats(server)
        assert state["counters"]["tokens_repaired"] > before
        # After a few of them the tier is left alone.
        assert not state["media"]["host"]["usable"]
        assert state["counters"]["host_rests"] > 0
    used_again(server, plain, prompts, "host")


def test_chats_equal_plain_while_all_tiers_fail(server, plain):
    """The whole schedule of the gate, while a third of all operations fails."""
    server.flush_cache()
    text = "host:fault=error@0.3,seed=1;disk:fault=error@0.2,fault=corrupt@0.2"
    with faults(server, text):
        answers = sequential(server, replay(plain.chat))
        assert struck(server, "host") > 0
    result = check_equality(
        plain.chat,
        answers,
        page_size=CASE.page_size,
        spread=plain.spread,
        forced=False,
    )
    assert result.passed, result.summary()


def test_a_removed_directory(server, plain, prompts, disk):
    """Where the disk's directory is removed the server serves on, and uses it again."""
    server.flush_cache()
    requests = prompts.take(2)
    cold = dropped_to(server, "disk", requests)
    shutil.rmtree(disk)
    assert_same(plain, cold, sequential(server, requests))
    assert_same(plain, cold, sequential(server, requests))
    used_again(server, plain, prompts, "disk")
    wait_until(lambda: any(disk.glob("tiered-*")), "the directory is made again")


def test_nonsense_is_refused(server):
    """A fault that would test nothing is refused, and nothing is switched."""
    with pytest.raises(RuntimeError, match="HTTP 400"):
        switch_faults(server, "disk:fault=explode")
    assert stats(server)["media"]["disk"]["emulation"] == ""


def test_shutdown_while_the_disk_hangs(servers, server, prompts):
    """A disk whose I/O never ends does not keep the server from ending."""
    requests = prompts.take(1)
    dropped_to(server, "disk", requests)
    settle(server)
    switch_faults(server, "disk:fault=hang")
    (answer,) = sequential(server, requests)
    assert answer.error is None
    root = psutil.Process(server.pid)
    processes = [root, *root.children(recursive=True)]
    root.terminate()
    gone, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    servers.abandon()
    assert not alive, [process.cmdline()[:3] for process in alive]
    assert gone
