"""Rows of two kinds and places for activations: each has one owner."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.layered.base import ActPlan
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.kinds import PageKinds
from sgl_tiered.layered.places import Places

LAYERS, PAGES = 2, 6


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@pytest.fixture
def binding() -> LayerBinding:
    """Return one of three rows of each kind."""
    return LayerBinding(
        LAYERS, PAGES, 12, first_physical=1, acts=ActPlan(3, 9, 2, 1, 8)
    )


def written(binding: LayerBinding, page: int, *, is_act: bool) -> None:
    """Write all of a page, as a forward does."""
    assert binding.kinds is not None
    binding.new_kinds(pages(page), np.array([is_act]))
    for layer in range(LAYERS):
        if is_act:
            binding.kinds.bind(layer, pages(page))
        binding.bind(layer, pages(page))
        binding.written(layer, pages(page))
    binding.completed(pages(page))
    binding.check()


def test_places_are_handed_out_lowest_first_and_come_back() -> None:
    """With an owner each; two owners are found, and none as well."""
    places = Places(5, 1)
    assert places.take(2).tolist() == [1, 2]
    assert places.set_aside(1).tolist() == [3]
    places.cut_loose(np.array([2]))
    assert (places.num_free, places.num_adrift, len(places)) == (2, 1, 5)
    places.check(np.array([1]))
    with pytest.raises(AssertionError, match="not once"):
        places.check(np.array([1, 2]))
    with pytest.raises(AssertionError, match="not once"):
        places.check(np.empty(0, np.int64))
    places.pick_up(np.array([2]))
    places.give(np.array([1, 2]))
    assert places.num_free == 4
    with pytest.raises(AssertionError, match="5 wanted, 4 free"):
        places.take(5)


def test_a_binding_without_activations_has_rows_that_are_the_pages() -> None:
    """And nothing in the act area."""
    plain = LayerBinding(LAYERS, PAGES, 12)
    assert plain.row.tolist() == list(range(PAGES))
    assert not plain.is_act.any()
    assert (plain.act == -1).all()
    assert plain.act.shape == (LAYERS, PAGES)
    assert plain.by_kind(pages(1, 2))[0].tolist() == [1, 2]
    plain.bind(0, pages(2))
    plain.written(0, pages(2))
    flight = plain.depart(0, pages(2), is_up=False)
    assert flight.rows is None
    assert flight.host_rows is flight.pages
    assert flight.acts is None


@pytest.mark.parametrize("is_act", [False, True])
def test_a_page_has_a_row_of_its_kind_until_it_is_forgotten(
    binding: LayerBinding, is_act: bool
) -> None:
    """The other kind's rows are as they were."""
    kinds = binding.kinds
    assert kinds is not None
    assert kinds.num_free_rows == (3, 3)
    written(binding, 4, is_act=is_act)
    assert kinds.num_free_rows == ((3, 2) if is_act else (2, 3))
    assert binding.row[4] == 0
    assert binding.is_act[4] == is_act
    assert (binding.act[:, 4] > 0).all() == is_act
    binding.forget(pages(4))
    assert kinds.num_free_rows == (3, 3)
    assert binding.row[4] == -1
    assert not binding.is_act[4]
    binding.check()


@pytest.mark.parametrize("is_act", [False, True])
def test_what_a_copy_uses_comes_back_when_the_last_one_ends(
    binding: LayerBinding, is_act: bool
) -> None:
    """Row and places of a page that is forgotten meanwhile are adrift until then."""
    kinds = binding.kinds
    assert kinds is not None
    num_places = kinds.places.num_free
    written(binding, 1, is_act=is_act)
    flights = [binding.depart(n, pages(1), is_up=False) for n in range(LAYERS)]
    assert all(flight.rows is not None for flight in flights)
    assert all((flight.acts is not None) == is_act for flight in flights)
    binding.forget(pages(1))
    binding.check()
    kind = int(is_act)
    # KV on the device is not what a copy of activations reads.
    assert binding.num_adrift == (0 if is_act else LAYERS)
    assert kinds.num_free_rows[kind] == 2
    assert not binding.arrive(flights[1], np.array([True])).any()
    binding.check()
    assert kinds.num_free_rows[kind] == 2
    assert not binding.arrive(flights[0], np.array([False])).any()
    binding.check()
    assert kinds.num_free_rows == (3, 3)
    assert kinds.places.num_free == num_places
    assert binding.num_free == 12


