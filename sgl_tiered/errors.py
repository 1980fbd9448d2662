"""The error tree. Expected negatives (miss, full, slow, dead tier) are values.

TieredError
├── ConfigError               a flag, key or file is wrong (also a ValueError)
├── EngineCompatibilityError  this SGLang does not fit (also a RuntimeError)
├── RanksPartedError          ranks have decided differently (also a RuntimeError)
├── TierUnavailableError      a tier cannot be opened at all (also an OSError)
└── TransportUnavailableError no bytes or messages can be sent (also an OSError)
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "EngineCompatibilityError",
    "RanksPartedError",
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


class RanksPartedError(TieredError, RuntimeError):
    """Ranks of a server have decided differently: the server must not go on.

    Args:
        rank: whose facts do not fit what was decided where they were heard.
        num_ranks: that the server has.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(
            f"rank {rank} of {num_ranks} has decided differently from another rank; "
            "restart the server, and please report it"
        )


class TierUnavailableError(TieredError, OSError):
    """A tier cannot be opened; the message says what, where and what to do."""


class TransportUnavailableError(TieredError, OSError):
    """A transport cannot be opened; the message says what, and what to do."""
