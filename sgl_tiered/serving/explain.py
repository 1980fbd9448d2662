"""Why a request waited and why its prefix was no hit: SGLang's side of the ledger.

Says to ``metrics/ledger.py`` what happens to SGLang's requests, gathers what the cache
knows of their pages when they are admitted, and answers ``GET /tiered/explain``. What
an answer holds, and whose data it never holds, is in metrics/EXPLAIN.md. Everything
runs on the scheduler's thread.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from sgl_tiered.cache.explanation import (
    add_edge,
    add_load_edges,
    missing_spans,
    predicted_service_s,
)
from sgl_tiered.cache.misses import MissSpan
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.cache.waiting_state import WaitingLoad
from sgl_tiered.core.ids import Encoding
from sgl_tiered.core.plans import OffloadPlan, TransferResult
from sgl_tiered.metrics.ledger import RequestLedger, WaitReason
from sgl_tiered.serving.attribution import cached_by_tier
from sgl_tiered.serving.lossy import is_lossy_key, unmarked_key

__all__ = ["Explainer", "Namespaces", "wants_explanation"]

_MAX_ADAPTERS = 16
_MAX_SENDERS = 1024
"""Namespaces that are compared with each other; beyond, the oldest are left out."""


class Namespaces:
    """Which namespaces differ from each other by the adapter, or the word on lossy KV.

    A sender is told of pages in a namespace only if he could have sent his prompt there
    and seen for himself: with another adapter or word under his own salt and key, or
    without any salt and key. So they are grouped by key and salt, and nobody is told of
    another's.
    """

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[str, str], dict[tuple[str, bool], bytes]] = (
            OrderedDict()
        )

    def note(
        self,
        extra_key: str | None,
        salt: str | None,
        adapter: str | None,
        digest: bytes,
    ) -> None:
        """Take note of a request's namespace.

        Args:
            extra_key: SGLang's: what the sender gave, then the adapter's name.
            salt: the sender's.
            adapter: name of the LoRA adapter.
            digest: of the namespace.
        """
        group = self._groups.setdefault(_group(extra_key, salt, adapter), {})
        if len(group) < _MAX_ADAPTERS:
            group[adapter or "", is_lossy_key(extra_key)] = digest
        if len(self._groups) > _MAX_SENDERS:
            self._groups.popitem(last=False)

    def siblings(
        self, extra_key: str | None, salt: str | None, adapter: str | None
    ) -> dict[str, bytes]:
        """Return the namespaces that may be told of, by what is different there."""
        own = _group(extra_key, salt, adapter)
        here = (adapter or "", is_lossy_key(extra_key))
        found = {}
        for (other, is_lossy), digest in self._groups.get(own, {}).items():
            if is_lossy != here[1]:
                if other == here[0]:
                    verb = "allow" if is_lossy else "refuse"
                    found[f"for requests that {verb} lossy KV"] = digest
            elif other != here[0]:
                found["for another adapter" if other else "without an adapter"] = digest
        if own != ("", "") and here in self._groups.get(("", ""), {}):
            found["without a salt or key"] = self._groups["", ""][here]
        return found

    def clear(self) -> None:
        """Forget them: digests have changed."""
        self._groups.clear()


class Explainer:
    """Follows SGLang's requests.

    Args:
        ledger: keeps what is found.
        cache: knows what became of pages, and predicts.
    """

    def __init__(self, ledger: RequestLedger, cache: TieredCache) -> None:
        self._ledger = ledger
        self._cache = cache
        self._layout = cache.config.layout
        self.namespaces = Namespaces()
        # Whether an adder looked at the queue in this pass, and its last verdict.
        self._has_looked = False
        self._verdict: str | None = None
        self._own_reason: WaitReason | None = None
        self._reason = WaitReason.PASS
        # Offloads under way: plan -> request.
        self._offloads: dict[int, str] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._ledger.is_on

    # -- The queue -------------------------------------------------------------

    def queued(self, req: Any, state: WaitingLoad[Any] | None) -> None:
        """Note a request that SGLang has put into its queue."""
        if not self.is_on:
            return
        num_tokens = len(req.origin_input_ids)
        decision = None if state is None else state.report.decision
        all_tokens = num_tokens + len(req.output_ids)
        service_s = predicted_service_s(self._cache, decision, all_tokens)
        self._ledger.queued(req.rid, num_tokens, service_s=service_s)

    def begin_pass(self) -> None:
        """Note that SGLang begins to look at its queue."""
        self._has_looked, self._verdict = True, None
        self._own_reason = None

    def looked_at(self, verdict: str) -> None:
        """Note what the adder said of a request: the name of an ``AddReqResult``."""
        self._verdict = verdict

    def stops_for(self, reason: WaitReason) -> None:
        """Note that this search ends for a reason of ours, whatever SGLang calls it."""
        self._own_reason = reason

    def end_pass(self, *, is_full: bool) -> None:
        """Note why the search has ended.

        Args:
            is_full: SGLang will not look again until a request has ended.
        """
        if not self._has_looked:
            # Not even looked, because of what was found before.
            was_full = self._reason in (WaitReason.BUDGET, WaitReason.SLOT)
            if not is_full:
                self._reason = WaitReason.PASS
            elif not was_full:
                self._reason = WaitReason.SLOT
        elif self._own_reason is not None:
            self._reason = self._own_reason
        elif self._verdict == "NO_TOKEN":
            self._reason = WaitReason.BUDGET
        elif self._verdict != "OTHER" and is_full:
            self._reason = WaitReason.SLOT
        else:
            self._reason = WaitReason.PASS
        self._has_looked = False
        self._ledger.pass_ended(self._reason)

    # -- A request's way -------------------------------------------------------

    def admitted(
        self, req: Any, state: WaitingLoad[Any] | None, prefix_tokens: int
    ) -> None:
        """Note a request that joins a pass, and why the rest of its prompt is no hit.

        Args:
            req: SGLang's request.
            state: of its load; None where the tiers cannot serve it.
            prefix_tokens: tokens that are on the device or on their way to it.
        """
        self._ledger.admitted(req.rid)
        if not self.is_on or "missing" in self._ledger.details(req.rid):
            return
        if state is None:
            self._ledger.note(req.rid, missing=self._not_allowed(req, prefix_tokens))
            return
        self.namespaces.note(req.extra_key, req.cache_salt, req.lora_id, state.digest)
        siblings = self.namespaces.siblings(req.extra_key, req.cache_salt, req.lora_id)
        page = self._layout.page_tokens
        missing = missing_spans(self._cache, state, prefix_tokens // page, siblings)
        self._ledger.note(req.rid, missing=missing)

    def _not_allowed(self, req: Any, prefix_tokens: int) -> list[dict[str, Any]]:
        """Say where a request refuses all that the tiers hold."""
        page = self._layout.page_tokens
        first = prefix_tokens // page
        # The last token is computed in any case.
        num_pages = (len(req.origin_input_ids) - 1) // page - first
        encoding = self._layout.encoding
        is_exact = encoding is not Encoding.RAW and not is_lossy_key(req.extra_key)
        if not is_exact or num_pages <= 0:
            return []
        text = f"the tiers hold {encoding.label} only, and the request refuses lossy KV"
        return [MissSpan(first, num_pages, "not allowed", text).as_dict(page)]

    def offloading(self, rid: str, plan: OffloadPlan) -> None:
        """Note a copy from the device that a request has caused."""
        if self.is_on:
            self._offloads[plan.plan_id] = rid

    def offloaded(self, plan: OffloadPlan, result: TransferResult) -> None:
        """Note its end, which may come after the request's."""
        rid = self._offloads.pop(plan.plan_id, None)
        if rid is None:
            return
        edges = dict(self._ledger.details(rid).get("edges", {}))
        num_bytes = plan.bytes_of(result.ok, self._layout.page_bytes)
        add_edge(edges, f"device->{plan.tier.label}", num_bytes, result.seconds)
        self._ledger.note(rid, edges=edges)

    def finished(
        self, req: Any, report: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Note the end of a request; return what its answer is to carry.

        Args:
            req: SGLang's request.
            report: what was decided about its load; None where nothing was.

        Returns:
            The report, with the explanation in it where the request asks for it.
        """
        if not self.is_on:
            return report
        rid = req.rid
        first_token_s = float(req.time_stats.prefill_finished_time)
        if first_token_s > 0:
            # Where nothing was published, only SGLang knows.
            self._ledger.first_token(rid, first_token_s)
        edges = dict(self._ledger.details(rid).get("edges", {}))
        actual = {} if report is None else report["actual"]
        config = self._cache.config
        whole, act = self._layout.page_bytes, config.act_page_bytes
        add_load_edges(edges, actual, whole, act)
        pulled = {} if report is None else report.get("peer", {})
        if pulled.get("bytes"):
            add_edge(edges, "peer->host", pulled["bytes"], pulled["seconds"])
        sources = cached_by_tier(req)
        num_cached = sum(sources.values())
        tokens = {tier.label: num for tier, num in sources.items() if num}
        tokens["computed"] = len(req.origin_input_ids) - num_cached
        details = {"tokens": tokens, "edges": edges, "decision": report}
        if config.act_refusal:
            details["activations"] = {"refused": config.act_refusal}
        is_aborted = type(req.finished_reason).__name__ == "FINISH_ABORT"
        self._ledger.finished(rid, details, is_aborted=is_aborted)
        if not wants_explanation(req):
            return report
        told = self._ledger.get(rid) or {}
        told.pop("decision", None)
        return {**(report or {}), "explain": told}

    def aborted(self, rid: str) -> None:
        """Note a request that has left without an answer."""
        self._ledger.finished(rid, is_aborted=True)

    def reset(self) -> None:
        """Forget what belongs to pages that were forgotten."""
        self.namespaces.clear()
        self._offloads.clear()

    # -- Questions -------------------------------------------------------------

    def answer(self, question: str) -> Any:
        """Answer what the HTTP process asks.

        Args:
            question: JSON: ``{"rid": ...}``, ``{"last": n}`` or ``{"slowest": n}``.
        """
        asked = json.loads(question)
        if "rid" in asked:
            return self._ledger.get(str(asked["rid"]))
        if "slowest" in asked:
            return self._ledger.slowest(int(asked["slowest"]))
        return self._ledger.recent(int(asked["last"]))


def wants_explanation(req: Any) -> bool:
    """Say whether a request asks for its explanation, by ``custom_params``."""
    params = getattr(req.sampling_params, "custom_params", None)
    ours = params.get("tiered") if isinstance(params, dict) else None
    return isinstance(ours, dict) and ours.get("explain") is True


def _group(
    extra_key: str | None, salt: str | None, adapter: str | None
) -> tuple[str, str]:
    given = (unmarked_key(extra_key) or "").removesuffix(adapter or "")
    return given, salt or ""
