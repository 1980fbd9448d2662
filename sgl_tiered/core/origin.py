"""Which requests a browser sends for a page that is not ours.

A page of any site can make a browser on this machine, or in this network, send requests
to addresses that the site itself cannot reach. The browser names the page's origin. A
site may also give its own name this machine's address, once its page is loaded; then
origin and host are equal, and the name is what tells.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

__all__ = ["is_foreign"]


def is_foreign(origin: str | None, host: str, local: str | None = None) -> bool:
    """Return whether a request comes from a page of another origin than its server.

    Args:
        origin: the request's header of this name; None where there is none. Then it
            comes from no page, or from one that only reads. (What reads a site may do
            under a name of its own, where nothing wants a key.)
        host: the request's header of this name.
        local: the address that the connection came to, where no key is wanted: a
            loopback one is reached from pages under addresses and ``localhost`` only.

    An origin that cannot be read, such as ``null``, is another one.
    """
    if origin is None:
        return False
    try:
        if urlsplit(origin).netloc.lower() != host.lower():
            return True
        name = urlsplit(origin).hostname or ""
    except ValueError:
        return True
    return _is_loopback(local) and not (_is_address(name) or _is_local_name(name))


def _is_local_name(name: str) -> bool:
    """Return whether browsers take a name for this machine without asking anybody."""
    return name == "localhost" or name.endswith(".localhost")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(local: str | None) -> bool:
    try:
        address = ipaddress.ip_address(local or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
