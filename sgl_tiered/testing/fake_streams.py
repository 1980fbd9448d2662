"""A device whose queued work runs late, and in any order that streams allow.

``FakeDevice`` runs nothing by itself: only when a thread blocks on an event, or a test
asks for steps. Each time it picks, by a generator of the test's, one of the streams
whose next piece of work may run. A wait that was forgotten, or a buffer that was used
again too early, then shows as wrong bytes for some seed. ``FakeCopyOps`` are the copies
of ``StreamPool`` on such a device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.layout import PageLayout

__all__ = [
    "FakeActOps",
    "FakeCopyOps",
    "FakeDevice",
    "FakeEvent",
    "FakeLayerOps",
    "FakeStream",
    "fake_kv",
]

_WEIGHT_STEPS = 16

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]


class FakeEvent:
    """An event: passed once the device has run its latest record."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.num_recorded = 0
        self.num_passed = 0
        self.at_ms = 0.0
        self.error = ""

    def query(self) -> bool:
        """Return whether it has passed; true where it was never recorded."""
        return self.num_passed >= self.num_recorded

    def synchronize(self) -> None:
        """Let the device run until it has passed; raise what failed before it."""
        self._device.run_until(self.query)
        if self.error:
            raise RuntimeError(self.error)

    def elapsed_time(self, end_event: Any) -> float:
        """Return the device's milliseconds between two events that have passed."""
        assert self.query(), "an event that has not passed has no time"
        assert end_event.query(), "an event that has not passed has no time"
        return float(end_event.at_ms - self.at_ms)


class FakeStream:
    """A queue of work in order."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self._device = device
        self.name = name
        self.queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self.error = ""

    def run(self, work: Callable[[], None], cost_ms: float = 0.0) -> None:
        """Queue work; where it raises, later events of this stream tell."""

        def execute() -> None:
            self._device.now_ms += cost_ms
            try:
                work()
            except RuntimeError as problem:
                self.error = str(problem)

        self._put(lambda: True, execute)

    def wait_event(self, event: FakeEvent) -> None:
        """Hold later work back until the record made so far has passed."""
        wanted = event.num_recorded
        self._put(lambda: event.num_passed >= wanted, lambda: None)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Record an event behind what is queued."""
        recorded = FakeEvent(self._device) if event is None else event
        recorded.num_recorded += 1
        number = recorded.num_recorded

        def execute() -> None:
            recorded.num_passed = number
            recorded.at_ms = self._device.now_ms
            recorded.error = self.error

        self._put(lambda: True, execute)
        return recorded

    def synchronize(self) -> None:
        """Let the device run until this stream is empty; raise what failed."""
        self._device.run_until(lambda: not self.queue)
        if self.error:
            raise RuntimeError(self.error)

    def _put(self, ready: Callable[[], bool], execute: Callable[[], None]) -> None:
        with self._device.lock:
            self.queue.append((ready, execute))


