"""Servers of the end-to-end tests: one at a time in each process of the tests.

It is reused as long as the flags agree. What plain SGLang answers is recorded once for
all processes of a run, and SGLang is imported once for all of them.

A test asks for a server by its spec. The one that runs is handed out again if its spec
is equal, else it is stopped first; so tests of one server stand together in a file.
Whatever happens, the last one is stopped at the end of the session.
``TIERED_TEST_PORTS=first-last`` confines the ports.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sgl_tiered_workloads import fork_server
from sgl_tiered_workloads.fork_server import fork_servers
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.server import ServerSpec, SglangServer, free_port
from sgl_tiered_workloads.systems import plain_spec

from tests.e2e.e2e_support import (
    FORBIDDEN_IN_LOGS,
    MODELS,
    PATIENCE_S,
    REFERENCE_POOL_TOKENS,
    START_TIMEOUT_S,
    Case,
    Reference,
    record_reference,
    wait_until,
)
from tests.shared_run import SharedForkServer, recorded_once, run_folder

__all__: list[str] = []


LONGEST_FIRST = (
    "test_gate_can_fail.py",
    "test_split.py",
    "test_disagg.py",
    "test_models.py",
    "test_sparse.py",
    "test_activations.py",
    "test_tensor_parallel.py",
    "test_activations_ranks.py",
    "test_slo.py",
    "test_router.py",
    "test_layerkv_waves.py",
    "test_layerkv.py",
    "test_layerkv_grammar.py",
    "test_command_line.py",
    "test_encoding.py",
    "test_faults.py",
    "test_tiers.py",
    "test_activations_tiers.py",
    "test_weights.py",
    "test_peer.py",
    "test_pool_faults.py",
    "test_matrix.py",
    "test_abort.py",
    "test_prefetch.py",
    "test_eviction.py",
    "test_schedule_policies.py",
    "test_orders.py",
)
"""The negative control, which comes before every test that trusts the gate, and then
files by the time that they take: a long one that comes last keeps one core busy while
the others have nothing to do. Files that are not here come afterwards."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests with servers in that order."""
    folders = {Path(__file__).parent, Path(__file__).parents[1] / "faults"}
    places = [i for i, item in enumerate(items) if folders & set(item.path.parents)]
    ours = [items[place] for place in places]
    rank = {name: number for number, name in enumerate(LONGEST_FIRST)}
    ours.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    for place, item in zip(places, ours, strict=True):
        items[place] = item


def _has_adopted(server: SglangServer) -> bool:
    """Say whether all ranks have adopted what lies on disk, if anything may."""
    adoptions = [each["adoption"] for each in server.get("/tiered/stats", PATIENCE_S)]
    return all(not each or each["state"] == "done" for each in adoptions)


class Servers:
    """Starts servers on demand, at most one at a time."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.num_starts = 0
        self._current: SglangServer | None = None

    def get(self, spec: ServerSpec) -> SglangServer:
        """Return a running server of this spec."""
        current = self._current
        if current is not None and current.spec == spec and current.exit_code() is None:
            return current
        self.stop()
        return self._start(spec)

    def restart(self, spec: ServerSpec) -> SglangServer:
        """Return a new server of this spec, started after the former one ended.

        It has taken over what the former one left on disk: that is done behind serving.
        """
        self.stop()
        server = self._start(spec)
        if "tiered" in spec.flags:
            wait_until(lambda: _has_adopted(server), "pages on disk are adopted")
        return server

    def stop(self) -> None:
        """Stop the server that runs; its log must be free of broken invariants."""
        current, self._current = self._current, None
        if current is None:
            return
        died = current.exit_code()
        # Asked, SGLang takes 5 s to end; nothing of a plain server is to outlive it.
        current.stop(20.0 if "tiered" in current.spec.flags else 0.0)
        log = current.log_path.read_text(errors="replace")
        assert died is None, f"the server died by itself: {current.log_tail()}"
        for text in FORBIDDEN_IN_LOGS:
            assert text not in log, f"{text} in {current.log_path}"

    def abandon(self) -> None:
        """Stop the server that runs, whatever its state."""
        current, self._current = self._current, None
        if current is not None:
            current.stop()

    def _start(self, spec: ServerSpec) -> SglangServer:
        ports = os.environ.get("TIERED_TEST_PORTS")
        candidates = None
        if ports is not None:
            first, last = map(int, ports.split("-"))
            # In any order: another process of the tests may look at the same time.
            candidates = random.sample(range(first, last + 1), last + 1 - first)
        self.num_starts += 1
        server = SglangServer(
            spec,
            self.log_dir / f"{self.num_starts:02d}",
            free_port(candidates),
            START_TIMEOUT_S,
        )
        server.start()
        self._current = server
        return server


_SERVERS: list[Servers] = []
"""The one of this session, once it is there."""


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The one place that starts servers.

    Other folders have this fixture as one of their own. Where tests of several folders
    run in one session, it is the same place for all of them.
    """
    if not _SERVERS:
        _SERVERS.append(Servers(tmp_path_factory.mktemp("logs")))
        shared = functools.partial(SharedForkServer, run_folder(tmp_path_factory))
        fork_server.ForkServer = shared
        fork_server.MODULES += ("tests.e2e.forked_start",)
        fork_servers()
    (servers,) = _SERVERS
    try:
        yield servers
        servers.stop()
    finally:
        servers.abandon()
        fork_servers(False)


@pytest.fixture(scope="session")
def may_fork(request: pytest.FixtureRequest) -> bool:
    """Whether servers of which some are started by the command line may be forked.

    Such a start takes each process a minute of a core, so it is left to ``--full``.
    """
    return not request.config.getoption("--full")


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of the tiny Llama."""
    return make_model("tiny", MODELS)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run that all its processes see."""
    return run_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def reference(
    servers: Servers, model: Path, shared_folder: Path
) -> Callable[[Case], Reference]:
    """Return a function that gives a case's reference, recorded once per run.

    The overlap schedule changes when things happen and not what is computed, so cases
    that differ in it alone share a reference.
    """
    made: dict[str, Reference] = {}

    def get(case: Case) -> Reference:
        shared = Case(case.page_size, case.chunk_tokens, overlap=False)

        def record() -> Reference:
            device = shared.device(model, REFERENCE_POOL_TOKENS)
            server = servers.get(plain_spec(device, f"plain-{shared.name}"))
            answers = record_reference(server)
            servers.stop()
            return answers

        if shared.name not in made:
            file = shared_folder / f"reference-{shared.name}.pickle"
            made[shared.name] = recorded_once(file, record)
        return made[shared.name]

    return get
