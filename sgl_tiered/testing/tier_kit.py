"""Conformance kit: what every ``Tier`` must do, as a pytest base class.

A tier's own tests subclass it and say how the tier is made::

    class TestMyTier(TierKit):
        @pytest.fixture
        def tier(self, tmp_path):
            tier = MyTier(tmp_path, slot_bytes=self.SLOT_BYTES, ...)
            yield tier
            tier.close()

The tier must have at least ``NUM_SLOTS`` slots of ``SLOT_BYTES``, and its checksums
cover ``PAGE_BYTES`` (a page shorter than its slot, as real ones are).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from sgl_tiered.core.plans import PageRecords, TransferResult, namespace_rows
from sgl_tiered.tiers.base import MemoryTier, Tier, TierIO
from sgl_tiered.tiers.checks import checksum, expected_checksums
from sgl_tiered.tiers.memory import aligned_buffer

__all__ = ["TierKit", "make_pages", "make_records"]

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]


def make_pages(num_rows: int, slot_bytes: int, seed: int) -> UInt8s:
    """Return an aligned buffer of random rows."""
    buffer = aligned_buffer(num_rows, slot_bytes)
    rng = np.random.default_rng(seed)
    buffer[:] = rng.integers(0, 256, buffer.shape, np.uint8)
    return buffer


def make_records(
    addresses: Int64s,
    page_tokens: int,
    seed: int,
    namespace: bytes = b"n" * 16,
) -> PageRecords:
    """Return records with random keys and tokens for pages at these addresses."""
    rng = np.random.default_rng(seed)
    num_pages = len(addresses)
    return PageRecords(
        namespaces=namespace_rows(namespace, num_pages),
        keys=rng.integers(0, 256, (num_pages, 16), np.uint8),
        parents=rng.integers(0, 256, (num_pages, 16), np.uint8),
        tokens=rng.integers(0, 2**31, (num_pages, page_tokens)).astype(np.int32),
        checksums=np.zeros(num_pages, np.uint64),
        addresses=addresses,
    )


class TierKit:
    """Subclass it, name the class ``Test...`` and give it a ``tier`` fixture."""

    SLOT_BYTES = 8192
    PAGE_BYTES = 8000
    PAGE_TOKENS = 5
    NUM_SLOTS = 64
    SURVIVES_RESTART = False
    """True where ``recover`` returns what was stored."""

    @pytest.fixture
    def tier(self) -> Tier:
        """Return the tier under test; subclasses override this."""
        raise NotImplementedError("a TierKit needs a fixture named tier")

    def store(
        self, tier: Tier, addresses: list[int] | Int64s, seed: int
    ) -> tuple[UInt8s, TransferResult]:
        """Store random pages; return them (row i for address i) and the result."""
        slots = np.asarray(addresses, np.int64)
        pages = make_pages(max(1, len(slots)), self.SLOT_BYTES, seed)
        records = make_records(slots, self.PAGE_TOKENS, seed)
        rows = np.arange(len(slots), dtype=np.int64)
        return pages, tier.store(TierIO(slots, pages, rows, records))

    def load(
        self,
        tier: Tier,
        addresses: list[int] | Int64s,
        checksums: npt.NDArray[np.uint64] | None = None,
    ) -> tuple[UInt8s, TransferResult]:
        """Load pages into a fresh buffer; return it and the result."""
        slots = np.asarray(addresses, np.int64)
        buffer = make_pages(max(1, len(slots)), self.SLOT_BYTES, seed=99)
        records = None if checksums is None else expected_checksums(checksums, slots)
        rows = np.arange(len(slots), dtype=np.int64)
        return buffer, tier.load(TierIO(slots, buffer, rows, records))

    def test_sizes_are_as_the_kit_says(self, tier: Tier) -> None:
        """The tier has the slots that the kit's tests use."""
        assert tier.slot_bytes == self.SLOT_BYTES
        assert tier.num_slots >= self.NUM_SLOTS
        assert tier.health().usable

    @pytest.mark.parametrize("num_pages", [1, 2, 3, 7, 33, 64])
    def test_round_trip(self, tier: Tier, num_pages: int) -> None:
        """Pages come back byte for byte, with the checksums of their page bytes."""
        pages, stored = self.store(tier, np.arange(num_pages), seed=1)
        assert stored.ok.all(), stored.error
        assert stored.error == ""
        assert stored.num_bytes >= num_pages * self.PAGE_BYTES
        assert stored.checksums.tolist() == [
            checksum(page[: self.PAGE_BYTES]) for page in pages
        ]
        buffer, loaded = self.load(tier, np.arange(num_pages), stored.checksums)
        assert loaded.ok.all(), loaded.error
        assert loaded.seconds >= 0
        assert np.array_equal(buffer[:, : self.PAGE_BYTES], pages[:, : self.PAGE_BYTES])

    def test_empty_batch_is_ok(self, tier: Tier) -> None:
        """No pages is no error."""
        _, stored = self.store(tier, [], seed=1)
        _, loaded = self.load(tier, [])
        assert (len(stored.ok), stored.num_bytes, stored.error) == (0, 0, "")
        assert (len(loaded.ok), loaded.num_bytes, loaded.error) == (0, 0, "")

    def test_addresses_and_rows_in_any_order(self, tier: Tier) -> None:
        """Row i gets address i, whatever the order of either."""
        rng = np.random.default_rng(2)
        slots = rng.permutation(self.NUM_SLOTS)[:31].astype(np.int64)
        rows = rng.permutation(40)[:31].astype(np.int64)
        pages = make_pages(40, self.SLOT_BYTES, seed=2)
        records = make_records(slots, self.PAGE_TOKENS, seed=2)
        stored = tier.store(TierIO(slots, pages, rows, records))
        assert stored.ok.all(), stored.error
        order = rng.permutation(31)
        buffer, loaded = self.load(tier, slots[order], stored.checksums[order])
        assert loaded.ok.all(), loaded.error
        wanted = pages[rows[order], : self.PAGE_BYTES]
        assert np.array_equal(buffer[:, : self.PAGE_BYTES], wanted)

    def test_wider_rows_than_slots(self, tier: Tier) -> None:
        """A buffer may have longer rows; what is beyond the slot stays untouched."""
        pages, _ = self.store(tier, [4, 5, 6], seed=3)
        wide = aligned_buffer(5, 2 * self.SLOT_BYTES)
        rows = np.array([4, 0, 1])
        loaded = tier.load(TierIO(np.array([4, 5, 6]), wide, rows))
        assert loaded.ok.all(), loaded.error
        assert np.array_equal(
            wide[rows, : self.PAGE_BYTES], pages[:, : self.PAGE_BYTES]
        )
        assert not wide[:, self.SLOT_BYTES :].any()
        assert not wide[[2, 3]].any()

    def test_overwrite_replaces(self, tier: Tier) -> None:
        """The last store of a slot is what a load gives; its neighbours stay."""
        old, first = self.store(tier, [10, 11, 12], seed=4)
        new, second = self.store(tier, [11], seed=5)
        sums = np.array([first.checksums[0], second.checksums[0], first.checksums[2]])
        buffer, loaded = self.load(tier, [10, 11, 12], sums)
        assert loaded.ok.all(), loaded.error
        wanted = np.stack([old[0], new[0], old[2]])[:, : self.PAGE_BYTES]
        assert np.array_equal(buffer[:, : self.PAGE_BYTES], wanted)

    def test_checksum_mismatch_is_not_ok(self, tier: Tier) -> None:
        """A page with other bytes than expected is not ok; the others are."""
        _, stored = self.store(tier, [1, 2, 3], seed=6)
        sums = stored.checksums.copy()
        sums[1] ^= np.uint64(1)
        _, loaded = self.load(tier, [1, 2, 3], sums)
        assert loaded.ok.tolist() == [True, False, True]
        assert loaded.error

    def test_never_written_is_not_ok(self, tier: Tier) -> None:
        """A slot that holds nothing does not pass for an expected page."""
        _, stored = self.store(tier, [0], seed=7)
        _, loaded = self.load(tier, [20, 0], np.repeat(stored.checksums, 2))
        assert loaded.ok.tolist() == [False, True]

    @pytest.mark.parametrize("bad", [-1, "end"])
    def test_addresses_out_of_range_are_refused(
        self, tier: Tier, bad: int | str
    ) -> None:
        """A slot that does not exist is a defect of the caller, and raises."""
        slot = tier.num_slots if bad == "end" else int(bad)
        with pytest.raises(ValueError, match="outside"):
            self.store(tier, [0, slot], seed=8)
        with pytest.raises(ValueError, match="outside"):
            self.load(tier, [slot])

    def test_rows_out_of_range_are_refused(self, tier: Tier) -> None:
        """A row that the buffer does not have raises before anything is moved."""
        buffer = aligned_buffer(2, self.SLOT_BYTES)
        with pytest.raises(ValueError, match="rows"):
            tier.load(TierIO(np.array([0]), buffer, np.array([2])))

    def test_concurrent_transfers(self, tier: Tier) -> None:
        """Loads and stores of different slots at once do not disturb each other."""
        groups = np.arange(self.NUM_SLOTS).reshape(8, -1)

        def cycle(group: int) -> bool:
            for turn in range(5):
                pages, stored = self.store(tier, groups[group], seed=group * 10 + turn)
                buffer, loaded = self.load(tier, groups[group], stored.checksums)
                same = np.array_equal(
                    buffer[:, : self.PAGE_BYTES], pages[:, : self.PAGE_BYTES]
                )
                if not (stored.ok.all() and loaded.ok.all() and same):
                    return False
            return True

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(cycle, range(8)))

    def test_recover_and_forget(self, tier: Tier) -> None:
        """``recover`` returns what was stored, without what was forgotten since."""
        _, stored = self.store(tier, [3, 4, 5, 6], seed=9)
        records = make_records(np.array([3, 4, 5, 6]), self.PAGE_TOKENS, seed=9)
        tier.forget(np.array([4, 6]))
        found = list(tier.recover())
        if not self.SURVIVES_RESTART:
            assert found == []
            return
        assert tier.holds(np.array([3, 5, 7])).tolist() == [True, True, False]
        assert len(found) == 1
        got = found[0]
        assert np.array_equal(got.namespaces, records.namespaces[[0, 2]])
        assert got.addresses.tolist() == [3, 5]
        assert np.array_equal(got.keys, records.keys[[0, 2]])
        assert np.array_equal(got.parents, records.parents[[0, 2]])
        assert np.array_equal(got.tokens, records.tokens[[0, 2]])
        assert np.array_equal(got.checksums, stored.checksums[[0, 2]])

    def test_a_batch_of_many_namespaces(self, tier: Tier) -> None:
        """Each page comes back under its own namespace, also where keys are equal."""
        slots = np.arange(8, dtype=np.int64)
        records = make_records(slots, self.PAGE_TOKENS, seed=11)
        names = [bytes([ord("a") + slot % 3]) * 16 for slot in slots.tolist()]
        spaces = np.concatenate([namespace_rows(name, 1) for name in names])
        # Six tenants with one prompt: two pages, one under each of three namespaces.
        keys = records.keys.copy()
        keys[:6] = keys[[0, 0, 0, 1, 1, 1]]
        records = replace(records, namespaces=spaces, keys=keys)
        pages = make_pages(len(slots), self.SLOT_BYTES, seed=11)
        stored = tier.store(TierIO(slots, pages, slots, records))
        assert stored.ok.all(), stored.error
        found = list(tier.recover())
        if not self.SURVIVES_RESTART:
            assert found == []
            return
        assert len(found) == len(set(names))
        for group in found:
            where = group.addresses
            assert len({row.tobytes() for row in group.namespaces}) == 1
            assert np.array_equal(group.namespaces, spaces[where])
            assert np.array_equal(group.keys, keys[where])
            buffer, loaded = self.load(tier, where, group.checksums)
            assert loaded.ok.all(), loaded.error
            wanted = pages[where, : self.PAGE_BYTES]
            assert np.array_equal(buffer[:, : self.PAGE_BYTES], wanted)
        assert sorted(a for g in found for a in g.addresses.tolist()) == slots.tolist()

    def test_read_in_place(self, tier: Tier) -> None:
        """A memory tier shows the stored pages in place, page aligned."""
        if not isinstance(tier, MemoryTier):
            pytest.skip("not a memory tier")
        pages, _ = self.store(tier, [7, 8], seed=10)
        region, rows = tier.read_view(np.array([8, 7]))
        assert tier.region.shape == (tier.num_slots, self.SLOT_BYTES)
        assert tier.region.ctypes.data % 4096 == 0
        wanted = pages[[1, 0], : self.PAGE_BYTES]
        assert np.array_equal(region[rows][:, : self.PAGE_BYTES], wanted)
        tier.charge(self.PAGE_BYTES)

    def test_close_twice(self, tier: Tier) -> None:
        """Closing again does nothing, and a closed tier is not usable."""
        tier.close()
        tier.close()
        assert not tier.health().usable
