"""How much attention each token received: on the device's slots, and beside the table.

Two things per layer and token: ``mean``, the mean over queries of the attention that a
KV head's query heads gave to the token together, and ``reads``, over how many queries.
``SlotMass`` has them for the slots of the device while requests compute; ``PageMass``
keeps them for the pages of the cache's table, as long as these have a row there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["PageMass", "Run", "SlotMass", "reads_of", "sampled_queries"]

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_TAIL = 64
_RUN = 32
"""Queries in a row: the keys are turned to float32 once for each run."""
_MOST = np.float32(60_000.0)
"""Below the largest float16; more queries say nothing new."""
_MEAN_UNIT = np.float32(1 / 256)
"""Of the means in float16: most tokens of a long prompt get a 1e-5 or less, where
float16 has but a few steps left. The largest mean is a KV head's query heads."""
_FIRST_CAPACITY = 256


class Run(NamedTuple):
    """Queries of a prefill in a row, from ``begin`` until before ``end``.

    ``weight`` says how many of the prefill's queries each of them stands for.
    """

    begin: int
    end: int
    weight: float


def sampled_queries(num_queries: int, most: int) -> list[Run]:
    """Return the queries of a prefill that are asked what they read, in order.

    All of them, or, where there are more than ``most`` (128 at least), the last 64,
    which stand for themselves, and short runs spread evenly, which stand for the rest.
    """
    if num_queries <= most:
        return [Run(0, num_queries, 1.0)] if num_queries else []
    others = num_queries - _TAIL
    num_runs = max((most - _TAIL) // _RUN, 1)
    runs, begin = [], 0
    for run in range(num_runs):
        end = (run + 1) * others // num_runs
        # In the middle of those that it stands for.
        at = (begin + end - _RUN) // 2
        runs.append(Run(at, at + _RUN, (end - begin) / _RUN))
        begin = end
    return [*runs, Run(others, num_queries, 1.0)]


def reads_of(positions: Int64s, first: int, last: int, local: int) -> Float32s:
    """Return how many of the queries see each token from ``local`` tokens away.

    Args:
        positions: int64 [n], of the tokens.
        first, last: of the queries, positions as well; ``last`` is not among them.
        local: nearer queries do not count; 0 counts a token's own query as well.
    """
    seen: Float32s = np.clip(
        last - np.maximum(first, positions + local), 0, None
    ).astype(np.float32)
    return seen


class SlotMass:
    """Sums of what the queries of prefills gave to the tokens in slots.

    Args:
        num_layers: of the model.
        num_heads: KV heads.
        num_slots: of the device.
    """

    def __init__(self, num_layers: int, num_heads: int, num_slots: int) -> None:
        self._sums = np.zeros((num_layers, num_heads, num_slots), np.float32)
        self._reads = np.zeros((num_layers, num_slots), np.float32)

    @property
    def num_bytes(self) -> int:
        """Host memory of the sums."""
        return self._sums.nbytes + self._reads.nbytes

    def add(
        self,
        layer: int,
        slots: Int64s,
        mass: Float32s,
        reads: Float32s,
        window: int = 0,
    ) -> None:
        """Add what some queries gave to tokens, each slot once.

        Args:
            layer: which.
            slots: int64 [n].
            mass: float32 [num_heads, n], summed over the queries.
            reads: float32 [n], from ``reads_of``.
            window: what is known comes from the last so many queries: of what was known
                before, as much fades as the new ones take the place of. 0: all count.
        """
        sums, of_layer = self._sums[layer], self._reads[layer]
        if window:
            before = of_layer[slots]
            left = np.maximum(window - reads, 0.0)
            fade = np.minimum(left / np.maximum(before, 1.0), 1.0)
            sums[:, slots] *= fade
            of_layer[slots] *= fade
        sums[:, slots] += mass
        of_layer[slots] += reads

    def read(self, slots: Int64s) -> tuple[Float32s, Float32s]:
        """Return mean [num_layers, num_heads, n] and reads [num_layers, n].

        The mean is NaN where nobody was asked.
        """
        reads = self._reads[:, slots]
        mean = self._sums[:, :, slots] / np.maximum(reads, 1e-30)[:, None]
        np.copyto(mean, np.nan, where=reads[:, None] <= 0.0)
        return mean, reads

    def write(self, slots: Int64s, mean: Float32s, reads: Float32s) -> None:
        """Set what was known of tokens that are loaded."""
        known = np.where(reads[:, None] > 0.0, mean, 0.0)
        self._sums[:, :, slots] = known * reads[:, None]
        self._reads[:, slots] = reads

    def forget(self, slots: Int64s) -> None:
        """Forget what slots held."""
        self._sums[:, :, slots] = 0.0
        self._reads[:, slots] = 0.0


class PageMass:
    """What is known of the pages of the cache's table, in host memory.

    Grows as needed to ``max_pages``; then what was written first is forgotten first.

    Args:
        num_layers: of the model.
        num_heads: KV heads.
        page_tokens: of a page.
        max_pages: most pages to keep.
    """

    def __init__(
        self, num_layers: int, num_heads: int, page_tokens: int, max_pages: int
    ) -> None:
        if max_pages < 1:
            raise ValueError(f"no side table of {max_pages} pages")
        self._max_pages = max_pages
        capacity = min(_FIRST_CAPACITY, max_pages)
        # The means of all heads, and the reads.
        shape = (capacity, num_layers, num_heads + 1, page_tokens)
        self._kept = np.zeros(shape, np.float16)
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
            mean: float32 [num_layers, num_heads, n * page_tokens].
            reads: float32 [num_layers, n * page_tokens]; both as ``SlotMass.read``.
        """
        beyond = max(len(rows) - self._max_pages, 0)
        self.forget(rows[:beyond])
        rows = rows[beyond:]
        if not len(rows):
            return
        first = beyond * self._kept.shape[3]
        mean, reads = mean[:, :, first:], reads[:, first:]
        self._know(int(rows.max()))
        new = rows[self._place_of[rows] < 0]
        if len(new):
            taken = self._take(len(new))
            self._row_of[taken] = new
            self._place_of[new] = taken
        places = self._place_of[rows]
        # Among those that had to go there may be some of these.
        stays = places >= 0
        means = np.nan_to_num(mean) / _MEAN_UNIT
        values = np.concatenate([means, reads[:, None]], axis=1)
        paged = np.minimum(values, _MOST).reshape(*values.shape[:2], len(rows), -1)
        self._kept[places[stays]] = paged.transpose(2, 0, 1, 3)[stays]

    def get(self, rows: Int32s) -> tuple[Float32s, Float32s]:
        """Return mean and reads, shaped as ``put`` takes them; NaN, 0: not known."""
        num_layers, num_parts, page_tokens = self._kept.shape[1:]
        found = np.zeros((num_layers, num_parts, len(rows), page_tokens), np.float32)
        if len(rows):
            self._know(int(rows.max()))
        places = self._place_of[rows]
        known = places >= 0
        if known.any():
            kept = self._kept[places[known]].astype(np.float32)
            found[:, :, known] = kept.transpose(1, 2, 0, 3)
        flat = found.reshape(num_layers, num_parts, -1)
        mean, reads = flat[:, :-1] * _MEAN_UNIT, flat[:, -1]
        np.copyto(mean, np.nan, where=reads[:, None] <= 0.0)
        return mean, reads

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
