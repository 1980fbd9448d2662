"""How fast layers of pages are encoded and decoded, and by how much they change.

The pages of a 6,000-token prompt, scattered on both sides, on one thread: a layer of
4 KV heads of 64 in bfloat16 at a time. GB/s count the raw bytes of the pool, so that
they compare with ``page_copy``, whose copy of the same layer is timed beside; seconds
are the core's own, so that others on the machine disturb less. Errors
are root mean squares over those of the numbers: normal ones whose channels differ in
size and mean. ``--model FOLDER`` takes what a model computes for text of the standard
library instead; the last line has the errors of each layer.

    python benchmarks/micro/kv_codec.py --page 16
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sgl_tiered_kernels import kv_codec, page_copy
from sgl_tiered_kernels.kv_codec import reference

from sgl_tiered.core.encoded import EncodedLayout, encoded_layout
from sgl_tiered.core.ids import Encoding
from sgl_tiered.core.layout import PageLayout

HEADS, HEAD_DIM, TOKENS = 4, 64, 6144
MODEL_TOKENS = 2048
FORMS = {
    "fp8": (Encoding.FP8, None, None),
    "int8": (Encoding.INT8, None, None),
    "int4": (Encoding.INT4, None, None),
    "int4 16/16": (Encoding.INT4, 16, 16),
    "int4 16/11": (Encoding.INT4, 16, 11),
    "int4 11/16": (Encoding.INT4, 11, 16),
    "int4 11/11": (Encoding.INT4, 11, 11),
    "int4 11/8": (Encoding.INT4, 11, 8),
    "int4 8/11": (Encoding.INT4, 8, 11),
    "int4 8/8": (Encoding.INT4, 8, 8),
}
Numbers = npt.NDArray[np.float32]


def layout_of(name: str, page: int, heads: int, dim: int) -> EncodedLayout:
    """Return the layout of one layer in a form of ``FORMS``."""
    encoding, key_levels, value_levels = FORMS[name]
    raw = PageLayout(1, page, heads * dim * 2)
    return encoded_layout(
        raw, encoding, heads, dim, key_levels=key_levels, value_levels=value_levels
    )


def made_numbers() -> tuple[Numbers, Numbers]:
    """Return keys with channels off zero and of other sizes, and plain values."""
    rng = np.random.default_rng(0)
    shape = (1, TOKENS, HEADS, HEAD_DIM)
    sizes = np.exp(rng.normal(0, 0.5, shape[2:]))
    means = rng.normal(0, 1, shape[2:]) * (rng.random(shape[2:]) < 0.2) * 3
    keys = (rng.normal(0, 1, shape) + means) * sizes
    return keys.astype(np.float32), rng.normal(0, 1, shape).astype(np.float32)


def model_numbers(folder: Path) -> tuple[Numbers, Numbers]:
    """Return keys (after RoPE) and values of a model, [layers, tokens, heads, dim]."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(inspect.getsource(argparse), return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16)
    with torch.no_grad():
        cache = model(ids[:, :MODEL_TOKENS], use_cache=True).past_key_values
    both = []
    for name in ("keys", "values"):
        layers = [getattr(layer, name)[0].transpose(0, 1) for layer in cache.layers]
        both.append(torch.stack(layers).float().numpy())
    return both[0], both[1]


def errors(
    layout: EncodedLayout, keys: Numbers, values: Numbers
) -> tuple[float, float, float]:
    """Return relative errors of keys, of values, and of what attention gives.

    Args:
        layout: of the pages.
        keys: [tokens, kv_heads, head_dim] of one layer, a whole number of pages.
        values: the same.
    """
    num_pages = len(keys) // layout.page_tokens
    region = np.zeros((num_pages, layout.page_bytes), np.uint8)
    numbers = np.arange(num_pages)
    both = [keys.copy(), values.copy()]
    kv_codec.encode_layer(layout, 0, region, numbers, *both, numbers)
    kv_codec.decode_layer(layout, 0, *both, numbers, region, numbers)
    found = []
    for before, after in zip((keys, values), both, strict=True):
        found.append(_relative(before, after))
    # The last keys as queries: they ask as the model's would, by and large.
    queries = keys[-64:]
    found.append(
        _relative(_attention(queries, keys, values), _attention(queries, *both))
    )
    return found[0], found[1], found[2]


