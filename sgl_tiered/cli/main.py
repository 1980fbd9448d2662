"""The ``sgl-tiered`` command. A subcommand is one module and one line in COMMANDS."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from sgl_tiered.cli import (
    bench,
    calibrate,
    doctor,
    explain,
    pool,
    profile,
    router,
    simulate,
)
from sgl_tiered.errors import TieredError

__all__ = ["COMMANDS", "Command", "main"]


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
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 for a wrong setting)."""
    parser = argparse.ArgumentParser(
        prog="sgl-tiered", description="Tools around the sgl-tiered plugin of SGLang."
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"sgl-tiered {importlib.metadata.version('sgl-tiered')}",
    )
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.register(subparsers)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except TieredError as error:
        print(f"sgl-tiered: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
