"""FlashInfer's own planner and wrappers under the product's forwards, on a CPU.

What computes is a stand-in that does what a plan says; what a GPU would show beyond it
is in ``benchmarks/gpu``.
"""

from pathlib import Path

import pytest

from tests.contract.planner_build import CHECKED, compiled, why_not
from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang

ROUNDING = 1e-4
"""float32; a wrong page, or a chunk that is left out, is of another size altogether."""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The compiled planner."""
    reason = why_not()
    if reason:
        pytest.skip(f"not run: {reason}")
    return compiled(tmp_path_factory.mktemp("planner"))


@pytest.fixture(scope="module")
def told(library):
    """What the program saw."""
    return output_of("planner_program.py", library)


def test_the_version_that_was_checked_is_the_one_that_is_installed():
    """Whoever locks another one reads its planner, and these tests run again."""
    locked = Path(__file__).parents[2] / "scripts/constraints.txt"
    assert f"flashinfer-python=={CHECKED}\n" in locked.read_text()


@pytest.mark.parametrize("form", ["prefill", "decode as prefill", "decode"])
def test_a_plan_holds_nothing_of_page_numbers(told, form):
    """So a layer's own can be written behind it; it does depend on lengths."""
    held = told["held"][form]
    assert held["of_pages"] == []
    assert held["of_lens"] == 5
    # By the planner that is asked about, with plans that split and plans that do not.
    assert set(held["planned"]["decode" if form == "decode" else "prefill"]) == {
        True,
        False,
    }


@pytest.mark.parametrize("form", ["prefill", "decode as prefill", "decode"])
def test_a_plan_is_for_pages_and_not_for_what_fills_the_last_one(told, form):
    """What differs are the tokens of the last page, which a run reads for itself."""
    lengths = {"_paged_kv_last_page_len_buf", "_kv_lens_buffer", "_max_kv_len"}
    assert "_paged_kv_last_page_len_buf" in told["held"][form]["of_last"]
    assert set(told["held"][form]["of_last"]) <= lengths


def test_a_plan_that_keeps_its_pages_is_seen(told):
    """The negative control: some of FlashInfer's other backends do that."""
    assert told["held"]["kept"] == ["_block_tables"]


STORIES = [
    "plain",
    "plain, decoding without tensor cores",
    "layers",
    "layers, decoding without tensor cores",
    "layers, chunks of one size",
    "activations",
    "activations, decoding without tensor cores",
]


@pytest.mark.parametrize("name", STORIES)
def test_answers_are_right_on_flashinfers_plans(told, name):
    """Prefills, chunks, decode steps and pages from a tier; split and merged too."""
    found = told["stories"][name]
    assert found["worst"]["extend"] < ROUNDING
    assert found["worst"]["decode"] < ROUNDING
    assert found["splits"]["prefill"] > 0
    if "without" in name:
        assert found["splits"]["decode"] > 0
    else:
        assert found["plans"]["decode"] == 0
    if not name.startswith("plain"):
        assert max(found["groups"]["decode"]) > 1
        assert found["stored"]
        assert found["free"] == found["total"]
    if name.startswith("activations"):
        assert found["act_pages"] > 0
        assert found["rebuilds"] > 10


def test_no_story_is_left_out(told):
    """The program runs those that are asked about here."""
    assert sorted(told["stories"]) == sorted(STORIES)
    assert sorted(told["faults"]) == sorted(FAULTS)


FAULTS = [
    "lengths",
    "lengths, decoding without tensor cores",
    "lengths, chunks of one size",
    "a work item",
    "another layer",
    "another layer, activations",
    "not written",
]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_changes_answers(told, name):
    """A plan for other lengths or not all of it, and pages of another layer or plan."""
    assert told["faults"][name]["extend"] > 100 * ROUNDING
    assert told["faults"][name]["decode"] > 100 * ROUNDING


@pytest.mark.full
def test_answers_are_right_on_other_devices(library):
    """From two multiprocessors to those of an H100, on which other plans are made."""
    stories = output_of("planner_program.py", library, "full")["stories"]
    assert len(stories) == 4 * len(STORIES)
    for name, found in stories.items():
        assert found["worst"]["extend"] < ROUNDING, name
        assert found["worst"]["decode"] < ROUNDING, name
