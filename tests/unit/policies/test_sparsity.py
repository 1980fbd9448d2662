"""Each selection keeps what its method says, on prefixes small enough to see it."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.policies.sparsity.base import PrefixFacts
from sgl_tiered.policies.sparsity.car import CarSelection
from sgl_tiered.policies.sparsity.keeping import keep_best, whole_counts
from sgl_tiered.policies.sparsity.pooling import over_heads, over_neighbours, per_read
from sgl_tiered.policies.sparsity.pyramidkv import pyramid_counts
from sgl_tiered.policies.sparsity.registry import make_selection
from sgl_tiered.policies.sparsity.solver import HeldCurves

N = 20


def facts(budget: int, *, num_layers: int = 1, **more: object) -> PrefixFacts:
    """A prefix of which the first token and the last two stay."""
    return PrefixFacts(num_layers, N, budget, num_sinks=1, num_recent=2, **more)


def mass_at(*tokens: int, num_layers: int = 1, num_heads: int = 1) -> np.ndarray:
    """Attention for these tokens only, most for the first named."""
    mass = np.zeros((num_layers, num_heads, N), np.float32)
    for place, token in enumerate(tokens):
        mass[:, :, token] = len(tokens) - place
    return mass


def kept(name: str, given: PrefixFacts) -> list[list[int]]:
    selection = make_selection(name, np.random.default_rng(0))
    return [positions.tolist() for positions in selection.keep(given)]


def test_h2o_keeps_heavy_hitters_and_as_many_recent_tokens() -> None:
    """Of 8: four recent ones, the first token, and the three heaviest."""
    found = kept("h2o", facts(8, mass=mass_at(5, 9, 3, 7)))
    assert found == [[0, 3, 5, 9, 16, 17, 18, 19]]


def test_snapkv_keeps_the_neighbours_of_what_the_window_reads() -> None:
    """Seven tokens around the one that is read."""
    found = kept("snapkv", facts(10, recent_mass=mass_at(10)))
    assert found == [[0, 7, 8, 9, 10, 11, 12, 13, 18, 19]]


def test_recent_keeps_the_ends() -> None:
    """The first token and the last ones."""
    assert kept("recent", facts(5)) == [[0, 16, 17, 18, 19]]


def test_random_layers_differ() -> None:
    """A token that one layer drops may be kept by the next."""
    found = kept("random", facts(4 * 11, num_layers=4))
    assert len({tuple(row) for row in found}) > 1


def test_pyramid_falls_linearly() -> None:
    """The last layer keeps a twentieth of the mean, as far as tokens are whole."""
    given = PrefixFacts(5, 2000, 5 * (68 + 400))
    counts = pyramid_counts(given)
    assert counts.tolist() == [848, 658, 468, 278, 88]


def test_a_large_pyramid_is_flatter() -> None:
    """Where the first layer had more than all tokens, it keeps all of them."""
    given = PrefixFacts(3, 1068, 3 * (68 + 800))
    assert pyramid_counts(given).tolist() == [1068, 868, 668]


def test_car_counts_per_reader() -> None:
    """A token that few could read, and all did, is before one with a larger sum."""
    mass = np.zeros((1, 1, N), np.float32)
    mass[0, 0, 3], mass[0, 0, 14] = 5.0, 4.0
    reads = np.maximum(np.arange(N, 0, -1.0) - 1, 0)
    given = facts(4, mass=mass, reads=reads)
    # With few local tokens, so that the number of readers shows.
    selection = CarSelection()
    selection.local_tokens = 1
    assert selection.keep(given)[0].tolist() == [0, 14, 18, 19]


def test_readers_may_differ_by_layer() -> None:
    """A layer that lacked a token had fewer queries that could read it."""
    reads = np.ones((2, N), np.float32)
    reads[1, 5] = 1000.0
    mass = mass_at(5, 6, num_layers=2)
    found = kept("car-uniform", facts(8, num_layers=2, mass=mass, reads=reads))
    assert found == [[0, 5, 18, 19], [0, 6, 18, 19]]


def test_car_follows_the_profile_and_without_one_the_prefix() -> None:
    """A layer of which few tokens hold all keeps few."""
    rng = np.random.default_rng(0)
    even = rng.random((1, N)).astype(np.float32) + 5
    mass = np.stack([100 * mass_at(5, 6)[0], even])
    shares = np.array([0.25, 1.0])
    steep, flat = [0.99, 1.0], [0.25, 1.0]
    for curves, expected in (
        (None, [5, 19]),
        (HeldCurves(shares, np.array([steep, flat]), np.ones(2)), [5, 19]),
        (HeldCurves(shares, np.array([flat, steep]), np.ones(2)), [19, 5]),
    ):
        given = facts(24, num_layers=2, mass=mass, curves=curves)
        found = kept("car", given)
        assert [len(row) for row in found] == expected
        assert {5, 6} <= set(found[0])


def test_car_uniform_keeps_equally_many() -> None:
    """Of an odd budget the first layer keeps one more."""
    mass = mass_at(5, 6, num_layers=2)
    found = kept("car-uniform", facts(15, num_layers=2, mass=mass))
    assert [len(row) for row in found] == [8, 7]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("mean", [2.0, 2.5]),
        ("max", [3.0, 4.0]),
        ("normalised", [(3 / 4 + 1 / 5) / 2, (1 / 4 + 4 / 5) / 2]),
        # Medians and means are 2 and 2.5.
        ("lift", [3 / 2.02, 4 / 2.525]),
    ],
)
def test_pooling_over_heads(how: str, expected: list[float]) -> None:
    """Two heads of two tokens, by hand."""
    mass = np.array([[[3.0, 1.0], [1.0, 4.0]]])
    assert over_heads(mass, how)[0] == pytest.approx(expected)  # type: ignore[arg-type]


def test_pooling_over_neighbours_ends_at_the_ends() -> None:
    """No token has neighbours beyond them."""
    scores = np.array([[5.0, 0.0, 0.0, 1.0]])
    assert over_neighbours(scores, 3).tolist() == [[5.0, 5.0, 1.0, 1.0]]


def test_readers_are_counted_where_nobody_did() -> None:
    """Every later token of the prefix that is not local."""
    given = PrefixFacts(1, 4, 0, mass=np.ones((1, 1, 4), np.float32))
    means = per_read(np.ones((1, 1, 4), np.float32), given, 2)
    assert means[0, 0] == pytest.approx([1 / 4, 1 / 3, 1 / 2, 1 / 2])


def test_what_nobody_knows_is_kept() -> None:
    """A score that is no number counts as the highest."""
    scores = np.array([[1.0, np.nan, 3.0, 2.0, 9.0]])
    given = PrefixFacts(1, 5, 3, num_sinks=0, num_recent=1)
    (found,) = keep_best(given, scores, np.array([3]))
    assert found.tolist() == [1, 2, 4]


def test_the_ends_are_kept_before_an_infinite_score() -> None:
    """An overflow of the mass cannot push out what is always kept."""
    scores = np.full((1, 6), np.inf)
    given = PrefixFacts(1, 6, 3, num_sinks=1, num_recent=2)
    (found,) = keep_best(given, scores, np.array([3]))
    assert found.tolist() == [0, 4, 5]


def test_counts_are_shifted_alike_within_the_bounds() -> None:
    """Too much wanted is taken from all, but for those at a bound."""
    given = PrefixFacts(3, 100, 150, num_sinks=0, num_recent=10)
    counts = whole_counts(np.array([12.0, 90.0, 100.0]), given)
    assert counts.tolist() == [10, 65, 75]


@pytest.mark.parametrize(
    "wrong",
    [
        {"mass": np.zeros((2, 1, N))},
        {"mass": np.zeros((1, N))},
        {"mass": np.zeros((1, 0, N))},
        {"recent_mass": np.zeros((1, 1, N + 1))},
        {"reads": np.zeros(N - 1)},
        {"reads": np.zeros((2, N))},
        {"curves": HeldCurves(np.ones(1), np.ones((2, 1)), np.ones(2))},
    ],
)
def test_facts_that_do_not_fit_are_refused(wrong: dict[str, object]) -> None:
    """Before a selection reads them."""
    with pytest.raises(ValueError, match=r"is not|curves of"):
        facts(8, **wrong)


def test_a_negative_budget_is_refused() -> None:
    """A budget is a number of tokens."""
    with pytest.raises(ValueError, match="negative"):
        facts(-1)
