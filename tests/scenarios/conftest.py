"""Servers of the scenarios: those of the end-to-end tests, one at a time."""

from tests.e2e.conftest import model, servers

__all__ = ["model", "servers"]
