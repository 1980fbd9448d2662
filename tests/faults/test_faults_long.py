"""The long form: every tier and every fault, kills, full and removed disks.

Run by ``make test-full PART=faults``.
"""

import os
import shutil
import signal
import subprocess
import threading

import psutil
import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.server import ServerStartError, SglangServer, free_port
from sgl_tiered_workloads.sessions import replay

from sgl_tiered.core.ids import TierId
from sgl_tiered.serving.emulation import DISK_KINDS, MEMORY_KINDS
from sgl_tiered.testing.fault_switch import WRONG_BYTES
from tests.e2e.e2e_support import (
    PATIENCE_S,
    edge,
    open_loop,
    pinned,
    sequential,
    settle,
    stats,
    wait_until,
)
from tests.faults.fault_support import (
    CASE,
    HOST_BYTES,
    Prompts,
    assert_same,
    dropped_to,
    fault_spec,
    faults,
    small_filesystem,
    under_fault,
    used_again,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.faults_long]

NUM_KILLS = 10


def combinations(tier):
    """Return the text of every fault that a tier must survive, in either direction.

    Wrong bytes on a tier of memory are not among them: memory is trusted, and the
    negative control of the gate shows that such bytes would be seen.
    """
    memory = tier is not TierId.DISK
    kinds = set(MEMORY_KINDS) - WRONG_BYTES if memory else set(DISK_KINDS)
    texts = []
    for kind in sorted(kinds):
        # A copy in memory cannot be waited for elsewhere, so that it hangs for a time.
        lasting = "/for=3" if memory and kind == "hang" else ""
        ways = ["/store"] if kind == "full" else ["/load", "/store", "@0.3"]
        texts += [f"{tier.label}:fault={kind}{way}{lasting}" for way in ways]
    slow = "delay=0.01..0.05" if memory else "delay=0.2..1.0"
    return [*texts, f"{tier.label}:{slow}", f"{tier.label}:delay=1.0@0.05"]


def cases(tier):
    texts = combinations(tier)
    return pytest.mark.parametrize("text", texts, ids=texts)


@pytest.fixture(scope="module")
def prompts():
    return Prompts()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("disk") / "kv"


@pytest.fixture(scope="module")
def plain(reference):
    return reference(CASE)


@pytest.fixture
def server(servers, model, folder, plain):
    return servers.get(fault_spec(model, folder, "faults-long"))


@cases(TierId.HOST)
def test_host(server, plain, prompts, text):
    """Every fault of the host tier: all is answered, and the tier is used again."""
    under_fault(server, plain, prompts, "host", text)


@cases(TierId.DISK)
def test_disk(server, plain, prompts, text):
    """Every fault of the disk tier: all is answered, and the tier is used again."""
    under_fault(server, plain, prompts, "disk", text)


def test_reads_that_never_end_are_noticed(server, plain, prompts):
    """Where no read ends the disk is left alone, until one does."""
    server.flush_cache()
    known = prompts.take(4)
    cold = dropped_to(server, "disk", known)
    with faults(server, "disk:fault=hang/load"):
        assert_same(plain, cold[:2], open_loop(server, known[:2]))
        wait_until(lambda: not stats(server)["media"]["disk"]["usable"], "noticed")
        assert stats(server)["counters"]["disk_rests"] > 0
        answers = open_loop(server, known[2:])
        assert_same(plain, cold[2:], answers)
        assert all("disk" not in used(record) for record in answers)
    used_again(server, plain, prompts, "disk")


def used(record):
    return {tier for tier, tokens in record.cached_by_tier.items() if tokens}


def test_two_servers_on_one_disk(server, model, folder, tmp_path):
    """A second server on the same path is refused with a clear sentence."""
    spec = fault_spec(model, folder, "second")
    second = SglangServer(spec, tmp_path, free_port(ports()), 300.0)
    with pytest.raises(ServerStartError) as refused:
        second.start()
    log = second.log_path.read_text(errors="replace")
    assert refused.value.exit_code not in (None, 0)
    assert f"the disk tier at {folder} is in use by process" in log
    assert "give this one another path" in log
    assert server.exit_code() is None
    assert stats(server)["media"]["disk"]["usable"]


def ports():
    first, last = map(int, os.environ.get("TIERED_TEST_PORTS", "0-0").split("-"))
    return None if first == 0 else range(first, last + 1)


