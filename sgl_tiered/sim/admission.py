"""Which waiting requests go into the next prefill pass: SGLang's adder, modelled.

A chunked prompt goes on first. Then waiting requests are looked at in order; one that
waits for pages on their way is passed over, one that does not fit ends the search
(head-of-line blocking, as in the engine). Pages are taken at once, by eviction if need
be, so a pass that was built can run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sgl_tiered.metrics.ledger import WaitReason
from sgl_tiered.policies.order.queue import QueueOrder
from sgl_tiered.policies.order.registry import make_order
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.device_tree import DeviceTree, TreeNode
from sgl_tiered.sim.explain import SimLedger
from sgl_tiered.sim.holding import Holding
from sgl_tiered.sim.layers import LayerMemory
from sgl_tiered.sim.lower import LowerTiers
from sgl_tiered.sim.sequence import CLIP_NEW_TOKENS, NewTokenRatio, Sequence
from sgl_tiered.sim.waiting_facts import SimFacts

__all__ = ["Admission", "PassPlan"]

_VLLM_WATERMARK = 0.01
"""Share of the pool that vLLM 0.5.5 keeps free when it admits."""


@dataclass(slots=True)
class PassPlan:
    """A prefill pass to run.

    Attributes:
        parts: requests with the tokens of context and the new tokens of each.
        is_whole: per part, whether the prompt ends in this pass.
        blocked: a waiting request did not fit into the pool.
        held: a request waits although it would fit, for the decoders' sake.
        left: requests that still wait, in the order in which they were looked at.
    """

    parts: list[tuple[Sequence, int, int]] = field(default_factory=list)
    is_whole: list[bool] = field(default_factory=list)
    blocked: bool = False
    held: bool = False
    left: list[Sequence] = field(default_factory=list)

    @property
    def work(self) -> list[tuple[int, int]]:
        """(context, new) tokens of each part, for ``DeviceTimes``."""
        return [(context, new) for _, context, new in self.parts]


class Admission:
    """Builds passes; owns the order of the queue, not the queue.

    Args:
        config: of the server.
        tree: the device's pages.
        lower: the tiers, or None.
        ledger: told why who waits.
        holding: the SLO admission, or None.
        layers: layer-wise memory, or None.
    """

    def __init__(
        self,
        config: ServerConfig,
        tree: DeviceTree,
        lower: LowerTiers | None,
        ledger: SimLedger,
        holding: Holding | None = None,
        layers: LayerMemory | None = None,
    ) -> None:
        self._ledger = ledger
        self._config = config
        self._page = config.page_tokens
        self._tree = tree
        self._lower = lower
        self._holding = holding
        self._layers = layers
        self._running: list[Sequence] = []
        self._order: QueueOrder[Sequence] | None = None
        if config.scheduler.order != "fcfs":
            order = make_order(config.scheduler.order)
            self._order = QueueOrder(order, SimFacts(config, tree, lower))
        self._is_vllm = config.scheduler.admission == "vllm"
        self.ratio = NewTokenRatio(fixed=config.scheduler.ignore_eos)
        self.chunked: Sequence | None = None
        self._rem_chunk: int | None = None
        self._rem_input = 0
        self._reserved = 0.0

    def can_ever_run(self, seq: Sequence) -> bool:
        """Return whether an empty server could run the request to its end."""
        if self._layers is not None and not self._layers.can_ever_run(seq):
            return False
        request = seq.request
        tokens = request.num_prompt_tokens + request.num_output_tokens + self._page
        return tokens < self._watermark_pages() * -self._page + (
            self._config.capacity_pages * self._page
        )

    def next_pass(
        self, waiting: list[Sequence], running: list[Sequence], now_s: float
    ) -> PassPlan:
        """Take what fits out of ``waiting``; an empty plan means decode."""
        scheduler = self._config.scheduler
        plan = PassPlan()
        self._rem_chunk = scheduler.chunk_tokens or None
        self._rem_input = scheduler.max_prefill_tokens
        self._reserved = 0.0
        self._running = running
        if not waiting and self.chunked is None:
            return plan
        if self._lower is not None:
            self._lower.begin_pass(len(waiting), is_busy=bool(running))
        if self._holding is not None:
            self._holding.begin_pass(running, self.chunked, waiting, now_s)
        if not self._is_vllm:
            self._reserved = self.ratio.reserved_tokens(running)
        if self.chunked is not None:
            self._continue_chunked(plan)
        admitted: set[int] = set()
        reason = WaitReason.PASS
        ordered = self._in_order(waiting, now_s)
        for seq in ordered:
            # A chunked prompt takes the rest of the pass; only one is under way.
            full = len(running) + len(plan.parts) >= scheduler.max_running
            if full or self.chunked is not None or self._rem_input <= 0:
                reason = WaitReason.SLOT if full else reason
                break
            if self._rem_chunk is not None and self._rem_chunk < self._page:
                break
            node, num_matched = self._match(seq)
            ready = self._lower is None or self._lower.prepare(seq.index, num_matched)
            if not ready:
                self._ledger.waits(seq, WaitReason.LOAD)
                continue
            if not self._add(plan, seq, node, num_matched):
                reason = WaitReason.BUDGET if plan.blocked else reason
                break
            admitted.add(seq.index)
            self._ledger.admitted(seq, num_matched)
        self._ledger.pass_ended(WaitReason.SLO if plan.held else reason)
        if plan.parts:
            self._tree.make_room(self._spare_pages(plan))
        if admitted:
            waiting[:] = [seq for seq in waiting if seq.index not in admitted]
        plan.left = [s for s in ordered or waiting if s.index not in admitted]
        return plan

    def _in_order(self, waiting: list[Sequence], now_s: float) -> list[Sequence]:
        if self.chunked is not None:
            return []
        if self._holding is not None:
            return self._holding.due_first(self._by_order(waiting, now_s))
        return self._by_order(waiting, now_s)

    def _by_order(self, waiting: list[Sequence], now_s: float) -> list[Sequence]:
        if self._order is None:
            return waiting
        return [waiting[i] for i in self._order.arrange(waiting, now_s)]

    def _match(self, seq: Sequence) -> tuple[TreeNode, int]:
        if not self._config.device_reuse:
            return self._tree.root, 0
        return self._tree.match(seq.matchable_raw(self._page))

    def _add(
        self, plan: PassPlan, seq: Sequence, node: TreeNode, num_matched: int
    ) -> bool:
        """Admit one request; False where the search ends here."""
        page, tree = self._page, self._tree
        num_loaded = 0
        if self._lower is not None:
            num_loaded = self._lower.loadable(seq.index, num_matched)
        prefix = (num_matched + num_loaded) * page
        new = seq.input_tokens - prefix
        # Its own prefix cannot be evicted for it.
        tree.lock(node)
        allowed = min(seq.tokens_left, CLIP_NEW_TOKENS)
        if not self._fits(seq, num_matched, allowed):
            plan.blocked = True
            tree.unlock(node)
            return False
        paged = -(-new // page) * page
        is_whole = True
        if self._rem_chunk is not None and paged > self._rem_chunk:
            new = self._rem_chunk // page * page
            paged, is_whole = new, False
        elif self._rem_chunk is None and plan.parts and paged >= self._rem_input:
            tree.unlock(node)
            return False
        if self._holding is not None:
            part = self._holding.fit(seq, prefix, new)
            if not part:
                plan.held = True
                tree.unlock(node)
                return False
            is_whole = is_whole and part == new
            new = part
        num_taken = -(-(prefix + new) // page) - num_matched
        # Slots for a load are taken at once, those of the new tokens with the pass's.
        fits = num_taken <= tree.available_pages and self._has_layers(seq, prefix, new)
        if not (fits and tree.take_private(num_loaded)):
            plan.blocked = True
            tree.unlock(node)
            return False
        promised = tree.promise_private(num_taken - num_loaded)
        assert promised, "it fitted a moment ago"
        seq.node, seq.tree_pages = node, num_matched
        seq.private_pages += num_taken
        first_time = seq.admitted_s < 0
        if first_time:
            seq.device_tokens = num_matched * page
        if num_loaded and self._lower is not None:
            load = self._lower.begin(seq.index, num_loaded)
            seq.load_bytes, seq.cxl_bytes = load.num_bytes, load.cxl_bytes
            if first_time:
                seq.host_tokens = load.host_pages * page
                seq.cxl_tokens = load.cxl_pages * page
                seq.disk_tokens = load.disk_pages * page
        self._put(plan, seq, prefix, new, is_whole)
        self._reserved += page + (allowed if is_whole and not self._is_vllm else 0)
        return True

    def _has_layers(self, seq: Sequence, context: int, new: int) -> bool:
        """Return whether the device has room for a part of a prompt, and take it."""
        if self._layers is None:
            return True
        return self._layers.admit(seq, context, new, self._running)

    def _put(
        self, plan: PassPlan, seq: Sequence, prefix: int, new: int, is_whole: bool
    ) -> None:
        seq.extend_tokens = new
        plan.parts.append((seq, prefix, new))
        if self._holding is not None:
            self._holding.commit(seq)
        if self._lower is not None:
            self._lower.admitted(prefix, new)
        plan.is_whole.append(is_whole)
        paged = -(-new // self._page) * self._page
        self._rem_input -= paged
        if self._rem_chunk is not None:
            self._rem_chunk -= paged
        if not is_whole:
            self.chunked = seq

    def _spare_pages(self, plan: PassPlan) -> int:
        """Return what SGLang keeps free beyond the pages of a pass: one per request.

        It counts tokens, so what the pages of a prompt are longer than the prompt is
        taken off.
        """
        if self._is_vllm:
            return 0
        page = self._page
        lengths = [new for _, _, new in plan.parts]
        unused = sum(-length % page for length in lengths)
        return -(-(page * len(lengths) - unused) // page)

    def _fits(self, seq: Sequence, num_matched: int, allowed: int) -> bool:
        page = self._page
        available = self._tree.available_pages
        if self._is_vllm:
            wanted = -(-seq.input_tokens // page) - num_matched
            return wanted + self._watermark_pages() <= available
        total = seq.input_tokens - num_matched * page + allowed + page
        return total < available * page - self._reserved

    def _watermark_pages(self) -> int:
        if not self._is_vllm:
            return 0
        return int(_VLLM_WATERMARK * self._config.capacity_pages)

    def _continue_chunked(self, plan: PassPlan) -> None:
        seq, self.chunked = self.chunked, None
        assert seq is not None
        assert self._rem_chunk is not None
        page = self._page
        new = min(seq.input_tokens - seq.kv_tokens, self._rem_chunk // page * page)
        # A chunk starts at a page's start. The pool may have filled up since the
        # prompt was admitted: then a part of the chunk has to do.
        new = min(new, self._tree.available_pages * page)
        if new > 0 and self._holding is not None:
            new = self._holding.fit(seq, seq.kv_tokens, new)
            if new <= 0:
                self.chunked = seq
                plan.held = True
                return
        if new <= 0:
            self.chunked = seq
            plan.blocked = True
            return
        if not self._has_layers(seq, seq.kv_tokens, new):
            self.chunked = seq
            plan.blocked = True
            return
        num_pages = -(-(seq.kv_tokens + new) // page)
        num_taken = num_pages - seq.kv_tokens // page
        taken = self._tree.promise_private(num_taken)
        assert taken, "as many pages as are available were asked for"
        seq.private_pages += num_taken
        is_whole = seq.kv_tokens + new == seq.input_tokens
        self._put(plan, seq, seq.kv_tokens, new, is_whole)
        if is_whole and not self._is_vllm:
            self._reserved += min(seq.tokens_left, CLIP_NEW_TOKENS) + page
