"""Reads the bodies of requests: within a size and a time, and all of them within a sum.

A body is kept while its request may have to be sent again, to another instance. What is
kept of all requests together is bounded, so that many long bodies at a time are refused
instead of ending the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.http import HttpProcessingError

from sgl_tiered.router.refusals import RefusedError

__all__ = ["Bodies"]

_MB = 2**20


class Bodies:
    """The bodies that are held now.

    Args:
        max_bytes: of one.
        max_held_bytes: of all.
        timeout_s: from the end of the headers to the end of the body.

    Attributes:
        num_bytes: held now.
    """

    def __init__(self, max_bytes: int, max_held_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._timeout_s = timeout_s
        self.num_bytes = 0

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """Give the whole body of a request, unpacked; it counts until the block ends.

        Raises:
            RefusedError: it is too long, too slow, broken, or too much beside others.
        """
        pieces: list[bytes] = []
        num_bytes = 0
        try:
            if (request.content_length or 0) > self._max_bytes:
                raise self._too_long()
            try:
                async with asyncio.timeout(self._timeout_s):
                    while piece := await request.content.readany():
                        if num_bytes + len(piece) > self._max_bytes:
                            raise self._too_long()
                        if self.num_bytes + len(piece) > self._max_held_bytes:
                            raise self._too_many()
                        num_bytes += len(piece)
                        self.num_bytes += len(piece)
                        pieces.append(piece)
            except TimeoutError:
                raise RefusedError(
                    408,
                    "body_time",
                    f"the body was not here {self._timeout_s:g} s after its headers: "
                    "send it faster, or raise --body-timeout",
                ) from None
            except (web.RequestPayloadError, HttpProcessingError):
                raise RefusedError(400, "body_broken", "the body is broken") from None
            whole = b"".join(pieces)
            pieces.clear()
            yield whole
        finally:
            self.num_bytes -= num_bytes

    def _too_long(self) -> RefusedError:
        return RefusedError(
            413,
            "body_size",
            f"the body is longer than {self._max_bytes / _MB:g} MiB: send less, or "
            "raise --max-body-mb",
        )

    def _too_many(self) -> RefusedError:
        return RefusedError(
            503,
            "bodies_held",
            f"requests under way hold {self._max_held_bytes / _MB:g} MiB of bodies: "
            "try again later, or raise --max-held-mb",
        )
