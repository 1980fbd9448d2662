"""ServeGen: the clients of a production service as rates and length histograms.

A tar archive or folder has ``chunk-N-trace.csv`` and ``chunk-N-dataset.json`` for each
client N. A row of the trace is a window: its start in seconds, requests per second, the
CV of the gaps, their family (Gamma or Weibull, empty in a silent window) and the
family's shape and scale. The data set gives for each longer window, by its start, the
histograms of ``input_tokens``, ``output_tokens`` and ``reason_ratio``: dictionaries of
value to probability, each written as a string.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered_workloads.traces.base import Int64s, TraceError

__all__ = ["Float64s", "LengthWindow", "RateWindow", "ServeGenClient", "read_servegen"]

Float64s = npt.NDArray[np.float64]

_MEMBER = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)$")
_FAMILIES = ("Gamma", "Weibull")
_MAX_NUMBER = 1e15


@dataclass(frozen=True, slots=True)
class RateWindow:
    """A stretch of time with one arrival process.

    Attributes:
        start_s: of the window.
        rate_per_s: mean requests per second; 0 where the client is silent.
        cv: measured coefficient of variation of the gaps.
        family: Gamma or Weibull; empty where silent.
        shape: of the family; 0 where silent.
    """

    start_s: float
    rate_per_s: float
    cv: float
    family: str
    shape: float


@dataclass(frozen=True, slots=True, eq=False)
class LengthWindow:
    """A stretch of time with one distribution of lengths, independent of each other.

    Attributes:
        start_s: of the window.
        input_tokens: int64 [n], values.
        input_share: float64 [n], their probabilities, sum 1.
        output_tokens: int64 [m], values; the reasoning is part of the answer.
        output_share: float64 [m].
    """

    start_s: float
    input_tokens: Int64s
    input_share: Float64s
    output_tokens: Int64s
    output_share: Float64s


@dataclass(frozen=True, slots=True, eq=False)
class ServeGenClient:
    """One client of the service.

    Attributes:
        number: of the client.
        window_s: length of a rate window.
        rates: windows in order.
        lengths: windows in order; silent ones left out.
    """

    number: int
    window_s: float
    rates: tuple[RateWindow, ...]
    lengths: tuple[LengthWindow, ...]

    def lengths_at(self, start_s: float) -> LengthWindow:
        """Return the lengths that hold at a time."""
        current = [window for window in self.lengths if window.start_s <= start_s]
        return current[-1] if current else self.lengths[0]


def read_servegen(path: Path) -> tuple[ServeGenClient, ...]:
    """Read all clients, by number, from a (gzipped) tar archive or a folder.

    Raises:
        TraceError: a file is missing or not in this format.
    """
    path = Path(path)
    members = _members(path)
    numbers = sorted({number for number, _ in members})
    if not numbers:
        raise TraceError(
            path, None, "no chunk-N-trace.csv in it", "give ServeGen's client data"
        )
    clients = []
    for number in numbers:
        rows = members.get((number, "trace.csv"))
        histograms = members.get((number, "dataset.json"))
        if rows is None or histograms is None:
            raise TraceError(
                path,
                None,
                f"client {number} has only one of its two files",
                "unpack the archive whole",
            )
        rates = _rates(path, number, rows)
        clients.append(
            ServeGenClient(
                number=number,
                window_s=rates[1].start_s - rates[0].start_s,
                rates=rates,
                lengths=_lengths(path, number, histograms, rates),
            )
        )
    return tuple(clients)


def _members(path: Path) -> dict[tuple[int, str], bytes]:
    found: dict[tuple[int, str], bytes] = {}
    try:
        if path.is_dir():
            for file in sorted(path.rglob("chunk-*")):
                match = _MEMBER.search(file.name)
                if match:
                    found[int(match[1]), match[2]] = file.read_bytes()
            return found
        with tarfile.open(path) as archive:
            for member in archive:
                match = _MEMBER.search(member.name)
                content = archive.extractfile(member) if match else None
                if match and content is not None:
                    found[int(match[1]), match[2]] = content.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise TraceError(
            path, None, f"cannot be read ({error})", "give the archive or its folder"
        ) from None
    return found


def _rates(path: Path, number: int, content: bytes) -> tuple[RateWindow, ...]:
    name = f"chunk-{number}-trace.csv"
    windows: list[RateWindow] = []
    try:
        lines = list(csv.reader(io.StringIO(content.decode())))
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(
            path, None, f"{name} is not CSV ({error})", "unpack the archive again"
        ) from None
    for line, values in enumerate(lines, 1):
        window: RateWindow | None
        try:
            start, rate, cv, family, shape, _ = values
            window = RateWindow(
                float(start), float(rate), float(cv), family, float(shape)
            )
        except ValueError:
            window = None
        else:
            numbers = (window.start_s, window.rate_per_s, window.cv, window.shape)
            if not all(map(math.isfinite, numbers)) or window.rate_per_s < 0:
                window = None
        active = window is not None and window.rate_per_s > 0
        if window is None or (
            active and not (window.family in _FAMILIES and window.shape > 0)
        ):
            raise TraceError(
                path,
                None,
                f"{name}, line {line}: {','.join(values)[:60]!r} is no window",
                "a window is start,rate,cv,Gamma or Weibull,shape,scale",
            )
        windows.append(window)
    starts = np.array([window.start_s for window in windows])
    if len(windows) < 2 or not np.all(np.diff(starts) > 0):
        raise TraceError(
            path, None, f"{name}: windows are not in order", "sort them by start"
        )
    return tuple(windows)


def _lengths(
    path: Path, number: int, content: bytes, rates: tuple[RateWindow, ...]
) -> tuple[LengthWindow, ...]:
    try:
        table = json.loads(content)
        windows = [
            _window(float(start), histograms) for start, histograms in table.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TraceError(
            path,
            None,
            f"chunk-{number}-dataset.json has no histograms of lengths",
            "give ServeGen's own file",
        ) from None
    kept = sorted((w for w in windows if w is not None), key=lambda w: w.start_s)
    if not kept and any(window.rate_per_s > 0 for window in rates):
        raise TraceError(
            path,
            None,
            f"client {number} sends requests but has no histogram of lengths",
            "remove that client",
        )
    return tuple(kept)


def _window(start_s: float, histograms: Mapping[str, Any]) -> LengthWindow | None:
    if not math.isfinite(start_s):
        raise ValueError("a window begins at no time")
    inputs = _numbers(histograms["input_tokens"])
    outputs = _numbers(histograms["output_tokens"])
    if inputs.size == 0 or outputs.size == 0:
        return None
    return LengthWindow(start_s, *_histogram(inputs), *_histogram(outputs))


def _numbers(text: str) -> Float64s:
    # float64 [n, 2]: value and probability. Cut by hand: literal_eval takes seconds.
    flat = text.strip("{} \n").replace(":", ",")
    numbers = [float(number) for number in flat.split(",")] if flat else []
    return np.array(numbers, dtype=np.float64).reshape(-1, 2)


def _histogram(numbers: Float64s) -> tuple[Int64s, Float64s]:
    # Not a number fails every comparison.
    if not (np.abs(numbers) < _MAX_NUMBER).all():
        raise ValueError("a histogram has a number without end")
    values, share = numbers[:, 0].astype(np.int64), numbers[:, 1]
    if values.min() < 0 or share.min() < 0 or not share.sum() > 0:
        raise ValueError("a histogram has a negative entry, or none")
    return np.maximum(values, 1), share / share.sum()
