"""What this machine is: driver, device attributes, NUMA, and what pinning costs.

Pinning is the product's own (``tiers/pinning.py``): the first part by who asks, the
rest by threads, parts of 1 GiB by 4 threads as a server's start does, and by fewer and
more. Over memory that nothing has touched, which is what a start sees, and over memory
that is there; anywhere, and near the device.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from stages.stage import Stage

from sgl_tiered.engines.device.cuda_ops import cuda_register, numa_node
from sgl_tiered.tiers.memory import MemoryRegion, populate
from sgl_tiered.tiers.pinning import NUM_THREADS, PIN_BYTES, Pinning, Register

__all__ = ["run"]

_ATTRIBUTES = {
    "can_use_host_pointer_for_registered_mem": 91,
    "host_register_supported": 99,
    "host_register_read_only_supported": 113,
    "pageable_memory_access": 88,
    "pageable_memory_access_uses_host_page_tables": 100,
    "concurrent_managed_access": 89,
    "unified_addressing": 41,
    "async_engine_count": 40,
    "can_map_host_memory": 19,
    "host_numa_id": 134,
    "memory_pools_supported": 115,
    "stream_priorities_supported": 78,
    "pci_bus_id": 33,
    "multiprocessor_count": 16,
    "l2_cache_size": 38,
}
"""``CUdevice_attribute`` of cuda.h, CUDA 12.8."""
_THREADS = (NUM_THREADS, 1, 16)
_GIB = 1 << 30
_ROW = 4096
_ASK_S = 20.0


def run(stage: Stage) -> None:
    """Write one record per kind of fact."""
    is_cuda = torch.cuda.is_available() and not stage.dry_run
    stage.add("software", **_software())
    stage.add("numa", **_numa())
    if is_cuda:
        device = _device()
        stage.figure("device", device["name"])
        stage.add("device", **device)
        for query in ("", "topo -m"):
            stage.add(
                "nvidia-smi", query=query, said=_ask("nvidia-smi", *query.split())
            )
        stage.add("link", **_link())
        stage.add("matmul", **_matmul())
    # A part for who asks, and one for each of the product's threads.
    num_bytes = (NUM_THREADS + 1) * PIN_BYTES if is_cuda else 1 << 20
    register: Register = _nothing
    near: int | None = 0
    if is_cuda:
        torch.cuda.init()
        register = cuda_register("memory of the benchmark", "cuda")
        near = numa_node(torch.device("cuda", 0))
    cases = [(None, num_threads) for num_threads in _THREADS]
    if near is not None:
        cases.insert(1, (near, NUM_THREADS))
    best_s = float("inf")
    for is_fresh in (True, False):
        for node, num_threads in cases:
            if stage.left_s < 0:
                stage.add("skipped", what=f"pinning by {num_threads} threads")
                continue
            part_bytes = min(PIN_BYTES, num_bytes // (num_threads + 1))
            first_s, seconds = _pin(
                num_bytes, part_bytes, num_threads, node, register, is_fresh=is_fresh
            )
            stage.add(
                "pinning",
                threads=num_threads,
                num_bytes=num_bytes,
                part_bytes=part_bytes,
                node=node,
                is_fresh=is_fresh,
                first_s=first_s,
                seconds=seconds,
            )
            if is_fresh:
                best_s = min(best_s, seconds)
    if is_cuda and best_s < float("inf"):
        stage.figure("pin_gib_per_s", round(num_bytes / _GIB / best_s, 2))


def _software() -> dict[str, Any]:
    import triton

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda or "none",
        "triton": triton.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "locked_memory_bytes": _locked_limit(),
        "nvcc": _ask("nvcc", "--version").splitlines()[-1:],
        "batched_copies": _has_batches(),
    }


def _locked_limit() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _has_batches() -> str:
    """Say whether ``cuMemcpyBatchAsync`` is found, and if not, what is missing."""
    from importlib.util import find_spec

    from sgl_tiered_kernels.page_copy.dma import batch_function

    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "cuda-python is not installed"
    try:
        return "there" if batch_function() is not None else "the driver has none"
    except Exception as problem:  # noqa: BLE001 - a machine without a driver
        return f"{type(problem).__name__}: {problem}"


def _device() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    driver = ctypes.CDLL("libcuda.so.1")
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    torch.cuda.init()
    handle = ctypes.c_int(0)
    driver.cuDeviceGet(ctypes.byref(handle), 0)
    attributes = {}
    for name, number in _ATTRIBUTES.items():
        value = ctypes.c_int(0)
        status = driver.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        attributes[name] = value.value if status == 0 else f"error {status}"
    free, total = torch.cuda.mem_get_info()
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability()),
        "driver_cuda_version": version.value,
        "free_bytes": free,
        "total_bytes": total,
        "attributes": attributes,
    }


def _link() -> dict[str, int | None]:
    """Return the PCIe link's generation and width, the roof of what is moved.

    An idle link rests in a lower generation, so that the highest one counts.
    """
    fields = {
        "generation": "pcie.link.gen.max",
        "generation_now": "pcie.link.gen.current",
        "lanes": "pcie.link.width.current",
        "lanes_most": "pcie.link.width.max",
    }
    query = f"--query-gpu={','.join(fields.values())}"
    said = _ask("nvidia-smi", query, "--format=csv,noheader,nounits")
    cells = [cell.strip() for cell in (said.splitlines() or [""])[0].split(",")]
    cells += [""] * (len(fields) - len(cells))
    return {
        name: int(cell) if cell.isdigit() else None
        for name, cell in zip(fields, cells, strict=False)
    }


def _matmul() -> dict[str, Any]:
    """Return seconds of 8192^3 in bfloat16, by events: the roof of computing."""
    left, right = (
        torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    seconds = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        left @ right
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return {"flop": 2 * 8192**3, "seconds": seconds[2:]}


def _numa() -> dict[str, Any]:
    """Return nodes with their cores and memory, and the node of each accelerator."""
    nodes = {}
    for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        cores = (folder / "cpulist").read_text().strip()
        lines = (folder / "meminfo").read_text().splitlines()
        total = next((line.split()[-2] for line in lines if "MemTotal" in line), "0")
        nodes[folder.name] = {"cores": cores, "memory_kib": int(total)}
    cards = {}
    for folder in sorted(Path("/sys/bus/pci/devices").glob("*")):
        kind, node = folder / "class", folder / "numa_node"
        if kind.exists() and kind.read_text().startswith(("0x0302", "0x0300")):
            cards[folder.name] = int(node.read_text()) if node.exists() else -1
    return {"nodes": nodes, "accelerators": cards}


def _pin(
    num_bytes: int,
    part_bytes: int,
    num_threads: int,
    node: int | None,
    register: Register,
    *,
    is_fresh: bool,
) -> tuple[float, float]:
    """Return the seconds until the first part is pinned, and until all are."""
    # Pinned by nobody yet, and not populated in the background.
    region = MemoryRegion(
        num_bytes // _ROW, _ROW, register=lambda *_: lambda: None, node=node
    )
    address = region.array.ctypes.data
    if not is_fresh:
        populate(address, num_bytes)
    began_s = time.perf_counter()
    pinning = Pinning(
        register,
        address,
        num_bytes // _ROW,
        _ROW,
        part_bytes=part_bytes,
        num_threads=num_threads,
    )
    first_s = time.perf_counter() - began_s
    pinning.wait()
    seconds = time.perf_counter() - began_s
    assert pinning.pinned_bytes == num_bytes, "memory was not pinned"
    pinning.close()
    region.close()
    return first_s, seconds


def _nothing(address: int, num_bytes: int) -> Callable[[], None]:
    """Stand for a device's pinning: fault the pages in."""
    populate(address, num_bytes)
    return lambda: None


def _ask(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_ASK_S
    )
    return done.stdout[-4000:]
