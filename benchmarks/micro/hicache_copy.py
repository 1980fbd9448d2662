"""Is HiCache's CPU form held back by its copies? Moves pages both ways, ours and its.

A prompt of 5,984 tokens (374 pages of 16) of the bench model is loaded and stored, all
layers, by our pages' layout and by HiCache's ``page_first`` and ``page_first_direct``
through the hooks of ``benchmarks/baselines``. Calls alternate; median times. Prints
microseconds per page and the speed against ours; the last line is one JSON object.

    python benchmarks/micro/hicache_copy.py [--repeats 60]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from sgl_tiered_kernels import page_copy

from sgl_tiered.core.layout import PageLayout

sys.path.append(str(Path(__file__).parents[1] / "baselines"))
from hicache_cpu.copies import LAYOUTS, load_layer, store_layers

NUM_LAYERS, NUM_HEADS, HEAD_DIM, PAGE_TOKENS = 12, 4, 64, 16
POOL_PAGES, HOST_PAGES, MOVED_PAGES = 513, 4096, 374
TOKEN_SHAPE = (NUM_HEADS, HEAD_DIM)
LAYOUT = PageLayout(NUM_LAYERS, PAGE_TOKENS, NUM_HEADS * HEAD_DIM * 2)

Moves = dict[str, dict[str, Callable[[], None]]]


def device_buffers(seed: int) -> tuple[torch.Tensor, ...]:
    """Return one buffer per layer with random content."""
    generator = torch.Generator().manual_seed(seed)
    shape = (POOL_PAGES * PAGE_TOKENS, *TOKEN_SHAPE)
    return tuple(
        torch.randn(shape, generator=generator).to(torch.bfloat16)
        for _ in range(NUM_LAYERS)
    )


def our_moves(keys: tuple, values: tuple, host: np.ndarray, device: np.ndarray):
    """Return load and store as the host tier does them."""

    def pages(buffer: torch.Tensor) -> np.ndarray:
        return buffer.view(torch.uint8).reshape(POOL_PAGES, -1).numpy()

    k_pages, v_pages = [pages(b) for b in keys], [pages(b) for b in values]
    region = np.zeros((HOST_PAGES, LAYOUT.slot_bytes), np.uint8)

    def load() -> None:
        for layer in range(NUM_LAYERS):
            k_offset, v_offset = LAYOUT.key_offset(layer), LAYOUT.value_offset(layer)
            page_copy.copy_layer(
                k_pages[layer],
                v_pages[layer],
                device,
                region,
                host,
                k_offset,
                v_offset,
                LAYOUT.part_bytes,
            )

    def store() -> None:
        for layer in range(NUM_LAYERS):
            k_offset, v_offset = LAYOUT.key_offset(layer), LAYOUT.value_offset(layer)
            page_copy.gather_layer(
                region,
                host,
                k_offset,
                v_offset,
                k_pages[layer],
                v_pages[layer],
                device,
                LAYOUT.part_bytes,
            )

    return {"load": load, "store": store}


def hicache_moves(
    layout: str, keys: tuple, values: tuple, host: np.ndarray, device: np.ndarray
):
    """Return load and store as HiCache's hooks do them in one layout."""
    shape: tuple[int, ...] = (HOST_PAGES * PAGE_TOKENS, NUM_LAYERS, *TOKEN_SHAPE)
    if layout == "page_first_direct":
        shape = (HOST_PAGES, NUM_LAYERS, PAGE_TOKENS, *TOKEN_SHAPE)
    pool = SimpleNamespace(
        layout=layout,
        page_size=PAGE_TOKENS,
        k_buffer=torch.zeros(shape, dtype=torch.bfloat16),
        v_buffer=torch.zeros(shape, dtype=torch.bfloat16),
        device_k_buffers=keys,
        device_v_buffers=values,
    )

    def tokens(pages: np.ndarray) -> torch.Tensor:
        grid = pages[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)
        return torch.from_numpy(grid.reshape(-1))

    host_tokens, device_tokens = tokens(host), tokens(device)

    def load() -> None:
        for layer in range(NUM_LAYERS):
            load_layer(pool, host_tokens, device_tokens, layer)

    def store() -> None:
        store_layers(pool, host_tokens, device_tokens)

    return {"load": load, "store": store}


def check(moves: Moves, keys: tuple, values: tuple, device: np.ndarray) -> None:
    """Demand of every form that a page stored and loaded again is the same."""
    slots = (device[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)
    for name, move in moves.items():
        before = [b[slots].clone() for b in (*keys, *values)]
        move["store"]()
        for buffer in (*keys, *values):
            buffer[slots] = 0
        move["load"]()
        for was, buffer in zip(before, (*keys, *values), strict=True):
            if not torch.equal(was, buffer[slots]):
                raise SystemExit(f"{name}: a page changed on its way")


def main() -> None:
    """Check the copies, time them, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=60)
    args = parser.parse_args()
    generator = np.random.default_rng(1)
    # Scattered on both sides, as pages are in a pool that is in use.
    host = generator.permutation(HOST_PAGES)[:MOVED_PAGES].astype(np.int64)
    device = (1 + generator.permutation(POOL_PAGES - 1)[:MOVED_PAGES]).astype(np.int64)
    keys, values = device_buffers(1), device_buffers(2)
    backend = page_copy.prepare()
    moves: Moves = {"ours": our_moves(keys, values, host, device)}
    for layout in LAYOUTS:
        moves[layout] = hicache_moves(layout, keys, values, host, device)
    check(moves, keys, values, device)

    times_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    names = list(moves)
    for turn in range(args.repeats):
        for direction in ("load", "store"):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                start = time.perf_counter()
                moves[name][direction]()
                times_s[name, direction].append(time.perf_counter() - start)

    result: dict[str, object] = {"copy": backend, "page_bytes": LAYOUT.page_bytes}
    for direction in ("load", "store"):
        ours_s = float(np.median(times_s["ours", direction]))
        for name in names:
            spent_s = float(np.median(times_s[name, direction]))
            page_us = spent_s / MOVED_PAGES * 1e6
            print(
                f"{direction:5s} {name:18s} {page_us:7.1f} us per page, "
                f"{ours_s / spent_s:5.2f} of our speed"
            )
            result[f"{direction}_{name}_us_per_page"] = round(page_us, 2)
            if name != "ours":
                result[f"{direction}_{name}_speed"] = round(ours_s / spent_s, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
