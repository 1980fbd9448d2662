"""SGLang's kernels of HiCache, on the same bytes: a baseline where they are there.

They are compiled when first used, from sources of SGLang's wheel (``sglang/kernels``)
by ``tvm_ffi`` and nvcc. SGLang itself need not be installed: README.md says what to
carry. Their layout is ``layer_first`` on both sides: tokens of K, and of V, per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from stages.clocks import Device

__all__ = ["HiCache"]


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
            )
        except Exception as problem:  # noqa: BLE001 - foreign code: told, no more
            return f"not there: {type(problem).__name__}: {problem}"
        if not fits:
            return f"not there: it takes no tokens of {token_bytes} bytes"

        def caches(memory: torch.Tensor) -> torch.Tensor:
            # Its kernels take elements of the model's type.
            elements = memory[:num_bytes].view(torch.bfloat16)
            return elements.view(2, layers, tokens, token_bytes // 2)

        self._host = caches(torch.from_numpy(host))
        self._there = caches(device)
        rng = np.random.default_rng(layers * pages)

        def indices() -> torch.Tensor:
            chosen = rng.permutation(2 * pages)[:pages] * page_tokens
            slots = chosen[:, None] + np.arange(page_tokens)
            numbers = torch.from_numpy(slots.reshape(-1).astype(np.int64))
            return numbers.to(self._device.torch)

        self._host_indices, self._device_indices = indices(), indices()
        return ""

    def copy(self, direction: str, stream: Any) -> Callable[[], None]:
        """Return a copy of all layers, one launch per layer as HiCache loads."""
        up = direction == "up"
        to, frm = (self._there, self._host) if up else (self._host, self._there)
        at = (self._device_indices, self._host_indices)
        to_at, from_at = at if up else at[::-1]

        def run() -> None:
            with self._device.on(stream):
                for layer in range(to.shape[1]):
                    self._kernels.transfer_hicache_one_layer(
                        to[0, layer],
                        to[1, layer],
                        to_at,
                        frm[0, layer],
                        frm[1, layer],
                        from_at,
                        page_size=self._page_tokens,
                    )

        return run

    def is_right(self, copy: Callable[[], None], direction: str) -> bool:
        """Return whether the bytes of the last layer come."""
        there, host = self._there[:, -1], self._host[:, -1]
        at = (self._device_indices, self._host_indices.cpu())
        target, target_at = (there, at[0]) if direction == "up" else (host, at[1])
        target[:, target_at] = 7.0
        copy()
        self._device.synchronize()
        moved = there[:, at[0]].cpu().view(torch.int16)
        kept = host[:, at[1]].view(torch.int16)
        return bool(torch.equal(moved, kept)) and not bool((kept == 0x40E0).all())
