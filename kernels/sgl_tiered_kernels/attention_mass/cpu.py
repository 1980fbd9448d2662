"""Mass, row statistics and small entries on a CPU: float32 products, block by block.

Every pass walks the keys in blocks and, for each, the queries that see it; what a block
of keys is to all of a block of queries needs no mask. The query heads of a KV head are
rows of one product. Inputs are turned to float32 a block at a time: in bfloat16 a
product's result would be rounded to 8 bits, which moves a score of 20 by a tenth.

The functions take checked arguments; see the entry in ``__init__.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["attention_mass", "row_statistics", "small_entries"]

# Scores of a block over all heads: 4 MB, which stays in the cache between the passes
# over it.
_BLOCK_ENTRIES = 1 << 20
_BLOCK_KEYS = 512
# So few scores are computed once, for the row's sum and for the mass: the rows of a
# sample of queries.
_WHOLE_ENTRIES = 1 << 22


@dataclass(frozen=True, slots=True)
class _Problem:
    """Queries and keys with the places of both.

    ``bounds`` is ``[num_queries]``: the last position that counts for each query.
    ``places`` is ``[kv_len]``.
    """

    query: torch.Tensor
    keys: torch.Tensor
    scale: float
    bounds: torch.Tensor
    places: torch.Tensor

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return int(self.query.shape[1] // self.keys.shape[1])

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Return queries as ``[num_kv_heads, queries * group, head_dim]``, scaled."""
        num_kv_heads, head_dim = self.keys.shape[1:]
        shape = (end - begin, num_kv_heads, self.group, head_dim)
        rows = self.query[begin:end].reshape(shape).permute(1, 0, 2, 3).float()
        return rows.mul(self.scale).reshape(num_kv_heads, -1, head_dim)

    def columns(self, begin: int, end: int) -> torch.Tensor:
        """Return keys as ``[num_kv_heads, head_dim, keys]``."""
        return self.keys[begin:end].permute(1, 2, 0).float()

    def hidden(self, rows: slice, columns: slice) -> torch.Tensor:
        """Return ``[queries * group, keys]``: true where a key does not count."""
        hidden = self.places[columns] > self.bounds[rows].unsqueeze(1)
        return hidden.repeat_interleave(self.group, dim=0)

    def blocks(self) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
        """Yield blocks of keys, each with the blocks of queries for which some count.

        With each block of queries: whether some of the keys do not count for some.
        """
        num_queries, num_heads = self.query.shape[:2]
        kv_len = self.keys.shape[0]
        width = min(_BLOCK_KEYS, kv_len)
        step = max(1, _BLOCK_ENTRIES // (width * num_heads))
        for begin in range(0, kv_len, width):
            columns = slice(begin, min(begin + width, kv_len))
            ends = self.places[[columns.start, columns.stop - 1]]
            some, every = torch.searchsorted(self.bounds, ends).tolist()
            rows = [(r, True) for r in _cut(some, every, step)]
            rows += [(r, False) for r in _cut(every, num_queries, step)]
            if rows:
                yield columns, rows

    def per_row(self, values: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return ``[num_heads, num_queries]`` as ``rows`` lays them out, one wide."""
        num_kv_heads = self.keys.shape[1]
        part = values[:, rows].view(num_kv_heads, self.group, -1)
        return part.transpose(1, 2).reshape(num_kv_heads, -1, 1)


def attention_mass(
    query: torch.Tensor,
    keys: torch.Tensor,
    lse: torch.Tensor | None,
    first_position: int,
    scale: float,
    out: torch.Tensor,
    local: int,
    positions: torch.Tensor | None,
) -> None:
    """Add the mass to ``out``."""
    problem = _problem(query, keys, first_position, scale, positions, local)
    if lse is None:
        seen = _problem(query, keys, first_position, scale, positions, 0)
        if query.shape[0] * query.shape[1] * keys.shape[0] <= _WHOLE_ENTRIES:
            _mass_at_once(problem, seen, out)
            return
        lse = torch.empty(query.shape[1], query.shape[0])
        _statistics(seen, torch.empty_like(lse), lse)
    for columns, blocks in problem.blocks():
        part = problem.columns(columns.start, columns.stop)
        for rows, is_masked in blocks:
            scores = _scores(problem, rows, part, problem.per_row(lse, rows))
            if is_masked:
                scores.masked_fill_(problem.hidden(rows, columns), -torch.inf)
            out[:, columns] += scores.exp_().sum(dim=1)


def row_statistics(
    query: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    scale: float,
    positions: torch.Tensor | None,
    maximum: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write every element of ``maximum`` and ``lse``."""
    problem = _problem(query, keys, first_position, scale, positions, 0)
    _statistics(problem, maximum, lse)


def small_entries(
    query: torch.Tensor,
    keys: torch.Tensor,
    maximum: torch.Tensor | None,
    first_position: int,
    scale: float,
    out: torch.Tensor,
    log_share: float,
    positions: torch.Tensor | None,
) -> None:
    """Add the counts to ``out``."""
    problem = _problem(query, keys, first_position, scale, positions, 0)
    if maximum is None:
        maximum = torch.empty(query.shape[1], query.shape[0])
        _statistics(problem, maximum, torch.empty_like(maximum))
    limit = maximum + log_share
    counts = out.view(keys.shape[1], problem.group)
    for columns, blocks in problem.blocks():
        part = problem.columns(columns.start, columns.stop)
        for rows, is_masked in blocks:
            scores = _scores(problem, rows, part, problem.per_row(limit, rows))
            if is_masked:
                scores.masked_fill_(problem.hidden(rows, columns), torch.inf)
            small = (scores < 0).sum(dim=2)
            counts += small.view(keys.shape[1], -1, problem.group).sum(dim=1)


def _problem(
    query: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    scale: float,
    positions: torch.Tensor | None,
    local: int,
) -> _Problem:
    first = first_position - local
    bounds = torch.arange(first, first + query.shape[0])
    places = torch.arange(keys.shape[0]) if positions is None else positions
    return _Problem(query, keys, scale, bounds, places)


def _cut(begin: int, end: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, end)) for at in range(begin, end, step)]


