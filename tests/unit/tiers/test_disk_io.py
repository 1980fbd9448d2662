"""How batches are cut into I/Os."""

import numpy as np
import pytest

from sgl_tiered.tiers.disk_io import (
    SystemCalls,
    plan_extents,
    read_extent,
    read_through,
    write_extent,
)

MIB = 1 << 20


def cut(addresses, *, slots_per_slab=100, slot_bytes=MIB // 4, max_io=MIB, threads=1):
    slots = np.asarray(addresses, np.int64)
    return plan_extents(
        slots, np.arange(len(slots)), slots_per_slab, slot_bytes, max_io, threads
    )


def test_neighbours_share_an_io():
    """Consecutive slots go together, in slot order, whatever order they came in."""
    (extent,) = cut([7, 5, 6])
    assert (extent.slab, extent.offset) == (0, 5 * MIB // 4)
    assert extent.positions == [1, 2, 0]


def test_gaps_slabs_and_duplicates_end_an_io():
    """An I/O does not reach over a gap, into the next slab, or read a slot twice."""
    extents = cut([1, 3, 99, 100, 101, 3])
    assert [(e.slab, e.positions) for e in extents] == [
        (0, [0]),
        (0, [1]),
        (0, [5]),
        (0, [2]),
        (1, [3, 4]),
    ]


def test_long_runs_are_cut():
    """No I/O is longer than the limit, and none is empty."""
    extents = cut(range(10), max_io=MIB)
    assert [len(e.positions) for e in extents] == [4, 4, 2]


def test_small_batches_are_shared_out():
    """With several threads a run is cut finer, down to 256 KiB."""
    assert len(cut(range(4), threads=4)) == 4
    assert len(cut(range(32), slot_bytes=16384, threads=8)) == 2


@pytest.mark.parametrize("num_pages", [0, 1, 63, 64])
def test_every_page_is_in_one_io(num_pages):
    """The I/Os cover the batch once."""
    slots = np.random.default_rng(num_pages).permutation(1000)[:num_pages]
    found = [p for e in cut(slots) for p in e.positions]
    assert sorted(found) == list(range(num_pages))


def test_a_page_larger_than_the_limit_is_one_io():
    """The limit never splits a page."""
    extents = cut(range(2), slot_bytes=4 * MIB)
    assert [len(e.positions) for e in extents] == [1, 1]


def test_a_write_of_no_bytes_is_an_error():
    """The system may not say so; asking again and again would hold a thread."""

    class TakesNothing(SystemCalls):
        num_calls = 0

        def pwritev(self, fd, views, offset):
            self.num_calls += 1
            assert self.num_calls < 10, "it asks again and again"
            return 1 if self.num_calls == 1 else 0

    calls = TakesNothing()
    with pytest.raises(OSError, match="takes no more bytes"):
        write_extent(calls, 0, [memoryview(bytes(4))], 0)
    assert calls.num_calls == 2


def test_read_stops_at_the_end_of_the_file():
    """A read past the end says how much there was, and does not go round for ever."""

    class Ends(SystemCalls):
        def preadv(self, fd, views, offset):
            return max(0, min(5000, sum(map(len, views)), 10_000 - offset))

    views = [memoryview(bytearray(8192)), memoryview(bytearray(8192))]
    assert read_extent(Ends(), -1, views, 0) == 5000


@pytest.mark.parametrize("sizes", [[100], [1, 2, 3], [64, 64], [10, 150, 7], [63, 65]])
@pytest.mark.parametrize("limit", [1000, 40])
def test_reading_through_a_small_buffer(sizes, limit):
    """All views are filled in order, whatever the sizes and however short the reads."""
    content = np.random.default_rng(1).integers(0, 256, 1000, np.uint8).tobytes()

    class Memory(SystemCalls):
        def preadv(self, fd, views, offset):
            # O_DIRECT moves whole blocks; each has one value here.
            count = min(len(views[0]), limit * 4096, 1000 * 4096 - offset)
            first = offset // 4096
            blocks = content[first : first + count // 4096]
            views[0][:count] = b"".join(bytes([b]) * 4096 for b in blocks)
            return count

    views = [memoryview(bytearray(size * 4096)) for size in sizes]
    bounce = memoryview(bytearray(64 * 4096))
    wanted = sum(sizes)
    assert read_through(Memory(), -1, bounce, views, 5 * 4096) == wanted * 4096
    found = b"".join(bytes(view)[::4096] for view in views)
    assert found == content[5 : 5 + wanted]


def test_reading_through_stops_at_the_end():
    """A read past the end says how much there was, and touches nothing behind it."""

    class Ends(SystemCalls):
        def preadv(self, fd, views, offset):
            count = max(0, min(len(views[0]), 12288 - offset))
            views[0][:count] = b"x" * count
            return count

    views = [memoryview(bytearray(8192)), memoryview(bytearray(8192))]
    bounce = memoryview(bytearray(8192))
    assert read_through(Ends(), -1, bounce, views, 0) == 12288
    assert bytes(views[1]) == b"x" * 4096 + bytes(4096)
