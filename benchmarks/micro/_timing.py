"""The options and the samples that programs here share: whose clock, what order."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Clock = Callable[[], float]


def timing_options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with ``--repeats``, ``--threads`` and ``--clock``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    return parser


def start_clock(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Clock:
    """Give torch its threads; return the clock that was asked for."""
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu counts one thread; add --threads 1")
    torch.set_num_threads(args.threads)
    return time.thread_time if args.clock == "cpu" else time.perf_counter


def timing_record(args: argparse.Namespace) -> dict[str, Any]:
    """Return how it was measured, for the JSON line."""
    return {
        "clock": args.clock,
        "threads": args.threads,
        "repeats": args.repeats,
        "torch": torch.__version__,
    }


def interleaved(
    jobs: dict[str, Callable[[], object]], repeats: int, clock: Clock
) -> dict[str, float]:
    """Run all jobs in turn, again and again; return the median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            began = clock()
            job()
            seconds[name].append(clock() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}
