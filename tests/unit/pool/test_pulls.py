"""Tier peer: when pages are pulled, who waits how long, and what a failure costs.

The cache and its store are real; peers are told what to answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import Lookup, TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.pool.cache_store import CacheStore
from sgl_tiered.pool.peers import Hint, Holder
from sgl_tiered.pool.pulls import PeerPulls
from sgl_tiered.tiers.region import RegionTier
from sgl_tiered.transport.base import TransferStatus
from sgl_tiered.transport.incidents import Incidents

PAGE = 4
LAYOUT = PageLayout(2, PAGE, 64)
DIGEST = b"n" * 16
PROMPT = np.arange(8 * PAGE + 1, dtype=np.int32)
NUM_PAGES = 8
HINT = (Hint("b", "", NUM_PAGES * PAGE),)
TOKEN_S = 1e-2
"""Of computing: a page takes 40 ms, and a pull of any length some 5."""


class Memory:
    """A region that is a plain array."""

    def __init__(self, num_rows: int) -> None:
        self.array = np.zeros((num_rows, LAYOUT.slot_bytes), np.uint8)

    def close(self) -> None:
        """Nothing to close."""


@dataclass
class Answer:
    """A search that the test ends."""

    done: bool = False
    holders: list[Holder] = field(default_factory=list)


@dataclass
class Flight:
    """A fetch that the test ends."""

    instance: int
    tokens: np.ndarray
    addresses: np.ndarray
    first_page: int
    status: TransferStatus = TransferStatus.RUNNING
    error: str = ""
    num_blocks: int = 0
    refused: bool = False
    num_read: int = 0
    read_s: float = 0.0

    def land(self, num_blocks: int | None = None) -> None:
        """Let pages arrive; all if no number is given."""
        self.status = TransferStatus.DONE
        self.num_blocks = len(self.addresses) if num_blocks is None else num_blocks

    def fail(self, error: str = "it broke") -> None:
        """Let it end with an error."""
        self.status, self.error = TransferStatus.FAILED, error


@dataclass
class TestPeers:
    """Two others: instance 1 is b, instance 2 is c."""

    __test__ = False
    searches: list[Answer] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    num_others: int = 2

    def instance_of(self, hint: Hint) -> int | None:
        return {"b": 1, "c": 2}.get(hint.name)

    def name_of(self, instance: int) -> str:
        return "?bc"[instance]

    def search(
        self, digest: bytes, tokens: np.ndarray, first_page: int, timeout_s: float
    ) -> Answer:
        assert timeout_s > 0.0
        assert 0 <= first_page < len(tokens) // PAGE
        self.searches.append(Answer())
        return self.searches[-1]

    def fetch(self, instance: int, digest: bytes, *rest: Any) -> Flight:
        tokens, addresses, first_page, timeout_s = rest
        assert len(tokens) == (first_page + len(addresses)) * PAGE
        assert timeout_s > 0.0
        self.flights.append(Flight(instance, tokens, addresses, first_page))
        return self.flights[-1]


@dataclass
class Bench:
    """An instance whose peers are scripted."""

    host_slots: int = 32
    peers: TestPeers = field(default_factory=TestPeers)
    clock: ManualClock = field(default_factory=ManualClock)
    metrics: MetricsRegistry = field(default_factory=MetricsRegistry)
    incidents: Incidents = field(default_factory=Incidents)

    def __post_init__(self) -> None:
        prefill = PrefillCost(1000, 1, 1, 1e9, overhead_s=1e-6)
        # Told often enough that it believes it.
        for _ in range(64):
            for num in (PAGE, 2 * PAGE, 8 * PAGE):
                prefill.observe(0, num, num * TOKEN_S)
        self.cost = CostModel(prefill, {TierId.HOST: LinkCost(1e-6, 1e9)})
        self.cache = TieredCache(
            CacheConfig(LAYOUT, (TierConfig(TierId.HOST, self.host_slots),)),
            cost=self.cost,
            eviction={TierId.HOST: LRUPolicy()},
            clock=self.clock,
        )
        tier = RegionTier(TierId.HOST, Memory(self.host_slots))
        self.store = CacheStore(self.cache, 0, {TierId.HOST: tier}, 1, 0.75)
        self.pulls = PeerPulls(
            self.store,
            self.peers,
            self.cost,
            self.clock,
            self.metrics,
            page_tokens=PAGE,
            page_bytes=LAYOUT.page_bytes,
            incidents=self.incidents,
        )

    def arrive(
        self,
        rid: str = "r",
        tokens: np.ndarray = PROMPT,
        hints: tuple[Hint, ...] = HINT,
        device_pages: int = 0,
    ) -> None:
        """A request with a prompt comes in."""
        num_pages = len(tokens) // PAGE
        self.pulls.arrived(rid, DIGEST, tokens, device_pages, num_pages, hints)

    def found(self, tokens: np.ndarray = PROMPT) -> int:
        """How many of its pages a load could bring."""
        decision = self.cache.lookup(DIGEST, tokens, 0, quiet=True)
        return decision.num_found if decision.lookup is Lookup.HIT else 0

    def reason(self, rid: str = "r") -> str:
        wanted = self.pulls.wanted(rid)
        assert wanted is not None
        return wanted.reason

    def all_free(self) -> bool:
        """Whether nobody has blocks beside the cache, whose laws hold."""
        self.cache.check()
        return self.store.usage(TierId.HOST).active == 0


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_hinted_prefix_is_pulled_and_found(bench: Bench) -> None:
    """The request waits while it is under way; then its pages are the cache's."""
    bench.arrive()
    (flight,) = bench.peers.flights
    assert not bench.peers.searches
    assert (flight.instance, len(flight.addresses)) == (1, NUM_PAGES)
    assert bench.pulls.should_wait("r")
    assert bench.found() == 0
    bench.clock.advance(0.01)
    flight.land()
    assert not bench.pulls.should_wait("r")
    assert bench.found() == NUM_PAGES
    told = bench.pulls.wanted("r").as_dict()
    assert (told["holder"], told["pages"], told["reason"]) == ("b", NUM_PAGES, "")
    assert told["bytes"] == NUM_PAGES * LAYOUT.page_bytes
    edges = bench.metrics.snapshot()["edges"]["peer->host"]
    assert (edges["pages"], edges["failed_pages"]) == (NUM_PAGES, 0)
    assert bench.all_free()


