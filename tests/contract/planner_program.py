"""Plans of FlashInfer's own planner under the product's forwards, on a CPU.

    planner_program.py LIBRARY [full]

LIBRARY is the compiled planner (``planner_build.py``). What plans hold is compared
for other page numbers; then plain tiers, layer-wise KV and activations run on it, right
and with faults. With ``full``, on more devices. The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cuda_build_program import Server, story
from cuda_stand_ins import PlayedCuda
from flashinfer_support import (
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    Forwards,
    Table,
    make_backend,
)
from planner_support import FlashInferKernels, Planner, install

warnings.simplefilter("ignore")

H100 = (132, 2)
"""Multiprocessors, and blocks of decoding that one runs at once."""
SMALL = (8, 2)
LARGE_HEADS, LARGE_DIM = (32, 8), 128
SCALE = 6
"""Requests of more than 128 tokens: FlashInfer splits no shorter ones by itself."""
SPLIT_TOKENS = 7


# -- What a plan holds ---------------------------------------------------------


def wrapper_of(form: str) -> Any:
    """Return a wrapper with memory of its own."""
    from flashinfer import (
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
    )

    workspace = torch.empty(64 << 20, dtype=torch.uint8)
    if form == "prefill":
        return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    return BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", backend="fa2", use_tensor_cores=form == "decode as prefill"
    )


def made(
    wrapper: Any, form: str, lens: Any, news: Any, indices: Any, page: int, last: Any
) -> dict[str, Any]:
    """Plan, and return all that the wrapper then holds but its list of pages.

    Args:
        wrapper: that plans.
        form: of it.
        lens: pages of each request.
        news: query rows of each request.
        indices: numbers of the pages.
        page: tokens of one.
        last: tokens in each request's last one.
    """
    wrapper._int_workspace_buffer.zero_()
    wrapper._pin_memory_int_workspace_buffer.zero_()
    indptr = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    rows = torch.tensor([0, *np.cumsum(news)], dtype=torch.int32)
    first = (rows, indptr) if form == "prefill" else (indptr,)
    wrapper.begin_forward(
        *first,
        indices,
        torch.tensor(last, dtype=torch.int32),
        *LARGE_HEADS,
        LARGE_DIM,
        page,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    assert wrapper._paged_kv_indices_buf.data_ptr() == indices.data_ptr()
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in vars(wrapper).items()
        if name not in ("_paged_kv_indices_buf", "_float_workspace_buffer")
    }


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names under which two plans hold other values."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a.shape == b.shape and torch.equal(a, b)
        return bool(type(a) is type(b) and a == b)

    names = sorted(one.keys() | other.keys())
    kept = [n for n in names if not same(one.get(n), other.get(n))]
    # A module is made anew, and holds no plan.
    return [name for name in kept if name != "_cached_module"]


def keeps_pages(wrapper: Any) -> Any:
    """Let a wrapper keep what its pages were as it planned: a fault."""
    begin = wrapper.begin_forward

    def plan(*args: Any, **kwargs: Any) -> None:
        begin(*args, **kwargs)
        wrapper._block_tables = wrapper._paged_kv_indices_buf.clone()

    wrapper.begin_forward = plan
    return wrapper


def independence(planner: Planner) -> dict[str, Any]:
    """Return what plans hold of page numbers and of lengths."""
    planner.play(*H100)
    rng = np.random.default_rng(0)
    told: dict[str, Any] = {}

    def pages(lens: Any) -> torch.Tensor:
        return torch.from_numpy(rng.permutation(1 << 20)[: sum(lens)].astype(np.int32))

    def batches() -> Iterator[tuple[list[int], list[int]]]:
        for size, longest in ((1, 30_000), (2, 300), (5, 4_000), (40, 900), (200, 60)):
            lens = rng.integers(1, longest, size).tolist()
            yield lens, [int(rng.integers(1, min(len_, 512) + 1)) for len_ in lens]

    for form in ("prefill", "decode as prefill", "decode"):
        wrapper = wrapper_of(form)
        of_pages, of_lens, of_last = set(), 0, set()
        planner.planned = {"prefill": [], "decode": []}
        for lens, news in batches():
            ones, page = [1] * len(lens), 1
            if form != "prefill":
                news = ones
            first = made(wrapper, form, lens, news, pages(lens), page, ones)
            again = made(wrapper, form, lens, news, pages(lens), page, ones)
            of_pages |= set(differing(first, again))
            other = [length + 130 for length in lens]
            longer = made(wrapper, form, other, news, pages(other), page, ones)
            of_lens += "_plan_info" in differing(first, longer) or (
                "_int_workspace_buffer" in differing(first, longer)
            )
            # Pages of 16 tokens, full or not: their count is what is planned for.
            few = [1 + length // 16 for length in lens]
            news = [min(new, 16) for new in news]
            full = made(wrapper, form, few, news, pages(few), 16, [16] * len(few))
            part = made(wrapper, form, few, news, pages(few), 16, ones)
            of_last |= set(differing(full, part))
        told[form] = {
            "of_pages": sorted(of_pages),
            "of_lens": of_lens,
            "of_last": sorted(of_last),
            "planned": planner.planned,
        }
    wrapper = keeps_pages(wrapper_of("prefill"))
    first, again = (
        made(wrapper, "prefill", [9], [3], pages([9]), 1, [1]) for _ in range(2)
    )
    told["kept"] = differing(first, again)
    return told


# -- Plain tiers ---------------------------------------------------------------


class Plain:
    """SGLang's own backend and pool; pages go to host memory and come back elsewhere.

    Args:
        seed: of the device and of the numbers.
        kernels: for the backend.
        group: heads of queries for one of keys.
    """

    def __init__(self, seed: int, kernels: Any, group: int) -> None:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from sgl_tiered.engines.device.pools import page_layout
        from sgl_tiered.pipelines.stream_pool import StreamPool

        torch.manual_seed(seed)
        self.played = PlayedCuda(seed)
        num_pages = 300
        self.pool = MHATokenToKVPool(
            size=num_pages * PAGE,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        layout = page_layout(self.pool, PAGE)
        ops = self.played.pool_ops_class()(self.pool, layout, self.played.engine)
        self.device = StreamPool(ops)
        free = np.random.default_rng(seed).permutation(np.arange(1, num_pages))
        self.free = free.tolist()
        self.backend = make_backend(
            self.pool, Table(), kernels, group=group, layered=False
        )
        self.forwards = Forwards(self.backend, self.free.pop, group)
        self.region = np.zeros((num_pages, layout.slot_bytes), np.uint8)
        self.played.pinned.add(self.region.ctypes.data)

    def moved(self, rid: str, into: str) -> None:
        """End a request; its whole pages come back elsewhere, as another's prefix."""
        forwards = self.forwards
        count = len(forwards.truth[rid][0]) // PAGE
        slots = forwards.slots(rid)[: count * PAGE]
        pages = slots.numpy()[::PAGE].astype(np.int64) // PAGE
        rows = np.arange(count, dtype=np.int64)[::-1].copy()
        self.device.store_pages(self.region, rows, pages, self.device.mark())
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer[slots.long()] = 9e9
        fresh = np.array([self.free.pop(0) for _ in pages], np.int64)
        assert not set(fresh) & set(pages)
        mark = self.device.mark()
        for layer in range(LAYERS):
            arrival = self.device.load_layer(
                layer, self.region, rows, fresh, after=mark
            )
        arrival.order()
        forwards.rows[into] = len(forwards.rows)
        where = fresh[:, None] * PAGE + np.arange(PAGE)
        forwards.table[forwards.rows[into], : len(slots)] = torch.from_numpy(
            where.reshape(-1).astype(np.int32)
        )
        forwards.truth[into] = [list(one[: len(slots)]) for one in forwards.truth[rid]]


