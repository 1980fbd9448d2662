"""The copies of the CUDA pool: the kernels interpreted, the copy engines stood in for.

On a machine with CUDA the same pages go through real streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sgl_tiered_kernels.page_copy.dma import CopyEngines  # noqa: E402

from sgl_tiered.core.clock import SystemClock  # noqa: E402
from sgl_tiered.engines.device import cuda_ops  # noqa: E402
from sgl_tiered.engines.device.cuda_ops import (  # noqa: E402
    CudaOps,
    CudaStreams,
    NumberBlocks,
    as_byte_pages,
    cuda_register,
    numa_node,
    pin_if_possible,
    pinned_if_possible,
    use_device_in_threads,
)
from sgl_tiered.engines.device.pools import make_device_pool, page_layout  # noqa: E402
from sgl_tiered.engines.device.tokens import page_numbers  # noqa: E402
from sgl_tiered.errors import ConfigError  # noqa: E402
from sgl_tiered.metrics.registry import MetricsRegistry  # noqa: E402
from sgl_tiered.pipelines.completions import CompletionQueue  # noqa: E402
from sgl_tiered.pipelines.layerwise_load import (  # noqa: E402
    LayerwiseLoader,
    LoadJob,
    Segment,
)
from sgl_tiered.pipelines.stream_pool import LoadWay, StreamPool  # noqa: E402
from sgl_tiered.pipelines.streams import BufferRing  # noqa: E402
from sgl_tiered.pipelines.worker import Worker, prepare_threads  # noqa: E402
from sgl_tiered.testing.fake_streams import FakeDevice, FakeEvent  # noqa: E402
from sgl_tiered.tiers.host import HostTier  # noqa: E402
from sgl_tiered.tiers.memory import MemoryRegion  # noqa: E402

NUM_LAYERS, NUM_PAGES, PAGE_TOKENS = 3, 10, 16
PATIENCE_S = 20.0


def make_pool(device):
    """Return buffers as SGLang's MHA pool has them: [slots, heads, head_dim]."""
    torch.manual_seed(0)
    shape = (NUM_PAGES * PAGE_TOKENS + 1, 2, 8)

    def buffers():
        return [
            torch.randn(shape).to(torch.bfloat16).to(device) for _ in range(NUM_LAYERS)
        ]

    return SimpleNamespace(k_buffer=buffers(), v_buffer=buffers())


def page_bytes(pool, layout, page):
    """Return a page as it has to lie in memory: uint8 [page_bytes]."""
    parts = [
        as_byte_pages(buffer, layout)[page]
        for layer in zip(pool.k_buffer, pool.v_buffer, strict=True)
        for buffer in layer
    ]
    return torch.cat(parts).cpu().numpy()


def host_engines():
    """Return copy engines over host addresses that copy at once."""

    def one(to, frm, num_bytes, stream):
        ctypes.memmove(to, frm, num_bytes)
        return 0

    return CopyEngines(None, one)


def check_on_host():
    """Send pages down, and up by both ways, without a device; raises on a difference.

    Needs TRITON_INTERPRET=1.
    """
    pool = make_pool("cpu")
    layout = page_layout(pool, PAGE_TOKENS)
    ops = CudaOps(pool, layout, None, engines=host_engines())
    stream = SimpleNamespace(cuda_stream=0)
    region = np.zeros((6, layout.slot_bytes), np.uint8)
    rows, pages, targets = np.array([4, 0, 2]), np.array([1, 5, 9]), np.array([7, 3, 0])
    wanted = [page_bytes(pool, layout, page) for page in pages]
    ops.gather(None, 1, torch.from_numpy(pages), 0, 3)
    ops.copy_out(stream, 1, region, rows)
    for row, whole in zip(rows, wanted, strict=True):
        np.testing.assert_array_equal(region[row, : layout.page_bytes], whole)
    assert not region[[1, 3, 5]].any()
    numbers = [torch.from_numpy(n) for n in (rows, targets)]
    for way in LoadWay:
        for buffer in pool.k_buffer + pool.v_buffer:
            buffer.zero_()
        for layer in range(NUM_LAYERS):
            first, layers = layout.key_offset(layer), range(layer, NUM_LAYERS)
            if way is LoadWay.KERNEL:
                ops.load_by_kernel(None, layer, region, numbers[0], first, numbers[1])
            elif way is LoadWay.ENGINES:
                ops.load_by_engines(stream, layer, region, rows, first, targets)
            elif layer == 0:
                width = layout.page_bytes
                ops.bring(stream, 1, region, rows[1:], first, width)
                ops.scatter(None, 1, layers, numbers[1], slice(1, 3))
                ops.bring(stream, 0, region, rows[:1], first, width)
                ops.scatter(None, 0, layers, numbers[1], slice(0, 1))
        for page, whole in zip(targets, wanted, strict=True):
            np.testing.assert_array_equal(page_bytes(pool, layout, page), whole)
        assert not page_bytes(pool, layout, 1).any()


