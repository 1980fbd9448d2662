"""The flags of disaggregated serving: what they ask of SGLang, and what they refuse.

MemServe's designs (Table 4) are one number, ``--tiered-pd-caching``: which instance
keeps KV after a request, and who sends what to whom.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from sgl_tiered.engines.sglang.config import RUST_ENV, has_rust_server
from sgl_tiered.errors import ConfigError

__all__ = [
    "CACHING_FLAG",
    "PD_FLAGS",
    "PD_TRANSPORTS",
    "TRANSFER_BACKEND",
    "PdCaching",
    "declare_caching",
    "pd_caching",
    "pd_returns",
    "refuse_with_disaggregation",
    "refuse_without_disaggregation",
]

TRANSFER_BACKEND = "tiered"
"""Our name for ``--disaggregation-transfer-backend``."""
CACHING_FLAG = "--tiered-pd-caching"
PD_FLAGS = ("pd_caching", "pd_transport", "pd_returns")
"""Fields, without their prefix, that need no tiered cache."""
PD_TRANSPORTS = ("auto", "mooncake", "nixl", "loopback")


_ELSEWHERE = ("--tiered-layerkv", "--tiered-activations", "--tiered-sparsity")
"""Flags whose KV no transfer finds: not where one writes, or not as KV at all."""


class PdCaching(IntEnum):
    """Who keeps KV after a request."""

    NOBODY = 0
    PREFILL = 1
    BOTH = 2
    RETURNED = 3


def pd_caching(server_args: Any) -> PdCaching | None:
    """Return the mode that was asked for; None where SGLang's own flags say it."""
    value = getattr(server_args, "tiered_pd_caching", None)
    if value is None and _mode(server_args) == "decode" and _has_tiers(server_args):
        return PdCaching.BOTH
    return None if value is None else PdCaching(value)


def pd_returns(server_args: Any) -> str:
    """Return which answers go back to prefill: ``auto``, ``always`` or ``never``."""
    return str(getattr(server_args, "tiered_pd_returns", None) or "auto")


def declare_caching(server_args: Any) -> dict[str, Any]:
    """Return the fields of SGLang's arguments that a caching mode sets.

    Prefill: the radix cache on, or off for ``NOBODY``. Decode: its radix cache on from
    ``BOTH`` on, which also makes SGLang ask for missing pages only.
    """
    caching = pd_caching(server_args)
    if caching is None:
        return {}
    if _mode(server_args) == "prefill":
        return {"disable_radix_cache": caching is PdCaching.NOBODY}
    keeps = caching >= PdCaching.BOTH
    return {"disaggregation_decode_enable_radix_cache": keeps}


def refuse_without_disaggregation(server_args: Any) -> None:
    """Refuse our flags where there is nothing for them to do.

    Raises:
        ConfigError: one sentence that says what to add.
    """
    given = [f for f in PD_FLAGS if getattr(server_args, f"tiered_{f}", None)]
    if getattr(server_args, "tiered_pd_caching", None) is not None:
        given.insert(0, "pd_caching")
    backend = getattr(server_args, "disaggregation_transfer_backend", None)
    is_ours = backend == TRANSFER_BACKEND and _mode(server_args) != "null"
    if given and not is_ours:
        raise ConfigError(
            "--tiered-" + given[0].replace("_", "-"),
            "is for servers that prefill or decode only, over our transport",
            "add --disaggregation-mode prefill or decode and "
            f"--disaggregation-transfer-backend {TRANSFER_BACKEND}",
        )


def refuse_with_disaggregation(server_args: Any, config: Any | None) -> None:
    """Refuse what disaggregated serving was not shown to work with.

    Args:
        server_args: as given; what nobody has named is not refused.
        config: the tiers' settings; None without them.

    Raises:
        ConfigError: one sentence about the first flag that is in the way.
    """
    refuse_without_disaggregation(server_args)
    if _mode(server_args) == "null":
        return
    if getattr(server_args, "disaggregation_transfer_backend", None) == "tiered":
        _refuse_with_our_backend(server_args)
    caching = pd_caching(server_args)
    returns = getattr(server_args, "tiered_pd_returns", None)
    if returns is not None and caching is not PdCaching.RETURNED:
        raise ConfigError(
            "--tiered-pd-returns",
            "chooses among the returns that only one caching mode makes",
            f"add {CACHING_FLAG} 3",
        )
    if config is None:
        if caching is PdCaching.RETURNED:
            raise ConfigError(
                CACHING_FLAG,
                "3 returns KV to the host tier, which there is none of",
                "add --radix-cache-backend tiered",
            )
        return
    _refuse_with_tiers(server_args, config, caching)


