"""What lies in files: disk tiers, settings, traces, calibrations."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from sgl_tiered_workloads.traces import files as trace_files
from sgl_tiered_workloads.traces.azure import read_azure
from sgl_tiered_workloads.traces.base import Trace, TraceError
from sgl_tiered_workloads.traces.lengths import (
    read_arxiv_lengths,
    read_sharegpt_lengths,
)
from sgl_tiered_workloads.traces.mooncake import read_mooncake
from sgl_tiered_workloads.traces.servegen import read_servegen
from sgl_tiered_workloads.traces.sharegpt import read_sharegpt_texts
from sgl_tiered_workloads.traces.weka import read_weka

from sgl_tiered.core import json_file
from sgl_tiered.core.plans import PageRecords, namespace_rows
from sgl_tiered.cost import calibration
from sgl_tiered.cost.calibration import calibration_from_dict, read_calibration
from sgl_tiered.errors import ConfigError, TierUnavailableError
from sgl_tiered.serving.option_kinds import Kind
from sgl_tiered.serving.option_reader import read_options
from sgl_tiered.serving.options import OPTIONS, Options
from sgl_tiered.sim.spec import SimSpec, read_spec
from sgl_tiered.tiers import disk_directory, disk_files, disk_format
from sgl_tiered.tiers.disk_directory import DiskDirectory
from sgl_tiered.tiers.disk_files import IndexFile
from sgl_tiered.tiers.disk_format import (
    FORMAT_VERSION,
    INDEX_NAME,
    META_NAME,
    DiskMeta,
    encode_records,
    record_dtype,
    slab_name,
)
from sgl_tiered.tiers.disk_io import SystemCalls
from sgl_tiered.tiers.disk_records import RecordBook
from tests.fuzz.kit import (
    Fault,
    Rng,
    Target,
    as_json,
    demand,
    is_sentence,
    mangled,
    mutated,
    pick,
)
from tests.unit.cost.calibration_support import CALIBRATION

__all__ = ["Calibrations", "Configs", "DiskMetas", "DiskRecords", "Traces"]

PAGE_TOKENS = 4
NUM_SLOTS = 8


class _InFolder(Target):
    """A target with a folder of its own."""

    def __enter__(self) -> _InFolder:
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder)


class DiskRecords(_InFolder):
    """The index of a disk tier: pages come back as they were written, or not at all."""

    name = "disk records"
    faults = (
        Fault(
            "the record's own checksum is not compared",
            lambda patch: patch.setattr(
                disk_format, "_own_checksums", lambda records: records["own"]
            ),
        ),
        Fault(
            "a record may lie in another's slot",
            lambda patch: patch.setattr(
                disk_files, "read_records", _without_slot_check
            ),
        ),
    )

    def __enter__(self) -> DiskRecords:
        """Make the records of 8 pages of two namespaces."""
        super().__enter__()
        rng = np.random.default_rng(5)
        self.dtype = record_dtype(PAGE_TOKENS)
        halves = []
        for half, namespace in enumerate((b"a" * 16, b"b" * 16)):
            slots = np.arange(4, dtype=np.int64) + 4 * half
            records = PageRecords(
                namespaces=namespace_rows(namespace, 4),
                keys=rng.integers(0, 256, (4, 16), np.uint8),
                parents=rng.integers(0, 256, (4, 16), np.uint8),
                tokens=rng.integers(0, 9, (4, PAGE_TOKENS)).astype(np.int32),
                checksums=rng.integers(0, 2**63, 4, np.uint64),
                addresses=slots,
                representations=np.zeros(4, np.uint8),
            )
            halves.append(
                encode_records(
                    self.dtype, records, slots, records.checksums, 1 + 4 * half
                )
            )
        self.right = np.concatenate(halves)
        return self

    def inputs(self, rng: Rng) -> Iterator[bytes]:
        """Records changed, moved, doubled, cut off, sealed anew after a change."""
        size = self.dtype.itemsize
        names = [name for name in self.dtype.names if name != "own"]
        while True:
            rows = self.right.copy()
            kind = int(rng.integers(6))
            if kind == 0:
                yield mangled(rng, rows.tobytes())
            elif kind == 1:
                rows = rows[rng.permutation(len(rows))]
            elif kind == 2:
                rows[int(rng.integers(len(rows)))] = rows[int(rng.integers(len(rows)))]
            elif kind == 3:
                # What another server may have written: sealed, but not for here.
                row = int(rng.integers(len(rows)))
                name = pick(rng, ("magic", "version", "representation", "slot"))
                rows[name][row] += np.asarray(9, rows[name].dtype)
                rows["own"] = _seals(rows)
            elif kind == 4:
                row, name = int(rng.integers(len(rows))), pick(rng, names)
                field = rows[name][row : row + 1].view(np.uint8).reshape(-1)
                field[int(rng.integers(len(field)))] ^= 1 << int(rng.integers(8))
            else:
                rows = rows[: int(rng.integers(len(rows)))]
                cut = size - int(rng.integers(size))
                yield rows.tobytes() + self.right[:1].tobytes()[:cut]
                continue
            yield rows.tobytes()

    def check(self, given_input: bytes) -> bool:
        """Every page that is recovered is the one that was written to that slot."""
        path = self.folder / INDEX_NAME
        path.write_bytes(given_input)
        index = IndexFile(
            self.folder, SystemCalls(), num_slots=NUM_SLOTS, page_tokens=PAGE_TOKENS
        )
        book = RecordBook(index, num_slots=NUM_SLOTS, page_tokens=PAGE_TOKENS)
        try:
            groups = book.recover()
            seen: list[int] = []
            for group in groups:
                for row, slot in enumerate(group.addresses.tolist()):
                    seen.append(slot)
                    demand(0 <= slot < NUM_SLOTS, f"slot {slot}")
                    right = self.right[slot]
                    is_same = (
                        (right["namespace"] == group.namespaces[row]).all()
                        and (right["key"] == group.keys[row]).all()
                        and (right["parent"] == group.parents[row]).all()
                        and (right["tokens"] == group.tokens[row]).all()
                        and right["payload"] == group.checksums[row]
                        and group.representations[row] == 0
                    )
                    demand(is_same, f"slot {slot} comes back as another page")
            demand(len(seen) == len(set(seen)), "a slot comes back twice")
            known, _ = book.known(np.arange(NUM_SLOTS), None)
            demand(np.flatnonzero(known).tolist() == sorted(seen), "other slots known")
            demand(not len(book.forgotten()), "an old record was not voided")
        finally:
            book.close()
        return len(seen) == NUM_SLOTS


def _seals(rows: np.ndarray) -> np.ndarray:
    # The checksum as it is written, whatever a planted fault has made of the function.
    return _SEAL(rows)


_SEAL = disk_format._own_checksums


def _without_slot_check(raw: np.ndarray, first_slot: int) -> np.ndarray:
    del first_slot
    return np.ascontiguousarray(raw[raw["own"] == _SEAL(raw)])


class DiskMetas(_InFolder):
    """The meta file: slabs are kept for an equal one, deleted for any other of ours.

    One of another version is refused, and all of it kept.
    """

    name = "disk meta"
    wanted = DiskMeta("model a", 4096, 4096, 16, 64)
    faults = (
        Fault(
            "no difference counts",
            lambda patch: patch.setattr(DiskMeta, "unlike", lambda *args: ""),
        ),
        Fault(
            "another version's slabs are deleted",
            lambda patch: patch.setattr(
                disk_directory, "known_version", lambda text: None
            ),
        ),
        Fault(
            "small slabs are kept",
            lambda patch: patch.setattr(disk_directory, "MAX_KEPT_SLABS", 2**63),
        ),
    )

    def inputs(self, rng: Rng) -> Iterator[bytes]:
        """Files that are nearly right."""
        right = asdict(self.wanted)
        while True:
            kind = int(rng.integers(8))
            if kind == 0:
                yield mangled(rng, as_json(right))
            elif kind == 1:
                yield as_json({**right, "slots_per_slab": int(rng.integers(1, 200))})
            elif kind == 2:
                yield as_json({**right, "version": int(rng.integers(-1, 5))})
            else:
                yield as_json(mutated(rng, right))

    def check(self, given_input: bytes) -> bool:
        """Kept where all but the slabs' size is equal, and they are not too many."""
        (self.folder / META_NAME).write_bytes(given_input)
        data = [self.folder / INDEX_NAME, self.folder / slab_name(0)]
        for file in data:
            file.write_bytes(b"kv")
        other = self._other_version(given_input)
        try:
            directory = DiskDirectory(self.folder)
        except TierUnavailableError as error:
            demand(other, "one of our version, or a damaged one, was refused")
            demand(f"in format {other}," in str(error), "refused for another reason")
            kept = [(self.folder / META_NAME).read_bytes(), *map(Path.read_bytes, data)]
            demand(kept == [given_input, b"kv", b"kv"], "what is not ours was touched")
            return False
        try:
            demand(not other, "another version's was taken")
            meta = directory.adopt(self.wanted, num_slots=10_000)
        finally:
            directory.close()
        is_kept = [file.exists() for file in data]
        demand(is_kept in ([True, True], [False, False]), "one half was kept")
        may = self._may_be_kept(given_input)
        demand(is_kept[0] == may, f"kept: {is_kept[0]}, though {may}")
        ours = {**asdict(meta), "slots_per_slab": 0}
        demand(ours == {**asdict(self.wanted), "slots_per_slab": 0}, "another meta")
        if not may:
            demand(meta == self.wanted, "a new directory has an old meta")
            written = json.loads((self.folder / META_NAME).read_text())
            demand(written == asdict(self.wanted), "the new meta is not on disk")
        return may

    def _other_version(self, raw: bytes) -> int:
        """Return the format of another version that a meta file tells of; 0 if none."""
        try:
            said = json.loads(raw.decode())
        except (ValueError, RecursionError):
            return 0
        if not isinstance(said, dict) or said.get("format") != self.wanted.format:
            return 0
        version = said.get("version")
        is_one = type(version) is int and 0 < version < 2**16
        return version if is_one and version != FORMAT_VERSION else 0

    def _may_be_kept(self, raw: bytes) -> bool:
        try:
            said = json.loads(raw.decode())
        except (ValueError, RecursionError):
            return False
        right = asdict(self.wanted)
        if not isinstance(said, dict) or not set(said) <= set(right):
            return False
        said = {"version": FORMAT_VERSION, "format": right["format"], **said}
        per_slab = said.get("slots_per_slab")
        if type(per_slab) is not int or not 0 < per_slab < 2**63:
            return False
        same = {**said, "slots_per_slab": right["slots_per_slab"]} == right
        types = all(type(said[name]) is type(right[name]) for name in said)
        return same and types and -(-10_000 // per_slab) <= 512


class Configs(_InFolder):
    """Settings of a server by flags and file, and of the simulator."""

    name = "configs"
    faults = (
        Fault(
            "numbers have no bounds",
            lambda patch: _take_any(patch, lambda kind: kind.word is int),
        ),
        Fault(
            "any word is a choice",
            lambda patch: _take_any(patch, lambda kind: kind.choices),
        ),
        Fault(
            "a simulation takes any type",
            lambda patch: patch.setattr(SimSpec, "with_values", _with_any),
        ),
    )
    right: ClassVar[dict[str, Any]] = {
        "host_size": "1MiB",
        "disk_threads": 4,
        "eviction_policy": "lru",
        "write_policy": "on-evict",
        "offload_threshold": 0.5,
        "load_policy": "always",
        "order": "fcfs",
        "prefetch": "arrival",
        "prefetch_window": 8,
        "log_interval": 10.0,
        "seed": 3,
        "emulate": "host:bandwidth=1e9",
        "staging_size": "16MiB",
        "explain_last": 10,
        "slo_ttft": 1.5,
    }
    spec: ClassVar[dict[str, Any]] = {
        "server": {"hardware": "H800", "page_size": 16, "tensor_parallel": 1},
        "tiers": {"host_gb": 10, "disk_gb": 1.5, "host_medium": "dram"},
        "scheduler": {"max_running": 8, "ignore_eos": True, "order": "fcfs"},
        "workload": {"rate": 1.0, "num_requests": 10},
        "params": {"turns": 3},
        "slo": {"ttft_s": 1.0, "tpot_s": 0.1},
    }

    def inputs(self, rng: Rng) -> Iterator[tuple[str, Any]]:
        """Flags and files that are nearly right."""
        while True:
            kind = int(rng.integers(8))
            if kind == 0:
                yield "spec", _toml(mutated(rng, self.spec))
            elif kind == 1:
                yield "spec", mangled(rng, _toml(self.spec))
            elif kind == 2:
                yield "file", mangled(rng, _toml(self.right))
            elif kind == 3:
                yield "file", _toml(mutated(rng, self.right))
            else:
                values = mutated(rng, self.right, num=1)
                if rng.random() < 0.5:
                    name = pick(rng, ("disk_threads", "seed", "order", "load_policy"))
                    values = {name: pick(rng, (0, -1, 257, 2**40, "moon", 1.5, True))}
                if isinstance(values, dict):
                    yield "flags", {k: v for k, v in values.items() if k in OPTIONS}

    def check(self, given_input: tuple[str, Any]) -> bool:
        """One sentence, or settings within their bounds."""
        what, value = given_input
        path = self.folder / "file.toml"
        try:
            if what == "spec":
                path.write_bytes(value)
                spec = read_spec(path)
                for each in fields(spec):
                    found = getattr(spec, each.name)
                    demand(
                        type(found).__name__ == each.type, f"{each.name} is {found!r}"
                    )
                spec.server()
                return True
            if what == "file":
                path.write_bytes(value)
                value = {"config": str(path)}
            options = read_options(value)
        except ConfigError as error:
            demand(is_sentence(str(error)), f"no sentence: {error}")
            return False
        for name, low, high in (
            ("host_bytes", 0, 2**63),
            ("staging_bytes", 1, 2**63),
            ("disk_threads", 1, 256),
            ("prefetch_window", 1, 1024),
            ("seed", 0, 2**32 - 1),
            ("explain_last", 0, 10**6),
            ("offload_threshold", 0, 1),
            ("log_interval_s", 0, 1e12),
            ("slo_ttft_s", 0, math.inf),
        ):
            found = _setting(options, name)
            is_number = type(found) in (int, float)
            demand(is_number and low <= found <= high, f"{name} is {str(found)[:99]}")
        for name in ("eviction_policy", "write_policy", "load_policy", "order"):
            choices = OPTIONS[name].kind.choices
            demand(_setting(options, name) in choices, f"{name} is no choice")
        return True


def _setting(options: Options, name: str) -> Any:
    """Return a value by its field, whichever part has it."""
    parts = [getattr(options, each.name) for each in fields(options)]
    return next(getattr(part, name) for part in parts if hasattr(part, name))


def _take_any(patch: pytest.MonkeyPatch, concerns: Callable[[Kind], Any]) -> None:
    """Let settings of a kind be whatever is given."""
    anything = Kind("anything", lambda flag, value: value)
    for name, row in OPTIONS.items():
        if concerns(row.kind):
            patch.setitem(OPTIONS, name, replace(row, kind=anything))


def _with_any(spec: SimSpec, values: dict[str, Any]) -> SimSpec:
    known = {field.name for field in fields(spec)}
    made = SimSpec()
    for name in known & set(values):
        object.__setattr__(made, name, values[name])
    return made


def _toml(value: Any) -> bytes:
    """Return TOML, or nearly: what TOML has no word for is written as JSON has it."""
    if not isinstance(value, dict):
        return as_json(value)
    plain = {k: v for k, v in value.items() if not isinstance(v, dict)}
    lines = [f"{json.dumps(k)} = {_value(v)}" for k, v in plain.items()]
    for name, inner in value.items():
        if isinstance(inner, dict):
            lines.append(f"[{json.dumps(name)}]")
            lines += [f"{json.dumps(k)} = {_value(v)}" for k, v in inner.items()]
    return "\n".join(lines).encode("utf-8", "replace")


def _value(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None:
        return "1979-05-27"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items())
            + "}"
        )
    if isinstance(value, list):
        # One frame a level: values are nested deeply.
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)


