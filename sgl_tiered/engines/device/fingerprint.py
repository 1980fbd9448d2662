"""Which weights compute KV: a hash of every byte of them.

xxh3 with 128 bits, tensor by tensor and piece by piece: in memory where it is, from a
device through a buffer of bounded size. Tensors that are no plain memory (wrappers
around others, sparse, quantised and packed ones) are taken apart. One that cannot be
gets a hash of its own each time: then what such weights compute is not found again, and
nothing is found wrongly.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash

from sgl_tiered.engines.device.cuda_ops import pinned_if_possible
from sgl_tiered.serving.weights import HashStopped, Read, WeightsHash

__all__ = ["adapter_tensors", "hash_tensors", "weights_reader"]

logger = logging.getLogger(__name__)

_VOLATILE_KEYS = ("_name_or_path", "transformers_version")
_PIECE_BYTES = 4 << 20
"""Hashed at once, in less than a millisecond, without the interpreter's lock."""
_STAGE_BYTES = 32 << 20
"""Copied from a device at once; this much pinned memory for each thread."""
_SPAN_BYTES = 256 << 20
"""Of one tensor, what one thread takes at a time."""


def weights_reader(
    model: Callable[[], torch.nn.Module], hf_config: Any, engine: str
) -> Callable[[], Read]:
    """Return what reads a model's weights, for ``WeightsIdentity``.

    Args:
        model: returns the loaded model, on any device.
        hf_config: its configuration (rotary settings and the like shape KV too).
        engine: name and version of what computes, since kernels may change rounding.
    """
    config = {
        key: value
        for key, value in hf_config.to_dict().items()
        if key not in _VOLATILE_KEYS
    }
    header = json.dumps([config, engine], sort_keys=True, default=str).encode()

    def begin() -> Read:
        found, mark = model().state_dict(keep_vars=True), None
        state = {name: _memory_now(value) for name, value in found.items()}
        if torch.cuda.is_available():
            # Behind what the device was asked to write so far.
            mark = torch.cuda.Event()
            mark.record()

        def read(num_threads: int, stop: threading.Event) -> WeightsHash:
            return hash_tensors(
                header, state, num_threads=num_threads, stop=stop, mark=mark
            )

        return read

    return begin


def _memory_now(value: Any) -> Any:
    """Return what a tensor's bytes are in now, wherever it is said to lie later.

    A forward lets projections lie in a slot for a while (``offloaded.py``), whose bytes
    are soon another layer's, while a thread reads the weights.
    """
    is_plain = isinstance(value, torch.Tensor) and not hasattr(
        value, "__tensor_flatten__"
    )
    if not is_plain:
        return value
    try:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return value.detach()
    except Exception:
        # Whoever reads it finds the same, and says so.
        logger.debug("sgl-tiered: a tensor cannot be detached", exc_info=True)
        return value