def _scores(
    problem: _Problem, rows: slice, columns: torch.Tensor, less: torch.Tensor | None
) -> torch.Tensor:
    """Return the scores of a block, less a number per row where one is given."""
    queries = problem.rows(rows.start, rows.stop)
    if less is None:
        return torch.bmm(queries, columns)
    return torch.baddbmm(less.neg(), queries, columns)


def _mass_at_once(problem: _Problem, seen: _Problem, out: torch.Tensor) -> None:
    """Add the mass of so few scores that they are computed but once."""
    last = int(torch.searchsorted(seen.places, seen.bounds[-1], right=True))
    if last == 0:
        return
    rows, columns = slice(0, problem.query.shape[0]), slice(0, last)
    product = torch.bmm(problem.rows(0, rows.stop), problem.columns(0, last))
    product.masked_fill_(seen.hidden(rows, columns), -torch.inf)
    # A row that sees nothing: 0 / 0, and nothing of it counts below.
    shares = torch.softmax(product, dim=2)
    shares.masked_fill_(problem.hidden(rows, columns), 0.0)
    out[:, :last] += shares.sum(dim=1)


def _statistics(problem: _Problem, maximum: torch.Tensor, lse: torch.Tensor) -> None:
    """Write the largest score of each row and its logsumexp, both once through."""
    num_queries, num_heads, _ = problem.query.shape
    num_kv_heads, group = problem.keys.shape[1], problem.group
    largest = torch.full((num_kv_heads, num_queries * group, 1), -torch.inf)
    sums = torch.zeros_like(largest)
    for columns, blocks in problem.blocks():
        part = problem.columns(columns.start, columns.stop)
        for rows, is_masked in blocks:
            scores = _scores(problem, rows, part, None)
            if is_masked:
                scores.masked_fill_(problem.hidden(rows, columns), -torch.inf)
            mine = slice(rows.start * group, rows.stop * group)
            before = largest[:, mine]
            # Every row of a block sees the first of its keys: no -inf minus -inf.
            after = torch.maximum(before, scores.amax(dim=2, keepdim=True))
            sums[:, mine] *= (before - after).exp_()
            sums[:, mine] += scores.sub_(after).exp_().sum(dim=2, keepdim=True)
            largest[:, mine] = after
    by_head = (num_kv_heads, num_queries, group)
    for values, target in ((largest, maximum), (sums.log_().add_(largest), lse)):
        heads = values.view(by_head).transpose(1, 2)
        target.copy_(heads.reshape(num_heads, num_queries))
