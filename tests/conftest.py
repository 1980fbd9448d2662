"""What all tests share: which of them run on this machine, and Hypothesis's profiles.

- ``gpu``: skipped, and reported as not run, where there is no accelerator.
- ``sglang``: skipped where SGLang is not installed.
- ``full``: the full cross product; left out unless ``--full`` is given.
- ``faults_long``: every fault of every tier; left out without ``--faults-long``.

``HYPOTHESIS_PROFILE`` names the profile; without it, ``ci`` (the same examples on each
run) where ``CI`` is set and ``dev`` (new examples each time) elsewhere. The profile of
``make test-full`` is ``full``: ten times as many, new ones each time.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
from collections.abc import Generator

import hypothesis
import pytest

__all__: list[str] = []

# Read when torch is loaded, here and in every server. The threads of one small product
# wait for each other actively: on cores that they share with another process, that
# takes ten times as long as the product.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True
)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("full", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)

_LEFT_OUT = {
    "full": "the full cross product",
    "faults_long": "the long form of the fault tests",
}
"""Marker -> what it stands for; an option of the same name brings it in."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that bring in what is left out by default."""
    for marker, wanted in _LEFT_OUT.items():
        option = "--" + marker.replace("_", "-")
        parser.addoption(option, action="store_true", help=f"also run {wanted}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Let the processes of a run collect one after the other.

    The first rewrites the asserts of all tests and compiles what they import, where
    that was not done yet; it takes two thirds of its time, and the others read it.
    """
    if not hasattr(session.config, "workerinput"):
        return (yield)
    folder = session.config._tmp_path_factory.getbasetemp().parent
    with (folder / "collection.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out, or mark as skipped with the reason, what is not to run here."""
    for name in _LEFT_OUT:
        out = [item for item in items if item.get_closest_marker(name)]
        if out and not config.getoption("--" + name.replace("_", "-")):
            config.hook.pytest_deselected(items=out)
            items[:] = [item for item in items if not item.get_closest_marker(name)]
    for marker, reason in _reasons_not_to_run(items):
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _reasons_not_to_run(items: list[pytest.Item]) -> list[tuple[str, str]]:
    """Return (marker, reason) pairs; looks only at what some test asks for."""
    reasons = []
    if any(item.get_closest_marker("gpu") for item in items) and not _accelerator():
        reasons.append(("gpu", "not run: no accelerator"))
    if any(item.get_closest_marker("sglang") for item in items) and (
        importlib.util.find_spec("sglang") is None
    ):
        reasons.append(("sglang", "not run: SGLang is not installed"))
    return reasons


def _accelerator() -> bool:
    """Return whether torch is there and sees an accelerator."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.accelerator.is_available()
