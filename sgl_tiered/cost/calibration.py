"""The calibration file: what one machine takes for one model, measured and fitted.

``sgl-tiered calibrate`` writes it; the planner (``--tiered-calibration``) and the
simulator read it. One JSON object with a version, readable by people, never executed.
A part that was not measured is null, and the reader falls back on its own guess. All
times are seconds, all sizes bytes; coefficients are never negative.
"""

from __future__ import annotations

import math
import types
import typing
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Union

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.json_file import JsonFile
from sgl_tiered.errors import ConfigError

__all__ = [
    "CALIBRATION_VERSION",
    "CachingFit",
    "Calibration",
    "DecodeFit",
    "FitQuality",
    "LinkFit",
    "LocationFit",
    "MachineFacts",
    "ModelFacts",
    "PrefillFit",
    "RebuildFit",
    "TokensFit",
    "calibration_from_dict",
    "calibration_to_dict",
    "read_calibration",
    "write_calibration",
]

CALIBRATION_VERSION = 1
_FILE = JsonFile(
    "calibration file", "sgl-tiered calibrate", CALIBRATION_VERSION, 1 << 20
)
_MAY_BE_NEGATIVE = frozenset({"r2"})
"""R2 is below zero where the fit is worse than the mean."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Which model was measured, and how it was served.

    Attributes:
        name: as the server calls it; for people, not compared.
        architecture: class of the model, e.g. ``LlamaForCausalLM``.
        dtype: of the weights, e.g. ``bfloat16``.
        kv_dtype: of the KV pool.
        attention_backend: what computes attention, or "" where it is not known.
        num_layers: attention layers.
        attention_width: query heads times head size.
        num_params: parameters that every token passes (without the embedding); None
            where they were not counted.
        kv_bytes_per_token: keys and values over all layers.
        page_tokens: tokens in a page of the cache.
        chunk_tokens: most new tokens in one prefill pass; None for no limit.
    """

    name: str
    architecture: str
    dtype: str
    kv_dtype: str
    attention_backend: str
    num_layers: int
    attention_width: int
    num_params: int | None
    kv_bytes_per_token: int
    page_tokens: int
    chunk_tokens: int | None


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Which machine ``sgl-tiered calibrate`` ran on. For people, not compared.

    Attributes:
        accelerator: name of the device that computes, or "none".
        num_cores: CPU cores that the process may use.
        memory_bytes: main memory.
        system: kernel and Python.
    """

    accelerator: str
    num_cores: int
    memory_bytes: int
    system: str


@dataclass(frozen=True, slots=True)
class FitQuality:
    """How well a line goes through its points.

    Attributes:
        num_points: medians that were fitted.
        r2: 1 - residual variance / variance; 1 is perfect, 0 no better than the mean.
        median_relative_residual: middle of |fitted - measured| / measured.
        max_relative_residual: the largest of these.
    """

    num_points: int
    r2: float
    median_relative_residual: float
    max_relative_residual: float


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """One prefill pass over ``n`` new tokens after a context of ``p`` tokens.

    ``overhead_s + token_s * n + pair_s * n * (p + (n + 1) / 2) + context_token_s * p``:
    the form of ``PrefillCost`` and the reading of the context's KV, which a pass over
    few tokens pays like a decode step. A prompt longer than a chunk takes several
    passes.

    Attributes:
        alpha: LayerKV's Eq. 3: ``token_s`` over what the operations per second of a
            large matrix product promise; None where these are not known.
        context_token_s: 0 in files written before it was measured.
    """

    overhead_s: float
    token_s: float
    pair_s: float
    alpha: float | None
    quality: FitQuality
    context_token_s: float = 0.0

    def seconds(self, context_tokens: int, new_tokens: int) -> float:
        """Return the time of one pass; 0 for no new tokens."""
        if new_tokens <= 0:
            return 0.0
        pairs = new_tokens * (context_tokens + (new_tokens + 1) / 2)
        linear_s = self.token_s * new_tokens + self.context_token_s * context_tokens
        return self.overhead_s + linear_s + self.pair_s * pairs


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """One decode step: ``step_s + request_s * batch + context_token_s * contexts``.

    ``contexts`` is the sum of the context lengths of all requests of the batch.
    """

    step_s: float
    request_s: float
    context_token_s: float
    quality: FitQuality

    def seconds(self, num_requests: int, context_tokens: int) -> float:
        """Return the time of one step; 0 for an empty batch.

        Args:
            num_requests: requests in the batch.
            context_tokens: summed over the batch.
        """
        if num_requests <= 0:
            return 0.0
        return (
            self.step_s
            + self.request_s * num_requests
            + self.context_token_s * context_tokens
        )


@dataclass(frozen=True, slots=True)
class LinkFit:
    """One edge in one direction: ``latency_s + bytes / bytes_per_s`` per transfer.

    Attributes:
        source, target: labels of ``TierId``: device, host, cxl, disk, peer.
        latency_s: of a transfer without bytes; 0 where it could not be told apart.
        bytes_per_s: > 0.
        emulated: the tier was slowed down on purpose (``--tiered-emulate``).
        beta: LayerKV's Eq. 4: time per byte over what a single copy at start-up
            promised; None where that is not known.
    """

    source: str
    target: str
    latency_s: float
    bytes_per_s: float
    emulated: bool
    beta: float | None
    quality: FitQuality

    def seconds(self, num_bytes: int) -> float:
        """Return the time of one transfer; 0 for no bytes."""
        if num_bytes <= 0:
            return 0.0
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class TokensFit:
    """A time for n tokens of one layer: ``overhead_s + token_s * n``."""

    overhead_s: float
    token_s: float
    quality: FitQuality

    def seconds(self, num_tokens: int) -> float:
        """Return the time for so many tokens; 0 for none."""
        if num_tokens <= 0:
            return 0.0
        return self.overhead_s + self.token_s * num_tokens


@dataclass(frozen=True, slots=True)
class RebuildFit:
    """HybridServe's two regressions: one layer, and the heads of one rank.

    Attributes:
        kv_gen: rebuilding keys and values from activations on the device.
        load_kv: copying keys and values from host memory.
    """

    kv_gen: TokensFit
    load_kv: TokensFit


@dataclass(frozen=True, slots=True)
class LocationFit:
    """What cached KV at one place adds to a time to first token.

    ``request_s * requests + token_s * tokens + page_s * pages``, of what is brought
    from there.

    Attributes:
        location: label of a ``TierId`` other than the device.
        request_s, token_s: per request that reuses KV from there, per token of it.
        page_s: per page; 0 where only one page size was measured, for then it is in
            ``token_s``.
        overlaps: it comes layer by layer under the pass, instead of before it.
        quality: of whole times to first token.
    """

    location: str
    request_s: float
    token_s: float
    page_s: float
    overlaps: bool
    quality: FitQuality


@dataclass(frozen=True, slots=True)
class CachingFit:
    """Time to first token of a batch whose prompts are cached in part.

    MemServe's context-caching cost model; the equations are in
    ``cost/context_caching.py``.

    Attributes:
        message_s, pass_s, request_s: per batch, per forward pass, per request.
        token_s, pair_s: per token computed, per pair of query and key.
        context_token_s: per token of reused context that a pass reads.
        locations: each place at most once, without the device.
        quality: of batches that reused nothing, or KV on the device.
    """

    message_s: float
    pass_s: float
    request_s: float
    token_s: float
    pair_s: float
    context_token_s: float
    locations: tuple[LocationFit, ...]
    quality: FitQuality


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything that was measured.

    Attributes:
        created: date and time in UTC, ISO 8601.
        method: ``server`` (through HTTP) or ``process`` (links only).
        engine: name and version of the engine, or "".
        model, machine: what was measured, and where.
        prefill, decode: None where they were not measured.
        request_overhead_s: from the arrival of a tiny prompt to its first token,
            beyond its prefill pass; None where it was not measured.
        links: each edge at most once.
        rebuild, caching: None where not measured, as in all older files.
    """

    created: str
    method: str
    engine: str
    model: ModelFacts
    machine: MachineFacts
    prefill: PrefillFit | None
    decode: DecodeFit | None
    request_overhead_s: float | None
    links: tuple[LinkFit, ...]
    rebuild: RebuildFit | None = None
    caching: CachingFit | None = None

    def link(self, source: str, target: str) -> LinkFit | None:
        """Return one edge, or None where it was not measured."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        return None


def read_calibration(path: Path) -> Calibration:
    """Read and check a calibration file.

    Raises:
        ConfigError: one sentence about the first thing that is wrong.
    """
    return calibration_from_dict(_FILE.read(path))


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a file that only its owner may read; a former one is replaced whole.

    Raises:
        ConfigError: the file cannot be written, or a number is not one.
    """
    fields = calibration_to_dict(calibration)
    # What cannot be read back is not written.
    calibration_from_dict(fields)
    _FILE.write(path, fields)


