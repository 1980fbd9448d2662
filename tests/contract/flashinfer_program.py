"""SGLang's FlashInfer backend over layers, on a CPU, with stand-ins for the kernels.

Everything that plans, writes indices, stores and splits a batch is the product's or
SGLang's; the wrappers compute plain attention from what their index buffers hold.
Answers are compared with attention over each request's own keys and values. The last
line printed is JSON.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import torch

warnings.simplefilter("ignore")

PAGE, LAYERS, HEADS, DIM = 4, 3, 2, 8
NUM_PAGES, NUM_PHYSICAL, HALF = 40, 100, 10


def attend(q, keys, values, causal):
    """Return attention and log-sum-exp of [n, heads, dim] over [m, heads, dim]."""
    scores = torch.einsum("nhd,mhd->hnm", q, keys) * DIM**-0.5
    if causal:
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool)
        scores.masked_fill_(ahead.triu(len(keys) - len(q) + 1), float("-inf"))
    lse = torch.logsumexp(scores, -1).T
    out = torch.einsum("hnm,mhd->nhd", torch.softmax(scores, -1), values)
    return torch.nan_to_num(out), lse


class Paged:
    """In the place of a paged wrapper; what it reads is what FlashInfer's reads."""

    def __init__(self, *args, **kwargs):
        del args, kwargs
        self.num_plans = self.num_runs = 0

    def begin_forward(self, qo_indptr, kv_indptr, kv_indices, *args, **kwargs):
        del args, kwargs
        self.num_plans += 1
        self.qo, self.kv = qo_indptr, kv_indptr
        self._paged_kv_indices_buf = kv_indices

    def forward_return_lse(self, q, kv_cache, causal=False, **kwargs):
        del kwargs
        self.num_runs += 1
        outs = []
        for i in range(len(self.kv) - 1):
            where = self._paged_kv_indices_buf[self.kv[i] : self.kv[i + 1]].long()
            rows = q[self.qo[i] : self.qo[i + 1]]
            outs.append(attend(rows, kv_cache[0][where], kv_cache[1][where], causal))
        return tuple(torch.cat(parts) for parts in zip(*outs, strict=True))

    def forward(self, q, kv_cache, **kwargs):
        return self.forward_return_lse(q, kv_cache, **kwargs)[0]


class Decode(Paged):
    """In the place of a decode wrapper: one query row a request."""


class Ragged:
    """In the place of the wrapper over new tokens."""

    def begin_forward(self, qo_indptr, *args, **kwargs):
        del args, kwargs
        self.qo = qo_indptr

    def forward_return_lse(self, q, k, v, causal=True, **kwargs):
        del kwargs
        cuts = zip(self.qo[:-1].tolist(), self.qo[1:].tolist(), strict=True)
        outs = [attend(q[a:b], k[a:b], v[a:b], causal) for a, b in cuts]
        return tuple(torch.cat(parts) for parts in zip(*outs, strict=True))

    def forward(self, q, k, v, **kwargs):
        return self.forward_return_lse(q, k, v, **kwargs)[0]


def merge(out_a, lse_a, out_b, lse_b):
    """Join two parts of one softmax, as FlashInfer does."""
    both = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (torch.exp(lse - both)[..., None] for lse in (lse_a, lse_b))
    return out_a * weight_a + out_b * weight_b, both


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

    before = answers()
    capacity._planned.append(plan)
    pool, mla, allocator = answers()
    capacity._planned.clear()
    attention_registry.ATTENTION_BACKENDS["flashinfer"] = lambda runner: "plain"
    flashinfer.register_layered_flashinfer()
    create = attention_registry.ATTENTION_BACKENDS["flashinfer"]
    return {
        "before": before,
        "pool": [base.__name__ for base in pool.__mro__],
        "mla": mla,
        "allocator": [base.__name__ for base in allocator.__mro__],
        "base_is_untouched": SRTPlatform.get_kv_pool_cls is untouched,
        "plain": create(SimpleNamespace(token_to_kv_pool=object())),
    }


