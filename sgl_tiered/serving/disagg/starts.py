"""Which start of a prefill instance a decode instance knows.

SGLang takes an instance for lost after two heartbeats in vain. One that ends and is
back before that is at another port, with other memory, and nobody asks: requests wait
in vain from then on. So its bootstrap server says which start of it this is; and that
it proves what it says to decode instances (``speaking.py``), for one of SGLang's own or
of an older version would not be heard there.
"""

from __future__ import annotations

import secrets

import requests
from urllib3.exceptions import HTTPError

__all__ = ["MUTE", "PROVES", "START_ROUTE", "new_start", "start_of"]

START_ROUTE = "/tiered_start"
PROVES = {"Tiered-Proves": "1"}
"""Header of an answer there."""
MUTE = ""
"""Instead of a start: an instance that proves nothing."""
_TIMEOUT_S = 2.0
_START_BYTES = 16


def new_start() -> str:
    """Return a name for a start, which no other has."""
    return secrets.token_hex(_START_BYTES)


def start_of(address: str) -> str | None:
    """Return the start of the bootstrap server at ``host:port``; None without answer.

    It is ``MUTE`` where what answers is SGLang's own, or of an older version.
    """
    try:
        with requests.get(
            f"http://{address}{START_ROUTE}", timeout=_TIMEOUT_S, stream=True
        ) as response:
            told = response.raw.read(2 * _START_BYTES + 1)
            code, headers = response.status_code, response.headers
    except (requests.RequestException, HTTPError, OSError):
        # What is read raw fails in the words of the library below.
        return None
    if code == requests.codes.not_found:
        return MUTE
    if code != requests.codes.ok:
        return None
    proves = all(headers.get(name) == value for name, value in PROVES.items())
    if not proves:
        return MUTE
    is_start = len(told) == 2 * _START_BYTES
    return str(told.decode(errors="replace")) if is_start else None
