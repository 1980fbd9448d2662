"""Places and sizes of the tiers: what was asked for, and what the machine has.

Sizes are of one rank, in bytes; ``auto`` is a rank's part of what the machine has.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_tiered.core.sizes import parse_size
from sgl_tiered.errors import ConfigError
from sgl_tiered.serving.option_kinds import absolute, size
from sgl_tiered.tiers.cxl_source import CxlSource, largest_bytes, parse_source
from sgl_tiered.tiers.memory import available_memory_bytes

__all__ = ["cxl_place", "disk_place", "host_size", "rank_folder"]

_AUTO_SHARE = 0.5
_AUTO_HOST_MAX_BYTES = 64 * 2**30
_SIZE = size("give a size such as 100GB")


def host_size(value: object, taken_bytes: int, num_ranks: int, num_to_come: int) -> int:
    """Return a rank's host tier's size, beside what its CXL tier takes of free memory.

    Args:
        value: of the setting.
        taken_bytes: of free memory by the CXL tier of each rank.
        num_ranks: that share what is free.
        num_to_come: of them, those that have not taken their memory yet.
    """
    available = available_memory_bytes()
    if available is not None:
        available = max(0, available - taken_bytes * num_to_come)
    if value == "auto":
        share = _AUTO_HOST_MAX_BYTES
        if available is not None:
            share = int(available * _AUTO_SHARE / num_ranks)
        return min(share, _AUTO_HOST_MAX_BYTES)
    num_bytes = parse_size("--tiered-host-size", value)
    if available is not None and num_bytes * num_to_come > available:
        ranks = f" for each of {num_to_come} ranks" if num_to_come > 1 else ""
        raise ConfigError(
            "--tiered-host-size",
            f"{num_bytes / 2**30:.1f} GiB{ranks} is more than the "
            f"{available / 2**30:.1f} GiB "
            f"of memory that is free{' beside the CXL tier' if taken_bytes else ''}",
            "give less, or auto for half of what is free",
        )
    if num_bytes == 0:
        raise ConfigError("--tiered-host-size", "is 0", "give a size such as 4GB")
    return num_bytes


def cxl_place(
    settings: Mapping[str, Any], num_ranks: int
) -> tuple[CxlSource | None, int]:
    """Return where a rank's CXL tier's memory comes from, and its size."""
    value, asked = settings.get("cxl"), settings.get("cxl_size", "auto")
    if value is None:
        return None, 0
    source = parse_source(str(value), parse_size)
    largest = largest_bytes(source)
    if asked == "auto":
        if largest is None:
            raise ConfigError(
                "--tiered-cxl-size",
                "is needed where CXL memory is emulated",
                "give a size such as 4GB",
            )
        return source, largest // num_ranks
    num_bytes = _SIZE.read("--tiered-cxl-size", asked)
    if largest is not None and num_bytes > largest:
        raise ConfigError(
            "--tiered-cxl-size",
            f"{num_bytes / 2**30:.2f} GiB asked for, and {source.describe()} with "
            f"{largest / 2**30:.2f} GiB to give",
            "give less, or auto for all of it",
        )
    return source, num_bytes


def disk_place(
    settings: Mapping[str, Any], num_ranks: int
) -> tuple[tuple[Path, ...], int]:
    """Return the disk tier's folders, which are made, and a rank's size in them."""
    value, asked = settings.get("disk_path"), settings.get("disk_size", "auto")
    if value is None:
        return (), 0
    folders = _folders(value)
    if asked == "auto":
        return folders, _disk_auto_bytes(folders, num_ranks)
    return folders, _SIZE.read("--tiered-disk-size", asked)


def rank_folder(folder: Path, rank: int, num_ranks: int) -> Path:
    """Return where a rank keeps its part of a disk folder; one folder has one user."""
    return folder if num_ranks == 1 else folder / f"rank-{rank}-of-{num_ranks}"


def _folders(value: object) -> tuple[Path, ...]:
    """Make the folders of a comma-separated text, or of a list in a file."""
    names = value if isinstance(value, list) else str(value).split(",")
    folders = tuple(
        absolute("--tiered-disk-path", str(name).strip())
        for name in names
        if str(name).strip()
    )
    if not folders or len(set(folders)) < len(folders):
        raise ConfigError(
            "--tiered-disk-path",
            f"{value!r} names no directory, or one of them twice",
            "give directories separated by commas",
        )
    for folder in folders:
        problem = ""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{folder} cannot be used ({error.strerror})"
        if not problem and not os.access(folder, os.W_OK | os.X_OK):
            problem = f"{folder} is not writable"
        if problem:
            raise _unusable(problem)
    return folders


def _unusable(problem: str) -> ConfigError:
    return ConfigError(
        "--tiered-disk-path", problem, "give a directory that this user may write to"
    )


def _disk_auto_bytes(folders: tuple[Path, ...], num_ranks: int) -> int:
    """Return a rank's part of half of what is free, or held by a former server.

    All folders get equal shares, so the tightest one decides; folders of one file
    system share what is free there.
    """
    try:
        devices = [folder.stat().st_dev for folder in folders]
        shares = []
        for folder, device in zip(folders, devices, strict=True):
            free = shutil.disk_usage(folder).free / devices.count(device)
            held = sum(
                _held_bytes(rank_folder(folder, rank, num_ranks))
                for rank in range(num_ranks)
            )
            shares.append(free + held)
    except OSError as error:
        problem = f"{error.filename} cannot be looked at ({error.strerror})"
        raise _unusable(problem) from None
    return int(min(shares) * len(folders) * _AUTO_SHARE / num_ranks)


def _held_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder; 0 where it is not there."""
    if not folder.is_dir():
        return 0
    return sum(item.stat().st_size for item in folder.iterdir() if item.is_file())
