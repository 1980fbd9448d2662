"""What the doctor says of the transports between instances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

from sgl_tiered.cli.advice import Facts
from sgl_tiered.cli.doctor import render
from sgl_tiered.cli.transports import TransportFacts, transport_facts
from sgl_tiered.errors import TransportUnavailableError


def missing() -> ModuleType:
    raise TransportUnavailableError("it is not here: pip install it")


def test_what_can_be_imported_is_named_with_its_version() -> None:
    """The package that a module comes from, and one of no package by its own name."""
    import numpy as np

    found = transport_facts(
        {"numpy": lambda: np.linalg, "own": lambda: ModuleType("x")}
    )
    assert found[0] == TransportFacts("numpy", True, f"numpy {np.__version__}")
    assert found[1] == TransportFacts("own", True, "x")


def test_what_is_missing_says_what_to_install() -> None:
    """A missing transport is a fact and no error."""
    (found,) = transport_facts({"one": missing})
    assert found == TransportFacts("one", False, "it is not here: pip install it")


def test_ours_are_asked_for() -> None:
    """Both are told, whether they are here or not."""
    found = transport_facts()
    assert [fact.name for fact in found] == ["mooncake", "nixl"]
    assert all(fact.detail for fact in found)


def test_the_report_has_a_line_each(good: Facts) -> None:
    """Usable or not, with the detail."""
    facts = replace(good, transports=(TransportFacts("mooncake", False, "absent"),))
    lines: Iterator[str] = render(facts, [])
    assert "mooncake          no: absent" in list(lines)
