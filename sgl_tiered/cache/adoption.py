"""Taking over the pages that a former process left in a tier, a slice at a time.

Records come in any order and may be damaged: a page is adopted only if its key follows
from its parent's key and its own tokens, and its parent is in the index. ``arrange``
finds out, for all namespaces at once and on any thread, which page follows which, and
puts runs of pages in order: the newest first, each behind the pages that it needs. An
``Adoption`` then adds them on the cache's thread, as many in a call as it is told.
Costs are linear in pages, however many namespaces and runs they are in.

Slots of pages that are still to be adopted are in use from the start. Meanwhile the
cache is used as ever: a page that was computed and stored anew is left as it is, and
where a parent has been evicted its pages are given up. Where pages are KV only, none is
adopted that is activations: the namespaces differ, but a page that nobody can rebuild
must not depend on that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from sgl_tiered.cache.index import Node, concat_rows
from sgl_tiered.cache.store import PageStore
from sgl_tiered.core.ids import Representation
from sgl_tiered.core.keys import KEY_BYTES
from sgl_tiered.core.plans import Bools, FoundPages, Int32s, Int64s, UInt8s, UInt64s

__all__ = ["Adoption", "Arranged", "arrange"]

_AT_START, _UNKNOWN = -1, -2
"""In the place of a parent: none, and one that was not found."""
_NOTHING: Int64s = np.zeros(0, np.int64)
_RUN_PAGES = 16
"""A call takes as many pages, or a run for every so many: they take as long."""


@dataclass(frozen=True, slots=True, eq=False)
class Arranged:
    """Pages in the order of their adoption.

    Attributes:
        found: the pages.
        order: int64 [m], numbers of pages in ``found``, run after run; those that
            circle are left out.
        stops: int64 [runs], where in ``order`` each run ends.
        parents: int64 [runs], the page in front of each run; -1 for none, -2 for one
            that ``found`` does not have.
    """

    found: FoundPages
    order: Int64s
    stops: Int64s
    parents: Int64s


def arrange(found: FoundPages) -> Arranged:
    """Order pages for their adoption; of any thread, O(n log n) in numpy.

    A run is a sequence of pages each of which is the only one after the one before.
    Runs go by the newest page in or behind them, so that the whole of the newest
    prompt comes first and what it shares with others is as recent as the newest of
    them.
    """
    num_pages = len(found)
    if not num_pages:
        return Arranged(found, _NOTHING, _NOTHING, _NOTHING)
    parent = _parents(found)
    followed = np.bincount(parent[parent >= 0], minlength=num_pages)
    goes_on = parent >= 0
    goes_on[goes_on] = followed[parent[goes_on]] == 1
    head, place = _climb(parent, goes_on)
    # A run without a beginning goes in circles: its key would have to be its own.
    whole = ~goes_on[head]
    heads = np.flatnonzero(~goes_on)
    run_of = np.full(num_pages, -1, np.int64)
    run_of[heads] = np.arange(len(heads))
    run_of = np.where(whole, run_of[head], -1)
    ages = np.full(len(heads), np.iinfo(np.int64).min)
    np.maximum.at(ages, run_of[whole], found.ages[whole])
    follows = parent[heads] >= 0
    above = np.full(len(heads), -1)
    above[follows] = run_of[parent[heads[follows]]]
    has_above = above >= 0
    # Behind a run in circles.
    lost = follows & ~has_above
    newest = _newest_behind(ages, above, has_above)
    top, depth = _climb(above, has_above)
    lost = (lost | has_above)[top] | lost
    by_age = np.lexsort((depth, -newest))
    by_age = by_age[~lost[by_age]]
    lengths = np.bincount(run_of[whole], minlength=len(heads))
    stops = np.cumsum(lengths[by_age])
    starts = np.full(len(heads), -1, np.int64)
    starts[by_age] = stops - lengths[by_age]
    order = np.zeros(int(stops[-1]) if len(stops) else 0, np.int64)
    kept = np.flatnonzero(whole)
    kept = kept[starts[run_of[kept]] >= 0]
    order[starts[run_of[kept]] + place[kept]] = kept
    return Arranged(found, order, stops, parent[heads[by_age]])


class Adoption:
    """Adds arranged pages to a store as ready copies of one tier.

    On the cache's thread, like everything that changes the store. From the start on
    the pages' slots are in use.

    Args:
        store: gets the pages.
        tier: number of their tier.
        arranged: the pages.
    """

    def __init__(self, store: PageStore, tier: int, arranged: Arranged) -> None:
        self._store = store
        self._tier = tier
        self._found = found = arranged.found
        self._order = arranged.order
        self._stops = arranged.stops
        self._parents = arranged.parents
        self._next = 0
        self._run = 0
        self._now_s = store.recency[1]
        # Of pages that are adopted, the row; -1 of all others.
        self._row_of: Int32s = np.full(len(found), -1, np.int32)
        self._refused: list[Int64s] = []
        self.num_adopted = 0
        self.num_refused = 0
        shapes_fit = found.tokens.shape[1:] == (store.page_tokens,)
        if not shapes_fit or not len(found):
            self._order = self._order[:0]
        self._has_slot = store.table.slots[tier].reserve(found.addresses)
        store.num_held[tier] += int(np.count_nonzero(self._has_slot))
        outside = np.ones(len(found), np.bool_)
        outside[self._order] = False
        self._refuse(np.flatnonzero(outside))
        self._find_known_parents()

    @property
    def num_left(self) -> int:
        """Pages that have been neither adopted nor refused yet."""
        return len(self._order) - self._next

    @property
    def tier(self) -> int:
        """Number of the tier."""
        return self._tier

    def take_refused(self) -> Int64s:
        """Return the addresses of pages that were refused since the last call."""
        refused, self._refused = self._refused, []
        return np.concatenate([np.zeros(0, np.int64), *refused])

    def step(self, max_pages: int) -> int:
        """Adopt or refuse the next pages; return how many were looked at.

        Fewer than ``max_pages`` where runs are short: 1 us per page and 40 us per run.
        """
        start = self._next
        if start == len(self._order):
            return 0
        last_run = self._run + max_pages // _RUN_PAGES
        stop = min(len(self._order), start + max_pages)
        if last_run < len(self._stops):
            stop = min(stop, int(self._stops[last_run]))
        numbers = self._order[start:stop]
        self._next = stop
        table = self._store.table
        good = self._check(numbers)
        tokens = np.ascontiguousarray(self._found.tokens[numbers])
        rows = table.alloc_rows(len(numbers))
        table.keys[rows] = self._found.keys[numbers]
        table.key_known[rows] = True
        # Where a page is already that has no copy in this tier, its row.
        used = np.full(len(numbers), -1, np.int32)
        raw, width = tokens.tobytes(), self._store.page_bytes
        first = 0
        while first < len(numbers):
            end = min(int(self._stops[self._run]), stop) - start
            parent = int(self._parents[self._run])
            if start + first > (self._stops[self._run - 1] if self._run else 0):
                parent = int(self._order[start + first - 1])
            if start + end == self._stops[self._run]:
                self._run += 1
            num = end - first
            if not good[first:end].all():
                num = int(good[first:end].argmin())
            if num:
                node = self._end_of(parent, numbers[first])
                if node is not None:
                    here = slice(first, first + num)
                    part = raw[first * width : (first + num) * width]
                    self._add(node, part, numbers[here], rows[here], used[here])
            first = end
        self._make_copies(numbers, used)
        spare = rows[~table.in_index[rows]]
        if len(spare):
            table.free_rows(spare)
        self._store.settle()
        if not self.num_left:
            self._release()
        return len(numbers)

    def cancel(self) -> None:
        """Adopt no more: what is left is refused by the store's ``Removal``."""
        left, self._next = self._order[self._next :], len(self._order)
        self._store.removal.add_slots(self._tier, self._refuse_all(left))

    def _refuse_all(self, left: Int64s) -> Iterator[None]:
        """Refuse pages step by step; nobody asks which."""
        num_pages = self._store.removal.max_pages
        for start in range(0, len(left), num_pages):
            self._refuse(left[start : start + num_pages])
            yield
        self._refused.clear()
        self._release()

    def _release(self) -> None:
        """Let go of the records, hundreds of bytes for each page."""
        self._found, self._order, self._next = FoundPages.of([]), _NOTHING, 0
        self._row_of, self._has_slot = _NOTHING.astype(np.int32), _NOTHING.astype(bool)

    def _check(self, numbers: Int64s) -> Bools:
        """Return which keys follow from their parents' and which kinds can be."""
        found = self._found
        framed = np.concatenate(
            [
                found.parents[numbers],
                np.ascontiguousarray(found.tokens[numbers]).view(np.uint8),
            ],
            axis=1,
        )
        width, raw = framed.shape[1], framed.tobytes()
        digest = xxhash.xxh3_128_digest
        keys = b"".join(
            [digest(raw[at : at + width]) for at in range(0, len(raw), width)]
        )
        derived = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        good: Bools = (derived == found.keys[numbers]).all(axis=1)
        if not self._store.table.act_page_bytes:
            good &= found.representations[numbers] == Representation.KV
        return good

    def _end_of(self, parent: int, number: int) -> Node | None:
        """Return the node that a run follows, cut behind it; None if it has gone."""
        store, table = self._store, self._store.table
        if parent == _AT_START:
            return store.index.root(self._found.namespaces[number].tobytes())
        row = int(self._row_of[parent if parent >= 0 else number])
        if row < 0 or not (table.in_index[row] and table.key_known[row]):
            return None
        # Rows are used again.
        if table.keys[row].tobytes() != self._found.parents[number].tobytes():
            return None
        node: Node = table.node[row]
        if node.rows[-1] == row:
            return node
        place = int(np.flatnonzero(node.rows == row)[0])
        return store.index.split(node, place + 1)

    def _add(
        self, node: Node, raw: bytes, numbers: Int64s, rows: Int32s, used: Int32s
    ) -> None:
        """Put a run's pages into the index, and note where there is to be a copy.

        Args:
            node: what they follow.
            raw: their tokens.
            numbers: of the pages.
            rows: one for each, taken as far as the pages are new.
            used: is set to the rows of pages that get a copy.
        """
        store = self._store
        known = np.zeros(0, np.int32)
        if raw[: store.page_bytes] in node.children:
            path = store.index.walk(node, raw)
            # The pages after them are found by their keys.
            store.derive_keys(store.index.path_to(path[-1]))
            known, node = concat_rows(path), path[-1]
            lacks = store.table.entry_of[self._tier][known] < 0
            lacks &= self._has_slot[numbers[: len(known)]]
            used[: len(known)][lacks] = known[lacks]
            self._row_of[numbers[: len(known)]] = known
        num_new = len(numbers) - len(known)
        has_slot = self._has_slot[numbers[len(known) :]]
        if not has_slot.all():
            # What comes after such a page could not be reached.
            num_new = int(has_slot.argmin())
        if num_new <= 0:
            return
        new = slice(len(known), len(known) + num_new)
        raw = raw[new.start * store.page_bytes : new.stop * store.page_bytes]
        # Later ones are older; all are older than anything that was used since.
        as_of = (-self._run - 1, self._now_s)
        store.add_rows(node, raw, rows[new].copy(), as_of)
        used[new] = rows[new]
        self._row_of[numbers[new]] = rows[new]

    def _make_copies(self, numbers: Int64s, used: Int32s) -> None:
        """Give the pages that have a row their copies, and refuse the others."""
        store, found = self._store, self._found
        # Two directories may have a page each: it was forgotten in the one, but not
        # voided there when the process ended, and written to the other.
        which = np.unique(used, return_index=True)[1]
        which = np.sort(which[used[which] >= 0])
        rest = np.ones(len(numbers), np.bool_)
        rest[which] = False
        self._refuse(numbers[rest])
        if not len(which):
            return
        taken, rows = numbers[which], used[which]
        entries = store.table.add_copies(
            self._tier,
            rows,
            found.addresses[taken],
            representation=found.representations[taken],
        )
        store.num_held[self._tier] -= len(taken)
        store.table.mark_ready(entries, found.checksums[taken])
        store.index.change(self._tier, rows, 1)
        store.counters.adopted[store.tiers[self._tier]] += len(taken)
        self.num_adopted += len(taken)

    def _refuse(self, numbers: Int64s) -> None:
        """Give up pages: their slots are free, and to be forgotten in the tier."""
        if not len(numbers):
            return
        addresses = self._found.addresses[numbers]
        self._refused.append(addresses)
        self.num_refused += len(numbers)
        mine = addresses[self._has_slot[numbers]]
        self._store.num_held[self._tier] -= len(mine)
        self._store.table.give_up(self._tier, mine)

    def _find_known_parents(self) -> None:
        """Look which pages in the index some runs go on from; O(pages in the index).

        There are hardly any of either: runs lose their beginning to damage, and the
        index is filled by this. ``_row_of`` of such a run's first page says where.
        """
        runs = np.flatnonzero(self._parents == _UNKNOWN)
        table = self._store.table
        rows = np.flatnonzero(table.in_index & table.key_known)
        if not len(runs) or not len(rows) or not len(self._order):
            return
        starts = np.concatenate([[0], self._stops[:-1]])[runs]
        numbers = self._order[starts]
        known, sought = table.keys[rows], self._found.parents[numbers]
        where = _lookup(_words(known)[:, 0], _words(sought)[:, 0])
        same = (known[where] == sought).all(axis=1)
        spaces = [node.digest for node in table.node[rows[where[same]]]]
        numbers, where = numbers[same], where[same]
        for number, at, space in zip(numbers, where, spaces, strict=True):
            if self._found.namespaces[number].tobytes() == space:
                self._row_of[number] = rows[at]


