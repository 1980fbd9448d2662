"""A prefill instance that is back before it was missed is met anew."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang

KEPT = {
    "is_known": True,
    "connections": 1,
    "has_failed": False,
    "is_known_again": True,
}


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What came of all stories."""
    return output_of("pd_starts_program.py")


def test_an_instance_that_starts_anew_is_taken_for_lost(told: dict[str, Any]) -> None:
    """Who waits for it fails at once, and the next request asks where it is now."""
    assert told["restarts"] == {
        "is_known": False,
        "connections": 0,
        "has_failed": True,
        "is_known_again": True,
    }


@pytest.mark.parametrize("story", ["stays", "restarts untold"])
def test_others_are_kept(told: dict[str, Any], story: str) -> None:
    """The same start, and SGLang's own server, which does not say."""
    assert told[story] == KEPT
