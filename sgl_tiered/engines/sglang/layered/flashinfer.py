"""FlashInfer over a `LayeredPool`: one plan per forward, own indices in each layer.

A plan depends on how long the requests are, not on where their tokens lie. So SGLang's
backend plans as ever, with logical slots, and before each layer's run this one writes
into the plan's index buffer where the tokens lie in that layer. Runs and writes are
queued on one stream, in order, so the buffer is never changed under a run.

Where not all pages that a layer needs fit one half of the staging memory, the layer
manager cuts the batch into groups; each has a plan of its own, and its attention is
queued once its pages have come. A group's prefill then reads its new tokens from the
pool too (SGLang's paged form), which may round differently from the form for a whole
batch, as may a plan for fewer requests. Mini-batches (``serving/layered/batches.py``)
give groups requests that do not lie side by side: their rows are gathered, and their
answers go back to where SGLang has these rows.

Not validated on a GPU; the log says so at the start. What is tested on a CPU: the
arithmetic (``engines/device/indices.py``), both passes with a stand-in for the kernels,
and both again on FlashInfer's own planner and wrappers, over kernels that do what a
plan says. CUDA graphs replay fixed copies, and are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.layers.attention.flashinfer_backend import (
    DecodeMetadata,
    FlashInferAttnBackend,
    PrefillMetadata,
)
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_tiered.engines.device.cuda_ops import pinned_buffer
from sgl_tiered.engines.device.device_rows import DeviceRows
from sgl_tiered.engines.device.indices import (
    fill_slots,
    leading_pages,
    new_token_pages,
    page_positions,
    page_starts,
    request_rows,
)
from sgl_tiered.errors import EngineCompatibilityError
from sgl_tiered.layered.base import PassRequest
from sgl_tiered.pipelines.streams import BufferRing

__all__ = [
    "NOT_VALIDATED",
    "NO_GRAPHS",
    "LayeredFlashInfer",
    "PinnedUpload",
    "create_layered_flashinfer",
    "register_layered_flashinfer",
]

logger = logging.getLogger(__name__)

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Upload = Callable[[Int32s], torch.Tensor]

NOT_VALIDATED = (
    "sgl-tiered: layer-wise KV with FlashInfer has not been validated on a GPU; before "
    "you rely on it, compare its answers with those of a server without "
    "--tiered-layerkv."
)
NO_GRAPHS = (
    "--tiered-layerkv runs without CUDA graphs, which replay one layer's places for "
    "ever: add --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill "
    "disabled."
)
_NUM_UPLOADS = 128
"""Lists of pages under way to the device: two for each of 64 layers."""
_UPLOAD_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Requests whose attention runs together.

    Attributes:
        wrapper: FlashInfer's, planned for them.
        rows: query rows: side by side, or int64 [n] on the device.
        pages: which entries of the manager's table their reads name.
        out: int32 [n], the wrapper's index buffer; views what the run will read.
        positions: int32 [n], of the tokens' pages among ``pages``.
        offsets: int32 [n], in their pages.
    """

    wrapper: Any
    rows: slice | torch.Tensor
    pages: slice | Int64s
    out: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor


