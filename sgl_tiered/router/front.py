"""The HTTP front: paths, keys, and the life of the router.

Every path but ``/health`` wants the key, if there is one. What changes the fleet wants
JSON besides, so that no web page can make a browser send it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.metadata
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import web

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.routing.registry import make_routing
from sgl_tiered.pool.membership import default_name
from sgl_tiered.router.config import InstanceConfig, RouterConfig, parse_instance
from sgl_tiered.router.fleet import Fleet
from sgl_tiered.router.following import Following
from sgl_tiered.router.instances import Instance
from sgl_tiered.router.metrics import RouterMetrics
from sgl_tiered.router.prompts import CHARACTERS, PATHS, TOKENS, Tokenizer
from sgl_tiered.router.proxy import Proxy, error_response
from sgl_tiered.router.scheduler import Scheduler

__all__ = ["Router"]

_ASKED = ("/v1/models", "/model_info", "/get_model_info")
"""What any instance may answer for all."""
_EXPIRE_S = 1.0
_KEEPALIVE_S = 2.0
"""Less than the 5 s of SGLang's own server, so that it never closes what we reuse."""
_SHUTDOWN_S = 30.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """The global scheduler as a server. ``start``, then ``close``, in one event loop.

    Args:
        config: settings, checked.
        instances: to begin with; others can be added while it serves, or are found in
            the registry.
        tokenizer: None for characters.
        clock: time base of loads and assumptions.
        seed: of the generator that draws the rooms of pairs; None for a new one.
    """

    def __init__(
        self,
        config: RouterConfig,
        instances: Sequence[InstanceConfig] = (),
        tokenizer: Tokenizer | None = None,
        clock: Clock | None = None,
        seed: int | None = None,
    ) -> None:
        self._config = config
        self._begin_with = tuple(instances)
        self._tokenizer = tokenizer
        self._clock = clock or SystemClock()
        self._rng = np.random.default_rng(seed)
        self._policy = make_routing(
            config.policy,
            credits_by_place=config.credits,
            running_cost_tokens=config.running_cost_tokens,
            compute_cost=config.compute_cost,
        )
        self.metrics = RouterMetrics()
        self._closing = contextlib.AsyncExitStack()
        self._fleet: Fleet | None = None
        self._following: Following | None = None
        self._proxy: Proxy | None = None
        self._session: aiohttp.ClientSession | None = None
        self.port = config.port

    @property
    def fleet(self) -> Fleet:
        """The instances; there once the router has started."""
        assert self._fleet is not None, "the router has not started"
        return self._fleet

    @property
    def following(self) -> Following:
        """What keeps the instances as they should be; as ``fleet``."""
        assert self._following is not None, "the router has not started"
        return self._following

    async def start(self) -> None:
        """Probe the instances and begin to listen; ``port`` is known afterwards."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop listening, let what is under way end, and close everything."""
        await self._closing.aclose()

    async def _start(self) -> None:
        config = self._config
        session = await self._closing.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
            )
        )
        key = config.instance_api_key
        probing = await self._closing.enter_async_context(
            aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {key}"} if key else None,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        )
        self._session = session
        self._fleet = fleet = Fleet(config, probing, self.metrics, self._clock)
        self._closing.push_async_callback(fleet.close)
        following = Following(config, fleet, self._begin_with, self.metrics)
        self._following = following
        self._closing.push_async_callback(following.close)
        await following.start()
        scheduler = Scheduler(fleet, self._policy, config.page_characters, self._clock)
        self._proxy = proxy = Proxy(
            config,
            fleet,
            scheduler,
            session,
            self.metrics,
            self._clock,
            self._tokenizer,
            self._rng,
        )
        self._closing.callback(proxy.close)
        expiring = asyncio.create_task(self._expire())
        self._closing.push_async_callback(_stop, expiring)
        runner = web.AppRunner(
            self._app(proxy),
            handler_cancellation=True,  # a client that leaves ends its request
            access_log=None,
            shutdown_timeout=_SHUTDOWN_S,
        )
        self._closing.push_async_callback(runner.cleanup)
        await runner.setup()
        site = web.TCPSite(runner, config.host, config.port)
        await site.start()
        self.port = int(runner.addresses[0][1])
        host = f"[{config.host}]" if ":" in config.host else config.host
        name = config.name or default_name(self.port)
        following.lead(name, f"http://{host}:{self.port}")

    def _app(self, proxy: Proxy) -> web.Application:
        app = web.Application(
            middlewares=[self._guard], client_max_size=self._config.max_body_bytes
        )
        for path in PATHS:
            app.router.add_post(path, proxy.handle)
        for path in _ASKED:
            app.router.add_get(path, self._ask)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_text)
        app.router.add_get("/router/state", self._state)
        app.router.add_post("/router/instances", self._add)
        app.router.add_delete("/router/instances/{name}", self._remove)
        app.router.add_post("/router/instances/{name}/drain", self._drain)
        app.router.add_post("/router/instances/{name}/resume", self._resume)
        return app

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_S)
            self.fleet.expire()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        key = self._config.api_key
        if key is not None and request.path != "/health":
            brought = request.headers.get("Authorization", "")
            wanted = f"Bearer {key}"
            if not hmac.compare_digest(_raw(brought), _raw(wanted)):
                return error_response(401, "the API key is missing or wrong")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return error_response(error.status, error.reason)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        del request
        is_ready = any(each.is_available for each in self.fleet)
        return web.Response(status=200 if is_ready else 503)

    async def _metrics_text(self, request: web.Request) -> web.StreamResponse:
        del request
        return web.Response(
            body=self.metrics.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        """Pass a question on to any instance; they all serve the same model."""
        assert self._session is not None
        config = self._config
        headers = {}
        if config.instance_api_key is not None:
            headers["Authorization"] = f"Bearer {config.instance_api_key}"
        elif config.api_key is None and "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        timeout = aiohttp.ClientTimeout(total=config.health_timeout_s)
        for instance in self.fleet:
            if not instance.is_available:
                continue
            url = instance.config.url + request.path_qs
            try:
                async with self._session.get(
                    url, headers=headers, timeout=timeout
                ) as answer:
                    return web.Response(
                        status=answer.status,
                        body=await answer.read(),
                        headers={"Content-Type": answer.headers["Content-Type"]},
                    )
            except (aiohttp.ClientError, TimeoutError, OSError, KeyError):
                continue
        return error_response(503, "no instance is available")

    async def _state(self, request: web.Request) -> web.StreamResponse:
        del request
        state: dict[str, Any] = {
            "version": importlib.metadata.version("sgl-tiered"),
            "policy": self._policy.name,
            "alphabet": CHARACTERS if self._tokenizer is None else TOKENS,
            "tokenizer": None if self._tokenizer is None else self._tokenizer.name,
            "ttl_s": self._config.ttl_s,
            "registry": self.following.state(),
            **self.fleet.state(),
        }
        for name, shown in state["instances"].items():
            shown.update(self.following.shown(name))
        return _json(state)

    async def _add(self, request: web.Request) -> web.StreamResponse:
        body = await _json_body(request)
        text = body.get("instance") if isinstance(body, dict) else None
        if not isinstance(text, str):
            return error_response(400, 'send {"instance": "URL,kind=..."}')
        try:
            config = parse_instance(text, "instance")
            instance, is_noted = await self.following.add(config, text)
        except ConfigError as error:
            return error_response(400, str(error))
        told = {"name": instance.name, "up": instance.is_up}
        return _json({**told, **self._noted(is_noted)}, 201)

    async def _remove(self, request: web.Request) -> web.StreamResponse:
        instance = self._named(request)
        is_noted = await self.following.remove(instance)
        told = {"name": instance.name, "under_way": instance.num_under_way}
        return _json({**told, **self._noted(is_noted)})

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        await _json_body(request)
        instance = self._named(request)
        is_noted = await self.following.drain(instance)
        told = {"name": instance.name, "under_way": instance.num_under_way}
        return _json({**told, **self._noted(is_noted)})

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        await _json_body(request)
        instance = self._named(request)
        is_noted = await self.following.drain(instance, is_draining=False)
        told = {"name": instance.name, "up": instance.is_up}
        if instance.is_draining:
            told["draining"] = True  # the registry says so: it will leave
        return _json({**told, **self._noted(is_noted)})

    def _noted(self, is_noted: bool) -> dict[str, bool]:
        """Return what an answer says of a registry: do the other replicas know?"""
        return {} if self._config.registry is None else {"noted": is_noted}

    def _named(self, request: web.Request) -> Instance:
        instance = self.fleet.get(request.match_info["name"])
        if instance is None:
            raise web.HTTPNotFound(reason="no instance of this name")
        return instance


async def _json_body(request: web.Request) -> Any:
    """Return the parsed body; a body of another type is refused."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(reason="send application/json")
    raw = await request.read()
    try:
        return msgspec.json.decode(raw) if raw else None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise web.HTTPBadRequest(reason="the body is not JSON") from error


def _raw(header: str) -> bytes:
    # Headers may carry any bytes; those that are no UTF-8 come as surrogates.
    return header.encode("utf-8", "surrogateescape")


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(value),
        content_type="application/json",
    )


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
