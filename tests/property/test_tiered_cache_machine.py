"""TieredCache against a model that holds the very contents of every slot.

The model writes into a slot, when a transfer ends, which page it now holds, and spoils
it when the transfer begins. So a load that is handed a wrong, evicted or reused slot
reads another page than its prompt has, and the law "a hit's tokens are right" fails.
It knows as well whether a slot holds KV or activations, which is drawn page by page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sgl_tiered.cache.config import DEMOTE_POLICIES, WRITE_POLICIES
from sgl_tiered.cache.table import FREE, READY
from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import Lookup, TierId
from sgl_tiered.core.keys import Namespace, page_keys
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import (
    DemotePlan,
    LoadPlan,
    OffloadPlan,
    PageRecords,
    TransferResult,
    namespace_rows,
)
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.policies.eviction.registry import (
    EVICTION_POLICIES,
    make_eviction_policy,
)
from sgl_tiered.policies.write_admission.registry import WRITE_ADMISSIONS
from sgl_tiered.testing.strategies import prompts

PAGE_TOKENS = 2
SLOTS = {TierId.HOST: 4, TierId.CXL: 5, TierId.DISK: 6}
CHAINS = [
    (TierId.HOST, TierId.CXL, TierId.DISK),
    (TierId.HOST, TierId.DISK),
    (TierId.HOST, TierId.CXL),
    (TierId.CXL, TierId.DISK),
]
NAMESPACES = [Namespace("m", "bfloat16", PAGE_TOKENS, cache_salt=s) for s in ("", "x")]
PROMPTS = prompts(
    page_tokens=PAGE_TOKENS, words=["abca", "abcb", "abbbb", "ac", "ba", "bacab"]
)
RARELY = st.sampled_from([False] * 9 + [True])
SELDOM = st.sampled_from([False] * 3 + [True])
Page = tuple[bytes, bytes]
"""A page as the model knows it: namespace and all tokens up to its end."""


@dataclass(frozen=True)
class Setup:
    """How to make the cache, so that a replay can make it again."""

    policy: str
    write_policy: str
    demote_policy: str
    load_policy: str
    seed: int
    tiers: tuple[TierId, ...]
    disk_admission: str
    act_page_bytes: int
    step_pages: int = 1024
    num_open: int | None = None
    """Slots of the first tier that may be used at first."""

    def make(self, disk_slots: int = SLOTS[TierId.DISK]) -> TieredCache:
        """Return an empty cache with open namespaces."""
        slots = {**SLOTS, TierId.DISK: disk_slots}
        rng = np.random.default_rng(self.seed)
        config = CacheConfig(
            PageLayout(2, PAGE_TOKENS, 64),
            tuple(
                TierConfig(tier, slots[tier], None if number else self.num_open)
                for number, tier in enumerate(self.tiers)
            ),
            load_policy=self.load_policy,
            write_policy=self.write_policy,
            demote_policy=self.demote_policy,
            demote_watermark=0.5,
            demote_rest_s=0.0,
            disk_admission=self.disk_admission,
            act_page_bytes=self.act_page_bytes,
        )
        # A page takes 4 us to compute; a host load 1 us + 1 us per page, a CXL load
        # 2 us + 1.3 us per page, a disk load 10 us + 2 us per page: which of them is
        # worth it differs from case to case.
        cost = CostModel(
            PrefillCost(1000, 1, 1, 1e9, overhead_s=1e-6),
            {
                TierId.HOST: LinkCost(1e-6, 5e8),
                TierId.CXL: LinkCost(2e-6, 4e8),
                TierId.DISK: LinkCost(1e-5, 2.5e8),
            },
        )
        cache = TieredCache(
            config,
            cost=cost,
            eviction={t: make_eviction_policy(self.policy, rng) for t in self.tiers},
            clock=ManualClock(),
        )
        for namespace in NAMESPACES:
            cache.open_namespace(namespace)
        cache._store.removal.max_pages = self.step_pages
        return cache


def pages_of(digest: bytes, tokens: np.ndarray) -> list[Page]:
    """Return the whole pages of a prompt."""
    stop = len(tokens) // PAGE_TOKENS * PAGE_TOKENS
    ends = range(PAGE_TOKENS, stop + 1, PAGE_TOKENS)
    return [(digest, tokens[:end].tobytes()) for end in ends]


def contents(cache: TieredCache, tier: TierId) -> dict[Page, tuple[int, bool]]:
    """Return every copy in a tier: its page, its slot, and whether it is a hit."""
    store = cache._store
    number = store.tiers.index(tier)
    found = {}
    for node in store.index.nodes():
        raw = b"".join(part.raw for part in store.index.path_to(node))
        for at, row in enumerate(node.rows):
            entry = store.table.entry_of[number][row]
            if entry >= 0:
                end = (node.first_page + at + 1) * store.page_bytes
                address = int(store.table.address[entry])
                is_hit = bool(store.table.flags[row] >> number & 1)
                found[node.digest, raw[:end]] = (address, is_hit)
    return found


def left_over(cache: TieredCache, tier: TierId) -> set[int]:
    """Return the slots of copies that a drop has forgotten and nobody uses."""
    table = cache._store.table
    idle = table.doomed & (table.state == READY) & (table.pins == 0)
    entries = np.flatnonzero(idle & (table.tier == table.tiers.index(tier)))
    return set(table.address[entries].tolist())


def snapshot(cache: TieredCache) -> tuple[Any, ...]:
    """Return everything but recency: what a failed plan must leave alone."""
    table = cache._store.table
    return (
        [contents(cache, tier) for tier in table.tiers],
        [cache.occupancy(tier) for tier in table.tiers],
        table.pins.tobytes(),
        table.state.tobytes(),
        table.doomed.tobytes(),
        table.flags.tobytes(),
        [slots._is_free.tobytes() for slots in table.slots],
        table.rows.used_slots,
    )


@dataclass
class Driver:
    """Carries out operations by name and keeps a log, for the replay."""

    cache: TieredCache
    plans: dict[int, Any] = field(default_factory=dict)
    decisions: list[Any] = field(default_factory=list)
    log: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)
    sighted: Any = None

    def run(self, name: str, *args: Any) -> Any:
        """Do one operation; plans and decisions are named by number."""
        value = getattr(self, "do_" + name)(*args)
        self.log.append((name, args, _summary(value)))
        return value

    def do_lookup(self, *args: Any) -> Any:
        digest, tokens, first_page, max_pages, allowed = args
        self.decisions.append(
            self.cache.lookup(
                digest, tokens, first_page, max_pages=max_pages, tiers_allowed=allowed
            )
        )
        return self.decisions[-1]

    def do_commit(self, number: int) -> LoadPlan | None:
        return self._keep(self.cache.commit_load(self.decisions[number]))

    def do_offload(
        self, digest: bytes, tokens: Any, most: int | None, kinds: Any
    ) -> Any:
        return self._keep(
            self.cache.plan_offload(digest, tokens, max_pages=most, kinds=kinds)
        )

    def do_sight(self, digest: bytes, tokens: Any, seen: int) -> None:
        self.sighted = self.cache.sight(digest, tokens, seen_pages=seen)

    def do_offload_late(
        self, digest: bytes, tokens: Any, most: int | None, kinds: Any
    ) -> Any:
        plan = self.cache.plan_offload(
            digest, tokens, max_pages=most, sighted=self.sighted, kinds=kinds
        )
        return self._keep(plan)

    def do_demote(self, most: int) -> Any:
        return self._keep(self.cache.plan_demote(most))

    def do_finish_load(self, plan_id: int, landed: bool, bad: list[int]) -> None:
        self.cache.finish_load(
            self.plans.pop(plan_id), landed=landed, bad_pages=np.array(bad, np.int32)
        )

    def do_finish_offload(self, plan_id: int, ok: list[bool]) -> None:
        self.cache.finish_offload(self.plans.pop(plan_id), _result(ok))

    def do_finish_demote(self, plan_id: int, ok: list[bool]) -> None:
        self.cache.finish_demote(self.plans.pop(plan_id), _result(ok))

    def do_drop_tier(self, tier: TierId) -> None:
        self.cache.drop_tier(tier)

    def do_free_dropped(self) -> bool:
        return self.cache.free_dropped()

    def do_take_forgotten(self, tier: TierId) -> Any:
        return self.cache.take_forgotten(tier)

    def do_open_slots(self, tier: TierId, num_slots: int) -> None:
        self.cache.open_slots(tier, num_slots)

    def do_reset(self) -> None:
        self.cache.reset()

    def do_adopt(self, tier: TierId, records: PageRecords) -> Any:
        return self.cache.adopt(tier, records)

    def _keep(self, plan: Any) -> Any:
        if plan is not None:
            self.plans[plan.plan_id] = plan
        return plan


def _result(ok: list[bool]) -> TransferResult:
    sums = np.arange(100, 100 + len(ok), dtype=np.uint64)
    return TransferResult(np.array(ok, np.bool_), 0, 1e-3, sums)


def _summary(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_summary(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {n: _summary(getattr(value, n)) for n in value.__dataclass_fields__}
    return value


class TieredCacheMachine(RuleBasedStateMachine):
    """Random operations of several requests, with transfers under way meanwhile."""

    driver_class = Driver

    @initialize(
        setup=st.builds(
            Setup,
            policy=st.sampled_from(EVICTION_POLICIES),
            write_policy=st.sampled_from(WRITE_POLICIES),
            demote_policy=st.sampled_from(DEMOTE_POLICIES),
            load_policy=st.sampled_from(["auto", "always"]),
            seed=st.integers(0, 9),
            tiers=st.sampled_from(CHAINS),
            disk_admission=st.sampled_from(WRITE_ADMISSIONS),
            act_page_bytes=st.sampled_from([0, 256]),
            step_pages=st.sampled_from([1, 2, 1024]),
            num_open=st.sampled_from([None, 1, 3]),
        )
    )
    def start(self, setup: Setup) -> None:
        """Choose the policies."""
        self.begin(setup)

    def begin(self, setup: Setup) -> None:
        """Make the cache and an empty model."""
        self.setup = setup
        self.driver = self.driver_class(setup.make())
        self.digests = [namespace.digest() for namespace in NAMESPACES]
        # What lies in each slot: the model's truth about bytes.
        self.tiers = setup.tiers
        self.first = setup.tiers[0]
        self.num_open = setup.num_open or SLOTS[self.first]
        self.memory: dict[TierId, dict[int, Page | None]] = {t: {} for t in self.tiers}
        # And whether it is KV (0) or activations (1).
        self.held: dict[TierId, dict[int, int]] = {t: {} for t in self.tiers}
        self.records: dict[int, tuple[Page, bytes, bytes]] = {}
        self.pages: dict[int, list[Page]] = {}
        self.decision_pages: list[list[Page]] = []
        self.stale: list[int] = []
        # Loads of pages that a reset has forgotten: nobody waits for them.
        self.reset_away: set[int] = set()

    @property
    def cache(self) -> TieredCache:
        return self.driver.cache

    def plans(self, kind: type) -> list[Any]:
        """Return the plans of one kind under way."""
        return [p for p in self.driver.plans.values() if isinstance(p, kind)]

    def pinned(self) -> set[tuple[TierId, int]]:
        """Return the slots that plans under way read."""
        slots = set()
        for plan in self.plans(LoadPlan):
            slots |= {
                (TierId(int(t)), int(a))
                for t, a in zip(plan.tiers, plan.addresses, strict=True)
            }
        for plan in self.plans(DemotePlan):
            slots |= {(plan.source, int(a)) for a in plan.source_addresses}
        return slots

    def kept(self) -> dict[TierId, dict[Page, tuple[int, bool]]]:
        """Return the copies in each tier but for those that may go at any time."""
        found = {}
        for tier in self.tiers:
            gone = left_over(self.cache, tier)
            here = contents(self.cache, tier).items()
            found[tier] = {page: copy for page, copy in here if copy[0] not in gone}
        return found

    def at_rest(self) -> tuple[Any, ...] | None:
        """Return a snapshot; None where room may be made by giving back what went."""
        return None if self.cache.is_freeing else snapshot(self.cache)

    def num_written(self) -> int:
        """Return how many slots plans under way write."""
        plans = [*self.plans(OffloadPlan), *self.plans(DemotePlan)]
        return sum(len(plan.pages) for plan in plans)

    # Rules. Hypothesis leaves some of them out of each run, so those that only make
    # sense together call each other.

    @rule(
        space=st.integers(0, 1),
        tokens=PROMPTS,
        most=st.none() | st.integers(1, 4),
        ends_now=st.integers(0, 3),
        late=RARELY,
        acts=st.integers(0, 31),
    )
    def new_pages(
        self,
        space: int,
        tokens: np.ndarray,
        most: int | None,
        ends_now: int,
        late: bool,
        acts: int,
    ) -> None:
        """A request has computed its prompt."""
        self.offload(space, tokens, most, ends_now, late, acts)

    @rule(space=st.integers(0, 1), tokens=PROMPTS, seen=st.integers(0, 2))
    def sight(self, space: int, tokens: np.ndarray, seen: int) -> None:
        """A request whose offload is put off changes recency and nothing else."""
        before = snapshot(self.cache)
        self.driver.run("sight", self.digests[space], tokens, seen)
        assert snapshot(self.cache) == before

    def offload(
        self,
        space: int,
        tokens: np.ndarray,
        most: int | None,
        ends_now: int,
        late: bool = False,
        acts: int = 0b01101,
    ) -> None:
        """Room is made lawfully, or nothing changes at all."""
        digest = self.digests[space]
        prompt = pages_of(digest, tokens)
        before = self.at_rest()
        old = self.kept()
        pinned = self.pinned()
        name = "offload_late" if late else "offload"
        kinds = None
        if self.setup.act_page_bytes:
            kinds = np.array([acts >> at & 1 for at in range(len(prompt))], np.uint8)
        plan = self.driver.run(name, digest, tokens, most, kinds)
        if plan is None:
            assert before in (None, snapshot(self.cache))
            return
        wanted = None if kinds is None else kinds[plan.positions]
        self.holds(self.first, plan.addresses, plan, wanted)
        assert most is None or len(plan.pages) <= most
        self.pages[plan.plan_id] = [prompt[at] for at in plan.positions]
        for page, address in zip(
            self.pages[plan.plan_id], plan.addresses.tolist(), strict=True
        ):
            assert page not in old[self.first]
            self.memory[self.first][address] = None
        self.check_evictions(old, pinned, self.first, len(plan.pages), set(prompt))
        if ends_now:
            # One in three arrives in part: every other page.
            some = [ends_now > 1 or i % 2 == 0 for i in range(len(plan.pages))]
            self.end_offload(plan, some)

    @rule(most=st.integers(1, 5), ends_now=st.integers(0, 3))
    def go_down(self, most: int, ends_now: int) -> None:
        """The pump runs."""
        self.demote(most, ends_now)

    def demote(self, most: int, ends_now: int) -> None:
        """Only hits go down, one tier each, after their parents; pins hold."""
        before = self.at_rest()
        old = self.kept()
        everything = {tier: set(contents(self.cache, tier)) for tier in self.tiers}
        pinned = self.pinned()
        busy = {plan.source for plan in self.plans(DemotePlan)}
        plan = self.driver.run("demote", most)
        if plan is None:
            assert before in (None, snapshot(self.cache))
            return
        assert 1 <= len(plan.pages) <= most
        place = self.tiers.index(plan.source)
        assert plan.target == self.tiers[place + 1]
        assert plan.source not in busy, "a second plan on one edge"
        at_source = {address: page for page, (address, _) in old[plan.source].items()}
        chosen = [at_source[address] for address in plan.source_addresses.tolist()]
        self.pages[plan.plan_id] = chosen
        there = everything[plan.target]
        for number, page in enumerate(chosen):
            assert old[plan.source][page][1]
            assert page not in there
            digest, raw = page
            parent = raw[: -4 * PAGE_TOKENS]
            assert not parent or (digest, parent) in there
            there.add(page)
            self.check_record(plan.records, number, page)
            address = int(plan.target_addresses[number])
            self.memory[plan.target][address] = None
            if plan.target is TierId.DISK:
                self.records.pop(address, None)
        said = [self.held[plan.source][a] for a in plan.source_addresses.tolist()]
        self.holds(plan.target, plan.target_addresses, plan.records, said)
        self.check_evictions(old, pinned, plan.target, len(chosen), set(chosen))
        if ends_now:
            self.end_demote(plan, [True] * len(chosen))

    def holds(self, tier: TierId, addresses: Any, plan: Any, kinds: Any) -> None:
        """Note what slots are to hold, which a plan has to say as well."""
        if not self.setup.act_page_bytes:
            assert plan.representations is None
            kinds = np.zeros(len(addresses), np.uint8)
        else:
            assert plan.representations.tolist() == list(kinds)
        for address, kind in zip(addresses.tolist(), kinds, strict=True):
            self.held[tier][address] = int(kind)

    def check_record(self, records: PageRecords, number: int, page: Page) -> None:
        """A record's key is the chain of all tokens up to its page."""
        digest, raw = page
        tokens = np.frombuffer(raw, np.int32)
        keys = page_keys(digest, tokens, PAGE_TOKENS)
        parent = keys[-2].tobytes() if len(keys) > 1 else digest
        assert records.namespaces[number].tobytes() == digest
        assert records.keys[number].tobytes() == keys[-1].tobytes()
        assert records.parents[number].tobytes() == parent
        assert (records.tokens[number] == tokens[-PAGE_TOKENS:]).all()

    def check_evictions(
        self,
        old: dict[TierId, dict[Page, tuple[int, bool]]],
        pinned: set[tuple[TierId, int]],
        tier: TierId,
        num_new: int,
        kept: set[Page],
    ) -> None:
        """What went, went from one tier, for need, unpinned, and last pages first."""
        for other in self.tiers:
            now = contents(self.cache, other)
            lost = set(old[other]) - set(now)
            if other != tier:
                assert not lost
                continue
            assert len(lost) <= num_new
            if lost and not self.cache.is_freeing:
                assert self.cache.occupancy(tier).free_slots == 0
            for page in lost:
                assert page not in kept
                address, was_hit = old[other][page]
                assert was_hit, "a copy in flight was evicted"
                assert (tier, address) not in pinned, "a pinned copy was evicted"
                digest, raw = page
                for at, left in now:
                    assert at != digest or not left.startswith(raw) or left == raw

    @rule(
        space=st.integers(0, 1),
        tokens=PROMPTS,
        first_page=st.sampled_from([0, 0, 0, 1, 3]),
        most=st.none() | st.integers(1, 4),
        allowed=st.sampled_from([None, None, None, 0, 1]),
        commits=st.integers(0, 3),
        was_seen=st.integers(0, 3),
        goes_down=st.booleans(),
        ends_now=st.booleans(),
    )
    def request(
        self,
        space: int,
        tokens: np.ndarray,
        first_page: int,
        most: int | None,
        allowed: int | None,
        commits: int,
        was_seen: int,
        goes_down: bool,
        ends_now: bool,
    ) -> None:
        """A request arrives, often for a prompt that was there before."""
        if was_seen:
            self.offload(space, tokens, None, was_seen)
        if goes_down:
            self.demote(5, True)
        only = None if allowed is None else (self.tiers[allowed],)
        plan = self.look_up(space, tokens, first_page, most, only, bool(commits))
        if plan is not None and ends_now:
            self.end_load(plan, True, set())

    def look_up(
        self,
        space: int,
        tokens: np.ndarray,
        first_page: int,
        most: int | None,
        allowed: tuple[TierId, ...] | None,
        commits: bool,
    ) -> LoadPlan | None:
        """A lookup finds exactly the model's run of ready copies, fastest first."""
        digest = self.digests[space]
        prompt = pages_of(digest, tokens)[first_page:]
        before = snapshot(self.cache)
        decision = self.driver.run("lookup", digest, tokens, first_page, most, allowed)
        assert snapshot(self.cache) == before
        loading = {
            page
            for plan in self.plans(LoadPlan)
            for page in self.pages[plan.plan_id]
            if plan.plan_id not in self.reset_away
        }
        hits = {
            tier: {page for page, (_, hit) in contents(self.cache, tier).items() if hit}
            for tier in (allowed or self.tiers)
        }
        run: list[TierId] = []
        for page in prompt[:most]:
            source = [tier for tier in hits if page in hits[tier]]
            if page in loading or not source:
                break
            run.append(min(source))
        assert decision.num_found == len(run)
        assert [TierId(int(t)) for t in decision.tiers] == run[: decision.num_pages]
        is_pending = bool(prompt[:most]) and prompt[0] in loading
        wanted = Lookup.HIT if decision.num_pages else Lookup.MISS
        assert decision.lookup == (Lookup.PENDING if is_pending else wanted)
        self.decision_pages.append(prompt[: decision.num_pages])
        number = len(self.decision_pages) - 1
        if not commits:
            self.stale.append(number)
            return None
        plan = self.driver.run("commit", number)
        assert (plan is None) == (decision.num_pages == 0)
        if plan is not None:
            self.pages[plan.plan_id] = self.decision_pages[number]
        return plan

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def commit_late(self, data: st.DataObject) -> None:
        """An old decision is refused unless every source is still what it was."""
        number = data.draw(st.sampled_from(self.stale))
        self.stale.remove(number)
        before = snapshot(self.cache)
        plan = self.driver.run("commit", number)
        if plan is None:
            assert snapshot(self.cache) == before
            return
        self.pages[plan.plan_id] = self.decision_pages[number]

    @precondition(lambda self: self.plans(LoadPlan))
    @rule(data=st.data(), landed=st.booleans())
    def finish_load(self, data: st.DataObject, landed: bool) -> None:
        """The slots of a load hold, at its end, the pages that the prompt has."""
        plan = data.draw(st.sampled_from(self.plans(LoadPlan)))
        bad = data.draw(st.sets(st.integers(0, plan.num_pages - 1), max_size=2))
        self.end_load(plan, landed, bad)

    def end_load(self, plan: LoadPlan, landed: bool, bad: set[int]) -> None:
        """Compare what the slots hold with what the prompt has."""
        wanted = self.pages[plan.plan_id]
        assert len(wanted) == plan.num_pages
        for page, tier, address in zip(wanted, plan.tiers, plan.addresses, strict=True):
            assert self.memory[TierId(int(tier))][int(address)] == page
        self.check_kinds(plan)
        self.driver.run("finish_load", plan.plan_id, landed, sorted(bad))
        for number in bad:
            copies = contents(self.cache, TierId(int(plan.tiers[number])))
            hits = {address: page for page, (address, hit) in copies.items() if hit}
            assert int(plan.addresses[number]) not in hits
            # A copy of the same page that was made after a reset is another one.
            if plan.plan_id not in self.reset_away:
                assert wanted[number] not in hits.values()

    def check_kinds(self, plan: LoadPlan) -> None:
        """A load says what its sources hold, and how many bytes that is."""
        if plan.representations is None:
            assert not self.setup.act_page_bytes
            assert plan.num_bytes is None
            return
        sources = zip(plan.tiers.tolist(), plan.addresses.tolist(), strict=True)
        held = [self.held[TierId(tier)][address] for tier, address in sources]
        assert plan.representations.tolist() == held
        sizes = (self.cache.config.layout.page_bytes, self.setup.act_page_bytes)
        assert plan.num_bytes is not None
        assert plan.num_bytes.tolist() == [sizes[kind] for kind in held]

    @precondition(lambda self: self.plans(OffloadPlan))
    @rule(data=st.data())
    def finish_offload(self, data: st.DataObject) -> None:
        """What arrived is written in the model, and nothing else becomes a hit."""
        plan = data.draw(st.sampled_from(self.plans(OffloadPlan)))
        self.end_offload(plan, [data.draw(st.integers(0, 9)) > 0 for _ in plan.pages])

    def end_offload(self, plan: OffloadPlan, ok: list[bool]) -> None:
        """Write what arrived."""
        for page, address, arrived in zip(
            self.pages[plan.plan_id], plan.addresses.tolist(), ok, strict=True
        ):
            if arrived:
                self.memory[self.first][address] = page
        self.driver.run("finish_offload", plan.plan_id, ok)

    @precondition(lambda self: self.plans(DemotePlan))
    @rule(data=st.data())
    def finish_demote(self, data: st.DataObject) -> None:
        """The source still holds the page when the copy ends."""
        plan = data.draw(st.sampled_from(self.plans(DemotePlan)))
        self.end_demote(plan, [data.draw(st.integers(0, 9)) > 0 for _ in plan.pages])

    def end_demote(self, plan: DemotePlan, ok: list[bool]) -> None:
        """Copy in the model what arrived, and keep its record."""
        for number, page in enumerate(self.pages[plan.plan_id]):
            source = int(plan.source_addresses[number])
            assert self.memory[plan.source][source] == page
            if not ok[number]:
                continue
            target = int(plan.target_addresses[number])
            self.memory[plan.target][target] = page
            if plan.target is TierId.DISK:
                self.records[target] = (
                    page,
                    plan.records.keys[number].tobytes(),
                    plan.records.parents[number].tobytes(),
                )
        self.driver.run("finish_demote", plan.plan_id, ok)

    @precondition(lambda self: TierId.DISK in self.tiers)
    @rule()
    def forget(self) -> None:
        """An address to forget holds no copy."""
        for address in self.driver.run("take_forgotten", TierId.DISK).tolist():
            used = {a for a, _ in contents(self.cache, TierId.DISK).values()}
            assert address not in used
            self.records.pop(address, None)

    @rule(place=st.integers(0, 2), really=SELDOM)
    def drop_tier(self, place: int, really: bool) -> None:
        """After a drop the tier has no hit, and only what is in use keeps its slot."""
        if not really:
            return
        tier = self.tiers[place % len(self.tiers)]
        self.driver.run("drop_tier", tier)
        left = contents(self.cache, tier)
        assert not any(hit for _, hit in left.values())
        if not self.cache.is_freeing:
            self.check_in_use(tier)

    def check_in_use(self, tier: TierId) -> None:
        """Of a tier without hits only what plans use keeps its slot."""
        entries = [*self.cache._chain.under_way, *self.cache.promoter.under_way]
        used = [e for one in entries for e in (*one.reads, *one.writes)]
        for plan in (*self.cache._loads.values(), *self.cache._offloads.values()):
            used += [*plan]
        table = self.cache._store.table
        number = table.tiers.index(tier)
        used_slots = {int(table.address[e]) for e in used if table.tier[e] == number}
        num_held = self.cache._store.num_held[number]
        occupancy = self.cache.occupancy(tier)
        assert occupancy.used_slots == len(used_slots) + num_held

    @precondition(lambda self: self.cache.is_freeing)
    @rule(to_the_end=st.booleans())
    def free_dropped(self, to_the_end: bool) -> None:
        """Nothing comes into sight by it; at its end nothing is left over."""
        hits = [self.hits(tier) for tier in self.tiers]
        while self.driver.run("free_dropped") and to_the_end:
            self.cache.check()
        assert [self.hits(tier) for tier in self.tiers] == hits
        if not self.cache.is_freeing:
            assert not any(left_over(self.cache, tier) for tier in self.tiers)

    def hits(self, tier: TierId) -> set[Page]:
        """Return the pages that a tier has."""
        found = contents(self.cache, tier).items()
        return {page for page, (_, is_hit) in found if is_hit}

    @precondition(lambda self: self.num_open < SLOTS[self.first])
    @rule(more=st.integers(0, 3))
    def open_slots(self, more: int) -> None:
        """Slots that come into use later are free; those in use stay as they are."""
        held = {tier: contents(self.cache, tier) for tier in self.tiers}
        wanted = min(self.num_open + more, SLOTS[self.first])
        self.driver.run("open_slots", self.first, wanted)
        self.num_open = wanted
        assert {tier: contents(self.cache, tier) for tier in self.tiers} == held

    @rule(really=SELDOM)
    def reset(self, really: bool) -> None:
        """After a reset nothing is found; slots in use are still taken."""
        if not really:
            return
        under_way = len(self.pinned()) + self.num_written()
        self.driver.run("reset")
        self.reset_away |= {plan.plan_id for plan in self.plans(LoadPlan)}
        assert not any(contents(self.cache, tier) for tier in self.tiers)
        used = sum(self.cache.occupancy(tier).used_slots for tier in self.tiers)
        left = sum(len(left_over(self.cache, tier)) for tier in self.tiers)
        held = sum(self.cache._store.num_held)
        assert used == under_way + left + held

    @precondition(lambda self: TierId.DISK in self.tiers)
    @rule(data=st.data(), really=RARELY)
    def restart(self, data: st.DataObject, really: bool) -> None:
        """A new process adopts exactly the records that hang together."""
        if not really:
            return
        self.replay()
        kept = data.draw(st.permutations(list(self.records.items())))
        damaged = set(data.draw(st.sets(st.integers(0, 7), max_size=2)))
        held = self.held[TierId.DISK]
        self.begin(self.setup)
        for digest in self.digests:
            mine = [(a, r) for a, r in kept if r[0][0] == digest]
            self.held[TierId.DISK] |= {a: held[a] for a, _ in mine}
            self.adopt(digest, mine, damaged)

    def adopt(
        self,
        digest: bytes,
        found: list[tuple[int, tuple[Page, bytes, bytes]]],
        damaged: set[int],
    ) -> None:
        """Adopt records of one namespace, of which some have a flipped token."""
        tokens = [np.frombuffer(r[0][1], np.int32)[-PAGE_TOKENS:] for _, r in found]
        table = np.array(tokens, np.int32).reshape(-1, PAGE_TOKENS)
        spoilt = [at for at in range(len(found)) if at in damaged]
        table[spoilt] += 1
        records = PageRecords(
            namespaces=namespace_rows(digest, len(found)),
            keys=np.array([list(r[1]) for _, r in found], np.uint8).reshape(-1, 16),
            parents=np.array([list(r[2]) for _, r in found], np.uint8).reshape(-1, 16),
            tokens=table,
            checksums=np.zeros(len(found), np.uint64),
            addresses=np.array([address for address, _ in found], np.int64),
            representations=np.array(
                [self.held[TierId.DISK][address] for address, _ in found], np.uint8
            ),
        )
        whole = {r[0]: a for at, (a, r) in enumerate(found) if at not in damaged}
        wanted = {
            page: address
            for page, address in whole.items()
            if all(
                (digest, page[1][:end]) in whole
                for end in range(4 * PAGE_TOKENS, len(page[1]), 4 * PAGE_TOKENS)
            )
        }
        num_adopted, refused = self.driver.run("adopt", TierId.DISK, records)
        adopted = {
            page: address
            for page, (address, _) in contents(self.cache, TierId.DISK).items()
            if page[0] == digest
        }
        assert num_adopted == len(adopted) == len(found) - len(refused)
        assert set(adopted) == set(wanted)
        for address, (page, key, parent) in found:
            if adopted.get(page) == address:
                self.memory[TierId.DISK][address] = page
                self.records[address] = (page, key, parent)

    # Laws.

    @invariant()
    def laws_hold(self) -> None:
        """Slots, counts, flags and pins agree; every hit is what the model holds."""
        self.cache.check()
        for tier in self.tiers:
            capacity = self.num_open if tier is self.first else SLOTS[tier]
            occupancy = self.cache.occupancy(tier)
            assert occupancy.used_slots + occupancy.free_slots == capacity
            used_bytes = occupancy.used_slots * occupancy.slot_bytes
            assert used_bytes <= capacity * self.cache.config.layout.slot_bytes
            for page, (address, is_hit) in contents(self.cache, tier).items():
                assert not is_hit or self.memory[tier][address] == page
                assert address < capacity
        table = self.cache._store.table
        for entry in np.flatnonzero(table.state != FREE).tolist():
            held = self.held[table.tiers[table.tier[entry]]]
            assert table.representation[entry] == held[int(table.address[entry])]

    def teardown(self) -> None:
        """End the run with a replay."""
        if hasattr(self, "driver"):
            self.replay()

    def replay(self) -> None:
        """The same operations on a new cache give the same answers and state."""
        again = self.driver_class(self.setup.make())
        for name, args, _ in self.driver.log:
            again.run(name, *args)
        assert [e[2] for e in again.log] == [e[2] for e in self.driver.log]
        assert again.cache.state_digest() == self.cache.state_digest()


TestTieredCacheMachine = TieredCacheMachine.TestCase
TestTieredCacheMachine.settings = settings(
    # 60, and 600 in the profile ``full``.
    max_examples=settings.default.max_examples * 3 // 5,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
