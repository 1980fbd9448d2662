"""What a disk tier keeps over a restart, and what it must not serve."""

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from sgl_tiered.errors import TierUnavailableError
from sgl_tiered.tiers import disk_directory
from sgl_tiered.tiers.disk import MAX_SLABS
from sgl_tiered.tiers.disk_format import (
    FORMAT_VERSION,
    INDEX_NAME,
    META_NAME,
    record_dtype,
    slab_name,
)
from sgl_tiered.tiers.disk_format import _own_checksums as own_checksums
from tests.unit.tiers.disk_support import (
    PAGE_BYTES,
    PAGE_TOKENS,
    REST_S,
    SLOT_BYTES,
    SLOTS_PER_SLAB,
    assert_holds,
    load,
    open_tier,
    recovered,
    store,
)

PATIENCE_S = 20.0
"""Upper bound of every wait: only a defect makes a test wait so long."""


def fill(path, pages):
    tier = open_tier(path)
    result = store(tier, list(pages), list(pages.values()))
    assert result.ok.all(), result.error
    tier.close()


def flip(file, offset, bit=0):
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 1 << bit
    file.write_bytes(raw)


def test_restart_round_trip(path):
    """A tier opened again gives keys, tokens, checksums and bytes as stored."""
    pages = {3: 103, 9: 109, 31: 131, 10: 110}
    fill(path, pages)
    tier = open_tier(path)
    assert recovered(tier) == pages
    assert_holds(tier, pages)
    tier.close()


def test_nothing_is_served_before_recover(path):
    """A slot of a former server is a miss until its record has been read."""
    fill(path, {3: 103})
    tier = open_tier(path)
    assert not load(tier, [3])[1].ok.any()
    tier.close()


def test_namespaces_are_kept_apart(path):
    """The same key under two namespaces is two pages, each in its own value."""
    tier = open_tier(path)
    store(tier, [1, 2, 3], [7, 8, 9], namespace=b"a" * 16)
    store(tier, [4, 5], [8, 10], namespace=b"b" * 16)
    store(tier, [6], [7], namespace=b"a" * 16)
    found = {
        group.namespaces[0].tobytes(): group.addresses.tolist()
        for group in tier.recover()
    }
    assert found == {b"a" * 16: [2, 3, 6], b"b" * 16: [4, 5]}
    tier.close()


def test_pages_are_recovered_by_age(path):
    """``recover`` gives pages in the order of their stores, oldest first."""
    tier = open_tier(path)
    for address, seed in ((20, 1), (4, 2), (11, 3)):
        store(tier, [address], [seed])
    (group,) = tier.recover()
    assert group.addresses.tolist() == [20, 4, 11]
    assert group.tokens[:, 0].tolist() == [1, 2, 3]
    tier.close()


def test_newest_copy_of_a_page_wins(path):
    """Of two slots with one key only the younger is recovered, also next time."""
    tier = open_tier(path)
    store(tier, [5], [7])
    store(tier, [2], [7])
    assert recovered(tier) == {2: 7}
    tier.close()
    tier = open_tier(path)
    assert recovered(tier) == {2: 7}
    assert not load(tier, [5])[1].ok.any()
    tier.close()


def test_sequence_goes_on_after_restart(path):
    """What is stored after a restart is younger than all before it."""
    fill(path, {8: 1, 9: 2})
    tier = open_tier(path)
    tier.recover()
    store(tier, [1], [1])
    tier.close()
    tier = open_tier(path)
    assert recovered(tier) == {9: 2, 1: 1}
    tier.close()


def test_forgotten_slot_is_not_recovered(path):
    """A forgotten slot stays forgotten after close, and its data is a miss at once."""
    tier = open_tier(path)
    store(tier, [1, 2, 3], [11, 12, 13])
    tier.forget(np.array([2]))
    assert load(tier, [1, 2, 3])[1].ok.tolist() == [True, False, True]
    tier.close()
    tier = open_tier(path)
    assert recovered(tier) == {1: 11, 3: 13}
    tier.close()


def test_reused_slot_has_its_new_record(path):
    """A slot forgotten and stored again is recovered as the new page only."""
    tier = open_tier(path)
    store(tier, [1, 2], [11, 12])
    tier.forget(np.array([1, 2]))
    store(tier, [1], [21])
    tier.close()
    tier = open_tier(path)
    assert recovered(tier) == {1: 21}
    assert_holds(tier, {1: 21})
    tier.close()


