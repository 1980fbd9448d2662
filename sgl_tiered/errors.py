"""The error tree. Expected negatives (miss, full, slow, dead tier) are values.

TieredError
├── ConfigError               a flag, key or file is wrong (also a ValueError)
├── EngineCompatibilityError  this SGLang does not fit (also a RuntimeError)
├── TierUnavailableError      a tier cannot be opened at all (also an OSError)
└── TransportUnavailableError no bytes or messages can be sent (also an OSError)
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "EngineCompatibilityError",
    "TierUnavailableError",
    "TieredError",
    "TransportUnavailableError",
]


class TieredError(Exception):
    """Root of every error that sgl-tiered raises."""


class ConfigError(TieredError, ValueError):
    """A setting is wrong: says which one, what is wrong and what to do.

    Attributes:
        setting: the flag or key, as the user writes it.
        problem: what is wrong with it.
        remedy: what to do about it.
    """

    def __init__(self, setting: str, problem: str, remedy: str) -> None:
        self.setting = setting
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{setting}: {problem}; {remedy}.")


class EngineCompatibilityError(TieredError, RuntimeError):
    """The plugin cannot attach to this SGLang, or to this model under it."""


class TierUnavailableError(TieredError, OSError):
    """A tier cannot be opened; the message says what, where and what to do."""


class TransportUnavailableError(TieredError, OSError):
    """A transport cannot be opened; the message says what, and what to do."""
