"""Taking over the pages that a former process left in a tier.

Records come in any order and may be damaged: every page is checked against its parent
(its key must follow from the parent's key and its own tokens) and every address
against the tier. Chains are followed from known pages on, a whole run at a time. Where
pages are KV only, none is adopted that is activations: the namespaces differ, but a
page that nobody can rebuild must not depend on that.
"""

from __future__ import annotations

import numpy as np

from sgl_tiered.cache.index import Node, concat_rows
from sgl_tiered.cache.store import PageStore
from sgl_tiered.core.ids import Representation
from sgl_tiered.core.keys import KEY_BYTES, page_keys
from sgl_tiered.core.plans import Bools, Int32s, Int64s, PageRecords, UInt8s

__all__ = ["adopt_records"]


def adopt_records(
    store: PageStore, tier: int, records: PageRecords
) -> tuple[int, Int64s]:
    """Add the records' pages as ready copies; return their number and the refused.

    O(pages); about 2 us per page in long runs.
    """
    num_pages = len(records.addresses)
    adopted = np.zeros(num_pages, np.bool_)
    shapes_fit = records.tokens.shape == (num_pages, store.page_tokens) and (
        records.keys.shape == records.parents.shape == (num_pages, KEY_BYTES)
    )
    if num_pages and shapes_fit:
        # A tenant's namespace is opened by its first request, which is still to come.
        # The digest covers all that makes bytes differ, so nobody else can hit it.
        _Adoption(store, tier, records, adopted).run()
    return int(np.count_nonzero(adopted)), records.addresses[~adopted].copy()


class _Adoption:
    """One run over one value of records."""

    def __init__(
        self, store: PageStore, tier: int, records: PageRecords, adopted: Bools
    ) -> None:
        self._store = store
        self._tier = tier
        self._records = records
        self._adopted = adopted
        self._keys = _split_bytes(records.keys.tobytes())
        # Key of a page -> the records of the pages after it.
        self._after: dict[bytes, list[int]] = {}
        for number, parent in enumerate(_split_bytes(records.parents.tobytes())):
            self._after.setdefault(parent, []).append(number)

    def run(self) -> None:
        """Follow the chains from the namespace's root and from pages known before."""
        digest = self._records.namespace
        stack = [(self._store.index.root(digest), digest)]
        for row in self._known_parents():
            node = self._end_at(row)
            stack.append((node, self._store.table.keys[row].tobytes()))
        while stack:
            node, key = stack.pop()
            # Popped: a page is looked at once, whatever circles the records claim.
            for number in self._after.pop(key, []):
                end = self._adopt_chain(node, key, self._chain(number))
                if end is not None:
                    stack.append(end)

    def _chain(self, number: int) -> list[int]:
        """Return the record and those after it, as long as there is just one."""
        chain = [number]
        while True:
            after = self._after.get(self._keys[chain[-1]])
            if after is None or len(after) != 1:
                return chain
            del self._after[self._keys[chain[-1]]]
            chain.append(after[0])

    def _adopt_chain(
        self, node: Node, key: bytes, chain: list[int]
    ) -> tuple[Node, bytes] | None:
        """Adopt a chain after ``node``; return its end, or None if it was cut."""
        store, table, records = self._store, self._store.table, self._records
        numbers = np.asarray(chain)
        tokens = np.ascontiguousarray(records.tokens[numbers], dtype=np.int32)
        keys = page_keys(key, tokens.reshape(-1), store.page_tokens)
        is_wrong = (keys != records.keys[numbers]).any(axis=1)
        if records.representations is not None and not table.act_page_bytes:
            is_wrong |= records.representations[numbers] != Representation.KV
        wrong = np.flatnonzero(is_wrong)
        if len(wrong):
            numbers = numbers[: wrong[0]]
        if not len(numbers):
            return None
        num_pages = len(numbers)
        raw = tokens[:num_pages].tobytes()
        path = store.index.walk(node, raw)
        known = concat_rows(path)
        wanted = np.ones(num_pages, np.bool_)
        wanted[: len(known)] = table.entry_of[self._tier][known] < 0
        taken = np.zeros(num_pages, np.bool_)
        slots = table.slots[self._tier]
        taken[wanted] = slots.reserve(records.addresses[numbers[wanted]])
        refused = np.flatnonzero(wanted & ~taken)
        if len(refused):
            # What comes after a refused page could not be reached.
            num_pages = int(refused[0])
            slots.free(records.addresses[numbers[num_pages:][taken[num_pages:]]])
            taken[num_pages:] = False
        end = path[-1] if path else node
        rows = known[:num_pages]
        store.touch(path)
        store.derive_keys(path)
        if num_pages > len(known):
            start = len(known) * store.page_bytes
            end = store.add_pages(end, raw[start : num_pages * store.page_bytes])
            table.keys[end.rows] = keys[len(known) : num_pages]
            table.key_known[end.rows] = True
            rows = np.concatenate([rows, end.rows])
        where = np.flatnonzero(taken[:num_pages])
        if len(where):
            new = numbers[where]
            self._make_copies(rows[where], new)
            self._adopted[new] = True
        if num_pages < len(chain):
            return None
        return end, keys[-1].tobytes()

    def _make_copies(self, rows: Int32s, numbers: Int64s) -> None:
        store, records = self._store, self._records
        kinds: UInt8s | Representation = Representation.KV
        if records.representations is not None:
            kinds = records.representations[numbers]
        entries = store.table.add_copies(
            self._tier, rows, records.addresses[numbers], representation=kinds
        )
        store.table.mark_ready(entries, records.checksums[numbers])
        store.index.change(self._tier, rows, 1)

    def _known_parents(self) -> list[int]:
        """Return rows of pages known before that some record names as its parent."""
        store, table = self._store, self._store.table
        rows: list[int] = []
        for node in list(store.index.nodes()):
            if node.digest != self._records.namespace:
                continue
            store.derive_keys([node])
            keys = _split_bytes(table.keys[node.rows].tobytes())
            rows += [
                int(row)
                for row, key in zip(node.rows, keys, strict=True)
                if key in self._after
            ]
        return rows

    def _end_at(self, row: int) -> Node:
        """Return the node that ends with a row, after a split if need be."""
        node: Node = self._store.table.node[row]
        num_pages = int(np.flatnonzero(node.rows == row)[0]) + 1
        if num_pages == len(node.rows):
            return node
        return self._store.index.split(node, num_pages)


def _split_bytes(raw: bytes) -> list[bytes]:
    return [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]
