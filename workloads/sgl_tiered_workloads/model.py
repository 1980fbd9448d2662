"""Small models with random weights, made on the spot and cached by content.

The weights are random but not arbitrary. Two things must hold, or the equality
gate could not fail (see gate.py): a page of KV far back in the context must
move the next tokens, and greedy output must not fall into a loop that ignores
the prompt. Standard initialisation (std 0.02) gives neither: attention is
nearly uniform, so one page of 16 among 2,000 tokens is averaged away, and the
residual stream is the last token's embedding, so each token fixes its
successor. The gains here are chosen for a residual stream of unit scale:

- ``query_key_gain``: standard deviation of q and of k entries, so attention
  scores have a standard deviation of its square. With scores of standard
  deviation s, a query attends to about ``n * exp(-s**2)`` of n positions. The
  chosen 1.6 gives s = 2.56: a few of 2,000, spread evenly over the
  context since random rotary phases prefer no distance.
- ``attention_gain``: what attention adds to the residual stream at each layer.
- ``mlp_gain``: what the MLP adds.
- ``embedding_std``: small against the above, so the context outweighs the last
  token.
- ``logit_std``: spread of the logits; 2 makes the top logprobs differ by about
  0.4, far above bfloat16 noise.

Measured (bench preset, 1,500 random tokens, 24 greedy tokens): 19 distinct
tokens; recomputing instead of reusing moves a top-5 logprob by 0.11 at most,
zeroing the KV of one early page by 0.29 at least, other tokens in it by 1.7.
With gain 1.0 the same page moves it by 0.09 and 2 of 24 tokens are distinct.

``python -m sgl_tiered_workloads.model --preset demo --out DIR`` prints the
folder of the model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.tokenizer import (
    VOCAB_TOKENS,
    corpus_digest,
    train_tokenizer,
)

__all__ = ["PRESETS", "ModelPreset", "main", "make_model"]

_MAKER_VERSION = 1
"""Raise it whenever the same preset would give other weights."""
_making = threading.Lock()
"""To build a model, transformers changes torch's default dtype for a while: of two
threads at once, the second would put the first one's back for good."""


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """Shape, family and scale of one random model. Sizes are in units, not bytes."""

    family: str = "llama"
    num_layers: int = 4
    hidden: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate: int = 256
    max_positions: int = 32768
    seed: int = 0
    query_key_gain: float = 1.6
    attention_gain: float = 1.0
    mlp_gain: float = 0.5
    embedding_std: float = 0.5
    logit_std: float = 2.0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, in bfloat16."""
        head_dim = self.hidden // self.num_heads
        return 2 * 2 * self.num_layers * self.num_kv_heads * head_dim


_TINY = ModelPreset()
_BENCH = ModelPreset(
    num_layers=12, hidden=512, num_heads=8, num_kv_heads=4, intermediate=1280
)

PRESETS: dict[str, ModelPreset] = {
    "tiny": _TINY,
    # 40 M parameters: prefill of 2,000 tokens takes about a second on 2 cores.
    "bench": _BENCH,
    "demo": replace(_BENCH, seed=1),
    # 135 M parameters in four layers. What a step of decoding takes besides its
    # matrices goes by layers on a CPU: in "bench" half of the time, which no cache
    # saves.
    "wide": ModelPreset(
        num_layers=4, hidden=1536, num_heads=12, num_kv_heads=2, intermediate=6144
    ),
    "opt-tiny": replace(_TINY, family="opt", num_kv_heads=4),
    "qwen2-tiny": replace(_TINY, family="qwen2"),
    "mistral-tiny": replace(_TINY, family="mistral"),
}


def make_model(preset: str | ModelPreset, out: Path) -> Path:
    """Return the folder of the model, making it if ``out`` does not hold it yet.

    The folder's name carries a digest of everything that shapes its content.
    It is written under a temporary name and renamed, so concurrent makers and
    a maker that was killed leave either a whole model or none.

    Raises:
        KeyError: no preset of that name.
    """
    name = preset if isinstance(preset, str) else "custom"
    shape = PRESETS[preset] if isinstance(preset, str) else preset
    key = {
        "maker": _MAKER_VERSION,
        "preset": asdict(shape),
        "corpus": corpus_digest(),
        "vocab": VOCAB_TOKENS,
    }
    digest = hashlib.blake2b(
        json.dumps(key, sort_keys=True).encode(), digest_size=8
    ).hexdigest()
    folder = out / f"{name}-{digest}"
    if folder.is_dir():
        return folder
    out.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=out))
    try:
        train_tokenizer(partial, shape.max_positions)
        _write_weights(shape, partial)
        (partial / "sgl_tiered_model.json").write_text(json.dumps(key, indent=1))
        # mkdtemp makes 0700; a model may be read by another user's server.
        partial.chmod(0o755)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _publish(partial: Path, folder: Path) -> None:
    """Rename into place; a concurrent maker that was first wins, silently."""
    try:
        os.rename(partial, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _write_weights(shape: ModelPreset, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(shape)
    with _making, torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model: Any = AutoModelForCausalLM.from_config(config)
        _scale(model, shape)
    model.to(torch.bfloat16).save_pretrained(folder)


def _config(shape: ModelPreset) -> Any:
    from transformers import LlamaConfig, MistralConfig, OPTConfig, Qwen2Config

    shared = {
        "vocab_size": VOCAB_TOKENS,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    if shape.family == "opt":
        return OPTConfig(
            ffn_dim=shape.intermediate, word_embed_proj_dim=shape.hidden, **shared
        )
    grouped = {
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.intermediate,
        **shared,
    }
    if shape.family == "llama":
        return LlamaConfig(**grouped)
    if shape.family == "qwen2":
        return Qwen2Config(**grouped)
    if shape.family == "mistral":
        # Windows are refused by the tiered cache; the tiny Mistral has none.
        return MistralConfig(sliding_window=None, **grouped)
    raise ValueError(f"no model family {shape.family!r}")


def _scale(model: Any, shape: ModelPreset) -> None:
    """Draw every weight anew, with the standard deviation its role asks for.

    A matrix with ``fan_in`` columns of standard deviation ``g / sqrt(fan_in)``
    maps inputs of unit scale to outputs of scale g.
    """
    import torch

    gains = {
        "q_proj": shape.query_key_gain,
        "k_proj": shape.query_key_gain,
        "v_proj": 1.0,
        "o_proj": shape.attention_gain,
        "out_proj": shape.attention_gain,
        "gate_proj": 1.0,
        "up_proj": 1.0,
        "down_proj": shape.mlp_gain,
        "fc1": 1.0,
        "fc2": shape.mlp_gain,
        "lm_head": shape.logit_std,
    }
    generator = torch.Generator().manual_seed(shape.seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            role = name.split(".")[-2]
            if "norm" in role:
                weight.fill_(1.0 if name.endswith("weight") else 0.0)
            elif role.startswith("embed"):
                weight.normal_(0.0, shape.embedding_std, generator=generator)
            elif name.endswith("bias"):
                weight.zero_()
            else:
                std = gains[role] / float(weight.shape[1]) ** 0.5
                weight.normal_(0.0, std, generator=generator)


def main(argv: Sequence[str] | None = None) -> int:
    """Make a model and print its folder."""
    parser = argparse.ArgumentParser(description="make a small random model")
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    print(make_model(args.preset, args.out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
