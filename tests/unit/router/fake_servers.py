"""SGLang servers as the router sees them, in this process: HTTP, and KV events.

A fake answers as told by its ``behaviour``, a coroutine that takes the request and its
body. Nothing here sleeps to be right: behaviours wait for events, tests for conditions.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from sgl_tiered.router.config import RouterConfig, Timeouts, parse_instance
from sgl_tiered.router.feed import FeedSource
from sgl_tiered.router.front import Router
from tests.web_servers import accept_all

__all__ = [
    "PATIENCE_S",
    "FakePublisher",
    "FakeServer",
    "answer",
    "begin",
    "break_off",
    "cluster",
    "event",
    "fast",
    "hang",
    "scenario",
    "status",
    "stored",
    "stream",
    "until",
]

PATIENCE_S = 20.0
"""Upper bound of every wait: only a defect makes a test wait so long."""
Behaviour = Callable[["FakeServer", web.Request, Any], Awaitable[web.StreamResponse]]


def event(text: str) -> bytes:
    """Return one event of a stream."""
    return f"data: {text}\n\n".encode()


async def answer(
    server: FakeServer, request: web.Request, body: Any
) -> web.StreamResponse:
    """Answer at once: a stream of three events where one is asked for."""
    if body.get("stream"):
        return await stream(3)(server, request, body)
    return web.json_response({"served_by": server.name, "body": body})


def stream(num_events: int, tail: bytes = b"data: [DONE]\n\n") -> Behaviour:
    """Stream so many events and an end."""

    async def behave(
        server: FakeServer, request: web.Request, body: Any
    ) -> web.StreamResponse:
        del body
        response = await begin(request)
        for number in range(num_events):
            await response.write(event(f"{server.name}-{number}"))
        await response.write(tail)
        return response

    return behave


async def begin(request: web.Request) -> web.StreamResponse:
    """Send the headers of a stream, as SGLang does before the first token."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def break_off(data: bytes | None) -> Behaviour:
    """Break the connection: before the headers (None), or after these bytes."""

    async def behave(
        server: FakeServer, request: web.Request, body: Any
    ) -> web.StreamResponse:
        del server, body
        response = web.StreamResponse()
        if data is not None:
            response = await begin(request)
            if data:
                await response.write(data)
                await asyncio.sleep(0.05)  # the bytes leave before the connection does
        assert request.transport is not None
        request.transport.abort()
        return response

    return behave


def hang(data: bytes | None = None) -> Behaviour:
    """Fall silent: before the headers (None), or after these bytes."""

    async def behave(
        server: FakeServer, request: web.Request, body: Any
    ) -> web.StreamResponse:
        del body
        if data is not None:
            response = await begin(request)
            if data:
                await response.write(data)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            server.num_gone += 1
            raise
        raise AssertionError

    return behave


def status(code: int) -> Behaviour:
    """Answer with a status."""

    async def behave(
        server: FakeServer, request: web.Request, body: Any
    ) -> web.StreamResponse:
        del request, body
        return web.json_response({"served_by": server.name}, status=code)

    return behave


class FakeServer:
    """One server on a free port of 127.0.0.1.

    Attributes:
        behaviour: of the next requests; those in ``scripted`` come first.
        seen: bodies of the requests that came, in order.
        headers: of these requests.
        num_gone: requests whose client left while they hung.
        loads: what ``/v1/loads`` tells; None for a server without that path.
        info: what ``/server_info`` tells.
        told: what else a path tells, as text in place of JSON.
        redirects_to: where all questions are sent to; empty for nowhere.
        asked: paths of the questions that came, in order.
        health: status of ``/health``.
        is_stopped: whether questions get no answer, as from a stopped process.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.behaviour: Behaviour = answer
        self.scripted: deque[Behaviour] = deque()
        self.seen: list[Any] = []
        self.headers: list[Any] = []
        self.num_gone = 0
        self.loads: list[dict[str, int]] | None = None
        self.info: dict[str, Any] = {}
        self.told: dict[str, str] = {}
        self.redirects_to = ""
        self.asked: list[str] = []
        self.health = 200
        self.is_stopped = False
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/{path:.*}", self._post)
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Close the port and break every connection, as a killed process does."""
        runner, self._runner = self._runner, None
        if runner is None:
            return  # killed already
        await accept_all()
        server = runner.server
        assert server is not None
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        self.headers.append(request.headers)
        behave = self.scripted.popleft() if self.scripted else self.behaviour
        return await behave(self, request, body)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.is_stopped:
            await asyncio.Event().wait()
        self.asked.append(request.path)
        if self.redirects_to:
            raise web.HTTPFound(self.redirects_to + request.path)
        if request.path in self.told:
            text = self.told[request.path]
            return web.Response(text=text, content_type="application/json")
        if request.path == "/health":
            return web.Response(status=self.health)
        if request.path == "/v1/loads" and self.loads is not None:
            return web.json_response({"loads": self.loads})
        if request.path == "/server_info":
            return web.json_response(self.info)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": self.name}]})
        return web.Response(status=404)