def _relative(before: Numbers, after: Numbers) -> float:
    return float(np.sqrt(((after - before) ** 2).mean() / (before**2).mean()))


def _attention(queries: Numbers, keys: Numbers, values: Numbers) -> Numbers:
    scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(keys.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values)


def timed(call: Callable[[], None], repeats: int) -> float:
    """Return the median seconds of the core that a call takes."""
    taken = []
    for _ in range(repeats):
        began = time.thread_time()
        call()
        taken.append(time.thread_time() - began)
    return statistics.median(taken)


def speeds(layout: EncodedLayout, repeats: int) -> dict[str, float]:
    """Return GB/s of raw bytes for a layer's encoding, decoding and sparse decoding."""
    rng = np.random.default_rng(1)
    num_pages = TOKENS // layout.page_tokens
    pool: list[npt.NDArray[Any]] = [
        reference.float_as_rows(numbers[0], np.uint16) for numbers in made_numbers()
    ]
    region = np.zeros((num_pages, layout.page_bytes), np.uint8)
    rows, pages = rng.permutation(num_pages), rng.permutation(num_pages)
    half = np.sort(rng.permutation(TOKENS)[: TOKENS // 2])
    sparse = (half, region, rows[half // layout.page_tokens], half % layout.page_tokens)
    calls = {
        "encode": lambda: kv_codec.encode_layer(layout, 0, region, rows, *pool, pages),
        "decode": lambda: kv_codec.decode_layer(layout, 0, *pool, pages, region, rows),
        "decode half": lambda: kv_codec.decode_tokens(layout, 0, *pool, *sparse),
    }
    raw_bytes = sum(rows.nbytes for rows in pool)
    shares = {"decode half": 0.5}
    return {
        name: raw_bytes * shares.get(name, 1.0) / timed(call, repeats) / 1e9
        for name, call in calls.items()
    }


def copy_speed(page: int, repeats: int) -> float:
    """Return GB/s of a raw load of the same layer."""
    part = page * HEADS * HEAD_DIM * 2
    num_pages = TOKENS // page
    host = np.ones((num_pages, 2 * part), np.uint8)
    keys, values = (np.zeros((num_pages, part), np.uint8) for _ in "kv")
    rows = np.random.default_rng(2).permutation(num_pages)

    def copy() -> None:
        page_copy.copy_layer(keys, values, rows, host, rows, 0, part, part)

    copy()
    return host.nbytes / timed(copy, repeats) / 1e9


def main() -> None:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    kv_codec.prepare()
    kv_codec.prepare(np.float32)
    if args.model is None:
        keys, values = made_numbers()
    else:
        keys, values = model_numbers(args.model)
    whole = keys.shape[1] // args.page * args.page
    heads, dim = keys.shape[2:]
    record: dict[str, Any] = {"page_tokens": args.page, "forms": {}}
    record["backend"] = kv_codec.backend_name()
    record["copy_gb_per_s"] = round(copy_speed(args.page, args.repeats), 2)
    print(f"raw copy of a layer: {record['copy_gb_per_s']} GB/s")
    print(
        f"{'form':11} {'steps':>8} {'bits':>6} {'ratio':>6} {'encode':>7} "
        f"{'decode':>7} {'half':>7} {'keys':>7} {'values':>7} {'output':>7}"
    )
    for name in FORMS:
        layout = layout_of(name, args.page, heads, dim)
        speed = speeds(layout_of(name, args.page, HEADS, HEAD_DIM), args.repeats)
        found = [
            errors(layout, np.ascontiguousarray(k[:whole]), v[:whole].copy())
            for k, v in zip(keys, values, strict=True)
        ]
        mean = np.mean(found, axis=0)
        steps = f"{layout.key_levels}/{layout.value_levels}"
        print(
            f"{name:11} {steps:>8} {layout.bits:6.3f} {layout.ratio:6.2f} "
            + " ".join(f"{gb:7.2f}" for gb in speed.values())
            + " "
            + " ".join(f"{error:7.4f}" for error in mean)
        )
        record["forms"][name] = {
            "steps": [layout.key_levels, layout.value_levels],
            "bits": layout.bits,
            "ratio": round(layout.ratio, 3),
            "gb_per_s": {part: round(gb, 2) for part, gb in speed.items()},
            "errors": [[round(e, 5) for e in layer] for layer in found],
        }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
