"""The comparison of orders prints what it is asked for, and can say no."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks/sim"


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("order_cases", "orders"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("orders")


def run(orders: ModuleType, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["orders.py", "--scale", "0.02", *flags])
    status: int = orders.main()
    return status


def test_the_last_line_has_the_keys(
    orders: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ratios for every order but fcfs, a gain per load, and the worst of both."""
    run(orders, monkeypatch, "--only", "mixed", "--orders", "fcfs,cost,car")
    out = capsys.readouterr().out.splitlines()
    figures = json.loads(out[-1])
    assert set(figures["mean_ttft_vs_fcfs"]) == {"cost", "car"}
    means = figures["mean_ttft_vs_fcfs"]["cost"]
    assert len(means) == 2
    assert figures["worst_mean_ttft_vs_fcfs"] == max(means.values())
    assert figures["worst_p99_ttft_vs_fcfs"] > 0
    for name, ratio in means.items():
        assert figures["cost_mean_ttft_gain"][name] == pytest.approx(1.0 - ratio)
    assert any(line.startswith("| cost |") for line in out)


def test_an_order_that_is_worse_fails(
    orders: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With figures of a cost order that triples the tail the exit status is 1."""
    real = orders.run

    def slow(case: object, order: str, shake: int = 0) -> object:
        found = real(case, order, shake)
        factor = 3.0 if order == "cost" else 1.0
        return orders.replace(found, p99_s=found.p99_s * factor)

    monkeypatch.setattr(orders, "run", slow)
    flags = ("--only", "text analysis, 5/s", "--orders", "cost")
    assert run(orders, monkeypatch, *flags) == 1
