"""How long pages are worth their room: learned online, per tier, in bounded memory.

Each page of a sample (by its key, so always the same ones) is remembered from one use to
the next, whether the tier still has it or not. Pages are told apart by *kinds*: how
often they were used, how many turns the conversation had that they came with, and how
long its prompt was. Per kind the ages at which they are used again give, as a life table
with censoring does (Kaplan and Meier, 1958), the share H(T) used again within T accesses
and the mean room s(T) that a page takes if it is kept for T accesses at most. The
*horizon* T of a kind solves

    max  sum_k rate_k * H_k(T_k)   so that   sum_k rate_k * s_k(T_k) = capacity,

that is, T_k maximises H_k(T) - price * s_k(T) at the one price that fills the tier. A
page whose reload costs w times the usual has its horizon at price / w. Ages are counted
in accesses, and nothing depends on a clock or on chance: ranks that see the same
requests learn the same.

Whether this is better than LRU is not believed but tried, see ``cache/duel.py``: without
proof every horizon is 0, and that is LRU.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.duel import Duel
from sgl_tiered.core.plans import Int32s, Int64s, UInt8s, UInt64s

__all__ = ["NUM_KINDS", "ReuseHistory"]

Float64s = npt.NDArray[np.float64]

_MAX_TRACKED = 32_768
"""Pages remembered, about 200 bytes each."""
_REACH = 8
"""Pages are remembered while so many times the tier's capacity of others is used."""
_NUM_USES, _NUM_TURNS, _NUM_LENGTHS = 5, 4, 4
NUM_KINDS = _NUM_USES * _NUM_TURNS * _NUM_LENGTHS
_FIRST_LENGTH = 2_048
"""Tokens; prompts are told apart at 1, 4 and 16 times it."""
_EDGES: Int64s = np.unique(np.round(2.0 ** (np.arange(0, 49) / 2))).astype(np.int64)
_WIDTHS: Float64s = np.diff(np.concatenate([[0], _EDGES])).astype(np.float64)
_PRIOR_PAGES = 100.0
"""Weight of all kinds together in the estimate for one, in pages: some prompts' worth."""
_FIRST_FIT, _FIT_EVERY = 64, 256
"""Requests until the first fit, and between two later ones."""
_HALF_LIFE = 16_384
"""Requests after which what was seen counts half."""
_WEIGHT_STEPS = 3
"""Weights are rounded to powers of 2, from 2**-3 to 2**3."""
_NO_KINDS: UInt8s = np.zeros(0, np.uint8)