@pytest.mark.parametrize(("num_skipped", "alignment"), [(0, 16), (4, 8), (1, 2)])
def test_kernels_are_told_what_divides_all_addresses(
    monkeypatch, num_skipped, alignment
):
    """One buffer that begins elsewhere is enough for them to take smaller steps."""
    from sgl_tiered_kernels.page_copy import triton as kernels

    told = []

    def record(*args, alignment):
        told.append(alignment)

    monkeypatch.setattr(kernels, "scatter_parts", record)
    monkeypatch.setattr(kernels, "gather_parts", record)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    pool = make_pool("cpu")
    last = pool.v_buffer[-1]
    longer = torch.zeros(num_skipped + last.numel(), dtype=last.dtype)
    pool.v_buffer[-1] = longer[num_skipped:].view(last.shape)
    layout = page_layout(pool, PAGE_TOKENS)
    ops = CudaOps(pool, layout, None, engines=host_engines())
    numbers, region = torch.zeros(1), np.zeros((1, layout.slot_bytes), np.uint8)
    ops.load_by_kernel(None, 0, region, numbers, 0, numbers)
    ops.gather(None, 0, numbers, 0, 1)
    assert told == [alignment, alignment]


class HostOps(CudaOps):
    """The product's copies where streams, events and pinned memory are played."""

    def __init__(self, pool, layout):
        super().__init__(pool, layout, None, engines=host_engines())
        self.device = FakeDevice(np.random.default_rng(0))

    def new_stream(self, *, urgent):
        stream = self.device.new_stream("load" if urgent else "store")
        stream.cuda_stream = 1
        return stream

    def new_event(self):
        return FakeEvent(self.device)

    def current_stream(self):
        return self.device.engine

    def pinned(self, num_bytes):
        return np.zeros(num_bytes, np.uint8)

    def is_pinned(self, memory):
        return True


