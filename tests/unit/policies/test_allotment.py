"""Layers of the device by claims."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.policies.layers.allotment import allotted_layers


def test_whole_ones_then_a_part_then_nothing() -> None:
    """Of 100 layer-pages: 40 and 40, five layers of the next, and none for a small one.

    The small one behind would fit, but then claims would mean nothing.
    """
    assert allotted_layers(8, [5, 5, 4, 1], 100) == (8, 8, 5, 0)
    assert allotted_layers(8, [5, 5], 80) == (8, 8)
    assert allotted_layers(8, [5], 4) == (0,)
    assert allotted_layers(8, [5, 1], -3) == (0, 0)


def test_who_has_no_pages_has_all() -> None:
    """It takes nothing, also behind those without room."""
    assert allotted_layers(8, [9, 0, 9], 80) == (8, 8, 0)


@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 50), max_size=12),
    st.integers(-10, 5_000),
)
def test_it_fits_and_wastes_nothing(
    num_layers: int, pages: list[int], room: int
) -> None:
    """The room holds what is given, and not one more layer of the first that lacks."""
    given_layers = allotted_layers(num_layers, pages, room)
    taken = sum(num * n for num, n in zip(given_layers, pages, strict=True))
    assert taken <= max(room, 0)
    held = [(num, n) for num, n in zip(given_layers, pages, strict=True) if n]
    assert [num for num, _ in held] == sorted((num for num, _ in held), reverse=True)
    lacking = [(num, n) for num, n in held if num < num_layers]
    if lacking:
        assert all(num == 0 for num, _ in lacking[1:])
        assert taken + lacking[0][1] > max(room, 0)
