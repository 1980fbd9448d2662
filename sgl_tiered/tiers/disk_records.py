"""Which slots of a disk tier hold a whole page, in memory and in the index file.

The order that makes a kill harmless: ``void`` before a slot's payload is overwritten,
``enter`` when the new payload is on disk.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.plans import PageRecords
from sgl_tiered.tiers.disk_files import IndexFile
from sgl_tiered.tiers.disk_format import encode_records, group_by_namespace

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

    def recover(self) -> list[PageRecords]:
        """Read the index; of several copies of a page the newest counts.

        What is forgotten meanwhile stays a miss.
        """
        with self._writing:
            self._clear(self.forgotten())
            found = self._index.scan()
            groups, stale = group_by_namespace(found, self._page_tokens)
            for part in found:
                newest = int(part["sequence"].max()) + 1
                self._sequence = max(self._sequence, newest)
            with self._lock:
                self._recorded[:] = False
                self._recorded[stale] = True
                for group in groups:
                    self._recorded[group.addresses] = True
                    self._checksums[group.addresses] = group.checksums
                    self._valid[group.addresses] = ~self._forgotten[group.addresses]
                self._forgotten[stale] = True
                self._forgotten &= self._recorded
            self._clear(self.forgotten())
            return groups

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
