"""The runtime over host and CXL: what moves where, and what is told of it."""

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import ManualClock, SystemClock
from sgl_tiered.core.ids import Lookup, TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.engines.sglang.runtime import (
    STORE_PATIENCE_S,
    Parts,
    TieredRuntime,
)
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue
from sgl_tiered.pipelines.demote import DemoteWorker
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader
from sgl_tiered.pipelines.offload import CHUNK_PAGES, OffloadWorker
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.options import Options
from sgl_tiered.serving.weights import WeightsIdentity
from sgl_tiered.testing.emulator import Emulator
from sgl_tiered.testing.fakes import FakeDevicePool
from sgl_tiered.testing.strategies import spell
from sgl_tiered.tiers.cxl import CxlTier
from sgl_tiered.tiers.cxl_source import CxlSource
from sgl_tiered.tiers.host import HostTier
from tests.draining import drain
from tests.unit.engines.weights_support import FakeWeights, read_out

LAYOUT = PageLayout(num_layers=3, page_tokens=2, token_bytes=96)
NUM_SLOTS = 16
PATIENCE_S = 20.0
"""Upper bound of every wait: only a defect makes a test wait so long."""


class Rig:
    """A runtime over a pool of random bytes, a host tier and an emulated CXL tier."""

    def __init__(self, clock=None, write_policy="write-through"):
        self.pool = FakeDevicePool(LAYOUT, 32)
        self.pool.fill(np.random.default_rng(3))
        self.emulator = Emulator(switchable=True)
        self.host = self.emulator.wrap(HostTier(LAYOUT.slot_bytes, NUM_SLOTS))
        self.cxl = CxlTier(CxlSource(emulated=True), LAYOUT.slot_bytes, NUM_SLOTS)
        clock = clock or SystemClock()
        metrics, completions = MetricsRegistry(), CompletionQueue()
        tiers = (TierId.HOST, TierId.CXL)
        self.cost = CostModel(
            PrefillCost(1000, 3, 64, 1e9), {tier: LinkCost(1e-4, 1e9) for tier in tiers}
        )
        self.weights = FakeWeights()
        weights = WeightsIdentity(self.weights.begin, Agreement(clock), metrics)
        cache = TieredCache(
            CacheConfig(
                layout=LAYOUT,
                tiers=tuple(TierConfig(tier, NUM_SLOTS) for tier in tiers),
                load_policy="always",
                write_policy=write_policy,
            ),
            cost=self.cost,
            eviction={tier: LRUPolicy() for tier in tiers},
            clock=clock,
        )
        work = (completions, clock, metrics)
        self.runtime = TieredRuntime(
            Parts(
                config=Options(),
                namespace=Namespace("model", "bfloat16", LAYOUT.page_tokens),
                weights=weights,
                clock=clock,
                cost=self.cost,
                cache=cache,
                device=self.pool,
                host=self.host,
                cxl=self.cxl,
                disk=None,
                emulator=self.emulator,
                metrics=metrics,
                completions=completions,
                loader=LayerwiseLoader(self.pool, *work),
                offloader=OffloadWorker(self.pool, self.host, *work),
                demoters={tiers: DemoteWorker(self.host, self.cxl, *work)},
                stager=None,
                lookahead=None,
                deferred=None,
                probe={},
                served={},
            ),
            wait_whole=False,
        )

    def settle(self):
        """Let everything that is under way, and what follows from it, end."""
        for _ in range(4):
            drain(self.runtime)
            self.runtime.pump()

    def keep(self, word, first_device_page):
        """Offload a prompt whose pages are in a row on the device."""
        digest = self.runtime.namespace(None, None)
        plan = self.runtime.cache.plan_offload(digest, spell(word, LAYOUT.page_tokens))
        pages = first_device_page + plan.positions.astype(np.int64)
        assert self.runtime.offload(plan, pages)
        self.settle()

    def load(self, word, first_device_page, *, lands=True):
        """Load a prompt to the device; return the job."""
        digest = self.runtime.namespace(None, None)
        tokens = spell(word, LAYOUT.page_tokens, tail=1)
        coordinator = self.runtime.coordinator
        state = coordinator.track("r", digest, tokens, len(word))
        assert coordinator.prepare(state, 0)
        num_pages = coordinator.loadable_pages(state, 0)
        pages = first_device_page + np.arange(num_pages, dtype=np.int64)
        job = coordinator.begin(state, pages)
        assert self.runtime.loader.submit([job]).wait(PATIENCE_S) == lands
        self.settle()
        coordinator.settle(state, landed=lands)
        coordinator.release("r")
        return job


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.runtime.close(rig.runtime.pump)


