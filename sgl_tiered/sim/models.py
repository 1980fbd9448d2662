"""Shapes of the models of the papers: what fixes FLOPs and bytes, each with its source.

Layers, hidden size, heads and head size are those of the model's published
``config.json`` (named by its repository); parameters are counted from the shapes with
``count_params`` and agree with the published numbers within 3 % (tested).
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.errors import ConfigError

__all__ = ["MODELS", "ModelShape", "find_model"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model.

    Attributes:
        name: as in the papers.
        num_layers, hidden_size, ffn_size, num_heads, num_kv_heads, head_size, vocab:
            as in the configuration.
        gated_ffn: three matrices (Llama) or two (OPT) in the feed-forward part.
        tied_embedding: the output matrix is the input embedding.
        max_tokens: context window.
        source: where the numbers come from.
        weight_bytes_per_param: 2 for 16-bit weights.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab: int
    gated_ffn: bool
    tied_embedding: bool
    max_tokens: int
    source: str
    weight_bytes_per_param: int = 2

    @property
    def attention_width(self) -> int:
        """Query heads * head size."""
        return self.num_heads * self.head_size

    @property
    def num_params(self) -> int:
        """Parameters of all matrices, embeddings included."""
        copies = 1 if self.tied_embedding else 2
        return self.num_compute_params + (copies - 1) * self.vocab * self.hidden_size

    @property
    def num_compute_params(self) -> int:
        """Parameters that every token passes: the layers and the output matrix."""
        attention = (
            2
            * self.hidden_size
            * (self.attention_width + self.num_kv_heads * self.head_size)
        )
        matrices = 3 if self.gated_ffn else 2
        ffn = matrices * self.hidden_size * self.ffn_size
        return self.num_layers * (attention + ffn) + self.vocab * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.num_params * self.weight_bytes_per_param

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token over all layers, 16 bits each."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_size


def _llama(
    name: str, shape: tuple[int, ...], max_tokens: int, source: str
) -> ModelShape:
    layers, hidden, ffn, heads, kv_heads, vocab = shape
    return ModelShape(
        name, layers, hidden, ffn, heads, kv_heads, hidden // heads, vocab,
        gated_ffn=True, tied_embedding=False, max_tokens=max_tokens, source=source,
    )  # fmt: skip


def _opt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        name, layers, hidden, 4 * hidden, heads, heads, hidden // heads, 50_272,
        gated_ffn=False, tied_embedding=True, max_tokens=2_048,
        source=f"facebook/{name.lower()} config.json; OPT paper, Table 1",
    )  # fmt: skip


MODELS: dict[str, ModelShape] = {
    shape.name.lower(): shape
    for shape in (
        _llama(
            "Llama-2-7B",
            (32, 4_096, 11_008, 32, 32, 32_000),
            # The window is 4,096; LayerKV and LongLoRA run it with 16k.
            16_384,
            "meta-llama/Llama-2-7b-hf config.json",
        ),
        _llama(
            "Llama-2-13B",
            (40, 5_120, 13_824, 40, 40, 32_000),
            16_384,
            "meta-llama/Llama-2-13b-hf config.json",
        ),
        _llama(
            "Yi-34B-200K",
            (60, 7_168, 20_480, 56, 8, 64_000),
            200_000,
            "01-ai/Yi-34B-200K config.json",
        ),
        _llama(
            "Llama-3.1-8B",
            (32, 4_096, 14_336, 32, 8, 128_256),
            131_072,
            "meta-llama/Llama-3.1-8B config.json",
        ),
        _llama(
            "Llama-3.1-70B",
            (80, 8_192, 28_672, 64, 8, 128_256),
            131_072,
            "meta-llama/Llama-3.1-70B config.json",
        ),
        _opt("OPT-6.7B", 32, 4_096, 32),
        _opt("OPT-13B", 40, 5_120, 40),
        _opt("OPT-30B", 48, 7_168, 56),
        _opt("OPT-66B", 64, 9_216, 72),
    )
}
"""By name in lower case."""


def find_model(name: str) -> ModelShape:
    """Return a model by name, case ignored.

    Raises:
        ConfigError: there is none of that name.
    """
    shape = MODELS.get(name.lower())
    if shape is None:
        known = ", ".join(shape.name for shape in MODELS.values())
        raise ConfigError("model", f"{name!r} is not known", f"choose one of {known}")
    return shape
