"""The row of a tree counts prompts and KV in device pools, from the tree alone."""

from __future__ import annotations

import json
from pathlib import Path

import lsp_tree
import pytest
from sgl_tiered_workloads.lsp_dojo.base import Finding
from sgl_tiered_workloads.lsp_dojo.tree import Node, Sample, SearchTree
from sgl_tiered_workloads.server import ServerSpec
from sgl_tiered_workloads.usage import Usage

SIZES = lsp_tree.Sizes(pool_tokens=100, samples=2, max_new_tokens=20, nodes=3)


def tree() -> SearchTree:
    """A root of 60 tokens, two children of 80 and 90, and one that waited."""
    nodes = []
    for index, prompt_tokens, cached in ((0, 60, 0), (1, 80, 60), (2, 90, 54)):
        parent = None if index == 0 else 0
        node = Node(index, parent, 0, min(index, 1), f"p{index}")
        node.samples = [Sample("x", (Finding(0, 0, 1, "no"),))] * 2
        node.prompt_usage = Usage(prompt_tokens, 0, cached, {"host": cached})
        node.sample_usage = Usage(2 * prompt_tokens, 40, 2 * prompt_tokens, {})
        nodes.append(node)
    nodes.append(Node(3, 1, 0, 2, "p3"))
    return SearchTree(nodes, stopped_by="nodes", seconds=2.0)


def test_the_row_follows_from_the_tree(tmp_path: Path) -> None:
    """Prompts count once a node; KV is new prompt tokens plus what samples wrote."""
    row = lsp_tree._record(tmp_path, ServerSpec("tiered", Path("m")), SIZES, tree())
    assert row["share"] == pytest.approx(114 / 230)
    assert row["host"] == pytest.approx(114 / 230)
    assert row["prompts_in_pools"] == pytest.approx(2.3)
    assert row["kv_in_pools"] == pytest.approx((60 + 20 + 30 + 120) / 100)
    assert row["all_samples"] == 1.0
    header = json.loads((tmp_path / "tiered" / "header.json").read_text())
    assert header["facts"]["pool_tokens"] == 100
    assert (tmp_path / "tiered" / "tree.png").exists()
    assert "| tiered | 3 | 2.3 | 2.3 | 49.6% | 0.0% | 49.6% | 0.0% | 2 |" in (
        lsp_tree._table({"tiered": row})
    )
