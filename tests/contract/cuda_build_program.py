"""Builds layer-wise KV as a CUDA server does, on a CPU; prints what it saw as JSON.

    cuda_build_program.py

SGLang's CUDA platform is asked for the classes, with the product's hooks on it; pool,
allocator, placing, copies, attention and the tiers' way down and up are the product's.
Played are the device (``cuda_stand_ins.py``) and FlashInfer's kernels
(``flashinfer_support.py``). The last line is one JSON object.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from typing import Any

import numpy as np
import torch
from cuda_acts_support import PAGE_BYTES, Inputs, act_plan, chosen
from cuda_stand_ins import PlayedCuda
from flashinfer_support import (
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    Forwards,
    Table,
    make_backend,
    retained,
)

warnings.simplefilter("ignore")

NUM_PAGES, NUM_PHYSICAL, HALF = 40, 100, 10
NUM_ROWS = 12
"""These, and the requests, are so many times as large where a story has a scale."""
OFFLOADED = (1 << 30, 5_700)
"""Everything, or one layer and a part of another."""


def plan(
    scale: int = 1, *, acts: bool = False, offload_bytes: int | None = None
) -> Any:
    from sgl_tiered.core.layout import PageLayout
    from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
    from sgl_tiered.serving.options import LayerKv

    layout = PageLayout(LAYERS, PAGE, HEADS * DIM * 4)
    counts = [scale * count for count in (NUM_PAGES, NUM_PHYSICAL, HALF)]
    if acts:
        areas = (act_plan(scale), chosen(offload_bytes))
        return LayerPlan(layout, *counts, LayerKv(), *areas)
    return LayerPlan(layout, *counts, LayerKv())


class Server:
    """What is built at the start of a server, and its forwards."""

    def __init__(
        self,
        seed: int,
        *,
        pins: bool = True,
        guard: Any = None,
        breaks: bool = False,
        acts: bool = False,
        offload_bytes: int | None = None,
        scale: int = 1,
        kernels: Any = None,
        group: int = 1,
    ) -> None:
        from sglang.srt.platforms.cuda import CudaSRTPlatform

        from sgl_tiered.core.clock import SystemClock
        from sgl_tiered.engines.sglang.layered import build, capacity, cuda
        from sgl_tiered.serving.agreement import Agreement
        from sgl_tiered.serving.options import STAGING_FAULT, Experiment, Options
        from sgl_tiered.testing.emulator import Emulator

        torch.manual_seed(seed)
        self.played = PlayedCuda(seed, pins=pins)
        cuda.cuda_register = self.played.register
        cuda.CudaLayerOps = self.played.ops_class()
        cuda.CudaActOps = self.played.act_ops_class()
        platform = CudaSRTPlatform()
        self.scale = scale
        self.plan = plan(scale, acts=acts, offload_bytes=offload_bytes)
        self.home: list[int] = []
        if offload_bytes is not None:
            self.home = self.plan.chosen.projections.addresses()
        capacity._planned[:] = [self.plan]
        size = scale * NUM_PAGES * PAGE
        self.pool = platform.get_kv_pool_cls(kind="mha")(
            size,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = platform.get_paged_allocator_cls()(
            size,
            page_size=PAGE,
            dtype=torch.float32,
            device="cpu",
            kvcache=self.pool,
            need_sort=False,
        )
        capacity._planned.clear()
        clock = SystemClock()
        fault = STAGING_FAULT if breaks else ""
        config = Options(experiment=Experiment(fault=fault))
        emulator = Emulator((), clock=clock)
        placing = (self.pool, None, config, clock, emulator, Agreement(clock))
        self.too_early = ""
        try:
            build.place_layers(*placing)
        except Exception as error:  # noqa: BLE001 - the kind is what is told
            self.too_early = f"{type(error).__name__}: {error}"
        backend = make_backend(self.pool, Table(), kernels, group=group)
        if guard is None:
            placed = build.place_layers(*placing)
        else:
            placed = build.connect(self.pool, self.plan, clock, None, guard=guard)
        self.driver, self.device = placed.driver, placed.device
        self.warmed = sorted(set(self.played.kernels))
        self.copier = self.driver.manager._mover._copier
        self.at_start = self.driver.transfers[:, 1:].copy()
        self.backend = backend
        self.forwards = Forwards(backend, self.take_page, group)
        self.inputs = None
        if acts:
            self.inputs = Inputs(self.plan.chosen.projections)
            self.forwards.project = self.inputs
            if self.home:
                self.inputs.ready = self.await_unit
        self.num_acts = 0
        rows = (scale * NUM_ROWS, plan().layout.slot_bytes)
        self.region = np.zeros(rows, np.uint8)
        self.played.pinned.add(self.region.ctypes.data)

    def await_unit(self, layer: int) -> None:
        """Wait for a layer's first unit to be queued, if it has begun to be.

        Its weights are then in a slot: what is lent does not depend on who is quicker.
        """
        forward = self.driver.manager._forward
        if forward is None:
            return
        index, stream = int(forward.reads.unit_of[layer, 0]), forward.stream
        while 0 <= index < stream._num_started and not stream._is_settled[index]:
            time.sleep(1e-3)

    def take_page(self) -> int:
        return int(self.allocator.alloc(PAGE)[0]) // PAGE

    def pages(self, rid: str) -> np.ndarray:
        """Return a request's whole pages."""
        slots = self.forwards.slots(rid).numpy()[::PAGE].astype(np.int64)
        num_whole = len(self.forwards.truth[rid][0]) // PAGE
        return slots[:num_whole] // PAGE

    def free(self, rid: str) -> None:
        """End a request and give its pages back."""
        slots = self.forwards.slots(rid).to(torch.int64)
        self.driver.finished(rid)
        self.allocator.free(slots)

    def decode(self, *rids: str) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.forwards.step([(rid, 1) for rid in rids], ForwardMode.DECODE)

    def extend(self, batch: list[tuple[str, int]], layers: Any = None) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        news = [(rid, self.scale * new) for rid, new in batch]
        self.forwards.step(news, ForwardMode.EXTEND, layers)

    def run(self) -> None:
        """Prefill, chunk, decode, with layers on both sides."""
        self.extend([("a", 17), ("b", 9)], retained(1))
        self.forwards.settle()
        self.extend([("a", 6), ("c", 12), ("b", 3)], retained())
        everything = np.ones(LAYERS, np.bool_)
        for number in range(8):
            self.decode("a", "b", "c")
            if number % 3 == 0:
                self.forwards.settle()
                for rid in "abc":
                    self.driver.manager.release(rid, everything)
                # What is on the host as well leaves, as it does under pressure.
                self.driver.manager._room.drop(self.scale * NUM_PHYSICAL)
            if number == 5:
                self.driver.manager.hold("a", everything)
                self.driver.manager.pull("a")
        self.extend([("a", 4), ("b", 4), ("c", 7)])
        self.forwards.settle()

    def stored(self, rid: str) -> bool:
        """Send a request's whole pages down; return whether they are right there."""
        pages = self.pages(rid)
        rows = np.arange(len(pages), dtype=np.int64)[::-1].copy()
        self.is_act = np.zeros(len(pages), np.bool_)
        kinds = self.driver.kinds(pages)
        if kinds is not None:
            self.is_act = kinds[0].astype(np.bool_)
            assert not kinds[1].any()
        self.driver.begin_store(1, pages, None if kinds is None else kinds[0])
        places = self.driver.transfers[:, pages]
        self.mixed = bool((places >= 0).any() and (places < 0).any())
        self.device.store_pages(self.region, rows, pages, self.device.mark())
        self.driver.end_store(1)
        self.rows = rows
        wanted = np.concatenate(
            [self.bytes_of(rid, layer, len(pages)) for layer in range(LAYERS)], axis=1
        )
        width, is_kv = plan().layout.page_bytes, ~self.is_act
        is_right = np.array_equal(self.region[rows[is_kv], :width], wanted[is_kv])
        if self.inputs is None:
            return is_right
        kept = np.concatenate(
            [self.inputs.pages(rid, layer, len(pages)) for layer in range(LAYERS)],
            axis=1,
        )[self.is_act]
        acts = self.region[rows[self.is_act], : LAYERS * PAGE_BYTES]
        return is_right and np.array_equal(acts, kept)

    def bytes_of(self, rid: str, layer: int, num_pages: int) -> np.ndarray:
        """Return uint8 [num_pages, layer_page_bytes] as they were computed."""
        both = torch.stack(self.forwards.truth[rid][layer])[: num_pages * PAGE]
        parts = [both[:, part].reshape(num_pages, -1).numpy() for part in (0, 1)]
        return np.concatenate([part.view(np.uint8) for part in parts], axis=1)

    def loaded(self, rid: str, into: str) -> None:
        """Bring those pages up as the prefix of another request."""
        count = len(self.rows)
        slots = self.allocator.alloc(count * PAGE)
        pages = slots.numpy()[::PAGE] // PAGE
        self.driver.decide(into, retained(0))
        assert self.driver.open_load(into, pages, self.is_act)
        mark = self.device.mark()
        for layer in range(LAYERS):
            arrival = self.device.load_layer(
                layer, self.region, self.rows, pages, after=mark
            )
        arrival.order()
        self.driver.close_loads()
        forwards = self.forwards
        forwards.rows[into] = len(forwards.rows)
        forwards.table[forwards.rows[into], : len(slots)] = slots.to(torch.int32)
        forwards.truth[into] = [
            list(told[: len(slots)]) for told in forwards.truth[rid]
        ]

    def end(self) -> dict[str, Any]:
        """Give everything back, and close."""
        manager = self.driver.manager
        self.forwards.settle()
        room = manager.room()
        self.played.device.settle()
        self.driver.close()
        return {
            "worst": dict(self.forwards.worst),
            "groups": self.forwards.groups,
            "copies": self.played.num_copies,
            "rebuilds": self.played.num_rebuilds,
            "act_pages": self.num_acts,
            "free": room.free,
            "total": room.total,
            "free_slots": self.allocator.available_size(),
            "slots": self.scale * NUM_PAGES * PAGE,
        }


