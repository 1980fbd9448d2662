"""The sparsity profile: how a model's attention is spread, layer by layer.

``sgl-tiered profile`` writes it; the solver of keep ratios reads it. One JSON object
with a version, readable by people, never executed. Arrays are float64 and read-only.

Two questions are answered of every layer:

- *How much of the score matrix is next to nothing?* CaR's Figure 4: ``small_share``.
- *How few tokens hold what is read from afar?* ``held_by_top`` where the tokens are
  chosen knowing who reads them, ``held_later`` where they are chosen by what was read
  before, which is what a server can do: it is the lower of the two, as a rule, and the
  one to plan with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.json_file import JsonFile
from sgl_tiered.errors import ConfigError

__all__ = [
    "FRACTIONS",
    "PROFILE_VERSION",
    "SparsityProfile",
    "held_curve",
    "refuse_other_model",
]

PROFILE_VERSION = 1
_NEW_PROFILE = "measure this model with sgl-tiered profile"
FRACTIONS: tuple[float, ...] = (
    0.01,
    0.02,
    *(round(0.05 * step, 2) for step in range(1, 21)),
)
"""Shares of the tokens at which curves are measured: the first 5 % hold the sinks."""
_FILE = JsonFile("sparsity profile", "sgl-tiered profile", PROFILE_VERSION, 64 << 20)
_ROUNDING = 1e-6

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SparsityProfile:
    """What was measured of one model. L layers, H query heads, K fractions.

    A *visible* entry is a pair of a query and a key that is not after it. *Mass* of a
    token is the attention that it received, summed over queries and heads; *long-range*
    leaves out keys less than ``local_tokens`` positions before their query.

    Attributes:
        model: as its server calls it; for people, not compared.
        fingerprint: of architecture, weights and engine, as the cache's namespace has
            it; "" where it is not known.
        num_kv_heads: key and value heads; H is a multiple of it.
        num_tokens: tokens of all prompts together.
        num_prompts: prompts that were run.
        local_tokens: see above; 0 counts every distance.
        small_share: ``[L, H]``, of the visible entries the share below 1 % of the
            largest of their row.
        fractions: ``[K]``, increasing, in (0, 1], the last is 1.
        held_by_top: ``[L, K]``, the share of a layer's long-range mass that the
            heaviest tokens hold, at each fraction of the tokens (rounded up, prompt by
            prompt). Increasing in K, 1 at the end.
        held_later: ``[L, K]``: prompts are cut in two; of the long-range mass that the
            second part's queries give to tokens of the first, the share that those
            tokens hold that were heaviest before the cut. None if not measured.
        long_share: ``[L]``, the share of all attention that is long-range: what a layer
            can lose at all. None if not measured.
        engine: name and version of what computed, or "".
        created: date and time in UTC, ISO 8601, or "".

    Raises:
        ConfigError: a shape or a number does not fit; one sentence says which.
    """

    model: str
    fingerprint: str
    num_kv_heads: int
    num_tokens: int
    num_prompts: int
    local_tokens: int
    small_share: FloatArray
    fractions: FloatArray
    held_by_top: FloatArray
    held_later: FloatArray | None = None
    long_share: FloatArray | None = None
    engine: str = ""
    created: str = ""

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _array(name, value))
        _check(self)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.small_share.shape[0])

    @property
    def num_heads(self) -> int:
        """H: query heads."""
        return int(self.small_share.shape[1])

    def save(self, path: Path) -> None:
        """Write a file that only its owner may read; a former one is replaced whole.

        Raises:
            ConfigError: the file cannot be written.
        """
        _FILE.write(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> SparsityProfile:
        """Read and check a file.

        Raises:
            ConfigError: one sentence about the first thing that is wrong.
        """
        return cls.from_dict(_FILE.read(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the file's JSON object; shares with six digits."""
        fields: dict[str, Any] = {"version": PROFILE_VERSION}
        for name in (*_TEXTS, *_COUNTS):
            fields[name] = getattr(self, name)
        for name in _ARRAYS:
            value = getattr(self, name)
            fields[name] = None if value is None else np.round(value, 6).tolist()
        return fields

    @classmethod
    def from_dict(cls, raw: object) -> SparsityProfile:
        """Check a file's JSON object and build the value.

        Raises:
            ConfigError: one sentence about the first thing that is wrong.
        """
        found = _FILE.fields(raw)
        names = (*_TEXTS, *_COUNTS, *_ARRAYS)
        missing = [name for name in names if name not in found]
        if missing:
            raise _wrong(f"it lacks {missing[0]}")
        unknown = sorted(set(found) - set(names))
        if unknown:
            raise _wrong(f"it has the unknown key {unknown[0]}")
        return cls(**found)


_TEXTS = ("model", "fingerprint", "engine", "created")
_COUNTS = ("num_kv_heads", "num_tokens", "num_prompts", "local_tokens")
_ARRAYS = ("small_share", "fractions", "held_by_top", "held_later", "long_share")


