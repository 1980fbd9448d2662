"""Who holds a page and where, shared by all the pages of which the same is true.

A *claim* is one integer: the holder's number, and below it a bit per place of
``policies.routing.base.PLACES``. A page's claims are a sorted tuple of them. Pages come
in chains, so that few different tuples name the holders of many pages: each tuple is
kept once, and two pages have equal claims exactly if they have the same object. With a
thousand holders of one beginning a page then costs a pointer, not a thousand integers,
and the end of a run of equal pages is seen by identity.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from sgl_tiered.policies.routing.base import ASSUMED, NUM_PLACES

__all__ = ["ASSUMED_BIT", "FASTEST", "KNOWN_BITS", "NOBODY", "PLACE_MASK"]
__all__ += ["ClaimSets", "Claims"]

_PLACE_BITS = 8
PLACE_MASK = (1 << _PLACE_BITS) - 1
ASSUMED_BIT = 1 << ASSUMED
KNOWN_BITS = ASSUMED_BIT - 1
FASTEST = np.array(
    [
        (mask & -mask).bit_length() - 1 if mask else 0
        for mask in range(1 << _PLACE_BITS)
    ],
    np.int64,
)
"""Per mask of places the fastest of them, the lowest bit."""
assert NUM_PLACES <= _PLACE_BITS


class Claims:
    """One sorted tuple of claims, and what lookups derive from it.

    Attributes:
        claims: the tuple.
        num_nodes: pages that have it.
    """

    __slots__ = ("_columns", "claims", "num_nodes")

    def __init__(self, claims: tuple[int, ...]) -> None:
        self.claims = claims
        self.num_nodes = 0
        self._columns: tuple[npt.NDArray[np.int64], ...] | None = None

    def places(self, number: int) -> int:
        """Return the places of one holder, 0 for none; O(log holders)."""
        at = bisect_left(self.claims, number << _PLACE_BITS)
        if at == len(self.claims):
            return 0
        claim = self.claims[at]
        return claim & PLACE_MASK if claim >> _PLACE_BITS == number else 0

    @property
    def columns(self) -> tuple[npt.NDArray[np.int64], ...]:
        """Numbers of the holders (rising), fastest place, confirmed (0 or 1) of each.

        Three arrays of shape [num_holders], derived at the first lookup.
        """
        if self._columns is None:
            claims = np.array(self.claims, np.int64)
            places = claims & PLACE_MASK
            known = ((places & KNOWN_BITS) != 0).astype(np.int64)
            self._columns = (claims >> _PLACE_BITS, FASTEST[places], known)
        return self._columns


NOBODY = Claims(())


class ClaimSets:
    """All tuples in use, each once."""

    def __init__(self) -> None:
        self._sets: dict[tuple[int, ...], Claims] = {}
        # The last change: neighbours in a chain mostly need the same one.
        self._asked: tuple[Claims, int, int, int] = (NOBODY, -1, 0, 0)
        self._answer: tuple[Claims, int] = (NOBODY, 0)

    def __len__(self) -> int:
        return len(self._sets)

    def changed(
        self, claims: Claims, number: int, keep: int, add: int
    ) -> tuple[Claims, int]:
        """Return the claims with one holder's places changed, and those places.

        Args:
            claims: as they are.
            number: of the holder.
            keep: mask of its places that stay.
            add: places that it gets.
        """
        asked = (claims, number, keep, add)
        last = self._asked
        answer = self._answer
        if (
            last[0] is claims
            and last[1:] == asked[1:]
            and (answer[0].num_nodes or answer[0] is NOBODY)
        ):
            return answer
        places = claims.places(number)
        new = (places & keep) | add
        answer = (claims if new == places else self._with(claims, number, new), new)
        self._asked, self._answer = asked, answer
        return answer

    def moved(self, old: Claims, new: Claims) -> None:
        """Note that a page has other claims now."""
        if new is not NOBODY:
            new.num_nodes += 1
        if old is not NOBODY:
            old.num_nodes -= 1
            if not old.num_nodes:
                del self._sets[old.claims]

    def _with(self, claims: Claims, number: int, places: int) -> Claims:
        old = claims.claims
        at = bisect_left(old, number << _PLACE_BITS)
        behind = at
        if at < len(old) and old[at] >> _PLACE_BITS == number:
            behind += 1
        new = (number << _PLACE_BITS | places,) if places else ()
        wanted = (*old[:at], *new, *old[behind:])
        if not wanted:
            return NOBODY
        found = self._sets.get(wanted)
        if found is None:
            found = self._sets[wanted] = Claims(wanted)
        return found
