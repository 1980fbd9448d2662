"""Which implementation of the page copies this process runs."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

__all__ = ["backend_name", "load_backend", "load_team"]


@functools.cache
def backend_name() -> str:
    """Return ``numba`` where numba is installed, else ``reference``."""
    return "numba" if importlib.util.find_spec("numba") else "reference"


@functools.cache
def load_backend() -> Any:
    """Import the module that holds the copies; only then is numba imported."""
    name = "cpu" if backend_name() == "numba" else "reference"
    return importlib.import_module(f"sgl_tiered_kernels.page_copy.{name}")


@functools.cache
def load_team() -> Any:
    """Return the module of copies by several threads; None where there is but one."""
    if backend_name() != "numba":
        return None
    team = importlib.import_module("sgl_tiered_kernels.page_copy.team")
    return team if team.team_size() > 1 else None
