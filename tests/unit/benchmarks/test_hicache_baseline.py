"""HiCache's CPU form copies right, waits right, and is found by SGLang's loader."""

import importlib.metadata
import os
import threading
from types import SimpleNamespace

import pytest
from hicache_cpu.distribution import hicache_env

torch = pytest.importorskip("torch")

PAGE, LAYERS, SHAPE = 4, 3, (2, 8)


def make_pool(layout, seed=0):
    generator = torch.Generator().manual_seed(seed)
    host = (6 * PAGE, LAYERS, *SHAPE)
    if layout == "page_first_direct":
        host = (6, LAYERS, PAGE, *SHAPE)
    layers = [
        torch.randn((5 * PAGE, *SHAPE), generator=generator).to(torch.bfloat16)
        for _ in range(2 * LAYERS)
    ]
    return SimpleNamespace(
        layout=layout,
        page_size=PAGE,
        k_buffer=torch.zeros(host, dtype=torch.bfloat16),
        v_buffer=torch.zeros(host, dtype=torch.bfloat16),
        device_k_buffers=tuple(layers[:LAYERS]),
        device_v_buffers=tuple(layers[LAYERS:]),
    )


def tokens(*pages):
    return torch.cat([torch.arange(p * PAGE, (p + 1) * PAGE) for p in pages])


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_pages_come_back_elsewhere_unchanged(layout):
    """A page stored and loaded to another place is the same in every layer."""
    from hicache_cpu.copies import load_layer, store_layers

    pool = make_pool(layout)
    buffers = (*pool.device_k_buffers, *pool.device_v_buffers)
    before = [buffer.clone() for buffer in buffers]
    store_layers(pool, tokens(5, 0), tokens(3, 1))
    for layer in range(LAYERS):
        load_layer(pool, tokens(0, 5), tokens(2, 4), layer)
    for was, now in zip(before, buffers, strict=True):
        assert torch.equal(now[tokens(2, 4)], was[tokens(1, 3)])
        assert torch.equal(now[tokens(0, 1, 3)], was[tokens(0, 1, 3)])


def test_page_first_matches_sglangs_layout():
    """In page_first a token's layers lie side by side, as SGLang reads them."""
    from hicache_cpu.copies import store_layers

    pool = make_pool("page_first")
    store_layers(pool, tokens(2), tokens(1))
    for layer in range(LAYERS):
        stored = pool.v_buffer[tokens(2), layer]
        assert torch.equal(stored, pool.device_v_buffers[layer][tokens(1)])


def test_other_layouts_are_refused():
    """A layout that is not copied is refused, not copied wrongly."""
    from hicache_cpu.copies import load_layer

    pool = make_pool("page_first")
    pool.layout = "page_head"
    with pytest.raises(ValueError, match="page_head"):
        load_layer(pool, tokens(0), tokens(0), 0)


def test_waiting_stream_goes_on_when_the_event_is_recorded():
    """A layer waits for its own event, and new events count as recorded."""
    from hicache_cpu.asynchronous import Event, HostStreams

    event = Event()
    assert event.query()
    event.clear()
    passed = threading.Event()

    def compute():
        HostStreams.current_stream().wait_event(event)
        passed.set()

    thread = threading.Thread(target=compute)
    thread.start()
    assert not passed.wait(0.05)
    event.record()
    thread.join(10.0)
    assert passed.is_set()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_entry_point_is_found(tmp_path, asynchronous):
    """The generated folder gives SGLang's plugin group one entry point."""
    env = hicache_env(tmp_path, asynchronous)
    path = env["PYTHONPATH"].split(os.pathsep)
    found = [
        entry
        for dist in importlib.metadata.distributions(path=path[:1])
        for entry in dist.entry_points
    ]
    assert [e.value for e in found] == ["hicache_cpu.plugin:activate"]
    assert found[0].load().__name__ == "activate"
    assert env["HICACHE_CPU_ASYNC"] == ("1" if asynchronous else "0")
