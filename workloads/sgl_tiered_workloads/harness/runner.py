"""Runs a comparison: the gate first, then every system in turn, then the records.

A system's server is started when its turn comes and stopped when another's does (or all
run together, where the machine has room); caches are emptied before every repeat. Each
repeat has its own seed, the same for all systems, and another system begins. A system
at a foreign address is driven and nothing else: not started, emptied or judged.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from tqdm import tqdm

from sgl_tiered_workloads.driver import run_workload
from sgl_tiered_workloads.harness.clients import (
    FolderTokenizer,
    LazyEncoder,
    make_client,
    server_facts,
)
from sgl_tiered_workloads.harness.errors import HarnessError, SpecError
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.harness.gating import (
    PLAIN,
    REFERENCE,
    Gate,
    judge,
    write_gate,
)
from sgl_tiered_workloads.harness.openai_client import Tokenizer
from sgl_tiered_workloads.harness.results import GATE_FILE
from sgl_tiered_workloads.harness.spec import Spec, SystemSpec
from sgl_tiered_workloads.harness.turns import bytes_by_edge, rotated, settle
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.records import RequestRecord, make_header, write_records
from sgl_tiered_workloads.registry import make_workload
from sgl_tiered_workloads.server import ServerSpec, SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.systems import Device, plain_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS
from sgl_tiered_workloads.workload import Workload

__all__ = ["Comparison", "WorkloadMaker", "records_path", "server_specs"]

_WARM_UP = PlannedRequest("warm", tuple(range(100, 700)), 4)
"""Long enough for a prefill, a hit and a decode on any server."""
_REACH_S = 10.0
_GATE_SEED = 0
_REPEAT_SEEDS = 1_000_003
"""Seeds of two specifications and of their repeats do not meet by accident."""

Say = Callable[[str], None]


class WorkloadMaker(Protocol):
    """The registry's ``make_workload``; tests hand in their own."""

    def __call__(
        self, name: str, params: Mapping[str, Any], seed: int, vocab_tokens: int
    ) -> Workload:
        """Return a fresh workload."""
        ...


@dataclass(slots=True)
class _System:
    """A compared system and what was seen of it."""

    spec: SystemSpec
    tokenizer: Tokenizer | None
    records: list[RequestRecord]
    moved_bytes: list[dict[str, int]]
    server: dict[str, str]


def records_path(out: Path, system: str) -> Path:
    """Return where a system's records are."""
    return out / "records" / f"{system}.jsonl"


def server_specs(spec: Spec, model: Path, out: Path) -> dict[str, ServerSpec]:
    """Return how to start every server: the compared ones, and two for the gate."""
    device = Device(model, spec.pool_tokens, spec.page_size, spec.flags)
    large = device.with_pool(spec.gate.reference_pool_tokens)
    specs = {REFERENCE: plain_spec(large, REFERENCE), PLAIN: plain_spec(device, PLAIN)}
    for system in spec.started:
        store = str(out / "stores" / system.name)
        flags = [flag.replace("{store}", store) for flag in system.flags]
        started = plain_spec(device, system.name, flags)
        specs[system.name] = replace(started, env=dict(system.env))
    return specs


def _registry(spec: Spec) -> WorkloadMaker:
    """Return the registry's maker; presets know words only by their hash."""
    folder = spec.model.path
    if not folder:
        return make_workload
    return partial(make_workload, encode=LazyEncoder(Path(folder).expanduser()))


def _reach(system: SystemSpec) -> None:
    """Refuse an address where nothing listens before anything is started.

    Raises:
        SpecError: there is no server, or no address.
    """
    key = f"systems.{system.name}.url"
    try:
        address = urlsplit(system.url)
        port = address.port or (443 if address.scheme == "https" else 80)
        host = address.hostname
    except ValueError:
        host, port = None, 0
    if not host:
        remedy = "write http://HOST:PORT"
        raise SpecError(key, f"{system.url!r} is no address", remedy)
    try:
        socket.create_connection((host, port), timeout=_REACH_S).close()
    except OSError as error:
        remedy = "start the server, or correct the address"
        problem = f"no server answers at {system.url} ({error.strerror or error})"
        raise SpecError(key, problem, remedy) from None


def _clear(out: Path) -> None:
    """Remove an older run's results, so that none of them passes for the new one's.

    Only a folder that holds a gate's result is taken for ours.
    """
    shutil.rmtree(out / "stores", ignore_errors=True)
    if not (out / GATE_FILE).exists():
        return
    shutil.rmtree(out / "records", ignore_errors=True)
    for path in (out / GATE_FILE, out / "report.md", out / "report.html"):
        path.unlink(missing_ok=True)