@pytest.mark.parametrize("offset", [0, 1, SLOT_BYTES - 200, 3 * SLOT_BYTES + 4000])
def test_bit_flip_in_a_slab_is_a_miss(path, offset):
    """A page with one changed bit is not ok; its neighbours are."""
    pages = {0: 100, 1: 101, 2: 102, 3: 103}
    fill(path, pages)
    flip(path / slab_name(0), offset, bit=5)
    tier = open_tier(path)
    assert recovered(tier) == pages
    ok = load(tier, [0, 1, 2, 3])[1].ok.tolist()
    assert ok == [slot != offset // SLOT_BYTES for slot in range(4)]
    tier.close()


def test_bit_flip_anywhere_in_a_record_drops_it(path):
    """A record with one changed bit is no record, whichever byte it is in."""
    pages = {0: 100, 1: 101}
    fill(path, pages)
    whole = (path / INDEX_NAME).read_bytes()
    record_bytes = len(whole) // 2
    for offset in range(record_bytes, 2 * record_bytes):
        flip(path / INDEX_NAME, offset, bit=offset % 8)
        tier = open_tier(path)
        assert recovered(tier) == {0: 100}, f"byte {offset - record_bytes}"
        tier.close()
        (path / INDEX_NAME).write_bytes(whole)


def test_record_in_the_wrong_place_is_dropped(path):
    """A record counts only at its own slot: a misplaced one revives nothing."""
    fill(path, {0: 100, 1: 101})
    raw = (path / INDEX_NAME).read_bytes()
    half = len(raw) // 2
    (path / INDEX_NAME).write_bytes(bytes(half) + raw[:half])
    tier = open_tier(path)
    assert recovered(tier) == {}
    tier.close()


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, SLOT_BYTES, SLOT_BYTES + 4097])
def test_truncated_slab(path, num_bytes):
    """Pages behind the end of a cut slab are misses, and can be stored again."""
    pages = {0: 100, 1: 101, 2: 102}
    fill(path, pages)
    with (path / slab_name(0)).open("r+b") as file:
        file.truncate(num_bytes)
    tier = open_tier(path)
    tier.recover()
    ok = load(tier, [0, 1, 2])[1].ok.tolist()
    assert ok == [slot < num_bytes // SLOT_BYTES for slot in range(3)]
    store(tier, [2], [202])
    assert_holds(tier, {2: 202})
    tier.close()


@pytest.mark.parametrize("num_bytes", [0, 7, 111, 112, 113, 300])
def test_truncated_index(path, num_bytes):
    """A cut index loses the records behind the cut and no others."""
    fill(path, {0: 100, 1: 101, 2: 102})
    with (path / INDEX_NAME).open("r+b") as file:
        file.truncate(num_bytes)
    tier = open_tier(path)
    found = recovered(tier)
    assert found == {slot: 100 + slot for slot in range(num_bytes // 112)}
    assert_holds(tier, found)
    tier.close()


def test_missing_slab_is_a_miss(path):
    """Records whose slab is gone lead to misses, not to errors."""
    fill(path, {0: 100, 9: 109})
    (path / slab_name(1)).unlink()
    tier = open_tier(path)
    tier.recover()
    assert load(tier, [0, 9])[1].ok.tolist() == [True, False]
    tier.close()


@pytest.mark.parametrize(
    "other",
    [{"fingerprint": "model-b"}, {"page_tokens": 6}, {"page_bytes": 7999}],
)
def test_other_fingerprint_or_layout_is_discarded(path, other, caplog):
    """Slabs of another model or layout are removed, with one line that says so."""
    fill(path, {0: 100, 1: 101})
    tier = open_tier(path, **other)
    assert not len(tier.recover())
    assert not load(tier, [0])[1].ok.any()
    tier.close()
    lines = [line for line in caplog.messages if "discarded" in line]
    assert len(lines) == 1
    assert next(iter(other)) in lines[0]
    assert not list(path.glob("*.kv"))


def contents(path):
    """Return what is in a folder: names, bytes, modes and times of change."""
    return {
        file.name: (file.read_bytes(), file.stat().st_mode, file.stat().st_mtime_ns)
        for file in path.iterdir()
    } | {"": path.stat().st_mode}


@pytest.mark.parametrize("more", [{}, {"more": 1}, {"slot_bytes": None}])
@pytest.mark.parametrize(
    ("other", "whose"),
    [(1, "an older"), (FORMAT_VERSION - 1, "an older"), (99, "a newer")],
)
def test_another_version_s_folder_is_refused_as_it_is(path, other, whose, more):
    """A server of another version started by mistake costs nobody a cache.

    Whatever else that version writes into its meta file.
    """
    fill(path, {0: 100})
    meta, ours = path / META_NAME, (path / META_NAME).read_text()
    meta.write_text(json.dumps(json.loads(ours) | more | {"version": other}))
    path.chmod(0o755)
    before = contents(path)
    with pytest.raises(TierUnavailableError) as refused:
        open_tier(path)
    assert str(refused.value) == (
        f"the disk tier does not use {path}, because {whose} version of sgl-tiered "
        f"keeps its pages in it, in format {other}, and this one reads format "
        f"{FORMAT_VERSION} only; start that version, give another path, or delete the "
        f"tiered-* files in it."
    )
    assert contents(path) == before
    meta.write_text(ours)
    tier = open_tier(path)
    assert recovered(tier) == {0: 100}
    tier.close()


def test_files_that_only_another_version_knows_are_not_called_foreign(path):
    """What the folder is comes first: its owner is told whose it is."""
    fill(path, {0: 100})
    meta = path / META_NAME
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"version": 99}))
    (path / "tiered-journal").write_text("of a later version")
    with pytest.raises(TierUnavailableError, match="a newer version of sgl-tiered"):
        open_tier(path)


