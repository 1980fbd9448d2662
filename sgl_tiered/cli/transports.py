"""Which transports between instances can be used here, found by importing them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgl_tiered.errors import TransportUnavailableError
from sgl_tiered.transport.mooncake import import_mooncake
from sgl_tiered.transport.nixl import import_nixl

__all__ = ["TransportFacts", "transport_facts"]


@dataclass(frozen=True, slots=True)
class TransportFacts:
    """Whether a transport can be used.

    Attributes:
        name: mooncake or nixl.
        usable: it can be imported.
        detail: the package and its version, or why not and what to install.
    """

    name: str
    usable: bool
    detail: str


_TRANSPORTS: dict[str, Callable[[], Any]] = {
    "mooncake": import_mooncake,
    "nixl": import_nixl,
}


def transport_facts(
    transports: dict[str, Callable[[], Any]] | None = None,
) -> tuple[TransportFacts, ...]:
    """Import each; takes a second, most of it for NIXL's torch.

    Args:
        transports: name -> what imports it; for tests. None takes ours.
    """
    found = []
    for name, load in (transports or _TRANSPORTS).items():
        try:
            module = load()
        except TransportUnavailableError as error:
            found.append(TransportFacts(name, False, str(error)))
        else:
            found.append(TransportFacts(name, True, _package(module.__name__)))
    return tuple(found)


def _package(module: str) -> str:
    """Return the distributions that a module comes from, with versions."""
    top = module.partition(".")[0]
    names = importlib.metadata.packages_distributions().get(top, [])
    packages = [f"{name} {importlib.metadata.version(name)}" for name in set(names)]
    return ", ".join(sorted(packages)) or top
