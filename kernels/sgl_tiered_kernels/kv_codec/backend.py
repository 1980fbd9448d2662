"""Which implementation of the encodings this process runs."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

__all__ = ["backend_name", "load_backend"]


@functools.cache
def backend_name() -> str:
    """Return ``numba`` where numba is installed, else ``reference``."""
    return "numba" if importlib.util.find_spec("numba") else "reference"


@functools.cache
def load_backend() -> Any:
    """Import the module that holds the encodings; only then is numba imported."""
    name = "cpu" if backend_name() == "numba" else "reference"
    return importlib.import_module(f"sgl_tiered_kernels.kv_codec.{name}")
