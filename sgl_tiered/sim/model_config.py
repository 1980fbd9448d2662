"""The shape of a model from its ``config.json``, by the keys of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.model_shape import Experts, LatentAttention, ModelShape

__all__ = ["read_model_shape"]

_MAX = 1 << 31
_UNGATED = ("opt", "gpt2", "gpt_neox", "falcon", "phi", "starcoder2")
"""Types of models with two matrices in the feed-forward part."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_model_shape(path: Path) -> ModelShape:
    """Read a ``config.json``, or that of a folder.

    Raises:
        ConfigError: it cannot be read, or says too little.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
        # Models that also see have their language model's part in a table of its own.
        table = raw.get("text_config", raw)
        return _shape(file, table)
    except OSError as error:
        raise ConfigError(
            "--model",
            f"{file} cannot be read ({error.strerror})",
            "give a config.json, or the folder of a Hugging Face model",
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            "--model",
            f"{file} is not understood ({error!r})",
            "give the config.json of a language model",
        ) from None


def _shape(file: Path, raw: Mapping[str, Any]) -> ModelShape:
    def whole(*names: str, default: int | None = None, least: int = 1) -> int:
        """Return the first of these keys that is there."""
        value = next((raw[n] for n in names if raw.get(n) is not None), default)
        if value is None:
            raise KeyError(names[0])
        if type(value) is not int or not least <= value <= _MAX:
            raise ConfigError(
                "--model",
                f"{file} has {value!r} for {names[0]}",
                f"it has to be a whole number from {least} on",
            )
        return value

    hidden, heads = whole("hidden_size", "n_embd"), whole("num_attention_heads")
    latent = None
    if "kv_lora_rank" in raw:
        latent = LatentAttention(
            kv_rank=whole("kv_lora_rank"),
            query_rank=whole("q_lora_rank", default=0, least=0),
            rope_size=whole("qk_rope_head_dim"),
            nope_size=whole("qk_nope_head_dim"),
            value_size=whole("v_head_dim"),
        )
    ffn = whole("intermediate_size", "ffn_dim", default=4 * hidden)
    num_layers = whole("num_hidden_layers")
    experts = None
    if any(name in raw for name in _NUM_EXPERTS):
        size = whole("moe_intermediate_size", "intermediate_size")
        shared = whole("shared_expert_intermediate_size", default=0, least=0)
        experts = Experts(
            num=whole(*_NUM_EXPERTS),
            num_active=whole("num_experts_per_tok"),
            ffn_size=size,
            num_shared=whole("n_shared_experts", default=shared // size, least=0),
            num_dense_layers=whole("first_k_dense_replace", default=0, least=0),
        )
        if experts.num_active > experts.num or experts.num_dense_layers > num_layers:
            raise ConfigError(
                "--model",
                f"{file} has {experts.num_active} of {experts.num} experts in "
                f"{num_layers} layers, {experts.num_dense_layers} of them without",
                "correct the file",
            )
    quantised = raw.get("quantization_config")
    is_fp8 = isinstance(quantised, dict) and quantised.get("quant_method") == "fp8"
    is_wide = (raw.get("dtype") or raw.get("torch_dtype")) == "float32"
    return ModelShape(
        name=file.resolve().parent.name,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_size=ffn,
        num_heads=heads,
        num_kv_heads=whole("num_key_value_heads", default=heads),
        head_size=whole("head_dim", default=max(hidden // heads, 1)),
        vocab=whole("vocab_size"),
        gated_ffn=raw.get("model_type") not in _UNGATED,
        tied_embedding=bool(raw.get("tie_word_embeddings", False)),
        max_tokens=whole("max_position_embeddings", default=_MAX),
        source=str(file),
        weight_bytes_per_param=1 if is_fp8 else 4 if is_wide else 2,
        experts=experts,
        latent=latent,
    )