class FakeDevice:
    """Streams, and the adversary that picks which of them goes on.

    Args:
        rng: picks; equal seeds give equal orders for equal work.
        number: of the device; a thread that has entered none works under device 0.

    Attributes:
        engine: the stream of the engine's forward.
        issued: for each piece of work that ops were asked for, the name of the thread
            and the device that it works under.
        blocked: names of the threads that had to wait for the device, each time.
        now_ms: the time on the device: the sum of what the work has cost.
        num_run: pieces of work that have run.
        going: set at first; while it is clear the device runs nothing, and threads
            that block on an event wait for it.
    """

    _entered = threading.local()

    def __init__(self, rng: np.random.Generator, number: int = 0) -> None:
        self._rng = rng
        self.number = number
        self.issued: list[tuple[str, int]] = []
        self.blocked: list[str] = []
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.now_ms = 0.0
        self.num_run = 0
        self.going = threading.Event()
        self.going.set()
        self.engine = self.new_stream("engine")

    def enter(self) -> None:
        """Have the calling thread work under this device from now on."""
        self._entered.number = self.number

    def issue(self) -> None:
        """Note that the calling thread asks the device for something."""
        number = getattr(self._entered, "number", 0)
        self.issued.append((threading.current_thread().name, number))

    def new_stream(self, name: str) -> FakeStream:
        """Return another stream."""
        stream = FakeStream(self, name)
        self.streams.append(stream)
        return stream

    def chance(self) -> bool:
        """Return true half of the time."""
        with self.lock:
            return bool(self._rng.integers(2))

    def step(self) -> bool:
        """Run one piece of work that may run now; False where there is none."""
        with self.lock:
            able = [s for s in self.streams if s.queue and s.queue[0][0]()]
            if not able:
                return False
            stream = able[int(self._rng.integers(len(able)))]
            _, execute = stream.queue.popleft()
            execute()
            self.num_run += 1
            return True

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Step until ``reached``.

        Raises:
            AssertionError: nothing can run any more: the streams wait for each other.
        """
        if reached():
            # Also of a device that runs nothing.
            return
        self.blocked.append(threading.current_thread().name)
        while True:
            self.going.wait()
            with self.lock:
                if reached():
                    return
                assert self.step(), "the streams wait for each other"

    def settle(self) -> None:
        """Run everything that is queued."""
        self.run_until(lambda: not any(stream.queue for stream in self.streams))


class FakeCopyOps:
    """The copies of a ``StreamPool``, on arrays.

    Attributes:
        device: the streams.
        layers: uint8 [num_layers, num_pages, layer_page_bytes], keys then values.
        fail_layer: the copy of this layer fails on the device; -1 for none.
        refuse_layer: the copy of this layer cannot even be queued; -1 for none.
        fail_store: copies from the device fail there while True.
        engines_ms, kernel_ms, staged_ms: what the load of a layer costs, by each way.
        unpinned: arrays (by identity) that the device cannot reach.
        pins: the device can reach host memory at all.
        kernels: names of the kernels that were launched.
    """

    def __init__(
        self,
        device: FakeDevice,
        layout: PageLayout,
        num_pages: int,
        *,
        half_pages: int = 2,
    ) -> None:
        self.device = device
        self._layout = layout
        self._half_pages = half_pages
        self.layers: UInt8s = np.zeros(
            (layout.num_layers, num_pages, layout.layer_page_bytes), np.uint8
        )
        self._halves = np.zeros((2, half_pages, layout.page_bytes), np.uint8)
        self._staging = np.full((2, self.staging_bytes), 0xEE, np.uint8)
        self.fail_layer = -1
        self.refuse_layer = -1
        self.fail_store = False
        self.engines_ms = 1.0
        self.kernel_ms = 1.0
        self.staged_ms = 1.0
        self.unpinned: list[UInt8s] = []
        self.pins = True
        self.kernels: list[str] = []

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""
        return self._layout

    @property
    def half_pages(self) -> int:
        """Pages in a half."""
        return self._half_pages

    def new_stream(self, *, urgent: bool) -> FakeStream:
        """Return another stream of the device."""
        return self.device.new_stream("load" if urgent else "store")

    def new_event(self) -> FakeEvent:
        """Return an event."""
        return FakeEvent(self.device)

    def current_stream(self) -> FakeStream:
        """Return the engine's stream: only it asks."""
        return self.device.engine

    def engine_streams(self) -> Sequence[FakeStream]:
        """Return the engine's stream."""
        return [self.device.engine]

    def pinned(self, num_bytes: int) -> UInt8s:
        """Allocate memory full of what nobody should read."""
        self.device.issue()
        return np.full(num_bytes, 0xEE, np.uint8)

    def is_pinned(self, memory: UInt8s) -> bool:
        """Return whether it was not named as unpinned."""
        return self.pins and not any(memory is array for array in self.unpinned)

    def upload(self, stream: FakeStream, numbers: Int64s) -> Int64s:
        """Read the numbers when the device comes to it."""
        self.device.issue()
        on_device = np.full(len(numbers), -1, np.int64)

        def work() -> None:
            on_device[:] = numbers

        stream.run(work)
        return on_device

    def download(self, numbers: Int64s) -> tuple[Int64s, FakeEvent]:
        """Copy the numbers to the host when the engine's stream comes to it."""
        self.device.issue()
        on_host = np.full(len(numbers), -1, np.int64)

        def work() -> None:
            on_host[:] = numbers

        self.device.engine.run(work)
        return on_host, self.device.engine.record_event()

    def choose(
        self, stream: FakeStream, parts: Sequence[tuple[Int64s, Int64s | None]]
    ) -> Int64s:
        """Read numbers and positions when the device comes to it."""
        self.device.issue()
        self.kernels.append("choose")
        lengths = [len(n if chosen is None else chosen) for n, chosen in parts]
        found = np.full(sum(lengths), -1, np.int64)

        def work() -> None:
            found[:] = np.concatenate(
                [n if chosen is None else n[chosen] for n, chosen in parts]
            )

        stream.run(work)
        return found

    def load_by_engines(
        self,
        stream: FakeStream,
        layer: int,
        memory: UInt8s,
        rows: Int64s,
        first_byte: int,
        pages: Int64s,
    ) -> None:
        """Copy; the addresses are taken now, the bytes now or later."""
        self.device.issue()
        rows, pages = rows.copy(), pages.copy()
        source = memory
        if self.device.chance():
            # The copy engines may read a complete source before its turn.
            source = memory.copy()
        self._load(
            stream, layer, source, rows, first_byte, pages, cost_ms=self.engines_ms
        )

    def load_by_kernel(
        self,
        stream: FakeStream,
        layer: int,
        memory: UInt8s,
        rows: Int64s,
        first_byte: int,
        pages: Int64s,
    ) -> None:
        """Copy; bytes and numbers are read when the device comes to it."""
        self.device.issue()
        self.kernels.append("load")
        self._load(
            stream, layer, memory, rows, first_byte, pages, cost_ms=self.kernel_ms
        )

    def gather(
        self, stream: FakeStream, half: int, pages: Int64s, begin: int, end: int
    ) -> None:
        """Copy pages to a half."""
        self.device.issue()
        self.kernels.append(f"gather {half}")

        def work() -> None:
            chosen = self.layers[:, pages[begin:end]]
            whole = chosen.transpose(1, 0, 2).reshape(end - begin, -1)
            self._halves[half, : end - begin] = whole

        stream.run(work)

    def copy_out(
        self, stream: FakeStream, half: int, memory: UInt8s, rows: Int64s
    ) -> None:
        """Copy from a half to memory."""
        self.device.issue()
        rows = rows.copy()

        def work() -> None:
            if self.fail_store:
                raise RuntimeError("the store was told to fail")
            memory[rows, : self._layout.page_bytes] = self._halves[half, : len(rows)]

        stream.run(work)

    @property
    def staging_bytes(self) -> int:
        """Bytes of a half that loads go through."""
        return self._half_pages * self._layout.page_bytes

    def bring(
        self,
        stream: FakeStream,
        half: int,
        memory: UInt8s,
        rows: Int64s,
        first_byte: int,
        num_bytes: int,
    ) -> None:
        """Copy to a half; the bytes are read now, or when the device comes to it."""
        self.device.issue()
        rows = rows.copy()
        source = memory.copy() if self.device.chance() else memory
        end = first_byte + num_bytes

        def work() -> None:
            pieces = source[rows, first_byte:end]
            self._staging[half, : pieces.size] = pieces.reshape(-1)

        stream.run(work)

    def scatter(
        self, stream: FakeStream, half: int, layers: range, pages: Int64s, part: slice
    ) -> None:
        """Copy from a half; bytes and numbers are read when the device comes to it."""
        self.device.issue()
        self.kernels.append("scatter")
        if self.refuse_layer in layers:
            raise RuntimeError(f"layer {self.refuse_layer} was refused")
        width = self._layout.layer_page_bytes
        count = part.stop - part.start

        def work() -> None:
            if self.fail_layer in layers:
                raise RuntimeError(f"layer {self.fail_layer} was told to fail")
            num_bytes = count * len(layers) * width
            pieces = self._staging[half, :num_bytes].reshape(count, len(layers), width)
            self.layers[layers.start : layers.stop, pages[part]] = pieces.swapaxes(0, 1)

        stream.run(work, self.staged_ms * len(layers))

    def free_staging(self) -> None:
        """Lose what it held."""
        self._staging[:] = 0xEE

    def _load(
        self,
        stream: FakeStream,
        layer: int,
        memory: UInt8s,
        rows: Int64s,
        first_byte: int,
        pages: Int64s,
        *,
        cost_ms: float,
    ) -> None:
        if layer == self.refuse_layer:
            raise RuntimeError(f"layer {layer} was refused")
        end = first_byte + self._layout.layer_page_bytes

        def work() -> None:
            if layer == self.fail_layer:
                raise RuntimeError(f"layer {layer} was told to fail")
            self.layers[layer, pages] = memory[rows, first_byte:end]

        stream.run(work, cost_ms)


