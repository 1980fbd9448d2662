"""What lies on disk, byte by byte. Every change here needs a new ``FORMAT_VERSION``.

Files of one directory:

- ``tiered-meta.json``: version, fingerprint and sizes; a difference in any of them
  makes the rest worthless.
- ``tiered-slab-000000.kv`` ...: ``slots_per_slab`` slots of ``slot_bytes`` each.
- ``tiered-index.bin``: one record per slot at ``slot * record_bytes``; little endian.
- ``tiered-lock``: held with flock by the server that uses the directory.

A record is written after its payload and names the payload's checksum, and whether that
is KV or activations. It carries its own slot number and checksum, so that a torn or
misplaced record is no record. Version 2 added what the payload holds. Since version 3
fingerprints and namespaces name weights by all of their bytes, and adapters by theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import Representation
from sgl_tiered.core.plans import PageRecords
from sgl_tiered.tiers.checks import checksum

__all__ = [
    "FORMAT_VERSION",
    "INDEX_NAME",
    "LOCK_NAME",
    "META_NAME",
    "DiskMeta",
    "encode_records",
    "is_ours",
    "read_records",
    "record_dtype",
    "slab_name",
]

FORMAT_VERSION = 3
FORMAT_NAME = "sgl-tiered-disk"
META_NAME = "tiered-meta.json"
LOCK_NAME = "tiered-lock"
INDEX_NAME = "tiered-index.bin"
PROBE_NAME = "tiered-probe"
MAGIC = 0x4B56_5449  # "ITVK" on disk; only has to differ from zeros
_OURS = re.compile(r"tiered-(meta\.json(\.new)?|lock|index\.bin|probe|slab-\d{6}\.kv)")


def slab_name(slab: int) -> str:
    """Return the file name of a slab."""
    return f"tiered-slab-{slab:06d}.kv"


def is_ours(name: str) -> bool:
    """Return whether a file name is one that this tier writes."""
    return _OURS.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class DiskMeta:
    """What must be equal for the slabs of a former server to be of use."""

    fingerprint: str
    slot_bytes: int
    page_bytes: int
    page_tokens: int
    slots_per_slab: int
    version: int = FORMAT_VERSION
    format: str = FORMAT_NAME

    def to_json(self) -> str:
        """Return the text of ``META_NAME``."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> DiskMeta | None:
        """Return the parsed value, or None where the text is not one of ours."""
        try:
            fields = json.loads(text)
            meta = cls(**fields)
        except (ValueError, TypeError, RecursionError):
            return None
        sizes = (
            meta.slot_bytes,
            meta.page_bytes,
            meta.page_tokens,
            meta.slots_per_slab,
            meta.version,
        )
        whole = all(type(size) is int and 0 < size < 2**63 for size in sizes)
        texts = isinstance(meta.fingerprint, str) and meta.format == FORMAT_NAME
        return meta if whole and texts else None

    def unlike(self, other: DiskMeta) -> str:
        """Return why what ``other`` describes is of no use here; empty if it is."""
        if other.version != self.version:
            return (
                f"it was written in format {other.version}, and this version of "
                f"sgl-tiered reads format {self.version} only"
            )
        theirs = asdict(other)
        for name, value in asdict(self).items():
            if name != "fingerprint" and value != theirs[name]:
                return f"{name} is {theirs[name]!r}, not {value!r}"
        if other.fingerprint != self.fingerprint:
            return (
                "it belongs to other weights, or to a model that is served otherwise "
                f"(fingerprint {other.fingerprint!r}, not {self.fingerprint!r})"
            )
        return ""


def record_dtype(page_tokens: int) -> np.dtype[np.void]:
    """Return the structured type of one index record; its size is a multiple of 8."""
    odd = page_tokens % 2
    return np.dtype(
        [
            ("magic", "<u4"),
            ("version", "<u2"),
            ("representation", "<u2"),
            ("slot", "<u8"),
            ("sequence", "<u8"),
            ("payload", "<u8"),
            ("namespace", "u1", (16,)),
            ("key", "u1", (16,)),
            ("parent", "u1", (16,)),
            ("tokens", "<i4", (page_tokens + odd,)),
            ("own", "<u8"),
        ]
    )


