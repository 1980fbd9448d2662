"""Running servers by name: starts those that are wanted, stops the others.

The servers of a comparison either all run, each asleep while another is measured, or
one at a time, where the machine has room for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.server import ServerSpec, SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest

__all__ = ["Fleet"]

Say = Callable[[str], None]

_STARTS = 2


class Fleet:
    """Running servers by name; a context manager that stops them all.

    Args:
        specs: how to start each.
        logs: folder of the logs.
        first_port: of the ports to use; None for any free ones.
        say: takes progress lines.
    """

    def __init__(
        self,
        specs: Mapping[str, ServerSpec],
        logs: Path,
        first_port: int | None,
        say: Say,
    ) -> None:
        self._specs = specs
        self._logs = logs
        self._ports = {
            name: None if first_port is None else first_port + place
            for place, name in enumerate(specs)
        }
        self._say = say
        self.servers: dict[str, SglangServer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop(list(self.servers))

    async def only(self, names: Iterable[str], warm_up: PlannedRequest) -> None:
        """Let exactly these servers run; new ones are warmed up and emptied.

        Raises:
            ServerStartError: one did not start.
        """
        wanted = list(names)
        await asyncio.to_thread(
            self._stop, [name for name in self.servers if name not in wanted]
        )
        fresh = [name for name in wanted if name not in self.servers]
        # A start is mostly imports on one core; two at a time fill two cores.
        turn = asyncio.Semaphore(_STARTS)

        async def start(name: str) -> None:
            server = SglangServer(
                self._specs[name], self._logs, self._ports[name], 600.0, self._say
            )
            async with turn:
                await asyncio.to_thread(server.start)
            self.servers[name] = server

        ended = await asyncio.gather(
            *(start(name) for name in fresh), return_exceptions=True
        )
        for error in ended:
            if error is not None:
                raise error
        for name in fresh:
            server = self.servers[name]
            # Compute, hit and decode once each before anything counts.
            async with StreamingClient(server.url) as client:
                await client.run_sequential([warm_up] * 3)
            await asyncio.to_thread(server.flush_cache)

    def _stop(self, names: Iterable[str]) -> None:
        for name in names:
            self.servers.pop(name).stop()
