"""Facts about what serves: the accelerator, SGLang, and whether the plugin fits it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "AcceleratorFacts",
    "EngineFacts",
    "SeamFacts",
    "accelerator_facts",
    "engine_facts",
    "left_out_plugins",
]

PLUGIN = "sgl_tiered"
PLATFORM = "sgl_tiered_cpu"
_PLUGIN_GROUP = "sglang.srt.plugins"
_PLATFORM_GROUP = "sglang.srt.platforms"


@dataclass(frozen=True, slots=True)
class AcceleratorFacts:
    """What torch sees.

    Attributes:
        torch_version: None where torch cannot be imported.
        kind: cuda, xpu, ... ; None where there is no accelerator.
        names: one per device.
        memory_bytes: of each device, 0 where it is not known.
        detail: why torch cannot be imported, else empty.
    """

    torch_version: str | None
    kind: str | None
    names: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SeamFacts:
    """One SGLang symbol that the plugin needs, and whether it is there."""

    name: str
    found: bool
    detail: str


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """SGLang and our entry points into it.

    Attributes:
        version: of SGLang; None where it is not installed or cannot be imported.
        tested_version: the version that this release was tested with.
        seams: what the plugin needs of SGLang.
        plugin_registered, platform_registered: our entry points are installed.
        detail: why SGLang cannot be used, else empty.
    """

    version: str | None
    tested_version: str
    seams: tuple[SeamFacts, ...]
    plugin_registered: bool
    platform_registered: bool
    detail: str = ""


class _SeamReport(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def found(self) -> bool: ...
    @property
    def detail(self) -> str: ...


def accelerator_facts(load: Callable[[], Any] | None = None) -> AcceleratorFacts:
    """Ask torch; a torch that cannot be imported is a fact and no error.

    Args:
        load: returns the torch module; for tests.
    """
    try:
        torch = (load or _load_torch)()
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        return AcceleratorFacts(None, None, detail=f"torch cannot be imported: {error}")
    version = str(torch.__version__)
    if not torch.accelerator.is_available():
        return AcceleratorFacts(version, None)
    kind = torch.accelerator.current_accelerator().type
    devices = range(torch.accelerator.device_count())
    module: Any = getattr(torch, kind, None)
    if not hasattr(module, "get_device_properties"):
        return AcceleratorFacts(version, kind, tuple(f"{kind}:{i}" for i in devices))
    properties = [module.get_device_properties(i) for i in devices]
    return AcceleratorFacts(
        version,
        kind,
        tuple(str(item.name) for item in properties),
        tuple(int(getattr(item, "total_memory", 0)) for item in properties),
    )


def engine_facts(
    tested_version: str, check: Callable[[], Iterable[_SeamReport]]
) -> EngineFacts:
    """Look SGLang, every seam and our entry points up.

    Args:
        tested_version: the version of SGLang that this release was tested with.
        check: returns a report per seam; raises ImportError without SGLang.
    """
    version, detail = None, ""
    seams: tuple[SeamFacts, ...] = ()
    try:
        version = importlib.metadata.version("sglang")
        # SGLang prints while it is imported, and our output may be one JSON object.
        with contextlib.redirect_stdout(sys.stderr):
            seams = tuple(SeamFacts(r.name, r.found, r.detail) for r in check())
    except importlib.metadata.PackageNotFoundError:
        detail = f"SGLang is not installed: pip install sglang=={tested_version}"
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "sgl_tiered":
            raise
        detail = f"SGLang cannot be imported: {error}"
    return EngineFacts(
        version=version,
        tested_version=tested_version,
        seams=seams,
        plugin_registered=_is_registered(_PLUGIN_GROUP, PLUGIN),
        platform_registered=_is_registered(_PLATFORM_GROUP, PLATFORM),
        detail=detail,
    )


def left_out_plugins(environment: Mapping[str, str]) -> list[str]:
    """Return which of our entry points ``SGLANG_PLUGINS`` keeps SGLang from loading."""
    chosen = environment.get("SGLANG_PLUGINS", "").strip()
    if not chosen:
        return []
    names = {name.strip() for name in chosen.split(",")}
    return [name for name in (PLUGIN, PLATFORM) if name not in names]


def _is_registered(group: str, name: str) -> bool:
    found = importlib.metadata.entry_points(group=group)
    return any(entry.name == name for entry in found)


def _load_torch() -> Any:
    return importlib.import_module("torch")
