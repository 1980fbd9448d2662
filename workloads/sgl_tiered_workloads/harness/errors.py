"""What the harness refuses, each in one sentence that says what to do."""

from __future__ import annotations

__all__ = ["GateRedError", "HarnessError", "RecordsError", "SpecError"]


class HarnessError(ValueError):
    """Root of what the harness refuses."""


class SpecError(HarnessError):
    """A specification is wrong.

    Attributes:
        key: the entry, as the user writes it (``systems.plain.api``).
    """

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        super().__init__(f"{key}: {problem}; {remedy}.")
        self.key = key


class RecordsError(HarnessError):
    """Records cannot give the figure that was asked for."""


class GateRedError(HarnessError):
    """The answers were not equal, or nobody looked, so no speed is reported."""
