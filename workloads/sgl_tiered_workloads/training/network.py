"""A Llama in plain functions, with the names and the arithmetic of transformers' one.

Parameters are a dictionary by the names that a checkpoint has, float32; a step casts
them once to the type it computes in. Activations have that type throughout, as a
server's have; norms, rotary tables and the loss are computed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from sgl_tiered_workloads.training.copying import begin_with_copying
from sgl_tiered_workloads.training.recipe import Shape

__all__ = [
    "EMBEDDING",
    "OUTPUT",
    "Network",
    "hf_config",
    "initial_parameters",
]

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
# As long as what a layer writes after some hundred steps, so that none drowns it.
_EMBEDDING_STD = 1.0
_OUTPUT_STD = 0.01
_QUERY_BLOCK = 512

Parameters = Mapping[str, torch.Tensor]


def _layer(index: int, part: str) -> str:
    return f"model.layers.{index}.{part}.weight"


def _shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the size of every parameter by name, in the order of the layers."""
    hidden, inner = shape.hidden, shape.intermediate
    queries = shape.num_heads * shape.head_dim
    values = shape.num_kv_heads * shape.head_dim
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_tokens, hidden)}
    for index in range(shape.num_layers):
        found |= {
            _layer(index, "input_layernorm"): (hidden,),
            _layer(index, "self_attn.q_proj"): (queries, hidden),
            _layer(index, "self_attn.k_proj"): (values, hidden),
            _layer(index, "self_attn.v_proj"): (values, hidden),
            _layer(index, "self_attn.o_proj"): (hidden, queries),
            _layer(index, "post_attention_layernorm"): (hidden,),
            _layer(index, "mlp.gate_proj"): (inner, hidden),
            _layer(index, "mlp.up_proj"): (inner, hidden),
            _layer(index, "mlp.down_proj"): (hidden, inner),
        }
    return found | {
        "model.norm.weight": (hidden,),
        OUTPUT: (shape.vocab_tokens, hidden),
    }


