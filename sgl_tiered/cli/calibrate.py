"""``sgl-tiered calibrate``: measures machine and model, writes what planner and
simulator read.

Exit code 0 when a file was written, 2 when something is wrong. A poor fit is written
and warned about: the planner refines it, the reader of a simulation should know.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from sgl_tiered.cli.engine import accelerator_facts
from sgl_tiered.cli.live_server import LiveServer, add_key_flags
from sgl_tiered.cli.local_links import (
    layout_of,
    measure_copies,
    measure_disk,
    projection_of_config,
    read_model_config,
)
from sgl_tiered.cli.machine import cpu_facts, memory_facts
from sgl_tiered.cli.measure import Edge, Limits, Measured, Measurer, Server
from sgl_tiered.cli.measure_rebuild import measure_rebuild
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.caching_fitting import CachingSample, fit_caching
from sgl_tiered.cost.calibration import (
    CachingFit,
    Calibration,
    FitQuality,
    LinkFit,
    MachineFacts,
    ModelFacts,
    PrefillFit,
    write_calibration,
)
from sgl_tiered.cost.context_caching import ContextCaching
from sgl_tiered.cost.fitting import (
    LinkSample,
    fit_decode,
    fit_link,
    fit_prefill,
)
from sgl_tiered.errors import ConfigError

__all__ = [
    "calibrate_process",
    "calibrate_server",
    "check_folder",
    "check_writable",
    "register",
    "render",
    "run",
]

_BUDGET_S = 170.0
_QUICK_BUDGET_S = 45.0
_POOR_R2 = 0.9
_POOR_RESIDUAL = 0.25
_EXAMPLE_TOKENS = 1024
"""Length of the prompts for which the table says from where on reuse pays."""


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure this machine and model for planner and simulator",
        description="Measures a running tiered server (--url; nobody else should use "
        "it, and what its device and host tiers hold is forgotten) or, without one, "
        "this machine's links for a model (--model; prefill and decode are not "
        "measured then). The file is for --tiered-calibration and the simulator.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="address of a running tiered server")
    source.add_argument(
        "--model", type=Path, metavar="DIR", help="folder of a model; no server"
    )
    parser.add_argument(
        "--peer-url",
        help="with --url: another server of its pool, to measure KV pulled from there",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    add_key_flags(parser)
    parser.add_argument(
        "--quick", action="store_true", help="fewer points: 45 s instead of 3 minutes"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts")
    parser.add_argument(
        "--disk-path", type=Path, metavar="DIR", help="with --model: measure this disk"
    )
    parser.add_argument(
        "--page-size", type=int, default=16, help="with --model: tokens in a page"
    )
    parser.add_argument(
        "--kv-dtype", default="auto", help="with --model: type of the KV pool"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the fits, write the file; returns the exit code."""
    check_writable(arguments.out)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    if arguments.url is not None:
        rng = np.random.default_rng(arguments.seed)
        budget_s = _QUICK_BUDGET_S if arguments.quick else _BUDGET_S
        keys = arguments.api_key, arguments.admin_api_key
        server = LiveServer(arguments.url, *keys)
        # Servers of one pool have one key, as their router assumes too.
        peer = LiveServer(arguments.peer_url, *keys) if arguments.peer_url else None
        print(f"measuring {arguments.url}; about {budget_s:.0f} s", flush=True)
        calibration, notes = calibrate_server(server, rng, budget_s, created, peer)
    else:
        model = read_model_config(
            arguments.model, arguments.page_size, arguments.kv_dtype
        )
        projection = projection_of_config(arguments.model)
        calibration, notes = calibrate_process(
            model, arguments.disk_path, created, projection
        )
    write_calibration(arguments.out, calibration)
    print("\n".join(render(calibration, notes)))
    print(f"wrote {arguments.out}")
    return 0


def calibrate_server(
    server: Server,
    rng: np.random.Generator,
    budget_s: float,
    created: str,
    peer: Server | None = None,
) -> tuple[Calibration, list[str]]:
    """Measure a server; return the figures and what to know about them.

    Args:
        server: what is measured.
        rng: for the prompts.
        budget_s: time that it may take.
        created: time of the file.
        peer: another server of the same pool, or None.
    """
    stats = server.stats()
    served = stats["served"]
    try:
        model = ModelFacts(**served["model"])
        machine = MachineFacts(**served["machine"])
    except TypeError:
        raise ConfigError(
            "--url",
            "the server's plugin describes its model in other words",
            "use the same version of sgl-tiered on both sides",
        ) from None
    limits = Limits(
        vocab_tokens=int(served["vocab_tokens"]),
        pool_tokens=int(served["pool_tokens"]),
        context_tokens=int(served["context_tokens"]),
        page_tokens=model.page_tokens,
        chunk_tokens=model.chunk_tokens,
    )
    measured = Measurer(server, limits, rng, budget_s, peer).run()
    decode = fit_decode(measured.decode)
    prefill, overhead_s = _prefill(measured, model, stats["probe"], decode)
    emulated = {name for name, tier in stats["media"].items() if tier["emulated"]}
    rebuild, notes = measure_rebuild(
        served.get("projection"),
        model,
        machine,
        _machine(),
        measured.links.get(("host", "device"), ()),
    )
    calibration = Calibration(
        created=created,
        method="server",
        engine=str(served["engine"]),
        model=model,
        machine=machine,
        prefill=prefill,
        decode=decode,
        request_overhead_s=overhead_s,
        links=_links(measured.links, emulated, stats["probe"]),
        rebuild=rebuild,
        caching=_caching(measured, model),
    )
    return calibration, measured.notes + notes


