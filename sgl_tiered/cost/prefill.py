"""Time to compute tokens: LayerKV's Eq. 3, for a prompt of which a prefix is known.

The paper estimates a whole prompt of ``s`` tokens as

    T = alpha * s * (2 * n_param + 2 * s * n_hidden) / flops

(2 operations per parameter and token; attention grows with the square). For ``n`` new
tokens after a prefix of ``p`` the same count, per layer and with causal attention, is

    linear:     2 * n_param * n
    attention:  4 * layers * width * n * (p + (n + 1) / 2)
    T = overhead + alpha * (linear + attention) / flops

since new token i sees p + i tokens, and each (query, key) pair costs 2 * width
operations for the score and 2 * width for the weighted sum (width = query heads *
head size). With p = 0 the attention term is 2 * layers * width * n * (n + 1): the
paper's, with its number of layers written out. ``overhead`` is what a forward pass
costs however few tokens it has. The three coefficients are refined online.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.cost.regression import MEASURED, BoundedRegression
from sgl_tiered.errors import ConfigError

__all__ = ["PrefillCost", "PrefillSnapshot"]

_DEFAULT_OVERHEAD_S = 1e-3


@dataclass(frozen=True, slots=True)
class PrefillSnapshot:
    """The prefill figures at one moment, in seconds (per token, per token pair)."""

    overhead_s: float
    token_s: float
    pair_s: float
    num_observations: int


class PrefillCost:
    """Predicts and learns the time of a forward pass over new tokens.

    Args:
        num_params: parameters that every token passes, of this rank.
        num_layers: attention layers.
        attention_width: query heads * head size, of this rank.
        flops_per_s: operations per second that the device is said to do.
        alpha: the paper's correction: real time over the time by the data sheet.
        overhead_s: first guess of the time of a pass without tokens, > 0.
    """

    def __init__(
        self,
        num_params: int,
        num_layers: int,
        attention_width: int,
        flops_per_s: float,
        *,
        alpha: float = 1.0,
        overhead_s: float = _DEFAULT_OVERHEAD_S,
    ) -> None:
        values = {
            "num_params": num_params,
            "num_layers": num_layers,
            "attention_width": attention_width,
            "flops_per_s": flops_per_s,
            "alpha": alpha,
            "overhead_s": overhead_s,
        }
        for name, value in values.items():
            if not value > 0:
                raise ConfigError(
                    f"prefill.{name}", f"{value} is not positive", "give a positive one"
                )
        token_s = alpha * 2.0 * num_params / flops_per_s
        pair_s = alpha * 4.0 * num_layers * attention_width / flops_per_s
        self._fit = BoundedRegression((overhead_s, token_s, pair_s))
        self._overhead_s, self._token_s, self._pair_s = self._fit.coefficients

    @classmethod
    def from_coefficients(
        cls,
        overhead_s: float,
        token_s: float,
        pair_s: float,
        deviation: float = MEASURED,
    ) -> PrefillCost:
        """Return a cost that starts from known coefficients, each > 0.

        Args:
            overhead_s, token_s, pair_s: seconds; see ``PrefillSnapshot``.
            deviation: how far they may be off; see ``BoundedRegression``.
        """
        cost = cls(1, 1, 1, 1.0)
        cost._fit = BoundedRegression((overhead_s, token_s, pair_s), deviation)
        cost._overhead_s, cost._token_s, cost._pair_s = cost._fit.coefficients
        return cost

    def seconds(self, prefix_tokens: int, new_tokens: int) -> float:
        """Return the predicted time of one pass; 0 for no new tokens."""
        if new_tokens <= 0:
            return 0.0
        pairs = new_tokens * (prefix_tokens + (new_tokens + 1) / 2)
        return self._overhead_s + self._token_s * new_tokens + self._pair_s * pairs

    def observe(self, prefix_tokens: int, new_tokens: int, seconds: float) -> None:
        """Learn from one pass; values that cannot be are left out."""
        if new_tokens <= 0 or prefix_tokens < 0:
            return
        pairs = new_tokens * (prefix_tokens + (new_tokens + 1) / 2)
        if self._fit.observe((1.0, float(new_tokens), pairs), seconds):
            self._overhead_s, self._token_s, self._pair_s = self._fit.coefficients

    def snapshot(self) -> PrefillSnapshot:
        """Return the figures as they are now."""
        return PrefillSnapshot(
            overhead_s=self._overhead_s,
            token_s=self._token_s,
            pair_s=self._pair_s,
            num_observations=self._fit.num_observations,
        )
