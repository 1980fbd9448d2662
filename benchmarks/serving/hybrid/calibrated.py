"""A calibration file with what a server has measured of itself under load.

``auto`` samples T_kv_gen when a server starts, with nothing else on the machine. A
thread that rebuilds beside a forward is slower, and the share that balances follows
from it, so the hybrid's server is given the served figure, as a user gives one that
``sgl-tiered calibrate`` has written.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from hybrid.arms import MODEL, PAGE, TOKEN_BYTES

from sgl_tiered.cost.calibration import (
    Calibration,
    FitQuality,
    MachineFacts,
    ModelFacts,
    RebuildFit,
    TokensFit,
    write_calibration,
)

__all__ = ["write_served"]

_BY_DEFINITION = FitQuality(1, 1.0, 0.0, 0.0)
"""Of an emulated link."""


def write_served(path: Path, kv_gen: TokensFit, bytes_per_s: float) -> None:
    """Write both regressions; what is not known is not compared by the server.

    Args:
        path: of the file.
        kv_gen: as a server rebuilds.
        bytes_per_s: of the emulated link.
    """
    model = ModelFacts(
        name="",
        architecture="",
        dtype="",
        kv_dtype="",
        attention_backend="",
        num_layers=MODEL.num_layers,
        attention_width=MODEL.hidden,
        num_params=None,
        kv_bytes_per_token=MODEL.num_layers * TOKEN_BYTES,
        page_tokens=PAGE,
        chunk_tokens=None,
    )
    load_kv = TokensFit(0.0, TOKEN_BYTES / bytes_per_s, _BY_DEFINITION)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_calibration(
        path,
        Calibration(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            method="server",
            engine="",
            model=model,
            machine=MachineFacts("none", os.cpu_count() or 1, 0, ""),
            prefill=None,
            decode=None,
            request_overhead_s=None,
            links=(),
            rebuild=RebuildFit(kv_gen, load_kv),
        ),
    )