@pytest.fixture
def launches(monkeypatch):
    """What notes launches of kernels, and streams that torch can be put on."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    folder = Path(__file__).parents[3] / "benchmarks/gpu"
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("launches")
    sys.modules.pop("launches", None)


def lend(blocks, event, num_numbers=3):
    """Take a block as a copy does; return it, and what its reader holds."""
    block = blocks.take(num_numbers)
    numbers = block[:num_numbers].numpy()
    blocks.lent(block, numbers, event)
    return block.data_ptr(), numbers


def test_numbers_are_copied_to_memory_that_is_there(monkeypatch):
    """Copies that follow each other ask for no memory; a burst does once."""
    asked = []
    real = cuda_ops.pinned_if_possible

    def allocate(shape, dtype):
        asked.append(tuple(shape))
        return real(shape, dtype)

    monkeypatch.setattr(cuda_ops, "pinned_if_possible", allocate)
    blocks, passed = NumberBlocks(), SimpleNamespace(query=lambda: True)
    num_blocks, block_numbers = asked.pop()
    for _ in range(3 * num_blocks):
        lend(blocks, passed)
    assert asked == []
    for _ in range(2):
        held = [lend(blocks, passed) for _ in range(num_blocks + 1)]
        assert len({at for at, _ in held}) == num_blocks + 1
        lend(blocks, passed, block_numbers + 1)
        held.clear()
    assert asked == [(block_numbers,), (2 * block_numbers,)]


def test_numbers_stay_while_they_are_read_or_written(monkeypatch):
    """Neither a reader, of a part too, nor a copy under way loses its memory."""
    monkeypatch.setattr(cuda_ops, "_NUM_BLOCKS", 1)
    blocks, is_over = NumberBlocks(), [False]
    event = SimpleNamespace(query=lambda: is_over[0])
    first, numbers = lend(blocks, event)
    part = numbers[1:]
    del numbers
    is_over[0] = True
    assert blocks.take(1).data_ptr() != first
    del part
    is_over[0] = False
    assert blocks.take(1).data_ptr() != first
    is_over[0] = True
    assert blocks.take(1).data_ptr() == first


@pytest.mark.parametrize("way", LoadWay)
@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize("page_tokens", [16, 1])
def test_a_start_compiles_what_a_server_launches(
    launches, monkeypatch, heads, page_tokens, way
):
    """Loads of any layer and region, known pages or not, and stores of any number."""
    from sgl_tiered_kernels.page_copy import triton as kernels

    shape = (NUM_PAGES * PAGE_TOKENS + 1, heads, 5)
    buffers = [[torch.zeros(shape) for _ in range(NUM_LAYERS)] for _ in "kv"]
    kv = SimpleNamespace(k_buffer=buffers[0], v_buffer=buffers[1])
    layout = page_layout(kv, page_tokens)
    monkeypatch.setattr(cuda_ops, "_HALF_BYTES", 3 * layout.page_bytes)
    ops = HostOps(kv, layout)
    # The last layers are fewer than come at once before.
    staged_bytes = 2 * layout.layer_page_bytes
    pool = StreamPool(ops, staging=ops, way=way, staged_bytes=staged_bytes)
    regions = [np.zeros((9, width), np.uint8) for width in (layout.slot_bytes, 8192)]

    def serve():
        for region, count in itertools.product(regions, (1, 2, 3, 7)):
            rows, pages = np.arange(count), np.arange(count) + 1
            later = pool.queue_pages(torch.from_numpy(pages))
            for layer in range(NUM_LAYERS):
                pool.load_layer(layer, region, rows, later[::-1]).finish()
            pool.store_pages(region, rows, pages, pool.mark())

    def told(run):
        return {one.key for one in launches.launches_of(kernels, run)}

    ready = told(lambda: pool.warm(np.array([1])))
    # Where pages are no multiple of 16 bytes, second halves begin at an odd place.
    assert len(ready) == (2 if layout.page_bytes % 16 == 0 else 4)
    served = told(serve)
    assert served <= ready
    if way is LoadWay.STAGED:
        # Which of them the others need is known once they have been measured.
        assert served == ready


def test_pages_survive_both_ways_of_the_copies():
    """Under TRITON_INTERPRET=1 (read at import, so in a process of its own)."""
    done = subprocess.run(
        [sys.executable, __file__],
        env={"TRITON_INTERPRET": "1", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done"]


@pytest.fixture
def own_threads():
    """Lets threads be prepared in a test."""
    yield
    prepare_threads(None)


@pytest.mark.usefixtures("own_threads")
def test_threads_take_the_device_of_the_pool_before_their_first_job(monkeypatch):
    """Those of each worker made from then on, and each thread for itself."""
    chosen = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: chosen.append((threading.current_thread().name, str(device))),
    )
    use_device_in_threads(torch.device("cuda:1"))
    seen = []
    worker = Worker(
        "t",
        lambda job: seen.append(len(chosen)),
        lambda job, error: None,
        num_threads=2,
    )
    for job in range(4):
        worker.try_put(job)
    assert worker.drain(PATIENCE_S)
    worker.close(PATIENCE_S)
    assert sorted(chosen) == [("t-0", "cuda:1"), ("t-1", "cuda:1")]
    assert min(seen) >= 1


@pytest.mark.gpu
@pytest.mark.usefixtures("own_threads")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")
def test_a_thread_of_a_second_rank_works_under_its_device():
    """The current device of a worker's thread is the one of its pool."""
    use_device_in_threads(torch.device("cuda:1"))
    seen = []
    worker = Worker(
        "t", lambda job: seen.append(torch.cuda.current_device()), lambda job, error: 0
    )
    worker.try_put(0)
    assert worker.drain(PATIENCE_S)
    worker.close(PATIENCE_S)
    assert seen == [1]


@pytest.fixture
def pinned_region():
    """Rows of ordinary memory that CUDA has pinned, as the host tier's are."""
    region = np.zeros((NUM_PAGES, 4096), np.uint8)
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(region.ctypes.data, region.nbytes, 0)) == 0
    yield region
    cudart.cudaHostUnregister(region.ctypes.data)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("way", LoadWay)