def test_a_folder_that_becomes_another_version_s_is_not_opened_afresh(path, clock):
    """The disk rests, which its state says, and nothing there is deleted."""
    tier = open_tier(path, clock=clock, rest_s=REST_S)
    store(tier, [2], [102])
    path.rename(path.with_name("away"))
    assert not store(tier, [3], [103]).ok.any()
    fill(path, {0: 100})
    meta = path / META_NAME
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"version": 99}))
    before = contents(path)
    for _ in range(3):
        clock.advance(REST_S + 1)
        assert not store(tier, [4], [104]).ok.any()
    assert "a newer version of sgl-tiered" in tier._access.writes.last_error
    assert contents(path) == before
    tier.close()


def test_records_of_another_version_in_a_folder_of_ours_are_left_out(path):
    """They are as good as damaged ones: no reason to refuse the start."""
    dtype = record_dtype(PAGE_TOKENS)
    fill(path, {0: 100, 1: 101})
    raw = np.fromfile(path / INDEX_NAME, dtype)
    raw["version"][1] = FORMAT_VERSION - 1
    raw["own"] = own_checksums(raw)
    raw.tofile(path / INDEX_NAME)
    tier = open_tier(path)
    assert recovered(tier) == {0: 100}
    tier.close()


@pytest.mark.parametrize("version", [0, -1, 1.5, "2", True, None, [2], 1 << 16])
def test_a_version_that_is_none_is_damage(path, version):
    """No version ever wrote that: the slabs are removed, and the server starts."""
    fill(path, {0: 100})
    meta = path / META_NAME
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"version": version}))
    tier = open_tier(path)
    assert not len(tier.recover())
    tier.close()


def test_pages_stored_after_a_new_mark_are_kept_over_a_restart(path):
    """The weights changed while the tier was open: the next server asks for those."""
    tier = open_tier(path)
    store(tier, [0, 1], [100, 101])
    tier.forget(np.array([0, 1]))
    tier.relabel("model-b")
    store(tier, [2], [102])
    tier.close()
    tier = open_tier(path, fingerprint="model-b")
    assert recovered(tier) == {2: 102}
    assert_holds(tier, {2: 102})
    tier.close()
    tier = open_tier(path)
    assert not len(tier.recover()), "the weights of before are another model"
    tier.close()


def test_marking_does_not_wait_for_the_disk(path, monkeypatch):
    """A folder that hangs holds up whoever writes the mark, and nobody else."""
    let_go, began = threading.Event(), threading.Event()
    fsync = os.fsync

    def hangs(fd):
        began.set()
        assert let_go.wait(PATIENCE_S)
        fsync(fd)

    tier = open_tier(path)
    monkeypatch.setattr(os, "fsync", hangs)
    tier.relabel("model-b")
    assert began.wait(PATIENCE_S), "it is written in the background"
    assert "model-b" not in (path / META_NAME).read_text()
    assert store(tier, [2], [102]).ok.all()
    let_go.set()
    tier.close()
    tier = open_tier(path, fingerprint="model-b")
    assert recovered(tier) == {2: 102}
    tier.close()


def test_a_kill_before_the_mark_costs_the_cache_and_no_more(path, monkeypatch):
    """Records of other weights than the mark's are under a namespace of their own."""
    tier = open_tier(path)
    store(tier, [0], [100])
    monkeypatch.setattr(tier._voider, "submit", lambda *work: None)
    tier.forget(np.array([0]))
    tier.relabel("model-b")
    store(tier, [2], [102], namespace=b"of other weights")
    copy = path.parent / "killed"
    shutil.copytree(path, copy)
    monkeypatch.undo()
    tier.close()
    old = open_tier(copy)
    assert {group.namespaces[0].tobytes() for group in old.recover()} == {
        b"0123456789abcdef",
        b"of other weights",
    }
    old.close()
    new = open_tier(copy, fingerprint="model-b")
    assert not len(new.recover())
    new.close()


