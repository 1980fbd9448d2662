"""SGLang's FlashInfer backend over layers, on a CPU, with stand-ins for the kernels.

Answers are compared with attention over each request's own keys and values. The last
line printed is JSON.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import torch
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


class Copier:
    """Copies of layer-pages between torch's tensors and host rows."""

    waiter_copies = True

    def __init__(self, pool):
        self.pool = pool
        self.rows = torch.full((LAYERS, NUM_PAGES, 2, PAGE, HEADS, DIM), 9e9)
        self.breaks = False
        self.num_up = 0

    def mark(self):
        return None

    def _pages(self):
        both = (self.pool.k_buffer[0], self.pool.v_buffer[0])
        return [buffer.view(-1, PAGE, HEADS, DIM) for buffer in both]

    def to_host(self, layer, physical, rows, after):
        for part, pages in enumerate(self._pages()):
            self.rows[layer, rows, part] = pages[physical.astype(np.int64)]

    def to_device(self, layer, rows, physical, after):
        self.num_up += len(rows)
        if not self.breaks:
            for part, pages in enumerate(self._pages()):
                pages[physical.astype(np.int64)] = self.rows[layer, rows, part]


def cuda_hooks_seen(plan):
    """Return what SGLang's CUDA platform answers, with and without planned layers."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.platforms.cuda import CudaSRTPlatform
    from sglang.srt.platforms.interface import SRTPlatform
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_tiered.engines.sglang.layered import capacity, cuda, flashinfer

    backends = attention_registry.ATTENTION_BACKENDS
    plain = backends["flashinfer"] = lambda runner: "plain"
    untouched = SRTPlatform.get_kv_pool_cls
    for target, hook, kind in cuda.cuda_hooks():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    platform = CudaSRTPlatform()

    def answers():
        return [
            platform.get_kv_pool_cls(kind="mha"),
            platform.get_kv_pool_cls(kind="mla"),
            platform.get_paged_allocator_cls(),
        ]

    def defaults(**given):
        args = SimpleNamespace(_raw_input=given, attention_backend=None, **given)
        platform.apply_server_args_defaults(args)
        return args.attention_backend

    before = answers()
    unregistered = backends["flashinfer"] is plain
    capacity._planned.append(plan)
    pool, mla, allocator = answers()
    capacity._planned.clear()
    create = backends["flashinfer"]
    flashinfer.register_layered_flashinfer()
    return {
        "before": before,
        "unregistered": unregistered,
        "pool": [base.__name__ for base in pool.__mro__],
        "mla": mla,
        "allocator": [base.__name__ for base in allocator.__mro__],
        "base_is_untouched": SRTPlatform.get_kv_pool_cls is untouched,
        "plain": create(SimpleNamespace(token_to_kv_pool=object())),
        "registered_once": backends["flashinfer"] is create,
        "defaults": [defaults(), defaults(tiered_layerkv="on")],
    }


def packed_seen(forwards, driver, extend, decode):
    """Return what mini-batches give: requests in another order than their rows."""
    batches = [
        (extend, [("a", 2), ("b", 3), ("c", 4)]),
        (decode, [("a", 1), ("b", 1), ("c", 1)]),
        # One that fits in one group, and whose rows are turned round all the same.
        (extend, [("d", 3), ("e", 2)]),
        (decode, [("d", 1), ("e", 1)]),
    ]
    seen = {"orders": [], "groups": []}
    worst, forwards.worst = forwards.worst, {"extend": 0.0, "decode": 0.0}

    def order(requests):
        told = list(range(len(requests)))
        told = told[1:] + told[:1]
        seen["orders"].append(told)
        return told

    driver.packing = SimpleNamespace(order=order)
    for mode, batch in batches:
        forwards.step(batch, mode, retained(0, 1, 2))
        forwards.settle()
        kind = "decode" if mode.is_decode() else "extend"
        seen["groups"].append(forwards.groups[kind][-1])
    driver.packing = None
    seen["worst"], forwards.worst = forwards.worst, worst
    return seen


def joined_seen():
    """Return what the plugin does where SGLang runs on CUDA, and on this platform."""
    import sglang.srt.platforms as platforms
    from sglang.srt.platforms.cuda import CudaSRTPlatform

    from sgl_tiered.engines.sglang import plugin
    from sgl_tiered.engines.sglang.args import TieredServerArgs, tiered_options
    from sgl_tiered.errors import ConfigError

    def said(**given):
        args = TieredServerArgs(
            model_path="dummy",
            radix_cache_backend="tiered",
            tiered_host_size="1MB",
            page_size=16,
            **given,
        )
        try:
            tiered_options(args)
        except ConfigError as error:
            return str(error)
        return ""

    on = {"tiered_layerkv": "on"}
    eager = on | {"disable_cuda_graph": True}
    synchronous = eager | {"disable_overlap_schedule": True}
    here = [target for target, _, _ in plugin._device_hooks()]
    on_this = said(**on)
    platforms.current_platform = CudaSRTPlatform()
    return {
        "here": here,
        "on_this": on_this,
        "cuda": [target.rpartition(".")[2] for target, _, _ in plugin._device_hooks()],
        "without_layers": said(),
        "graphs": said(**on),
        "overlap": said(**eager),
        "backend": said(**synchronous, attention_backend="triton"),
        "right": said(**synchronous),
        "chosen": said(**synchronous, attention_backend="flashinfer"),
    }


def main() -> None:
    from sglang.srt.layers.attention import flashinfer_backend as theirs
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sgl_tiered.core.layout import PageLayout
    from sgl_tiered.engines.sglang.layered import flashinfer as ours
    from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
    from sgl_tiered.engines.sglang.layered.cuda import CudaPlaces
    from sgl_tiered.engines.sglang.layered.driver import LayerDriver
    from sgl_tiered.errors import EngineCompatibilityError
    from sgl_tiered.layered.binding import LayerBinding
    from sgl_tiered.layered.manager import LayerManager
    from sgl_tiered.layered.mover import LayerMover
    from sgl_tiered.serving.options import LayerKv

    layout = PageLayout(LAYERS, PAGE, HEADS * DIM * 4)
    plan = LayerPlan(layout, NUM_PAGES - 1, NUM_PHYSICAL, HALF, LayerKv())

    class Pool(CudaPlaces):
        """A pool of layers on a device, as far as attention asks."""

        def __init__(self):
            self.page_size, self.start_layer, self.layer_num = PAGE, 0, LAYERS
            shape = (2, (NUM_PHYSICAL + 1) * PAGE, HEADS, DIM)
            both = torch.full(shape, 9e9)
            self.k_buffer, self.v_buffer = [both[0]] * LAYERS, [both[1]] * LAYERS

        def get_kv_buffer(self, layer_id):
            return self.k_buffer[layer_id], self.v_buffer[layer_id]

        def set_kv_buffer(self, layer, loc_info, k, v, k_scale, v_scale):
            self._store_kv_layer(layer.layer_id, loc_info.loc, k, v)

    pool, table = Pool(), Table()
    copier = Copier(pool)
    binding = LayerBinding(LAYERS, NUM_PAGES, NUM_PHYSICAL, first_physical=1)
    mover = LayerMover(copier, layout.layer_page_bytes)
    manager = LayerManager(binding, mover, PAGE, HALF, lazy=False)
    pool.driver = LayerDriver(manager, plan)
    backend = make_backend(pool, table)
    free = np.random.default_rng(0).permutation(np.arange(1, NUM_PAGES)).tolist()
    forwards = Forwards(backend, free.pop)
    step, settle, worst = forwards.step, forwards.settle, forwards.worst

    torch.manual_seed(0)
    extend, decode = ForwardMode.EXTEND, ForwardMode.DECODE
    some, none = retained(1), retained()
    step([("a", 17), ("b", 9)], extend, some)
    settle()
    step([("a", 6), ("c", 12), ("b", 3)], extend, none)
    settle()
    streamed = copier.num_up
    for _ in range(6):
        step([("a", 1), ("b", 1), ("c", 1)], decode)
        settle()
    step([("a", 4), ("b", 4), ("c", 7)], extend)
    settle()
    packed = packed_seen(forwards, pool.driver, extend, decode)
    right = dict(worst)
    copier.breaks = True
    step([("a", 1), ("b", 1), ("c", 1)], decode)
    refused = ""
    try:
        backend.init_cuda_graph_state(1, 1)
    except EngineCompatibilityError as error:
        refused = f"{type(error).__name__}: {error}"
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    ours.logger.addHandler(handler)
    theirs.FlashInferAttnBackend.__init__ = lambda self, runner, **kw: (
        self.__dict__.update(backend.__dict__)
    )
    ours.PinnedUpload = lambda device: None
    ours.create_layered_flashinfer(
        None,
        SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(plan=1),
            device="cpu",
            init_new_workspace=False,
        ),
    )
    hooked = cuda_hooks_seen(plan)
    parameters = {
        name: [
            list(inspect.signature(getattr(cls, name)).parameters)
            for cls in (theirs.FlashInferAttnBackend, ours.LayeredFlashInfer)
        ]
        for name in ("forward_extend", "forward_decode", "init_forward_metadata")
    }
    print(
        json.dumps(
            {
                "worst": right,
                "broken": worst["decode"],
                "groups": forwards.groups,
                "packed": packed,
                "streamed": copier.num_up,
                "streamed_in_prefill": streamed,
                "plans": backend.decode_wrappers[0].num_plans,
                "runs": backend.decode_wrappers[0].num_runs,
                "refused": refused,
                "logged": records,
                "parameters": parameters,
                "hooked": hooked,
                "joined": joined_seen(),
            }
        )
    )


if __name__ == "__main__":
    main()
    sys.exit(0)