def plain(seed: int, prepare: Any = None, **how: Any) -> dict[str, Any]:
    """Run forwards of all kinds around pages that went down and came up."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    extend, decode = ForwardMode.EXTEND, ForwardMode.DECODE
    server = Plain(seed, **how)
    if prepare is not None:
        prepare(server)
    step = server.forwards.step
    step([("a", 300), ("b", 40)], extend)
    step([("a", 30), ("c", 60), ("b", 3)], extend)
    for _ in range(3):
        step([("a", 1), ("b", 1), ("c", 1)], decode)
    server.moved("a", "d")
    step([("d", 6), ("b", 2)], extend)
    for _ in range(3):
        step([("c", 1), ("d", 1), ("b", 1)], decode)
    server.played.device.settle()
    return {"worst": server.forwards.worst, "groups": server.forwards.groups}


# -- Forwards over plans -------------------------------------------------------


def forwards(
    planner: Planner,
    run: Any,
    seed: int,
    *,
    tensor_cores: bool,
    group: int,
    split_tokens: int | None = None,
    fault: str = "",
    num_sm: int = SMALL[0],
    **how: Any,
) -> dict[str, Any]:
    """Run a story on FlashInfer's plans; say how it went and what was planned.

    Args:
        planner: that plans.
        run: the story.
        seed: of it.
        tensor_cores: whether decoding is planned as prefill.
        group: heads of queries for one of keys.
        split_tokens: of a chunk, as SGLang asks for in its deterministic mode.
        fault: to be planted.
        num_sm: multiprocessors of the device.
        how: for the story.
    """

    def prepare(server: Any) -> None:
        backend = server.backend
        backend.prefill_split_tile_size = split_tokens
        backend.decode_split_tile_size = split_tokens
        if fault == "another layer":
            write = backend._write_indices

            def only_first(number: int, part: Any) -> None:
                if number == 0:
                    write(number, part)

            backend._write_indices = only_first
        elif fault == "not written":
            backend._write_indices = lambda number, part: None

    planner.play(num_sm)
    planner.planned = {"prefill": [], "decode": []}
    planner.shortens, planner.drops = fault == "lengths", fault == "a work item"
    try:
        told = run(
            seed,
            prepare,
            kernels=FlashInferKernels(tensor_cores=tensor_cores),
            group=group,
            **how,
        )
    finally:
        planner.shortens = planner.drops = False
    splits = {form: sum(planned) for form, planned in planner.planned.items()}
    plans = {form: len(planned) for form, planned in planner.planned.items()}
    return {**told, "splits": splits, "plans": plans}


def broken(planner: Planner, run: Any, fault: str, **how: Any) -> dict[str, float]:
    """Return how far answers are off; infinity where a kernel leaves its memory."""
    try:
        worst: dict[str, float] = forwards(planner, run, 1, fault=fault, **how)["worst"]
    except IndexError:
        # A part of an answer beyond what the plan has set aside for parts.
        return dict.fromkeys(("extend", "decode"), float("inf"))
    return worst


def misread(seed: int, prepare: Any, **how: Any) -> dict[str, Any]:
    """Run forwards alone."""
    server = Server(seed, **how)
    prepare(server)
    server.run()
    worst = dict(server.forwards.worst)
    server.end()
    return {"worst": worst}


LONG = {"scale": SCALE}
CORES = {"tensor_cores": True, "group": 4}
NO_CORES = {"tensor_cores": False, "group": 1}
STORIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (plain, CORES),
    "plain, decoding without tensor cores": (plain, NO_CORES),
    "layers": (story, CORES | LONG),
    "layers, decoding without tensor cores": (story, NO_CORES | LONG),
    "layers, chunks of one size": (story, CORES | {"split_tokens": SPLIT_TOKENS}),
    "activations": (story, CORES | LONG | {"acts": True}),
    "activations, decoding without tensor cores": (
        story,
        {"tensor_cores": False, "group": 2, "acts": True} | LONG,
    ),
}
FAULTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lengths": (plain, CORES),
    "lengths, decoding without tensor cores": (plain, NO_CORES),
    "lengths, chunks of one size": (misread, CORES | {"split_tokens": SPLIT_TOKENS}),
    "a work item": (plain, NO_CORES),
    "another layer": (misread, CORES | LONG),
    "another layer, activations": (misread, CORES | LONG | {"acts": True}),
    "not written": (misread, NO_CORES | LONG),
}


def main(library: str, mode: str = "") -> None:
    """Print what was seen."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_tiered.engines.sglang.layered.cuda import cuda_hooks

    for target, hook, kind in cuda_hooks():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    planner = Planner(Path(library))
    install(planner)
    if mode == "full":
        told = {
            f"{name}, seed {seed}, {num_sm} multiprocessors": forwards(
                planner, run, seed, num_sm=num_sm, **how
            )
            for name, (run, how) in STORIES.items()
            for seed, num_sm in ((2, 2), (3, 4), (4, 16), (5, 132))
        }
        print(json.dumps({"stories": told}))
        return
    stories = {
        name: forwards(planner, run, 0, **how) for name, (run, how) in STORIES.items()
    }
    faults = {
        name: broken(planner, run, name.partition(",")[0], **how)
        for name, (run, how) in FAULTS.items()
    }
    found = {"held": independence(planner), "stories": stories, "faults": faults}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
