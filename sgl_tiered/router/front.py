"""The HTTP front: paths, keys, and the life of the router.

One table says what is served and whose key it wants (``access.py``). What a browser
sends for a page of another origin is refused, whatever its key; what changes the fleet
wants JSON besides.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import resource
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import web
from aiohttp.http import HttpProcessingError

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.core.origin import is_foreign
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.routing.registry import make_routing
from sgl_tiered.pool.membership import default_name
from sgl_tiered.router.access import Level, check_key
from sgl_tiered.router.attempt import read_whole
from sgl_tiered.router.bodies import Bodies
from sgl_tiered.router.config import InstanceConfig, RouterConfig, parse_instance
from sgl_tiered.router.connections import Door, connection_of
from sgl_tiered.router.fleet import Fleet
from sgl_tiered.router.following import Following
from sgl_tiered.router.instances import Instance
from sgl_tiered.router.metrics import RouterMetrics
from sgl_tiered.router.prompts import CHARACTERS, PATHS, TOKENS
from sgl_tiered.router.proxy import Proxy
from sgl_tiered.router.readers import Readers
from sgl_tiered.router.refusals import RefusedError, error_response
from sgl_tiered.router.scheduler import Scheduler
from sgl_tiered.router.supervised import supervised

__all__ = ["Router"]

_ASKED = ("/v1/models", "/model_info", "/get_model_info")
"""What any instance may answer for all."""
_EXPIRE_S = 1.0
_KEEPALIVE_S = 2.0
"""Less than the 5 s of SGLang's own server, so that it never closes what we reuse."""
_SHUTDOWN_S = 30.0
_LINGER_S = 2.0
"""For which the rest of a refused body is taken, so that the client reads why."""
_MAX_CONNECTIONS = 16_384
_FILES_OF_OURS = 128
_LOG = logging.getLogger(__name__)
_HTTP_LOG = logging.getLogger("sgl_tiered.router.http")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """The global scheduler as a server. ``start``, then ``close``, in one event loop.

    Args:
        config: settings, checked.
        instances: to begin with; others can be added while it serves, or are found in
            the registry.
        clock: time base of loads and assumptions.
        seed: of the generator that draws the rooms of pairs; None for a new one.
    """

    def __init__(
        self,
        config: RouterConfig,
        instances: Sequence[InstanceConfig] = (),
        clock: Clock | None = None,
        seed: int | None = None,
    ) -> None:
        self._config = config
        self._begin_with = tuple(instances)
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
        self._levels: dict[Handler, Level] = {}
        self._routes: list[tuple[str, str]] = []
        self._bodies = Bodies(
            config.max_body_bytes, config.max_held_bytes, config.timeouts.body_s
        )
        self._readers = Readers(
            config.tokenizer,
            config.page_characters,
            config.timeouts.read_s,
            config.num_readers,
            config.template_keys,
            self.metrics.refuse,
        )
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

    @property
    def routes(self) -> frozenset[tuple[str, str]]:
        """Methods and paths that are served; as ``fleet``."""
        return frozenset(self._routes)

    async def start(self) -> None:
        """Probe the instances and begin to listen; ``port`` is known afterwards."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def warm(self) -> None:
        """Start what the first long body would have to wait for."""
        await self._readers.warm()

    async def close(self) -> None:
        """Stop listening, let what is under way end, and close everything."""
        await self._closing.aclose()

    async def _start(self) -> None:
        config = self._config
        self._closing.push_async_callback(self._readers.close)
        await self._readers.start()
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
        proxy = Proxy(
            config,
            fleet,
            scheduler,
            session,
            self.metrics,
            self._clock,
            self._bodies,
            self._readers,
            self._rng,
        )
        expiring = supervised("expire", self._expire, self.metrics.fail)
        self._closing.push_async_callback(_stop, asyncio.create_task(expiring))
        counting = _Counting(self.metrics)
        _HTTP_LOG.addFilter(counting)
        _HTTP_LOG.setLevel(logging.DEBUG)  # some of it is told at that level only
        self._closing.callback(_HTTP_LOG.removeFilter, counting)
        runner = web.AppRunner(
            self._app(proxy),
            handler_cancellation=True,  # a client that leaves ends its request
            access_log=None,
            logger=_HTTP_LOG,
            keepalive_timeout=config.timeouts.keepalive_s,
            lingering_time=_LINGER_S,
            shutdown_timeout=_SHUTDOWN_S,
        )
        self._closing.push_async_callback(runner.cleanup)
        await runner.setup()
        assert runner.server is not None
        door = Door(
            runner.server,
            config.max_connections or _room_for_connections(),
            config.timeouts.header_s,
            config.timeouts.idle_s,
            self.metrics.refuse,
        )
        self.metrics.connections.set_function(lambda: door.num_open)
        self.metrics.body_bytes.set_function(lambda: self._bodies.num_bytes)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(door, config.host, config.port)
        self._closing.callback(server.close)
        self.port = int(server.sockets[0].getsockname()[1])
        host = f"[{config.host}]" if ":" in config.host else config.host
        name = config.name or default_name(self.port)
        following.lead(name, f"http://{host}:{self.port}")

    def _app(self, proxy: Proxy) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        client, admin = Level.CLIENT, Level.ADMIN
        for method, path, handler, level in (
            *(("POST", path, proxy.handle, client) for path in PATHS),
            *(("GET", path, self._ask, client) for path in _ASKED),
            ("GET", "/health", self._health, Level.OPEN),
            ("GET", "/metrics", self._metrics_text, client),
            ("GET", "/router/state", self._state, admin),
            ("POST", "/router/instances", self._add, admin),
            ("DELETE", "/router/instances/{name}", self._remove, admin),
            ("POST", "/router/instances/{name}/drain", self._drain, admin),
            ("POST", "/router/instances/{name}/resume", self._resume, admin),
        ):
            self._levels[handler] = level
            for each in ("GET", "HEAD") if method == "GET" else (method,):
                app.router.add_route(each, path, handler)
                self._routes.append((each, path))
        return app

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_S)
            self.fleet.expire()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Let a request through, and make an answer of whatever it raises."""
        connection = connection_of(request)
        if connection is None:  # it went while its headers were read
            return web.Response(status=400)
        connection.begin()
        try:
            self._check(request)
            return await handler(request)
        except RefusedError as refused:
            self.metrics.refuse(refused.reason)
            return error_response(refused.status, refused.sentence)
        except web.HTTPException as error:
            self.metrics.refuse("path")
            return error_response(error.status, error.reason)
        finally:
            connection.end()

    def _check(self, request: web.Request) -> None:
        """Check key and origin.

        Raises:
            RefusedError: one of them is not allowed.
        """
        # A path that is not there tells who may know that.
        level = self._levels.get(request.match_info.handler, Level.CLIENT)
        check_key(level, request.headers.get("Authorization", ""), self._config)
        origin = request.headers.get("Origin")
        keys = (self._config.api_key, self._config.admin_api_key)
        local = None
        if keys == (None, None) and request.transport is not None:
            local = (request.transport.get_extra_info("sockname") or [None])[0]
        if level is not Level.OPEN and is_foreign(origin, request.host, local):
            raise RefusedError(
                403,
                "origin",
                f"a page of {str(origin)[:100]!r} may not call this router: call it "
                "without a browser",
            )

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
                    url, headers=headers, timeout=timeout, allow_redirects=False
                ) as answer:
                    return web.Response(
                        status=answer.status,
                        body=await read_whole(answer, config.max_body_bytes),
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
            "alphabet": TOKENS if self._readers.name else CHARACTERS,
            "tokenizer": self._readers.name or None,
            "ttl_s": self._config.ttl_s,
            "registry": self.following.state(),
            **self.fleet.state(),
        }
        for name, shown in state["instances"].items():
            shown.update(self.following.shown(name))
        return _json(state)

    async def _add(self, request: web.Request) -> web.StreamResponse:
        body = await self._json_body(request)
        text = body.get("instance") if isinstance(body, dict) else None
        if not isinstance(text, str):
            raise RefusedError(400, "input", 'send {"instance": "URL,kind=..."}')
        try:
            config = parse_instance(text, "instance")
            instance, is_noted = await self.following.add(config, text)
        except ConfigError as error:
            raise RefusedError(400, "input", str(error)) from None
        told = {"name": instance.name, "up": instance.is_up}
        return _json({**told, **self._noted(is_noted)}, 201)

    async def _remove(self, request: web.Request) -> web.StreamResponse:
        instance = self._named(request)
        is_noted = await self.following.remove(instance)
        told = {"name": instance.name, "under_way": instance.num_under_way}
        return _json({**told, **self._noted(is_noted)})

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        await self._json_body(request)
        instance = self._named(request)
        is_noted = await self.following.drain(instance)
        told = {"name": instance.name, "under_way": instance.num_under_way}
        return _json({**told, **self._noted(is_noted)})

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        await self._json_body(request)
        instance = self._named(request)
        is_noted = await self.following.drain(instance, is_draining=False)
        told = {"name": instance.name, "up": instance.is_up}
        if instance.is_draining:
            told["draining"] = True  # the registry says so: it will leave
        return _json({**told, **self._noted(is_noted)})

    async def _json_body(self, request: web.Request) -> Any:
        """Return the parsed body; a body of another type is refused."""
        if request.content_type != "application/json":
            raise RefusedError(415, "input", "send application/json")
        async with self._bodies.read(request) as raw:
            try:
                return msgspec.json.decode(raw) if raw else None
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                raise RefusedError(400, "body", "the body is not JSON") from None

    def _noted(self, is_noted: bool) -> dict[str, bool]:
        """Return what an answer says of a registry: do the other replicas know?"""
        return {} if self._config.registry is None else {"noted": is_noted}

    def _named(self, request: web.Request) -> Instance:
        instance = self.fleet.get(request.match_info["name"])
        if instance is None:
            raise RefusedError(404, "input", "no instance of this name")
        return instance


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(value),
        content_type="application/json",
    )


class _Counting(logging.Filter):
    """Counts what the HTTP server says of bytes that are no HTTP, and keeps it short.

    It would write a traceback for each of them, and whoever can connect can send them.
    """

    def __init__(self, metrics: RouterMetrics) -> None:
        super().__init__()
        self._metrics = metrics

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        self._metrics.refuse("http")
        _LOG.debug("a request is no HTTP: %s", error)
        return False


def _room_for_connections() -> int:
    """Return how many clients may connect: each needs a file, and another upstream."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(min((soft - _FILES_OF_OURS) // 2, _MAX_CONNECTIONS), 16)


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
