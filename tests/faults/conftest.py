"""Servers of the fault tests: those of the end-to-end tests, one at a time."""

from tests.e2e.conftest import model, reference, servers, shared_folder

__all__ = ["model", "reference", "servers", "shared_folder"]