def adapter_tensors(adapter: Any) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Return what decides about a LoRA adapter's KV: its settings and its tensors.

    Args:
        adapter: SGLang's ``LoRAAdapter``, loaded.
    """
    config = adapter.config
    settings = {
        "rank": config.r,
        "scaling": adapter.scaling,
        "modules": sorted(config.target_modules)
        if not isinstance(config.target_modules, str)
        else config.target_modules,
    }
    tensors: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(adapter.layers):
        for name, tensor in layer.weights.items():
            tensors[f"{number}.{name}"] = tensor
    tensors.update(adapter.embedding_layers)
    tensors.update(adapter.added_tokens_embeddings)
    return json.dumps(settings, sort_keys=True, default=str).encode(), tensors


def hash_tensors(
    header: bytes,
    state: Mapping[str, Any],
    *,
    num_threads: int = 1,
    stop: threading.Event | None = None,
    mark: Any = None,
) -> WeightsHash:
    """Return the hash of named tensors, all of their bytes.

    Args:
        header: goes in front.
        state: as ``torch.nn.Module.state_dict`` gives it; what is no tensor is hashed
            as it is serialised.
        num_threads: that read; 1 for the calling one.
        stop: once it is set, nothing more than a piece is read.
        mark: an event of the device behind whose work the tensors are written; None
            where they are.

    Raises:
        HashStopped: ``stop`` was set.
    """
    stop = stop or threading.Event()
    parts = {name: _parts(name, value) for name, value in sorted(state.items())}
    jobs = [
        (part, begin)
        for each in parts.values()
        for part in each
        for begin in range(0, part.num_bytes, _SPAN_BYTES)
    ]
    local = threading.local()

    def run(job: tuple[_Part, int]) -> bytes:
        if not hasattr(local, "stage"):
            local.stage = _Stage(mark)
        part, begin = job
        found = xxhash.xxh3_128()
        end = min(begin + _SPAN_BYTES, part.num_bytes)
        for piece in part.pieces(begin, end, local.stage):
            if stop.is_set():
                raise HashStopped
            found.update(piece)
        return found.digest()

    if num_threads > 1:
        with ThreadPoolExecutor(num_threads, "tiered-hash") as pool:
            spans = list(pool.map(run, jobs))
    else:
        spans = [run(job) for job in jobs]
    whole = xxhash.xxh3_128()
    _add(whole, header)
    place = iter(spans)
    for name, each in parts.items():
        _add(whole, name.encode())
        for part in each:
            _add(whole, part.text.encode())
            for _ in range(0, part.num_bytes, _SPAN_BYTES):
                whole.update(next(place))
    num_bytes = sum(part.num_bytes for each in parts.values() for part in each)
    num_unknown = sum(part.is_unknown for each in parts.values() for part in each)
    return WeightsHash(whole.hexdigest(), len(parts), num_bytes, num_unknown)


def _add(found: Any, raw: bytes) -> None:
    """Add a text with its length, so that neighbours cannot run into each other."""
    found.update(len(raw).to_bytes(8, "little") + raw)


class _Stage:
    """Memory that one thread copies from a device to, and the stream it does that on.

    Args:
        mark: an event of the device to wait for first; None for none.
    """

    def __init__(self, mark: Any) -> None:
        self._mark = mark
        self._buffer: torch.Tensor | None = None
        self._stream: Any = None

    def fetch(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a copy of at most ``_STAGE_BYTES`` in memory, good until the next."""
        is_cuda = flat.is_cuda
        if self._buffer is None:
            make = pinned_if_possible if is_cuda else torch.empty
            self._buffer = make((_STAGE_BYTES,), dtype=torch.uint8)
            if is_cuda:
                self._stream = torch.cuda.Stream(flat.device)
                if self._mark is not None:
                    self._stream.wait_event(self._mark)
        copy = self._buffer[: flat.numel()]
        # A stream of its own: the copies do not queue among the model's kernels.
        with torch.cuda.stream(self._stream) if is_cuda else contextlib.nullcontext():
            copy.copy_(flat, non_blocking=True)
        if is_cuda:
            self._stream.synchronize()
        return copy


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of a tensor.

    Attributes:
        text: what they mean: names, shape, type, order.
        num_bytes: of them.
        flat: uint8 [num_bytes], where they lie; None where ``rows`` gives them.
        rows: (first byte, last byte, stage) -> the bytes between, for a tensor with
            gaps; it gives whole rows, so it is asked for all of them at once.
        is_unknown: the bytes are chance, as the tensor's could not be read.
    """

    text: str
    num_bytes: int
    flat: torch.Tensor | None = None
    rows: Callable[[_Stage], Iterator[memoryview]] | None = None
    is_unknown: bool = False

    def pieces(self, begin: int, end: int, stage: _Stage) -> Iterator[memoryview]:
        """Iterate over the bytes from ``begin`` to ``end``, a piece at a time."""
        if self.flat is None:
            assert self.rows is not None
            # All of it belongs to the first span.
            if begin == 0:
                yield from self.rows(stage)
            return
        yield from _pieces(self.flat[begin:end], stage)


def _pieces(flat: torch.Tensor, stage: _Stage) -> Iterator[memoryview]:
    """Iterate over the bytes of a flat uint8 tensor, wherever it lies."""
    if flat.device.type != "cpu":
        for begin in range(0, flat.numel(), _STAGE_BYTES):
            yield from _pieces(stage.fetch(flat[begin : begin + _STAGE_BYTES]), stage)
        return
    raw = memoryview(flat.numpy())
    for begin in range(0, len(raw), _PIECE_BYTES):
        yield raw[begin : begin + _PIECE_BYTES]


def _parts(name: str, value: Any) -> list[_Part]:
    """Take a value of a state apart; never raises."""
    try:
        if isinstance(value, torch.Tensor):
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                return list(_tensor_parts(value))
        return [_bytes_part("value", pickle.dumps(value))]
    except Exception:
        logger.debug("sgl-tiered: %s is no plain memory", name, exc_info=True)
    logger.warning(
        "sgl-tiered: the weights in %s (%s) cannot be read, so nothing that this "
        "server keeps will be found after a restart, nor by a peer",
        name,
        type(value).__qualname__,
    )
    return [replace(_bytes_part("unknown", os.urandom(16)), is_unknown=True)]


def _bytes_part(text: str, raw: bytes) -> _Part:
    # A copy: torch warns of memory that may not be written to.
    flat = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)
    return _Part(f"{text} {len(raw)}", flat.numel(), flat)


def _tensor_parts(tensor: torch.Tensor, text: str = "") -> Iterator[_Part]:
    """Yield the memory of a tensor, of those inside it where it wraps others."""
    text += f"{tuple(tensor.shape)} {tensor.dtype}"
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, context = flatten()
        text += f" {type(tensor).__qualname__} {context!r}"
        for name in names:
            yield from _tensor_parts(getattr(tensor, name), f"{text} {name} ")
        return
    tensor = tensor.detach()
    if tensor.device.type == "meta":
        yield _bytes_part(f"{text} meta", b"")
    elif tensor.layout is torch.sparse_coo:
        for each in (tensor._indices(), tensor._values()):
            yield from _tensor_parts(each, f"{text} coo ")
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        for each in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
            yield from _tensor_parts(each, f"{text} {tensor.layout} ")
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        for each in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()):
            yield from _tensor_parts(each, f"{text} {tensor.layout} ")
    elif tensor.layout is not torch.strided:
        # Packed for a library (mkldnn): only it knows how.
        yield from _tensor_parts(tensor.to_dense(), f"{text} {tensor.layout} ")
    elif tensor.is_quantized:
        yield from _tensor_parts(tensor.int_repr(), f"{text} {_scales(tensor)} ")
    else:
        yield _dense(tensor.resolve_conj().resolve_neg(), text)


def _scales(tensor: torch.Tensor) -> str:
    """Return the scales of a quantised tensor."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{tensor.q_scale()!r} {tensor.q_zero_point()}"
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return f"{tensor.q_per_channel_axis()} {scales.tolist()} {zeros.tolist()}"


def _dense(tensor: torch.Tensor, text: str) -> _Part:
    """Return the memory of a strided tensor, in its order where that has no gaps."""
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return _Part(text, 0, torch.empty(0, dtype=torch.uint8))
    wide = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    order = sorted(wide, key=lambda dim: -tensor.stride(dim))
    turned = tensor.squeeze().permute([wide.index(dim) for dim in order])
    if turned.is_contiguous():
        turning = "" if order == wide else f" {order}"
        return _Part(text + turning, num_bytes, turned.reshape(-1).view(torch.uint8))
    rows = max(1, _STAGE_BYTES // (num_bytes // tensor.shape[wide[0]]))
    flat = tensor.squeeze()

    def gathered(stage: _Stage) -> Iterator[memoryview]:
        for begin in range(0, len(flat), rows):
            part = flat[begin : begin + rows].contiguous().reshape(-1)
            yield from _pieces(part.view(torch.uint8), stage)

    return _Part(text, num_bytes, None, gathered)