def _refuse_with_our_backend(server_args: Any) -> None:
    """Refuse what takes memory, roles or the bootstrap server from under a transfer."""
    for name in ("enable_memory_saver", "enable_pd_role_switch"):
        if getattr(server_args, name, False):
            raise ConfigError(
                "--disaggregation-transfer-backend",
                f"{TRANSFER_BACKEND} does not go with --{name.replace('_', '-')}, as "
                "registered memory has to stay where it is",
                "leave one of the two out",
            )
    if _mode(server_args) == "prefill" and has_rust_server():
        raise ConfigError(
            "--disaggregation-transfer-backend",
            f"{TRANSFER_BACKEND} needs its own bootstrap server on prefill, in whose "
            f"place {RUST_ENV} puts SGLang's",
            f"unset {RUST_ENV}",
        )
    overall = getattr(server_args, "disaggregation_decode_host_receive_threshold", 1)
    if overall is not None and overall < 1:
        raise ConfigError(
            "--disaggregation-transfer-backend",
            f"{TRANSFER_BACKEND} receives into the device's pool only",
            "leave --disaggregation-decode-host-receive-threshold out",
        )


def _refuse_with_tiers(
    server_args: Any, config: Any, caching: PdCaching | None
) -> None:
    if getattr(server_args, "disaggregation_transfer_backend", None) != "tiered":
        raise ConfigError(
            "--radix-cache-backend",
            "tiered was tested with our transfer backend only",
            f"add --disaggregation-transfer-backend {TRANSFER_BACKEND}",
        )
    is_decode = _mode(server_args) == "decode"
    if caching is PdCaching.NOBODY or (is_decode and caching is PdCaching.PREFILL):
        raise ConfigError(
            CACHING_FLAG,
            f"{int(caching)} keeps nothing on this instance, and a tiered cache would",
            "leave --radix-cache-backend out, or give 2",
        )
    if caching is PdCaching.RETURNED and config.pool is None:
        raise ConfigError(
            CACHING_FLAG,
            "3 returns KV through the pool of both instances",
            "add --tiered-pool, the same on both",
        )
    for flag, is_given in {
        "--tiered-layerkv": is_decode and config.layerkv is not None,
        "--tiered-activations": config.layerkv is not None
        and config.layerkv.activations is not None,
        "--tiered-sparsity": config.sparsity is not None,
        "--tiered-encoding": config.is_encoded,
        "--tiered-write-policy on-evict": is_decode
        and config.write_policy == "on-evict",
        "--tiered-length-predictor llm": config.length_predictor == "llm",
    }.items():
        if is_given:
            raise ConfigError(
                flag.partition(" ")[0],
                f"does not go with --disaggregation-mode {_mode(server_args)} yet, as "
                "its KV is not where the transfer looks for it"
                if flag in _ELSEWHERE
                else f"does not go with --disaggregation-mode {_mode(server_args)} yet",
                "leave it out",
            )
    has_sums = getattr(server_args, "disaggregation_enable_kv_checksum", False)
    if config.layerkv is not None and has_sums:
        raise ConfigError(
            "--tiered-layerkv",
            "does not go with --disaggregation-enable-kv-checksum, which reads KV "
            "where SGLang would have put it",
            "leave one of the two out",
        )
    if (getattr(server_args, "tp_size", 1) or 1) > 1:
        raise ConfigError(
            "--disaggregation-mode",
            "with tiers runs on one rank only so far",
            "leave --tp-size out",
        )


def _mode(server_args: Any) -> str:
    return str(getattr(server_args, "disaggregation_mode", None) or "null")


def _has_tiers(server_args: Any) -> bool:
    return getattr(server_args, "radix_cache_backend", None) == "tiered"
