"""SGLang's KV pool on CUDA: the copies that ``StreamPool`` queues.

Torch's streams and events, the copy engines through CUDA's batched copies, and the
Triton form of the page copies, which reads pinned host memory in place.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels.page_copy.dma import (
    CopyEngines,
    batch_function,
    common_alignment,
    copy_function,
    device_attribute,
    part_addresses,
    row_addresses,
)

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.errors import ConfigError
from sgl_tiered.pipelines.worker import prepare_threads
from sgl_tiered.tiers.pinning import LenientRegister

__all__ = [
    "CudaOps",
    "CudaStreams",
    "NumberBlocks",
    "as_byte_pages",
    "cuda_register",
    "numa_node",
    "pin_if_possible",
    "pinned_buffer",
    "pinned_if_possible",
    "reads_registered",
    "use_device_in_threads",
]

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)

_HALF_BYTES = 16 << 20
"""Device memory of each half: 0.3 ms at 50 GB/s, many times what a launch costs."""
_USES_HOST_POINTERS = 91
"""``CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM``."""
_SYSFS = Path("/sys/bus/pci/devices")
_NUM_BLOCKS, _BLOCK_NUMBERS = 64, 2048
"""1 MiB: copies of page numbers under way at a time, and pages of one."""
_URGENT = -1
"""CUDA's priority of a stream whose work goes before others'; 0 is the usual one."""


class NumberBlocks:
    """Pinned memory that page numbers are copied to, allocated once and used again.

    To allocate such memory may hold the calling thread until the device is idle. Only
    where all blocks are in use, or the numbers are more than a block takes, one is
    added, and kept. One thread at a time.
    """

    def __init__(self) -> None:
        shape = (_NUM_BLOCKS, _BLOCK_NUMBERS)
        self._free = list(pinned_if_possible(shape, torch.int64))
        self._lent: list[tuple[torch.Tensor, weakref.ref[Int64s], Any]] = []

    def take(self, num_numbers: int) -> torch.Tensor:
        """Return a block, int64 [at least ``num_numbers``]; ``lent`` must follow."""
        lent, self._lent = self._lent, []
        for block, reader, ready in lent:
            # The device may still write what nobody wants any more.
            if reader() is None and ready.query():
                insort(self._free, block, key=len)
            else:
                self._lent.append((block, reader, ready))
        shortest = bisect_left(self._free, num_numbers, key=len)
        if shortest < len(self._free):
            return self._free.pop(shortest)
        length = 1 << (max(num_numbers, _BLOCK_NUMBERS) - 1).bit_length()
        return pinned_if_possible((length,), torch.int64)

    def lent(self, block: torch.Tensor, numbers: Int64s, ready: Any) -> None:
        """Take a block back once ``ready`` has passed and nobody has ``numbers``.

        Args:
            block: that was taken.
            numbers: what is read of it; views of it hold it as well.
            ready: an event behind the copy.
        """
        self._lent.append((block, weakref.ref(numbers), ready))


class CudaStreams:
    """Streams, events and pinned memory of one device.

    Args:
        device: which.
        forward_stream: on which SGLang's overlap scheduler runs the model; or None.
        engines: the copy engines; those of the CUDA driver if None.
        refused: told of buffers that CUDA did not pin, in bytes.
    """

    def __init__(
        self,
        device: torch.device,
        forward_stream: Any,
        *,
        engines: CopyEngines | None = None,
        refused: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self._device = device
        self._forward_stream = forward_stream
        self._engines = engines or CopyEngines(batch_function(), copy_function())
        self._refused = refused
        self._blocks = NumberBlocks()

    def new_stream(self, *, urgent: bool) -> Any:
        """Return a stream; an urgent one's kernels go first."""
        return torch.cuda.Stream(self._device, priority=_URGENT if urgent else 0)

    def new_event(self) -> Any:
        """Return an event whose waiter sleeps instead of spinning on a core."""
        return torch.cuda.Event(enable_timing=True, blocking=True)

    def current_stream(self) -> Any:
        """Return the calling thread's stream on this device."""
        return torch.cuda.current_stream(self._device)

    def engine_streams(self) -> Sequence[Any]:
        """Return the scheduler's stream and the forward's."""
        streams = [self.current_stream()]
        if self._forward_stream is not None:
            streams.append(self._forward_stream)
        return streams

    def pinned(self, num_bytes: int) -> UInt8s:
        """Allocate pinned memory, or pageable memory where CUDA pins no more.

        Only copies reach it, and those take either; no kernel reads it in place.
        """
        return pinned_buffer(num_bytes, self._not_pinned)

    def _not_pinned(self, num_bytes: int) -> None:
        self._refused(num_bytes)
        # A batch might be refused memory that a single copy takes.
        self._engines = self._engines.unbatched()

    def is_pinned(self, memory: UInt8s) -> bool:
        """Ask CUDA whether the device can use these addresses, in kernels as well."""
        is_known = bool(torch.from_numpy(memory).is_pinned())
        return is_known and reads_registered(self._device)

    def upload(self, stream: Any, numbers: Int64s) -> torch.Tensor:
        """Copy numbers to the device; the tensor belongs to the stream."""
        with torch.cuda.stream(stream):
            return torch.from_numpy(numbers).to(self._device, non_blocking=True)

    def download(self, numbers: torch.Tensor) -> tuple[Int64s, Any]:
        """Queue a copy to pinned memory on the calling thread's stream.

        The memory is used again once nobody has the array; on the engine's thread.
        """
        block = self._blocks.take(len(numbers))
        to = block[: len(numbers)]
        to.copy_(numbers, non_blocking=True)
        ready = self.current_stream().record_event(self.new_event())
        on_host: Int64s = to.numpy()
        self._blocks.lent(block, on_host, ready)
        return on_host, ready

    def choose(self, stream: Any, parts: Sequence[tuple[Any, Any]]) -> torch.Tensor:
        """Put chosen numbers behind each other; the tensor belongs to the stream."""
        with torch.cuda.stream(stream):
            return torch.cat(
                [
                    numbers if chosen is None else numbers[chosen]
                    for numbers, chosen in parts
                ]
            )


