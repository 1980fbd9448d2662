"""Runs a comparison: one server after the other, a file per cell, then the page.

A system that does not start, or whose request fails, is told of and stops no other. A
server that ends, or answers no more, is started once more; after the second time what
is left of it is given up. What is done already is not measured again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from comparison.chart import draw
from comparison.checks import why_not_started
from comparison.loads import NotThereError
from comparison.measure import Measure, warm_up
from comparison.memory import given_memory, measured_memory
from comparison.page import last_line, page, result
from comparison.plan import Cell, Session, lengths_that_fit, plan
from comparison.results import Findings, find
from comparison.settings import Model, Shared, Sizes
from comparison.store import FAILED, NOT_THERE, OK, Store
from comparison.systems import (
    PLAIN,
    SYSTEMS,
    UNCAPPED,
    absent,
    beside,
    spec_of,
    store_of,
)
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.processes import Service, ServiceError
from sgl_tiered_workloads.server import ServerSpec, ServerStartError, SglangServer

__all__ = ["Comparison"]

_STARTS = 2
"""Of a server that ends while it is measured."""
_FLUSH_S = 30.0

Work = Callable[[Session, SglangServer, Sequence[Service]], Awaitable[None]]


class _ServerGoneError(RuntimeError):
    """A server ended, or answers no more, while its cells were measured."""


class Comparison:
    """One run.

    Args:
        model: that all serve.
        shared: what they have in common.
        sizes: how much is measured.
        systems: by name.
        store: of the cells.
        port: of the servers; None for free ones.
        header: of the run.
        say: takes progress lines.
    """

    def __init__(
        self,
        model: Model,
        shared: Shared,
        sizes: Sizes,
        systems: Sequence[str],
        store: Store,
        port: int | None,
        header: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._model, self._shared, self._sizes = model, shared, sizes
        self._systems, self._store, self._port = systems, store, port
        self._header, self._say = header, say
        self._dry_run = bool(header["dry_run"])
        # What the first server said: pool_tokens, attention_backend, host_gb, lengths
        # that can be measured, and left_out, why the others cannot.
        self._facts = store.facts()
        self._broken: dict[str, str] = {}
        self._given_up: set[Cell] = set()

    async def run(self) -> None:
        """Measure what is not measured yet."""
        for name in sorted(self._systems, key=lambda name: name != PLAIN):
            # Whoever comes up first says how large the device pool is, with its limit.
            if self._facts is None and name != UNCAPPED:
                await self._first(name)
        if self._facts is None:
            return
        for length, why in self._facts["left_out"].items():
            self._say(f"hits of {length} tokens are left out: {why}")
        sessions = self._sessions()
        for place, session in enumerate(sessions):
            if self._todo(session):
                self._say(f"{session.system}: start {place + 1} of {len(sessions)}")
                await self._with_server(session, self._measure)

    def _sessions(self) -> list[Session]:
        lengths = self._sizes.lengths if self._facts is None else self._facts["lengths"]
        return plan(self._systems, lengths, self._sizes)

    def _todo(self, session: Session) -> list[Cell]:
        """Return the cells that are neither measured nor were tried by this run.

        Of the lengths that are known to fit by now.
        """
        same = (session.system, session.start)
        return [
            cell
            for one in self._sessions()
            if (one.system, one.start) == same
            for cell in one.cells
            if cell not in self._given_up and not self._store.is_done(cell)
        ]

    async def _first(self, name: str) -> None:
        """Start a server that says how large the pool is; measure plain's cells."""
        self._say(f"{name}: the first start, which says how large the device pool is")
        session = next(one for one in self._sessions() if one.system == name)

        async def learn(
            session: Session, server: SglangServer, others: Sequence[Service]
        ) -> None:
            if self._facts is None:
                told = await asyncio.to_thread(self._memory, name, server)
                self._facts = self._learn(told)
                self._store.keep_facts(self._facts)
            # Another one was given host memory for the largest pool that may be.
            if name == PLAIN:
                await self._measure(session, server, others)

        await self._with_server(session, learn)

    def _learn(self, told: Mapping[str, Any]) -> dict[str, Any]:
        shared, pool_tokens = self._shared, int(told["pool_tokens"])
        host_gb = shared.host_gb_of(pool_tokens, self._model.token_bytes)
        lengths, left_out = lengths_that_fit(
            self._sizes.lengths, self._model, pool_tokens, host_gb * 10**9
        )
        backend = shared.attention_backend
        if not self._dry_run:
            backend = backend or str(told["attention_backend"])
        return {
            "pool_tokens": pool_tokens,
            "attention_backend": backend,
            "host_gb": host_gb,
            "lengths": lengths,
            "left_out": left_out,
        }

    def _host_gb(self) -> int:
        if self._facts is not None:
            return int(self._facts["host_gb"])
        return self._shared.host_gb_of(
            self._shared.pool_tokens, self._model.token_bytes
        )

    def _memory(self, name: str, server: SglangServer) -> dict[str, Any]:
        return given_memory(SYSTEMS[name], server, self._shared, self._host_gb())

    async def _measure(
        self, session: Session, server: SglangServer, others: Sequence[Service]
    ) -> None:
        """Measure the cells of one start that are not measured yet.

        Raises:
            _ServerGoneError: a cell failed, and the server with it.
        """
        facts, system = self._facts, SYSTEMS[session.system]
        assert facts is not None
        given = await asyncio.to_thread(self._memory, system.name, server)
        out = self._store.out
        cells = Measure(
            system,
            server,
            self._model,
            replace(self._sizes, lengths=facts["lengths"] or self._sizes.lengths),
            self._shared.page_size,
            facts["pool_tokens"],
            out / "records",
            store_of(system, out) if system.has_disk else None,
            self._say,
        )
        for cell in self._todo(session):
            began_s = time.monotonic()
            try:
                found = await cells.run(cell)
            except NotThereError as problem:
                self._fail(cell, NOT_THERE, str(problem))
                continue
            except Exception as problem:
                # Whatever it was, the other cells are measured.
                gone = await asyncio.to_thread(_why_gone, server)
                why = ": ".join(filter(None, (gone, _one_sentence(problem))))
                self._fail(cell, FAILED, why)
                if gone:
                    raise _ServerGoneError(why) from problem
                continue
            seconds = round(time.monotonic() - began_s, 1)
            pids = [one.pid for one in (server, *others) if one.pid is not None]
            used = await asyncio.to_thread(measured_memory, pids)
            found |= {"took_s": seconds, "memory": {**given, **used}}
            self._store.put(cell, OK, **found)
            self._say(f"  {cell.name}: done in {seconds:.0f} s")

    async def _with_server(self, session: Session, work: Work) -> None:
        """Start a system's server for some work; why not is written to its cells."""
        name = session.system
        if why := absent(name, dry_run=self._dry_run):
            self._give_up(session, NOT_THERE, why)
            return
        for start in range(_STARTS):
            if why := self._broken.get(name, ""):
                self._give_up(session, FAILED, why)
                return
            try:
                await self._start(session, work)
            except _ServerGoneError as problem:
                if start + 1 == _STARTS:
                    why = f"its server was lost {_STARTS} times, at last: {problem}"
                    self._give_up(session, FAILED, why)
                elif self._todo(session):
                    self._say(f"  {name}: is started once more")
                    continue
            except (ServerStartError, ServiceError) as problem:
                # Nothing that this run does would make it start later.
                self._broken[name] = why_not_started(problem)
                self._give_up(session, FAILED, self._broken[name])
            except Exception as problem:  # noqa: BLE001 - told: stops no other
                self._give_up(session, FAILED, _one_sentence(problem))
            return

    async def _start(self, session: Session, work: Work) -> None:
        system, out = SYSTEMS[session.system], self._store.out
        store = store_of(system, out)
        if system.has_disk:
            shutil.rmtree(store, ignore_errors=True)
            store.mkdir(parents=True)
        try:
            spec = self._spec(session.system)
            with (
                beside(system, self._host_gb(), out) as others,
                Fleet({spec.name: spec}, out / "logs", self._port, self._say) as fleet,
            ):
                first = warm_up(self._model, self._shared.pool_tokens)
                await fleet.only([spec.name], first)
                await work(session, fleet.servers[spec.name], others)
        finally:
            if system.has_disk:
                shutil.rmtree(store, ignore_errors=True)

    def _spec(self, name: str) -> ServerSpec:
        shared = self._shared
        if self._facts is not None:
            backend = self._facts["attention_backend"]
            shared = replace(shared, attention_backend=backend)
        return spec_of(
            SYSTEMS[name],
            self._model,
            shared,
            self._host_gb(),
            self._store.out,
            dry_run=self._dry_run,
        )

    def _give_up(self, session: Session, status: str, why: str) -> None:
        for cell in self._todo(session):
            self._fail(cell, status, why)

    def _fail(self, cell: Cell, status: str, why: str) -> None:
        """Write why a cell is not measured; this run does not try it again."""
        self._store.put(cell, status, why)
        self._given_up.add(cell)
        self._say(f"  {cell.name}: {status}: {why}")

    def finish(self) -> tuple[dict[str, Any], str]:
        """Write table, figures and chart from all cells; return last line and table.

        The table and the figures are written before anything is drawn.
        """
        out = self._store.out
        cells, broken = self._store.every()
        findings = find(cells, out / "records", self._shared.page_size)
        findings.problems += [f"{name} cannot be read" for name in broken]
        text = self._write(findings)
        try:
            draw(out / "chart.png", self._header, findings)
        except Exception as problem:  # noqa: BLE001 - told: the figures are there
            why = f"there is no chart: {type(problem).__name__}: {problem}"
            findings.problems.append(why)
            text = self._write(findings)
        return last_line(self._header, findings), text

    def _write(self, findings: Findings) -> str:
        facts, out = self._facts or {}, self._store.out
        text = page(self._header, findings, facts)
        (out / "table.md").write_text(text, encoding="utf-8")
        told = result(self._header, findings, facts)
        (out / "result.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
        return text


def _why_gone(server: SglangServer) -> str:
    """Return why a server can measure no more cells; empty where it can."""
    if (code := server.exit_code()) is not None:
        return f"the server ended with code {code}"
    try:
        server.flush_cache(_FLUSH_S)
    except (OSError, RuntimeError) as problem:
        return f"the server answers no more ({_one_sentence(problem)})"
    return ""


def _one_sentence(problem: Exception) -> str:
    text = str(problem).partition("\n")[0]
    if type(problem) is RuntimeError and text:
        return text
    return f"{type(problem).__name__}: {text}"