def test_without_a_hint_peers_are_asked(bench: Bench) -> None:
    """The one with the most pages is asked for them."""
    bench.arrive(hints=())
    (search,) = bench.peers.searches
    assert bench.pulls.should_wait("r")
    search.done, search.holders = True, [Holder(1, 3), Holder(2, 6)]
    bench.pulls.poll()
    (flight,) = bench.peers.flights
    assert (flight.instance, len(flight.addresses)) == (2, 6)
    flight.land()
    assert not bench.pulls.should_wait("r")
    assert bench.found() == 6


def test_a_disk_that_takes_longer_than_computing_is_not_read(bench: Bench) -> None:
    """The holder says how long its disk takes: who has less in memory is asked."""
    bench.arrive(hints=())
    (search,) = bench.peers.searches
    saved_s = NUM_PAGES * PAGE * TOKEN_S
    search.done = True
    search.holders = [Holder(1, NUM_PAGES, 6, 1.1 * saved_s), Holder(2, 3)]
    bench.pulls.poll()
    (flight,) = bench.peers.flights
    assert (flight.instance, len(flight.addresses)) == (2, 3)


def test_what_lies_on_a_disk_is_pulled_where_that_pays(bench: Bench) -> None:
    """Its time counts in the prediction, and not in what the link is taken to take."""
    link_s = bench.pulls._link(1).seconds(NUM_PAGES * LAYOUT.page_bytes)
    bench.arrive(hints=())
    (search,) = bench.peers.searches
    disk_s = 0.5 * bench.pulls._saved_s(PROMPT, 0, NUM_PAGES)
    search.done, search.holders = True, [Holder(1, NUM_PAGES, 6, disk_s)]
    bench.pulls.poll()
    (flight,) = bench.peers.flights
    bench.clock.advance(disk_s + link_s)
    flight.num_read, flight.read_s = 6, disk_s
    flight.land()
    bench.pulls.poll()
    told = bench.pulls.wanted("r").as_dict()
    assert told["predicted_s"] == pytest.approx(disk_s + link_s, abs=1e-5)
    assert (told["pages"], told["disk_pages"]) == (NUM_PAGES, 6)
    after_s = bench.pulls._link(1).seconds(NUM_PAGES * LAYOUT.page_bytes)
    assert after_s == pytest.approx(link_s, rel=0.2)


