"""The settings of a tiered server: flags and file in, one frozen value out.

Flags and environment are read here, once. A key of the file stands for the flag of
the same name without its prefix (``host-size`` or ``host_size`` stand for
``--tiered-host-size``); a flag that is given wins over the file.
"""

from __future__ import annotations

import math
import os
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_tiered.cache.prefetcher import DEFAULT_WINDOW
from sgl_tiered.core.ids import Encoding, TierId
from sgl_tiered.core.sizes import parse_size
from sgl_tiered.cost.calibration import read_calibration
from sgl_tiered.engines.sglang.layered.activations.settings import refuse_weights
from sgl_tiered.engines.sglang.layered.settings import (
    LAYERKV_CHOICES,
    STAGING_FAULT,
    LayerKvSettings,
    read_layerkv,
)
from sgl_tiered.engines.sglang.pooled.settings import (
    POOL_CHOICES,
    POOL_FAULT,
    PoolSettings,
    read_pool,
)
from sgl_tiered.engines.sglang.sparse.settings import (
    KEEP_FAULT,
    SPARSITY_CHOICES,
    SparsitySettings,
    read_sparsity,
)
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.admission.registry import ADMISSIONS, NO_ADMISSION
from sgl_tiered.policies.eviction.registry import EVICTION_POLICIES
from sgl_tiered.policies.length.registry import NO_PREDICTOR, make_length_predictor
from sgl_tiered.policies.order.registry import ORDERS
from sgl_tiered.policies.prefetch.registry import (
    PREFETCH_POLICIES,
    PREFETCH_TARGETS,
    check_prefetch_to,
)
from sgl_tiered.serving.lossy import LOSSY_DEFAULTS, REFUSE
from sgl_tiered.testing.emulation import Emulation, parse_emulation
from sgl_tiered.tiers.cxl_source import CxlSource, largest_bytes, parse_source
from sgl_tiered.tiers.disk_engines import ENGINES
from sgl_tiered.tiers.memory import available_memory_bytes

__all__ = [
    "BACKEND_NAME",
    "CHOICES",
    "EMULATED_TIERS",
    "FAULT_ENV",
    "FLAG_PREFIX",
    "RUST_ENV",
    "TieredConfig",
    "faults_allowed",
    "has_rust_server",
    "parse_size",
    "rank_folder",
    "read_config",
]

BACKEND_NAME = "tiered"
FLAG_PREFIX = "tiered_"
FAULT_ENV = "SGL_TIERED_ALLOW_FAULTS"
RUST_ENV = "SGLANG_RUST_SERVER"
EMULATED_TIERS = (TierId.HOST, TierId.CXL, TierId.DISK)
"""Tiers that ``--tiered-emulate`` and ``POST /tiered/faults`` know."""

ENCODINGS = tuple(
    e.label for e in (Encoding.RAW, Encoding.FP8, Encoding.INT8, Encoding.INT4)
)
"""How pages below the device may be written."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "eviction_policy": EVICTION_POLICIES,
    "device_eviction": EVICTION_POLICIES,
    "write_policy": ("auto", "write-through", "selective", "on-evict"),
    "demote_policy": ("write-through", "on-evict"),
    "disk_admission": ("auto", "all", "second-hit", "reuse"),
    "load_policy": ("auto", "always", "never"),
    "admission": ADMISSIONS,
    "order": ORDERS,
    "prefetch": PREFETCH_POLICIES,
    "prefetch_to": PREFETCH_TARGETS,
    "disk_io": ENGINES,
    "encoding": ENCODINGS,
    "lossy_default": LOSSY_DEFAULTS,
    "fault_corrupt": ("zero", "swap", STAGING_FAULT, KEEP_FAULT, POOL_FAULT),
    **LAYERKV_CHOICES,
    **POOL_CHOICES,
    **SPARSITY_CHOICES,
}

_DEFAULT_STAGING_BYTES = 256 * 2**20
"""Holds a 1,000-token read of an 8B model; larger reads are cut to fit."""
_MAX_NUMBER = 2**63 - 1
_AUTO_SHARE = 0.5
_AUTO_HOST_MAX_BYTES = 64 * 2**30
_FLOOR_SHARE, _FLOOR_S = 0.25, 0.5
"""Least TTFT target of requests: of the server's, or seconds where it has none."""


