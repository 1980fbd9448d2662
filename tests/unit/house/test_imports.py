"""Rooms that decide can be imported without an engine, a GPU library or a compiler.

import-linter reads import statements only; it sees neither ``importlib`` nor what a
parent package's ``__init__`` brings in. So this runs the imports.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

ROOMS = (
    "sgl_tiered.cache",
    "sgl_tiered.cli",
    "sgl_tiered.core",
    "sgl_tiered.cost",
    "sgl_tiered.errors",
    "sgl_tiered.layered",
    "sgl_tiered.metrics",
    "sgl_tiered.pipelines",
    "sgl_tiered.policies",
    "sgl_tiered.pool",
    "sgl_tiered.router",
    "sgl_tiered.serving",
    "sgl_tiered.sim",
    "sgl_tiered.testing",
    "sgl_tiered.tiers",
    "sgl_tiered.transport",
)
BLOCKED = ("numba", "sglang", "torch", "triton")
PROGRAM = """
import importlib, pkgutil, sys

room, *blocked = sys.argv[1:]

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{room} must not import {name}")

sys.meta_path.insert(0, Refusal())
module = importlib.import_module(room)
names = [room]
for found in pkgutil.walk_packages(getattr(module, "__path__", []), room + "."):
    importlib.import_module(found.name)
    names.append(found.name)
print(len(names))
"""


def run(room: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, room, *BLOCKED]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_that_decides_imports_none_of_them(room: str) -> None:
    """Every module of the room is imported with them blocked."""
    done = run(room)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1


def test_the_block_works() -> None:
    """The engine's room, which does import torch, is caught."""
    done = run("sgl_tiered.engines")
    assert done.returncode != 0
    assert "must not import" in done.stderr
