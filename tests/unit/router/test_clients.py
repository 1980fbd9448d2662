"""Slow, huge and half-sent requests at a router process: it ends them, others go on.

The router is the command as users start it, with short limits; the server behind it is
a fake of this process. That a connection is ended is seen by its end: no test looks at
a clock, and a router without that limit lets the test wait until it fails.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp

from tests.unit.router.fake_servers import (
    PATIENCE_S,
    FakeServer,
    answer,
    begin,
    event,
    hang,
    scenario,
    until,
)

PROMPT = {"input_ids": list(range(16))}
HEAD = b"POST /generate HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
CAP = 20


class Process:
    """A router process and the fake behind it."""

    def __init__(self, port: int, server: FakeServer) -> None:
        self.port = port
        self.server = server
        self.url = f"http://127.0.0.1:{port}"
        self.writers: list[asyncio.StreamWriter] = []

    async def open(self, data: bytes):
        """Return a connection on which something was sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        writer.write(data)
        await writer.drain()
        return reader

    async def answers(self) -> bool:
        """Return whether a friendly request is answered, on a connection of its own."""
        async with (
            aiohttp.ClientSession(self.url) as client,
            client.post("/generate", json=PROMPT) as response,
        ):
            return response.status == 200

    async def refused(self, reason: str) -> float:
        """Return how often the router counted this."""
        async with (
            aiohttp.ClientSession(self.url) as client,
            client.get("/metrics") as response,
        ):
            lines = (await response.text()).splitlines()
        label = f'sgl_tiered_router_refusals_total{{reason="{reason}"}} '
        found = [line.removeprefix(label) for line in lines if line.startswith(label)]
        return float(found[0]) if found else 0.0


