"""Adoption in slices, with everything else that a cache does in between.

The machine is that of ``TieredCache``; after a restart the pages come back a few at a
time, under lookups, offloads, evictions, drops and resets. Its model of what each slot
holds finds every slot that was handed out while a page was still to be adopted from it,
and every page that was adopted from a slot that had been written since.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sgl_tiered.cache.adoption import Adoption, arrange
from sgl_tiered.core.ids import Representation, TierId
from sgl_tiered.core.keys import KEY_BYTES, page_keys
from sgl_tiered.core.plans import FoundPages, PageRecords, namespace_rows
from tests.property.test_tiered_cache_machine import (
    CHAINS,
    NAMESPACES,
    PAGE_TOKENS,
    RARELY,
    Driver,
    Setup,
    TieredCacheMachine,
    contents,
)


class SlicingDriver(Driver):
    """Begins adoptions and goes on with them."""

    adoption: Adoption | None = None

    def do_begin_adoption(self, found: FoundPages) -> None:
        self.adoption = self.cache.begin_adoption(TierId.DISK, arrange(found))

    def do_step(self, most: int) -> int:
        assert self.adoption is not None
        return self.adoption.step(most)


class AdoptionMachine(TieredCacheMachine):
    """Restarts in the middle of everything, adoptions too."""

    driver_class: type[Driver] = SlicingDriver

    @property
    def num_left(self) -> int:
        """Pages that are still to be adopted."""
        adoption = getattr(self.driver, "adoption", None)
        return 0 if adoption is None else adoption.num_left

    @precondition(lambda self: TierId.DISK in self.tiers)
    @rule(data=st.data(), really=st.integers(0, 4))
    def restart(self, data: st.DataObject, really: int) -> None:
        """A new process finds what is on disk, and adopts nothing yet."""
        if really:
            return
        self.replay()
        kept = data.draw(st.permutations(list(self.records.items())))
        damaged = data.draw(st.sets(st.integers(0, 7), max_size=1))
        held = self.held[TierId.DISK]
        self.begin(self.setup)
        tokens = np.array(
            [np.frombuffer(r[0][1], np.int32)[-PAGE_TOKENS:] for _, r in kept], np.int32
        ).reshape(-1, PAGE_TOKENS)
        tokens[[at for at in damaged if at < len(kept)]] += 1

        def bytes_of(parts: list[bytes]) -> Any:
            return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, KEY_BYTES)

        found = FoundPages(
            namespaces=bytes_of([r[0][0] for _, r in kept]),
            keys=bytes_of([r[1] for _, r in kept]),
            parents=bytes_of([r[2] for _, r in kept]),
            tokens=tokens,
            checksums=np.zeros(len(kept), np.uint64),
            addresses=np.array([address for address, _ in kept], np.int64),
            representations=np.array([held[a] for a, _ in kept], np.uint8),
            ages=np.array([data.draw(st.integers(0, 9)) for _ in kept], np.int64),
        )
        for address, record in kept:
            self.memory[TierId.DISK][address] = record[0]
            self.held[TierId.DISK][address] = held[address]
            self.records[address] = record
        self.driver.run("begin_adoption", found)

    @precondition(lambda self: self.num_left)
    @rule(most=st.integers(1, 40))
    def go_on(self, most: int) -> None:
        """Some more pages are adopted; nothing that was there goes."""
        before = contents(self.cache, TierId.DISK)
        self.driver.run("step", most)
        after = contents(self.cache, TierId.DISK)
        assert before.items() <= after.items()

    @rule(space=st.integers(0, 1), most=st.integers(1, 9), really=RARELY)
    def drop_while_adopting(self, space: int, most: int, really: bool) -> None:
        """What was dropped is not adopted afterwards."""
        if not really or not self.num_left:
            return
        self.drop_tier(self.tiers.index(TierId.DISK), True)
        assert not self.num_left
        self.driver.run("step", most)
        assert not self.hits(TierId.DISK)


TestAdoptionMachine = AdoptionMachine.TestCase
TestAdoptionMachine.settings = settings(
    # 75, and 750 in the profile ``full``.
    max_examples=settings.default.max_examples * 3 // 4,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

WORDS = st.text("ab", min_size=1, max_size=6)


def records_of(
    prompts: list[tuple[int, str]], lost: set[int], spoilt: set[int]
) -> FoundPages:
    """Return the records of some prompts, each page once; some lost, some altered."""
    pages: dict[bytes, tuple[bytes, bytes, bytes]] = {}
    for space, word in prompts:
        digest = NAMESPACES[space].digest()
        tokens = np.frombuffer(word.encode(), np.uint8).repeat(PAGE_TOKENS)
        keys = page_keys(digest, tokens.astype(np.int32), PAGE_TOKENS)
        before = digest
        for at, key in enumerate(keys):
            page = np.full(PAGE_TOKENS, ord(word[at]), np.int32).tobytes()
            pages.setdefault(key.tobytes(), (digest, before, page))
            before = key.tobytes()
    groups = []
    for number, (key, (digest, before, raw)) in enumerate(pages.items()):
        if number in lost:
            continue
        tokens = np.frombuffer(raw, np.int32).reshape(1, -1) + (number in spoilt)
        groups.append(
            PageRecords(
                namespace_rows(digest, 1),
                np.frombuffer(key, np.uint8).reshape(1, -1),
                np.frombuffer(before, np.uint8).reshape(1, -1),
                tokens,
                np.array([number], np.uint64),
                np.array([number]),
                np.array([Representation.KV], np.uint8),
            )
        )
    return FoundPages.of(groups, PAGE_TOKENS)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 1), WORDS), max_size=8),
    lost=st.sets(st.integers(0, 30), max_size=3),
    spoilt=st.sets(st.integers(0, 30), max_size=2),
    steps=st.lists(st.integers(1, 5), min_size=1),
    seed=st.integers(0, 5),
)
def test_in_slices_as_at_once(
    prompts: list[tuple[int, str]],
    lost: set[int],
    spoilt: set[int],
    steps: list[int],
    seed: int,
) -> None:
    """The same pages at the same addresses, and the same refused, in any order."""
    found = records_of(prompts, lost, spoilt)
    order = np.random.default_rng(seed).permutation(len(found))
    found = found.part(order, found.addresses[order])
    ended = []
    for sizes in ([len(found) * 16 + 16], steps):
        setup = Setup("lru", "write-through", "write-through", "always", 0, CHAINS[1],
                      "all", 0)  # fmt: skip
        cache = setup.make(disk_slots=64)
        adoption = cache.begin_adoption(TierId.DISK, arrange(found))
        cache.check()
        assert cache.occupancy(TierId.DISK).used_slots == adoption.num_left
        for at in range(10_000):
            if not adoption.step(sizes[at % len(sizes)]):
                break
            cache.check()
        here = {
            page: place for page, (place, _) in contents(cache, TierId.DISK).items()
        }
        refused = sorted(adoption.take_refused().tolist())
        assert len(here) == adoption.num_adopted == len(found) - len(refused)
        assert cache.take_forgotten(TierId.DISK).tolist() == refused
        ended.append((here, refused))
    assert ended[0] == ended[1]
    whole = dict.fromkeys(ended[0][0].values(), True)
    assert not whole.keys() & spoilt
    if not lost and not spoilt:
        assert not ended[0][1]
