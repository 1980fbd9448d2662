"""A disk that forgets: what may lie on it after a crash at any moment.

``Recorder`` notes what a process does to the files of one folder, call by call. From
that come the states in which a crash may leave the folder:

- ``killed``: all calls up to a moment, and the first sectors of the one under way;
- ``powerless``: what was synced, and any part of the rest: calls reach the medium in
  any order, and a write sector by sector. Contents and names are synced apart.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

SECTOR_BYTES = 512
_CALLS = (
    *("open", "close", "write", "pwrite", "pwritev", "ftruncate", "posix_fallocate"),
    *("fsync", "fdatasync", "rename", "replace", "unlink", "remove"),
)


@dataclass(frozen=True)
class Op:
    """One call.

    Attributes:
        kind: create, rename, unlink (of names); write, truncate, allocate (of a file);
            sync (of a file), sync_names; or mark, which changes nothing.
        file: number of the file.
        name, new_name: in the folder.
        offset: of a write; the size after a truncation or an allocation.
        data: of a write; of a mark what its maker wants to know.
    """

    kind: str
    file: int = 0
    name: str = ""
    new_name: str = ""
    offset: int = 0
    data: Any = b""

    @property
    def is_of_names(self) -> bool:
        """Whether it changes what the folder lists."""
        return self.kind in ("create", "rename", "unlink")

    def cut(self, sectors: Iterable[int]) -> list[Op]:
        """Return the writes of some sectors of a write, counted from its first one."""
        first = self.offset // SECTOR_BYTES * SECTOR_BYTES
        parts = []
        for sector in sectors:
            begin = max(0, first + sector * SECTOR_BYTES - self.offset)
            end = first + (sector + 1) * SECTOR_BYTES - self.offset
            data = self.data[begin:end]
            parts.append(Op("write", self.file, offset=self.offset + begin, data=data))
        return parts

    @property
    def num_sectors(self) -> int:
        """Sectors that a write touches."""
        last = (self.offset + len(self.data) - 1) // SECTOR_BYTES
        return last - self.offset // SECTOR_BYTES + 1


class Recorder:
    """Notes the calls that change files of a folder, in the order in which they end.

    Attributes:
        ops: what was done so far.
    """

    def __init__(self, folder: Path) -> None:
        self.ops: list[Op] = []
        self._folder = str(folder)
        self._lock = threading.RLock()
        self._real = {name: getattr(os, name) for name in _CALLS}
        self._names: dict[str, int] = {}
        self._files: dict[int, int] = {}
        self._positions: dict[int, int] = {}
        self._folders: set[int] = set()
        self._num_files = 0

    def mark(self, *data: Any) -> None:
        """Note something between the calls."""
        with self._lock:
            self.ops.append(Op("mark", data=data))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what is done meanwhile, by any thread."""
        with ExitStack() as stack:
            for name in _CALLS:
                ours = getattr(self, "call_" + name)
                stack.enter_context(mock.patch.object(os, name, ours))
            yield

    def call_open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        """Open; a new name and a cut file are changes."""
        with self._lock:
            fd: int = self._real["open"](path, flags, *args, **kwargs)
            name = self._name(path)
            if str(path) == self._folder:
                self._folders.add(fd)
            elif name is not None:
                if name not in self._names:
                    self._num_files += 1
                    self._names[name] = self._num_files
                    self.ops.append(Op("create", self._num_files, name))
                elif flags & os.O_TRUNC:
                    self.ops.append(Op("truncate", self._names[name]))
                self._files[fd], self._positions[fd] = self._names[name], 0
            return fd

    def call_close(self, fd: int) -> None:
        """Close."""
        with self._lock:
            self._files.pop(fd, None)
            self._folders.discard(fd)
            self._real["close"](fd)

    def call_write(self, fd: int, data: Any) -> int:
        """Write behind the last write."""
        with self._lock:
            count: int = self._real["write"](fd, data)
            if fd in self._files:
                at = self._positions[fd]
                self._positions[fd] += count
                self._wrote(fd, at, bytes(data[:count]))
            return count

    def call_pwrite(self, fd: int, data: Any, offset: int) -> int:
        """Write somewhere."""
        with self._lock:
            count: int = self._real["pwrite"](fd, data, offset)
            self._wrote(fd, offset, bytes(data[:count]))
            return count

    def call_pwritev(self, fd: int, views: Sequence[Any], offset: int) -> int:
        """Write several pieces in a row."""
        with self._lock:
            count: int = self._real["pwritev"](fd, views, offset)
            self._wrote(fd, offset, b"".join(map(bytes, views))[:count])
            return count

    def call_ftruncate(self, fd: int, size: int) -> None:
        """Cut or lengthen."""
        with self._lock:
            self._real["ftruncate"](fd, size)
            if fd in self._files:
                self.ops.append(Op("truncate", self._files[fd], offset=size))

    def call_posix_fallocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """Set space aside."""
        with self._lock:
            self._real["posix_fallocate"](fd, offset, num_bytes)
            if fd in self._files:
                size = offset + num_bytes
                self.ops.append(Op("allocate", self._files[fd], offset=size))

    def call_fsync(self, fd: int) -> None:
        """Let a file's bytes, or the folder's names, reach the medium."""
        with self._lock:
            self._real["fsync"](fd)
            if fd in self._folders:
                self.ops.append(Op("sync_names"))
            elif fd in self._files:
                self.ops.append(Op("sync", self._files[fd]))

    call_fdatasync = call_fsync

    def call_rename(self, old: Any, new: Any, **kwargs: Any) -> None:
        """Give a file another name, in the place of the file that has it."""
        with self._lock:
            self._real["rename"](old, new, **kwargs)
            name, new_name = self._name(old), self._name(new)
            if name is not None and new_name is not None:
                file = self._names.pop(name)
                self._names[new_name] = file
                self.ops.append(Op("rename", file, name, new_name))

    call_replace = call_rename

    def call_unlink(self, path: Any, **kwargs: Any) -> None:
        """Take a name away."""
        with self._lock:
            self._real["unlink"](path, **kwargs)
            name = self._name(path)
            if name is not None:
                self.ops.append(Op("unlink", self._names.pop(name), name))

    call_remove = call_unlink

    def _name(self, path: Any) -> str | None:
        """Return a path's name in the folder; None for any other."""
        folder, _, name = os.fspath(path).rpartition("/")
        return name if folder == self._folder else None

    def _wrote(self, fd: int, offset: int, data: bytes) -> None:
        if fd in self._files and data:
            self.ops.append(Op("write", self._files[fd], offset=offset, data=data))


