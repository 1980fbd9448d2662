"""The cheapest request first, as far as nobody's wait leaves what fcfs gives."""

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
"""Requests whose costs differ by less than this factor are equals: swapping them gains
little, and the predictions are not that good."""
_LEAST_S = 1e-9


class CostOrder:
    """Cheapest request first, inside the slack that fcfs leaves.

    Sources: shortest job first has the least mean wait (Smith, 1956); what it does to
    the tail is kept off by due times, as in earliest due date first (Jackson, 1955).
    Ours is what a request costs, and how the two are joined.

    What serving request j delays the others by is predicted as

        c_j = service_s_j + h * (tokens of j that need room on the device)

    ``service_s`` is the planner's time of its pass; h is how long the queue was lately
    held up beside passes, by decoding and a full pool, per token of room given away
    (``FCFSShadow``). Where computing is short h is 0, where room is, room decides.
    Under fcfs the waiting request k would have its first token a time

        F_k = (now - arrival_k) + sum of c_j over all j that came before it, and k

    after it came. The *level* is the 0.9-quantile of F over those that wait together
    with what fcfs would have given to the requests served lately. A request x may go
    before older ones i if every one of them stays below the level with it:

        c_x <= min over older i of (level - F_i)

    and then uses up c_x of the slack of each of them. Of those that may, the one of the
    lowest class of c goes first, the oldest among equals; the oldest of all always may.
    So, as far as the predictions hold, whoever waits longer than the level under fcfs
    waits no longer under this order, and those who would not may be asked to wait as
    long as the tenth that fcfs treats worst does.

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
        # ``num_new_tokens`` of each, without a call for each.
        new_tokens = np.array(
            [facts.num_prompt_tokens - facts.num_device_tokens for facts in waiting]
        )
        cost_s = service_s + self._shadow.held_token_s * np.maximum(new_tokens, 1)
        fcfs_s = now_s - arrival_s + np.cumsum(cost_s)
        known = np.concatenate([self._shadow.waits_s, fcfs_s])
        level_s = 0.0
        if self._quantile:
            place = int(self._quantile * (len(known) - 1))
            level_s = float(np.partition(known, place)[place])
        cost_s = np.maximum(cost_s[:num], _LEAST_S)
        classes = np.floor(np.log(cost_s) / self._log_octave)
        picked = _pick(classes, cost_s, level_s - fcfs_s[:num])
        is_picked = np.zeros(num, np.bool_)
        is_picked[picked] = True
        rest = np.flatnonzero(~is_picked).tolist()
        return [*picked, *rest, *range(num, len(waiting))]


def _pick(classes: Float64s, cost_s: Float64s, slack_s: Float64s) -> list[int]:
    """Return positions in the order of service; float64 [n] each, by arrival."""
    num = len(classes)
    classes, slack_s = classes.copy(), slack_s.copy()
    # What the least patient of all older ones can still bear; the oldest has none.
    bearable_s = np.full(num + 1, np.inf)
    picked: list[int] = []
    for _ in range(min(NUM_PICKS, num)):
        np.minimum.accumulate(slack_s, out=bearable_s[1:])
        ranks = np.where(cost_s <= bearable_s[:-1], classes, np.inf)
        best = int(ranks.argmin())
        picked.append(best)
        slack_s[:best] -= cost_s[best]
        # It is neither chosen again nor asked what it can bear.
        classes[best] = slack_s[best] = np.inf
    return picked
