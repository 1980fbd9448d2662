"""Which slots of a disk tier hold a whole page, in memory and in the index file.

The order that makes a kill harmless: ``void`` before a slot's payload is overwritten,
``enter`` when the new payload is on disk.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.keys import KEY_BYTES
from sgl_tiered.core.plans import FoundPages, PageRecords
from sgl_tiered.tiers.disk_files import IndexFile
from sgl_tiered.tiers.disk_format import encode_records, older_copies

__all__ = ["RecordBook"]

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


class RecordBook:
    """State of each slot. Thread-safe.

    Methods that write or read the index raise OSError where that fails, and may take as
    long as the disk does. ``known`` and ``forget`` never wait for it: the lock of the
    state is not held during any I/O, and users of the index file queue at another one.
    """

    def __init__(self, index: IndexFile, *, num_slots: int, page_tokens: int) -> None:
        self._index = index
        self._page_tokens = page_tokens
        self._lock = threading.Lock()
        # Taken before the other one, by one user of the index file at a time.
        self._writing = threading.Lock()
        self._sequence = 1
        self._checksums = np.zeros(num_slots, np.uint64)
        self._valid = np.zeros(num_slots, np.bool_)
        self._recorded = np.zeros(num_slots, np.bool_)
        self._recorded[: index.num_former_slots] = True
        self._forgotten = np.zeros(num_slots, np.bool_)
        self._scan_ends = False

    def known(self, slots: Int64s, wanted: UInt64s | None) -> tuple[Bools, UInt64s]:
        """Return which slots hold the wanted page (0: any), and their checksums."""
        with self._lock:
            known, sums = self._valid[slots], self._checksums[slots]
        if wanted is not None:
            known &= (wanted == 0) | (wanted == sums)
        return known, sums

    def void(self, slots: Int64s) -> None:
        """Make slots empty, on disk as well."""
        with self._writing:
            with self._lock:
                self._valid[slots] = False
                old = slots[self._recorded[slots]]
            self._clear(old)

    def enter(
        self, slots: Int64s, checksums: UInt64s, records: PageRecords | None
    ) -> None:
        """Make slots valid; pages without records do not survive the process."""
        with self._writing:
            if records is not None:
                encoded = encode_records(
                    self._index.dtype, records, slots, checksums, self._sequence
                )
                self._sequence += len(slots)
                with self._lock:
                    self._recorded[slots] = True
                self._index.write(slots, encoded)
            with self._lock:
                self._checksums[slots] = checksums
                self._valid[slots] = True

    def forget(self, slots: Int64s) -> None:
        """Make slots a miss now; ``void_forgotten`` voids their records."""
        with self._lock:
            self._valid[slots] = False
            self._forgotten[slots] = self._recorded[slots]

    def void_forgotten(self) -> None:
        """Void the records of forgotten slots; what fails stays marked."""
        with self._writing:
            self._clear(self.forgotten())

    def forgotten(self) -> Int64s:
        """Return the slots whose records are still to be voided."""
        with self._lock:
            return np.flatnonzero(self._forgotten)

    def holds(self, slots: Int64s) -> Bools:
        """Return which slots have a record, of this or of a former process."""
        return self._index.holds(slots)

    def recover(self) -> FoundPages:
        """Read the index; of several copies of a page the newest counts.

        What is forgotten meanwhile is left out. Takes seconds for millions of pages, in
        which no record is written.
        """
        with self._writing:
            self._clear(self.forgotten())
            columns = _Columns(self._index.reach(), self._page_tokens)
            for part in self._index.scan():
                if self._scan_ends:
                    return FoundPages.of([], self._page_tokens)
                columns.add(part)
            found = columns.found()
            older = older_copies(found.namespaces, found.keys, found.ages)
            if len(found):
                self._sequence = max(self._sequence, int(found.ages.max()) + 1)
            with self._lock:
                gone = older | self._forgotten[found.addresses]
                self._recorded[:] = False
                self._recorded[found.addresses] = True
                self._forgotten[found.addresses[older]] = True
                self._forgotten &= self._recorded
                kept = found.addresses[~gone]
                self._valid[kept] = True
                self._checksums[kept] = found.checksums[~gone]
            if gone.any():
                # Hundreds of bytes a page, so not under the lock.
                found = found.part(np.flatnonzero(~gone), kept)
            self._clear(self.forgotten())
        return found

    def keep_as(self, former: RecordBook) -> int:
        """Keep what another book of the same slots holds; return how many pages.

        To be called after ``recover``, on files that have come back in the place of the
        other book's. They need not be the files that were written last: what was voided
        or overwritten in those lies here still, and nobody else would ever forget it.
        What the other book was opened with and has not looked at yet is kept as well.
        """
        with former._lock, self._lock:
            held = former._valid & (former._checksums == self._checksums)
            held |= former._recorded & ~former._valid & ~former._forgotten
            self._forgotten |= self._recorded & ~held
            self._valid &= held
            return int(np.count_nonzero(self._valid))

    def end_scan(self) -> None:
        """Let ``recover`` return soon, with nothing."""
        self._scan_ends = True

    def close(self) -> None:
        """Close the index; may be called twice."""
        with self._writing:
            self._index.close()

    def _clear(self, slots: Int64s) -> None:
        """Void the records of slots; the file's lock is held."""
        self._index.clear(slots)
        with self._lock:
            self._recorded[slots] = False
            self._forgotten[slots] = False


class _Columns:
    """Room for the columns of all records of an index, filled part by part."""

    def __init__(self, num_slots: int, page_tokens: int) -> None:
        self._num = 0
        # Not touched before it is filled, so not taken.
        self._all = FoundPages(
            namespaces=np.empty((num_slots, KEY_BYTES), np.uint8),
            keys=np.empty((num_slots, KEY_BYTES), np.uint8),
            parents=np.empty((num_slots, KEY_BYTES), np.uint8),
            tokens=np.empty((num_slots, page_tokens), np.int32),
            checksums=np.empty(num_slots, np.uint64),
            addresses=np.empty(num_slots, np.int64),
            representations=np.empty(num_slots, np.uint8),
            ages=np.empty(num_slots, np.int64),
        )

    def add(self, part: npt.NDArray[np.void]) -> None:
        """Take over whole records."""
        to, self._num = slice(self._num, self._num + len(part)), self._num + len(part)
        found = self._all
        found.namespaces[to] = part["namespace"]
        found.keys[to] = part["key"]
        found.parents[to] = part["parent"]
        found.tokens[to] = part["tokens"][:, : found.tokens.shape[1]]
        found.checksums[to] = part["payload"]
        found.addresses[to] = part["slot"]
        found.representations[to] = part["representation"]
        found.ages[to] = part["sequence"]

    def found(self) -> FoundPages:
        """Return what was filled."""
        found, stop = self._all, slice(self._num)
        return found.part(stop, found.addresses[stop])
