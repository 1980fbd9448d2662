"""Runs a comparison: one server after the other, a file per cell, then the page.

A system that does not start, or whose request fails, is told of and stops no other.
What is done already is not measured again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from comparison.chart import draw
from comparison.checks import why_not_started
from comparison.loads import NotThereError
from comparison.measure import Measure, warm_up
from comparison.page import last_line, markdown, memory_lines, result
from comparison.plan import Cell, Session, lengths_that_fit, plan
from comparison.results import find
from comparison.settings import Model, Shared, Sizes
from comparison.store import FAILED, NOT_THERE, OK, Store
from comparison.systems import (
    PLAIN,
    SYSTEMS,
    System,
    absent,
    beside,
    memory,
    spec_of,
    store_of,
)
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.processes import ServiceError
from sgl_tiered_workloads.server import ServerSpec, ServerStartError, SglangServer

__all__ = ["Comparison", "Facts"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the first server said.

    Attributes:
        pool_tokens: of the device pool, with the memory fraction that was asked for.
        attention_backend: that all others are asked for; empty for their own choice.
        host_gb: of the systems with host memory.
        lengths: of hits that can be measured.
        left_out: the others, and why.
    """

    pool_tokens: int
    attention_backend: str
    host_gb: int
    lengths: tuple[int, ...]
    left_out: Mapping[str, str]

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Facts:
        """Return facts as they were written."""
        return cls(
            int(told["pool_tokens"]),
            str(told["attention_backend"]),
            int(told["host_gb"]),
            tuple(told["lengths"]),
            dict(told["left_out"]),
        )

    def told(self) -> dict[str, Any]:
        """Return them to be written."""
        return {
            "pool_tokens": self.pool_tokens,
            "attention_backend": self.attention_backend,
            "host_gb": self.host_gb,
            "lengths": list(self.lengths),
            "left_out": dict(self.left_out),
        }


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
        told = store.facts()
        self._facts = None if told is None else Facts.read(told)
        self._broken: dict[str, str] = {}

    async def run(self) -> None:
        """Measure what is not measured yet."""
        for name in sorted(self._systems, key=lambda name: name != PLAIN):
            # Whoever comes up first says how large the device pool is.
            if self._facts is None:
                await self._first(name)
        if self._facts is None:
            return
        for length, why in self._facts.left_out.items():
            self._say(f"hits of {length} tokens are left out: {why}")
        sessions = self._sessions()
        for place, session in enumerate(sessions):
            if self._todo(session):
                self._say(f"{session.system}: start {place + 1} of {len(sessions)}")
                await self._with_server(session, self._measure)

    def _sessions(self) -> list[Session]:
        lengths = self._sizes.lengths if self._facts is None else self._facts.lengths
        return plan(self._systems, lengths, self._sizes)

    def _todo(self, session: Session) -> list[Cell]:
        return [cell for cell in session.cells if not self._store.is_done(cell)]

    async def _first(self, name: str) -> None:
        """Start a server that says how large the pool is; measure plain's cells."""
        self._say(f"{name}: the first start, which says how large the device pool is")
        session = next(one for one in self._sessions() if one.system == name)

        async def learn(session: Session, server: SglangServer) -> None:
            told = await asyncio.to_thread(self._memory, name, server)
            self._facts = self._learn(told)
            self._store.keep_facts(self._facts.told())
            # Another one was given host memory for the largest pool that may be.
            if name == PLAIN:
                await self._measure(self._sessions()[0], server)

        await self._with_server(session, learn)

    def _learn(self, told: Mapping[str, Any]) -> Facts:
        shared, pool_tokens = self._shared, int(told["pool_tokens"])
        host_gb = shared.host_gb_of(pool_tokens, self._model.token_bytes)
        lengths, left_out = lengths_that_fit(
            self._sizes.lengths, self._model, pool_tokens, host_gb * 10**9
        )
        backend = shared.attention_backend
        if not self._dry_run:
            backend = backend or str(told["attention_backend"])
        named = {f"{length:,}": why for length, why in left_out.items()}
        return Facts(pool_tokens, backend, host_gb, lengths, named)

    def _host_gb(self) -> int:
        if self._facts is not None:
            return self._facts.host_gb
        return self._shared.host_gb_of(
            self._shared.pool_tokens, self._model.token_bytes
        )

    def _memory(self, name: str, server: SglangServer) -> dict[str, Any]:
        return memory(SYSTEMS[name], server, self._shared, self._host_gb())

    async def _measure(self, session: Session, server: SglangServer) -> None:
        """Measure the cells of one start that are not measured yet."""
        facts, system = self._facts, SYSTEMS[session.system]
        assert facts is not None
        told = await asyncio.to_thread(self._memory, system.name, server)
        for line in memory_lines({system.name: told}, self._dry_run)[2:]:
            self._say(f"  memory: {line.strip('| ')}")
        out = self._store.out
        cells = Measure(
            system,
            server,
            self._model,
            replace(self._sizes, lengths=facts.lengths or self._sizes.lengths),
            self._shared.page_size,
            facts.pool_tokens,
            out / "records",
            store_of(system, out) if system.has_disk else None,
            self._say,
        )
        for cell in self._todo(session):
            began_s = time.monotonic()
            try:
                found = await cells.run(cell)
            except NotThereError as problem:
                self._store.put(cell, NOT_THERE, str(problem))
                self._say(f"  {cell.name}: {problem}")
                continue
            except (RuntimeError, OSError) as problem:
                why = _one_sentence(problem)
                if (code := server.exit_code()) is not None:
                    why = f"the server ended with code {code}: {why}"
                self._store.put(cell, FAILED, why)
                self._say(f"  {cell.name}: failed: {why}")
                continue
            seconds = round(time.monotonic() - began_s, 1)
            self._store.put(cell, OK, seconds=seconds, memory=told, **found)
            self._say(f"  {cell.name}: done in {seconds:.0f} s")

    async def _with_server(
        self,
        session: Session,
        work: Callable[[Session, SglangServer], Awaitable[None]],
    ) -> None:
        """Start a system's server for some work; why not is written to its cells."""
        system, out = SYSTEMS[session.system], self._store.out
        if why := absent(system.name, dry_run=self._dry_run):
            self._give_up(session, NOT_THERE, why)
            return
        if why := self._broken.get(system.name, ""):
            self._give_up(session, FAILED, why)
            return
        store = store_of(system, out)
        if system.has_disk:
            shutil.rmtree(store, ignore_errors=True)
            store.mkdir(parents=True)
        try:
            spec = self._spec(system)
            with (
                beside(system, self._host_gb(), out),
                Fleet({spec.name: spec}, out / "logs", self._port, self._say) as fleet,
            ):
                first = warm_up(self._model, self._shared.pool_tokens)
                await fleet.only([spec.name], first)
                await work(session, fleet.servers[spec.name])
        except (ServerStartError, ServiceError) as problem:
            # Nothing that this run does would make it start later.
            self._broken[system.name] = why_not_started(problem)
            self._give_up(session, FAILED, self._broken[system.name])
        except (RuntimeError, OSError, KeyError) as problem:
            self._give_up(session, FAILED, _one_sentence(problem))
        finally:
            if system.has_disk:
                shutil.rmtree(store, ignore_errors=True)

    def _spec(self, system: System) -> ServerSpec:
        shared = self._shared
        if self._facts is not None:
            shared = replace(shared, attention_backend=self._facts.attention_backend)
        return spec_of(
            system,
            self._model,
            shared,
            self._host_gb(),
            self._store.out,
            dry_run=self._dry_run,
        )

    def _give_up(self, session: Session, status: str, why: str) -> None:
        self._say(f"  {session.system}: {why}")
        for cell in self._todo(session):
            self._store.put(cell, status, why)

    def finish(self) -> tuple[dict[str, Any], str]:
        """Write table, figures and chart from all cells; return last line and table."""
        out = self._store.out
        cells, broken = self._store.every()
        findings = find(cells, out / "records", self._shared.page_size)
        findings.problems += [f"{name} cannot be read" for name in broken]
        left_out = {} if self._facts is None else self._facts.left_out
        try:
            draw(out / "chart.png", self._header, findings)
        except ModuleNotFoundError:
            findings.problems.append("there is no chart: matplotlib is not installed")
        text = markdown(self._header, findings, left_out)
        (out / "table.md").write_text(text, encoding="utf-8")
        told = result(self._header, findings, left_out)
        (out / "result.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
        return last_line(self._header, findings), text


def _one_sentence(problem: Exception) -> str:
    text = str(problem).partition("\n")[0]
    if isinstance(problem, RuntimeError):
        return text
    return f"{type(problem).__name__}: {text}"
