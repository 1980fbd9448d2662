"""The settings of a tiered server: flags and file in, one frozen value out.

Flags and environment are read here, once. A key of the file stands for the flag of
the same name without its prefix (``host-size`` or ``host_size`` stand for
``--tiered-host-size``); a flag that is given wins over the file.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.calibration import read_calibration
from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.disk_engines import ENGINES
from sgl_tiered.tiers.memory import available_memory_bytes

__all__ = [
    "BACKEND_NAME",
    "CHOICES",
    "FAULT_ENV",
    "FLAG_PREFIX",
    "Emulation",
    "TieredConfig",
    "parse_size",
    "read_config",
]

BACKEND_NAME = "tiered"
FLAG_PREFIX = "tiered_"
FAULT_ENV = "SGL_TIERED_ALLOW_FAULTS"

CHOICES: Mapping[str, tuple[str, ...]] = {
    "eviction_policy": ("lru", "fifo", "random"),
    "write_policy": ("write-through", "selective"),
    "demote_policy": ("write-through", "on-evict"),
    "load_policy": ("auto", "always", "never"),
    "disk_io": ENGINES,
    "fault_corrupt": ("zero", "swap"),
}

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_DEFAULT_STAGING_BYTES = 256 * 2**20
"""Holds a 1,000-token read of an 8B model; larger reads are cut to fit."""
_AUTO_SHARE = 0.5
_AUTO_HOST_MAX_BYTES = 64 * 2**30


@dataclass(frozen=True, slots=True)
class Emulation:
    """A tier made slower than it is, for experiments.

    Attributes:
        bandwidth_bytes_per_s: infinite for the real one.
        latency_s: added to every operation.
    """

    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class TieredConfig:
    """Validated settings of the tiers.

    Attributes:
        host_bytes: size of the host tier.
        disk_paths, disk_bytes: folders and size of the disk tier, all folders
            together; empty and 0 for none.
        disk_threads: I/Os that the disk tier has in flight, per folder.
        disk_io: how it does them: auto, threads, bounce, uring, mmap.
        staging_bytes: memory through which disk pages go up to the device.
        eviction_policy: which page leaves a full tier: lru, fifo, random.
        write_policy: when a page is offloaded to the host: write-through (when it is
            computed) or selective (when it is seen a second time).
        demote_policy: when a host page is written to disk: write-through (soon after)
            or on-evict (the coldest, before room is needed).
        load_policy: auto (load if cheaper than recompute), always, never.
        log_interval_s: time between two log lines; 0 for none.
        seed: for the policies that draw random numbers.
        emulate: tiers that are slowed down.
        calibration: file of ``sgl-tiered calibrate`` from which the planner's costs
            start; None to measure at start-up.
        fault_corrupt: a deliberate fault for the negative control of the tests.
    """

    host_bytes: int
    disk_paths: tuple[Path, ...] = ()
    disk_bytes: int = 0
    disk_threads: int = 8
    disk_io: str = "auto"
    staging_bytes: int = _DEFAULT_STAGING_BYTES
    eviction_policy: str = "lru"
    write_policy: str = "write-through"
    demote_policy: str = "write-through"
    load_policy: str = "auto"
    log_interval_s: float = 60.0
    seed: int = 0
    emulate: Mapping[TierId, Emulation] = field(default_factory=dict)
    calibration: Path | None = None
    fault_corrupt: str | None = None


def read_config(values: Mapping[str, Any]) -> TieredConfig:
    """Build the settings from flag values (None where a flag was not given).

    Args:
        values: by flag name without ``--tiered-``, with underscores.

    Raises:
        ConfigError: one sentence about the first setting that is wrong.
    """
    given = {name: value for name, value in values.items() if value is not None}
    path = given.pop("config", None)
    from_file = {} if path is None else _read_file(path, set(values) - {"config"})
    settings = {**from_file, **given}

    disk_paths, disk_bytes = _disk(settings)
    config = TieredConfig(
        host_bytes=_host_bytes(settings.get("host_size", "auto")),
        disk_paths=disk_paths,
        disk_bytes=disk_bytes,
        disk_threads=_whole(settings, "disk_threads", 8, low=1, high=256),
        disk_io=_choice(settings, "disk_io", "auto"),
        staging_bytes=parse_size(
            "--tiered-staging-size",
            settings.get("staging_size", _DEFAULT_STAGING_BYTES),
        ),
        eviction_policy=_choice(settings, "eviction_policy", "lru"),
        write_policy=_choice(settings, "write_policy", "write-through"),
        demote_policy=_choice(settings, "demote_policy", "write-through"),
        load_policy=_choice(settings, "load_policy", "auto"),
        log_interval_s=_seconds(settings, "log_interval", 60.0),
        seed=_whole(settings, "seed", 0, low=0, high=2**32 - 1),
        emulate=_emulation(settings.get("emulate")),
        calibration=_calibration(settings.get("calibration")),
        fault_corrupt=_fault(settings),
    )
    if config.staging_bytes <= 0:
        raise ConfigError("--tiered-staging-size", "is 0", "give a size such as 256MiB")
    return config


def parse_size(setting: str, value: object) -> int:
    """Return bytes from a number or a text such as ``4GB`` or ``512MiB``.

    Raises:
        ConfigError: the text is not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(str(value).strip())
    unit = match.group(2).upper() if match else "?"
    if match is None or unit not in _UNITS:
        raise ConfigError(
            setting, f"{value!r} is not a size", "write for example 512MB, 4GiB or 2TB"
        )
    return int(float(match.group(1)) * _UNITS[unit])