@asynccontextmanager
async def router(*flags: str):
    """Start a router process in front of a fake."""
    server = FakeServer("a")
    await server.start()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sgl_tiered.cli.main", "router", "--port", "0"),
        *("--instance", f"{server.url},name=a", "--max-connections", str(CAP)),
        *("--max-body-mb", "1", "--load-interval", "0.2", *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = (await process.stdout.readline()).decode()
        found = Process(int(line.rsplit(":", 1)[1]), server)
        try:
            yield found
        finally:
            for writer in found.writers:
                writer.close()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await server.kill()


async def rest(reader) -> bytes:
    """Return what comes until the router closes the connection."""
    found = b""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                piece = await reader.read(2**16)
            except ConnectionError:
                return found
            if not piece:
                return found
            found += piece


@scenario
async def test_half_sent_headers_are_ended():
    """As many as may be open, and twice as many: others are served meanwhile.

    They have 3 s as well, which is enough on a machine that is busy with other tests.
    """
    async with router("--header-timeout", "3") as r:
        for data in (b"", b"POST", HEAD, HEAD + b"X: " + b"y" * 5000):
            before = await r.refused("connections")
            readers = [await r.open(data) for _ in range(2 * CAP)]
            assert await r.answers()
            for reader in readers:
                assert await rest(reader) == b""
            assert await r.refused("connections") >= before + CAP
        assert await r.refused("header_time") >= 1
        assert await r.answers()


@scenario
async def test_headers_that_trickle_are_ended():
    """A byte now and then is no request; nor is it behind a whole one."""
    async with router("--header-timeout", "0.5") as r:

        async def trickle(writer):
            while True:
                writer.write(b"X: y\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)

        body = json.dumps(PROMPT).encode()
        whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        for first in (b"", whole):
            reader = await r.open(first)
            if first:
                async with asyncio.timeout(PATIENCE_S):
                    assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 200")
            r.writers[-1].write(HEAD)
            sending = asyncio.create_task(trickle(r.writers[-1]))
            await rest(reader)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        assert await r.refused("header_time") == 2
        assert await r.answers()


@scenario
async def test_half_sent_bodies_are_ended():
    """With a sentence, and without a request to a server."""
    async with router("--body-timeout", "0.5") as r:
        for lines in (
            b"Content-Length: 100\r\n\r\n[1, 2",
            b"Transfer-Encoding: chunked\r\n\r\n5\r\n[1, 2\r\n",
        ):
            readers = [await r.open(HEAD + lines) for _ in range(CAP // 2)]
            assert await r.answers()
            for reader in readers:
                told = await rest(reader)
                assert told.startswith(b"HTTP/1.1 408"), told
                assert b"--body-timeout" in told
        assert await r.refused("body_time") == CAP
        assert len(r.server.seen) == 2  # those in between


@scenario
async def test_a_huge_body_is_refused_before_it_is_sent():
    """By its length; one without a length once it is too long."""
    async with router() as r:
        long = HEAD + b"Content-Length: %d\r\n\r\n" % 10**12
        reader = await r.open(long)
        told = await rest(reader)
        assert told.startswith(b"HTTP/1.1 413")
        assert b"--max-body-mb" in told
        reader = await r.open(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")

        async def send():
            while True:
                r.writers[-1].write(b"10000\r\n" + b"x" * 2**16 + b"\r\n")
                await r.writers[-1].drain()

        sending = asyncio.create_task(send())
        told = await rest(reader)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert told == b"" or told.startswith(b"HTTP/1.1 413")
        assert await r.refused("body_size") == 2
        assert await r.answers()


@scenario
async def test_who_does_not_take_an_answer_is_ended():
    """And the server stops computing it."""

    async def flood(server, request, body):
        del body
        response = await begin(request)
        try:
            while True:
                await response.write(event("x" * 2**16))
        finally:
            server.num_gone += 1

    async with router("--idle-timeout", "0.5") as r:
        r.server.scripted.append(flood)
        body = b'{"input_ids": [1], "stream": true}'
        head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
        await r.open(head + body)
        await until(lambda: r.server.seen)
        assert await r.answers()
        await until(lambda: r.server.num_gone == 1)
        await until_counted(r, "slow_reader")


async def until_counted(r, reason):
    async with asyncio.timeout(PATIENCE_S):
        while not await r.refused(reason):
            await asyncio.sleep(0.05)


NO_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 600 + b"\r\n\r\n",
    b"GET / HTTP/9\r\n\r\n",
    b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
    HEAD + b"X: " + b"y" * 20_000 + b"\r\n\r\n",
    HEAD + b"Content-Length: -5\r\n\r\n",
    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
    HEAD + b"bad header\r\n\r\n",
    HEAD + b"".join(b"X%d: 1\r\n" % n for n in range(5000)) + b"\r\n",
)


@scenario
async def test_what_is_no_http_is_ended():
    """400 and the end of the connection; counted, without a traceback."""
    async with router() as r:
        for number, data in enumerate(NO_HTTP, 1):
            told = await rest(await r.open(data))
            # What it still sends while it is told may reset its connection.
            assert told[:12] in (b"HTTP/1.0 400", b"HTTP/1.1 400", b""), told
            assert await r.refused("http") == number
        assert await r.answers()


@scenario
async def test_an_idle_connection_is_ended():
    """After its answer, when nothing more comes."""
    async with router("--keepalive-timeout", "0.5") as r:
        reader = await r.open(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await rest(reader)).startswith(b"HTTP/1.1 200")


@scenario
async def test_where_all_are_served_one_more_is_refused():
    """In a sentence, and at once; when one ends there is room."""
    async with router() as r:
        r.server.behaviour = hang()
        async with aiohttp.ClientSession(
            r.url, connector=aiohttp.TCPConnector(limit=0)
        ) as client:
            sent = [
                asyncio.create_task(client.post("/generate", json=PROMPT))
                for _ in range(CAP)
            ]
            await until(lambda: len(r.server.seen) == CAP)
            reader = await r.open(HEAD)
            told = await rest(reader)
            assert told.startswith(b"HTTP/1.1 503")
            assert b"--max-connections" in told
            for task in sent:
                task.cancel()
            await asyncio.gather(*sent, return_exceptions=True)
        await until(lambda: r.server.num_gone == CAP)
        r.server.behaviour = answer
        assert await r.answers()
        assert await r.refused("connections") == 1
