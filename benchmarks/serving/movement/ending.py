"""How a benchmark of servers ends: a file, one JSON line, an exit status."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.server import ServerStartError, exit_on_signals


def run_to_end(run: Coroutine[Any, Any, dict[str, Any]], out: Path) -> int:
    """Run a benchmark, and write its figures to ``out/result.json`` and as last line.

    Returns:
        1 if the figures name ``problems`` or ``targets_missed``, or a server did not
        start, else 0.
    """
    exit_on_signals()
    try:
        result = asyncio.run(run)
    except ServerStartError as error:
        print(error, file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result))
    return 1 if result.get("problems") or result.get("targets_missed") else 0
