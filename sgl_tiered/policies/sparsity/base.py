"""Interface of a selection: which tokens of a prefix keep their KV, layer by layer?

A selection only chooses. It sees how much attention each token received, and a budget;
what it leaves out is never read again by those who meet the sparse prefix, while lower
tiers keep everything. All KV heads of a layer keep the same tokens, since a slot of the
device pool holds a token for all heads of a layer.

The budget counts layer-tokens: one token of one layer. They all have the same bytes, so
two selections under one budget move and hold equally many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sgl_tiered.policies.sparsity.solver import HeldCurves

__all__ = ["Counts", "Floats", "KeepSets", "PrefixFacts", "Selection"]

Floats = npt.NDArray[np.floating]
Counts = npt.NDArray[np.int64]
KeepSets = list[npt.NDArray[np.int64]]
"""Per layer the kept positions, ascending."""


@dataclass(frozen=True, slots=True)
class PrefixFacts:
    """What is known of a prefix, or of a span of one, when tokens of it are dropped.

    Attributes:
        num_layers: of the model.
        num_tokens: of the prefix.
        budget_tokens: layer-tokens that may be kept. What is always kept (``num_sinks``
            and ``num_recent`` in each layer) is kept even if that is more.
        mass: attention that each token received: over the queries, and over the query
            heads of a KV head, the sum of probabilities to the selection's
            ``mass_power``; float [num_layers, num_heads, num_tokens]. Queries nearer
            than the selection's ``local_tokens`` are left out. One "head" where
            somebody has summed over them.
        reads: queries that ``mass`` is a sum over, per token; [num_tokens], or where
            layers have lacked tokens before [num_layers, num_tokens]. Without it every
            later token of the prefix counts as one.
        recent_mass: as ``mass``, but of the prefix's last ``window_tokens`` queries.
        curves: how the model's layers hold their mass, from a profile.
        num_sinks: first tokens that are always kept; 0 for a span that does not begin
            a prompt.
        num_recent: last tokens that are always kept; 0 for a span that others follow.

    Raises:
        ValueError: a shape does not fit, or a number is negative.
    """

    num_layers: int
    num_tokens: int
    budget_tokens: int
    mass: Floats | None = None
    reads: Floats | None = None
    recent_mass: Floats | None = None
    curves: HeldCurves | None = None
    num_sinks: int = 4
    num_recent: int = 64

    def __post_init__(self) -> None:
        least = min(
            self.num_layers - 1,
            self.num_tokens,
            self.budget_tokens,
            self.num_sinks,
            self.num_recent,
        )
        if least < 0:
            raise ValueError(f"a negative number in {self!r}")
        for name, mass in (("mass", self.mass), ("recent_mass", self.recent_mass)):
            if mass is not None and (
                mass.ndim != 3
                or mass.shape[0] != self.num_layers
                or mass.shape[1] < 1
                or mass.shape[2] != self.num_tokens
            ):
                raise ValueError(
                    f"{name} {mass.shape} is not [{self.num_layers}, heads, "
                    f"{self.num_tokens}]"
                )
        of_tokens = (self.num_tokens,)
        shapes = of_tokens, (self.num_layers, *of_tokens)
        if self.reads is not None and self.reads.shape not in shapes:
            raise ValueError(
                f"reads {self.reads.shape} is not [{self.num_tokens}], nor "
                f"[{self.num_layers}, {self.num_tokens}]"
            )
        if self.curves is not None and self.curves.num_layers != self.num_layers:
            raise ValueError(
                f"curves of {self.curves.num_layers} layers, not {self.num_layers}"
            )


@runtime_checkable
class Selection(Protocol):
    """Chooses keep sets; keeps nothing itself."""

    @property
    def name(self) -> str:
        """The word used in flags and reports."""
        ...

    @property
    def needs_mass(self) -> bool:
        """Whether it looks at ``mass``."""
        ...

    @property
    def local_tokens(self) -> int:
        """Queries nearer to a token than this are to be left out of ``mass``."""
        ...

    @property
    def mass_power(self) -> int:
        """Power of the probabilities that ``mass`` is a sum of.

        The second needs no other kernel than the first: twice the scores have twice
        the logarithm of the sum, ``p ** 2 = exp(2 s - 2 lse)``.
        """
        ...

    @property
    def window_tokens(self) -> int:
        """Last queries that ``recent_mass`` is to be a sum over; 0: it is not read."""
        ...

    def keep(self, facts: PrefixFacts) -> KeepSets:
        """Return per layer the kept positions: ascending, unique, int64 in range.

        First and last tokens as the facts say are always among them. Over all layers
        exactly ``budget_tokens`` are kept, or all there are, or, where the budget is
        below it, what is always kept. Equal facts give equal sets.

        Raises:
            ValueError: the facts lack what this selection needs.
        """
        ...