class CudaOps(CudaStreams):
    """``CopyOps`` over the tensors of an MHA pool.

    Args:
        pool: SGLang's; K and V of each layer as [slots, heads, dim].
        layout: shape of a page.
        forward_stream: on which SGLang's overlap scheduler runs the model; or None.
        engines: the copy engines; those of the CUDA driver if None.
        refused: told of buffers that CUDA did not pin, in bytes.
    """

    def __init__(
        self,
        pool: Any,
        layout: PageLayout,
        forward_stream: Any,
        *,
        engines: CopyEngines | None = None,
        refused: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        device = pool.k_buffer[0].device
        super().__init__(device, forward_stream, engines=engines, refused=refused)
        self._layout = layout
        parts = [
            [as_byte_pages(buffer, layout) for buffer in buffers]
            for buffers in zip(pool.k_buffer, pool.v_buffer, strict=True)
        ]
        # Views, held so that the addresses stay good.
        self._parts = parts
        self._addresses = [[part.data_ptr() for part in layer] for layer in parts]
        self._alignment = common_alignment(itertools.chain(*self._addresses))
        self._table = torch.tensor(
            self._addresses, dtype=torch.int64, device=self._device
        )
        self._half_pages = max(_HALF_BYTES // layout.page_bytes, 1)
        self._halves = torch.empty(
            (2, self._half_pages, layout.page_bytes),
            dtype=torch.uint8,
            device=self._device,
        )
        # Of pages, or of pieces of one layer at least.
        num_rows = self._half_pages * layout.num_layers
        self._half_rows = torch.arange(num_rows, device=self._device)
        self._staging: torch.Tensor | None = None

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""
        return self._layout

    @property
    def half_pages(self) -> int:
        """Pages in a half."""
        return self._half_pages

    @property
    def batched(self) -> bool:
        """Whether CUDA takes a batch of copies in one call."""
        return self._engines.batched

    def load_by_engines(
        self,
        stream: Any,
        layer: int,
        memory: UInt8s,
        rows: Int64s,
        first_byte: int,
        pages: Int64s,
    ) -> None:
        """Queue two copies a page: its keys and its values."""
        keys, values = self._addresses[layer]
        to, frm = part_addresses(
            keys,
            values,
            pages,
            memory.ctypes.data,
            memory.strides[0],
            rows,
            first_byte,
            self._layout.part_bytes,
        )
        # A plan's sources are complete and pinned until the load has ended.
        self._engines.submit(
            to, frm, self._layout.part_bytes, stream.cuda_stream, source_complete=True
        )

    def load_by_kernel(
        self,
        stream: Any,
        layer: int,
        memory: UInt8s,
        rows: torch.Tensor,
        first_byte: int,
        pages: torch.Tensor,
    ) -> None:
        """Queue one kernel that reads the rows in place."""
        from sgl_tiered_kernels.page_copy import triton as kernels

        with torch.cuda.stream(stream):
            kernels.scatter_parts(
                self._table[layer],
                pages,
                torch.from_numpy(memory),
                rows,
                first_byte,
                self._layout.part_bytes,
                alignment=self._alignment,
            )

    def gather(
        self, stream: Any, half: int, pages: torch.Tensor, begin: int, end: int
    ) -> None:
        """Queue one kernel that brings all layers of the pages together."""
        from sgl_tiered_kernels.page_copy import triton as kernels

        with torch.cuda.stream(stream):
            kernels.gather_parts(
                self._halves[half],
                self._half_rows[: end - begin],
                0,
                self._table.view(-1),
                pages[begin:end],
                self._layout.part_bytes,
                alignment=self._alignment,
            )

    def copy_out(self, stream: Any, half: int, memory: UInt8s, rows: Int64s) -> None:
        """Queue one copy a page, to its row."""
        width = self._layout.page_bytes
        first = self._halves[half].data_ptr()
        to = row_addresses(memory.ctypes.data, memory.strides[0], rows)
        frm = row_addresses(first, width, np.arange(len(rows), dtype=np.int64))
        # The gather is still under way: its bytes must be read in the stream's order.
        self._engines.submit(to, frm, width, stream.cuda_stream, source_complete=False)

    # Through device memory of our own: ``StagingOps``.

    @property
    def staging_bytes(self) -> int:
        """Bytes of a half: as many as of the stores'."""
        return self._half_pages * self._layout.page_bytes

    def bring(
        self,
        stream: Any,
        half: int,
        memory: UInt8s,
        rows: Int64s,
        first_byte: int,
        num_bytes: int,
    ) -> None:
        """Queue one copy a row."""
        first = self._staging_halves()[half].data_ptr()
        frm = row_addresses(memory.ctypes.data, memory.strides[0], rows, first_byte)
        to = row_addresses(first, num_bytes, np.arange(len(rows), dtype=np.int64))
        self._engines.submit(
            to, frm, num_bytes, stream.cuda_stream, source_complete=True
        )

    def scatter(
        self, stream: Any, half: int, layers: range, pages: torch.Tensor, part: slice
    ) -> None:
        """Queue one kernel that puts the pieces where they belong."""
        from sgl_tiered_kernels.page_copy import triton as kernels

        width = len(layers) * self._layout.layer_page_bytes
        count = part.stop - part.start
        pieces = self._staging_halves()[half][: count * width].view(count, width)
        with torch.cuda.stream(stream):
            kernels.scatter_parts(
                self._table[layers.start : layers.stop].view(-1),
                pages[part],
                pieces,
                self._half_rows[:count],
                0,
                self._layout.part_bytes,
                alignment=self._alignment,
            )

    def free_staging(self) -> None:
        """Give the halves back to torch."""
        self._staging = None

    def _staging_halves(self) -> torch.Tensor:
        if self._staging is None:
            self._staging = torch.empty(
                (2, self.staging_bytes), dtype=torch.uint8, device=self._device
            )
        return self._staging


def as_byte_pages(buffer: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """View [slots, heads, dim] as uint8 [pages, part_bytes]."""
    rows = buffer.view(buffer.shape[0], -1).view(torch.uint8)
    num_pages = buffer.shape[0] // layout.page_tokens
    return rows[: num_pages * layout.page_tokens].view(num_pages, layout.part_bytes)


def use_device_in_threads(device: torch.device) -> None:
    """Have the pipelines' threads, made from now on, work under this device.

    A new thread's is device 0: the driver would issue the copies of other ranks, and
    allocate their pinned memory, under that one's context.
    """
    prepare_threads(functools.partial(torch.cuda.set_device, device))


def numa_node(device: torch.device, sysfs: Path = _SYSFS) -> int | None:
    """Return the NUMA node next to a CUDA device; None where nobody says."""
    facts = torch.cuda.get_device_properties(device)
    try:
        where = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}"
        folder = sysfs / f"{where}:{facts.pci_device_id:02x}.0"
        node = int((folder / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    # -1: a machine of one node.
    return None if node < 0 else node


def reads_registered(device: torch.device | str) -> bool:
    """Return whether a device uses registered memory by the address the host has.

    Where it does not, kernels in place and batched copies would end in a fault; single
    copies work. Memory that CUDA has allocated itself is always used by its address.
    """
    where = _indexed(device)
    return where.type != "cuda" or _uses_host_pointers(where.index)


def _indexed(device: torch.device | str) -> torch.device:
    """Return a device with its number: the calling thread's where none is named."""
    where = torch.device(device)
    if where.type != "cuda" or where.index is not None:
        return where
    return torch.device("cuda", torch.cuda.current_device())


@functools.cache
def _uses_host_pointers(ordinal: int) -> bool:
    try:
        return device_attribute(_USES_HOST_POINTERS, ordinal) == 1
    except (OSError, RuntimeError) as problem:
        logger.warning("sgl-tiered: %s", problem)
        return False


def cuda_register(
    setting: str, device: torch.device | str
) -> Callable[[int, int], Callable[[], None]]:
    """Return a function that pins memory for CUDA and gives back how to unpin it.

    It raises ConfigError where CUDA pins no more, or the device would not use what is
    pinned by its address, which is what pinning is for here.

    Args:
        setting: the flag that says how much, for the sentence of its ``ConfigError``.
        device: that is to use it.
    """
    cudart = torch.cuda.cudart()
    where = _indexed(device)

    def register(address: int, num_bytes: int) -> Callable[[], None]:
        # Threads that pin begin at device 0, which may be another rank's.
        torch.cuda.set_device(where)
        if not reads_registered(where):
            raise ConfigError(
                setting,
                "the device cannot use registered memory by the host's addresses "
                f"(CUDA attribute {_USES_HOST_POINTERS} is not 1)",
                "only another device or driver changes that",
            )
        status = int(cudart.cudaHostRegister(address, num_bytes, 0))
        if status != 0:
            raise ConfigError(
                setting,
                f"CUDA cannot pin {num_bytes} bytes (error {status})",
                "give less, or raise the locked-memory limit (ulimit -l)",
            )

        def unregister() -> None:
            cudart.cudaHostUnregister(address)

        return unregister

    return register


def pinned_if_possible(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return host memory: pinned, or pageable where CUDA pins no more.

    A copy to the latter is right as well, but waits for all work before it.
    """
    with contextlib.suppress(RuntimeError):
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    return torch.empty(tuple(shape), dtype=dtype)


def pinned_buffer(
    num_bytes: int, refused: Callable[[int], None] = lambda num_bytes: None
) -> UInt8s:
    """Return a buffer for copies: pinned, or pageable where CUDA pins no more.

    Args:
        num_bytes: of it.
        refused: told how many bytes were not pinned.
    """
    buffer = pinned_if_possible((num_bytes,), torch.uint8)
    if not buffer.is_pinned():
        logger.warning(
            "sgl-tiered: CUDA cannot pin a buffer of %d bytes: raise the locked-memory "
            "limit (ulimit -l). Until then copies through it wait for each other.",
            num_bytes,
        )
        refused(num_bytes)
    numbers: UInt8s = buffer.numpy()
    return numbers


def pin_if_possible(
    register: Callable[[int, int], Callable[[], None]],
    device: torch.device | str,
    refused: Callable[[int], None] = lambda num_bytes: None,
) -> LenientRegister:
    """Return what pins memory, and leaves it pageable where CUDA refuses to.

    Args:
        register: pins, or raises ConfigError.
        device: of torch, whose next error would be that of the refusal.
        refused: told how many bytes of a region are not pinned in the end.
    """
    where = _indexed(device)

    def recover() -> None:
        # CUDA tells of it once more, to whoever launches the next kernel.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=where).add_(1)

    return LenientRegister(register, refused, recover)
