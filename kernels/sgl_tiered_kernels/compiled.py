"""Modules that numba compiles, where numba can be imported.

It may be installed and refuse: it raises ImportError under a numpy that it does not
know, and other errors where a part of it was built for another version. Only an import
tells, so what is asked for is imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import Any

__all__ = ["load_compiled"]

logger = logging.getLogger(__name__)


@functools.cache
def load_compiled(name: str) -> Any:
    """Import a module that imports numba; None where numba is not, or not usable.

    Why it is not usable is logged, each reason once in a process.

    Args:
        name: of the module, in full.
    """
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        return importlib.import_module(name)
    except Exception as problem:  # noqa: BLE001 - whatever a broken install raises
        _log(f"{type(problem).__name__}: {problem}")
        return None


@functools.cache
def _log(reason: str) -> None:
    logger.warning(
        "sgl-tiered: numba is installed and cannot be used (%s); copies and encodings "
        "on this CPU run in numpy, slower. Install a numba that fits this numpy.",
        reason,
    )