def test_a_question_of_ours_is_not_followed_in_the_queue(rig, monkeypatch):
    """Whoever puts it there: also where it is queued again."""
    noted = []
    explainer = SimpleNamespace(queued=lambda req, state: noted.append(req.rid))
    monkeypatch.setattr(rig.runtime, "explainer", explainer)
    lengths = SimpleNamespace(asks={"ours"})
    monkeypatch.setattr(type(rig.runtime), "lengths", lengths)
    for rid in ("ours", "theirs"):
        rig.runtime.note_queued(SimpleNamespace(rid=rid))
    assert noted == ["theirs"]


def test_pages_reach_cxl_and_come_back_from_it(rig):
    """Offloaded to the host, demoted, forgotten above, loaded: the same bytes."""
    rig.keep("abcd", 0)
    assert rig.runtime.cache.stats.pages_stored[TierId.CXL] == 4
    rig.runtime.drop(TierId.HOST)
    job = rig.load("abcd", 8)
    assert job.num_pages_from(TierId.CXL) == 4
    assert job.num_pages_from(TierId.HOST) == 0
    for page in range(4):
        assert np.array_equal(rig.pool.page(8 + page), rig.pool.page(page))
    edges = rig.runtime.metrics_snapshot()["edges"]
    assert {name: edge["pages"] for name, edge in edges.items()} == {
        "device->host": 4,
        "host->cxl": 4,
        "cxl->device": 4,
    }


def test_a_load_teaches_the_cost_of_the_tier_it_came_from(rig):
    """What CXL took says nothing of the host's link."""
    rig.keep("abcd", 0)
    rig.runtime.drop(TierId.HOST)
    rig.load("abcd", 8)
    seen = rig.cost.snapshot()
    assert seen["link.cxl.num_observations"] == 1
    assert seen["link.host.num_observations"] == 0


def test_every_report_says_that_cxl_is_emulated(rig, caplog):
    """The state, the metrics and the log line; and the host is not."""
    stats = rig.runtime.stats()
    assert stats["media"]["cxl"] == {
        "slot_bytes": LAYOUT.slot_bytes,
        "num_bytes": rig.runtime.parts.cxl.num_slots * LAYOUT.slot_bytes,
        "pinned_bytes": 0,
        "usable": True,
        "emulated": True,
        "emulation": "",
        "faults_struck": {},
        "detail": "CXL is emulated by plain memory",
        "age_s": 0.0,
    }
    assert not stats["media"]["host"]["emulated"]
    assert stats["emulated"] == ["cxl"]
    assert list(stats["occupancy"]) == ["host", "cxl"]
    rig.runtime._logged_at_s = -1e9
    rig.runtime.count_request(10, {TierId.CXL: 4})
    with caplog.at_level("INFO"):
        rig.runtime.between_passes()
    assert "cxl 0% full (emulated)" in caplog.text
    assert "host 0% full," in caplog.text


def test_copies_that_stop_and_begin_again_are_told(caplog):
    """In a line each, not more often than other lines, and in the figures."""
    clock = ManualClock()
    rig = Rig(clock, write_policy="auto")
    runtime, cache = rig.runtime, rig.runtime.cache
    digest = runtime.namespace(None, None)

    def see(first, num_pages):
        tokens = np.arange(first, first + 2 * num_pages, dtype=np.int32)
        plan = cache.plan_offload(digest, tokens)
        if plan is not None:
            lost = TransferResult.failed(len(plan.pages), 0.0, "left out")
            cache.finish_offload(plan, lost)
        with caplog.at_level("INFO"):
            runtime.between_passes()

    see(0, 2 * NUM_SLOTS)
    assert not runtime.stats()["copies_at_once"]
    assert f"nothing has come again for {4 * NUM_SLOTS} tokens" in caplog.text
    caplog.clear()
    see(0, 4)
    assert runtime.metrics_snapshot()["copies_at_once"]
    assert "prompts come again" not in caplog.text
    clock.advance(runtime.config.observe.log_interval_s)
    see(0, 4)
    assert "prompts come again" in caplog.text
    runtime.close(runtime.pump)


def test_the_scheduler_is_told_of_room_that_offloads_give_back(rig):
    """Else it would not look for prompts before the next request leaves.

    A server with room for three requests ran two, so.
    """
    told = []
    rig.runtime.on_offloaded = lambda: told.append(rig.runtime.cache.stats.pages_stored)
    rig.runtime.pump()
    assert told == []
    rig.keep("abc", 0)
    assert len(told) == 1
    rig.load("abc", 8)
    assert len(told) == 1