def story(seed: int, prepare: Any = None, **how: Any) -> dict[str, Any]:
    """Run forwards, then the way down and up; free all.

    Args:
        seed: of the device and of the numbers.
        prepare: is given the server before its first forward.
        how: of the server.
    """
    server = Server(seed, **how)
    if prepare is not None:
        prepare(server)
    server.run()
    stored = server.stored("a")
    server.num_acts = int(server.is_act.sum())
    server.free("a")
    server.loaded("a", "d")
    server.extend([("d", 5)])
    server.decode("b", "d", "c")
    for rid in "bcd":
        server.free(rid)
    from sgl_tiered.engines.sglang.factory import _loads_by

    offload = None
    if server.home:
        told = server.driver.stats()["activations"]
        found = server.plan.chosen.projections.told(server.home)
        offload = {**found, "weight_bytes": told.get("weight_bytes")}
    return {
        "offload": offload,
        "stored": stored,
        "mixed": server.mixed,
        "ahead": server.copier._ahead,
        "pool": type(server.pool).__name__,
        "device": type(server.device).__name__,
        "served": _loads_by(server.device),
        "too_early": server.too_early,
        "warmed": server.warmed,
        "not_warmed": sorted(set(server.played.kernels) - set(server.warmed)),
        "measured_over_the_link": bool((server.at_start >= 0).any()),
        "pinned": server.pool.region.array.ctypes.data in server.played.pinned,
        **server.end(),
    }


