"""Stand-ins: equal prefixes get equal ones, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.requests import WorkloadBuilder
from sgl_tiered.sim.synthetic import fixed_lengths, shared_prefixes

BLOCKS = [np.array([7, 8, 9]), np.array([7, 8, 100]), np.array([5])]


@pytest.mark.parametrize(
    ("page", "num_pages", "shared"),
    [(8, [3, 3, 1], 2), (4, [6, 6, 2], 4), (16, [1, 1, 0], 1)],
)
def test_blocks_become_pages_of_any_size(
    page: int, num_pages: list[int], shared: int
) -> None:
    """Blocks of 8 tokens at a page of 8, 4 and 16: prompts share the same tokens."""
    builder = WorkloadBuilder(page)
    parts = builder.number_blocks(BLOCKS, 8)
    assert [len(part) for part in parts] == num_pages
    assert len(np.intersect1d(parts[0], parts[1])) == shared
    assert parts[0][:shared].tolist() == parts[1][:shared].tolist()
    assert not len(np.intersect1d(parts[0], parts[2]))
    assert not len(np.intersect1d(builder.fresh(4), np.concatenate(parts)))


def test_a_page_that_does_not_fit_the_blocks_is_refused() -> None:
    """The error names both sizes."""
    with pytest.raises(ConfigError, match=r"12 tokens .* blocks of 8"):
        WorkloadBuilder(12).number_blocks(BLOCKS, 8)


def test_a_request_has_pages_for_prompt_and_answer() -> None:
    """The last token of an answer has no KV, and answers may be left out."""
    for keep_answers, num_pages in ((True, 4), (False, 2)):
        builder = WorkloadBuilder(4, keep_answers=keep_answers)
        prefix = builder.prefix("p", 2)
        index = builder.add(0.0, 9, 8, prefix=prefix)
        request = builder.build("w").requests[index]
        assert len(request.page_ids) == num_pages
        assert request.page_ids[:2].tolist() == prefix.tolist()


def test_tokens_with_equal_prefixes_get_equal_stand_ins() -> None:
    """The same page after another beginning is another page."""
    builder = WorkloadBuilder(2)
    first = builder.number_tokens(np.array([1, 2, 3, 4, 5], np.int32))
    again = builder.number_tokens(np.array([1, 2, 3, 4, 9, 9], np.int32))
    other = builder.number_tokens(np.array([0, 2, 3, 4], np.int32))
    assert len(first) == 2
    assert first.tolist() == again[:2].tolist()
    assert not set(other.tolist()) & set(first.tolist())


def test_poisson_arrivals_have_the_rate() -> None:
    """4,000 arrivals at 5/s take 800 s within four standard errors."""
    workload = fixed_lengths(4_000, 5.0, 10, 2, 4, np.random.default_rng(1))
    assert workload.requests[-1].arrival_s == pytest.approx(800.0, rel=4 / 4_000**0.5)


def test_a_closed_loop_has_no_arrivals_of_its_own() -> None:
    """Its clients decide when a request leaves."""
    workload = shared_prefixes(
        9, 1.0, 2, 8, 4, 3, 4, np.random.default_rng(0), num_clients=3
    )
    assert workload.num_clients == 3
    assert {request.arrival_s for request in workload.requests} == {0.0}
