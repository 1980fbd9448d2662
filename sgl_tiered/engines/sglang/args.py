"""Native flags: a subclass of SGLang's ServerArgs with the ``tiered`` namespace.

Plugins are loaded before the command line is parsed, so the subclass that takes the
place of ``ServerArgs`` brings the flags into ``--help``, validation, ``/server_info``
and the pickled copy that every child process gets.
"""

from __future__ import annotations

from typing import Any, Optional

from sglang.srt.arg_groups.arg_utils import NS, A, Arg

from sgl_tiered.engines.sglang.config import (
    BACKEND_NAME,
    CHOICES,
    FLAG_PREFIX,
    TieredConfig,
    read_config,
)
from sgl_tiered.engines.sglang.disagg.settings import (
    PD_FLAGS,
    refuse_with_disaggregation,
)
from sgl_tiered.engines.sglang.layered.activations.settings import (
    refuse_with_activations,
)
from sgl_tiered.engines.sglang.layered.settings import (
    refuse_on_cuda,
    refuse_with_layerkv,
)
from sgl_tiered.engines.sglang.pooled.args import PoolServerArgs
from sgl_tiered.engines.sglang.pooled.settings import refuse_with_pool
from sgl_tiered.engines.sglang.sparse.settings import (
    refuse_device,
    refuse_with_sparsity,
)
from sgl_tiered.errors import ConfigError

__all__ = ["TieredServerArgs", "flag_values", "tiered_config"]

_NS = NS("tiered")


