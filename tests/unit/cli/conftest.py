"""An imagined machine that can serve; tests change one thing each."""

from __future__ import annotations

import pytest

from sgl_tiered.cli.advice import GB, Facts
from sgl_tiered.cli.engine import AcceleratorFacts, EngineFacts, SeamFacts
from sgl_tiered.cli.machine import CpuFacts, HugePageFacts, MemoryFacts, NumaNode
from sgl_tiered.cli.storage import DiskFacts, IoUringFacts
from sgl_tiered.cli.transports import TransportFacts

GPU = AcceleratorFacts("2.14.1", "cuda", ("H200",), (141 * GB,))
DISK = DiskFacts(
    "/mnt/nvme", "/mnt/nvme", "ext4", 1000 * GB, 500 * GB, False, True, True, True, ""
)
ENGINE = EngineFacts(
    version="0.5.23",
    tested_version="0.5.23",
    seams=(SeamFacts("flags", True, "a.b"), SeamFacts("radix cache", True, "c.d")),
    plugin_registered=True,
    platform_registered=True,
)


@pytest.fixture
def good() -> Facts:
    """A machine with a GPU, 100 GB of free memory and 500 GB of free disk."""
    return Facts(
        accelerator=GPU,
        cpu=CpuFacts(16, None),
        memory=MemoryFacts(128 * GB, 100 * GB, None),
        numa_nodes=[NumaNode(0, "0-15", 128 * GB, 100 * GB)],
        dax_devices=[],
        huge_pages=HugePageFacts("madvise", {2**21: (0, 0)}),
        disk=DISK,
        io_uring=IoUringFacts(True, "a ring can be made"),
        transports=(TransportFacts("mooncake", True, "mooncake-x 1.0"),),
        engine=ENGINE,
    )
