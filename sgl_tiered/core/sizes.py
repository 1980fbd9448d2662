"""Sizes as people write them: ``4GB``, ``512MiB``."""

from __future__ import annotations

import re

from sgl_tiered.errors import ConfigError

__all__ = ["parse_size"]

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_MAX_BYTES = 2**63 - 1
"""No file and no memory is larger."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(setting: str, value: object) -> int:
    """Return bytes from a number or a text such as ``4GB`` or ``512MiB``.

    Raises:
        ConfigError: the text is not a size.
    """
    number: float | None = None
    unit = ""
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif match := _SIZE.fullmatch(str(value).strip()):
        number, unit = float(match.group(1)), match.group(2).upper()
    if number is None or number < 0 or unit not in _UNITS:
        raise ConfigError(
            setting, f"{value!r} is not a size", "write for example 512MB, 4GiB or 2TB"
        )
    if number * _UNITS[unit] > _MAX_BYTES:
        raise ConfigError(setting, "is more than any machine has", "give less")
    return int(number * _UNITS[unit])