def _read_file(path: str, known: set[str]) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            raw = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            "--tiered-config",
            f"{path} cannot be read ({error.strerror})",
            "give the path of a TOML file",
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            "--tiered-config", f"{path} is not TOML ({error})", "correct the file"
        ) from None
    settings = {key.replace("-", "_"): value for key, value in raw.items()}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(
            "--tiered-config",
            f"{path} has the unknown key {unknown[0]!r}",
            f"use {', '.join(sorted(known))}",
        )
    return settings


def _host_bytes(value: object) -> int:
    available = available_memory_bytes()
    if value == "auto":
        share = _AUTO_HOST_MAX_BYTES if available is None else available * _AUTO_SHARE
        return min(int(share), _AUTO_HOST_MAX_BYTES)
    size = parse_size("--tiered-host-size", value)
    if available is not None and size > available:
        raise ConfigError(
            "--tiered-host-size",
            f"{size / 2**30:.1f} GiB is more than the {available / 2**30:.1f} GiB "
            "of memory that is free",
            "give less, or auto for half of what is free",
        )
    if size == 0:
        raise ConfigError("--tiered-host-size", "is 0", "give a size such as 4GB")
    return size


def _disk(settings: Mapping[str, Any]) -> tuple[tuple[Path, ...], int]:
    value, size = settings.get("disk_path"), settings.get("disk_size")
    if value is None:
        if size is not None:
            raise ConfigError(
                "--tiered-disk-size",
                "is given without a path",
                "add --tiered-disk-path DIRECTORY",
            )
        return (), 0
    folders = _disk_folders(value)
    if size is None or size == "auto":
        return folders, _disk_auto_bytes(folders)
    size_bytes = parse_size("--tiered-disk-size", size)
    if size_bytes == 0:
        raise ConfigError("--tiered-disk-size", "is 0", "give a size such as 100GB")
    return folders, size_bytes


def _disk_folders(value: object) -> tuple[Path, ...]:
    """Make the folders of a comma-separated text, or of a list in a file."""
    names = value if isinstance(value, list) else str(value).split(",")
    folders = tuple(
        Path(str(name).strip()).expanduser().absolute()
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
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "--tiered-disk-path",
                f"{folder} cannot be used ({error.strerror})",
                "give a directory that this user may write to",
            ) from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                "--tiered-disk-path",
                f"{folder} is not writable",
                "give a directory that this user may write to",
            )
    return folders


