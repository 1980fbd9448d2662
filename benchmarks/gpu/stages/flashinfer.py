"""FlashInfer over layers whose pages lie elsewhere in each: one plan, own indices.

Layer-wise KV rests on this: a plan depends on lengths alone, so that what is written
into its index buffer before a layer's run is where that layer reads. Prefill and decode
are planned once; each layer's answer is compared with plain attention over the tokens
that its own indices name, and with a run over the indices of the plan, which must
differ. Kernels are compiled when first used, by nvcc. Where that is not there, the
wheel of compiled ones has to be, and FlashInfer is told to compile nothing, and for
which architecture it looks for kernels. Without the package, or without either, the
stage is not there. A dry run takes a stand-in.

The same kernels then read what plain tiers load into their pages, by each way of a
load, and what is rebuilt there from activations, queued with no wait of a thread; an
answer over the pages as they were before must differ.

SGLang asks for ``fa2``, and for a decoding kernel without tensor cores where a head of
keys has fewer than four of queries. What FlashInfer would choose by itself is looked at
as well, where it can be: a backend that copies the pages into tables of its own as it
plans is refused, and so is one that does not run on this machine.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from movement.place import Place, Shape, Store
from sgl_tiered_kernels.kv_gen import KVProjection, Rotary, rebuild_kv
from sgl_tiered_kernels.kv_gen.reference import rebuild_reference
from stages.clocks import Device
from stages.stage import Stage

from sgl_tiered.engines.device.indices import fill_slots, page_positions

__all__ = ["run"]

_LAYERS = 3
_TOLERANCE = 0.03
"""Of averages of numbers about 1 in bfloat16; other tokens are about 1 off."""
_REBUILT_TOLERANCE = 0.05
"""Of answers over KV that was rounded twice on its way."""
_WORKSPACE_BYTES = 128 << 20
_ASKED, _CHOSEN = "fa2", "auto"
"""The backend that SGLang asks for, and what leaves the choice to FlashInfer."""
_READ_AT_RUN = ("fa2", "fa3", "stand-in")
"""Backends whose runs read the index buffer; others read a table made by their plan."""
_FORMS = {"prefill": 7, "decode": 1}
_WITHOUT_CORES = {"decode_without_tensor_cores": 1}
"""New tokens of each request, by form."""
_LEAST_S = 10.0


def run(stage: Stage) -> None:
    """Write one record per form; raises AssertionError for another answer."""
    device = Device(stage.dry_run)
    if stage.dry_run:
        sizes: dict[str, Any] = {"page_tokens": 4, "heads": (2, 2), "dim": 8}
        _measure(stage, device, "stand-in", _FORMS | _WITHOUT_CORES, **sizes)
        _measure_kinds(stage, device, "stand-in", **sizes)
        return
    has_compiler, is_compiled = _has_compiler(), _is_compiled()
    if not has_compiler:
        if not is_compiled:
            stage.missing(
                "flashinfer, its compiled kernels (the wheel flashinfer-jit-cache), or "
                "nvcc that would compile them"
            )
        # Read when it is imported; what somebody has set stays.
        for name, value in _without_compiler(torch.cuda.get_device_capability()):
            os.environ.setdefault(name, value)
    try:
        import flashinfer
    except Exception as problem:  # noqa: BLE001 - it checks its environment at import
        stage.missing(f"flashinfer: {type(problem).__name__}: {problem}")
    version = getattr(flashinfer, "__version__", "?")
    facts = {"version": version, "compiler": has_compiler, "compiled": is_compiled}
    stage.add("flashinfer", **facts)
    sizes = {"page_tokens": 16, "heads": (32, 8), "dim": 128}
    began_s = time.perf_counter()
    _measure(stage, device, _ASKED, _FORMS, **sizes)
    _measure_kinds(stage, device, _ASKED, **sizes)
    took_s = time.perf_counter() - began_s
    for backend, forms in ((_ASKED, _WITHOUT_CORES), (_CHOSEN, _FORMS)):
        # May have to be compiled too, and a stage that is killed loses its figures.
        if stage.left_s < max(_LEAST_S, 2.0 * took_s):
            why = f"the first took {took_s:.0f} s, and {stage.left_s:.0f} s are left"
            stage.add("skipped", backend=backend, forms=sorted(forms), why=why)
            continue
        _measure(stage, device, backend, forms, **sizes)


def _has_compiler() -> bool:
    """Return whether nvcc is where FlashInfer looks for it."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))
    folders = [Path(home) for home in (*homes, "/usr/local/cuda") if home]
    return shutil.which("nvcc") is not None or any(
        (folder / "bin" / "nvcc").exists() for folder in folders
    )