def test_tokens_are_counted_by_tier(rig):
    """Host and CXL apart; a tier that is not there is left out; the rest is new."""
    rig.runtime.count_request(
        20, {TierId.DEVICE: 4, TierId.HOST: 2, TierId.CXL: 6, TierId.DISK: 0}
    )
    rig.runtime.count_request(10, {TierId.DEVICE: 2})
    snapshot = rig.runtime.metrics_snapshot()
    hits = {name: tier["tokens_hit"] for name, tier in snapshot["tiers"].items()}
    assert hits == {"device": 6, "host": 2, "cxl": 6}
    assert snapshot["tiers"]["cxl"]["tokens_missed"] == 8 + 8
    assert snapshot["counters"]["tokens_computed"] == 16


def test_cxl_can_be_forgotten(rig):
    """Then a prompt that was only there is a miss, and the other tiers are known."""
    rig.keep("ab", 0)
    rig.runtime.drop(TierId.HOST)
    rig.runtime.drop(TierId.CXL)
    digest = rig.runtime.namespace(None, None)
    tokens = spell("ab", LAYOUT.page_tokens, tail=1)
    assert rig.runtime.cache.lookup(digest, tokens, 0).lookup is Lookup.MISS
    assert rig.runtime.has_tier(TierId.CXL)
    assert not rig.runtime.has_tier(TierId.DISK)


def test_closing_closes_every_tier(rig):
    """No tier is usable after the runtime is closed."""
    rig.runtime.close(rig.runtime.pump)
    assert not rig.host.health().usable
    assert not rig.cxl.health().usable


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def slow_rig(clock):
    """A rig whose time stands still unless it is told."""
    rig = Rig(clock)
    yield rig
    rig.emulator.release()
    rig.runtime.close(rig.runtime.pump)


def test_a_tier_whose_copies_break_rests_and_is_tried_again(slow_rig, clock):
    """After three broken loads other copies are read; after a rest, the tier again."""
    rig = slow_rig
    rig.keep("abcd", 0)
    assert rig.runtime.switch_faults("host:fault=error/load") == ""
    for _ in range(3):
        job = rig.load("abcd", 8, lands=False)
        assert job.num_pages_from(TierId.HOST) == 4
    assert rig.load("abcd", 8).num_pages_from(TierId.CXL) == 4
    state = rig.runtime.stats()
    assert not state["media"]["host"]["usable"]
    assert "injected" in state["media"]["host"]["detail"]
    assert state["media"]["host"]["emulation"] == "host:fault=error/load"
    assert state["media"]["host"]["faults_struck"] == {"error": 3}
    assert state["counters"]["host_rests"] == 1
    clock.advance(5.0)
    rig.settle()
    rig.load("abcd", 8, lands=False)
    assert rig.load("abcd", 8).num_pages_from(TierId.CXL) == 4, "the probe failed"
    assert rig.runtime.switch_faults("") == ""
    clock.advance(5.0)
    rig.settle()
    assert rig.load("abcd", 8).num_pages_from(TierId.HOST) == 4
    assert rig.runtime.stats()["media"]["host"]["usable"]


def test_offloads_that_fail_rest(slow_rig, clock):
    """After three of them offloads are dropped at once, until a rest is over."""
    rig = slow_rig
    digest = rig.runtime.namespace(None, None)

    def offload(word):
        plan = rig.runtime.cache.plan_offload(digest, spell(word, LAYOUT.page_tokens))
        taken = rig.runtime.offload(plan, plan.positions.astype(np.int64))
        rig.settle()
        return taken

    assert rig.runtime.switch_faults("host:fault=error/store") == ""
    assert [offload("ab") for _ in range(4)] == [True, True, True, False]
    assert rig.runtime.switch_faults("") == ""
    clock.advance(5.0)
    assert offload("ab")
    assert rig.runtime.cache.stats.pages_stored[TierId.HOST] == 2