def calibration_to_dict(calibration: Calibration) -> dict[str, Any]:
    """Return the file's JSON object."""
    return {"version": CALIBRATION_VERSION, **asdict(calibration)}


def calibration_from_dict(raw: object) -> Calibration:
    """Check a file's JSON object and build the value.

    Raises:
        ConfigError: one sentence about the first thing that is wrong.
    """
    body = _FILE.fields(raw)
    calibration = _decode(Calibration, body, "")
    assert isinstance(calibration, Calibration)
    labels = {tier.label for tier in TierId}
    edges = [(link.source, link.target) for link in calibration.links]
    for link in calibration.links:
        if not {link.source, link.target} <= labels:
            names = f"{link.source!r} to {link.target!r}"
            raise _wrong(f"{names} is no link between tiers")
        if edges.count((link.source, link.target)) > 1:
            raise _wrong(f"the link {link.source} to {link.target} is there twice")
        if link.bytes_per_s == 0:
            raise _wrong(f"the link {link.source} to {link.target} has no bandwidth")
    places = (
        [p.location for p in calibration.caching.locations]
        if calibration.caching
        else []
    )
    for place in places:
        if place not in labels - {TierId.DEVICE.label} or places.count(place) > 1:
            raise _wrong(f"caching.locations has {place}, which is no place of its own")
    if calibration.model.page_tokens == 0 or calibration.model.num_layers == 0:
        raise _wrong("model.page_tokens and model.num_layers must be positive")
    return calibration


