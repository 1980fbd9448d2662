"""SGLang's platform on a machine without an accelerator.

SGLang resolves its platform while ``sglang.srt.utils`` is still being imported, in
every process, so this module may import nothing of SGLang beyond
``sglang.srt.platforms`` and the plain lists of ``sglang.srt.arg_groups.choices``.
The attention backend's name has to be known before the command line is parsed (here,
in the constructor); its class only where a model runs (``init_backend``).
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, ClassVar, Final

from sglang.srt.arg_groups.choices import (
    ATTENTION_BACKEND_CHOICES,
    add_attention_backend_choices,
)
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

__all__ = ["ATTENTION_BACKEND", "MEM_FRACTION_STATIC", "TieredCpuPlatform"]

ATTENTION_BACKEND: Final = "tiered_cpu"
# The "device" pool, the host tier and the page cache all live in one RAM here, so
# SGLang's own default (about 0.8, made for a card of its own) would starve the rest.
MEM_FRACTION_STATIC: Final = 0.4

# glibc gives a freed block of some MB back to the kernel, and the next forward touches
# fresh pages again: 10 to 20 % of a prefill, and a different share in every start, for
# the limit moves with the order of the first blocks. These are `mallopt`'s M_*.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 1 << 30

_RETRACTION: Final = "disaggregation_decode_retraction_backup"
_ATTENTION_FIELDS: Final = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)


class TieredCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU as SGLang's device: eager execution, torch kernels, no Triton."""

    _enum: ClassVar[Any] = PlatformEnum.OOT
    capabilities: ClassVar[Any] = PlatformCapabilities()

    def __init__(self) -> None:
        super().__init__()
        if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
            add_attention_backend_choices([ATTENTION_BACKEND])

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill what a plain start needs on a CPU; keep whatever the user gave.

        SGLang calls this after its own CPU defaults, which have already filled the
        attention backend (with one that needs a package absent here); the user's
        own choice is therefore read from the record of raw input.
        """
        # Every process imports this module, and only those with a command line this.
        from sgl_tiered.serving.option_reader import given_value

        given = getattr(server_args, "_raw_input", None) or {}
        if all(given.get(name) is None for name in _ATTENTION_FIELDS):
            server_args.attention_backend = ATTENTION_BACKEND
        if given.get("mem_fraction_static") is None:
            server_args.mem_fraction_static = MEM_FRACTION_STATIC
        if given.get(_RETRACTION) is None:
            # SGLang's own choice for a decode instance is pinned memory.
            setattr(server_args, _RETRACTION, "cpu_tensor")
        places = (("layerkv", "on"), ("sparsity", "load"))
        if any(given_value(server_args, name) == value for name, value in places):
            # KV is placed between two forwards, on the scheduler's thread.
            server_args.disable_overlap_schedule = True
        self._disable_graphs(server_args)

    def _disable_graphs(self, server_args: Any) -> None:
        """Turn graph capture off in each phase whose backend the user left open."""
        from sglang.srt.model_executor.cuda_graph_config import (
            Backend,
            Phase,
            with_phase,
        )

        config = server_args.cuda_graph_config
        given = server_args._cuda_graph_config_locked
        for phase in Phase.ALL:
            if (phase, "backend") not in given:
                config = with_phase(config, phase, backend=Backend.DISABLED)
        server_args.cuda_graph_config = config

    def get_device(self, device_id: int = 0) -> str:
        """Return the device as a string, which is what SGLang splits at a colon."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        """Name the backend that computes new rows only."""
        return ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """Return the pool of layer-wise or sparse KV; None for SGLang's own."""
        from sgl_tiered.engines.sglang.layered import capacity as layered
        from sgl_tiered.engines.sglang.sparse import capacity as sparse

        return (layered.pool_class() or sparse.pool_class()) if kind == "mha" else None

    def get_paged_allocator_cls(self) -> type | None:
        """Return the allocator of layer-wise or sparse KV; None for SGLang's own."""
        from sgl_tiered.engines.sglang.layered import capacity as layered
        from sgl_tiered.engines.sglang.sparse import capacity as sparse

        return layered.allocator_class() or sparse.allocator_class()

    def init_backend(self) -> None:
        """Register the attention backend; called in each process that runs a model."""
        from sglang.srt.layers.attention.attention_registry import (
            register_attention_backend,
        )

        register_attention_backend(ATTENTION_BACKEND)(_create_attention)
        _keep_freed_memory()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """There is no device to pin host memory for."""
        return False


def _keep_freed_memory() -> None:
    """Let the allocator keep up to ``KEPT_BYTES`` for the next forward, on glibc."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def _create_attention(model_runner: Any) -> Any:
    """Build the attention backend; imported late, for it needs the model stack."""
    from sgl_tiered.engines.sglang.cpu_attention import create_cpu_attention

    return create_cpu_attention(model_runner)
