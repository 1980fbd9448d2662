"""The search follows the report's pseudo-code and stops where it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sgl_tiered_workloads.lsp_dojo.base import (
    CompleterError,
    Completions,
    Finding,
    LanguageServerError,
    PromptRefusedError,
)
from sgl_tiered_workloads.lsp_dojo.picture import draw_tree, place_nodes
from sgl_tiered_workloads.lsp_dojo.search import Limits, SearchConfig, TreeSearch
from sgl_tiered_workloads.lsp_dojo.tree import SearchTree
from sgl_tiered_workloads.usage import Usage

from sgl_tiered.core.clock import ManualClock

TWO = SearchConfig(num_samples=2, limits=Limits(None, None, None, None))


class WordChecker:
    """Calls every line with a word that begins with ``bad`` wrong; offers ``good``."""

    def __init__(self) -> None:
        self.checked: list[str] = []

    async def check(self, source: str) -> tuple[Finding, ...]:
        self.checked.append(source)
        return tuple(
            Finding(number, line.index("bad"), len(line), "bad word")
            for number, line in enumerate(source.splitlines())
            if "bad" in line and not line.startswith("#")
        )

    async def offer(
        self, source: str, line: int, character: int, wrong: str
    ) -> tuple[str, ...]:
        return ("other", "badge")


class Script:
    """A model that answers by a function of the prompt."""

    def __init__(self, answer: Callable[[str], Sequence[str]]) -> None:
        self.prompts: list[str] = []
        self._answer = answer

    async def complete(self, prompt: str, num_samples: int) -> Completions:
        self.prompts.append(prompt)
        texts = tuple(self._answer(prompt))
        assert len(texts) == num_samples
        return Completions(
            texts, Usage(100, 0, 80, {"host": 80}), Usage(200, 20, 190, {})
        )


def search(
    script: Script,
    config: SearchConfig = TWO,
    checker: WordChecker | None = None,
    clock: ManualClock | None = None,
) -> SearchTree:
    found = TreeSearch(script, checker or WordChecker(), config, clock or ManualClock())
    return asyncio.run(found.run("start\n"))


def test_the_first_program_without_errors_is_the_answer() -> None:
    """Later samples are neither checked nor searched."""
    checker = WordChecker()
    tree = search(Script(lambda prompt: ["good\n", "also good\n"]), checker=checker)
    assert tree.solution == "start\ngood\n"
    assert checker.checked == ["start\ngood\n"]
    assert tree.summary().repaired
    assert tree.summary().stopped_by == "repaired"


def test_nodes_are_expanded_breadth_first() -> None:
    """All prompts of one depth are asked before any of the next."""
    count = iter(range(100))

    def answer(prompt: str) -> list[str]:
        if prompt.count("# error") == 2:
            return ["good\n", "good\n"]
        return [f"bad{next(count)}\n", f"bad{next(count)}\n"]

    script = Script(answer)
    tree = search(script)
    assert [p.count("# error") for p in script.prompts] == [0, 1, 1, 2]
    assert tree.solution is not None
    assert tree.summary().depth == 2


def test_every_error_line_of_every_sample_becomes_a_prompt() -> None:
    """The code before the line is kept, earlier errors with it."""
    script = Script(lambda prompt: ["bada\nbadb\n", "badc\n"])
    config = replace(TWO, num_offers=0, limits=Limits(1, None, None, None))
    tree = search(script, config)
    assert [node.prompt for node in tree.nodes[1:]] == [
        "start\n# wrong: bada\n# error: bad word\n",
        "start\nbada\n# wrong: badb\n# error: bad word\n",
        "start\n# wrong: badc\n# error: bad word\n",
    ]
    assert [(n.parent, n.sample, n.depth) for n in tree.nodes[1:]] == [
        (0, 0, 1),
        (0, 0, 1),
        (0, 1, 1),
    ]
    assert tree.stopped_by == "depth"


def test_a_sample_may_be_cut_at_its_first_errors_only() -> None:
    """What is cut at a later line keeps the earlier errors, so it can be left out."""
    script = Script(lambda prompt: ["bada\nbadb\n", "badc\nbadd\n"])
    limits = Limits(1, None, None, None)
    tree = search(script, replace(TWO, num_errors=1, limits=limits))
    cuts = [node.prompt for node in tree.nodes[1:]]
    assert [cut.partition("wrong: ")[2][:4] for cut in cuts] == ["bada", "badc"]


def test_a_prompt_is_searched_once() -> None:
    """Samples that say the same give one child."""
    script = Script(lambda prompt: ["bad\n", "bad\n"])
    config = replace(TWO, limits=Limits(1, None, None, None))
    assert len(search(script, config).nodes) == 2


def test_offered_names_stand_in_the_comment_and_can_extend_a_node() -> None:
    """With fixes, the offered name is put in first, the comment comes after."""
    script = Script(lambda prompt: ["good\n"] if "badge" in prompt else ["x = badg"])
    config = replace(TWO, num_samples=1, num_fixes=1)
    tree = search(script, config)
    assert tree.nodes[1].prompt == "start\nx = badge"
    assert "# known names: badge\n" in tree.nodes[2].prompt
    assert tree.nodes[2].offers == ("badge",)


@pytest.mark.parametrize(
    ("limits", "reason", "nodes"),
    [
        (Limits(None, 3, None, None), "nodes", 3),
        (Limits(None, None, 25.0, None), "seconds", 3),
        (Limits(None, None, None, 250), "tokens", 3),
        (Limits(2, None, None, None), "depth", 7),
    ],
)
def test_each_limit_ends_the_search(limits: Limits, reason: str, nodes: int) -> None:
    """A node costs 10 s and 120 tokens; no limit is exceeded by more than a node."""
    clock = ManualClock()
    count = iter(range(10_000))

    def answer(prompt: str) -> list[str]:
        clock.advance(10.0)
        return [f"bad{next(count)}\n", f"bad{next(count)}\n"]

    tree = search(Script(answer), replace(TWO, limits=limits), clock=clock)
    assert tree.stopped_by == reason
    assert len(tree.expanded()) == nodes
    assert tree.solution is None


def test_what_breaks_leaves_the_tree_that_was_found() -> None:
    """The sentence of the error is the reason, and the nodes before it are there."""

    def answer(prompt: str) -> list[str]:
        if "#" in prompt:
            raise CompleterError("the server is gone")
        return ["bad1\n", "bad2\n"]

    tree = search(Script(answer))
    assert tree.stopped_by == "the server is gone"
    assert len(tree.expanded()) == 1


def test_a_refused_prompt_ends_its_branch_only() -> None:
    """A branch that grew beyond the context is given up, and the others go on."""

    def answer(prompt: str) -> list[str]:
        if "wrong: bad1" in prompt:
            raise PromptRefusedError("too long")
        return ["good\n", "good\n"] if "#" in prompt else ["bad1\n", "bad2\n"]

    tree = search(Script(answer))
    assert tree.nodes[1].refused == "too long"
    assert tree.solution == tree.nodes[2].prompt + "good\n"
    summary = tree.summary()
    assert (summary.nodes, summary.refused, summary.waiting) == (2, 1, 0)


def test_a_refused_root_is_the_reason() -> None:
    """Nothing is left to search, and the server's words say why."""

    def answer(prompt: str) -> list[str]:
        raise PromptRefusedError("too long")

    assert search(Script(answer)).stopped_by == "too long"


