"""Which batches a server has computed, told from its log.

SGLang logs each prefill, and with ``--decode-log-interval 1`` each decode step, with
the number of requests and tokens in it. Two servers that were sent the same requests in
the same order, and log the same numbers, have computed the same batches: their
scheduler is first come first served, so the numbers say who was in each of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["STEP_FLAGS", "Step", "StepLog"]

STEP_FLAGS = ("--decode-log-interval", "1")
"""That a server needs for its steps to be told."""
_LINE = re.compile(r"\b(Prefill|Decode) batch,(.*)")
_NUMBER = re.compile(r"#(new-seq|new-token|cached-token|running-req|queue-req): (\d+)")


@dataclass(frozen=True, slots=True)
class Step:
    """One forward.

    Attributes:
        kind: ``Prefill`` or ``Decode``.
        counts: as logged, by name: ``new-seq``, ``new-token``, ``cached-token``,
            ``running-req``, ``queue-req``.
    """

    kind: str
    counts: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        """Return it in a few words."""
        return f"{self.kind} {', '.join(f'{n} {c}' for n, c in self.counts)}"


class StepLog:
    """Reads a server's log as it grows.

    Args:
        path: of the log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0

    def take(self) -> tuple[Step, ...]:
        """Return the steps logged since the last call; a line under way is left."""
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        steps = []
        for line in whole.decode(errors="replace").splitlines():
            found = _LINE.search(line)
            if found is not None:
                numbers = _NUMBER.findall(found[2])
                counts = tuple((name, int(count)) for name, count in numbers)
                steps.append(Step(found[1], counts))
        return tuple(steps)
