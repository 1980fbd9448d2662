"""A request inside the simulated server, and how much room answers are promised."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from sgl_tiered.sim.device_tree import DeviceTree, TreeNode
from sgl_tiered.sim.records import RequestRecord
from sgl_tiered.sim.requests import SimRequest

__all__ = ["NewTokenRatio", "Sequence"]

CLIP_NEW_TOKENS = 4_096
"""SGLang's bound on what is reserved for one answer."""
_INIT_RATIO = 0.7
_MIN_RATIO = 0.7 * 0.14
_DECAY_STEPS = 600
_RETRACT_STEPS = 20


class Sequence:
    """Mutable state of one request: its pages, its progress, its times.

    Its KV covers ``kv_tokens`` tokens in ``tree_pages`` pages of the tree, locked by
    ``node``, and ``private_pages`` pages of its own.
    """

    __slots__ = (
        "admitted_s",
        "arrival_s",
        "cxl_bytes",
        "cxl_tokens",
        "device_tokens",
        "disk_tokens",
        "extend_tokens",
        "first_token_s",
        "host_tokens",
        "index",
        "kv_tokens",
        "load_bytes",
        "load_s",
        "node",
        "noted_pages",
        "num_retractions",
        "offloaded_pages",
        "outputs",
        "page_raw",
        "private_pages",
        "request",
        "resumed_s",
        "span_start",
        "spans",
        "tree_pages",
    )

    def __init__(self, index: int, request: SimRequest, arrival_s: float) -> None:
        self.index = index
        self.request = request
        self.arrival_s = arrival_s
        self.page_raw = request.page_ids.tobytes()
        self.outputs = 0
        self.kv_tokens = 0
        self.extend_tokens = 0
        self.load_bytes = 0
        self.load_s = 0.0
        self.cxl_bytes = 0
        self.node: TreeNode | None = None
        self.tree_pages = 0
        self.noted_pages = 0
        self.private_pages = 0
        self.offloaded_pages = 0
        self.admitted_s = -1.0
        self.first_token_s = -1.0
        self.device_tokens = 0
        self.host_tokens = 0
        self.cxl_tokens = 0
        self.disk_tokens = 0
        self.num_retractions = 0
        self.span_start = 0
        self.spans: list[tuple[int, int]] = []
        self.resumed_s: list[float] = []

    @property
    def input_tokens(self) -> int:
        """Tokens to have KV for before the next token: prompt and former output."""
        return self.request.num_prompt_tokens + self.outputs

    @property
    def tokens_left(self) -> int:
        """Tokens of the answer still to come."""
        return self.request.num_output_tokens - self.outputs

    def matchable_pages(self, page_tokens: int) -> int:
        """Return the whole pages that may be reused: the last token is computed."""
        num_pages = (self.input_tokens - 1) // page_tokens
        return min(num_pages, len(self.request.page_ids))

    def matchable_raw(self, page_tokens: int) -> bytes:
        """Return the stand-ins of those pages."""
        return self.page_raw[: self.matchable_pages(page_tokens) * 4]

    def publish(self, tree: DeviceTree, page_tokens: int) -> None:
        """Give all whole pages that have stand-ins to the tree."""
        num_pages = min(self.kv_tokens // page_tokens, len(self.request.page_ids))
        if num_pages <= self.tree_pages:
            return
        node, _ = tree.insert(self.page_raw[: num_pages * 4], self.tree_pages)
        tree.lock(node)
        if self.node is not None:
            tree.unlock(self.node)
        self.node = node
        self.private_pages -= num_pages - self.tree_pages
        self.tree_pages = num_pages
        if num_pages > self.noted_pages:
            tree.note(node, self.request.page_ids[:num_pages], self.noted_pages)
            self.noted_pages = num_pages

    def release(self, tree: DeviceTree) -> None:
        """Give everything back."""
        if self.node is not None:
            tree.unlock(self.node)
        tree.give_private(self.private_pages)
        self.node = None
        self.tree_pages = self.private_pages = self.kv_tokens = 0

    def record(self, now_s: float, *, aborted: bool = False) -> RequestRecord:
        """Return what is known at the end."""
        return RequestRecord(
            request=self.index,
            arrival_s=self.arrival_s,
            admitted_s=now_s if self.admitted_s < 0 else self.admitted_s,
            first_token_s=now_s if self.first_token_s < 0 else self.first_token_s,
            finished_s=now_s,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=self.outputs,
            device_tokens=self.device_tokens,
            host_tokens=self.host_tokens,
            disk_tokens=self.disk_tokens,
            cxl_tokens=self.cxl_tokens,
            num_retractions=self.num_retractions,
            spans=tuple(self.spans),
            resumed_s=tuple(self.resumed_s),
            aborted=aborted,
        )


class NewTokenRatio:
    """SGLang's guess of the part of an answer's allowance that will be used.

    It starts high, falls with every decode step, and is set anew by a retraction.
    """

    def __init__(self, *, fixed: bool) -> None:
        self._fixed = fixed
        self._ratio = _INIT_RATIO

    def reserved_tokens(self, running: Seq[Sequence]) -> float:
        """Return the tokens to keep free for the requests that decode."""
        left = sum(min(seq.tokens_left, CLIP_NEW_TOKENS) for seq in running)
        return left * (1.0 if self._fixed else self._ratio)

    def decay(self, num_steps: int) -> None:
        """Note decode steps."""
        step = (_INIT_RATIO - _MIN_RATIO) / _DECAY_STEPS
        self._ratio = max(_MIN_RATIO, self._ratio - step * num_steps)

    def reset(self) -> None:
        """Start over: the server was idle."""
        self._ratio = _INIT_RATIO

    def retracted(self, running: Seq[Sequence]) -> None:
        """Estimate it from the requests that stayed."""
        done = sum(seq.outputs for seq in running) + _RETRACT_STEPS * len(running)
        allowed = sum(seq.request.num_output_tokens for seq in running)
        self._ratio = min(1.0, done / (allowed + 1))