def _parents(found: FoundPages) -> Int64s:
    """Return the number of the page before each, ``_AT_START`` or ``_UNKNOWN``."""
    keys, parents = _words(found.keys), _words(found.parents)
    spaces = _words(found.namespaces)
    parent = _lookup(keys[:, 0], parents[:, 0])
    # Equal in 64 bits says little; two keys that are cost one of them its children.
    same = (keys[parent] == parents).all(axis=1)
    same &= (spaces[parent] == spaces).all(axis=1)
    parent[~same] = _UNKNOWN
    parent[(parents == spaces).all(axis=1)] = _AT_START
    return parent


def _lookup(values: UInt64s, sought: UInt64s) -> Int64s:
    """Return where each sought value is in ``values``, anywhere if it is not there."""
    order = np.argsort(values, kind="stable")
    # Sorted questions run through memory in order: a third of the time.
    asked = np.argsort(sought)
    found = np.empty(len(sought), np.int64)
    found[asked] = np.searchsorted(values[order], sought[asked])
    np.minimum(found, len(values) - 1, out=found)
    return order[found]


def _climb(parent: Int64s, goes_on: Bools) -> tuple[Int64s, Int64s]:
    """Return from each element the one where ``goes_on`` ends, and the steps to it.

    Twice as far with each turn. Elements in a circle, and those below one, end up
    somewhere in it, where ``goes_on`` still holds.
    """
    top = np.where(goes_on, parent, np.arange(len(parent)))
    steps = goes_on.astype(np.int64)
    for _ in range(len(parent).bit_length() + 1):
        further = top[top]
        if (further == top).all():
            break
        steps += steps[top]
        top = further
    return top, steps


def _newest_behind(ages: Int64s, above: Int64s, has_above: Bools) -> Int64s:
    """Return the largest age of each run and all runs behind it."""
    newest = ages.copy()
    top = np.where(has_above, above, np.arange(len(above)))
    # Behind each run so far: those less than 1, 2, 4 ... steps away.
    for _ in range(len(above).bit_length() + 1):
        np.maximum.at(newest, top, newest.copy())
        further = top[top]
        if (further == top).all():
            break
        top = further
    return newest


def _words(rows: UInt8s) -> npt.NDArray[np.uint64]:
    """Return rows of 16 bytes as two integers each."""
    words: npt.NDArray[np.uint64] = np.ascontiguousarray(rows).view(np.uint64)
    return words