class Guard:
    """Lets everything go, and counts."""

    def __init__(self) -> None:
        self.num_asked = 0

    def wait(self, stop: Any) -> bool:
        self.num_asked += 1
        return not stop.is_set()


def broken(seed: int, *, acts: bool = False) -> float:
    """Return how far answers are off where staging leaves pages out."""
    server = Server(seed, breaks=True, acts=acts)
    server.run()
    worst = server.forwards.worst["decode"]
    server.end()
    return float(worst)


def main() -> None:
    """Print the stories."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_tiered.engines.sglang.layered.cuda import cuda_hooks

    for target, hook, kind in cuda_hooks():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sgl_tiered")
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    guard = Guard()
    told: dict[str, Any] = {f"pinned {seed}": story(seed) for seed in range(3)}
    told["warnings where it is pinned"] = list(records)
    told["pageable"] = story(3, pins=False)
    told["warnings where it is not"] = list(records)
    told["guarded"] = story(4, guard=guard)
    told["asked"] = guard.num_asked
    told["broken"] = broken(1)
    records.clear()
    told |= {f"activations {seed}": story(seed, acts=True) for seed in range(3)}
    told["warnings of activations"] = list(records)
    told["activations pageable"] = story(3, pins=False, acts=True)
    told["broken with activations"] = broken(1, acts=True)
    told["activations guarded"] = story(4, guard=Guard(), acts=True)
    for number, num_bytes in enumerate(OFFLOADED):
        story_of = story(5 + number, acts=True, offload_bytes=num_bytes)
        told[f"activations offloaded {num_bytes}"] = story_of
    print(json.dumps(told))


if __name__ == "__main__":
    main()
