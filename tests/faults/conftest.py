"""Servers of the fault tests: those of the end-to-end tests, one at a time."""

from tests.e2e.conftest import model, reference, servers

__all__ = ["model", "reference", "servers"]
