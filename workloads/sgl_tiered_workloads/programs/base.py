"""What every program is given and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgl_tiered.core.clock import Clock
from sgl_tiered_workloads.programs.frontend import (
    FrontendError,
    Meter,
    connect,
    load_frontend,
)
from sgl_tiered_workloads.usage import Usage

__all__ = ["Program", "ProgramReport", "run_program"]

Program = Callable[[Any, Any, np.random.Generator, Mapping[str, int]], list[str]]
"""(sglang, endpoint, generator, sizes) -> what the model answered, in order."""


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """What one run of a program took.

    Attributes:
        program: its name.
        requests: answers of the server, those that fork and select asked for included.
        usage: tokens, and the share of the prompts that came from cache.
        seconds: from the first request to the last answer.
        answers: what the model answered, in the program's order.
    """

    program: str
    requests: int
    usage: Usage
    seconds: float
    answers: tuple[str, ...] = field(repr=False)

    def describe(self) -> str:
        """Return one line for people."""
        return (
            f"{self.program}: {self.requests} requests in {self.seconds:.2f} s; "
            f"{self.usage.describe()}"
        )


def run_program(
    name: str,
    program: Program,
    url: str,
    generator: np.random.Generator,
    sizes: Mapping[str, int],
    clock: Clock,
) -> ProgramReport:
    """Run a program against the server at ``url``.

    Raises:
        FrontendError: SGLang is absent, or the server does not answer.
    """
    meter = Meter()
    sgl = load_frontend()
    endpoint = connect(url, meter)
    begin_s = clock.now()
    answers = program(sgl, endpoint, generator, sizes)
    if meter.failure is not None:
        raise FrontendError(
            f"{name} broke off at the server: {meter.failure}"
        ) from meter.failure
    seconds = clock.now() - begin_s
    return ProgramReport(
        name, meter.num_requests, meter.total(), seconds, tuple(answers)
    )
