"""What does not go together: our settings with one another, and with SGLang's flags.

Each is refused until it is tested: a wrong answer would cost more than a feature. What
nobody has named of SGLang's is not refused.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.serving.disagg.caching import read_pd
from sgl_tiered.serving.options import (
    BACKEND_NAME,
    GROUPS,
    Options,
    Pd,
    PdCaching,
    Pool,
    Sparsity,
)
from sgl_tiered.transport.keys import is_loopback

__all__ = [
    "CUDA_ATTENTION",
    "RUST_ENV",
    "has_rust_server",
    "names_attention",
    "refuse_clashes",
    "refuse_needed",
    "refuse_on_cuda",
    "refuse_on_store",
    "refuse_own_clashes",
    "refuse_pd",
]

RUST_ENV = "SGLANG_RUST_SERVER"
CUDA_ATTENTION = "flashinfer"
_ATTENTION_FIELDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)
_BACKEND = "--disaggregation-transfer-backend"
_BOTH = "leave one of the two out"
_OUT = "leave it out"

_NEEDED: Mapping[str, object] = {
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
# What moves KV behind the scheduler's back was not tried with a pool of our own.
_UNTRIED_WITH_POOLS = (
    "enable_mixed_chunk",
    "enable_dynamic_chunking",
    "enable_two_batch_overlap",
    "enable_memory_saver",
    "prefill_only_disable_kv_cache",
)
# They change weights per request, or what a projection is given, behind our back.
_UNTRIED_WITH_ACTIVATIONS = (
    "enable_lora",
    "lora_paths",
    "enable_torch_compile",
    "quantization",
)
# Within a page, the other selections have no say: they weigh tokens of a prefix.
_ON_STORE = ("car", "car-uniform")


class _Theirs:
    """SGLang's arguments, where a field that is not there is None."""

    def __init__(self, server_args: Any) -> None:
        self._server_args = server_args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server_args, name, None)

    @property
    def num_ranks(self) -> int:
        return int(getattr(self._server_args, "tp_size", None) or 1)

    @property
    def mode(self) -> str:
        return str(getattr(self._server_args, "disaggregation_mode", None) or "null")

    @property
    def transfers_by_us(self) -> bool:
        return bool(self.disaggregation_transfer_backend == BACKEND_NAME)


def _spelt(name: str) -> str:
    return "--" + name.replace("_", "-")


def _no(name: str, problem: str, remedy: str = _BOTH) -> ConfigError:
    """Return the refusal of a setting of ours, or of a flag of SGLang's."""
    flag = name if name.startswith("--") else _spelt("tiered_" + name)
    return ConfigError(flag, problem, remedy)


def refuse_own_clashes(options: Options, given: Collection[str]) -> None:
    """Refuse settings of ours that do not go together.

    Args:
        options: all of them.
        given: names of those that were given.

    Raises:
        ConfigError: one sentence about the first that is in the way.
    """
    write_policy = options.writes.write_policy
    to_device = options.queue.prefetch_to == "device"
    if options.pool is not None:
        _refuse_reach(options.pool)
        if write_policy == "auto":
            raise _no(
                "write_policy",
                "auto does not go with --tiered-pool: what nobody asks this server for "
                "twice may be asked of another one",
                "leave it out, or give write-through",
            )
    if options.sparsity is not None:
        for other, is_given, remedy in (
            ("layerkv on", options.layerkv is not None, _BOTH),
            (
                "write-policy on-evict",
                write_policy == "on-evict",
                "use auto, write-through or selective",
            ),
            ("prefetch-to device", to_device, "use host"),
        ):
            if is_given:
                raise _no("sparsity", f"does not go with --tiered-{other} yet", remedy)
        _refuse_choice(options.sparsity, given)
    if options.layerkv is None:
        return
    if to_device:
        raise _no(
            "prefetch_to", "device does not go with --tiered-layerkv yet", "give host"
        )
    links = (e for e in options.experiment.emulate if TierId.HOST in e.tiers)
    if options.layerkv.weight_bytes and not any(e.has_link for e in links):
        raise _no(
            "emulate_weights",
            "needs an emulated link of the host tier",
            "add --tiered-emulate host:bandwidth=...",
        )
    if options.is_encoded:
        label = options.lossy.encoding.label
        raise _no("encoding", f"{label} does not go with --tiered-layerkv yet")