class Calibrations(_InFolder):
    """Calibration files."""

    name = "calibration files"
    faults = (
        Fault(
            "any number is a number",
            lambda patch: patch.setattr(
                calibration, "_number", lambda value, where: value
            ),
        ),
        Fault(
            "any version is read",
            lambda patch: patch.setattr(
                json_file.JsonFile,
                "fields",
                lambda self, raw: {k: v for k, v in raw.items() if k != "version"},
            ),
        ),
    )

    def inputs(self, rng: Rng) -> Iterator[bytes]:
        """Files that are nearly right."""
        right = json.loads(json.dumps(calibration.calibration_to_dict(CALIBRATION)))
        while True:
            kind = int(rng.integers(5))
            if kind == 0:
                yield mangled(rng, as_json(right))
            elif kind == 1:
                version = pick(rng, (0, 2, True, "1", None, 1.5, 2**70))
                yield as_json({**right, "version": version})
            else:
                yield as_json(mutated(rng, right))

    def check(self, given_input: bytes) -> bool:
        """Numbers that can be counted with, each link once; it reads back as itself."""
        path = self.folder / "calibration.json"
        path.write_bytes(given_input)
        try:
            found = read_calibration(path)
        except ConfigError as error:
            demand(is_sentence(str(error)), f"no sentence: {error}")
            return False
        demand(json.loads(given_input)["version"] == 1, "another version was read")
        whole = calibration.calibration_to_dict(found)
        for name, number in _numbers(whole):
            demand(math.isfinite(number), f"{name} is {number}")
            demand(number >= 0 or name == "r2", f"{name} is negative")
        edges = [(link.source, link.target) for link in found.links]
        demand(len(edges) == len(set(edges)), "a link is there twice")
        for link in found.links:
            demand(math.isfinite(link.seconds(4096)), "a time without end")
        demand(calibration_from_dict(whole) == found, "another when read again")
        if found.prefill:
            demand(found.prefill.seconds(100, 10) >= 0.0, "a negative time")
        return True


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, key)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


