"""The bytes of one page whose keys and values are written in fewer bits.

A layer-page is still one piece at a fixed offset: rows of codes, one per token, then
the scales of the keys; the same for the values. Keys are scaled per channel over
``key_group`` tokens, values per token over ``value_group`` channels, since keys have
channels that stand out and values do not (KIVI, arXiv:2402.02750). What the codes mean
is in the kernel ``kv_codec``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import Encoding
from sgl_tiered.core.layout import PageLayout

__all__ = ["LEVELS", "EncodedLayout", "encoded_layout", "kept_bytes"]

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]

LEVELS = {256: 16, 16: 8, 11: 7, 8: 6}
"""Steps that a number is rounded to, and the bits that two numbers take: two of 11
steps have 121 values, which fit into 7."""
_VERSION = 1
"""Rises with every change of what the bytes mean."""
_UNIT = 16
"""Numbers of a row are packed by 16, so that each kind of code fills whole bytes."""
_INT4_LEVELS = ((16, 16), (16, 11), (11, 16), (11, 11), (8, 16), (8, 11), (8, 8))
"""Steps of keys and of values, best first; see the kernel's README for the errors."""
_MAX_KEY_GROUP = 64


@dataclass(frozen=True, slots=True)
class EncodedLayout(PageLayout):
    """Shape of one page, encoded; sizes of tokens and parts are those on the device.

    Attributes:
        encoding: FP8, INT8 or INT4.
        kv_heads: heads of keys (and of values) in a layer of this rank.
        head_dim: channels of a head.
        key_levels, value_levels: steps of a code, one of ``LEVELS``.
        key_group: tokens that share the scale of a key's channel.
        value_group: channels of a token that share the scale of its values.
    """

    # A field, where the parent has a property of this name.
    encoding: Encoding = field()
    kv_heads: int
    head_dim: int
    key_levels: int
    value_levels: int
    key_group: int
    value_group: int

    def __post_init__(self) -> None:
        """Check what would otherwise be cut off.

        Raises:
            ValueError: groups do not divide what they share, or unknown steps.
        """
        if self.page_tokens % self.key_group or self.head_dim % self.value_group:
            raise ValueError(
                f"groups of {self.key_group} tokens and {self.value_group} channels do "
                f"not divide {self.page_tokens} tokens and {self.head_dim} channels"
            )
        if not {self.key_levels, self.value_levels} <= LEVELS.keys():
            raise ValueError(f"steps must be of {sorted(LEVELS)}")
        if self.token_bytes % self.width:
            raise ValueError(
                f"{self.token_bytes} bytes a token are no {self.width} numbers"
            )

    @property
    def form(self) -> str:
        """Everything on which the bytes depend, besides the numbers: for namespaces."""
        steps = f"k{self.key_levels}v{self.value_levels}"
        return (
            f"{self.encoding.label}-{steps}-g{self.key_group}x{self.value_group}"
            f"-{_VERSION}"
        )

    @property
    def width(self) -> int:
        """Numbers in the keys (or values) of one token in one layer."""
        return self.kv_heads * self.head_dim

    @property
    def padded_width(self) -> int:
        """``width`` rounded up to whole units of 16."""
        return -(-self.width // _UNIT) * _UNIT

    @property
    def has_zeros(self) -> bool:
        """Whether a scale has a zero point beside it: not where codes are floats."""
        return self.encoding is not Encoding.FP8

    @property
    def key_row_bytes(self) -> int:
        """Bytes of the codes of one token's keys."""
        return self.padded_width * LEVELS[self.key_levels] // 16

    @property
    def value_row_bytes(self) -> int:
        """Bytes of the codes of one token's values."""
        return self.padded_width * LEVELS[self.value_levels] // 16

    @property
    def num_key_scales(self) -> int:
        """Scales of the keys of a layer-page: one a channel and group of tokens."""
        return self.page_tokens // self.key_group * self.width

    @property
    def num_value_scales(self) -> int:
        """Scales of the values of a layer-page: one a token and group of channels."""
        return self.page_tokens * (self.width // self.value_group)

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys of a layer-page, scales included."""
        scales = self.num_key_scales * (1 + self.has_zeros)
        return self.page_tokens * self.key_row_bytes + scales

    @property
    def value_bytes(self) -> int:
        """Bytes of the values of a layer-page, scales included."""
        scales = self.num_value_scales * (1 + self.has_zeros)
        return self.page_tokens * self.value_row_bytes + scales

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of keys and values of one page in one layer."""
        return self.key_bytes + self.value_bytes

    @property
    def single_token_bytes(self) -> int:
        """Bytes that one token has to itself in one layer.

        Its codes, and the scales and zeros of its values.
        """
        scales = self.width // self.value_group * (1 + self.has_zeros)
        return self.key_row_bytes + self.value_row_bytes + scales

    @property
    def shared_bytes(self) -> int:
        """Bytes of the scales and zeros that the keys of a group share in one layer."""
        return self.width * (1 + self.has_zeros)

    @property
    def bits(self) -> float:
        """Bits per number, everything included."""
        return 8 * self.layer_page_bytes / (2 * self.page_tokens * self.width)

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than on the device."""
        return 2 * self.part_bytes / self.layer_page_bytes

    def key_offset(self, layer: int) -> int:
        """Offset in bytes of a layer's keys inside a page."""
        return layer * self.layer_page_bytes

    def value_offset(self, layer: int) -> int:
        """Offset in bytes of a layer's values inside a page."""
        return layer * self.layer_page_bytes + self.key_bytes


def encoded_layout(
    layout: PageLayout,
    encoding: Encoding,
    kv_heads: int,
    head_dim: int,
    *,
    key_levels: int | None = None,
    value_levels: int | None = None,
    key_group: int | None = None,
    value_group: int | None = None,
) -> EncodedLayout:
    """Return the layout of a page in an encoding.

    INT4 without steps takes the finest that need at most 4 bits a number, scales and
    all, which is 4 times fewer bytes than 16-bit KV.

    Args:
        layout: as the device has it.
        encoding: FP8, INT8 or INT4.
        kv_heads: heads in a layer of this rank.
        head_dim: channels of a head.
        key_levels, value_levels: other steps than the encoding's own.
        key_group: other than the page, or 64 tokens of a longer one.
        value_group: other than the head.

    Raises:
        ValueError: RAW and SPARSE have no such layout; groups do not fit.
    """
    if encoding not in (Encoding.FP8, Encoding.INT8, Encoding.INT4):
        raise ValueError(f"{encoding.name} writes no codes")
    tokens = layout.page_tokens
    if key_group is None:
        key_group = tokens if tokens % _MAX_KEY_GROUP else _MAX_KEY_GROUP

    def of(levels: tuple[int, int]) -> EncodedLayout:
        return EncodedLayout(
            layout.num_layers,
            tokens,
            layout.token_bytes,
            encoding,
            kv_heads,
            head_dim,
            key_levels=key_levels or levels[0],
            value_levels=value_levels or levels[1],
            key_group=key_group,
            value_group=value_group or head_dim,
        )

    if encoding is not Encoding.INT4:
        return of((256, 256))
    choices = [of(levels) for levels in _INT4_LEVELS]
    return next((c for c in choices if c.bits <= 4), choices[-1])


def kept_bytes(layout: EncodedLayout, kept: Bools) -> Int64s:
    """Return int64 [n], the bytes that decoding some tokens of encoded pages reads.

    Args:
        layout: of the pages.
        kept: bool [num_layers, n, page_tokens].
    """
    num_groups = layout.page_tokens // layout.key_group
    grouped = kept.reshape(*kept.shape[:2], num_groups, layout.key_group)
    tokens = grouped.sum(axis=(0, 2, 3))
    groups = grouped.any(axis=3).sum(axis=(0, 2))
    count: Int64s = tokens * layout.single_token_bytes + groups * layout.shared_bytes
    return count