def test_a_hint_of_a_disk_is_a_slower_link(bench: Bench) -> None:
    """Learned from what that disk has taken, whatever the peer says of it."""
    hint = (Hint("b", "", NUM_PAGES * PAGE, on_disk=True),)
    bench.arrive("first", hints=hint)
    (flight,) = bench.peers.flights
    before_s = bench.pulls.wanted("first").predicted_s
    assert before_s > bench.pulls._link(1).seconds(NUM_PAGES * LAYOUT.page_bytes)
    flight.land()
    for number in range(64):
        disk = bench.pulls._disk(1)
        disk.observe((1 + number % 8) * LAYOUT.page_bytes, 9.0)
    bench.pulls.poll()
    bench.arrive("second", PROMPT + 500, hint)
    assert len(bench.peers.flights) == 1
    assert bench.reason("second") == "recomputing is cheaper"
    assert bench.pulls._read_s(Holder(1, 8, 8, 1e-6)) > 5.0
    assert bench.pulls._read_s(Holder(2, 8, 8, 1e-6)) == 1e-6
    assert bench.pulls._read_s(Holder(1, 8)) == 0.0


def test_an_answer_that_does_not_come_costs_little(bench: Bench) -> None:
    """A tenth of what a pull could save at most."""
    bench.arrive(hints=())
    saved_s = NUM_PAGES * PAGE * TOKEN_S
    assert bench.pulls.should_wait("r")
    bench.clock.advance(0.1 * saved_s + 1e-6)
    assert not bench.pulls.should_wait("r")
    assert bench.reason() == "no peer answered in time"
    assert bench.pulls.num_under_way == 0


def test_only_what_is_missing_here_is_pulled(bench: Bench) -> None:
    """Pages on the device and in the tiers stay where they are."""
    blocks = bench.store.alloc(TierId.HOST, 3)
    bench.store.insert(DIGEST, PROMPT, blocks, 0)
    bench.arrive(device_pages=1)
    (flight,) = bench.peers.flights
    assert (flight.first_page, len(flight.addresses)) == (3, 5)


def test_pages_behind_those_of_the_device_alone_are_found(bench: Bench) -> None:
    """No tier has the first pages: the others are found behind them all the same."""
    bench.arrive(device_pages=2)
    (flight,) = bench.peers.flights
    flight.land()
    bench.pulls.poll()
    decision = bench.cache.lookup(DIGEST, PROMPT, 2, quiet=True)
    assert decision.num_found == NUM_PAGES - 2
    assert bench.found() == 0
    assert bench.all_free()


@pytest.mark.parametrize(
    ("tokens", "hints", "why"),
    [
        (PROMPT, (Hint("nobody", "", 99),), ""),
        (PROMPT[: PAGE + 1], (), "peers seldom"),
    ],
)
def test_what_names_nobody_is_asked_for(
    bench: Bench, tokens: np.ndarray, hints: tuple[Hint, ...], why: str
) -> None:
    """A hint that fits nobody is none."""
    if why:
        bench.pulls._hit_share = 0.0
    bench.arrive(tokens=tokens, hints=hints)
    assert not bench.peers.flights
    assert bench.reason().startswith(why)
    assert bool(bench.peers.searches) == (not why)


def test_what_was_never_found_is_asked_for_now_and_then(bench: Bench) -> None:
    """Otherwise a pool that fills up later would never be looked at."""
    bench.pulls._hit_share = 0.0
    for number in range(400):
        bench.arrive(f"r{number}", hints=())
    assert 0 < len(bench.peers.searches) < 100


def test_a_pull_that_costs_more_than_computing_is_left(bench: Bench) -> None:
    """By what the link of this peer was measured to take."""
    link = bench.pulls._link(1)
    for _ in range(64):
        link.observe(LAYOUT.page_bytes, 9.0)
        link.observe(8 * LAYOUT.page_bytes, 10.0)
    bench.arrive()
    assert not bench.peers.flights
    assert bench.reason() == "recomputing is cheaper"
    assert not bench.pulls.should_wait("r")


