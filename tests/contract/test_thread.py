"""Tiers as the factory builds them: the scheduler's thread asks no disk."""

import pytest

from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang


def test_the_scheduler_s_thread_asks_nothing_of_the_disk(tmp_path):
    """Pages are written, read, evicted, dropped and reset, and metrics published."""
    told = output_of("thread_program.py", tmp_path / "disk")
    assert min(told["stored"], told["loaded"], told["evicted"]) > 0
    assert told["seen"] == []