class Traces(_InFolder):
    """Files of traces, in all formats that are read."""

    name = "traces"
    faults = (
        Fault(
            "numbers have no least value",
            lambda patch: patch.setattr(
                trace_files.Row, "integer", lambda row, name, minimum: row.fields[name]
            ),
        ),
        Fault(
            "numbers have no end",
            lambda patch: patch.setattr(trace_files, "_MAX_INTEGER", 10**6000),
        ),
    )
    json_lines: ClassVar[dict[str, list[Any]]] = {
        "mooncake": [
            {
                "timestamp": 1000 * n,
                "input_length": 600 + n,
                "output_length": 5,
                "hash_ids": [0, n + 1],
            }
            for n in range(3)
        ],
        "weka": [
            {
                "id": "a",
                "start_s": 0.0,
                "block_size": 16,
                "requests": [
                    {"t": 0.0, "in": 33, "out": 4, "lcp": 0, "new": [[0, 2]]},
                    {"t": 2, "in": 50, "out": 4, "think": 1, "lcp": 2, "new": [[5, 1]]},
                ],
            }
        ],
    }
    columns: ClassVar[dict[str, list[str]]] = {
        "azure": [
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:15:46.6805900,374,44",
            "2023-11-16 18:15:50.9951690,396,109",
        ],
        "arxiv": ["num_prefill_tokens,num_decode_tokens", "100,5", "20,6"],
        "turns": ["num_prefill_tokens,num_decode_tokens", "100,5", "120,6"],
    }
    readers: ClassVar[dict[str, Any]] = {
        "mooncake": read_mooncake,
        "weka": read_weka,
        "azure": read_azure,
        "arxiv": read_arxiv_lengths,
        "turns": read_sharegpt_lengths,
        "texts": read_sharegpt_texts,
        "servegen": read_servegen,
    }
    texts: ClassVar[list[Any]] = [{"input": "some words", "output_length": "12"}] * 2
    rates: ClassVar[list[str]] = [
        "0,1.5,1.1,Gamma,0.8,1.2",
        "60,0,0,,0,0",
        "120,2,1,Weibull,1.5,0.4",
    ]
    lengths: ClassVar[dict[str, Any]] = {
        "0": {
            "input_tokens": "{10: 0.5, 20: 0.5}",
            "output_tokens": "{3: 1.0}",
            "reason_ratio": "{}",
        }
    }

    def inputs(self, rng: Rng) -> Iterator[tuple[str, Any]]:
        """Files that are nearly right, of one format after the other."""
        names = sorted(self.readers)
        while True:
            name = pick(rng, names)
            is_mangled = rng.random() < 0.3
            if name in self.json_lines:
                rows = self.json_lines[name]
                if not is_mangled:
                    rows = [mutated(rng, row) for row in rows]
                raw = b"\n".join(as_json(row) for row in rows)
            elif name == "texts":
                raw = as_json(self.texts if is_mangled else mutated(rng, self.texts))
            elif name == "servegen":
                rates = "\n".join(self._cells(rng, self.rates)).encode(
                    "utf-8", "replace"
                )
                raw = as_json(mutated(rng, self.lengths))
                if is_mangled:
                    rates, raw = mangled(rng, rates), mangled(rng, raw)
                yield name, (rates, raw)
                continue
            else:
                lines = self.columns[name]
                lines = lines if is_mangled else self._cells(rng, lines)
                raw = "\n".join(lines).encode("utf-8", "replace")
            yield name, mangled(rng, raw) if is_mangled else raw

    def _cells(self, rng: Rng, lines: list[str]) -> list[str]:
        cells = mutated(rng, [line.split(",") for line in lines])
        if not isinstance(cells, list):
            return [str(cells)]
        return [
            ",".join(map(_cell, line)) if isinstance(line, list) else _cell(line)
            for line in cells
        ]

    def check(self, given_input: tuple[str, Any]) -> bool:
        """One sentence that names the file, or requests that can be replayed."""
        name, raw = given_input
        path = self.folder / name
        if name == "servegen":
            path.mkdir(exist_ok=True)
            (path / "chunk-0-trace.csv").write_bytes(raw[0])
            (path / "chunk-0-dataset.json").write_bytes(raw[1])
        else:
            path.write_bytes(raw)
        try:
            found = self.readers[name](path)
        except TraceError as error:
            demand(str(path) in str(error), f"it names no file: {error}")
            demand(is_sentence(str(error)), f"no sentence: {error}")
            return False
        if isinstance(found, Trace):
            self._can_be_replayed(found)
        elif name == "texts":
            demand(all(text.num_output_tokens >= 1 for text in found), "no answer")
        else:
            self._can_be_drawn(found)
        return True

    def _can_be_replayed(self, trace: Trace) -> None:
        demand(len(trace.requests) > 0, "a trace of nothing")
        last_s = -math.inf
        for request in trace.requests:
            demand(math.isfinite(request.arrival_s), "an arrival without a time")
            demand(request.arrival_s >= last_s, "arrivals are out of order")
            last_s = request.arrival_s
            for number in (request.num_prompt_tokens, request.num_output_tokens):
                demand(type(number) is int and 1 <= number < 2**63, f"{number} tokens")
            ids = request.block_ids
            demand(ids.dtype == np.int64 and ids.ndim == 1, "ids of another type")
            if trace.block_tokens:
                most = -(-request.num_prompt_tokens // trace.block_tokens)
                demand(len(ids) <= most, "more blocks than tokens")

    def _can_be_drawn(self, clients: tuple[Any, ...]) -> None:
        for client in clients:
            demand(client.window_s > 0, "windows of no length")
            for window in client.rates:
                numbers = (window.start_s, window.rate_per_s, window.cv, window.shape)
                demand(all(map(math.isfinite, numbers)), "a rate without end")
                demand(window.rate_per_s >= 0, "a negative rate")
            for window in client.lengths:
                demand(math.isfinite(window.start_s), "a window without a start")
                for values, share in (
                    (window.input_tokens, window.input_share),
                    (window.output_tokens, window.output_share),
                ):
                    demand((values >= 1).all(), "a length below 1")
                    demand(abs(share.sum() - 1.0) < 1e-6, "shares of another sum")
                    demand((share >= 0).all(), "a negative share")


def _cell(value: Any) -> str:
    with contextlib.suppress(ValueError):
        return str(value)
    return "9" * 5000