def test_links_learn_from_pulls(bench: Bench) -> None:
    """What a peer took is what the next pull from it is taken to take."""
    before_s = bench.pulls._link(1).seconds(8 * LAYOUT.page_bytes)
    for number in range(32):
        tokens = PROMPT + 1000 * (number + 1)
        bench.arrive(f"r{number}", tokens)
        bench.clock.advance(0.1)
        bench.peers.flights[-1].land()
        bench.pulls.poll()
    after_s = bench.pulls._link(1).seconds(8 * LAYOUT.page_bytes)
    assert before_s < 0.02 < 0.05 < after_s < 0.12


def test_a_late_pull_is_not_waited_for_and_kept_for_others(bench: Bench) -> None:
    """The request goes on when the pull can save nothing any more."""
    bench.arrive()
    (flight,) = bench.peers.flights
    bench.clock.advance(NUM_PAGES * PAGE * TOKEN_S * 1.1)
    assert not bench.pulls.should_wait("r")
    assert "late" in bench.reason()
    assert bench.pulls.num_awaited == 0
    flight.land()
    bench.pulls.poll()
    assert bench.found() == NUM_PAGES
    assert "late" in bench.reason(), "what it was told stays"
    assert bench.all_free()


def test_a_failed_pull_is_recomputed(bench: Bench) -> None:
    """No page of it is found, no block of it is lost."""
    bench.arrive()
    bench.peers.flights[0].fail("the bytes that arrived are not those that were sent")
    assert not bench.pulls.should_wait("r")
    assert "not those that were sent" in bench.reason()
    assert bench.found() == 0
    assert bench.all_free()
    assert bench.metrics.snapshot()["edges"]["peer->host"]["failed_pages"] == NUM_PAGES


def test_a_peer_that_fails_again_and_again_rests(bench: Bench) -> None:
    """After three failures it is left alone for a while; then it is tried again."""
    for number in range(3):
        bench.arrive(f"r{number}")
        bench.peers.flights[-1].fail()
        bench.pulls.poll()
    bench.arrive("rests")
    assert len(bench.peers.flights) == 3
    assert "rest" in bench.reason("rests")
    bench.clock.advance(60.0)
    bench.arrive("again")
    assert len(bench.peers.flights) == 4


def test_a_hint_that_was_wrong_is_no_failure(bench: Bench) -> None:
    """A peer that has none of the pages any more is asked for others at once."""
    for number in range(5):
        bench.arrive(f"r{number}")
        bench.peers.flights[-1].refused = True
        bench.peers.flights[-1].fail("it has none of these pages")
        bench.pulls.poll()
    assert len(bench.peers.flights) == 5
    assert bench.reason("r4") == "it has none of these pages"
    assert bench.all_free()


def test_who_lacks_the_same_pages_waits_for_the_same_pull(bench: Bench) -> None:
    """A longer prompt with the same beginning joins; another prompt does not."""
    bench.arrive("a")
    bench.arrive("b", np.append(PROMPT[:-1], np.arange(900, 900 + 2 * PAGE + 1)))
    bench.arrive("c", PROMPT + 500)
    assert len(bench.peers.flights) == 2
    assert bench.pulls.should_wait("b")
    bench.peers.flights[0].land()
    bench.pulls.poll()
    assert not bench.pulls.should_wait("b")
    wanted = bench.pulls.wanted("b")
    assert (wanted.joined, wanted.num_pages) == (True, NUM_PAGES)
    assert bench.pulls.should_wait("c")


def test_a_prompt_of_another_namespace_does_not_join(bench: Bench) -> None:
    """Tenants and adapters share nothing."""
    bench.arrive("a")
    bench.pulls.arrived("b", b"m" * 16, PROMPT, 0, NUM_PAGES, HINT)
    assert len(bench.peers.flights) == 2


def test_part_of_what_was_asked_for_is_kept(bench: Bench) -> None:
    """The holder had fewer pages than the hint said: the blocks left over are free."""
    bench.arrive()
    bench.peers.flights[0].land(3)
    bench.pulls.poll()
    assert bench.found() == 3
    assert bench.all_free()


