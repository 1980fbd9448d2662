"""TCP endpoints as text, ``tcp://host:port``: read by one rule, wherever they are."""

from __future__ import annotations

import ipaddress
import re

__all__ = ["MAX_PORT", "Endpoint", "tcp_endpoint"]

Endpoint = tuple[str, int]

_SCHEME = "tcp://"
_MAX_HOST = 253
MAX_PORT = 65535
_TOLD = 80
_PORT = re.compile(r"[0-9]{1,5}")
# Longer labels, and empty ones, are refused by resolvers in ways of their own.
_HOST = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


def tcp_endpoint(text: str) -> Endpoint:
    """Return host and port of an endpoint; an IPv6 address without its brackets.

    Raises:
        ValueError: it is none that can be connected to; says why.
    """
    told = f"{text[:_TOLD]!r} is no endpoint"
    if not text.startswith(_SCHEME):
        raise ValueError(f"{told}: it does not begin with {_SCHEME}")
    host, _, port = text.removeprefix(_SCHEME).rpartition(":")
    # By length first: Python reads no number of thousands of digits.
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= MAX_PORT:
        raise ValueError(f"{told}: its port is none of 1 to {MAX_PORT}")
    if len(host) > _MAX_HOST:
        raise ValueError(f"{told}: its host has more than {_MAX_HOST} characters")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{told}: its host is no IPv6 address") from None
        if not (host.isascii() and host.isprintable()):
            raise ValueError(f"{told}: its host is no IPv6 address")
    elif not _HOST.fullmatch(host):
        raise ValueError(f"{told}: its host is no name and no address")
    return host, int(port)
