"""Reads the tables of a TOML file: typed entries, and nothing left over."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from sgl_tiered_workloads.harness.errors import SpecError

__all__ = ["Table"]

T = TypeVar("T")

_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


class Table:
    """One table; ``end`` refuses what nobody asked for.

    Args:
        content: as TOML gave it.
        path: of the table, as the user writes it; empty for the file itself.
    """

    def __init__(self, content: Mapping[str, Any], path: str = "") -> None:
        self._content = dict(content)
        self._path = path
        self._asked: list[str] = []

    def key(self, name: str) -> str:
        """Return an entry's whole name."""
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        """Whether the entry is given and was not taken yet."""
        return name in self._content

    def number(
        self, name: str, default: float | None = None, above: float = 0.0
    ) -> float:
        """Take a number greater than ``above``."""
        value = float(self._take(name, (int, float), float, default))
        if not value > above:
            remedy = f"give a number above {above:g}"
            raise SpecError(self.key(name), f"{value:g} is too small", remedy)
        return self._finite(name, value)

    def optional(self, name: str, above: float = 0.0) -> float | None:
        """Take a number that may be missing."""
        return self.number(name, above=above) if self.has(name) else None

    def seconds(self, name: str, default: float) -> float:
        """Take a time that may be zero."""
        value = float(self._take(name, (int, float), float, default))
        if value < 0:
            raise SpecError(self.key(name), f"{value:g} is negative", "give 0 or more")
        return self._finite(name, value)

    def _finite(self, name: str, value: float) -> float:
        if not math.isfinite(value):
            raise SpecError(self.key(name), f"{value:g} is no amount", "give a number")
        return value

    def share(self, name: str, default: float) -> float:
        """Take a number from 0 to 1."""
        value = float(self._take(name, (int, float), float, default))
        if not 0 <= value <= 1:
            problem = f"{value:g} is no share"
            raise SpecError(self.key(name), problem, "give a number from 0 to 1")
        return value

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Take a whole number of at least ``least``."""
        value = int(self._take(name, (int,), int, default))
        if value < least:
            remedy = f"give {least} or more"
            raise SpecError(self.key(name), f"{value} is too small", remedy)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Take text that is not empty, unless its default is."""
        value = str(self._take(name, (str,), str, default))
        if not value and default != "":
            raise SpecError(self.key(name), "it is empty", "give a name")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Take true or false."""
        return bool(self._take(name, (bool,), bool, default))

    def choice(
        self, name: str, choices: Iterable[str], default: str | None = None
    ) -> str:
        """Take one of several words."""
        allowed = list(choices)
        value = self.text(name, default)
        if value not in allowed:
            remedy = f"use one of {', '.join(allowed)}"
            raise SpecError(self.key(name), f"{value!r} is unknown", remedy)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Take a list of texts; empty if it is missing."""
        value = self._content.pop(name, [])
        self._asked.append(name)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise SpecError(self.key(name), "it is no list of texts", 'write ["..."]')
        return tuple(value)

    def table(self, name: str, needed: bool = False) -> Table:
        """Take a table; an empty one if it may be missing."""
        value = self._content.pop(name, None)
        self._asked.append(name)
        if value is None and needed:
            remedy = f"add [{self.key(name)}]"
            raise SpecError(self.key(name), "it is missing", remedy)
        if not isinstance(value, dict | None):
            remedy = f"write [{self.key(name)}]"
            raise SpecError(self.key(name), "it is no table", remedy)
        return Table(value or {}, self.key(name))

    def tables(self) -> dict[str, Table]:
        """Take everything that is left, each as a table."""
        return {name: self.table(name) for name in list(self._content)}

    def variables(self, name: str) -> dict[str, str]:
        """Take a table of texts; empty if it is missing."""
        found = self.table(name)
        return {key: found.text(key, "") for key in list(found._content)}

    def rest(self) -> dict[str, Any]:
        """Take everything that is left, as it is."""
        rest, self._content = self._content, {}
        return rest

    def end(self) -> None:
        """Refuse what was not taken.

        Raises:
            SpecError: an entry has a name that nobody knows.
        """
        for name in self._content:
            near = difflib.get_close_matches(name, self._asked, 1)
            known = ", ".join(self._asked) or "nothing"
            remedy = f"did you mean {near[0]}" if near else f"known here: {known}"
            raise SpecError(self.key(name), "this key is unknown", remedy)

    def _take(
        self, name: str, kinds: tuple[type, ...], named: type, default: T | None
    ) -> Any:
        self._asked.append(name)
        if name not in self._content:
            if default is None:
                raise SpecError(self.key(name), "it is missing", "add it")
            return default
        value = self._content.pop(name)
        # TOML's true is an int to Python.
        if not isinstance(value, kinds) or (
            isinstance(value, bool) and named is not bool
        ):
            remedy = f"give {_NAMES[named]}"
            raise SpecError(self.key(name), f"{value!r} does not fit", remedy)
        return value
