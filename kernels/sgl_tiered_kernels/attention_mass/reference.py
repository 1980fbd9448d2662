"""The same written out in float32, one row and one head at a time."""

from __future__ import annotations

import torch

__all__ = ["mass_reference", "small_reference", "statistics_reference"]


def mass_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    scale: float,
    *,
    local: int = 0,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``[num_kv_heads, kv_len]`` float32; see ``attention_mass``."""
    places = _positions(keys, positions)
    group = query.shape[1] // keys.shape[1]
    mass = torch.zeros(keys.shape[1], keys.shape[0])
    for row, head, position, scores in _rows(
        query, keys, first_position, scale, places
    ):
        del row
        probabilities = torch.softmax(scores, dim=0)
        far = position - places[: scores.numel()] >= local
        mass[head // group, : scores.numel()] += probabilities * far
    return mass


def statistics_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    scale: float,
    *,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return maximum and logsumexp of each row; see ``row_statistics``."""
    maximum = torch.full((query.shape[1], query.shape[0]), -torch.inf)
    lse = maximum.clone()
    places = _positions(keys, positions)
    for row, head, _, scores in _rows(query, keys, first_position, scale, places):
        maximum[head, row] = scores.max()
        lse[head, row] = torch.logsumexp(scores, dim=0)
    return maximum, lse


def small_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    scale: float,
    *,
    share: float = 0.01,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, int]:
    """Return small entries ``[num_heads]`` and visible ones; see ``small_entries``."""
    small = torch.zeros(query.shape[1], dtype=torch.int64)
    visible = 0
    places = _positions(keys, positions)
    for _, head, _, scores in _rows(query, keys, first_position, scale, places):
        probabilities = torch.softmax(scores, dim=0)
        small[head] += (probabilities < share * probabilities.max()).sum()
        visible += scores.numel() if head == 0 else 0
    return small, visible


def _positions(keys: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    return torch.arange(keys.shape[0]) if positions is None else positions


def _rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    scale: float,
    places: torch.Tensor,
) -> list[tuple[int, int, int, torch.Tensor]]:
    """List row, head, position and the scores of the visible keys; none is empty."""
    num_queries, num_heads, _ = query.shape
    group = num_heads // keys.shape[1]
    found = []
    for row in range(num_queries):
        position = first_position + row
        visible = int((places <= position).sum())
        for head in range(num_heads if visible else 0):
            seen = keys[:visible, head // group].float()
            found.append((row, head, position, seen @ query[row, head].float() * scale))
    return found
