"""Imported by the process that forks the tests' servers, after all else that it has.

It imports what every server would import after the fork (0.3 s of CPU time in each),
lets the measurements of a start, up to six, take a quarter of their time, and lets a
server that is asked to end notice it at once. A server by the command line has nothing
of it.
"""

import importlib
import sys
from types import FunctionType

from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sgl_tiered.engines.device import probe

__all__: list[str] = []

MODULES = (
    "numba.experimental",
    "numba.typed",
    "sglang.srt.arg_groups.pipeline",
    "sglang.srt.constrained.xgrammar_backend",
    "sglang.srt.distributed.device_communicators.custom_all_reduce",
    "sglang.srt.distributed.device_communicators.pymscclpp",
    "sglang.srt.mem_cache.rust_tree_core",
    "sgl_tiered_kernels.attention_mass.cpu",
    "sgl_tiered_kernels.paged_attention.cpu",
)
"""None of them imports ``prometheus_client``, which looks at its import for the folder
that SGLang makes for a server's metrics."""

LOOK_S, LOOK_OFTEN_S = 5, 0.2
"""SGLang looks every 5 s whether it was asked to end."""


def look_often(watchdog: FunctionType) -> None:
    """Let it look more often: the number stands in its code."""
    code = watchdog.__code__
    assert LOOK_S in code.co_consts, "SGLang waits in another way"
    found = (LOOK_OFTEN_S if each == LOOK_S else each for each in code.co_consts)
    watchdog.__code__ = code.replace(co_consts=tuple(found))


for name in MODULES:
    importlib.import_module(name)
assert "prometheus_client" not in sys.modules, "metrics of servers would go nowhere"
probe._BUDGET_S = 0.05
look_often(TokenizerManager.sigterm_watchdog)