def test_a_store_that_does_not_end_is_given_up(slow_rig, clock, caplog):
    """With those behind it: their device pages are free, and nothing is found of them.

    No store is begun until it has ended, and its slots are used by nobody; one that
    moves bytes is waited for.
    """
    rig, ended = slow_rig, []
    runtime, cache = rig.runtime, rig.runtime.cache
    runtime.on_offload_end = ended.append
    digest = runtime.namespace(None, None)

    def offload(word):
        plan = cache.plan_offload(digest, spell(word, LAYOUT.page_tokens))
        return plan, runtime.offload(plan, plan.positions.astype(np.int64))

    rig.pool.store_gate.clear()
    (first, _), (second, _) = offload("ab"), offload("cd")
    assert rig.pool.store_started.acquire(timeout=PATIENCE_S)
    clock.advance(STORE_PATIENCE_S)
    runtime.pump()
    assert ended == []
    clock.advance(0.1)
    runtime.pump()
    runtime.pump()
    assert ended == [first.plan_id, second.plan_id]
    assert runtime.stats()["counters"]["offloads_given_up"] == 2
    (record,) = [r for r in caplog.records if "moved no byte" in r.getMessage()]
    assert "2 store(s)" in record.getMessage()
    assert cache.occupancy(TierId.HOST).used_slots == 4
    clock.advance(60.0)
    runtime.pump()
    assert not offload("ef")[1]
    assert runtime.is_storing
    # What it reads from now on belongs to somebody else.
    rig.pool.fill(np.random.default_rng(4))
    rig.pool.store_gate.set()
    rig.settle()
    assert not runtime.is_storing
    assert ended == [first.plan_id, second.plan_id]
    assert [found(rig, word) for word in ("ab", "cd", "ef")] == [0, 0, 0]
    assert cache.occupancy(TierId.HOST).used_slots == 0
    clock.advance(5.0)
    assert offload("ab")[1]
    rig.settle()
    assert found(rig, "ab") == 2
    cache.check()


def test_a_store_takes_as_long_as_the_link_needs(slow_rig, clock):
    """Ten times what a chunk takes at the measured bandwidth, if that is longer."""
    rig, ended = slow_rig, []
    rig.runtime.on_offload_end = ended.append
    chunk_bytes = CHUNK_PAGES * LAYOUT.page_bytes
    limit_s = 3 * STORE_PATIENCE_S
    rig.cost._links[TierId.HOST] = LinkCost(1e-4, 10.0 * chunk_bytes / limit_s)
    digest = rig.runtime.namespace(None, None)
    plan = rig.runtime.cache.plan_offload(digest, spell("ab", LAYOUT.page_tokens))
    rig.pool.store_gate.clear()
    assert rig.runtime.offload(plan, plan.positions.astype(np.int64))
    assert rig.pool.store_started.acquire(timeout=PATIENCE_S)
    for seconds, is_given_up in ((0.9 * limit_s, False), (0.2 * limit_s, True)):
        clock.advance(seconds)
        rig.runtime.pump()
        assert ended == [plan.plan_id] * is_given_up
    rig.pool.store_gate.set()


def test_nonsense_is_not_switched(rig):
    """The sentence says why, and nothing is emulated."""
    assert "not understood" in rig.runtime.switch_faults("host:fault=error/upwards")
    assert rig.runtime.stats()["media"]["host"]["emulation"] == ""


def test_whoever_takes_ends_an_offload_s_end_is_told(rig):
    """A drop takes the ends of transfers itself, and a lock waits for each."""
    ended = []
    rig.runtime.on_offload_end = ended.append
    digest = rig.runtime.namespace(None, None)
    tokens = spell("abcd", LAYOUT.page_tokens)
    plan = rig.runtime.cache.plan_offload(digest, tokens)
    assert rig.runtime.offload(plan, plan.positions.astype(np.int64))
    rig.runtime.drop(TierId.HOST)
    assert ended == [plan.plan_id]


def change(rig, text, *, device_is_empty=True):
    """Change the weights, as the hooks on SGLang's updates do."""
    rig.runtime.forget_plans()
    rig.runtime.weights.changing()
    rig.weights.text = text
    rig.runtime.weights.changed(device_is_empty=device_is_empty)


def found(rig, word):
    """Return how many pages of a prompt are found; None where nothing is asked."""
    digest = rig.runtime.namespace(None, None)
    if digest is None:
        return None
    tokens = spell(word, LAYOUT.page_tokens, tail=1)
    return rig.runtime.cache.lookup(digest, tokens, 0).num_found


