"""The layer counter that SGLang's KV pool asks before it reads a layer."""

import threading

import numpy as np

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.pipelines.layerwise_load import LoadJob, LoadTicket, Segment
from sgl_tiered.pipelines.stream_pool import StreamPool
from sgl_tiered.serving.layer_counter import LayerCounter
from sgl_tiered.testing.fake_streams import FakeCopyOps, FakeDevice
from sgl_tiered.testing.fakes import FakeDevicePool
from tests.unit.pipelines.pipeline_support import load_plan

PATIENCE_S = 20.0
NUM_LAYERS = 3


def ticket():
    layout = PageLayout(num_layers=NUM_LAYERS, page_tokens=16, token_bytes=64)
    return LoadTicket([], FakeDevicePool(layout, 1), SystemClock())


def waits(counter, layer):
    """Return whether the layer is waited for, and let the waiter go."""
    passed = threading.Event()

    def wait():
        counter.wait_until(layer)
        passed.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, passed


def test_a_batch_without_loads_waits_for_nothing():
    """Where nothing is loaded no layer is waited for."""
    counter = LayerCounter(NUM_LAYERS)
    counter.wait_until(0)
    counter.add(ticket())
    counter.set_consumer(-1)
    counter.wait_until(NUM_LAYERS - 1)


def test_a_replay_of_one_graph_waits_for_the_whole_load():
    """SGLang's runner asks whether there is one, and waits for the last layer."""
    counter = LayerCounter(NUM_LAYERS)
    load = ticket()
    assert counter.consumer_index == -1
    counter.set_consumer(counter.add(load))
    assert counter.consumer_index == 0
    thread, passed = waits(counter, counter.num_layers - 1)
    for _ in range(NUM_LAYERS - 1):
        load._copy(by_waiter=False)
    assert not passed.wait(0.05)
    load._copy(by_waiter=False)
    assert passed.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    counter.set_consumer(-1)
    assert counter.consumer_index == -1


def test_a_layer_is_waited_for_until_it_arrives():
    """A consumer of a batch with loads passes a layer only once it is there."""
    counter = LayerCounter(NUM_LAYERS)
    load = ticket()
    assert counter.add(load) == 0
    counter.set_consumer(0)
    load._copy(by_waiter=False)
    counter.wait_until(0)
    thread, passed = waits(counter, 1)
    assert not passed.wait(0.05)
    load._copy(by_waiter=False)
    assert passed.wait(PATIENCE_S)
    thread.join(PATIENCE_S)


def test_on_a_device_with_streams_the_model_s_stream_waits():
    """The layer's event stands on the stream, and no copy has run by then."""
    layout = PageLayout(num_layers=NUM_LAYERS, page_tokens=16, token_bytes=64)
    device = FakeDevice(np.random.default_rng(0))
    pool = StreamPool(FakeCopyOps(device, layout, 4))
    rows = np.array([0])
    segment = Segment(np.ones((1, layout.slot_bytes), np.uint8), rows, rows)
    load = LoadTicket([LoadJob(load_plan([0]), (segment,), rows)], pool, SystemClock())
    counter = LayerCounter(NUM_LAYERS)
    counter.set_consumer(counter.add(load))
    load._copy(by_waiter=False)
    counter.wait_until(0)
    assert device.num_run == 0
    device.engine.run(lambda: None)
    while device.engine.queue:
        assert device.step()
    assert (pool._ops.layers[0, 0] == 1).all()


def test_a_failed_load_lets_everybody_go():
    """A load that broke does not leave the model waiting."""
    counter = LayerCounter(NUM_LAYERS)
    load = ticket()
    counter.set_consumer(counter.add(load))
    thread, passed = waits(counter, NUM_LAYERS - 1)
    load._finish("broke")
    assert passed.wait(PATIENCE_S)
    thread.join(PATIENCE_S)


def test_indices_grow_and_old_tickets_are_let_go():
    """Each batch gets the next index; a batch and its predecessor are kept."""
    counter = LayerCounter(NUM_LAYERS)
    indices = [counter.add(ticket()) for _ in range(4)]
    assert indices == [0, 1, 2, 3]
    assert counter.latest == 3
    counter.set_consumer(0)
    counter.wait_until(0)
    counter.set_consumer(2)
    _, passed = waits(counter, 0)
    assert not passed.wait(0.05)
