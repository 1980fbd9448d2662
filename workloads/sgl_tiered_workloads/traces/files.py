"""Lines and rows of trace files, plain or gzipped, with every complaint located.

A reader asks a ``Row`` for typed fields; whatever is absent, of the wrong type or out
of range becomes a ``TraceError`` that names the file, the line and the field.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from sgl_tiered_workloads.traces.base import TraceError

__all__ = [
    "Row",
    "csv_rows",
    "json_document",
    "json_list",
    "json_rows",
    "read_bytes",
    "text_lines",
]

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a file, asked for typed fields.

    Attributes:
        path: of the file.
        line: from 1; None where the format has no lines.
        fields: the record.
        item: its place from 0, in a file that is one list.
    """

    path: Path
    line: int | None
    fields: Mapping[str, Any]
    item: int | None = None

    def wrong(self, problem: str, remedy: str) -> TraceError:
        """Return an error that points at this row."""
        if self.item is not None:
            problem = f"item {self.item}: {problem}"
        return TraceError(self.path, self.line, problem, remedy)

    def integer(self, name: str, minimum: int) -> int:
        """Return a whole number of at least ``minimum`` that 64 bits hold.

        Raises:
            TraceError: the field is absent, not a whole number, or out of range.
        """
        value = self._present(name)
        if isinstance(value, str):
            try:
                value = int(value)
            except ValueError:
                raise self._typed(name, "a whole number", value) from None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._typed(name, "a whole number", value)
        if not minimum <= value <= _MAX_INTEGER:
            wanted = f"at least {minimum}" if value < minimum else "below 2^63"
            raise self._typed(name, wanted, value)
        return value

    def number(self, name: str, minimum: float = 0.0) -> float:
        """Return a finite number of at least ``minimum``.

        Raises:
            TraceError: the field is absent, not a finite number, or smaller.
        """
        value = self._present(name)
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            raise self._typed(name, "a number", value) from None
        if not math.isfinite(number):
            raise self._typed(name, "a finite number", value)
        if number < minimum:
            raise self._typed(name, f"at least {minimum:g}", value)
        return number

    def text(self, name: str) -> str:
        """Return a string.

        Raises:
            TraceError: the field is absent or not a string.
        """
        value = self._present(name)
        if not isinstance(value, str):
            raise self._typed(name, "a string", value)
        return value

    def items(self, name: str) -> list[Any]:
        """Return a list.

        Raises:
            TraceError: the field is absent or not a list.
        """
        value = self._present(name)
        if not isinstance(value, list):
            raise self._typed(name, "a list", value)
        return value

    def rows(self, name: str) -> list[Row]:
        """Return a list of objects as rows on the same line.

        Raises:
            TraceError: the field is absent or not a list of objects.
        """
        items = self.items(name)
        for fields in items:
            if not isinstance(fields, dict):
                raise self._typed(name, "a list of objects", fields)
        return [Row(self.path, self.line, fields, self.item) for fields in items]

    def _present(self, name: str) -> Any:
        if name not in self.fields:
            raise self.wrong(
                f"the field {name!r} is missing",
                "check that the file has the format that this reader reads",
            )
        return self.fields[name]

    def _typed(self, name: str, wanted: str, value: Any) -> TraceError:
        shown = repr(value)[:60]
        return self.wrong(
            f"the field {name!r} should be {wanted} but is {shown}",
            "repair or remove that record",
        )


def read_bytes(path: Path) -> bytes:
    """Return a file's content, unpacked where it is gzip by content.

    Raises:
        TraceError: it cannot be read, or is a damaged gzip file.
    """
    with _open(path) as source:
        return _guarded_read(path, source)


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end), blank lines left out.

    Raises:
        TraceError: the file cannot be read, is damaged, or is not UTF-8 text.
    """
    number = 0
    with _open(path) as source, io.TextIOWrapper(source, "utf-8") as text:
        while True:
            try:
                line = text.readline()
            except (OSError, EOFError, zlib.error) as damage:
                raise _damaged(path, damage) from None
            except UnicodeDecodeError:
                raise TraceError(
                    path, number + 1, "not UTF-8 text", "give the trace file itself"
                ) from None
            if not line:
                return
            number += 1
            if line.strip():
                yield number, line.rstrip("\r\n")


def json_rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON-lines file.

    Raises:
        TraceError: a line is not a JSON object, or the file has none.
    """
    empty = True
    for number, line in text_lines(path):
        empty = False
        try:
            fields = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise TraceError(
                path,
                number,
                f"not JSON ({error.msg})",
                "the file needs one JSON object per line; was it cut off?",
            ) from None
        if not isinstance(fields, dict):
            raise TraceError(
                path, number, "not a JSON object", "put one JSON object on each line"
            )
        yield Row(path, number, fields)
    if empty:
        raise TraceError(path, None, "the file is empty", "give a file with records")


def csv_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a CSV file whose header has at least ``columns``.

    Raises:
        TraceError: the header lacks a column, or a row has another width.
    """
    lines = text_lines(path)
    _, first = next(lines, (0, ""))
    header = _cells(path, 1, first)
    missing = [column for column in columns if column not in header]
    if missing:
        raise TraceError(
            path,
            1,
            f"the header lacks {', '.join(missing)}",
            f"the first line must name the columns {', '.join(columns)}",
        )
    empty = True
    for number, line in lines:
        empty = False
        values = _cells(path, number, line)
        if len(values) != len(header):
            raise TraceError(
                path,
                number,
                f"{len(values)} values under {len(header)} columns",
                "repair or remove that line",
            )
        yield Row(path, number, dict(zip(header, values, strict=True)))
    if empty:
        raise TraceError(path, None, "no rows below the header", "give a whole file")


def _cells(path: Path, number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error as error:
        raise TraceError(
            path, number, f"not CSV ({error})", "repair or remove that line"
        ) from None


def json_list(path: Path) -> list[Row]:
    """Return the objects of a file that is one JSON list.

    Raises:
        TraceError: it is not a list of objects, or is empty.
    """
    items = json_document(path)
    if not isinstance(items, list) or not items:
        raise TraceError(
            path, None, "not a JSON list with records", "give the data set's own file"
        )
    for number, fields in enumerate(items):
        if not isinstance(fields, dict):
            raise TraceError(
                path, None, f"item {number} is not an object", "remove that item"
            )
    return [Row(path, None, fields, number) for number, fields in enumerate(items)]


def json_document(path: Path) -> Any:
    """Return a file that is one JSON value.

    Raises:
        TraceError: it is not JSON.
    """
    try:
        return orjson.loads(read_bytes(path).decode("utf-8"))
    except orjson.JSONDecodeError as error:
        raise TraceError(
            path,
            error.lineno,
            f"not JSON ({error.msg})",
            "give the data set's own file; was it cut off?",
        ) from None
    except UnicodeDecodeError:
        raise TraceError(
            path, None, "not UTF-8 text", "give the data set's own file"
        ) from None


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    try:
        with path.open("rb") as probe:
            zipped = probe.read(2) == _GZIP_MAGIC
        if zipped:
            return gzip.open(path, "rb")
        return path.open("rb")
    except OSError as error:
        raise TraceError(
            path, None, error.strerror or "cannot be opened", "check the path"
        ) from None


def _guarded_read(path: Path, source: gzip.GzipFile | io.BufferedReader) -> bytes:
    try:
        return source.read()
    except (OSError, EOFError, zlib.error) as damage:
        raise _damaged(path, damage) from None


def _damaged(path: Path, damage: Exception) -> TraceError:
    return TraceError(path, None, f"damaged ({damage})", "fetch the file again")