def _is_compiled() -> bool:
    """Return whether FlashInfer's compiled kernels are there, in either place."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    package = importlib.util.find_spec("flashinfer")
    folders = (package and package.submodule_search_locations) or ()
    return any((Path(folder) / "data" / "aot").is_dir() for folder in folders)


def _without_compiler(capability: tuple[int, int]) -> tuple[tuple[str, str], ...]:
    """Return the environment in which FlashInfer loads kernels and compiles none."""
    major, minor = capability
    feature = "a" if major >= 9 else ""
    return (
        ("FLASHINFER_DISABLE_JIT", "1"),
        ("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{feature}"),
    )


def _measure(
    stage: Stage,
    device: Device,
    backend: str,
    forms: dict[str, int],
    *,
    page_tokens: int,
    heads: tuple[int, int],
    dim: int,
) -> None:
    """Run forms over layers of one shared tensor."""
    torch.manual_seed(0)
    on = {"device": device.torch}
    dtype = torch.bfloat16 if device.is_cuda else torch.float32
    lengths = [5 * page_tokens + 3, 2 * page_tokens, 9 * page_tokens + 1]
    pages = [-(-length // page_tokens) for length in lengths]
    num_pages = 2 * _LAYERS * sum(pages) + 1
    keys, values = (
        torch.randn(num_pages * page_tokens, heads[1], dim, dtype=dtype, **on)
        for _ in range(2)
    )
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    indptr = torch.tensor(starts, dtype=torch.int32, **on)
    # Positions of a request's tokens in the row of all requests' pages.
    firsts = [0, *torch.tensor(pages).cumsum(0).tolist()]
    logical = torch.cat(
        [
            first * page_tokens + torch.arange(length)
            for first, length in zip(firsts, lengths, strict=False)
        ]
    ).to(device.torch, torch.int32)
    positions, offsets = page_positions(logical, page_tokens), logical % page_tokens
    for form, num_new in forms.items():
        queries = torch.tensor([0, *(num_new * (n + 1) for n in range(len(lengths)))])
        queries = queries.to(torch.int32)
        q = torch.randn(int(queries[-1]), heads[0], dim, dtype=dtype, **on)
        began_s = time.perf_counter()
        try:
            wrapper = _planned(
                device, backend, form, queries, indptr, logical, heads, dim, dtype
            )
            found = _resolved(wrapper, backend)
            if found in _READ_AT_RUN:
                _answer(wrapper, q, keys, values)
                device.synchronize()
        except Exception as problem:  # noqa: BLE001 - its compiler may be missing
            why = f"{type(problem).__name__}: {str(problem)[:500]}"
            if backend == _ASKED and form in _FORMS:
                stage.missing(f"flashinfer cannot be used here: {why}")
            why = f"{form} by {backend} does not run here: {why}"
            stage.add("refused", backend=backend, form=form, why=why)
            continue
        if found not in _READ_AT_RUN:
            why = (
                f"{backend} chooses {found}, which copies the pages into a table as it "
                f"plans, and reads no others; SGLang asks for {_ASKED}"
            )
            stage.add("refused", backend=backend, form=form, found=found, why=why)
            continue
        ready_s = time.perf_counter() - began_s
        worst, unwritten = 0.0, 0.0
        for _ in range(_LAYERS):
            places = torch.randperm(num_pages - 1, **on)[: sum(pages)] + 1
            stale = _answer(wrapper, q, keys, values)
            buffer = wrapper._paged_kv_indices_buf[: starts[-1]]
            starting = (places * page_tokens).to(buffer.dtype)
            fill_slots(buffer, starting, positions, offsets)
            answer = _answer(wrapper, q, keys, values)
            wanted = _truth(q, keys, values, buffer.long(), lengths, num_new)
            worst = max(worst, float((answer.float() - wanted).abs().max()))
            off = float((stale.float() - wanted).abs().max())
            unwritten = off if not unwritten else min(unwritten, off)
        stage.add(
            "layers",
            backend=backend,
            found=found,
            form=form,
            worst=worst,
            without_indices=unwritten,
            ready_s=ready_s,
        )
        assert worst <= _TOLERANCE, f"{backend} {form}: {worst} off"
        assert unwritten > _TOLERANCE, "the control shows nothing"
        stage.figure(f"flashinfer_{backend}_{form}_off", round(worst, 5))


def _measure_kinds(
    stage: Stage,
    device: Device,
    backend: str,
    *,
    page_tokens: int,
    heads: tuple[int, int],
    dim: int,
) -> None:
    """Read what tiers load, and what is rebuilt, by the forms that SGLang runs."""
    torch.manual_seed(0)
    place = Place(device.torch.type)
    lengths = [5 * page_tokens + 3, 2 * page_tokens, 9 * page_tokens + 1]
    counts = [-(-length // page_tokens) for length in lengths]
    shape = Shape(_LAYERS, heads[1], dim, page_tokens, 2 * sum(counts))
    for way in place.ways:
        store = Store(place, shape, way, sum(counts))
        pages = torch.from_numpy(store.pages)
        tokens = (pages[:, None] * page_tokens + torch.arange(page_tokens)).flatten()
        # A request's tokens are its pages' first ones.
        firsts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        slots = torch.cat(
            [
                tokens[first * page_tokens :][:length]
                for first, length in zip(firsts, lengths, strict=False)
            ]
        ).to(device.torch)
        noise = torch.randn(store.region.size // 2).to(torch.bfloat16)
        store.region[:] = noise.view(torch.uint8).numpy().reshape(store.region.shape)

        def load(layer: int, store: Store = store) -> None:
            pool = store.pool
            arrival = pool.load_layer(
                layer, store.region, store.rows, store.pages, after=pool.mark()
            )
            if arrival is not None:
                arrival.order()

        def loaded(layer: int, store: Store = store) -> list[torch.Tensor]:
            part, made = store.layout.part_bytes, []
            for offset in (
                store.layout.key_offset(layer),
                store.layout.value_offset(layer),
            ):
                kept = store.region[store.rows, offset : offset + part].copy()
                whole = torch.zeros(shape.num_pages, part, dtype=torch.uint8)
                whole[torch.from_numpy(store.pages)] = torch.from_numpy(kept)
                numbers = whole.flatten().view(torch.bfloat16)
                made.append(numbers.view(-1, heads[1], dim).to(device.torch))
            return made

        facts = {"backend": backend, "way": way}
        case = (device, store.buffers, slots, lengths, heads, dim)
        _show(stage, "tiers", _TOLERANCE, facts, case, load, loaded)
    rebuild, rebuilt = _rebuilds(device, store.buffers, slots, lengths, heads, dim)
    facts = {"backend": backend, "way": "rebuilt"}
    _show(stage, "acts", _REBUILT_TOLERANCE, facts, case, rebuild, rebuilt)


def _rebuilds(
    device: Device,
    buffers: Any,
    slots: torch.Tensor,
    lengths: list[int],
    heads: tuple[int, int],
    dim: int,
) -> tuple[Callable[[int], None], Callable[[int], list[torch.Tensor]]]:
    """Return what rebuilds a layer's KV in its slots, and what that has to be."""
    hidden, count = heads[1] * dim, len(slots)
    angles = torch.rand(max(lengths), dim // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    weight = (torch.randn(2 * hidden, hidden) * hidden**-0.5).to(torch.bfloat16)
    acts = torch.randn(_LAYERS, count, hidden).to(torch.bfloat16)
    rows = torch.randperm(count)
    positions = torch.cat([torch.arange(length) for length in lengths])

    def on(where: Any) -> KVProjection:
        rotary = Rotary(table.to(where))
        return KVProjection(weight.to(where), None, heads[1], dim, rotary)

    here, there = on("cpu"), on(device.torch)
    moved = [one.to(device.torch) for one in (acts, rows, positions)]

    def rebuild(layer: int) -> None:
        keys, values = buffers.k_buffer[layer], buffers.v_buffer[layer]
        rebuild_kv(moved[0][layer], moved[1], there, keys, values, slots, moved[2])

    def rebuilt(layer: int) -> list[torch.Tensor]:
        made = []
        for part in rebuild_reference(acts[layer], rows, here, positions):
            whole = torch.zeros_like(buffers.k_buffer[layer])
            whole[slots] = part.to(device.torch)
            made.append(whole)
        return made

    return rebuild, rebuilt


def _show(
    stage: Stage,
    kind: str,
    tolerance: float,
    facts: dict[str, Any],
    case: tuple[Device, Any, torch.Tensor, list[int], tuple[int, int], int],
    bring: Callable[[int], None],
    brought: Callable[[int], list[torch.Tensor]],
) -> None:
    """Write a record per form; raises AssertionError for another answer.

    Args:
        kind: of the records.
        tolerance: of the answers.
        facts: of the records.
        case: device, buffers of the layers, slots of all requests' tokens, the
            requests' lengths, heads of queries and of keys, and their width.
        bring: queues a layer's KV into its slots.
        brought: returns keys and values as they have to be then.
    """
    device, buffers, slots, lengths, heads, dim = case
    dtype = torch.bfloat16
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    indptr = torch.tensor(starts, dtype=torch.int32, device=device.torch)
    for form, num_new in _FORMS.items():
        queries = torch.tensor([0, *(num_new * (n + 1) for n in range(len(lengths)))])
        queries = queries.to(torch.int32)
        q = torch.randn(int(queries[-1]), heads[0], dim, dtype=dtype).to(device.torch)
        indices = slots.to(torch.int32)
        wrapper = _planned(
            device, facts["backend"], form, queries, indptr, indices, heads, dim, dtype
        )
        worst, before = 0.0, float("inf")
        for layer in range(_LAYERS):
            keys, values = buffers.k_buffer[layer], buffers.v_buffer[layer]
            keys.normal_()
            values.normal_()
            stale = _answer(wrapper, q, keys, values)
            bring(layer)
            answer = _answer(wrapper, q, keys, values)
            wanted = _truth(q, *brought(layer), slots, lengths, num_new)
            worst = max(worst, float((answer.float() - wanted).abs().max()))
            before = min(before, float((stale.float() - wanted).abs().max()))
        stage.add(kind, form=form, worst=worst, before=before, **facts)
        name = f"{kind} {facts['way']} {form}"
        assert worst <= tolerance, f"{name}: {worst} off"
        assert before > tolerance, f"{name}: the control shows nothing"
        way = "" if kind == "acts" else f"_{facts['way']}"
        stage.figure(f"flashinfer_{kind}{way}_{form}_off", round(worst, 5))


def _planned(
    device: Device,
    backend: str,
    form: str,
    queries: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
) -> Any:
    """Return a wrapper with a plan, pages of one token as SGLang has them."""
    if not device.is_cuda:
        return _StandIn(queries, indptr, indices.clone())
    import flashinfer

    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device.torch)
    last = torch.ones(len(indptr) - 1, dtype=torch.int32, device=device.torch)
    if form != "prefill":
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=form in _FORMS, backend=backend
        )
        wrapper.plan(
            indptr,
            indices.clone(),
            last,
            *heads,
            dim,
            1,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return wrapper
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace, "NHD", backend=backend
    )
    wrapper.plan(
        queries.to(device.torch),
        indptr,
        indices.clone(),
        last,
        *heads,
        dim,
        1,
        causal=True,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    return wrapper


def _resolved(wrapper: Any, backend: str) -> str:
    """Return the backend that a planned wrapper runs on."""
    found = getattr(wrapper, "resolved_backend", None)
    return str(found or getattr(wrapper, "_backend", backend))


def _answer(
    wrapper: Any, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    if not q.is_cuda:
        found: torch.Tensor = wrapper.run(q, (keys, values))
        return found
    # Pages of one token: [tokens, 1, heads, dim].
    answer: torch.Tensor = wrapper.run(q, (keys[:, None], values[:, None]))
    return answer


class _StandIn:
    """In the place of a wrapper: what it reads is what FlashInfer's reads."""

    def __init__(
        self, queries: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor
    ) -> None:
        self._lengths = indptr.diff().tolist()
        self._num_new = int(queries[1] - queries[0])
        self._paged_kv_indices_buf = indices

    def run(
        self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return attention over what the index buffer names."""
        slots = self._paged_kv_indices_buf.long()
        return _truth(q, *cache, slots, self._lengths, self._num_new)


def _truth(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: list[int],
    num_new: int,
) -> torch.Tensor:
    """Return plain attention in float32; new tokens are a request's last."""
    outs = []
    begin, group = 0, q.shape[1] // keys.shape[1]
    for number, length in enumerate(lengths):
        where = slots[begin : begin + length]
        begin += length
        own = q[number * num_new : (number + 1) * num_new].float().transpose(0, 1)
        k, v = (
            one[where].float().transpose(0, 1).repeat_interleave(group, 0)
            for one in (keys, values)
        )
        scores = own @ k.transpose(1, 2) * q.shape[2] ** -0.5
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        scores.masked_fill_(ahead.triu(length - num_new + 1), float("-inf"))
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)
