"""kill -9 at any moment: what is recovered is right or not ok, never wrong."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.unit.tiers.disk_support import PAGE_BYTES, load, open_tier, page_of

NUM_SLOTS = 32
CYCLES = 10

WRITER = """
import sys
from pathlib import Path
import numpy as np
from tests.unit.tiers.disk_support import open_tier, store
path, turn = Path(sys.argv[1]), int(sys.argv[2])
tier = open_tier(path, num_slots=32)
tier.recover()
rng = np.random.default_rng(turn)
seed = turn * 1_000_000
while True:
    slots = rng.permutation(32)[: rng.integers(1, 9)]
    seeds = np.arange(seed, seed + len(slots))
    seed += len(slots)
    if rng.random() < 0.3:
        tier.forget(rng.permutation(32)[:4])
    assert store(tier, slots, seeds).ok.all()
    print(*(f"{a}:{s}" for a, s in zip(slots, seeds)), flush=True)
"""


@pytest.mark.timeout(120)
def test_killed_writer(tmp_path):
    """After each kill, every page recovered loads as its key says, or is not ok."""
    path = tmp_path / "tier"
    rng = np.random.default_rng(11)
    num_found = num_right = 0
    for turn in range(CYCLES):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(turn)],
            stdout=subprocess.PIPE,
            text=True,
        )
        # The moment of the kill is counted in acknowledged stores, plus whatever the
        # writer does until the signal gets there.
        for _ in range(int(rng.integers(1, 40))):
            line = child.stdout.readline()
            assert line, "the writer ended by itself"
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        tier = open_tier(path, num_slots=NUM_SLOTS)
        for group in tier.recover():
            pages, result = load(tier, group.addresses, group.checksums)
            for i in np.flatnonzero(result.ok).tolist():
                seed = int.from_bytes(group.keys[i, :8].tobytes(), "little")
                assert np.array_equal(pages[i], page_of(seed)), f"seed {seed}"
                assert group.tokens[i, 0] == seed
            num_found += len(result.ok)
            num_right += int(result.ok.sum())
        tier.close()
    assert pages.shape[1] == PAGE_BYTES
    # Records follow their payload and are voided before it: nothing torn is found.
    assert num_right == num_found
    assert num_found > CYCLES * NUM_SLOTS // 4


def test_acknowledged_pages_survive_a_kill(tmp_path):
    """A store that returned before the kill is there after it, unless overwritten."""
    path = tmp_path / "tier"
    code = (
        "import sys, os, signal; from pathlib import Path;"
        "from tests.unit.tiers.disk_support import open_tier, store;"
        "tier = open_tier(Path(sys.argv[1]));"
        "assert store(tier, range(20), range(100, 120)).ok.all();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert child.returncode == -signal.SIGKILL
    tier = open_tier(path)
    (group,) = tier.recover()
    assert sorted(group.addresses.tolist()) == list(range(20))
    pages, result = load(tier, group.addresses, group.checksums)
    assert result.ok.all()
    for page, address in zip(pages, group.addresses.tolist(), strict=True):
        assert np.array_equal(page, page_of(100 + address))
    tier.close()
