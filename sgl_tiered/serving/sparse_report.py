"""What was left out of loads, for a request's report and the counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sgl_tiered.core.ids import Encoding

__all__ = ["SparseLoad", "shares_by_layer"]

_DIGITS = 4


@dataclass(frozen=True, slots=True)
class SparseLoad:
    """One load, or all of a request.

    Attributes:
        num_tokens: of its pages.
        kept: per layer, how many of them came to the device.
        num_bytes: read for them of what the tiers hold.
        whole_bytes: of whole pages, written as the tiers write.
        encoding: how that is.
        policy: who chose.
    """

    num_tokens: int
    kept: Sequence[int]
    num_bytes: int
    whole_bytes: int
    policy: str
    encoding: Encoding = Encoding.RAW

    @property
    def rows_dropped(self) -> int:
        """Tokens that were left out, summed over the layers."""
        return len(self.kept) * self.num_tokens - sum(self.kept)

    def with_earlier(self, other: SparseLoad | None) -> SparseLoad:
        """Return this load and an earlier one of the same request as one."""
        if other is None:
            return self
        kept = zip(self.kept, other.kept, strict=True)
        return replace(
            self,
            num_tokens=self.num_tokens + other.num_tokens,
            kept=[mine + theirs for mine, theirs in kept],
            num_bytes=self.num_bytes + other.num_bytes,
            whole_bytes=self.whole_bytes + other.whole_bytes,
        )

    def counters(self) -> dict[str, int]:
        """Return what the load adds to the counters."""
        return {
            "sparsity_loads": 1,
            "sparsity_rows_dropped": self.rows_dropped,
            "sparsity_bytes_saved": self.whole_bytes - self.num_bytes,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        whole = len(self.kept) * self.num_tokens
        return {
            "policy": self.policy,
            "tokens_loaded": self.num_tokens,
            "kept_share": round(sum(self.kept) / whole, _DIGITS),
            "kept_share_by_layer": shares_by_layer(self.kept, self.num_tokens),
            "rows_dropped": self.rows_dropped,
            "encoding": self.encoding.label,
            "bytes_loaded": self.num_bytes,
            "bytes_saved": self.whole_bytes - self.num_bytes,
        }


def shares_by_layer(kept: Sequence[int], num_tokens: int) -> list[float]:
    """Return per layer the share of the tokens that came, rounded; none of none."""
    return [round(count / num_tokens, _DIGITS) for count in kept if num_tokens]