def calibrate_process(
    model: ModelFacts,
    disk_path: Path | None,
    created: str,
    projection: Mapping[str, Any] | None = None,
) -> tuple[Calibration, list[str]]:
    """Measure the links of this machine for pages of a model, without a server.

    Args:
        model: what its folder says.
        disk_path: folder on the disk to be measured; None for none.
        created: time of the file.
        projection: of its layers, to rebuild K and V by; None to leave that out.
    """
    layout = layout_of(model)
    accelerator = accelerator_facts()
    notes = ["Prefill, decode and the overhead of a request need a server (--url)."]
    samples: dict[Edge, list[LinkSample]] = {}
    if accelerator.kind is None:
        samples.update(measure_copies(layout, SystemClock()))
    else:
        notes.append("The links to the accelerator need a server (--url).")
    if disk_path is None:
        notes.append("No disk was measured (--disk-path).")
    else:
        samples.update(measure_disk(layout, disk_path.expanduser()))
    machine = _machine()
    rebuild, more = measure_rebuild(
        projection, model, machine, machine, samples.get(("host", "device"), ())
    )
    calibration = Calibration(
        created=created,
        method="process",
        engine="",
        model=model,
        machine=machine,
        prefill=None,
        decode=None,
        request_overhead_s=None,
        links=_links(samples, frozenset(), {}),
        rebuild=rebuild,
    )
    return calibration, notes + more


def _machine() -> MachineFacts:
    accelerator = accelerator_facts()
    return MachineFacts(
        accelerator=accelerator.names[0] if accelerator.names else "none",
        num_cores=cpu_facts().num_cores,
        memory_bytes=memory_facts().total_bytes,
        system=f"{platform.system()} {platform.machine()}",
    )


def _prefill(
    measured: Measured,
    model: ModelFacts,
    probe: Mapping[str, float],
    decode: Any,
) -> tuple[PrefillFit | None, float | None]:
    """Fit prefill; what a tiny prompt takes beyond its pass is the request's."""
    # A pass over one token is what a decode step of one request is.
    step_s = None if decode is None else decode.seconds(1, 0)
    line = fit_prefill(measured.prefill, step_s)
    if line is None:
        return None, None
    flops_per_s = probe.get("flops_per_s")
    alpha = None
    if flops_per_s and model.num_params:
        alpha = line.token_s * flops_per_s / (2.0 * model.num_params)
    fit = PrefillFit(
        overhead_s=line.overhead_s,
        token_s=line.token_s,
        pair_s=line.pair_s,
        alpha=alpha,
        quality=line.quality,
        context_token_s=line.context_token_s,
    )
    if measured.tiny_s is None:
        return fit, line.request_s
    return fit, max(measured.tiny_s - fit.seconds(0, measured.tiny_tokens), 0.0)


def _caching(measured: Measured, model: ModelFacts) -> CachingFit | None:
    """Fit the context-caching model, to the prefill points as well."""
    here = [
        CachingSample(
            point.context_tokens + point.new_tokens,
            point.context_tokens,
            TierId.DEVICE,
            point.seconds,
            model.page_tokens,
            point.num_requests,
            model.chunk_tokens,
        )
        for point in measured.prefill
    ]
    return fit_caching(here + measured.caching, model.num_layers)


def _links(
    samples: Mapping[Edge, Sequence[LinkSample]],
    emulated: set[str] | frozenset[str],
    probe: Mapping[str, float],
) -> tuple[LinkFit, ...]:
    links = []
    for (source, target), points in sorted(samples.items()):
        line = fit_link(points)
        if line is None:
            continue
        lower = source if target == "device" or source == "disk" else target
        promised = probe.get(f"{lower}_bandwidth_bytes_per_s")
        links.append(
            LinkFit(
                source,
                target,
                line.latency_s,
                line.bytes_per_s,
                bool({source, target} & emulated),
                promised / line.bytes_per_s if promised else None,
                line.quality,
            )
        )
    return tuple(links)


