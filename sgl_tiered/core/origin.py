"""Which requests a browser sends for a page that is not ours.

A page of any site can make a browser on this machine, or in this network, send requests
to addresses that the site itself cannot reach. The browser names the page's origin.
"""

from __future__ import annotations

from urllib.parse import urlsplit

__all__ = ["is_foreign"]


def is_foreign(origin: str | None, host: str) -> bool:
    """Return whether a request comes from a page of another origin than its server.

    Args:
        origin: the request's header of this name; None where there is none. Then it
            comes from no page, or from one that only reads and cannot see the answer.
        host: the request's header of this name.

    An origin that cannot be read, such as ``null``, is another one.
    """
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != host.lower()
    except ValueError:
        return True
