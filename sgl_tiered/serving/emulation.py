"""What ``--tiered-emulate`` says: tiers that are slowed down or fail, as values.

The text is a list of sections, ``TIERS:ITEMS;TIERS:ITEMS``. ``TIERS`` is one tier or
several joined by ``+``, which then share the section's link (host and CXL memory
behind one PCIe link, say). A tier may stand in several sections: it pays for each.
Items, separated by commas:

- ``bandwidth=2GB`` per second, both directions together; ``read-bandwidth`` and
  ``write-bandwidth`` for a direction of its own;
- ``latency=0.001`` seconds, added to the end of every operation;
- ``delay=0.01``, ``delay=0.01..0.05`` (drawn evenly), ``delay=0.5@0.01`` (with that
  probability: spikes); may be repeated;
- ``fault=KIND[@PROBABILITY]`` and any of ``/load``, ``/store``, ``/after=OPERATIONS``,
  ``/for=SECONDS``, ``/times=OPERATIONS``; may be repeated, the first that strikes
  counts;
- ``seed=7`` of everything that is drawn; default 0.

An operation is one read or write; on a tier of memory, the copy of one layer of pages.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.sizes import parse_size
from sgl_tiered.errors import ConfigError

__all__ = [
    "DISK_KINDS",
    "MEMORY_KINDS",
    "Delay",
    "Emulation",
    "Fault",
    "emulation_text",
    "parse_emulation",
]

DISK_KINDS = ("error", "partial", "corrupt", "zero", "hang", "full")
"""What can go wrong on a medium behind system calls; ``full`` strikes writes only."""
MEMORY_KINDS = ("error", "partial", "corrupt", "zero", "swap", "hang")
"""What can go wrong on a tier of memory. Wrong bytes there reach the device, for
memory is trusted: those are for the negative control of the tests."""
_MEMORY = (TierId.HOST, TierId.CXL)
_DIRECTIONS = ("load", "store")
_REMEDY = (
    "write for example host:bandwidth=2GB,latency=0.001;disk:read-bandwidth=500MB,"
    "delay=0.01..0.02,fault=error@0.1/load"
)


@dataclass(frozen=True, slots=True)
class Delay:
    """Time added to an operation.

    Attributes:
        low_s, high_s: drawn evenly between them.
        probability: that an operation is delayed at all.
    """

    low_s: float
    high_s: float
    probability: float = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: ``error`` (the operation fails), ``partial`` (a part of it is done),
            ``corrupt`` (one bit flipped), ``zero`` (a page zeroed), ``swap`` (another
            page's bytes), ``hang`` (does not end before the fault does), ``full``.
        probability: that an operation is struck.
        direction: ``load`` or ``store``; empty for both.
        after: operations in its direction that pass before the first is struck.
        duration_s: how long the fault lasts, from its being switched on.
        times: operations that are struck at most.
    """

    kind: str
    probability: float = 1.0
    direction: str = ""
    after: int = 0
    duration_s: float = math.inf
    times: float = math.inf


@dataclass(frozen=True, slots=True)
class Emulation:
    """One section.

    Attributes:
        tiers: whom it concerns; they share the link.
        bandwidth_bytes_per_s: of both directions together; infinite for no limit.
        latency_s: added to every operation.
        read_bytes_per_s, write_bytes_per_s: of one direction.
        delays: further time, drawn for each operation.
        faults: what goes wrong.
        seed: of delays and faults.
        text: the section as it was written, for reports.
    """

    tiers: tuple[TierId, ...]
    bandwidth_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    read_bytes_per_s: float = math.inf
    write_bytes_per_s: float = math.inf
    delays: tuple[Delay, ...] = ()
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    text: str = ""

    @property
    def has_link(self) -> bool:
        """Whether it slows by a bandwidth or a latency."""
        limits = (
            self.bandwidth_bytes_per_s,
            self.read_bytes_per_s,
            self.write_bytes_per_s,
        )
        return self.latency_s > 0 or any(map(math.isfinite, limits))


def parse_emulation(
    text: str, tiers: Collection[TierId], setting: str = "--tiered-emulate"
) -> tuple[Emulation, ...]:
    """Read the text of the flag; see the module's docstring for its grammar.

    Args:
        text: sections; an empty one says nothing.
        tiers: those that can be emulated.
        setting: the flag, for the error.

    Raises:
        ConfigError: names the first part that is not understood.
    """
    known = {tier.label: tier for tier in tiers}
    parts = [part.strip() for part in text.split(";")]
    return tuple(_section(part, known, setting) for part in parts if part)


