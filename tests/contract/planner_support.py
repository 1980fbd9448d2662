"""FlashInfer's own planner and wrappers on a CPU, over kernels that follow a plan.

The planner is compiled by ``planner_build.py``; the wrappers are the wheel's Python. In
the place of a module that nvcc would compile is ``PlannedKernels``: it plans with that
planner, and computes what the kernels do, from the work items that lie in their
workspace. What the plan leaves out is not computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_PREFILL = (
    "padded_batch_size",
    "total_num_rows",
    "total_num_rows_offset",
    "cta_tile_q",
    "request_indices",
    "qo_tile_indices",
    "kv_tile_indices",
    "merge_indptr",
    "o_indptr",
    "kv_chunk_size",
    "v",
    "s",
    "block_valid_mask",
    "enable_cuda_graph",
    "split_kv",
)
"""What a plan's numbers are, in their order: of ``PrefillPlanInfo::ToVector``."""
_DECODE = (
    "padded_batch_size",
    "v",
    "s",
    "request_indices",
    "kv_tile_indices",
    "o_indptr",
    "block_valid_mask",
    "kv_chunk_size",
    "enable_cuda_graph",
    "split_kv",
)
_CAUSAL = 1
_NO_WINDOW = -1


class Planner:
    """The compiled planner, for a device with so many multiprocessors.

    Args:
        library: of ``planner_build.compiled``.

    Attributes:
        planned: by form, whether each plan so far has split keys and values.
        shortens: whether plans are made for half of each request's tokens: a fault.
        drops: whether plans lack their last work item: another.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.planner_error.restype = ctypes.c_char_p
        self.planned: dict[str, list[bool]] = {"prefill": [], "decode": []}
        self.shortens = self.drops = False

    def play(self, num_sm: int, blocks_per_sm: int = 2) -> None:
        """Set what the device is."""
        self._library.planner_device(num_sm, blocks_per_sm)

    def prefill(
        self, workspace: Any, qo_indptr: Any, kv_indptr: Any, *numbers: Any
    ) -> list[int]:
        """Call ``PrefillPlan``; ``numbers`` are as it takes them."""
        at = [_address(qo_indptr), _address(self._kv_indptr(kv_indptr))]
        return self._plan("prefill", _PREFILL, workspace, at, numbers)

    def decode(self, workspace: Any, indptr: Any, *numbers: Any) -> list[int]:
        """Call ``DecodePlan``; ``numbers`` are as ``plan_decode`` takes them."""
        at = [_address(self._kv_indptr(indptr))]
        return self._plan("decode", _DECODE, workspace, at, numbers)

    def _kv_indptr(self, indptr: torch.Tensor) -> torch.Tensor:
        if not self.shortens:
            return indptr
        lengths = (indptr.diff() // 2).clamp(min=1)
        self._shortened = torch.zeros_like(indptr)
        self._shortened[1:] = lengths.cumsum(0)
        return self._shortened

    def _plan(
        self, form: str, names: Any, workspace: Any, at: list[Any], numbers: Any
    ) -> list[int]:
        floats, ints, pinned = workspace
        info = (ctypes.c_int64 * len(names))()
        count = getattr(self._library, f"plan_{form}")(
            _address(floats),
            ctypes.c_size_t(floats.nbytes),
            _address(ints),
            _address(pinned),
            ctypes.c_size_t(ints.nbytes),
            *at,
            *numbers,
            info,
        )
        if count != len(names):
            raise RuntimeError(self._library.planner_error().decode())
        told = list(info)
        told[names.index("padded_batch_size")] -= self.drops
        self.planned[form].append(bool(told[-1]))
        return told


def _address(numbers: torch.Tensor) -> ctypes.c_void_p:
    assert numbers.is_contiguous()
    return ctypes.c_void_p(numbers.data_ptr())


class _Plan:
    """A plan as a kernel finds it.

    Args:
        names: of its numbers.
        told: the numbers.
        floats: workspace for partial answers.
        ints: workspace on the device, to which the planner has copied.
    """

    def __init__(
        self, names: tuple[str, ...], told: list[int], floats: Any, ints: Any
    ) -> None:
        self.facts = dict(zip(names, told, strict=True))
        self._floats, self._ints = floats, ints
        self.num_items = self.facts["padded_batch_size"]
        self.splits = bool(self.facts["split_kv"])
        assert not self.facts["enable_cuda_graph"]
        (self.chunk_tokens,) = self.ints("kv_chunk_size", 1)

    def ints(self, name: str, count: int) -> list[int]:
        """Return so many numbers that lie where the plan says."""
        begin = self.facts[name]
        numbers = self._ints[begin : begin + 4 * count].view(torch.int32)
        found: list[int] = numbers.tolist()
        return found

    def partial(self, heads: int, dim: int) -> tuple[Any, Any]:
        """Return memory of partial answers and of their sums; nothing is in it yet.

        As many rows as the planner has set aside, which are more than the plan writes.
        """
        both = []
        rows = (self.facts["s"] - self.facts["v"]) // (4 * heads * dim)
        for name, width in (("v", dim), ("s", 1)):
            begin = self.facts[name]
            memory = self._floats[begin : begin + 4 * rows * heads * width]
            both.append(memory.view(torch.float32).fill_(float("nan")))
        return both[0].view(rows, heads, dim), both[1].view(rows, heads)

    def chunk(self, number: int, num_tokens: int) -> slice:
        """Return the tokens of a request's chunk."""
        if not self.splits:
            return slice(0, num_tokens)
        begin = number * self.chunk_tokens
        end = min(begin + self.chunk_tokens, num_tokens)
        return slice(min(begin, num_tokens), end)


