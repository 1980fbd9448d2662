"""The disk tier after a crash at any moment: what it recovers is what was written.

A history of servers on one folder is recorded call by call; each state that a kill or a
power loss may have left is recovered by the tier itself, and judged:

- recovery never raises, and the folder can be used;
- a page that is found has the bytes of a version of it that was written under this
  fingerprint, or is a miss; after a kill it is no miss;
- a page is found under its own namespace, also of a batch that holds several;
- after a kill everything that was acknowledged is there, and nothing that was
  overwritten, forgotten before a close, or left by another fingerprint;
- once a tier has been opened its meta file is whole, so that a power loss costs the
  pages under way and not the whole folder.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_tiered.core.plans import PageRecords, TransferResult
from sgl_tiered.tiers import disk_directory, disk_files, disk_format
from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.checks import checksum, expected_checksums
from sgl_tiered.tiers.disk import DiskTier
from sgl_tiered.tiers.disk_directory import DiskDirectory
from sgl_tiered.tiers.disk_format import META_NAME, DiskMeta
from sgl_tiered.tiers.disk_payload import Batch
from sgl_tiered.tiers.disk_records import RecordBook
from sgl_tiered.tiers.memory import aligned_buffer
from tests.property.crash_world import Recorder, killed, lay_out, powerless

SLOT_BYTES = 4096
PAGE_BYTES = 4000
PAGE_TOKENS = 3
RECORD_BYTES = disk_format.record_dtype(PAGE_TOKENS).itemsize
SLOTS_PER_SLAB = 4
NUM_SLOTS = 10
NUM_KEYS = 8


class ViolationError(AssertionError):
    """A state that the product recovers wrongly."""


def demand(condition: bool, what: str) -> None:
    if not condition:
        raise ViolationError(what)


def page_of(seed: int) -> Any:
    """Return the bytes of a version of a page: uint8 [PAGE_BYTES]."""
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, np.uint8)


def namespace_of(key: int) -> Any:
    """Return the namespace of a key's page: uint8 [16]."""
    return np.full(16, key % 3, np.uint8)


def open_tier(folder: Any, fingerprint: str, num_slots: int) -> DiskTier:
    return DiskTier.open(
        folder,
        slot_bytes=SLOT_BYTES,
        page_bytes=PAGE_BYTES,
        page_tokens=PAGE_TOKENS,
        max_bytes=num_slots * (SLOT_BYTES + RECORD_BYTES),
        slab_bytes=SLOTS_PER_SLAB * SLOT_BYTES,
        fingerprint=fingerprint,
        io="threads",
        num_threads=1,
    )


def store(tier: DiskTier, slots: list[int], keys: list[int], seeds: list[int]) -> Any:
    """Store a version of each key's page, in one batch of several namespaces."""
    buffer = aligned_buffer(len(slots), SLOT_BYTES)
    names = np.zeros((len(slots), 16), np.uint8)
    spaces = np.stack([namespace_of(key) for key in keys])
    for row, (key, seed) in enumerate(zip(keys, seeds, strict=True)):
        buffer[row, :PAGE_BYTES] = page_of(seed)
        names[row, 0] = key
    records = PageRecords(
        namespaces=spaces,
        keys=names,
        parents=names + np.uint8(1),
        tokens=np.repeat(np.asarray(keys, np.int32)[:, None], PAGE_TOKENS, axis=1),
        checksums=np.zeros(len(slots), np.uint64),
        addresses=np.asarray(slots),
    )
    io = TierIO(np.asarray(slots), buffer, np.arange(len(slots)), records)
    return tier.store(io)


@dataclass
class Known:
    """What is known of a folder at a moment of its history.

    Attributes:
        fingerprint, num_slots: of the server that uses it, or is about to.
        written: (fingerprint, key) -> seeds of the versions that may be there.
        certain: slot -> key and seed that were acknowledged.
        unsure: slots that are being changed.
        is_opened: the server has opened it.
    """

    fingerprint: str = ""
    num_slots: int = 0
    written: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    certain: dict[int, tuple[int, int]] = field(default_factory=dict)
    unsure: set[int] = field(default_factory=set)
    is_opened: bool = False

    def take(self, event: str, *facts: Any) -> None:
        """Take note of a mark."""
        if event == "opens":
            fingerprint, num_slots = facts
            if fingerprint != self.fingerprint:
                self.certain, self.unsure = {}, set()
            self.fingerprint, self.num_slots = fingerprint, num_slots
            self.certain = {s: c for s, c in self.certain.items() if s < num_slots}
            self.unsure = {s for s in self.unsure if s < num_slots}
            self.is_opened = False
        elif event == "opened":
            self.is_opened = True
        elif event == "begins":
            slots, keys, seeds = facts
            for key, seed in zip(keys, seeds, strict=True):
                place = (self.fingerprint, key)
                self.written.setdefault(place, set()).add(seed)
            former = {s for s, (key, _) in self.certain.items() if key in keys}
            self._touch(former | set(slots))
        elif event == "stored":
            slots, keys, seeds = facts
            for slot, key, seed in zip(slots, keys, seeds, strict=True):
                self.certain[slot] = key, seed
                self.unsure.discard(slot)
        elif event == "forgets":
            self._touch(set(facts[0]))
        elif event == "closed":
            # What was forgotten is void, and nothing is under way; an older copy of a
            # page may still have its record.
            self.unsure &= facts[0]

    def _touch(self, slots: set[int]) -> None:
        for slot in slots:
            self.certain.pop(slot, None)
        self.unsure |= slots


