"""Tier ``peer``: pages of a prompt that another instance holds, pulled where that pays.

When a request arrives, what the device and the tiers here have of its prompt is
subtracted; if computing the rest is predicted to take longer than a pull, a holder is
looked for (a hint of the router's, else the peers are asked) and its pages are fetched
into blocks of this instance. Those that have arrived and passed their checks are
inserted: from then on they are copies like any other, and the request loads them.

A request waits for a pull only while it is looked at, and no longer than the pull was
to save. Whoever else lacks the same pages waits for the same pull. Whatever goes wrong,
a late pull included, ends in computing, as if there were no peers; what comes after its
request has gone on is kept for others.

Costs: a link per peer, learned from its pulls, and its disk's, for pages that nothing
else of it has; a peer that fails again and again rests.
All calls come from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Int32s, UInt64s
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pool.peers import (
    Fetching,
    Hint,
    Holder,
    Peers,
    PullStore,
    Search,
    Wanted,
)
from sgl_tiered.tiers.breaker import CircuitBreaker
from sgl_tiered.transport.base import TransferStatus
from sgl_tiered.transport.incidents import Incidents

__all__ = ["PeerPulls"]

_FIRST_LATENCY_S = 5e-3
_FIRST_BANDWIDTH = 1e9
"""A link before its first pull: messages of a loaded machine, and a tenth of what a
network card or a memory does."""
_DISK_LATENCY_S = 2e-2
_DISK_BANDWIDTH = 2e8
"""A peer's disk that nobody has said anything of: its thread reads in turns."""
_MARGIN = 0.9
"""A pull has to be predicted to save a tenth at least: the prediction is no better."""
_SEARCH_SHARE = 0.1
"""Of what is to be saved, so much may be waited for answers who holds anything."""
_PATIENCE = 8.0
"""Times the usual time of a search: then those that do not answer are left out."""
_LEAST_SEARCH_S = 2e-3
_HIT_WEIGHT = 0.1
"""Of one search in the share of searches that find anything."""
_LEAST_HIT_SHARE = 0.02
_LATE_FACTOR = 2.0
"""A pull may take so many times what it was to save before it is given up."""
_TRIAL_FACTOR = 4.0
"""A trial of a link that looks slow may take so many times what it was to save."""
_FORCED_S = 60.0
_MAX_PULLS = 64
_MAX_ENDED = 1024
_MAX_REASONS = 32
_FAILED = "the pull failed here"


@dataclass(slots=True, eq=False)
class _Pull:
    """One pull, from the search for a holder to the insertion."""

    digest: bytes
    tokens: Int32s
    first_page: int
    max_pages: int
    began_s: float
    give_up_at_s: float
    wanted: dict[str, Wanted] = field(default_factory=dict)
    search: Search | None = None
    instance: int = -1
    addresses: UInt64s | None = None
    fetching: Fetching | None = None
    is_dropped: bool = False
    asked_s: float = 0.0

    @property
    def stop(self) -> int:
        """The page after the last one that may come."""
        if self.addresses is None:
            return self.max_pages
        return self.first_page + len(self.addresses)


