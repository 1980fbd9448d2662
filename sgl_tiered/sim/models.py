"""Shapes of models: what fixes FLOPs and bytes, each with its source.

Layers, hidden size, heads and head size are those of the model's published
``config.json`` (named by its repository); parameters are counted from the shapes and
agree with the published numbers within 3 % (tested). ``find_model`` also reads such a
file, or the folder that it lies in (``model_config.py``).
"""

from __future__ import annotations

from pathlib import Path

from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.model_config import read_model_shape
from sgl_tiered.sim.model_shape import Experts, LatentAttention, ModelShape

__all__ = ["MODELS", "ModelShape", "find_model"]


def _llama(
    name: str,
    shape: tuple[int, ...],
    max_tokens: int,
    source: str,
    *,
    is_tied: bool = False,
) -> ModelShape:
    layers, hidden, ffn, heads, kv_heads, vocab = shape
    return ModelShape(
        name, layers, hidden, ffn, heads, kv_heads, hidden // heads, vocab,
        gated_ffn=True, tied_embedding=is_tied, max_tokens=max_tokens, source=source,
    )  # fmt: skip


def _qwen3(
    size: str,
    shape: tuple[int, ...],
    *,
    is_tied: bool = False,
    experts: Experts | None = None,
) -> ModelShape:
    layers, hidden, ffn, heads, kv_heads = shape
    return ModelShape(
        f"Qwen3-{size}", layers, hidden, ffn, heads, kv_heads, 128, 151_936,
        gated_ffn=True, tied_embedding=is_tied, max_tokens=40_960,
        source=f"Qwen/Qwen3-{size} config.json", experts=experts,
    )  # fmt: skip


def _deepseek(
    name: str,
    shape: tuple[int, ...],
    query_rank: int,
    experts: Experts,
    weight_bytes_per_param: int = 2,
) -> ModelShape:
    layers, hidden, ffn, heads, vocab = shape
    return ModelShape(
        name, layers, hidden, ffn, heads, heads, 192, vocab,
        gated_ffn=True, tied_embedding=False, max_tokens=163_840,
        source=f"deepseek-ai/{name} config.json",
        weight_bytes_per_param=weight_bytes_per_param, experts=experts,
        latent=LatentAttention(512, query_rank, 64, 128, 128),
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
        _llama(
            "Llama-3.1-405B",
            (126, 16_384, 53_248, 128, 8, 128_256),
            131_072,
            "meta-llama/Llama-3.1-405B config.json",
        ),
        _llama(
            "Llama-3.2-1B",
            (16, 2_048, 8_192, 32, 8, 128_256),
            131_072,
            "meta-llama/Llama-3.2-1B config.json",
            is_tied=True,
        ),
        _llama(
            "Llama-3.2-3B",
            (28, 3_072, 8_192, 24, 8, 128_256),
            131_072,
            "meta-llama/Llama-3.2-3B config.json",
            is_tied=True,
        ),
        _llama(
            "Llama-3.3-70B",
            (80, 8_192, 28_672, 64, 8, 128_256),
            131_072,
            "meta-llama/Llama-3.3-70B-Instruct config.json",
        ),
        _qwen3("0.6B", (28, 1_024, 3_072, 16, 8), is_tied=True),
        _qwen3("1.7B", (28, 2_048, 6_144, 16, 8), is_tied=True),
        _qwen3("4B", (36, 2_560, 9_728, 32, 8), is_tied=True),
        _qwen3("8B", (36, 4_096, 12_288, 32, 8)),
        _qwen3("14B", (40, 5_120, 17_408, 40, 8)),
        _qwen3("32B", (64, 5_120, 25_600, 64, 8)),
        _qwen3("30B-A3B", (48, 2_048, 6_144, 32, 4), experts=Experts(128, 8, 768)),
        _qwen3("235B-A22B", (94, 4_096, 12_288, 64, 4), experts=Experts(128, 8, 1_536)),
        _deepseek(
            "DeepSeek-V2-Lite",
            (27, 2_048, 10_944, 16, 102_400),
            0,
            Experts(64, 6, 1_408, num_shared=2, num_dense_layers=1),
        ),
        _deepseek(
            "DeepSeek-V2",
            (60, 5_120, 12_288, 128, 102_400),
            1_536,
            Experts(160, 6, 1_536, num_shared=2, num_dense_layers=1),
        ),
        # Weights of 8 bits, as published; the rate of 16 bits is what is modelled.
        *(
            _deepseek(
                name,
                (61, 7_168, 18_432, 128, 129_280),
                1_536,
                Experts(256, 8, 2_048, num_shared=1, num_dense_layers=3),
                weight_bytes_per_param=1,
            )
            for name in ("DeepSeek-V3", "DeepSeek-R1")
        ),
        _opt("OPT-6.7B", 32, 4_096, 32),
        _opt("OPT-13B", 40, 5_120, 40),
        _opt("OPT-30B", 48, 7_168, 56),
        _opt("OPT-66B", 64, 9_216, 72),
    )
}
"""By name in lower case."""


_VARIANTS = ("-instruct", "-chat", "-base", "-hf", "-it")
"""Trained further: the shape stays."""


def find_model(name: str) -> ModelShape:
    """Return a model by name, by its repository's name, or from a ``config.json``.

    Args:
        name: of ``MODELS``, case ignored, with or without ``OWNER/`` and what it was
            trained for (``-Instruct``); or the path of a ``config.json`` or its folder.

    Raises:
        ConfigError: there is none of that name, or the file is not understood.
    """
    path = Path(name).expanduser()
    if name and (path.is_dir() or path.is_file()):
        return read_model_shape(path)
    bare = name.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    for variant in _VARIANTS:
        bare = bare.removesuffix(variant)
    shape = MODELS.get(bare)
    if shape is None:
        known = ", ".join(shape.name for shape in MODELS.values())
        raise ConfigError(
            "--model",
            f"{name!r} is not known and no config.json or folder with one",
            f"give its path, or one of {known}",
        )
    return shape
