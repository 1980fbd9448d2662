"""The search tree as a picture: depth downwards, a node's colour its cached share.

Roots are on top. A square is a node that was expanded, a small dot one that waited;
the number under a square is how many errors its best sample had. The path to a
repaired program is drawn in green.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.lsp_dojo.tree import Node, SearchTree

__all__ = ["draw_tree", "place_nodes"]

_GREEN = "#1a9850"
_GREY = "#bbbbbb"
_MAX_WIDTH_IN = 14.0
_MANY_NODES = 60
"""Above it, numbers under the nodes would overlap."""


def place_nodes(nodes: Sequence[Node]) -> dict[int, float]:
    """Return a horizontal place for every node: leaves in turn, parents in between.

    No two nodes of one depth share a place.
    """
    children: dict[int | None, list[int]] = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node.index)
    places: dict[int, float] = {}
    next_leaf = 0
    # Children are placed before parents; an own stack, since trees may be deep.
    stack = [(root, False) for root in reversed(children.get(None, []))]
    while stack:
        index, descended = stack.pop()
        below = children.get(index, [])
        if not below:
            places[index] = float(next_leaf)
            next_leaf += 1
        elif descended:
            places[index] = sum(places[child] for child in below) / len(below)
        else:
            stack.append((index, True))
            stack.extend((child, False) for child in reversed(below))
    return places


def draw_tree(path: Path, tree: SearchTree, title: str) -> None:
    """Draw ``tree`` into the file ``path``, whose ending names the format."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    places = place_nodes(tree.nodes)
    depths = {node.index: node.depth for node in tree.nodes}
    width_in = min(_MAX_WIDTH_IN, 6.0 + 0.22 * (max(places.values(), default=0) + 1))
    height_in = 3.0 + 1.1 * (max(depths.values(), default=0) + 1)
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    axes = figure.add_subplot()
    solved = _path_to_solution(tree)
    for node in tree.nodes:
        if node.parent is not None:
            green = node.index in solved
            axes.plot(
                [places[node.parent], places[node.index]],
                [-depths[node.parent], -node.depth],
                color=_GREEN if green else _GREY,
                linewidth=2.0 if green else 0.6,
                zorder=2 if green else 1,
            )
    colours = ScalarMappable(Normalize(0.0, 1.0), "viridis")
    few = len(tree.nodes) <= _MANY_NODES
    for node in tree.nodes:
        _draw_node(axes, node, places[node.index], colours, solved, few)
    if any(node.prompt_usage.cached_share is not None for node in tree.nodes):
        figure.colorbar(
            colours, ax=axes, label="prompt tokens from cache (share)", shrink=0.7
        )
    axes.set_yticks([-depth for depth in range(max(depths.values(), default=0) + 1)])
    axes.set_yticklabels(
        [str(depth) for depth in range(max(depths.values(), default=0) + 1)]
    )
    axes.set_ylabel("depth (errors cut on the path)")
    axes.set_xticks([])
    axes.margins(y=0.15)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    summary = tree.summary()
    outcome = "repaired" if summary.repaired else "not repaired"
    axes.set_title(
        f"{title}\n{outcome}; {summary.nodes} nodes expanded (squares), "
        f"{summary.waiting} waiting (dots), {summary.diagnostics} errors found",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_node(
    axes: Any, node: Node, place: float, colours: Any, solved: set[int], few: bool
) -> None:
    if not node.samples:
        axes.plot([place], [-node.depth], ".", color=_GREY, markersize=4, zorder=3)
        return
    share = node.prompt_usage.cached_share
    axes.plot(
        [place],
        [-node.depth],
        "s",
        color="white" if share is None else colours.to_rgba(share),
        markeredgecolor=_GREEN if node.index in solved else "#333333",
        markeredgewidth=2.0 if node.index in solved else 0.6,
        markersize=9,
        zorder=4,
    )
    if few:
        best = min(len(sample.findings) for sample in node.samples)
        axes.annotate(
            str(best),
            (place, -node.depth),
            xytext=(0, -14),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )


def _path_to_solution(tree: SearchTree) -> set[int]:
    if tree.solution_at is None:
        return set()
    path: set[int] = set()
    index: int | None = tree.solution_at[0]
    while index is not None:
        path.add(index)
        index = tree.nodes[index].parent
    return path