def _refuse_reach(pool: Pool) -> None:
    """Refuse an address that other machines reach, without what that needs."""
    if is_loopback(f"tcp://{pool.host}:*"):
        return
    if pool.keys is None:
        raise _no(
            "pool_host",
            f"{pool.host} can be reached from other machines, and there are no keys",
            "add --tiered-pool-keys DIR, and keep its ports in a private network",
        )
    if pool.transport == "loopback":
        raise _no(
            "pool_transport",
            f"loopback does not leave this machine, and {pool.host} is on a network",
            "give mooncake or nixl",
        )


def _refuse_choice(sparsity: Sparsity, given: Collection[str]) -> None:
    """Refuse what does not say how many tokens are kept, and which."""
    if sparsity.budget is not None and "sparsity_keep" in given:
        raise _no(
            "sparsity_budget",
            "and --tiered-sparsity-keep both say how much is kept",
            "give one of the two",
        )
    if sparsity.budget is not None and sparsity.profile is None:
        raise _no(
            "sparsity_budget",
            "needs a profile to know what the model's layers lose",
            "add --tiered-sparsity-profile FILE, which sgl-tiered profile writes",
        )
    if sparsity.on_store and sparsity.policy not in _ON_STORE:
        raise _no(
            "sparsity_policy",
            f"{sparsity.policy} does not go with --tiered-sparsity store: it chooses "
            "in pages",
            f"use {' or '.join(_ON_STORE)}, or --tiered-sparsity load",
        )


def refuse_on_store(given: Collection[str]) -> None:
    """Refuse settings, by name, that have no say where tokens are dropped on store."""
    for name in ("sparsity_profile", "sparsity_budget"):
        if name in given:
            raise _no(
                name,
                "does not go with --tiered-sparsity store, which keeps as many tokens "
                "of every layer",
                "use --tiered-sparsity-keep, or --tiered-sparsity load",
            )


def refuse_needed(server_args: Any) -> None:
    """Refuse what of SGLang's goes with no tiers at all; before ours are read."""
    for name, wanted in _NEEDED.items():
        value = getattr(server_args, name, None)
        if value != wanted and value is not None:
            raise _no(
                _spelt(name),
                f"{value!r} does not go with --radix-cache-backend {BACKEND_NAME}",
                "leave it out; it is untested with the tiers",
            )


def refuse_clashes(
    options: Options, server_args: Any, device: str = "cpu", given: Collection[str] = ()
) -> None:
    """Refuse what does not go with SGLang's arguments.

    Args:
        options: of the server.
        server_args: SGLang's, as given.
        device: the kind of device that SGLang runs on.
        given: names of our settings that were given by flags.

    Raises:
        ConfigError: one sentence about the first flag that is in the way.
    """
    theirs = _Theirs(server_args)
    _refuse_policies(options, theirs, given)
    if options.layerkv is not None:
        _refuse_with_own_pool("layerkv", "as layers are placed by pages", theirs)
        if options.layerkv.activations is not None:
            _refuse_with_activations(theirs, device)
    if options.sparsity is not None:
        _refuse_with_own_pool("sparsity", "of which it drops some", theirs)
        if theirs.num_ranks > 1:
            raise _no("sparsity", "does not go with --tp-size above 1 yet")
        if device != "cpu":
            raise _no("sparsity", f"runs on a CPU only, not on {device}", _OUT)
    if options.pool is not None:
        if _has_activations(options):
            why = "does not go with --tiered-activations, as what is exchanged is KV"
            raise _no("pool", why)
        if options.sparsity is not None:
            raise _no(
                "pool",
                "does not go with --tiered-sparsity, as what is exchanged are whole "
                "pages",
            )
    refuse_pd(server_args, options)
    if theirs.num_ranks == 1:
        return
    # See TP.md.
    for name, value, is_given in (
        ("prefetch_to", "device", options.queue.prefetch_to == "device"),
        ("length_predictor", "llm", options.queue.length_predictor == "llm"),
        ("encoding", options.lossy.encoding.label, options.is_encoded),
    ):
        if is_given:
            raise _no(
                name,
                f"{value} does not go with --tp-size above 1, as ranks might differ",
            )


def _has_activations(options: Options) -> bool:
    return options.layerkv is not None and options.layerkv.activations is not None