def test_a_mark_that_cannot_be_written_is_a_failed_write(path, monkeypatch):
    """The tier goes on; the next server discards what it finds."""
    tier = open_tier(path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    tier.relabel("model-b")
    tier._voider.submit(lambda: None).result(PATIENCE_S)
    assert "meta file" in tier._access.writes.last_error
    assert tier.health().usable
    monkeypatch.undo()
    tier.close()
    tier = open_tier(path, fingerprint="model-b")
    assert not len(tier.recover())
    tier.close()


def test_a_mark_without_a_thread_is_written_by_the_next_one(path, monkeypatch):
    """The scheduler that asks for it lives on."""
    tier = open_tier(path)

    def refuse(*work):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(tier._voider, "submit", refuse)
        tier.relabel("model-b")
    tier.forget(np.array([0]))
    tier._voider.submit(lambda: None).result(PATIENCE_S)
    assert "model-b" in (path / META_NAME).read_text()
    tier.close()


def test_a_directory_opened_afresh_is_asked_for_the_mark_in_force(path, clock):
    """A disk that comes back under weights that changed keeps what is theirs."""
    tier = open_tier(path, clock=clock, rest_s=REST_S)
    tier.relabel("model-b")
    store(tier, [2], [102])
    away = path.with_name("away")
    path.rename(away)
    assert not store(tier, [3], [103]).ok.any()
    away.rename(path)
    clock.advance(REST_S + 1)
    for _ in range(3):
        store(tier, [4], [104])
        clock.advance(REST_S + 1)
    assert recovered(tier) == {2: 102, 4: 104}
    tier.close()


def test_a_restart_keeps_what_a_page_is_held_as(path):
    """KV and activations of one prompt, told apart by their records."""
    tier = open_tier(path)
    kinds = np.array([1, 0, 1], np.uint8)
    assert store(tier, [4, 9, 2], [7, 8, 9], kinds=kinds).ok.all()
    tier.close()
    tier = open_tier(path)
    (found,) = tier.recover()
    held = dict(zip(found.addresses.tolist(), found.representations, strict=True))
    assert held == {4: 1, 9: 0, 2: 1}
    assert_holds(tier, {4: 7, 9: 8, 2: 9})
    tier.close()


def test_what_a_page_is_held_as_is_in_its_record_s_checksum(path):
    """A record that was turned into one of activations is no record."""
    dtype = record_dtype(PAGE_TOKENS)
    fill(path, {0: 100, 1: 101})
    raw = np.fromfile(path / INDEX_NAME, dtype)
    raw["representation"][1] = 1
    raw.tofile(path / INDEX_NAME)
    tier = open_tier(path)
    assert recovered(tier) == {0: 100}
    tier.close()


def test_a_form_that_nobody_knows_is_no_record(path):
    """Even where its checksum fits: a later version may write more forms."""
    dtype = record_dtype(PAGE_TOKENS)
    fill(path, {0: 100, 1: 101})
    raw = np.fromfile(path / INDEX_NAME, dtype)
    raw["representation"][1] = 2
    raw["own"] = own_checksums(raw)
    raw.tofile(path / INDEX_NAME)
    tier = open_tier(path)
    assert recovered(tier) == {0: 100}
    tier.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"fingerprint": 1}', "\x00\x00"])
def test_unreadable_meta_is_discarded(path, text):
    """Slabs that nobody vouches for are removed, never served."""
    fill(path, {0: 100})
    (path / META_NAME).write_text(text)
    tier = open_tier(path)
    assert not len(tier.recover())
    store(tier, [0], [5])
    tier.close()
    tier = open_tier(path)
    assert recovered(tier) == {0: 5}
    tier.close()