class FakeLayerOps(FakeCopyOps):
    """Copies of layer-pages of one tensor, which all layers share.

    Attributes:
        tensor: uint8 [num_physical, layer_page_bytes], keys then values.
    """

    def __init__(
        self, device: FakeDevice, layout: PageLayout, num_physical: int
    ) -> None:
        super().__init__(device, layout, num_physical)
        width = layout.layer_page_bytes
        self.tensor: UInt8s = np.full((num_physical, width), 0xEE, np.uint8)
        # A copy names a layer and a page; every layer is a view of the one tensor.
        self.layers = np.lib.stride_tricks.as_strided(
            self.tensor,
            (layout.num_layers, num_physical, width),
            (0, *self.tensor.strides),
        )

    def store_by_engines(
        self,
        stream: FakeStream,
        layer: int,
        memory: UInt8s,
        rows: Int64s,
        first_byte: int,
        pages: Int64s,
    ) -> None:
        """Copy to rows of memory; the bytes are read when the device comes to it."""
        del layer
        rows, pages = rows.copy(), pages.copy()
        end = first_byte + self.layout.layer_page_bytes

        def work() -> None:
            if self.fail_store:
                raise RuntimeError("the store was told to fail")
            memory[rows, first_byte:end] = self.tensor[pages]

        stream.run(work)


