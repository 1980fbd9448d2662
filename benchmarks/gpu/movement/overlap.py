"""The layer-wise load under a forward, and an offload beside one.

Measured for the same pages: the forward with its prefix on the device, the load by
itself, both in one (the product's loader and ticket), and one after the other. What
counts is the time of both over max(forward, load) plus the first layer's load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from movement.place import Place, Shape, Store
from movement.stack import Stack, StackShape

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import LoadPlan
from sgl_tiered.engines.device.cuda_ops import as_byte_pages
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader, LoadJob, Segment

__all__ = ["measure_overlap"]


def measure_overlap(
    place: Place,
    model: StackShape,
    *,
    page_tokens: int,
    cached_tokens: int,
    new_tokens: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Yield one record per way of loading, and one of the offload beside a forward.

    Raises:
        AssertionError: the forward over a load gave another answer, or other bytes
            were offloaded.
    """
    torch.manual_seed(0)
    count = cached_tokens // page_tokens
    shape = Shape(
        model.num_layers, model.num_heads, model.head_dim, page_tokens, 2 * count + 1
    )
    stack = Stack(model, place.device)
    x = torch.randn(new_tokens, model.hidden, device=place.device, dtype=torch.bfloat16)
    for way in place.ways:
        store = Store(place, shape, way, count)
        try:
            run = _Run(place, stack, store, x)
            yield {
                "kind": "overlap",
                "way": way,
                **store.facts(),
                "cached_tokens": cached_tokens,
                "new_tokens": new_tokens,
                **run.measure(repeats),
            }
            run.close()
        finally:
            store.close()


class _Run:
    """One store, one forward and the ways to bring them together."""

    def __init__(
        self, place: Place, stack: Stack, store: Store, x: torch.Tensor
    ) -> None:
        self._place, self._stack, self._store, self._x = place, stack, store, x
        # Finite KV: noise of all bit patterns holds NaN, which equals nothing.
        noise = np.random.default_rng(1).integers(0, 256, store.region.shape, np.uint8)
        store.region[:] = noise & 0x3F
        self._threads = ThreadPoolExecutor(1)
        self._completions = CompletionQueue()
        self._loader = LayerwiseLoader(
            store.pool, self._completions, SystemClock(), MetricsRegistry()
        )
        tokens = np.arange(store.shape.page_tokens)
        slots = (store.pages[:, None] * store.shape.page_tokens + tokens).reshape(-1)
        self._slots = torch.from_numpy(slots).to(place.device)
        self._spare = np.setdiff1d(np.arange(store.shape.num_pages), store.pages)
        self._spare_region = place.region(len(store.rows), store.layout)
        self._offload: Future[Any] | None = None

    def close(self) -> None:
        self._threads.shutdown()
        self._loader.close()
        self._spare_region.close()

    def measure(self, repeats: int) -> dict[str, Any]:
        """Return the raw seconds of each form."""
        self._load()
        wanted = self._alone()
        ways: dict[str, Callable[[], Any]] = {
            "forward_s": self._alone,
            "load_s": self._load,
            "both_s": self._both,
            "one_after_the_other_s": self._serial,
            "forward_beside_offload_s": self._beside_offload,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        stalls = []
        first_layer = [self._first_layer() for _ in range(repeats)]
        for turn in range(repeats + 1):
            for name, way in ways.items():
                self._place.synchronize()
                began = time.perf_counter()
                result = way()
                self._place.synchronize_this()
                taken_s = time.perf_counter() - began
                self._end_offload()
                if turn:
                    seconds[name].append(taken_s)
                if name == "both_s":
                    answer, ticket = result
                    assert torch.equal(answer, wanted), "the answer depends on the load"
                    stalls.append(ticket.stall_s)
        return {
            **seconds,
            "first_layer_s": first_layer,
            "stall_s": stalls[1:],
            "load_bytes": len(self._store.rows) * self._store.layout.page_bytes,
        }

    def _forward(self, wait_layer: Callable[[int], None]) -> torch.Tensor:
        return self._stack.forward(
            self._x, self._store.buffers, self._slots, wait_layer
        )

    def _alone(self) -> torch.Tensor:
        """Run the forward with the prefix on the device."""
        return self._forward(lambda layer: None)

    def _submit(self) -> Any:
        store = self._store
        count = len(store.rows)
        plan = LoadPlan(
            plan_id=1,
            first_page=0,
            pages=np.arange(count, dtype=np.int32),
            tiers=np.full(count, TierId.HOST, np.uint8),
            addresses=store.rows,
            checksums=np.zeros(count, np.uint64),
            predicted_s=0.0,
        )
        segment = Segment(store.region, store.rows, np.arange(count))
        return self._loader.submit([LoadJob(plan, (segment,), store.pages)])

    def _load(self) -> None:
        assert self._submit().wait(), "the load broke"

    def _both(self) -> tuple[torch.Tensor, Any]:
        self._spoil()
        ticket = self._submit()
        answer = self._forward(ticket.wait_layer)
        assert ticket.wait(), "the load broke"
        return answer, ticket

    def _serial(self) -> torch.Tensor:
        self._load()
        return self._forward(lambda layer: None)

    def _spoil(self) -> None:
        """Make the answer wrong unless the last layer is loaded in time."""
        last = self._stack.shape.num_layers - 1
        self._store.buffers.k_buffer[last][self._slots[:1]] = 7.0

    def _first_layer(self) -> float:
        store = self._store
        began = time.perf_counter()
        arrival = store.pool.load_layer(0, store.region, store.rows, store.pages)
        if arrival is not None:
            return arrival.finish()
        return time.perf_counter() - began

    def _beside_offload(self) -> torch.Tensor:
        """Run the forward while as many pages as it reads go down."""
        store, pages = self._store, self._spare[: len(self._store.rows)]
        rows = np.arange(len(pages), dtype=np.int64)
        mark = store.pool.mark()
        self._spare_region.array[:] = 0
        self._offload = self._threads.submit(
            store.pool.store_pages, self._spare_region.array, rows, pages, mark
        )
        return self._forward(lambda layer: None)

    def _end_offload(self) -> None:
        """Wait for it, and look at the first and the last page of each layer."""
        if self._offload is None:
            return
        self._offload.result()
        self._offload = None
        store = self._store
        count, layout = len(store.rows), store.layout
        for layer in range(store.shape.num_layers):
            begin = layout.key_offset(layer)
            for row in {0, count - 1}:
                page = int(self._spare[row])
                wanted = torch.cat(
                    [
                        as_byte_pages(buffers[layer], layout)[page]
                        for buffers in (store.buffers.k_buffer, store.buffers.v_buffer)
                    ]
                )
                found = self._spare_region.array[row, begin : begin + len(wanted)]
                same = np.array_equal(found, wanted.cpu().numpy())
                assert same, "other bytes were offloaded"