class PeerPulls:
    """The pulls of one instance.

    Args:
        store: this instance's blocks and index.
        peers: the others.
        cost: of computing here, and of loads from memory.
        clock: bounds the waiting.
        metrics: counts what came, and why the rest did not.
        page_tokens, page_bytes: of one page.
        load_policy: ``auto`` (pull what pays), ``always`` (for experiments: as if
            computing took a minute) or ``never``; asked each time.
        incidents: counts what fails here.
    """

    def __init__(
        self,
        store: PullStore,
        peers: Peers,
        cost: CostModel,
        clock: Clock,
        metrics: MetricsRegistry,
        *,
        page_tokens: int,
        page_bytes: int,
        load_policy: Callable[[], str] = lambda: "auto",
        incidents: Incidents | None = None,
    ) -> None:
        self._incidents = incidents or Incidents("pulls")
        self._load_policy = load_policy
        self._store = store
        self._peers = peers
        self._cost = cost
        self._clock = clock
        self._metrics = metrics
        self._page_tokens = page_tokens
        self._page_bytes = page_bytes
        self._links: dict[int, LinkCost] = {}
        self._disks: dict[int, LinkCost] = {}
        self._breakers: dict[int, CircuitBreaker] = {}
        self._pulls: list[_Pull] = []
        self._wanted: dict[str, Wanted] = {}
        self._reasons: dict[str, int] = {}
        self._search_s = _FIRST_LATENCY_S
        self._hit_share = 0.5
        self._num_unasked = 0
        # Called when pages have come, or will not.
        self.on_ended: Callable[[], None] = lambda: None

    @property
    def num_under_way(self) -> int:
        """Pulls that have not ended."""
        return len(self._pulls)

    @property
    def num_awaited(self) -> int:
        """Those of them that requests wait for."""
        return sum(bool(pull.wanted) for pull in self._pulls)

    def is_waiting(self, rid: str) -> bool:
        """Return whether a pull for a request is under way."""
        return any(rid in pull.wanted for pull in self._pulls)

    def wanted(self, rid: str) -> Wanted | None:
        """Return what became of a request's wish; None where it never had any."""
        return self._wanted.get(rid)

    # Requests.

    def arrived(
        self,
        rid: str,
        digest: bytes,
        tokens: Int32s,
        device_pages: int,
        max_pages: int,
        hints: Sequence[Hint] = (),
    ) -> None:
        """Begin what pays for a request; asked again for one, it does nothing.

        Whatever peers and the cache do, nothing is raised: what fails is counted, and
        there is no pull.

        Args:
            rid: of the request.
            digest: its namespace.
            tokens: int32, its prompt.
            device_pages: first pages of it that the device has.
            max_pages: pages of it that may be reused.
            hints: who holds more of it; empty: peers are asked.
        """
        if rid in self._wanted or not self._peers.num_others:
            return
        if self._load_policy() == "never":
            return

        def begin() -> None:
            self._look(rid, digest, tokens, device_pages, max_pages, hints)

        if not self._incidents.guard("the beginning of a pull", begin):
            wanted = self._wanted.setdefault(rid, Wanted())
            wanted.reason = _FAILED
            self._count(_FAILED)
            for pull in [each for each in self._pulls if rid in each.wanted]:
                self._break(pull)

    def _look(
        self,
        rid: str,
        digest: bytes,
        tokens: Int32s,
        device_pages: int,
        max_pages: int,
        hints: Sequence[Hint],
    ) -> None:
        """Begin what pays."""
        present = self._store.num_present(digest, tokens, device_pages)
        first = device_pages + present
        if first >= max_pages:
            return
        wanted = self._wanted[rid] = Wanted()
        if len(self._wanted) > _MAX_ENDED + len(self._pulls):
            # Requests that were never forgotten, which there should not be.
            self._wanted.pop(next(iter(self._wanted)))
        common = self._under_way(digest, tokens, first)
        if common is not None:
            common.wanted[rid] = wanted
            wanted.joined = True
            wanted.first_page = first
            return
        wanted.reason = self._begin(
            rid, digest, tokens, first, max_pages, hints, wanted
        )
        if wanted.reason:
            self._count(wanted.reason)

    def should_wait(self, rid: str) -> bool:
        """Return whether a request that could run is better off waiting for a pull."""
        wanted = self._wanted.get(rid)
        if wanted is None or not self._pulls:
            return False
        pull = next((p for p in self._pulls if rid in p.wanted), None)
        if pull is None:
            return False
        self._move(pull)
        if pull not in self._pulls:
            return False
        if self._clock.now() < pull.give_up_at_s:
            return True
        wanted.reason = "the peer was late, so its pages are computed"
        self._count(wanted.reason)
        # It goes on for the others, and for the next one to ask for these pages.
        del pull.wanted[rid]
        return False

    def forget(self, rid: str) -> None:
        """End what is known of a request; its pull goes on for others."""
        if self._wanted.pop(rid, None) is not None:
            for pull in self._pulls:
                pull.wanted.pop(rid, None)

    def poll(self) -> None:
        """Take the ends of searches and pulls; what fails is counted, not raised."""
        for pull in list(self._pulls):
            self._move(pull)

    def reset(self) -> None:
        """Forget requests: the cache was emptied. What is under way ends unused."""
        for pull in self._pulls:
            pull.wanted.clear()
            pull.is_dropped = True
        self._wanted.clear()

    def stats(self) -> dict[str, Any]:
        """Return a JSON-able picture."""
        links = {}
        for instance, link in self._links.items():
            figures = link.snapshot()
            links[self._peers.name_of(instance)] = {
                "latency_s": figures.latency_s,
                "bandwidth_bytes_per_s": figures.bandwidth_bytes_per_s,
                "num_observations": figures.num_observations,
                "rests": self._breaker(instance).rests,
                "last_error": self._breaker(instance).last_error,
            }
        return {
            "under_way": len(self._pulls),
            "search_s": self._search_s,
            "search_hit_share": self._hit_share,
            "not_pulled": dict(self._reasons),
            "links": links,
        }

    # Private.

    def _under_way(self, digest: bytes, tokens: Int32s, page: int) -> _Pull | None:
        """Return a pull under way that may bring a page of a prompt."""
        stop = (page + 1) * self._page_tokens
        for pull in self._pulls:
            covers = pull.digest == digest and pull.first_page <= page < pull.stop
            if covers and np.array_equal(pull.tokens[:stop], tokens[:stop]):
                return pull
        return None

    def _begin(
        self,
        rid: str,
        digest: bytes,
        tokens: Int32s,
        first: int,
        max_pages: int,
        hints: Sequence[Hint],
        wanted: Wanted,
    ) -> str:
        """Begin a pull; return why there is none."""
        if len(self._pulls) >= _MAX_PULLS:
            return "too many pulls are under way"
        worth_s = self._worth_s(tokens, first, max_pages - first)
        holders = []
        for hint in hints:
            instance = self._peers.instance_of(hint)
            num_pages = min(hint.num_tokens // self._page_tokens, max_pages)
            if instance is not None and num_pages > first:
                # Which of them are on its disk is not said.
                num_disk = num_pages - first if hint.on_disk else 0
                holders.append(Holder(instance, num_pages, num_disk))
        now_s = self._clock.now()
        pull = _Pull(digest, tokens, first, max_pages, now_s, now_s)
        pull.wanted[rid] = wanted
        if holders:
            # First, so that it is known where what follows fails.
            self._pulls.append(pull)
            reason = self._fetch(pull, holders)
            if reason:
                self._pulls.remove(pull)
            return reason
        reason = self._no_search(worth_s, max_pages - first)
        if reason:
            return reason
        # Longer than answers usually take, and never a notable part of the gain.
        wait_s = min(_PATIENCE * self._search_s, _SEARCH_SHARE * worth_s)
        wait_s = max(wait_s, _LEAST_SEARCH_S)
        if self._is_forced:
            wait_s = worth_s
        pull.give_up_at_s = now_s + wait_s
        pull.search = self._peers.search(
            digest, tokens[: max_pages * self._page_tokens], first, wait_s
        )
        self._metrics.add("peer_searches")
        self._pulls.append(pull)
        self._advance(pull)
        return ""

    def _no_search(self, worth_s: float, num_pages: int) -> str:
        """Return why peers are not asked who holds anything."""
        if self._is_forced:
            return ""
        num_bytes = num_pages * self._page_bytes
        best_s = min(
            (link.seconds(num_bytes) for link in self._links.values()),
            default=self._first_link().seconds(num_bytes),
        )
        gain_s = _MARGIN * worth_s - best_s
        if gain_s <= 0.0:
            return "recomputing is cheaper than any pull"
        if self._hit_share * gain_s > self._search_s:
            return ""
        # Once in a while all the same: what was never found may be found by now.
        self._num_unasked += 1
        if self._num_unasked * _LEAST_HIT_SHARE * gain_s > self._search_s:
            self._num_unasked = 0
            return ""
        return "peers seldom hold anything, and asking them takes too long"

    def _move(self, pull: _Pull) -> None:
        """Move one pull along; it is over where that fails."""
        if not self._incidents.guard("a pull", partial(self._advance, pull)):
            self._break(pull)

    def _break(self, pull: _Pull) -> None:
        """End a pull of which something has failed here."""
        if pull in self._pulls:
            self._incidents.guard(
                "the end of a pull", partial(self._over, pull, _FAILED)
            )
        if pull.addresses is None:
            return
        # One by one: some may be the cache's by now. Where they are still written to,
        # the pool holds them, and they are free when it says so.
        for at in range(len(pull.addresses)):
            block = pull.addresses[at : at + 1]
            self._incidents.guard("the end of a pull", partial(self._store.free, block))

    def _advance(self, pull: _Pull) -> None:
        """Move one pull along."""
        if pull.search is not None:
            self._end_search(pull, pull.search)
        elif pull.fetching is not None:
            running = pull.fetching.status is TransferStatus.RUNNING
            if not running:
                self._end_fetch(pull, pull.fetching)

    def _end_search(self, pull: _Pull, search: Search) -> None:
        now_s = self._clock.now()
        if not search.done and now_s < pull.give_up_at_s:
            return
        took_s = now_s - pull.began_s
        for wanted in pull.wanted.values():
            wanted.search_s = took_s
        holders = [each for each in search.holders if each.num_pages > pull.first_page]
        self._search_s += _HIT_WEIGHT * (took_s - self._search_s)
        hit = 1.0 if holders else 0.0
        self._hit_share += _HIT_WEIGHT * (hit - self._hit_share)
        pull.search = None
        reason = "no peer holds more of it"
        if not holders and not search.done:
            reason = "no peer answered in time"
        if holders:
            reason = self._fetch(pull, holders)
        if reason:
            self._over(pull, reason)

    def _fetch(self, pull: _Pull, holders: Sequence[Holder]) -> str:
        """Choose a holder and ask for its pages; return why not."""
        best: tuple[float, int, int, float, float] | None = None
        reason = "peers that hold more of it rest after failures"
        for holder in holders:
            instance = holder.instance
            if self._breaker(instance).rests:
                continue
            num_pages = min(holder.num_pages, pull.max_pages) - pull.first_page
            worth_s = self._worth_s(pull.tokens, pull.first_page, num_pages)
            link = self._link(instance)
            pull_s = link.seconds(num_pages * self._page_bytes) + self._read_s(holder)
            if pull_s >= _MARGIN * worth_s:
                is_bearable = pull_s < _TRIAL_FACTOR * worth_s
                if not is_bearable or not link.trial_due():
                    reason = "recomputing is cheaper"
                    continue
            gain_s = worth_s - pull_s
            if best is None or gain_s > best[0]:
                best = (gain_s, instance, num_pages, pull_s, worth_s)
        if best is None:
            return reason
        _, instance, num_pages, pull_s, worth_s = best
        if not self._breaker(instance).allows():
            return reason
        addresses = self._store.alloc(TierId.HOST, num_pages)
        if addresses is None:
            return "the host tier has no room for it"
        now_s = self._clock.now()
        pull.instance, pull.addresses = instance, addresses
        pull.asked_s = now_s
        bound_s = max(worth_s, pull_s)
        pull.give_up_at_s = now_s + bound_s
        name = self._peers.name_of(instance)
        saved_s = self._saved_s(pull.tokens, pull.first_page, num_pages)
        for wanted in pull.wanted.values():
            wanted.holder = name
            wanted.predicted_s, wanted.saved_s = pull_s, saved_s
        pull.fetching = self._peers.fetch(
            instance,
            pull.digest,
            pull.tokens[: pull.stop * self._page_tokens],
            addresses,
            pull.first_page,
            # Late pages are of use to others, and until it ends nobody has the blocks.
            _LATE_FACTOR * bound_s,
        )
        self._metrics.add("peer_pulls")
        return ""

    def _end_fetch(self, pull: _Pull, fetching: Fetching) -> None:
        addresses = pull.addresses
        assert addresses is not None
        num = 0 if pull.is_dropped else min(fetching.num_blocks, len(addresses))
        seconds = self._clock.now() - pull.asked_s
        done = fetching.status is TransferStatus.DONE
        num_bytes = num * self._page_bytes
        reason = "" if done and num else fetching.error or "the peer had none of it"
        if not fetching.refused:
            # A hint that was wrong says nothing about the peer.
            error = "" if done else fetching.error or "failed"
            self._breaker(pull.instance).record(error)
        num_kept = 0
        if num:
            tokens = pull.tokens[: (pull.first_page + num) * self._page_tokens]
            kept = self._store.insert_behind(
                pull.digest, tokens, addresses[:num], pull.first_page
            )
            # Pages that were computed meanwhile are here already.
            self._free(kept.duplicates)
            reason = reason or kept.refusal
            num_kept = 0 if kept.refusal else num
        self._free(addresses[num:])
        num_disk = min(fetching.num_read, num)
        if done and num:
            read_s = min(max(fetching.read_s, 0.0), seconds)
            self._link(pull.instance).observe(num_bytes, seconds - read_s)
            if num_disk:
                disk = self._disk(pull.instance)
                disk.observe(num_disk * self._page_bytes, read_s)
                self._metrics.add("peer_disk_pages", num_disk)
        self._metrics.record_transfer(
            TierId.PEER,
            TierId.HOST,
            num_pages=num,
            num_bytes=num_bytes,
            seconds=seconds,
            failed_pages=0 if done else len(addresses) - num,
            failed=not done,
        )
        for wanted in pull.wanted.values():
            wanted.seconds = seconds
            if num_kept:
                wanted.first_page = pull.first_page
                wanted.num_pages, wanted.num_bytes = num_kept, num_bytes
                wanted.disk_pages, wanted.disk_s = num_disk, fetching.read_s
        self._over(pull, reason)

    def _over(self, pull: _Pull, reason: str) -> None:
        self._pulls.remove(pull)
        for wanted in pull.wanted.values():
            wanted.reason = reason
        if reason:
            self._count(reason)
        self.on_ended()

    def _free(self, addresses: UInt64s) -> None:
        if len(addresses):
            refusal = self._store.free(addresses)
            assert not refusal, refusal

    @property
    def _is_forced(self) -> bool:
        return self._load_policy() == "always"

    def _worth_s(self, tokens: Int32s, first: int, num_pages: int) -> float:
        """Return how long a pull of pages may take."""
        if self._is_forced:
            return _FORCED_S
        return self._saved_s(tokens, first, num_pages)

    def _saved_s(self, tokens: Int32s, first: int, num_pages: int) -> float:
        """Return the predicted time that having pages in the host tier saves."""
        page, total = self._page_tokens, len(tokens)
        begin, end = first * page, (first + num_pages) * page
        all_s = self._cost.recompute_s(begin, max(total - begin, 1))
        rest_s = self._cost.recompute_s(end, max(total - end, 1))
        load_s = self._cost.load_s(TierId.HOST, num_pages * self._page_bytes)
        return all_s - rest_s - load_s

    def _first_link(self) -> LinkCost:
        return LinkCost(_FIRST_LATENCY_S, _FIRST_BANDWIDTH)

    def _link(self, instance: int) -> LinkCost:
        return self._links.setdefault(instance, self._first_link())

    def _disk(self, instance: int) -> LinkCost:
        if instance not in self._disks:
            self._disks[instance] = LinkCost(_DISK_LATENCY_S, _DISK_BANDWIDTH)
        return self._disks[instance]

    def _read_s(self, holder: Holder) -> float:
        """Return the predicted time of a holder's disk.

        It knows its disk, and not how busy it will be: what its reads have taken may
        be worse than what it says.
        """
        if not holder.num_disk:
            return 0.0
        disk = self._disk(holder.instance)
        if holder.read_s and not disk.snapshot().num_observations:
            return holder.read_s
        learned_s = disk.seconds(holder.num_disk * self._page_bytes)
        return max(holder.read_s, learned_s)

    def _breaker(self, instance: int) -> CircuitBreaker:
        breaker = self._breakers.get(instance)
        if breaker is None:
            breaker = self._breakers[instance] = CircuitBreaker(self._clock)
        return breaker

    def _count(self, reason: str) -> None:
        """Count why something was not pulled; of reasons that errors gave, the sum."""
        self._metrics.add("peer_not_pulled")
        if reason not in self._reasons and len(self._reasons) >= _MAX_REASONS:
            reason = "other"
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
