"""The CXL tier on the memory that it is made for; skipped where there is none.

``SGL_TIERED_EXPECT_CXL`` says what must be there; see README.md.
"""

from __future__ import annotations

import mmap
import os
import re
import subprocess

import numpy as np
import pytest

from sgl_tiered.cli import machine
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import DemotePlan, LoadPlan, OffloadPlan
from sgl_tiered.errors import ConfigError
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue
from sgl_tiered.pipelines.demote import DemoteWorker
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader, LoadJob, Segment
from sgl_tiered.pipelines.offload import OffloadWorker
from sgl_tiered.serving.option_reader import read_options
from sgl_tiered.testing.fakes import FakeDevicePool
from sgl_tiered.testing.tier_kit import TierKit, make_records
from sgl_tiered.tiers.cxl import CxlTier
from sgl_tiered.tiers.cxl_source import CxlSource
from sgl_tiered.tiers.devdax import DaxRegion, dax_devices
from sgl_tiered.tiers.host import HostTier
from sgl_tiered.tiers.numa import (
    NumaRegion,
    free_node_bytes,
    memory_only_nodes,
    nodes_with_cores,
    parse_ids,
)

EXPECTED = dict(
    part.split("=") for part in os.environ.get("SGL_TIERED_EXPECT_CXL", "").split()
)
NODES = memory_only_nodes()
DEVICES = {device.name: device for device in dax_devices()}
DEVICE = DEVICES.get(EXPECTED.get("devdax", ""))
PAGE = mmap.PAGESIZE
MIB = 2**20

needs_node = pytest.mark.skipif(not NODES, reason="no NUMA node without cores here")
needs_nodes = pytest.mark.skipif(
    len(NODES) < 2, reason="no two NUMA nodes without cores here"
)
needs_device = pytest.mark.skipif(
    DEVICE is None, reason="SGL_TIERED_EXPECT_CXL names no device-DAX node of here"
)


def pages_by_node(array):
    """Read where an array lies from the process's map: not the call that we use."""
    begin = f"{array.ctypes.data:08x} "
    with open("/proc/self/numa_maps") as file:
        (line,) = (line for line in file if line.startswith(begin))
    return {int(node): int(n) for node, n in re.findall(r" N(\d+)=(\d+)", line)}, line


def devdax(kit, **settings):
    source = CxlSource(path=DEVICE.path, **settings)
    return CxlTier(source, kit.SLOT_BYTES, kit.NUM_SLOTS, page_bytes=kit.PAGE_BYTES)


def on_nodes(kit, nodes):
    source = CxlSource(nodes=nodes)
    return CxlTier(source, kit.SLOT_BYTES, kit.NUM_SLOTS, page_bytes=kit.PAGE_BYTES)


@pytest.mark.skipif(not EXPECTED, reason="SGL_TIERED_EXPECT_CXL is not set")
def test_the_machine_is_as_expected():
    """What the other tests run on is there, so that none is skipped unnoticed."""
    assert parse_ids(EXPECTED["nodes"]) == NODES
    if "devdax" in EXPECTED:
        assert DEVICE is not None
        assert not DEVICE.is_system_ram


@needs_node
class TestNode(TierKit):
    """One node without cores."""

    @pytest.fixture
    def tier(self):
        tier = on_nodes(self, NODES[-1:])
        yield tier
        tier.close()


@needs_nodes
class TestInterleaved(TierKit):
    """All nodes without cores together."""

    @pytest.fixture
    def tier(self):
        tier = on_nodes(self, NODES)
        yield tier
        tier.close()


@needs_device
class TestDevdax(TierKit):
    """A device-DAX node, behind its beginning."""

    @pytest.fixture
    def tier(self):
        tier = devdax(self, offset_bytes=DEVICE.align_bytes)
        yield tier
        tier.close()


