"""Does it pay to send an answer's KV back to the instance that computed its prompt?

MemServe's PD-Caching-3 (section 5.1) returns every answer, and its cost model (section
5.3) says what cached KV is worth. Here the two meet. The next turn's prompt is what
there is now, s tokens, and at least a page more. Of it the prefill instance has the
c tokens of this prompt, and would find the m tokens that it lacks in its host tier:

    gain = T(s + k | c) - T(s + k | c, m in host)
    cost = B(m) / bandwidth + t_messages + 2 B(m) / sum_rate

with T the least of the model's times (``ContextCaching.decide``), k the tokens of a
page, B(m) the bytes of m tokens, the link's bandwidth as pushes between the two found
it, and the work at both ends: messages, and a checksum made of every byte here and
there. A return is worth it where the gain, times the share of answers that are
continued, exceeds the cost. A second of the link or of an end counts as much as one of
a first token, though nobody waits for it: a return has to earn what it takes from
others. How long the link takes to answer is no cost: nothing is occupied meanwhile.

All of what is missing goes or none: pages cost alike, the later ones save the more, and
the messages are paid once.

Of one request, not of a batch: answers end one by one, and whom the next turn will be
computed with is not known. Pure: no clock, no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.context_caching import CachedPrompt, ContextCaching

__all__ = ["RETURN_POLICIES", "ReturnChoice", "choose_return", "return_cost_s"]

RETURN_POLICIES = ("auto", "always", "never")
WORTH = "a later prefill is predicted to save more than the return costs"
NOT_WORTH = "the return is predicted to cost more than a later prefill saves"
NOTHING = "the answer fills no page that the prefill instance lacks"
ALWAYS = "returns are always made"
NEVER = "returns are never made"

_MESSAGES_S = 12e-3
"""Processor time that a return of one page took: 4 ms on prefill and 9 on decode, of
slow cores (three messages each way, pages entered, loops that turn while it is under
way). The next turn's first token was later by as much where it was asked for at once.
Faster machines pay less, and return less than they could."""
_SUM_BYTES_PER_S = 2e9
"""At which a core reads bytes to sum them up, or somewhat faster."""


@dataclass(frozen=True, slots=True)
class ReturnChoice:
    """What is to become of one answer's KV, and why.

    Attributes:
        num_tokens: to be returned; 0 for none.
        gain_s: predicted time that a next turn would save.
        cost_s: predicted time of the return.
        chance: share of answers that are continued, by which the gain was multiplied.
        reason: one clause.
    """

    num_tokens: int
    gain_s: float
    cost_s: float
    chance: float
    reason: str


def return_cost_s(num_bytes: int, bytes_per_s: float) -> float:
    """Return what a return takes from link and ends, in seconds.

    Args:
        num_bytes: to be sent.
        bytes_per_s: of the link.
    """
    work_s = _MESSAGES_S + 2.0 * num_bytes / _SUM_BYTES_PER_S
    return num_bytes / bytes_per_s + work_s


def choose_return(
    model: ContextCaching,
    num_tokens: int,
    num_known: int,
    cost_s: Callable[[int], float],
    *,
    chance: float = 1.0,
    policy: str = "auto",
) -> ReturnChoice:
    """Decide for one request that has ended.

    Args:
        model: of the instance that computed the prompt.
        num_tokens: prompt and answer that have KV, whole pages.
        num_known: first tokens of them that it has.
        cost_s: predicted time to send so many tokens.
        chance: that the answer is continued, 0 to 1.
        policy: one of ``RETURN_POLICIES``; for experiments other than ``auto``.
    """
    page = model.page_tokens
    num_known = min(num_known // page, num_tokens // page) * page
    num_missing = num_tokens // page * page - num_known
    if not num_missing:
        # Nothing is missing, as far as is known here: it may have lost some since.
        kept = num_tokens if policy == "always" else 0
        return ReturnChoice(kept, 0.0, 0.0, chance, ALWAYS if kept else NOTHING)
    here = ((TierId.DEVICE, num_known),) if num_known else ()
    prompt = CachedPrompt(num_known + num_missing + page, here)
    gain_s = model.gain_s(prompt, (*here, (TierId.HOST, num_missing)))
    sent_s = cost_s(num_missing)
    is_worth = chance * gain_s > sent_s
    if policy == "auto":
        reason = WORTH if is_worth else NOT_WORTH
    else:
        is_worth = policy == "always"
        reason = ALWAYS if is_worth else NEVER
    return ReturnChoice(num_missing if is_worth else 0, gain_s, sent_s, chance, reason)
