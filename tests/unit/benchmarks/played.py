"""Clients and fleets of played servers, for programs that measure real ones.

A played server is any object with ``answer(request, order, wishes)``, which returns a
record at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerSpec, ServerStartError
from sgl_tiered_workloads.turns import Session

__all__ = ["PlayedClient", "answer_all", "at_rest", "played_fleet"]

TICK_S = 0.25
"""Between two looks at a played client's clock."""


class PlayedClient:
    """Hands requests to their server, which is its own address."""

    def __init__(
        self,
        url: Any,
        logprobs: bool = True,
        timeout_s: float = 0.0,
        wishes: Mapping[str, Any] | None = None,
    ) -> None:
        self._server, self._wishes = url, wishes
        self._ticks = itertools.count(100.0, TICK_S)

    async def __aenter__(self) -> PlayedClient:
        return self

    async def __aexit__(self, *failure: object) -> None:
        return None

    def now_s(self) -> float:
        """Return a time that goes on with each look."""
        return next(self._ticks)

    async def send(self, request: Any, order: int = 0) -> Any:
        """Return the record of one request."""
        return self._server.answer(request, order, self._wishes)

    async def run_sequential(self, requests: Any) -> list[Any]:
        """Return the records of some."""
        return [await self.send(one, order) for order, one in enumerate(requests)]


async def at_rest(*_: object) -> None:
    """A played server writes at once."""


def played_fleet(
    make: Callable[[ServerSpec], Any], broken: Collection[str] = ()
) -> Any:
    """Return a class in the place of ``Fleet``; two servers at a time are a mistake.

    Args:
        make: a played server of a specification.
        broken: names of those that do not start.
    """

    class PlayedFleet:
        started: ClassVar[list[str]] = []
        running: ClassVar[int] = 0

        def __init__(self, specs: Any, logs: Any, port: Any, say: Any) -> None:
            self.servers: dict[str, Any] = {}
            self._specs = specs

        def __enter__(self) -> Any:
            assert PlayedFleet.running == 0
            PlayedFleet.running += 1
            return self

        def __exit__(self, *failure: object) -> None:
            PlayedFleet.running -= 1

        async def only(self, names: Any, warm_up: Any) -> None:
            for name in names:
                PlayedFleet.started.append(name)
                if name in broken:
                    raise ServerStartError(
                        f"server {name} ended with code 1 after 2 s",
                        1,
                        "error: unrecognized arguments: --odd",
                    )
                self.servers[name] = make(self._specs[name])

    return PlayedFleet


def answer_all(sessions: Sequence[Session]) -> list[RequestRecord]:
    """Answer every turn with ones, one session after the other."""
    records: list[RequestRecord] = []
    for session in sessions:
        while not session.finished:
            request = session.next_request()
            answer = (1,) * request.max_new_tokens
            session.record_answer(answer)
            records.append(
                RequestRecord(
                    request.key,
                    len(records),
                    request.prompt,
                    0.0,
                    1.0,
                    token_times_s=tuple(1.5 + 0.1 * i for i in range(len(answer))),
                    output=answer,
                )
            )
    return records
