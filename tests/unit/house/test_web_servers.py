"""A web server of a test leaves nothing behind, whenever it ends."""

from __future__ import annotations

import asyncio
import gc
import socket

import pytest
from aiohttp import web

from tests.web_servers import end_server


@pytest.mark.filterwarnings("error")
def test_a_connection_that_is_being_accepted_is_ended_too() -> None:
    """However far the loop has come with it; without the wait it is lost after 2."""

    async def run(num_turns: int) -> None:
        runner = web.AppRunner(web.Application(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        with socket.create_connection(runner.addresses[0][:2]):
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await end_server(runner)

    for num_turns in range(8):
        asyncio.run(run(num_turns))
    gc.collect()
