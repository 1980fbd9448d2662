"""The Triton form of the page copies equals the reference."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from sgl_tiered_kernels.page_copy import reference

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

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


def test_the_interpreted_kernel_equals_the_reference():
    """Under TRITON_INTERPRET=1 (read at import, so in a process of its own)."""
    done = subprocess.run(
        [sys.executable, __file__],
        env={"TRITON_INTERPRET": "1", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["rows", "layer"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_compiled_kernel_equals_the_reference():
    """On a real device, all sizes and offsets."""
    check_rows("cuda")
    check_layer("cuda")


def test_a_block_outside_its_row_is_refused():
    """Offsets and sizes are checked on the host."""
    from sgl_tiered_kernels.page_copy import triton as kernel

    data, rows = torch.zeros((2, 16), dtype=torch.uint8), torch.tensor([0])
    with pytest.raises(ValueError, match="src"):
        kernel.copy_rows(data, rows, 0, data.clone(), rows, 12, 8)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.copy_rows(data[:, ::2], rows, 0, data.clone(), rows, 0, 8)


if __name__ == "__main__":
    check_rows("cpu")
    print("rows")
    check_layer("cpu")
    print("layer")
