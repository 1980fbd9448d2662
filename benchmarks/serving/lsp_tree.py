"""LSPDojo's tree search on plain SGLang and on SGLang with tiers, side by side.

One program is completed by a model with random weights, so every sample is noise, every
branch fails, and the tree grows until its limit: two samples per node, each cut at its
first error, give a binary tree whose prompts, and whose KV, are several device pools. A
node's parent was asked a whole level earlier, so its KV has left a small pool.

What is measured is the share of prompt tokens that came from cache, each node's prompt
counted once, before its own samples could fill the cache. Both servers have the same
device pool and the same limits. Sampling is not seeded (SGLang heeds seeds only in
deterministic inference), so the two trees have the same shape and not the same texts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from sgl_tiered_workloads import tokenizer
from sgl_tiered_workloads.lsp_dojo.completer import Sampling, SglangCompleter
from sgl_tiered_workloads.lsp_dojo.language_server import LanguageServer
from sgl_tiered_workloads.lsp_dojo.picture import draw_tree
from sgl_tiered_workloads.lsp_dojo.search import Limits, SearchConfig, TreeSearch
from sgl_tiered_workloads.lsp_dojo.tree import Node, SearchTree
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.records import make_header
from sgl_tiered_workloads.server import (
    ServerSpec,
    ServerStartError,
    SglangServer,
    exit_on_signals,
)
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec, tiered_spec

from sgl_tiered.core.clock import SystemClock

PRESET = "demo"
HOST_BYTES = 200 * MB
DISK_BYTES = 1000 * MB


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a run measures with.

    Attributes:
        pool_tokens: device pool of both servers.
        samples: completions per node.
        max_new_tokens: of one completion.
        nodes: nodes expanded.
    """

    pool_tokens: int
    samples: int
    max_new_tokens: int
    nodes: int


def main() -> int:
    """Run both servers; 0 if the tiered one reached the share that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/lsp-tree"))
    add("--models", type=Path, default=Path("out/models"))
    add("--port", type=int, help="default: a free one")
    add("--pool-tokens", type=int, default=2048, help="device pool")
    add("--samples", type=int, default=2, help="completions per node")
    add("--max-new-tokens", type=int, default=64, help="of one completion")
    add("--nodes", type=int, default=45, help="nodes expanded")
    add("--wanted", type=float, default=0.8, help="share from cache, tiered")
    add("--server-flag", action="append", default=[], help="for both; repeatable")
    args = parser.parse_args()
    exit_on_signals()
    sizes = Sizes(
        args.pool_tokens,
        args.samples,
        args.max_new_tokens,
        args.nodes,
    )
    try:
        return asyncio.run(_compare(args, sizes))
    except ServerStartError as error:
        print(error, file=sys.stderr)
        return 1


async def _compare(args: argparse.Namespace, sizes: Sizes) -> int:
    disk = args.out / "disk"
    shutil.rmtree(disk, ignore_errors=True)
    disk.mkdir(parents=True)
    device = Device(
        make_model(PRESET, args.models),
        sizes.pool_tokens,
        flags=tuple(args.server_flag),
    )
    tiers = Tiers(HOST_BYTES, disk, DISK_BYTES)
    rows = {}
    for spec in (plain_spec(device), tiered_spec(device, tiers)):
        with SglangServer(spec, args.out / "logs", args.port) as server:
            tree = await _search(server, sizes)
        rows[spec.name] = _record(args.out, spec, sizes, tree)
    shutil.rmtree(disk, ignore_errors=True)
    print("\n" + _table(rows))
    shares = {name: row["share"] for name, row in rows.items()}
    print(json.dumps({"cached_share": shares, "sizes": asdict(sizes)}))
    return 0 if rows["tiered"]["share"] >= args.wanted else 1


def _begun_program() -> str:
    """Return the head of one of our own files, which ends within a list.

    It imports the standard library alone and has no error of its own. A list that
    must still be closed is never right by luck, as a sample of noise can be that
    begins like a comment.
    """
    text = Path(tokenizer.__file__).read_text(encoding="utf-8")
    before, _, rest = text.partition("__all__ = [")
    head = before + rest.partition("]\n")[2].partition("def train_tokenizer")[0]
    return head + "WORDS = [\n"


async def _search(server: SglangServer, sizes: Sizes) -> SearchTree:
    """Search until the limit and return the tree."""
    prompt = _begun_program()
    limits = Limits(depth=None, nodes=sizes.nodes, seconds=None)
    config = SearchConfig(sizes.samples, num_errors=1, limits=limits)
    sampling = Sampling(sizes.max_new_tokens, temperature=1.0)
    begun = SglangCompleter(server.url, sampling)
    async with LanguageServer() as checker, begun as completer:
        # One short request runs each path once; then nothing is cached.
        await completer.complete("x = 1\n", sizes.samples)
        await asyncio.to_thread(server.flush_cache)
        search = TreeSearch(completer, checker, config, SystemClock(), _say)
        return await search.run(prompt)


def _say(node: Node) -> None:
    usage = node.prompt_usage
    print(
        f"  node {node.index}, depth {node.depth}: {node.seconds:.1f} s, "
        f"{usage.cached_tokens} of {usage.prompt_tokens} tokens cached "
        f"{dict(usage.cached_by_tier)}",
        flush=True,
    )


def _record(
    out: Path, spec: ServerSpec, sizes: Sizes, tree: SearchTree
) -> dict[str, float]:
    """Write tree, header and picture; return a row of the table."""
    folder = out / spec.name
    tree.write(folder)
    header = asdict(make_header(spec.name, {"preset": PRESET, **asdict(sizes)}))
    (folder / "header.json").write_text(json.dumps(header, indent=1) + "\n")
    draw_tree(folder / "tree.png", tree, f"LSPDojo on {spec.name}")
    summary = tree.summary()
    print(summary.describe())
    tokens = summary.prompt.prompt_tokens
    # KV of a node: its prompt beyond its parent's, and what its samples wrote.
    distinct = summary.all_samples.completion_tokens
    for node in tree.expanded():
        above = None if node.parent is None else tree.nodes[node.parent]
        known = 0 if above is None else above.prompt_usage.prompt_tokens
        distinct += max(0, node.prompt_usage.prompt_tokens - known)
    tiers = summary.prompt.cached_by_tier
    return {
        "share": summary.prompt.cached_share or 0.0,
        **{tier: count / tokens for tier, count in tiers.items()},
        "nodes": summary.nodes,
        "prompts_in_pools": tokens / sizes.pool_tokens,
        "kv_in_pools": distinct / sizes.pool_tokens,
        "all_samples": summary.all_samples.cached_share or 0.0,
        "seconds": tree.seconds,
    }


def _table(rows: dict[str, dict[str, float]]) -> str:
    lines = [
        "| system | nodes | prompts, in pools | KV, in pools | from cache "
        "| device | host | disk | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        shares = [row.get(key, 0.0) for key in ("share", "device", "host", "disk")]
        cells = " | ".join(f"{share:.1%}" for share in shares)
        lines.append(
            f"| {name} | {row['nodes']:.0f} | {row['prompts_in_pools']:.1f} | "
            f"{row['kv_in_pools']:.1f} | {cells} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
