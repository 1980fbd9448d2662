"""Answer lengths in SGLang: what a request tells the predictor, and when it is over.

A request enters the book when it is first asked for, or at its end at the latest, so
that every answer that ends is learned from. Requests end in the same order on all
ranks, and the predictors draw nothing, so all ranks predict alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sgl_tiered.policies.length.base import LengthFacts, LengthPrediction
from sgl_tiered.policies.length.book import LengthBook

__all__ = ["LengthReader"]

_PARAMS_KEY = "tiered"
_FLAT_KEY = "tiered_output_len"
_MAX_GROUP_CHARS = 256


class LengthReader:
    """Reads SGLang's requests for a ``LengthBook``; on the scheduler's thread.

    A client may say in ``custom_params`` what it knows: ``{"tiered": {"output_len": N,
    "group": "NAME"}}``, or for experiments ``{"tiered_output_len": N}``. What is not a
    length or a name is taken as not said. Groups of different tenants and adapters
    never meet.

    Args:
        book: of the server's predictor.
    """

    def __init__(self, book: LengthBook) -> None:
        self.book = book

    def prediction(self, req: Any) -> LengthPrediction:
        """Return what is predicted for a request as it stands."""
        num_done = len(req.output_ids)
        found = self.book.prediction(req.rid, num_done)
        if found is None:
            first = self.book.entered(req.rid, length_facts(req))
            found = self.book.prediction(req.rid, num_done) or first
        return found

    def released(self, req: Any) -> None:
        """Learn from a request whose slots are given back, if it has ended.

        One that was retracted comes back; one that was aborted tells nothing.
        """
        if not req.finished():
            return
        if req.finished_reason.to_json()["type"] == "abort":
            self.book.left(req.rid)
            return
        if req.rid not in self.book:
            self.book.entered(req.rid, length_facts(req))
        self.book.finished(req.rid, len(req.output_ids_through_stop))

    def stats(self) -> dict[str, Any]:
        """Return a JSON-able picture, for ``GET /tiered/stats``."""
        picture: dict[str, Any] = {
            "predictor": self.book.predictor.name,
            "num_under_way": len(self.book),
            **asdict(self.book.score()),
        }
        weights = getattr(self.book.predictor, "weights", None)
        if weights is not None:
            picture["weights"] = weights
        return picture


def length_facts(req: Any) -> LengthFacts:
    """Return what a predictor may know of one of SGLang's requests."""
    params = req.sampling_params
    custom = params.custom_params
    custom = custom if isinstance(custom, Mapping) else {}
    said = custom.get(_PARAMS_KEY)
    said = said if isinstance(said, Mapping) else {}
    length = said.get("output_len", custom.get(_FLAT_KEY))
    name = said.get("group")
    name = name[:_MAX_GROUP_CHARS] if isinstance(name, str) else ""
    parts = (req.extra_key or "", req.cache_salt or "", name)
    is_length = isinstance(length, int) and not isinstance(length, bool) and length > 0
    return LengthFacts(
        num_prompt_tokens=len(req.origin_input_ids),
        max_new_tokens=params.max_new_tokens or 0,
        group="\0".join(parts) if any(parts) else "",
        said_tokens=int(length) if is_length else 0,
    )
