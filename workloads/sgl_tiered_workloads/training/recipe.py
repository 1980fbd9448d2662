"""What is trained and how: the model's shape, the phases, the rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sgl_tiered_workloads.training.documents import Mix

__all__ = ["RECIPES", "Phase", "Recipe", "Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's shape."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    intermediate: int
    vocab_tokens: int
    max_positions: int
    rope_theta: float = 10_000_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Entries of one head."""
        return self.hidden // self.num_heads

    @property
    def num_params(self) -> int:
        """Trained numbers."""
        attention = 2 * self.hidden * (self.num_heads + self.num_kv_heads)
        per_layer = attention * self.head_dim + 3 * self.hidden * self.intermediate
        norms = (2 * self.num_layers + 1) * self.hidden
        return self.num_layers * per_layer + 2 * self.vocab_tokens * self.hidden + norms


@dataclass(frozen=True, slots=True)
class Phase:
    """Some steps, each on ``num_sequences`` documents of ``num_tokens`` predictions.

    ``stretch`` is the share of sequences whose positions jump at a few random places,
    so that short sequences show distances up to the model's longest: what is read by
    content at 200 tokens is then read at 4,000 as well, for the price of 200.

    With ``rate`` the phase has a cycle of its own: the factor on the rates begins there
    and falls to zero until the phase ends. Such phases come last.
    """

    num_steps: int
    num_tokens: int
    num_sequences: int
    mix: Mix
    stretch: float = 0.0
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole training: equal recipes on equal corpora give equal models.

    Rates: ``matrix_rate`` is Muon's, for matrices; AdamW has ``embedding_rate`` for the
    embedding, ``vector_rate`` for output layer and norms. All rise over
    ``warmup_steps`` and fall to zero over the last ``decay_share`` of the steps (of the
    phases without a rate of their own).
    ``num_shards`` threads compute a step's sequences; it is part of the recipe because
    sums in another order round differently.
    """

    name: str
    shape: Shape
    phases: tuple[Phase, ...]
    seed: int = 0
    matrix_rate: float = 0.02
    embedding_rate: float = 0.02
    vector_rate: float = 0.002
    matrix_decay: float = 0.01
    warmup_steps: int = 100
    decay_share: float = 0.4
    num_shards: int = 2

    @property
    def num_steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.num_steps for phase in self.phases)

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps."""
        return sum(p.num_steps * p.num_tokens * p.num_sequences for p in self.phases)

    def phase_at(self, step: int) -> Phase:
        """Return the phase of a step.

        Raises:
            IndexError: there are fewer steps.
        """
        for phase in self.phases:
            if step < phase.num_steps:
                return phase
            step -= phase.num_steps
        raise IndexError(f"step {step} behind the last phase of {self.name}")

    def rate_at(self, step: int) -> float:
        """Return the factor on all rates at a step, in (0, 1]."""
        first = [phase.num_steps for phase in self.phases if phase.rate is None]
        begin = num_steps = sum(first)
        for phase in self.phases[len(first) :]:
            if phase.rate is not None and begin <= step < begin + phase.num_steps:
                return phase.rate * (1.0 - (step - begin) / phase.num_steps)
            begin += phase.num_steps
        rising = (step + 1) / self.warmup_steps
        falling = (num_steps - step) / (self.decay_share * num_steps)
        return min(1.0, rising, falling)

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Recipe:
        """Return the recipe of what ``to_json`` gave."""

        def phases() -> Iterator[Phase]:
            for phase in data["phases"]:
                yield Phase(**{**phase, "mix": Mix(**phase["mix"])})

        fields = {**data, "shape": Shape(**data["shape"]), "phases": tuple(phases())}
        return Recipe(**fields)


# Heads of 64, which every attention kernel knows.
_DEMO = Shape(
    num_layers=6,
    hidden=256,
    num_heads=4,
    num_kv_heads=2,
    intermediate=768,
    vocab_tokens=3072,
    max_positions=8192,
)

_TINY = Shape(
    num_layers=2,
    hidden=64,
    num_heads=2,
    num_kv_heads=1,
    intermediate=128,
    vocab_tokens=1024,
    max_positions=512,
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="demo",
            shape=_DEMO,
            phases=(
                # Dense: what to look for, and where, is learned in short sequences.
                Phase(300, 256, 16, Mix(0.45, 0.4, 0.3), stretch=0.3),
                Phase(2600, 512, 8, Mix(0.15, 0.08, 0.05, 2.0), stretch=0.6),
                Phase(900, 1024, 6, Mix(0.1, 0.05, 0.0, 4.0), stretch=0.6),
                Phase(250, 4608, 2, Mix(0.09, 0.03, 0.0, 4.0)),
                # Another cycle: after the first, 4,096 tokens back 88 % were right.
                Phase(300, 4608, 2, Mix(0.09, 0.03, 0.0, 4.0), rate=0.25),
            ),
        ),
        Recipe(
            name="tiny",
            shape=_TINY,
            phases=(
                Phase(12, 128, 4, Mix(0.3, 0.2, 0.3), stretch=0.5),
                Phase(12, 256, 2, Mix(0.1, 0.1, 0.0, 2.0), stretch=0.5),
            ),
            warmup_steps=4,
        ),
    )
}
"""Recipes by name: ``demo`` is meant for 90 minutes on two cores, ``tiny`` seconds."""