@dataclass(frozen=True, slots=True)
class TieredConfig:
    """Validated settings of the tiers.

    Attributes:
        host_bytes: size of the host tier.
        cxl, cxl_bytes: where the CXL tier's memory comes from, and its size; None and
            0 for none.
        disk_paths, disk_bytes: folders and size of the disk tier, all folders
            together; empty and 0 for none.
        disk_threads: I/Os that the disk tier has in flight, per folder.
        disk_io: how it does them: auto, threads, bounce, uring, mmap.
        staging_bytes: memory through which disk pages go up to the device.
        eviction_policy: which page leaves a full tier: lru, fifo, random, score, cost.
        device_eviction: the same for the device, by SGLang's Python tree; None for
            SGLang's own tree and policy.
        write_policy: when a page is offloaded to the host: write-through (when it is
            computed), selective (when it is seen a second time), auto (the one while
            prompts come again, the other while none does) or on-evict (the coldest,
            once the device is fuller than ``offload_threshold``).
        offload_threshold: share of the device, 0 to 1.
        demote_policy: when a host page is written to disk: write-through (soon after)
            or on-evict (the coldest, before room is needed).
        disk_admission: which pages may be written to disk: all, second-hit (seen by
            two requests), reuse (also where prompts were often seen again), or auto
            (all, but second-hit while nothing comes again).
        load_policy: auto (load if cheaper than recompute), always, never.
        length_predictor: how answer lengths are predicted: none, online (if there is
            an admission or layer-wise KV, which need it), constant:N, oracle, llm.
        order: in which order waiting requests are looked at, see policies/order.
        prefetch: when reads from disk begin: none (when their request is looked at),
            arrival (when it is queued), car (when they are due, into the host tier).
        prefetch_window: requests at the head of the queue that car looks at.
        prefetch_to: how far car brings pages: to the host, or on to the device where
            that has room.
        log_interval_s: time between two log lines; 0 for none.
        seed: for the policies that draw random numbers.
        emulate: tiers that are slowed down or fail on purpose.
        switchable_faults: delays and faults may be switched while serving (tests).
        explain_last: ended requests that can be explained; 0 for none, which saves the
            bookkeeping as well.
        calibration: file of ``sgl-tiered calibrate`` from which the planner's costs
            start; None to measure at start-up.
        admission: none, slo (prefill is held where decoders would be late) or goodput
            (where that harms fewer requests than it spares).
        slo_ttft_s, slo_tpot_s: targets of requests that bring none; 0 for none.
        slo_floor_s: least TTFT target that counts of those that requests bring.
        layerkv: of layer-wise KV; None where it is off.
        breaks_staging: layers are streamed wrongly on purpose (tests).
        encoding: how all pages below the device are written.
        lossy_default: whether requests that do not say so allow KV that was altered:
            refuse or allow.
        sparsity: of sparse KV; None where it is off.
        keeps_wrong: sparse KV keeps the wrong tokens on purpose (tests).
        pool: of servers that hand KV to each other; None for none.
        spoils_sent: what is sent to peers is spoiled on purpose (tests).
    """

    host_bytes: int
    cxl: CxlSource | None = None
    cxl_bytes: int = 0
    disk_paths: tuple[Path, ...] = ()
    disk_bytes: int = 0
    disk_threads: int = 8
    disk_io: str = "auto"
    staging_bytes: int = _DEFAULT_STAGING_BYTES
    eviction_policy: str = "lru"
    device_eviction: str | None = None
    write_policy: str = "auto"
    offload_threshold: float = 0.9
    demote_policy: str = "write-through"
    disk_admission: str = "auto"
    load_policy: str = "auto"
    length_predictor: str = NO_PREDICTOR
    order: str = "fcfs"
    prefetch: str = "arrival"
    prefetch_window: int = DEFAULT_WINDOW
    prefetch_to: str = "host"
    log_interval_s: float = 60.0
    seed: int = 0
    emulate: tuple[Emulation, ...] = ()
    switchable_faults: bool = False
    calibration: Path | None = None
    explain_last: int = 1_000
    admission: str = NO_ADMISSION
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    slo_floor_s: float = 0.0
    layerkv: LayerKvSettings | None = None
    breaks_staging: bool = False
    encoding: Encoding = Encoding.RAW
    lossy_default: str = REFUSE
    sparsity: SparsitySettings | None = None
    keeps_wrong: bool = False
    pool: PoolSettings | None = None
    spoils_sent: bool = False

    @property
    def is_encoded(self) -> bool:
        """Whether pages below the device are written in fewer bits."""
        return self.encoding is not Encoding.RAW

    @property
    def alters_all(self) -> bool:
        """Whether all pages below the device are other than those on it."""
        drops = self.sparsity is not None and self.sparsity.on_store
        return self.is_encoded or drops

    @property
    def is_lossy(self) -> bool:
        """Whether anything here alters KV."""
        return self.is_encoded or self.sparsity is not None


