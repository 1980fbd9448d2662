"""Ends of the web servers that tests run within their own event loop."""

import asyncio

from aiohttp import web

_TURNS = 8
"""From a connection's acceptance to its transport asyncio needs three of the loop."""


async def accept_all() -> None:
    """Let connections that are being accepted get their transports.

    asyncio loses one whose server is closed before, and warns of it whenever the
    garbage is collected: in any other test.
    """
    for _ in range(_TURNS):
        await asyncio.sleep(0)


async def end_server(runner: web.AppRunner) -> None:
    """End a server with all its connections."""
    await accept_all()
    await runner.cleanup()
