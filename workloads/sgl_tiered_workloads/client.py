"""A streaming client of SGLang's ``/generate`` that records what it sees.

Failures are values: a refused, broken or aborted request gives a record with
``error`` set and whatever had arrived. Three ways to send:

- ``run_sequential``: one at a time, the batch is always one request. This is
  the forced schedule of the equality gate.
- ``run_batches``: each group goes out as one HTTP request, which SGLang hands to
  its scheduler as one message, so the group's batch composition is the same on
  every server whose pool holds it.
- ``run_open_loop``: each request leaves at its own time, whatever is running.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from sgl_tiered_workloads.connected import Connected
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import ChatSession, PlannedRequest
from sgl_tiered_workloads.usage import usage_of

__all__ = ["StreamingClient", "run_chat"]

_TOP_LOGPROBS = 5
_IDLE_S = 3.0
"""Idle connections are closed by us first: servers do it after 5 s, and a request that
is on its way then is lost."""
_LINE_BYTES = 1 << 26
"""A streamed line repeats the whole answer so far; aiohttp's default is 64 KiB."""


@dataclass(slots=True)
class _Answer:
    """What has arrived of one answer."""

    token_times_s: list[float] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    top_logprobs: list[list[list[Any]]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    finished: bool = False

    def take(self, event: dict[str, Any], now_s: float) -> None:
        """Take one streamed event, cumulative or incremental."""
        self.meta = event["meta_info"]
        ids: list[int] = event.get("output_ids", [])
        # SGLang repeats the answer so far in each event unless the server runs
        # with --incremental-streaming-output; the count tells which it is.
        whole = len(ids) == self.meta["completion_tokens"]
        self.output = list(ids) if whole else self.output + list(ids)
        logprobs = self.meta.get("output_token_logprobs") or []
        tops = self.meta.get("output_top_logprobs") or []
        self.logprobs = logprobs if whole else self.logprobs + logprobs
        self.top_logprobs = tops if whole else self.top_logprobs + tops
        fresh = len(self.output) - len(self.token_times_s)
        self.token_times_s.extend([now_s] * fresh)
        self.finished = self.meta.get("finish_reason") is not None


class StreamingClient(Connected[aiohttp.ClientSession]):
    """Sends requests to one server; an async context manager.

    Args:
        url: the server's address, such as ``http://127.0.0.1:30000``.
        logprobs: ask for the logprobs of the top five tokens of each output token.
        timeout_s: of one request, from start to last token.
        wishes: what every request says to a server with tiers, in its
            ``custom_params``, such as ``{"lossy": "allow"}``; None for nothing.
        tells_session: each request names its session in the header ``X-Session-Id``, by
            its key up to the turn: ``s3`` of ``s3.t1``.
        session_prefix: before that name; runs with other ones are other sessions.
        api_key: that each request brings; None for none.
    """

    def __init__(
        self,
        url: str,
        logprobs: bool = True,
        timeout_s: float = 600.0,
        wishes: Mapping[str, Any] | None = None,
        tells_session: bool = False,
        session_prefix: str = "",
        api_key: str | None = None,
    ) -> None:
        super().__init__()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url
        self._logprobs = logprobs
        self._wishes = None if wishes is None else dict(wishes)
        self._tells_session = tells_session
        self._session_prefix = session_prefix
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    def _connect(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers=self._headers,
            timeout=self._timeout,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            read_bufsize=_LINE_BYTES,
        )

    async def send(self, request: PlannedRequest, order: int = 0) -> RequestRecord:
        """Send one request and return its record."""
        return (await self.send_batch([request], order))[0]

    async def send_batch(
        self, requests: Sequence[PlannedRequest], order: int = 0, *, named: bool = False
    ) -> list[RequestRecord]:
        """Send requests as one HTTP request and return their records.

        SGLang's scheduler receives them in one message and so plans them together.

        Args:
            requests: at least one.
            order: of their records.
            named: their keys are their names on the server, by which to abort them.
        """
        answers = [_Answer() for _ in requests]
        started_s = self.now_s()
        error: str | None = None
        try:
            body = self._body(requests)
            if named:
                keys = [request.key for request in requests]
                body["rid"] = keys[0] if len(keys) == 1 else keys
            headers = {}
            if self._tells_session:
                session = requests[0].key.rpartition(".")[0]
                headers["X-Session-Id"] = self._session_prefix + session
            async for event in self._events(body, headers):
                answers[event.get("index", 0)].take(event, self.now_s())
        except (aiohttp.ClientError, TimeoutError, _ServerSaidNoError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        return [
            _record(request, answer, order, started_s, error)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _body(self, requests: Sequence[PlannedRequest]) -> dict[str, Any]:
        single = len(requests) == 1
        prompts = [list(request.prompt) for request in requests]
        wished: dict[str, Any] = {}
        if self._wishes is not None:
            wished["custom_params"] = {"tiered": self._wishes}
        sampling = [
            {
                "temperature": 0.0,
                "max_new_tokens": request.max_new_tokens,
                "ignore_eos": True,
                **wished,
            }
            for request in requests
        ]
        salts = [request.salt for request in requests]
        salted = {"cache_salt": salts[0] if single else salts} if any(salts) else {}
        return {
            **salted,
            "input_ids": prompts[0] if single else prompts,
            "sampling_params": sampling[0] if single else sampling,
            "stream": True,
            "return_logprob": self._logprobs,
            "top_logprobs_num": _TOP_LOGPROBS if self._logprobs else 0,
            # Only of the output: prompt logprobs would forbid prefix reuse.
            "logprob_start_len": -1,
        }

    async def _events(
        self, body: dict[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[dict[str, Any]]:
        async with self.session.post(
            self._url + "/generate", json=body, headers=headers
        ) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                raise _ServerSaidNoError(f"HTTP {response.status}: {text}")
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    return
                event: dict[str, Any] = orjson.loads(payload)
                if "error" in event:
                    raise _ServerSaidNoError(str(event["error"])[:500])
                yield event

    async def run_sequential(
        self,
        requests: Iterable[PlannedRequest],
        each: Callable[[RequestRecord], None] | None = None,
    ) -> list[RequestRecord]:
        """Send requests one after the other; ``each`` sees every record."""
        records = []
        for order, request in enumerate(requests):
            record = await self.send(request, order)
            records.append(record)
            if each is not None:
                each(record)
        return records

    async def run_batches(
        self, batches: Iterable[Sequence[PlannedRequest]]
    ) -> list[RequestRecord]:
        """Send groups one after the other, each group as one batch."""
        records: list[RequestRecord] = []
        for order, batch in enumerate(batches):
            records.extend(await self.send_batch(batch, order))
        return records

    async def run_open_loop(
        self, requests: Sequence[PlannedRequest]
    ) -> list[RequestRecord]:
        """Send each request at its ``start_s``, without waiting for others."""
        zero_s = self.now_s()

        async def one(order: int, request: PlannedRequest) -> RequestRecord:
            await asyncio.sleep(max(0.0, zero_s + request.start_s - self.now_s()))
            return await self.send(request, order)

        tasks = [one(order, request) for order, request in enumerate(requests)]
        return list(await asyncio.gather(*tasks))


async def run_chat(
    client: StreamingClient,
    sessions: Sequence[ChatSession],
    each: Callable[[RequestRecord], None] | None = None,
) -> list[RequestRecord]:
    """Play chat sessions turn by turn, one request at a time, there and back.

    All first turns come before any second turn, so each session's KV rests while
    the others speak. Each round goes in the opposite direction of the one before, so
    that rests are short and long, as with real users; a strict round robin is LRU's
    worst case, in which a tier smaller than the whole set is never hit. A session
    whose turn failed is left out from then on.
    """
    records: list[RequestRecord] = []
    alive = list(sessions)
    while alive:
        for session in list(alive):
            record = await client.send(session.next_request(), len(records))
            records.append(record)
            if each is not None:
                each(record)
            session.record_answer(record.output)
            if session.finished or record.error is not None:
                alive.remove(session)
        alive.reverse()
    return records


class _ServerSaidNoError(Exception):
    """The server answered with an error; kept as a value in the record."""


def _record(
    request: PlannedRequest,
    answer: _Answer,
    order: int,
    started_s: float,
    error: str | None,
) -> RequestRecord:
    if error is None and not answer.finished:
        error = "the stream ended before the answer did"
    reason = answer.meta.get("finish_reason") or {}
    if error is None and reason.get("type") == "abort":
        error = f"aborted: {reason.get('message', '')}"
    usage = usage_of(answer.meta)
    return RequestRecord(
        key=request.key,
        order=order,
        prompt=request.prompt,
        targeted_s=request.start_s,
        started_s=started_s,
        token_times_s=tuple(answer.token_times_s),
        output=tuple(answer.output),
        logprobs=tuple(float(item[0]) for item in answer.logprobs),
        top_logprobs=tuple(
            tuple((float(pair[0]), int(pair[1])) for pair in top)
            for top in answer.top_logprobs
        ),
        cached_tokens=usage.cached_tokens or 0,
        cached_by_tier=usage.cached_by_tier,
        error=error,
        is_split=any(told.get("split") for told in answer.meta.get("tiered") or ()),
    )
