"""The disk and io_uring probes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sgl_tiered.cli import storage


def mounts(tmp_path: Path, *lines: tuple[str, str]) -> Path:
    """Write a ``mountinfo`` of (mount point, type) pairs."""
    file = tmp_path / "mountinfo"
    file.write_text(
        "".join(
            f"{i} 1 0:{i} / {point} rw,relatime shared:1 - {kind} none rw\n"
            for i, (point, kind) in enumerate(lines)
        )
    )
    return file


def test_a_folder_that_is_not_there_is_tried_above(tmp_path: Path) -> None:
    """The nearest folder that exists is probed, and nothing is left in it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    table = mounts(tmp_path, ("/", "ext4"))
    facts = storage.disk_facts(folder / "a/b", table)
    assert facts.path == str(folder / "a/b")
    assert facts.probed_path == str(folder)
    assert facts.writable
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert list(folder.iterdir()) == []


def test_the_innermost_and_last_mount_counts(tmp_path: Path) -> None:
    """The type is that of the file system which holds the folder, spaces included."""
    folder = tmp_path / "my disk"
    folder.mkdir()
    escaped = str(folder).replace(" ", "\\040")
    table = mounts(
        tmp_path, (escaped, "ext4"), (escaped, "tmpfs"), ("/", "xfs"), ("/m", "nfs")
    )
    facts = storage.disk_facts(folder, table)
    assert (facts.file_system, facts.is_memory) == ("tmpfs", True)
    assert storage.disk_facts(tmp_path, table).file_system == "xfs"


def test_direct_io_that_fails_only_at_the_write_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that opens with O_DIRECT and then refuses has none."""

    def refuse(descriptor: int, data: object, offset: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "pwrite", refuse)
    facts = storage.disk_facts(tmp_path)
    assert facts.writable
    assert not facts.direct_io
    assert "O_DIRECT does not work (Invalid argument)" in facts.detail


def test_a_folder_that_refuses_files_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file nothing else is tried, and the reason is given."""

    def refuse(**_: object) -> tuple[int, str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(storage.tempfile, "mkstemp", refuse)
    facts = storage.disk_facts(tmp_path)
    assert (facts.writable, facts.direct_io, facts.fallocate) == (False, False, False)
    assert "Permission denied" in facts.detail


@pytest.mark.parametrize(
    ("code", "usable", "words"),
    [
        (0, True, "can be made"),
        (errno.ENOSYS, False, "ENOSYS"),
        (errno.EPERM, False, "EPERM"),
        (errno.ENOMEM, False, "Cannot allocate memory"),
    ],
)
def test_io_uring_refusals_are_told_apart(code: int, usable: bool, words: str) -> None:
    """An old kernel, a ban and a lack of memory have different remedies."""
    facts = storage.io_uring_facts(lambda: code)
    assert facts.usable is usable
    assert words in facts.detail


def test_the_real_ring_probe_leaks_no_descriptor() -> None:
    """Asking the kernel, whatever it says, leaves no file open."""
    before = len(os.listdir("/proc/self/fd"))
    storage.io_uring_facts()
    assert len(os.listdir("/proc/self/fd")) == before
