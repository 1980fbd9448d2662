"""SGLang's side of the explanations; requests are stand-ins with SGLang's fields."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.cache.explanation import predicted_service_s
from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.cache.waiting import WaitingLoads
from sgl_tiered.cache.waiting_state import WaitingLoad
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import QUEUE_FULL, TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.metrics.ledger import RequestLedger, WaitReason
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.serving.explain import Explainer, Namespaces, wants_explanation
from sgl_tiered.testing.strategies import spell

LAYOUT = PageLayout(num_layers=2, page_tokens=4, token_bytes=32)
PAGE = LAYOUT.page_tokens


class FINISH_ABORT:  # noqa: N801
    """What SGLang calls the reason of an aborted request."""


class Rig:
    """A host tier, its ledger, and requests of letters."""

    def __init__(self, keep=10, host=64, **settings):
        self.clock = ManualClock(10.0)
        tiers = (TierConfig(TierId.HOST, host),)
        self.cache = TieredCache(
            CacheConfig(
                LAYOUT, tiers, load_policy="always", tombstones=1 << 12, **settings
            ),
            cost=CostModel(
                PrefillCost(10**6, 2, 32, 1e9), {TierId.HOST: LinkCost(1e-4, 1e9)}
            ),
            eviction={TierId.HOST: LRUPolicy()},
            clock=self.clock,
        )
        self.digest = self.cache.open_namespace(Namespace("m", "bf16", PAGE))
        self.loads = WaitingLoads(self.cache, (TierId.HOST,), None, self.clock)
        self.ledger = RequestLedger(keep, self.clock)
        self.explainer = Explainer(self.ledger, self.cache)

    def keep(self, word):
        plan = self.cache.plan_offload(self.digest, spell(word, PAGE))
        ok = np.ones(len(plan.pages), np.bool_)
        self.cache.finish_offload(plan, TransferResult(ok, 0, 1e-3))

    def request(self, rid, word, **fields):
        req = SimpleNamespace(
            rid=rid,
            origin_input_ids=spell(word, PAGE, tail=1).tolist(),
            output_ids=[],
            extra_key=None,
            cache_salt=None,
            lora_id=None,
            cached_tokens_device=0,
            cached_tokens_host=0,
            cached_tokens_storage=0,
            finished_reason=SimpleNamespace(),
            time_stats=SimpleNamespace(prefill_finished_time=0.0),
            sampling_params=SimpleNamespace(custom_params=None),
        )
        vars(req).update(fields)
        tokens = spell(word, PAGE, tail=1)
        state = WaitingLoad(self.digest, tokens, len(word))
        self.loads.decide(state, 0)
        return req, state

    def search(self, *verdicts, is_full=False):
        """Let SGLang look at its queue: no verdicts mean that it did not look."""
        if verdicts:
            self.explainer.begin_pass()
        for verdict in verdicts:
            self.explainer.looked_at(verdict)
        self.explainer.end_pass(is_full=is_full)

    def reason_after(self, *searches):
        """Return what a request waits for in the second after these searches."""
        req, state = self.request("w", "zz")
        self.explainer.queued(req, state)
        for verdicts, is_full in searches:
            self.search(*verdicts, is_full=is_full)
        self.clock.advance(1.0)
        (reason,) = self.ledger.get("w")["wait"]["by_reason_s"]
        return reason


@pytest.fixture
def rig():
    return Rig()


@pytest.mark.parametrize(
    ("searches", "reason"),
    [
        ([(("CONTINUE", "NO_TOKEN"), True)], "budget"),
        ([(("NO_TOKEN",), False)], "budget"),
        ([(("CONTINUE", "OTHER"), False)], "pass"),
        ([(("CONTINUE",), True)], "slot"),
        ([((), True)], "slot"),
        ([(("NO_TOKEN",), True), ((), True)], "budget"),
        ([(("CONTINUE",), True), ((), True)], "slot"),
        ([(("NO_TOKEN",), True), ((), False)], "pass"),
    ],
)
def test_the_end_of_a_search_is_understood(rig, searches, reason):
    """No tokens is the pool, a full batch without that is the running requests, and a
    search that SGLang leaves out has the reason of the one before."""
    assert rig.reason_after(*searches) == reason


def test_a_reason_of_ours_wins_for_one_search(rig):
    """Who ends a search on purpose says why; the next search is SGLang's again."""
    req, state = rig.request("w", "zz")
    rig.explainer.queued(req, state)
    rig.explainer.begin_pass()
    rig.explainer.stops_for(WaitReason.SLO)
    rig.explainer.looked_at("OTHER")
    rig.explainer.end_pass(is_full=False)
    rig.clock.advance(1.0)
    rig.search("NO_TOKEN")
    rig.clock.advance(2.0)
    assert rig.ledger.get("w")["wait"]["by_reason_s"] == {"budget": 2.0, "slo": 1.0}


