"""The settings of a simulation: what each means, in which unit, and what it may be.

One row a setting. ``SimSpec`` checks its values against them, and the command line
makes its help of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.cache.config import DEMOTE_POLICIES, LOAD_POLICIES, WRITE_POLICIES
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.admission.registry import ADMISSIONS as SLO_ADMISSIONS
from sgl_tiered.policies.eviction.registry import EVICTION_POLICIES
from sgl_tiered.policies.length.registry import (
    LENGTH_PREDICTORS,
    make_length_predictor,
)
from sgl_tiered.policies.order.registry import ORDERS
from sgl_tiered.policies.prefetch.registry import PREFETCH_POLICIES, PREFETCH_TARGETS
from sgl_tiered.policies.write_admission.registry import WRITE_ADMISSIONS
from sgl_tiered.sim.config import ADMISSIONS, LOAD_MODES
from sgl_tiered.sim.hardware import HARDWARE, find_hardware
from sgl_tiered.sim.links import DISCIPLINES

__all__ = ["SETTINGS", "Setting", "check_setting", "flag_of", "refusal"]

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


def _one_of(section: str, text: str, *choices: str) -> Setting:
    return Setting(section, text, choices=choices)


SETTINGS: dict[str, Setting] = {
    "hardware": Setting(
        "server",
        "device, by its data sheet: "
        + ", ".join(profile.name for profile in HARDWARE.values()),
        "NAME",
    ),
    "model": Setting(
        "server",
        "name of a model, or path of a config.json or of the folder that has one",
        "NAME|PATH",
    ),
    "tensor_parallel": Setting("server", "devices that share the model", least=1),
    "calibration": Setting(
        "server", "of sgl-tiered calibrate, in place of the data sheet", "FILE"
    ),
    "device_gb": Setting(
        "server", "KV pool of all devices; 0 for what the weights leave", "GB"
    ),
    "page_size": Setting("server", "tokens of a page", "TOKENS", least=1),
    "load_mode": Setting(
        "server",
        "loads run under the prefill layer by layer, or the thread that computes waits "
        "for them; empty for what the calibrated device does, else layerwise",
        choices=("", *LOAD_MODES),
    ),
    "request_overhead_s": Setting("server", "before a request is queued", "S"),
    "seed": Setting("server", "of the synthetic workload and of policies that draw"),
    "host_gb": Setting("tiers", "host memory, of all devices; 0 for none", "GB"),
    "cxl_gb": Setting("tiers", "CXL memory below the host; 0 for none", "GB"),
    "disk_gb": Setting("tiers", "disk; 0 for none", "GB"),
    "host_medium": _one_of(
        "tiers", "what the host tier is made of: over PCIe, or CXL", "dram", "cxl"
    ),
    "load_policy": _one_of(
        "tiers", "auto loads what is cheaper than computing it", *LOAD_POLICIES
    ),
    "write_policy": _one_of(
        "tiers", "when a page is copied to the first tier", *WRITE_POLICIES
    ),
    "demote_policy": _one_of(
        "tiers", "when a page is copied to the next tier", *DEMOTE_POLICIES
    ),
    "disk_admission": _one_of(
        "tiers", "which pages are written to disk", *WRITE_ADMISSIONS
    ),
    "offload_threshold": Setting(
        "tiers", "share of the device above which on-evict copies", "SHARE", most=1
    ),
    "eviction": _one_of("tiers", "which page leaves a full tier", *EVICTION_POLICIES),
    "device_eviction": _one_of(
        "tiers", "which page leaves the device", *EVICTION_POLICIES
    ),
    "link_discipline": _one_of(
        "tiers", "how copies share a link: at once or in turn", *DISCIPLINES
    ),
    "prefetch": _one_of("tiers", "when reads from disk begin", *PREFETCH_POLICIES),
    "prefetch_window": Setting(
        "tiers", "requests at the head of the queue that car looks at", least=1
    ),
    "prefetch_to": _one_of("tiers", "how far car brings pages", *PREFETCH_TARGETS),
    "staging_gb": Setting("tiers", "memory for reads from disk; 0: no bound", "GB"),
    "admission": _one_of(
        "scheduler",
        "SGLang 0.5.23 reserves room for answers, vLLM 0.5.5 preempts",
        *ADMISSIONS,
    ),
    "chunk_tokens": Setting(
        "scheduler", "new tokens of a pass; 0: prompts are not cut", "TOKENS"
    ),
    "max_prefill_tokens": Setting(
        "scheduler", "new tokens of a pass of several prompts", "TOKENS", least=1
    ),
    "max_running": Setting("scheduler", "requests that decode at a time", least=1),
    "ignore_eos": Setting("scheduler", "answers have the length asked for"),
    "order": _one_of("scheduler", "of the queue", *ORDERS),
    "slo_admission": _one_of(
        "scheduler", "hold prefill for the decoders' sake", *SLO_ADMISSIONS
    ),
    "length_predictor": Setting(
        "scheduler", f"of answers: {', '.join(LENGTH_PREDICTORS)}", "NAME"
    ),
    "trace": Setting("workload", "Mooncake or WEKA JSON lines, gzipped or not", "FILE"),
    "limit": Setting("workload", "first requests of the trace; 0 for all"),
    "max_prompt_tokens": Setting(
        "workload", "conversations end before a longer prompt; 0: never", "TOKENS"
    ),
    "slowdown": Setting(
        "workload", "the trace takes so many times longer", "X", above=True
    ),
    "rate": Setting(
        "workload",
        "requests a second: of a synthetic load, or of a trace in place of its own",
        "PER_S",
    ),
    "sessions": Setting("workload", "a trace's turn waits for the answer before it"),
    "workload": Setting("workload", "one of sgl-tiered bench, by its name", "NAME"),
    "params": Setting("workload", "its parameters", "JSON"),
    "num_requests": Setting("workload", "of a synthetic load", least=1),
    "prompt_tokens": Setting(
        "workload", "of its requests, with the prefix", "TOKENS", least=1
    ),
    "output_tokens": Setting("workload", "of its answers", "TOKENS", least=1),
    "num_prefixes": Setting("workload", "that its prompts begin with; 0 for none"),
    "prefix_tokens": Setting("workload", "of each of them", "TOKENS"),
    "ttft_s": Setting("slo", "target for the first token; 0 for none", "S"),
    "tpot_s": Setting("slo", "target for each token after it; 0 for none", "S"),
}
"""By the key of a file; the flag is spelt with dashes."""


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def refusal(name: str, problem: str, remedy: str) -> ConfigError:
    """Return an error that names a setting as a flag and as a file have it."""
    flag = flag_of(name)
    spelt = flag if flag[2:] == name else f"{flag} ({name})"
    return ConfigError(spelt, problem, remedy)


def check_setting(name: str, value: object) -> None:
    """Check one value of the right type.

    Raises:
        ConfigError: it is out of bounds, or no choice.
    """
    setting = SETTINGS[name]
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