def main() -> None:
    from sglang.srt.layers.attention import flashinfer_backend as theirs
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sgl_tiered.core.layout import PageLayout
    from sgl_tiered.engines.sglang.layered import flashinfer as ours
    from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
    from sgl_tiered.engines.sglang.layered.cuda import CudaPlaces
    from sgl_tiered.engines.sglang.layered.driver import LayerDriver
    from sgl_tiered.engines.sglang.layered.settings import LayerKvSettings
    from sgl_tiered.errors import EngineCompatibilityError
    from sgl_tiered.layered.binding import LayerBinding
    from sgl_tiered.layered.manager import LayerManager
    from sgl_tiered.layered.mover import LayerMover

    theirs._safe_merge_state = merge
    layout = PageLayout(LAYERS, PAGE, HEADS * DIM * 4)
    plan = LayerPlan(layout, NUM_PAGES - 1, NUM_PHYSICAL, HALF, LayerKvSettings())

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

    class Table:
        """SGLang's table of slots, and of who has which row."""

        def __init__(self):
            self.req_to_token = torch.zeros((16, 64), dtype=torch.int32)

    class Translator:
        """Packs logical slots, as a Triton kernel does on a device."""

        reads_are_translated = False

        def pack_read_stream(
            self, plan, *, req_pool_indices, seq_lens, indptr, out, **kwargs
        ):
            del plan, kwargs
            cuts = zip(
                req_pool_indices.tolist(), seq_lens.tolist(), indptr, strict=False
            )
            for row, count, begin in cuts:
                out[begin : begin + count] = table.req_to_token[row, :count]

    class Updater(theirs.FlashInferIndicesUpdaterPrefill):
        """SGLang's own, but for what it reads off a model runner."""

        def __init__(self, backend):
            self.num_qo_heads = self.num_kv_heads = HEADS
            self.head_dim, self.page_size = DIM, 1
            self.data_type = self.q_data_type = torch.float32
            self.sliding_window_size, self._swa_kv_pool = None, None
            self.attn_backend = backend
            self.kv_indptr, self.qo_indptr = backend.kv_indptr, backend.qo_indptr
            self.kv_last_page_len = backend.kv_last_page_len
            self.prefill_wrapper_ragged = backend.prefill_wrapper_ragged
            self.update = self.update_single_wrapper

    class DecodeUpdater(theirs.FlashInferIndicesUpdaterDecode):
        """SGLang's signature; its own form allocates on a CUDA device."""

        def __init__(self, backend):
            self.attn_backend, self.kv_indptr = backend, backend.kv_indptr
            self.update = self.update_single_wrapper

        def call_begin_forward(
            self, wrapper, lens, total, kv_indptr, *args, req_pool_indices, plan, **kw
        ):
            kv_indptr[1 : len(lens) + 1] = torch.cumsum(lens, 0)
            kv_indptr = kv_indptr[: len(lens) + 1]
            indices = torch.empty(total, dtype=torch.int32)
            self.attn_backend.kv_index_translator.pack_read_stream(
                plan,
                req_pool_indices=req_pool_indices,
                seq_lens=lens,
                indptr=kv_indptr,
                out=indices,
            )
            rows = torch.arange(len(lens) + 1, dtype=torch.int32)
            wrapper.begin_forward(rows, kv_indptr, indices)

    pool, table = Pool(), Table()
    copier = Copier(pool)
    binding = LayerBinding(LAYERS, NUM_PAGES, NUM_PHYSICAL, first_physical=1)
    mover = LayerMover(copier, layout.layer_page_bytes)
    manager = LayerManager(binding, mover, PAGE, HALF, lazy=False)
    pool.driver = LayerDriver(manager, plan)

    backend = object.__new__(ours.LayeredFlashInfer)
    backend.token_to_kv_pool, backend.req_to_token_pool = pool, table
    backend.kv_index_translator = Translator()
    backend._swa_kv_pool, backend.use_sliding_window_kv_pool = None, False
    backend.num_wrappers, backend.dispatch_reason = 1, None
    for name in (
        "enable_mis",
        "is_multimodal",
        "is_dllm_model",
        "enable_deterministic",
        "prefill_uses_dequant_workspace",
        "decode_uses_dequant_workspace",
        "use_paged",
    ):
        setattr(backend, name, False)
    backend.prefill_split_tile_size = backend.decode_split_tile_size = None
    backend.kv_cache_quant_method = SimpleNamespace(needs_global_scale=lambda: False)
    backend.dq_page_table = backend.dq_paged_kernel_lens = None
    backend.kv_indptr = [torch.zeros(17, dtype=torch.int32)]
    backend.qo_indptr = [torch.zeros(17, dtype=torch.int32)]
    backend.kv_last_page_len = torch.ones(16, dtype=torch.int32)
    backend.prefill_wrapper_ragged = Ragged()
    backend.prefill_wrappers_paged, backend.decode_wrappers = [Paged()], [Decode()]
    backend.indices_updater_prefill = Updater(backend)
    backend.indices_updater_decode = DecodeUpdater(backend)
    backend._new_wrapper = lambda is_decode: Decode() if is_decode else Paged()
    backend.attach(lambda numbers: torch.from_numpy(numbers.copy()))

    layers = [
        SimpleNamespace(
            layer_id=number,
            tp_q_head_num=HEADS,
            tp_k_head_num=HEADS,
            tp_v_head_num=HEADS,
            head_dim=DIM,
            scaling=DIM**-0.5,
            logit_cap=0.0,
            sliding_window_size=-1,
            is_cross_attention=False,
            attn_type=None,
            k_scale=None,
            v_scale=None,
            k_scale_float=None,
            v_scale_float=None,
        )
        for number in range(LAYERS)
    ]
    free = np.random.default_rng(0).permutation(np.arange(1, NUM_PAGES)).tolist()
    truth: dict[str, list[list[torch.Tensor]]] = {}
    rows: dict[str, int] = {}
    worst = {"extend": 0.0, "decode": 0.0}
    groups: dict[str, list[int]] = {"extend": [], "decode": []}

    def step(batch: list[tuple[str, int]], mode: ForwardMode, retained=None) -> None:
        """Run one forward of (request, new tokens) and compare."""
        kind = "decode" if mode.is_decode() else "extend"
        out_loc, lens, news = [], [], []
        for rid, new in batch:
            row = rows.setdefault(rid, len(rows))
            known = truth.setdefault(rid, [[] for _ in range(LAYERS)])
            before = len(known[0])
            for token in range(before, before + new):
                if token % PAGE == 0:
                    page = free.pop()
                slot = (
                    page * PAGE
                    if token % PAGE == 0
                    else int(table.req_to_token[row, token - 1]) + 1
                )
                table.req_to_token[row, token] = slot
                out_loc.append(slot)
            lens.append(before + new)
            news.append(new)
            if before == 0 and retained is not None:
                pool.driver.decide(rid, retained)
        seq_lens = torch.tensor(lens)
        batch_of = SimpleNamespace(
            forward_mode=mode,
            batch_size=len(batch),
            rids=[rid for rid, _ in batch],
            req_pool_indices=torch.tensor([rows[rid] for rid, _ in batch]),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens.clone(),
            seq_lens_sum=sum(lens),
            encoder_lens=None,
            spec_info=None,
            kv_loc_plan=None,
            cross_attention_custom_mask=None,
            out_cache_loc=torch.tensor(out_loc),
            out_cache_loc_is_physical=False,
        )
        if kind == "extend":
            prefix = [kv - new for kv, new in zip(lens, news, strict=True)]
            batch_of.extend_prefix_lens = torch.tensor(prefix)
            batch_of.extend_prefix_lens_cpu = prefix
            batch_of.extend_seq_lens_cpu = news
        backend.init_forward_metadata(batch_of)
        groups[kind].append(len(backend._parts))
        run = backend.forward_decode if kind == "decode" else backend.forward_extend
        for layer in layers:
            q, k, v = (torch.randn(sum(news), HEADS, DIM) for _ in range(3))
            got = run(q.view(-1, HEADS * DIM), k, v, layer, batch_of)
            begin = 0
            for (rid, new), kv in zip(batch, lens, strict=True):
                own = slice(begin, begin + new)
                truth[rid][layer.layer_id] += list(torch.stack([k[own], v[own]], 1))
                both = torch.stack(truth[rid][layer.layer_id])
                assert len(both) == kv
                wanted, _ = attend(q[own], both[:, 0], both[:, 1], True)
                found = got.view(-1, HEADS, DIM)[own]
                worst[kind] = max(worst[kind], float((found - wanted).abs().max()))
                begin += new

    def settle() -> None:
        """Let every copy that is under way land."""
        pause = threading.Event()
        for _ in range(4000):
            manager.poll()
            if manager.is_idle:
                return
            pause.wait(0.005)
        raise AssertionError("a copy did not land")

    torch.manual_seed(0)
    extend, decode = ForwardMode.EXTEND, ForwardMode.DECODE
    some = np.array([False, True, False])
    none = np.zeros(LAYERS, np.bool_)
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
                "groups": groups,
                "streamed": copier.num_up,
                "streamed_in_prefill": streamed,
                "plans": backend.decode_wrappers[0].num_plans,
                "runs": backend.decode_wrappers[0].num_runs,
                "refused": refused,
                "logged": records,
                "parameters": parameters,
                "hooked": hooked,
            }
        )
    )


if __name__ == "__main__":
    main()
    sys.exit(0)
