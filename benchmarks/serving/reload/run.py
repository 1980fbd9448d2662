"""The serving part of ``make bench-sparsity``: from options to figures and files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reload.measure import Options, Reloads
from reload.picture import draw
from reload.results import TARGETS, summary, table
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.server import exit_on_signals

__all__ = ["PRESET", "measure_reloads", "model_of"]

PRESET = "wide"
"""135 M parameters in four layers. A reload is worth while where it takes less than
computing, and decides TTFT where it takes much longer than what a request costs
besides, some tens of milliseconds here. So computing has to be long: the demo model
computes such a prefix in about the time that a request takes anyhow."""


def model_of(folder: Path | None, models: Path) -> Path:
    """Return the folder given, or that of the preset, which is made if need be."""
    return make_model(PRESET, models.resolve()) if folder is None else folder


def measure_reloads(
    options: Options, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure, write table, picture and result to the folder, and return the result.

    A server that does not start, and a request that fails, are problems in the result.
    """
    exit_on_signals()
    try:
        reloads = Reloads(options, say)
        findings = asyncio.run(reloads.run())
    except RuntimeError as error:
        say(str(error))
        reason = str(error).partition("\n")[0]
        return {"missed": list(TARGETS), "problems": [f"serving: {reason}"]}
    result = summary(findings, options.scale.min_hits)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.md").write_text(table(result) + "\n")
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(options.out / "ttft.png", result)
    say(table(result))
    return result
