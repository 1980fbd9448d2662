"""Whether an answer goes back: asked once of each request that has ended on decode.

The decision is ``cost/returning.py``; here its facts are gathered: what the prefill
instance has told of itself, how many answers were continued so far, and what is sent.
It takes some ten microseconds, whatever it decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import Int32s
from sgl_tiered.cost.continued import ContinuedShare
from sgl_tiered.cost.returning import ReturnChoice, choose_return, return_cost_s
from sgl_tiered.serving.disagg.figures import PrefillFigures

__all__ = ["ReturnJudge"]

_RECENT = 8
_DIGITS = 6


class ReturnJudge:
    """Decides for one decode instance.

    Args:
        policy: one of ``RETURN_POLICIES``.
        layout: of a page.
        count: takes ``returns_declined`` and ``pages_declined``.
    """

    def __init__(
        self, policy: str, layout: PageLayout, count: Callable[[str, int], None]
    ) -> None:
        self._policy = policy
        self._layout = layout
        self._count = count
        self._answers = ContinuedShare()
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)

    def asked(self, namespace: bytes, tokens: Int32s) -> None:
        """Note the prompt of a request that has come."""
        self._answers.asked(namespace, tokens)

    def is_worth(
        self,
        rid: str,
        figures: PrefillFigures,
        namespace: bytes,
        tokens: Int32s,
        num_prompt: int,
    ) -> bool:
        """Return whether an answer is to go back.

        Args:
            rid: of the request that has ended.
            figures: of the instance that computed its prompt.
            namespace: digest of its namespace.
            tokens: int32 [n], prompt and answer, whole pages.
            num_prompt: tokens of the prompt.
        """
        page = self._layout.page_tokens
        token_bytes = self._layout.page_bytes // page

        def cost_s(num_tokens: int) -> float:
            return return_cost_s(num_tokens * token_bytes, figures.bytes_per_s)

        choice = choose_return(
            figures.model(page, self._layout.num_layers),
            len(tokens),
            num_prompt,
            cost_s,
            chance=self._answers.share,
            policy=self._policy,
        )
        num_missing = max(len(tokens) - num_prompt // page * page, 0)
        if num_missing:
            self._answers.ended(namespace, tokens)
        if not choice.num_tokens:
            self._count("returns_declined", 1)
            self._count("pages_declined", num_missing // page)
        self._recent.append(_told(rid, choice, num_missing, figures.is_fitted))
        return bool(choice.num_tokens)

    def clear(self) -> None:
        """Forget answers: the weights have changed, say."""
        self._answers.clear()

    def stats(self) -> dict[str, Any]:
        """Return the last decisions and what they went by, JSON-able."""
        return {
            "policy": self._policy,
            "continued_share": round(self._answers.share, _DIGITS),
            "last": list(self._recent),
        }


def _told(
    rid: str, choice: ReturnChoice, num_missing: int, is_fitted: bool
) -> dict[str, Any]:
    told = asdict(choice)
    for name in ("gain_s", "cost_s", "chance"):
        told[name] = round(told[name], _DIGITS)
    by = "calibration" if is_fitted else "planner"
    return {"rid": rid, "missing_tokens": num_missing, **told, "figures": by}
