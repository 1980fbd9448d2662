"""Runs the command blocks of README, docs and examples: ``make test-docs``.

A block is a fence of shell commands. It is run by bash in the checkout, and fails where
a command fails. A comment in the line before says what is different::

    <!-- docs: serve -->                  a server: stays until the page ends
    <!-- docs: with a server -->          a usual server is started for it
    <!-- docs: install -->                pip only reads what it is to install
    <!-- docs: long: REASON -->           only with --long
    <!-- docs: not on a CPU: REASON -->   never

Blocks of a page are run in order. Ports are replaced by free ones (those of
``TIERED_TEST_PORTS=first-last`` if that is set), ``MODEL`` by the model of this
repository, and ``/mnt/nvme/kv`` by a folder; ``make`` does not install again. With
``--clone`` all of it happens in a clone of the last commit.

The last line is one JSON object: ``blocks`` (all of them), ``run``, ``failed``,
``not_on_cpu`` and ``long`` (place: reason). The exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from sgl_tiered_workloads.server import exit_on_signals, free_port, shuffled_ports

__all__ = ["Block", "blocks", "main", "pages"]

ROOT = Path(__file__).resolve().parents[1]
HOWS = ("run", "serve", "with a server", "install", "long", "not on a CPU")
_FENCE = re.compile(
    r"(?:^<!-- docs: ([^:>]+?)(?:: ([^>]*?))? -->\n)?^```(?:sh|bash)\n(.*?)^```$",
    re.M | re.S,
)
_PORT = re.compile(r"(?<=[:= ])(30\d{3}|555\d)\b")
_USUAL_PORT = "30000"
_USUAL_SERVER = (
    "python -m sglang.launch_server --model-path workloads/models/demo "
    "--radix-cache-backend tiered --page-size 16 --max-total-tokens 16384 "
    "--tiered-host-size 200MB --sleep-on-idle --disable-overlap-schedule"
)
_START_S, _RUN_S, _LONG_S, _END_S = 600.0, 900.0, 5400.0, 30.0


@dataclass(frozen=True, slots=True)
class Block:
    """One fence of commands.

    Attributes:
        place: file and line.
        text: of the commands.
        how: it is run, one of ``HOWS``.
        reason: why it is not run, where it is not.
    """

    place: str
    text: str
    how: str = "run"
    reason: str = ""


def pages(root: Path = ROOT) -> list[Path]:
    """Return the documents whose blocks count."""
    docs = sorted((root / "docs").rglob("*.md"))
    return [root / "README.md", *docs, root / "examples/README.md"]


def blocks(page: Path, root: Path = ROOT) -> list[Block]:
    """Return the blocks of a page.

    Raises:
        ValueError: a comment says something else than ``HOWS``, or gives no reason.
    """
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start(3))
        place = f"{page.relative_to(root).as_posix()}:{line}"
        how, reason = fence[1] or "run", fence[2] or ""
        if how not in HOWS or (how in ("long", "not on a CPU")) != bool(reason):
            raise ValueError(f"{place}: {how!r} is none of {HOWS}, or lacks a reason")
        found.append(Block(place, fence[3], how, reason))
    return found


class Reader:
    """Somebody who follows one page: its ports, and the servers that it started.

    Args:
        root: of the checkout.
        scratch: for logs and what stands for a disk.
    """

    def __init__(self, root: Path, scratch: Path) -> None:
        self._root, self._scratch = root, scratch
        scratch.mkdir(parents=True)
        self._ports = _untried()
        self._taken: dict[str, str] = {}
        self._servers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        """Begin a page."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every server that the page started."""
        for server in reversed(self._servers):
            _end(server)

    def follow(self, block: Block) -> str:
        """Do what a block says; return why it failed, or nothing."""
        if block.how == "install":
            return self._installed(block)
        if block.how == "serve":
            return self._serve(block.text)
        if block.how == "with a server" and not self._servers:
            problem = self._serve(_USUAL_SERVER)
            if problem:
                return problem
        limit_s = _LONG_S if block.how == "long" else _RUN_S
        return self._run(self._for_here(block.text), limit_s)

    def _for_here(self, text: str) -> str:
        text = _PORT.sub(lambda port: self._port(port[1]), text)
        text = re.sub(r"\bMODEL\b", "workloads/models/demo", text)
        return text.replace("/mnt/nvme/kv", str(self._scratch / "disk"))

    def _port(self, named: str) -> str:
        return self._taken.setdefault(named, str(free_port(self._ports)))

    def _environment(self) -> dict[str, str]:
        folders = (".", "kernels", "workloads", "platform_dist")
        found = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(self._root / each) for each in folders),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        found.pop("PYTHONDONTWRITEBYTECODE", None)
        return found

    def _run(self, text: str, limit_s: float) -> str:
        # The environment is there: what else `make install` would do is nothing.
        make = f'make() {{ command make -o install VENV="{sys.prefix}" "$@"; }}\n'
        log = self._scratch / "block.log"
        with log.open("wb") as out:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", make + text],
                cwd=self._root,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = shell.wait(limit_s)
            except subprocess.TimeoutExpired:
                return f"took longer than {limit_s:.0f} s\n{_tail(log)}"
            finally:
                _end(shell)
        return "" if code == 0 else f"exit code {code}\n{_tail(log)}"

    def _serve(self, text: str) -> str:
        command = text.strip()
        if "--port" not in command:
            command += f" --port {_USUAL_PORT}"
        named = re.search(r"--port (\d+)", command)
        assert named is not None, command
        url = f"http://127.0.0.1:{self._port(named[1])}/health"
        log = self._scratch / f"server-{len(self._servers)}.log"
        with log.open("wb") as out:
            server = subprocess.Popen(
                ["bash", "-c", "exec " + self._for_here(command)],
                cwd=self._root,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._servers.append(server)
        until_s = time.monotonic() + _START_S
        while time.monotonic() < until_s:
            if server.poll() is not None:
                return f"the server ended with {server.returncode}\n{_tail(log)}"
            if _answers(url):
                return ""
            time.sleep(0.5)
        return f"no answer after {_START_S:.0f} s\n{_tail(log)}"

    def _installed(self, block: Block) -> str:
        """Let pip read what it is to install, and install nothing."""
        place = self._scratch / "pip"
        if not place.exists():
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
        words = f'pip() {{ "{place}/bin/python" -m pip "$@" --dry-run --no-deps; }}\n'
        problem = self._run(words + block.text, _RUN_S)
        said = (self._scratch / "block.log").read_text(errors="replace")
        return problem or (said if "does not provide the extra" in said else "")


def _untried() -> Iterator[int]:
    """Return ports to try, in the range that the environment confines us to."""
    confined = os.environ.get("TIERED_TEST_PORTS")
    if not confined:
        return shuffled_ports()
    first, last = map(int, confined.split("-"))
    return iter(range(first, last + 1))


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that we started, and its children, by its group."""
    for number, patience_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    process.poll()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def _chosen(names: Iterable[str], root: Path) -> Iterator[Path]:
    for page in pages(root):
        place = page.relative_to(root).as_posix()
        if not names or any(place.startswith(name) for name in names):
            yield page


def _clone(scratch: Path) -> Path:
    target = scratch / "clone"
    command = ("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(target))
    subprocess.run(command, check=True)
    return target


@dataclass(slots=True)
class Tally:
    """What came of the blocks so far.

    Attributes:
        is_dry, has_long: run nothing; run those that take long too.
        blocks, run: counted; failed, not_on_cpu, long: why, by place.
    """

    is_dry: bool
    has_long: bool
    blocks: int = 0
    run: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    not_on_cpu: dict[str, str] = field(default_factory=dict)
    long: dict[str, str] = field(default_factory=dict)

    def take(self, block: Block, reader: Reader) -> None:
        """Run a block, or note why it is not run."""
        self.blocks += 1
        if block.how == "not on a CPU":
            self.not_on_cpu[block.place] = block.reason
        elif block.how == "long" and not self.has_long:
            self.long[block.place] = block.reason
        elif not self.is_dry:
            began_s = time.monotonic()
            problem = reader.follow(block)
            self.run += 1
            word = "FAILED" if problem else "ok"
            took_s = time.monotonic() - began_s
            print(f"{word:6} {block.place} ({took_s:.0f} s)", flush=True)
            if problem:
                self.failed[block.place] = problem
                print(problem, flush=True)

    def as_json(self) -> str:
        """Return the last line."""
        counts = {"blocks": self.blocks, "run": self.run, "failed": len(self.failed)}
        why = {"not_on_cpu": self.not_on_cpu, "long": self.long}
        return json.dumps({**counts, "failed_blocks": sorted(self.failed), **why})


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run what the command line asks for; 0 if no block failed."""
    parser = argparse.ArgumentParser(prog="make test-docs")
    parser.add_argument("pages", nargs="*", help="beginnings of paths; default all")
    parser.add_argument("--long", action="store_true", help="those that take long too")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--clone", action="store_true", help="in a clone of the commit")
    args = parser.parse_args(arguments)
    exit_on_signals()
    scratch = Path(tempfile.mkdtemp(prefix="test-docs-"))
    tally = Tally(args.list, args.long)
    try:
        root = _clone(scratch) if args.clone else root
        # Pages without servers of their own share the usual one.
        with Reader(root, scratch / "shared") as shared:
            for number, page in enumerate(_chosen(args.pages, root)):
                found = blocks(page, root)
                if not any(block.how == "serve" for block in found):
                    for block in found:
                        tally.take(block, shared)
                    continue
                with Reader(root, scratch / f"page-{number}") as reader:
                    for block in found:
                        tally.take(block, reader)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(tally.as_json())
    return 1 if tally.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