def read_config(
    values: Mapping[str, Any], *, num_ranks: int = 1, is_first: bool = True
) -> TieredConfig:
    """Build the settings from flag values (None where a flag was not given).

    Args:
        values: by flag name without ``--tiered-``, with underscores.
        num_ranks: ranks on this machine. Sizes are per rank; ``auto`` is a rank's part
            of what the machine has.
        is_first: no rank has taken memory yet, so that what is free is for all of them;
            else it is checked for one.

    Raises:
        ConfigError: one sentence about the first setting that is wrong.
    """
    given = {name: value for name, value in values.items() if value is not None}
    path = given.pop("config", None)
    from_file = {} if path is None else _read_file(path, set(values) - {"config"})
    settings = {**from_file, **given}
    _refuse_unusable(settings)

    num_to_come = num_ranks if is_first else 1
    pool = read_pool(settings)
    disk_paths, disk_bytes = _disk(settings, num_ranks)
    cxl, cxl_bytes = _cxl(settings, num_ranks)
    taken_bytes = cxl_bytes if cxl is not None and cxl.is_machine_memory else 0
    config = TieredConfig(
        host_bytes=_host_bytes(
            settings.get("host_size", "auto"), taken_bytes, num_ranks, num_to_come
        ),
        cxl=cxl,
        cxl_bytes=cxl_bytes,
        disk_paths=disk_paths,
        disk_bytes=disk_bytes,
        disk_threads=_whole(settings, "disk_threads", 8, low=1, high=256),
        disk_io=_choice(settings, "disk_io", "auto"),
        staging_bytes=parse_size(
            "--tiered-staging-size",
            settings.get("staging_size", _DEFAULT_STAGING_BYTES),
        ),
        eviction_policy=_choice(settings, "eviction_policy", "lru"),
        device_eviction=_choice(settings, "device_eviction", "")
        if "device_eviction" in settings
        else None,
        write_policy=_write_policy(settings, pool),
        offload_threshold=_share(settings, "offload_threshold", 0.9),
        demote_policy=_choice(settings, "demote_policy", "write-through"),
        disk_admission=_choice(settings, "disk_admission", "auto"),
        load_policy=_choice(settings, "load_policy", "auto"),
        length_predictor=_length_predictor(settings),
        order=_choice(settings, "order", "fcfs"),
        prefetch=_choice(settings, "prefetch", "arrival"),
        prefetch_window=_whole(
            settings, "prefetch_window", DEFAULT_WINDOW, low=1, high=1024
        ),
        prefetch_to=_choice(settings, "prefetch_to", "host"),
        log_interval_s=_seconds(settings, "log_interval", 60.0),
        seed=_whole(settings, "seed", 0, low=0, high=2**32 - 1),
        emulate=_emulation(settings),
        switchable_faults=faults_allowed(),
        calibration=_calibration(settings.get("calibration")),
        explain_last=_whole(settings, "explain_last", 1_000, low=0, high=1_000_000),
        admission=_choice(settings, "admission", NO_ADMISSION),
        slo_ttft_s=_target(settings, "slo_ttft"),
        slo_tpot_s=_target(settings, "slo_tpot"),
        slo_floor_s=_floor(settings),
        layerkv=read_layerkv(settings),
        breaks_staging=settings.get("fault_corrupt") == STAGING_FAULT,
        encoding=Encoding[_choice(settings, "encoding", Encoding.RAW.label).upper()],
        lossy_default=_choice(settings, "lossy_default", REFUSE),
        sparsity=read_sparsity(settings),
        keeps_wrong=settings.get("fault_corrupt") == KEEP_FAULT,
        pool=pool,
        spoils_sent=settings.get("fault_corrupt") == POOL_FAULT,
    )
    if config.staging_bytes <= 0:
        raise ConfigError("--tiered-staging-size", "is 0", "give a size such as 256MiB")
    check_prefetch_to(config.prefetch, config.prefetch_to, _flag("prefetch_to"))
    if config.layerkv is not None and config.prefetch_to == "device":
        raise ConfigError(
            _flag("prefetch_to"),
            "device does not go with --tiered-layerkv yet",
            "give host",
        )
    if config.layerkv is not None:
        refuse_weights(config.layerkv.weight_bytes, config.emulate)
    _refuse_lossy(config, said="lossy_default" in settings)
    return config


