"""The settings of a tiered server: one row a setting, and the value of all of them.

A field of a part is a row: its flag's name, what it may be, its default, what it means.
From the rows are made SGLang's flags, the reader of flags and file (``option_reader``)
and ``docs/reference/options.md``. What does not go together: ``option_clashes``.

Of several wrong settings any one is refused.
"""

# ruff: noqa: RUF009 - _row and _part return dataclasses.field, made for each field anew

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

from sgl_tiered.cache.config import DEMOTE_POLICIES, LOAD_POLICIES, WRITE_POLICIES
from sgl_tiered.cache.prefetcher import DEFAULT_WINDOW
from sgl_tiered.core.ids import Encoding, TierId
from sgl_tiered.cost.calibration import read_calibration
from sgl_tiered.cost.returning import RETURN_POLICIES
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.admission.registry import ADMISSIONS, NO_ADMISSION
from sgl_tiered.policies.eviction.registry import EVICTION_POLICIES
from sgl_tiered.policies.length.registry import NO_PREDICTOR, make_length_predictor
from sgl_tiered.policies.order.registry import ORDERS
from sgl_tiered.policies.prefetch.registry import PREFETCH_POLICIES, PREFETCH_TARGETS
from sgl_tiered.policies.sparsity.profile import SparsityProfile
from sgl_tiered.policies.sparsity.registry import SELECTIONS
from sgl_tiered.policies.write_admission.registry import WRITE_ADMISSIONS
from sgl_tiered.pool.membership import check_name
from sgl_tiered.serving.emulation import Emulation, parse_emulation
from sgl_tiered.serving.lossy import LOSSY_DEFAULTS, REFUSE
from sgl_tiered.serving.option_kinds import (
    Kind,
    absolute,
    by_flag,
    choice,
    count,
    number,
    path,
    seconds,
    share,
    size,
    text,
)
from sgl_tiered.tiers.cxl_source import CxlSource
from sgl_tiered.tiers.disk_engines import ENGINES

__all__ = [
    "BACKEND_NAME",
    "CONFIG",
    "EMULATED_TIERS",
    "GROUPS",
    "KEEP_FAULT",
    "OPTIONS",
    "POOL_FAULT",
    "STAGING_FAULT",
    "Activations",
    "Experiment",
    "LayerKv",
    "Loads",
    "Lossy",
    "Observe",
    "Option",
    "Options",
    "Pd",
    "PdCaching",
    "Pool",
    "Queue",
    "Slo",
    "Sparsity",
    "Tiers",
    "Writes",
]

BACKEND_NAME = "tiered"
"""Our name for ``--radix-cache-backend`` and ``--disaggregation-transfer-backend``."""
EMULATED_TIERS = (TierId.HOST, TierId.CXL, TierId.DISK)
"""Tiers that ``--tiered-emulate`` and ``POST /tiered/faults`` know."""
STAGING_FAULT, KEEP_FAULT, POOL_FAULT = "staging", "keep", "peer"
"""Words of ``--tiered-fault-corrupt`` that break streaming of layers, keep the wrong
tokens of sparse KV, and spoil what is sent to peers."""

_ENCODINGS = tuple(
    e.label for e in (Encoding.RAW, Encoding.FP8, Encoding.INT8, Encoding.INT4)
)
_TRANSPORTS = ("auto", "mooncake", "nixl", "loopback")
_REGISTRIES = ("file:", "etcd://", "etcd+https://")
_DEFAULT_STAGING_BYTES = 256 * 2**20
"""Holds a 1,000-token read of an 8B model; larger reads are cut to fit."""
_MAX_LAYERS = 1024
_DEFAULT_QUERIES = 512
"""Of 2,048 new tokens (one layer, 8 heads of 64, one thread of a busy machine) asking
all took 1.8 times as long as their attention, 512 of them 0.4 times, 128 0.2 times. Of
the half that all rank best, on random keys, 512 found 96 %, and 128 78 %."""
_MIN_QUERIES = 128