def play(folder: Any, seed: int, num_steps: int) -> Recorder:
    """Let servers use a folder one after the other; return what they did to it."""
    rng = np.random.default_rng(seed)
    recorder = Recorder(folder)
    seeds = itertools.count(1)
    servers = [("a", 10), ("a", 10), ("b", 10), ("b", 6), ("b", 10), ("a", 10)]
    last = ""
    newest: dict[int, int] = {}
    with recorder.recording():
        for fingerprint, num_slots in servers:
            if fingerprint != last:
                newest = {}
            last = fingerprint
            recorder.mark("opens", fingerprint, num_slots)
            tier = open_tier(folder, fingerprint, num_slots)
            recorder.mark("opened")
            tier.recover()
            stale: set[int] = set()
            newest = {key: slot for key, slot in newest.items() if slot < num_slots}
            for _ in range(num_steps):
                count = int(rng.integers(1, 4))
                first = int(rng.integers(num_slots - count + 1))
                slots = list(range(first, first + count))
                if rng.random() < 0.3:
                    slots = rng.permutation(num_slots)[:count].tolist()
                if rng.random() < 0.25:
                    recorder.mark("forgets", slots)
                    tier.forget(np.asarray(slots))
                    stale -= set(slots)
                    continue
                keys = rng.permutation(NUM_KEYS)[:count].tolist()
                versions = list(itertools.islice(seeds, count))
                recorder.mark("begins", slots, keys, versions)
                result = store(tier, slots, keys, versions)
                assert result.ok.all(), result.error
                recorder.mark("stored", slots, keys, versions)
                stale -= set(slots)
                for key, slot in zip(keys, slots, strict=True):
                    if newest.get(key, slot) not in slots:
                        stale.add(newest[key])
                    newest[key] = slot
            tier.close()
            recorder.mark("closed", set(stale))
    return recorder


def judge(folder: Any, known: Known, *, was_killed: bool) -> None:
    """Recover a folder as its next server does, and judge what comes."""
    if known.is_opened:
        file = folder / META_NAME
        text = file.read_text(errors="replace") if file.exists() else ""
        demand(DiskMeta.from_json(text) is not None, "the meta file is not whole")
    found: dict[int, tuple[int, int]] = {}
    tier = open_tier(folder, known.fingerprint, known.num_slots)
    try:
        left = tier.recover()
        for group in left if isinstance(left, list) else [left]:
            buffer = aligned_buffer(len(group.addresses), SLOT_BYTES)
            wanted = expected_checksums(group.checksums, group.addresses)
            rows = np.arange(len(group.addresses))
            result = tier.load(TierIO(group.addresses, buffer, rows, wanted))
            for row, slot in enumerate(group.addresses.tolist()):
                key = int(group.keys[row, 0])
                demand((group.tokens[row] == key).all(), "a record in parts")
                is_own = (group.namespaces[row] == namespace_of(key)).all()
                demand(bool(is_own), f"slot {slot}: {key} in another namespace")
                if not result.ok[row]:
                    demand(not was_killed, f"slot {slot} is recovered and no page")
                    continue
                versions = known.written.get((known.fingerprint, key), set())
                seed = next((s for s in versions if is_page(buffer[row], s)), None)
                demand(seed is not None, f"slot {slot} holds no version of {key}")
                found[slot] = key, int(seed or 0)
        if was_killed:
            for slot, page in known.certain.items():
                demand(found.get(slot) == page, f"slot {slot} has lost {page}")
            for slot in found.keys() - known.certain.keys():
                demand(slot in known.unsure, f"slot {slot} came back")
        result = store(tier, [0], [NUM_KEYS], [10**9])
        demand(bool(result.ok.all()), f"the folder cannot be used: {result.error}")
    finally:
        tier.close()


_SUMS: dict[int, int] = {}


def is_page(row: Any, seed: int) -> bool:
    """Return whether a row holds this version of a page."""
    if seed not in _SUMS:
        _SUMS[seed] = checksum(page_of(seed))
    return checksum(row[:PAGE_BYTES]) == _SUMS[seed]


