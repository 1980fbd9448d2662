"""What all targets share: mutations of valid inputs, and the count of their ends.

A target hands inputs to an entry point of the product. Two ends are allowed: it takes
the input, and what it makes of it obeys the target's laws; or it refuses it in the way
that its documentation says. ``WrongError`` is raised where a law is broken; any other
exception is a crash. A fault is a check of the product that is taken away: the same
inputs must then find something.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

__all__ = [
    "Fault",
    "Tally",
    "Target",
    "WrongError",
    "as_json",
    "demand",
    "drawn",
    "find_fault",
    "is_sentence",
    "mangled",
    "mutated",
    "pick",
    "run_target",
]

Rng = np.random.Generator
MAX_KEPT = 5
"""Findings of a target that are shown."""
_CHUNK = 100
_NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63) - 1),
    *(10**400, 0.5, -0.0, 1e-300, 1e308, math.inf, -math.inf, math.nan, 1.0),
)
_TEXTS = (
    *("", " ", "\0", "a\0b", "\N{ARABIC-INDIC DIGIT THREE}", "\ud800", "x" * 5000),
    *("9" * 5000, "-1", "1e999", "nan", "[::1", "../..", "\r\n", "\N{GRINNING FACE}"),
)


class WrongError(Exception):
    """Taken, although it must not be; or something wrong was made of it."""


def demand(is_so: object, sentence: str) -> None:
    """Raise WrongError unless a law holds."""
    if not is_so:
        raise WrongError(sentence)


def is_sentence(text: str) -> bool:
    """Return whether a refusal is one line that says something."""
    return bool(text.strip()) and "\n" not in text and len(text) < 20_000


@dataclass(frozen=True, slots=True)
class Fault:
    """A check that is taken away."""

    name: str
    remove: Callable[[pytest.MonkeyPatch], None]


@dataclass(slots=True)
class Tally:
    """What came of the inputs of one target.

    Attributes:
        inputs, accepted, refused, crashes, wrong: numbers of inputs.
        findings: the first crashes and wrong ends, with their inputs.
    """

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    crashes: int = 0
    wrong: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def found(self) -> int:
        """Inputs that ended in no allowed way."""
        return self.crashes + self.wrong

    def note(self, error: BaseException, shown: object) -> None:
        """Count one that did."""
        is_wrong = isinstance(error, (WrongError, AssertionError))
        self.wrong += is_wrong
        self.crashes += not is_wrong
        if len(self.findings) < MAX_KEPT:
            text = f"{type(error).__name__}: {str(error)[:300]} <- {repr(shown)[:1500]}"
            self.findings.append(text)


class Target:
    """One entry point of the product; used as a context.

    Attributes:
        name: for the command line and the report.
        faults: that its inputs must find.
    """

    name = ""
    faults: tuple[Fault, ...] = ()

    def __enter__(self) -> Target:
        """Make folders, applications and valid inputs."""
        return self

    def __exit__(self, *error: object) -> None:
        """Remove them."""

    def inputs(self, rng: Rng) -> Iterator[Any]:
        """Yield inputs without end."""
        raise NotImplementedError

    def check(self, given_input: Any) -> bool:
        """Hand one over: True if it was taken, False if it was refused."""
        raise NotImplementedError

    def drive(self, num: int, number: int, tally: Tally, *, once: bool) -> None:
        """Run ``num`` inputs of the seed ``number``; with ``once``, to a finding."""
        source = self.inputs(np.random.default_rng(number))
        for _ in range(num):
            value = next(source)
            tally.inputs += 1
            try:
                taken = self.check(value)
            except Exception as error:  # noqa: BLE001 - anything is a finding
                tally.note(error, value)
            else:
                tally.accepted += taken
                tally.refused += not taken
            if once and tally.found:
                return


def run_target(target: Target, num: int, number: int) -> Tally:
    """Return what came of ``num`` inputs."""
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with target:
            target.drive(num, number, tally, once=False)
    return tally


def find_fault(target: Target, fault: Fault, num: int, number: int) -> int:
    """Return how many inputs it took to find a fault; 0 if ``num`` did not."""
    tally = Tally()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        with target:
            fault.remove(patch)
            target.drive(num, number, tally, once=True)
    return tally.inputs if tally.found else 0


def drawn(strategy: st.SearchStrategy[Any], rng: Rng) -> list[Any]:
    """Return some values of a Hypothesis strategy."""
    found: list[Any] = []

    @seed(int(rng.integers(2**32)))
    @settings(
        max_examples=_CHUNK,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def take(value: Any) -> None:
        found.append(value)

    take()
    return found


def pick(rng: Rng, some: Any) -> Any:
    """Return one of some."""
    return some[int(rng.integers(len(some)))]


def as_json(value: Any) -> bytes:
    """Return JSON, also of what JSON does not allow, such as NaN."""
    return json.dumps(value).encode()


def mutated(rng: Rng, value: Any, *, num: int | None = None) -> Any:
    """Return a copy of a JSON value with 1 to 3 places changed, now and then none."""
    whole = {"": _copy(value)}
    for _ in range(int(rng.integers(4)) if num is None else num):
        places = list(_places(whole))
        holder, key = pick(rng, places)
        _change(rng, holder, key, places)
        if "" not in whole:
            return None
    return whole[""]


def mangled(rng: Rng, raw: bytes) -> bytes:
    """Return bytes with a few pieces changed, cut off, doubled or zeroed."""
    data = bytearray(raw)
    for _ in range(int(rng.integers(1, 4))):
        if not data:
            return bytes(data)
        start = int(rng.integers(len(data)))
        stop = min(len(data), start + int(rng.integers(1, 9)))
        kind = int(rng.integers(6))
        if kind == 0:
            data[start] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            del data[start:]
        elif kind == 2:
            data[start:start] = data[start:stop]
        elif kind == 3:
            data[start:stop] = bytes(stop - start)
        elif kind == 4:
            del data[start:stop]
        else:
            data[start:stop] = rng.bytes(stop - start)
    return bytes(data)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(each) for each in value]
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _change(rng: Rng, holder: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
    value = holder[key]
    kind = int(rng.integers(10))
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, its = pick(rng, places)
        holder[key] = _copy(other[its])
    elif kind == 2:
        holder[key] = pick(rng, ([], {}, None, True, False, [value], {"": value}))
    elif kind == 3 and isinstance(holder, list):
        holder.insert(key, _copy(value))
    elif kind == 3:
        holder[pick(rng, ("version", "unknown", "", "\0", "type"))] = value
    elif kind == 4 and rng.random() < 0.1:
        for _ in range(int(rng.integers(2, 250))):
            value = [value]
        holder[key] = value
    elif kind in (5, 6) and _is_small(value):
        steps = (value + 1, value - 1, -value, value * 2**32, str(value), value / 2)
        holder[key] = pick(rng, steps)
    elif kind in (5, 6) and isinstance(value, str) and value:
        at = int(rng.integers(len(value)))
        steps = (value[:at], value + value, value[:at] + pick(rng, _TEXTS) + value[at:])
        holder[key] = pick(rng, steps)
    else:
        holder[key] = pick(rng, _NUMBERS if rng.random() < 0.6 else _TEXTS)


def _is_small(value: Any) -> bool:
    # Not a number fails every comparison.
    return type(value) in (int, float) and -1e200 < value < 1e200
