"""How much of host memory is for KV pages and for activations: Algorithm 1.

Source: HybridServe (papers: hybridserve), section 4.3.1. The device holds activations
only, and as many as fit: there a page of them is half a page of KV. First the time to
load a layer's weights is set against the rebuilding of these (Eq. 8 to 10); what is
left of it is filled with activations of the host, or, where rebuilding takes longer,
with KV. Then the rest of host memory is filled so that loading the KV of it takes as
long as rebuilding the activations of it.

Like the paper this takes loads of activations for free (Eq. 9 counts weights and KV
alone), and balances a host memory that is full. ``balance.py`` counts them, for a batch
that is known.

Sizes are those of all layers, times those of one. Each step is rounded down to pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.policies.activations.base import PageLine

__all__ = [
    "Allocation",
    "HostFacts",
    "allocate",
    "initial_allocation",
    "remaining_allocation",
]


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What Algorithm 1 is given.

    Attributes:
        room_bytes: M_Host - S_weight: of host memory, without the weights.
        kv_page_bytes: S_KV, over all layers.
        act_page_bytes: S_ACT, over all layers; half of that in an MHA model.
        num_device_act: #ACT_GPU, pages whose activations the device holds.
        load_weights_s: T_load_w, of one layer.
        kv_gen, load_kv: T_kv_gen and T_load_kv, of one layer.
    """

    room_bytes: int
    kv_page_bytes: int
    act_page_bytes: int
    num_device_act: int
    load_weights_s: float
    kv_gen: PageLine
    load_kv: PageLine


@dataclass(frozen=True, slots=True)
class Allocation:
    """Pages of host memory: #ACT_Host and #KV_Host."""

    num_act: int
    num_kv: int

    def __add__(self, other: Allocation) -> Allocation:
        return Allocation(self.num_act + other.num_act, self.num_kv + other.num_kv)


def allocate(facts: HostFacts) -> Allocation:
    """Return #ACT_Host and #KV_Host (Algorithm 1); together they fit."""
    initial = initial_allocation(facts)
    return initial + remaining_allocation(facts, initial)


def initial_allocation(facts: HostFacts) -> Allocation:
    """Return what makes up for the time that only one side would take (lines 10-18).

    No more than fits: the paper has memory enough.
    """
    budget_s = facts.load_weights_s - facts.kv_gen.seconds(facts.num_device_act)
    room = max(facts.room_bytes, 0)
    if budget_s >= 0.0:
        num_act = min(facts.kv_gen.most(budget_s), room // facts.act_page_bytes)
        return Allocation(num_act, 0)
    num_kv = min(facts.load_kv.most(-budget_s), room // facts.kv_page_bytes)
    return Allocation(0, num_kv)


def remaining_allocation(facts: HostFacts, initial: Allocation) -> Allocation:
    """Return what fills the rest in balance (lines 20-27).

    With T_kv_gen = g0 + g * A and T_load_kv = l0 + l * K, both lines 25 and 26 hold at

        A = (M * l - S_KV * (g0 - l0)) / (S_ACT * l + S_KV * g)

    and where that is no number of pages that fits, the nearest one is taken.
    """
    occupied = facts.act_page_bytes * initial.num_act
    occupied += facts.kv_page_bytes * initial.num_kv
    remaining = max(facts.room_bytes - occupied, 0)
    gen, load = facts.kv_gen, facts.load_kv
    gap_s = gen.overhead_s - load.overhead_s
    balanced = remaining * load.page_s - facts.kv_page_bytes * gap_s
    balanced /= facts.act_page_bytes * load.page_s + facts.kv_page_bytes * gen.page_s
    num_act = min(max(int(balanced), 0), remaining // facts.act_page_bytes)
    left = remaining - num_act * facts.act_page_bytes
    return Allocation(num_act, left // facts.kv_page_bytes)