@dataclass(frozen=True, slots=True)
class Option:
    """One setting.

    Attributes:
        place: ``flag``, ``table`` (its flag works, and ``--help`` does not name it) or
            ``hidden`` (for experiments and tests: the same).
        name: ``host_size`` for ``--tiered-host-size`` and the key ``host-size``.
        kind: what it may be.
        default: of the field.
        needs: words of ``option_reader.NEEDS``: unless one of them holds, the setting
            would have no effect and is refused.
        part: that a switch turns on.
        help: what it means, with its default.
    """

    place: str
    name: str
    kind: Kind
    default: Any
    needs: str = ""
    part: type | None = None
    help: str = ""

    @property
    def flag(self) -> str:
        """The flag, as people write it."""
        return "--tiered-" + self.name.replace("_", "-")

    def means(self, help: str) -> Any:
        """Return the field of a part that this row is."""
        row = replace(self, help=help)
        return field(default=row.default, metadata={"option": row, "part": row.part})


_flag, _table, _hidden = (
    partial(Option, place) for place in ("flag", "table", "hidden")
)


def _part(part: type) -> Any:
    return field(default_factory=part, metadata={"part": part})


def _retain(flag: str, value: str) -> int | None:
    if value == "auto":
        return None
    if not value.isdigit() or int(value) > _MAX_LAYERS:
        raise ConfigError(
            flag,
            f"{value!r} is not a number of layers",
            "give a whole number from 0, or auto",
        )
    return int(value)


def _activations(flag: str, value: str) -> float | None:
    """Return the share that was given, 0 for off; None for auto."""
    if value == "auto":
        return None
    try:
        found = 0.0 if value == "off" else float(value)
    except ValueError:
        found = -1.0
    # Not "< 0": nan is no share either.
    if not 0.0 <= found <= 1.0:
        raise ConfigError(
            flag,
            f"{value!r} is neither a share nor a word",
            "give a number from 0 to 1, off or auto",
        )
    return found


def _registry(flag: str, url: str) -> str:
    if url != "local" and not url.startswith(_REGISTRIES):
        raise ConfigError(
            flag,
            f"{url!r} is no registry",
            "give local, file:PATH or etcd://HOST:PORT/PREFIX",
        )
    return url


def _pool_name(flag: str, name: str) -> str:
    if name:
        by_flag(flag, lambda: check_name(name))
    return name


def _keys(folder: Path) -> None:
    if not os.path.isdir(folder):  # where is_dir raises, as of a long name, it is none
        raise ConfigError(
            "keys", f"{folder} is no folder", "make keys with sgl-tiered pool keys"
        )


def _predictor(flag: str, name: str) -> str:
    """Check the name by making one; the server makes its own."""
    by_flag(flag, lambda: make_length_predictor(name))
    return name


def _profile(flag: str, name: str) -> SparsityProfile:
    """Read the file; whether it is of the model is seen when that is loaded."""
    file = absolute(flag, name)
    return by_flag(flag, lambda: SparsityProfile.load(file))


_SIZE = text("size, `auto`")
_LAYER_SIZE = size("give a size such as 4GB", auto=0)
_TARGET = seconds("give seconds, or leave it out for no target")

CONFIG = Option(
    "flag",
    "config",
    text("path"),
    None,
    help="TOML file with any of the --tiered-* settings as keys.",
)


