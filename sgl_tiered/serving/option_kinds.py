"""Kinds of settings: what may be given for one, and what a server makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sgl_tiered.core.sizes import parse_size
from sgl_tiered.errors import ConfigError

__all__ = [
    "Kind",
    "absolute",
    "by_flag",
    "choice",
    "count",
    "number",
    "path",
    "seconds",
    "share",
    "size",
    "text",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a setting may be.

    Attributes:
        says: what may be given, for people.
        read: makes a value of what was given by the flag or in a file; is called with
            the flag as well, and raises ConfigError.
        word: type of the flag's word on the command line.
        choices: words that it may be; empty for any.
    """

    says: str
    read: Callable[[str, Any], Any]
    word: type = str
    choices: tuple[Any, ...] = ()


def by_flag(flag: str, check: Callable[[], T]) -> T:
    """Return what a check of another room returns; it is refused by our flag's name."""
    try:
        return check()
    except ConfigError as error:
        raise ConfigError(flag, error.problem, error.remedy) from None


def text(says: str, read: Callable[[str, str], Any] | None = None) -> Kind:
    """Return the kind of any text, or of one that ``read`` understands."""
    return Kind(
        says, lambda flag, value: read(flag, str(value)) if read else str(value)
    )


def absolute(flag: str, name: str) -> Path:
    """Return a path in full; a tilde stands for a home."""
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            flag, f"{name!r} begins with a home that is not known", "write it in full"
        ) from None


def path(says: str, check: Callable[[Path], Any]) -> Kind:
    """Return the kind of a path, made absolute, that passes a check."""

    def read(flag: str, value: object) -> Path:
        found = absolute(flag, str(value))
        by_flag(flag, lambda: check(found))
        return found

    return Kind(says, read)


def choice(names: Sequence[Any], make: Callable[[Any], Any] = str) -> Kind:
    """Return the kind of one word of several, from which ``make`` makes the value."""

    def read(flag: str, value: Any) -> Any:
        if value not in names:
            words = ", ".join(map(str, names))
            raise ConfigError(flag, f"{value!r} is unknown", f"use {words}")
        return make(value)

    said = ", ".join(f"`{name}`" for name in names)
    return Kind(said, read, type(names[0]), tuple(names))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(
    says: str,
    fits: Callable[[Any], bool],
    problem: str,
    remedy: str,
    make: type[int] | type[float] = float,
) -> Kind:
    """Return the kind of a number that fits; no other one survives ``make``.

    Args:
        says: what may be given, for people.
        fits: of a number. NaN has to fail, and does in every comparison.
        problem: what is wrong with what does not fit, behind its value.
        remedy: what to give.
        make: int for whole numbers only.
    """

    def read(flag: str, value: Any) -> int | float:
        is_kind = _is_number(value) and (make is float or isinstance(value, int))
        if not is_kind or not fits(value):
            raise ConfigError(flag, f"{value!r} {problem}", remedy)
        return make(value)

    return Kind(says, read, make)


def count(low: int, high: int) -> Kind:
    """Return the kind of whole numbers within bounds, which are both allowed."""
    return number(
        f"{low:,} to {high:,}",
        lambda value: low <= value <= high,
        "is out of range",
        f"give a whole number from {low} to {high}",
        int,
    )


def share() -> Kind:
    """Return the kind of shares."""
    return number(
        "0 to 1",
        lambda value: 0.0 <= value <= 1.0,
        "is not a share",
        "give a number from 0 to 1",
    )


def seconds(zero: str = "") -> Kind:
    """Return the kind of times; ``zero`` says what to do in place of giving none."""
    # isfinite: TOML and float() know nan, which no comparison catches.
    time = number(
        "seconds",
        lambda value: math.isfinite(value) and value >= 0,
        "is not a time",
        "give seconds, 0 for never",
    )

    def read(flag: str, value: object) -> Any:
        found = time.read(flag, value)
        if zero and found == 0.0:
            raise ConfigError(flag, "is 0", zero)
        return found

    return Kind(time.says, read, float)


def size(remedy: str, auto: int | None = None) -> Kind:
    """Return the kind of sizes in bytes, above 0.

    Args:
        remedy: what to do in place of giving 0.
        auto: what the word ``auto`` stands for; None where it is no size.
    """

    def read(flag: str, value: object) -> int:
        if auto is not None and value == "auto":
            return auto
        num_bytes = parse_size(flag, value)
        if num_bytes == 0:
            raise ConfigError(flag, "is 0", remedy)
        return num_bytes

    return Kind("size" if auto is None else "size, `auto`", read)
