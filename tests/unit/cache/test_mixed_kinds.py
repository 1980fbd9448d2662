"""Pages of KV and of activations in one prompt, in tiers that need not agree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sgl_tiered.cache.load_report import LoadReport
from sgl_tiered.cache.noted_uses import reload_costs
from sgl_tiered.cache.planner import Planner
from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.core.encoded import encoded_layout
from sgl_tiered.core.ids import Encoding, Representation, TierId
from sgl_tiered.core.keys import Namespace, page_keys
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import (
    OffloadPlan,
    PageRecords,
    Span,
    TransferResult,
    namespace_rows,
)
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.cost.rebuild import RebuildCosts, TokensCost
from sgl_tiered.errors import ConfigError
from sgl_tiered.testing.strategies import spell

PAGE_TOKENS = 4
SPACE = Namespace("model", "bfloat16", PAGE_TOKENS)
WHOLE, ACT = 512, 128  # bytes of a page: conftest's layout, and what is set here
MakeCache = Callable[..., TieredCache]


def kinds(text: str) -> np.ndarray:
    """Return what pages are held as: k for KV, a for activations."""
    return np.array([letter == "a" for letter in text], np.uint8)


def landed(plan: object) -> TransferResult:
    num = len(plan.pages)  # type: ignore[attr-defined]
    return TransferResult(np.ones(num, np.bool_), 0, 1e-3, np.arange(num, dtype="u8"))


class Story:
    """A cache whose pages may be activations, and one namespace."""

    def __init__(self, cache: TieredCache) -> None:
        self.cache = cache
        self.digest = cache.open_namespace(SPACE)

    def plan(self, word: str, held: str) -> OffloadPlan | None:
        tokens = spell(word, PAGE_TOKENS)
        return self.cache.plan_offload(self.digest, tokens, kinds=kinds(held))

    def store(self, word: str, held: str) -> None:
        plan = self.plan(word, held)
        assert plan is not None
        self.cache.finish_offload(plan, landed(plan))

    def demote(self) -> None:
        plan = self.cache.plan_demote(100)
        assert plan is not None
        self.cache.finish_demote(plan, landed(plan))

    def look_up(self, word: str, **how: object):  # type: ignore[no-untyped-def]
        tokens = spell(word, PAGE_TOKENS)
        return self.cache.lookup(self.digest, tokens, 0, **how)

    def held(self, word: str) -> str:
        """Return what a load would find: a tier's letter and a kind for each page."""
        found = self.look_up(word)
        plan = self.cache.commit_load(found)
        assert plan is not None
        assert plan.representations is not None
        assert plan.num_bytes is not None
        self.cache.finish_load(plan, landed=True)
        assert (plan.num_bytes == np.where(plan.representations, ACT, WHOLE)).all()
        tiers = [TierId(tier).label[0] for tier in plan.tiers.tolist()]
        names = ["ka"[kind] for kind in plan.representations.tolist()]
        return " ".join(t + k for t, k in zip(tiers, names, strict=True))


@pytest.fixture
def story(make_cache: MakeCache) -> Story:
    """Return a story over host and disk."""
    return Story(make_cache(disk=8, act_page_bytes=ACT))


def test_a_load_says_what_its_sources_hold(story: Story) -> None:
    """Page by page, with the bytes of each."""
    story.store("abcd", "kaak")
    assert story.held("abcd") == "hk ha ha hk"
    story.cache.check()


def test_an_offload_says_what_is_to_be_copied(story: Story) -> None:
    """Of the pages that it copies, which need not be the first ones."""
    story.store("ab", "ka")
    plan = story.plan("abcd", "aaak")
    assert plan is not None
    assert plan.positions.tolist() == [2, 3]
    assert plan.representations is not None
    assert plan.representations.tolist() == [1, 0]
    assert plan.bytes_of(slice(0, 1), WHOLE) == ACT
    assert plan.bytes_of(np.array([True, True]), WHOLE) == ACT + WHOLE
    story.cache.finish_offload(plan, landed(plan))
    assert story.held("abcd") == "hk ha ha hk"