def _disk_auto_bytes(folders: tuple[Path, ...]) -> int:
    """Return half of what is free, or held by a former server.

    All folders get equal shares, so the tightest one decides; folders of one file
    system share what is free there.
    """
    devices = [folder.stat().st_dev for folder in folders]
    shares = []
    for folder, device in zip(folders, devices, strict=True):
        free = shutil.disk_usage(folder).free / devices.count(device)
        held = sum(item.stat().st_size for item in folder.iterdir() if item.is_file())
        shares.append(free + held)
    return int(min(shares) * len(folders) * _AUTO_SHARE)


def _choice(settings: Mapping[str, Any], name: str, default: str) -> str:
    value = settings.get(name, default)
    if value not in CHOICES[name]:
        raise ConfigError(
            _flag(name), f"{value!r} is unknown", f"use {', '.join(CHOICES[name])}"
        )
    return str(value)


def _whole(
    settings: Mapping[str, Any], name: str, default: int, *, low: int, high: int
) -> int:
    value = settings.get(name, default)
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not low <= value <= high
    ):
        raise ConfigError(
            _flag(name),
            f"{value!r} is out of range",
            f"give a whole number from {low} to {high}",
        )
    return value


def _seconds(settings: Mapping[str, Any], name: str, default: float) -> float:
    value = settings.get(name, default)
    # isfinite: TOML and float() know nan, which no comparison catches.
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not (math.isfinite(value) and value >= 0)
    ):
        raise ConfigError(
            _flag(name), f"{value!r} is not a time", "give seconds, 0 for never"
        )
    return float(value)


def _emulation(value: object) -> dict[TierId, Emulation]:
    """Read ``host:bandwidth=2GB,latency=0.001;disk:bandwidth=500MB``."""
    setting = "--tiered-emulate"
    remedy = "write for example host:bandwidth=2GB,latency=0.001;disk:bandwidth=500MB"
    emulate: dict[TierId, Emulation] = {}
    for part in filter(None, str(value or "").split(";")):
        name, _, text = part.strip().partition(":")
        tiers = {TierId.HOST.label: TierId.HOST, TierId.DISK.label: TierId.DISK}
        pairs = dict(item.partition("=")[::2] for item in text.split(",") if item)
        if name not in tiers or not pairs or set(pairs) - {"bandwidth", "latency"}:
            raise ConfigError(setting, f"{part!r} is not understood", remedy)
        try:
            latency = float(pairs.get("latency", 0.0))
        except ValueError:
            raise ConfigError(setting, f"{part!r} is not understood", remedy) from None
        bandwidth = (
            float(parse_size(setting, pairs["bandwidth"]))
            if "bandwidth" in pairs
            else math.inf
        )
        if bandwidth <= 0 or not (math.isfinite(latency) and latency >= 0):
            raise ConfigError(setting, f"{part!r} is not positive", remedy)
        emulate[tiers[name]] = Emulation(bandwidth, latency)
    return emulate


def _calibration(value: object) -> Path | None:
    """Check the file; whether it fits the model is seen when that is loaded."""
    if value is None:
        return None
    path = Path(str(value)).expanduser().absolute()
    try:
        read_calibration(path)
    except ConfigError as error:
        raise ConfigError("--tiered-calibration", error.problem, error.remedy) from None
    return path


def _fault(settings: Mapping[str, Any]) -> str | None:
    if settings.get("fault_corrupt") is None:
        return None
    if os.environ.get(FAULT_ENV) != "1":
        raise ConfigError(
            "--tiered-fault-corrupt",
            "makes the server answer wrongly on purpose",
            f"set {FAULT_ENV}=1 if that is what you want",
        )
    return _choice(settings, "fault_corrupt", "")


def _flag(name: str) -> str:
    return "--" + (FLAG_PREFIX + name).replace("_", "-")