@pytest.mark.parametrize("fault", ["fault=hang", "fault=hang/store"])
def test_shutdown_while_the_disk_hangs(servers, server, prompts, fault):
    """A disk whose I/O never ends does not keep the server from ending."""
    requests = prompts.take(1)
    dropped_to(server, "disk", requests)
    server.post(f"/tiered/faults?emulate=disk:{fault}", {}, PATIENCE_S)
    answers = sequential(server, [*requests, *prompts.take(2)])
    assert all(answer.error is None for answer in answers)
    root = psutil.Process(server.pid)
    processes = [root, *root.children(recursive=True)]
    root.terminate()
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    servers.abandon()
    assert not alive, [process.cmdline()[:3] for process in alive]


class TestCxl:
    """A CXL tier in plain memory, below the host."""

    @pytest.fixture
    def server(self, servers, model, plain):
        flags = ("--tiered-cxl=emulate:memory", f"--tiered-cxl-size={HOST_BYTES}")
        return servers.get(fault_spec(model, None, "faults-cxl", flags))

    @cases(TierId.CXL)
    def test_cxl(self, server, plain, prompts, text):
        """Every fault of the CXL tier: all is answered, and the tier is used again."""
        under_fault(server, plain, prompts, "cxl", text)


def test_a_full_file_system(servers, model, plain, prompts, tmp_path):
    """On a file system too small for the tier all is served; given room, it is used."""
    folder = tmp_path / "small"
    folder.mkdir()
    with small_filesystem(folder, "2m") as mounted:
        if not mounted:
            pytest.skip("not run: mounting a tmpfs is not allowed here")
        server = servers.get(fault_spec(model, folder, "small-disk"))
        answers = sequential(server, replay(plain.chat))
        result = check_equality(
            plain.chat,
            answers,
            page_size=CASE.page_size,
            spread=plain.spread,
            forced=False,
        )
        assert result.passed, result.summary()
        assert edge(settle(server), "host->disk", "failures") > 0
        remount = ["mount", "-o", "remount,size=128m", str(folder)]
        subprocess.run(remount, check=True, timeout=20)
        used_again(server, plain, prompts, "disk")
        servers.stop()


def test_a_directory_removed_and_returned(servers, model, plain, prompts, tmp_path):
    """A directory that is moved away and back again: served on, and used again."""
    folder = tmp_path / "kv"
    server = servers.get(fault_spec(model, folder, "moved-disk"))
    for _ in range(3):
        requests = prompts.take(3)
        cold = dropped_to(server, "disk", requests)
        folder.rename(tmp_path / "away")
        assert_same(plain, cold, open_loop(server, requests))
        new = open_loop(server, prompts.take(3))
        assert all(record.error is None for record in new)
        shutil.rmtree(folder, ignore_errors=True)
        (tmp_path / "away").rename(folder)
        assert_same(plain, cold, sequential(server, requests))
        used_again(server, plain, prompts, "disk")
    servers.stop()


def test_killed_again_and_again(servers, model, plain, prompts, tmp_path):
    """Killed under load ten times, on one disk: after each start the gate is green."""
    spec = fault_spec(model, tmp_path / "kv", "killed", host_bytes=HOST_BYTES // 4)
    from_disk = 0
    for _ in range(NUM_KILLS):
        server = servers.get(spec)
        answers = sequential(server, replay(plain.chat))
        result = check_equality(
            plain.chat,
            answers,
            page_size=CASE.page_size,
            spread=plain.spread,
            forced=False,
        )
        assert result.passed, result.summary()
        from_disk += sum(record.cached_by_tier.get("disk", 0) for record in answers)
        kill_under_load(server, prompts)
        servers.abandon()
    assert from_disk > 0, "no start found a page of the one before"
    server = servers.get(spec)
    assert pinned(settle(server)) == 0
    servers.stop()


def kill_under_load(server, prompts):
    """Kill every process of a server while requests run and pages are written."""
    cut_off = threading.Event()

    def load():
        # Crowd after crowd, so that one is under way whenever the kill comes.
        while all(
            record.error is None for record in open_loop(server, prompts.take(8))
        ):
            pass
        cut_off.set()

    written = edge(stats(server), "host->disk")
    sender = threading.Thread(target=load, daemon=True)
    sender.start()
    wait_until(lambda: edge(stats(server), "host->disk") > written, "pages are written")
    assert not cut_off.is_set(), "a request failed before the kill"
    os.killpg(server.pid, signal.SIGKILL)
    assert cut_off.wait(PATIENCE_S), "a request to a killed server never ended"
    sender.join(PATIENCE_S)
