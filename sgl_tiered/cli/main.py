"""The ``sgl-tiered`` command. A subcommand is one module and one line in COMMANDS.

Exit codes of all of them: 0 done; 1 done, with a finding (no request could run, a gate
is red, serving is not possible); 2 a wrong setting, file or address, said in one
sentence; 130 interrupted; 141 nobody reads what is printed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from sgl_tiered.cli import (
    bench,
    calibrate,
    completion,
    doctor,
    explain,
    pool,
    profile,
    router,
    simulate,
)
from sgl_tiered.errors import TieredError

__all__ = ["COMMANDS", "Command", "main", "make_parser"]

_INTERRUPTED, _NOBODY_READS = 130, 141
"""128 and the number of the signal that would have ended the process."""


class Command(Protocol):
    """A module that brings one subcommand."""

    def register(self, subparsers: Any) -> None:
        """Add a parser whose default ``run`` takes the arguments, returns the code."""
        ...


COMMANDS: tuple[Command, ...] = (
    doctor,
    calibrate,
    profile,
    bench,
    simulate,
    explain,
    router,
    pool,
    completion,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 for a wrong setting)."""
    arguments = make_parser().parse_args(argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except TieredError as error:
        print(f"sgl-tiered: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sgl-tiered: interrupted.", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # As of ``| head``. What is still buffered must not fail at exit once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = _Parser(
        prog="sgl-tiered",
        description="Tools around the sgl-tiered plugin of SGLang.",
        epilog="Exit codes: 0 done; 1 done, with a finding; 2 a wrong setting, file or "
        "address.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"sgl-tiered {importlib.metadata.version('sgl-tiered')}",
    )
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.register(subparsers)
    # For completions, which are made of all subcommands' flags.
    parser.set_defaults(of_all=parser)
    return parser


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


if __name__ == "__main__":
    sys.exit(main())
