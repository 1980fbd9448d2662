"""The specification of a comparison: one TOML file, seeded, checked whole when read.

Seconds and bytes throughout. Unknown keys are refused. The hash names the experiment,
not the place: paths are reduced to their last part and addresses left out, so the same
specification has the same hash on another machine.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sgl_tiered_workloads.harness.errors import SpecError
from sgl_tiered_workloads.harness.metrics import Slos, Window
from sgl_tiered_workloads.harness.tables import Table

__all__ = [
    "APIS",
    "GateSpec",
    "ModelSpec",
    "Spec",
    "SystemSpec",
    "WorkloadSpec",
    "load_spec",
    "parse_spec",
]

APIS = ("generate", "openai-completions", "openai-chat")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model of the servers that are started.

    Attributes:
        preset: a model made on the spot; empty if a folder is given.
        path: folder of a model; empty with a preset.
        vocab_tokens: ids that workloads may use; 0 takes the preset's tokenizer.
    """

    preset: str = ""
    path: str = ""
    vocab_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """What is sent: a name of the workload registry, and its parameters.

    The registry checks the parameters, ``arrivals`` among them.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GateSpec:
    """The equality gate.

    Attributes:
        kind: ``equality``, or ``off`` where nothing can be compared (foreign servers).
        because: why it is off; stands in the report.
        requests: how many of the workload's requests it plays.
        reference_pool_tokens: device pool of the reference, which holds them all.
        min_exact_fraction: least share of output tokens to compare bit for bit.
    """

    kind: Literal["equality", "off"] = "equality"
    because: str = ""
    requests: int = 24
    reference_pool_tokens: int = 65536
    min_exact_fraction: float = 0.5


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """One of the compared systems.

    Attributes:
        name: of its files and of its row in the report.
        flags: of ``sglang.launch_server``; ``{store}`` stands for a folder of its own.
        env: variables of its process.
        url: of a server that others run; it is only driven. Empty to start one.
        api: how it is spoken to.
        model: the name that the server serves, for the OpenAI interfaces.
        tokenizer: folder of its tokenizer: needed by ``openai-chat``, and for sessions
            on a server that tells no token ids.
        extensions: whether it takes what vLLM and SGLang add to the OpenAI API.
        must_cover: tiers that must serve an answer that the gate compared exactly.
    """

    name: str
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    api: str = "generate"
    model: str = "default"
    tokenizer: str = ""
    extensions: bool = True
    must_cover: tuple[str, ...] = ()

    @property
    def external(self) -> bool:
        """Whether others start and stop it."""
        return bool(self.url)


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole comparison.

    Attributes:
        name: of the experiment.
        seed: of all randomness.
        repeats: of every system; each has its own seed, the same for all systems.
        together: whether all servers run at once, asleep while another is measured;
            else one at a time, started anew for each repeat.
        page_size: tokens per page of the servers that are started.
        pool_tokens: their device pool.
        flags: further flags that all of them get.
        model, workload, window, slos, gate, systems: see there.
    """

    name: str
    seed: int
    repeats: int
    together: bool
    page_size: int
    pool_tokens: int
    flags: tuple[str, ...]
    model: ModelSpec
    workload: WorkloadSpec
    window: Window
    slos: Slos
    gate: GateSpec
    systems: tuple[SystemSpec, ...]

    @property
    def started(self) -> tuple[SystemSpec, ...]:
        """The systems whose servers the harness runs."""
        return tuple(system for system in self.systems if not system.external)

    def public(self) -> dict[str, Any]:
        """Return everything but addresses and folders of the machine."""
        fields = asdict(self)
        fields["model"]["path"] = Path(self.model.path).name
        fields["flags"] = _without_folders(self.flags)
        fields["workload"]["params"] = {
            name: Path(value).name if _is_folder(value) else value
            for name, value in self.workload.params.items()
        }
        for system in fields["systems"]:
            system["url"] = "external" if system["url"] else ""
            system["tokenizer"] = Path(system["tokenizer"]).name
            system["flags"] = _without_folders(system["flags"])
            system["env"] = {
                name: Path(value).name if _is_folder(value) else value
                for name, value in system["env"].items()
            }
        return fields

    @property
    def hash(self) -> str:
        """Name of the experiment: 16 hex digits of what ``public`` returns."""
        text = json.dumps(self.public(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def load_spec(path: Path) -> Spec:
    """Read a specification.

    Raises:
        SpecError: the file is absent, no TOML, or wrong in an entry.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or "it cannot be read"
        raise SpecError(str(path), problem, "give the path of a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise SpecError(str(path), f"it is no TOML ({error})", "mend it") from error
    return parse_spec(content)


def parse_spec(content: Mapping[str, Any]) -> Spec:
    """Check a specification.

    Raises:
        SpecError: an entry is missing, unknown or wrong.
    """
    top = Table(content)
    device = top.table("device")
    spec = Spec(
        name=top.text("name"),
        seed=top.whole("seed", least=0),
        repeats=top.whole("repeats", 1),
        together=top.flag("together", False),
        page_size=device.whole("page_size", 16),
        pool_tokens=device.whole("pool_tokens", 8192),
        flags=device.texts("flags"),
        model=_model(top.table("model")),
        workload=_workload(top.table("workload", needed=True), top.table("arrivals")),
        window=_window(top.table("window")),
        slos=_slos(top.table("slo")),
        gate=_gate(top.table("gate")),
        systems=_systems(top.table("systems", needed=True)),
    )
    device.end()
    top.end()
    _check(spec)
    return spec


def _check(spec: Spec) -> None:
    if spec.started and not (spec.model.preset or spec.model.path):
        remedy = "give preset or path, since a server is to be started"
        raise SpecError("model", "it is missing", remedy)
    if spec.gate.kind == "equality" and not spec.started:
        remedy = 'set kind = "off" and say because'
        problem = "no system is started here, so nothing can be compared"
        raise SpecError("gate.kind", problem, remedy)
    if spec.gate.reference_pool_tokens < spec.pool_tokens:
        remedy = "give it at least device.pool_tokens"
        problem = "the reference's pool is smaller than the systems'"
        raise SpecError("gate.reference_pool_tokens", problem, remedy)


def _model(table: Table) -> ModelSpec:
    model = ModelSpec(
        preset=table.text("preset", ""),
        path=table.text("path", ""),
        vocab_tokens=table.whole("vocab_tokens", 0, least=0),
    )
    table.end()
    if model.preset and model.path:
        remedy = "give one of them"
        raise SpecError(table.key("preset"), "a path is given as well", remedy)
    if model.path and not model.vocab_tokens:
        remedy = "say how many token ids the model has"
        raise SpecError(table.key("vocab_tokens"), "it is missing", remedy)
    return model


def _workload(table: Table, arrivals: Table) -> WorkloadSpec:
    name = table.text("name")
    params = table.table("params").rest()
    table.end()
    when = arrivals.rest()
    if when and "arrivals" in params:
        problem = "the workload's parameters have arrivals as well"
        raise SpecError("arrivals", problem, "keep one of them")
    return WorkloadSpec(name, {**params, "arrivals": when} if when else params)


def _window(table: Table) -> Window:
    window = Window(table.seconds("warmup_s", 0.0), table.seconds("cooldown_s", 0.0))
    table.end()
    return window


def _slos(table: Table) -> Slos:
    slos = Slos(*(table.optional(name) for name in ("ttft_s", "tpot_s", "e2e_s")))
    table.end()
    return slos


def _gate(table: Table) -> GateSpec:
    kind = table.choice("kind", ("equality", "off"), "equality")
    if kind == "off":
        gate = GateSpec("off", table.text("because"))
    else:
        gate = GateSpec(
            requests=table.whole("requests", 24, least=2),
            reference_pool_tokens=table.whole("reference_pool_tokens", 65536),
            min_exact_fraction=table.share("min_exact_fraction", 0.5),
        )
    table.end()
    return gate


def _systems(table: Table) -> tuple[SystemSpec, ...]:
    systems = tuple(_system(name, entry) for name, entry in table.tables().items())
    if not systems:
        raise SpecError("systems", "none is given", "add [systems.NAME]")
    return systems


def _system(name: str, table: Table) -> SystemSpec:
    """Read a system; what it may say depends on who runs its server."""
    if not name.replace("-", "").replace("_", "").isalnum():
        remedy = "use letters, digits, - and _, since files are named after it"
        raise SpecError(f"systems.{name}", "the name does not fit", remedy)
    api = table.choice("api", APIS, "generate")
    asked: dict[str, Any] = {}
    if table.has("url"):
        asked["url"] = table.text("url")
    else:
        asked["flags"] = table.texts("flags")
        asked["env"] = table.variables("env")
        asked["must_cover"] = table.texts("must_cover")
    if api != "generate":
        asked["model"] = table.text("model", "default")
        asked["extensions"] = table.flag("extensions", True)
        # A server of our own has the tokenizer in its model's folder.
        needed = api == "openai-chat" and "url" in asked
        asked["tokenizer"] = table.text("tokenizer", None if needed else "")
    table.end()
    return SystemSpec(name, api=api, **asked)


def _without_folders(flags: tuple[str, ...]) -> list[str]:
    return [Path(flag).name if _is_folder(flag) else flag for flag in flags]


def _is_folder(value: object) -> bool:
    """Whether it is a path that only means something on one machine."""
    return isinstance(value, str) and value.startswith(("/", "~", "./", "../"))