def check(
    room: Any,
    seed: int,
    *,
    num_steps: int,
    every: int = 0,
    num_states: int = 0,
    kills: bool = True,
) -> int:
    """Play a history and judge states after crashes; return how many.

    Args:
        room: a folder for folders.
        seed: of the history and of what is drawn.
        num_steps: of each server.
        every: after each how many calls a power loss is tried; 0 for never.
        num_states: of each power loss.
        kills: try a kill at every moment.
    """
    ops = play(room / "history", seed, num_steps).ops
    rng = np.random.default_rng(seed)
    known, num_judged = Known(), 0
    place = room / "state"

    def judged(state: Any, *, was_killed: bool) -> None:
        lay_out(state, place)
        try:
            judge(place, known, was_killed=was_killed)
        finally:
            shutil.rmtree(place)

    for moment in range(len(ops) + 1):
        if moment and ops[moment - 1].kind == "mark":
            known.take(*ops[moment - 1].data)
        if not known.fingerprint or (moment and ops[moment - 1].kind == "create"):
            continue
        for state in killed(ops, moment) if kills else ():
            judged(state, was_killed=True)
            num_judged += 1
        if every and moment % every == 0:
            for state in powerless(ops, moment, rng, num_states):
                judged(state, was_killed=False)
                num_judged += 1
    return num_judged


@pytest.fixture
def room(tmp_path, caplog):
    """A folder in memory, where there is one: states are many and small."""
    caplog.set_level(logging.ERROR, "sgl_tiered")
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.mark.timeout(300)
def test_what_is_recovered_was_written(room):
    """A short history, each of its moments, and some power losses."""
    assert check(room, 1, num_steps=3, every=6, num_states=6) > 300


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(2, 8))
def test_long_histories(room, seed):
    """Longer histories, and more of what a power loss may leave."""
    assert check(room, seed, num_steps=12, every=2, num_states=12) > 3000


# Defects, each of which must be found.


def record_before_payload(monkeypatch):
    def store_wrongly(self: DiskTier, io: TierIO) -> TransferResult:
        with self._access.running():
            volume = self._access.volume
            assert volume is not None
            sums = np.zeros(len(io.addresses), np.uint64)
            batch = self._payload.batch(
                io, volume.slabs, volume.meta, sums, writes=True
            )
            positions = self._prepare(volume, batch)
            for position in positions.tolist():
                sums[position] = checksum(batch._page(position))
                batch.ok[position] = True
            self._commit(volume, batch)
            self._payload.run(batch, positions)
            return self._result(batch, 0.0, "not written")

    monkeypatch.setattr(DiskTier, "store", store_wrongly)


def old_record_stays(monkeypatch):
    def void_in_memory(self: RecordBook, slots: Any) -> None:
        self._valid[slots] = False

    monkeypatch.setattr(RecordBook, "void", void_in_memory)


def forgotten_records_stay(monkeypatch):
    monkeypatch.setattr(DiskTier, "_void_forgotten", lambda self: None)


def meta_is_not_synced(monkeypatch):
    class NamesOnly:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def fsync(self, fd: int) -> None:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                os.fsync(fd)

    monkeypatch.setattr(disk_directory, "os", NamesOnly())


def names_are_not_synced(monkeypatch):
    monkeypatch.setattr(DiskDirectory, "_sync_names", lambda self: None)


def payload_is_not_checked(monkeypatch):
    def moved(self: Batch, extent: Any, num_bytes: int, seconds: float) -> None:
        self.ok[extent.positions[: num_bytes // SLOT_BYTES]] = True

    monkeypatch.setattr(Batch, "moved", moved)


def record_is_not_checked(monkeypatch):
    def read(raw: Any, first_slot: int) -> Any:
        return np.ascontiguousarray(raw[raw["magic"] == disk_format.MAGIC])

    monkeypatch.setattr(disk_files, "read_records", read)


def another_fingerprint_is_kept(monkeypatch):
    monkeypatch.setattr(DiskMeta, "unlike", lambda self, other: "")


BY_KILLS = {"kills": True}
BY_POWER = {"kills": False, "every": 2, "num_states": 12}
DEFECTS = {
    record_before_payload: BY_KILLS,
    old_record_stays: BY_KILLS,
    forgotten_records_stay: BY_KILLS,
    another_fingerprint_is_kept: BY_KILLS,
    record_is_not_checked: BY_KILLS,
    meta_is_not_synced: BY_POWER,
    names_are_not_synced: BY_POWER,
    payload_is_not_checked: BY_POWER,
}
"""What is taken away from the tier, and the crashes that have to show it."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_found(room, monkeypatch, defect):
    """The checker can fail: each of these orders and checks is needed."""
    defect(monkeypatch)

    def check_some():
        for seed in range(1, 4):
            folder = room / str(seed)
            folder.mkdir()
            check(folder, seed, num_steps=4, **DEFECTS[defect])

    with pytest.raises(ViolationError):
        check_some()
