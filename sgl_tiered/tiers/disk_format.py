"""What lies on disk, byte by byte. Every change here needs a new ``FORMAT_VERSION``.

Files of one directory:

- ``tiered-meta.json``: version, fingerprint and sizes; a difference in any of them
  makes the rest worthless to this server. In every version a JSON object with
  ``format`` and ``version``: one of another version is refused as it is, since the
  server that wrote it may want it back.
- ``tiered-slab-000000.kv`` ...: ``slots_per_slab`` slots of ``slot_bytes`` each.
- ``tiered-index.bin``: one record per slot at ``slot * record_bytes``; little endian.
- ``tiered-lock``: held with flock by the server that uses the directory.

A record is written after its payload and names the payload's checksum, and whether that
is KV or activations. It carries its own slot number and checksum, so that a torn or
misplaced record is no record. Version 2 added what the payload holds. Since version 3
fingerprints and namespaces name weights by all of their bytes, and adapters by theirs,
and the records' own checksum is one that is computed for many at once.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import Representation
from sgl_tiered.core.plans import PageRecords, UInt8s

__all__ = [
    "FORMAT_VERSION",
    "INDEX_NAME",
    "LOCK_NAME",
    "META_NAME",
    "DiskMeta",
    "encode_records",
    "is_ours",
    "known_version",
    "older_copies",
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
_SEED, _FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_BLOCK = 8192
"""Records at a time: what is computed of them stays in the processor's cache."""
_OURS = re.compile(r"tiered-(meta\.json(\.new)?|lock|index\.bin|probe|slab-\d{6}\.kv)")


def slab_name(slab: int) -> str:
    """Return the file name of a slab."""
    return f"tiered-slab-{slab:06d}.kv"


def is_ours(name: str) -> bool:
    """Return whether a file name is one that this tier writes."""
    return _OURS.fullmatch(name) is not None


def known_version(text: str) -> int | None:
    """Return the format of which a meta file says that it is; None for no meta file."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT_NAME:
        return None
    version = fields.get("version")
    # A record says it in two bytes.
    return version if type(version) is int and 0 < version < 2**16 else None


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
    out["namespace"] = records.namespaces
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


def older_copies(
    namespaces: UInt8s, keys: UInt8s, sequence: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return which records are of a page that has a newer one; of whole records.

    O(n log n). Pages whose keys agree in 64 bits and no further are told apart unless
    several of their records mix; then an older copy may pass for the only one.
    """
    # A column of integers sorts many times faster than rows of bytes.
    order = np.lexsort((sequence, _words(keys)[:, 0]))
    keys, namespaces = _words(keys)[order], _words(namespaces)[order]
    same = (keys[1:] == keys[:-1]).all(axis=1)
    same &= (namespaces[1:] == namespaces[:-1]).all(axis=1)
    older = np.zeros(len(order), np.bool_)
    older[order[:-1]] = same
    return older


def _words(rows: UInt8s) -> npt.NDArray[np.uint64]:
    """Return rows of 16 bytes as two integers each; no copy."""
    words: npt.NDArray[np.uint64] = rows.view(np.uint64)
    return words


def _own_checksums(records: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """Return a checksum of each record without its last field, uint64 [n].

    All records at once, word by word: each step is one to one, so a change of a single
    word is always seen, and the hash of a page would cost a call for every record.
    """
    size = records.dtype.itemsize // 8
    words = np.ascontiguousarray(records).view("<u8").reshape(-1, size)
    sums = np.full(len(words), _SEED, np.uint64)
    for start in range(0, len(words), _BLOCK):
        block = sums[start : start + _BLOCK]
        for word in words[start : start + _BLOCK, :-1].T:
            block ^= word
            block *= _FACTOR
            block ^= block >> _SHIFT
    return sums
