"""How KV lies in memory, and which bytes go where: index arithmetic, nothing else.

MemServe, section 5.2 (figures 5 and 11): pages lie either *discrete*, one run of bytes
per layer and per keys or values (as an engine's device pool), or *aggregated*, all of a
page in one run (as our tiers, ``PageLayout``). They travel by layer, as each is ready,
or by request. Three ways have names there: ``by-layer`` and ``by-request`` on discrete
pages, ``by-request-agg`` on aggregated ones.

Ranks of an instance hold some layers (pipeline) and some KV heads (tensor parallelism)
of every page. Where two instances are partitioned differently, every pair of ranks
exchanges what both hold (``shares``); heads that several ranks of the source hold are
sent by one of them. A piece is a range of bytes: offset here, offset there, length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import Int64s
from sgl_tiered.errors import ConfigError
from sgl_tiered.transport.base import Pieces

__all__ = ["KVShape", "MemoryForm", "Shard", "Share", "Way", "batches", "shares"]

_MAX_BYTES = 1 << 48
"""Of a page, and from one part of memory to the next: more than any machine has."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """KV of one page of a whole model: equal on both sides of a transfer.

    Attributes:
        num_layers: layers in all.
        num_heads: KV heads in all.
        head_bytes: bytes of one head's key (or value) of one token.
        page_tokens: tokens in one page.
    """

    num_layers: int
    num_heads: int
    head_bytes: int
    page_tokens: int

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.num_heads, self.head_bytes, self.page_tokens)
        if min(sizes) < 1 or 2 * math.prod(sizes) > _MAX_BYTES:
            raise ValueError(f"no page has {sizes} layers, heads, bytes and tokens")

    def check_same(self, other: KVShape, instance: int) -> None:
        """Raise ConfigError unless pages can be exchanged with an instance."""
        if self.page_tokens != other.page_tokens:
            raise ConfigError(
                "page size",
                f"instance {instance} has pages of {other.page_tokens} tokens and "
                f"this one of {self.page_tokens}",
                "start all instances of a pool with the same --page-size",
            )
        if self != other:
            raise ConfigError(
                "pool",
                f"instance {instance} has another model or KV type ({other}, here "
                f"{self})",
                "let only instances of one model and KV type share a pool",
            )


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of every page one rank holds.

    Attributes:
        first_layer, num_layers: its layers.
        first_head, num_heads: its KV heads.
    """

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int

    def __post_init__(self) -> None:
        is_part = min(self.num_layers, self.num_heads) >= 1
        if not is_part or min(self.first_layer, self.first_head) < 0:
            raise ValueError("a rank holds no part of a page")

    @staticmethod
    def split(shape: KVShape, tp: int, pp: int) -> tuple[Shard, ...]:
        """Return the shards of ``tp * pp`` ranks, tensor parallelism innermost.

        Layers are dealt as evenly as can be, the first stages get those left over.
        With fewer heads than ``tp``, neighbours hold the same one, as in SGLang.

        Raises:
            ConfigError: heads and ranks do not divide, or there are too few layers.
        """
        heads = shape.num_heads
        if min(tp, pp) < 1 or max(tp, heads) % min(tp, heads) or pp > shape.num_layers:
            raise ConfigError(
                "parallelism",
                f"{heads} heads and {shape.num_layers} layers do not go into {tp} "
                f"tensor and {pp} pipeline ranks",
                "choose sizes that divide",
            )
        found = []
        first_layer = 0
        for stage in range(pp):
            num_layers = shape.num_layers // pp + (stage < shape.num_layers % pp)
            for rank in range(tp):
                each = max(1, heads // tp)
                first_head = rank * heads // tp
                found.append(Shard(first_layer, num_layers, first_head, each))
            first_layer += num_layers
        return tuple(found)

    def layout(self, shape: KVShape) -> PageLayout:
        """Return the layout of this rank's part of a page."""
        token_bytes = self.num_heads * shape.head_bytes
        return PageLayout(self.num_layers, shape.page_tokens, token_bytes)


@dataclass(frozen=True, slots=True)
class MemoryForm:
    """Where the pages of one rank lie in a region: strides in bytes.

    The bytes of a head of a token are at ``slot * slot_stride + layer * layer_stride +
    (0 or value_offset) + token * token_stride + head * head_bytes``, layers and heads
    counted from the shard's first.
    """

    shard: Shard
    slot_stride: int
    layer_stride: int
    value_offset: int
    token_stride: int

    def __post_init__(self) -> None:
        strides = (self.slot_stride, self.layer_stride, self.token_stride)
        if not min(*strides, self.value_offset) >= 0 or self.slot_stride < 1:
            raise ValueError("pages lie backwards")
        if max(*strides, self.value_offset) > _MAX_BYTES:
            raise ValueError(f"a stride is longer than {_MAX_BYTES} bytes")

    def refusal(self, shape: KVShape, num_bytes: int) -> str:
        """Return why pages cannot lie so in a region; else an empty text."""
        shard = self.shard
        if (
            shard.first_layer + shard.num_layers > shape.num_layers
            or shard.first_head + shard.num_heads > shape.num_heads
        ):
            return "a rank holds more than there is"
        extent = (
            (shard.num_layers - 1) * self.layer_stride
            + self.value_offset
            + (shape.page_tokens - 1) * self.token_stride
            + shard.num_heads * shape.head_bytes
        )
        return "" if extent <= num_bytes else "a page is longer than its region"

    @staticmethod
    def aggregated(shape: KVShape, shard: Shard, row_bytes: int = 0) -> MemoryForm:
        """Return the form of tiers: a page is one row; ``row_bytes`` 0 for tight."""
        layout = shard.layout(shape)
        return MemoryForm(
            shard,
            row_bytes or layout.page_bytes,
            layout.layer_page_bytes,
            layout.part_bytes,
            layout.token_bytes,
        )

    @staticmethod
    def discrete(shape: KVShape, shard: Shard, num_slots: int) -> MemoryForm:
        """Return the form of a device pool: per layer all keys, then all values."""
        layout = shard.layout(shape)
        return MemoryForm(
            shard,
            layout.part_bytes,
            num_slots * layout.layer_page_bytes,
            num_slots * layout.part_bytes,
            layout.token_bytes,
        )


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank of the source sends to one rank of the destination.

    Attributes:
        source, target: numbers of the ranks.
        part: the layers and heads.
    """

    source: int
    target: int
    part: Shard


class Way(Enum):
    """How pages travel."""

    BY_LAYER = "by-layer"
    BY_REQUEST = "by-request"
    BY_REQUEST_AGG = "by-request-agg"


def shares(sources: Sequence[Shard], targets: Sequence[Shard]) -> list[Share]:
    """Return what goes from which rank to which, so that every target gets all once.

    Of source ranks that hold the same heads, targets take turns: each sends about as
    much as the others.

    Raises:
        ValueError: a target's layers and heads are held by no source, or in parts.
    """
    found = []
    for number, target in enumerate(targets):
        wanted = np.zeros((target.num_layers, target.num_heads), np.bool_)
        turn = number % max(1, len(sources))
        order = [*range(turn, len(sources)), *range(turn)]
        for source in order:
            part = _common(sources[source], target)
            if part is None:
                continue
            layers = slice(
                part.first_layer - target.first_layer,
                part.first_layer - target.first_layer + part.num_layers,
            )
            heads = slice(
                part.first_head - target.first_head,
                part.first_head - target.first_head + part.num_heads,
            )
            if wanted[layers, heads].all():
                continue
            if wanted[layers, heads].any():
                raise ValueError("ranks hold parts of what others hold")
            wanted[layers, heads] = True
            found.append(Share(source, number, part))
        if not wanted.all():
            raise ValueError(f"nobody holds all of what rank {number} needs")
    return found


def batches(
    way: Way,
    shape: KVShape,
    source: MemoryForm,
    target: MemoryForm,
    part: Shard,
    slots: Int64s,
    target_slots: Int64s,
    regions: tuple[int, int] = (0, 0),
) -> list[Pieces]:
    """Return the pieces of one share, one batch per layer or one in all.

    Neighbouring pieces that are neighbours on both sides become one.

    Args:
        way: by layer, or by request.
        shape: of the model.
        source, target: where the pages lie on either side.
        part: the share's layers and heads, held by both.
        slots, target_slots: int64 [n], the pages here and there.
        regions: numbers of the regions here and there.
    """
    assert len(slots) == len(target_slots), (len(slots), len(target_slots))
    length, inner = part.num_heads * shape.head_bytes, 0
    # What follows on without a gap on both sides is one piece from the start: tokens,
    # then values after keys, then (by request) layers.
    counts = (shape.page_tokens, 2, part.num_layers)
    strides = zip(_strides(source), _strides(target), strict=True)
    max_inner = 2 if way is Way.BY_LAYER else 3
    for count, (here_stride, there_stride) in zip(counts, strides, strict=True):
        if inner == max_inner or not here_stride == there_stride == length:
            break
        length, inner = length * count, inner + 1
    here = _offsets(shape, source, part, slots, inner)
    there = _offsets(shape, target, part, target_slots, inner)
    if way is Way.BY_LAYER:
        return [
            _merged(here[:, i], there[:, i], length, regions)
            for i in range(part.num_layers)
        ]
    return [_merged(here, there, length, regions)]


def _common(a: Shard, b: Shard) -> Shard | None:
    """Return the layers and heads that both hold, or None."""
    first_layer = max(a.first_layer, b.first_layer)
    last_layer = min(a.first_layer + a.num_layers, b.first_layer + b.num_layers)
    first_head = max(a.first_head, b.first_head)
    last_head = min(a.first_head + a.num_heads, b.first_head + b.num_heads)
    if first_layer >= last_layer or first_head >= last_head:
        return None
    return Shard(
        first_layer, last_layer - first_layer, first_head, last_head - first_head
    )


def _strides(form: MemoryForm) -> tuple[int, int, int]:
    """Return the strides of tokens, of keys to values, and of layers."""
    return form.token_stride, form.value_offset, form.layer_stride


def _offsets(
    shape: KVShape, form: MemoryForm, part: Shard, slots: Int64s, inner: int
) -> Int64s:
    """Return where pieces begin: int64 [slots, layers, 2, tokens].

    The last ``inner`` of these dimensions are inside a piece, and have length 1.
    """
    first_layer = part.first_layer - form.shard.first_layer
    first_head = part.first_head - form.shard.first_head
    counts = (
        shape.page_tokens if inner < 1 else 1,
        2 if inner < 2 else 1,
        part.num_layers if inner < 3 else 1,
    )
    tokens, halves, layers = (
        np.arange(count, dtype=np.int64) * stride
        for count, stride in zip(counts, _strides(form), strict=True)
    )
    start = first_layer * form.layer_stride + first_head * shape.head_bytes
    offsets: Int64s = (
        (slots * form.slot_stride + start)[:, None, None, None]
        + layers[None, :, None, None]
        + halves[None, None, :, None]
        + tokens[None, None, None, :]
    )
    return offsets


def _merged(
    here: Int64s, there: Int64s, length: int, regions: tuple[int, int]
) -> Pieces:
    """Return pieces of ``length`` bytes, joined where both sides go on."""
    local, remote = here.ravel(), there.ravel()
    begins = np.ones(len(local), np.bool_)
    goes_on = (local[1:] == local[:-1] + length) & (remote[1:] == remote[:-1] + length)
    begins[1:] = ~goes_on
    firsts = np.flatnonzero(begins)
    counts = np.diff(np.append(firsts, len(local)))
    return Pieces(local[firsts], remote[firsts], counts * length, *regions)
