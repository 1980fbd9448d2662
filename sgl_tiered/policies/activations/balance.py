"""The share of activations that is best for a batch that is known.

Eq. 8 to 10 of HybridServe (papers: hybridserve) for one layer of one decode step, with
what they leave out: the loads of activations, the computation of the layer itself, and
KV in the room on the device that activations do not take. More activations never
shorten the computation and, but for one overhead, never lengthen the transfers, so the
longer of both is least where they cross.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.policies.activations.base import LayerFacts

__all__ = ["DevicePages", "LayerSplit", "balanced_split", "device_pages", "split_at"]


@dataclass(frozen=True, slots=True)
class DevicePages:
    """Pages of a layer that the device holds."""

    num_act: int
    num_kv: int


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """A layer with so many pages as activations, the others as KV.

    Attributes:
        num_act, num_kv: pages, wherever they are.
        link_s: transfers to the device, weights included.
        compute_s: rebuilding, and the layer itself.
    """

    num_act: int
    num_kv: int
    link_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """The layer's time if both overlap in full: nothing does better."""
        return max(self.link_s, self.compute_s)


def device_pages(facts: LayerFacts, num_act: int) -> DevicePages:
    """Return what the device holds: activations first, KV in what they leave."""
    num_device_act = min(num_act, facts.device_bytes // facts.act_page_bytes)
    left = facts.device_bytes - num_device_act * facts.act_page_bytes
    num_kv = facts.num_pages - num_act
    return DevicePages(num_device_act, min(num_kv, left // facts.kv_page_bytes))


def split_at(facts: LayerFacts, num_act: int) -> LayerSplit:
    """Return the times with ``num_act`` of ``facts.num_pages`` as activations."""
    held = device_pages(facts, num_act)
    num_kv = facts.num_pages - num_act
    link_s = facts.load_weights_s
    link_s += facts.load_kv.seconds(num_kv - held.num_kv)
    link_s += facts.load_act.seconds(num_act - held.num_act)
    compute_s = facts.compute_s + facts.kv_gen.seconds(num_act)
    return LayerSplit(num_act, num_kv, link_s, compute_s)


def balanced_split(facts: LayerFacts) -> LayerSplit:
    """Return the split with the shortest layer; of equal ones the fewest activations.

    Its ``seconds`` are the balance bound that a measured layer is compared with. Only
    for pages whose activations load no slower than their KV (``refusal.py``).
    O(log pages).
    """
    on_device = min(facts.device_bytes // facts.act_page_bytes, facts.num_pages)
    tried = [split_at(facts, 0)]
    # The first page of activations on the host costs a transfer's overhead more.
    for low, high in ((1, on_device), (on_device + 1, facts.num_pages)):
        if low <= high:
            tried += _around_crossing(facts, low, high)
    return min(tried, key=lambda split: split.seconds)


def _around_crossing(facts: LayerFacts, low: int, high: int) -> list[LayerSplit]:
    """Return the last split whose link is the longer one, and the one after it."""
    first = low
    while low < high:
        middle = (low + high) // 2
        split = split_at(facts, middle)
        if split.compute_s >= split.link_s:
            high = middle
        else:
            low = middle + 1
    return [split_at(facts, num) for num in range(max(low - 1, first), low + 1)]
