"""A restart on a disk tier that holds millions of pages: when it serves, what it costs.

    python benchmarks/disk/bench_restart.py [--pages N] [--folder DIR] [--record DIR]

A folder is filled by the tier's own writer of records, with the fingerprint that a
server of the tiny model (pages of 16 tokens, slots of 4 KiB) put there. No payload is
written: what is measured is everything but the reading of payloads. Its prompts share a
beginning of 20 pages per tenant and go on with 50 of their own; there is a tenant for
every 5,000 pages.

Real servers then start in turns with that folder and with an empty one. The last line
is one JSON object:

- ``ready_delay_s_5m_pages``: seconds from the start of the process to the first answer,
  with the folder less without; the difference of the medians of ``--starts`` each.
- ``adopt_s_idle``: from the opening of the folder to the last page, nothing else to do.
- ``throughput_while_adopting``: tokens per second of clients in a closed loop while
  pages are adopted, over those of the same clients on the same server once all is
  adopted; the median of ``--rounds`` restarts. The window begins when the scan has
  ended; ``adopted_in_the_windows`` says how many pages were adopted in each, and the
  exit code is 1 where adoption did not go on to the end of one.
- ``throughput_while_scanning``: the same of a window that begins when the server is
  ready, as far as it still reads the records then; null if that is too short to say.
- ``salts_exponent``: slope of log CPU time over log salts, of scanning, arranging and
  adopting a fixed number of pages in a fixed number of prompts, without a server.
- ``state_bytes_per_page``: what the scheduler's resident memory grew by, and its peak.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from sgl_tiered_workloads.harness.keeping import keep_record, run_facts
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.server import ServerSpec, SglangServer, exit_on_signals
from sgl_tiered_workloads.systems import CPU_FLAGS, MB, Device, Tiers, tiered_spec

from sgl_tiered.cache.adoption import arrange
from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import KEY_BYTES, page_keys
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import PageRecords, namespace_rows
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.tiers.disk import DiskTier
from sgl_tiered.tiers.disk_format import META_NAME, DiskMeta, record_dtype

ROOT = Path(__file__).parents[2]
SOURCES = ("sgl_tiered", "benchmarks/disk")
"""Folders whose source decides what is measured, and how."""
PAGE_TOKENS, SLOT_BYTES = 16, 4096
MODEL = replace(PRESETS["tiny"], num_layers=2, num_kv_heads=1)
"""Its pages of 16 tokens take 4 KiB."""
SHARED_PAGES, OWN_PAGES, TENANT_PAGES = 20, 50, 5000
HOST_BYTES = 64 * MB
POOL_TOKENS = 8192
SALTS = (4, 40, 400, 4000)
CLIENTS, PROMPT_TOKENS, ANSWER_TOKENS = 2, 64, 64
BEGIN_S, LOOK_S, LEAST_S = 2.0, 0.5, 5.0
"""Before a window, when clients have begun; between two looks; a window that says
something."""


def open_tier(folder: Path, num_pages: int, fingerprint: str) -> DiskTier:
    """Open a tier for so many pages of 4 KiB, and some more."""
    record_bytes = record_dtype(PAGE_TOKENS).itemsize
    return DiskTier.open(
        folder,
        slot_bytes=SLOT_BYTES,
        page_bytes=SLOT_BYTES,
        page_tokens=PAGE_TOKENS,
        max_bytes=int(1.02 * num_pages + 1024) * (SLOT_BYTES + record_bytes),
        fingerprint=fingerprint,
    )


def tenant_records(
    random: np.random.Generator, shared: int, own: int, num_prompts: int
) -> PageRecords:
    """Return the pages of a tenant's prompts: one beginning, and ends of their own."""
    digest = random.bytes(KEY_BYTES)
    keys, parents, tokens = [], [], []

    def add(before: bytes, num_pages: int) -> bytes:
        new = random.integers(0, 150_000, num_pages * PAGE_TOKENS, np.int32)
        found = page_keys(before, new, PAGE_TOKENS)
        if num_pages:
            keys.append(found)
            parents.append(np.frombuffer(before, np.uint8)[None])
            parents.append(found[:-1])
            tokens.append(new.reshape(-1, PAGE_TOKENS))
        return found[-1].tobytes() if num_pages else before

    beginning = add(digest, shared)
    for _ in range(num_prompts):
        add(beginning, own)
    num_pages = shared + num_prompts * own
    return PageRecords(
        namespaces=namespace_rows(digest, num_pages),
        keys=np.concatenate(keys),
        parents=np.concatenate(parents),
        tokens=np.concatenate(tokens),
        checksums=random.integers(1, 1 << 63, num_pages, np.uint64),
        addresses=np.zeros(num_pages, np.int64),
    )