# SGLang reads these annotations at run time with its own small parser, which knows
# Optional[...] but not every spelling of a union.
class TieredServerArgs(PoolServerArgs, dict=True):  # type: ignore[call-arg]
    """SGLang's arguments and ours; all of ours are None where they are not given."""

    tiered_config: A[
        Optional[str],  # noqa: UP045
        Arg(help="TOML file with any of the --tiered-* settings as keys."),
        _NS,
    ] = None
    tiered_host_size: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Size of the host tier of a rank, e.g. 32GB; default auto: half of "
            "free memory, shared by the ranks."
        ),
        _NS,
    ] = None
    tiered_cxl: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Memory of the CXL tier: auto (NUMA nodes without cores), node:1,2, "
            "/dev/dax0.0, or a stand-in: emulate:memory, emulate:node:0, "
            "emulate:/dev/shm. Default none."
        ),
        _NS,
    ] = None
    tiered_cxl_size: A[
        Optional[str],  # noqa: UP045
        Arg(help="Size of the CXL tier, e.g. 256GB; default auto, all that is free."),
        _NS,
    ] = None
    tiered_disk_path: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Directory of the disk tier, kept across restarts; default none. "
            "Several, separated by commas and best on several devices, are striped."
        ),
        _NS,
    ] = None
    tiered_disk_size: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Size of the disk tier of a rank, all directories together, e.g. 2TB; "
            "default auto: half of free space, shared by the ranks."
        ),
        _NS,
    ] = None
    tiered_disk_threads: A[
        Optional[int],  # noqa: UP045
        Arg(help="I/Os in flight per directory of the disk tier; default 8."),
        _NS,
    ] = None
    tiered_disk_io: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="How the disk tier does I/O: auto (default: bounce on virtual disks, "
            "else threads), threads, bounce, uring (needs NIXL: the extra uring) or "
            "mmap; what does not work here becomes threads.",
            choices=list(CHOICES["disk_io"]),
        ),
        _NS,
    ] = None
    tiered_staging_size: A[
        Optional[str],  # noqa: UP045
        Arg(help="Memory through which disk pages go to the device; default 256MiB."),
        _NS,
    ] = None
    tiered_eviction_policy: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Which page leaves a full tier: lru (default), fifo, random, score "
            "(what the window and the device use least) or cost (what saves the least "
            "time for its room, as learned and as the queue says).",
            choices=list(CHOICES["eviction_policy"]),
        ),
        _NS,
    ] = None
    tiered_device_eviction: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="The same for the device, in SGLang's Python tree; default SGLang's "
            "own policy and tree.",
            choices=list(CHOICES["device_eviction"]),
        ),
        _NS,
    ] = None
    tiered_write_policy: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="When a page is copied to the host: when it is computed "
            "(write-through), when it is seen again (selective), the one until traffic "
            "has shown that nothing comes again and the other until it does (auto, "
            "default), or before the device drops it (on-evict).",
            choices=list(CHOICES["write_policy"]),
        ),
        _NS,
    ] = None
    tiered_offload_threshold: A[
        Optional[float],  # noqa: UP045
        Arg(
            help="Share of the device in use above which on-evict copies the coldest "
            "pages; default 0.9."
        ),
        _NS,
    ] = None
    tiered_demote_policy: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="When a host page is written to disk: soon (write-through, default) "
            "or the coldest ones ahead of need (on-evict).",
            choices=list(CHOICES["demote_policy"]),
        ),
        _NS,
    ] = None
    tiered_disk_admission: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Which pages are written to disk: all, those that two requests had "
            "(second-hit), also those where prompts are often seen again (reuse), or "
            "all unless traffic has shown that nothing comes again (auto, default).",
            choices=list(CHOICES["disk_admission"]),
        ),
        _NS,
    ] = None
    tiered_load_policy: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Load cached pages if that is cheaper than recompute (auto, default), "
            "always or never.",
            choices=list(CHOICES["load_policy"]),
        ),
        _NS,
    ] = None
    tiered_length_predictor: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="How answer lengths are predicted: none (default), online (learned "
            "from the answers that end; default where --tiered-admission or "
            "--tiered-layerkv needs it), constant:N, oracle (experiments: requests say "
            "it in custom_params) or llm (like online, and while requests wait the "
            "model is asked for the lengths of its own answers)."
        ),
        _NS,
    ] = None
    tiered_order: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="In which order waiting requests are served: fcfs (default), fpf "
            "(nearest prefix first, unfair), relaxed-fpf (the same, aged), car (device "
            "hits first, within a window) or cost (shortest predicted pass first, as "
            "far as nobody's wait leaves what fcfs gives). SGLang's own orders: "
            "--schedule-policy.",
            choices=list(CHOICES["order"]),
        ),
        _NS,
    ] = None
    tiered_prefetch: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="When a queued request's pages are read from disk: when the request "
            "is looked at (none), as soon as it is queued (arrival, default), or in "
            "time for its turn, into the host tier (car).",
            choices=list(CHOICES["prefetch"]),
        ),
        _NS,
    ] = None
    tiered_prefetch_window: A[
        Optional[int],  # noqa: UP045
        Arg(help="Queued requests that --tiered-prefetch car looks at; default 16."),
        _NS,
    ] = None
    tiered_prefetch_to: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="How far --tiered-prefetch car brings pages: to the host tier "
            "(default), or on to the device ahead of admission, where it has room that "
            "nobody else needs.",
            choices=list(CHOICES["prefetch_to"]),
        ),
        _NS,
    ] = None
    tiered_log_interval: A[
        Optional[float],  # noqa: UP045
        Arg(help="Seconds between two log lines of the tiers; default 60, 0 for none."),
        _NS,
    ] = None
    tiered_seed: A[
        Optional[int],  # noqa: UP045
        Arg(help="Seed of the policies that draw random numbers; default 0."),
        _NS,
    ] = None
    tiered_emulate: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="For experiments: slow tiers down, e.g. 'host+cxl:bandwidth=20GB;"
            "disk:read-bandwidth=2GB,write-bandwidth=1GB,latency=0.001,"
            "delay=0.2@0.01'; or make them fail, e.g. 'disk:fault=error@0.1/load' "
            "(needs SGL_TIERED_ALLOW_FAULTS=1). All of it: pydoc "
            "sgl_tiered.testing.emulation."
        ),
        _NS,
    ] = None
    tiered_calibration: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="File of sgl-tiered calibrate, from which the planner's costs start; "
            "default none, a short measurement at start-up."
        ),
        _NS,
    ] = None
    tiered_explain_last: A[
        Optional[int],  # noqa: UP045
        Arg(
            help="Ended requests that GET /tiered/explain knows, about 4 kB each; "
            "default 1000, 0 for none."
        ),
        _NS,
    ] = None
    tiered_admission: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Which prefill may delay requests that decode: all (none, default), "
            "as much as their TPOT targets allow (slo), or what harms fewer requests "
            "than a delay would (goodput).",
            choices=list(CHOICES["admission"]),
        ),
        _NS,
    ] = None
    tiered_slo_ttft: A[
        Optional[float],  # noqa: UP045
        Arg(
            help="Target for the time to the first token, in seconds, of requests that "
            "bring none; default none."
        ),
        _NS,
    ] = None
    tiered_slo_tpot: A[
        Optional[float],  # noqa: UP045
        Arg(
            help="Target for the mean time per token after the first, in seconds, of "
            "requests that bring none (they may, as custom_params: "
            '{"tiered": {"ttft_s": 2, "tpot_s": 0.05}}); default none.'
        ),
        _NS,
    ] = None
    tiered_slo_floor: A[
        Optional[float],  # noqa: UP045
        Arg(
            help="Least target for the time to the first token, in seconds, that "
            "counts of those that requests bring: who is due goes before others. "
            "Default a quarter of --tiered-slo-ttft, 0.5 without it."
        ),
        _NS,
    ] = None
    tiered_layerkv: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Layer-wise KV: prompts keep some layers on the device, the others in "
            "memory, streamed as they are needed (on), or all layers (off, default). "
            "--max-total-tokens then is the device's room; more tokens are admitted.",
            choices=list(CHOICES["layerkv"]),
        ),
        _NS,
    ] = None
    tiered_layerkv_host_size: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Memory for layers that are not on the device, e.g. 16GB; default "
            "four times the device's pool. It bounds the tokens that are admitted."
        ),
        _NS,
    ] = None
    tiered_layerkv_decode: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Who decodes where layers of running requests are in memory: those "
            "whose layers stream in time, while others wait for their turn (pause, "
            "default), or everybody (stream).",
            choices=list(CHOICES["layerkv_decode"]),
        ),
        _NS,
    ] = None
    tiered_layerkv_retain: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Layers of a prompt that stay on the device: a number, or auto "
            "(default), as many as its prefill cannot hide the copies of."
        ),
        _NS,
    ] = None
    tiered_layerkv_staging_size: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Part of the device's pool through which layers are streamed; default "
            "twice a layer of the longest context."
        ),
        _NS,
    ] = None
    tiered_layerkv_guard: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="With --tp-size above 1: copies of layers give way to collectives on "
            "a link that both use, which on CUDA is so without NVLink (auto, default), "
            "or never (off).",
            choices=list(CHOICES["layerkv_guard"]),
        ),
        _NS,
    ] = None
    tiered_activations: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="With --tiered-layerkv on: share of a request's pages, 0 to 1, kept "
            "below the device as activations, of which K and V are made again; auto "
            "for what the link and the cores make best, or none (off, default). "
            "Experimental, on CUDA never run, and there only with a share."
        ),
        _NS,
    ] = None
    tiered_activations_device_size: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Part of the device's pool for activations on their way, e.g. 64MB; "
            "default auto, for staging, open pages and a chunk of a prompt."
        ),
        _NS,
    ] = None
    tiered_encoding: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="How KV is written below the device: raw (default), or in fewer bits, "
            "fp8 and int8 in about half of the bytes, int4 in a quarter. What comes "
            "back then differs a little; only requests that allow it get any (see "
            "--tiered-lossy-default). Needs --page-size 16 or more.",
            choices=list(CHOICES["encoding"]),
        ),
        _NS,
    ] = None
    tiered_lossy_default: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Whether requests that do not say so allow KV that was altered to "
            "save bytes: refuse (default) or allow. A request says it as "
            'custom_params: {"tiered": {"lossy": "allow"}}.',
            choices=list(CHOICES["lossy_default"]),
        ),
        _NS,
    ] = None
    tiered_sparsity: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="For requests that allow lossy KV: load only the tokens of a layer "
            "that attention reads (load; experimental, CPU only), offload no others "
            "(store), or keep all (off, default).",
            choices=list(CHOICES["sparsity"]),
        ),
        _NS,
    ] = None
    tiered_sparsity_keep: A[
        Optional[float],  # noqa: UP045
        Arg(
            help="Share of all layers' tokens that is loaded; default 0.5. With "
            "--tiered-sparsity-profile layers share it out by what they lose."
        ),
        _NS,
    ] = None
    tiered_sparsity_policy: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Who selects the tokens: what distant queries read most, in each "
            "layer as many as it needs (car, default) or the same share of each "
            "(car-uniform); for comparison the methods h2o, snapkv, pyramidkv, random "
            "and recent.",
            choices=list(CHOICES["sparsity_policy"]),
        ),
        _NS,
    ] = None
    tiered_sparsity_profile: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="File of sgl-tiered profile for this model: how few tokens of each "
            "layer hold what is read from afar. Default none."
        ),
        _NS,
    ] = None
    tiered_sparsity_budget: A[
        Optional[float],  # noqa: UP045
        Arg(
            help="In place of --tiered-sparsity-keep, the share of long-range "
            "attention that may be lost, e.g. 0.02: as few tokens are loaded as the "
            "profile allows."
        ),
        _NS,
    ] = None
    tiered_sparsity_queries: A[
        Optional[int],  # noqa: UP045
        Arg(
            help="How many queries of a pass of a prefill are asked at most what they "
            "read, 128 or more; default 512. Of a longer pass a sample is."
        ),
        _NS,
    ] = None
    tiered_emulate_weights: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="For benchmarks: bytes of weights, e.g. 16MB, that cross the emulated "
            "host link before each layer of each forward, as if weights were offloaded."
        ),
        _NS,
    ] = None
    tiered_fault_corrupt: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="For tests: load a wrong page from the host, as "
            "--tiered-emulate host:fault=... does, or leave pages out where layers are "
            "streamed (staging), or keep the wrong tokens of sparse KV (keep), or send "
            "peers other bytes (peer); needs SGL_TIERED_ALLOW_FAULTS=1.",
            choices=list(CHOICES["fault_corrupt"]),
        ),
        _NS,
    ] = None

    def check_server_args(self) -> None:
        """Check our settings before SGLang checks its own.

        Raises:
            ConfigError: one sentence about what is wrong.
        """
        tiered_config(self, is_first=True)
        super().check_server_args()


