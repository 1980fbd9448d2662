"""What a call of ``python -m tests.equality`` goes through: worlds, and their order.

A *world* is one server (two with a pool, or with prefill and decode apart) with a pair
of features on and some tiers below its device. Each pair of features is one world; how
often it has run before decides which tiers it gets, which faults strike and whether it
is killed, so that further calls see other combinations. Nothing here starts anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

__all__ = [
    "CHAINS",
    "FAULTS",
    "FEATURES",
    "INERT",
    "MIN_PER_CELL",
    "TIERS",
    "World",
    "empty_cells",
    "next_worlds",
    "pair_name",
    "pairs",
]

FEATURES = (
    "layerwise",
    "activations",
    "orders",
    "prefetch",
    "admission",
    "splits",
    "pool",
    "pd",
    "ranks",
)
TIERS = ("host", "cxl", "disk", "peer")
"""Below the device; ``peer`` is what another server of the pool has."""
CHAINS = (
    ("host", "cxl", "disk"),
    ("host", "disk"),
    ("host", "cxl", "disk"),
    ("host", "cxl"),
)
"""What is below a server's device, by turns. The second has little host memory."""
MIN_PER_CELL = 30
"""Answers with pages of a tier under a feature; a cell with fewer counts as empty."""
INERT: Mapping[str, Mapping[str, str]] = {
    "admission+pd": {
        "admission": "a prompt is held for requests that decode on the same server, "
        "and where prompts are computed none does"
    },
    "splits+pd": {
        "splits": "a prefill server hands its chunks on as they end, so that it splits "
        "no prompt"
    },
}
"""By pair, what is on there and cannot act, and why: the product does not refuse it.

Such a pair runs, as its answers must be right nevertheless."""
_FAULTS_PER_WORLD = 3

FAULTS: Mapping[str, Mapping[str, str]] = {
    "host": {
        "slow": "host:delay=0.001..0.004",
        "failing": "host:fault=error@0.3/load",
        "full": "host:fault=error/store",
        "dead": "host:fault=hang/for=1",
    },
    "cxl": {
        "slow": "cxl:delay=0.001..0.004",
        "failing": "cxl:fault=error@0.3/load",
        "dead": "cxl:fault=error",
    },
    "disk": {
        "slow": "disk:delay=0.02..0.1",
        "failing": "disk:fault=error@0.5",
        "corrupt": "disk:fault=partial@0.4/load,fault=corrupt@0.5,fault=zero@0.2",
        "full": "disk:fault=full",
        "dead": "disk:fault=hang",
        "removed": "",
    },
}
"""By tier and kind, the text of the fault; ``removed`` is done to the disk's folder.

Wrong bytes in memory are not among them: memory is trusted, so that they are planted
faults, which the gate must catch."""
_LAYERED_HOST = {
    "slow": "host:delay=0.001..0.002",
    "failing": "host:fault=error/load/times=1",
}
"""Layers that are not on the device lie in host memory only: where none of them can be
read, a request ends with a sentence, as documented."""


@dataclass(frozen=True, slots=True)
class World:
    """One combination.

    Attributes:
        features: one pair; empty for tiers alone.
        tiers: below the device of each server, fastest first.
        faults: (tier, kind) of ``FAULTS``, in the order in which they strike.
        is_killed: by SIGKILL under load, and started again on what its disk has.
        is_planted: in the end it is made to answer wrongly, which has to be caught.
    """

    features: tuple[str, ...]
    tiers: tuple[str, ...]
    faults: tuple[tuple[str, str], ...] = ()
    is_killed: bool = False
    is_planted: bool = False

    @property
    def on(self) -> frozenset[str]:
        """All features that are on: activations are kept by layer-wise KV only."""
        implied = {"layerwise"} if "activations" in self.features else set()
        return frozenset(self.features) | implied

    @property
    def fetches_to_device(self) -> bool:
        """Whether prefetch goes on to the device, where the product does that."""
        return "prefetch" in self.on and not self.on & {"layerwise", "ranks", "pd"}

    @property
    def pair(self) -> str:
        """Name of the pair."""
        return pair_name(self.features)

    def fault_text(self, tier: str, kind: str) -> str:
        """Return what is switched on for a fault."""
        if tier == "host" and "layerwise" in self.on:
            return _LAYERED_HOST[kind]
        return FAULTS[tier][kind]


def pair_name(features: Collection[str]) -> str:
    """Return the name of a pair, such as ``layerwise+pd``; of none, ``tiers``."""
    return "+".join(name for name in FEATURES if name in features) or "tiers"


def pairs() -> list[tuple[str, ...]]:
    """Return all pairs of features, and none at all, those with one server first.

    So mixed that a call that ends early has seen every feature.
    """
    every = list(combinations(FEATURES, 2))
    steps = sorted(every, key=lambda pair: (_distance(pair), pair))
    return [(), *steps]


def next_worlds(times_run: Mapping[str, int]) -> list[World]:
    """Return a world for each pair, those that have run least first.

    Args:
        times_run: by name of the pair, in earlier calls on this source.
    """
    worlds = []
    for place, features in enumerate(pairs()):
        times = times_run.get(pair_name(features), 0)
        worlds.append((times, place, _world(features, place + times)))
    return [world for *_, world in sorted(worlds, key=lambda one: one[:2])]


def empty_cells(
    cells: Mapping[str, Mapping[str, int]], refused: Collection[str]
) -> list[str]:
    """Return the names of cells with too few answers, such as ``disk x orders``.

    Args:
        cells: answers by tier, then by feature.
        refused: names of pairs that the product refuses. Pages of a peer need a pool,
            so a feature that is refused with one has no such cell.
    """
    return [
        f"{tier} x {feature}"
        for tier in TIERS
        for feature in FEATURES
        if cells.get(tier, {}).get(feature, 0) < MIN_PER_CELL
        and not (tier == "peer" and pair_name(("pool", feature)) in refused)
    ]


def _distance(pair: tuple[str, ...]) -> int:
    first, second = (FEATURES.index(name) for name in pair)
    return min(second - first, len(FEATURES) - second + first)


def _world(features: tuple[str, ...], turn: int) -> World:
    tiers = CHAINS[turn % len(CHAINS)]
    if "splits" in features and "disk" not in tiers:
        # The back of a prompt is read from disk while its front is computed.
        tiers = CHAINS[0]
    world = World(features, tiers)
    if world.on & {"prefetch"} and not world.fetches_to_device and "disk" not in tiers:
        # Pages are brought from disk to the host, and nothing else.
        tiers = CHAINS[0]
        world = replace(world, tiers=tiers)
    kinds = [
        (tier, kind)
        for tier in reversed(tiers)
        for kind in (
            _LAYERED_HOST
            if tier == "host" and "layerwise" in world.on
            else FAULTS[tier]
        )
    ]
    begin = turn * _FAULTS_PER_WORLD
    faults = tuple(kinds[(begin + n) % len(kinds)] for n in range(_FAULTS_PER_WORLD))
    return World(
        features,
        tiers,
        faults,
        # A pair's servers know each other by their ports; who is killed there, and what
        # its partner does then, is for tests/cluster.
        is_killed="disk" in tiers and turn % 2 == 0 and "pd" not in features,
        is_planted=turn % 3 == 0,
    )
