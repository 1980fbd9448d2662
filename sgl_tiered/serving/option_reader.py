"""Reads the settings: flags and file in, one frozen ``Options`` out.

A key of the file stands for the flag of the same name without its prefix (``host-size``
or ``host_size`` for ``--tiered-host-size``), alone or in the table of its group; a flag
that is given wins over the file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sgl_tiered.core.ids import Encoding
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.admission.registry import NO_ADMISSION
from sgl_tiered.policies.length.registry import NO_PREDICTOR
from sgl_tiered.policies.prefetch.registry import check_prefetch_to
from sgl_tiered.serving.emulation import parse_emulation
from sgl_tiered.serving.option_clashes import (
    refuse_clashes,
    refuse_needed,
    refuse_on_cuda,
    refuse_on_store,
    refuse_own_clashes,
    refuse_pd,
)
from sgl_tiered.serving.options import (
    BACKEND_NAME,
    CONFIG,
    EMULATED_TIERS,
    GROUPS,
    KEEP_FAULT,
    OPTIONS,
    POOL_FAULT,
    STAGING_FAULT,
    Activations,
    Experiment,
    LayerKv,
    Loads,
    Lossy,
    Observe,
    Options,
    Pool,
    Queue,
    Slo,
    Sparsity,
    Tiers,
    Writes,
)
from sgl_tiered.serving.tier_sizes import cxl_place, disk_place, host_size

__all__ = [
    "FAULT_ENV",
    "FIELD_PREFIX",
    "NEEDS",
    "faults_allowed",
    "flag_values",
    "given_value",
    "read_options",
    "read_server",
]

FAULT_ENV = "SGL_TIERED_ALLOW_FAULTS"
FIELD_PREFIX = "tiered_"
"""Of our flags' fields among SGLang's arguments."""
_MAX_NUMBER = 2**63 - 1
_FLOOR_SHARE, _FLOOR_S = 0.25, 0.5
"""Least TTFT target of requests: of the server's, or seconds where it has none."""

NEEDS: Mapping[str, tuple[str, str]] = {
    "cxl": ("is given without a place", "add --tiered-cxl auto"),
    "disk_path": ("is given without a path", "add --tiered-disk-path DIRECTORY"),
    "admission": ("has no effect without an admission", "add --tiered-admission slo"),
    "layerkv": ("has no effect without layer-wise KV", "add --tiered-layerkv on"),
    "layers": (
        "stands for weights on the link that layers of KV take",
        "add --tiered-layerkv on",
    ),
    "activations": (
        "has no effect without activations",
        "add --tiered-activations auto",
    ),
    "sparsity": ("has no effect without sparse KV", "add --tiered-sparsity load"),
    "lossy": (
        "has no effect where nothing alters KV",
        "add --tiered-encoding or --tiered-sparsity, or leave it out",
    ),
    "pool": ("has no effect without a pool", "add --tiered-pool"),
}
"""What a setting without it is refused with: the problem, and the remedy."""


def read_options(
    values: Mapping[str, Any], *, num_ranks: int = 1, is_first: bool = True
) -> Options:
    """Build the settings from flag values (None where a flag was not given).

    Args:
        values: by flag name without ``--tiered-``, with underscores.
        num_ranks: ranks on this machine, which share what it has.
        is_first: no rank has taken memory yet, so that what is free is for all of them;
            else it is checked for one.

    Raises:
        ConfigError: one sentence about the first setting that is wrong.
    """
    given = {name: value for name, value in values.items() if value is not None}
    file = given.pop("config", None)
    settings = {**({} if file is None else _read_file(file)), **given}
    _refuse_unusable(settings)
    _refuse_useless(settings)
    if "pool" in settings:
        # What nobody asks this server for twice may be asked of another one.
        settings.setdefault("write_policy", "write-through")
    options = Options(
        pool=_pool(settings),
        tiers=_tiers(settings, num_ranks, num_ranks if is_first else 1),
        writes=_read(Writes, settings),
        loads=_read(Loads, settings),
        queue=_read(Queue, settings, length_predictor=_length_predictor(settings)),
        observe=_read(Observe, settings),
        experiment=_experiment(settings),
        slo=_slo(settings),
        layerkv=_layerkv(settings),
        lossy=_read(Lossy, settings),
        sparsity=_sparsity(settings),
    )
    queue = options.queue
    check_prefetch_to(queue.prefetch, queue.prefetch_to, OPTIONS["prefetch_to"].flag)
    refuse_own_clashes(options, settings)
    return options