def test_a_request_is_followed_to_its_end(rig):
    """Sources, edges, misses, prediction and times of a request, from the queue on."""
    rig.keep("abcd")
    req, state = rig.request("r", "abcdef")
    rig.explainer.queued(req, state)
    rig.clock.advance(0.25)
    rig.explainer.begin_pass()
    rig.explainer.admitted(req, state, 4 * PAGE)
    rig.explainer.looked_at("CONTINUE")
    rig.explainer.end_pass(is_full=False)
    plan = rig.cache.plan_offload(rig.digest, spell("abcdef", PAGE))
    rig.explainer.offloading("r", plan)
    req.cached_tokens_host = 4 * PAGE
    req.time_stats.prefill_finished_time = 10.75
    rig.clock.advance(1.0)
    state.report.pages_by_tier = {TierId.HOST: 4}
    state.report.add_copies({TierId.HOST: 0.5})
    report = state.report.as_dict()
    assert rig.explainer.finished(req, report) == report
    rig.explainer.offloaded(plan, TransferResult(np.ones(2, np.bool_), 0, 0.125))
    told = json.loads(json.dumps(rig.explainer.answer('{"rid": "r"}')))
    assert told["state"] == "finished"
    assert told["tokens"] == {"host": 16, "computed": 9}
    assert told["ttft"]["real_s"] == 0.75
    assert told["wait"] == {"total_s": 0.25, "by_reason_s": {"pass": 0.25}}
    assert told["edges"] == {
        "host->device": {"bytes": 4 * LAYOUT.page_bytes, "s": 0.5},
        "device->host": {"bytes": 2 * LAYOUT.page_bytes, "s": 0.125},
    }
    (miss,) = told["missing"]
    assert (miss["first_token"], miss["tokens"]) == (16, 8)
    assert miss["cause"] == "never seen"
    expected_s = predicted_service_s(rig.cache, state.report.decision, 25)
    assert told["ttft"]["predicted_s"] == pytest.approx(expected_s, abs=1e-6)
    assert expected_s > 0


def test_edges_are_those_of_what_pages_are_kept_as():
    """Of four pages two came as activations, and one of two went as such."""
    rig = Rig(act_page_bytes=64)
    req, _ = rig.request("r", "abcdef")
    plan = rig.cache.plan_offload(
        rig.digest, spell("ab", PAGE), kinds=np.array([0, 1], np.uint8)
    )
    rig.explainer.queued(req, None)
    rig.explainer.offloading("r", plan)
    by_tier = {
        "host": {"pages": 4, "act_pages": 2, "copy_s": 0.5},
        "disk": {"pages": 1, "act_pages": 1, "copy_s": 0.0},
    }
    rig.explainer.finished(req, {"actual": {"by_tier": by_tier, "read_s": 0.25}})
    rig.explainer.offloaded(plan, TransferResult(np.ones(2, np.bool_), 0, 0.125))
    whole = LAYOUT.page_bytes
    told = rig.ledger.get("r")
    assert told["edges"] == {
        "host->device": {"bytes": 2 * whole + 3 * 64, "s": 0.5},
        "disk->host": {"bytes": whole, "s": 0.25},
        "device->host": {"bytes": whole + 64, "s": 0.125},
    }
    assert "activations" not in told


def test_why_activations_are_not_kept_is_told():
    """With every request that has ended, as it is the server's."""
    rig = Rig(act_refusal="The link is fast enough.")
    req, state = rig.request("r", "abcd")
    rig.explainer.queued(req, state)
    rig.explainer.finished(req, None)
    assert rig.ledger.get("r")["activations"] == {"refused": "The link is fast enough."}


def test_pages_that_were_found_and_not_loaded_are_told(rig):
    """Where recomputing is cheaper the pages are no miss of the cache, and the reason
    is the planner's."""
    rig.keep("abcd")
    rig.cache.use_load_policy("never")
    req, state = rig.request("r", "abcd")
    rig.explainer.queued(req, state)
    rig.explainer.admitted(req, state, 0)
    (miss,) = rig.ledger.get("r")["missing"]
    assert (miss["cause"], miss["tokens"]) == ("not loaded", 16)
    assert "never" in miss["text"]


def test_the_answer_carries_it_only_on_request(rig):
    """``custom_params`` of exactly the documented form; the report keeps its form."""
    params = {"tiered": {"explain": True}}
    req, state = rig.request("r", "ab")
    req.sampling_params.custom_params = params
    rig.explainer.queued(req, state)
    rig.explainer.admitted(req, state, 0)
    report = state.report.as_dict()
    carried = rig.explainer.finished(req, dict(report))
    assert {name: carried[name] for name in report} == report
    assert carried["explain"]["rid"] == "r"
    assert "decision" not in carried["explain"]
    for other in (None, {}, {"tiered": True}, {"tiered": {"explain": "yes"}}):
        req.sampling_params.custom_params = other
        assert not wants_explanation(req)


