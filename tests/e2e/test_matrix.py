"""Page sizes, chunked prefill, schedules and policies against plain SGLang.

A few configurations that meet all pairs of page size, chunking and schedule with the
servers of the other files run always; the whole cross product with ``--full``.
"""

import itertools
import os
import subprocess
from dataclasses import dataclass

import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.sessions import replay
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec

from tests.e2e.e2e_support import Case, edge, pinned, sequential, settle

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]


@dataclass(frozen=True)
class Setup:
    """A case and what is below its device."""

    case: Case
    host_bytes: int
    disk_bytes: int
    flags: tuple[str, ...] = ()
    small_filesystem: bool = False

    @property
    def name(self):
        return self.case.name


# At page size 1 a slot of 4 KiB holds one token, so that the sizes are larger there.
CHOSEN = (
    Setup(
        Case(1, chunk_tokens=256, overlap=False),
        6 * MB,
        64 * MB,
        ("--tiered-eviction-policy=lru",),
        small_filesystem=True,
    ),
    Setup(
        Case(64, chunk_tokens=256),
        2 * MB,
        3 * MB,
        ("--tiered-eviction-policy=fifo", "--tiered-demote-policy=on-evict"),
    ),
)
CROSS = [
    Setup(Case(page, chunk, overlap), (8 if page == 1 else 2) * MB, 64 * MB)
    for page, chunk, overlap in itertools.product(
        (1, 16, 64), (None, 256), (True, False)
    )
]


def run(servers, model, reference, setup, folder):
    """Replay the chats on a tiered server and return the gate's result and state."""
    plain = reference(setup.case)
    flags = (
        "--tiered-load-policy=always",
        "--tiered-staging-size=16MB",
        *setup.flags,
    )
    tiers = Tiers(setup.host_bytes, folder, setup.disk_bytes)
    spec = tiered_spec(
        setup.case.device(model), tiers, f"tiered-{setup.name}", flags=flags
    )
    server = servers.get(spec)
    server.flush_cache()
    answers = sequential(server, replay(plain.chat))
    result = check_equality(
        plain.chat,
        answers,
        page_size=setup.case.page_size,
        spread=plain.spread,
        min_exact_fraction=0.1,
    )
    return result, settle(server)


@pytest.mark.parametrize("setup", CHOSEN, ids=lambda setup: setup.name)
def test_chats_equal_plain(servers, model, reference, setup, folder):
    """Whatever the page size, the chunks and the schedule, the answers are plain's."""
    result, state = run(servers, model, reference, setup, folder)
    assert result.passed, result.summary()
    assert result.exact_tokens_by_tier.get("disk", 0) + edge(state, "host->device") > 0
    assert pinned(state) == 0
    for tier in state["occupancy"].values():
        assert tier["used"] <= tier["capacity"]
    if setup.small_filesystem and os.path.ismount(folder):
        # Writes were refused; the tier says so, and the answers are right all the same.
        assert edge(state, "host->disk", "failures") > 0
    servers.stop()


@pytest.mark.full
@pytest.mark.parametrize("setup", CROSS, ids=lambda setup: setup.name)
def test_cross_product(servers, model, reference, setup, tmp_path):
    """Every combination of page size, chunking and schedule gives plain's answers."""
    result, state = run(servers, model, reference, setup, tmp_path)
    assert result.passed, result.summary()
    assert pinned(state) == 0
    servers.stop()


@pytest.fixture
def folder(setup, tmp_path_factory):
    """The disk tier's folder; on a file system of 6 MB where that can be mounted."""
    folder = tmp_path_factory.mktemp("disk")
    if not setup.small_filesystem or not mount_small(folder):
        yield folder
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def mount_small(folder):
    """Mount a small file system; say whether that was allowed."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False, timeout=20)
    except FileNotFoundError:
        return False
    return done.returncode == 0
