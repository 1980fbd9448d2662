"""Names of tiers and of the forms in which a page can be kept."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Encoding", "Lookup", "Representation", "TierId"]


class TierId(IntEnum):
    """Where a copy is, fastest first. The device level belongs to SGLang."""

    DEVICE = 0
    HOST = 1
    CXL = 2
    DISK = 3
    PEER = 4

    @property
    def label(self) -> str:
        """The word used in flags, metrics and reports."""
        return self.name.lower()


class Representation(IntEnum):
    """What a copy holds: keys and values, or the activations to rebuild them."""

    KV = 0
    ACT = 1


class Encoding(IntEnum):
    """How a copy is written."""

    RAW = 0
    SPARSE = 1
    FP8 = 2
    INT4 = 3
    INT8 = 4

    @property
    def label(self) -> str:
        """The word used in flags, metrics and reports."""
        return self.name.lower()


class Lookup(IntEnum):
    """Answer to "is this span to be had": now, soon (a transfer runs), or not."""

    HIT = 0
    PENDING = 1
    MISS = 2
