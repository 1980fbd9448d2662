"""What the cluster tests share: sessions, how they are played, and what must hold.

A *round* plays every session once through the router, as users do: a turn leaves when
the answer before has come. Every prompt is the reference's, so answers can be compared
one by one. What becomes of a request is one of four:

- *answered*: whole; it must equal the reference, up to plain SGLang's own spread;
- *broken*: it began to stream and ended with an error; what came must begin like a
  right answer, and the user asks again;
- *lost*: it ended with an error before its first token. The router must prevent that as
  long as one server can answer;
- *overdue*: it did not end within ``BOUND_S``, which the router's own limits add up to.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from sgl_tiered_workloads.arrivals import ClosedLoop
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.cluster.running import Cluster, read_json
from sgl_tiered_workloads.driver import run_sessions
from sgl_tiered_workloads.gate import (
    GateResult,
    Spread,
    check_equality,
    measure_spread,
    widest_spread,
)
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS
from sgl_tiered_workloads.turns import Turn, TurnSession

from tests.e2e.e2e_support import FLOOR, PATIENCE_S, sequential, wait_until

__all__ = [
    "BOUND_S",
    "PAGE",
    "POOL_TOKENS",
    "ROUTER_FLAGS",
    "Played",
    "Reference",
    "accounts",
    "answered_by",
    "assert_right",
    "begun",
    "emptied",
    "play",
    "record_sessions",
    "released",
    "router_state",
    "settled",
    "states",
    "storm",
    "struck",
    "transferred",
    "under_way",
    "up",
]

PAGE = 16
POOL_TOKENS = 16_384
ATTEMPTS, CONNECT_S, FIRST_BYTE_S, IDLE_S, WHOLE_S = 3, 3, 45, 20, 90
ROUTER_FLAGS = (
    f"--max-attempts={ATTEMPTS}",
    f"--connect-timeout={CONNECT_S}",
    f"--first-byte-timeout={FIRST_BYTE_S}",
    f"--idle-timeout={IDLE_S}",
    f"--whole-timeout={WHOLE_S}",
    "--health-interval=1",
    "--load-interval=0.5",
    # A busy machine may answer late: down is who refuses, or is silent for so long.
    "--health-timeout=5",
)
MOST_TOKENS = 24
"""Of an answer. A stream may be silent for ``IDLE_S`` before each."""
BOUND_S = ATTEMPTS * (CONNECT_S + FIRST_BYTE_S) + MOST_TOKENS * IDLE_S
"""By when a request through the router has ended, whatever fails behind it."""
_AGAIN_S = 0.2
_MOST_TRIES = 200
_SEED = 9


@dataclass(frozen=True, slots=True)
class Reference:
    """Plain SGLang's answers, one request at a time.

    Attributes:
        sessions: by name, the records of its turns in order.
        spread: plain against itself: prefixes reused whole, by half or not at all, and
            prompts alone or with others in a batch.
    """

    sessions: Mapping[str, Sequence[RequestRecord]]
    spread: Spread

    @property
    def by_key(self) -> dict[str, RequestRecord]:
        """All records by key."""
        return {
            record.key: record for each in self.sessions.values() for record in each
        }


@dataclass(slots=True)
class Played:
    """What became of the requests of some rounds.

    Attributes:
        answered: in the order of their ends; a key comes once per round.
        broken: began to stream and ended with an error.
        lost: ended with an error before the first token, at a router that runs.
        failed_over: ended because their router was gone; sent to the next one.
        overdue: did not end in time.
    """

    answered: list[RequestRecord] = field(default_factory=list)
    broken: list[RequestRecord] = field(default_factory=list)
    lost: list[RequestRecord] = field(default_factory=list)
    failed_over: list[RequestRecord] = field(default_factory=list)
    overdue: list[RequestRecord] = field(default_factory=list)


def random_sessions(count: int = 6) -> list[TurnSession]:
    """Draw multi-turn sessions; every other one begins with a shared prompt."""
    draw = np.random.default_rng(_SEED)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        length = int(draw.integers(low, high + 1))
        return random_tokens(draw, length, VOCAB_TOKENS)

    shared = tokens(150, 150)
    sessions = []
    for number in range(count):
        first = tokens(60, 400)
        turns = [
            Turn(tokens(5, 60), int(draw.integers(4, MOST_TOKENS + 1)))
            for _ in range(int(draw.integers(2, 5)))
        ]
        opening = shared + first if number % 2 else first
        sessions.append(TurnSession(f"s{number}", turns, opening))
    return sessions


def record_sessions(server: SglangServer) -> Reference:
    """Record the reference on a plain server whose pool holds everything."""

    async def talk(num_users: int, sessions: list[TurnSession]) -> list[RequestRecord]:
        async with StreamingClient(server.url, timeout_s=PATIENCE_S) as client:
            return await run_sessions(client, sessions, ClosedLoop(num_users))

    server.flush_cache()
    records = asyncio.run(talk(1, random_sessions()))
    by_name: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        assert record.error is None, record.error
        by_name[record.key.rpartition(".")[0]].append(record)
    spreads = [FLOOR]
    server.flush_cache()
    together = asyncio.run(talk(len(by_name), replayed(by_name)))
    spreads.append(measure_spread(records, together))
    cold, halved = [], []
    chosen = records[::3]
    for record in chosen:
        request = PlannedRequest(record.key, record.prompt, len(record.output))
        server.flush_cache()
        cold += sequential(server, [request])
        server.flush_cache()
        half = PlannedRequest("half", record.prompt[: len(record.prompt) // 2], 1)
        halved += sequential(server, [half, request])[1:]
    spreads += [measure_spread(chosen, other) for other in (cold, halved)]
    return Reference(dict(by_name), widest_spread(spreads))


def replayed(
    sessions: Mapping[str, Sequence[RequestRecord]],
) -> list[TurnSession]:
    """Return sessions that send the recorded prompts, whatever is answered now."""
    return [
        TurnSession(
            name,
            [Turn(record.prompt, len(record.output)) for record in records],
            carries_answers=False,
        )
        for name, records in sessions.items()
    ]


class Player:
    """Plays rounds until it is told that it is enough.

    Args:
        routers: addresses; the first one is used as long as it answers.
        reference: whose sessions are played.
    """

    def __init__(self, routers: Sequence[str], reference: Reference) -> None:
        self.played = Played()
        self.num_rounds = 0
        self._routers = list(routers)
        self._reference = reference

    async def round(self) -> None:
        """Play every session once, all at the same time."""
        clients = [
            StreamingClient(url, timeout_s=BOUND_S, tells_session=True)
            for url in self._routers
        ]
        async with contextlib.AsyncExitStack() as stack:
            for client in clients:
                await stack.enter_async_context(client)
            await asyncio.gather(
                *(
                    self._session(clients, records)
                    for records in self._reference.sessions.values()
                )
            )
        self.num_rounds += 1

    async def _session(
        self, clients: Sequence[StreamingClient], records: Sequence[RequestRecord]
    ) -> None:
        at = 0
        for record in records:
            request = PlannedRequest(record.key, record.prompt, len(record.output))
            for _ in range(_MOST_TRIES):
                answer = await clients[at].send(request, record.order)
                if answer.error is None:
                    self.played.answered.append(answer)
                    break
                if self._judge(answer):
                    at = (at + 1) % len(clients)
                await asyncio.sleep(_AGAIN_S)
            else:
                raise AssertionError(f"{record.key}: never answered: {answer.error}")

    def _judge(self, answer: RequestRecord) -> bool:
        """File a request that ended with an error; say whether its router is gone."""
        assert answer.error is not None
        if answer.error.startswith("TimeoutError"):
            self.played.overdue.append(answer)
        elif answer.output:
            self.played.broken.append(answer)
            return _is_of_network(answer.error)
        elif _is_of_network(answer.error):
            self.played.failed_over.append(answer)
            return True
        else:
            self.played.lost.append(answer)
        return False


def _is_of_network(error: str) -> bool:
    """Whether the connection to the router failed, not what is behind it."""
    names = ("ClientConnector", "ServerDisconnected", "ClientOSError", "ClientPayload")
    return error.startswith(names)


def play(routers: Sequence[str], reference: Reference, num_rounds: int = 1) -> Played:
    """Play rounds to their end."""
    player = Player(routers, reference)

    async def run() -> None:
        for _ in range(num_rounds):
            await player.round()

    asyncio.run(run())
    return player.played


def storm(
    routers: Sequence[str],
    reference: Reference,
    fault: Callable[[], None],
    before_round: Callable[[], None] | None = None,
) -> Played:
    """Play rounds while a fault comes and goes, and one more after it.

    The fault decides itself when it strikes (by ``under_way``, say) and ends when it is
    over; rounds go on for as long, so nothing here depends on how fast a machine is.
    """
    player = Player(routers, reference)
    over = threading.Event()
    errors: list[BaseException] = []

    def strike() -> None:
        try:
            fault()
        except BaseException as error:  # noqa: BLE001 - told to the test below
            errors.append(error)
        finally:
            over.set()

    async def run() -> None:
        is_last = False
        while not is_last:
            is_last = over.is_set()
            if before_round is not None:
                await asyncio.to_thread(before_round)
            await player.round()

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    try:
        asyncio.run(run())
    finally:
        thread.join(BOUND_S)
    if errors:
        raise errors[0]
    told = player.played
    print(
        f"\n  {player.num_rounds} rounds: {len(told.answered)} answered, "
        f"{len(told.broken)} broken, {len(told.failed_over)} failed over"
    )
    return told


def struck(
    cluster: Cluster,
    reference: Reference,
    name: str,
    strike: Callable[[], None],
    heal: Callable[[], None],
) -> Played:
    """Play while an instance is struck with requests under way, then healed."""
    url = cluster.routers[0]

    def fault() -> None:
        wait_until(lambda: under_way(url, name) > 0, f"{name} has work")
        strike()
        wait_until(lambda: not up(url, name), f"{name} is taken for down")
        heal()
        wait_until(lambda: up(url, name), f"{name} is up again")

    return storm(cluster.routers, reference, fault)


def assert_right(
    reference: Reference, played: Played, *, router_struck: bool = False
) -> GateResult:
    """Demand what must hold under every fault.

    Every whole answer is right, every part of one begins like a right one, no request
    was lost or overdue; and the router's own connections hold, unless it was struck.
    """
    known = reference.by_key
    if not router_struck:
        assert not played.failed_over, [(r.key, r.error) for r in played.failed_over]
    for name in ("overdue", "lost"):
        wrong = getattr(played, name)
        told = [(record.key, (record.error or "")[:300]) for record in wrong[:3]]
        assert not wrong, f"{len(wrong)} requests {name}: {told}"
    for record in played.broken:
        cut, part = begun(known[record.key], record)
        result = _compare(reference, [cut], [part])
        assert result.passed, f"a broken stream said wrong: {result.summary()}"
    rounds: dict[int, list[RequestRecord]] = defaultdict(list)
    seen: dict[str, int] = defaultdict(int)
    for record in played.answered:
        rounds[seen[record.key]].append(record)
        seen[record.key] += 1
    assert rounds
    for answers in rounds.values():
        result = _compare(reference, [known[r.key] for r in answers], answers)
        assert result.passed, result.summary()
    return result


def begun(
    whole: RequestRecord, broken: RequestRecord
) -> tuple[RequestRecord, RequestRecord]:
    """Return how a right answer begins, and what came of one that broke off."""
    num = len(broken.output)
    cut = replace(
        whole, output=whole.output[:num], top_logprobs=whole.top_logprobs[:num]
    )
    return cut, replace(broken, error=None, top_logprobs=broken.top_logprobs[:num])


def _compare(
    reference: Reference, ours: list[RequestRecord], theirs: list[RequestRecord]
) -> GateResult:
    return check_equality(
        ours, theirs, page_size=PAGE, spread=reference.spread, forced=False
    )


# -- What the servers say ---------------------------------------------------------


def router_state(url: str) -> dict[str, dict[str, object]]:
    """Return what a router says of its instances, by name; nothing if it is silent."""
    try:
        instances: dict[str, dict[str, object]] = read_json(url + "/router/state")[
            "instances"
        ]
    except OSError:
        return {}
    return instances


def up(url: str, name: str) -> bool:
    """Whether a router takes an instance to be up."""
    return bool(router_state(url).get(name, {}).get("up"))


def under_way(url: str, name: str) -> int:
    """Return how many requests of a router an instance has."""
    return int(str(router_state(url).get(name, {}).get("under_way", 0)))


def accounts(server: SglangServer) -> tuple[int, int, int]:
    """Return (running, waiting, used tokens) of a server, over its ranks."""
    loads = server.get("/v1/loads?include=core", PATIENCE_S)["loads"]
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    running, waiting, used = (sum(int(load[n]) for load in loads) for n in names)
    return running, waiting, used


def settled(cluster: Cluster) -> None:
    """Demand that nothing is left: no request, no token of KV, no ticket, no defect.

    Every server is emptied: what a pool still holds then is leaked.
    """
    for url in cluster.routers:
        for name in cluster.members:
            wait_until(lambda u=url, n=name: up(u, n), f"{name} is up")
            wait_until(lambda u=url, n=name: under_way(u, n) == 0, f"{name} is idle")
    for server in cluster.servers.values():
        name = server.spec.name
        wait_until(lambda s=server: accounts(s)[:2] == (0, 0), f"{name}: requests end")
        wait_until(lambda s=server: _unsettled(s) == 0, f"{name}: transfers settle")
        emptied(server)
        wait_until(lambda s=server: accounts(s)[2] == 0, f"{name}: no KV is left")
        assert server.exit_code() is None
    _logs_are_clean(cluster)


def released(cluster: Cluster) -> None:
    """Demand that pools hold nothing for transfers that have failed.

    That takes a minute after the last one, so it is asked once, when all is over.
    """
    for name, server in cluster.servers.items():
        wait_until(lambda s=server: _unsettled(s, at_last=True) == 0, f"{name} is free")
    _logs_are_clean(cluster)


def _logs_are_clean(cluster: Cluster) -> None:
    for path in cluster.log_dir.rglob("*.log"):
        text = path.read_text(errors="replace")
        for word in ("leak detected", "double free", "use-after-free"):
            assert word not in text, f"{word} in {path}"


def transferred(cluster: Cluster) -> int:
    """Return the bytes of KV that servers have sent each other so far."""
    return sum(
        int(states(server, "tiered_pd").get("bytes_pushed", 0))
        for server in cluster.servers.values()
    )


def answered_by(cluster: Cluster, record: RequestRecord) -> tuple[str, list[int]]:
    """Ask the first router for one answer, whole; return who gave it and its tokens.

    Raises:
        HTTPError: nobody could.
    """
    body = {
        "input_ids": list(record.prompt),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": len(record.output),
            "ignore_eos": True,
        },
    }
    request = urllib.request.Request(
        cluster.routers[0] + "/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return response.headers["X-Tiered-Instance"], json.load(response)["output_ids"]


def states(server: SglangServer, name: str) -> dict[str, Any]:
    """Return a part of a server's internal state; empty where it has none."""
    (state,) = server.get("/server_info", PATIENCE_S)["internal_states"]
    found: dict[str, Any] = state.get(name) or {}
    return found


