"""SGLang's FlashInfer backend on a CPU: stand-ins for its kernels, and forwards.

Everything that plans, writes indices, stores and splits a batch is the product's or
SGLang's; the wrappers compute plain attention from what their index buffers hold
(``planner_support.py`` has FlashInfer's own instead). ``Forwards`` compares with
attention over each request's own keys and values.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

PAGE, LAYERS, HEADS, DIM = 4, 3, 2, 8


def attend(q, keys, values, causal):
    """Return attention and log-sum-exp of [n, heads, dim] over [m, heads, dim].

    A head of keys and values may serve several of queries.
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = (one.repeat_interleave(group, 1) for one in (keys, values))
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


class Table:
    """SGLang's table of slots, and of who has which row."""

    def __init__(self):
        self.req_to_token = torch.zeros((16, 512), dtype=torch.int32)


class Translator:
    """Packs logical slots, as a Triton kernel does on a device."""

    reads_are_translated = False

    def __init__(self, table):
        self.table = table

    def pack_read_stream(
        self, plan, *, req_pool_indices, seq_lens, indptr, out, **kwargs
    ):
        del plan, kwargs
        cuts = zip(req_pool_indices.tolist(), seq_lens.tolist(), indptr, strict=False)
        for row, count, begin in cuts:
            out[begin : begin + count] = self.table.req_to_token[row, :count]