class FakePublisher:
    """Publishes KV events like SGLang's, with or without a replay endpoint.

    Attributes:
        is_silent: whether replays are not answered.
        source: where a subscriber finds it; given, it binds there.
    """

    def __init__(
        self,
        *,
        has_replay: bool = False,
        buffer: int = 1000,
        source: FeedSource | None = None,
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self.port = self.replay_port = 0
        self.is_silent = False
        self._replay: asyncio.Task[None] | None = None
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._next = 0
        if source is not None:
            self._socket.bind(source.endpoint)
        else:
            self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        if has_replay or source is not None:
            router = self._context.socket(zmq.ROUTER)
            if source is not None:
                router.bind(source.replay_endpoint)
            else:
                self.replay_port = router.bind_to_random_port("tcp://127.0.0.1")
            self._replay = asyncio.create_task(self._serve_replay(router))
        self.source = source or FeedSource(
            f"tcp://127.0.0.1:{self.port}",
            f"tcp://127.0.0.1:{self.replay_port}" if has_replay else None,
        )

    @property
    def words(self) -> str:
        """What stands after ``--instance URL``."""
        words = f",events=tcp://127.0.0.1:{self.port}"
        if self.replay_port:
            words += f",replay=tcp://127.0.0.1:{self.replay_port}"
        return words

    async def subscribed(self) -> None:
        """Wait until a subscriber is there."""
        async with asyncio.timeout(PATIENCE_S):
            await self._socket.recv()

    async def publish(self, *events: dict[str, Any], is_lost: bool = False) -> None:
        """Publish a batch; a lost one only counts, and can be replayed."""
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        number = self._next
        self._next += 1
        self._buffer.append((number, payload))
        if not is_lost:
            await self.send(number, payload)

    async def send(self, number: int, payload: bytes) -> None:
        """Send a batch of any number."""
        await self._socket.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def _serve_replay(self, router: Any) -> None:
        while True:
            client, _, start = await router.recv_multipart()
            if self.is_silent:
                continue
            for number, payload in list(self._buffer):
                if number >= int.from_bytes(start, "big"):
                    at = number.to_bytes(8, "big")
                    await router.send_multipart([client, b"", b"", at, payload])
            end = (-1).to_bytes(8, "big", signed=True)
            await router.send_multipart([client, b"", b"", end, b""])

    async def close(self) -> None:
        if self._replay is not None:
            self._replay.cancel()
            await asyncio.gather(self._replay, return_exceptions=True)
        self._context.destroy(linger=0)


def stored(
    tokens: list[int], page: int, first: int = 0, medium: str = "GPU"
) -> dict[str, Any]:
    """Return the event of a prompt's pages from page ``first`` on."""
    names = [hash(tuple(tokens[:end])) for end in range(page, len(tokens) + 1, page)]
    return {
        "type": "BlockStored",
        "block_hashes": names[first:],
        "parent_block_hash": names[first - 1] if first else None,
        "token_ids": tokens[first * page : len(names) * page],
        "block_size": page,
        "lora_id": None,
        "medium": medium,
    }


def fast(**changes: Any) -> RouterConfig:
    """Return settings with short intervals; a name of ``Timeouts`` goes there."""
    bounds = {"connect_s": 2.0, "first_byte_s": 10.0, "idle_s": 10.0, "whole_s": 10.0}
    names = [each.name for each in fields(Timeouts)]
    bounds.update({name: changes.pop(name) for name in names if name in changes})
    return RouterConfig(
        **{
            "port": 0,
            "load_interval_s": 0.05,
            "health_interval_s": 0.2,
            "health_timeout_s": 5.0,
            "page_tokens": 4,
            "page_characters": 4,
            "show_cached_tokens": True,
            "timeouts": Timeouts(**bounds),
            **changes,
        }
    )


class Cluster:
    """A router, its servers, and a client of it."""

    def __init__(
        self, router: Router, servers: list[FakeServer], client: aiohttp.ClientSession
    ) -> None:
        self.router = router
        self.servers = servers
        self.client = client

    def __getitem__(self, name: str) -> FakeServer:
        return next(server for server in self.servers if server.name == name)

    async def post(
        self, body: Any, path: str = "/generate", **fields: Any
    ) -> tuple[int, Any, Any]:
        """Return (status, headers, body); the body is parsed unless it is a stream."""
        async with self.client.post(path, json=body, **fields) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json"
            return (
                response.status,
                response.headers,
                json.loads(raw) if is_json else raw,
            )

    async def state(self) -> Any:
        async with self.client.get("/router/state") as response:
            assert response.status == 200
            return await response.json()

    async def metric(self, name: str, **labels: str) -> float:
        """Return a value of the router's metrics, 0 for none."""
        value = self.router.metrics.registry.get_sample_value(name, labels)
        return value or 0.0


@asynccontextmanager
async def cluster(
    names: str = "ab",
    config: RouterConfig | None = None,
    words: dict[str, str] | None = None,
    key: str | None = None,
    given: str | None = None,
) -> AsyncIterator[Cluster]:
    """Start a server per letter and a router in front of them.

    Args:
        names: of the servers.
        config: of the router.
        words: per server, what stands after its URL.
        key: that the client brings.
        given: servers that the router is told of; all by default.
    """
    servers = [FakeServer(name) for name in names]
    for server in servers:
        await server.start()
    router = Router(
        config or fast(),
        [
            parse_instance(f"{s.url},name={s.name}" + (words or {}).get(s.name, ""))
            for s in servers
            if given is None or s.name in given
        ],
        seed=0,
    )
    try:
        await router.start()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"http://127.0.0.1:{router.port}"
        async with aiohttp.ClientSession(url, headers=headers) as client:
            yield Cluster(router, servers, client)
    finally:
        await router.close()
        for server in servers:
            await server.kill()


async def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds; it may be a coroutine function."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            held = condition()
            if asyncio.iscoroutine(held):
                held = await held
            if held:
                return
            await asyncio.sleep(0.01)


def scenario(run: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a test of a coroutine function."""

    def test(*args: Any, **fields: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60.0):
                await run(*args, **fields)

        asyncio.run(bounded())

    test.__name__ = run.__name__
    test.__doc__ = run.__doc__
    test.__wrapped__ = run  # type: ignore[attr-defined] # pytest reads its parameters
    return test