_NOT_HELD = ("num_transfers", "num_fetches")
"""Of a pool's ``under_way``: what waits for no grace time, as all the others may."""


def _unsettled(server: SglangServer, *, at_last: bool = False) -> int:
    """Return what is still held: for transfers that failed, and by copies of tiers.

    What a failed push may touch stays pinned for the transport's grace of a minute, and
    counts only ``at_last`` with a server in a pool.
    """
    pair, tiers = states(server, "tiered_pd"), states(server, "tiered")
    held = int(pair.get("rooms_unsettled", 0)) + int(pair.get("releases_held", 0))
    pool = tiers.get("pool") or {}
    if pool and not at_last:
        under_way = sum(int(pool["under_way"][name]) for name in _NOT_HELD)
        return held + under_way + int(pool["pulls"]["under_way"])
    held += sum(int(tier["pinned"]) for tier in tiers.get("occupancy", {}).values())
    held += sum(pool.get("under_way", {}).values())
    held += sum(each["active"] for each in pool.get("media", {}).values())
    return held + int(pool.get("pulls", {}).get("under_way", 0))


def emptied(server: SglangServer) -> None:
    """Empty all caches of a server that runs; nothing where none does."""

    def flushes() -> bool:
        try:
            server.flush_cache()
        except RuntimeError:  # it still ends something
            return False
        except OSError:  # struck by a fault: there is nothing to empty
            return True
        return True

    wait_until(flushes, f"{server.spec.name} is flushed")
