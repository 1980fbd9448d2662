"""The markers of ``tests/conftest.py`` do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[2] / "conftest.py"

MARKED = """
import pytest

@pytest.mark.full
def test_full(): pass

@pytest.mark.faults_long
def test_every_fault(): pass

@pytest.mark.gpu
def test_gpu(): raise AssertionError("runs only with an accelerator")

def test_plain(): pass
"""

NO_ACCELERATOR = """
import sys, types
torch = types.ModuleType("torch")
torch.accelerator = types.SimpleNamespace(is_available=lambda: False)
torch.__spec__ = types.SimpleNamespace()
sys.modules["torch"] = torch
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """A small suite with our conftest, on a machine without an accelerator."""
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(no_accelerator=NO_ACCELERATOR)
    pytester.makeini(
        "[pytest]\nmarkers =\n    full\n    faults_long\n    gpu\n    sglang\n"
    )
    pytester.makepyfile(MARKED)
    return pytester


def test_long_ones_are_left_out_unless_asked_for(suite: pytest.Pytester) -> None:
    """Without their option long tests are deselected; with it, they run."""
    suite.runpytest_subprocess("-p", "no_accelerator").assert_outcomes(
        passed=1, skipped=1, deselected=2
    )
    for option in ("--full", "--faults-long"):
        suite.runpytest_subprocess("-p", "no_accelerator", option).assert_outcomes(
            passed=2, skipped=1, deselected=1
        )


def test_gpu_is_reported_as_not_run(suite: pytest.Pytester) -> None:
    """Without an accelerator the reason stands in the report."""
    result = suite.runpytest_subprocess("-p", "no_accelerator", "-rs")
    result.stdout.fnmatch_lines(["*not run: no accelerator*"])
