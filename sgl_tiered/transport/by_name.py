"""Transports by their names."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sgl_tiered.errors import ConfigError, TransportUnavailableError
from sgl_tiered.transport.base import Transport
from sgl_tiered.transport.batched import DEFAULT_GRACE_S, DEFAULT_TIMEOUT_S
from sgl_tiered.transport.keys import is_loopback
from sgl_tiered.transport.loopback import open_loopback
from sgl_tiered.transport.mooncake import open_mooncake
from sgl_tiered.transport.nixl import open_nixl

__all__ = ["TRANSPORTS", "open_transport"]

_LOG = logging.getLogger(__name__)
TRANSPORTS = ("auto", "mooncake", "nixl", "loopback")


def open_transport(
    name: str,
    host: str = "127.0.0.1",
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    grace_s: float = DEFAULT_GRACE_S,
) -> Transport:
    """Open a transport, or with ``auto`` the first one that works here.

    That is Mooncake, else NIXL, else, where the host is on loopback, copies by the
    kernel. All instances of a pool must come to the same one.

    Args:
        name: one of ``TRANSPORTS``.
        host: address of this machine that others reach it by.
        timeout_s: of a transfer that names no other.
        grace_s: how long pieces of a failed transfer stay unused.

    Raises:
        ConfigError: there is no such transport.
        TransportUnavailableError: it does not work here; with ``auto``, none does.
    """
    openers: dict[str, Callable[[], Transport]] = {
        "mooncake": lambda: open_mooncake(host, timeout_s=timeout_s, grace_s=grace_s),
        "nixl": lambda: open_nixl(timeout_s=timeout_s, grace_s=grace_s),
        "loopback": lambda: open_loopback(timeout_s=timeout_s, grace_s=grace_s),
    }
    if name in openers:
        return openers[name]()
    if name != "auto":
        remedy = f"choose one of {', '.join(TRANSPORTS)}"
        raise ConfigError("transport", f"there is no {name!r}", remedy)
    if not is_loopback(f"tcp://{host}:*"):
        # Instances of another machine cannot be reached by the kernel's copies.
        del openers["loopback"]
    reasons = []
    for each, opener in openers.items():
        try:
            found = opener()
        except TransportUnavailableError as error:
            reasons.append(f"{each}: {error}")
        else:
            _LOG.info("bytes between instances go by %s", each)
            return found
    raise TransportUnavailableError("no transport works here: " + "; ".join(reasons))
