"""``as_script ERRORS PROGRAM ARGUMENTS...``: what ``python PROGRAM ARGUMENTS...`` does.

In a process that was forked from one that has imported SGLang. What the program says
on its standard error goes to the file ERRORS.
"""

import os
import runpy
import sys
from pathlib import Path

from sgl_tiered.engines.device import probe

__all__: list[str] = []

BUDGET_S = 0.01
"""For each measurement of a start: what they cost is not asked here, and a program with
dozens of starts would spend most of its time on them."""


def main() -> None:
    """Run it with its folder on the path, as a script has it."""
    errors, *sys.argv = sys.argv[1:]
    file = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 2)
    os.close(file)
    program = sys.argv[0]
    sys.path[0] = str(Path(program).parent)
    probe._BUDGET_S = BUDGET_S
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
