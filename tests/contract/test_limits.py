"""What a waiting request may reuse, whoever looks at it, with both tree cores."""

import pytest

from tests.contract.story_support import CORES, told_by

pytestmark = pytest.mark.sglang

PAGE = 16
REUSED_PAGES = {
    "whole pages": 3,
    "a token more": 4,
    "logprobs from 20": 1,
    "logprobs from 0": 0,
    "replaced embeddings": 0,
}
"""Of four pages on disk: the last token is computed, and what logprobs are told of."""


@pytest.fixture(scope="module")
def stories():
    """What was reused and read, by core, case and kind of policy."""
    return told_by("limits_program.py")


@pytest.fixture(params=CORES)
def seen(request, stories):
    """The story of one core."""
    return stories[request.param]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("case", REUSED_PAGES)
def test_no_policy_changes_what_is_reused(seen, case, policy):
    """A policy that sorts by prefixes asks for whole prompts; no load is as long."""
    assert seen[case][policy]["reused"] == REUSED_PAGES[case] * PAGE


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("case", REUSED_PAGES)
def test_nothing_is_read_that_may_not_be_reused(seen, case, policy):
    """Neither read from disk, nor held for others' eyes when the request has gone."""
    assert seen[case][policy]["read"] == REUSED_PAGES[case]
    assert seen[case][policy]["pinned"] == 0


@pytest.mark.parametrize("case", REUSED_PAGES)
def test_a_policy_sees_what_will_be_reused(seen, case):
    """No more: the queue is sorted by what a load will bring."""
    assert seen[case]["lpm"]["seen_by_policy"] == REUSED_PAGES[case] * PAGE
