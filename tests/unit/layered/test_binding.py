"""The table of layer-pages keeps its books, whatever happens during copies."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.layered.binding import LayerBinding

PAGES = np.array([3, 5])
ALL = np.ones(2, np.bool_)


@pytest.fixture
def binding() -> LayerBinding:
    """Return a binding of 2 layers, 8 pages and 10 layer-pages from 1."""
    return LayerBinding(2, 8, 10, first_physical=1)


def test_what_is_bound_is_taken_and_forgotten_is_free(binding: LayerBinding) -> None:
    """Places are numbers of the tensor, each given once."""
    places = binding.bind(0, PAGES)
    assert places.tolist() == [1, 2]
    assert binding.num_free == 8
    binding.check()
    binding.forget(PAGES)
    assert binding.num_free == 10
    binding.check()


def test_one_call_binds_pages_of_several_layers(binding: LayerBinding) -> None:
    """Layers and pages may come in pairs."""
    places = binding.bind(np.array([0, 1]), np.array([4, 4]))
    assert binding.device[:, 4].tolist() == places.tolist()
    binding.check()


def test_a_copy_down_makes_the_row_valid(binding: LayerBinding) -> None:
    """After it, and only after it, the device copy can be dropped."""
    binding.bind(0, PAGES)
    binding.written(0, PAGES)
    with pytest.raises(AssertionError, match="the only copy"):
        binding.drop(0, PAGES)
    flight = binding.depart(0, PAGES, is_up=False)
    with pytest.raises(AssertionError):
        binding.drop(0, PAGES)
    assert binding.arrive(flight, np.array([True, False])).tolist() == [True, False]
    assert binding.on_host[0, PAGES].tolist() == [True, False]
    binding.drop(0, PAGES[:1])
    binding.check()
    assert binding.num_free == 9


def test_a_copy_up_binds_what_arrived(binding: LayerBinding) -> None:
    """Its places belong to the copy until then, and come back where it failed."""
    binding.written_to_host(1, PAGES)
    flight = binding.depart(1, PAGES, is_up=True)
    assert (binding.num_free, binding.num_adrift) == (8, 2)
    assert (binding.device[1, PAGES] < 0).all()
    binding.check()
    binding.arrive(flight, np.array([False, True]))
    assert binding.device[1, PAGES].tolist() == [-1, flight.physical[1]]
    assert (binding.num_free, binding.num_adrift) == (9, 0)
    binding.check()


@pytest.mark.parametrize("is_up", [False, True])
def test_a_page_forgotten_during_a_copy_is_not_spoken_for(
    binding: LayerBinding, is_up: bool
) -> None:
    """Its place comes back with the copy's end, which says nothing of the page."""
    if is_up:
        binding.written_to_host(0, PAGES)
    else:
        binding.bind(0, PAGES)
        binding.written(0, PAGES)
    flight = binding.depart(0, PAGES, is_up=is_up)
    binding.forget(PAGES[:1])
    assert binding.copying[0, PAGES].all(), "its host row is still in use"
    with pytest.raises(AssertionError, match="a copy uses"):
        binding.bind(0, PAGES[:1])
    assert binding.num_free == 8
    binding.check()
    assert binding.arrive(flight, ALL).tolist() == [False, True]
    assert binding.num_free == 9
    assert not binding.on_host[0, PAGES[0]]
    assert binding.device[0, PAGES[0]] < 0
    binding.check()


def test_new_kv_makes_the_row_void(binding: LayerBinding) -> None:
    """A host row does not outlive what it was copied from."""
    binding.bind(0, PAGES)
    binding.written(0, PAGES)
    binding.arrive(binding.depart(0, PAGES, is_up=False), ALL)
    binding.written(0, PAGES)
    assert not binding.on_host[0, PAGES].any()
    binding.check()


def test_what_is_pinned_stays(binding: LayerBinding) -> None:
    """Neither dropped nor forgotten while somebody reads it."""
    binding.bind(0, PAGES)
    binding.written(0, PAGES)
    binding.arrive(binding.depart(0, PAGES, is_up=False), ALL)
    binding.pinned[PAGES] += 1
    with pytest.raises(AssertionError, match="while it is read"):
        binding.drop(0, PAGES)
    with pytest.raises(AssertionError, match="while it is read"):
        binding.forget(PAGES)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda b: b.device.__setitem__((1, 3), b.device[0, 3]),
        lambda b: b.device.__setitem__((0, 3), -1),
        lambda b: b.on_host.__setitem__((1, 7), True),
        lambda b: b.full.__setitem__(3, True),
        lambda b: b.pinned.__setitem__(3, -1),
    ],
)
def test_check_finds_every_broken_law(binding: LayerBinding, spoil: object) -> None:
    """The invariants can be broken, and then are found to be."""
    binding.bind(0, PAGES)
    binding.written(0, PAGES)
    binding.check()
    spoil(binding)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        binding.check()


def test_sizes_that_make_no_sense_are_refused() -> None:
    """A binding of nothing is none."""
    with pytest.raises(ValueError, match="no binding of 0 layers"):
        LayerBinding(0, 1, 1)
