"""The search tree: nodes, samples, and the summary that is made from them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.lsp_dojo.base import Finding
from sgl_tiered_workloads.usage import Usage, total_usage

__all__ = ["Node", "Sample", "SearchTree", "Summary"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of a node's prompt and the errors in it."""

    text: str
    findings: tuple[Finding, ...]

    @property
    def correct(self) -> bool:
        """Whether the checker found no error in the whole program."""
        return not self.findings


@dataclass(slots=True)
class Node:
    """One prompt of the search.

    Attributes:
        index: its number in the order in which nodes were made.
        parent: number of the node from whose sample it was cut; None for a root.
        sample: which sample of the parent.
        depth: 0 for a root.
        prompt: the code so far.
        reason: the error that it was cut at; empty for a root.
        offers: names that the checker offered there.
        samples: what the completer wrote; empty while the node waits in the queue.
        prompt_usage: the prompt counted once, before sampling.
        sample_usage: all samples as the server counts them.
        seconds: completing and checking.
        refused: why the server did not take the prompt; empty if it did.
    """

    index: int
    parent: int | None
    sample: int
    depth: int
    prompt: str
    reason: str = ""
    offers: tuple[str, ...] = ()
    samples: list[Sample] = field(default_factory=list)
    prompt_usage: Usage = field(default_factory=Usage)
    sample_usage: Usage = field(default_factory=Usage)
    seconds: float = 0.0
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a search did.

    Attributes:
        repaired: whether a program without errors was found.
        stopped_by: ``repaired``, ``exhausted``, the limit that was reached, or what
            broke.
        nodes: nodes that were expanded.
        refused: nodes whose prompt the server did not take; their branch ends.
        waiting: nodes that were still in the queue.
        depth: of the deepest node that was expanded.
        samples: programs that were checked.
        diagnostics: errors that the checker reported, over all samples.
        seconds: from start to end.
        prompt: each expanded node's prompt counted once. Its cached share is what
            an earlier request had left in the cache.
        all_samples: each sample's own prompt. The server computes a node's prompt
            once for all of them, so this share is high on every server.
    """

    repaired: bool
    stopped_by: str
    nodes: int
    refused: int
    waiting: int
    depth: int
    samples: int
    diagnostics: int
    seconds: float
    prompt: Usage
    all_samples: Usage

    def describe(self) -> str:
        """Return a few lines for people."""
        outcome = "repaired" if self.repaired else f"not repaired ({self.stopped_by})"
        return (
            f"{outcome} after {self.seconds:.1f} s: {self.nodes} nodes expanded, "
            f"{self.refused} refused, {self.waiting} waiting, depth {self.depth}, "
            f"{self.samples} programs checked, {self.diagnostics} errors found\n"
            f"each node's prompt once: {self.prompt.describe()}\n"
            f"every sample:            {self.all_samples.describe()}"
        )


@dataclass(slots=True)
class SearchTree:
    """All nodes of a search and how it ended.

    Attributes:
        nodes: in the order in which they were made.
        solution: the first program without errors, if any.
        solution_at: (node, sample) of it.
        stopped_by: see ``Summary``.
        seconds: from start to end.
    """

    nodes: list[Node] = field(default_factory=list)
    solution: str | None = None
    solution_at: tuple[int, int] | None = None
    stopped_by: str = ""
    seconds: float = 0.0

    def expanded(self) -> list[Node]:
        """Return the nodes that have samples, in order."""
        return [node for node in self.nodes if node.samples]

    def tokens(self) -> int:
        """Return prompt and completion tokens so far, each node's prompt once."""
        return sum(
            node.prompt_usage.prompt_tokens + node.sample_usage.completion_tokens
            for node in self.nodes
        )

    def summary(self) -> Summary:
        """Sum the tree up."""
        nodes = self.expanded()
        refused = sum(bool(node.refused) for node in self.nodes)
        samples = [sample for node in nodes for sample in node.samples]
        return Summary(
            repaired=self.solution is not None,
            stopped_by=self.stopped_by,
            nodes=len(nodes),
            refused=refused,
            waiting=len(self.nodes) - len(nodes) - refused,
            depth=max((node.depth for node in nodes), default=0),
            samples=len(samples),
            diagnostics=sum(len(sample.findings) for sample in samples),
            seconds=self.seconds,
            prompt=total_usage(node.prompt_usage for node in nodes),
            all_samples=total_usage(node.sample_usage for node in nodes),
        )

    def write(self, folder: Path) -> None:
        """Write ``tree.jsonl`` (a node a line) and ``summary.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "tree.jsonl").open("w", encoding="utf-8") as out:
            for node in self.nodes:
                out.write(json.dumps(asdict(node)) + "\n")
        summary = self.summary()
        facts: dict[str, Any] = asdict(summary)
        facts["cached_share"] = summary.prompt.cached_share
        facts["solution_at"] = self.solution_at
        text = json.dumps(facts, indent=1) + "\n"
        (folder / "summary.json").write_text(text, encoding="utf-8")
