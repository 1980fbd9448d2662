"""Clusters on this machine: routers against each other, and prefill/decode pairs.

Routers: three plain servers with KV events, and in front of them our router by prompt
tree, our router by session, and sglang-router's cache_aware, in turns. LooGLE's cut at
share ratio 2: every document is asked about by two users, Poisson arrivals. Once the
servers do what prefill instances do (MemServe's study has three of them), once all.

Pairs: two colocated servers without and with caches (PD, PD-CC), a prefill and a decode
server of ours without and with all caches (1P1D, 1P1D-CC), and SGLang's own pair with
both radix caches on. ShareGPT, LooGLE's cut and ReAct shapes. Systems that are set
against each other run side by side and take turns; all get the same sessions, in which
a turn holds the system's own answers, as with a real client.

Pool, only where asked for (``--part pool``): what a server in a pool costs where
nothing is reused, against plain SGLang, and what it gains where a peer has the prompt.

README.md says more. A table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from against.running import Running
from parts.arms import (
    CC,
    FRONTS,
    GROUPS,
    PAGE,
    PAIR_BASIC,
    PAIR_CC,
    PLAIN,
    PREFIX_TREE,
    SESSION,
    SGLANG_PAIR,
    SGLANG_ROUTER,
    System,
    fronts,
    make_system,
    plain_servers,
)
from parts.figures import figures, ratio, table
from parts.loads import (
    DOCUMENT_TOKENS,
    LOADS,
    QUESTIONS,
    draw_sessions,
    replayed,
    shared_documents,
)
from sgl_tiered_workloads.arrivals import ClosedLoop, OpenLoop, poisson_arrivals
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.cluster.running import Cluster
from sgl_tiered_workloads.driver import run_sessions
from sgl_tiered_workloads.gate import (
    Spread,
    check_equality,
    measure_spread,
    widest_spread,
)
from sgl_tiered_workloads.harness.control import rounding_spread
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.processes import Service
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerStartError, SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS
from sgl_tiered_workloads.turns import Session

sys.path.append(str(Path(__file__).parents[1] / "serving"))
from movement.ending import run_to_end
from movement.tools import answered
from parts.pooled import measure_pooled, pooled_members
from reuse.parts import rotated

DEFAULT_PARTS = ("routers", "pairs")
PARTS = (*DEFAULT_PARTS, "pool")
MODEL = "bench"
CELL_REQUESTS, PAIR_REQUESTS = 60, 30
ROUNDED = 12
"""Requests whose answers tell how plain SGLang rounds; half of them are taken."""
NUM_SERVERS, SHARE_RATIO = 3, 2
NUM_USERS = 4


@dataclass(frozen=True, slots=True)
class Study:
    """A load of the routers.

    Attributes:
        name: of its cells.
        key: that its figures' names begin with.
        answer_tokens: of each answer.
        think_s: mean time between an answer and the next question.
        load: sessions that begin in the time that a cold document takes.
    """

    name: str
    key: str
    answer_tokens: int
    think_s: float
    load: float


STUDIES = (
    # A prefill instance gives one token; the rest of the answer comes from elsewhere
    # (here: nobody computes it, the pause stands for it).
    Study("loogle x2, prefill", "router", 1, 0.4, 1.5),
    Study("loogle x2, colocated", "router_colocated", 20, 0.0, 1.0),
)
HALVES = 2
"""A cell of a pair is measured in so many pieces, with others in between."""
Cells = dict[tuple[str, str], list[RequestRecord]]


class Bench:
    """One run of the bench."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = time.monotonic()
        self.rng = np.random.default_rng(args.seed)
        self.problems: list[str] = []
        self.cells: Cells = {}

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    async def run(self) -> dict[str, Any]:
        """Measure the parts asked for and return the result."""
        model = await asyncio.to_thread(make_model, MODEL, self.args.models.resolve())
        result: dict[str, Any] = {}
        if "routers" in self.args.part:
            result |= await self._routers(model)
        if "pairs" in self.args.part:
            result |= await self._pairs(model)
        if "pool" in self.args.part:
            result |= await self._pool(model)
        for line in table(self.cells):
            print(line)
        result["cells"] = {
            f"{load}/{system}": figures(records)
            for (load, system), records in self.cells.items()
        }
        return result | {"problems": self.problems}

    # -- Routers ---------------------------------------------------------------

    async def _routers(self, model: Path) -> dict[str, Any]:
        ports, logs = Ports(), self._logs("routers")
        members = plain_servers(model, ports, NUM_SERVERS)
        services = fronts(members, ports, logs, self.args.sglang_router)
        behind = list(services.values())
        cluster = Cluster(members, logs, behind=behind, ports=ports, say=self.say)
        result: dict[str, Any] = {}
        async with Running(cluster):
            servers = list(cluster.servers.values())
            cold_s = await self._cold_s(servers)
            self.say(f"a cold document takes {cold_s:.2f} s")
            for study in STUDIES:
                result |= await self._study(study, cold_s, servers, services)
        return result

    async def _study(
        self,
        study: Study,
        cold_s: float,
        servers: Sequence[SglangServer],
        services: Mapping[str, Service],
    ) -> dict[str, Any]:
        """Let the routers take turns with one load."""
        load = study.name
        rate = study.load * self.args.router_load / cold_s
        self.say(f"{load}: {rate:.2f} sessions/s")
        for repeat in range(self.args.repeats):
            seed = int(self.rng.integers(2**31))
            documents = max(self.args.requests // (QUESTIONS * SHARE_RATIO), 1)
            count = documents * SHARE_RATIO
            arrivals = poisson_arrivals(rate, count, np.random.default_rng(seed))
            for name in rotated(FRONTS, repeat):
                await self._empty(servers)
                sessions = shared_documents(
                    documents, SHARE_RATIO, seed, study.answer_tokens, study.think_s
                )
                # Where a session's name is hashed to is luck: new in each repeat.
                records = await self._play(
                    services[name].url, sessions, arrivals, f"{seed}."
                )
                self._keep(load, name, records, repeat)
                told = figures(records)
                self.say(
                    f"  {repeat} {name}: TTFT mean {told['ttft_mean_s']:.3f} s, "
                    f"p99 {told['ttft_p99_s']:.3f} s, cached "
                    f"{told['cached_share']:.1%}"
                )
        base = self.cells[load, SESSION]
        rounding = await rounding_spread(servers[0], base, PAGE)
        ours, theirs = self.cells[load, PREFIX_TREE], self.cells[load, SGLANG_ROUTER]
        spread = widest_spread([rounding, measure_spread(base, theirs)])
        for name in (PREFIX_TREE, SGLANG_ROUTER):
            self._gate(f"{load}: {name}", base, self.cells[load, name], spread)
        key = study.key
        return {
            f"{key}_p99_vs_session": ratio(ours, base, "ttft_p99_s"),
            f"{key}_p99_vs_sglang_router": ratio(ours, theirs, "ttft_p99_s"),
            f"{key}_mean_vs_session": ratio(ours, base, "ttft_mean_s"),
            f"{key}_mean_vs_sglang_router": ratio(ours, theirs, "ttft_mean_s"),
            f"{key}_sessions_per_s": rate,
        }

    async def _cold_s(self, servers: Sequence[SglangServer]) -> float:
        """Warm every server up; return the median TTFT of a document nobody knows."""
        times = []
        for server in servers:
            async with StreamingClient(server.url) as client:
                for number in range(3):
                    prompt = random_tokens(self.rng, DOCUMENT_TOKENS, VOCAB_TOKENS)
                    request = PlannedRequest(f"warm.t{number}", prompt, 4)
                    record = answered(await client.send(request))
                    answered(await client.send(request))
                    times.append(record.ttft_s)
        return float(np.median(times))

    # -- Pairs -----------------------------------------------------------------

    async def _pairs(self, model: Path) -> dict[str, Any]:
        rates: dict[str, float] = {}
        spread = await self._spread(model)
        for group in GROUPS:
            try:
                await self._group(group, model, rates, spread)
            except ServerStartError as error:
                self.problems.append(f"{' and '.join(group)}: {error}"[:2000])
                self.say(self.problems[-1])
                if PLAIN in group:
                    break
        return self._pair_figures()

    async def _spread(self, model: Path) -> Spread:
        """Measure how far a plain server is from itself, over all loads.

        Between batches of one and of more, and between prompts computed whole and in
        parts: a rare move that one load does not show is as possible on it.
        """
        ports, logs = Ports(), self._logs("plain")
        cluster = Cluster(plain_servers(model, ports, 1), logs, say=self.say)
        users = ClosedLoop(NUM_USERS)
        spreads: list[Spread] = []
        async with Running(cluster):
            (server,) = cluster.servers.values()
            for load in LOADS:
                sessions = draw_sessions(load, ROUNDED, self.args.seed, self.args.data)
                alone = await self._play(server.url, sessions, ClosedLoop(1))
                await self._empty([server])
                batched = await self._play(server.url, replayed(alone), users)
                spreads.append(measure_spread(alone, batched))
                spreads.append(
                    await rounding_spread(
                        server, alone[:ROUNDED], PAGE, ROUNDED // 2, spreads
                    )
                )
        return widest_spread(spreads)

    async def _group(
        self,
        group: Sequence[str],
        model: Path,
        rates: dict[str, float],
        spread: Spread,
    ) -> None:
        """Let the systems of a group take turns with every load."""
        self.say(f"{' beside '.join(group)}")
        ports, logs = Ports(), self._logs("-".join(group))
        pool = f"file:{logs / 'pool'}"
        systems = {
            n: make_system(n, model, ports, logs, pool, self.args.caching)
            for n in group
        }
        members = [each for system in systems.values() for each in system.members]
        if PLAIN not in group:
            members += plain_servers(model, ports, 1)
        judge = members[0 if PLAIN in group else -1].name
        behind = [system.front for system in systems.values()]
        cluster = Cluster(members, logs, behind=behind, ports=ports, say=self.say)
        async with Running(cluster):
            for system in systems.values():
                await self._warm(system)
            for load in LOADS:
                if load not in rates:
                    rates[load] = await self._rate(systems[PLAIN], load)
                for half in range(HALVES):
                    for name in rotated(group, half):
                        await self._half(
                            cluster, systems[name], load, half, rates[load]
                        )
                for name in group:
                    if name != PLAIN:
                        base, answers = self.cells[load, PLAIN], self.cells[load, name]
                        plain = await self._reference(cluster.url(judge), base, answers)
                        self._gate(f"{load}: {name}", plain, answers, spread)

    async def _half(
        self,
        cluster: Cluster,
        system: System,
        load: str,
        half: int,
        rate: float,
    ) -> None:
        """Measure a half of a cell."""
        servers = [cluster.servers[member.name] for member in system.members]
        await self._empty(servers)
        seed = self.args.seed * 100 + LOADS.index(load) * 10 + half
        count = self.args.pair_requests // HALVES
        sessions = draw_sessions(load, count, seed, self.args.data)
        turns = sum(session.num_turns for session in sessions) / len(sessions)
        draw = np.random.default_rng(seed)
        arrivals = poisson_arrivals(rate / turns, len(sessions), draw)
        records = await self._play(system.front.url, sessions, arrivals)
        self._keep(load, system.name, records, half)
        told = figures(records)
        self.say(
            f"  {load} {half} {system.name}: {len(records)} requests, TTFT mean "
            f"{told['ttft_mean_s']:.3f} s, TPOT {told['tpot_mean_s'] * 1e3:.0f} ms, "
            f"JCT {told['jct_mean_s']:.2f} s, cached {told['cached_share']:.1%}"
        )

    async def _warm(self, system: System) -> None:
        """Compute, hit and decode once each before anything counts."""
        prompt = random_tokens(self.rng, DOCUMENT_TOKENS, VOCAB_TOKENS)
        for number in range(3 * len(system.members)):
            request = PlannedRequest(f"w{number}.t0", prompt, 4)
            async with StreamingClient(system.front.url) as client:
                answered(await client.send(request))

    async def _rate(self, system: System, load: str) -> float:
        """Return the requests/s to offer: a share of what PD does for four users."""
        sessions = draw_sessions(load, 16, self.args.seed + 7_000, self.args.data)
        records = await self._play(system.front.url, sessions, ClosedLoop(NUM_USERS))
        # By Little's law, and not by the time that it took: in the end few still run.
        rate = NUM_USERS / float(np.mean([record.e2e_s for record in records]))
        self.say(f"  {load}: PD does {rate:.2f} requests/s")
        return float(rate * self.args.pair_load)

    def _pair_figures(self) -> dict[str, Any]:
        """Return the ratios that are there, each of cells that ran side by side."""
        result: dict[str, Any] = {}
        gains = self._ratios(PAIR_CC, PAIR_BASIC)
        if len(gains) == len(LOADS):
            result["cc_ttft_gain_worst"] = 1.0 - max(gains.values())
        peers = self._ratios(PAIR_CC, SGLANG_PAIR)
        if len(peers) == len(LOADS):
            result["cc_ttft_vs_sglang_pd"] = max(peers.values())
        return result | {
            "cc_ttft_vs_basic_by_load": gains,
            "cc_ttft_vs_sglang_pd_by_load": peers,
            "pd_cc_ttft_vs_pd_by_load": self._ratios(CC, PLAIN),
        }

    def _ratios(self, ours: str, theirs: str) -> dict[str, float]:
        """Return mean TTFT of one system over another's, by load, where both ran."""
        return {
            load: ratio(self.cells[load, ours], self.cells[load, theirs], "ttft_mean_s")
            for load in LOADS
            if (load, ours) in self.cells and (load, theirs) in self.cells
        }

    # -- Pool ------------------------------------------------------------------

    async def _pool(self, model: Path) -> dict[str, Any]:
        self.say("a server in a pool, beside plain SGLang")
        ports, logs = Ports(), self._logs("pool")
        members = pooled_members(model, ports, f"file:{logs / 'registry'}")
        async with Running(Cluster(members, logs, ports=ports, say=self.say)) as all_:
            return await measure_pooled(all_.servers, self.rng, self.say, self.problems)

    # -- Sending and judging ---------------------------------------------------

    async def _play(
        self,
        url: str,
        sessions: Sequence[Session],
        arrivals: OpenLoop | ClosedLoop,
        prefix: str = "",
    ) -> list[RequestRecord]:
        async with StreamingClient(
            url, tells_session=True, session_prefix=prefix
        ) as client:
            records = await run_sessions(client, sessions, arrivals)
        return [answered(record) for record in records]

    async def _reference(
        self, url: str, base: Sequence[RequestRecord], answers: Sequence[RequestRecord]
    ) -> list[RequestRecord]:
        """Return plain SGLang's answers to the prompts of another system.

        Once an answer differs by rounding, the prompts of its session do too: those are
        asked anew, at the plain server behind ``url``.
        """
        known = {(record.key, tuple(record.prompt)): record for record in base}
        places = asyncio.Semaphore(NUM_USERS)

        async def ask(record: RequestRecord) -> RequestRecord:
            told = known.get((record.key, tuple(record.prompt)))
            if told is not None:
                return told
            async with places:
                request = PlannedRequest(record.key, record.prompt, len(record.output))
                return answered(await client.send(request, record.order))

        async with StreamingClient(url) as client:
            return list(await asyncio.gather(*(ask(record) for record in answers)))

    def _keep(
        self, load: str, system: str, records: Sequence[RequestRecord], repeat: int
    ) -> None:
        """Keep the records of a cell; keys of repeats must differ for the gate."""
        kept = self.cells.setdefault((load, system), [])
        kept += [
            replace(
                record,
                key=record.key if "/" in record.key else f"{repeat}/{record.key}",
                order=len(kept) + record.order,
                repeat=repeat,
            )
            for record in records
        ]

    def _gate(
        self,
        label: str,
        base: Sequence[RequestRecord],
        answers: Sequence[RequestRecord],
        spread: Spread,
    ) -> None:
        """Demand the base's answers, up to plain SGLang's own spread."""
        result = check_equality(
            base, answers, page_size=PAGE, spread=spread, forced=False
        )
        self.say(f"  {label}: {result.summary()}")
        if not result.passed:
            self.problems.append(f"{label}: {result.summary()}")

    async def _empty(self, servers: Sequence[SglangServer]) -> None:
        for server in servers:
            await asyncio.to_thread(server.flush_cache)

    def _logs(self, name: str) -> Path:
        logs: Path = self.args.out.resolve() / "logs" / name
        return logs


def main() -> int:
    """Run the bench; 0 unless a server failed or answers differ."""
    full = os.environ.get("FULL") == "1"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-cluster"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--data", type=Path, help="folder of the traces' files")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--requests", type=int, default=CELL_REQUESTS, help="per cell of the routers"
    )
    parser.add_argument(
        "--pair-requests",
        type=int,
        default=CELL_REQUESTS if full else PAIR_REQUESTS,
        help="per cell of the pairs",
    )
    parser.add_argument(
        "--caching",
        type=int,
        choices=(1, 2, 3),
        default=3,
        help="--tiered-pd-caching of 1P1D-CC; figures are named after 3",
    )
    parser.add_argument(
        "--repeats", type=int, default=15 if full else 7, help="of the routers' cells"
    )
    parser.add_argument(
        "--router-load",
        type=float,
        default=1.0,
        help="times the load of each of the routers' studies",
    )
    parser.add_argument(
        "--pair-load", type=float, default=0.35, help="share of PD's closed loop"
    )
    parser.add_argument(
        "--sglang-router",
        type=Path,
        default=Path(".cache/sglang-router/bin/python"),
        help="the Python that has sglang-router (scripts/peers.sh makes it)",
    )
    args = parser.parse_args()
    args.part = args.part or list(DEFAULT_PARTS)
    args.sglang_router = args.sglang_router.absolute()
    return run_to_end(Bench(args).run(), args.out)


if __name__ == "__main__":
    raise SystemExit(main())
