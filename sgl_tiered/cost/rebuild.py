"""Time to have the context of one layer: rebuilt from activations, or loaded as KV.

Both are linear in the tokens, ``overhead + token * tokens`` (papers: hybridserve,
section 4.3, with R^2 = 0.99 for both on an RTX 4090). T_kv_gen is the product of stored
activations with the K and V slices of the qkv projection; T_load_kv is the copy of K
and V from host memory. Each rank counts its own heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sgl_tiered.cost.calibration import RebuildFit, TokensFit
from sgl_tiered.cost.regression import GUESSED, MEASURED, BoundedRegression

__all__ = ["RebuildCosts", "TokensCost", "TokensSnapshot"]

_LEAST_OVERHEAD_S = 1e-6
_LEAST_TOKEN_S = 1e-12
"""A fitted 0 must stay correctable: the online fit refines logarithms."""


@dataclass(frozen=True, slots=True)
class TokensSnapshot:
    """A line's figures at one moment."""

    overhead_s: float
    token_s: float
    num_observations: int


class TokensCost:
    """One of the two lines, refined by every measurement. Used on one thread.

    Args:
        overhead_s, token_s: first values; 0 becomes a tiny number.
        deviation: how far off they may be, as of ``BoundedRegression``.
    """

    def __init__(
        self, overhead_s: float, token_s: float, deviation: float = GUESSED
    ) -> None:
        firsts = (max(overhead_s, _LEAST_OVERHEAD_S), max(token_s, _LEAST_TOKEN_S))
        self._fit = BoundedRegression(firsts, deviation)
        self._overhead_s, self._token_s = self._fit.coefficients

    @classmethod
    def measured(cls, fit: TokensFit) -> TokensCost:
        """Return a cost that starts from a calibration."""
        return cls(fit.overhead_s, fit.token_s, MEASURED)

    def seconds(self, num_tokens: float) -> float:
        """Return the predicted time for so many tokens of one layer; 0 for none."""
        if num_tokens <= 0:
            return 0.0
        return self._overhead_s + self._token_s * num_tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from one rebuild or load; values that cannot be are left out."""
        if num_tokens > 0 and self._fit.observe((1.0, float(num_tokens)), seconds):
            self._overhead_s, self._token_s = self._fit.coefficients

    def snapshot(self) -> TokensSnapshot:
        """Return the figures as they are now."""
        return TokensSnapshot(
            self._overhead_s, self._token_s, self._fit.num_observations
        )


@dataclass(frozen=True, slots=True)
class RebuildCosts:
    """T_kv_gen and T_load_kv of one layer."""

    kv_gen: TokensCost
    load_kv: TokensCost

    @classmethod
    def measured(cls, fit: RebuildFit) -> RebuildCosts:
        """Return costs that start from a calibration."""
        kv_gen, load_kv = (TokensCost.measured(f) for f in (fit.kv_gen, fit.load_kv))
        return cls(kv_gen, load_kv)

    @classmethod
    def probed(
        cls,
        kv_gen: TokensFit,
        link_latency_s: float,
        link_bytes_per_s: float,
        layer_token_bytes: int,
        num_layers: int,
    ) -> RebuildCosts:
        """Return first guesses: a sampled T_kv_gen, and T_load_kv by the host link.

        Args:
            kv_gen: sampled when the server started.
            link_latency_s: of a load of all layers, host to device.
            link_bytes_per_s: of that link.
            layer_token_bytes: K and V of a token in one layer, on one rank.
            num_layers: that share the latency.
        """
        return cls(
            TokensCost(kv_gen.overhead_s, kv_gen.token_s),
            TokensCost(
                link_latency_s / num_layers, layer_token_bytes / link_bytes_per_s
            ),
        )

    def snapshot(self) -> dict[str, float]:
        """Return all figures by name, for reports and for the other ranks."""
        figures = {}
        for name, cost in (("kv_gen", self.kv_gen), ("load_kv", self.load_kv)):
            line = cost.snapshot()
            figures[f"rebuild.{name}.overhead_s"] = line.overhead_s
            figures[f"rebuild.{name}.token_s"] = line.token_s
            count = float(line.num_observations)
            figures[f"rebuild.{name}.num_observations"] = count
        return figures

    @classmethod
    def from_snapshot(cls, figures: Mapping[str, float]) -> RebuildCosts | None:
        """Return guesses that start from a snapshot; None if it has no such figures."""
        if "rebuild.kv_gen.token_s" not in figures:
            return None
        kv_gen, load_kv = (
            TokensCost(
                figures[f"rebuild.{name}.overhead_s"],
                figures[f"rebuild.{name}.token_s"],
            )
            for name in ("kv_gen", "load_kv")
        )
        return cls(kv_gen, load_kv)
