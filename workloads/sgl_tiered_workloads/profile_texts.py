"""Texts for profiling a model's attention: code, and code with a register strewn in.

Every machine has them: sources of Python's own library. A register's entries come again
later in their text, wherever it may be cut off, so that somebody reads from afar.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

__all__ = ["profile_texts"]

_MODULES = (
    "argparse",
    "ast",
    "calendar",
    "configparser",
    "csv",
    "dataclasses",
    "difflib",
    "doctest",
    "fractions",
    "ftplib",
    "gettext",
    "heapq",
    "inspect",
    "ipaddress",
    "mailbox",
    "optparse",
    "pickle",
    "plistlib",
    "shutil",
    "smtplib",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "tokenize",
    "typing",
    "uuid",
    "zipapp",
)
_THINGS = ("lamp", "kettle", "ladder", "violin", "camera", "anchor", "saddle", "mirror")
_PLACES = ("attic", "cellar", "garden", "harbour", "library", "kitchen", "station")
_LINES_PER_ENTRY = 6
_REPEATED = 0.5
"""Share of the register's lines that are an earlier entry again."""


def profile_texts(
    num_texts: int, num_chars: int, generator: np.random.Generator
) -> list[str]:
    """Return texts of about ``num_chars`` characters, every second with a register.

    Raises:
        ValueError: this Python keeps no sources of its library.
    """
    sources = [path for name in _MODULES if (path := _source(name)) is not None]
    if not sources:
        raise ValueError("this Python keeps no sources of its library")
    texts = []
    for number in range(num_texts):
        text = ""
        while len(text) < num_chars:
            path = sources[int(generator.integers(len(sources)))]
            text += path.read_text(encoding="utf-8", errors="replace")
        begin = int(generator.integers(len(text) - num_chars + 1))
        text = text[begin : begin + num_chars]
        texts.append(_with_register(text, generator) if number % 2 else text)
    return texts


def _source(name: str) -> Path | None:
    found = importlib.util.find_spec(name)
    path = None if found is None or found.origin is None else Path(found.origin)
    return path if path is not None and path.is_file() else None


def _with_register(text: str, generator: np.random.Generator) -> str:
    """Strew entries between the lines, and earlier entries again."""
    entries: list[str] = []
    woven = []
    for number, line in enumerate(text.splitlines()):
        woven.append(line)
        if number % _LINES_PER_ENTRY:
            continue
        if entries and generator.random() < _REPEATED:
            woven.append(entries[int(generator.integers(len(entries)))])
            continue
        thing = _THINGS[int(generator.integers(len(_THINGS)))]
        place = _PLACES[int(generator.integers(len(_PLACES)))]
        # A number makes each thing another one.
        which, box = generator.integers(100, 1000, 2).tolist()
        entries.append(f"# The {thing} {which} of the {place} is in box {box}.")
        woven.append(entries[-1])
    return "\n".join(woven) + "\n"