def test_a_landed_copy_makes_kv_and_places_droppable(binding: LayerBinding) -> None:
    """And what returns is computed from the row, or from a place that was left."""
    written(binding, 2, is_act=True)
    binding.position[2] = 14
    with pytest.raises(AssertionError, match="the only activations"):
        binding.drop_acts(pages(0), pages(2))
    for layer in range(LAYERS):
        flight = binding.depart(layer, pages(2), is_up=False)
        assert len(flight.physical) == 0
        with pytest.raises(AssertionError):
            binding.drop(layer, pages(2))
        assert binding.arrive(flight, np.array([True])).all()
    binding.drop_acts(pages(0), pages(2))
    binding.drop(np.arange(LAYERS), pages(2, 2))
    binding.check()
    ups = [binding.depart(n, pages(2), is_up=True) for n in range(LAYERS)]
    assert ups[0].acts is not None
    assert ups[0].acts.tolist() == [-1]
    assert ups[1].acts is not None
    assert ups[1].acts.tolist() == [binding.act[1, 2]]
    assert ups[0].positions is not None
    assert ups[0].positions.tolist() == [14]
    with pytest.raises(AssertionError, match="during a copy"):
        binding.drop_acts(pages(1), pages(2))
    binding.forget(pages(2))
    binding.check()
    for flight in ups:
        assert not binding.arrive(flight, np.array([True])).any()
    binding.check()
    assert binding.num_free == 12


def test_pinned_activations_stay(binding: LayerBinding) -> None:
    """A tier reads them where they are."""
    written(binding, 3, is_act=True)
    binding.arrive(binding.depart(0, pages(3), is_up=False), np.array([True]))
    binding.pinned[3] = 1
    with pytest.raises(AssertionError, match="while it is read"):
        binding.drop_acts(pages(0), pages(3))


def test_kinds_do_not_mix_in_a_copy(binding: LayerBinding) -> None:
    """``by_kind`` cuts them."""
    written(binding, 0, is_act=True)
    written(binding, 1, is_act=False)
    with pytest.raises(AssertionError, match="two kinds"):
        binding.depart(0, pages(0, 1), is_up=False)
    assert [part.tolist() for part in binding.by_kind(pages(0, 1))] == [[1], [0]]


def test_a_page_without_a_row_is_on_the_device(binding: LayerBinding) -> None:
    """In all layers, until it is forgotten; no copy of it begins."""
    kinds = binding.kinds
    assert kinds is not None
    no, yes = np.array([False]), np.array([True])
    with pytest.raises(AssertionError, match="not on the device"):
        binding.new_kinds(pages(5), no, yes)
    for layer in range(LAYERS):
        binding.bind(layer, pages(5))
    with pytest.raises(AssertionError, match="activations without a row"):
        binding.new_kinds(pages(5), yes, yes)
    binding.new_kinds(pages(5), no, yes)
    with pytest.raises(AssertionError, match="in use already"):
        kinds.assign(pages(5), no)
    for layer in range(LAYERS):
        binding.written(layer, pages(5))
    binding.completed(pages(5))
    binding.check()
    assert kinds.num_free_rows == (3, 3)
    assert (binding.row[5], binding.rowless[5]) == (-1, True)
    with pytest.raises(AssertionError, match="no row to copy to"):
        binding.depart(0, pages(5), is_up=False)
    place, binding.device[0, 5] = int(binding.device[0, 5]), -1
    with pytest.raises(AssertionError):
        binding.check()
    binding.device[0, 5] = place
    binding.copying[1, 5] = True
    with pytest.raises(AssertionError, match="rowless, and copied"):
        binding.check()
    binding.copying[1, 5] = False
    binding.row[5] = 2
    with pytest.raises(AssertionError):
        binding.check()
    binding.row[5] = -1
    binding.forget(pages(5))
    assert not binding.rowless.any()
    assert binding.num_free == 12
    binding.check()


def test_check_finds_what_is_lost() -> None:
    """A full page of activations without any; a place of a page of KV."""
    kinds = PageKinds(LAYERS, PAGES, ActPlan(3, 9, 2, 1, 8))
    kinds.assign(pages(0, 1), np.array([True, False]))
    on_host, full = np.zeros((LAYERS, PAGES), np.bool_), np.zeros(PAGES, np.bool_)
    kinds.check(on_host, full)
    full[0] = True
    with pytest.raises(AssertionError, match="activations are lost"):
        kinds.check(on_host, full)
    with pytest.raises(AssertionError, match="has no activations"):
        kinds.bind(0, pages(1))
    with pytest.raises(AssertionError, match="in use already"):
        kinds.assign(pages(1), np.array([True]))


@pytest.mark.parametrize(
    "sizes", [(0, 9, 2, 1, 8), (3, 5, 2, 1, 8), (3, 9, 0, 1, 8), (3, 9, 2, 0, 8)]
)
def test_a_plan_without_room_is_refused(sizes: tuple[int, ...]) -> None:
    """Rows, places beside the staging, halves and what returns."""
    with pytest.raises(ValueError, match=r"act|places"):
        ActPlan(*sizes)


def test_more_rows_than_pages_are_refused() -> None:
    """Each page has one row at most."""
    with pytest.raises(ValueError, match="7 act rows for 6 pages"):
        PageKinds(LAYERS, PAGES, ActPlan(7, 9, 2, 1, 8))
