"""What is looked at before a server is started, and why one did not start.

Each answer is one sentence for people.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from comparison.settings import Model, ProblemError, Shared, Sizes
from comparison.systems import SYSTEMS
from sgl_tiered_workloads.server import ServerStartError, free_port

from sgl_tiered.cli.machine import memory_facts

__all__ = [
    "check",
    "check_settings",
    "room_in_host",
    "sees_accelerator",
    "why_not_started",
]

_LEAST_POOL_TOKENS = 2048
_HOST_SHARE = 0.8
"""Of the memory that is free: models are read through it, and servers need some."""
_ERROR = re.compile(r"((?:\w*(?:Error|Exception)|\berror): .+)$")


def check_settings(shared: Shared, sizes: Sizes, systems: Sequence[str]) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ProblemError: one of them does.
    """
    for name in systems:
        if name not in SYSTEMS:
            known = ", ".join(SYSTEMS)
            raise ProblemError(f"--systems: there is no {name!r}; there are {known}.")
    if len(set(systems)) != len(systems) or not systems:
        raise ProblemError("--systems: name at least one, and each once.")
    if shared.page_size < 1 or shared.page_size & (shared.page_size - 1):
        raise ProblemError(
            f"--page-size: {shared.page_size} is no power of two, which SGLang's "
            "attention backends ask for."
        )
    for length in sizes.lengths:
        if length % shared.page_size or length < 2 * shared.page_size:
            raise ProblemError(
                f"--lengths: {length} tokens are not two or more whole pages of "
                f"{shared.page_size}."
            )
    if shared.pool_tokens < _LEAST_POOL_TOKENS:
        raise ProblemError(
            f"--pool-tokens: {shared.pool_tokens} are too few; give "
            f"{_LEAST_POOL_TOKENS} or more."
        )
    fraction = shared.mem_fraction
    if fraction is not None and not 0.1 <= fraction < 1.0:
        raise ProblemError(
            f"--mem-fraction: {fraction:g} is no share of the GPU's memory; give a "
            "number from 0.1 to 0.95."
        )


def check(
    model: Model,
    shared: Shared,
    systems: Sequence[str],
    out: Path,
    port: int | None,
) -> None:
    """Refuse to begin where it is known that nothing can come of it.

    Raises:
        ProblemError: says what, and what to do.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ProblemError(
            "SGLang is not installed here: pip install 'sgl-tiered[sglang,bench]'."
        )
    if port is not None:
        try:
            free_port([port])
        except (OSError, OverflowError):
            raise ProblemError(
                f"--port: another program has port {port}; give another one, or none."
            ) from None
    host_gb = shared.host_gb_of(shared.pool_tokens, model.token_bytes)
    if any(SYSTEMS[name].has_host for name in systems):
        problem = room_in_host(host_gb, memory_facts().available_bytes, shared)
        if problem:
            raise ProblemError(problem)
    if any(SYSTEMS[name].has_disk for name in systems):
        out.mkdir(parents=True, exist_ok=True)
        free_gb = shutil.disk_usage(out).free // 10**9
        if free_gb < shared.disk_gb:
            raise ProblemError(
                f"--disk-gb: the disk of --out has {free_gb} GB free, and the systems "
                f"with a disk may take {shared.disk_gb} GB; give a smaller --disk-gb, "
                "another --out, or leave them out with --systems."
            )


def room_in_host(host_gb: int, free_bytes: int, shared: Shared) -> str:
    """Return what is wrong with the host memory of a system; empty if nothing."""
    if host_gb * 10**9 <= _HOST_SHARE * free_bytes:
        return ""
    return (
        f"--pool-tokens: {host_gb} GB of host memory are asked for each system "
        f"(two device pools of {shared.pool_tokens:,} tokens, or --host-gb), and "
        f"{free_bytes // 10**9} GB are free; give a smaller --pool-tokens or --host-gb."
    )


def sees_accelerator() -> bool:
    """Whether torch is there and sees an accelerator."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.accelerator.is_available())


def why_not_started(error: Exception) -> str:
    """Return one sentence of a server's start: what it ended with, and its last error.

    The whole end of its log is in the folder of logs.
    """
    first, _, tail = str(error).partition("\n")
    if isinstance(error, ServerStartError):
        tail = error.log_tail
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    errors = [found[1] for line in lines if (found := _ERROR.search(line))]
    last = (errors or lines)[-1:]
    return f"{first}: {last[0][:300]}" if last else f"{first}."