def held_curve(
    scores: npt.NDArray[Any], mass: npt.NDArray[Any], fractions: npt.ArrayLike
) -> FloatArray:
    """Return the mass that the tokens of the highest scores hold, at each fraction.

    Args:
        scores: ``[N]``, by which tokens are chosen; equal ones, the earlier first.
        mass: ``[N]``, what they hold.
        fractions: ``[K]`` in (0, 1]; ``ceil(fraction * N)`` tokens are chosen.

    Returns:
        ``[K]`` sums, in the unit of ``mass``; the last is all of it at fraction 1.
    """
    order = np.argsort(-np.asarray(scores, np.float64), kind="stable")
    running = np.cumsum(np.asarray(mass, np.float64)[order])
    # 0.15 * 20 is a little more than 3 in floating point, and means 3.
    wanted = np.asarray(fractions, np.float64) * len(running) - 1e-9
    places: FloatArray = running[np.ceil(wanted).astype(np.int64) - 1]
    return places


def refuse_other_model(
    profile: SparsityProfile,
    flag: str,
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    fingerprint: str,
) -> None:
    """Refuse a profile of another model than the server's.

    Args:
        profile: as read from its file.
        flag: that names the file.
        num_layers, num_heads, num_kv_heads: of the server's model.
        fingerprint: of its architecture, weights and engine.

    Raises:
        ConfigError: one sentence that says what differs.
    """
    name = profile.model or "another model"
    for what, theirs, ours in (
        ("layers", profile.num_layers, num_layers),
        ("query heads", profile.num_heads, num_heads),
        ("KV heads", profile.num_kv_heads, num_kv_heads),
    ):
        if theirs != ours:
            raise ConfigError(
                flag,
                f"is of {name} with {theirs} {what}, and the server's model has {ours}",
                _NEW_PROFILE,
            )
    # An empty one is not known.
    if profile.fingerprint and profile.fingerprint != fingerprint:
        engine = f" ({profile.engine})" if profile.engine else ""
        raise ConfigError(
            flag,
            f"is of {name}, whose weights, configuration or engine{engine} differ from "
            "the server's by their digest",
            _NEW_PROFILE,
        )


def _array(name: str, value: object) -> FloatArray:
    try:
        array = np.array(value, dtype=np.float64)
    except (ValueError, TypeError):
        raise _wrong(f"{name} is no array of numbers") from None
    array.setflags(write=False)
    return array


def _check(profile: SparsityProfile) -> None:
    for name in _TEXTS:
        if not isinstance(getattr(profile, name), str):
            raise _wrong(f"{name} is not a text")
    for name in _COUNTS:
        value = getattr(profile, name)
        least = 0 if name == "local_tokens" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _wrong(f"{name} is {value!r}, not a whole number from {least}")
    required = ("small_share", "fractions", "held_by_top")
    missing = [name for name in required if getattr(profile, name) is None]
    if missing:
        raise _wrong(f"{missing[0]} is missing")
    if profile.small_share.ndim != 2 or 0 in profile.small_share.shape:
        raise _wrong("small_share is no table of layers and heads")
    num_layers, num_heads = profile.small_share.shape
    if num_heads % profile.num_kv_heads:
        raise _wrong(f"{num_heads} heads do not share {profile.num_kv_heads} KV heads")
    steps = np.diff(profile.fractions)
    if (
        profile.fractions.ndim != 1
        or not profile.fractions.size
        or not (steps > 0).all()
        or not profile.fractions[0] > 0.0
        or profile.fractions[-1] != 1.0
    ):
        raise _wrong("fractions do not increase from above 0 to 1")
    shapes: dict[str, tuple[int, ...]] = {
        "held_by_top": (num_layers, profile.fractions.size),
        "held_later": (num_layers, profile.fractions.size),
        "long_share": (num_layers,),
    }
    for name in ("small_share", *shapes):
        array: FloatArray | None = getattr(profile, name)
        if array is None:
            continue
        wanted = shapes.get(name, array.shape)
        if array.shape != wanted:
            raise _wrong(f"{name} has the shape {array.shape}, not {wanted}")
        # Written so that NaN, of which no comparison holds, is refused too.
        if not ((array >= -_ROUNDING) & (array <= 1 + _ROUNDING)).all():
            raise _wrong(f"{name} holds something that is no share from 0 to 1")
        if array.ndim == 2 and name != "small_share":
            if not (np.diff(array, axis=1) >= -_ROUNDING).all():
                raise _wrong(f"{name} falls where more tokens are kept")
            if not np.allclose(array[:, -1], 1.0, atol=1e-3):
                raise _wrong(f"{name} does not end at 1")


def _wrong(problem: str) -> ConfigError:
    return _FILE.wrong(problem)
