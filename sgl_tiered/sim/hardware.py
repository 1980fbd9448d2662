"""Devices and links by data sheet, each number with its source.

A data sheet is an upper bound. ``compute_share`` and ``memory_share`` say which part of
it a serving engine reaches; they are the same guess for every device (below) and the
reason why a figure made with a profile tells shapes, not milliseconds. A calibration
file measured on the machine replaces them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.errors import ConfigError

__all__ = ["CXL", "HARDWARE", "NVME", "HardwareProfile", "LinkSpeed", "find_hardware"]

GB = 1e9
COMPUTE_SHARE = 0.55
"""Of the dense 16-bit peak in a prefill: Llama-2-7B's prefill on an A100 is commonly
reported at 50-60 % of 312 TFLOP/s; a guess for the other devices."""
MEMORY_SHARE = 0.8
"""Of the memory bandwidth in a decode step, by the same kind of report."""
PCIE_SHARE = 0.8
"""Of a PCIe link's raw rate that pinned copies reach (about 25 of 31.5 GB/s)."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction of a link; ``source`` says where the numbers come from."""

    bytes_per_s: float
    latency_s: float
    source: str


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One device and its links.

    Attributes:
        flops_per_s: dense 16-bit tensor operations by the data sheet.
        memory_bytes: of the device, decimal.
        memory_bytes_per_s: bandwidth of that memory.
        host: the link to host memory, one direction.
        peer: the link between devices, one direction, for all-reduce.
        source: of the device's numbers.
        host_link_sharers: devices on one host link (LayerKV: two GPUs share one).
        compute_share, memory_share: see the module.
    """

    name: str
    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    host: LinkSpeed
    peer: LinkSpeed
    source: str
    host_link_sharers: int = 1
    compute_share: float = COMPUTE_SHARE
    memory_share: float = MEMORY_SHARE


_PCIE4 = LinkSpeed(
    31.5 * GB * PCIE_SHARE, 10e-6, "PCIe 4.0 x16: 31.5 GB/s raw per direction"
)
_PCIE5 = LinkSpeed(
    63.0 * GB * PCIE_SHARE, 10e-6, "PCIe 5.0 x16: 63 GB/s raw per direction"
)

HARDWARE: dict[str, HardwareProfile] = {
    profile.name.lower(): profile
    for profile in (
        HardwareProfile(
            "L20", 119.5e12, 48 * GB, 864 * GB, _PCIE4, _PCIE4,
            "NVIDIA L20 data sheet; PCIe by LayerKV section 5.1",
            host_link_sharers=2,
        ),
        HardwareProfile(
            "A100-40G", 312e12, 40 * GB, 1_555 * GB, _PCIE4,
            LinkSpeed(300 * GB, 5e-6, "NVLink 3: 600 GB/s both directions"),
            "NVIDIA A100 data sheet, 40 GB SXM",
        ),
        HardwareProfile(
            "A100-80G", 312e12, 80 * GB, 2_039 * GB, _PCIE4,
            LinkSpeed(300 * GB, 5e-6, "NVLink 3: 600 GB/s both directions"),
            "NVIDIA A100 data sheet, 80 GB SXM: 312 TFLOPS, 2,039 GB/s",
        ),
        HardwareProfile(
            "L40S", 362e12, 48 * GB, 864 * GB, _PCIE4, _PCIE4,
            "NVIDIA L40S data sheet: 362 TFLOPS dense, 48 GB, 864 GB/s, PCIe 4.0 x16",
        ),
        HardwareProfile(
            "H100", 989.5e12, 80 * GB, 3_350 * GB, _PCIE5,
            LinkSpeed(450 * GB, 5e-6, "NVLink 4: 900 GB/s both directions"),
            "NVIDIA H100 SXM data sheet: 1,979 TFLOPS with sparsity, 80 GB, 3.35 TB/s",
        ),
        HardwareProfile(
            "H800", 989.5e12, 80 * GB, 3_350 * GB, _PCIE5,
            LinkSpeed(200 * GB, 5e-6, "NVLink, cut to 400 GB/s both directions"),
            "NVIDIA H100/H800 SXM data sheet (dense rate)",
        ),
        HardwareProfile(
            "H200", 989.5e12, 141 * GB, 4_800 * GB, _PCIE5,
            LinkSpeed(450 * GB, 5e-6, "NVLink 4: 900 GB/s both directions"),
            "NVIDIA H200 SXM data sheet (dense rate)",
        ),
        HardwareProfile(
            "B200", 2_250e12, 180 * GB, 8_000 * GB, _PCIE5,
            LinkSpeed(900 * GB, 5e-6, "NVLink 5: 1.8 TB/s both directions"),
            "NVIDIA DGX B200 data sheet, an eighth: 1,440 GB, 64 TB/s; HGX B200: 36 "
            "PFLOPS of 16 bits with sparsity",
        ),
        HardwareProfile(
            "MI300X", 1_307.4e12, 192 * GB, 5_300 * GB, _PCIE5,
            LinkSpeed(448 * GB, 5e-6, "Infinity Fabric: 7 x 128 GB/s both directions"),
            "AMD Instinct MI300X data sheet: 1,307.4 TFLOPS dense, 192 GB, 5.3 TB/s",
        ),
        HardwareProfile(
            "RTX-4090", 165.2e12, 24 * GB, 1_008 * GB, _PCIE4, _PCIE4,
            "NVIDIA Ada white paper: dense FP16 with FP32 accumulation",
        ),
        HardwareProfile(
            "RTX-3090", 71.2e12, 24 * GB, 936 * GB, _PCIE4, _PCIE4,
            "NVIDIA Ampere GA102 white paper: dense FP16 with FP32 accumulation",
        ),
    )
}  # fmt: skip
"""By name in lower case."""

CXL = LinkSpeed(
    64 * GB, 1e-6, "CaR section II.B: 64 GB/s (CXL 3.0); latency of CXL loads < 1 us"
)
NVME = {
    "read": LinkSpeed(7.0 * GB, 80e-6, "PCIe 4.0 x4 SSD: 7.0 GB/s sequential read"),
    "write": LinkSpeed(5.0 * GB, 30e-6, "PCIe 4.0 x4 SSD: 5.0 GB/s sequential write"),
}
"""A current enterprise SSD by data sheet (Samsung PM9A3 and similar, rounded)."""


def find_hardware(name: str) -> HardwareProfile:
    """Return a profile by name, case ignored.

    Raises:
        ConfigError: there is none of that name.
    """
    asked = name.lower()
    profile = HARDWARE.get(asked) or HARDWARE.get(asked + "g")  # A100-80
    if profile is None:
        known = ", ".join(profile.name for profile in HARDWARE.values())
        raise ConfigError(
            "--hardware", f"{name!r} is not known", f"choose one of {known}"
        )
    return profile
