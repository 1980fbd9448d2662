"""Prints the versions of all packages of this environment, for ``pip install -c``.

What we develop ourselves is left out. Packages that only some machines need (another
Python, a CUDA of its own) are not in the list, so that they are free there.
"""

from __future__ import annotations

import importlib.metadata
import json
import re


def main() -> None:
    """Print a line for each package, in alphabetical order."""
    versions = {}
    for found in importlib.metadata.distributions():
        if not _is_ours(found):
            name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
            versions[name] = found.version
    print("# Versions that were tested together: made by `make lock`.")
    print(*(f"{name}=={versions[name]}" for name in sorted(versions)), sep="\n")


def _is_ours(found: importlib.metadata.Distribution) -> bool:
    """Return whether a package was installed from a folder."""
    origin = found.read_text("direct_url.json")
    return origin is not None and "dir_info" in json.loads(origin)


if __name__ == "__main__":
    main()
