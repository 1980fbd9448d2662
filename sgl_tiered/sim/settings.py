"""What a setting of a simulation means, in which unit, and what it may be.

Fields of ``SimSpec`` are the rows: it checks its values against them, and the command
line makes its help of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.length.registry import make_length_predictor
from sgl_tiered.sim.hardware import find_hardware

__all__ = ["Setting", "check_setting", "flag_of", "refusal"]

_MAX = 2**63 - 1
"""Of any number; not a number is not below it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        section: of a TOML file, and of the help.
        text: what it means; the default stands behind it in the help.
        unit: of a number, or what else is to be given.
        least, most: bounds of a number; ``above`` excludes the lower one.
        choices: of a word; empty for any.
    """

    section: str
    text: str
    unit: str = "N"
    least: float = 0
    most: float = _MAX
    above: bool = False
    choices: tuple[str, ...] = ()


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def refusal(name: str, problem: str, remedy: str) -> ConfigError:
    """Return an error that names a setting as a flag and as a file have it."""
    flag = flag_of(name)
    spelt = flag if flag[2:] == name else f"{flag} ({name})"
    return ConfigError(spelt, problem, remedy)


def check_setting(name: str, setting: Setting, value: object) -> None:
    """Check one value of the right type.

    Raises:
        ConfigError: it is out of bounds, or no choice.
    """
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        low = value > setting.least if setting.above else value >= setting.least
        if not (low and value <= setting.most):
            raise refusal(name, f"{value!r} is out of range", f"give {_range(setting)}")
    elif setting.choices and value not in setting.choices:
        choices = ", ".join(choice or "''" for choice in setting.choices)
        raise refusal(name, f"{value!r} is not known", f"choose one of {choices}")
    elif name == "hardware":
        find_hardware(str(value))
    elif name == "length_predictor":
        make_length_predictor(str(value))


def _range(setting: Setting) -> str:
    unit = "" if setting.unit == "N" else f" ({setting.unit})"
    low = f"a number {'above' if setting.above else 'of at least'} {setting.least:g}"
    high = "" if setting.most == _MAX else f" and at most {setting.most:g}"
    return low + high + unit