class PlannedKernels:
    """In the place of a module that is compiled for a type of keys and values.

    Args:
        planner: for the plans.
        kv_bytes: of one number.
    """

    def __init__(self, planner: Planner, kv_bytes: int) -> None:
        self._planner, self._kv_bytes = planner, kv_bytes

    def plan(self, floats: Any, ints: Any, pinned: Any, *args: Any) -> list[int]:
        """Plan as ``BatchPrefillWithKVCachePlan``, whose arguments these are."""
        qo_indptr, kv_indptr, _lens, rows, size, qo_heads, kv_heads, page = args[:8]
        graph, dim_qk, dim_vo, _causal, window, split, whole, ctas, uniform = args[8:]
        return self._planner.prefill(
            (floats, ints, pinned),
            qo_indptr,
            kv_indptr,
            *(rows, size, qo_heads, kv_heads, dim_qk, dim_vo, page),
            ctypes.c_bool(graph),
            *(window, split, ctypes.c_bool(whole)),
            *(ctypes.c_int64(ctas), ctypes.c_int64(uniform), self._kv_bytes),
        )

    def paged_run(
        self,
        floats: Any,
        ints: Any,
        told: list[int],
        q: Any,
        k: Any,
        v: Any,
        *args: Any,
    ) -> None:
        """Compute as ``BatchPrefillWithPagedKVCacheRun``."""
        qo_indptr, kv_indptr, indices, last, out, lse, mask, _layout, window = args[:9]
        assert window == _NO_WINDOW
        scale = args[17]
        self._prefill(
            _Plan(_PREFILL, told, floats, ints),
            q,
            _paged(k, v, kv_indptr, indices, last),
            qo_indptr.tolist(),
            (out, lse),
            mask == _CAUSAL,
            scale,
        )

    def ragged_run(
        self,
        floats: Any,
        ints: Any,
        told: list[int],
        q: Any,
        k: Any,
        v: Any,
        *args: Any,
    ) -> None:
        """Compute as ``BatchPrefillWithRaggedKVCacheRun``."""
        qo_indptr, kv_indptr, out, lse, mask, _layout, window = args[:7]
        assert window == _NO_WINDOW
        scale = args[15]
        cuts = kv_indptr.tolist()

        def tokens(request: int) -> tuple[Any, Any]:
            own = slice(cuts[request], cuts[request + 1])
            return k[own], v[own]

        self._prefill(
            _Plan(_PREFILL, told, floats, ints),
            q,
            tokens,
            qo_indptr.tolist(),
            (out, lse),
            mask == _CAUSAL,
            scale,
        )

    def _prefill(
        self,
        plan: _Plan,
        q: Any,
        tokens: Callable[[int], tuple[Any, Any]],
        cuts: list[int],
        answer: tuple[Any, Any],
        is_causal: bool,
        scale: float,
    ) -> None:
        """Walk the work items of ``BatchPrefillWithPagedKVCacheKernel``.

        Args:
            plan: as it lies in the workspace.
            q: [rows, heads, dim].
            tokens: returns a request's keys and values.
            cuts: of the rows, by request.
            answer: for what was computed, and for its logarithm of sums or None.
            is_causal: whether a row sees no token behind its own.
            scale: of scores.
        """
        requests, tiles, chunks = (
            plan.ints(name, plan.num_items)
            for name in ("request_indices", "qo_tile_indices", "kv_tile_indices")
        )
        starts = plan.ints("o_indptr", len(cuts))
        tile_rows = plan.facts["cta_tile_q"]
        out, lse = _where(answer, plan)
        for request, tile, chunk in zip(requests, tiles, chunks, strict=True):
            keys, values = tokens(request)
            num_rows = cuts[request + 1] - cuts[request]
            group = q.shape[1] // keys.shape[1]
            # A tile is of rows and the heads of a group, behind each other.
            end = min((tile + 1) * tile_rows, num_rows * group)
            packed = torch.arange(tile * tile_rows, end)
            rows, members = packed // group, packed % group
            own, places = plan.chunk(chunk, len(keys)), starts[request] + rows
            if plan.splits:
                num_chunks = -(-max(len(keys), 1) // plan.chunk_tokens)
                places = starts[request] + rows * num_chunks + chunk
            seen = len(keys) - num_rows + rows - own.start if is_causal else None
            for head in range(keys.shape[1]):
                heads = head * group + members
                asked = q[cuts[request] + rows, heads]
                out[places, heads], lse[places, heads] = _attend(
                    asked, keys[own, head], values[own, head], seen, scale
                )
        if plan.splits:
            _merge(out, lse, plan.ints("merge_indptr", len(q) + 1), answer)

    def run(
        self,
        floats: Any,
        ints: Any,
        told: list[int],
        q: Any,
        k: Any,
        v: Any,
        *args: Any,
    ) -> None:
        """Compute as ``BatchDecodeWithPagedKVCacheRun``: a row for each request."""
        indptr, indices, last, out, lse, _layout, window = args[:7]
        assert window == _NO_WINDOW
        scale = args[10]
        plan = _Plan(_DECODE, told, floats, ints)
        requests, chunks = (
            plan.ints(name, plan.num_items)
            for name in ("request_indices", "kv_tile_indices")
        )
        starts = plan.ints("o_indptr", len(q) + 1)
        tokens = _paged(k, v, indptr, indices, last)
        to, sums = _where((out, lse), plan)
        group = q.shape[1] // k.shape[2]
        for item, (request, chunk) in enumerate(zip(requests, chunks, strict=True)):
            keys, values = tokens(request)
            own = plan.chunk(chunk, len(keys))
            for head in range(k.shape[2]):
                heads = slice(head * group, (head + 1) * group)
                to[item, heads], sums[item, heads] = _attend(
                    q[request, heads], keys[own, head], values[own, head], None, scale
                )
        if plan.splits:
            _merge(to, sums, starts, (out, lse))


class DecodeKernels(PlannedKernels):
    """In the place of the module of decoding without tensor cores."""

    def plan(self, floats: Any, ints: Any, pinned: Any, *args: Any) -> list[int]:
        """Plan as ``BatchDecodeWithPagedKVCachePlan``, whose arguments these are."""
        indptr, size, qo_heads, kv_heads, page, graph, _window, _cap, dim = args[:9]
        numbers = (size, qo_heads, kv_heads, page, ctypes.c_bool(graph), dim)
        workspace = (floats, ints, pinned)
        return self._planner.decode(workspace, indptr, *numbers, self._kv_bytes)


def _where(answer: tuple[Any, Any], plan: _Plan) -> tuple[Any, Any]:
    """Return where work items write: answers, or parts of them to be merged."""
    out, lse = answer
    if plan.splits:
        return plan.partial(*out.shape[1:])
    return out, torch.empty(out.shape[:2]) if lse is None else lse


def _paged(
    k: Any, v: Any, indptr: Any, indices: Any, last: Any
) -> Callable[[int], tuple[Any, Any]]:
    """Return what gives a request's tokens, by the page numbers that lie there now."""
    cuts, left, page_tokens = indptr.tolist(), last.tolist(), k.shape[1]

    def tokens(request: int) -> tuple[Any, Any]:
        pages = indices[cuts[request] : cuts[request + 1]].long()
        count = (len(pages) - 1) * page_tokens + left[request] if len(pages) else 0
        both = (one[pages].flatten(0, 1)[:count] for one in (k, v))
        keys, values = both
        return keys, values

    return tokens


def _attend(q: Any, keys: Any, values: Any, seen: Any, scale: float) -> tuple[Any, Any]:
    """Return attention of [n, dim], and log2 of the sums; ``seen`` are last tokens."""
    scores = q @ keys.T * scale / torch.log(torch.tensor(2.0))
    if seen is not None:
        ahead = torch.arange(len(keys)) > seen[:, None]
        scores = scores.masked_fill(ahead, float("-inf"))
    if not len(keys):
        return torch.zeros_like(q), torch.full((len(q),), float("-inf"))
    top = scores.max(-1, keepdim=True).values.clamp(min=-1e30)
    weights = torch.exp2(scores - top)
    sums = weights.sum(-1, keepdim=True)
    found = weights @ values / sums.clamp(min=1e-30)
    return found, (top + sums.log2())[:, 0]


def _merge(out: Any, lse: Any, cuts: list[int], answer: tuple[Any, Any]) -> None:
    """Join the parts of each row, as ``VariableLengthMergeStates`` does."""
    for row in range(len(cuts) - 1):
        parts = slice(cuts[row], cuts[row + 1])
        top = lse[parts].max(0).values.clamp(min=-1e30)
        weights = torch.exp2(lse[parts] - top)
        sums = weights.sum(0)
        joined = (weights[..., None] * out[parts]).sum(0)
        answer[0][row] = joined / sums.clamp(min=1e-30)[..., None]
        if answer[1] is not None:
            answer[1][row] = top + sums.log2()


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Join two parts of one softmax, with sums to the base that FlashInfer has."""
    both = torch.logaddexp2(lse_a, lse_b)
    weights = (torch.exp2(lse - both)[..., None] for lse in (lse_a, lse_b))
    weight_a, weight_b = weights
    return out_a * weight_a + out_b * weight_b, both


def install(planner: Planner) -> None:
    """Let FlashInfer's wrappers, and SGLang's calls of them, run on a CPU.

    Memory is never pinned, and what is to lie on a CUDA device lies in memory.
    """
    import flashinfer.decode
    import flashinfer.prefill

    empty = torch.empty

    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return empty(*args, **kwargs)

    def of_prefill(backend: str, q: Any, kv: torch.dtype, *args: Any) -> PlannedKernels:
        assert backend == "fa2", backend
        return PlannedKernels(planner, kv.itemsize)

    def of_decode(q: Any, kv: torch.dtype, *args: Any) -> PlannedKernels:
        return DecodeKernels(planner, kv.itemsize)

    modules: Any = SimpleNamespace(prefill=flashinfer.prefill, decode=flashinfer.decode)
    torch.empty = on_cpu  # type: ignore[assignment]
    modules.prefill.get_batch_prefill_module = of_prefill
    modules.decode.get_batch_prefill_module = of_prefill
    modules.decode.get_batch_decode_module = of_decode


class FlashInferKernels:
    """The wheel's wrappers for ``make_backend``, with SGLang's own calls of them.

    Args:
        tensor_cores: whether decoding is planned and run as prefill, as SGLang chooses
            where a head of keys has four or more of queries.
    """

    def __init__(self, *, tensor_cores: bool) -> None:
        self._tensor_cores = tensor_cores

    def join(self, backend: Any, theirs: Any, heads: tuple[int, int], dim: int) -> None:
        """Give a backend its wrappers, and what updates them."""
        from flashinfer import (
            BatchDecodeWithPagedKVCacheWrapper,
            BatchPrefillWithPagedKVCacheWrapper,
            BatchPrefillWithRaggedKVCacheWrapper,
        )

        class Updater(theirs.FlashInferIndicesUpdaterDecode):  # type: ignore[misc]
            """SGLang's own, but for what it reads off a model runner."""

            def __init__(self) -> None:
                self.num_qo_heads, self.num_kv_heads = heads
                self.head_dim = dim
                self.data_type = self.q_data_type = torch.float32
                self.sliding_window_size, self._swa_kv_pool = None, None
                self.attn_backend, self.kv_indptr = backend, backend.kv_indptr
                self.kv_last_page_len = backend.kv_last_page_len
                self.update = self.update_single_wrapper

        theirs._safe_merge_state = merge
        workspace = torch.empty(4 << 20, dtype=torch.uint8)
        backend.workspace_buffer = workspace
        # SGLang's for every device.
        backend.prefill_backend = backend.decode_backend = "fa2"
        backend.decode_use_tensor_cores = self._tensor_cores
        backend.prefill_wrapper_ragged = BatchPrefillWithRaggedKVCacheWrapper(
            workspace, "NHD", backend="fa2"
        )
        backend.prefill_wrappers_paged = [
            BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        ]
        backend.decode_wrappers = [
            BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                backend="fa2",
                use_tensor_cores=self._tensor_cores,
            )
        ]
        backend.indices_updater_decode = Updater()
