"""Steps are told from a log that grows under the reader."""

from __future__ import annotations

from pathlib import Path

from sgl_tiered_workloads.steps import Step, StepLog

LINES = """\
[2026-01-01 00:00:00] The server is fired up
[2026-01-01 00:00:01] Prefill batch, #new-seq: 2, #new-token: 256, #cached-token: 16, \
token usage: 0.01, #running-req: 0, #queue-req: 3, #pending-token: 90, input 4.00
[2026-01-01 00:00:02] Decode batch, #running-req: 2, #token: 272, token usage: 0.02, \
gen throughput (token/s): 9.12, #queue-req: 3
"""


def test_both_kinds_are_read_without_what_depends_on_the_pool(tmp_path: Path) -> None:
    """Requests and tokens of the batch count; use of the pool and speed do not."""
    path = tmp_path / "log"
    path.write_text(LINES)
    prefill, decode = StepLog(path).take()
    assert prefill == Step(
        "Prefill",
        (
            ("new-seq", 2),
            ("new-token", 256),
            ("cached-token", 16),
            ("running-req", 0),
            ("queue-req", 3),
        ),
    )
    assert decode == Step("Decode", (("running-req", 2), ("queue-req", 3)))
    assert str(decode) == "Decode running-req 2, queue-req 3"


def test_each_step_is_told_once_and_whole(tmp_path: Path) -> None:
    """A line that is still written is left for the next call."""
    path = tmp_path / "log"
    half = len(LINES) - 40
    path.write_text(LINES[:half])
    log = StepLog(path)
    assert [step.kind for step in log.take()] == ["Prefill"]
    assert log.take() == ()
    path.write_text(LINES)
    assert [step.kind for step in log.take()] == ["Decode"]
    assert log.take() == ()
