"""Heads that copy, to start from: one that looks one token back, one that matches.

A Llama finds out by itself that what followed a word before may follow it again, but
late: two layers must agree before either is of use. Beginning with a weak form of both
(a mimetic initialisation, Trockman and Kolter, 2023) costs nothing, and leaves to be
learned what to match, how far back, and when.

- Layer 0: the first group of heads attends to the token before. All embeddings share
  one direction; queries and keys read it alone, and rotary positions make their product
  largest at distance one.
- Layer 1: the first group looks for tokens behind an earlier copy of this one. Keys
  read what layer 0 wrote, queries this token's own embedding, both by the slowly
  turning entries of a head only, so that distance hardly counts. Values are written
  back as they are, and the output layer begins as the embedding without the shared
  direction, so that it scores the matched token higher.
"""

from __future__ import annotations

import torch

from sgl_tiered_workloads.training.recipe import Shape

__all__ = ["begin_with_copying"]

# Rotary pairs that tell one token from the next.
_FAST_PAIRS = 8
# Scores of the token before, and of a matched one, over what stands elsewhere.
_BEFORE_SCORE = 35.0
_MATCH_SCORE = 20.0
# A pair turns by less than this over the longest distance: its product is content.
_SLOW_RADIANS = 1.5
# Of an embedding's length, what all embeddings share.
_SHARED_PART = 0.45
_WRITTEN_PART = 0.7


def begin_with_copying(
    parameters: dict[str, torch.Tensor],
    shape: Shape,
    embedding: str,
    output: str,
    seed: int,
) -> None:
    """Change initial parameters in place; nothing happens with fewer than two layers.

    Args:
        parameters: float32, by name; projections into the residual stream are zero.
        shape: of the model.
        embedding: name of the embedding.
        output: name of the output layer.
        seed: of the directions drawn.
    """
    if shape.num_layers < 2:
        return
    generator = torch.Generator().manual_seed(seed)
    dim, hidden = shape.head_dim, shape.hidden
    half = dim // 2
    shared = shape.num_heads // shape.num_kv_heads
    frequencies = shape.rope_theta ** (-torch.arange(half).float() / half)

    # What every embedding has in common.
    own = parameters[embedding]
    length = float(own.norm(dim=1).mean())
    direction = torch.randn(hidden, generator=generator)
    direction /= direction.norm()
    own -= torch.outer(own @ direction, direction)
    rows = parameters[output]
    rows.copy_(own * (rows.norm(dim=1).mean() / length))
    own *= (1 - _SHARED_PART**2) ** 0.5
    own += _SHARED_PART * length * direction

    def basis() -> torch.Tensor:
        """Return random orthonormal rows [head_dim, hidden] without the direction."""
        drawn = torch.randn(hidden, dim, generator=generator)
        drawn -= torch.outer(direction, direction @ drawn)
        rows: torch.Tensor = torch.linalg.qr(drawn).Q.T
        return rows.contiguous()

    def part(layer: int, name: str) -> torch.Tensor:
        return parameters[f"model.layers.{layer}.self_attn.{name}.weight"]

    # Normed embeddings have length sqrt(hidden): so much of it is the shared direction.
    seen = _SHARED_PART * hidden**0.5
    size = (_BEFORE_SCORE * dim**0.5 / seen**2 / _FAST_PAIRS) ** 0.5
    query, key = torch.zeros(dim), torch.zeros(dim)
    fast = torch.arange(min(_FAST_PAIRS, half))
    # The query is turned back by one position, the key is not.
    query[fast], query[fast + half] = (
        size * torch.cos(frequencies[fast]),
        -size * torch.sin(frequencies[fast]),
    )
    key[fast] = size
    read, write = basis(), basis()
    for head in range(shared):
        part(0, "q_proj")[head * dim : (head + 1) * dim] = torch.outer(query, direction)
    part(0, "k_proj")[:dim] = torch.outer(key, direction)
    part(0, "v_proj")[:dim] = read
    # A group's heads read the same values: each writes its share.
    gain = _WRITTEN_PART * length / (dim**0.5 * shared)
    for head in range(shared):
        part(0, "o_proj")[:, head * dim : (head + 1) * dim] = gain * write.T

    slow = torch.nonzero(frequencies * shape.max_positions / 2 < _SLOW_RADIANS)[:, 0]
    if len(slow) == 0:
        return
    slow = torch.cat((slow, slow + half))
    match = torch.zeros(dim, dim)
    match[slow, slow] = 1.0
    # Of both sides, ``slow`` of ``dim`` entries; keys hold the written part.
    query_length = (len(slow) * (1 - _SHARED_PART**2)) ** 0.5
    key_length = _WRITTEN_PART * len(slow) ** 0.5
    size = (_MATCH_SCORE * dim**0.5 / (query_length * key_length)) ** 0.5
    copied = basis()
    for head in range(shared):
        rows = slice(head * dim, (head + 1) * dim)
        part(1, "q_proj")[rows] = size * match @ read
        part(1, "o_proj")[:, rows] = (
            _WRITTEN_PART * length / (dim**0.5 * shared)
        ) * copied.T
    part(1, "k_proj")[:dim] = size * match @ write
    part(1, "v_proj")[:dim] = copied
