"""SGLang's kernels of HiCache, on the same bytes: a baseline where they are there.

They are compiled when first used, from sources of SGLang's wheel (``sglang/kernels``)
by ``tvm_ffi`` and nvcc. SGLang itself need not be installed: README.md says what to
carry. They are called as SGLang's host pool calls them for the layout ``page_first``,
which its authors advise: a token's layers lie side by side in host memory, and a
layer's tokens on the device. Up goes a launch per layer; down go all layers of 64 pages
at a time, by way of a staging buffer on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from stages.clocks import Device

__all__ = ["HiCache"]

_STAGED_PAGES = 64
"""As SGLang 0.5.23 has it (``_WRITE_BACK_STAGING_PAGE_CHUNK``)."""


class HiCache:
    """The kernels of one shape at a time.

    Attributes:
        why_not: why there are none; empty where there are.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.why_not = ""
        self._kernels: Any = None
        if not device.is_cuda:
            self.why_not = "not there: needs a CUDA device"
            return
        missing = [name for name in ("sglang", "tvm_ffi") if find_spec(name) is None]
        if missing:
            self.why_not = f"not there: no Python module {' and '.join(missing)}"
            return
        try:
            from sglang.kernels.ops.kvcache import hicache
        except Exception as problem:  # noqa: BLE001 - foreign code: told, no more
            self.why_not = f"not there: {type(problem).__name__}: {problem}"
            return
        self._kernels = hicache

    def prepare(
        self,
        host: np.ndarray,
        device: torch.Tensor,
        *,
        layers: int,
        pages: int,
        page_tokens: int,
        token_bytes: int,
    ) -> str:
        """Lay caches out over memory that is there; return why it cannot be done."""
        self._page_tokens = page_tokens
        tokens = 2 * pages * page_tokens
        num_bytes = 2 * layers * tokens * token_bytes
        if num_bytes > min(len(host), device.numel()):
            return "not there: its caches do not fit"
        try:
            fits = self._kernels.can_use_hicache_jit_kernel(
                element_size=token_bytes, page_size=page_tokens
            ) and self._kernels.can_use_write_back_jit_kernel(element_size=token_bytes)
        except Exception as problem:  # noqa: BLE001 - foreign code: told, no more
            return f"not there: {type(problem).__name__}: {problem}"
        if not fits:
            return f"not there: it takes no tokens of {token_bytes} bytes"
        # Its kernels take elements of the model's type.
        width = token_bytes // 2
        self._kept = (
            torch.from_numpy(host)[:num_bytes]
            .view(torch.bfloat16)
            .view(2, tokens, layers, width)
        )
        # The same memory, seen a layer at a time.
        self._host = self._kept.transpose(1, 2)
        self._there = (
            device[:num_bytes].view(torch.bfloat16).view(2, layers, tokens, width)
        )
        on = self._device.torch
        self._pointers = [
            torch.tensor(
                [layer.data_ptr() for layer in part], dtype=torch.uint64, device=on
            )
            for part in self._there
        ]
        staged = (2, min(pages, _STAGED_PAGES) * page_tokens, layers, width)
        self._staging = torch.empty(staged, dtype=torch.bfloat16, device=on)
        rng = np.random.default_rng(layers * pages)

        def indices() -> torch.Tensor:
            chosen = rng.permutation(2 * pages)[:pages] * page_tokens
            slots = chosen[:, None] + np.arange(page_tokens)
            numbers = torch.from_numpy(slots.reshape(-1).astype(np.int64))
            return numbers.to(self._device.torch)

        self._host_indices, self._device_indices = indices(), indices()
        return ""

    def copy(self, direction: str, stream: Any) -> Callable[[], None]:
        """Return a copy of all layers: a launch per layer up, all of them down."""
        kernels = self._kernels

        def up() -> None:
            with self._device.on(stream):
                for layer in range(self._there.shape[1]):
                    kernels.transfer_hicache_one_layer(
                        self._there[0, layer],
                        self._there[1, layer],
                        self._device_indices,
                        self._host[0, layer],
                        self._host[1, layer],
                        self._host_indices,
                        page_size=self._page_tokens,
                    )

        def down() -> None:
            with self._device.on(stream):
                kernels.transfer_hicache_all_layer_staged_lf_pf(
                    k_ptr_src=self._pointers[0],
                    v_ptr_src=self._pointers[1],
                    src_indices=self._device_indices,
                    dst_indices=self._host_indices,
                    staging_k=self._staging[0],
                    staging_v=self._staging[1],
                    dst_k=self._kept[0],
                    dst_v=self._kept[1],
                    page_size=self._page_tokens,
                )

        return up if direction == "up" else down

    def is_right(self, copy: Callable[[], None], direction: str) -> bool:
        """Return whether the bytes of all layers come."""
        at, host_at = self._device_indices, self._host_indices.cpu()
        if direction == "up":
            self._there[:, :, at] = 7.0
        else:
            self._host[:, :, host_at] = 7.0
        copy()
        self._device.synchronize()
        moved = self._there[:, :, at].cpu().view(torch.int16)
        kept = self._host[:, :, host_at].contiguous().view(torch.int16)
        return bool(torch.equal(moved, kept)) and not bool((kept == 0x40E0).all())