class PlayedKernels:
    """The wrappers of this file, and what makes more of them."""

    def join(self, backend: Any, theirs: Any, heads: tuple[int, int], dim: int) -> None:
        """Give a backend its wrappers, and what updates those of decoding."""
        del heads, dim

        class Updater(theirs.FlashInferIndicesUpdaterDecode):
            """SGLang's signature; its own form allocates on a CUDA device."""

            def __init__(self):
                self.attn_backend, self.kv_indptr = backend, backend.kv_indptr
                self.update = self.update_single_wrapper

            def call_begin_forward(
                self,
                wrapper,
                lens,
                total,
                kv_indptr,
                *args,
                req_pool_indices,
                plan,
                **kw,
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

        theirs._safe_merge_state = merge
        backend.prefill_wrapper_ragged = Ragged()
        backend.prefill_wrappers_paged, backend.decode_wrappers = [Paged()], [Decode()]
        backend.indices_updater_decode = Updater()
        backend._new_wrapper = lambda is_decode: Decode() if is_decode else Paged()


def make_backend(
    pool: Any,
    table: Table,
    kernels: Any = None,
    *,
    group: int = 1,
    layered: bool = True,
) -> Any:
    """Return the product's backend over a pool, attached.

    Args:
        pool: of keys and values.
        table: of slots.
        kernels: give it its wrappers; ``PlayedKernels`` where nothing is said.
        group: heads of queries for one of keys.
        layered: whether it is the product's; else SGLang's own.
    """
    from sglang.srt.layers.attention import flashinfer_backend as theirs

    from sgl_tiered.engines.sglang.layered import flashinfer as ours

    class Updater(theirs.FlashInferIndicesUpdaterPrefill):
        """SGLang's own, but for what it reads off a model runner."""

        def __init__(self, backend):
            self.num_qo_heads, self.num_kv_heads = HEADS * group, HEADS
            self.head_dim, self.page_size = DIM, 1
            self.data_type = self.q_data_type = torch.float32
            self.sliding_window_size, self._swa_kv_pool = None, None
            self.attn_backend = backend
            self.kv_indptr, self.qo_indptr = backend.kv_indptr, backend.qo_indptr
            self.kv_last_page_len = backend.kv_last_page_len
            self.prefill_wrapper_ragged = backend.prefill_wrapper_ragged
            self.update = self.update_single_wrapper

    made = ours.LayeredFlashInfer if layered else theirs.FlashInferAttnBackend
    backend = object.__new__(made)
    backend.token_to_kv_pool, backend.req_to_token_pool = pool, table
    backend.kv_index_translator = Translator(table)
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
    heads = (HEADS * group, HEADS)
    (PlayedKernels() if kernels is None else kernels).join(backend, theirs, heads, DIM)
    backend.indices_updater_prefill = Updater(backend)
    if layered:
        backend.attach(lambda numbers: torch.from_numpy(numbers.copy()))
    return backend


def make_layer(number: int, group: int = 1) -> Any:
    """Return what a backend reads of a model's layer."""
    return SimpleNamespace(
        layer_id=number,
        tp_q_head_num=HEADS * group,
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


class Forwards:
    """Forwards of a batch, compared with attention over what each request was given.

    Args:
        backend: of ``make_backend``.
        take_page: returns a free logical page.
        group: heads of queries for one of keys.

    Attributes:
        truth: keys and values of each token, by request and layer.
        rows: of the table, by request.
        worst: largest difference so far, by kind of forward.
        groups: parts of each forward, by kind.
    """

    def __init__(self, backend: Any, take_page: Any, group: int = 1) -> None:
        self.backend, self.take_page = backend, take_page
        self.table = backend.req_to_token_pool.req_to_token
        # None where pages are as SGLang has them.
        self.driver = getattr(backend.token_to_kv_pool, "driver", None)
        self.num_heads = HEADS * group
        self.layers = [make_layer(number, group) for number in range(LAYERS)]
        self.truth: dict[str, list[list[torch.Tensor]]] = {}
        self.rows: dict[str, int] = {}
        self.worst = {"extend": 0.0, "decode": 0.0}
        self.groups: dict[str, list[int]] = {"extend": [], "decode": []}
        # Makes K and V of a layer; None for numbers of chance.
        self.project: Any = None

    def slots(self, rid: str) -> torch.Tensor:
        """Return the logical slots of a request's tokens."""
        return self.table[self.rows[rid], : len(self.truth[rid][0])]

    def step(self, batch: list[tuple[str, int]], mode: Any, retained=None) -> None:
        """Run one forward of (request, new tokens) and compare."""
        kind = "decode" if mode.is_decode() else "extend"
        table, out_loc, lens, news = self.table, [], [], []
        for rid, new in batch:
            row = self.rows.setdefault(rid, len(self.rows))
            known = self.truth.setdefault(rid, [[] for _ in range(LAYERS)])
            before = len(known[0])
            for token in range(before, before + new):
                slot = (
                    self.take_page() * PAGE
                    if token % PAGE == 0
                    else int(table[row, token - 1]) + 1
                )
                table[row, token] = slot
                out_loc.append(slot)
            lens.append(before + new)
            news.append(new)
            if before == 0 and retained is not None:
                self.driver.decide(rid, retained)
        seq_lens = torch.tensor(lens)
        batch_of = SimpleNamespace(
            forward_mode=mode,
            batch_size=len(batch),
            rids=[rid for rid, _ in batch],
            req_pool_indices=torch.tensor([self.rows[rid] for rid, _ in batch]),
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
        backend = self.backend
        if kind == "extend":
            prefix = [kv - new for kv, new in zip(lens, news, strict=True)]
            batch_of.extend_prefix_lens = torch.tensor(prefix)
            batch_of.extend_prefix_lens_cpu = prefix
            batch_of.extend_seq_lens_cpu = news
        backend.init_forward_metadata(batch_of)
        # SGLang's own backend has one plan.
        self.groups[kind].append(len(getattr(backend, "_parts", [None])))
        run = backend.forward_decode if kind == "decode" else backend.forward_extend
        for layer in self.layers:
            q = torch.randn(sum(news), self.num_heads, DIM)
            k, v = (torch.randn(sum(news), HEADS, DIM) for _ in range(2))
            if self.project is not None:
                k, v = self.project(layer.layer_id, batch, lens)
            got = run(q.flatten(1), k, v, layer, batch_of)
            begin = 0
            for (rid, new), kv in zip(batch, lens, strict=True):
                own = slice(begin, begin + new)
                told = self.truth[rid][layer.layer_id]
                told += list(torch.stack([k[own], v[own]], 1))
                both = torch.stack(told)
                assert len(both) == kv
                wanted, _ = attend(q[own], both[:, 0], both[:, 1], True)
                found = got.view(-1, self.num_heads, DIM)[own]
                # NaN is a difference as well.
                off = (found - wanted).abs().nan_to_num(nan=float("inf"))
                self.worst[kind] = max(self.worst[kind], float(off.max()))
                begin += new

    def settle(self) -> None:
        """Let every copy that is under way land."""
        import threading

        pause = threading.Event()
        for _ in range(4000):
            self.driver.manager.poll()
            if self.driver.manager.is_idle:
                return
            pause.wait(0.005)
        raise AssertionError("a copy did not land")


def retained(*layers: int) -> np.ndarray:
    """Return bool [LAYERS], true for these."""
    wanted = np.zeros(LAYERS, np.bool_)
    wanted[list(layers)] = True
    return wanted