def flag_values(server_args: Any) -> dict[str, Any]:
    """Return the ``--tiered-*`` values by name without the prefix."""
    return {
        name.removeprefix(FLAG_PREFIX): getattr(server_args, name, None)
        for part in TieredServerArgs.__mro__
        for name in getattr(part, "__annotations__", {})
        if name.startswith(FLAG_PREFIX)
    }


def tiered_config(server_args: Any, *, is_first: bool = False) -> TieredConfig | None:
    """Return the settings, or None where the server is not tiered.

    Args:
        server_args: SGLang's, with ours.
        is_first: no rank of the server has taken memory yet.

    Raises:
        ConfigError: a setting is wrong, or does not go with another flag.
    """
    values = flag_values(server_args)
    for name in PD_FLAGS:
        del values[name]
    if server_args.radix_cache_backend != BACKEND_NAME:
        given = sorted(name for name, value in values.items() if value is not None)
        if given:
            raise ConfigError(
                f"--tiered-{given[0].replace('_', '-')}",
                "has no effect without the tiered cache",
                f"add --radix-cache-backend {BACKEND_NAME}",
            )
        refuse_with_disaggregation(server_args, None)
        return None
    for name, wanted in _NEEDED.items():
        value = getattr(server_args, name, wanted)
        if value != wanted and value is not None:
            raise ConfigError(
                "--" + name.replace("_", "-"),
                f"{value!r} does not go with --radix-cache-backend {BACKEND_NAME}",
                "leave it out; it is untested with the tiers",
            )
    num_ranks = getattr(server_args, "tp_size", 1) or 1
    config = read_config(values, num_ranks=num_ranks, is_first=is_first)
    if values["order"] is not None or config.order != "fcfs":
        _refuse_other_orders(server_args, config.order)
    if config.device_eviction is not None:
        theirs = getattr(server_args, "radix_eviction_policy", None)
        if theirs not in (None, "lru"):
            raise ConfigError(
                "--tiered-device-eviction",
                f"and --radix-eviction-policy {theirs} both rank the device's pages",
                "give one of them",
            )
    if config.layerkv is not None:
        refuse_with_layerkv(server_args)
        _refuse_on_cuda(server_args)
        activations = config.layerkv.activations
        if activations is not None:
            refuse_with_activations(server_args, _device(server_args), activations)
    if config.sparsity is not None:
        refuse_with_sparsity(server_args)
        refuse_device(_device(server_args))
    if config.pool is not None:
        refuse_with_pool(config)
    refuse_with_disaggregation(server_args, config)
    if num_ranks > 1:
        _refuse_for_one_rank(config)
    return config


