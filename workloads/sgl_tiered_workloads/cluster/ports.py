"""Ports for processes that are told theirs before they start."""

from __future__ import annotations

from sgl_tiered_workloads.server import free_port, shuffled_ports

__all__ = ["Ports"]


class Ports:
    """Free ports, none given twice (``shuffled_ports``).

    Args:
        seed: of the order; None for another one each time.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._untried = shuffled_ports(seed)

    def take(self) -> int:
        """Return a port that nobody listens on now.

        Raises:
            OSError: none is left.
        """
        return free_port(self._untried)
