"""A streaming client of any OpenAI-compatible server, through the official package.

It gives the same records as ``StreamingClient``, so a peer (vLLM, say) is measured with
the same schedule and the same arithmetic. Prompts are token ids:
``/v1/completions`` takes them as they are, ``/v1/chat/completions`` gets them decoded
as one user message, and then the server's own count of the prompt is recorded too.

When a token arrived is read, in this order, from the ids of an event, from the running
usage of an event, or from an event that carries text (one token each). The first two
are extensions that vLLM and SGLang share; a server that refuses unknown fields is
asked without them. Failures are values: a record with ``error`` set.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import httpx
import openai

from sgl_tiered_workloads.connected import Connected
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.usage import tokens_by_tier

__all__ = ["Api", "OpenAIClient", "Tokenizer"]

Api = Literal["openai-completions", "openai-chat"]

_NO_KEY = "none"
"""Servers of one's own ask for no key, and the package insists on one."""


class Tokenizer(Protocol):
    """What turns ids into a chat message and an answer's text into ids."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ``ids``."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens."""
        ...


@dataclass(slots=True)
class _Answer:
    """What has arrived of one answer."""

    token_times_s: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)
    finish_reason: str | None = None

    def take(self, event: dict[str, Any], now_s: float) -> None:
        """Take one streamed event."""
        self.usage = event.get("usage") or self.usage
        extra = event.get("sglext") or {}
        self.tiers |= tokens_by_tier(extra.get("cached_tokens_details") or {})
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            # Models that think aloud stream their first tokens under another name.
            text = (
                choice.get("text")
                or delta.get("content")
                or delta.get("reasoning_content")
                or ""
            )
            ids = choice.get("token_ids") or []
            fresh = self._fresh(ids, event.get("usage"), text)
            self.token_times_s.extend([now_s] * fresh)
            self.ids.extend(ids)
            self.text += text
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _fresh(
        self, ids: Sequence[int], usage: dict[str, Any] | None, text: str
    ) -> int:
        """Return how many tokens an event brought."""
        if ids:
            return len(ids)
        if usage is not None and "completion_tokens" in usage:
            return max(0, int(usage["completion_tokens"]) - len(self.token_times_s))
        return 1 if text else 0


class OpenAIClient(Connected[openai.AsyncOpenAI]):
    """Sends requests to one server; an async context manager.

    Args:
        url: the server's address without ``/v1``.
        model: the name that it serves.
        api: which of the two interfaces.
        tokenizer: needed for chat; without it, an answer's ids are known only where
            the server tells them.
        extensions: ask for what vLLM and SGLang add: no stop at the end token, token
            ids (completions only), running usage.
        api_key: sent as the bearer token.
        timeout_s: of one request, from start to last token.

    Raises:
        ValueError: chat without a tokenizer.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api: Api = "openai-completions",
        tokenizer: Tokenizer | None = None,
        extensions: bool = True,
        api_key: str = _NO_KEY,
        timeout_s: float = 600.0,
    ) -> None:
        if api == "openai-chat" and tokenizer is None:
            raise ValueError("chat sends text, so it needs the model's tokenizer")
        super().__init__()
        self._base = url.rstrip("/") + "/v1"
        self._model = model
        self._api = api
        self._tokenizer = tokenizer
        self._extensions = extensions
        self._api_key = api_key
        self._timeout_s = timeout_s

    def _connect(self) -> openai.AsyncOpenAI:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return openai.AsyncOpenAI(
            api_key=self._api_key,
            base_url=self._base,
            # A retry would hide a failure and count its wait as the server's.
            max_retries=0,
            timeout=self._timeout_s,
            http_client=httpx.AsyncClient(limits=limits, timeout=self._timeout_s),
        )

    async def send(self, request: PlannedRequest, order: int = 0) -> RequestRecord:
        """Send one request and return its record."""
        session = self.session
        body = self._body(request)
        answer = _Answer()
        started_s = self.now_s()
        error: str | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                async for event in self._events(session, body):
                    answer.take(event, self.now_s())
        except (
            openai.OpenAIError,
            httpx.HTTPError,
            json.JSONDecodeError,
            TimeoutError,
        ) as failure:
            error = f"{type(failure).__name__}: {failure}"[:500]
        return self._record(request, answer, order, started_s, error)

    def _body(self, request: PlannedRequest) -> dict[str, Any]:
        usage: dict[str, bool] = {"include_usage": True}
        extra: dict[str, Any] = {}
        if self._extensions:
            usage["continuous_usage_stats"] = True
            extra["ignore_eos"] = True
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": 0.0,
            "max_tokens": request.max_new_tokens,
            "stream": True,
            "stream_options": usage,
            "extra_body": extra,
        }
        if self._api == "openai-chat" and self._tokenizer is not None:
            text = self._tokenizer.decode(list(request.prompt))
            return {**body, "messages": [{"role": "user", "content": text}]}
        if self._extensions:
            extra["return_token_ids"] = True
        return {**body, "prompt": list(request.prompt)}

    async def _events(
        self, client: openai.AsyncOpenAI, body: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        send: Any = (
            client.completions.create
            if self._api == "openai-completions"
            else client.chat.completions.create
        )
        stream = await send(**body)
        try:
            async for event in stream:
                # The extensions are no fields of the package's types.
                yield event.to_dict()
        finally:
            await stream.close()

    def _record(
        self,
        request: PlannedRequest,
        answer: _Answer,
        order: int,
        started_s: float,
        error: str | None,
    ) -> RequestRecord:
        if error is None and answer.finish_reason is None:
            error = "the stream ended before the answer did"
        if error is None and answer.finish_reason == "abort":
            error = "aborted"
        if error is None and not answer.token_times_s:
            error = "the answer is empty"
        ids = answer.ids
        if not ids and answer.text and self._tokenizer is not None:
            ids = list(self._tokenizer.encode(answer.text))
        details = answer.usage.get("prompt_tokens_details") or {}
        cached = int(details.get("cached_tokens") or 0)
        # A server that tells no tiers must not be credited with one.
        tiers = answer.tiers or ({"unattributed": cached} if cached else {})
        prompt_tokens = answer.usage.get("prompt_tokens")
        output_tokens = answer.usage.get("completion_tokens")
        return RequestRecord(
            key=request.key,
            order=order,
            prompt=request.prompt,
            targeted_s=request.start_s,
            started_s=started_s,
            token_times_s=tuple(answer.token_times_s),
            output=tuple(ids),
            cached_tokens=max(cached, sum(answer.tiers.values())),
            cached_by_tier=tiers,
            error=error,
            prompt_tokens=None if prompt_tokens is None else int(prompt_tokens),
            output_tokens=(
                len(answer.token_times_s)
                if output_tokens is None
                else int(output_tokens)
            ),
            output_text="" if answer.ids else answer.text,
        )
