"""What others say to SGLang's own threads of our backend ends none of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What came of all modes."""
    return output_of("hostile_pd_program.py", "prefill", "decode", "worker", "receiver")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_message_that_cannot_be_read_is_dropped(
    told: dict[str, Any], side: str
) -> None:
    """It is counted; the next one is heard, and no byte lies where none was lent."""
    assert isinstance(told[side], dict), told[side]
    assert told[side]["message"] > 20
    assert set(told[side]) == {"message"}


def test_a_transfer_that_cannot_be_made_fails(told: dict[str, Any]) -> None:
    """And the thread makes the next one."""
    assert told["worker"] == {"failed": 2}


def test_a_prefill_instance_that_is_nowhere_is_silent(told: dict[str, Any]) -> None:
    """The scheduler's thread goes on, and the memory is held as for a silent one."""
    assert told["receiver"] == {}


def test_without_a_look_at_messages_it_is_noticed() -> None:
    """Of either side."""
    told = output_of("hostile_pd_program.py", "unguarded", "prefill", "decode")
    for side in ("prefill", "decode"):
        assert isinstance(told[side], str), told[side]