def encode_records(
    dtype: np.dtype[np.void],
    records: PageRecords,
    slots: npt.NDArray[np.int64],
    checksums: npt.NDArray[np.uint64],
    sequence: int,
) -> npt.NDArray[np.void]:
    """Return the records of pages just written, sequence numbers counting up."""
    out = np.zeros(len(slots), dtype)
    out["magic"] = MAGIC
    out["version"] = FORMAT_VERSION
    out["slot"] = slots
    out["sequence"] = np.arange(sequence, sequence + len(slots))
    out["payload"] = checksums
    out["namespace"] = np.frombuffer(records.namespace, np.uint8)
    out["key"] = records.keys
    out["parent"] = records.parents
    if records.representations is not None:
        out["representation"] = records.representations
    out["tokens"][:, : records.tokens.shape[1]] = records.tokens
    out["own"] = _own_checksums(out)
    return out


def read_records(raw: npt.NDArray[np.void], first_slot: int) -> npt.NDArray[np.void]:
    """Return those of consecutive records, from ``first_slot`` on, that are whole."""
    slots = np.arange(first_slot, first_slot + len(raw), dtype=np.uint64)
    plausible = (
        (raw["magic"] == MAGIC)
        & (raw["version"] == FORMAT_VERSION)
        & (raw["slot"] == slots)
        & np.isin(raw["representation"], list(Representation))
    )
    found = np.ascontiguousarray(raw[plausible])
    whole: npt.NDArray[np.void] = found[found["own"] == _own_checksums(found)]
    return whole


def group_by_namespace(
    found: Sequence[npt.NDArray[np.void]], page_tokens: int
) -> tuple[list[PageRecords], npt.NDArray[np.int64]]:
    """Sort whole records by age into one value per namespace.

    Returns:
        The records, oldest first, and the slots of older copies of pages that have a
        newer one; those are left out of the records.
    """
    if not found:
        return [], np.zeros(0, np.int64)
    rows = np.concatenate(found)
    names = np.concatenate([rows["namespace"], rows["key"]], axis=1).view("<u8")
    # By namespace, key and age, the last key of lexsort first: the newest copy of a
    # page is the last of its run. Columns of integers sort 4 times faster than bytes.
    order = np.lexsort((rows["sequence"], *names.T[::-1]))
    names = names[order]
    ends_page = np.ones(len(order), np.bool_)
    ends_page[:-1] = (names[1:] != names[:-1]).any(axis=1)
    stale = rows["slot"][order[~ends_page]].astype(np.int64)
    order, spaces = order[ends_page], names[ends_page, :2]
    changes = np.flatnonzero((spaces[1:] != spaces[:-1]).any(axis=1)) + 1
    groups = []
    for members in np.split(order, changes):
        by_age = members[np.argsort(rows["sequence"][members])]
        groups.append(_page_records(rows[by_age], page_tokens))
    return groups, stale


def _page_records(rows: npt.NDArray[np.void], page_tokens: int) -> PageRecords:
    """Return the records of one namespace as the value that the cache knows."""
    return PageRecords(
        namespace=rows["namespace"][0].tobytes(),
        keys=np.ascontiguousarray(rows["key"]),
        parents=np.ascontiguousarray(rows["parent"]),
        tokens=np.ascontiguousarray(rows["tokens"][:, :page_tokens]),
        checksums=rows["payload"].astype(np.uint64),
        addresses=rows["slot"].astype(np.int64),
        representations=rows["representation"].astype(np.uint8),
    )


def _own_checksums(records: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """Return xxh3-64 of each record without its last field, uint64 [n]."""
    size = records.dtype.itemsize
    raw = memoryview(records.tobytes())
    covered = size - 8
    return np.fromiter(
        (checksum(raw[start : start + covered]) for start in range(0, len(raw), size)),
        dtype=np.uint64,
        count=len(records),
    )
