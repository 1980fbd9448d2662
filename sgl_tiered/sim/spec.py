"""What to simulate, as one flat value: from a TOML file, from flags, or from both.

A TOML file has the sections ``[server]``, ``[tiers]``, ``[scheduler]``, ``[workload]``,
``[params]`` and ``[slo]``; which key is in which section is for the reader only, names
are unique. ``[params]`` alone is free: the parameters of the named workload.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from sgl_tiered.cache.config import DEMOTE_POLICIES, LOAD_POLICIES, WRITE_POLICIES
from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.calibration import Calibration, LinkFit
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.admission.registry import ADMISSIONS as SLO_ADMISSIONS
from sgl_tiered.policies.admission.registry import NO_ADMISSION
from sgl_tiered.policies.eviction.registry import EVICTION_POLICIES
from sgl_tiered.policies.length.registry import LENGTH_PREDICTORS, NO_PREDICTOR
from sgl_tiered.policies.order.registry import ORDERS
from sgl_tiered.policies.prefetch.registry import PREFETCH_POLICIES, PREFETCH_TARGETS
from sgl_tiered.policies.write_admission.registry import WRITE_ADMISSIONS
from sgl_tiered.sim.config import (
    ADMISSIONS,
    LOAD_MODES,
    SchedulerConfig,
    ServerConfig,
    TierSetup,
)
from sgl_tiered.sim.hardware import (
    CXL,
    HARDWARE,
    NVME,
    HardwareProfile,
    LinkSpeed,
    find_hardware,
)
from sgl_tiered.sim.links import DISCIPLINES
from sgl_tiered.sim.models import ModelShape, find_model
from sgl_tiered.sim.settings import Setting, check_setting, flag_of, refusal
from sgl_tiered.sim.times import DeviceTimes, times_of_profile

__all__ = ["SETTINGS", "SimSpec", "read_spec"]

GB = 1e9
_DEVICE_SHARE = 0.88
"""Of the device's memory for weights and KV (SGLang's ``mem_fraction_static``)."""
_SECTIONS = ("server", "tiers", "scheduler", "workload", "params", "slo")


def _row(section: str, default: Any, text: str, unit: str = "N", **limits: Any) -> Any:
    row = Setting(section, text, unit, **limits)
    return field(default=default, metadata={"setting": row})


_of_server, _of_tiers, _of_scheduler, _of_workload, _of_slo = (
    partial(_row, name) for name in _SECTIONS if name != "params"
)


@dataclass(frozen=True, slots=True)
class SimSpec:
    """Everything that a simulation can be told: a row a setting.

    Sizes are of all ranks, in decimal GB. ``slo_admission`` has ``ttft_s`` and
    ``tpot_s`` for targets, and ``online`` predicts for it if no ``length_predictor``
    is named.

    Raises:
        ConfigError: a value is out of range, or two do not go together.
    """

    hardware: str = _of_server(
        "H800",
        "device, by its data sheet: "
        + ", ".join(profile.name for profile in HARDWARE.values()),
        "NAME",
    )
    model: str = _of_server(
        "Llama-3.1-8B",
        "name of a model, or path of a config.json or of the folder that has one",
        "NAME|PATH",
    )
    tensor_parallel: int = _of_server(1, "devices that share the model", least=1)
    calibration: str = _of_server(
        "", "of sgl-tiered calibrate, in place of the data sheet", "FILE"
    )
    device_gb: float = _of_server(
        0.0, "KV pool of all devices; 0 for what the weights leave", "GB"
    )
    page_size: int = _of_server(16, "tokens of a page", "TOKENS", least=1)
    load_mode: str = _of_server(
        "",
        "loads run under the prefill layer by layer, or the thread that computes waits "
        "for them; empty for what the calibrated device does, else layerwise",
        choices=("", *LOAD_MODES),
    )
    request_overhead_s: float = _of_server(0.0, "before a request is queued", "S")
    seed: int = _of_server(0, "of the synthetic workload and of policies that draw")
    host_gb: float = _of_tiers(0.0, "host memory, of all devices; 0 for none", "GB")
    cxl_gb: float = _of_tiers(0.0, "CXL memory below the host; 0 for none", "GB")
    disk_gb: float = _of_tiers(0.0, "disk; 0 for none", "GB")
    host_medium: str = _of_tiers(
        "dram",
        "what the host tier is made of: over PCIe, or CXL",
        choices=("dram", "cxl"),
    )
    load_policy: str = _of_tiers(
        "auto", "auto loads what is cheaper than computing it", choices=LOAD_POLICIES
    )
    write_policy: str = _of_tiers(
        "auto", "when a page is copied to the first tier", choices=WRITE_POLICIES
    )
    demote_policy: str = _of_tiers(
        "write-through",
        "when a page is copied to the next tier",
        choices=DEMOTE_POLICIES,
    )
    disk_admission: str = _of_tiers(
        "auto", "which pages are written to disk", choices=WRITE_ADMISSIONS
    )
    offload_threshold: float = _of_tiers(
        0.9, "share of the device above which on-evict copies", "SHARE", most=1
    )
    eviction: str = _of_tiers(
        "lru", "which page leaves a full tier", choices=EVICTION_POLICIES
    )
    device_eviction: str = _of_tiers(
        "lru", "which page leaves the device", choices=EVICTION_POLICIES
    )
    link_discipline: str = _of_tiers(
        "fair", "how copies share a link: at once or in turn", choices=DISCIPLINES
    )
    prefetch: str = _of_tiers(
        "arrival", "when reads from disk begin", choices=PREFETCH_POLICIES
    )
    prefetch_window: int = _of_tiers(
        16, "requests at the head of the queue that car looks at", least=1
    )
    prefetch_to: str = _of_tiers(
        "host", "how far car brings pages", choices=PREFETCH_TARGETS
    )
    staging_gb: float = _of_tiers(0.0, "memory for reads from disk; 0: no bound", "GB")
    admission: str = _of_scheduler(
        "sglang",
        "SGLang 0.5.23 reserves room for answers, vLLM 0.5.5 preempts",
        choices=ADMISSIONS,
    )
    chunk_tokens: int = _of_scheduler(
        8_192, "new tokens of a pass; 0: prompts are not cut", "TOKENS"
    )
    max_prefill_tokens: int = _of_scheduler(
        16_384, "new tokens of a pass of several prompts", "TOKENS", least=1
    )
    max_running: int = _of_scheduler(256, "requests that decode at a time", least=1)
    ignore_eos: bool = _of_scheduler(False, "answers have the length asked for")
    order: str = _of_scheduler("fcfs", "of the queue", choices=ORDERS)
    slo_admission: str = _of_scheduler(
        NO_ADMISSION, "hold prefill for the decoders' sake", choices=SLO_ADMISSIONS
    )
    length_predictor: str = _of_scheduler(
        NO_PREDICTOR, f"of answers: {', '.join(LENGTH_PREDICTORS)}", "NAME"
    )
    trace: str = _of_workload("", "Mooncake or WEKA JSON lines, gzipped or not", "FILE")
    limit: int = _of_workload(0, "first requests of the trace; 0 for all")
    max_prompt_tokens: int = _of_workload(
        0, "conversations end before a longer prompt; 0: never", "TOKENS"
    )
    slowdown: float = _of_workload(
        1.0, "the trace takes so many times longer", "X", above=True
    )
    rate: float = _of_workload(
        0.0,
        "requests a second: of a synthetic load, or of a trace in place of its own",
        "PER_S",
    )
    sessions: bool = _of_workload(
        False, "a trace's turn waits for the answer before it"
    )
    workload: str = _of_workload("", "one of sgl-tiered bench, by its name", "NAME")
    params: str = _of_workload("", "its parameters", "JSON")
    num_requests: int = _of_workload(200, "of a synthetic load", least=1)
    prompt_tokens: int = _of_workload(
        2_048, "of its requests, with the prefix", "TOKENS", least=1
    )
    output_tokens: int = _of_workload(256, "of its answers", "TOKENS", least=1)
    num_prefixes: int = _of_workload(0, "that its prompts begin with; 0 for none")
    prefix_tokens: int = _of_workload(0, "of each of them", "TOKENS")
    ttft_s: float = _of_slo(3.0, "target for the first token; 0 for none", "S")
    tpot_s: float = _of_slo(0.2, "target for each token after it; 0 for none", "S")

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            check_setting(name, setting, getattr(self, name))
        if self.host_medium == "cxl" and self.cxl_gb:
            raise refusal(
                "cxl_gb",
                f"{self.cxl_gb} GB below a host tier that is CXL memory itself",
                "leave out cxl_gb or host_medium",
            )
        if bool(self.num_prefixes) != bool(self.prefix_tokens):
            given = "num_prefixes" if self.num_prefixes else "prefix_tokens"
            other = "prefix_tokens" if self.num_prefixes else "num_prefixes"
            raise refusal(
                given, f"does nothing without {flag_of(other)}", "give both or neither"
            )
        if self.prefix_tokens > self.prompt_tokens:
            raise refusal(
                "prefix_tokens",
                f"{self.prefix_tokens} tokens are more than the prompt's "
                f"{self.prompt_tokens}",
                "give --prompt-tokens at least as many",
            )

    def with_values(self, values: dict[str, Any]) -> SimSpec:
        """Return a copy with some values replaced.

        Raises:
            ConfigError: a name is unknown or a value is of the wrong kind.
        """
        kinds = {field.name: field.type for field in fields(self)}
        checked = {}
        for name, value in values.items():
            if name not in kinds:
                raise ConfigError(
                    "spec",
                    f"the key {name!r} is not known",
                    f"use one of {', '.join(kinds)}",
                )
            if kinds[name] == "float" and type(value) is int:
                # Checked before, since it might be too long for a float.
                check_setting(name, SETTINGS[name], value)
                value = float(value)
            if type(value).__name__ != kinds[name]:
                raise refusal(name, f"{value!r} is no {kinds[name]}", "correct it")
            checked[name] = value
        return replace(self, **checked)

    def server(self, calibration: Calibration | None = None) -> ServerConfig:
        """Return the server that the spec describes.

        Args:
            calibration: what the file named by ``calibration`` holds.

        Raises:
            ConfigError: sizes or names that cannot be.
        """
        hardware, model = find_hardware(self.hardware), find_model(self.model)
        ranks = self.tensor_parallel
        times = times_of_profile(
            hardware, model, tensor_parallel=ranks, request_s=self.request_overhead_s
        )
        if model.num_heads % ranks:
            raise refusal(
                "tensor_parallel",
                f"{ranks} devices do not divide the {model.num_heads} heads of "
                f"{model.name}",
                "give a divisor",
            )
        num_layers = model.num_layers
        token_bytes = int(model.kv_token_bytes * model.kv_copies(ranks)) // ranks
        chunk, load_mode = self.chunk_tokens, self.load_mode
        if calibration is not None:
            _check_model(calibration, model)
            times = _calibrated(times, calibration)
            num_layers = calibration.model.num_layers
            token_bytes = calibration.model.kv_bytes_per_token
            if calibration.method == "server":
                chunk = calibration.model.chunk_tokens or 0
            if not load_mode and calibration.machine.accelerator == "none":
                load_mode = "waiter"
        return ServerConfig(
            times=times,
            page_tokens=self.page_size,
            num_layers=num_layers,
            kv_token_bytes=token_bytes,
            device_tokens=int(self._device_bytes(hardware, model) / token_bytes),
            tiers=self._tiers(hardware, calibration, self.page_size * token_bytes),
            scheduler=SchedulerConfig(
                admission=self.admission,
                chunk_tokens=chunk,
                max_prefill_tokens=self.max_prefill_tokens,
                max_running=self.max_running,
                ignore_eos=self.ignore_eos,
                order=self.order,
                slo_admission=self.slo_admission,
                ttft_slo_s=self.ttft_s,
                tpot_slo_s=self.tpot_s,
            ),
            load_mode=load_mode or "layerwise",
            link_discipline=self.link_discipline,
            load_policy=self.load_policy,
            write_policy=self.write_policy,
            demote_policy=self.demote_policy,
            disk_admission=self.disk_admission,
            offload_threshold=self.offload_threshold,
            eviction=self.eviction,
            device_eviction=self.device_eviction,
            staging_bytes=int(self.staging_gb * GB / ranks),
            prefetch=self.prefetch,
            prefetch_window=self.prefetch_window,
            prefetch_to=self.prefetch_to,
            length_predictor=self._predictor(),
            seed=self.seed,
        )

    def _predictor(self) -> str:
        if self.slo_admission == NO_ADMISSION:
            return self.length_predictor
        named = self.length_predictor
        return "online" if named == NO_PREDICTOR else named

    def _device_bytes(self, hardware: HardwareProfile, model: ModelShape) -> float:
        ranks = self.tensor_parallel
        if self.device_gb:
            return self.device_gb * GB / ranks
        left = hardware.memory_bytes * _DEVICE_SHARE - model.weight_bytes / ranks
        if left <= 0:
            raise refusal(
                "tensor_parallel",
                f"{ranks} x {hardware.name} cannot hold {model.name}",
                "use more devices",
            )
        return left

    def _tiers(
        self,
        hardware: HardwareProfile,
        calibration: Calibration | None,
        page_bytes: int,
    ) -> tuple[TierSetup, ...]:
        ranks = self.tensor_parallel
        for name in ("host_gb", "cxl_gb", "disk_gb"):
            size = getattr(self, name)
            if 0 < size * GB < page_bytes * ranks:
                raise refusal(
                    name,
                    f"{size:g} GB hold no page of {page_bytes * ranks:,} bytes",
                    "give more, or 0 for none",
                )
        sharers = min(ranks, hardware.host_link_sharers)
        dram = replace(hardware.host, bytes_per_s=hardware.host.bytes_per_s / sharers)
        is_cxl = self.host_medium == "cxl"
        memory = CXL if is_cxl else dram
        tiers = []
        if self.host_gb:
            tiers.append(
                TierSetup(
                    TierId.CXL if is_cxl else TierId.HOST,
                    int(self.host_gb * GB / ranks),
                    _measured(calibration, "host", "device", memory),
                    _measured(calibration, "device", "host", memory),
                )
            )
        if self.cxl_gb:
            tiers.append(
                TierSetup(
                    TierId.CXL,
                    int(self.cxl_gb * GB / ranks),
                    _measured(calibration, "cxl", "device", CXL),
                    _measured(calibration, "host", "cxl", CXL),
                )
            )
        if self.disk_gb:
            # All ranks write to one disk.
            read, write = (
                replace(speed, bytes_per_s=speed.bytes_per_s / ranks)
                for speed in (NVME["read"], NVME["write"])
            )
            tiers.append(
                TierSetup(
                    TierId.DISK,
                    int(self.disk_gb * GB / ranks),
                    _measured(calibration, "disk", "host", read),
                    _measured(calibration, "host", "disk", write),
                )
            )
        return tuple(tiers)


SETTINGS: dict[str, Setting] = {
    each.name: each.metadata["setting"] for each in fields(SimSpec)
}
"""By the key of a file; the flag is spelt with dashes."""


def read_spec(path: Path) -> SimSpec:
    """Read a TOML file.

    Raises:
        ConfigError: one sentence about the first thing that is wrong.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            "spec", f"{path} cannot be read ({error.strerror})", "give another path"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError("spec", f"{path}: {error}", "correct the file") from None
    values: dict[str, Any] = {}
    for section, content in raw.items():
        if section not in _SECTIONS or not isinstance(content, dict):
            raise ConfigError(
                "spec",
                f"the section {section!r} is not known",
                f"use {', '.join(_SECTIONS)}",
            )
        if section == "params":
            try:
                content = {"params": json.dumps(content)}
            except (TypeError, ValueError):  # a date; a number of too many digits
                raise ConfigError(
                    "spec.params", "has a value that is not of JSON", "correct it"
                ) from None
        values.update(content)
    return SimSpec().with_values(values)


