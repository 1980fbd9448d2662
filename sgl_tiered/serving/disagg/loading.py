"""A decode instance's own tiers: what they hold of a prompt is loaded, not sent.

What the decode instance says it has decides what is sent to it, and it says so once it
takes room for a request. Ahead of that, pages that its tiers hold in memory are brought
into SGLang's tree, where that is predicted to be faster than being sent them. The
request is looked at again when they have landed; a load that fails, finds no room or
comes late leaves everything as it was, and what the tree then lacks is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_tiered.cache.device_prefetcher import DevicePrefetcher
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Int32s
from sgl_tiered.policies.prefetch.base import QueueFacts

__all__ = ["Arriving", "OwnLoads"]

_LEAST_PATIENCE_S = 0.25
_PATIENCE_FACTOR = 4.0
"""A load may take so many times what was predicted before its request goes without."""


@dataclass(slots=True, eq=False)
class Arriving:
    """A request that has not been matched yet; see ``device_prefetcher.Waiting``.

    Attributes:
        digest: of its namespace.
        tokens: int32, its prompt.
        max_pages, num_pages: of the prompt that may be reused, and of all of it.
        key: the prompt as SGLang's tree knows it.
        is_loading: a load was begun for it.
        until_s: when it goes on in any case.
        is_over: it waits for nothing any more.
    """

    digest: bytes
    tokens: Int32s
    max_pages: int
    num_pages: int
    key: Any
    is_loading: bool = False
    until_s: float = 0.0
    is_over: bool = False
    memory_only: bool = True

    @property
    def has_plan(self) -> bool:
        """Whether a load would come too late for it."""
        return self.is_over


class _AtOnce:
    """A policy by which every load is due."""

    name = "at once"
    at_arrival = False
    looks_ahead = True

    def starts_s(self, facts: QueueFacts) -> tuple[float, ...]:
        """Return that each could start now."""
        return (0.0,) * len(facts.services_s)

    def due_in_s(
        self, starts_s: Sequence[float], loads_s: Sequence[float]
    ) -> tuple[float, ...]:
        """Return that each load is due now."""
        del loads_s
        return (0.0,) * len(starts_s)


class OwnLoads:
    """Loads ahead of the match; the scheduler's thread only.

    Args:
        cache: knows what the tiers hold.
        clock: bounds the waiting.
        sent_s: predicted time to be sent pages, given the first one and how many.
    """

    def __init__(
        self, cache: TieredCache, clock: Clock, sent_s: Callable[[int, int], float]
    ) -> None:
        self.prefetcher = DevicePrefetcher(cache, _AtOnce(), sent_s)
        self._cache = cache
        self._clock = clock
        self._arriving: dict[str, Arriving] = {}

    @property
    def arriving(self) -> list[Arriving]:
        """Requests that were seen and are not matched yet."""
        return list(self._arriving.values())

    def state(self, rid: str) -> Arriving | None:
        """Return what is known of a request that was seen."""
        return self._arriving.get(rid)

    def arrived(self, rid: str, digest: bytes, tokens: Int32s, key: Any) -> Arriving:
        """Note a request that is seen for the first time."""
        page = self._cache.config.layout.page_tokens
        num_pages = -(-len(tokens) // page)
        max_pages = max(len(tokens) - 1, 0) // page
        state = Arriving(digest, tokens, max_pages, num_pages, key)
        self._arriving[rid] = state
        return state

    def advance(
        self, rids: Collection[str], on_device: Callable[[Arriving], int]
    ) -> set[str]:
        """Begin loads; return the requests that should wait for theirs.

        Args:
            rids: of all that could be matched now; others have gone on or ended.
            on_device: the pages of a prompt that are on the device.
        """
        for rid in [rid for rid in self._arriving if rid not in rids]:
            del self._arriving[rid]
        for state in self._arriving.values():
            if state.is_loading and not self.prefetcher.is_coming(state):
                # Once only: what has landed is found by the match.
                state.is_over = True
        room = self._room()
        looked_at = [
            rid
            for rid, state in self._arriving.items()
            # Where it has no room, it is looked at again once there is some.
            if not state.is_over and (state.is_loading or state.num_pages <= room)
        ]
        if not looked_at and not self.prefetcher.is_busy:
            return set()
        states = [self._arriving[rid] for rid in looked_at]
        waiting = [(state, on_device(state)) for state in states]
        self.prefetcher.advance(waiting, (), [0.0] * len(waiting), 0.0)
        now_s = self._clock.now()
        held = set()
        for rid, state in zip(looked_at, states, strict=True):
            is_coming = self.prefetcher.is_coming(state)
            if is_coming and not state.is_loading:
                state.is_loading = True
                state.until_s = now_s + self._patience_s(state)
            if is_coming and now_s < state.until_s:
                held.add(rid)
            else:
                state.is_over = True
        return held

    def clear(self) -> None:
        """Forget everybody."""
        self._arriving.clear()

    def _room(self) -> int:
        room = self.prefetcher.room
        return 0 if room is None or not self._arriving else room.room_pages()

    def _patience_s(self, state: Arriving) -> float:
        load_s = self._cache.planner.load_s(TierId.HOST, state.max_pages)
        return max(_LEAST_PATIENCE_S, _PATIENCE_FACTOR * load_s)
