"""One directory of slabs, opened: its lock, its files and what they hold."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from sgl_tiered.errors import TierUnavailableError
from sgl_tiered.tiers.disk_directory import DiskDirectory
from sgl_tiered.tiers.disk_files import IndexFile, SlabFiles, takes_direct_io
from sgl_tiered.tiers.disk_format import DiskMeta
from sgl_tiered.tiers.disk_io import SystemCalls
from sgl_tiered.tiers.disk_records import RecordBook

__all__ = ["DiskVolume"]


class DiskVolume:
    """The files of a disk tier between an open and a close.

    Attributes:
        directory: locked.
        meta: sizes in force.
        slabs: payload files.
        book: which slots hold what.

    Args:
        path: the directory.
        meta: sizes wanted; the slab size of what is there stays in force.
        num_slots: capacity.
        calls: the operating system.
        direct: open slabs with O_DIRECT; None to find out whether that works.
        device: the file system that the directory must lie on; None for any.

    Raises:
        TierUnavailableError: in use, foreign, not accessible, or another file system.
    """

    def __init__(
        self,
        path: Path,
        meta: DiskMeta,
        *,
        num_slots: int,
        calls: SystemCalls,
        direct: bool | None,
        device: int | None = None,
    ) -> None:
        self.directory = DiskDirectory(path, device=device)
        with ExitStack() as opened:
            opened.callback(self.directory.close)
            try:
                self.meta = self.directory.adopt(meta, num_slots)
                if direct is None:
                    direct = takes_direct_io(calls, path)
                self.slabs = SlabFiles(
                    path,
                    calls,
                    num_slots=num_slots,
                    slots_per_slab=self.meta.slots_per_slab,
                    slot_bytes=self.meta.slot_bytes,
                    direct=direct,
                )
                opened.callback(self.slabs.close)
                index = IndexFile(
                    path, calls, num_slots=num_slots, page_tokens=self.meta.page_tokens
                )
                opened.callback(index.close)
                self.slabs.open_existing()
            except OSError as error:
                raise TierUnavailableError(
                    f"the disk tier cannot use {path}: {error.strerror}; see to the "
                    f"disk or give another path."
                ) from error
            opened.pop_all()
        self.book = RecordBook(
            index, num_slots=num_slots, page_tokens=self.meta.page_tokens
        )

    def close(self) -> None:
        """Close the files and release the lock; may be called twice."""
        self.slabs.close()
        self.book.close()
        self.directory.close()
