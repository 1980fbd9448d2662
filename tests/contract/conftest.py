"""Runs the contract program, each mode once in a run of the tests."""

from functools import partial
from pathlib import Path

import pytest

from tests.contract.story_support import output_of, share

MODELS = Path(__file__).parents[2] / ".cache" / "models"


@pytest.fixture(scope="session", autouse=True)
def _shared(tmp_path_factory):
    share(tmp_path_factory)


@pytest.fixture(scope="session")
def model():
    """The folder of the tiny Llama."""
    making = pytest.importorskip("sgl_tiered_workloads.model")
    return making.make_model("tiny", MODELS)


@pytest.fixture(scope="session")
def look():
    """Return a function that runs a mode of the program and gives its JSON."""

    return partial(output_of, "contract_program.py")


@pytest.fixture(scope="session")
def symbols(look):
    """What SGLang's symbols look like."""
    return look("symbols")
