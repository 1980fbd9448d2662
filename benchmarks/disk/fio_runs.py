"""fio as the yardstick: one run on a file that is there, and what it says of itself."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ENGINES", "FIO_MISSING", "Measured", "command", "parse", "run"]

ENGINES = ("psync", "io_uring")
FIO_MISSING = (
    "fio is not installed, and there is nothing else to compare with: install the "
    "package fio of the system (Debian, Ubuntu: apt-get install fio) and start again."
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One transfer of the whole file.

    Attributes:
        bytes_per_s: bandwidth.
        cpu_s_per_gb: processor time, user and system, per 1e9 bytes.
    """

    bytes_per_s: float
    cpu_s_per_gb: float


def command(
    file: Path, *, engine: str, writes: bool, block_bytes: int, depth: int, size: int
) -> list[str]:
    """Return fio's arguments: ``depth`` I/Os in flight over the whole file, in order.

    psync has one I/O in flight per thread, so it gets as many threads, each with its
    own part of the file.
    """
    threads = depth if engine == "psync" else 1
    part = size // threads
    return [
        "fio",
        "--name=yardstick",
        f"--filename={file}",
        f"--rw={'write' if writes else 'read'}",
        f"--ioengine={engine}",
        f"--bs={block_bytes}",
        "--direct=1",
        "--thread",
        f"--numjobs={threads}",
        f"--iodepth={1 if engine == 'psync' else depth}",
        f"--size={part}",
        f"--offset_increment={part}",
        "--allow_file_create=0",
        "--fallocate=none",
        "--group_reporting",
        "--output-format=json",
    ]


def parse(text: str, *, writes: bool, size: int) -> Measured:
    """Read fio's JSON.

    Raises:
        ValueError: the run failed, or did not move ``size`` bytes.
    """
    # fio may print notes before the object.
    job = json.loads(text[text.index("{") :])["jobs"][0]
    side = job["write" if writes else "read"]
    if job["error"] or side["io_bytes"] != size:
        raise ValueError(
            f"fio moved {side['io_bytes']} of {size} B, error {job['error']}"
        )
    # Shares of the time of all threads together, which is job_runtime.
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Measured(size / (side["runtime"] / 1000), cpu_s / size * 1e9)


def run(
    file: Path, *, engine: str, writes: bool, block_bytes: int, depth: int, size: int
) -> Measured:
    """Run fio once.

    Raises:
        SystemExit: fio is not there.
        ValueError: it failed.
    """
    if shutil.which("fio") is None:
        raise SystemExit(FIO_MISSING)
    done = subprocess.run(
        command(
            file,
            engine=engine,
            writes=writes,
            block_bytes=block_bytes,
            depth=depth,
            size=size,
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ValueError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    return parse(done.stdout, writes=writes, size=size)
