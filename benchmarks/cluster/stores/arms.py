"""What is compared: where a prefix comes from that another server has computed.

Two servers each (one, where nothing is shared), all side by side and asleep when idle.
Below the devices all have the same memory: ours is the two host tiers; HiCache's is its
two host pools, as small as its device pools, and the segment of Mooncake's store
process, a quarter of the working set. So a host tier of ours has a host pool of
HiCache's and half a segment.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from against.model import TOKEN_BYTES, host_tier
from hicache_cpu.distribution import hicache_env
from sgl_tiered_workloads.cluster.members import COLOCATED, Member, new_member
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.processes import Service
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, hicache_spec
from stores.loads import working_set_tokens

__all__ = [
    "ARMS",
    "MOONCAKE_STORE",
    "PAGE",
    "POOLS",
    "POOL_TOKENS",
    "QUARTER",
    "RECOMPUTE",
    "Arm",
    "host_tokens",
    "make_arms",
    "reference_device",
    "shared_tokens",
]

QUARTER = "pool-quarter"
_TRANSPORTS = {"pool-mooncake": "mooncake", "pool-nixl": "nixl", QUARTER: "mooncake"}
POOLS = tuple(_TRANSPORTS)
MOONCAKE_STORE, RECOMPUTE = "mooncake-store", "recompute"
ARMS = (*POOLS, MOONCAKE_STORE, RECOMPUTE)
PAGE = 64
"""What HiCache's authors take with a store; ours takes it as well."""
POOL_TOKENS = 4_096
REFERENCE_TOKENS = 65_536
LAYOUT = "page_first_direct"
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Arm:
    """One of what is compared.

    Attributes:
        name: one of ``ARMS``.
        members: its servers, two or one.
        services: what runs besides, started before them.
    """

    name: str
    members: tuple[Member, ...]
    services: tuple[Service, ...] = ()


def reference_device(model: Path) -> Device:
    """Return the device of plain SGLang that holds much."""
    return Device(model, REFERENCE_TOKENS, PAGE, CPU_FLAGS)


def shared_tokens() -> int:
    """Return the size of Mooncake's segment: a quarter of the working set."""
    return working_set_tokens() // 4


def host_tokens(name: str) -> int:
    """Return the size of a host tier of one of ``POOLS``, in whole pages."""
    tokens = shared_tokens() // 2 + (0 if name == QUARTER else POOL_TOKENS)
    return tokens // PAGE * PAGE


def make_arms(
    names: Sequence[str], model: Path, ports: Ports, logs: Path
) -> dict[str, Arm]:
    """Return what is compared, not started.

    Args:
        names: some of ``ARMS``.
        model: folder of the model.
        ports: where ports come from.
        logs: folder for logs, registries and HiCache's entry point.
    """
    makers = {MOONCAKE_STORE: _mooncake_store, RECOMPUTE: _recompute}
    device = Device(model, POOL_TOKENS, PAGE, CPU_FLAGS)
    return {name: makers.get(name, _pool)(name, device, ports, logs) for name in names}


def _pool(name: str, device: Device, ports: Ports, logs: Path) -> Arm:
    registry = logs / f"registry-{name}"
    registry.parent.mkdir(parents=True, exist_ok=True)
    flags = (
        *host_tier(host_tokens(name)),
        "--tiered-pool",
        f"file:{registry}",
        "--tiered-pool-transport",
        _TRANSPORTS[name],
    )
    return Arm(name, _pair(name, device, ports, flags))


def _mooncake_store(name: str, device: Device, ports: Ports, logs: Path) -> Arm:
    """A master, a store process and two servers, by the README in SGLang's wheel."""
    master_port, metrics_port = ports.take(), ports.take()
    master = f"{_HOST}:{master_port}"
    told = {
        "local_hostname": _HOST,
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": "tcp",
        "device_name": "",
    }
    # The servers give no memory of their own: theirs would be lost with them.
    server = told | {"global_segment_size": 0}
    bare = Device(device.model, 0, PAGE)
    spec = hicache_spec(bare, name, ("--hicache-ratio", "1"), LAYOUT)
    flags = (
        *spec.flags,
        "--hicache-storage-backend",
        "mooncake",
        "--hicache-storage-prefetch-policy",
        "timeout",
        "--hicache-storage-backend-extra-config",
        json.dumps(server),
    )
    env = hicache_env(logs / "plugins", asynchronous=True)
    return Arm(
        name,
        _pair(name, device, ports, flags, env),
        (
            _master(master_port, metrics_port, logs),
            _store(told, ports.take(), metrics_port, logs),
        ),
    )


def _recompute(name: str, device: Device, ports: Ports, logs: Path) -> Arm:
    return Arm(name, _pair(name, device, ports, ())[:1])


def _pair(
    name: str,
    device: Device,
    ports: Ports,
    flags: Sequence[str],
    env: dict[str, str] | None = None,
) -> tuple[Member, ...]:
    return tuple(
        new_member(
            device,
            COLOCATED,
            f"{name}-{place}",
            ports,
            flags=flags,
            env=env,
            events=False,
        )
        for place in range(2)
    )


def _master(port: int, metrics_port: int, logs: Path) -> Service:
    """Return Mooncake's master, which says by its metrics that it is there."""
    command = [_program("mooncake_master"), f"--rpc_port={port}"]
    command += [f"--rpc_address={_HOST}", "--eviction_high_watermark_ratio=0.95"]
    command += [f"--metrics_port={metrics_port}", f"--metrics_host={_HOST}"]
    at = f"http://{_HOST}:{metrics_port}/metrics"
    return Service("mooncake-master", command, logs, lambda: bool(_read(at)))


def _store(
    told: Mapping[str, str], port: int, metrics_port: int, logs: Path
) -> Service:
    """Return Mooncake's store process; it is ready when the master has its segment."""
    config = logs / "mooncake-store.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    segment = {"global_segment_size": shared_tokens() * TOKEN_BYTES}
    # It only gives memory, and asks for nothing.
    config.write_text(json.dumps({**told, **segment, "local_buffer_size": 0}))
    command = [sys.executable, "-m", "mooncake.mooncake_store_service"]
    command += [f"--config={config}", f"--port={port}"]
    at = f"http://{_HOST}:{metrics_port}/get_all_segments"
    return Service("mooncake-store", command, logs, lambda: bool(_read(at).strip()))


def _program(name: str) -> str:
    """Return a program of Mooncake's wheel, beside the Python that runs us."""
    return str(Path(sys.executable).with_name(name))


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5.0) as response:
        return str(response.read().decode())