def _decode(kind: Any, value: object, where: str) -> Any:
    """Turn JSON into a value of a declared type; names the key that is wrong."""
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
        return _decode(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(f"{where} is not a list")
        inner = typing.get_args(kind)[0]
        return tuple(_decode(inner, v, f"{where}[{i}]") for i, v in enumerate(value))
    if is_dataclass(kind):
        return _decode_object(kind, value, where)
    if kind is float:
        return _number(value, where)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong(f"{where} is {value!r}, not {_TYPE_WORDS[kind]}")
    if kind is int:
        _number(value, where)
    return value


def _decode_object(kind: Any, value: object, where: str) -> Any:
    prefix = f"{where}." if where else ""
    if not isinstance(value, dict):
        raise _wrong(f"{where} is not an object")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.name in value]
    missing = [
        field.name
        for field in fields(kind)
        if field.name not in value and field.default is MISSING
    ]
    unknown = sorted(set(value) - set(names))
    if missing or unknown:
        problem = f"lacks {prefix}{missing[0]}" if missing else ""
        raise _wrong(problem or f"has the unknown key {prefix}{unknown[0]}")
    return kind(**{n: _decode(hints[n], value[n], prefix + n) for n in names})


def _number(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(f"{where} is {value!r}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _wrong(f"{where} is {number}, not a finite number")
    if number < 0 and where.rpartition(".")[2] not in _MAY_BE_NEGATIVE:
        raise _wrong(f"{where} is negative ({number})")
    return number


_TYPE_WORDS: dict[Any, str] = {int: "a whole number", str: "a text", bool: "a boolean"}


def _wrong(problem: str) -> ConfigError:
    return _FILE.wrong(problem)
