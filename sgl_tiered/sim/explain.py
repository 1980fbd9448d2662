"""The simulated server's side of the ledger: what the engine tells, in simulated time.

Requests are named by their number in the workload. Loads of one pass share its links,
so their seconds are those of the pass, as in the engine.
"""

from __future__ import annotations

from typing import Any

from sgl_tiered.cache.explanation import (
    add_load_edges,
    missing_spans,
    predicted_service_s,
)
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.metrics.ledger import RequestLedger, WaitReason
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.lower import LowerTiers
from sgl_tiered.sim.sequence import Sequence

__all__ = ["SimLedger"]


class SimLedger:
    """Notes of one run; does nothing where the configuration does not ask for it.

    Args:
        config: of the server.
        clock: simulated time.
        lower: the tiers, or None.
        num_requests: of the workload; all of them are kept.
    """

    def __init__(
        self,
        config: ServerConfig,
        clock: Clock,
        lower: LowerTiers | None,
        num_requests: int,
    ) -> None:
        self._page_tokens = config.page_tokens
        self._page_bytes = config.page_bytes
        self._times = config.times
        self._lower = lower
        self._ledger = RequestLedger(num_requests if config.explain else 0, clock)

    def queued(self, seq: Sequence) -> None:
        """Note a request that waits."""
        if self._ledger.is_on:
            service_s = self._service_s(seq)
            num_tokens = seq.request.num_prompt_tokens
            self._ledger.queued(str(seq.index), num_tokens, service_s=service_s)

    def waits(self, seq: Sequence, reason: WaitReason) -> None:
        """Note why this pass passes it over."""
        if self._ledger.is_on:
            self._ledger.waits(str(seq.index), reason)

    def pass_ended(self, reason: WaitReason) -> None:
        """Note why the search for a pass has ended."""
        self._ledger.pass_ended(reason)

    def admitted(self, seq: Sequence, device_pages: int) -> None:
        """Note a request that joins a pass, and why its pages are no hit."""
        if not self._ledger.is_on:
            return
        rid = str(seq.index)
        self._ledger.admitted(rid)
        if "missing" in self._ledger.details(rid):
            return
        missing: list[dict[str, Any]] = []
        state = None if self._lower is None else self._lower.state(seq.index)
        if self._lower is not None and state is not None:
            loaded = seq.host_tokens + seq.cxl_tokens + seq.disk_tokens
            prefix = device_pages + loaded // self._page_tokens
            missing = missing_spans(self._lower.cache, state, prefix, {})
            for span in missing:
                # The cache's tokens are pages here.
                span["first_token"] *= self._page_tokens
                span["tokens"] *= self._page_tokens
        self._ledger.note(rid, missing=missing)

    def first_token(self, seq: Sequence) -> None:
        """Note the end of its prompt's last pass."""
        if self._ledger.is_on:
            self._ledger.first_token(str(seq.index))

    def finished(self, seq: Sequence) -> None:
        """Note its end; its load must not be forgotten yet."""
        if not self._ledger.is_on:
            return
        tokens = {
            "device": seq.device_tokens,
            "host": seq.host_tokens,
            "cxl": seq.cxl_tokens,
            "disk": seq.disk_tokens,
        }
        cached = sum(tokens.values())
        told = {label: num for label, num in tokens.items() if num}
        told["computed"] = seq.request.num_prompt_tokens - cached
        edges: dict[str, Any] = {}
        report: dict[str, Any] | None = None
        state = None if self._lower is None else self._lower.state(seq.index)
        if state is not None:
            if seq.load_s:
                state.report.load_s = seq.load_s
                from_host = seq.host_tokens + seq.disk_tokens
                sources = {TierId.HOST: from_host, TierId.CXL: seq.cxl_tokens}
                used = [tier for tier, num in sources.items() if num]
                state.report.add_copies(dict.fromkeys(used, seq.load_s))
            report = state.report.as_dict()
            add_load_edges(edges, report["actual"], self._page_bytes)
        details = {"tokens": told, "edges": edges, "decision": report}
        self._ledger.finished(str(seq.index), details)

    def aborted(self, seq: Sequence) -> None:
        """Note a request that could not run."""
        if self._ledger.is_on:
            self._ledger.finished(str(seq.index), is_aborted=True)

    def explanations(self) -> list[dict[str, Any]]:
        """Return what is told of each request, in the order of their ends."""
        return self._ledger.recent(self._ledger.num_ended)[::-1]

    def _service_s(self, seq: Sequence) -> float:
        if self._lower is None:
            return self._times.prefill_s([(0, seq.input_tokens)])
        state = self._lower.state(seq.index)
        decision = None if state is None else state.report.decision
        num_pages = -(-seq.input_tokens // self._page_tokens)
        return predicted_service_s(self._lower.cache, decision, num_pages)
