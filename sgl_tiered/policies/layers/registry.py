"""Names of the turns, as flags spell them."""

from __future__ import annotations

from collections.abc import Callable

from sgl_tiered.policies.by_name import maker_of
from sgl_tiered.policies.layers.join import JoinTurns
from sgl_tiered.policies.layers.turns import PauseTurns, StreamTurns, Turns

__all__ = ["TURNS", "make_turns"]

_MAKERS: dict[str, Callable[[], Turns]] = {
    PauseTurns.name: PauseTurns,
    StreamTurns.name: StreamTurns,
    JoinTurns.name: JoinTurns,
}

TURNS: tuple[str, ...] = tuple(_MAKERS)


def make_turns(name: str) -> Turns:
    """Return a new policy.

    Raises:
        ConfigError: no policy has this name.
    """
    return maker_of(_MAKERS, "layerkv_decode", name)()
