"""What pages are worth their room: learned online, per tier, in bounded memory.

Each page of a sample (by its key, so always the same ones) is remembered from one use
to the next, whether the tier still has it or not. Pages are told apart by *kinds*: how
often they were used, how many turns the conversation had that they came with, and how
long its prompt was. Per kind the ages at which they are used again give, as a life
table with censoring does (Kaplan and Meier, 1958), the share S(a) not used again by age
a and the mean time I(a) that a page waits if it is given up at that age. From them
follows the reuse per access of room that a page of age a has still to give,

    density(a) = max over b > a of (S(a) - S(b)) / (I(b) - I(a)).

Ages are counted in accesses, and nothing depends on a clock or on chance: ranks that
see the same requests learn the same. Whether ranking by density is better than LRU is
not believed but tried, see ``cache/duel.py``: without proof every density is 0.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.duel import AGE_EDGES, Duel
from sgl_tiered.core.plans import Int32s, Int64s, UInt8s, UInt64s

__all__ = ["NUM_KINDS", "ReuseHistory"]

Float64s = npt.NDArray[np.float64]

_MAX_TRACKED = 32_768
"""Pages remembered, about 200 bytes each."""
_REACH = 8
"""Pages are remembered while at least so many times the tier's capacity of others is
used: where that is more than can be remembered, only a sample of the pages is."""
_NUM_USES, _NUM_TURNS, _NUM_LENGTHS = 5, 4, 4
NUM_KINDS = _NUM_USES * _NUM_TURNS * _NUM_LENGTHS
_FIRST_LENGTH = 2_048
"""Tokens; prompts are told apart at 1, 4 and 16 times it."""
_EDGES: Int64s = AGE_EDGES
_EDGE_LIST: list[int] = _EDGES.tolist()
_WIDTHS: Float64s = np.diff(np.concatenate([[0], _EDGES])).astype(np.float64)
_PRIOR_PAGES = 100.0
"""Weight of all kinds together in the estimate for one, in pages: a few prompts."""
_FIRST_FIT, _FIT_EVERY = 64, 256
"""Requests until the first fit, and between two later ones."""
_HALF_LIFE = 16_384
"""Requests after which what was seen counts half."""
_NO_KINDS: UInt8s = np.zeros(0, np.uint8)


class ReuseHistory:
    """What one tier may know of the pages that it keeps, and of those it lost.

    Args:
        capacity_pages: pages of the tier, at least 1.
        page_tokens: tokens of a page.
        trusted: use the densities without proof, for experiments.
    """

    def __init__(
        self, capacity_pages: int, page_tokens: int, *, trusted: bool = False
    ) -> None:
        self._page_tokens = page_tokens
        self._rate = min(1.0, _MAX_TRACKED / (_REACH * max(1, capacity_pages)))
        self._bound = np.uint64(min(self._rate * 2.0**64, 2.0**64 - 2048))
        self._capacity = max(1.0, capacity_pages * self._rate)
        self._limit = _MAX_TRACKED + 64
        self._trusted = trusted
        self._slots: dict[int, int] = {}
        self._free = list(range(self._limit))
        self._keys: UInt64s = np.zeros(self._limit, np.uint64)
        self._last: Int64s = np.zeros(self._limit, np.int64)
        self._kind: UInt8s = np.zeros(self._limit, np.uint8)
        self._uses: Int32s = np.zeros(self._limit, np.int32)
        self._turn: Int32s = np.zeros(self._limit, np.int32)
        shape = (NUM_KINDS, len(_EDGES) + 1)
        self._ended: Float64s = np.zeros(shape)
        self._dropped: Float64s = np.zeros(shape)
        self._sequence = 0
        self._num_requests = 0
        self._fit_at = _FIRST_FIT
        self._fitted_at = 0
        # By kind and by place of the age in the edges.
        self._densities: Float64s = np.zeros(shape)
        self._duel = Duel(max(1, round(self._capacity)))
        self._version = 0

    @property
    def version(self) -> int:
        """Grows when densities begin or cease to be given out."""
        return self._version

    @property
    def is_used(self) -> bool:
        """Whether densities are given out; without, everything ranks as under LRU."""
        return self._trusted or self._duel.is_won

    @property
    def gain(self) -> float:
        """Sampled pages that ranking by density has hit more than LRU, faded."""
        return self._duel.gain

    @property
    def sequence(self) -> int:
        """Number of the latest access."""
        return self._sequence

    def next_step(self, accessed: int) -> int | None:
        """Return the access at which a page's density changes by age; None: never.

        Args:
            accessed: number of its last access.
        """
        place = bisect_left(_EDGE_LIST, self._sequence - accessed)
        if place == len(_EDGE_LIST):
            return None
        return accessed + _EDGE_LIST[place] + 1

    def density(self, kind: int, accessed: int) -> float:
        """Return the uses per access of room that a page has still to give.

        Args:
            kind: of the page, as ``see`` told it.
            accessed: number of its last access.
        """
        if not self.is_used:
            return 0.0
        place = bisect_left(_EDGE_LIST, self._sequence - accessed)
        return float(self._densities[kind, place])

    def see(self, keys: UInt64s, seen_pages: int, sequence: int) -> UInt8s:
        """Note that a request used its pages; return the kind of each.

        Args:
            keys: uint64 [n], of all pages of the prompt, from its start.
            seen_pages: leading pages of earlier calls for the same request.
            sequence: number of the access, in the unit of ages.
        """
        if not len(keys):
            return _NO_KINDS
        picked = np.flatnonzero(_mixed(keys) < self._bound)
        if not len(picked):
            return np.zeros(len(keys), np.uint8)
        find = self._slots.get
        slots = np.array([find(key, -1) for key in keys[picked].tolist()], np.int64)
        self._advance(sequence, is_new=seen_pages == 0)
        sequence = self._sequence
        num_seen = int(np.searchsorted(picked, seen_pages))
        known = slots[num_seen:] >= 0
        turn = self._turn_of(slots, num_seen)
        self._end(slots[num_seen:][known], sequence)
        self._begin(picked[num_seen:], keys, slots, num_seen, turn)
        kinds = self._kind[slots]
        if num_seen < len(picked):
            self._duel.see(keys[picked].tolist(), kinds.tolist(), num_seen, sequence)
            if self._duel.turned:
                self._version += 1
        if self._num_requests >= self._fit_at:
            self._fit()
        # Pages between two of the sample are like the one before them.
        nearest = np.searchsorted(picked, np.arange(len(keys)), "right") - 1
        found: UInt8s = kinds[np.maximum(nearest, 0)]
        return found

    def clear(self) -> None:
        """Forget the pages; what was learned of their kinds stays."""
        self._slots.clear()
        self._free = list(range(self._limit))
        self._duel.clear()

    # -- Learning ------------------------------------------------------------------

    def _advance(self, sequence: int, *, is_new: bool) -> None:
        self._sequence = max(self._sequence, sequence)
        self._num_requests += is_new

    def _turn_of(self, slots: Int64s, num_seen: int) -> int:
        """Return the turn of the pages that come new with a request."""
        known = np.flatnonzero(slots >= 0)
        if not len(known):
            return 1
        turn = int(self._turn[slots[known[-1]]])
        return turn + 1 if known[-1] >= num_seen else turn

    def _end(self, slots: Int64s, sequence: int) -> None:
        ages = sequence - self._last[slots]
        bins = np.searchsorted(_EDGES, ages)
        np.add.at(self._ended, (self._kind[slots], bins), _faded(ages))
        # So that they are not the oldest where room is made for new ones.
        self._last[slots] = sequence

    def _begin(
        self, places: Int64s, keys: UInt64s, slots: Int64s, num_seen: int, turn: int
    ) -> None:
        """Start a new wait of each page; fills in the slots of new ones."""
        num_new = int(np.count_nonzero(slots[num_seen:] < 0))
        if num_new > len(self._free):
            self._drop_oldest(num_new)
        length = len(keys) * self._page_tokens
        size = min(_NUM_LENGTHS - 1, max(0, _log4(length // _FIRST_LENGTH)))
        for number, place in enumerate(places.tolist(), num_seen):
            slot = int(slots[number])
            if slot < 0:
                if not self._free:
                    # A prompt longer than the memory: its end stays unknown.
                    slots[number:] = max(0, int(slots[max(0, number - 1)]))
                    return
                slot = self._free.pop()
                slots[number] = slot
                key = int(keys[place])
                self._slots[key] = slot
                self._keys[slot] = key
                self._uses[slot] = 0
                self._turn[slot] = turn
            self._uses[slot] += 1
            uses = min(_NUM_USES, int(self._uses[slot])) - 1
            kind = (uses * _NUM_TURNS + min(_NUM_TURNS, turn) - 1) * _NUM_LENGTHS + size
            self._kind[slot] = kind
            self._last[slot] = self._sequence

    def _drop_oldest(self, num_needed: int) -> None:
        used = np.fromiter(self._slots.values(), np.int64, len(self._slots))
        # Those of this very access are younger than all that can go.
        old = used[self._last[used] < self._sequence]
        count = min(len(old), max(num_needed, self._limit // 8))
        if not count:
            return
        gone = old[np.argpartition(self._last[old], count - 1)[:count]]
        ages = self._sequence - self._last[gone]
        bins = np.searchsorted(_EDGES, ages)
        np.add.at(self._dropped, (self._kind[gone], bins), _faded(ages))
        for key in self._keys[gone].tolist():
            del self._slots[key]
        self._free += gone.tolist()

    def _fit(self) -> None:
        """Make the life tables anew; a millisecond or two."""
        since = self._num_requests - self._fitted_at
        self._fit_at = self._num_requests + min(_FIT_EVERY, max(_FIRST_FIT, since))
        self._fitted_at = self._num_requests
        used = np.fromiter(self._slots.values(), np.int64, len(self._slots))
        ages = self._sequence - self._last[used]
        waiting = np.zeros_like(self._ended)
        bins = np.searchsorted(_EDGES, ages)
        np.add.at(waiting, (self._kind[used], bins), _faded(ages))
        gone = waiting + self._dropped
        self._densities = _densities(self._ended, gone)
        self._duel.use(self._densities)
        fade = 0.5 ** (since / _HALF_LIFE)
        self._ended *= fade
        self._dropped *= fade


def _densities(ended: Float64s, gone: Float64s) -> Float64s:
    """Return the density of each kind at each age, [kinds, edges + 1].

    Args:
        ended: pages used again, by kind and age.
        gone: pages whose next use was not seen by that age.
    """
    prior = ended.sum(0) / np.maximum(_at_risk(ended.sum(0), gone.sum(0)), 1e-9)
    hazard = (ended + _PRIOR_PAGES * prior) / (_at_risk(ended, gone) + _PRIOR_PAGES)
    hazard = np.minimum(hazard, 1.0)[:, :-1]
    start = np.ones((len(hazard), 1))
    left = np.concatenate([start, np.cumprod(1.0 - hazard, axis=1)], axis=1)
    rooms = np.cumsum(_WIDTHS * (left[:, :-1] + left[:, 1:]) / 2, axis=1)
    rooms = np.concatenate([0 * start, rooms], axis=1)
    found: Float64s = np.zeros(left.shape)
    for place in range(left.shape[1] - 1):
        uses = left[:, place : place + 1] - left[:, place + 1 :]
        kept = rooms[:, place + 1 :] - rooms[:, place : place + 1]
        found[:, place] = (uses / np.maximum(kept, 1e-12)).max(axis=1)
    return found


def _at_risk(ended: Float64s, gone: Float64s) -> Float64s:
    """Return the pages that reached each age unused; half of those gone there."""
    both = ended + gone
    reached = np.cumsum(both[..., ::-1], axis=-1)[..., ::-1]
    risk: Float64s = reached - gone / 2
    return risk


def _mixed(keys: UInt64s) -> UInt64s:
    """Return hashes (SplitMix64) of keys that may be small numbers."""
    x = keys + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64s = x ^ (x >> np.uint64(31))
    return mixed


def _faded(ages: Int64s) -> Float64s:
    faded: Float64s = 0.5 ** (ages / _HALF_LIFE)
    return faded


def _log4(value: int) -> int:
    return (max(1, value).bit_length() + 1) // 2 if value else 0