def test_pages_survive_the_device(pinned_region, pinned, way):
    """Stored pages come back bit for bit, from pinned and from ordinary memory."""
    pool = make_pool("cuda")
    layout = page_layout(pool, PAGE_TOKENS)
    ops = CudaOps(pool, layout, torch.cuda.Stream())
    device = StreamPool(ops, staging=ops, way=way)
    region = pinned_region if pinned else np.zeros((NUM_PAGES, 4096), np.uint8)
    rows, pages, targets = np.array([4, 0, 2]), np.array([1, 5, 9]), np.array([7, 3, 0])
    wanted = [page_bytes(pool, layout, page) for page in pages]
    device.store_pages(region, rows, pages, device.mark())
    for row, whole in zip(rows, wanted, strict=True):
        np.testing.assert_array_equal(region[row, : layout.page_bytes], whole)
    arrivals = [
        device.load_layer(layer, region, rows, targets, after=device.mark())
        for layer in range(NUM_LAYERS)
    ]
    assert all(arrival.finish() > 0.0 for arrival in arrivals)
    for page, whole in zip(targets, wanted, strict=True):
        np.testing.assert_array_equal(page_bytes(pool, layout, page), whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("way", LoadWay)
def test_nothing_is_compiled_after_a_start(monkeypatch, pinned_region, way):
    """Triton's own hook sees no kernel that is new, in loads and in stores."""
    from triton import knobs

    kv = make_pool("cuda")
    layout = page_layout(kv, PAGE_TOKENS)
    ops = CudaOps(kv, layout, torch.cuda.Stream())
    device = StreamPool(ops, staging=ops, way=way)
    device.warm(np.array([1]))
    compiled = []

    def hook(**told):
        compiled.append(told["repr"])
        return False

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", hook)
    for count in (1, 2, 3):
        rows, pages = np.arange(count), np.arange(count) + 2
        queued = device.queue_pages(torch.from_numpy(pages).cuda())
        device.store_pages(pinned_region, rows, queued, device.mark())
        for layer in range(NUM_LAYERS):
            device.load_layer(layer, pinned_region, rows, pages).finish()
            chosen = queued[np.arange(count)[::-1]]
            device.load_layer(layer, pinned_region, rows, chosen).finish()
    assert compiled == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_device_says_whether_it_uses_registered_memory():
    """The driver knows the attribute; 0 and 1 are both right."""
    assert cuda_ops.device_attribute(91, torch.cuda.current_device()) in (0, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_forward_on_its_stream_reads_what_was_loaded(pinned_region):
    """Layer by layer, with no wait of a thread between the load and the reads."""
    from sgl_tiered.core.plans import LoadPlan

    pool = make_pool("cuda")
    layout = page_layout(pool, PAGE_TOKENS)
    forward = torch.cuda.Stream()
    device = make_device_pool(pool, layout, forward)
    rows, pages = np.arange(4), np.array([8, 2, 6, 1])
    pinned_region[:] = np.random.default_rng(0).integers(0, 256, pinned_region.shape)
    loader = LayerwiseLoader(
        device, CompletionQueue(), SystemClock(), MetricsRegistry()
    )
    plan = LoadPlan(
        plan_id=1,
        first_page=0,
        pages=np.arange(4, dtype=np.int32),
        tiers=np.ones(4, np.uint8),
        addresses=rows,
        checksums=np.zeros(4, np.uint64),
        predicted_s=0.0,
    )
    job = LoadJob(plan, (Segment(pinned_region, rows, np.arange(4)),), pages)
    numbers = torch.from_numpy(pages).cuda()
    torch.cuda.synchronize()
    for _ in range(20):
        for buffer in pool.k_buffer + pool.v_buffer:
            buffer.zero_()
        torch.cuda.synchronize()
        ticket = loader.submit([job])
        with torch.cuda.stream(forward):
            read = []
            for layer in range(NUM_LAYERS):
                ticket.wait_layer(layer)
                read += [
                    as_byte_pages(buffers[layer], layout)[numbers].clone()
                    for buffers in (pool.k_buffer, pool.v_buffer)
                ]
        assert ticket.wait(PATIENCE_S)
        forward.synchronize()
        whole = torch.cat(read, dim=1).cpu().numpy()
        np.testing.assert_array_equal(whole, pinned_region[:4, : layout.page_bytes])
    loader.close(PATIENCE_S)


def keep_busy(stream, seconds):
    """Queue that the device spins for so long, by how fast it was seen to spin."""
    cycles = 10**7
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        torch.cuda._sleep(int(1e3 * seconds / begin.elapsed_time(end) * cycles))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("way", LoadWay)
def test_nobody_waits_for_a_forward_to_learn_where_pages_lie(pinned_region, way):
    """Slots come of work that is queued behind a long forward; loads and stores too."""
    pool = make_pool("cuda")
    layout = page_layout(pool, PAGE_TOKENS)
    schedule, forward = torch.cuda.Stream(), torch.cuda.Stream()
    ops = CudaOps(pool, layout, forward)
    device = StreamPool(ops, staging=ops, way=way)
    rows, pages = np.array([4, 0, 2]), np.array([1, 5, 9])
    pinned_region[:] = np.random.default_rng(0).integers(0, 256, pinned_region.shape)
    slots = torch.from_numpy(np.repeat(pages * PAGE_TOKENS, 2)).cuda()
    # What is compiled or allocated at its first use is so now.
    device.load_layer(0, pinned_region, rows, pages).finish()
    device.store_pages(
        np.zeros((3, 4096), np.uint8), np.arange(3), pages, device.mark()
    )

    def queue():
        with torch.cuda.stream(schedule):
            schedule.wait_stream(forward)
            numbers = page_numbers(device, slots[::2].clone(), PAGE_TOKENS)
            chosen = numbers[np.array([0, 2])]
            mark = device.mark()
        arrivals = [
            device.load_layer(layer, pinned_region, rows[[0, 2]], chosen, after=mark)
            for layer in range(NUM_LAYERS)
        ]
        with torch.cuda.stream(forward):
            for arrival in arrivals:
                arrival.order()
            return chosen, arrivals, forward.record_event()

    # How long queueing takes here, with nothing to wait for: a forward that is to last
    # longer has to know. The first time compiles.
    for _ in range(2):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        _, arrivals, _ = queue()
        took_s = time.perf_counter() - began_s
        assert all(arrival.finish() > 0.0 for arrival in arrivals)
    for buffer in pool.k_buffer + pool.v_buffer:
        buffer.zero_()
    keep_busy(forward, 20 * took_s + 0.2)
    chosen, arrivals, after = queue()
    # Everything is queued, and the forward before it has not ended.
    assert not after.query()
    assert all(arrival.finish() > 0.0 for arrival in arrivals)
    for row, page in ((4, 1), (2, 9)):
        whole = pinned_region[row, : layout.page_bytes]
        np.testing.assert_array_equal(page_bytes(pool, layout, page), whole)
    back = np.zeros((3, 4096), np.uint8)
    device.store_pages(back, np.arange(2), chosen, device.mark())
    np.testing.assert_array_equal(
        back[:2, : layout.page_bytes], pinned_region[[4, 2], : layout.page_bytes]
    )


if __name__ == "__main__":
    check_on_host()
    print("done")


def test_memory_that_cuda_does_not_pin_is_used_as_it_is(caplog):
    """A start goes on with one sentence and a count of the bytes."""
    refused, undone = [], []

    def refuse(address, num_bytes):
        raise ConfigError("--tiered-host-size", "CUDA cannot pin it", "give less")

    pin = pin_if_possible(refuse, "cpu", refused.append)
    tier = HostTier(4096, 10, register=pin)
    tier.region[:] = 7
    tier.close()
    assert refused == [40960]
    (record,) = caplog.records
    assert "--tiered-host-size: CUDA cannot pin it" in record.getMessage()

    def take(address, num_bytes):
        return lambda: undone.append(num_bytes)

    HostTier(4096, 10, register=pin_if_possible(take, "cpu", refused.append)).close()
    assert (refused, undone) == ([40960], [40960])


class Driver:
    """CUDA, as far as host memory goes, with an attribute of the device.

    Attributes:
        registered: addresses and bytes.
        devices: that of the thread, at each of them; None where it has set none.
        asked: attributes and devices that were asked for.
    """

    def __init__(self, monkeypatch, attribute):
        self.registered, self.devices, self.asked = [], [], []
        self._attribute, self._threads = attribute, threading.local()
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(cuda_ops, "device_attribute", self.device_attribute)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)

    def device_attribute(self, number, ordinal):
        self.asked.append((number, ordinal))
        if isinstance(self._attribute, Exception):
            raise self._attribute
        return self._attribute

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        self.registered.append((address, num_bytes))
        self.devices.append(getattr(self._threads, "device", None))
        return 0

    def set_device(self, device):
        self._threads.device = device.index

    def cudaHostUnregister(self, address):  # noqa: N802
        self.registered = [one for one in self.registered if one[0] != address]


@pytest.fixture(autouse=True)
def unasked():
    """Attributes are asked for anew in each test."""
    cuda_ops._uses_host_pointers.cache_clear()
    yield
    cuda_ops._uses_host_pointers.cache_clear()


@pytest.mark.parametrize(
    "attribute", [0, RuntimeError("CUDA error 1"), OSError("none")]
)
def test_memory_that_the_device_cannot_use_in_place_is_left_alone(
    monkeypatch, caplog, attribute
):
    """Regions of a flag: one sentence for all of them, and a count of their bytes."""
    driver, refused = Driver(monkeypatch, attribute), []
    device = torch.device("cuda:1")
    register = cuda_register("--tiered-host-size", device)
    pin = pin_if_possible(register, "cpu", refused.append)
    regions = [MemoryRegion(rows, 4096, register=pin) for rows in (10, 3)]
    for region in regions:
        assert not CudaStreams(device, None, engines=host_engines()).is_pinned(
            region.array
        )
        region.array[:] = 7
        region.close()
    assert driver.registered == []
    assert driver.asked == [(91, 1)]
    assert refused == [40960, 12288]
    said = [record.getMessage() for record in caplog.records]
    # Before it, why the driver did not tell.
    assert len(said) == (1 if attribute == 0 else 2)
    assert "--tiered-host-size: the device cannot use registered memory" in said[-1]
    assert "pinned buffers" in said[-1]


def test_memory_that_the_device_can_use_in_place_is_registered(monkeypatch, caplog):
    """The device is asked once, also where it is named without a number."""
    driver, refused = Driver(monkeypatch, 1), []
    register = cuda_register("--tiered-host-size", "cuda")
    pin = pin_if_possible(register, "cpu", refused.append)
    regions = [MemoryRegion(rows, 4096, register=pin) for rows in (10, 3)]
    assert [size for _, size in driver.registered] == [40960, 12288]
    device = torch.device("cuda:0")
    streams = CudaStreams(device, None, engines=host_engines())
    assert streams.is_pinned(regions[0].array)
    for region in regions:
        region.close()
    assert driver.registered == refused == []
    assert driver.asked == [(91, 0)]
    assert not caplog.records


def test_threads_that_pin_do_so_for_the_device_of_their_rank(monkeypatch):
    """A new thread's device is 0: its context is not to be made by other ranks."""
    driver = Driver(monkeypatch, 1)
    register = cuda_register("--tiered-host-size", torch.device("cuda:1"))
    region = MemoryRegion(9, 4096, register=register, part_bytes=4096)
    assert driver.devices == [1] * 9
    region.close()


@pytest.fixture
def nothing_pins(monkeypatch):
    """CUDA refuses to pin host memory."""
    make = torch.empty

    def empty(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: OS call failed or operation not supported")
        return make(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)


def test_a_pool_starts_and_grows_without_pinned_memory(nothing_pins, caplog):
    """With a sentence and a count; copies are calls of their own, which take it."""
    batches, refused = [], []
    pool = make_pool("cpu")
    layout = page_layout(pool, PAGE_TOKENS)

    def one(to, frm, num_bytes, stream):
        ctypes.memmove(to, frm, num_bytes)
        return 0

    engines = CopyEngines(lambda *batch: batches.append(batch) or 1, one)
    ops = CudaOps(pool, layout, None, engines=engines, refused=refused.append)
    ring = BufferRing(ops.pinned, 2, 512)
    assert refused == [512, 512]
    buffer = ring.lend(2 * layout.layer_page_bytes).reshape(2, -1)
    assert refused[2:] == [2 * layout.layer_page_bytes]
    assert "CUDA cannot pin a buffer of 512 bytes" in caplog.text
    buffer[:] = 7
    stream, rows = SimpleNamespace(cuda_stream=1), np.array([0, 1])
    ops.load_by_engines(stream, 1, buffer, rows, 0, np.array([3, 4]))
    first = layout.key_offset(1)
    loaded = page_bytes(pool, layout, 4)[first : first + layout.layer_page_bytes]
    assert (loaded == 7).all()
    assert not batches


def test_what_comes_from_the_device_needs_no_pinned_memory(nothing_pins):
    """Where no more can be had: page numbers come later, and no step ends in it."""
    found = pinned_if_possible((3, 2), torch.int64)
    assert (tuple(found.shape), found.dtype) == ((3, 2), torch.int64)


def test_the_node_beside_a_device_is_read_from_its_slot(monkeypatch, tmp_path):
    """By its PCI address; a machine of one node, or one that does not say, has none."""

    class Facts:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0xAF, 1

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Facts)
    device = torch.device("cuda", 3)
    assert numa_node(device, tmp_path) is None
    folder = tmp_path / "0000:af:01.0"
    folder.mkdir()
    for text, node in (("1\n", 1), ("-1\n", None), ("x\n", None)):
        (folder / "numa_node").write_text(text)
        assert numa_node(device, tmp_path) == node
