"""The ranks of a process group of torch.distributed, as an agreement asks them."""

from __future__ import annotations

import struct
from typing import Any

from sgl_tiered.serving.agreement import Ranks

__all__ = ["group_ranks"]

_SIZE = struct.Struct("<I")
_ROOM = 252
"""Bytes that go at once, with their number; what is longer takes a second message."""


class _GroupRanks:
    """Over a process group of torch.distributed, on the CPU."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group = group
        self.rank = int(dist.get_rank(group))
        self.num_ranks = int(dist.get_world_size(group))

    def gather(self, message: bytes) -> list[bytes]:
        """Send what fits at once; the rest only where anybody has some."""
        heads = self._all(
            _SIZE.pack(len(message)) + message[:_ROOM], _SIZE.size + _ROOM
        )
        sizes = [_SIZE.unpack_from(head)[0] for head in heads]
        found = [
            head[_SIZE.size : _SIZE.size + min(size, _ROOM)]
            for head, size in zip(heads, sizes, strict=True)
        ]
        longest = max(sizes) - _ROOM
        if longest <= 0:
            return found
        rests = self._all(message[_ROOM:], longest)
        return [
            begin + rest[: max(size - _ROOM, 0)]
            for begin, rest, size in zip(found, rests, sizes, strict=True)
        ]

    def _all(self, part: bytes, num_bytes: int) -> list[bytes]:
        import torch

        padded = bytearray(part.ljust(num_bytes, b"\0"))
        mine = torch.frombuffer(padded, dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        self._dist.all_gather(parts, mine, group=self._group)
        return [one.numpy().tobytes() for one in parts]


def group_ranks(group: Any) -> Ranks | None:
    """Return the ranks of a process group; None for a group of one.

    Args:
        group: of torch.distributed, with a backend that sends from the CPU's memory
            (gloo).
    """
    import torch.distributed as dist

    if group is None or dist.get_world_size(group) == 1:
        return None
    return _GroupRanks(group)