class ReuseHistory:
    """What one tier may know of the pages that it keeps, and of those it lost.

    Args:
        capacity_pages: pages of the tier, at least 1.
        page_tokens: tokens of a page.
        trusted: use the horizons without proof, for experiments.
    """

    def __init__(
        self, capacity_pages: int, page_tokens: int, *, trusted: bool = False
    ) -> None:
        self._page_tokens = page_tokens
        self._rate = min(1.0, _MAX_TRACKED / (_REACH * max(1, capacity_pages)))
        self._bound = np.uint64(min(self._rate * 2.0**64, 2.0**64 - 2048))
        self._capacity = max(1.0, capacity_pages * self._rate)
        self._limit = int(min(_MAX_TRACKED, _REACH * self._capacity)) + 64
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
        self._begun: Float64s = np.zeros(NUM_KINDS)
        self._span = 0.0
        self._sequence = 0
        self._num_requests = 0
        self._fit_at = _FIRST_FIT
        self._fitted_at = 0
        # Per weight and kind, in accesses.
        self._horizons: Float64s = np.zeros((2 * _WEIGHT_STEPS + 1, NUM_KINDS))
        self._duel = Duel(max(1, round(self._capacity)))
        self._version = 0

    @property
    def version(self) -> int:
        """Grows when horizons have changed, so that a rank may have fallen."""
        return self._version

    @property
    def is_used(self) -> bool:
        """Whether horizons are given out; without, everything ranks as under LRU."""
        return self._trusted or self._duel.is_won

    def horizon(self, kind: int, weight: float = 1.0) -> float:
        """Return for how many accesses a page is worth its room.

        Args:
            kind: of the page, as ``see`` told it.
            weight: how much dearer than usual it is to bring back.
        """
        if not self.is_used:
            return 0.0
        step = 0 if weight == 1.0 else _step(weight)
        return float(self._horizons[_WEIGHT_STEPS + step, kind])

    def see(self, keys: UInt64s, seen_pages: int, sequence: int) -> UInt8s:
        """Note that a request used its pages; return the kind of each.

        Args:
            keys: uint64 [n], of all pages of the prompt, from its start.
            seen_pages: leading pages of earlier calls for the same request.
            sequence: number of the access, in the unit of horizons.
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
            horizons = self._horizons[_WEIGHT_STEPS, kinds[num_seen:]]
            self._duel.see(keys[picked[num_seen:]], horizons, sequence)
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
        if self._sequence:
            self._span += max(0, sequence - self._sequence)
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
            self._begun[kind] += 1.0

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
        """Solve for the horizons; a millisecond or two."""
        since = self._num_requests - self._fitted_at
        self._fit_at = self._num_requests + min(_FIT_EVERY, max(_FIRST_FIT, since))
        self._fitted_at = self._num_requests
        used = np.fromiter(self._slots.values(), np.int64, len(self._slots))
        ages = self._sequence - self._last[used]
        waiting = np.zeros_like(self._ended)
        bins = np.searchsorted(_EDGES, ages)
        np.add.at(waiting, (self._kind[used], bins), _faded(ages))
        gone = waiting + self._dropped
        hits, rooms = _life_table(self._ended, gone)
        rates = self._begun / max(1.0, self._span)
        self._horizons = _solve(hits, rooms, rates, self._capacity)
        fade = 0.5 ** (since / _HALF_LIFE)
        for array in (self._ended, self._dropped, self._begun):
            array *= fade
        self._span *= fade
        self._version += 1


def _life_table(ended: Float64s, gone: Float64s) -> tuple[Float64s, Float64s]:
    """Return H and s of each kind at each edge; [kinds, edges + 1], 0 first.

    Args:
        ended: pages used again, by kind and age.
        gone: pages whose next use was not seen by that age.
    """
    prior_hits, prior_risk = ended.sum(0), _at_risk(ended.sum(0), gone.sum(0))
    prior = prior_hits / np.maximum(prior_risk, 1e-9)
    hazard = (ended + _PRIOR_PAGES * prior) / (_at_risk(ended, gone) + _PRIOR_PAGES)
    hazard = np.minimum(hazard, 1.0)[:, :-1]
    left = np.cumprod(1.0 - hazard, axis=1)
    left = np.concatenate([np.ones((len(left), 1)), left], axis=1)
    rooms = np.cumsum(_WIDTHS * (left[:, :-1] + left[:, 1:]) / 2, axis=1)
    rooms = np.concatenate([np.zeros((len(left), 1)), rooms], axis=1)
    return 1.0 - left, rooms


def _at_risk(ended: Float64s, gone: Float64s) -> Float64s:
    """Return the pages that reached each age unused; half of those gone there."""
    both = ended + gone
    reached = np.cumsum(both[..., ::-1], axis=-1)[..., ::-1]
    risk: Float64s = reached - gone / 2
    return risk


def _solve(
    hits: Float64s, rooms: Float64s, rates: Float64s, capacity: float
) -> Float64s:
    """Return the horizons by weight and kind, at the price that fills the capacity."""
    ages = np.concatenate([[0], _EDGES]).astype(np.float64)
    kinds = np.arange(len(rates))

    def best(price: float) -> tuple[npt.NDArray[np.intp], float]:
        chosen = np.argmax(hits - price * rooms, axis=1)
        return chosen, float(rates @ rooms[kinds, chosen])

    low, high = 0.0, 1.0
    for _ in range(40):
        price = (low + high) / 2
        if best(price)[1] > capacity:
            low = price
        else:
            high = price
    (over, room_over), (under, room_under) = best(low), best(high)
    gap = room_over - room_under
    part = 0.0 if gap <= 0 else min(1.0, max(0.0, (capacity - room_under) / gap))
    horizons = []
    for step in range(-_WEIGHT_STEPS, _WEIGHT_STEPS + 1):
        if step:
            over, under = best(low / 2.0**step)[0], best(high / 2.0**step)[0]
        horizons.append(ages[under] + part * (ages[over] - ages[under]))
        if step == 0:
            assert (horizons[-1] >= 0).all(), "a horizon before the last access"
    return np.array(horizons)


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


def _step(weight: float) -> int:
    step = round(float(np.log2(max(weight, 1e-9))))
    return max(-_WEIGHT_STEPS, min(_WEIGHT_STEPS, step))
