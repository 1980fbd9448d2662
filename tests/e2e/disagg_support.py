"""A prefill and a decode server of our transfer backend, started together.

Requests go to both (``Pair.ask``), or through our router (``through_router``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerSpec, SglangServer, free_port
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, Tiers

from sgl_tiered.router.config import RouterConfig, parse_instance
from sgl_tiered.router.front import Router
from tests.e2e.e2e_support import PATIENCE_S, START_TIMEOUT_S

__all__ = [
    "PAGE",
    "Pair",
    "join_prefill",
    "pair_flags",
    "play_sessions",
    "start_pair",
]

PAGE = 16
_FORBIDDEN_IN_LOGS = ("AssertionError", "leak detected", "double free")
_ENV = {"SGLANG_HOST_IP": "127.0.0.1", "HOST_IP": "127.0.0.1"}


@dataclass(slots=True)
class Pair:
    """Two servers that serve one request together.

    Attributes:
        prefill, decode: the servers.
        bootstrap_port: where the decode server asks for the prefill server.
    """

    prefill: SglangServer
    decode: SglangServer
    bootstrap_port: int
    _rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def ask(
        self, prompt: Sequence[int], num_tokens: int, **wanted: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Have a prompt answered; return what either server said.

        Args:
            prompt: token ids.
            num_tokens: of the answer.
            wanted: further fields of the request.
        """
        fields = {
            **wanted,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": int(self._rng.integers(0, 2**62)),
        }
        with ThreadPoolExecutor(2) as both:
            said = [
                both.submit(server.generate, prompt, num_tokens, **fields)
                for server in (self.prefill, self.decode)
            ]
            return said[0].result(), said[1].result()

    def transfers(self, server: SglangServer) -> dict[str, Any]:
        """Return what a server says of its transfers."""
        (state,) = server.server_info()["internal_states"]
        found: dict[str, Any] = state["tiered_pd"]
        return found

    def stop(self, *, keep_decode: bool = False) -> None:
        """Stop both; their logs must be free of broken invariants.

        Args:
            keep_decode: it belongs to another pair.
        """
        servers = (self.prefill,) if keep_decode else (self.decode, self.prefill)
        for server in servers:
            died = server.exit_code()
            server.stop()
            log = server.log_path.read_text(errors="replace")
            assert died is None, f"{server.spec.name} died: {server.log_tail()}"
            for text in _FORBIDDEN_IN_LOGS:
                assert text not in log, f"{text} in {server.log_path}"


def pair_flags(caching: int, tiers: Tiers | None = None) -> tuple[str, ...]:
    """Return what both servers of a pair are told besides their roles."""
    return (
        "--disaggregation-transfer-backend",
        "tiered",
        "--tiered-pd-transport",
        "loopback",
        "--tiered-pd-caching",
        str(caching),
        *(() if tiers is None else tiers.flags),
    )


def start_pair(
    device: Device,
    log_dir: Path,
    flags: Sequence[str],
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    *,
    fork: bool = True,
    env: Mapping[str, str | None] | None = None,
) -> Pair:
    """Start both servers at the same time, and return when both answer.

    Args:
        device: of either server.
        log_dir: gets their logs.
        flags: of both.
        prefill: of the prefill server alone.
        decode: of the decode server alone.
        fork: whether a fork server may start them.
        env: variables of both.
    """
    port = free_port()
    servers = [
        _server(mode, mode, device, log_dir, port, (*flags, *extra), fork, env)
        for mode, extra in (("prefill", prefill), ("decode", decode))
    ]
    with ThreadPoolExecutor(2) as both:
        starts = [both.submit(server.start) for server in servers]
    failed = [start.exception() for start in starts if start.exception() is not None]
    if failed:
        for server in servers:
            server.stop(grace_s=2.0)
        assert failed[0] is not None
        raise failed[0]
    return Pair(servers[0], servers[1], port)


def join_prefill(
    pair: Pair, device: Device, log_dir: Path, flags: Sequence[str]
) -> Pair:
    """Start another prefill server for a pair's decode server; stop it alone.

    Args:
        pair: whose decode server it works with.
        device: of the new server.
        log_dir: gets its log.
        flags: of it.
    """
    port = free_port()
    server = _server("prefill", "prefill-2", device, log_dir, port, flags)
    server.start()
    return Pair(server, pair.decode, port)


def _server(
    mode: str,
    name: str,
    device: Device,
    log_dir: Path,
    bootstrap_port: int,
    flags: Sequence[str],
    fork: bool = True,
    env: Mapping[str, str | None] | None = None,
) -> SglangServer:
    """Return a server of a pair, not started yet."""
    shared = (
        "--page-size",
        str(device.page_size),
        "--max-total-tokens",
        str(device.pool_tokens),
        *CPU_FLAGS,
        *device.flags,
        "--disaggregation-bootstrap-port",
        str(bootstrap_port),
        "--disaggregation-mode",
        mode,
    )
    spec = ServerSpec(
        name, device.model, (*shared, *flags), {**_ENV, **(env or {})}, fork=fork
    )
    return SglangServer(spec, log_dir, start_timeout_s=START_TIMEOUT_S)


def play_sessions(
    pair: Pair, sessions: Sequence[Sequence[RequestRecord]]
) -> list[RequestRecord]:
    """Play recorded sessions again, all at once, each turn after the one before.

    Args:
        pair: who answers, through a router of ours.
        sessions: records of each session's turns, whose prompts are sent again.
    """

    async def one(
        client: StreamingClient, turns: Sequence[RequestRecord]
    ) -> list[RequestRecord]:
        return [
            await client.send(
                PlannedRequest(turn.key, turn.prompt, len(turn.output)), turn.order
            )
            for turn in turns
        ]

    async def talk(client: StreamingClient) -> list[RequestRecord]:
        played = await asyncio.gather(*(one(client, turns) for turns in sessions))
        return [record for turns in played for record in turns]

    return asyncio.run(_through_router(pair, talk))


async def _through_router(
    pair: Pair, talk: Callable[[StreamingClient], Awaitable[list[RequestRecord]]]
) -> list[RequestRecord]:
    """Let a client talk to the pair through our router."""
    words = (
        f"{pair.prefill.url},kind=prefill,name=prefill,bootstrap={pair.bootstrap_port}",
        f"{pair.decode.url},kind=decode,name=decode",
    )
    config = RouterConfig(port=0, load_interval_s=0.5, health_interval_s=60.0)
    router = Router(config, [parse_instance(word) for word in words])
    await router.start()
    try:
        url = f"http://127.0.0.1:{router.port}"
        async with StreamingClient(url, timeout_s=PATIENCE_S) as client:
            return await talk(client)
    finally:
        await router.close()