def test_what_goes_down_is_what_lies_above(story: Story) -> None:
    """The records say so, for the disk keeps them."""
    story.store("abc", "aka")
    plan = story.cache.plan_demote(9)
    assert plan is not None
    assert plan.records.representations is not None
    assert plan.records.representations.tolist() == [1, 0, 1]
    story.cache.check()
    story.cache.finish_demote(plan, landed(plan))
    story.cache.drop_tier(TierId.HOST)
    assert story.held("abc") == "da dk da"
    story.cache.check()


def test_tiers_may_hold_a_page_in_different_forms(story: Story) -> None:
    """KV on the disk, activations on the host: what is loaded is what is said."""
    story.store("ab", "kk")
    story.demote()
    story.cache.drop_tier(TierId.HOST)
    story.store("ab", "ak")
    assert story.held("ab") == "ha hk"
    only_disk = story.look_up("ab", tiers_allowed=(TierId.DISK,))
    assert only_disk.representations is not None
    assert not only_disk.representations.any()
    story.cache.check()


def test_what_comes_up_is_what_lies_below(story: Story) -> None:
    """A promotion copies bytes, and so what they are."""
    story.store("abc", "aak")
    story.demote()
    story.cache.drop_tier(TierId.HOST)
    tokens = spell("abc", PAGE_TOKENS)
    plan = story.cache.promoter.plan((story.digest, tokens), 0, 3)
    assert plan is not None
    assert plan.representations is not None
    assert plan.representations.tolist() == [1, 1, 0]
    story.cache.check()
    story.cache.promoter.finish(plan, np.arange(3, dtype=np.int32), landed(plan))
    assert story.held("abc") == "ha ha hk"
    story.cache.check()


def test_a_decision_about_another_form_does_not_hold(story: Story) -> None:
    """Room is taken by what it said; the same page came back as something else."""
    story.store("abx", "kkk")
    story.demote()
    decision = story.look_up("ab")
    same = story.look_up("ab")
    story.cache.drop_tier(TierId.HOST)
    story.store("ab", "ka")
    assert story.cache.commit_load(decision) is None
    story.cache.drop_tier(TierId.HOST)
    story.store("ab", "kk")
    assert story.cache.commit_load(same) is not None


def records(held: str | None) -> PageRecords:
    """Return the records of ``abc`` at slots 0, 1, 2."""
    digest, tokens = SPACE.digest(), spell("abc", PAGE_TOKENS)
    keys = page_keys(digest, tokens, PAGE_TOKENS)
    before = np.frombuffer(digest, np.uint8)[None, :]
    return PageRecords(
        namespaces=namespace_rows(digest, 3),
        keys=keys,
        parents=np.concatenate([before, keys[:-1]]),
        tokens=tokens.reshape(-1, PAGE_TOKENS),
        checksums=np.arange(3, dtype=np.uint64),
        addresses=np.arange(3),
        representations=None if held is None else kinds(held),
    )


def test_adoption_restores_what_a_page_is_held_as(story: Story) -> None:
    """As its record says; one that says nothing is KV."""
    assert story.cache.adopt(TierId.DISK, records("aka"))[0] == 3
    assert story.held("abc") == "da dk da"
    story.cache.check()


@pytest.mark.parametrize(("held", "num_pages"), [(None, 3), ("kkk", 3), ("kak", 1)])
def test_a_server_of_kv_adopts_no_activations(
    make_cache: MakeCache, held: str | None, num_pages: int
) -> None:
    """They and what comes after them are a miss; their slots are told."""
    cache = make_cache(disk=8)
    num_adopted, refused = cache.adopt(TierId.DISK, records(held))
    assert num_adopted == num_pages
    assert refused.tolist() == list(range(num_pages, 3))
    assert Story(cache).look_up("abc").num_found == num_pages
    cache.check()