def _refuse_policies(options: Options, theirs: _Theirs, given: Collection[str]) -> None:
    """Refuse that two order the queue, or rank the device's pages."""
    order, schedule = options.queue.order, theirs.schedule_policy
    is_ours = "order" in given or order != "fcfs"
    if is_ours and schedule not in (None, "fcfs"):
        raise _no(
            "order",
            f"{order} and --schedule-policy {schedule} both order the queue",
            "give one of the two",
        )
    if order != "fcfs" and theirs.enable_priority_scheduling:
        raise _no(
            "order",
            f"{order} does not go with --enable-priority-scheduling, whose classes it "
            "would mix",
            "give one of the two",
        )
    eviction = theirs.radix_eviction_policy
    if options.tiers.device_eviction is not None and eviction not in (None, "lru"):
        raise _no(
            "device_eviction",
            f"and --radix-eviction-policy {eviction} both rank the device's pages",
            "give one of them",
        )


def _refuse_with_own_pool(name: str, why_pages: str, theirs: _Theirs) -> None:
    """Refuse what a pool of our own does not go with, whatever it is for."""
    if theirs.page_size is not None and theirs.page_size < 2:
        raise _no(
            name, f"needs pages of several tokens, {why_pages}", "add --page-size 16"
        )
    for other in _UNTRIED_WITH_POOLS:
        value = getattr(theirs, other)
        if value:
            raise _no(
                name,
                f"does not go with {_spelt(other)} {value!r} yet",
                "leave that out",
            )
    # Where no device is named, the CPU platform switches it off.
    if theirs.device == "cpu" and theirs.disable_overlap_schedule is False:
        raise _no(
            name,
            "does not go with the overlap schedule yet",
            "add --disable-overlap-schedule",
        )


def _refuse_with_activations(theirs: _Theirs, device: str) -> None:
    if device not in ("cpu", "cuda"):
        why = f"is made for CPUs and CUDA, and not for {device}"
        raise _no("activations", why, _OUT)
    if device == "cuda" and theirs.num_ranks > 1:
        raise _no("activations", "does not go with --tp-size above 1 on CUDA yet")
    for other in _UNTRIED_WITH_ACTIVATIONS:
        if getattr(theirs, other):
            raise _no("activations", f"does not go with {_spelt(other)} yet")
    if (theirs.offload_group_size or 0) > 0:
        raise _no(
            "activations",
            "does not go with --offload-group-size, which SGLang has for the experts "
            "of models whose KV is no K and V",
            "use --cpu-offload-gb, or leave one of the two out",
        )


def refuse_on_cuda(server_args: Any) -> None:
    """Refuse what layer-wise KV on CUDA was not made for.

    Args:
        server_args: as given, or SGLang's view of what it has made of them; what
            nobody has named yet is not refused.

    Raises:
        ConfigError: one sentence that says what to add.
    """
    theirs = _Theirs(server_args)
    if theirs.device not in (None, "cuda"):
        raise _no(
            "layerkv",
            f"does not go with --device {theirs.device} where there is CUDA",
            "leave that out",
        )
    for phase in ("decode", "prefill"):
        graphs = _graphs(theirs, phase)
        if graphs != "disabled":
            raise _no(
                "layerkv",
                f"runs without CUDA graphs, and {phase} has {graphs!r} ones",
                "add --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill "
                "disabled",
            )
    if not theirs.disable_overlap_schedule:
        raise _no(
            "layerkv",
            "does not go with the overlap schedule yet",
            "add --disable-overlap-schedule",
        )
    if {getattr(theirs, name) for name in _ATTENTION_FIELDS} - {None, CUDA_ATTENTION}:
        raise _no(
            "layerkv",
            "is made for FlashInfer on CUDA",
            f"add --attention-backend {CUDA_ATTENTION}",
        )


def names_attention(given: Mapping[str, Any]) -> bool:
    """Return whether the user has chosen an attention backend."""
    return any(given.get(name) is not None for name in _ATTENTION_FIELDS)


def _graphs(theirs: _Theirs, phase: str) -> str:
    """Return which CUDA graphs a phase has: SGLang's word, or what the flags ask."""
    config = theirs.cuda_graph_config
    resolved = getattr(getattr(config, phase, None), "backend", None)
    if resolved is not None:
        return str(resolved)
    if config is not None:
        # Not read by SGLang yet, which overrules the flags below by it.
        return "disabled"
    named = getattr(theirs, f"cuda_graph_backend_{phase}")
    if named is not None:
        return str(named)
    is_off = theirs.disable_cuda_graph or getattr(theirs, f"disable_{phase}_cuda_graph")
    return "disabled" if is_off else "default"


def has_rust_server() -> bool:
    """Say whether SGLang serves by its server in Rust: the environment decides."""
    return os.environ.get(RUST_ENV, "").lower() in ("true", "1", "yes", "y")


