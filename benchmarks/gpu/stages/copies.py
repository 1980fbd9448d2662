"""Copies of pieces of 2 KiB to 2 MiB, 16 to 4,096 of them, by every way there is.

A load moves pages that lie whole in rows of pinned memory to one buffer per part of a
page (the keys, or the values, of a layer), a piece at a time:

- ``engines``: one copy of the copy engines per piece;
- ``batch``: all of them in one call of ``cuMemcpyBatchAsync``;
- ``kernel``: our page_copy kernel over the link, all parts in one launch, by how many
  programs, and in other forms of a program (``kernel_64_wide``); ``kernel_by_layer`` is
  one launch per two parts, as the product loads;
- ``pages_scatter``: whole pages in large copies into device memory, and a scatter on
  the device behind each chunk, on another stream;
- ``hicache``: SGLang's kernels of HiCache on as many pieces and bytes, as its host pool
  calls them, where their sources are there; beside the product's own pool too
  (``product_hicache``);
- ``plain``: one contiguous copy of as many bytes, which is the roof.

A store goes the other way. Bytes are compared before a time is told.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from movement.copies import LAYERS, measure_copies
from movement.place import Place
from sgl_tiered_kernels.page_copy import triton as kernels
from sgl_tiered_kernels.page_copy.dma import (
    CopyEngines,
    batch_function,
    common_alignment,
    copy_function,
    row_addresses,
)
from stages.clocks import Device
from stages.hicache import HiCache
from stages.stage import Stage

__all__ = ["run"]

_KIB = 1 << 10
_PIECES = tuple(2 * _KIB << step for step in range(11))
_COUNTS = (1024, 256, 4096, 64, 16)
"""The most telling first: what is not reached within the time is told."""
_MOST_BYTES = 256 << 20
_PRODUCT_PIECES = (8 * _KIB, 32 * _KIB, 128 * _KIB)
_PARTS = 64
"""Parts of a page: keys and values of 32 layers."""
_PROGRAMS = (16, 32, 64, 128, 264)
_DEFAULT_PROGRAMS = 64
_CHUNK_BYTES = 16 << 20
_CHECKED_PAGES = 16
_RUNS = 7
_PAGE_TOKENS = 16

Seconds = tuple[float, float]
"""Of the device, and of the thread that queued."""


@dataclass(frozen=True)
class _Case:
    """Pages of ``parts`` pieces each; ``pages * parts`` pieces in all."""

    piece_bytes: int
    pages: int
    parts: int

    @property
    def num_bytes(self) -> int:
        return self.piece_bytes * self.pages * self.parts

    @property
    def row_bytes(self) -> int:
        return self.piece_bytes * self.parts

    def facts(self) -> dict[str, int]:
        """Return what a record has to say about it."""
        return {
            "piece_bytes": self.piece_bytes,
            "pieces": self.pages * self.parts,
            "pages": self.pages,
            "parts": self.parts,
            "num_bytes": self.num_bytes,
        }


def run(stage: Stage) -> None:
    """Write one record per case, direction and way."""
    device = Device(stage.dry_run)
    pieces = _PIECES if device.is_cuda else _PIECES[:1]
    counts = _COUNTS if device.is_cuda else (16,)
    most_bytes = _MOST_BYTES if device.is_cuda else 1 << 20
    bench = _Bench(device, stage, most_bytes)
    stage.add("ways", **bench.told)
    skipped = []
    seen = set()
    for count in counts:
        for piece_bytes in pieces:
            count_here = min(count, max(most_bytes // piece_bytes, 16))
            parts = min(_PARTS, count_here)
            case = _Case(piece_bytes, count_here // parts, parts)
            if case in seen:
                continue
            seen.add(case)
            if stage.left_s < 2.0:
                skipped.append([piece_bytes, count])
                continue
            for record in bench.measure(case):
                stage.add("copy", **record)
    if skipped:
        stage.add("skipped", why="no time was left", cases=skipped)
    try:
        _by_the_product(stage, bench)
    finally:
        bench.close()
    for name, value in _figures(stage.records).items():
        stage.figure(name, value)


def _by_the_product(stage: Stage, bench: _Bench) -> None:
    """Write what the product's own pool reaches, layers up and whole pages down.

    HiCache's kernels move as many pieces of as many pages and layers beside it.
    """
    place = Place("cpu" if stage.dry_run else "cuda")
    for piece_bytes in _PRODUCT_PIECES[: 1 if stage.dry_run else None]:
        if stage.left_s < 3.0:
            stage.add("skipped", what=f"by the product, {piece_bytes} bytes")
            continue
        num_bytes = 64 << 10 if stage.dry_run else 128 << 20
        runs = 1 if stage.dry_run else _RUNS
        for record in measure_copies(place, [piece_bytes], num_bytes, runs):
            record["way"] = f"product_{record['way']}"
            stage.add(record.pop("kind"), **record)
        pages = num_bytes // (2 * piece_bytes)
        case = _Case(piece_bytes, pages, 2 * LAYERS)
        for record in bench.measure_hicache(case):
            record["way"] = "product_hicache"
            stage.add("copy", **record)


class _Bench:
    """Pinned rows, device buffers, and the ways between them."""

    def __init__(self, device: Device, stage: Stage, most_bytes: int) -> None:
        self._device, self._most_bytes = device, most_bytes
        self._runs = _RUNS if device.is_cuda else 1
        # Rows of every second page are moved, so that rows are not neighbours.
        self._region = device.pinned(2 * most_bytes)
        rng = np.random.default_rng(0)
        self._region.array[:] = rng.integers(0, 256, self._region.array.shape, np.uint8)
        self._buffer = torch.zeros(
            2 * most_bytes, dtype=torch.uint8, device=device.torch
        )
        self._staging = torch.zeros(most_bytes, dtype=torch.uint8, device=device.torch)
        self._stream, self._other = device.stream(), device.stream()
        self._batch: CopyEngines | None = None
        if device.is_cuda:
            batch = batch_function()
            self._engines = CopyEngines(None, copy_function())
            if batch is not None:
                self._batch = CopyEngines(batch, copy_function())
        else:
            self._engines = CopyEngines(None, device.memmove)
        self._hicache = HiCache(device)
        self.told = {
            "batch": "there" if self._batch else "not there",
            "hicache": self._hicache.why_not or "there",
        }

    def close(self) -> None:
        self._region.close()

    def measure(self, case: _Case) -> Iterator[dict[str, Any]]:
        """Yield a record per direction and way."""
        self._set(case)
        facts = case.facts()
        for direction, ways in (("up", self._ways_up()), ("down", self._ways_down())):
            for way, copy in ways.items():
                if way != "plain":
                    self._check(way, copy, direction)
                timed = [self._timed(copy) for _ in range(self._runs + 1)][1:]
                yield {
                    **facts,
                    "direction": direction,
                    "way": way,
                    "seconds": [device_s for device_s, _ in timed],
                    "queueing_s": [host_s for _, host_s in timed],
                }
        yield from self.measure_hicache(case)

    def _set(self, case: _Case) -> None:
        rng = np.random.default_rng(case.piece_bytes + case.pages)
        self._case, self._rng = case, rng
        # Twice as many rows and pages as are moved, in random order.
        self._rows = rng.permutation(2 * case.pages)[: case.pages].astype(np.int64)
        self._pages = rng.permutation(2 * case.pages)[: case.pages].astype(np.int64)
        size = case.row_bytes * 2 * case.pages
        self._memory = self._region.array[:size].reshape(2 * case.pages, case.row_bytes)
        # A buffer per part: all pages of the part in a row.
        self._parts = self._buffer[:size].view(
            case.parts, 2 * case.pages, case.piece_bytes
        )
        base = self._buffer.data_ptr()
        part_bytes = 2 * case.pages * case.piece_bytes
        addresses = [base + part * part_bytes for part in range(case.parts)]
        self._alignment = common_alignment(addresses)
        on = {"device": self._device.torch}
        self._table = torch.tensor(addresses, dtype=torch.int64, **on)
        self._row_numbers = torch.from_numpy(self._rows).to(self._device.torch)
        self._page_numbers = torch.from_numpy(self._pages).to(self._device.torch)
        self._staged_rows = torch.arange(case.pages, **on)
        self._addresses = np.array(addresses, np.uint64)

    def _ways_up(self) -> dict[str, Callable[[], None]]:
        ways: dict[str, Callable[[], None]] = {
            "plain": lambda: self._plain(up=True),
            "engines": lambda: self._by_engines(self._engines, up=True),
        }
        batch = self._batch
        if batch is not None:
            ways["batch"] = lambda: self._by_engines(batch, up=True)
        programs = _PROGRAMS if self._device.is_cuda else _PROGRAMS[:1]
        for number in programs:
            ways[f"kernel_{number}"] = partial(self._by_kernel, number, up=True)
        ways |= self._other_forms(up=True)
        ways["kernel_by_layer"] = self._by_layer
        ways["pages_scatter"] = self._pages_scatter
        return ways

    def _ways_down(self) -> dict[str, Callable[[], None]]:
        ways: dict[str, Callable[[], None]] = {
            "plain": lambda: self._plain(up=False),
            "engines": lambda: self._by_engines(self._engines, up=False),
        }
        batch = self._batch
        if batch is not None:
            ways["batch"] = lambda: self._by_engines(batch, up=False)
        ways["kernel_64"] = lambda: self._by_kernel(_DEFAULT_PROGRAMS, up=False)
        ways |= self._other_forms(up=False)
        ways["gather_pages"] = self._gather_pages
        return ways

    def _other_forms(self, *, up: bool) -> dict[str, Callable[[], None]]:
        """Return the kernel's other candidates that this size of a piece fills."""
        return {
            f"kernel_{_DEFAULT_PROGRAMS}_{name}": partial(
                self._by_kernel, _DEFAULT_PROGRAMS, up=up, form=form
            )
            for name, form in kernels.FORMS.items()
            if name
            and (not self._device.is_cuda or form.block_bytes <= self._case.piece_bytes)
        }

    def _plain(self, *, up: bool) -> None:
        host = torch.from_numpy(self._region.array[: self._case.num_bytes])
        there = self._staging[: self._case.num_bytes]
        to, frm = (there, host) if up else (host, there)
        with self._device.on(self._stream):
            to.copy_(frm, non_blocking=True)

    def _by_engines(self, engines: CopyEngines, *, up: bool) -> None:
        """Hand over one copy per piece; its addresses count as queueing."""
        case = self._case
        offsets = np.arange(case.parts, dtype=np.uint64) * np.uint64(case.piece_bytes)
        rows = row_addresses(self._memory.ctypes.data, case.row_bytes, self._rows)
        host = (rows[:, None] + offsets[None, :]).reshape(-1)
        first = self._pages.astype(np.uint64) * np.uint64(case.piece_bytes)
        device = (first[:, None] + self._addresses[None, :]).reshape(-1)
        to, frm = (device, host) if up else (host, device)
        handle = self._device.handle(self._stream)
        engines.submit(to, frm, case.piece_bytes, handle, source_complete=up)

    def _by_kernel(
        self, programs: int, *, up: bool, form: kernels.Form = kernels.FORMS[""]
    ) -> None:
        memory, case = torch.from_numpy(self._memory), self._case
        numbers = (self._page_numbers, self._row_numbers)
        with self._device.on(self._stream):
            if up:
                kernels.scatter_parts(
                    self._table,
                    numbers[0],
                    memory,
                    numbers[1],
                    0,
                    case.piece_bytes,
                    alignment=self._alignment,
                    max_programs=programs,
                    form=form,
                )
            else:
                kernels.gather_parts(
                    memory,
                    numbers[1],
                    0,
                    self._table,
                    numbers[0],
                    case.piece_bytes,
                    alignment=self._alignment,
                    max_programs=programs,
                    form=form,
                )

    def _by_layer(self) -> None:
        """Launch once per two parts, as the product loads layer by layer."""
        memory, case = torch.from_numpy(self._memory), self._case
        with self._device.on(self._stream):
            for part in range(0, case.parts, 2):
                kernels.scatter_parts(
                    self._table[part : part + 2],
                    self._page_numbers,
                    memory,
                    self._row_numbers,
                    part * case.piece_bytes,
                    case.piece_bytes,
                    alignment=self._alignment,
                )

    def _pages_scatter(self) -> None:
        """Bring whole pages in chunks; scatter each while the next one comes."""
        case = self._case
        step = max(_CHUNK_BYTES // case.row_bytes, 1)
        staged = self._staging[: case.num_bytes].view(case.pages, case.row_bytes)
        rows = row_addresses(self._memory.ctypes.data, case.row_bytes, self._rows)
        engines = self._batch or self._engines
        for begin in range(0, case.pages, step):
            end = min(begin + step, case.pages)
            chunk = np.arange(begin, end, dtype=np.int64)
            to = row_addresses(staged.data_ptr(), case.row_bytes, chunk)
            engines.submit(
                to,
                rows[begin:end],
                case.row_bytes,
                self._device.handle(self._stream),
                source_complete=True,
            )
            self._device.wait(self._other, self._device.record(self._stream))
            with self._device.on(self._other):
                # Within the device: all of its cores, for some microseconds.
                kernels.scatter_parts(
                    self._table,
                    self._page_numbers[begin:end],
                    staged,
                    self._staged_rows[begin:end],
                    0,
                    case.piece_bytes,
                    alignment=self._alignment,
                    max_programs=1024,
                )
        self._device.wait(self._stream, self._device.record(self._other))

    def _gather_pages(self) -> None:
        """Gather pages in device memory; each leaves as one piece, in chunks."""
        case = self._case
        step = max(_CHUNK_BYTES // case.row_bytes, 1)
        staged = self._staging[: case.num_bytes].view(case.pages, case.row_bytes)
        rows = row_addresses(self._memory.ctypes.data, case.row_bytes, self._rows)
        engines = self._batch or self._engines
        self._device.wait(self._other, self._device.record(self._stream))
        for begin in range(0, case.pages, step):
            end = min(begin + step, case.pages)
            with self._device.on(self._other):
                kernels.gather_parts(
                    staged,
                    self._staged_rows[begin:end],
                    0,
                    self._table,
                    self._page_numbers[begin:end],
                    case.piece_bytes,
                    alignment=self._alignment,
                )
            self._device.wait(self._stream, self._device.record(self._other))
            chunk = np.arange(begin, end, dtype=np.int64)
            frm = row_addresses(staged.data_ptr(), case.row_bytes, chunk)
            engines.submit(
                rows[begin:end],
                frm,
                case.row_bytes,
                self._device.handle(self._stream),
                source_complete=False,
            )

    def _timed(self, copy: Callable[[], None]) -> Seconds:
        self._device.synchronize()
        begin = self._device.record(self._stream)
        began_s = time.perf_counter()
        copy()
        queued_s = time.perf_counter() - began_s
        return self._device.seconds(begin, self._device.record(self._stream)), queued_s

    def _check(self, way: str, copy: Callable[[], None], direction: str) -> None:
        """Compare all pieces of some pages, and that no other page was written."""
        case = self._case
        what = f"{way} {case} {direction}"
        chosen = self._rng.permutation(case.pages)[:_CHECKED_PAGES]
        pages = torch.from_numpy(self._pages[chosen]).to(self._device.torch)
        rows = self._rows[chosen]
        if direction == "up":
            self._parts.fill_(0xEE)
            copy()
            self._device.synchronize()
            others = np.setdiff1d(np.arange(2 * case.pages), self._pages)
            left = self._parts[:, torch.from_numpy(others).to(self._device.torch)]
            assert bool((left == 0xEE).all()), f"{what}: wrote to other pages"
        else:
            others = np.setdiff1d(np.arange(2 * case.pages), self._rows)
            others = others[:_CHECKED_PAGES]
            untouched = self._memory[others].copy()
            self._memory[rows] = 0xEE
            copy()
            self._device.synchronize()
            same = np.array_equal(self._memory[others], untouched)
            assert same, f"{what}: wrote to other rows"
        moved = self._parts[:, pages].permute(1, 0, 2).reshape(len(chosen), -1)
        found = moved.cpu().numpy()
        assert np.array_equal(found, self._memory[rows]), f"{what}: other bytes"

    def measure_hicache(self, case: _Case) -> Iterator[dict[str, Any]]:
        """Yield HiCache's kernels on as many bytes: its own layout, its own indices."""
        if self._hicache.why_not or case.parts % 2:
            return
        facts = case.facts()
        told = self._hicache.prepare(
            self._region.array,
            self._buffer,
            layers=case.parts // 2,
            pages=case.pages,
            page_tokens=_PAGE_TOKENS,
            token_bytes=case.piece_bytes // _PAGE_TOKENS,
        )
        for direction in ("up", "down"):
            copy = None if told else self._hicache.copy(direction, self._stream)
            if copy is None:
                yield {**facts, "direction": direction, "way": "hicache", "why": told}
                continue
            try:
                assert self._hicache.is_right(copy, direction)
                timed = [self._timed(copy) for _ in range(self._runs + 1)][1:]
            except Exception as problem:  # noqa: BLE001 - not ours: told, no more
                why = f"{type(problem).__name__}: {problem}"
                yield {**facts, "direction": direction, "way": "hicache", "why": why}
                continue
            yield {
                **facts,
                "direction": direction,
                "way": "hicache",
                "seconds": [device_s for device_s, _ in timed],
                "queueing_s": [host_s for _, host_s in timed],
            }


def _figures(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return GB/s by size of a piece, of the largest case of each: way, direction."""
    rates: dict[tuple[str, int, str], dict[int, list[float]]] = {}
    for record in records:
        if record["kind"] != "copy" or not record.get("seconds"):
            continue
        key = (record["direction"], record["piece_bytes"], record["way"])
        samples = rates.setdefault(key, {}).setdefault(record["pieces"], [])
        samples += [record["num_bytes"] / 1e9 / max(s, 1e-9) for s in record["seconds"]]
    figures: dict[str, Any] = {}
    for (direction, piece_bytes, way), by_count in sorted(rates.items()):
        rate = statistics.median(by_count[max(by_count)])
        kib = f"{piece_bytes >> 10}"
        table = figures.setdefault(f"copies_{direction}_gb_per_s", {})
        table.setdefault(kib, {})[way] = round(rate, 2)
    return figures
