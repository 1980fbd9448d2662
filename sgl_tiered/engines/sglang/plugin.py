"""Entry point of SGLang's plugin group: registers flags, cache, reports.

SGLang logs what a plugin raises and serves on without it. So a plugin that could not
attach registers a cache factory that says so: a server that asked for the tiers stops
with that sentence, and any other server is left alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from sgl_tiered.errors import ConfigError, EngineCompatibilityError, TieredError
from sgl_tiered.serving.options import BACKEND_NAME

__all__ = ["activate"]

_SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
_ENGINE_MODULE = "sglang.srt.entrypoints.engine"


def activate() -> None:
    """Attach to SGLang; called once in every process of a server."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    try:
        _attach()
    except (TieredError, ImportError, AttributeError, TypeError) as error:
        reason = str(error)

        def refuse(ctx: Any) -> NoReturn:
            raise EngineCompatibilityError(
                f"sgl-tiered could not attach to this SGLang: {reason}"
            )

        register_radix_cache_backend(BACKEND_NAME, refuse)
        raise


def _attach() -> None:
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sgl_tiered.engines.sglang.args import TieredServerArgs
    from sgl_tiered.engines.sglang.disagg.backend import add_choice, service_hooks
    from sgl_tiered.engines.sglang.seams import require_seams

    add_choice()
    hooks: list[tuple[str, Any, HookType]] = [
        ("sglang.srt.server_args.ServerArgs", TieredServerArgs, HookType.REPLACE),
        (
            "sglang.srt.server_args.prepare_server_args",
            _refuse_in_one_sentence,
            HookType.AROUND,
        ),
    ]
    hooks += service_hooks()
    hooks += _device_hooks()
    in_scheduler = multiprocessing.parent_process() is not None
    if _SCHEDULER_MODULE in sys.modules:
        from sgl_tiered.engines.sglang.disagg.backend import disagg_hooks
        from sgl_tiered.engines.sglang.reporting import scheduler_hooks
        from sgl_tiered.engines.sglang.weight_hooks import weight_hooks

        require_seams(http=False)
        hooks += scheduler_hooks()
        hooks += weight_hooks()
        hooks += disagg_hooks()
    if not in_scheduler:
        from sgl_tiered.engines.sglang.http import http_hooks

        hooks += http_hooks()
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)
    # Applied here and not left to SGLang, which only logs a hook that fails.
    with _methods_are_looked_for_in_their_class():
        HookRegistry.apply_hooks()
    failed = [target for target, _, _ in hooks if target not in HookRegistry._patched]
    if failed:
        raise EngineCompatibilityError(f"the hook on {failed[0]} could not be applied")
    if _ENGINE_MODULE in sys.modules:
        # The class attribute was bound before the class was replaced.
        sys.modules[_ENGINE_MODULE].Engine.server_args_class = TieredServerArgs

    def factory(ctx: Any) -> Any:
        from sgl_tiered.engines.sglang.factory import build_cache

        return build_cache(ctx)

    register_radix_cache_backend(BACKEND_NAME, factory)


@contextlib.contextmanager
def _methods_are_looked_for_in_their_class() -> Iterator[None]:
    """Spare every process of a server up to 3 s of CPU time at its start.

    For each function that it wraps, SGLang looks at all names of all modules, as some
    may have imported it by name. No module has a method of a class so.
    """
    from sglang.srt.plugins import hook_registry

    propagate = getattr(hook_registry, "_propagate_patch", None)
    if propagate is None:
        yield
        return

    def of_modules_only(original: object, wrapped: object, source: object) -> Any:
        if isinstance(source, type):
            return 0
        return propagate(original, wrapped, source)

    hook_registry._propagate_patch = of_modules_only
    try:
        yield
    finally:
        hook_registry._propagate_patch = propagate


def _device_hooks() -> list[tuple[str, Any, Any]]:
    """Return the hooks that only a CUDA device needs, or only a CPU."""
    from sglang.srt.platforms import current_platform

    from sgl_tiered.engines.device.accelerator import has_accelerator

    if not has_accelerator() and _SCHEDULER_MODULE in sys.modules:
        from sgl_tiered.engines.sglang.disagg.cpu_repairs import cpu_hooks

        return cpu_hooks()
    if not current_platform.is_cuda():
        return []
    from sgl_tiered.engines.sglang.layered.cuda import cuda_hooks

    return cuda_hooks()


def _refuse_in_one_sentence(original: Any, argv: list[str]) -> Any:
    """Turn a wrong setting into an exit with its sentence, like argparse does."""
    from sgl_tiered.engines.sglang.args import tiered_options

    try:
        server_args = original(argv)
        tiered_options(server_args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return server_args
