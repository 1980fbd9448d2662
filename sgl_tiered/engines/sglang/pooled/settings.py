"""The settings of a server in a pool, and what they do not go with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sgl_tiered.errors import ConfigError
from sgl_tiered.pool.membership import check_name, default_name
from sgl_tiered.transport.keys import is_loopback

__all__ = [
    "POOL_CHOICES",
    "POOL_FAULT",
    "PoolSettings",
    "named_pool",
    "read_pool",
    "refuse_with_pool",
]

POOL_CHOICES: Mapping[str, tuple[str, ...]] = {
    "pool_transport": ("auto", "mooncake", "nixl", "loopback"),
}
POOL_FAULT = "peer"
"""Word of ``--tiered-fault-corrupt`` that spoils what is sent to peers."""
_LOOPBACK = "127.0.0.1"
_SCHEMES = ("file:", "etcd://", "etcd+https://")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What a server in a pool was told.

    Attributes:
        url: of the registry: ``local``, ``file:PATH`` or ``etcd://HOST:PORT/PREFIX``.
        name: of this server in the pool, unique there and the same after a restart;
            empty for one made of host and port.
        host: address on which others reach this server.
        transport: auto (the first that works here), mooncake, nixl or loopback.
        keys: folder of CURVE keys; None on one machine.
    """

    url: str
    name: str = ""
    host: str = _LOOPBACK
    transport: str = "auto"
    keys: Path | None = None


def read_pool(settings: Mapping[str, Any]) -> PoolSettings | None:
    """Read the settings by flag name without ``--tiered-``; None for no pool.

    Raises:
        ConfigError: one sentence about the first setting that is wrong.
    """
    url = settings.get("pool")
    if url is None:
        given = sorted(name for name in settings if name.startswith("pool_"))
        if given:
            raise ConfigError(
                _flag(given[0]), "has no effect without a pool", "add --tiered-pool"
            )
        return None
    url = str(url)
    if url != "local" and not url.startswith(_SCHEMES):
        raise ConfigError(
            "--tiered-pool",
            f"{url!r} is no registry",
            "give local, file:PATH or etcd://HOST:PORT/PREFIX",
        )
    transport = str(settings.get("pool_transport", "auto"))
    if transport not in POOL_CHOICES["pool_transport"]:
        raise ConfigError(
            "--tiered-pool-transport",
            f"{transport!r} is unknown",
            f"use {', '.join(POOL_CHOICES['pool_transport'])}",
        )
    name, host = str(settings.get("pool_name", "")), settings.get("pool_host")
    if name:
        try:
            check_name(name)
        except ConfigError as error:
            raise ConfigError(
                "--tiered-pool-name", error.problem, error.remedy
            ) from None
    keys = settings.get("pool_keys")
    folder = None if keys is None else Path(str(keys)).expanduser().absolute()
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            "--tiered-pool-keys",
            f"{folder} is no folder",
            "make keys with sgl-tiered pool keys",
        )
    host = _LOOPBACK if host is None else str(host)
    if folder is None and not is_loopback(f"tcp://{host}:*"):
        raise ConfigError(
            "--tiered-pool-host",
            f"{host} can be reached from other machines, and there are no keys",
            "add --tiered-pool-keys DIR, and keep its ports in a private network",
        )
    if transport == "loopback" and not is_loopback(f"tcp://{host}:*"):
        raise ConfigError(
            "--tiered-pool-transport",
            f"loopback does not leave this machine, and {host} is on a network",
            "give mooncake or nixl",
        )
    return PoolSettings(url, name, host, transport, folder)


def named_pool(settings: PoolSettings, port: int) -> PoolSettings:
    """Return the settings with a name: that given, else one of host and port."""
    if settings.name:
        return settings
    return replace(settings, name=default_name(port))


def refuse_with_pool(config: Any) -> None:
    """Refuse what a pool was not shown to work with.

    Args:
        config: the other settings of the tiers.

    Raises:
        ConfigError: one sentence that names the other flag.
    """
    activations = config.layerkv is not None and config.layerkv.activations is not None
    reasons = {
        "--tiered-activations: what is exchanged is KV": activations,
        "--tiered-sparsity: what is exchanged are whole pages": (
            config.sparsity is not None
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            other, _, why = reason.partition(": ")
            raise ConfigError(
                "--tiered-pool",
                f"does not go with {other}, as {why}",
                "leave one of the two out",
            )


def _flag(name: str) -> str:
    return "--tiered-" + name.replace("_", "-")
