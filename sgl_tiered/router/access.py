"""Who may ask the router for what, and which hosts may become instances.

There are two keys. A client's opens what serves requests; an operator's opens that and
what changes the fleet or tells of it. Where only clients have a key, nobody is an
operator: their key would let any of them send everybody's requests, and the servers'
key, to a host of theirs.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

from sgl_tiered.errors import ConfigError
from sgl_tiered.router.config import InstanceConfig, RouterConfig, host_of, is_loopback
from sgl_tiered.router.refusals import RefusedError

__all__ = ["Hosts", "Level", "check_key"]


class Level(Enum):
    """What a path wants."""

    OPEN = "open"
    CLIENT = "client"
    ADMIN = "admin"


def check_key(level: Level, authorization: str, config: RouterConfig) -> None:
    """Check the key that a request brings.

    Args:
        level: of the path.
        authorization: the request's header of this name; empty for none.
        config: has the keys.

    Raises:
        RefusedError: with 401 where the key is missing or wrong, with 403 where it is a
            client's and the path is the operator's.
    """
    is_admin = _brings(authorization, config.admin_api_key)
    is_client = _brings(authorization, config.api_key)
    has_keys = config.api_key is not None or config.admin_api_key is not None
    if level is Level.OPEN or is_admin or not has_keys:
        return
    if level is Level.CLIENT and (is_client or config.api_key is None):
        return
    if is_client:
        raise RefusedError(
            403,
            "admin_key",
            "this wants the admin key, and the key is a client's: bring the one of "
            "--admin-api-key-file",
        )
    raise RefusedError(401, "key", "the API key is missing or wrong")


def _brings(authorization: str, key: str | None) -> bool:
    if key is None:
        return False
    # Headers may carry any bytes; those that are no UTF-8 come as surrogates.
    brought = authorization.encode("utf-8", "surrogateescape")
    return hmac.compare_digest(brought, f"Bearer {key}".encode())


@dataclass(frozen=True, slots=True)
class _Allowed:
    """A host or a network, at one port or at any."""

    host: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    port: int | None


class Hosts:
    """Which hosts an operator may add while the router serves.

    Those that flags or a registry name; and this machine, unless the servers have a
    key, which is sent to nobody whom no flag or registry names.

    Args:
        config: has what ``--allow-host`` says.
        given: instances of the flags.

    Raises:
        ConfigError: an ``--allow-host`` is no host.
    """

    def __init__(self, config: RouterConfig, given: Iterable[InstanceConfig]) -> None:
        self._allowed = [_parsed(text) for text in config.allow_hosts]
        for instance in given:
            for url in _addresses(instance):
                host = urlsplit(url).hostname or ""
                self._allowed.append(_Allowed(host, None, None))
        self._has_loopback = config.instance_api_key is None
        self._named: set[str] = set()

    def name(self, urls: Iterable[str]) -> None:
        """Allow the hosts that a registry names, also when they have left it."""
        self._named.update(host for url in urls if (host := host_of(url)))

    def trouble(self, config: InstanceConfig) -> str:
        """Return in a sentence why an instance may not be added; empty if it may."""
        for url in _addresses(config):
            split = urlsplit(url)
            host = split.hostname or ""
            is_here = split.scheme == "ipc" or is_loopback(host)
            if (
                host in self._named
                or (is_here and self._has_loopback)
                or any(_allows(each, host, split.port) for each in self._allowed)
            ):
                continue
            return (
                f"{url} is on a host that no --instance, --allow-host or registry "
                "names, so that it gets no requests and no key"
            )
        return ""


def _addresses(config: InstanceConfig) -> list[str]:
    """Return all that the router would connect to for an instance."""
    found = [config.url]
    for source in config.sources:
        found += [source.endpoint, source.replay_endpoint or source.endpoint]
    return found


def _allows(allowed: _Allowed, host: str, port: int | None) -> bool:
    if allowed.port not in (None, port):
        return False
    if allowed.network is None:
        return host != "" and allowed.host == host
    try:
        return ipaddress.ip_address(host) in allowed.network
    except ValueError:
        return False


def _parsed(text: str) -> _Allowed:
    try:
        return _Allowed("", ipaddress.ip_network(text.strip("[]")), None)
    except ValueError:
        pass
    try:
        split = urlsplit(f"//{text}")
        host, port = split.hostname or "", split.port
    except ValueError:
        host, port = "", None
    if not host or split.netloc != text or "@" in text:
        raise ConfigError(
            "--allow-host",
            f"{text!r} is no host",
            "write HOST, HOST:PORT, or a network such as 10.0.0.0/8",
        )
    return _Allowed(host, None, port)