class Comparison:
    """One run of a specification.

    Args:
        spec: what to run.
        out: takes records, logs, the gate's result and the systems' stores.
        models: where models that are made on the spot are kept.
        first_port: of the servers; None for any free ones.
        say: takes progress lines.
        make: makes the workload; by default the registry does, with the texts of text
            workloads cut by the model's tokenizer where the model is the user's.
        quiet: show no progress bar.
    """

    def __init__(
        self,
        spec: Spec,
        out: Path,
        models: Path,
        first_port: int | None = None,
        say: Say = tqdm.write,
        make: WorkloadMaker | None = None,
        quiet: bool = False,
    ) -> None:
        self._spec = spec
        self._out = out
        self._models = models
        self._first_port = first_port
        self._say = say
        self._make = make or _registry(spec)
        self._quiet = quiet
        self._systems: list[_System] = []

    async def run(self) -> Gate:
        """Judge, measure, and write everything down.

        Raises:
            GateRedError: answers were not equal; nothing was timed.
            NegativeControlError: the gate would not have noticed.
            ServerStartError: a server did not start.
        """
        spec = self._spec
        # A wrong workload is found before the first server starts.
        self._workload(_GATE_SEED)
        for system in spec.systems:
            if system.external:
                _reach(system)
        model = self._model()
        for system in spec.systems:
            tokenizer = self._tokenizer(system, model)
            self._systems.append(_System(system, tokenizer, [], [], {}))
        specs = {} if model is None else server_specs(spec, model, self._out)
        _clear(self._out)
        stores = self._out / "stores"
        for system in spec.started:
            (stores / system.name).mkdir(parents=True)
        logs = self._out / "logs"
        try:
            with Fleet(specs, logs, self._first_port, self._say) as fleet:
                gate = await self._judge(fleet)
                gate.require_green()
                await self._measure(fleet, gate)
        finally:
            shutil.rmtree(stores, ignore_errors=True)
        return gate

    async def _judge(self, fleet: Fleet) -> Gate:
        @asynccontextmanager
        async def served(name: str) -> AsyncIterator[SglangServer]:
            await fleet.only([name], _WARM_UP)
            yield fleet.servers[name]

        sessions = self._workload(_GATE_SEED).as_sessions()
        gate = await judge(self._spec, sessions, served, self._say)
        write_gate(self._out / GATE_FILE, gate)
        return gate

    async def _measure(self, fleet: Fleet, gate: Gate) -> None:
        spec = self._spec
        total = spec.repeats * len(spec.systems)
        with tqdm(total=total, desc="runs", disable=self._quiet or None) as bar:
            for repeat in range(spec.repeats):
                # The last system is the first to be measured: the gate left it running.
                for system in rotated(self._systems, repeat - 1):
                    await self._run_once(fleet, system, repeat)
                    self._write(system, gate)
                    bar.update()

    async def _run_once(self, fleet: Fleet, system: _System, repeat: int) -> None:
        name = system.spec.name
        server: SglangServer | None = None
        if not system.spec.external:
            started = [other.name for other in self._spec.started]
            await fleet.only(started if self._spec.together else [name], _WARM_UP)
            server = fleet.servers[name]
            await asyncio.to_thread(server.flush_cache)
            before = await asyncio.to_thread(bytes_by_edge, server)
        url = system.spec.url if server is None else server.url
        system.server = await asyncio.to_thread(server_facts, url)
        workload = self._workload(repeat + 1)
        records = await self._drive(system, url, workload, repeat)
        system.records.extend(replace(record, repeat=repeat) for record in records)
        if server is not None:
            await settle(server, None)
            after = await asyncio.to_thread(bytes_by_edge, server)
            moved = {edge: num - before.get(edge, 0) for edge, num in after.items()}
            system.moved_bytes.append(moved)
        failed = sum(record.error is not None for record in records)
        self._say(
            f"  repeat {repeat}, {name}: {len(records)} requests, {failed} failed"
        )

    async def _drive(
        self, system: _System, url: str, workload: Workload, repeat: int
    ) -> list[RequestRecord]:
        carries = any(session.num_turns > 1 for session in workload.sessions)
        title = f"{system.spec.name} {repeat}"
        with tqdm(
            total=workload.num_requests,
            desc=title,
            leave=False,
            disable=self._quiet or None,
        ) as bar:

            def each(record: RequestRecord) -> None:
                bar.update()
                if carries and record.error is None and not record.output:
                    raise HarnessError(
                        f"{system.spec.name} tells no token ids, so the next turn of "
                        f"{record.key} cannot carry the answer; give the system a "
                        "tokenizer, or set extensions = true."
                    )

            # A new client per repeat: an idle connection may have been closed.
            client = make_client(system.spec, url, system.tokenizer)
            async with client:
                return await run_workload(client, workload, each)

    def _write(self, system: _System, gate: Gate) -> None:
        spec = self._spec
        public = spec.public()
        chosen = next(s for s in public["systems"] if s["name"] == system.spec.name)
        facts = {
            "spec": public,
            "system": chosen,
            "gate": gate.status(system.spec.name),
            "gate_kind": gate.kind,
            "server": system.server,
            "moved_bytes": system.moved_bytes,
        }
        header = make_header(system.spec.name, facts, spec.hash, spec.seed)
        path = records_path(self._out, system.spec.name)
        write_records(path, header, system.records)

    def _workload(self, number: int) -> Workload:
        spec = self._spec
        return self._make(
            spec.workload.name,
            spec.workload.params,
            spec.seed * _REPEAT_SEEDS + number,
            spec.model.vocab_tokens or VOCAB_TOKENS,
        )

    def _model(self) -> Path | None:
        spec = self._spec
        if not spec.started:
            return None
        if spec.model.path:
            return Path(spec.model.path).expanduser()
        self._say(f"  model {spec.model.preset} (random weights, made once)")
        return make_model(spec.model.preset, self._models)

    def _tokenizer(self, system: SystemSpec, model: Path | None) -> Tokenizer | None:
        if system.api == "generate":
            return None
        if system.tokenizer:
            return FolderTokenizer(Path(system.tokenizer).expanduser())
        own = model is not None and not system.external
        return FolderTokenizer(model) if own and model is not None else None
