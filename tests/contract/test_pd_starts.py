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
        "is_start_known": True,
        "is_known_again": True,
        "refused": "",
    }


@pytest.mark.parametrize("story", ["stays", "restarts untold"])
def test_others_are_kept(told: dict[str, Any], story: str) -> None:
    """The same start, and SGLang's own server, which does not say."""
    assert {name: told[story][name] for name in KEPT} == KEPT


def test_one_that_could_not_be_heard_is_not_asked(told: dict[str, Any]) -> None:
    """SGLang's own proves nothing that it says; the request fails with a sentence."""
    assert told["stays"]["refused"] == ""
    assert "instance at it proves nothing" in told["restarts untold"]["refused"]


def test_one_that_did_not_say_when_it_was_met_is_asked_again(
    told: dict[str, Any],
) -> None:
    """At its heartbeat; one that cannot be heard fails then, and is not asked again."""
    assert {name: told["unheard at first"][name] for name in KEPT} == KEPT
    assert told["unheard at first"]["is_start_known"]
    mute = told["mute, and unheard at first"]
    assert mute["has_failed"]
    assert "instance at it proves nothing" in mute["refused"]


def test_sglang_allocates_late_with_its_own_transfers_only(
    told: dict[str, Any],
) -> None:
    """So no ``BOOTSTRAP`` comes to ours, which would read it as a room's number."""
    assert told["late"]["mooncake"] == ""
    assert "transfer backends other than Mooncake" in told["late"]["tiered"]