def fill(tier: DiskTier, num_pages: int, shared: int, own: int, prompts: int) -> int:
    """Write the records of about so many pages, tenant by tenant; return how many."""
    random = np.random.default_rng(7)
    volume = tier._access.volume
    assert volume is not None
    each, done = shared + own * prompts, 0
    while done + each <= num_pages:
        records = tenant_records(random, shared, own, prompts)
        slots = np.arange(done, done + each)
        volume.book.enter(slots, records.checksums, records)
        done += each
    return done


def make_cache(num_slots: int) -> TieredCache:
    """Return an empty cache over a host and a disk tier."""
    tiers = {TierId.HOST: 1024, TierId.DISK: num_slots}
    return TieredCache(
        CacheConfig(
            PageLayout(4, PAGE_TOKENS, SLOT_BYTES // PAGE_TOKENS // 4),
            tuple(TierConfig(tier, num) for tier, num in tiers.items()),
        ),
        cost=CostModel(
            PrefillCost(10**6, 2, 32, 1e9), {t: LinkCost(1e-4, 1e9) for t in tiers}
        ),
        eviction={
            t: make_eviction_policy("lru", np.random.default_rng(0)) for t in tiers
        },
        clock=SystemClock(),
    )


def adopt_cpu_s(scratch: Path, salts: int, prompts: int, own: int) -> float:
    """Return the CPU seconds of scanning and adopting prompts of so many tenants."""
    folder = scratch / f"salts-{salts}-{own}"
    num_pages = prompts * own
    tier = open_tier(folder, num_pages, "salts")
    assert fill(tier, num_pages, 0, own, prompts // salts) == num_pages
    tier.close()
    tier = open_tier(folder, num_pages, "salts")
    cache = make_cache(tier.num_slots)
    started_s = time.process_time()
    adoption = cache.begin_adoption(TierId.DISK, arrange(tier.recover()))
    while adoption.step(4096):
        pass
    seconds = time.process_time() - started_s
    if adoption.num_adopted != num_pages or adoption.num_refused:
        raise SystemExit(f"{adoption.num_adopted} of {num_pages} pages were adopted")
    tier.close()
    shutil.rmtree(folder)
    return seconds


def salts(scratch: Path, num_pages: int) -> dict[str, Any]:
    """Return the time over salts, and per page by length of the prompts."""
    prompts = max(SALTS)
    own = num_pages // prompts
    seconds = {
        num: min(adopt_cpu_s(scratch, num, prompts, own) for _ in range(2))
        for num in SALTS
    }
    logs = np.log([list(seconds), list(seconds.values())])
    chains = {
        own: adopt_cpu_s(scratch, 1, num_pages // own, own) for own in (4, 40, 400)
    }
    return {
        "salts_exponent": round(float(np.polyfit(*logs, 1)[0]), 3),
        "salts_cpu_s": {str(num): round(s, 3) for num, s in seconds.items()},
        "cpu_us_per_page_by_prompt_pages": {
            str(own): round(1e6 * s / num_pages, 2) for own, s in chains.items()
        },
    }


def state(server: SglangServer) -> dict[str, Any]:
    """Return the state of the tiers."""
    (found,) = server.get("/tiered/stats", 120.0)
    return dict(found)


def wait_adopted(server: SglangServer) -> dict[str, Any]:
    """Wait until all is adopted; return what the server says of it."""
    while (told := state(server)["adoption"])["state"] != "done":
        time.sleep(1.0)
    return dict(told)


def memory_of(server: SglangServer) -> tuple[int, int]:
    """Return resident bytes, now and at most, of the largest process: the scheduler."""
    pids, sizes = [server.pid], []
    while pids:
        pid = pids.pop()
        tasks = Path(f"/proc/{pid}/task")
        for task in tasks.iterdir():
            pids += [int(each) for each in (task / "children").read_text().split()]
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        kb = {line.split(":")[0]: line.split()[1] for line in lines if "kB" in line}
        sizes.append((int(kb["VmRSS"]) * 1024, int(kb["VmHWM"]) * 1024))
    return max(sizes)


class Load:
    """Clients in a closed loop; counts tokens as answers end."""

    def __init__(self, server: SglangServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._ends: list[float] = []
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True)
            for n in range(CLIENTS)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def rate(self, begin_s: float, end_s: float) -> float:
        """Return tokens per second of the answers that ended in a window."""
        with self._lock:
            num = sum(begin_s <= at < end_s for at in self._ends)
        return num * (PROMPT_TOKENS + ANSWER_TOKENS) / (end_s - begin_s)

    def _run(self, number: int) -> None:
        random = np.random.default_rng([number, int(time.time())])
        while not self._stop.is_set():
            body = {
                "input_ids": random.integers(10, 2000, PROMPT_TOKENS).tolist(),
                "sampling_params": {
                    "max_new_tokens": ANSWER_TOKENS,
                    "ignore_eos": True,
                    "temperature": 0,
                },
            }
            self._server.post("/generate", body)
            with self._lock:
                self._ends.append(time.monotonic())


@dataclass(frozen=True, slots=True)
class Window:
    """What was served while adoption was in one state, and how far that came.

    Attributes:
        seconds: until the last look that found the state.
        tokens_per_s: of the answers that ended.
        adopted: pages from the first of these looks to the last.
        is_whole: the state lasted for all the time that was asked for.
    """

    seconds: float
    tokens_per_s: float
    adopted: int
    is_whole: bool


def window(
    look: Callable[[], Mapping[str, Any]],
    rate: Callable[[float, float], float],
    name: str,
    seconds: float,
    every_s: float = LOOK_S,
) -> Window:
    """Watch adoption for some time, as long as it is in one state.

    Args:
        look: says how far it is.
        rate: returns tokens per second from one moment to another.
        name: of the state, ``scanning``, ``adopting`` or ``done``.
        seconds: to watch at most.
        every_s: between two looks.
    """
    began_s = seen_s = time.monotonic()
    told = look()
    first = last = int(told["adopted"])
    while told["state"] == name:
        last, seen_s = int(told["adopted"]), time.monotonic()
        if seen_s - began_s >= seconds:
            break
        time.sleep(every_s)
        told = look()
    took_s = seen_s - began_s
    served = rate(began_s, seen_s) if took_s else 0.0
    return Window(took_s, served, last - first, took_s >= seconds)


def throughput(server: SglangServer, seconds: float) -> dict[str, Any]:
    """Return tokens per second while records are read, pages are adopted, and then.

    The scan yields to everything: where clients keep all cores busy it takes minutes,
    so they rest until it has ended, once its window is over.
    """

    def look() -> dict[str, Any]:
        return dict(state(server)["adoption"])

    def loaded(name: str) -> Window:
        with Load(server) as load:
            time.sleep(BEGIN_S)
            return window(look, load.rate, name, seconds)

    scanning = loaded("scanning")
    while look()["state"] == "scanning":
        time.sleep(0.05)
    adopting = loaded("adopting")
    rest = wait_adopted(server)
    after = loaded("done")

    def ratio(found: Window) -> float:
        return round(found.tokens_per_s / after.tokens_per_s, 4)

    return {
        "scanning": asdict(scanning),
        "adopting": asdict(adopting),
        "after": asdict(after),
        "ratio_scanning": ratio(scanning) if scanning.seconds >= LEAST_S else None,
        "ratio": ratio(adopting),
        "is_adopting_throughout": adopting.is_whole and adopting.adopted > 0,
        "longest_slice_s": round(rest["longest_slice_s"], 4),
    }


class Servers:
    """Servers with the folder and with empty ones."""

    def __init__(self, scratch: Path, folder: Path, num_pages: int) -> None:
        self._scratch = scratch
        self._folder = folder
        record_bytes = record_dtype(PAGE_TOKENS).itemsize
        self._disk_bytes = int(1.02 * num_pages + 1024) * (SLOT_BYTES + record_bytes)
        model = make_model(MODEL, ROOT / "out" / "models")
        self._device = Device(model, POOL_TOKENS, PAGE_TOKENS, CPU_FLAGS)
        self._num = 0

    def start(self, *, is_full: bool) -> SglangServer:
        """Return a server, which the caller enters."""
        self._num += 1
        empty = self._scratch / f"empty-{self._num}"
        folder = self._folder if is_full else empty
        return SglangServer(self._spec(folder), self._scratch / "logs")

    def prepare(self) -> DiskMeta:
        """Let a server make the folder; return its sizes and fingerprint."""
        with self.start(is_full=True):
            pass
        meta = DiskMeta.from_json((self._folder / META_NAME).read_text())
        assert meta is not None
        assert (meta.slot_bytes, meta.page_tokens) == (SLOT_BYTES, PAGE_TOKENS), meta
        return meta

    def _spec(self, folder: Path) -> ServerSpec:
        return tiered_spec(self._device, Tiers(HOST_BYTES, folder, self._disk_bytes))


def fill_folder(folder: Path, meta: DiskMeta, num_pages: int) -> int:
    """Write the records as the server would have; return how many."""
    tier = DiskTier.open(
        folder,
        slot_bytes=meta.slot_bytes,
        page_bytes=meta.page_bytes,
        page_tokens=meta.page_tokens,
        max_bytes=int(1.02 * num_pages + 1024)
        * (SLOT_BYTES + record_dtype(PAGE_TOKENS).itemsize),
        fingerprint=meta.fingerprint,
    )
    prompts = (TENANT_PAGES - SHARED_PAGES) // OWN_PAGES
    num = fill(tier, num_pages, SHARED_PAGES, OWN_PAGES, prompts)
    tier.close()
    return num


def restarts(servers: Servers, args: argparse.Namespace, num: int) -> dict[str, Any]:
    """Start servers in turns; return delays, adoption, throughput and memory."""
    starts: dict[bool, list[float]] = {True: [], False: []}
    idle: list[dict[str, Any]] = []
    busy: list[dict[str, Any]] = []
    memory: dict[bool, tuple[int, int]] = {}
    for number in range(max(args.starts, args.rounds + 1)):
        for is_full in (True, False):
            with servers.start(is_full=is_full) as server:
                starts[is_full].append(server.start_s)
                note(f"start {'full' if is_full else 'empty'}: {server.start_s:.1f} s")
                if not is_full:
                    memory[is_full] = memory_of(server)
                elif number == 0:
                    idle.append(told := wait_adopted(server))
                    if told["adopted"] != num:
                        raise SystemExit(f"of {num} pages: {told}")
                    memory[is_full] = memory_of(server)
                    note(f"idle: {told}")
                elif number <= args.rounds:
                    busy.append(throughput(server, args.window_s))
                    note(f"busy: {busy[-1]}")
    scans = [b["ratio_scanning"] for b in busy if b["ratio_scanning"] is not None]
    delay = statistics.median(starts[True]) - statistics.median(starts[False])
    return {
        "ready_delay_s_5m_pages": round(delay, 2),
        "adopt_s_idle": round(idle[0]["total_s"], 2),
        "throughput_while_adopting": statistics.median(b["ratio"] for b in busy),
        "adopted_in_the_windows": [b["adopting"]["adopted"] for b in busy],
        "is_adopting_throughout": all(b["is_adopting_throughout"] for b in busy),
        "throughput_while_scanning": statistics.median(scans) if scans else None,
        "read_s": round(idle[0]["read_s"], 2),
        "begin_s": round(idle[0]["begin_s"], 3),
        "starts_s": {
            "full": [round(s, 2) for s in starts[True]],
            "empty": [round(s, 2) for s in starts[False]],
        },
        "busy": busy,
        "longest_slice_s_idle": round(idle[0]["longest_slice_s"], 4),
        "state_bytes_per_page": round((memory[True][0] - memory[False][0]) / num),
        "peak_bytes_per_page": round((memory[True][1] - memory[False][1]) / num),
    }


def note(text: str) -> None:
    """Say how far it is."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Fill, start, measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=5_000_000)
    parser.add_argument("--salts-pages", type=int, default=160_000)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--window-s", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "bench-restart")
    parser.add_argument("--record", type=Path, help="folder for the figures as a file")
    args = parser.parse_args()
    exit_on_signals()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        scratch = Path(name)
        figures = salts(scratch, args.salts_pages)
        note(f"salts: {figures}")
        servers = Servers(scratch, scratch / "disk", args.pages)
        meta = servers.prepare()
        started_s = time.monotonic()
        num = fill_folder(scratch / "disk", meta, args.pages)
        note(f"wrote {num} records in {time.monotonic() - started_s:.0f} s")
        figures = {**restarts(servers, args, num), **figures, "pages": num}
    figures |= {
        "server": "sglang.launch_server on a CPU, tiny model of 2 layers",
        **run_facts("make bench-restart", ROOT, SOURCES),
    }
    if args.record is not None:
        keep_record(args.record, "restart", figures)
    if not figures["is_adopting_throughout"]:
        note("adoption ended before a window did: more --pages or a shorter --window-s")
    print(json.dumps(figures))
    return 0 if figures["is_adopting_throughout"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
