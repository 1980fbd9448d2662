"""Which implementation of the page copies this process runs."""

from __future__ import annotations

import functools
from typing import Any

from sgl_tiered_kernels.compiled import load_compiled
from sgl_tiered_kernels.page_copy import reference

__all__ = ["backend_name", "load_backend", "load_team"]

_PACKAGE = "sgl_tiered_kernels.page_copy"


def backend_name() -> str:
    """Return ``numba`` where its form runs, else ``reference``."""
    return "reference" if load_backend() is reference else "numba"


@functools.cache
def load_backend() -> Any:
    """Return the module that holds the copies; only then is numba imported."""
    return load_compiled(f"{_PACKAGE}.cpu") or reference


@functools.cache
def load_team() -> Any:
    """Return the module of copies by several threads; None where there is but one."""
    team = None if load_backend() is reference else load_compiled(f"{_PACKAGE}.team")
    return team if team is not None and team.team_size() > 1 else None
