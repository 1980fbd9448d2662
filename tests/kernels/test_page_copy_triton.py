"""The Triton form of the page copies equals the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sgl_tiered_kernels.page_copy import reference
from sgl_tiered_kernels.page_copy.dma import common_alignment

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

PARTS = [
    (4100, 2, 5, 64),
    (64, 6, 3, 4),
    (3, 2, 1, 1),
    (8192, 4, 7, 3),
    (4112, 2, 5, 3),
]
"""Bytes of a part, parts, pages, and the programs that share the work."""
PLACES = [(8, 5, 16), (16, 0, 16), (16, 0, 4), (16, 0, 1)]
"""Bytes of a row before and behind its parts, and what the caller knows to divide the
addresses of the buffers."""
CASES = [(1, 0, 0), (7, 3, 1), (64, 8, 16), (5000, 4, 8), (8192, 0, 0), (4097, 0, 3)]


def check_rows(device):
    """Compare all cases with the reference on one device; raises on a difference."""
    from sgl_tiered_kernels.page_copy import triton as kernel

    rng = np.random.default_rng(0)
    for nbytes, to_offset, from_offset in CASES:
        dst = rng.integers(0, 256, (9, nbytes + 24), np.uint8)
        src = rng.integers(0, 256, (7, nbytes + 20), np.uint8)
        to_rows, from_rows = rng.permutation(9)[:5], rng.permutation(7)[:5]
        got = torch.tensor(dst, device=device)
        kernel.copy_rows(
            got,
            torch.tensor(to_rows, device=device),
            to_offset,
            torch.tensor(src, device=device),
            torch.tensor(from_rows, device=device),
            from_offset,
            nbytes,
        )
        reference.copy_rows(
            dst, to_rows, to_offset, src, from_rows, from_offset, nbytes
        )
        np.testing.assert_array_equal(got.cpu().numpy(), dst)


def check_layer(device):
    """Send a layer down and back on one device; raises on a difference."""
    from sgl_tiered_kernels.page_copy import triton as kernel

    size, pages = 640, torch.tensor([4, 0, 2], device=device)
    keys = torch.randint(0, 256, (5, size), dtype=torch.uint8, device=device)
    values = torch.randint(0, 256, (5, size), dtype=torch.uint8, device=device)
    host = torch.zeros((6, 4 * size), dtype=torch.uint8, device=device)
    rows = torch.tensor([5, 1, 3], device=device)
    kernel.gather_layer(host, rows, size, 2 * size, keys, values, pages, size)
    back_k, back_v = torch.zeros_like(keys), torch.zeros_like(values)
    kernel.copy_layer(back_k, back_v, pages, host, rows, size, 2 * size, size)
    assert torch.equal(back_k[pages], keys[pages])
    assert torch.equal(back_v[pages], values[pages])
    assert not host[[0, 2, 4]].any()
    assert not host[:, :size].any()
    assert not host[:, 3 * size :].any()


def check_parts(device):
    """Move odd parts of several buffers both ways; raises on a difference."""
    from sgl_tiered_kernels.page_copy import triton as kernel

    rng = np.random.default_rng(1)
    for case, place in itertools.product(PARTS, PLACES):
        (size, num_parts, count, programs), (first, behind, alignment) = case, place
        width = first + num_parts * size + behind
        whole = rng.integers(0, 256, (7, width), np.uint8)
        buffers = [torch.zeros((9, size), dtype=torch.uint8, device=device)]
        buffers += [torch.zeros_like(buffers[0]) for _ in range(num_parts - 1)]
        addresses = [b.data_ptr() for b in buffers]
        assert common_alignment(addresses) == 16
        table = torch.tensor(addresses, device=device)
        pages, rows = rng.permutation(9)[:count], rng.permutation(7)[:count]
        on_device = [torch.tensor(numbers, device=device) for numbers in (pages, rows)]
        kernel.scatter_parts(
            table,
            on_device[0],
            torch.tensor(whole, device=device),
            on_device[1],
            first,
            size,
            alignment=alignment,
            max_programs=programs,
        )
        back = torch.zeros((7, width), dtype=torch.uint8, device=device)
        kernel.gather_parts(
            back,
            on_device[1],
            first,
            table,
            on_device[0],
            size,
            alignment=alignment,
            max_programs=programs,
        )
        wanted = np.zeros_like(whole)
        for part, buffer in enumerate(buffers):
            offset = first + part * size
            parts = np.zeros((9, size), np.uint8)
            reference.copy_rows(parts, pages, 0, whole, rows, offset, size)
            np.testing.assert_array_equal(buffer.cpu().numpy(), parts)
            reference.copy_rows(wanted, rows, offset, parts, pages, 0, size)
        np.testing.assert_array_equal(back.cpu().numpy(), wanted)


def test_the_interpreted_kernel_equals_the_reference(interpreted):
    """All cases, on any machine that has Triton."""
    assert interpreted == ["rows", "layer", "parts"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_compiled_kernel_equals_the_reference():
    """On a real device, all sizes and offsets."""
    check_rows("cuda")
    check_layer("cuda")
    check_parts("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_kernel_reads_and_writes_pinned_memory_in_place():
    """Whole pages may lie in host memory: the device reaches them over the link."""
    from sgl_tiered_kernels.page_copy import triton as kernel

    size = 4096
    buffers = [torch.zeros((5, size), dtype=torch.uint8, device="cuda") for _ in "kv"]
    table = torch.tensor([b.data_ptr() for b in buffers], device="cuda")
    pages = torch.tensor([4, 1], device="cuda")
    rows = torch.tensor([0, 2], device="cuda")
    host = torch.randint(0, 256, (3, 2 * size), dtype=torch.uint8, pin_memory=True)
    kernel.scatter_parts(table, pages, host, rows, 0, size, alignment=16)
    back = torch.zeros_like(host, pin_memory=True)
    kernel.gather_parts(back, rows, 0, table, pages, size, alignment=16)
    torch.cuda.synchronize()
    assert torch.equal(back[[0, 2]], host[[0, 2]])
    assert not back[1].any()


def test_a_block_outside_its_row_is_refused():
    """Offsets and sizes are checked on the host."""
    from sgl_tiered_kernels.page_copy import triton as kernel

    data, rows = torch.zeros((2, 16), dtype=torch.uint8), torch.tensor([0])
    with pytest.raises(ValueError, match="src"):
        kernel.copy_rows(data, rows, 0, data.clone(), rows, 12, 8)
    table = torch.tensor([data.data_ptr()])
    with pytest.raises(ValueError, match="outside a row"):
        kernel.gather_parts(data, rows, 1, table, rows, 16, alignment=16)
    others = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="differ in length"):
        kernel.scatter_parts(table, rows, data, others, 0, 16, alignment=16)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.copy_rows(data[:, ::2], rows, 0, data.clone(), rows, 0, 8)


if __name__ == "__main__":
    check_rows("cpu")
    print("rows")
    check_layer("cpu")
    print("layer")
    check_parts("cpu")
    print("parts")