class PinnedUpload:
    """Brings small int32 lists to a CUDA device without waiting for it.

    Args:
        device: which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = BufferRing(pinned_buffer, _NUM_UPLOADS, _UPLOAD_BYTES)

    def __call__(self, numbers: Int32s) -> torch.Tensor:
        """Queue the copy on the calling thread's stream; return int32 [n] there."""
        source = self._ring.lend(numbers.nbytes).view(np.int32)
        np.copyto(source, numbers)
        on_device = torch.from_numpy(source).to(self._device, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._ring.passes(event)
        return on_device


class LayeredFlashInfer(FlashInferAttnBackend):
    """SGLang's FlashInfer backend, with places by layer.

    Args:
        model_runner: SGLang's; its pool is a `LayeredPool` on a CUDA device.
        **kwargs: as SGLang passes them.

    Raises:
        EngineCompatibilityError: the model needs more than plain attention.
    """

    def __init__(self, model_runner: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, **kwargs)
        reason = self._refused()
        if reason is not None:
            raise EngineCompatibilityError(
                f"--tiered-layerkv does not serve {reason} with FlashInfer; leave it "
                "out."
            )
        self.attach(PinnedUpload(torch.device(model_runner.device)))
        logger.warning(NOT_VALIDATED)

    def attach(self, upload: Upload) -> None:
        """Start with no forward under way; ``upload`` brings lists to the device."""
        self._pool: Any = self.token_to_kv_pool
        self._page_tokens: int = self._pool.page_size
        self._upload = upload
        self._parts: list[_Part] = []
        self._more_wrappers: dict[tuple[bool, int], Any] = {}
        self._indptr: Int64s = np.zeros(1, np.int64)
        self._writes: tuple[Int64s, torch.Tensor, torch.Tensor] | None = None
        self._pool.write_slots = self._write_slots

    # -- Plans -----------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan once for all layers, with as many plans as there are groups."""
        self._parts, self._writes = [], None
        driver = self._pool.driver
        mode = forward_batch.forward_mode
        if driver is None or mode.is_idle() or not forward_batch.batch_size:
            # Nothing is placed yet: a forward that only warms up.
            super().init_forward_metadata(forward_batch)
            return
        is_decode = mode.is_decode()
        kv_lens = _on_host(forward_batch.seq_lens_cpu, forward_batch.seq_lens)
        new_lens = (
            np.ones_like(kv_lens)
            if is_decode
            else np.asarray(forward_batch.extend_seq_lens_cpu, np.int64)
        )
        pages = self._pages_of(forward_batch, kv_lens)
        requests = [
            PassRequest(rid, own, int(kv) - int(new), int(new), driver.decided(rid))
            for rid, own, kv, new in zip(
                forward_batch.rids, pages, kv_lens, new_lens, strict=True
            )
        ]
        order = np.arange(len(requests))
        if driver.packing is not None:
            order = np.asarray(driver.packing.order(requests), np.int64)
        is_packed = bool(np.any(np.diff(order) != 1))
        rows_of = request_rows(new_lens, order)
        plan = driver.begin_pass([requests[n] for n in order])
        self._indptr = plan.indptr
        kv_lens, new_lens = kv_lens[order], new_lens[order]
        listed = np.concatenate([pages[n] for n in order])
        self._plan_writes(listed, kv_lens - new_lens, new_lens, rows_of)
        ends = np.concatenate([[0], np.cumsum(new_lens)])
        if len(plan.groups) == 1 and not is_packed:
            super().init_forward_metadata(forward_batch)
            self._parts = [self._whole(is_decode, kv_lens, new_lens)]
            return
        wrappers = []
        for number, (first, last) in enumerate(plan.groups):
            lens = kv_lens[first:last]
            rows: slice | torch.Tensor = slice(int(ends[first]), int(ends[last]))
            who: slice | torch.Tensor = slice(first, last)
            if is_packed:
                rows, who = self._index(rows_of[rows]), self._index(order[who])
            wrapper = self._plan_group(forward_batch, is_decode, number, who, lens)
            own = slice(int(plan.indptr[first]), int(plan.indptr[last]))
            self._parts.append(self._part(wrapper, rows, own, int(lens.sum())))
            wrappers.append(wrapper)
        self.forward_metadata = (
            DecodeMetadata(wrappers)
            if is_decode
            else PrefillMetadata(wrappers, use_ragged=False, extend_no_prefix=False)
        )

    def _pages_of(self, forward_batch: Any, kv_lens: Int64s) -> list[Int64s]:
        """Read each request's logical pages off SGLang's table, in one copy."""
        table = self.req_to_token_pool.req_to_token
        longest = int(kv_lens.max())
        firsts = table[:, : longest : self._page_tokens]
        slots = firsts[forward_batch.req_pool_indices].cpu().numpy()
        numbers = slots.astype(np.int64) // self._page_tokens
        counts = -(-kv_lens // self._page_tokens)
        return [row[:count] for row, count in zip(numbers, counts, strict=True)]

    def _index(self, numbers: Int64s) -> torch.Tensor:
        return self._upload(numbers.astype(np.int32)).to(torch.int64)

    def _plan_writes(
        self, pages: Int64s, num_context: Int64s, num_new: Int64s, rows_of: Int64s
    ) -> None:
        """Tell where new tokens go; ``rows_of`` are their rows in the forward."""
        told = new_token_pages(self._indptr, num_context, num_new, self._page_tokens)
        positions, offsets = np.empty_like(told[0]), np.empty_like(told[1])
        positions[rows_of], offsets[rows_of] = told
        written, index = np.unique(positions, return_inverse=True)
        self._writes = (
            pages[written],
            self._upload(index.astype(np.int32)),
            self._upload(offsets),
        )
        driver = self._pool.driver
        if driver.plan.acts is not None:
            size, upload = self._page_tokens, self._upload
            driver.capture_on_device(
                DeviceRows(pages[written], index, offsets, size, upload)
            )

    def _whole(self, is_decode: bool, kv_lens: Int64s, new_lens: Int64s) -> _Part:
        """Return the one part of a batch that SGLang has planned."""
        planned = self.forward_metadata
        rows = slice(0, int(new_lens.sum()))
        whole = slice(0, int(self._indptr[-1]))
        if is_decode:
            wrapper = planned.decode_wrappers[0]
        else:
            wrapper = planned.prefill_wrappers[0]
            if planned.use_ragged:
                # The new tokens are attended as they come from the layer before.
                prefix = kv_lens - new_lens
                kept = leading_pages(self._indptr, prefix, self._page_tokens)
                return self._part(wrapper, rows, kept, int(prefix.sum()))
        return self._part(wrapper, rows, whole, int(kv_lens.sum()))

    def _part(
        self,
        wrapper: Any,
        rows: slice | torch.Tensor,
        pages: slice | Int64s,
        num_tokens: int,
    ) -> _Part:
        out = wrapper._paged_kv_indices_buf[:num_tokens]
        # Read before the first layer writes over them.
        return _Part(
            wrapper,
            rows,
            pages,
            out,
            page_positions(out, self._page_tokens),
            out % self._page_tokens,
        )

    def _plan_group(
        self,
        forward_batch: Any,
        is_decode: bool,
        number: int,
        own: slice | torch.Tensor,
        kv_lens: Int64s,
    ) -> Any:
        """Plan for some requests, as SGLang plans for all of them."""
        wrapper = self._wrapper(is_decode, number)
        lens, lens_cpu = forward_batch.seq_lens[own], torch.from_numpy(kv_lens)
        total = int(kv_lens.sum())
        rows = forward_batch.req_pool_indices[own]
        updater = (
            self.indices_updater_decode if is_decode else self.indices_updater_prefill
        )
        # A plan keeps views of these, so that groups cannot share them.
        shared = {
            name: getattr(updater, name)
            for name in ("kv_indptr", "qo_indptr")
            if hasattr(updater, name)
        }
        for name, (buffer, *_) in shared.items():
            setattr(updater, name, [torch.zeros_like(buffer[: len(kv_lens) + 1])])
        try:
            if is_decode:
                updater.update(
                    lens,
                    lens_cpu,
                    total,
                    decode_wrappers=[wrapper],
                    encoder_lens=None,
                    spec_info=None,
                    fixed_split_size=self.decode_split_tile_size,
                    disable_split_kv=False,
                    req_pool_indices=rows,
                    plan=forward_batch.kv_loc_plan,
                )
            else:
                updater.update(
                    rows,
                    lens,
                    lens_cpu,
                    total,
                    forward_batch.extend_prefix_lens[own],
                    prefill_wrappers=[wrapper],
                    use_ragged=False,
                    encoder_lens=None,
                    spec_info=None,
                    fixed_split_size=self.prefill_split_tile_size,
                    plan=forward_batch.kv_loc_plan,
                )
        finally:
            for name, buffers in shared.items():
                setattr(updater, name, buffers)
        return wrapper

    def _wrapper(self, is_decode: bool, number: int) -> Any:
        """Return a group's wrapper; the first group has SGLang's own."""
        ours = self.decode_wrappers if is_decode else self.prefill_wrappers_paged
        if number == 0:
            return ours[0]
        key = (is_decode, number)
        if key not in self._more_wrappers:
            self._more_wrappers[key] = self._new_wrapper(is_decode)
        return self._more_wrappers[key]

    def _new_wrapper(self, is_decode: bool) -> Any:
        """Make one like SGLang's: plans of their own, one workspace for all runs."""
        from flashinfer import (
            BatchDecodeWithPagedKVCacheWrapper,
            BatchPrefillWithPagedKVCacheWrapper,
        )

        if is_decode:
            return BatchDecodeWithPagedKVCacheWrapper(
                self.workspace_buffer,
                "NHD",
                backend=self.decode_backend,
                use_tensor_cores=self.decode_use_tensor_cores,
            )
        return BatchPrefillWithPagedKVCacheWrapper(
            self.workspace_buffer, "NHD", backend=self.prefill_backend
        )

    # -- Layers ----------------------------------------------------------------

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Store, then attend; the arguments are SGLang's."""
        run = super().forward_extend
        return self._forward(run, q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Store, then attend; the arguments are SGLang's."""
        run = super().forward_decode
        return self._forward(run, q, k, v, layer, forward_batch, save_kv_cache)

    def _forward(
        self,
        run: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        if not self._parts:
            return run(q, k, v, layer, forward_batch, save_kv_cache)
        number = layer.layer_id - self._pool.start_layer
        manager = self._pool.driver.manager
        if k is not None and save_kv_cache:
            # Before the reads, in each form: a layer is copied to the host from here.
            loc = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=None)
            scales = self._kv_write_scales(layer)
            self._pool.set_kv_buffer(layer, loc, k, v, *scales)
        # Alone and in the batch's own order: what SGLang has planned.
        if len(self._parts) == 1 and isinstance(self._parts[0].rows, slice):
            manager.wait_unit(number, 0)
            self._write_indices(number, self._parts[0])
            out = run(q, k, v, layer, forward_batch, save_kv_cache=False)
            manager.unit_done(number, 0)
        else:
            out = self._by_groups(number, q, layer)
        if number == self._pool.layer_num - 1:
            self._parts = []
            self._pool.driver.end_pass()
        return out

    def _by_groups(self, number: int, q: torch.Tensor, layer: Any) -> torch.Tensor:
        """Attend group by group, each once its pages are on their way."""
        manager = self._pool.driver.manager
        query = q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty_like(query)
        kv_cache = self._pool.get_kv_buffer(layer.layer_id)
        more: dict[str, Any] = (
            {"causal": True, "window_left": layer.sliding_window_size}
            if isinstance(self.forward_metadata, PrefillMetadata)
            else {}
        )
        for group, part in enumerate(self._parts):
            manager.wait_unit(number, group)
            self._write_indices(number, part)
            out[part.rows] = part.wrapper.forward(
                query[part.rows],
                kv_cache,
                sm_scale=layer.scaling,
                logits_soft_cap=layer.logit_cap,
                k_scale=layer.k_scale_float,
                v_scale=layer.v_scale_float,
                **more,
            )
            manager.unit_done(number, group)
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)

    def _write_indices(self, number: int, part: _Part) -> None:
        """Write where a part's tokens lie in a layer into its plan's buffer."""
        if not part.out.numel():
            return
        places = self._pool.driver.manager.table(number)[part.pages]
        starts = self._upload(page_starts(places, self._page_tokens))
        fill_slots(part.out, starts, part.positions, part.offsets)

    def _write_slots(self, number: int) -> torch.Tensor | None:
        """Return where the forward's new tokens go in a layer: int64 [n].

        None while nothing is placed.
        """
        if self._writes is None:
            return None
        pages, positions, offsets = self._writes
        places = self._pool.driver.manager.pages_for_write(number, pages)
        starts = self._upload(page_starts(places, self._page_tokens))
        slots = torch.empty_like(positions)
        fill_slots(slots, starts, positions, offsets)
        return slots.to(torch.int64)

    # -- What is refused -------------------------------------------------------

    def init_cuda_graph_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a graph would read one layer's places for ever."""
        raise EngineCompatibilityError(NO_GRAPHS)

    def _refused(self) -> str | None:
        """Say what the model needs beyond plain attention; None if nothing."""
        if self.num_wrappers != 1:
            return "sliding-window and encoder-decoder models"
        if self.prefill_uses_dequant_workspace or self.decode_uses_dequant_workspace:
            return "a quantised KV cache"
        if self.enable_mis or self.is_dllm_model:
            return "multi-item scoring and diffusion models"
        return None


def create_layered_flashinfer(plain: Callable[[Any], Any], runner: Any) -> Any:
    """Build the backend for a model runner; SGLang's own where its pool is not ours.

    Args:
        plain: builds SGLang's.
        runner: SGLang's ``ModelRunner``.
    """
    if not hasattr(runner.token_to_kv_pool, "plan"):
        return plain(runner)
    return LayeredFlashInfer(runner, init_new_workspace=runner.init_new_workspace)


def register_layered_flashinfer() -> None:
    """Let ``--attention-backend flashinfer`` serve a `LayeredPool`; once is enough."""
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    plain = ATTENTION_BACKENDS["flashinfer"]
    if isinstance(plain, _Backends):
        return
    register_attention_backend("flashinfer")(_Backends(plain))


class _Backends:
    """What SGLang calls for a backend of that name."""

    def __init__(self, plain: Callable[[Any], Any]) -> None:
        self._plain = plain

    def __call__(self, runner: Any) -> Any:
        return create_layered_flashinfer(self._plain, runner)


def _on_host(on_host: torch.Tensor | None, on_device: torch.Tensor) -> Int64s:
    lens = on_device.cpu() if on_host is None else on_host
    numbers: Int64s = lens.numpy().astype(np.int64)
    return numbers
