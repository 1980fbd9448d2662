"""The shortest predicted pass first, as far as nobody's wait leaves what fcfs gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgl_tiered.policies.order.base import WaitingFacts
from sgl_tiered.policies.order.car import window_end
from sgl_tiered.policies.order.shadow import FCFSShadow

__all__ = ["CostOrder"]

Float64s = npt.NDArray[np.float64]

WINDOW = 128
"""Arrivals among which may be chosen: the hard bound of any wait."""
NUM_PICKS = 32
"""Requests that are arranged by cost in a pass; the others follow by arrival. More than
a pass takes would be thrown away with it."""
QUANTILE = 0.9
"""Of the waits that fcfs gives: below it there is slack to use up, above it is the
tail, which nobody is to join who would not be in it anyway."""
OCTAVE = 2.0
"""Requests whose predicted times differ by less than this factor are equals: swapping
them gains little, and the predictions are not that good."""


class CostOrder:
    """Shortest predicted service first, inside the slack that fcfs leaves.

    Sources: shortest job first has the least mean wait (Smith, 1956); what it does to
    the tail is kept off by due times, as in earliest due date first (Jackson, 1955).
    Ours is how they are joined.

    Under fcfs the waiting request k would have its first token a time

        F_k = (now - arrival_k) + sum of d_j over all j that came before it, and k

    after it came, where d_j is the predicted pass ``service_s`` of j and what a request
    was lately held up beside its pass (decoding, a full pool; see ``FCFSShadow``). The
    *level* is the 0.9-quantile of F over those that wait together with what fcfs would
    have given to the requests served lately. A request x may go before older ones i if
    every one of them stays below the level with it:

        d_x <= min over older i of (level - F_i)

    and then uses up d_x of the slack of each of them. Of those that may, the one of the
    shortest class of ``service_s`` goes first, the oldest among equals; the oldest of
    all always may. So whoever waits longer than the level under fcfs waits no longer
    under this order, and those who would not may be asked to wait as long as the tenth
    that fcfs treats worst does.

    Bound: reordering takes place inside ``window_end`` only, so a request is overtaken
    by at most ``window - 1`` later arrivals, whatever is predicted: with p requests
    before it when it came, it is served after p + window - 1 others at the latest.

    Args:
        window: arrivals in the window, at least 1.
        quantile: of fcfs's waits that gives the level, 0 to 1; 0 is fcfs.
        octave: factor between the classes of equals, more than 1.
    """

    name = "cost"
    needs_facts = True

    def __init__(
        self,
        window: int = WINDOW,
        quantile: float = QUANTILE,
        octave: float = OCTAVE,
    ) -> None:
        assert window >= 1, f"a window of {window} requests"
        assert 0.0 <= quantile <= 1.0, f"a quantile of {quantile}"
        assert octave > 1.0, f"classes a factor of {octave} apart"
        self.window = window
        self._quantile = quantile
        self._log_octave = float(np.log(octave))
        self._shadow = FCFSShadow()

    def arrange(
        self, waiting: Sequence[WaitingFacts], now_s: float, pass_number: int
    ) -> list[int]:
        """Return the next requests by cost, then the others by arrival.

        O(NUM_PICKS * window) simple array steps.
        """
        del pass_number
        self._shadow.look(waiting, now_s)
        num = window_end(waiting, self.window)
        if num < 2:
            return list(range(len(waiting)))
        service_s = np.array([facts.service_s for facts in waiting])
        arrival_s = np.array([facts.arrival_s for facts in waiting])
        delay_s = service_s + self._shadow.held_s
        fcfs_s = now_s - arrival_s + np.cumsum(delay_s)
        known = np.concatenate([self._shadow.waits_s, fcfs_s])
        level_s = np.quantile(known, self._quantile) if self._quantile else 0.0
        octaves = np.log(np.maximum(service_s[:num], 1e-9)) / self._log_octave
        picked = _pick(np.floor(octaves), delay_s[:num], level_s - fcfs_s[:num])
        is_picked = np.zeros(num, np.bool_)
        is_picked[picked] = True
        rest = np.flatnonzero(~is_picked).tolist()
        return [*picked, *rest, *range(num, len(waiting))]


def _pick(classes: Float64s, delay_s: Float64s, slack_s: Float64s) -> list[int]:
    """Return positions in the order of service; float64 [n] each, by arrival."""
    positions = np.arange(len(classes))
    slack_s = slack_s.copy()
    picked = []
    for _ in range(min(NUM_PICKS, len(classes))):
        # What the least patient of all older ones can still bear; the oldest has none.
        bearable_s = np.minimum.accumulate(slack_s)
        may = np.empty(len(classes), np.bool_)
        may[0] = True
        np.less_equal(delay_s[1:], bearable_s[:-1], out=may[1:])
        best = int(np.where(may, classes, np.inf).argmin())
        slack_s[:best] -= delay_s[best]
        picked.append(int(positions[best]))
        positions = np.delete(positions, best)
        classes = np.delete(classes, best)
        delay_s = np.delete(delay_s, best)
        slack_s = np.delete(slack_s, best)
    return picked