@dataclass(frozen=True, slots=True)
class Tiers:
    """What lies below the device, and how large it is, per rank.

    ``option_reader`` reads places and sizes, which the machine has a say in.

    Attributes:
        cxl: None for no CXL tier.
        disk_paths: empty for no disk tier.
        device_eviction: None for SGLang's own tree and policy.
    """

    host_bytes: int = _flag("host_size", _SIZE, 0).means(
        "Size of the host tier of a rank, e.g. 32GB; default auto: half of "
        "free memory, shared by the ranks."
    )
    cxl: CxlSource | None = _flag("cxl", text("place"), None).means(
        "Memory of the CXL tier: auto (NUMA nodes without cores), node:1,2, "
        "/dev/dax0.0, or a stand-in: emulate:memory, emulate:node:0, "
        "emulate:/dev/shm. Default none."
    )
    cxl_bytes: int = _flag("cxl_size", _SIZE, 0, "cxl").means(
        "Size of the CXL tier, e.g. 256GB; default auto, all that is free."
    )
    disk_paths: tuple[Path, ...] = _flag("disk_path", text("paths"), ()).means(
        "Directory of the disk tier, kept across restarts; default none. "
        "Several, separated by commas and best on several devices, are striped."
    )
    disk_bytes: int = _flag("disk_size", _SIZE, 0, "disk_path").means(
        "Size of the disk tier of a rank, all directories together, e.g. 2TB; "
        "default auto: half of free space, shared by the ranks."
    )
    disk_threads: int = _table("disk_threads", count(1, 256), 8).means(
        "I/Os in flight per directory of the disk tier; default 8."
    )
    disk_io: str = _table("disk_io", choice(ENGINES), "auto").means(
        "How the disk tier does I/O: auto (default: bounce on virtual disks, "
        "else threads), threads, bounce, uring (needs NIXL: the extra uring) or "
        "mmap; what does not work here becomes threads."
    )
    staging_bytes: int = _table(
        "staging_size", size("give a size such as 256MiB"), _DEFAULT_STAGING_BYTES
    ).means("Memory through which disk pages go to the device; default 256MiB.")
    eviction_policy: str = _flag(
        "eviction_policy", choice(EVICTION_POLICIES), "lru"
    ).means(
        "Which page leaves a full tier: lru (default), fifo, random, score "
        "(what the window and the device use least) or cost (what saves the least "
        "time for its room, as learned and as the queue says)."
    )
    device_eviction: str | None = _flag(
        "device_eviction", choice(EVICTION_POLICIES), None
    ).means(
        "The same for the device, in SGLang's Python tree; default SGLang's "
        "own policy and tree."
    )


@dataclass(frozen=True, slots=True)
class Writes:
    """When pages are copied down."""

    write_policy: str = _flag("write_policy", choice(WRITE_POLICIES), "auto").means(
        "When a page is copied to the host: when it is computed "
        "(write-through), when it is seen again (selective), the one until traffic "
        "has shown that nothing comes again and the other until it does (auto, "
        "default), or before the device drops it (on-evict)."
    )
    offload_threshold: float = _table("offload_threshold", share(), 0.9).means(
        "Share of the device in use above which on-evict copies the coldest "
        "pages; default 0.9."
    )
    demote_policy: str = _table(
        "demote_policy", choice(DEMOTE_POLICIES), "write-through"
    ).means(
        "When a host page is written to disk: soon (write-through, default) "
        "or the coldest ones ahead of need (on-evict)."
    )
    disk_admission: str = _flag(
        "disk_admission", choice(WRITE_ADMISSIONS), "auto"
    ).means(
        "Which pages are written to disk: all, those that two requests had "
        "(second-hit), also those where prompts are often seen again (reuse), or "
        "all unless traffic has shown that nothing comes again (auto, default)."
    )


@dataclass(frozen=True, slots=True)
class Loads:
    """When pages are loaded, and what that is taken to cost."""

    load_policy: str = _flag("load_policy", choice(LOAD_POLICIES), "auto").means(
        "Load cached pages if that is cheaper than recompute (auto, default), "
        "always or never."
    )
    calibration: Path | None = _flag(
        "calibration", path("path", read_calibration), None
    ).means(
        "File of sgl-tiered calibrate, from which the planner's costs start; "
        "default none, a short measurement at start-up."
    )


