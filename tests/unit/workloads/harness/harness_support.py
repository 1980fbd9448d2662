"""A stand-in server that streams as SGLang and as OpenAI do, and hand-made work.

Its answers are a function of the prompt, so equal prompts get equal answers, and a
prompt with one wrong page gets another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from sgl_tiered_workloads.arrivals import ClosedLoop, OpenLoop
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.turns import Turn, TurnSession
from sgl_tiered_workloads.workload import Workload

from tests.web_servers import end_server

VOCAB = 4096


def answer_ids(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the answer that a right server gives."""
    digest = hashlib.sha256(json.dumps(list(prompt)).encode()).digest()
    return [
        7 + digest[i % 32] * 8 + i if i else 7 + digest[0] for i in range(num_tokens)
    ]


@dataclass
class StandIn:
    """What one stand-in server does.

    Attributes:
        status: of every answer; anything but 200 is a refusal.
        cut_after: events after which the connection is cut; None for never.
        tells_ids: whether OpenAI events carry token ids and running usage.
        tells_usage: whether a last event tells the usage.
        per_event: tokens in one event.
        wrong: answers as if prompts ended in another token.
        cached: prompt tokens that it claims to have had, by tier.
        shift: of its logprobs, as another rounding gives.
    """

    status: int = 200
    cut_after: int | None = None
    tells_ids: bool = True
    tells_usage: bool = True
    per_event: int = 1
    wrong: bool = False
    cached: Mapping[str, int] = field(default_factory=dict)
    shift: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[StandIn]:
        """Run the server within the running event loop."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/version", self._version)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await end_server(runner)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "9.9"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, sampling = body["input_ids"], body["sampling_params"]
        ids = self._ids(prompt, sampling["max_new_tokens"])
        events = []
        for end in range(self.per_event, len(ids) + 1, self.per_event):
            best = -0.5 + self.shift
            top = [[[best, i, None], [-1.5, 1, None]] for i in ids[:end]]
            meta = {
                "completion_tokens": end,
                "cached_tokens": sum(self.cached.values()),
                "cached_tokens_details": dict(self.cached),
                "finish_reason": {"type": "length"} if end == len(ids) else None,
                "output_token_logprobs": [[best, i, None] for i in ids[:end]],
                "output_top_logprobs": top,
            }
            events.append({"index": 0, "output_ids": ids[:end], "meta_info": meta})
        return await self._stream(request, body, events)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids = self._ids(body["prompt"], body["max_tokens"])
        return await self._stream(request, body, self._openai(body, ids, "text"))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = [ord(c) for c in body["messages"][0]["content"]]
        ids = self._ids(prompt, body["max_tokens"])
        role = {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}
        events = [role, *self._openai(body, ids, "chat")]
        return await self._stream(request, body, events)

    def _ids(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        return answer_ids([*prompt, 5] if self.wrong else prompt, num_tokens)

    def _openai(
        self, body: dict[str, Any], ids: list[int], kind: str
    ) -> list[dict[str, Any]]:
        events = []
        for end in range(self.per_event, len(ids) + 1, self.per_event):
            fresh = ids[end - self.per_event : end]
            text = "".join(chr(0x4E00 + i) for i in fresh)
            choice: dict[str, Any] = {"index": 0}
            choice |= {"text": text} if kind == "text" else {"delta": {"content": text}}
            choice["finish_reason"] = "length" if end == len(ids) else None
            event: dict[str, Any] = {"choices": [choice]}
            if self.tells_ids and body.get("return_token_ids"):
                choice["token_ids"] = fresh
            if self.tells_ids and body["stream_options"].get("continuous_usage_stats"):
                event["usage"] = self._usage(end)
            events.append(event)
        if self.tells_usage:
            events.append({"choices": [], "usage": self._usage(len(ids))})
        return events

    def _usage(self, output: int) -> dict[str, Any]:
        details = {"cached_tokens": sum(self.cached.values())}
        return {
            "prompt_tokens": 77,
            "completion_tokens": output,
            "prompt_tokens_details": details,
        }

    async def _stream(
        self, request: web.Request, body: dict[str, Any], events: list[dict[str, Any]]
    ) -> web.StreamResponse:
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no room"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(events):
            if number == self.cut_after:
                assert request.transport is not None
                request.transport.close()
                return response
            common = {"id": "x", "object": "x", "created": 0, "model": "m"}
            line = json.dumps({**common, **event})
            await response.write(f"data: {line}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


class LetterTokenizer:
    """One token per character; ids are code points less an offset."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(0x4E00 + i) for i in ids)

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 0x4E00 for c in text]


def tiny_workload(
    name: str, params: Mapping[str, Any], seed: int, vocab_tokens: int
) -> Workload:
    """Make two-turn chats with a shared opening; a stand-in for the registry."""
    num = int(params.get("num_sessions", 3))
    opening = tuple(range(100, 116))
    sessions = tuple(
        TurnSession(
            f"s{i}",
            [Turn(tuple(range(seed % 97 + 200 * i, seed % 97 + 200 * i + 40)), 4)] * 2,
            opening,
        )
        for i in range(num)
    )
    closed = params.get("arrivals", {}).get("process") == "closed"
    times = tuple(0.01 * i for i in range(num))
    arrivals = ClosedLoop(2) if closed else OpenLoop(times)
    return Workload(name, arrivals, sessions=sessions)


def record(
    key: str,
    targeted_s: float,
    token_times_s: Sequence[float],
    *,
    lag_s: float = 0.0,
    repeat: int = 0,
    prompt: int = 100,
    cached: Mapping[str, int] | None = None,
    error: str | None = None,
) -> RequestRecord:
    """Return a hand-made record; its answer has one token per time."""
    tiers = dict(cached or {})
    return RequestRecord(
        key=key,
        order=0,
        prompt=tuple(range(prompt)),
        targeted_s=targeted_s,
        started_s=targeted_s + lag_s,
        token_times_s=tuple(token_times_s),
        output=tuple(range(len(token_times_s))),
        cached_tokens=sum(tiers.values()),
        cached_by_tier=tiers,
        error=error,
        repeat=repeat,
    )
