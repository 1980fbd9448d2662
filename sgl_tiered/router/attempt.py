"""One attempt: a request sent to an instance (or to a pair), up to its first byte.

``open_answer`` returns once there is something to pass on: the first piece of a stream,
or a whole answer. Until then nothing has reached the client, and any failure is an
``AttemptError`` after which another instance can be tried. A stream whose first event
is the server's own failure counts as one: SGLang has said 200 by then, and a decode
instance finds out later than that that its prefill instance is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from sgl_tiered.router.config import Timeouts
from sgl_tiered.router.instances import Instance, Ticket

__all__ = [
    "Answer",
    "AttemptError",
    "Upstream",
    "is_refusal",
    "open_answer",
    "open_pair",
    "read_whole",
]

RETRIED = frozenset({500, 502, 503, 504})
"""Statuses that say something of the instance and nothing of the request."""
_PIECE_BYTES = 256 * 2**10
"""Of a body that are handed to a connection at one time."""


@dataclass(eq=False)
class AttemptError(Exception):
    """An instance did not serve a request, and nothing of it was passed on.

    Attributes:
        instance: that failed.
        outcome: ``refused``, ``broken``, ``timeout`` or ``status``.
        detail: what happened, for people.
        answer: what it said, where it said something.
    """

    instance: Instance
    outcome: str
    detail: str
    answer: Answer | None = None

    def __str__(self) -> str:
        return f"{self.instance.name}: {self.outcome} ({self.detail})"


@dataclass(frozen=True, slots=True)
class Upstream:
    """What every attempt of one request has in common.

    Attributes:
        session: that connects to instances.
        path: asked for.
        headers: to send.
        is_stream: whether the answer is passed on piece by piece.
        timeouts: bounds.
        max_bytes: of a whole answer.
    """

    session: aiohttp.ClientSession
    path: str
    headers: Mapping[str, str]
    is_stream: bool
    timeouts: Timeouts
    max_bytes: int


@dataclass(eq=False)
class Answer:
    """An answer that has begun. ``close`` it whatever becomes of it.

    Attributes:
        status: of HTTP.
        headers: as the instance sent them.
        first: the first piece; all of it, where it is not streamed.
    """

    status: int
    headers: Mapping[str, str]
    first: bytes
    _response: aiohttp.ClientResponse | None
    _timeouts: Timeouts
    _companion: asyncio.Task[None] | None = None

    @property
    def is_stream(self) -> bool:
        """Whether more may follow the first piece."""
        return self._response is not None

    async def rest(self) -> AsyncIterator[bytes]:
        """Give the pieces after the first one.

        Raises:
            aiohttp.ClientError: the instance broke off.
            TimeoutError: it fell silent.
        """
        if self._response is None:
            return
        while True:
            async with asyncio.timeout(self._timeouts.idle_s):
                piece = await self._response.content.readany()
            if not piece:
                return
            yield piece

    def close(self) -> None:
        """Give up what is open; an instance then stops computing what nobody reads."""
        if self._response is not None:
            # Closed, not released: after a client left, the rest is not to be read.
            self._response.close()
        if self._companion is not None:
            self._companion.cancel()


def is_refusal(error: BaseException) -> bool:
    """Return whether nobody listens there; what fails on our side does not count."""
    return (
        isinstance(error, aiohttp.ClientConnectorError)
        and error.os_error.errno == errno.ECONNREFUSED
    )


async def open_answer(
    upstream: Upstream, instance: Instance, ticket: Ticket, body: bytes
) -> Answer:
    """Send a request and return its answer once it has begun.

    The ticket's ``give_up`` ends the wait, as if its time were over.

    Raises:
        AttemptError: it did not begin.
    """
    timeouts = upstream.timeouts
    bound_s = timeouts.first_byte_s if upstream.is_stream else timeouts.whole_s
    response: aiohttp.ClientResponse | None = None
    try:
        async with asyncio.timeout(bound_s) as bound:
            ticket.give_up = _ender(bound)
            response = await upstream.session.post(
                instance.config.url + upstream.path,
                data=_pieces(body) if len(body) > _PIECE_BYTES else body,
                headers={**upstream.headers, "Content-Length": str(len(body))},
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=timeouts.connect_s
                ),
                allow_redirects=False,
            )
            streams = upstream.is_stream and response.status == 200
            if streams:
                first = await response.content.readany()
            else:
                first = await read_whole(response, upstream.max_bytes)
        answer = Answer(
            response.status,
            response.headers,
            first,
            response if streams and first else None,
            timeouts,
        )
        if response.status in RETRIED:
            raise AttemptError(instance, "status", str(response.status), answer)
        if streams and (failure := _failure(first)) is not None:
            answer.close()
            raise AttemptError(instance, "status", str(failure.status), failure)
        return answer
    except AttemptError:
        raise
    except BaseException as error:
        if response is not None:
            response.close()
        if is_refusal(error):
            raise AttemptError(instance, "refused", str(error)) from error
        if isinstance(error, TimeoutError):
            detail = f"{bound_s:g} s" if instance.is_up else "down"
            raise AttemptError(instance, "timeout", detail) from error
        if isinstance(error, aiohttp.ClientError | OSError):
            raise AttemptError(instance, "broken", repr(error)) from error
        raise
    finally:
        ticket.give_up = None  # what has begun, or failed, waits no more


async def open_pair(
    upstream: Upstream,
    prefill: tuple[Instance, Ticket],
    decode: tuple[Instance, Ticket],
    body: bytes,
) -> Answer:
    """Send a request to both and return the decode instance's answer.

    Raises:
        AttemptError: either failed before the answer began; names which.
    """
    ahead = asyncio.create_task(_prefill(upstream, *prefill, body))
    answer = asyncio.create_task(open_answer(upstream, *decode, body))
    try:
        await asyncio.wait({ahead, answer}, return_when=asyncio.FIRST_COMPLETED)
        if ahead.done():
            ahead.result()  # raises for a prefill that failed; decode waits in vain
        begun = await answer
    except BaseException:
        for task in (ahead, answer):
            task.cancel()
        for task in (ahead, answer):
            with contextlib.suppress(AttemptError, asyncio.CancelledError):
                late = await task
                if late is not None:
                    late.close()
        raise
    # Its failures are told through the decode instance from here on.
    ahead.add_done_callback(lambda task: task.cancelled() or task.exception())
    begun._companion = ahead
    return begun


async def _prefill(
    upstream: Upstream, prefill: Instance, ticket: Ticket, body: bytes
) -> None:
    """Read the prefill instance's answer to its end.

    Raises:
        AttemptError: it failed, or refused the request.
    """
    answer = await open_answer(upstream, prefill, ticket, body)
    try:
        if answer.status != 200:
            raise AttemptError(prefill, "status", str(answer.status), answer)
        async for _ in answer.rest():
            pass
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise AttemptError(prefill, "broken", repr(error)) from error
    finally:
        answer.close()


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """Give a long body piece by piece, so that others get the loop in between."""
    for at in range(0, len(body), _PIECE_BYTES):
        yield body[at : at + _PIECE_BYTES]


def _failure(first: bytes) -> Answer | None:
    """Return what a stream's first event says, where it is a failure of the server.

    In ``/generate`` a request is aborted with a status, in the OpenAI paths it is an
    error with a code. Aborts without a status are somebody's wish and no failure.
    """
    event, end, _ = first.partition(b"\n\n")
    # Looked for first: events with tokens in them are not worth parsing.
    if not end or (b'"abort"' not in event and b'"error"' not in event):
        return None
    try:
        told = msgspec.json.decode(event.removeprefix(b"data:"))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    fields = told if isinstance(told, dict) else {}
    meta, error = fields.get("meta_info"), fields.get("error")
    if isinstance(error, dict):
        status, message = error.get("code"), error.get("message")
    elif isinstance(meta, dict) and not meta.get("completion_tokens"):
        reason = meta.get("finish_reason")
        if not isinstance(reason, dict) or reason.get("type") != "abort":
            return None
        status, message = reason.get("status_code"), reason.get("message")
    else:
        return None
    if status not in RETRIED:
        return None
    body = {"object": "error", "error": {"message": str(message), "code": status}}
    headers = {"Content-Type": "application/json"}
    whole = msgspec.json.encode(body)
    return Answer(status, headers, whole, None, Timeouts())


def _ender(bound: asyncio.Timeout) -> Callable[[], None]:
    """Return what ends a wait now; nothing where it ends already."""
    now_s = asyncio.get_running_loop().time

    def end() -> None:
        if not bound.expired():
            bound.reschedule(now_s())

    return end


async def read_whole(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read all of an answer.

    Raises:
        aiohttp.ClientPayloadError: it is longer than ``max_bytes``, or broke off.
    """
    pieces = []
    num_bytes = 0
    async for piece in response.content.iter_any():
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise aiohttp.ClientPayloadError(f"more than {max_bytes} bytes")
        pieces.append(piece)
    response.release()
    return b"".join(pieces)
