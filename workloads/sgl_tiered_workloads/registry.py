"""Workloads by name: a name, parameters and a seed give one schedule.

The harness reads name and parameters from a spec's TOML. Equal arguments give equal
prompts and arrivals.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sgl_tiered_workloads.generators.base import Encode, Scene
from sgl_tiered_workloads.generators.chat import chat, system_chat
from sgl_tiered_workloads.generators.conversations import mt_bench, tau_bench
from sgl_tiered_workloads.generators.fixed_lengths import fixed_lengths
from sgl_tiered_workloads.generators.length_sweep import length_sweep
from sgl_tiered_workloads.generators.long_document import long_document
from sgl_tiered_workloads.generators.longalign import longalign
from sgl_tiered_workloads.generators.problems import problems
from sgl_tiered_workloads.generators.react import react
from sgl_tiered_workloads.generators.replay import trace
from sgl_tiered_workloads.generators.servegen import servegen
from sgl_tiered_workloads.generators.sharegpt import sharegpt
from sgl_tiered_workloads.generators.text_analysis import text_analysis
from sgl_tiered_workloads.params import Params, WorkloadError
from sgl_tiered_workloads.text_tokens import WordEncoder
from sgl_tiered_workloads.workload import Workload

__all__ = ["WORKLOADS", "make_workload"]

WORKLOADS: Mapping[str, Callable[[Params, Scene], Workload]] = {
    "chat": chat,
    "fixed_lengths": fixed_lengths,
    "length_sweep": length_sweep,
    "long_document": long_document,
    "longalign": longalign,
    "mt_bench": mt_bench,
    "problems": problems,
    "react": react,
    "servegen": servegen,
    "sharegpt": sharegpt,
    "system_chat": system_chat,
    "tau_bench": tau_bench,
    "text_analysis": text_analysis,
    "trace": trace,
}
"""Name to generator; each generator's docstring names its parameters."""


def make_workload(
    name: str,
    params: Mapping[str, Any],
    seed: int,
    vocab_tokens: int,
    encode: Encode | None = None,
) -> Workload:
    """Return the schedule that a name, parameters and a seed describe.

    Args:
        name: one of ``WORKLOADS``.
        params: from a spec; every workload takes a table ``arrivals``.
        seed: of everything drawn.
        vocab_tokens: size of the model's vocabulary; prompts stay below it.
        encode: text to token ids, for workloads of texts; without it texts are cut
            into pieces that are named by their hash (``WordEncoder``).

    Raises:
        WorkloadError: the name or a parameter is unknown or wrong.
        TraceError: a data file that a parameter names cannot be used.
    """
    make = WORKLOADS.get(name)
    if make is None:
        near = difflib.get_close_matches(name, WORKLOADS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise WorkloadError(
            f"there is no workload {name!r}; {hint}known are "
            f"{', '.join(sorted(WORKLOADS))}."
        )
    table = Params(name, params)
    scene = Scene(
        seed=seed,
        vocab_tokens=vocab_tokens,
        generator=np.random.default_rng(seed),
        encode=encode if encode is not None else WordEncoder(vocab_tokens),
    )
    workload = make(table, scene)
    table.finish()
    return workload
