"""The kernel that rebuilds K and V from activations: right first, then how fast.

For Llama-2-7B's and Llama-3.1-8B's layers, 256 to 8,192 tokens: the kernel beside the
product of the same sizes by torch (no rotation, no scatter), which is the roof. Of the
longest, other tiles of the kernel beside the product's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sgl_tiered_kernels.kv_gen import KVProjection, Rotary, rebuild_kv
from sgl_tiered_kernels.kv_gen import triton as kernels
from sgl_tiered_kernels.kv_gen.reference import rebuild_reference
from stages.clocks import Device
from stages.figures import median
from stages.stage import Stage

__all__ = ["run"]

_MODELS = (("llama8b", 4096, 8, 128), ("llama7b", 4096, 32, 128))
_DRY = (("small", 64, 2, 16),)
_TOKENS = (256, 1024, 4096, 8192)
_CHECKED = 64
_TOLERANCE = 0.05
"""Of numbers about 1, twice rounded to bfloat16; a wrong row is about 1 off."""
_RUNS = 12


def run(stage: Stage) -> None:
    """Write one record per model and length; raises AssertionError where wrong."""
    device = Device(stage.dry_run)
    best = 0.0
    for name, hidden, heads, dim in _MODELS if device.is_cuda else _DRY:
        for tokens in _TOKENS if device.is_cuda else (32,):
            if stage.left_s < 3.0:
                stage.add("skipped", model=name, tokens=tokens)
                continue
            record = _measure(device, hidden, heads, dim, tokens)
            rate = record["flop"] / median(record, "seconds") / 1e12
            record["of_product"] = median(record, "product_s") / median(
                record, "seconds"
            )
            stage.add("kv_gen", model=name, tokens=tokens, **record)
            stage.figure(f"kv_gen_tflops_{name}_{tokens}", round(rate, 2))
            best = max(best, record["of_product"])
        for word in kernels.TILES:
            if stage.left_s < 3.0:
                stage.add("skipped", model=name, tile=word)
                continue
            record = _measure(device, hidden, heads, dim, tokens, word)
            stage.add("tile", model=name, tokens=tokens, tile=word, **record)
            rate = record["flop"] / median(record, "seconds") / 1e12
            tiles = stage.figures.get("kv_gen_tiles_tflops", {})
            tiles.setdefault(name, {})[word] = round(rate, 2)
            stage.figure("kv_gen_tiles_tflops", tiles)
    stage.figure("kv_gen_of_product", round(best, 4))


def _measure(
    device: Device, hidden: int, heads: int, dim: int, tokens: int, tile: str = ""
) -> dict[str, Any]:
    """Return raw seconds by the product's entry, or by the kernel with another tile."""
    torch.manual_seed(0)
    on: dict[str, Any] = {"device": device.torch, "dtype": torch.bfloat16}
    width = 2 * heads * dim
    weight = torch.randn(width, hidden, **on) * hidden**-0.5
    angles = torch.rand(2 * tokens, dim // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device.torch)
    projection = KVProjection(weight, None, heads, dim, Rotary(table))
    acts = torch.randn(tokens, hidden, **on)
    out = [torch.full((2 * tokens, heads, dim), 7.0, **on) for _ in range(2)]
    rows = torch.randperm(tokens, device=device.torch)
    slots = torch.randperm(2 * tokens, device=device.torch)[:tokens]
    positions = torch.arange(tokens, device=device.torch)

    def rebuild() -> None:
        args = (acts, rows, projection, out[0], out[1], slots, positions)
        if tile:
            kernels.rebuild_kv(*args, kernels.TILES[tile])
        else:
            rebuild_kv(*args)

    rebuild()
    device.synchronize()
    few = slice(0, min(_CHECKED, tokens))
    truth = rebuild_reference(acts, rows[few], projection, positions[few])
    worst = max(
        float((found[slots[few]].float() - wanted.float()).abs().max())
        for found, wanted in zip(out, truth, strict=True)
    )
    assert worst <= _TOLERANCE, f"rebuilt KV of {tokens} tokens is {worst} off"
    return {
        "hidden": hidden,
        "kv_heads": heads,
        "head_dim": dim,
        "worst": worst,
        "flop": 2 * tokens * hidden * width,
        "seconds": _timed(device, rebuild),
        "product_s": _timed(device, lambda: acts @ weight.T),
    }


def _timed(device: Device, work: Callable[[], object]) -> list[float]:
    stream = torch.cuda.current_stream() if device.is_cuda else None
    seconds = []
    for _ in range((_RUNS if device.is_cuda else 1) + 2):
        begin = device.record(stream)
        work()
        seconds.append(device.seconds(begin, device.record(stream)))
    return seconds[2:]
