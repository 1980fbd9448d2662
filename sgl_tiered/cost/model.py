"""All costs that the planner asks for, and the measurements that refine them."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.prefill import PrefillCost, PrefillSnapshot
from sgl_tiered.cost.rebuild import RebuildCosts
from sgl_tiered.errors import ConfigError

__all__ = ["CostModel"]


class CostModel:
    """Seconds to load, to recompute or to rebuild. Used on one thread.

    Args:
        prefill: cost of computing tokens on the device.
        links: cost of bringing bytes from each tier to the device.
        rebuild: of one layer, from activations or as KV; None where nothing is kept
            as activations.
    """

    def __init__(
        self,
        prefill: PrefillCost,
        links: Mapping[TierId, LinkCost],
        rebuild: RebuildCosts | None = None,
    ) -> None:
        self._prefill = prefill
        self._links = dict(links)
        self._rebuild = rebuild

    @property
    def tiers(self) -> frozenset[TierId]:
        """Tiers whose link is known."""
        return frozenset(self._links)

    @property
    def prefill(self) -> PrefillSnapshot:
        """What computing costs now."""
        return self._prefill.snapshot()

    @property
    def rebuild(self) -> RebuildCosts | None:
        """T_kv_gen and T_load_kv of a layer; None where they are not known."""
        return self._rebuild

    def load_s(self, tier: TierId, num_bytes: int) -> float:
        """Return the predicted time to bring bytes from a tier, in seconds."""
        return self._links[tier].seconds(num_bytes)

    def link_figures(self, tier: TierId) -> tuple[float, float]:
        """Return a link's seconds of an empty load, and bytes per second."""
        link = self._links[tier].snapshot()
        return link.latency_s, link.bandwidth_bytes_per_s

    def trial_due(self, tier: TierId) -> bool:
        """Note that a load from a tier was decided against; see ``LinkCost``."""
        return self._links[tier].trial_due()

    def recompute_s(self, prefix_tokens: int, new_tokens: int) -> float:
        """Return the predicted time of a pass over ``new_tokens``, in seconds."""
        return self._prefill.seconds(prefix_tokens, new_tokens)

    def observe_load(self, tier: TierId, num_bytes: int, seconds: float) -> None:
        """Learn from a load out of one tier."""
        link = self._links.get(tier)
        if link is None:
            raise ConfigError(
                "cost.links", f"no link for {tier.label}", "give one per tier"
            )
        link.observe(num_bytes, seconds)

    def observe_prefill(
        self, prefix_tokens: int, new_tokens: int, seconds: float
    ) -> None:
        """Learn from a pass over ``new_tokens`` after ``prefix_tokens``."""
        self._prefill.observe(prefix_tokens, new_tokens, seconds)

    def observe_rebuild(self, num_tokens: int, seconds: float) -> None:
        """Learn from rebuilding tokens of one layer that waited for nothing."""
        if self._rebuild is not None:
            self._rebuild.kv_gen.observe(num_tokens, seconds)

    def observe_load_kv(self, num_tokens: int, seconds: float) -> None:
        """Learn from loading KV of tokens of one layer, alone on the link."""
        if self._rebuild is not None:
            self._rebuild.load_kv.observe(num_tokens, seconds)

    def snapshot(self) -> dict[str, float]:
        """Return all figures by name, for reports and calibration files."""
        prefill = self._prefill.snapshot()
        figures = {
            "prefill.overhead_s": prefill.overhead_s,
            "prefill.token_s": prefill.token_s,
            "prefill.pair_s": prefill.pair_s,
            "prefill.num_observations": float(prefill.num_observations),
        }
        for tier, cost in sorted(self._links.items()):
            link = cost.snapshot()
            name = f"link.{tier.label}"
            figures[f"{name}.latency_s"] = link.latency_s
            figures[f"{name}.bandwidth_bytes_per_s"] = link.bandwidth_bytes_per_s
            figures[f"{name}.num_observations"] = float(link.num_observations)
        if self._rebuild is not None:
            figures |= self._rebuild.snapshot()
        return figures