def test_a_request_without_pages_in_the_tiers_is_followed_too(rig):
    """One with pictures in its prompt: its times are kept, its misses are empty."""
    req, _ = rig.request("r", "ab")
    rig.explainer.queued(req, None)
    rig.explainer.admitted(req, None, 0)
    assert rig.explainer.finished(req, None) is None
    told = rig.ledger.get("r")
    assert told["missing"] == []
    assert told["ttft"]["predicted_s"] > 0


def test_aborted_requests_end(rig):
    """In the queue or while running: the state says so."""
    req, state = rig.request("q", "ab")
    rig.explainer.queued(req, state)
    rig.explainer.aborted("q")
    assert rig.ledger.get("q")["state"] == "aborted"
    req, state = rig.request("r", "ab", finished_reason=FINISH_ABORT())
    rig.explainer.queued(req, state)
    rig.explainer.admitted(req, state, 0)
    rig.explainer.finished(req, None)
    assert rig.ledger.get("r")["state"] == "aborted"
    assert rig.ledger.get("r")["ttft"]["real_s"] is None


def test_a_dropped_offload_is_forgotten(rig):
    """A copy that was left out moved nothing, and its plan is not kept."""
    req, state = rig.request("r", "ab")
    rig.explainer.queued(req, state)
    plan = rig.cache.plan_offload(rig.digest, spell("ab", PAGE))
    rig.explainer.offloading("r", plan)
    failed = TransferResult.failed(2, 0.0, QUEUE_FULL)
    rig.explainer.offloaded(plan, failed)
    assert rig.ledger.get("r")["edges"]["device->host"]["bytes"] == 0
    assert rig.explainer._offloads == {}


def test_nothing_is_gathered_where_nothing_is_kept():
    """With ``--tiered-explain-last 0`` a report passes through, and no plan is kept."""
    rig = Rig(keep=0)
    req, state = rig.request("r", "ab")
    rig.explainer.queued(req, state)
    rig.explainer.admitted(req, state, 0)
    plan = rig.cache.plan_offload(rig.digest, spell("ab", PAGE))
    rig.explainer.offloading("r", plan)
    assert rig.explainer._offloads == {}
    assert rig.explainer.finished(req, {"reason": "x"}) == {"reason": "x"}
    assert rig.explainer.answer('{"last": 5}') == []


def test_questions_by_number(rig):
    """The last ones, the latest first; the slowest, the slowest first."""
    for rid, ttft_s in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        req, state = rig.request(rid, "ab")
        rig.explainer.queued(req, state)
        rig.explainer.admitted(req, state, 0)
        rig.clock.advance(ttft_s)
        req.time_stats.prefill_finished_time = rig.clock.now()
        rig.explainer.finished(req, None)

    def rids(question):
        return [told["rid"] for told in rig.explainer.answer(question)]

    assert rids('{"last": 2}') == ["c", "b"]
    assert rids('{"slowest": 2}') == ["b", "c"]
    assert rig.explainer.answer('{"rid": "nobody"}') is None


def test_namespaces_that_a_sender_may_be_told_of():
    """His own with another adapter, and the one without any salt and key; never one
    with a salt or key that is not his."""
    names = Namespaces()
    names.note(None, None, None, b"plain")
    names.note("lora1", None, "lora1", b"public1")
    names.note(None, "salt-a", None, b"a")
    names.note("lora1", "salt-a", "lora1", b"a1")
    names.note("lora1", "salt-b", "lora1", b"b1")
    names.note("keylora1", None, "lora1", b"k1")
    assert set(names.siblings("lora1", "salt-a", "lora1").values()) == {
        b"a",
        b"public1",
    }
    assert set(names.siblings(None, None, None).values()) == {b"public1"}
    assert set(names.siblings("lora1", "salt-b", "lora1").values()) == {b"public1"}
    assert set(names.siblings("key", None, None).values()) == {b"k1", b"plain"}
    names.clear()
    assert names.siblings("lora1", "salt-a", "lora1") == {}


def test_the_namespaces_that_are_compared_are_bounded():
    """A server with a salt per sender keeps the last thousand only."""
    names = Namespaces()
    for number in range(3000):
        names.note(None, f"salt-{number}", None, b"x")
        names.note(f"lora{number}", "one", f"lora{number}", b"y")
    assert len(names._groups) <= 1024
    assert len(names._groups.get(("", "one"), {})) <= 16
