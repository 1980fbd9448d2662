"""Starts SGLang's server on a processor whose loads to the device may fail late.

``late_server.py ARGUMENTS OF sglang.launch_server``

A processor copies where a layer is needed, so what fails is known when the batch has
run. Here some loads, the share ``LATE_FAILURES`` of them, do what only a device does:
they count as queued when they have run, bring pages without their content, and are
known to have failed when the results of their batch are taken, and no sooner. The
scheduler's process imports this file again, as every process does that Python spawns.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
import threading
from typing import Any

import numpy as np

__all__ = ["LATE_ENV", "LATE_SERVER"]

LATE_ENV = "LATE_FAILURES"
LATE_SERVER = (sys.executable, __file__)
"""``ServerSpec.program``."""
ERROR = "the device failed behind accepted work"
PATIENCE_S = 5.0


def _fail_late(share: float) -> None:
    """Let a share of the loads of this process fail late."""
    from sgl_tiered.pipelines import layerwise_load

    kind: Any = layerwise_load.LoadTicket
    rng = random.Random(1)
    make, copy, land, wait, is_queued = (
        kind.__init__,
        kind._copy_layers,
        kind._land,
        kind.wait,
        kind.is_queued,
    )

    def made(ticket: Any, *args: Any, **kwargs: Any) -> None:
        make(ticket, *args, **kwargs)
        ticket.is_late = rng.random() < share
        ticket.outcome_asked = threading.Event()

    def copy_layers(ticket: Any, first: int, stop: int, by_waiter: bool) -> None:
        copy(ticket, first, stop, by_waiter)
        for part in ticket._copies if ticket.is_late else ():
            nothing = np.zeros_like(part.region[: len(part.rows)])
            rows = np.arange(len(part.rows), dtype=np.int64)
            for layer in range(first, stop):
                ticket._pool.load_layer(
                    layer, nothing, rows, part.device_pages, by_waiter=by_waiter
                )

    def waited(ticket: Any, *args: Any, **kwargs: Any) -> bool:
        ticket.outcome_asked.set()
        return bool(wait(ticket, *args, **kwargs))

    def landed(ticket: Any) -> str:
        if ticket.is_late:
            # For good only where a request goes before its batch is launched.
            ticket.outcome_asked.wait(PATIENCE_S)
        return land(ticket) or (ERROR if ticket.is_late else "")

    kind.__init__, kind._copy_layers = made, copy_layers
    kind._land, kind.wait = landed, waited
    kind.is_queued = property(
        lambda ticket: ticket.is_late or is_queued.__get__(ticket)
    )


# In the servers' processes, not in the tests that name this file.
if __name__ in ("__main__", "__mp_main__"):
    _fail_late(float(os.environ[LATE_ENV]))

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
