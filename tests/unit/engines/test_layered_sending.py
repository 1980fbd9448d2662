"""Pages on their way to a decode server: each layer from where it is, and it stays."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.engines.sglang.layered.sending import LayerSources
from sgl_tiered.layered.base import PassRequest
from sgl_tiered.serving.disagg.layers import send_layers
from sgl_tiered.serving.options import LayerKv
from tests.unit.layered.layered_support import Pool

LAYERS = Pool.LAYERS
EVERYTHING = np.ones(LAYERS, np.bool_)
LAYOUT = PageLayout(LAYERS, Pool.TOKENS, 64)
PART = LAYOUT.part_bytes
PHYSICAL = 26
ROOM = 77


class Rig:
    """A pool of layer-pages over memory of random bytes, and where it is sent."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.pool = Pool(PHYSICAL, 4)
        plan = LayerPlan(LAYOUT, Pool.PAGES - 1, PHYSICAL, 4, LayerKv())
        self.driver = LayerDriver(self.pool.manager, plan)

        def noise(*shape: int) -> np.ndarray:
            return rng.integers(0, 256, shape, dtype=np.uint8)

        self.keys, self.values = (noise(PHYSICAL + 1, PART) for _ in range(2))
        self.host = noise(Pool.PAGES, LAYOUT.slot_bytes)
        self.theirs = np.zeros((2, LAYERS, 32, PART), np.uint8)
        self.sources = LayerSources(
            SimpleNamespace(
                k_buffer=[torch.from_numpy(self.keys)],
                v_buffer=[torch.from_numpy(self.values)],
                region=SimpleNamespace(array=self.host),
            ),
            self.driver,
        )
        self.rc = 0
        self.pushed: list[int] = []

    def prefill(self, rid: str, num_tokens: int, first_page: int = 1) -> np.ndarray:
        """Compute a prompt of which nothing is retained; return its pages."""
        pages = np.arange(first_page, first_page + -(-num_tokens // Pool.TOKENS))
        request = PassRequest(rid, pages, 0, num_tokens, ~EVERYTHING)
        plan = self.driver.begin_pass([request])
        for layer in range(LAYERS):
            slots = torch.from_numpy(pages * Pool.TOKENS)
            self.driver.slots_for_write(layer, slots)
            self.pool.manager.layer_written(layer)
            for group in range(len(plan.groups)):
                self.pool.manager.wait_unit(layer, group)
                self.pool.manager.unit_done(layer, group)
        self.driver.end_pass()
        return pages.astype(np.int32)

    def batch_transfer_sync(self, session_id, buffers, peer_addresses, lengths) -> int:
        """Write like a transport would."""
        assert session_id == "decode"
        self.pushed = lengths
        for here, there, size in zip(buffers, peer_addresses, lengths, strict=True):
            ctypes.memmove(there, here, size)
        return self.rc

    def push(self, pages: np.ndarray, theirs: np.ndarray) -> int:
        """Send pages to some of the decode instance's."""
        pointers = [each.ctypes.data for half in self.theirs for each in half]
        return send_layers(self, self.sources, "decode", pages, pointers, theirs)

    def expected(self, layer: int, page: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of a layer of a page, from where they are now."""
        binding = self.pool.binding
        if binding.on_host[layer, page]:
            row, key = self.host[page], LAYOUT.key_offset(layer)
            value = LAYOUT.value_offset(layer)
            return row[key : key + PART], row[value : value + PART]
        place = binding.device[layer, page]
        assert place >= 0
        return self.keys[place], self.values[place]

    def check(self, pages: np.ndarray, theirs: np.ndarray) -> None:
        """Compare what arrived, and nothing else may have."""
        expected = np.zeros_like(self.theirs)
        for page, other in zip(pages.tolist(), theirs.tolist(), strict=True):
            for layer in range(LAYERS):
                expected[:, layer, other] = self.expected(layer, page)
        assert np.array_equal(self.theirs, expected)

    @property
    def num_pinned(self) -> int:
        """Pages that are kept where they are."""
        return int(np.count_nonzero(self.pool.binding.pinned))


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.pool.copier.let_all_go()
    rig.pool.close()


def test_layers_that_have_left_are_sent_from_host_rows(rig: Rig) -> None:
    """All but the page that is not full, which stays; and only that one is pinned."""
    pages = rig.prefill("a", 9)
    rig.pool.settle()
    sent = rig.sources.begin(ROOM, pages)
    assert rig.num_pinned == 1
    theirs = np.array([7, 3, 4, 30, 0])
    assert rig.push(sent, theirs) == 0
    rig.check(pages, theirs)
    assert rig.sources.num_host_bytes == 2 * LAYERS * 4 * PART
    assert rig.sources.num_device_bytes == 2 * LAYERS * PART
    rig.sources.collect()
    assert rig.num_pinned == 0
    assert not rig.driver.stores


def test_layers_that_are_on_their_way_are_sent_from_the_device(rig: Rig) -> None:
    """Where they are kept until the push has ended, whatever needs the room."""
    rig.pool.copier.step_by_step()
    pages = rig.prefill("a", 6)
    sent = rig.sources.begin(ROOM, pages)
    assert rig.num_pinned == 3
    assert len(rig.driver.stores) == 1
    before = rig.pool.binding.device[:, pages].copy()
    rig.pool.copier.let_all_go()
    rig.pool.settle()
    rig.pool.manager._room.drop(PHYSICAL)
    assert np.array_equal(rig.pool.binding.device[:, pages], before)
    num_host = rig.sources.num_host_bytes
    addresses = rig.sources.addresses(sent)
    assert rig.sources.num_from_host(addresses) == 0
    assert rig.push(sent, np.arange(3)) == 0
    assert rig.sources.num_host_bytes == num_host
    rig.sources.collect()
    assert rig.num_pinned == 0
    rig.pool.manager._room.drop(PHYSICAL)
    assert (rig.pool.binding.device[:, pages] < 0).all()
    rig.pool.manager.check()


def test_two_transfers_of_one_page(rig: Rig) -> None:
    """It stays until both have ended, in whichever order."""
    rig.pool.copier.step_by_step()
    pages = rig.prefill("a", 4)
    one = rig.sources.begin(ROOM, pages)
    two = rig.sources.begin(ROOM + 1, pages)
    assert rig.pool.binding.pinned[pages].tolist() == [2, 2]
    assert rig.push(two, np.arange(2)) == 0
    rig.sources.collect()
    assert rig.pool.binding.pinned[pages].tolist() == [1, 1]
    assert rig.push(one, np.arange(2)) == 0
    rig.sources.collect()
    assert rig.num_pinned == 0


def test_a_part_of_what_was_noted_ends_it_as_well(rig: Rig) -> None:
    """A decode instance may take fewer pages than there are."""
    rig.pool.copier.step_by_step()
    sent = rig.sources.begin(ROOM, rig.prefill("a", 6))
    assert rig.push(sent[:2], np.arange(2)) == 0
    rig.sources.collect()
    assert rig.num_pinned == 0


@pytest.mark.parametrize("way", ["end", "freed"])
def test_a_transfer_that_is_given_up_pins_nothing(rig: Rig, way: str) -> None:
    """Neither where it failed in the queue, nor where SGLang takes the pages back."""
    rig.pool.copier.step_by_step()
    pages = rig.prefill("a", 6)
    sent = rig.sources.begin(ROOM, pages)
    rig.sources.begin(ROOM, pages)
    if way == "end":
        rig.sources.end(ROOM)
    else:
        rig.driver.finished("a")
        rig.driver.freed(pages.astype(np.int64))
    assert rig.num_pinned == 0
    assert not rig.driver.stores
    # Its push may end after that.
    rig.sources.sent(sent, 0)
    rig.sources.collect()
    assert rig.num_pinned == 0


def test_what_has_no_kv_is_not_sent(rig: Rig) -> None:
    """Not even the pages beside it."""
    pages = rig.prefill("a", 4)
    rig.pool.settle()
    both = np.append(pages, np.int32(9))
    assert rig.push(rig.sources.begin(ROOM, both), np.arange(3)) == -1
    assert not rig.theirs.any()
    assert rig.sources.num_host_bytes == 0
    rig.sources.collect()
    assert rig.num_pinned == 0


def test_a_push_that_fails_counts_for_nothing(rig: Rig) -> None:
    """And what it read is free again."""
    rig.pool.copier.step_by_step()
    rig.rc = -1
    sent = rig.sources.begin(ROOM, rig.prefill("a", 6))
    assert rig.push(sent, np.arange(3)) == -1
    assert rig.sources.num_device_bytes == rig.sources.num_host_bytes == 0
    rig.sources.collect()
    assert rig.num_pinned == 0


def test_neighbours_on_both_sides_are_one_range(rig: Rig) -> None:
    """Within a layer; host rows never are, as a row has all layers."""
    rig.pool.copier.step_by_step()
    pages = rig.prefill("a", 6)
    rig.sources.begin(ROOM, pages)
    places = rig.sources._places[:, pages]
    runs = np.count_nonzero(np.diff(places) != 1, axis=1) + 1
    assert rig.push(pages, np.array([4, 5, 6])) == 0
    assert len(rig.pushed) == 2 * int(runs.sum())
    assert sum(rig.pushed) == 2 * LAYERS * 3 * PART
    assert rig.push(pages, np.array([6, 5, 4])) == 0
    assert len(rig.pushed) == 2 * LAYERS * 3


def test_a_decode_instance_of_other_layers_gets_nothing(rig: Rig) -> None:
    """SGLang has compared the two before; this is the last check."""
    pages = rig.prefill("a", 4)
    told = send_layers(rig, rig.sources, "decode", pages, [1, 2], np.arange(2))
    assert told == -1


@pytest.mark.parametrize(
    ("pointers", "theirs"),
    [
        ([1 << 63] * 2 * LAYERS, [0, 1]),
        ([-1 << 70] * 2 * LAYERS, [0, 1]),
        ([0] * 2 * LAYERS, [0, 1, 2]),
        ([0] * 2 * LAYERS, [0]),
        ([0] * 2 * LAYERS, []),
    ],
)
def test_odd_addresses_of_a_decode_instance_are_refused(
    rig: Rig, pointers: list[int], theirs: list[int]
) -> None:
    """As a failed push: what raises ends the thread that sends."""
    pages = rig.prefill("a", 4)
    assert len(pages) == 2
    rig.sources.begin(ROOM, pages)
    rig.pushed = []
    places = np.array(theirs, np.int64)
    told = send_layers(rig, rig.sources, "decode", pages, pointers, places)
    assert told == -1
    assert rig.pushed == []