def refuse_pd(server_args: Any, options: Options | None) -> None:
    """Refuse what disaggregated serving was not shown to work with.

    Args:
        server_args: SGLang's, as given.
        options: the tiers' settings; None without them.

    Raises:
        ConfigError: one sentence about the first flag that is in the way.
    """
    theirs, is_apart = _Theirs(server_args), _Theirs(server_args).mode != "null"
    for row in GROUPS["pd"]:
        is_given = getattr(theirs, f"tiered_{row.name}") is not None
        if is_given and not (is_apart and theirs.transfers_by_us):
            raise _no(
                row.name,
                "is for servers that prefill or decode only, over our transport",
                "add --disaggregation-mode prefill or decode and "
                f"{_BACKEND} {BACKEND_NAME}",
            )
    if not is_apart:
        return
    if theirs.transfers_by_us:
        _refuse_with_transfers(theirs)
    is_returned = read_pd(server_args).caching is PdCaching.RETURNED
    if theirs.tiered_pd_returns is not None and not is_returned:
        raise _no(
            "pd_returns",
            "chooses among the returns that only one caching mode makes",
            "add --tiered-pd-caching 3",
        )
    if options is not None:
        _refuse_pd_with_tiers(theirs, options, read_pd(server_args))
    elif is_returned:
        raise _no(
            "pd_caching",
            "3 returns KV to the host tier, which there is none of",
            "add --radix-cache-backend tiered",
        )


def _refuse_with_transfers(theirs: _Theirs) -> None:
    """Refuse what takes memory, roles or the bootstrap server from under a transfer."""
    for name in ("enable_memory_saver", "enable_pd_role_switch"):
        if getattr(theirs, name):
            raise _no(
                _BACKEND,
                f"{BACKEND_NAME} does not go with {_spelt(name)}, as registered memory "
                "has to stay where it is",
            )
    if theirs.mode == "prefill" and has_rust_server():
        raise _no(
            _BACKEND,
            f"{BACKEND_NAME} needs its own bootstrap server on prefill, in whose place "
            f"{RUST_ENV} puts SGLang's",
            f"unset {RUST_ENV}",
        )
    share = theirs.disaggregation_decode_host_receive_threshold
    if share is not None and share < 1:
        raise _no(
            _BACKEND,
            f"{BACKEND_NAME} receives into the device's pool only",
            "leave --disaggregation-decode-host-receive-threshold out",
        )


def _refuse_pd_with_tiers(theirs: _Theirs, options: Options, pd: Pd) -> None:
    if not theirs.transfers_by_us:
        raise _no(
            "--radix-cache-backend",
            "tiered was tested with our transfer backend only",
            f"add {_BACKEND} {BACKEND_NAME}",
        )
    is_decode = theirs.mode == "decode"
    if pd.caching is PdCaching.NOBODY or (
        is_decode and pd.caching is PdCaching.PREFILL
    ):
        raise _no(
            "pd_caching",
            f"{pd.caching:d} keeps nothing on this instance, and a tiered cache would",
            "leave --radix-cache-backend out, or give 2",
        )
    if pd.caching is PdCaching.RETURNED and options.pool is None:
        raise _no(
            "pd_caching",
            "3 returns KV through the pool of both instances",
            "add --tiered-pool, the same on both",
        )
    # Of the first three no transfer finds the KV: it is elsewhere, or not KV at all.
    elsewhere = ", as its KV is not where the transfer looks for it"
    for name, is_given, why in (
        ("layerkv", is_decode and options.layerkv is not None, elsewhere),
        ("activations", _has_activations(options), elsewhere),
        ("sparsity", options.sparsity is not None, elsewhere),
        ("encoding", options.is_encoded, ""),
        ("write_policy", is_decode and options.writes.write_policy == "on-evict", ""),
        ("length_predictor", options.queue.length_predictor == "llm", ""),
    ):
        if is_given:
            mode = f"--disaggregation-mode {theirs.mode}"
            raise _no(name, f"does not go with {mode} yet{why}", _OUT)
    if options.layerkv is not None and theirs.disaggregation_enable_kv_checksum:
        raise _no(
            "layerkv",
            "does not go with --disaggregation-enable-kv-checksum, which reads KV "
            "where SGLang would have put it",
        )
    if theirs.num_ranks > 1:
        raise _no(
            "--disaggregation-mode",
            "with tiers runs on one rank only so far",
            "leave --tp-size out",
        )
