"""The comparison on one GPU: its modules, small settings, and played systems."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.benchmarks.llama.llama_support import (
    PAGE,
    POOL,
    PlayedServer,
    folder_of_model,
    small_sizes,
)
from tests.unit.benchmarks.played import PlayedClient, at_rest

FOLDER = Path(__file__).parents[4] / "benchmarks/gpu"
_OURS = ("comparison", "llama", "movement")


@pytest.fixture(scope="module")
def load():
    """Import a module of the program, with its folder on the path as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setattr(sys, "path", list(sys.path))
        yield import_module
    for name in list(sys.modules):
        if name.partition(".")[0] in _OURS:
            del sys.modules[name]


@pytest.fixture(scope="module")
def parts(load):
    """All modules, as attributes."""
    names = (
        "settings checks systems plan store loads measure judging results page chart "
        "memory run"
    )
    return SimpleNamespace(
        **{name: load(f"comparison.{name}") for name in names.split()}
    )


@pytest.fixture
def measured(parts, tmp_path, monkeypatch):
    """Return a function that measures a cell of a system on a played server."""
    monkeypatch.setattr(parts.measure, "StreamingClient", PlayedClient)
    monkeypatch.setattr(
        import_module("sgl_tiered_workloads.harness.control"),
        "StreamingClient",
        PlayedClient,
    )
    monkeypatch.setattr(parts.measure, "settle", at_rest)
    monkeypatch.setattr(parts.measure, "make_cold", lambda store: 0.0)
    monkeypatch.setattr(parts.measure, "_LOOK_S", 0.0)
    model = parts.settings.Model.of(folder_of_model(tmp_path / "model"))

    def measure(name: str, part: str, case: int = 0, start: int = 0, **changes):
        server = PlayedServer(name)
        cells = parts.measure.Measure(
            parts.systems.SYSTEMS[name],
            server,
            model,
            dataclasses.replace(small_sizes(parts), **changes),
            PAGE,
            POOL,
            tmp_path / "records",
            tmp_path / "store",
            lambda text: None,
        )
        return asyncio.run(cells.run(parts.plan.Cell(name, part, start, case)))

    return measure