@dataclass(frozen=True, slots=True)
class Queue:
    """What waiting requests bring about."""

    length_predictor: str = _flag(
        "length_predictor",
        text("`none`, `online`, `constant:N`, `oracle`, `llm`", _predictor),
        NO_PREDICTOR,
    ).means(
        "How answer lengths are predicted: none (default), online (learned "
        "from the answers that end; default where --tiered-admission or "
        "--tiered-layerkv needs it), constant:N, oracle (experiments: requests say "
        "it in custom_params) or llm (like online, and while requests wait the "
        "model is asked for the lengths of its own answers)."
    )
    order: str = _flag("order", choice(ORDERS), "fcfs").means(
        "In which order waiting requests are served: fcfs (default), fpf "
        "(nearest prefix first, unfair), relaxed-fpf (the same, aged), car (device "
        "hits first, within a window) or cost (shortest predicted pass first, as "
        "far as nobody's wait leaves what fcfs gives). SGLang's own orders: "
        "--schedule-policy."
    )
    prefetch: str = _flag("prefetch", choice(PREFETCH_POLICIES), "arrival").means(
        "When a queued request's pages are read from disk: when the request "
        "is looked at (none), as soon as it is queued (arrival, default), or in "
        "time for its turn, into the host tier (car)."
    )
    prefetch_window: int = _table(
        "prefetch_window", count(1, 1024), DEFAULT_WINDOW
    ).means("Queued requests that --tiered-prefetch car looks at; default 16.")
    prefetch_to: str = _table("prefetch_to", choice(PREFETCH_TARGETS), "host").means(
        "How far --tiered-prefetch car brings pages: to the host tier "
        "(default), or on to the device ahead of admission, where it has room that "
        "nobody else needs."
    )


@dataclass(frozen=True, slots=True)
class Observe:
    """What is said of a server's work."""

    log_interval_s: float = _table("log_interval", seconds(), 60.0).means(
        "Seconds between two log lines of the tiers; default 60, 0 for none."
    )
    explain_last: int = _table("explain_last", count(0, 1_000_000), 1_000).means(
        "Ended requests that GET /tiered/explain knows, about 4 kB each; "
        "default 1000, 0 for none."
    )


@dataclass(frozen=True, slots=True)
class Experiment:
    """For experiments and tests.

    Attributes:
        fault: what is broken on purpose, beside what ``emulate`` says.
        switchable_faults: they may be switched while serving, as the environment says.
    """

    seed: int = _hidden("seed", count(0, 2**32 - 1), 0).means(
        "Seed of the policies that draw random numbers; default 0."
    )
    emulate: tuple[Emulation, ...] = _hidden(
        "emulate",
        Kind("text", lambda _, it: parse_emulation(str(it or ""), EMULATED_TIERS)),
        (),
    ).means(
        "For experiments: slow tiers down, e.g. 'host+cxl:bandwidth=20GB;"
        "disk:read-bandwidth=2GB,write-bandwidth=1GB,latency=0.001,"
        "delay=0.2@0.01'; or make them fail, e.g. 'disk:fault=error@0.1/load' "
        "(needs SGL_TIERED_ALLOW_FAULTS=1). All of it: pydoc "
        "sgl_tiered.serving.emulation."
    )
    fault: str = _hidden(
        "fault_corrupt",
        choice(("zero", "swap", STAGING_FAULT, KEEP_FAULT, POOL_FAULT)),
        "",
    ).means(
        "For tests: load a wrong page from the host, as "
        "--tiered-emulate host:fault=... does, or leave pages out where layers are "
        "streamed (staging), or keep the wrong tokens of sparse KV (keep), or send "
        "peers other bytes (peer); needs SGL_TIERED_ALLOW_FAULTS=1."
    )
    switchable_faults: bool = False


@dataclass(frozen=True, slots=True)
class Slo:
    """Whose prefill is held; targets of requests that bring none, 0 for none."""

    admission: str = _flag("admission", choice(ADMISSIONS), NO_ADMISSION).means(
        "Which prefill may delay requests that decode: all (none, default), "
        "as much as their TPOT targets allow (slo), or what harms fewer requests "
        "than a delay would (goodput)."
    )
    slo_ttft_s: float = _flag("slo_ttft", _TARGET, 0.0, "admission").means(
        "Target for the time to the first token, in seconds, of requests that "
        "bring none; default none."
    )
    # Turns of layer-wise KV go by it as well.
    slo_tpot_s: float = _flag("slo_tpot", _TARGET, 0.0, "admission layerkv").means(
        "Target for the mean time per token after the first, in seconds, of "
        "requests that bring none (they may, as custom_params: "
        '{"tiered": {"ttft_s": 2, "tpot_s": 0.05}}); default none.'
    )
    slo_floor_s: float = _table("slo_floor", _TARGET, 0.0, "admission").means(
        "Least target for the time to the first token, in seconds, that "
        "counts of those that requests bring: who is due goes before others. "
        "Default a quarter of --tiered-slo-ttft, 0.5 without it."
    )


