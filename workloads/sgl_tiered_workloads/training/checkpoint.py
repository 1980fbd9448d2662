"""What a training leaves behind to go on from, written whole or not at all."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

__all__ = ["Checkpoint"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State behind ``step`` finished steps.

    No generator's state is in it: each step draws from its own seed, made of the
    recipe's seed and the step's number. ``rows`` are the loss curve so far, ``pending``
    the sums of the row that is being gathered. ``elapsed_s``: seconds of training so
    far, all runs.
    """

    recipe: dict[str, Any]
    corpus_digest: str
    step: int
    elapsed_s: float
    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    rows: list[list[float]]
    pending: list[float]

    def save(self, path: Path) -> None:
        """Write to ``path`` over what was there; a crash leaves the old or the new."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with partial.open("wb") as file:
            content = {field.name: getattr(self, field.name) for field in fields(self)}
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    @staticmethod
    def load(path: Path) -> Checkpoint:
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: there is none.
        """
        return Checkpoint(**torch.load(path, weights_only=True))