def test_new_weights_find_nothing_of_the_old_ones(rig):
    """Neither while they are read nor after, and old pages give their memory back."""
    rig.keep("abcd", 0)
    assert found(rig, "abcd") == 4
    old = rig.runtime.namespace(None, None)
    rig.weights.gate.clear()
    change(rig, "others")
    assert found(rig, "abcd") is None
    rig.runtime.pump()
    assert found(rig, "abcd") is None
    rig.weights.gate.set()
    read_out(rig.runtime.weights)
    rig.settle()
    assert rig.runtime.namespace(None, None) != old
    assert found(rig, "abcd") == 0
    assert rig.runtime.cache.occupancy(TierId.HOST).used_slots == 0
    assert rig.runtime.stats()["weights"] == {
        "fingerprint": "others",
        "is_settled": True,
        "is_mixed": False,
        "num_unnamed": 0,
        "num_changes": 1,
    }
    rig.keep("abcd", 8)
    assert found(rig, "abcd") == 4


def test_weights_that_came_back_find_what_was_kept(rig):
    """Released and resumed without a flush: all is as it was."""
    rig.keep("abcd", 0)
    change(rig, "model", device_is_empty=False)
    assert found(rig, "abcd") is None
    read_out(rig.runtime.weights)
    rig.settle()
    assert found(rig, "abcd") == 4


def test_a_flush_reads_no_weights(rig):
    """They may be away just then, and are known anyway."""
    rig.keep("abcd", 0)
    num_begun = rig.weights.num_begun
    rig.runtime.weights.changing()
    rig.runtime.reset()
    rig.runtime.pump()
    assert rig.weights.num_begun == num_begun
    rig.runtime.weights.changed(device_is_empty=True)
    read_out(rig.runtime.weights)
    rig.settle()
    assert found(rig, "abcd") == 0


def test_an_offload_under_way_belongs_to_the_weights_that_computed_it(rig):
    """It ends after the change: into the old namespace, so into nothing."""
    digest = rig.runtime.namespace(None, None)
    plan = rig.runtime.cache.plan_offload(digest, spell("abcd", LAYOUT.page_tokens))
    rig.pool.store_gate.clear()
    assert rig.runtime.offload(plan, plan.positions.astype(np.int64))
    change(rig, "others")
    read_out(rig.runtime.weights)
    rig.runtime.pump()
    assert found(rig, "abcd") == 0
    rig.pool.store_gate.set()
    rig.settle()
    assert found(rig, "abcd") == 0
    assert rig.runtime.cache.occupancy(TierId.HOST).used_slots == 0
    rig.runtime.cache.check()


def test_a_plan_of_a_request_that_waits_does_not_outlive_the_weights(rig):
    """And gives the pages free that it held."""
    rig.keep("abcd", 0)
    coordinator = rig.runtime.coordinator
    digest = rig.runtime.namespace(None, None)
    tokens = spell("abcd", LAYOUT.page_tokens, tail=1)
    state = coordinator.track("r", digest, tokens, 4)
    assert coordinator.prepare(state, 0)
    assert coordinator.loadable_pages(state, 0) == 4
    change(rig, "others")
    assert coordinator.state("r") is None
    read_out(rig.runtime.weights)
    rig.settle()
    assert rig.runtime.cache.occupancy(TierId.HOST).pinned_slots == 0


def test_a_load_that_has_begun_ends_after_the_change(rig):
    """Its request computes already; nobody else gets what it brings."""
    rig.keep("abcd", 0)
    coordinator = rig.runtime.coordinator
    digest = rig.runtime.namespace(None, None)
    tokens = spell("abcd", LAYOUT.page_tokens, tail=1)
    state = coordinator.track("r", digest, tokens, 4)
    assert coordinator.loadable_pages(state, 0) == 4
    job = coordinator.begin(state, 8 + np.arange(4, dtype=np.int64))
    change(rig, "others", device_is_empty=False)
    read_out(rig.runtime.weights)
    rig.runtime.pump()
    assert coordinator.state("r") is state
    assert rig.runtime.loader.submit([job]).wait(PATIENCE_S)
    coordinator.settle(state, landed=True)
    coordinator.release("r")
    rig.settle()
    assert rig.runtime.cache.occupancy(TierId.HOST).used_slots == 0
    rig.runtime.cache.check()


def test_a_request_is_followed_until_all_of_it_is_forgotten(rig):
    """Its load, its wait and its times each keep it among those that are followed."""
    runtime = rig.runtime
    tokens = spell("abcd", LAYOUT.page_tokens, tail=1)
    runtime.coordinator.track("loads", runtime.namespace(None, None), tokens, 4)
    runtime.note_wait("waits", waiting=True)
    runtime.ledger.queued("queued", 9)
    assert runtime.followed() == {"loads", "waits", "queued"}
    for rid in ("loads", "waits"):
        runtime.forget_request(rid)
    runtime.ledger.finished("queued")
    assert runtime.followed() == set()
