"""Whose turn it is, and when the one before has come to rest."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from sgl_tiered_workloads.harness import turns
from sgl_tiered_workloads.server import ServerSpec


class Writing:
    """A tiered server that moves bytes until so many looks at it were taken."""

    def __init__(self, num_looks: int) -> None:
        self.spec = ServerSpec("writes", Path("m"), ("tiered",))
        self._looks = itertools.count()
        self._last = num_looks

    def get(self, path: str) -> list[dict[str, Any]]:
        """Return what was moved so far."""
        return [{"edges": {"a->b": {"bytes": min(next(self._looks), self._last)}}}]


@pytest.mark.parametrize(("num_looks", "is_in_time"), [(8, True), (30, False)])
def test_a_server_is_waited_for_as_long_as_is_asked(
    monkeypatch: pytest.MonkeyPatch, num_looks: int, is_in_time: bool
) -> None:
    """Much to be written takes longer than the usual patience; it is told which."""
    monkeypatch.setattr(turns, "_QUIET_S", 0.001)
    server: Any = Writing(num_looks)
    waiting = turns.settle(server, None, 0.02)
    if is_in_time:
        asyncio.run(waiting)
        return
    with pytest.raises(RuntimeError, match="writes still writes after"):
        asyncio.run(waiting)