def _device(server_args: Any) -> str:
    """Return the kind of device that SGLang runs on."""
    from sglang.srt.platforms import current_platform

    given = getattr(server_args, "device", None) or "cpu"
    return "cuda" if current_platform.is_cuda() else str(given).partition(":")[0]


def _refuse_on_cuda(server_args: Any) -> None:
    """Ask for what a CUDA device needs, where SGLang runs on one."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.platforms import current_platform

    if current_platform.is_cuda():
        refuse_on_cuda(resolving_view(server_args))


def _refuse_for_one_rank(config: TieredConfig) -> None:
    """Refuse what several ranks do not agree on yet; see serving/TP.md."""
    for flag, is_given in {
        "--tiered-prefetch-to device": config.prefetch_to == "device",
        "--tiered-length-predictor llm": config.length_predictor == "llm",
        f"--tiered-encoding {config.encoding.label}": config.is_encoded,
    }.items():
        if is_given:
            name, _, value = flag.partition(" ")
            raise ConfigError(
                name,
                f"{value} does not go with --tp-size above 1, as ranks might differ",
                "leave one of the two out",
            )


def _refuse_other_orders(server_args: Any, order: str) -> None:
    theirs = getattr(server_args, "schedule_policy", "fcfs")
    if theirs != "fcfs":
        raise ConfigError(
            "--tiered-order",
            f"{order} and --schedule-policy {theirs} both order the queue",
            "give one of the two",
        )
    if order != "fcfs" and getattr(server_args, "enable_priority_scheduling", False):
        raise ConfigError(
            "--tiered-order",
            f"{order} does not go with --enable-priority-scheduling, whose classes it "
            "would mix",
            "give one of the two",
        )


# Each is refused until it is tested: a wrong answer would cost more than a feature.
_NEEDED: dict[str, object] = {
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_unified_cache_external_linker": False,
    "disable_radix_cache": False,
    "enable_session_radix_cache": False,
    "enable_streaming_session": False,
    "speculative_algorithm": None,
    "dllm_algorithm": None,
    "enable_pd_role_switch": False,
    "enable_pdmux": False,
    "enable_dp_attention": False,
    "nnodes": 1,
    "pp_size": 1,
    "dp_size": 1,
    "tokenizer_worker_num": 1,
}