def _check_model(calibration: Calibration, model: ModelShape) -> None:
    """Refuse to put the links of one model beside the computing of another."""
    measured = calibration.model
    if calibration.prefill is not None and calibration.decode is not None:
        return
    if (measured.num_layers, measured.attention_width) == (
        model.num_layers,
        model.attention_width,
    ):
        return
    raise refusal(
        "calibration",
        f"has no times of prefill and decode, and links measured for {measured.name} "
        f"({measured.num_layers} layers), not for {model.name} ({model.num_layers})",
        "give --model the config.json that it was measured with",
    )


def _calibrated(times: DeviceTimes, calibration: Calibration) -> DeviceTimes:
    """Put what was measured in the place of the profile's numbers."""
    changes: dict[str, float] = {}
    if (prefill := calibration.prefill) is not None:
        changes |= {
            "prefill_overhead_s": prefill.overhead_s,
            "prefill_token_s": prefill.token_s,
            "prefill_pair_s": prefill.pair_s,
            "prefill_context_token_s": prefill.context_token_s,
        }
    if (decode := calibration.decode) is not None:
        changes |= {
            "decode_overhead_s": decode.step_s,
            "decode_request_s": decode.request_s,
            "decode_context_token_s": decode.context_token_s,
        }
    if changes:
        # The fits have the reading of the weights in their constants.
        changes["weights_s"] = 0.0
    if calibration.request_overhead_s is not None:
        changes["request_s"] = calibration.request_overhead_s
    return replace(times, **changes)


def _measured(
    calibration: Calibration | None, source: str, target: str, guess: LinkSpeed
) -> LinkSpeed:
    fit: LinkFit | None = None
    if calibration is not None:
        fit = calibration.link(source, target)
    if fit is None:
        return guess
    return LinkSpeed(fit.bytes_per_s, fit.latency_s, "the calibration file")
