"""Passes a request on to an instance and its answer back, byte for byte.

Another instance is tried while nothing has reached the client: a refused or broken
connection, a time-out, or a status that speaks of the instance (500, 502, 503, 504).
After the first byte there is no second try, as a client must never see two answers
mixed; a stream that breaks off then ends with one event that carries an error, and
without ``[DONE]``. A half event is never passed on.

When the client leaves, the connection to the instance is closed: SGLang then aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import msgspec
import numpy as np
from aiohttp import web

from sgl_tiered.core.clock import Clock
from sgl_tiered.policies.routing.base import PLACES
from sgl_tiered.router.attempt import (
    RETRIED,
    Answer,
    AttemptError,
    Upstream,
    open_answer,
    open_pair,
)
from sgl_tiered.router.bodies import Bodies
from sgl_tiered.router.bootstrap import with_bootstrap
from sgl_tiered.router.config import COLOCATED, DECODE, PREFILL, RouterConfig
from sgl_tiered.router.fleet import Fleet
from sgl_tiered.router.instances import Instance
from sgl_tiered.router.metrics import RouterMetrics
from sgl_tiered.router.prompts import Prompt, PromptKeys
from sgl_tiered.router.readers import Readers
from sgl_tiered.router.refusals import RefusedError, error_body, error_response
from sgl_tiered.router.scheduler import Choice, Scheduler

__all__ = ["Proxy", "whole_events"]

_LOG = logging.getLogger(__name__)
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-length",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_FORWARDED = _HOP_BY_HOP | {
    "accept-encoding",
    "authorization",
    "content-encoding",  # the body was unpacked on its way in
    "expect",
    "host",
}
_NOT_RETURNED = _HOP_BY_HOP | {"date", "server"}
_OURS = "x-tiered-"
_MAX_HELD_BYTES = 2**20
"""Of an event that does not end; beyond, it is passed on as it comes."""


@dataclass(frozen=True, slots=True)
class _Route:
    """Who serves a request: one instance, or a pair that answers by the second."""

    serving: Choice
    prefill: Choice | None = None

    @property
    def first(self) -> Choice:
        """The one that computes the prompt."""
        return self.prefill or self.serving


class Proxy:
    """Handles requests; holds no state of its own beyond a turn of the rooms."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        scheduler: Scheduler,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        clock: Clock,
        bodies: Bodies,
        readers: Readers,
        rng: np.random.Generator,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._scheduler = scheduler
        self._session = session
        self._metrics = metrics
        self._clock = clock
        self._bodies = bodies
        self._readers = readers
        self._rng = rng

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one request of one of ``prompts.PATHS``."""
        began_s = self._clock.now()
        outcome = "gone"
        try:
            async with self._bodies.read(request) as raw:
                response, outcome = await self._serve(request, raw, began_s)
        except RefusedError as refused:
            outcome = str(refused.status)
            raise
        finally:
            self._metrics.requests.labels(request.path, outcome).inc()
        return response

    async def _serve(
        self, request: web.Request, raw: bytes, began_s: float
    ) -> tuple[web.StreamResponse, str]:
        """Have an instance answer; ``raw`` is the request's body.

        Raises:
            RefusedError: what the body says is none, or costs too much to be read.
        """
        sizes = self._scheduler.page_sizes
        reading = await self._readers.read(request.path, raw, sizes)
        if reading.trouble:
            raise RefusedError(400, "body", reading.trouble)
        prompt = reading.prompt
        keys = reading.keys(self._config.page_characters)
        session = request.headers.get("x-session-id") or prompt.session
        session = session or _connection(request)
        tried: list[str] = []
        last: AttemptError | None = None
        while len(tried) < self._config.max_attempts:
            route = self._route(prompt, keys, session, tried)
            if route is None:
                break
            try:
                return await self._attempt(
                    request, raw, prompt, keys, route, len(tried) + 1, began_s
                )
            except AttemptError as error:
                _LOG.warning("attempt %d failed at %s", len(tried) + 1, error)
                last = error
                tried.append(error.instance.name)
                self._count(error.instance, error.outcome)
                self._scheduler.doubt(error.instance, keys)
                self._fleet.failed(error.instance, is_gone=error.outcome == "refused")
                if error.answer is not None and error.answer.status not in RETRIED:
                    break
        if last is None:
            return _refusal(503, "no instance is available")
        if last.answer is not None:
            answer = last.answer
            headers = _returned(answer.headers)
            headers["X-Tiered-Attempts"] = str(len(tried))
            response = web.Response(
                status=answer.status, body=answer.first, headers=headers
            )
            return response, str(answer.status)
        status = 504 if last.outcome == "timeout" else 502
        return _refusal(status, f"{len(tried)} attempts failed, the last at {last}")

    def _route(
        self, prompt: Prompt, keys: PromptKeys, session: str, tried: list[str]
    ) -> _Route | None:
        """Choose a pair where both kinds are there, else a colocated instance."""

        def choose(kind: str) -> Choice | None:
            return self._scheduler.choose(
                prompt, keys, kind, session=session, tried=tried
            )

        began_s = self._clock.now()
        prefill = choose(PREFILL) if self._fleet.has(DECODE) else None
        decode = choose(DECODE) if prefill is not None else None
        route = None
        if prefill is not None and decode is not None:
            route = _Route(decode, prefill)
        else:
            colocated = choose(COLOCATED)
            if colocated is not None:
                route = _Route(colocated)
        self._metrics.decision_seconds.observe(self._clock.now() - began_s)
        return route

    async def _attempt(
        self,
        request: web.Request,
        raw: bytes,
        prompt: Prompt,
        keys: PromptKeys,
        route: _Route,
        number: int,
        began_s: float,
    ) -> tuple[web.StreamResponse, str]:
        """Send the request along one route and pass the answer on.

        Raises:
            AttemptError: nothing was passed on.
        """
        first = route.first
        now_s = self._clock.now()
        own_tokens = max(prompt.num_tokens - first.facts.num_cached, 0)
        tickets = [(first.instance, first.instance.open(now_s, own_tokens))]
        if route.prefill is not None:
            serving = route.serving.instance
            tickets.append((serving, serving.open(now_s, 0)))
        headers = self._forwarded(request.headers, first.holders)
        upstream = Upstream(
            self._session,
            request.path_qs,
            headers,
            prompt.is_stream,
            self._config.timeouts,
            self._config.max_body_bytes,
        )
        ttl_s = self._config.ttl_s
        taking_back = [
            self._scheduler.expect(instance, keys, ttl_s) for instance, _ in tickets
        ]
        answer: Answer | None = None
        is_held = False
        try:
            if route.prefill is None:
                answer = await open_answer(upstream, *tickets[0], raw)
            else:
                sent = with_bootstrap(raw, prompt, first.instance.config, self._rng)
                answer = await open_pair(upstream, tickets[0], tickets[1], sent)
            for instance, ticket in tickets:
                instance.answered(ticket)
            if number == 1:
                self._count_tokens(prompt, first)
            is_held = answer.status == 200
            return await self._pass_on(
                request, answer, route, prompt, keys, number, began_s
            )
        finally:
            if not is_held:  # it was refused, or nobody knows
                for take_back in taking_back:
                    take_back()
            for instance, ticket in tickets:
                instance.close(ticket)
            if answer is not None:
                answer.close()

    async def _pass_on(
        self,
        request: web.Request,
        answer: Answer,
        route: _Route,
        prompt: Prompt,
        keys: PromptKeys,
        number: int,
        began_s: float,
    ) -> tuple[web.StreamResponse, str]:
        """Write an answer to the client: from here on there is no second try."""
        serving = route.serving.instance
        headers = _returned(answer.headers)
        headers["X-Tiered-Instance"] = serving.name
        if route.prefill is not None:
            headers["X-Tiered-Prefill"] = route.prefill.instance.name
        # Without a salt it would tell a tenant what others have asked before.
        if prompt.cache_salt or self._config.show_cached_tokens:
            headers["X-Tiered-Cached-Tokens"] = str(route.first.facts.num_cached)
        headers["X-Tiered-Attempts"] = str(number)
        if not answer.is_stream:
            self._count(serving, "ok")
            if answer.status == 200:
                await self._assume(route, keys)
            whole = web.Response(
                status=answer.status, body=answer.first, headers=headers
            )
            return whole, str(answer.status)
        self._metrics.first_byte_seconds.observe(self._clock.now() - began_s)
        response = web.StreamResponse(status=answer.status, headers=headers)
        has_events = "text/event-stream" in answer.headers.get("Content-Type", "")
        outcome = str(answer.status)
        await response.prepare(request)
        passed, held = whole_events(answer.first) if has_events else (answer.first, b"")
        await response.write(passed)
        await self._assume(route, keys)
        rest = answer.rest()
        while True:
            try:
                piece = await anext(rest, b"")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                _LOG.warning("%s broke off: %r", serving.name, error)
                self._count(serving, "broken")
                outcome = "broken"
                held = _error_event(serving) if has_events else b""
                break
            if not piece:
                self._count(serving, "ok")
                await self._assume(route, keys)
                break
            if has_events:
                passed, held = whole_events(held + piece)
            else:
                passed = piece
            if passed:
                await response.write(passed)
        if held:
            await response.write(held)
        if outcome == "broken" and not has_events and request.transport is not None:
            # Without events there is no word for it: the client must see it break.
            request.transport.abort()
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response, outcome

    def _forwarded(self, headers: Mapping[str, str], holders: str) -> dict[str, str]:
        """Return the headers for an instance."""
        sent = {
            name: value
            for name, value in headers.items()
            if name.lower() not in _NOT_FORWARDED and not name.lower().startswith(_OURS)
        }
        if self._config.instance_api_key is not None:
            sent["Authorization"] = f"Bearer {self._config.instance_api_key}"
        elif self._config.api_key is None and "Authorization" in headers:
            sent["Authorization"] = headers["Authorization"]
        if holders:
            sent["X-Tiered-Holders"] = holders
        return sent

    async def _assume(self, route: _Route, keys: PromptKeys) -> None:
        for choice in (route.serving, route.prefill):
            if choice is None:
                continue
            ttl_s = self._config.ttl_s
            for _ in self._scheduler.assuming(choice.instance, keys, ttl_s):
                await asyncio.sleep(0)

    def _count(self, instance: Instance, outcome: str) -> None:
        self._metrics.attempts.labels(instance.name, outcome).inc()

    def _count_tokens(self, prompt: Prompt, first: Choice) -> None:
        self._metrics.prompt_tokens.inc(prompt.num_tokens)
        for place, num_tokens in zip(PLACES, first.facts.cached_tokens, strict=True):
            if num_tokens:
                self._metrics.cached_tokens.labels(place).inc(num_tokens)


def whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Split a stream of events into those that are whole and the rest."""
    end = data.rfind(b"\n\n") + 2
    if end == 1:
        return (data, b"") if len(data) > _MAX_HELD_BYTES else (b"", data)
    return data[:end], data[end:]


def _error_event(instance: Instance) -> bytes:
    message = f"instance {instance.name} broke off"
    return b"data: " + msgspec.json.encode(error_body(502, message)) + b"\n\n"


def _refusal(status: int, message: str) -> tuple[web.Response, str]:
    return error_response(status, message), str(status)


def _returned(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers for the client."""
    return {
        name: value
        for name, value in headers.items()
        if name.lower() not in _NOT_RETURNED
    }


def _connection(request: web.Request) -> str:
    """Return a name of the client's connection: its address and port."""
    peer = request.transport.get_extra_info("peername") if request.transport else None
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""
