"""Which implementation of the encodings this process runs."""

from __future__ import annotations

import functools
from typing import Any

from sgl_tiered_kernels.compiled import load_compiled
from sgl_tiered_kernels.kv_codec import reference

__all__ = ["backend_name", "load_backend"]


def backend_name() -> str:
    """Return ``numba`` where its form runs, else ``reference``."""
    return "reference" if load_backend() is reference else "numba"


@functools.cache
def load_backend() -> Any:
    """Return the module that holds the encodings; only then is numba imported."""
    return load_compiled("sgl_tiered_kernels.kv_codec.cpu") or reference
