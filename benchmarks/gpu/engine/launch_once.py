"""Launch named kernels of ours on small inputs; for a sanitizer, or interpreted.

launch_once.py page_copy kv_gen
launch_once.py planted            # writes beyond a buffer, on purpose
"""

from __future__ import annotations

import sys

import torch
from sgl_tiered_kernels.kv_gen import KVProjection, Rotary
from sgl_tiered_kernels.kv_gen import triton as kv_gen
from sgl_tiered_kernels.page_copy import triton as page_copy
from sgl_tiered_kernels.page_copy.dma import common_alignment

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def launch_page_copy() -> None:
    """Move parts both ways: words and bytes, whole blocks and rests."""
    for part_bytes in (4096, 5000, 6):
        row_bytes = 2 * part_bytes
        buffers = [
            torch.zeros((8, part_bytes), dtype=torch.uint8, device=_DEVICE)
            for _ in range(2)
        ]
        whole = torch.randint(0, 256, (6, row_bytes), dtype=torch.uint8)
        whole = whole.to(_DEVICE)
        addresses = [one.data_ptr() for one in buffers]
        table = torch.tensor(addresses, device=_DEVICE)
        alignment = common_alignment(addresses)
        rows = torch.tensor([5, 0, 3], device=_DEVICE)
        pages = torch.tensor([7, 2, 0], device=_DEVICE)
        page_copy.scatter_parts(
            table, pages, whole, rows, 0, part_bytes, alignment=alignment
        )
        back = torch.zeros_like(whole)
        page_copy.gather_parts(
            back, rows, 0, table, pages, part_bytes, alignment=alignment
        )
        assert torch.equal(back[rows], whole[rows]), "other bytes"


def launch_kv_gen() -> None:
    """Rebuild a few tokens, with a rest of every block."""
    heads, dim, hidden, tokens = 3, 32, 72, 70
    weight = torch.randn(2 * heads * dim, hidden, device=_DEVICE)
    table = torch.rand(tokens, dim, device=_DEVICE)
    projection = KVProjection(weight, None, heads, dim, Rotary(table))
    acts = torch.randn(tokens, hidden, device=_DEVICE)
    out = [torch.zeros(tokens, heads, dim, device=_DEVICE) for _ in range(2)]
    numbers = torch.arange(tokens, device=_DEVICE)
    kv_gen.rebuild_kv(acts, numbers, projection, out[0], out[1], numbers, numbers)
    # On the CPU: a sanitizer would look at the product's kernel as well.
    wanted = acts.cpu() @ weight.cpu()[heads * dim :].T
    found = out[1].cpu().view(tokens, -1)
    assert torch.allclose(found, wanted, atol=1e-3), "other values"


def launch_planted() -> None:
    """Scatter to a page that the buffer does not have."""
    buffer = torch.zeros((2, 4096), dtype=torch.uint8, device=_DEVICE)
    whole = torch.zeros((2, 4096), dtype=torch.uint8, device=_DEVICE)
    table = torch.tensor([buffer.data_ptr()], device=_DEVICE)
    rows = torch.tensor([0], device=_DEVICE)
    # 64 MiB behind it: another allocation is not likely to be there.
    pages = torch.tensor([1 << 14], device=_DEVICE)
    page_copy.scatter_parts(table, pages, whole, rows, 0, 4096, alignment=16)


def main() -> None:
    """Launch what is named."""
    for name in sys.argv[1:]:
        {
            "page_copy": launch_page_copy,
            "kv_gen": launch_kv_gen,
            "planted": launch_planted,
        }[name]()
        if _DEVICE == "cuda":
            torch.cuda.synchronize()
        print(f"{name} ran")


if __name__ == "__main__":
    main()
