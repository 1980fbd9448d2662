"""Search a program without errors: ``python -m sgl_tiered_workloads.lsp_dojo``."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from sgl_tiered.core.clock import SystemClock
from sgl_tiered_workloads.lsp_dojo.base import LanguageServerError
from sgl_tiered_workloads.lsp_dojo.completer import Sampling, SglangCompleter
from sgl_tiered_workloads.lsp_dojo.picture import draw_tree
from sgl_tiered_workloads.lsp_dojo.search import Limits, SearchConfig, TreeSearch
from sgl_tiered_workloads.lsp_dojo.tree import Node, SearchTree
from sgl_tiered_workloads.traces.problems import read_human_eval

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one search; 0 if a program without errors was found, 1 if not, 2 if it broke.

    A search that broke still leaves what it had.
    """
    args = _parser().parse_args(argv)
    try:
        name, text = _program(args)
        tree = asyncio.run(_search(args, text))
    except (LanguageServerError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"{error.name} is not installed: pip install 'sgl-tiered[bench]'",
            file=sys.stderr,
        )
        return 2
    summary = tree.summary()
    tree.write(args.out)
    draw_tree(args.out / "tree.png", tree, f"LSPDojo on {name}")
    if tree.solution is not None:
        (args.out / name).write_text(tree.solution, encoding="utf-8")
    print(summary.describe())
    print(f"tree.jsonl, summary.json and tree.png are in {args.out}")
    if summary.stopped_by in _ENDS:
        return 0 if summary.repaired else 1
    print(summary.stopped_by, file=sys.stderr)
    return 2


_PROBLEM_STOPS = ["\nclass ", "\ndef ", "\nif __name__", "\nprint("]
"""Where a HumanEval function is over and a model begins something else."""

_ENDS = ("repaired", "exhausted", "depth", "nodes", "seconds", "tokens")


def _program(args: argparse.Namespace) -> tuple[str, str]:
    """Return the file name and the text of what is to be completed.

    Raises:
        ValueError: no such problem, or FILE is not in HumanEval's format.
    """
    if args.problem is None:
        return args.file.name, args.file.read_text(encoding="utf-8")
    for problem in read_human_eval(args.file):
        if problem.name == args.problem:
            args.stop = args.stop or _PROBLEM_STOPS
            return problem.name.replace("/", "_") + ".py", problem.prompt
    raise ValueError(f"{args.file} has no problem {args.problem!r}")


async def _search(args: argparse.Namespace, text: str) -> SearchTree:
    # Here, so that a missing pygls is told like every other missing thing.
    from sgl_tiered_workloads.lsp_dojo.language_server import LanguageServer

    limits = Limits(args.max_depth, args.max_nodes, args.max_seconds, args.max_tokens)
    config = SearchConfig(
        num_samples=args.samples,
        num_offers=args.offers,
        num_fixes=args.fixes,
        num_errors=args.errors,
        comment=args.comment,
        limits=limits,
    )
    sampling = Sampling(
        args.max_new_tokens, args.temperature, args.seed, tuple(args.stop)
    )
    checker = LanguageServer(
        shlex.split(args.language_server),
        args.root,
        args.checker_timeout,
        name="lsp_dojo_candidate" + (".py" if args.problem else args.file.suffix),
        language_id=args.language_id,
    )
    async with checker, SglangCompleter(args.url, sampling) as completer:
        search = TreeSearch(completer, checker, config, SystemClock(), _say)
        return await (search.repair(text) if args.repair else search.run(text))


def _say(node: Node) -> None:
    best = min(len(sample.findings) for sample in node.samples)
    share = node.prompt_usage.cached_share
    errors = "1 error" if best == 1 else f"{best} errors"
    cached = "" if share is None else f", {share:.0%} of the prompt from cache"
    print(
        f"node {node.index}, depth {node.depth}: {node.seconds:.1f} s, best sample "
        f"has {errors}{cached}",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_tiered_workloads.lsp_dojo", description=__doc__
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="an unfinished program")
    add("--problem", help="FILE is HumanEval's; which one, such as HumanEval/0")
    add("--url", required=True, help="an SGLang server, http://host:port")
    add("--out", type=Path, required=True, help="folder for tree and picture")
    add("--repair", action="store_true", help="FILE is whole: begin at its errors")
    add("--samples", type=int, default=4, help="completions per node")
    add("--offers", type=int, default=5, help="names offered in a comment")
    add("--fixes", type=int, default=0, help="prompts with an offered name put in")
    add("--errors", type=int, help="lines a sample is cut at; default: all with errors")
    add("--max-depth", type=int, default=8)
    add("--max-nodes", type=int, default=64)
    add("--max-seconds", type=float, default=600.0)
    add("--max-tokens", type=int, help="prompt and completion tokens of all nodes")
    add("--max-new-tokens", type=int, default=256, help="of one completion")
    add("--temperature", type=float, default=0.8)
    add("--seed", type=int, help="for servers with deterministic inference")
    add("--stop", action="append", default=[], help="text that ends a completion")
    add("--language-server", default="pyrefly lsp", help="command; it speaks on stdio")
    add("--language-id", default="python")
    add("--comment", default="#", help="what begins a comment line")
    add("--root", type=Path, help="project that FILE belongs to; default: none")
    add("--checker-timeout", type=float, default=60.0, help="s per answer")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
