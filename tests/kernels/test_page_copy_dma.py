"""Copies by the copy engines: the right addresses, in one call where there is one."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from sgl_tiered_kernels.page_copy import reference
from sgl_tiered_kernels.page_copy.dma import (
    CopyEngines,
    batch_function,
    copy_function,
    part_addresses,
    row_addresses,
)

torch = pytest.importorskip("torch")

STREAM = 77
PART = 24


class Driver:
    """Stands in for CUDA: host addresses, copied at once."""

    def __init__(self, *, status=0):
        self.status = status
        self.calls = []

    def one(self, to, frm, num_bytes, stream):
        self.calls.append((1, None, stream))
        ctypes.memmove(to, frm, num_bytes)
        return self.status

    def batch(self, to, frm, sizes, count, attributes, first, num, failed, stream):
        """Take what ``cuMemcpyBatchAsync`` takes, the arrays as addresses."""
        order = ctypes.c_uint.from_address(attributes).value
        assert num == 1
        assert ctypes.c_size_t.from_address(first).value == 0
        self.calls.append((count, order, stream))
        if self.status:
            ctypes.c_size_t.from_address(failed).value = 1
            return self.status
        arrays = [(ctypes.c_uint64 * count).from_address(a) for a in (to, frm, sizes)]
        for target, source, size in zip(*arrays, strict=True):
            ctypes.memmove(target, source, size)
        return 0


def engines(driver, *, batched):
    return CopyEngines(driver.batch if batched else None, driver.one)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_goes_where_the_reference_puts_it(batched, layer):
    """Keys and values of scattered pages land byte for byte."""
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 256, (6, 6 * PART + 10), np.uint8)
    keys, values = np.zeros((2, 9, PART), np.uint8)
    rows, pages = np.array([5, 0, 3]), np.array([1, 8, 2])
    to, frm = part_addresses(
        keys.ctypes.data,
        values.ctypes.data,
        pages,
        memory.ctypes.data,
        memory.strides[0],
        rows,
        layer * 2 * PART,
        PART,
    )
    driver = Driver()
    engines(driver, batched=batched).submit(to, frm, PART, STREAM, source_complete=True)
    wanted_keys, wanted_values = np.zeros((2, 9, PART), np.uint8)
    first = layer * 2 * PART
    reference.copy_layer(
        wanted_keys, wanted_values, pages, memory, rows, first, first + PART, PART
    )
    np.testing.assert_array_equal(keys, wanted_keys)
    np.testing.assert_array_equal(values, wanted_values)
    assert [stream for _, _, stream in driver.calls] == [STREAM] * len(driver.calls)
    assert [count for count, _, _ in driver.calls] == ([6] if batched else [1] * 6)


def test_a_source_that_is_still_written_is_read_in_order():
    """Only complete sources may be read ahead of what was queued before."""
    data = np.zeros((4, PART), np.uint8)
    rows = row_addresses(data.ctypes.data, PART, np.array([0, 1]))
    targets = row_addresses(data.ctypes.data, PART, np.array([2, 3]))
    driver = Driver()
    for complete in (True, False):
        engines(driver, batched=True).submit(
            targets, rows, PART, STREAM, source_complete=complete
        )
    any_time, in_stream_order = 3, 1
    assert [order for _, order, _ in driver.calls] == [any_time, in_stream_order]


@pytest.mark.parametrize("batched", [True, False])
def test_a_refused_copy_is_an_error(batched):
    """The status of CUDA is not overlooked."""
    data = np.zeros((2, PART), np.uint8)
    address = row_addresses(data.ctypes.data, PART, np.array([0]))
    copies = engines(Driver(status=700), batched=batched)
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        copies.submit(address, address + PART, PART, STREAM, source_complete=True)


def test_nothing_and_uneven():
    """No copies are no call; sides of different length are refused."""
    driver = Driver()
    copies = engines(driver, batched=True)
    none = np.empty(0, np.uint64)
    copies.submit(none, none, PART, STREAM, source_complete=True)
    assert driver.calls == []
    with pytest.raises(ValueError, match="1 targets and 0 sources"):
        copies.submit(np.ones(1, np.uint64), none, PART, STREAM, source_complete=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("batched", [True, False])
def test_the_device_copies_what_the_addresses_say(batched):
    """Down and up again through the real copy engines."""
    batch = batch_function() if batched else None
    if batched and batch is None:
        pytest.skip("not run: this CUDA cannot batch copies")
    copies = CopyEngines(batch, copy_function())
    stream = torch.cuda.Stream()
    stream.record_event()
    host = torch.randint(0, 256, (5, 4096), dtype=torch.uint8, pin_memory=True)
    device = torch.zeros((7, 4096), dtype=torch.uint8, device="cuda")
    back = torch.zeros((5, 4096), dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    rows, pages = np.array([4, 0]), np.array([6, 2])
    there = row_addresses(device.data_ptr(), 4096, pages)
    frm = row_addresses(host.data_ptr(), 4096, rows)
    to = row_addresses(back.data_ptr(), 4096, rows)
    copies.submit(there, frm, 4096, stream.cuda_stream, source_complete=True)
    copies.submit(to, there, 4096, stream.cuda_stream, source_complete=False)
    stream.synchronize()
    assert torch.equal(back[[4, 0]], host[[4, 0]])
    assert not back[[1, 2, 3]].any()