@dataclass(frozen=True, slots=True)
class Activations:
    """Pages that are kept as activations.

    Attributes:
        share: of a request's full pages, above 0; None for what is best (auto).
        device_bytes: 0 for as much as staging, open pages and a prefill's pages need.
    """

    share: float | None
    device_bytes: int = _table(
        "activations_device_size",
        size("give a size such as 256MB, or auto", auto=0),
        0,
        "activations",
    ).means(
        "Part of the device's pool for activations on their way, e.g. 64MB; "
        "default auto, for staging, open pages and a chunk of a prompt."
    )


@dataclass(frozen=True, slots=True)
class LayerKv:
    """Layer-wise KV.

    Attributes:
        host_bytes: 0 for four times the device's pool.
        retain: None for as many layers as the prefill cannot hide the copies of.
        staging_bytes: 0 for two layers of the longest context.
        has_guard: copies give way to collectives, where both use one link.
        weight_bytes: of each layer.
    """

    host_bytes: int = _table("layerkv_host_size", _LAYER_SIZE, 0, "layerkv").means(
        "Memory for layers that are not on the device, e.g. 16GB; default "
        "four times the device's pool. It bounds the tokens that are admitted."
    )
    decode: str = _table(
        "layerkv_decode", choice(("pause", "stream")), "pause", "layerkv"
    ).means(
        "Who decodes where layers of running requests are in memory: those "
        "whose layers stream in time, while others wait for their turn (pause, "
        "default), or everybody (stream)."
    )
    retain: int | None = _table(
        "layerkv_retain",
        text(f"0 to {_MAX_LAYERS:,}, `auto`", _retain),
        None,
        "layerkv",
    ).means(
        "Layers of a prompt that stay on the device: a number, or auto "
        "(default), as many as its prefill cannot hide the copies of."
    )
    staging_bytes: int = _table(
        "layerkv_staging_size", _LAYER_SIZE, 0, "layerkv"
    ).means(
        "Part of the device's pool through which layers are streamed; default "
        "twice a layer of the longest context."
    )
    has_guard: bool = _table(
        "layerkv_guard",
        choice(("auto", "off"), lambda word: word == "auto"),
        True,
        "layerkv",
    ).means(
        "With --tp-size above 1: copies of layers give way to collectives on "
        "a link that both use, which on CUDA is so without NVLink (auto, default), "
        "or never (off)."
    )
    activations: Activations | None = _flag(
        "activations",
        text("0 to 1, `auto`, `off`", _activations),
        None,
        part=Activations,
    ).means(
        "With --tiered-layerkv on: share of a request's pages, 0 to 1, kept "
        "below the device as activations, of which K and V are made again; auto "
        "for what the link and the cores make best, or none (off, default). "
        "Experimental, on CUDA never run, and there only with a share."
    )
    weight_bytes: int = _hidden(
        "emulate_weights", size("give the bytes of a layer's weights"), 0, "layers"
    ).means(
        "For benchmarks: bytes of weights, e.g. 16MB, that cross the emulated "
        "host link before each layer of each forward, as if weights were offloaded."
    )


