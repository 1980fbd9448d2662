"""A process that uses the disk tier until it is killed, and what must hold after.

Run as a program it is that process: it stores, loads and forgets pages through the
tier's public interface from several threads, and says before and after each step what
it does, in lines that are written at once. ``cycle`` starts it, kills it with -9 at a
random moment, and checks what a new process finds against what was said.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sgl_tiered.core.plans import PageRecords, namespace_rows
from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.checks import expected_checksums
from sgl_tiered.tiers.disk_striped import open_disk_tier
from sgl_tiered.tiers.memory import aligned_buffer

SLOT_BYTES = 128 << 10
PAGE_BYTES = SLOT_BYTES - 192
PAGE_TOKENS = 16
NUM_SLOTS = 48
NUM_WRITERS = 2
ROOT = Path(__file__).parents[3]
FREE = 0
"""No seed: nothing is stored there."""


def open_tier(paths, io):
    """Open the tier that is killed: ``NUM_SLOTS`` slots in slabs of eight."""
    return open_disk_tier(
        paths,
        max_bytes=(NUM_SLOTS + 8) * (SLOT_BYTES + 256),
        slot_bytes=SLOT_BYTES,
        page_bytes=PAGE_BYTES,
        page_tokens=PAGE_TOKENS,
        slab_bytes=8 * SLOT_BYTES,
        fingerprint="killed",
        io=io,
    )


def page_of(seed):
    """Return the bytes of the page that ``seed`` names: uint8 [PAGE_BYTES]."""
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, np.uint8)


def store(tier, slots, seeds):
    """Store the page of each seed; key and tokens name the seed as well."""
    buffer = aligned_buffer(len(slots), SLOT_BYTES)
    keys = np.zeros((len(slots), 16), np.uint8)
    for row, seed in enumerate(seeds):
        buffer[row, :PAGE_BYTES] = page_of(seed)
        keys[row, :8] = np.frombuffer(int(seed).to_bytes(8, "little"), np.uint8)
    records = PageRecords(
        namespaces=namespace_rows(b"n" * 16, len(slots)),
        keys=keys,
        parents=keys + np.uint8(1),
        tokens=np.repeat(np.asarray(seeds, np.int32)[:, None], PAGE_TOKENS, axis=1),
        checksums=np.zeros(len(slots), np.uint64),
        addresses=np.asarray(slots),
    )
    rows = np.arange(len(slots))
    return tier.store(TierIO(np.asarray(slots), buffer, rows, records))


def load(tier, slots, checksums=None):
    """Load pages; return (bytes uint8 [n, PAGE_BYTES], result)."""
    slots = np.asarray(slots)
    buffer = aligned_buffer(max(1, len(slots)), SLOT_BYTES)
    records = None if checksums is None else expected_checksums(checksums, slots)
    result = tier.load(TierIO(slots, buffer, np.arange(len(slots)), records))
    return buffer[:, :PAGE_BYTES], result


@dataclass
class Book:
    """What a killed process said that it had done: slot -> the seeds it may hold.

    One seed is certain; several mean that a step was under way. ``FREE`` is a seed.
    """

    may_hold: dict[int, set[int]] = field(
        default_factory=lambda: {slot: {FREE} for slot in range(NUM_SLOTS)}
    )

    def read(self, line):
        """Take note of one line."""
        step, *pairs = line.split()
        for pair in pairs:
            slot, seed = map(int, pair.split(":"))
            if step == "begin":
                # Voided, as it was, or already the new page.
                self.may_hold[slot] |= {FREE, seed}
            elif step == "done":
                self.may_hold[slot] = {seed}
            elif step == "forget":
                # Its record is voided some time later.
                self.may_hold[slot] |= {FREE}
            else:
                raise AssertionError(f"the process said {line!r}")


def check(paths, io, book):
    """Check what a new process finds; return the number of pages it found."""
    tier = open_tier(paths, io)
    found = dict.fromkeys(range(NUM_SLOTS), FREE)
    num_found = 0
    for group in tier.recover():
        pages, result = load(tier, group.addresses, group.checksums)
        # Records follow their payload and are voided before it: nothing torn is found.
        assert result.ok.all(), result.error
        for row, slot in enumerate(group.addresses.tolist()):
            seed = int.from_bytes(group.keys[row, :8].tobytes(), "little")
            assert np.array_equal(pages[row], page_of(seed)), f"slot {slot}"
            assert (group.tokens[row] == seed).all()
            found[slot] = seed
            num_found += 1
    tier.close()
    for slot, seed in found.items():
        assert seed in book.may_hold[slot], (
            f"slot {slot} holds {seed}, not one of {book.may_hold[slot]}"
        )
        book.may_hold[slot] = {seed}
    return num_found


def cycle(paths, io, book, turn, rng):
    """Start the process, kill it, and check; return the number of pages found."""
    command = [sys.executable, __file__, io, str(turn), *map(str, paths)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        # Counted in steps, so that it does not depend on the speed of the machine,
        # and then a little later, so that it hits any part of a step.
        lines = list(itertools.islice(child.stdout, int(rng.integers(1, 60))))
        time.sleep(rng.exponential(0.001))
        child.send_signal(signal.SIGKILL)
        lines += child.stdout
    assert child.returncode == -signal.SIGKILL, "the process ended by itself"
    for line in lines:
        book.read(line)
    return check(paths, io, book)


def run_cycles(paths, io, num_cycles, seed=0):
    """Run so many cycles on one tier; return the pages found in all of them."""
    rng = np.random.default_rng(seed)
    book = Book()
    return sum(cycle(paths, io, book, turn, rng) for turn in range(num_cycles))


def main():
    """Use the tier until killed."""
    io, turn, *paths = sys.argv[1:]
    tier = open_tier([Path(path) for path in paths], io)
    held = {}
    for group in tier.recover():
        for slot, key in zip(group.addresses.tolist(), group.keys, strict=True):
            held[slot] = int.from_bytes(key[:8].tobytes(), "little")

    def say(step, slots, seeds):
        pairs = " ".join(f"{a}:{s}" for a, s in zip(slots, seeds, strict=True))
        # One write of less than PIPE_BUF bytes: lines are whole or not there.
        os.write(1, f"{step} {pairs}\n".encode())

    def write(part):
        rng = np.random.default_rng(1000 * int(turn) + part)
        mine = np.array_split(np.arange(NUM_SLOTS), NUM_WRITERS)[part]
        seed = (int(turn) * NUM_WRITERS + part) * 100_000 + 1
        while True:
            first = int(rng.integers(len(mine)))
            slots = mine[first : first + int(rng.integers(1, 9))].tolist()
            if rng.random() < 0.5:
                slots = rng.permutation(mine)[: len(slots)].tolist()
            if rng.random() < 0.2:
                say("forget", slots, [FREE] * len(slots))
                for slot in slots:
                    held.pop(slot, None)
                tier.forget(np.asarray(slots))
                continue
            seeds = list(range(seed, seed + len(slots)))
            seed += len(slots)
            for slot in slots:
                held.pop(slot, None)
            say("begin", slots, seeds)
            result = store(tier, slots, seeds)
            if not result.ok.all():
                say("FAILED", slots, seeds)
            say("done", slots, seeds)
            held.update(zip(slots, seeds, strict=True))
            pages, result = load(tier, slots)
            for row, page_seed in enumerate(seeds):
                right = np.array_equal(pages[row], page_of(page_seed))
                if not (result.ok[row] and right):
                    say("WRONG", slots, seeds)

    say("begin", [], [])
    threads = [threading.Thread(target=write, args=(n,)) for n in range(NUM_WRITERS)]
    for thread in threads:
        thread.daemon = True
        thread.start()
    time.sleep(60)


if __name__ == "__main__":
    main()
