"""A prefill instance that starts anew between two heartbeats; prints JSON.

Bootstrap servers are real, SGLang's manager of a decode instance is ours without its
sockets; what it would learn of ranks is put in its tables.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from contextlib import ExitStack, closing
from socket import socket
from typing import Any
from unittest.mock import patch

import requests
from sglang.srt.arg_groups.pd_disaggregation_hook import handle_pd_disaggregation
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.mooncake import conn as mooncake
from sglang.srt.server_args import ServerArgs

from sgl_tiered.engines.sglang.disagg import conn
from tests.contract.hostile_pd_program import ROOM, manager

PATIENCE_S = 60.0


def free_port() -> int:
    """Return a port that nobody listens at."""
    with closing(socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def serve(kind: Any, port: int) -> Any:
    """Start a bootstrap server and wait until it answers."""
    server = kind("127.0.0.1", port)
    waiting = threading.Event()
    for _ in range(int(PATIENCE_S / 0.05)):
        try:
            if requests.get(f"http://127.0.0.1:{port}/health", timeout=1).ok:
                return server
        except requests.ConnectionError:
            waiting.wait(0.05)
    raise TimeoutError("the bootstrap server does not answer")


def decode() -> Any:
    """Return the manager of a decode instance."""
    made = manager(is_prefill=False)
    made.connection_lock, made.session_pool_lock = threading.Lock(), threading.Lock()
    made.connection_pool, made.prefill_info_table = {}, {}
    made.heartbeat_failures = {}
    made.addr_to_rooms_tracker = defaultdict(set)
    made.session_pool = defaultdict(requests.Session)
    made.failure_records = {}
    return made


def refused(made: Any, address: str) -> str:
    """Return why a request does not ask an instance; empty where it would."""
    if not made.is_mute(address):
        return ""
    it: Any = object.__new__(conn.TieredKVReceiver)
    it.kv_mgr, it.bootstrap_addr, it.bootstrap_room = made, address, ROOM
    it.conclude_state = None
    it.init(0)
    assert it.conclude_state == KVPoll.Failed
    assert made.request_status[ROOM] == KVPoll.Failed
    return str(made.failure_records[ROOM]).replace(address, "it")


def unheard(address: str) -> None:
    """Have no answer in time to which start it is."""


def story(kind: Any, *, restarts: bool, is_heard: bool = True) -> dict[str, Any]:
    """Meet an instance, let it start anew or not, and hear its heartbeat."""
    port = free_port()
    address, made = f"127.0.0.1:{port}", decode()
    server = serve(kind, port)
    with ExitStack() as meeting:
        if not is_heard:
            meeting.enter_context(patch.object(conn, "start_of", unheard))
        assert made.try_ensure_parallel_info(address)
    made.connection_pool[f"{address}_0"] = []
    made.addr_to_rooms_tracker[address].add(ROOM)
    if restarts:
        server.close()
        server = serve(kind, port)
    made._on_heartbeat_success(address)
    told: dict[str, Any] = {
        "is_known": address in made.prefill_info_table,
        "connections": len(made.connection_pool),
        "has_failed": made.request_status[ROOM] == KVPoll.Failed,
    }
    assert made.try_ensure_parallel_info(address)
    told["is_start_known"] = bool(made._starts.get(address))
    made._on_heartbeat_success(address)
    told["is_known_again"] = address in made.prefill_info_table
    told["refused"] = refused(made, address)
    server.close()
    return told


def late(backend: str) -> str:
    """Return why SGLang lets decode servers of a backend not allocate late, if so."""
    args = ServerArgs(
        model_path="none",
        disaggregation_mode="prefill",
        disaggregation_transfer_backend=backend,
        disaggregation_decode_allocation_policy="prefill_complete",
    )
    try:
        handle_pd_disaggregation(args)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    """Play all, print what came of each."""

    def met(self: Any, bootstrap_addr: str) -> bool:
        self.prefill_info_table.setdefault(bootstrap_addr, object())
        return True

    common.CommonKVManager.try_ensure_parallel_info = met
    ours, stock = conn.TieredKVBootstrapServer, mooncake.MooncakeKVBootstrapServer
    found = {
        "stays": story(ours, restarts=False),
        "restarts": story(ours, restarts=True),
        "restarts untold": story(stock, restarts=True),
        "unheard at first": story(ours, restarts=False, is_heard=False),
        "mute, and unheard at first": story(stock, restarts=False, is_heard=False),
        "late": {each: late(each) for each in ("mooncake", "tiered")},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
