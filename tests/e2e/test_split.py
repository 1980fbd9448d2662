"""Prompts whose front is computed while their back is read: a real engine, a slow disk.

A split pays where computing takes about as long as reading. How fast a core is depends
on what else runs, so the disk is made slower, or faster, until splits are decided.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from sgl_tiered_workloads.gate import (
    check_equality,
    measure_spread,
    negative_control,
    widest_spread,
)
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import (
    ANSWER_TOKENS,
    MODELS,
    Case,
    drop,
    open_loop,
    pinned,
    sequential,
    settle,
    stats,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16, overlap=False)
POOL_TOKENS = 4_096
PROMPT_TOKENS = 1_000
NUM_PROMPTS = 2
LAST_FULL_PAGE = 992
DISK_MB = 10.0
"""Bandwidth at first: an idle core computes a prompt in half the time of its read."""
MAX_ROUNDS = 4
PARTS = ((496, LAST_FULL_PAGE), (144, 400, 560), (160, 976))
"""Where prompts are cut that plain passes compute, besides where splits cut them. Most
cuts round nothing otherwise, but some do: one of them alone may show no spread."""
EXCHANGED = slice(800, 816)
"""A page of a prompt that a broken split would get wrong."""


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(21)
    return [
        PlannedRequest(
            f"s{i}",
            random_tokens(generator, PROMPT_TOKENS, VOCAB_TOKENS),
            ANSWER_TOKENS,
        )
        for i in range(NUM_PROMPTS)
    ]


@pytest.fixture
def start(servers, tmp_path_factory, prompts):
    """Starts a server whose disk alone holds the prompts, by the disk's MB/s."""

    def begin(megabytes):
        tiers = Tiers(200 * MB, tmp_path_factory.mktemp("disk"), 500 * MB)
        device = CASE.device(make_model("bench", MODELS), POOL_TOKENS)
        flags = ("--tiered-emulate", f"disk:bandwidth={megabytes}MB")
        server = servers.restart(tiered_spec(device, tiers, "split", flags))
        # So that the prompts are on disk, and the costs are learned.
        sequential(server, prompts)
        settle(server)
        return server

    return begin


def answers(server, prompts, policy, ends=((),) * NUM_PROMPTS):
    """Return the answers when only the disk has anything, under a load policy.

    With ``ends``, each prompt is computed in parts that end at its own.
    """
    records = []
    for request, own_ends in zip(prompts, ends, strict=True):
        drop(server, "device", "host")
        server.post(f"/tiered/load-policy?policy={policy}", {})
        for end in own_ends:
            part = replace(request, prompt=request.prompt[:end])
            sequential(server, [part])
        records += [
            replace(record, order=len(records))
            for record in sequential(server, [request])
        ]
    return records


def split_answers(start, prompts):
    """Return a server, its answers to prompts that were computed, those to prompts that
    were split, and what was decided for each of these."""
    megabytes, tried = DISK_MB, []
    for _ in range(MAX_ROUNDS):
        server = start(megabytes)
        computed = answers(server, prompts, "never")
        records = answers(server, prompts, "auto")
        told = server.get(f"/tiered/explain?last={NUM_PROMPTS}")
        reports = [each["decision"] for each in reversed(told)]
        reasons = [report["reason"] for report in reports]
        if all("front" in reason for reason in reasons):
            return server, computed, records, reports
        tried.append((megabytes, reasons))
        # The core is slow, so that all is loaded; or it is fast, and all is computed.
        megabytes *= 0.5 if "loading is cheaper" in reasons else 1.5
    raise AssertionError(f"no split, by MB/s of the disk: {tried}")


def with_a_wrong_page(server, prompts):
    """Return the answers to prompts with a page exchanged, as if to themselves."""
    wrong = []
    for request in prompts:
        tokens = list(request.prompt)
        tokens[EXCHANGED] = tokens[EXCHANGED][::-1]
        wrong.append(replace(request, prompt=tuple(tokens)))
    records = answers(server, wrong, "never")
    return [
        replace(record, prompt=request.prompt)
        for record, request in zip(records, prompts, strict=True)
    ]


@pytest.mark.full
def test_a_split_prompt_is_answered_as_a_computed_one(start, prompts):
    """Front computed, back loaded: the same answers, and the report says what it did;
    several at once end as well, and leave nothing behind."""
    server, computed, split, reports = split_answers(start, prompts)
    loaded = [record.cached_by_tier["disk"] for record in split]
    assert all(0 < num < LAST_FULL_PAGE for num in loaded), loaded
    for report in reports:
        assert [span["action"] for span in report["spans"]] == ["compute", "load"]
        predicted = report["predicted"]
        assert predicted["total_s"] < predicted["total_without_load_s"]
        assert 0 < report["actual"]["pages_read"] <= report["spans"][1]["pages"]

    # Where a machine cuts is a matter of its speed; plain passes round alike there.
    fronts = [(LAST_FULL_PAGE - num,) for num in loaded]
    spread = widest_spread(
        [
            measure_spread(computed, answers(server, prompts, "never", ends))
            for ends in (fronts, *([parts] * NUM_PROMPTS for parts in PARTS))
        ]
    )
    judge = partial(
        check_equality, page_size=16, spread=spread, forced=False, slack=2.0
    )
    negative_control({"page": judge(computed, with_a_wrong_page(server, prompts))})
    result = judge(computed, split)
    assert result.passed, result.summary()
    assert stats(server)["counters"]["decisions_split"] >= 1

    server.post("/tiered/load-policy?policy=auto", {})
    for _ in range(2):
        drop(server, "device", "host")
        records = open_loop(server, prompts)
        assert [record.error for record in records] == [None] * NUM_PROMPTS
    assert pinned(settle(server)) == 0
    server.flush_cache()
    assert stats(server)["occupancy"]["disk"]["used"] == 0