@dataclass(frozen=True, slots=True)
class Lossy:
    """KV that is altered to save bytes."""

    encoding: Encoding = _flag(
        "encoding",
        choice(_ENCODINGS, lambda word: Encoding[word.upper()]),
        Encoding.RAW,
    ).means(
        "How KV is written below the device: raw (default), or in fewer bits, "
        "fp8 and int8 in about half of the bytes, int4 in a quarter. What comes "
        "back then differs a little; only requests that allow it get any (see "
        "--tiered-lossy-default). Needs --page-size 16 or more."
    )
    default: str = _flag(
        "lossy_default", choice(LOSSY_DEFAULTS), REFUSE, "lossy"
    ).means(
        "Whether requests that do not say so allow KV that was altered to "
        "save bytes: refuse (default) or allow. A request says it as "
        'custom_params: {"tiered": {"lossy": "allow"}}.'
    )


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Sparse KV.

    Attributes:
        profile: of the model, for ratios by layer; None for none.
        budget: instead of ``keep``; None where that counts.
        on_store: tokens are left out when pages are offloaded already.
    """

    keep: float = _table(
        "sparsity_keep",
        number(
            "above 0, to 1",
            lambda value: 0.0 < value <= 1.0,
            "is not a share to keep",
            "give a number above 0 and at most 1",
        ),
        0.5,
        "sparsity",
    ).means(
        "Share of all layers' tokens that is loaded; default 0.5. With "
        "--tiered-sparsity-profile layers share it out by what they lose."
    )
    policy: str = _table(
        "sparsity_policy", choice(SELECTIONS), "car", "sparsity"
    ).means(
        "Who selects the tokens: what distant queries read most, in each "
        "layer as many as it needs (car, default) or the same share of each "
        "(car-uniform); for comparison the methods h2o, snapkv, pyramidkv, random "
        "and recent."
    )
    profile: SparsityProfile | None = _table(
        "sparsity_profile", text("path", _profile), None, "sparsity"
    ).means(
        "File of sgl-tiered profile for this model: how few tokens of each "
        "layer hold what is read from afar. Default none."
    )
    budget: float | None = _table(
        "sparsity_budget",
        number(
            "0 to below 1",
            lambda value: 0.0 <= value < 1.0,
            "is not a share of attention to lose",
            "give a number from 0 to below 1",
        ),
        None,
        "sparsity",
    ).means(
        "In place of --tiered-sparsity-keep, the share of long-range "
        "attention that may be lost, e.g. 0.02: as few tokens are loaded as the "
        "profile allows."
    )
    queries: int = _hidden(
        "sparsity_queries",
        number(
            f"from {_MIN_QUERIES}",
            lambda value: value >= _MIN_QUERIES,
            "is no number of queries to ask",
            f"give a whole number from {_MIN_QUERIES}",
            int,
        ),
        _DEFAULT_QUERIES,
        "sparsity",
    ).means(
        "How many queries of a pass of a prefill are asked at most what they "
        "read, 128 or more; default 512. Of a longer pass a sample is."
    )
    on_store: bool = False

    def tokens_of(self, page_tokens: int) -> int:
        """Return how many tokens of each page are stored, where some are left out."""
        return math.ceil(self.keep * page_tokens - 1e-9)


@dataclass(frozen=True, slots=True)
class Pool:
    """Servers that hand KV to each other.

    Attributes:
        url: of the registry.
        name: empty for one made of host and port.
        keys: folder of CURVE keys; None on one machine.
    """

    url: str
    name: str = _flag("pool_name", text("text", _pool_name), "", "pool").means(
        "Name of this server in its pool, the same after a restart; default "
        "one made of the machine's name and --port."
    )
    host: str = _flag("pool_host", text("address"), "127.0.0.1", "pool").means(
        "Address on which other servers of the pool reach this one; default "
        "127.0.0.1. Beyond this machine it needs --tiered-pool-keys and a private "
        "network."
    )
    transport: str = _table(
        "pool_transport", choice(_TRANSPORTS), "auto", "pool"
    ).means(
        "What carries KV between servers: auto (mooncake or nixl, else "
        "loopback on one machine; default), mooncake, nixl or loopback."
    )
    keys: Path | None = _table("pool_keys", path("path", _keys), None, "pool").means(
        "Folder of the CURVE keys of the pool's control messages."
    )


class PdCaching(IntEnum):
    """Who keeps KV after a request: MemServe's designs (Table 4)."""

    NOBODY = 0
    PREFILL = 1
    BOTH = 2
    RETURNED = 3


