"""The tree search of the Berkeley report, breadth-first, with limits.

For each prompt in the queue: N completions; each is checked as a whole program; the
first without errors ends the search. Otherwise, for each line with errors, the code
before that line, the wrong line and its errors as comments become a new prompt at the
queue's end. Two things are added to the report's pseudo-code: names that the checker
offers stand in the comment (and, if asked for, in the place of the wrong name, as a
further prompt), and a prompt that was already in the queue is not pushed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sgl_tiered.core.clock import Clock
from sgl_tiered_workloads.lsp_dojo.base import (
    Checker,
    Completer,
    CompleterError,
    Completions,
    Finding,
    LanguageServerError,
    PromptRefusedError,
)
from sgl_tiered_workloads.lsp_dojo.cut import (
    closest_names,
    cut_at_error,
    errors_by_line,
    replace_name,
    wrong_name,
)
from sgl_tiered_workloads.lsp_dojo.tree import Node, Sample, SearchTree

__all__ = ["Limits", "SearchConfig", "TreeSearch"]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a search gives up. None is no limit.

    Attributes:
        depth: errors cut on one path; a root has depth 0.
        nodes: nodes expanded.
        seconds: checked before each node; a node that has begun is finished.
        tokens: prompt (once a node) and completion tokens, checked like seconds.
    """

    depth: int | None = 8
    nodes: int | None = 64
    seconds: float | None = 600.0
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """How a search goes.

    Attributes:
        num_samples: N, completions per node.
        num_offers: names put into a comment; 0 for none.
        num_fixes: prompts made by putting an offered name in the wrong one's place.
        num_errors: lines with errors that a sample is cut at, the first ones; None
            cuts at all of them, as the report does. A wrong line is still there in
            what is cut at a later one.
        comment: what begins a comment line in the language.
        limits: when it gives up.
    """

    num_samples: int = 4
    num_offers: int = 5
    num_fixes: int = 0
    num_errors: int | None = None
    comment: str = "#"
    limits: Limits = field(default_factory=Limits)


class TreeSearch:
    """One search; ``run`` and ``repair`` may be called once.

    Args:
        completer: writes code.
        checker: finds errors.
        config: how.
        clock: measures.
        each: sees every node that was expanded.
    """

    def __init__(
        self,
        completer: Completer,
        checker: Checker,
        config: SearchConfig,
        clock: Clock,
        each: Callable[[Node], None] | None = None,
    ) -> None:
        self._completer = completer
        self._checker = checker
        self._config = config
        self._clock = clock
        self._each = each
        self._begin_s = clock.now()
        self._queue: deque[Node] = deque()
        self._seen: set[str] = set()
        self.tree = SearchTree()

    async def run(self, prompt: str) -> SearchTree:
        """Search from an unfinished program."""
        self._push(Node(0, None, 0, 0, prompt))
        return await self._search()

    async def repair(self, program: str) -> SearchTree:
        """Search from a whole program, which is checked before any is written."""
        root = Node(0, None, 0, 0, "")
        self.tree.nodes.append(root)
        try:
            await self._examine(root, Completions((program,)))
        except LanguageServerError as error:
            return self._end(str(error))
        return await self._search()

    async def _search(self) -> SearchTree:
        try:
            while self.tree.solution is None:
                if not self._queue:
                    # What lies below the depth limit was never pushed.
                    return self._end(self.tree.stopped_by or "exhausted")
                limit = self._limit_reached()
                if limit:
                    return self._end(limit)
                await self._expand(self._queue.popleft())
        except (CompleterError, LanguageServerError) as error:
            return self._end(str(error))
        return self._end("repaired")

    async def _expand(self, node: Node) -> None:
        begin_s = self._clock.now()
        try:
            answer = await self._completer.complete(
                node.prompt, self._config.num_samples
            )
        except PromptRefusedError as error:
            node.refused = str(error)
            if node.parent is None:
                raise
            return
        node.prompt_usage, node.sample_usage = answer.prompt, answer.samples
        await self._examine(node, answer)
        node.seconds = self._clock.now() - begin_s
        if self._each is not None:
            self._each(node)

    async def _examine(self, node: Node, answer: Completions) -> None:
        for number, text in enumerate(answer.texts):
            program = node.prompt + text
            findings = await self._checker.check(program)
            node.samples.append(Sample(text, findings))
            if not findings:
                self.tree.solution = program
                self.tree.solution_at = (node.index, number)
                return
            for errors in errors_by_line(findings)[: self._config.num_errors]:
                await self._push_children(node, number, program, errors)

    async def _push_children(
        self, node: Node, number: int, program: str, errors: tuple[Finding, ...]
    ) -> None:
        depth = self._config.limits.depth
        if depth is not None and node.depth >= depth:
            self.tree.stopped_by = "depth"
            return
        found = wrong_name(program, errors[0])
        line, offers = (
            errors[0].line,
            await self._offers(program, errors[0].line, found),
        )
        fixes = [
            replace_name(program, line, *found, name)
            for name in offers[: self._config.num_fixes]
            if found is not None
        ]
        shown = offers[: self._config.num_offers]
        noted = cut_at_error(program, errors, shown, self._config.comment)
        for prompt in (*fixes, noted):
            index = len(self.tree.nodes)
            child = Node(index, node.index, number, node.depth + 1, prompt)
            child.reason, child.offers = errors[0].message, shown
            self._push(child)

    async def _offers(
        self, program: str, line: int, found: tuple[int, str] | None
    ) -> tuple[str, ...]:
        num_names = max(self._config.num_offers, self._config.num_fixes)
        if found is None or not num_names:
            return ()
        character, wrong = found
        names = await self._checker.offer(program, line, character, wrong)
        return closest_names(wrong, names, num_names)

    def _push(self, node: Node) -> None:
        if node.prompt in self._seen:
            return
        self._seen.add(node.prompt)
        self.tree.nodes.append(node)
        self._queue.append(node)

    def _limit_reached(self) -> str:
        limits = self._config.limits
        tree = self.tree
        reached = {
            "nodes": (len(tree.expanded()), limits.nodes),
            "seconds": (self._clock.now() - self._begin_s, limits.seconds),
            "tokens": (tree.tokens(), limits.tokens),
        }
        for name, (value, limit) in reached.items():
            if limit is not None and value >= limit:
                return name
        return ""

    def _end(self, reason: str) -> SearchTree:
        self.tree.stopped_by = reason
        self.tree.seconds = self._clock.now() - self._begin_s
        return self.tree