@needs_node
@pytest.mark.parametrize("node", NODES)
def test_every_page_is_on_the_node(node):
    """Ours and the process's map agree, and the node has so much less to give."""
    free = free_node_bytes(node)
    region = NumaRegion(64 * MIB // PAGE, PAGE, (node,))
    assert region.placement.pages_by_node == {node: 64 * MIB // PAGE}
    found, line = pages_by_node(region.array)
    assert found == {node: 64 * MIB // PAGE}
    assert f"bind:{node}" in line
    assert free - free_node_bytes(node) > 48 * MIB


@needs_nodes
def test_interleaved_pages_are_on_all_nodes():
    """Each node has its part of the region, and no other node has any."""
    region = NumaRegion(96 * MIB // PAGE, PAGE, NODES)
    found, line = pages_by_node(region.array)
    assert found == region.placement.pages_by_node
    assert set(found) == set(NODES)
    assert sum(found.values()) == 96 * MIB // PAGE
    assert min(found.values()) >= 0.5 * max(found.values())
    assert "interleave" in line
    assert region.policy.startswith("interleaved")


@needs_node
def test_more_than_the_node_has_is_refused():
    """Nothing is taken, so that no process is ended for it."""
    too_many = free_node_bytes(NODES[0]) // PAGE + 1
    with pytest.raises(ConfigError, match=f"would go to NUMA node {NODES[0]}"):
        NumaRegion(too_many, PAGE, NODES[:1])


@needs_node
def test_the_flag_finds_the_nodes():
    """auto takes them all, the host gets of the rest, a node with cores is refused."""
    config = read_options({"cxl": "auto", "host_size": "auto"})
    assert config.tiers.cxl == CxlSource(nodes=NODES)
    assert 0 < config.tiers.cxl_bytes <= sum(free_node_bytes(node) for node in NODES)
    assert config.tiers.host_bytes > 0
    near = nodes_with_cores()[0]
    with pytest.raises(ConfigError, match=f"node {near} has cores"):
        read_options({"cxl": f"node:{near}", "cxl_size": "1MB", "host_size": "1MB"})


@needs_node
def test_the_doctor_sees_the_nodes():
    """Memory without cores, with its size."""
    seen = {node.node_id: node for node in machine.numa_nodes() if node.is_memory_only}
    assert tuple(seen) == NODES
    assert all(node.total_bytes > 64 * MIB for node in seen.values())


@needs_device
def test_the_device_is_mapped_and_never_read_as_a_file():
    """The kernel refuses file I/O on it; what the tier writes is there afterwards."""
    descriptor = os.open(DEVICE.path, os.O_RDWR)
    with pytest.raises(OSError, match="Invalid argument"):
        os.pread(descriptor, PAGE, 0)
    os.close(descriptor)
    rows = 16 * MIB // PAGE
    written = np.random.default_rng(0).integers(0, 256, (rows, PAGE), np.uint8)
    first = DaxRegion(rows, PAGE, DEVICE.path)
    first.array[:] = written
    first.close()
    # What the process's caches still hold must not be what is compared.
    again = DaxRegion(rows + 1, PAGE, DEVICE.path)
    assert np.array_equal(again.array[:rows], written)
    again.close()


@needs_device
def test_the_whole_device_is_usable_and_no_more():
    """Its last byte can be written; one unit more is refused."""
    rows = DEVICE.size_bytes // PAGE
    region = DaxRegion(rows, PAGE, DEVICE.path)
    region.array[-1, -1] = 77
    assert region.array[-1, -1] == 77
    region.close()
    with pytest.raises(ConfigError, match="left after the offset"):
        DaxRegion(rows, PAGE, DEVICE.path, offset_bytes=DEVICE.align_bytes)


@needs_device
def test_two_users_of_the_device_keep_apart():
    """The same bytes are refused; a range of their own is not."""
    first = DaxRegion(1, PAGE, DEVICE.path)
    with pytest.raises(ConfigError, match="in use by another server"):
        DaxRegion(1, PAGE, DEVICE.path)
    other = DaxRegion(1, PAGE, DEVICE.path, offset_bytes=DEVICE.align_bytes)
    first.array[:] = 1
    other.array[:] = 2
    assert (first.array == 1).all()
    other.close()
    first.close()


@needs_device
def test_the_flag_takes_the_device():
    """By its path, with all of it behind an offset, beside the machine's memory."""
    unit = DEVICE.align_bytes
    config = read_options({"cxl": f"{DEVICE.path}@{unit}", "host_size": "1MB"})
    assert config.tiers.cxl == CxlSource(path=DEVICE.path, offset_bytes=unit)
    assert config.tiers.cxl_bytes == DEVICE.size_bytes - unit
    assert DEVICE.target_node not in NODES


def sources():
    """Every kind of CXL memory that there is here."""
    found = {}
    if NODES:
        found["node"] = CxlSource(nodes=NODES[-1:])
    if DEVICE is not None:
        found["devdax"] = CxlSource(path=DEVICE.path)
    return found or {"none": None}


@pytest.mark.parametrize("source", sources().values(), ids=sources())
def test_pages_come_back_from_cxl_through_the_pipelines(source):
    """Device to CXL, host to CXL, and CXL to device, layer by layer: the same bytes."""
    if source is None:
        pytest.skip("no CXL memory here")
    layout = PageLayout(num_layers=3, page_tokens=4, token_bytes=256)
    pool = FakeDevicePool(layout, 32)
    pool.fill(np.random.default_rng(1))
    before = pool.layers.copy()
    host = HostTier(layout.slot_bytes, 8, page_bytes=layout.page_bytes)
    cxl = CxlTier(source, layout.slot_bytes, 16, page_bytes=layout.page_bytes)
    completions, metrics = CompletionQueue(), MetricsRegistry()
    parts = (completions, SystemClock(), metrics)
    to_host = OffloadWorker(pool, host, *parts)
    to_cxl = OffloadWorker(pool, cxl, *parts)
    demoter = DemoteWorker(host, cxl, *parts)
    loader = LayerwiseLoader(pool, *parts)
    try:
        eight = np.arange(8)
        ids = eight.astype(np.int32)
        plan = OffloadPlan(1, TierId.HOST, ids, ids, eight)
        to_host.submit(plan, eight, pool.mark())
        # Pages 8..15 go straight down, into the upper half of the tier.
        plan = OffloadPlan(2, TierId.CXL, ids, ids, eight + 8)
        to_cxl.submit(plan, eight + 8, pool.mark())
        assert to_host.drain(60)
        assert to_cxl.drain(60)
        records = make_records(eight, layout.page_tokens, seed=2)
        demoter.submit(
            DemotePlan(3, TierId.HOST, TierId.CXL, ids, eight, eight, records)
        )
        assert demoter.drain(60)
        sixteen = np.arange(16)
        load = LoadPlan(
            plan_id=4,
            first_page=0,
            pages=sixteen.astype(np.int32),
            tiers=np.full(16, TierId.CXL, np.uint8),
            addresses=sixteen,
            checksums=np.zeros(16, np.uint64),
            predicted_s=0.0,
        )
        segment = Segment.of_tier(cxl, sixteen, sixteen)
        ticket = loader.submit([LoadJob(load, (segment,), sixteen + 16)])
        assert ticket.wait(60), ticket.failed
        assert loader.drain(60)
    finally:
        for worker in (to_host, to_cxl, demoter, loader):
            worker.close()
        host.close()
        cxl.close()
    assert np.array_equal(pool.layers[:, 16:], before[:, :16])
    edges = metrics.snapshot()["edges"]
    assert edges["host->cxl"]["pages"] == 8
    assert edges["device->cxl"]["pages"] == 8
    assert edges["cxl->device"]["pages"] == 16
    assert not any(edge["failed_pages"] for edge in edges.values())


@pytest.mark.skipif(
    "reconfigure" not in EXPECTED, reason="changes the device; for the guest only"
)
def test_a_device_becomes_a_node():
    """The way from devdax to system-ram: the tier follows, and says where it went.

    Runs last: the device is gone after it.
    """
    command = ["daxctl", "reconfigure-device", "-m", "system-ram", DEVICE.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    node = DEVICE.target_node
    nodes = memory_only_nodes()
    assert nodes == (*NODES, node)
    with pytest.raises(ConfigError, match=f"give node:{node} instead"):
        read_options({"cxl": str(DEVICE.path), "host_size": "1MB"})
    config = read_options({"cxl": "auto", "host_size": "1MB"})
    assert config.tiers.cxl == CxlSource(nodes=nodes)
    alone = NumaRegion(64 * MIB // PAGE, PAGE, (node,))
    assert pages_by_node(alone.array)[0] == {node: 64 * MIB // PAGE}
    tier = CxlTier(config.tiers.cxl, 8192, 96 * MIB // 8192)
    found, _ = pages_by_node(tier.region)
    assert set(found) == set(nodes)
    assert sum(found.values()) == 96 * MIB // PAGE
    assert not tier.health().emulated
    tier.close()