@dataclass(frozen=True, slots=True)
class Pd:
    """Prefill and decode on servers of their own, with or without tiers: flags only.

    Attributes:
        caching: None where SGLang's own flags say it.
    """

    caching: PdCaching | None = _flag(
        "pd_caching", choice(tuple(map(int, PdCaching)), PdCaching), None
    ).means(
        "With --disaggregation-mode: who keeps KV after a request, and who "
        "sends what: nobody (0), the prefill instance (1), the decode instance as "
        "well, which is then sent only what it lacks (2), and KV of answers goes "
        "back to the prefill instance's host tier (3). Default: as SGLang's own "
        "flags say; 2 on a decode instance with tiers. Needs "
        "--disaggregation-transfer-backend tiered."
    )
    transport: str = _flag("pd_transport", choice(_TRANSPORTS), "auto").means(
        "What moves KV from prefill to decode: mooncake (RDMA with "
        "--disaggregation-ib-device, else TCP), nixl, loopback (two servers on one "
        "machine, for tests), or auto (default), the first of them that is here."
    )
    returns: str = _flag("pd_returns", choice(RETURN_POLICIES), "auto").means(
        "With --tiered-pd-caching 3 on decode: which answers go back to the "
        "prefill instance: those whose next turn is predicted to save more than "
        "their return costs (auto, default), or for experiments always or never."
    )


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a server with tiers, a part for each group; None: it is off."""

    tiers: Tiers = _part(Tiers)
    writes: Writes = _part(Writes)
    loads: Loads = _part(Loads)
    queue: Queue = _part(Queue)
    slo: Slo = _part(Slo)
    layerkv: LayerKv | None = _flag(
        "layerkv", choice(("off", "on")), None, part=LayerKv
    ).means(
        "Layer-wise KV: prompts keep some layers on the device, the others in "
        "memory, streamed as they are needed (on), or all layers (off, default). "
        "--max-total-tokens then is the device's room; more tokens are admitted."
    )
    lossy: Lossy = _part(Lossy)
    sparsity: Sparsity | None = _flag(
        "sparsity", choice(("off", "load", "store")), None, part=Sparsity
    ).means(
        "For requests that allow lossy KV: load only the tokens of a layer "
        "that attention reads (load; experimental, CPU only), offload no others "
        "(store), or keep all (off, default)."
    )
    pool: Pool | None = _flag("pool", text("text", _registry), None, part=Pool).means(
        "Registry of a pool of servers that hand KV to each other: local (of "
        "this user and machine, see sgl-tiered pool up), file:PATH or "
        "etcd://HOST:PORT/PREFIX; default none. What a server of the pool has "
        "computed another one then pulls, where that is faster than computing it."
    )
    observe: Observe = _part(Observe)
    experiment: Experiment = _part(Experiment)

    @property
    def is_encoded(self) -> bool:
        """Whether pages below the device are written in fewer bits."""
        return self.lossy.encoding is not Encoding.RAW

    @property
    def alters_all(self) -> bool:
        """Whether all pages below the device are other than those on it."""
        drops = self.sparsity is not None and self.sparsity.on_store
        return self.is_encoded or drops

    @property
    def is_lossy(self) -> bool:
        """Whether anything here alters KV."""
        return self.is_encoded or self.sparsity is not None

    @property
    def lossy_default(self) -> str:
        """Whether requests that do not say so allow altered KV: refuse or allow."""
        return self.lossy.default


def _rows(part: Any) -> Iterator[Option]:
    for each in fields(part):
        if "option" in each.metadata:
            yield each.metadata["option"]
        if each.metadata.get("part"):
            yield from _rows(each.metadata["part"])


def _groups() -> dict[str, tuple[Option, ...]]:
    groups: dict[str, tuple[Option, ...]] = {}
    for each in fields(Options):
        switch = [each.metadata["option"]] if "option" in each.metadata else []
        groups[each.name] = (*switch, *_rows(each.metadata["part"]))
    return groups


GROUPS: dict[str, tuple[Option, ...]] = {**_groups(), "pd": tuple(_rows(Pd))}
"""The rows by the tables of a file; those of ``pd`` hold without tiers: flags only."""
OPTIONS: dict[str, Option] = {row.name: row for rows in GROUPS.values() for row in rows}
"""The rows by name, but ``CONFIG``."""
