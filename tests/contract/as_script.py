"""``as_script ERRORS PROGRAM ARGUMENTS...``: what ``python PROGRAM ARGUMENTS...`` does.

In a process that was forked from one that has imported SGLang. What the program says
on its standard error goes to the file ERRORS.
"""

import os
import runpy
import sys
from pathlib import Path

__all__: list[str] = []


def main() -> None:
    """Run it with its folder on the path, as a script has it."""
    errors, *sys.argv = sys.argv[1:]
    file = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 2)
    os.close(file)
    program = sys.argv[0]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