def test_without_activations_nothing_is_said(make_cache: MakeCache) -> None:
    """No array by page is made, on any way."""
    story = Story(make_cache(disk=8))
    plan = story.cache.plan_offload(story.digest, spell("ab", PAGE_TOKENS))
    assert plan is not None
    assert (plan.representations, plan.num_bytes) == (None, None)
    assert plan.bytes_of(slice(None), WHOLE) == 2 * WHOLE
    story.cache.finish_offload(plan, landed(plan))
    down = story.cache.plan_demote(9)
    assert down is not None
    assert down.records.representations is None
    decision = story.look_up("ab")
    load = story.cache.commit_load(decision)
    assert load is not None
    assert (decision.representations, load.representations) == (None, None)
    assert load.num_bytes is None


def test_activations_where_there_are_none_are_a_broken_law(
    make_cache: MakeCache,
) -> None:
    """Nobody could say how many bytes they have."""
    story = Story(make_cache())
    with pytest.raises(AssertionError, match="no page is activations"):
        story.plan("ab", "ka")


def test_a_law_finds_a_copy_of_another_form(story: Story) -> None:
    """A source that is relabelled while it is copied, and bytes that do not fit."""
    story.store("ab", "ka")
    plan = story.cache.plan_demote(9)
    assert plan is not None
    table = story.cache._store.table
    table.representation[table.entry_of[0][plan.pages[0]]] = 1
    with pytest.raises(AssertionError, match="of another kind"):
        story.cache.check()


@pytest.mark.parametrize("num_bytes", [-2, 127, 514])
def test_sizes_that_cannot_be_are_refused(
    make_cache: MakeCache, num_bytes: int
) -> None:
    """Below zero, not the same for both layers, larger than a slot's page."""
    with pytest.raises(ConfigError, match="act_page_bytes"):
        make_cache(act_page_bytes=num_bytes)


def test_encoded_pages_are_never_activations() -> None:
    """An encoding says how KV is written."""
    raw = PageLayout(2, PAGE_TOKENS, 32)
    layout = encoded_layout(raw, Encoding.INT8, kv_heads=1, head_dim=16)
    with pytest.raises(ConfigError, match="raw KV"):
        CacheConfig(layout, (TierConfig(TierId.HOST, 4),), act_page_bytes=128)


# -- What is predicted and told ------------------------------------------------

LAYOUT = PageLayout(num_layers=4, page_tokens=10, token_bytes=50)  # 4,000 B a page
HOST, DISK = int(TierId.HOST), int(TierId.DISK)


def make_planner(rebuild_token_s: float | None) -> Planner:
    """Return a planner; the host brings 1 MB/s, the disk 0.1, without any latency."""
    rebuild = None
    if rebuild_token_s is not None:
        line = TokensCost(0.0, rebuild_token_s)
        rebuild = RebuildCosts(line, line)
    prefill = PrefillCost(10**6, 1, 1, 1e9, overhead_s=1e-6)
    links = {TierId.HOST: LinkCost(1e-9, 1e6), TierId.DISK: LinkCost(1e-9, 1e5)}
    return Planner(
        CostModel(prefill, links, rebuild), LAYOUT, "always", act_page_bytes=1000
    )


def of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint8)


def test_the_link_carries_what_a_page_is_held_as() -> None:
    """Two pages of KV and one of activations: 9,000 B."""
    choice = make_planner(None).choose(of(HOST, HOST, HOST), 0, 100, kinds=of(0, 1, 0))
    assert choice.load_s == pytest.approx(9e-3, rel=1e-3)


def test_the_disk_is_read_by_whole_slots() -> None:
    """Whatever they hold."""
    choice = make_planner(None).choose(of(DISK, DISK), 0, 100, kinds=of(1, 0))
    assert choice.load_s == pytest.approx(80e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("token_s", "load_s"),
    [(1e-6, 2e-3), (1e-3, 80e-3)],
    ids=["the link is the longer", "rebuilding is the longer"],
)
def test_rebuilding_runs_under_the_load(token_s: float, load_s: float) -> None:
    """Two pages of activations: 2,000 B, and 20 tokens in 4 layers."""
    planner = make_planner(token_s)
    choice = planner.choose(of(HOST, HOST), 0, 100, kinds=of(1, 1))
    assert choice.load_s == pytest.approx(load_s, rel=1e-2)
    assert planner.direct_s(of(HOST, HOST), of(1, 1)) == pytest.approx(choice.load_s)


