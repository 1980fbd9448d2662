"""What the fault tests share: a server whose tiers fail on order, and what must hold.

Under any fault each request is answered, with plain SGLang's tokens, in bounded time;
and when the fault is over the tier is used again.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerSpec, SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import (
    ANSWER_TOKENS,
    PATIENCE_S,
    Case,
    Reference,
    drop,
    open_loop,
    pinned,
    sequential,
    settle,
    stats,
    wait_until,
)

__all__ = [
    "CASE",
    "HOST_BYTES",
    "Prompts",
    "assert_same",
    "dropped_to",
    "fault_spec",
    "faults",
    "small_filesystem",
    "struck",
    "switch_faults",
    "under_fault",
    "used_again",
]

CASE = Case(16)
HOST_BYTES = 8 * MB
"""Holds every prompt of one test and not those of all, so that pages are evicted."""
PROMPT_PAGES = 30


class Prompts:
    """Prompts that no test has sent before."""

    def __init__(self) -> None:
        self._seeds = itertools.count(1000)

    def take(self, count: int) -> list[PlannedRequest]:
        """Return prompts of 30 pages and a few tokens."""
        num_tokens = PROMPT_PAGES * CASE.page_size + 5
        return [
            PlannedRequest(
                f"f{seed}",
                random_tokens(np.random.default_rng(seed), num_tokens, VOCAB_TOKENS),
                ANSWER_TOKENS,
            )
            for seed in itertools.islice(self._seeds, count)
        ]


def fault_spec(
    model: Path,
    disk: Path | None,
    name: str,
    flags: Sequence[str] = (),
    host_bytes: int = HOST_BYTES,
) -> ServerSpec:
    """Return a tiered server whose faults can be switched."""
    tiers = Tiers(host_bytes, disk, 0 if disk is None else 64 * MB)
    every = (
        "--tiered-load-policy=always",
        "--tiered-staging-size=8MB",
        *flags,
    )
    env = {"SGL_TIERED_ALLOW_FAULTS": "1"}
    return tiered_spec(CASE.device(model), tiers, name, flags=every, env=env)


@contextlib.contextmanager
def faults(server: SglangServer, text: str) -> Iterator[None]:
    """Switch faults on, and off again whatever happens."""
    switch_faults(server, text)
    try:
        yield
    finally:
        switch_faults(server, "")


def switch_faults(server: SglangServer, text: str) -> None:
    """Put these faults in force."""
    query = urllib.parse.urlencode({"emulate": text})
    server.post(f"/tiered/faults?{query}", {}, PATIENCE_S)


def struck(server: SglangServer, tier: str) -> int:
    """Return how many operations of a tier were struck since the start."""
    return sum(stats(server)["media"][tier]["faults_struck"].values())


def assert_same(
    plain: Reference, before: list[RequestRecord], after: list[RequestRecord]
) -> None:
    """Demand no failed request and equal answers, up to plain SGLang's own spread."""
    result = check_equality(
        before, after, page_size=CASE.page_size, spread=plain.spread, forced=False
    )
    assert result.passed, result.summary()


def dropped_to(
    server: SglangServer, tier: str, requests: Sequence[PlannedRequest]
) -> list[RequestRecord]:
    """Send prompts and leave their pages on that tier and those below it."""
    answers = sequential(server, requests)
    assert all(record.error is None for record in answers)
    above = {"host": ["device"], "cxl": ["device", "host"], "disk": ["device", "host"]}
    if tier == "disk" and "cxl" in stats(server)["media"]:
        above["disk"].append("cxl")
    drop(server, *above[tier])
    return answers


def under_fault(
    server: SglangServer,
    plain: Reference,
    prompts: Prompts,
    tier: str,
    text: str,
    *,
    crowd: int = 3,
) -> None:
    """Hold what must hold while a fault is on, and after it.

    Old prompts lie on the tier when the fault begins, one after the other and then all
    at once; new ones are offloaded and demoted into it.
    """
    server.flush_cache()
    known, fresh = prompts.take(3), prompts.take(crowd)
    cold = dropped_to(server, tier, known)
    before = struck(server, tier)
    with faults(server, text):
        media = stats(server)["media"][tier]
        assert media["emulated"]
        assert media["emulation"] == text
        assert_same(plain, cold, sequential(server, known))
        new = open_loop(server, [*fresh, *known])
        again = open_loop(server, fresh)
        if "delay" not in text:
            wait_until(lambda: struck(server, tier) > before, f"{text} strikes")
    assert_same(plain, cold, new[len(fresh) :])
    assert_same(plain, new[: len(fresh)], again)
    used_again(server, plain, prompts, tier)


def used_again(
    server: SglangServer, plain: Reference, prompts: Prompts, tier: str
) -> None:
    """Wait until the tier serves hits again, with the right answers."""

    def is_used() -> bool:
        requests = prompts.take(1)
        cold = dropped_to(server, tier, requests)
        again = sequential(server, requests)
        assert_same(plain, cold, again)
        return again[0].cached_by_tier.get(tier, 0) > 0

    wait_until(is_used, f"the {tier} tier is used again")
    state = settle(server)
    assert pinned(state) == 0
    assert state["media"][tier]["usable"], state["media"][tier]["detail"]


@contextlib.contextmanager
def small_filesystem(folder: Path, size: str) -> Iterator[bool]:
    """Mount a small file system on a folder; yield whether that was allowed."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        allowed = subprocess.run(mount, capture_output=True, timeout=20).returncode == 0
    except FileNotFoundError:
        allowed = False
    try:
        yield allowed
    finally:
        if allowed:
            subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)