def lay_out(ops: Iterable[Op], folder: Path) -> None:
    """Make a folder that holds what these calls leave behind."""
    names: dict[str, int] = {}
    contents: dict[int, bytearray] = {}
    for op in ops:
        content = contents.setdefault(op.file, bytearray())
        match op.kind:
            case "create":
                names[op.name] = op.file
            case "rename":
                # Also where the creation was lost: the folder lists the new name.
                if names.get(op.name) == op.file:
                    del names[op.name]
                names[op.new_name] = op.file
            case "unlink":
                if names.get(op.name) == op.file:
                    del names[op.name]
            case "write":
                end = op.offset + len(op.data)
                content.extend(bytes(max(0, end - len(content))))
                content[op.offset : end] = op.data
            case "truncate":
                del content[op.offset :]
                content.extend(bytes(op.offset - len(content)))
            case "allocate":
                content.extend(bytes(max(0, op.offset - len(content))))
    folder.mkdir(mode=0o700)
    for name, file in names.items():
        (folder / name).write_bytes(contents[file])


def killed(ops: Sequence[Op], moment: int) -> Iterator[list[Op]]:
    """Return the states after a kill while a call is under way.

    A call of several sectors may have got as far as any of them.
    """
    done = list(ops[:moment])
    yield done
    if moment < len(ops) and ops[moment].kind == "write":
        op = ops[moment]
        for num in range(1, op.num_sectors):
            yield [*done, *op.cut(range(num))]


def powerless(
    ops: Sequence[Op], moment: int, rng: np.random.Generator, num_states: int
) -> Iterator[list[Op]]:
    """Return states after a power loss at a moment.

    Nothing of what is not synced; all of it but one file's; all but one call, or one
    alone; and parts of it, with writes torn, as the generator draws them.
    """
    pending: list[int] = []
    synced: set[int] = set()
    names_are = False
    for number in range(moment - 1, -1, -1):
        op = ops[number]
        if op.kind == "sync":
            synced.add(op.file)
        elif op.kind == "sync_names":
            names_are = True
        elif op.kind != "mark" and not (
            names_are if op.is_of_names else op.file in synced
        ):
            pending.append(number)
    # Of one file nothing that is not synced: files reach the medium one by one.
    files = {ops[n].file for n in pending if not ops[n].is_of_names}
    chosen = [set(pending)]
    chosen += [
        {n for n in pending if ops[n].file == file and not ops[n].is_of_names}
        for file in sorted(files)
    ]
    # One call alone, and all but one, of the last.
    window = pending[: max(8, num_states)]
    single = [{number} for number in window]
    single += [set(pending) - {number} for number in window]
    drawn = rng.permutation(len(single))[: num_states // 2]
    chosen += [single[number] for number in drawn]
    num_states += len(files)
    while len(chosen) < num_states:
        share = rng.random()
        chosen.append({n for n in pending if rng.random() < share})
    is_pending = set(pending)
    for gone in chosen:
        state: list[Op] = []
        for number in range(moment):
            op = ops[number]
            if number in gone:
                continue
            if op.kind == "write" and number in is_pending and rng.random() < 0.2:
                kept = np.flatnonzero(rng.random(op.num_sectors) < 0.5)
                state += op.cut(kept.tolist())
                continue
            state.append(op)
        yield state