class FakeActOps(FakeLayerOps):
    """Copies of places of an act area, and rebuilds into a tensor of layer-pages.

    Attributes:
        fail_rebuild: rebuilds fail on the device while True.
        refuse_weights: copies of weights cannot even be queued while True.
        slots: int64 [2], the layer whose weights are in each slot; -1 for none's.
    """

    def __init__(
        self,
        device: FakeDevice,
        layout: PageLayout,
        num_places: int,
        kv: FakeLayerOps,
    ) -> None:
        super().__init__(device, layout, num_places)
        self._kv = kv
        self.fail_rebuild = False
        self.refuse_weights = False
        self.slots: Int64s = np.full(2, -1, np.int64)

    def bring_weights(self, stream: FakeStream, layer: int, slot: int) -> int:
        """Copy a layer's weights, which are its number, piece by piece."""
        if self.refuse_weights:
            raise RuntimeError(f"the weights of layer {layer} were refused")

        def work(number: int) -> None:
            self.slots[slot] = number

        # While it is under way a slot holds nobody's; and weights are large.
        for _ in range(_WEIGHT_STEPS):
            stream.run(lambda: work(-1))
        stream.run(lambda: work(layer), cost_ms=0.5)
        return self.slots.itemsize

    def rebuild(
        self,
        stream: FakeStream,
        layer: int,
        numbers: Int64s,
        count: int,
        slot: int | None,
    ) -> None:
        """Rebuild; places, numbers and weights are read when the device comes to it."""
        self.kernels.append(f"rebuild from {'weights' if slot is None else 'a slot'}")
        page_tokens, size = self.layout.page_tokens, self._kv.layout.token_bytes
        tensor = self._kv.tensor.reshape(-1, 2, page_tokens, size)

        def work() -> None:
            if self.fail_rebuild:
                raise RuntimeError("the rebuild was told to fail")
            rows, slots, positions = numbers.reshape(3, count)
            acts = self.tensor.reshape(-1, 2 * self.layout.token_bytes)[rows]
            pages, tokens = slots // page_tokens, slots % page_tokens
            number = layer if slot is None else int(self.slots[slot])
            keys, values = fake_kv(acts, number, positions, size)
            tensor[pages, 0, tokens], tensor[pages, 1, tokens] = keys, values

        stream.run(work, cost_ms=1.0)


def fake_kv(
    acts: UInt8s, layer: int, positions: Int64s, token_bytes: int
) -> tuple[UInt8s, UInt8s]:
    """Return keys and values that are made of activations, in place of a product.

    Args:
        acts: uint8 [n, act_bytes].
        layer: whose.
        positions: int64 [n].
        token_bytes: of keys, and of values.

    Returns:
        uint8 [n, token_bytes] each; every byte depends on all that is given.
    """
    sums = acts.astype(np.int64).sum(axis=1) + 17 * layer
    spread = acts[:, np.arange(token_bytes) % acts.shape[1]].astype(np.int64)
    values = (spread + sums[:, None]) % 256
    keys = (values + 31 * positions[:, None] + 1) % 256
    return keys.astype(np.uint8), values.astype(np.uint8)