def test_pages_computed_meanwhile_stay(bench: Bench) -> None:
    """The copies that came are given back."""
    bench.arrive()
    blocks = bench.store.alloc(TierId.HOST, 2)
    assert bench.store.insert(DIGEST, PROMPT, blocks, 0).num_inserted == 2
    bench.peers.flights[0].land()
    bench.pulls.poll()
    assert bench.found() == NUM_PAGES
    assert bench.all_free()


def test_pulls_leave_a_part_of_the_host_tier_alone() -> None:
    """Active blocks take a share at most: what does not fit is computed."""
    bench = Bench(host_slots=8)
    bench.arrive()
    assert not bench.peers.flights
    assert "no room" in bench.reason()


def test_a_request_that_leaves_frees_nothing_too_early(bench: Bench) -> None:
    """Its pull goes on, as the peer may be writing, and what comes is kept."""
    bench.arrive()
    bench.pulls.forget("r")
    assert bench.pulls.wanted("r") is None
    assert bench.pulls.num_awaited == 0
    assert bench.store.usage(TierId.HOST).active == NUM_PAGES
    bench.peers.flights[0].land()
    bench.pulls.poll()
    assert bench.found() == NUM_PAGES


def test_what_comes_after_a_reset_is_not_kept(bench: Bench) -> None:
    """The weights may have changed."""
    bench.arrive()
    bench.cache.reset()
    bench.pulls.reset()
    assert not bench.pulls.should_wait("r")
    bench.peers.flights[0].land()
    bench.pulls.poll()
    assert bench.found() == 0
    assert bench.all_free()


def test_alone_in_a_pool_nothing_is_asked(bench: Bench) -> None:
    """Nor is anything remembered of requests."""
    bench.peers.num_others = 0
    bench.arrive(hints=())
    assert bench.pulls.wanted("r") is None
    assert not bench.peers.searches


def fails(*args: object, **kwargs: object) -> Any:
    raise ValueError("planted")


@pytest.mark.parametrize("part", ["peers.fetch", "peers.search", "store.num_present"])
def test_a_pull_that_fails_here_is_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """It is counted, the request is computed, and no block stays taken."""
    owner, name = part.split(".")
    hints = () if name == "search" else HINT
    with monkeypatch.context() as planted:
        planted.setattr(getattr(bench, owner), name, fails)
        bench.arrive(hints=hints)
    assert bench.incidents.counts == {"failed": 1}
    assert bench.reason() == "the pull failed here"
    assert not bench.pulls.should_wait("r")
    assert bench.pulls.num_under_way == 0
    assert bench.all_free()
    bench.arrive("another")
    bench.peers.flights[-1].land()
    bench.pulls.poll()
    assert bench.found() == NUM_PAGES


@pytest.mark.parametrize("call", ["poll", "should_wait"])
@pytest.mark.parametrize("part", ["cost", "store", "metrics"])
def test_the_end_of_a_pull_may_fail(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str, part: str
) -> None:
    """In whatever part: it is over, others go on, and no block stays taken."""
    other = np.arange(1000, 1000 + 4 * PAGE + 1, dtype=np.int32)
    bench.arrive(hints=() if part == "cost" else HINT)
    bench.arrive("other", other, HINT)
    if part == "cost":
        (search,) = bench.peers.searches
        search.done, search.holders = True, [Holder(1, NUM_PAGES)]
    else:
        bench.peers.flights[0].land()
    method = {
        "cost": (bench.pulls, "_saved_s"),
        "store": (bench.store, "insert_behind"),
        "metrics": (bench.metrics, "record_transfer"),
    }[part]
    with monkeypatch.context() as planted:
        planted.setattr(*method, fails)
        if call == "poll":
            bench.pulls.poll()
        else:
            assert not bench.pulls.should_wait("r")
    assert bench.incidents.counts == {"failed": 1}
    assert bench.reason() == "the pull failed here"
    assert bench.pulls.num_under_way == 1
    bench.peers.flights[-1].land()
    bench.pulls.poll()
    assert bench.found(other) == 4
    assert bench.all_free()
