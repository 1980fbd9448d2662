"""Which start of a prefill instance a decode instance knows.

SGLang takes an instance for lost after two heartbeats in vain. One that ends and is
back before that is at another port, with other memory, and nobody asks: requests wait
in vain from then on. So its bootstrap server says which start of it this is.
"""

from __future__ import annotations

import secrets

import requests

__all__ = ["START_ROUTE", "new_start", "start_of"]

START_ROUTE = "/tiered_start"
_TIMEOUT_S = 2.0
_START_BYTES = 16


def new_start() -> str:
    """Return a name for a start, which no other has."""
    return secrets.token_hex(_START_BYTES)


def start_of(address: str) -> str | None:
    """Return the start of the bootstrap server at ``host:port``; None if untold.

    SGLang's own servers do not say.
    """
    try:
        with requests.get(
            f"http://{address}{START_ROUTE}", timeout=_TIMEOUT_S, stream=True
        ) as response:
            told = response.raw.read(2 * _START_BYTES + 1)
            is_told = response.status_code == requests.codes.ok
    except (requests.RequestException, OSError):
        return None
    if not is_told or len(told) != 2 * _START_BYTES:
        return None
    return str(told.decode(errors="replace"))
