"""``sgl-tiered doctor``: what this machine offers, and the flags that it suggests.

Exit code 0 when serving is possible, 1 when it is not, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sgl_tiered.cli import advice, engine, machine, storage
from sgl_tiered.cli.progress import progress
from sgl_tiered.cli.transports import transport_facts
from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.model_shape import ModelShape
from sgl_tiered.sim.models import find_model
from sgl_tiered.tiers.devdax import DaxDevice, dax_devices

__all__ = ["gather", "register", "render", "report", "run"]

_DEFAULT_PATH = Path("~/.cache/sgl-tiered")
_LABEL_WIDTH = 18


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine offers, and the flags it suggests",
        description="Shows what this machine offers to a tiered server, and suggests "
        "flags. Exit code 0 when serving is possible, else 1.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--path",
        type=Path,
        default=_DEFAULT_PATH.expanduser(),
        metavar="DIR",
        help="where a disk tier would be (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        metavar="NAME|PATH",
        help="say how many tokens the sizes hold: a model's name, a config.json or its "
        "folder",
    )
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="ranks; default %(default)s"
    )
    parser.add_argument(
        "--all", action="store_true", help="list what was found in SGLang, too"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns the exit code."""
    if arguments.tp < 1:
        raise ConfigError("--tp", f"{arguments.tp} is no number of ranks", "give 1")
    shape = None if arguments.model is None else find_model(arguments.model)
    with (
        progress("looking at the machine and at SGLang"),
        warnings.catch_warnings(action="ignore"),  # what SGLang's modules say of a CPU
    ):
        facts = gather(arguments.path)
    obstacles = advice.obstacles(facts, os.environ)
    suggestion = advice.suggest(facts, arguments.model or "MODEL", arguments.tp)
    if arguments.json:
        print(json.dumps(report(facts, obstacles, suggestion)))
        return 1 if obstacles else 0
    print("\n".join(render(facts, obstacles, all_seams=arguments.all)))
    if not obstacles and suggestion:
        if shape is not None:
            print("\n".join(_room_lines(shape, suggestion, arguments.tp)))
        print("Serving is possible. Suggested:")
        print(f"  {suggestion.command}")
    return 1 if obstacles else 0


def gather(path: Path) -> advice.Facts:
    """Find out everything; takes seconds, most of them for importing SGLang."""
    # Not at the top: only this function needs SGLang's room.
    from sgl_tiered.engines.sglang import seams

    return advice.Facts(
        accelerator=engine.accelerator_facts(),
        cpu=machine.cpu_facts(),
        memory=machine.memory_facts(),
        numa_nodes=machine.numa_nodes(),
        dax_devices=dax_devices(),
        huge_pages=machine.huge_page_facts(),
        disk=storage.disk_facts(path),
        io_uring=storage.io_uring_facts(),
        transports=transport_facts(),
        engine=engine.engine_facts(seams.TESTED_VERSION, seams.check_seams),
    )


def report(
    facts: advice.Facts, obstacles: list[str], suggestion: advice.Suggestion | None
) -> dict[str, Any]:
    """Return the JSON object: the facts, the suggestion and the verdict."""
    return {
        **asdict(facts),
        "suggestion": asdict(suggestion) if suggestion else None,
        "remarks": advice.remarks(facts),
        "obstacles": obstacles,
        "serving_possible": not obstacles,
    }


def render(
    facts: advice.Facts, obstacles: list[str], *, all_seams: bool = False
) -> Iterator[str]:
    """Yield the lines of the report as aligned text."""
    yield from _machine_lines(facts)
    yield from _storage_lines(facts)
    yield from _engine_lines(facts.engine, all_seams)
    yield ""
    for remark in advice.remarks(facts):
        yield f"Note: {remark}"
    for obstacle in obstacles:
        yield f"Not possible: {obstacle}"


def _room_lines(
    shape: ModelShape, suggestion: advice.Suggestion, num_ranks: int
) -> Iterator[str]:
    """Yield how many tokens the suggested sizes hold."""
    token = int(shape.kv_token_bytes * shape.kv_copies(num_ranks)) // num_ranks
    yield _line(
        "model", f"{shape.name}: {token:,} bytes of KV a token at 16 bits, a rank"
    )
    sizes = {"host": suggestion.host_bytes, "disk": suggestion.disk_bytes}
    for name, size in sizes.items():
        if size:
            yield _line("", f"{name} {_gb(size)}: {size // token:,} tokens")


