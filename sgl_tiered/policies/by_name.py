"""A policy by its name, as flags spell it, or a sentence that lists the choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from sgl_tiered.errors import ConfigError

__all__ = ["maker_of"]

T = TypeVar("T")


def maker_of(makers: Mapping[str, T], setting: str, name: str) -> T:
    """Return what makes the policy of this name.

    Raises:
        ConfigError: none has this name; names the setting and lists the choices.
    """
    maker = makers.get(name)
    if maker is None:
        raise ConfigError(
            setting, f"{name!r} is not known", f"choose one of {', '.join(makers)}"
        )
    return maker