def flag_values(server_args: Any) -> dict[str, Any]:
    """Return what was given by flags, by name without ``--tiered-``."""
    names = (CONFIG.name, *OPTIONS)
    found = {name: getattr(server_args, FIELD_PREFIX + name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def given_value(server_args: Any, name: str) -> Any:
    """Return one setting as flag or file give it, unchecked; None where neither does.

    For what must be known before the settings are read. A file that cannot be read
    gives nothing here; ``read_options`` says what is wrong with it.
    """
    flags = flag_values(server_args)
    if name in flags or CONFIG.name not in flags:
        return flags.get(name)
    try:
        return _read_file(flags[CONFIG.name]).get(name)
    except ConfigError:
        return None


def read_server(
    server_args: Any,
    device: str,
    resolved: Callable[[Any], Any],
    *,
    is_first: bool = False,
) -> Options | None:
    """Return the settings, or None where the server is not tiered.

    Args:
        server_args: SGLang's, with our flags as fields.
        device: the kind of device that SGLang runs on.
        resolved: returns SGLang's view of what it has made of its arguments.
        is_first: no rank of the server has taken memory yet.

    Raises:
        ConfigError: a setting is wrong, or does not go with another flag.
    """
    given = flag_values(server_args)
    for row in GROUPS["pd"]:
        given.pop(row.name, None)
    if server_args.radix_cache_backend != BACKEND_NAME:
        if given:
            raise ConfigError(
                f"--tiered-{min(given).replace('_', '-')}",
                "has no effect without the tiered cache",
                f"add --radix-cache-backend {BACKEND_NAME}",
            )
        refuse_pd(server_args, None)
        return None
    refuse_needed(server_args)
    num_ranks = getattr(server_args, "tp_size", 1) or 1
    options = read_options(given, num_ranks=num_ranks, is_first=is_first)
    refuse_clashes(options, server_args, device, given)
    if options.layerkv is not None and device == "cuda":
        refuse_on_cuda(resolved(server_args))
    return options


def faults_allowed() -> bool:
    """Say whether this process may fail on purpose: the environment has to ask."""
    return os.environ.get(FAULT_ENV) == "1"


def _read_file(path: str) -> dict[str, Any]:
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
    known = OPTIONS.keys() - {row.name for row in GROUPS["pd"]}
    settings: dict[str, Any] = {}
    for name, value in raw.items():
        # A table stands for its keys; which key is in which is for the reader only.
        is_table = name in GROUPS and isinstance(value, dict)
        for key, setting in value.items() if is_table else [(name, value)]:
            spelt = key.replace("-", "_")
            if spelt in settings:
                raise ConfigError(
                    "--tiered-config",
                    f"{path} has the key {spelt!r} twice",
                    "give it once",
                )
            settings[spelt] = setting
    unknown = sorted(settings.keys() - known)
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
        flag = OPTIONS[name].flag
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, int) and not -_MAX_NUMBER <= part <= _MAX_NUMBER:
                raise ConfigError(flag, "is too large a number", "give less")
            if isinstance(part, str) and "\0" in part:
                raise ConfigError(flag, "has a zero byte in it", "write it without")


def _refuse_useless(settings: Mapping[str, Any]) -> None:
    """Refuse what would have no effect: what it needs is not there."""
    is_layered = settings.get("layerkv", "off") != "off"
    is_sparse = settings.get("sparsity", "off") != "off"
    is_encoded = settings.get("encoding", Encoding.RAW.label) != Encoding.RAW.label
    there = {
        "cxl": "cxl" in settings,
        "disk_path": "disk_path" in settings,
        "admission": settings.get("admission", NO_ADMISSION) != NO_ADMISSION,
        "layerkv": is_layered,
        "layers": is_layered,
        "activations": _word(settings, "activations", 0.0) != 0.0,
        "sparsity": is_sparse,
        "lossy": is_sparse or is_encoded,
        "pool": "pool" in settings,
    }
    for name in sorted(settings):
        needs = OPTIONS[name].needs.split()
        if needs and not any(there[need] for need in needs):
            raise ConfigError(OPTIONS[name].flag, *NEEDS[needs[0]])


def _word(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of one setting, or a default."""
    row = OPTIONS[name]
    return row.kind.read(row.flag, settings[name]) if name in settings else default


def _read(part: Any, settings: Mapping[str, Any], **made: Any) -> Any:
    """Return a part: its rows that were given, and what was made elsewhere."""
    for each in fields(part):
        row = each.metadata.get("option")
        if row is not None and row.name in settings and each.name not in made:
            made[each.name] = _word(settings, row.name, None)
    return part(**made)


def _tiers(settings: Mapping[str, Any], num_ranks: int, num_to_come: int) -> Any:
    disk_paths, disk_bytes = disk_place(settings, num_ranks)
    cxl, cxl_bytes = cxl_place(settings, num_ranks)
    taken_bytes = cxl_bytes if cxl is not None and cxl.is_machine_memory else 0
    return _read(
        Tiers,
        settings,
        host_bytes=host_size(
            settings.get("host_size", "auto"), taken_bytes, num_ranks, num_to_come
        ),
        cxl=cxl,
        cxl_bytes=cxl_bytes,
        disk_paths=disk_paths,
        disk_bytes=disk_bytes,
    )


def _length_predictor(settings: Mapping[str, Any]) -> Any:
    is_needed = settings.get("admission", NO_ADMISSION) != NO_ADMISSION
    is_wanted = is_needed or settings.get("layerkv") == "on"
    name = _word(settings, "length_predictor", "online" if is_wanted else NO_PREDICTOR)
    if is_needed and name == NO_PREDICTOR:
        raise ConfigError(
            OPTIONS["length_predictor"].flag,
            "is none, and --tiered-admission needs one",
            "leave it out for online",
        )
    return name


def _experiment(settings: Mapping[str, Any]) -> Any:
    read = _read(Experiment, settings, switchable_faults=faults_allowed())
    flags = {"emulate": any(section.faults for section in read.emulate)}
    flags["fault_corrupt"] = bool(read.fault)
    for name, fails in flags.items():
        if fails and not faults_allowed():
            raise ConfigError(
                OPTIONS[name].flag,
                "makes the server fail or answer wrongly on purpose",
                f"set {FAULT_ENV}=1 if that is what you want",
            )
    if read.fault in ("", STAGING_FAULT, KEEP_FAULT, POOL_FAULT):
        return read
    # The older flag for one fault of the host.
    struck = parse_emulation(f"host:fault={read.fault}", EMULATED_TIERS)
    return replace(read, emulate=read.emulate + struck)


def _slo(settings: Mapping[str, Any]) -> Any:
    slo = _read(Slo, settings)
    ttft_s, floor_s = slo.slo_ttft_s, slo.slo_floor_s
    if ttft_s and floor_s > ttft_s:
        raise ConfigError(
            OPTIONS["slo_floor"].flag,
            f"{floor_s:g} is more than {OPTIONS['slo_ttft'].flag}, {ttft_s:g}",
            "give less",
        )
    floor_s = floor_s or (ttft_s * _FLOOR_SHARE if ttft_s else _FLOOR_S)
    return replace(slo, slo_floor_s=floor_s)


def _layerkv(settings: Mapping[str, Any]) -> Any:
    is_on = _word(settings, "layerkv", "off") == "on"
    share = _word(settings, "activations", 0.0)
    if share != 0.0 and not is_on:
        raise ConfigError(
            OPTIONS["activations"].flag,
            "keeps single layers, which only layer-wise KV does",
            "add --tiered-layerkv on",
        )
    if not is_on:
        return None
    # A share of 0 is nothing to be built for.
    kept = None if share == 0.0 else _read(Activations, settings, share=share)
    return _read(LayerKv, settings, activations=kept)


def _sparsity(settings: Mapping[str, Any]) -> Any:
    mode = _word(settings, "sparsity", "off")
    if mode == "off":
        return None
    if mode == "store":
        # Before a file is read for nothing.
        refuse_on_store(settings)
    return _read(Sparsity, settings, on_store=mode == "store")


def _pool(settings: Mapping[str, Any]) -> Any:
    url = _word(settings, "pool", None)
    return None if url is None else _read(Pool, settings, url=url)
