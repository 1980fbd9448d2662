"""A real language server finds a planted error and confirms its repair."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from sgl_tiered_workloads.lsp_dojo.__main__ import main
from sgl_tiered_workloads.lsp_dojo.base import (
    Completions,
    LanguageServerError,
)
from sgl_tiered_workloads.lsp_dojo.language_server import LanguageServer
from sgl_tiered_workloads.lsp_dojo.search import SearchConfig, TreeSearch
from sgl_tiered_workloads.lsp_dojo.tree import SearchTree

from sgl_tiered.core.clock import SystemClock

PROGRAM = '''import math


def area(radius: float) -> float:
    """Return the area of a circle: π r²."""
    return math.pii * radius**2


print("naïve 😀", aera(3.0))
'''
SILENT = [sys.executable, "-c", "import sys; sys.stdin.read()"]
DYING = [sys.executable, "-c", "raise SystemExit('out of memory')"]

GREETER = """
import json, sys, time
heads = {}
while (line := sys.stdin.buffer.readline().strip()):
    name, _, value = line.partition(b":")
    heads[name] = value
asked = json.loads(sys.stdin.buffer.read(int(heads[b"Content-Length"])))
answer = {"jsonrpc": "2.0", "id": asked["id"], "result": {"capabilities": {}}}
text = json.dumps(answer).encode()
sys.stdout.buffer.write(b"Content-Length: %d\\r\\n\\r\\n" % len(text) + text)
sys.stdout.buffer.flush()
sys.stderr.write("x" * 200_000)
sys.stderr.flush()
if sys.argv[1] == "dies":
    sys.stdin.buffer.readline()
    sys.exit("no more")
time.sleep(600)
"""
"""Greets, fills more than a pipe with noise, then dies or never speaks again."""


class RepairingScript:
    """A model that repeats its mistakes until a comment tells what is known."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    async def complete(self, prompt: str, num_samples: int) -> Completions:
        self.prompts.append(prompt)
        last = prompt.splitlines()[-1]
        _, found, names = last.partition("# known names: ")
        name = names.split(", ")[0] if found else "nothing_offered"
        if "pii" in prompt and "return math.pi *" not in prompt:
            right = f"    return math.{name} * radius**2\n\n\nprint(aera(3.0))\n"
        else:
            right = f"print({name}(3.0))\n"
        noise = "\nprint(undefined_thing)\n"
        return Completions((noise, right)[:num_samples])


async def repair(program: str, script: RepairingScript) -> SearchTree:
    async with LanguageServer() as server:
        search = TreeSearch(script, server, SearchConfig(num_samples=2), SystemClock())
        return await search.repair(program)


def failure(
    command: Sequence[str], greeting_s: float = 60.0, check_s: float = 60.0
) -> str:
    """Return what is said when a program is checked with ``command``."""

    async def run() -> None:
        async with LanguageServer(command, timeout_s=greeting_s) as server:
            server._timeout_s = check_s
            await server.check("x = 1\n")

    with pytest.raises(LanguageServerError) as caught:
        asyncio.run(run())
    return str(caught.value)


def test_a_planted_error_is_found_repaired_and_confirmed() -> None:
    """Two errors, one behind the other, are repaired from what the server offers."""
    script = RepairingScript()
    tree = asyncio.run(repair(PROGRAM, script))
    assert tree.stopped_by == "repaired"
    assert tree.solution is not None
    (whole,) = tree.nodes[0].samples
    assert [finding.line for finding in whole.findings] == [5, 8]
    assert "# wrong: return math.pii * radius**2" in script.prompts[0]
    assert "# known names: pi" in script.prompts[0]
    assert "return math.pi * radius**2" in tree.solution
    assert "print(area(3.0))" in tree.solution
    # The repaired program runs, and the planted one does not.
    exec(compile(tree.solution, "repaired", "exec"), {})
    with pytest.raises(NameError):
        exec(compile(PROGRAM, "planted", "exec"), {})


def test_positions_are_python_indices() -> None:
    """A character beyond the basic plane before the error does not shift it."""

    async def run() -> tuple[str, tuple[str, ...]]:
        async with LanguageServer() as server:
            findings = await server.check(PROGRAM)
            last = findings[-1]
            line = PROGRAM.splitlines()[last.line]
            names = await server.offer(PROGRAM, last.line, last.character, "aera")
            return line[last.character : last.end_character], names

    marked, names = asyncio.run(run())
    assert marked == "aera"
    assert {"area", "math"} <= set(names)


def test_an_absent_server_is_told_with_the_remedy() -> None:
    """One sentence names the command and how to get one."""
    said = failure(["no-such-language-server"])
    assert "'no-such-language-server' is not installed" in said
    assert "pip install 'sgl-tiered[bench]'" in said


def test_a_server_that_dies_says_its_last_words() -> None:
    """Whether at the greeting or when a program is to be checked."""
    assert "ended with code 1, having said: out of memory" in failure(DYING)
    late = failure([sys.executable, "-c", GREETER, "dies"])
    assert "ended with code 1" in late
    assert late.endswith("no more")


def test_a_server_that_hangs_is_left_and_ended() -> None:
    """The wait has a limit, with noise on stderr too."""
    assert "gave no capabilities in 0.2 s" in failure(SILENT, 0.2)
    hanging = [sys.executable, "-c", GREETER, "hangs"]
    assert "gave no diagnostics in 0.5 s" in failure(hanging, check_s=0.5)


def test_the_command_says_one_sentence_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An absent language server is status 2; so is an absent model server."""
    program = tmp_path / "wrong.py"
    program.write_text(PROGRAM)
    ask = [str(program), "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "out")]
    assert main([*ask, "--language-server", "no-such-language-server"]) == 2
    assert "is not installed" in capsys.readouterr().err
    assert main(ask) == 2
    assert "http://127.0.0.1:9 cannot be asked" in capsys.readouterr().err
    assert (tmp_path / "out" / "tree.png").exists()


def test_a_human_eval_problem_can_be_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its prompt is the root of the tree; an unknown name is told."""
    problems = tmp_path / "problems.jsonl"
    task = {"task_id": "HumanEval/7", "prompt": "def f(x):\n"}
    task["canonical_solution"] = "    return x\n"
    problems.write_text(json.dumps(task) + "\n")
    ask = [str(problems), "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "out")]
    assert main([*ask, "--problem", "HumanEval/8"]) == 2
    assert "has no problem 'HumanEval/8'" in capsys.readouterr().err
    assert main([*ask, "--problem", "HumanEval/7"]) == 2
    assert "cannot be asked" in capsys.readouterr().err
    root = json.loads((tmp_path / "out" / "tree.jsonl").read_text())
    assert root["prompt"] == "def f(x):\n"
