"""How much attention each token received: on the device's slots, and beside the table.

Two numbers per layer and token: ``mean``, the mean over queries (and heads) of the
share of their attention that went to the token, and ``reads``, over how many queries.
``SlotMass`` has them for the slots of the device while requests compute; ``PageMass``
keeps them for the pages of the cache's table, as long as these have a row there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["PageMass", "SlotMass", "reads_of", "sampled_queries"]

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

LOCAL = 64
"""Attention over a shorter distance is left out: it says what the own text reads, and
not what later turns will. The tokens that are so near to the end stay unjudged."""
_MAX_TAIL = 64
_SHARE = 8
"""One query in so many is asked: their scores are computed a second time, which costs
half of their attention."""
_BLOCK = 8
_MAX_BLOCKS = 8
_MAX_READS = 60_000.0
"""Below the largest float16; more queries say nothing new."""
_FIRST_CAPACITY = 256


def sampled_queries(num_queries: int) -> list[tuple[int, int]]:
    """Return the queries of a prefill that are asked what they read, as ranges.

    The last ones, which stand for what comes next, and short runs spread over the
    others: an eighth of all at most, or 16 where that is more, and never above 128.
    """
    if num_queries <= 2 * _BLOCK:
        return [(0, num_queries)] if num_queries else []
    tail = min(_MAX_TAIL, max(_BLOCK, num_queries // _SHARE // 2))
    others = num_queries - tail
    num_blocks = min(_MAX_BLOCKS, others // (2 * _SHARE * _BLOCK))
    ranges = []
    for block in range(num_blocks):
        stop = (block + 1) * others // num_blocks
        ranges.append((stop - _BLOCK, stop))
    return [*ranges, (others, num_queries)]


def reads_of(positions: Int64s, first: int, last: int) -> Float32s:
    """Return how many of the queries see each token from ``LOCAL`` tokens away.

    Args:
        positions: int64 [n], of the tokens.
        first, last: of the queries, positions as well; ``last`` is not among them.
    """
    seen: Float32s = np.clip(
        last - np.maximum(first, positions + LOCAL), 0, None
    ).astype(np.float32)
    return seen


class SlotMass:
    """Sums of what the queries of prefills gave to the tokens in slots.

    Args:
        num_layers: of the model.
        num_slots: of the device.
    """

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self._sums = np.zeros((num_layers, num_slots), np.float32)
        self._reads = np.zeros((num_layers, num_slots), np.float32)

    @property
    def num_bytes(self) -> int:
        """Host memory of the sums."""
        return self._sums.nbytes + self._reads.nbytes

    def add(self, layer: int, slots: Int64s, mass: Float32s, reads: Float32s) -> None:
        """Add what some queries gave to tokens, each slot once.

        Args:
            layer: which.
            slots: int64 [n].
            mass: float32 [n], summed over the queries, a mean over the heads.
            reads: float32 [n], from ``reads_of``.
        """
        self._sums[layer, slots] += mass
        self._reads[layer, slots] += reads

    def read(self, slots: Int64s) -> tuple[Float32s, Float32s]:
        """Return mean (NaN where nobody was asked) and reads, [num_layers, n]."""
        reads = self._reads[:, slots]
        mean = np.full(reads.shape, np.nan, np.float32)
        np.divide(self._sums[:, slots], reads, out=mean, where=reads > 0)
        return mean, reads

    def write(self, slots: Int64s, mean: Float32s, reads: Float32s) -> None:
        """Set what was known of tokens that are loaded."""
        self._sums[:, slots] = np.where(reads > 0, mean, 0.0) * reads
        self._reads[:, slots] = reads

    def forget(self, slots: Int64s) -> None:
        """Forget what slots held."""
        self._sums[:, slots] = 0.0
        self._reads[:, slots] = 0.0


class PageMass:
    """What is known of the pages of the cache's table, in host memory.

    Grows as needed to ``max_pages``; then what was written first is forgotten first.

    Args:
        num_layers: of the model.
        page_tokens: of a page.
        max_pages: most pages to keep.
    """

    def __init__(self, num_layers: int, page_tokens: int, max_pages: int) -> None:
        if max_pages < 1:
            raise ValueError(f"no side table of {max_pages} pages")
        self._max_pages = max_pages
        capacity = min(_FIRST_CAPACITY, max_pages)
        self._kept = np.zeros((capacity, 2, num_layers, page_tokens), np.float16)
        self._row_of = np.full(capacity, -1, np.int64)
        self._free: list[int] = list(range(capacity - 1, -1, -1))
        self._place_of = np.full(_FIRST_CAPACITY, -1, np.int32)
        self._hand = 0

    @property
    def num_pages(self) -> int:
        """Pages that are kept."""
        return len(self._row_of) - len(self._free)

    @property
    def num_bytes(self) -> int:
        """Host memory of the table."""
        return self._kept.nbytes + self._row_of.nbytes + self._place_of.nbytes

    def put(self, rows: Int32s, mean: Float32s, reads: Float32s) -> None:
        """Keep what is known of pages, in place of what was known of them.

        Args:
            rows: int32 [n], rows of the cache's table, each once.
            mean, reads: float32 [num_layers, n * page_tokens], as ``SlotMass.read``.
        """
        self.forget(rows[: -self._max_pages])
        rows = rows[-self._max_pages :]
        if not len(rows):
            return
        self._know(int(rows.max()))
        new = rows[self._place_of[rows] < 0]
        if len(new):
            taken = self._take(len(new))
            self._row_of[taken] = new
            self._place_of[new] = taken
        places = self._place_of[rows]
        # Among those that had to go there may be some of these.
        stays = places >= 0
        for part, values in enumerate((np.nan_to_num(mean), reads)):
            bounded = np.minimum(values, _MAX_READS)
            paged = bounded.reshape(len(values), -1, self._kept.shape[3])
            paged = paged[:, -len(rows) :].transpose(1, 0, 2)
            self._kept[places[stays], part] = paged[stays]

    def get(self, rows: Int32s) -> tuple[Float32s, Float32s]:
        """Return mean and reads, [num_layers, n * page_tokens]; NaN, 0: not known."""
        num_layers, page_tokens = self._kept.shape[2:]
        shape = (num_layers, len(rows), page_tokens)
        mean = np.full(shape, np.nan, np.float32)
        reads = np.zeros(shape, np.float32)
        if len(rows):
            self._know(int(rows.max()))
        places = self._place_of[rows]
        known = places >= 0
        if known.any():
            kept = self._kept[places[known]].astype(np.float32)
            seen = kept[:, 1].transpose(1, 0, 2)
            reads[:, known] = seen
            mean[:, known] = np.where(seen > 0, kept[:, 0].transpose(1, 0, 2), np.nan)
        flat = (num_layers, len(rows) * page_tokens)
        return mean.reshape(flat), reads.reshape(flat)

    def forget(self, rows: Int32s) -> None:
        """Forget pages, known or not: their rows are given up."""
        rows = rows[rows < len(self._place_of)]
        places = self._place_of[rows]
        places = places[places >= 0]
        self._place_of[rows] = -1
        self._row_of[places] = -1
        self._free.extend(places.tolist())

    def check(self) -> None:
        """Assert that rows and places belong together; for tests."""
        used = np.flatnonzero(self._row_of >= 0)
        assert (self._place_of[self._row_of[used]] == used).all()
        assert np.count_nonzero(self._place_of >= 0) == len(used) == self.num_pages
        assert sorted([*used.tolist(), *self._free]) == list(range(len(self._row_of)))
        assert len(self._row_of) <= self._max_pages

    def _know(self, row: int) -> None:
        missing = row + 1 - len(self._place_of)
        if missing > 0:
            more = max(missing, len(self._place_of))
            tail = np.full(more, -1, np.int32)
            self._place_of = np.concatenate([self._place_of, tail])

    def _take(self, count: int) -> Int64s:
        capacity = len(self._row_of)
        if count > len(self._free) and capacity < self._max_pages:
            needed = capacity + count - len(self._free)
            self._grow(min(self._max_pages, max(2 * capacity, needed)))
        while len(self._free) < count:
            # In turn: about the order in which they were written.
            row = self._row_of[self._hand]
            if row >= 0:
                self.forget(np.array([row], np.int32))
            self._hand = (self._hand + 1) % len(self._row_of)
        return np.array([self._free.pop() for _ in range(count)], np.int64)

    def _grow(self, capacity: int) -> None:
        old = len(self._row_of)
        more = np.zeros((capacity - old, *self._kept.shape[1:]), np.float16)
        self._kept = np.concatenate([self._kept, more])
        self._row_of = np.concatenate([self._row_of, np.full(capacity - old, -1)])
        self._free = [*range(capacity - 1, old - 1, -1), *self._free]
