"""Answer lengths in SGLang: what a request tells the predictor, and when it is over.

A request enters the book when it is first asked for, or at its end at the latest, so
that every answer that ends is learned from. Requests end in the same order on all
ranks, and the predictors draw nothing, so all ranks predict alike.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sgl_tiered.core.clock import Clock
from sgl_tiered.engines.sglang.asking import LengthAsks, Questions, tokenized_request
from sgl_tiered.metrics.ledger import RequestLedger
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.policies.length.base import LengthFacts, LengthPrediction
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.length.llm import LLMLengths, Reply

__all__ = ["LengthReader"]

logger = logging.getLogger(__name__)

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
        # Questions to the served model; None where it is not asked.
        self.asks: LengthAsks | None = None

    def watch(
        self,
        scheduler: Any,
        ledger: RequestLedger,
        metrics: MetricsRegistry,
        clock: Clock,
    ) -> None:
        """Ask this scheduler's model, where the predictor is ``llm``."""
        if self.book.predictor.name != LLMLengths.name:
            return
        tokenizer = scheduler.tokenizer
        if tokenizer is None:
            logger.warning(
                "sgl-tiered: the model cannot be asked without a tokenizer "
                "(--skip-tokenizer-init): lengths are predicted as by online."
            )
            return

        def told(req: Any, reply: Reply, length: int, is_late: bool) -> None:
            if length and not is_late:
                self.prediction(req)
                self.book.said(req.rid, length)
            ledger.note(req.rid, length_asked=_as_told(reply, length, is_late))
            for name, amount in _as_counted(reply, length, is_late).items():
                metrics.add(name, amount)

        self.asks = LengthAsks(
            scheduler,
            Questions.of(tokenizer),
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            told,
            clock,
            make=tokenized_request,
            secret=str(scheduler.random_seed),
        )

    def prediction(self, req: Any) -> LengthPrediction:
        """Return what is predicted for a request as it stands."""
        num_done = len(req.output_ids)
        found = self.book.prediction(req.rid, num_done)
        if found is None:
            first = self.book.entered(req.rid, length_facts(req))
            found = self.book.prediction(req.rid, num_done) or first
        return found

    def computed(self, req: Any) -> None:
        """Note a request whose prompt has been computed: the model may be asked."""
        if self.asks is not None and not length_facts(req).said_tokens:
            self.asks.computed(req)

    def released(self, req: Any) -> None:
        """Learn from a request whose slots are given back, if it has ended.

        One that was retracted comes back; one that was aborted tells nothing, and
        neither does a question of ours.
        """
        is_question = self.asks is not None and self.asks.ended(req)
        if not req.finished():
            return
        if is_question:
            self.book.left(req.rid)
            return
        if req.finished_reason.to_json()["type"] == "abort":
            self.book.left(req.rid)
            return
        if req.rid not in self.book:
            self.book.entered(req.rid, length_facts(req))
        self.book.finished(req.rid, len(req.output_ids_through_stop))

    def left(self, rid: str) -> None:
        """Forget a request that ended in the queue."""
        self.book.left(rid)
        if self.asks is not None:
            self.asks.left(rid)

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
        if self.asks is not None:
            picture["asking"] = self.asks.stats()
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


def _as_told(reply: Reply, length: int, is_late: bool) -> dict[str, Any]:
    """Return what an explanation says of a question."""
    told = {
        "said_tokens": length or None,
        "prompt_tokens": reply.num_prompt_tokens,
        "cached_tokens": reply.num_cached_tokens,
        "output_tokens": reply.num_output_tokens,
        "s": round(reply.seconds, 6),
    }
    unused = reply.error or ("it came late" if is_late else "")
    return {**told, "unused": unused} if unused else told


def _as_counted(reply: Reply, length: int, is_late: bool) -> dict[str, float]:
    """Return what a question adds to the counters."""
    return {
        "length_asks": 1,
        "length_asks_failed": bool(reply.error),
        "length_asks_unclear": not reply.error and not length,
        "length_asks_late": is_late,
        "length_ask_prompt_tokens": reply.num_prompt_tokens,
        "length_ask_cached_tokens": reply.num_cached_tokens,
        "length_ask_output_tokens": reply.num_output_tokens,
        "length_ask_s": reply.seconds,
    }
