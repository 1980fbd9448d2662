"""Parameters of a workload, from a TOML table, asked for by name and type."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Params", "WorkloadError"]


_LARGEST = 2.0**63


class WorkloadError(ValueError):
    """A workload cannot be made from its name and parameters; says why."""


class Params:
    """A table of parameters; remembers what was asked for, to refuse the rest.

    Args:
        workload: whose parameters they are, for messages.
        table: names to values.
    """

    def __init__(self, workload: str, table: Mapping[str, Any]) -> None:
        self.workload = workload
        self._table = dict(table)
        self._asked: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the parameter is given."""
        self._asked.add(name)
        return name in self._table

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """Return a whole number of at least ``minimum``.

        Raises:
            WorkloadError: it is absent without default, no whole number, or too small.
        """
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.wrong(name, f"a whole number of at least {minimum}", value)
        return value

    def number(
        self,
        name: str,
        default: float | None = None,
        minimum: float = 0.0,
        above: bool = False,
    ) -> float:
        """Return a number of at least (or ``above``) ``minimum``.

        Raises:
            WorkloadError: it is absent without default, no number, or too small.
        """
        value = self._get(name, default)
        wanted = f"a number {'above' if above else 'of at least'} {minimum:g}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, wanted, value)
        if not (value > minimum if above else value >= minimum):
            raise self.wrong(name, wanted, value)
        if not value <= _LARGEST:
            raise self.wrong(name, "a finite number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false.

        Raises:
            WorkloadError: it is neither.
        """
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """Return one of ``choices``.

        Raises:
            WorkloadError: it is none of them.
        """
        value = self._get(name, default)
        if value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}", value)
        return str(value)

    def path(self, name: str) -> Path:
        """Return the path of a file that the user has.

        Raises:
            WorkloadError: it is absent or no string.
        """
        value = self._get(name, None)
        if not isinstance(value, str | Path):
            raise self.wrong(name, "the path of a file", value)
        return Path(value)

    def integers(
        self, name: str, default: Sequence[int], minimum: int = 1
    ) -> list[int]:
        """Return a list of whole numbers, none smaller than ``minimum``.

        Raises:
            WorkloadError: it is empty or has something else in it.
        """
        value = self._get(name, list(default))
        wanted = f"a list of whole numbers of at least {minimum}"
        if not isinstance(value, list | tuple) or not value:
            raise self.wrong(name, wanted, value)
        for item in value:
            if not isinstance(item, int) or isinstance(item, bool) or item < minimum:
                raise self.wrong(name, wanted, value)
        return list(value)

    def table(self, name: str, default: Mapping[str, Any]) -> Params:
        """Return a table within the table.

        Raises:
            WorkloadError: it is no table.
        """
        value = self._get(name, dict(default))
        if not isinstance(value, Mapping):
            raise self.wrong(name, "a table", value)
        return Params(f"{self.workload}.{name}", value)

    def finish(self) -> None:
        """Refuse parameters that nobody asked for.

        Raises:
            WorkloadError: there is one.
        """
        for name in self._table:
            if name not in self._asked:
                near = difflib.get_close_matches(name, self._asked, 1)
                hint = f"; did you mean {near[0]}" if near else ""
                known = ", ".join(sorted(self._asked))
                raise WorkloadError(
                    f"{self.workload} has no parameter {name}{hint}; it takes {known}."
                )

    def wrong(self, name: str, wanted: str, value: Any) -> WorkloadError:
        """Return an error about one parameter."""
        return WorkloadError(
            f"{self.workload}: {name} must be {wanted}, not {value!r}."
        )

    def _get(self, name: str, default: Any) -> Any:
        self._asked.add(name)
        value = self._table.get(name, default)
        if value is None:
            raise WorkloadError(f"{self.workload} needs the parameter {name}.")
        return value