META = {
    "fingerprint": "model-a",
    "slot_bytes": SLOT_BYTES,
    "page_bytes": PAGE_BYTES,
    "page_tokens": PAGE_TOKENS,
    "slots_per_slab": 8,
    "version": FORMAT_VERSION,
    "format": "sgl-tiered-disk",
}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(META | {"slots_per_slab": "8"}),
        json.dumps(META | {"slots_per_slab": None}),
        json.dumps(META | {"slots_per_slab": 0}),
        json.dumps(META | {"slots_per_slab": -8}),
        json.dumps(META | {"slots_per_slab": 1.5}),
        json.dumps(META | {"slots_per_slab": True}),
        json.dumps(META | {"slots_per_slab": 10**40}),
        json.dumps(META | {"slots_per_slab": [8]}),
        json.dumps(META | {"fingerprint": {}}),
        json.dumps(META | {"more": 1}),
        '"text"',
        "[" * 100_000,
        '{"a":' * 50_000,
        "1e999",
        "9" * 5000,
        "\\ud800",
        " " * (1 << 20) + json.dumps(META),
    ],
)
def test_a_meta_file_of_anything_is_discarded(path, text):
    """A number that is none, or a value nested without end, is no meta of ours."""
    fill(path, {0: 1})
    (path / META_NAME).write_text(text)
    tier = open_tier(path)
    assert recovered(tier) == {}
    assert store(tier, [0], [2]).ok.all()
    tier.close()
    again = open_tier(path)
    assert recovered(again) == {0: 2}
    again.close()


@pytest.mark.parametrize("num_bytes", [1, 7])
def test_a_meta_file_is_written_whole(path, monkeypatch, num_bytes):
    """Where the system takes a few bytes at a time, as it may."""
    real = os.write
    monkeypatch.setattr(
        disk_directory.os, "write", lambda fd, data: real(fd, data[:num_bytes])
    )
    fill(path, {3: 4})
    tier = open_tier(path)
    assert recovered(tier) == {3: 4}
    tier.close()


def test_a_meta_file_that_the_disk_does_not_give_is_kept(path, monkeypatch):
    """A failing read says nothing of what was kept; the next start may find it."""
    tier = open_tier(path)
    store(tier, [0], [1])
    tier.close()
    real = Path.open

    def fails(self, *args, **kwargs):
        if self.name == META_NAME:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fails)
        with pytest.raises(TierUnavailableError, match="Input/output error"):
            open_tier(path)
    tier = open_tier(path)
    assert recovered(tier) == {0: 1}
    tier.close()


def test_a_meta_file_that_is_not_taken_refuses_the_tier(path, monkeypatch):
    """A disk that takes no byte and tells no error does not hold the start for ever."""
    monkeypatch.setattr(disk_directory.os, "write", lambda fd, data: 0)
    with pytest.raises(TierUnavailableError, match="takes no bytes"):
        open_tier(path)


def test_a_tier_that_has_grown_far_gets_larger_slabs(path, caplog):
    """Small slabs are kept up to a number of descriptors, and given up beyond."""
    fill(path, {0: 1})
    most = disk_directory.MAX_KEPT_SLABS * SLOTS_PER_SLAB
    tier = open_tier(path, num_slots=most)
    assert recovered(tier) == {0: 1}
    tier.close()
    grown = 2 * most
    tier = open_tier(path, num_slots=grown, slab_bytes=SLOT_BYTES)
    assert recovered(tier) == {}
    assert "the tier has grown" in caplog.text
    slabs = grown // tier._access.volume.meta.slots_per_slab
    assert slabs <= MAX_SLABS
    assert store(tier, [0, grown - 1], [5, 6]).ok.all()
    tier.close()
    again = open_tier(path, num_slots=grown)
    assert recovered(again) == {0: 5, grown - 1: 6}
    again.close()


def test_smaller_and_larger_again(path):
    """A tier that shrinks keeps what fits, and may grow again."""
    fill(path, {0: 100, 10: 110, 30: 130})
    small = open_tier(path, num_slots=12)
    assert recovered(small) == {0: 100, 10: 110}
    assert_holds(small, {0: 100, 10: 110})
    small.close()
    large = open_tier(path, num_slots=64)
    assert recovered(large) == {0: 100, 10: 110}
    store(large, [15, 63], [215, 263])
    assert_holds(large, {0: 100, 10: 110, 15: 215, 63: 263})
    large.close()


def test_slab_size_on_disk_stays_in_force(path):
    """Another slab size in the settings does not make old slabs unreadable."""
    fill(path, {0: 100, 20: 120})
    tier = open_tier(path, slab_bytes=3 * SLOT_BYTES)
    assert recovered(tier) == {0: 100, 20: 120}
    assert_holds(tier, {0: 100, 20: 120})
    tier.close()


def test_space_taken_is_within_the_limit(path):
    """Slabs and index of a full tier take at most ``max_bytes``."""
    max_bytes = 20 * SLOT_BYTES
    tier = open_tier(path, max_bytes=max_bytes)
    slots = np.arange(tier.num_slots)
    assert store(tier, slots, slots).ok.all()
    tier.close()
    taken = sum(file.stat().st_size for file in path.iterdir())
    assert tier.num_slots == 19
    assert taken - 4096 <= max_bytes
