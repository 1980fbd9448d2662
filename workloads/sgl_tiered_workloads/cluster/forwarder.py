"""Passes TCP connections on, so that a path between two processes can be cut.

Killed, the port refuses and what was open breaks; stopped, it takes connections and
nothing passes. Loopback only.

    python -m sgl_tiered_workloads.cluster.forwarder --listen PORT --to PORT
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Sequence

__all__ = ["main"]

_HOST = "127.0.0.1"
_PIECE_BYTES = 1 << 16


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until one side ends, then end the other."""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


async def _serve(listen: int, target: int) -> None:
    async def forward(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            there, back = await asyncio.open_connection(_HOST, target)
        except OSError:
            # Nobody there: the client is to see that at once, as without us.
            writer.transport.abort()
            return
        try:
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        finally:
            for each in (back, writer):
                each.close()

    server = await asyncio.start_server(forward, _HOST, listen)
    async with server:
        await server.serve_forever()


def main(argv: Sequence[str] | None = None) -> int:
    """Forward until the process is ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--listen", type=int, required=True, metavar="PORT")
    parser.add_argument("--to", type=int, required=True, metavar="PORT")
    args = parser.parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(args.listen, args.to))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
