"""Progress of what takes long: lines on stderr, and none for what is short."""

from __future__ import annotations

import threading

import pytest

from sgl_tiered.cli.progress import progress


def test_what_is_short_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line comes after the first period."""
    with progress("working", period_s=60.0):
        pass
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def test_what_is_long_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, so that a pipe gets results only; and it ends with the block."""
    asked = threading.Event()

    def state() -> str:
        asked.set()
        return "3 of 7"

    with progress("working", state, period_s=0.01):
        assert asked.wait(60.0)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("working: ")
    assert ", 3 of 7\n" in said.err
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_the_thread_ends_when_the_block_fails() -> None:
    """The error goes on."""
    with pytest.raises(ValueError, match="no"), progress("working", period_s=60.0):
        raise ValueError("no")
    assert not any(thread.name == "progress" for thread in threading.enumerate())