def _write_policy(settings: Mapping[str, Any], pool: PoolSettings | None) -> str:
    policy = _choice(
        settings, "write_policy", "auto" if pool is None else "write-through"
    )
    if pool is not None and policy == "auto":
        raise ConfigError(
            _flag("write_policy"),
            "auto does not go with --tiered-pool: what nobody asks this server for "
            "twice may be asked of another one",
            "leave it out, or give write-through",
        )
    return policy


def _refuse_lossy(config: TieredConfig, *, said: bool) -> None:
    if said and not config.is_lossy:
        raise ConfigError(
            _flag("lossy_default"),
            "has no effect where nothing alters KV",
            "add --tiered-encoding or --tiered-sparsity, or leave it out",
        )
    if config.layerkv is not None and config.is_encoded:
        raise ConfigError(
            _flag("encoding"),
            f"{config.encoding.label} does not go with {_flag('layerkv')} yet",
            "leave one of the two out",
        )


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
    except (ValueError, RecursionError) as error:
        # Of tomllib or of what it stands on: other bytes than UTF-8, numbers without
        # end, values nested without end.
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


def _refuse_unusable(settings: Mapping[str, Any]) -> None:
    """Refuse what no setting can be and not every check would survive."""
    for name, value in settings.items():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, int) and not -_MAX_NUMBER <= part <= _MAX_NUMBER:
                raise ConfigError(_flag(name), "is too large a number", "give less")
            if isinstance(part, str) and "\0" in part:
                raise ConfigError(
                    _flag(name), "has a zero byte in it", "write it without"
                )


def _host_bytes(
    value: object, taken_bytes: int, num_ranks: int, num_to_come: int
) -> int:
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
    size = parse_size("--tiered-host-size", value)
    if available is not None and size * num_to_come > available:
        ranks = f" for each of {num_to_come} ranks" if num_to_come > 1 else ""
        raise ConfigError(
            "--tiered-host-size",
            f"{size / 2**30:.1f} GiB{ranks} is more than the "
            f"{available / 2**30:.1f} GiB "
            f"of memory that is free{' beside the CXL tier' if taken_bytes else ''}",
            "give less, or auto for half of what is free",
        )
    if size == 0:
        raise ConfigError("--tiered-host-size", "is 0", "give a size such as 4GB")
    return size


def _cxl(settings: Mapping[str, Any], num_ranks: int) -> tuple[CxlSource | None, int]:
    text, size = settings.get("cxl"), settings.get("cxl_size")
    if text is None:
        if size is not None:
            raise ConfigError(
                "--tiered-cxl-size",
                "is given without a place",
                "add --tiered-cxl auto",
            )
        return None, 0
    source = parse_source(str(text), parse_size)
    largest = largest_bytes(source)
    if size is None or size == "auto":
        if largest is None:
            raise ConfigError(
                "--tiered-cxl-size",
                "is needed where CXL memory is emulated",
                "give a size such as 4GB",
            )
        return source, largest // num_ranks
    size_bytes = parse_size("--tiered-cxl-size", size)
    if size_bytes == 0:
        raise ConfigError("--tiered-cxl-size", "is 0", "give a size such as 100GB")
    if largest is not None and size_bytes > largest:
        raise ConfigError(
            "--tiered-cxl-size",
            f"{size_bytes / 2**30:.2f} GiB asked for, and {source.describe()} with "
            f"{largest / 2**30:.2f} GiB to give",
            "give less, or auto for all of it",
        )
    return source, size_bytes


def _disk(settings: Mapping[str, Any], num_ranks: int) -> tuple[tuple[Path, ...], int]:
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
        return folders, _disk_auto_bytes(folders, num_ranks)
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


def rank_folder(folder: Path, rank: int, num_ranks: int) -> Path:
    """Return where a rank keeps its part of a disk folder; one folder has one user."""
    return folder if num_ranks == 1 else folder / f"rank-{rank}-of-{num_ranks}"


