"""Which share of pages is kept as activations, known before the pool is made.

The pool's and the host region's bytes are shared by it. What auto goes by is what can
be known then: the model's shape, a rebuild that is tried on the spot, and the link that
is emulated, was calibrated or, on CUDA, is sampled. Rank 0 decides for all ranks.
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import Representation, TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.calibration import Calibration, TokensFit, read_calibration
from sgl_tiered.errors import ConfigError, EngineCompatibilityError
from sgl_tiered.layered.base import ActChooser
from sgl_tiered.pipelines.stream_weights import NUM_SLOTS
from sgl_tiered.policies.activations.base import LayerFacts, PageLine
from sgl_tiered.policies.activations.choice import choose_share
from sgl_tiered.policies.activations.ratio import PageRatio, next_page
from sgl_tiered.policies.activations.refusal import refusal_of_model
from sgl_tiered.serving.layered.act_sizes import FLAG, Demand

if TYPE_CHECKING:
    # One needs SGLang, and the other us.
    from sgl_tiered.engines.device.device_figures import DeviceFigures
    from sgl_tiered.engines.sglang.layered.activations.offloaded import (
        OffloadedWeights,
    )
    from sgl_tiered.engines.sglang.layered.activations.projections import (
        LayerProjections,
    )
    from sgl_tiered.serving.agreement import Ranks
    from sgl_tiered.serving.options import Options

__all__ = ["Chosen", "Links", "choose", "page_chooser"]

logger = logging.getLogger(__name__)

Bools = npt.NDArray[np.bool_]

_MEMORY_BYTES_PER_S = 10e9
"""Where nothing tells: a core copies pages of 2 to 64 KiB at 13 to 57 GB/s."""
_OPEN_PAGES = 32
"""Requests that have a page that is not complete, where no limit is given."""
_DECODERS = 8
"""Rows of a step whose time is guessed."""
_RUNS = 5


@dataclass(frozen=True, slots=True)
class Chosen:
    """How activations are used.

    Attributes:
        share: of a request's full pages; 0 for none.
        reason: why, in a sentence, for log and reports.
        demand: what they take; None if there are none.
        kv_gen, load_kv: time to rebuild pages of a layer, and to load them as KV; None
            if there are none.
        projections: what rebuilds; None if nothing does.
        sampled: time to rebuild tokens of a layer, as this rank found it.
        offloaded: of the projections, what is in host memory; None if nothing is.
    """

    share: float
    reason: str
    demand: Demand | None = None
    kv_gen: PageLine | None = None
    load_kv: PageLine | None = None
    projections: LayerProjections | None = None
    sampled: TokensFit | None = None
    offloaded: OffloadedWeights | None = None

    def stats(self) -> dict[str, Any]:
        """Return it as JSON can write it."""
        return {"share": round(self.share, 4), "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Links:
    """The link between host and device, as far as a start knows it.

    Attributes:
        latency_s: of a copy.
        bytes_per_s: towards the device.
        is_emulated: that it is slower than the machine.
        is_guessed: nothing tells how fast it is.
    """

    latency_s: float
    bytes_per_s: float
    is_emulated: bool = False
    is_guessed: bool = False

    @classmethod
    def known(cls, config: Options, calibration: Calibration | None) -> Links:
        """Return the emulated link, else the calibrated one, else a guess."""
        for section in config.experiment.emulate:
            if TierId.HOST in section.tiers and section.has_link:
                fastest = min(section.bandwidth_bytes_per_s, section.read_bytes_per_s)
                is_guessed = math.isinf(fastest)
                if is_guessed:
                    fastest = _MEMORY_BYTES_PER_S
                return cls(section.latency_s, fastest, True, is_guessed)
        fit = None
        if calibration is not None:
            fit = calibration.link(TierId.HOST.label, TierId.DEVICE.label)
        if fit is not None:
            return cls(fit.latency_s, fit.bytes_per_s)
        return cls(0.0, _MEMORY_BYTES_PER_S, is_guessed=True)

    def sampled(self, figures: DeviceFigures) -> Links:
        """Return it with what was sampled in the place of a guess."""
        if not self.is_guessed:
            return self
        return replace(
            self,
            latency_s=self.latency_s + figures.latency_s,
            bytes_per_s=figures.upload_bytes_per_s,
            is_guessed=False,
        )

    def line(self, page_bytes: int) -> PageLine:
        """Return the time of pages of so many bytes."""
        return PageLine(self.latency_s, page_bytes / self.bytes_per_s)


def choose(
    configurator: Any,
    config: Options,
    layout: PageLayout,
    device_tokens: int,
    ranks: Ranks | None,
) -> Chosen | None:
    """Return how activations are used; None where nobody asked.

    Args:
        configurator: SGLang's, of the pool; its model is loaded.
        config: of the server.
        layout: shape of a page of KV.
        device_tokens: of the device's pool.
        ranks: of the server; None for one.

    Raises:
        EngineCompatibilityError: a share was asked for of a model that cannot be
            rebuilt.
        ConfigError: a share was asked for where activations are the larger pages.
    """
    assert config.layerkv is not None, "only layer-wise KV has activations"
    settings = config.layerkv.activations
    if settings is None:
        return None
    # Whether a model can be rebuilt is alike on all ranks: they have the same classes.
    from sgl_tiered.engines.sglang.layered.activations.projections import (
        find_projections,
    )

    try:
        found = find_projections(
            configurator.model,
            layout.num_layers,
            configurator.kv_cache_dtype,
            configurator.device,
        )
    except EngineCompatibilityError as error:
        if settings.share is not None:
            raise
        return _told(Chosen(0.0, str(error)))
    one = found.shape
    token_bytes = found.hidden * found.dtype.itemsize
    if settings.share is not None and token_bytes > 2 * layout.token_bytes:
        raise ConfigError(
            FLAG,
            f"a token has {token_bytes} bytes in a layer as activations and "
            f"{2 * layout.token_bytes} as KV on each rank",
            "leave it out for this model",
        )
    if settings.share is None:
        refusal = refusal_of_model(found.hidden, one.num_kv_heads, one.head_dim)
        if refusal is not None:
            return _told(Chosen(0.0, refusal))
    calibration = None
    if config.loads.calibration is not None:
        calibration = read_calibration(config.loads.calibration)
    link = Links.known(config, calibration)
    fit = _kv_gen(found, layout.page_tokens, calibration)
    kv_gen = PageLine(
        max(fit.overhead_s, 0.0), max(fit.token_s * layout.page_tokens, 1e-12)
    )
    share = settings.share
    if share is not None:
        reason = f"{FLAG} {share:g} was asked for."
    else:
        share, reason, link = _best(
            config, layout, device_tokens, found, link, kv_gen, calibration
        )
    share, reason, *line = _first(
        ranks, [share, reason, kv_gen.overhead_s, kv_gen.page_s]
    )
    if share == 0.0:
        return _told(Chosen(0.0, reason))
    offloaded = found.offloaded
    args: dict[str, Any] = configurator.server_args.resolved_dict()
    chunk = args.get("chunked_prefill_size") or 0
    chunk_tokens = chunk if chunk > 0 else configurator.model_config.context_len
    demand = Demand(
        share,
        token_bytes,
        open_pages=int(args.get("max_running_requests") or _OPEN_PAGES),
        chunk_pages=-(-chunk_tokens // layout.page_tokens),
        device_bytes=settings.device_bytes,
        weight_bytes=0 if offloaded is None else NUM_SLOTS * offloaded.slot_bytes,
    )
    load_kv = link.line(layout.layer_page_bytes)
    lines = (PageLine(*line), load_kv)
    return _told(Chosen(share, reason, demand, *lines, found, fit, offloaded))


def page_chooser(share: float) -> ActChooser:
    """Return what says which new pages are activations (HybridServe, Eq. 11)."""
    ratio = PageRatio.of_share(share)

    def choose_pages(num_act: int, num_kv: int, num_new: int) -> Bools:
        chosen = np.zeros(num_new, np.bool_)
        for n in range(num_new):
            place = next_page(ratio, num_act, num_kv, 0)
            chosen[n] = place.representation is Representation.ACT
            num_act += int(chosen[n])
            num_kv += int(not chosen[n])
        return chosen

    return choose_pages


def _told(chosen: Chosen) -> Chosen:
    logger.info(
        "sgl-tiered: %s %.0f %% of pages as activations: %s",
        FLAG,
        100 * chosen.share,
        chosen.reason,
    )
    return chosen


def _first(ranks: Ranks | None, told: list[Any]) -> list[Any]:
    """Return what rank 0 says."""
    if ranks is None:
        return told
    said: list[Any] = json.loads(ranks.gather(json.dumps(told).encode())[0])
    return said


def _kv_gen(
    found: LayerProjections, page_tokens: int, calibration: Calibration | None
) -> TokensFit:
    from sgl_tiered.engines.device.rebuild_probe import probe_kv_gen

    if calibration is not None and calibration.rebuild is not None:
        return calibration.rebuild.kv_gen
    one = found.shape
    return probe_kv_gen(
        one.hidden,
        one.num_kv_heads,
        one.head_dim,
        one.dtype,
        page_tokens,
        has_rotary=one.has_rotary,
        has_bias=one.has_bias,
        device=found.device,
    )


def _best(
    config: Options,
    layout: PageLayout,
    device_tokens: int,
    found: LayerProjections,
    link: Links,
    kv_gen: PageLine,
    calibration: Calibration | None,
) -> tuple[float, str, Links]:
    """Return what auto takes and why, and the link as it is known then."""
    figures = None
    has_decode = calibration is not None and calibration.decode is not None
    if found.device.type == "cuda" and (link.is_guessed or not has_decode):
        try:
            figures = _device_figures(found)
        except RuntimeError as error:
            reason = f"activations are refused: the device was not sampled ({error})."
            return 0.0, reason, link
        logger.info("sgl-tiered: %s auto sampled %s", FLAG, figures)
        link = link.sampled(figures)
    facts = _facts(
        config, layout, device_tokens, found, link, kv_gen, calibration, figures
    )
    one = found.shape
    best = choose_share(facts, found.hidden, one.num_kv_heads, one.head_dim)
    return best.share, best.reason, link


def _device_figures(found: LayerProjections) -> DeviceFigures:
    """Return what the device takes; a test has its own."""
    from sgl_tiered.engines.device.device_figures import sample_device

    weights = [linear.weight for linear in found.linears]
    return sample_device(found.device, weights, _DECODERS)


def _facts(
    config: Options,
    layout: PageLayout,
    device_tokens: int,
    found: LayerProjections,
    link: Links,
    kv_gen: PageLine,
    calibration: Calibration | None,
    figures: DeviceFigures | None,
) -> LayerFacts:
    """Return one layer of a step over all the KV that the server holds when it is full.

    That is when layers are streamed, and what a page is, is fixed when it is new.
    """
    settings = config.layerkv
    assert settings is not None, "only layer-wise KV has activations"
    device_pages = device_tokens // layout.page_tokens
    num_pages = settings.host_bytes // layout.slot_bytes or 4 * device_pages
    compute_s = _compute_s(found, layout, num_pages, calibration, figures)
    act_page_bytes = found.hidden * found.dtype.itemsize * layout.page_tokens
    weight_bytes = settings.weight_bytes
    if found.offloaded is not None:
        weight_bytes += found.offloaded.layer_bytes
    return LayerFacts(
        num_pages=max(num_pages, 1),
        device_bytes=device_pages * layout.layer_page_bytes,
        kv_page_bytes=layout.layer_page_bytes,
        act_page_bytes=act_page_bytes,
        kv_gen=kv_gen,
        load_kv=link.line(layout.layer_page_bytes),
        load_act=link.line(act_page_bytes),
        load_weights_s=weight_bytes / link.bytes_per_s,
        compute_s=compute_s,
    )


def _compute_s(
    found: LayerProjections,
    layout: PageLayout,
    num_pages: int,
    calibration: Calibration | None,
    figures: DeviceFigures | None,
) -> float:
    """Return about how long a layer computes in such a step, rebuilding left out."""
    contexts = num_pages * layout.page_tokens
    if calibration is not None and calibration.decode is not None:
        return calibration.decode.seconds(_DECODERS, contexts) / layout.num_layers
    # Its projection's time, for all of its weights, and its KV read once.
    kv_bytes = num_pages * layout.layer_page_bytes
    weights = max(found.layer_params / found.module(0).weight.numel(), 1.0)
    if figures is not None:
        kv_s = kv_bytes / figures.memory_bytes_per_s
        return float(figures.projection_s * weights + kv_s)
    kv_s = kv_bytes / _MEMORY_BYTES_PER_S
    return float(_projection_s(found) * weights + kv_s)


def _projection_s(found: LayerProjections) -> float:
    """Return how long a CPU takes for the projection of some decoding requests."""
    import torch

    weight: torch.Tensor = found.module(0).weight
    inputs = torch.zeros((_DECODERS, found.hidden), dtype=found.dtype)
    fastest = math.inf
    with torch.inference_mode():
        for _ in range(_RUNS):
            started_s = time.perf_counter()
            torch.nn.functional.linear(inputs, weight)
            fastest = min(fastest, time.perf_counter() - started_s)
    return fastest