def test_pages_read_from_disk_are_rebuilt_as_well() -> None:
    """40 ms of reading, then 40 ms of rebuilding."""
    choice = make_planner(1e-3).choose(of(DISK), 0, 100, kinds=of(1))
    assert choice.load_s == pytest.approx(80e-3, rel=1e-2)


def test_a_slow_rebuild_is_left_for_a_recompute() -> None:
    """The same pages, by KV: the load is worth it."""
    for token_s, num_pages in [(1e-6, 3), (1.0, 0)]:
        planner = make_planner(token_s)
        planner.load_policy = "auto"
        choice = planner.choose(of(*[HOST] * 3), 0, 100, kinds=of(1, 1, 1))
        assert choice.num_pages == num_pages
    planner = make_planner(1.0)
    planner.load_policy = "auto"
    assert planner.choose(of(*[HOST] * 3), 0, 100, kinds=of(0, 0, 0)).num_pages == 3


@pytest.mark.parametrize(
    ("held", "token_s", "host_s", "disk_s"),
    [
        ("kk", 1e-3, 8e-3, 80e-3),
        ("aa", 1e-6, 2e-3, 80e-3),
        ("ak", 1e-6, 5e-3, 80e-3),
        ("aa", 2e-4, 16e-3, 96e-3),
    ],
)
def test_what_a_loss_costs_is_reckoned_by_kind(
    story: Story, held: str, token_s: float, host_s: float, disk_s: float
) -> None:
    """For eviction: the host gives activations, and they are rebuilt under the load.

    A page that is lost there is computed, in 20 ms, or read from disk and rebuilt.
    """
    story.store("ab", held)
    planner, table = make_planner(token_s), story.cache._table
    reload_s = reload_costs(planner, (TierId.HOST, TierId.DISK), lambda: table)
    (node,) = {id(one): one for one in table.node[table.in_index]}.values()
    computed_s = planner.compute_s(0, 2)
    assert computed_s == pytest.approx(40e-3, rel=1e-2)
    lost_s = max(computed_s - host_s, 0.0) / 2
    assert reload_s(node, 0) == pytest.approx(lost_s, rel=1e-2)
    story.demote()
    assert node.resident == [2, 2]
    assert reload_s(node, 0) == pytest.approx((disk_s - host_s) / 2, rel=1e-2)


def test_a_decision_names_what_is_rebuilt(story: Story) -> None:
    """In its reason, its spans and the report of its request."""
    story.store("abcd", "kaak")
    decision = story.look_up("abcd")
    assert decision.num_act == 2
    assert decision.reason == "load_policy is always; rebuild 2 pages: 2 from host"
    kv, act = Representation.KV, Representation.ACT
    assert decision.spans == [
        Span(0, 1, TierId.HOST, kv),
        Span(1, 2, TierId.HOST, act),
        Span(3, 1, TierId.HOST, kv),
    ]
    report = LoadReport(decision=decision)
    plan = story.cache.commit_load(decision)
    assert plan is not None
    report.add_pages(plan, np.array([True, True, False, True]))
    told = report.as_dict()
    assert [span["action"] for span in told["spans"]] == ["load", "rebuild", "load"]
    host = told["actual"]["by_tier"]["host"]
    assert (host["pages"], host["act_pages"]) == (3, 1)


def test_a_decision_without_activations_is_told_as_before(story: Story) -> None:
    """Neither its reason nor its report have a word more."""
    story.store("ab", "kk")
    decision = story.look_up("ab")
    assert decision.reason == "load_policy is always"
    report = LoadReport(decision=decision)
    plan = story.cache.commit_load(decision)
    assert plan is not None
    report.add_pages(plan, np.ones(2, np.bool_))
    assert set(report.as_dict()["actual"]["by_tier"]["host"]) == {"pages", "copy_s"}
