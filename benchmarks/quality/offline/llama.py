"""A Llama's forward in plain torch, with the KV of each layer in the caller's hands.

What a server cannot easily be asked for: each layer's KV may be of other tokens than
the next one's, and of a lossy form, and every attention row can be looked at. Queries
and new keys keep their true positions; what was dropped is simply not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

__all__ = ["LayerKV", "Llama", "LlamaShape", "Watch"]

ROW_BLOCK = 256
"""Queries whose scores are in memory at a time."""

LayerKV = tuple[torch.Tensor, torch.Tensor]
"""Rotated keys and values of one layer; [num_tokens, num_kv_heads, head_dim]."""

Watch = Callable[[int, int, torch.Tensor], None]
"""Called as ``watch(layer, first_row, probabilities)`` with float32 [num_kv_heads,
group, rows, keys] of a sequence without a past: key j is position j."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What of a checkpoint's ``config.json`` the forward needs.

    Raises:
        ValueError: the checkpoint is no plain Llama.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float

    @staticmethod
    def read(folder: Path) -> LlamaShape:
        """Read it from a checkpoint's folder."""
        config = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or rope
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if config.get("model_type") != "llama" or kind != "default":
            raise ValueError(f"{folder} is no Llama with plain rotary positions")
        if config.get("attention_bias") or config.get("mlp_bias"):
            raise ValueError(f"{folder} has biases, which this forward has not")
        heads = config["num_attention_heads"]
        return LlamaShape(
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            norm_eps=config["rms_norm_eps"],
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        )


class Llama:
    """Weights and forward.

    Args:
        shape: of the model.
        weights: by the names of a Hugging Face checkpoint.
        dtype: to compute in; scores and norms are float32.
    """

    def __init__(
        self,
        shape: LlamaShape,
        weights: dict[str, torch.Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shape = shape
        self._weights = {name: w.to(dtype) for name, w in weights.items()}
        # Tied to the embedding where a checkpoint has no output layer.
        embedding = self._weights["model.embed_tokens.weight"]
        self._output = self._weights.get("lm_head.weight", embedding)

    @staticmethod
    def load(folder: Path, dtype: torch.dtype = torch.float32) -> Llama:
        """Read a checkpoint's folder (``config.json``, ``*.safetensors``).

        Raises:
            ValueError: it is no plain Llama, or has no weights.
        """
        from safetensors.torch import load_file

        weights: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            weights |= load_file(path)
        if not weights:
            raise ValueError(f"no *.safetensors in {folder}")
        return Llama(LlamaShape.read(folder), weights, dtype)

    @torch.inference_mode()
    def run(
        self,
        tokens: torch.Tensor,
        first_position: int = 0,
        past: Sequence[LayerKV] | None = None,
        watch: Watch | None = None,
        logits_from: int = 0,
    ) -> tuple[torch.Tensor, list[LayerKV]]:
        """Compute tokens behind a past.

        Args:
            tokens: int64 [batch, num_tokens]; all of the batch see the same past.
            first_position: of the first token.
            past: kept KV per layer, any number of tokens each; every new token sees all
                of it. None for none.
            watch: sees the probabilities of the first sequence; only without a past.
            logits_from: the first of ``tokens`` whose logits are wanted.

        Returns:
            Logits, float32 [batch, num_tokens - logits_from, vocabulary], and the first
            sequence's new KV per layer.
        """
        hidden = self._weights["model.embed_tokens.weight"][tokens]
        cos, sin = self._rotation(first_position, tokens.shape[1], hidden)
        found: list[LayerKV] = []
        for layer in range(self.shape.num_layers):
            name = f"model.layers.{layer}."
            normed = self._norm(hidden, name + "input_layernorm.weight")
            query, key, value = self._project(name, normed, cos, sin)
            found.append((key[0], value[0]))
            behind = past[layer] if past is not None else None
            see = partial(watch, layer) if watch is not None else None
            attended = self._attend(query, key, value, behind, see)
            hidden = hidden + self._times(attended, name + "self_attn.o_proj")
            normed = self._norm(hidden, name + "post_attention_layernorm.weight")
            hidden = hidden + self._mlp(name + "mlp.", normed)
        last = self._norm(hidden[:, logits_from:], "model.norm.weight")
        return (last @ self._output.T).float(), found

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.norm_eps)
        return self._weights[name] * (wide * scale).to(x.dtype)

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.silu(self._times(x, name + "gate_proj"))
        return self._times(gate * self._times(x, name + "up_proj"), name + "down_proj")

    def _times(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self._weights[name + ".weight"].T

    def _rotation(
        self, first: int, count: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        half = torch.arange(0, self.shape.head_dim, 2, device=like.device).float()
        frequencies = self.shape.rope_theta ** (-half / self.shape.head_dim)
        positions = torch.arange(first, first + count, device=like.device).float()
        angles = torch.outer(positions, frequencies)
        angles = torch.cat([angles, angles], dim=-1)[:, None, :]
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def _project(
        self, name: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value, [batch, tokens, heads, head_dim]."""
        heads = self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads
        parts = [
            self._times(x, f"{name}self_attn.{part}_proj").unflatten(
                -1, (count, self.shape.head_dim)
            )
            for part, count in zip("qkv", heads, strict=True)
        ]
        query, key = (_rotate(part, cos, sin) for part in parts[:2])
        return query, key, parts[2]

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        past: LayerKV | None,
        watch: Callable[[int, torch.Tensor], None] | None,
    ) -> torch.Tensor:
        """Attention in blocks of rows; [batch, tokens, heads * head_dim]."""
        kv_heads = self.shape.num_kv_heads
        group = self.shape.num_heads // kv_heads
        query = query.unflatten(2, (kv_heads, group)) * self.shape.head_dim**-0.5
        count = query.shape[1]
        blocks = []
        for begin in range(0, count, ROW_BLOCK):
            end = min(begin + ROW_BLOCK, count)
            rows = query[:, begin:end]
            scores = torch.einsum("bqhgd,bkhd->bhgqk", rows, key[:, :end]).float()
            later = torch.ones(
                end - begin, end, dtype=torch.bool, device=query.device
            ).triu(begin + 1)
            scores.masked_fill_(later, float("-inf"))
            num_past = 0
            if past is not None:
                num_past = len(past[0])
                behind = torch.einsum("bqhgd,khd->bhgqk", rows, past[0]).float()
                scores = torch.cat([behind, scores], dim=-1)
            shares = torch.softmax(scores, dim=-1)
            if watch is not None:
                watch(begin, shares[0])
            shares = shares.to(value.dtype)
            mixed = torch.einsum(
                "bhgqk,bkhd->bqhgd", shares[..., num_past:], value[:, :end]
            )
            if past is not None:
                mixed = mixed + torch.einsum(
                    "bhgqk,khd->bqhgd", shares[..., :num_past], past[1]
                )
            blocks.append(mixed.flatten(2))
        return torch.cat(blocks, dim=1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate halves against each other, as Hugging Face's checkpoints expect."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
