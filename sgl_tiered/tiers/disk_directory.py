"""The directory of a disk tier: whose it is, who uses it, and what may be kept.

Nothing that is not ours is ever deleted: a directory with any other file in it is
refused, and so is one in another version's format, of which nothing is touched. Slabs
written under another fingerprint or layout, and those whose meta file is damaged, are
discarded with one log line, never served.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
from pathlib import Path

from sgl_tiered.errors import TierUnavailableError
from sgl_tiered.tiers.disk_format import (
    FORMAT_VERSION,
    INDEX_NAME,
    LOCK_NAME,
    META_NAME,
    DiskMeta,
    is_ours,
    known_version,
)

__all__ = ["DiskDirectory"]

logger = logging.getLogger(__name__)
DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
MAX_KEPT_SLABS = 512
"""Twice what a new directory gets at most: each one costs a file descriptor."""
MAX_META_BYTES = 1 << 16
TOLERATED = frozenset({"lost+found"})
RANK_FOLDER = re.compile(r"rank-\d+-of-(\d+)")
"""Of one rank of several, within the folder that the server was given."""


class DiskDirectory:
    """An opened and locked directory; ``close`` releases the lock.

    Args:
        path: where it is; made if it is not there.
        device: number of the file system that it must lie on; None for any. Under the
            mount point of a disk that has gone lies another one, not meant for us.

    Raises:
        TierUnavailableError: in use by another process, holding files of others or of
            another format, on another file system, or not to be created or entered.
    """

    def __init__(self, path: Path, *, device: int | None = None) -> None:
        self.path = path
        self._lock_fd = -1
        try:
            if device is not None:
                nearest = path if path.exists() else path.parent
                if nearest.stat().st_dev != device:
                    raise TierUnavailableError(
                        f"the disk tier waits for {path}: its file system has gone."
                    )
            path.mkdir(mode=DIRECTORY_MODE, parents=device is None, exist_ok=True)
            # First: another version may write files that this one does not know.
            self._read_meta()
            self._refuse_foreign_files()
            path.chmod(DIRECTORY_MODE)
            self._lock_fd = self._take_lock()
        except TierUnavailableError:
            raise
        except OSError as error:
            raise TierUnavailableError(
                f"the disk tier cannot use {path}: {error.strerror}; give another path."
            ) from error

    @property
    def device(self) -> int:
        """Number of the file system that the directory lies on."""
        return os.fstat(self._lock_fd).st_dev

    @property
    def vanished(self) -> bool:
        """True where the path does not lead to the directory that was opened."""
        try:
            there, ours = os.stat(self.path / LOCK_NAME), os.fstat(self._lock_fd)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    def adopt(self, wanted: DiskMeta, num_slots: int) -> DiskMeta:
        """Keep what fits ``wanted`` and discard the rest; return the meta in force.

        ``slots_per_slab`` may differ: then the one on disk stays in force, unless the
        capacity would take more than ``MAX_KEPT_SLABS`` of them.

        Raises:
            TierUnavailableError: it is in another version's format.
            OSError: the disk fails. Then nothing is discarded: what cannot be read now
                may be readable at the next start.
        """
        stored = self._read_meta()
        if stored is None:
            reason = "it has no readable meta file"
        else:
            in_force = DiskMeta(
                fingerprint=wanted.fingerprint,
                slot_bytes=wanted.slot_bytes,
                page_bytes=wanted.page_bytes,
                page_tokens=wanted.page_tokens,
                slots_per_slab=stored.slots_per_slab,
            )
            reason = in_force.unlike(stored)
            num_slabs = -(-num_slots // stored.slots_per_slab)
            if not reason and num_slabs <= MAX_KEPT_SLABS:
                return in_force
            reason = reason or (
                f"the tier has grown: it would take {num_slabs} of their small slabs"
            )
        self._discard(reason)
        # The new meta file must not survive a power loss that brings old slabs back.
        self._sync_names()
        self.write_meta(wanted)
        self._sync_names()
        return wanted

    def write_meta(self, meta: DiskMeta) -> None:
        """Replace the meta file in one step, so that it is never half written."""
        new = self.path / (META_NAME + ".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        fd = os.open(new, flags, FILE_MODE)
        try:
            left = meta.to_json().encode()
            while left:
                # A write may take a part only.
                count = os.write(fd, left)
                if count == 0:
                    raise OSError(errno.EIO, "the disk takes no bytes of a write")
                left = left[count:]
            os.fsync(fd)
        finally:
            os.close(fd)
        new.rename(self.path / META_NAME)

    def close(self) -> None:
        """Release the lock; may be called twice."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _refuse_foreign_files(self) -> None:
        for name in sorted(os.listdir(self.path)):
            mode = os.lstat(self.path / name).st_mode
            ours = is_ours(name) and stat.S_ISREG(mode)
            ranks = RANK_FOLDER.fullmatch(name)
            if ranks is not None and stat.S_ISDIR(mode):
                raise TierUnavailableError(
                    f"the disk tier does not use {self.path}, because a server with "
                    f"--tp-size {ranks[1]} keeps its pages in it ({name}); start with "
                    f"that --tp-size, give another path, or delete its rank-* folders."
                )
            if not ours and name not in TOLERATED:
                raise TierUnavailableError(
                    f"the disk tier does not use {self.path}, because it holds "
                    f"{name!r}, which sgl-tiered did not write; give an empty "
                    f"or a new directory."
                )

    def _take_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path / LOCK_NAME, flags, FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise TierUnavailableError(
                f"the disk tier at {self.path} is in use by process {pid}; stop that "
                f"server or give this one another path."
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd

    def _read_meta(self) -> DiskMeta | None:
        """Return what is kept here, None where nothing says so; refuse other versions.

        A meta file that is damaged is none: it may be what a crash has left.
        """
        file_path = self.path / META_NAME
        try:
            # A link or a pipe is foreign.
            if not stat.S_ISREG(os.lstat(file_path).st_mode):
                return None
            with file_path.open("rb") as file:
                text = file.read(MAX_META_BYTES).decode()
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        version = known_version(text)
        if version is not None and version != FORMAT_VERSION:
            whose = "a newer" if version > FORMAT_VERSION else "an older"
            raise TierUnavailableError(
                f"the disk tier does not use {self.path}, because {whose} version of "
                f"sgl-tiered keeps its pages in it, in format {version}, and this one "
                f"reads format {FORMAT_VERSION} only; start that version, give another "
                f"path, or delete the tiered-* files in it."
            )
        return DiskMeta.from_json(text)

    def _sync_names(self) -> None:
        """Let what was made, renamed and deleted so far reach the medium."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            # Some file systems sync no directories: then their order is what it is.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(fd)

    def _discard(self, reason: str) -> None:
        """Delete our data files; the index first, so that no half is ever served."""
        names = sorted(
            (name for name in os.listdir(self.path) if is_ours(name)),
            key=lambda name: name != INDEX_NAME,
        )
        names = [name for name in names if name not in (LOCK_NAME, META_NAME)]
        num_bytes = 0
        for name in names:
            info = os.lstat(self.path / name)
            assert stat.S_ISREG(info.st_mode), f"{name} is not a regular file"
            num_bytes += info.st_blocks * 512
            (self.path / name).unlink()
        if names:
            logger.warning(
                "disk tier at %s: discarded %.1f MiB of an earlier server, because %s",
                self.path,
                num_bytes / 2**20,
                reason,
            )