def initial_parameters(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Draw the parameters (float32) to start from.

    Both projections into the residual stream are zero, so that a layer begins as the
    identity and need not be unlearned; but for two groups of heads, see ``copying``.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, size in _shapes(shape).items():
        tensor = torch.empty(size)
        if len(size) == 1:
            tensor.fill_(1.0)
        elif name == EMBEDDING:
            tensor.normal_(0.0, _EMBEDDING_STD, generator=generator)
        elif name == OUTPUT:
            tensor.normal_(0.0, _OUTPUT_STD, generator=generator)
        elif "o_proj" in name or "down_proj" in name:
            tensor.zero_()
        else:
            tensor.normal_(0.0, size[1] ** -0.5, generator=generator)
        found[name] = tensor
    begin_with_copying(found, shape, EMBEDDING, OUTPUT, seed + 1)
    return found


def hf_config(shape: Shape, *, bos: int, eos: int, pad: int) -> dict[str, Any]:
    """Return the content of ``config.json`` for transformers and SGLang."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_positions,
        "mlp_bias": False,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": shape.norm_eps,
        # Both spellings: transformers 5 reads the first, older readers the second.
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_tokens,
    }


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Return causal attention, [batch, num_tokens, num_heads * head_dim].

    By blocks of queries against all keys up to them, probabilities kept for the way
    back: about 90 MB a layer and sequence at 4,608 tokens in bfloat16. Torch's flash
    attention on a CPU took 30 % of a shard's time at 256 tokens, twice as much on the
    way back as forward, for about a hundredth of the operations.

    Args:
        query: [batch, num_kv_heads, shared, num_tokens, head_dim], scaled.
        key: [batch, num_kv_heads, num_tokens, head_dim]; ``value`` alike.
        value: see above.
    """
    num_tokens = key.shape[2]
    blocks = []
    for start in range(0, num_tokens, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, num_tokens)
        some = query[..., start:stop, :]
        scores = some.flatten(2, 3) @ key[:, :, :stop].transpose(2, 3)
        future = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        hidden = torch.zeros(stop - start, stop, dtype=scores.dtype)
        hidden[:, start:].masked_fill_(future, float("-inf"))
        scores = scores.unflatten(2, some.shape[2:4]) + hidden
        shares = scores.softmax(-1).flatten(2, 3)
        found = shares @ value[:, :, :stop]
        blocks.append(found.unflatten(2, some.shape[2:4]))
    joined = torch.cat(blocks, dim=3)
    return joined.permute(0, 3, 1, 2, 4).flatten(2)


class Network:
    """Computes hidden states and losses for one shape.

    Args:
        shape: the Llama's shape.
        dtype: what to compute in.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype

    def cast(self, parameters: Parameters) -> dict[str, torch.Tensor]:
        """Return the parameters in the computation's type, matrices joined."""
        own = {name: value.to(self._dtype) for name, value in parameters.items()}
        for index in range(self._shape.num_layers):
            for joined, parts in (
                ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("gate_up", ("mlp.gate_proj", "mlp.up_proj")),
            ):
                weights = [own.pop(_layer(index, part)) for part in parts]
                own[_layer(index, joined)] = torch.cat(weights)
        return own

    def hidden(
        self, own: Parameters, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the last norm's output, [batch, num_tokens, hidden].

        Args:
            own: what ``cast`` returned.
            tokens: int64 [batch, num_tokens].
            positions: int64 of the same shape, rising along a sequence.
        """
        shape = self._shape
        cosine, sine = self._rotary(positions)
        x = F.embedding(tokens, own[EMBEDDING])
        for index in range(shape.num_layers):
            query, key, value = self._before_attention(
                x,
                own[_layer(index, "input_layernorm")],
                own[_layer(index, "qkv")],
                cosine,
                sine,
            )
            attended = _attended(query, key, value)
            x = self._after_attention(
                x,
                attended,
                own[_layer(index, "self_attn.o_proj")],
                own[_layer(index, "post_attention_layernorm")],
                own[_layer(index, "gate_up")],
                own[_layer(index, "mlp.down_proj")],
            )
        return _norm(x, own["model.norm.weight"], shape.norm_eps)

    def logits(self, own: Parameters, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 scores of the next token, [..., vocab_tokens]."""
        return F.linear(hidden, own[OUTPUT]).float()

    def losses(
        self, own: Parameters, hidden: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each target's loss in nats (float32) and whether it scored highest.

        Args:
            own: what ``cast`` returned.
            hidden: [..., hidden].
            targets: int64 [...], the token that follows each.
        """
        scores = self.logits(own, hidden)
        losses = F.cross_entropy(
            scores.flatten(0, -2), targets.flatten(), reduction="none"
        )
        best = scores.detach().argmax(-1)
        return losses.view(targets.shape), best == targets

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._shape
        exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        frequencies = 1.0 / shape.rope_theta**exponents
        angles = positions[..., None].float() * frequencies
        both = torch.cat((angles, angles), dim=-1)[:, :, None, :]
        return both.cos().to(self._dtype), both.sin().to(self._dtype)

    def _before_attention(
        self,
        x: torch.Tensor,
        norm: torch.Tensor,
        qkv: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = self._shape
        heads = F.linear(_norm(x, norm, shape.norm_eps), qkv)
        heads = heads.unflatten(-1, (-1, shape.head_dim))
        turning = shape.num_heads + shape.num_kv_heads
        turned = _rotated(heads[:, :, :turning], cosine, sine)
        query = turned[:, :, : shape.num_heads] * shape.head_dim**-0.5
        # [batch, num_kv_heads, shared, num_tokens, head_dim]: heads that share keys
        # stand together.
        query = query.unflatten(2, (shape.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        key = turned[:, :, shape.num_heads :].transpose(1, 2)
        return query, key, heads[:, :, turning:].transpose(1, 2)

    def _after_attention(
        self,
        x: torch.Tensor,
        attended: torch.Tensor,
        output: torch.Tensor,
        norm: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        x = x + F.linear(attended, output)
        gate, up = F.linear(_norm(x, norm, self._shape.norm_eps), gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, down)