def emulation_text(sections: Iterable[Emulation], tier: TierId) -> str:
    """Return what a tier's sections say, in the words of the flag; empty for none."""
    return "; ".join(one.text for one in sections if tier in one.tiers)


def _section(part: str, known: dict[str, TierId], setting: str) -> Emulation:
    names, _, rest = part.partition(":")
    items = [item.strip() for item in rest.split(",") if item.strip()]
    labels = [name.strip() for name in names.split("+")]
    wrong = [label for label in labels if label not in known]
    if wrong or not items or len(set(labels)) != len(labels):
        raise _not_understood(setting, part)
    chosen = tuple(known[label] for label in labels)
    numbers: dict[str, float] = {}
    delays: list[Delay] = []
    faults: list[Fault] = []
    for item in items:
        key, _, value = item.partition("=")
        if key == "delay":
            delays.append(_delay(value, part, setting))
        elif key == "fault":
            faults.append(_fault(value, chosen, part, setting))
        elif key in numbers or key not in _FIELDS:
            raise _not_understood(setting, part)
        elif key.endswith("bandwidth"):
            numbers[key] = float(parse_size(setting, value))
            if numbers[key] <= 0:
                raise ConfigError(setting, f"{part!r} is not positive", _REMEDY)
        else:
            numbers[key] = _number(value, part, setting)
    seed = numbers.pop("seed", 0.0)
    if seed != int(seed):
        raise _not_understood(setting, part)
    fields = {_FIELDS[key]: value for key, value in numbers.items()}
    return Emulation(
        tiers=chosen,
        delays=tuple(delays),
        faults=tuple(faults),
        seed=int(seed),
        text=part,
        **fields,
    )


_FIELDS = {
    "bandwidth": "bandwidth_bytes_per_s",
    "read-bandwidth": "read_bytes_per_s",
    "write-bandwidth": "write_bytes_per_s",
    "latency": "latency_s",
    "seed": "seed",
}


def _delay(value: str, part: str, setting: str) -> Delay:
    span, has_probability, probability = value.partition("@")
    low, has_high, high = span.partition("..")
    low_s = _number(low, part, setting)
    high_s = _number(high, part, setting) if has_high else low_s
    if high_s < low_s:
        raise ConfigError(setting, f"{part!r} has a delay that ends early", _REMEDY)
    return Delay(
        low_s,
        high_s,
        _probability(probability, part, setting) if has_probability else 1.0,
    )


def _fault(value: str, tiers: tuple[TierId, ...], part: str, setting: str) -> Fault:
    head, *options = value.split("/")
    kind, has_probability, chance = head.partition("@")
    for tier in tiers:
        kinds = MEMORY_KINDS if tier in _MEMORY else DISK_KINDS
        if kind not in kinds:
            raise ConfigError(
                setting,
                f"{kind!r} is not a fault of the {tier.label} tier",
                f"use {', '.join(kinds)}",
            )
    probability = _probability(chance, part, setting) if has_probability else 1.0
    direction, after, duration_s, times = "", 0, math.inf, math.inf
    for option in options:
        key, _, number = option.partition("=")
        if option in _DIRECTIONS:
            direction = option
        elif key == "after":
            after = int(_number(number, part, setting))
        elif key == "for":
            duration_s = _number(number, part, setting)
        elif key == "times":
            times = _number(number, part, setting)
        else:
            raise _not_understood(setting, part)
    return Fault(kind, probability, direction, after, duration_s, times)


def _probability(value: str, part: str, setting: str) -> float:
    probability = _number(value, part, setting)
    if probability > 1.0:
        raise ConfigError(setting, f"{part!r} has a probability above 1", _REMEDY)
    return probability


def _number(value: str, part: str, setting: str) -> float:
    """Return a finite number that is not negative."""
    try:
        number = float(value)
    except ValueError:
        raise _not_understood(setting, part) from None
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(setting, f"{part!r} is not positive", _REMEDY)
    return number


def _not_understood(setting: str, part: str) -> ConfigError:
    return ConfigError(setting, f"{part!r} is not understood", _REMEDY)
