"""What makes K and V of a layer from its input: a part of its weights, and positions.

Both are views of what the model holds, checked once and then used for every rebuild.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_tiered_kernels.tensors import FLOAT_TYPES, check_tensor

__all__ = ["KVProjection", "Rotary"]


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Rotary positions of a layer's keys, as SGLang's ``RotaryEmbedding`` has them.

    SGLang puts a new table in the place of the old when it grows or changes its type;
    this keeps the one that it was given.

    Attributes:
        cos_sin: ``[num_positions, rotary_dim]``, of each position the cosines of all
            pairs, then the sines. Numbers of a head beyond ``rotary_dim`` are left
            alone.
        neox: A pair is ``(i, i + rotary_dim / 2)``; else (GPT-J) ``(2 i, 2 i + 1)``.
    """

    cos_sin: torch.Tensor
    neox: bool = True

    def __post_init__(self) -> None:
        table = self.cos_sin
        if table.ndim != 2 or not table.shape[1] or table.shape[1] % 2:
            raise ValueError(
                "cos_sin must be [num_positions, rotary_dim] with an even rotary_dim, "
                f"not {list(table.shape)}"
            )
        if table.dtype not in FLOAT_TYPES:
            raise ValueError(f"cos_sin must not be {table.dtype}")
        if not table.is_contiguous():
            raise ValueError("cos_sin must be contiguous")

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated, from its first on."""
        return int(self.cos_sin.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class KVProjection:
    """The K and V part of a layer's qkv projection, and what is done to K after it.

    Attributes:
        weight: ``[2 * num_kv_heads * head_dim, hidden]``, the rows of K, then of V;
            float32, bfloat16 or float16, not packed or quantised.
        bias: ``[2 * num_kv_heads * head_dim]``, or None.
        num_kv_heads: KV heads (of this rank).
        head_dim: Numbers of a head; even.
        rotary: Positions of K; None where they are in the input already (OPT).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    num_kv_heads: int
    head_dim: int
    rotary: Rotary | None = None

    @classmethod
    def from_fused(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_kv_heads: int,
        head_dim: int,
        rotary: Rotary | None = None,
    ) -> KVProjection:
        """Return the K and V part of a fused projection, as views.

        Args:
            weight: ``[(num_heads + 2 * num_kv_heads) * head_dim, hidden]``, the rows
                of Q, then of K, then of V.
            bias: ``[(num_heads + 2 * num_kv_heads) * head_dim]``, or None.
            num_kv_heads: KV heads (of this rank).
            head_dim: Numbers of a head.
            rotary: Positions of K, or None.

        Raises:
            ValueError: the rows are not those of whole groups of query heads and of
                their KV heads, or something does not fit.
        """
        width = 2 * num_kv_heads * head_dim
        num_rows = weight.shape[0] if weight.ndim == 2 else 0
        if width <= 0 or num_rows <= width or (num_rows - width) % (width // 2):
            raise ValueError(
                f"weight {list(weight.shape)} is no fused projection for {num_kv_heads}"
                f" KV heads of {head_dim}"
            )
        if bias is not None:
            check_tensor("bias", bias, (num_rows,), weight.dtype, weight.device)
            bias = bias.detach()[-width:]
        kv_weight = weight.detach()[-width:]
        return cls(kv_weight, bias, num_kv_heads, head_dim, rotary)

    def __post_init__(self) -> None:
        weight, rotary = self.weight, self.rotary
        if self.num_kv_heads < 1 or self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"{self.num_kv_heads} KV heads of {self.head_dim}: there must be one, "
                "and its size must be even"
            )
        if weight.dtype not in FLOAT_TYPES:
            raise ValueError(f"weight must not be {weight.dtype}")
        hidden = weight.shape[-1] if weight.ndim else 0
        shape = (2 * self.width, hidden)
        check_tensor("weight", weight, shape, weight.dtype, weight.device)
        if self.bias is not None:
            check_tensor("bias", self.bias, shape[:1], weight.dtype, weight.device)
        if rotary is not None and rotary.rotary_dim > self.head_dim:
            raise ValueError(
                f"rotary_dim is {rotary.rotary_dim}, and a head has {self.head_dim}"
            )
        if rotary is not None and rotary.cos_sin.device != weight.device:
            raise ValueError(
                f"cos_sin is on {rotary.cos_sin.device}, weight on {weight.device}"
            )

    @property
    def hidden(self) -> int:
        """Numbers of an activation."""
        return int(self.weight.shape[1])

    @property
    def width(self) -> int:
        """Numbers of a token's K (and of its V)."""
        return self.num_kv_heads * self.head_dim