def _disk_auto_bytes(folders: tuple[Path, ...], num_ranks: int = 1) -> int:
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
        raise ConfigError(
            "--tiered-disk-path",
            f"{error.filename} cannot be looked at ({error.strerror})",
            "give a directory that this user may write to",
        ) from None
    return int(min(shares) * len(folders) * _AUTO_SHARE / num_ranks)


def _held_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder; 0 where it is not there."""
    if not folder.is_dir():
        return 0
    return sum(item.stat().st_size for item in folder.iterdir() if item.is_file())


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


def _target(settings: Mapping[str, Any], name: str) -> float:
    """Return a target in seconds; 0 where there is none."""
    if settings.get(name) is None:
        return 0.0
    # Turns of layer-wise KV go by TPOT targets as well.
    is_read = name == "slo_tpot" and settings.get("layerkv") == "on"
    if not is_read and settings.get("admission", NO_ADMISSION) == NO_ADMISSION:
        raise ConfigError(
            _flag(name),
            "has no effect without an admission",
            "add --tiered-admission slo",
        )
    value = _seconds(settings, name, 0.0)
    if value == 0.0:
        raise ConfigError(
            _flag(name), "is 0", "give seconds, or leave it out for no target"
        )
    return value


def _floor(settings: Mapping[str, Any]) -> float:
    """Return the least TTFT target that a request may bring, in seconds."""
    ttft_s = _target(settings, "slo_ttft")
    floor_s = _target(settings, "slo_floor")
    if ttft_s and floor_s > ttft_s:
        raise ConfigError(
            _flag("slo_floor"),
            f"{floor_s:g} is more than {_flag('slo_ttft')}, {ttft_s:g}",
            "give less",
        )
    return floor_s or (ttft_s * _FLOOR_SHARE if ttft_s else _FLOOR_S)


def _share(settings: Mapping[str, Any], name: str, default: float) -> float:
    value = settings.get(name, default)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0.0 <= value <= 1.0
    ):
        raise ConfigError(
            _flag(name), f"{value!r} is not a share", "give a number from 0 to 1"
        )
    return float(value)


def faults_allowed() -> bool:
    """Say whether this process may fail on purpose: the environment has to ask."""
    return os.environ.get(FAULT_ENV) == "1"


def has_rust_server() -> bool:
    """Say whether SGLang serves by its server in Rust: the environment decides."""
    return os.environ.get(RUST_ENV, "").lower() in ("true", "1", "yes", "y")


def _emulation(settings: Mapping[str, Any]) -> tuple[Emulation, ...]:
    """Read ``--tiered-emulate``, and the older flag for one fault of the host."""
    sections = parse_emulation(str(settings.get("emulate") or ""), EMULATED_TIERS)
    flags = {"--tiered-emulate": any(section.faults for section in sections)}
    if settings.get("fault_corrupt") is not None:
        flags["--tiered-fault-corrupt"] = True
        kind = _choice(settings, "fault_corrupt", "")
        if kind not in (STAGING_FAULT, KEEP_FAULT, POOL_FAULT):
            sections += parse_emulation(f"host:fault={kind}", EMULATED_TIERS)
    for flag, fails in flags.items():
        if fails and not faults_allowed():
            raise ConfigError(
                flag,
                "makes the server fail or answer wrongly on purpose",
                f"set {FAULT_ENV}=1 if that is what you want",
            )
    return sections


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


def _length_predictor(settings: Mapping[str, Any]) -> str:
    """Check the name by making one; the server makes its own."""
    is_needed = settings.get("admission", NO_ADMISSION) != NO_ADMISSION
    is_wanted = is_needed or settings.get("layerkv") == "on"
    name = str(
        settings.get("length_predictor", "online" if is_wanted else NO_PREDICTOR)
    )
    if is_needed and name == NO_PREDICTOR:
        raise ConfigError(
            _flag("length_predictor"),
            "is none, and --tiered-admission needs one",
            "leave it out for online",
        )
    try:
        make_length_predictor(name)
    except ConfigError as error:
        raise ConfigError(
            _flag("length_predictor"), error.problem, error.remedy
        ) from None
    return name


def _flag(name: str) -> str:
    return "--" + (FLAG_PREFIX + name).replace("_", "-")