def _machine_lines(facts: advice.Facts) -> Iterator[str]:
    accelerator = facts.accelerator
    if accelerator.kind is None:
        yield _line("accelerator", accelerator.detail or "none: the CPU computes")
    for name, size in zip(
        accelerator.names,
        accelerator.memory_bytes or (0,) * len(accelerator.names),
        strict=True,
    ):
        extent = f", {_gb(size)}" if size else ""
        yield _line("accelerator", f"{name} ({accelerator.kind}){extent}")
    yield _line("torch", accelerator.torch_version or "not there")
    quota = facts.cpu.quota_cores
    limited = "" if quota is None else f", limited to {quota:g} by the cgroup"
    yield _line("CPU cores", f"{facts.cpu.num_cores}{limited}")
    memory = facts.memory
    limit = memory.limit_bytes
    limited = "" if limit is None else f", cgroup limit {_gb(limit)}"
    yield _line(
        "memory",
        f"{_gb(memory.available_bytes)} free of {_gb(memory.total_bytes)}{limited}",
    )
    for node in facts.numa_nodes:
        cores = f"cores {node.cpus}" if node.cpus else "no cores (CXL memory?)"
        yield _line(
            f"NUMA node {node.node_id}",
            f"{cores}, {_gb(node.free_bytes)} free of {_gb(node.total_bytes)}",
        )
    for device in facts.dax_devices:
        yield _line("DAX device", _dax(device))
    if not facts.dax_devices:
        yield _line("DAX devices", "none")
    reserved = ", ".join(
        f"{free} of {total} pages of {size // 2**20} MiB free"
        for size, (total, free) in facts.huge_pages.reserved.items()
        if total
    )
    yield _line(
        "huge pages",
        f"transparent: {facts.huge_pages.transparent}; reserved: {reserved or 'none'}",
    )


def _storage_lines(facts: advice.Facts) -> Iterator[str]:
    disk = facts.disk
    where = disk.path
    if disk.probed_path != disk.path:
        where += f" (does not exist; tried in {disk.probed_path})"
    yield _line("disk", where)
    yield _line(
        "",
        f"{disk.file_system}, {_gb(disk.free_bytes)} free of {_gb(disk.total_bytes)}; "
        f"O_DIRECT {_yes(disk.direct_io)}, fallocate {_yes(disk.fallocate)}",
    )
    if disk.detail:
        yield _line("", disk.detail)
    yield _line("io_uring", f"{_yes(facts.io_uring.usable)}: {facts.io_uring.detail}")
    for found in facts.transports:
        yield _line(found.name, f"{_yes(found.usable)}: {found.detail}")


def _engine_lines(facts: engine.EngineFacts, all_seams: bool) -> Iterator[str]:
    tested = f"tested: {facts.tested_version}"
    yield _line("SGLang", f"{facts.version or facts.detail} ({tested})")
    found = [seam for seam in facts.seams if seam.found]
    if facts.seams:
        yield _line("seams", f"{len(found)} of {len(facts.seams)} found")
    for seam in facts.seams:
        if seam.found and not all_seams:
            continue
        verdict = "found  " if seam.found else "MISSING"
        yield _line("", f"{verdict} {seam.name}: {seam.detail}")
    yield _line("plugin", _installed(facts.plugin_registered))
    yield _line("CPU platform", _installed(facts.platform_registered))


def _dax(device: DaxDevice) -> str:
    node = device.target_node
    text = f"{device.path}, {_gb(device.size_bytes)}, units of "
    text += f"{device.align_bytes // 2**20} MiB"
    if device.is_system_ram:
        return f"{text}; in use as NUMA node {node}"
    return text if node is None else f"{text}; would be NUMA node {node}"


def _line(label: str, text: str) -> str:
    return f"{label:{_LABEL_WIDTH}}{text}".rstrip()


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / advice.GB:.1f} GB"


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def _installed(fact: bool) -> str:
    return "installed" if fact else "not installed"