def render(calibration: Calibration, notes: Sequence[str]) -> list[str]:
    """Return the table of the fits, then warnings and notes."""
    rows: list[tuple[str, str, FitQuality | None]] = []
    prefill, decode = calibration.prefill, calibration.decode
    if prefill is not None:
        alpha = "" if prefill.alpha is None else f"  (alpha {prefill.alpha:.2f})"
        text = (
            f"{_time(prefill.overhead_s)} + {_time(prefill.token_s)}/token + "
            f"{_time(prefill.pair_s)}/pair + "
            f"{_time(prefill.context_token_s)}/context token{alpha}"
        )
        rows.append(("prefill pass", text, prefill.quality))
    if decode is not None:
        text = (
            f"{_time(decode.step_s)} + {_time(decode.request_s)}/request + "
            f"{_time(decode.context_token_s)}/context token"
        )
        rows.append(("decode step", text, decode.quality))
    if calibration.request_overhead_s is not None:
        rows.append(("request", _time(calibration.request_overhead_s), None))
    for link in calibration.links:
        beta = "" if link.beta is None else f"  (beta {link.beta:.2f})"
        note = "  EMULATED" if link.emulated else ""
        text = f"{_time(link.latency_s)} + {link.bytes_per_s / 1e9:.3g} GB/s"
        rows.append(
            (f"{link.source} -> {link.target}", text + beta + note, link.quality)
        )
    if calibration.rebuild is not None:
        for name, fit in (
            ("rebuild layer", calibration.rebuild.kv_gen),
            ("load layer", calibration.rebuild.load_kv),
        ):
            text = f"{_time(fit.overhead_s)} + {_time(fit.token_s)}/token"
            rows.append((name, text, fit.quality))
    if calibration.caching is not None:
        rows += _caching_rows(calibration)
    width = max([len(text) for _, text, _ in rows], default=0)
    lines = [f"{'':16} {'fitted':{width}} points     R2  median   worst"]
    for name, text, quality in rows:
        line = f"{name:16} {text:{width}}"
        if quality is not None:
            line += (
                f" {quality.num_points:6d} {quality.r2:6.3f} "
                f"{quality.median_relative_residual:6.1%} "
                f"{quality.max_relative_residual:7.1%}"
            )
        lines.append(line.rstrip())
    lines += [f"warning: {text}" for text in _warnings(rows)]
    return lines + [f"note: {note}" for note in notes]


def _caching_rows(
    calibration: Calibration,
) -> list[tuple[str, str, FitQuality | None]]:
    """Return a row for batches on the device, and one for each place below it."""
    fit, model = calibration.caching, ContextCaching.calibrated(calibration)
    assert fit is not None
    assert model is not None
    text = (
        f"{_time(fit.message_s)} + {_time(fit.pass_s)}/pass + "
        f"{_time(fit.request_s)}/request + {_time(fit.token_s)}/token"
    )
    rows: list[tuple[str, str, FitQuality | None]] = [("batch", text, fit.quality)]
    tiers = {tier.label: tier for tier in TierId}
    for place in fit.locations:
        ratio = model.break_even_ratio(_EXAMPLE_TOKENS, tiers[place.location])
        pays = "never pays" if ratio is None else f"pays from {ratio:.0%} on"
        text = (
            f"+ {_time(place.request_s)}/request + {_time(place.token_s)}/token"
            f"{' under the pass' if place.overlaps else ''}"
            f"  ({pays}, of {_EXAMPLE_TOKENS:,} tokens)"
        )
        rows.append((f"cached in {place.location}", text, place.quality))
    return rows


def _warnings(rows: Sequence[tuple[str, str, FitQuality | None]]) -> list[str]:
    found = []
    for name, _, quality in rows:
        if quality is None:
            continue
        if quality.num_points < 4:
            found.append(
                f"{name}: {quality.num_points} points are too few to judge the fit."
            )
        elif quality.r2 < _POOR_R2 or quality.max_relative_residual > _POOR_RESIDUAL:
            found.append(
                f"{name}: the fit is poor (R2 {quality.r2:.2f}, worst point off by "
                f"{quality.max_relative_residual:.0%}); was the machine busy?"
            )
    return found


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-12:.3g} ps"


def check_writable(path: Path, flag: str = "--out") -> None:
    """Refuse a target before minutes are spent, not after.

    Raises:
        ConfigError: it lies in no folder that this user may write to.
    """
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise ConfigError(
            flag, f"{path} cannot be written", "give a file in a folder of yours"
        )


def check_folder(path: Path, flag: str = "--out") -> None:
    """Refuse a folder for results before minutes are spent, not after.

    Raises:
        ConfigError: it cannot be made, or this user may not write into it.
    """
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(
            flag,
            f"{path} cannot be made in {there}",
            "give a folder in one of yours",
        )
