"""The benchmark can tell a cold file from a warm one."""

import mmap

import pytest
from reuse.page_cache import drop_page_cache, residence


@pytest.fixture
def store(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.bin").write_bytes(b"x" * (3 * mmap.PAGESIZE + 1))
    (tmp_path / "empty.bin").write_bytes(b"")
    return tmp_path


def test_written_files_are_resident(store):
    """What was just written lies in the page cache, part pages included."""
    found = residence(store)
    assert (found.resident, found.total) == (4, 4)
    assert found.fraction == 1.0


def test_dropped_files_are_not_resident(store):
    """After a drop nothing is in memory, dirty pages written first."""
    drop_page_cache(store)
    found = residence(store)
    if found.resident == found.total:
        pytest.skip("this file system keeps its files in memory")
    assert found.fraction == 0.0
    assert (store / "deep" / "a.bin").read_bytes()[:3] == b"xxx"


def test_empty_store(tmp_path):
    """A store without files has nothing resident."""
    assert residence(tmp_path).fraction == 0.0
