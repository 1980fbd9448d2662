"""The table grows where it is, by little at a time."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.cache import table as table_module
from sgl_tiered.cache.copy_watch import CopyWatch
from sgl_tiered.cache.index import RadixIndex
from sgl_tiered.cache.table import _MOST_NEW, CacheTable
from sgl_tiered.core.ids import TierId

RESERVES = """
from sgl_tiered.cache.table import CacheTable
from sgl_tiered.core.ids import TierId


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


before = resident()
table = CacheTable((TierId.DISK,), ({num_slots},), num_layers=2, page_bytes=64)
print(resident() - before)
"""


def columns(table: CacheTable) -> dict[str, np.ndarray]:
    """Return the columns, each under a name."""
    found = {k: v for k, v in vars(table).items() if isinstance(v, np.ndarray)}
    return found | {f"entry_of-{t}": each for t, each in enumerate(table.entry_of)}


@pytest.mark.parametrize("slots", [(8,), (3 * _MOST_NEW, 100)])
def test_what_was_written_stays_in_growing_columns(slots):
    """Beyond what was expected too, which is copied; new rows and entries are empty."""
    tiers = (TierId.HOST, TierId.DISK)[: len(slots)]
    table = CacheTable(tiers, slots, num_layers=2, page_bytes=64)
    other = CacheTable(tiers, slots, num_layers=2, page_bytes=64)
    node = object()
    first = table.alloc_rows(1000)
    table.keys[first] = 7
    table.node[first] = node
    table.slots[0].reserve(np.arange(4))
    entries = table.add_copies(0, first[:4], np.arange(4))
    before = columns(table)
    copied = {name: column.copy() for name, column in before.items()}
    sizes = []
    for _ in range(9):
        was = table.rows.capacity
        table.alloc_rows(table.rows.free_slots + 1)
        sizes.append(table.rows.capacity - was)
    table._grow_entries(table.rows.capacity)
    assert max(sizes) <= _MOST_NEW
    for name, column in columns(table).items():
        old = before[name]
        empty = columns(other)[name][0]
        assert len(column) == table.rows.capacity
        assert np.array_equal(column[:1000], copied[name][:1000]), name
        if name not in ("born", "key_known"):
            assert all(np.all(each == empty) for each in column[len(old) :][[0, -1]])
        assert np.shares_memory(column, old) == (len(slots) == 2), name
    assert table.entry_of[0][first[:4]].tolist() == entries.tolist()
    assert table.node[first[-1]] is node


def test_what_is_reserved_takes_little_memory_and_lasts():
    """Numbers that nobody wrote take none; objects take 8 bytes each."""
    num_slots = 1 << 22
    program = [sys.executable, "-c", RESERVES.format(num_slots=num_slots)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    # Objects for 131,072 rows more, and a byte of each of the slots.
    assert int(done.stdout) < 11 * num_slots
    table = CacheTable((TierId.DISK,), (num_slots,), num_layers=2, page_bytes=64)
    # Beside the ten bytes of the tier's slots.
    assert table.array_bytes() >= (8 + 10) * num_slots
    keys = table.keys
    while table.rows.capacity < num_slots:
        was = table.rows.capacity
        table.alloc_rows(table.rows.free_slots + 1)
        assert table.rows.capacity - was <= _MOST_NEW
    assert np.shares_memory(keys, table.keys)


def test_who_watches_copies_grows_in_place_too():
    """What it keeps is as long as the table."""
    slots = 3 * _MOST_NEW
    table = CacheTable((TierId.DISK,), (slots,), num_layers=2, page_bytes=64)
    watch = CopyWatch(table, RadixIndex(table, 64, print), 64, SimpleNamespace())
    watch._fit()
    before = watch._states
    watch._told[:] = 1
    table.alloc_rows(2 * _MOST_NEW)
    watch._fit()
    assert len(watch._states) == len(table.flags)
    assert np.shares_memory(before, watch._states)
    assert int(watch._told.sum()) == len(before)


def test_a_system_that_reserves_nothing_ahead_is_no_reason_to_stop(monkeypatch, caplog):
    """As with vm.overcommit_memory=2: the columns are copied as they grow, and it is
    said once that they are."""
    zeros, empty, most = np.zeros, np.empty, 20_000

    def refusing(make):
        def made(shape, *args, **kwargs):
            if np.prod(shape) >= most * 2:
                raise MemoryError
            return make(shape, *args, **kwargs)

        return made

    monkeypatch.setattr(table_module.np, "zeros", refusing(zeros))
    monkeypatch.setattr(table_module.np, "empty", refusing(empty))
    table = CacheTable((TierId.HOST,), (most,), num_layers=2, page_bytes=64)
    assert caplog.text.count("vm.overcommit_memory") == 1
    rows = table.alloc_rows(1000)
    table.born[rows] = 5
    table.checksum[:] = 3
    table.alloc_rows(1000)
    assert (table.born[rows] == 5).all()
    table._grow_entries(2000)
    assert (table.checksum[:1024] == 3).all()
    assert (table.entry_row[1024:] == -1).all()