def test_a_checker_that_breaks_while_a_program_is_repaired_is_a_reason() -> None:
    """The first check is of the program itself, before any sample."""

    class Broken(WordChecker):
        async def check(self, source: str) -> tuple[Finding, ...]:
            raise LanguageServerError("it hangs")

    script = Script(lambda prompt: ["good\n", "good\n"])
    found = TreeSearch(script, Broken(), TWO, ManualClock())
    assert asyncio.run(found.repair("bad\n")).stopped_by == "it hangs"
    assert script.prompts == []


def test_a_whole_program_is_checked_before_the_model_is_asked() -> None:
    """A correct one costs no completion; a wrong one is cut at its errors."""
    script = Script(lambda prompt: ["good\n", "good\n"])
    found = TreeSearch(script, WordChecker(), TWO, ManualClock())
    assert asyncio.run(found.repair("fine\n")).solution == "fine\n"
    assert script.prompts == []
    found = TreeSearch(script, WordChecker(), TWO, ManualClock())
    tree = asyncio.run(found.repair("fine\nbad\nlost\n"))
    assert script.prompts[0].startswith("fine\n# wrong: bad\n")
    assert tree.solution == script.prompts[0] + "good\n"


def test_the_summary_counts_a_prompt_once_and_a_sample_each(tmp_path: Path) -> None:
    """The two shares stand apart, in the file as in the text."""
    script = Script(lambda prompt: ["bad1\n", "bad2 \nbad3\n"])
    tree = search(script, replace(TWO, limits=Limits(None, 2, None, None)))
    summary = tree.summary()
    assert summary.prompt.prompt_tokens == 200
    assert summary.prompt.cached_share == pytest.approx(0.8)
    assert summary.all_samples.cached_share == pytest.approx(0.95)
    assert summary.samples == 4
    assert summary.diagnostics == sum(
        len(s.findings) for n in tree.nodes for s in n.samples
    )
    tree.write(tmp_path)
    facts = json.loads((tmp_path / "summary.json").read_text())
    assert facts["cached_share"] == pytest.approx(0.8)
    assert facts["prompt"]["cached_by_tier"] == {"host": 160}
    lines = (tmp_path / "tree.jsonl").read_text().splitlines()
    assert len(lines) == len(tree.nodes)
    assert json.loads(lines[1])["parent"] == 0


def test_the_picture_places_every_node_and_none_on_another(tmp_path: Path) -> None:
    """Each node has a place, distinct within its depth; the file is a picture."""
    count = iter(range(100))
    script = Script(lambda p: [f"bad{next(count)}\n", f"bad{next(count)}\nbad\n"])
    tree = search(script, replace(TWO, limits=Limits(None, 4, None, None)))
    places = place_nodes(tree.nodes)
    assert set(places) == {node.index for node in tree.nodes}
    assert len({(n.depth, places[n.index]) for n in tree.nodes}) == len(tree.nodes)
    draw_tree(tmp_path / "tree.png", tree, "a tree")
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
