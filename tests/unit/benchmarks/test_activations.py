"""HybridServe's figures: every table is there, and a loss to either side fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest


@pytest.fixture
def activations(
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """The script as a module, with two prompt lengths."""
    module = load_script("sim/activations.py")
    monkeypatch.setattr(module, "PROMPTS", (512, 1_920))
    monkeypatch.setattr(sys, "argv", ["activations.py"])
    return module


def test_all_tables_and_one_object(
    activations: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 0; the last line is strict JSON with the paper's values in it."""
    assert activations.main() == 0
    lines = capsys.readouterr().out.splitlines()
    for title in ("Figure 12", "Figure 13", "Figure 14", "Figure 15", "Regressions"):
        assert any(line.startswith("## ") and title in line for line in lines), title

    def refuse(text: str) -> None:
        raise AssertionError(text)

    figures = json.loads(lines[-1], parse_constant=refuse)
    assert figures["vs_kv_only"] > 1.0
    assert figures["vs_act_only"] > 1.0
    assert figures["balanced_vs_better_at_least"] > 1.0
    assert 0.05 < figures["kv_only_link_share_for_papers_gain"] < 1.0
    assert set(figures["kv_per_act"]) == set(activations.MODELS)
    paper = figures["paper"]
    assert paper["hybrid / KV only (Fig. 12)"]["paper"] == 2.19
    assert paper["hybrid / ACT only (Fig. 12)"]["paper"] == 1.35
    assert paper["KV:ACT, OPT-30B (sec. 5.5)"]["within"] is True


def test_a_choice_that_loses_fails(
    activations: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A balanced split at 0.9 of its speed exits with 1."""
    real = activations.simulate_batch

    def slower(setup: object, context: object) -> object:
        found = real(setup, context)
        if context is not activations.Context.BALANCED:
            return found
        return replace(found, tokens_per_s=0.9 * found.tokens_per_s)

    monkeypatch.setattr(activations, "simulate_batch", slower)
    monkeypatch.setattr(activations, "PROMPTS", (128, 1_920))
    assert activations.main() == 1


def test_within_a_quarter(activations: ModuleType) -> None:
    """A ratio of 0.75 or 1.25 is within, beyond it is not."""
    comparison = activations.Comparison()
    assert comparison.within(2.0, 2.5)
    assert comparison.within(2.0, 1.5)
    assert not comparison.within(2.0, 2.51)
    assert not comparison.within(2.0, 1.49)
