"""Looks SGLang over in a process of its own and prints what it saw as JSON.

Importing SGLang costs many seconds, so one run answers for many tests. Modes:

- ``symbols``: the seams, the signatures, the pool.
- ``flags MODEL CASES.json``: activates the plugin and parses command lines.
- ``broken MODEL``: takes one seam away, then activates the plugin.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import inspect
import io
import itertools
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

warnings.simplefilter("ignore")


def parameters(function: Any) -> list[list[Any]]:
    """Return name, kind and "has a default" of each parameter but self."""
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [
        [p.name, p.kind.name, p.default is not p.empty]
        for p in found
        if p.name != "self"
    ]


def counter_reads() -> list[str]:
    """Return what SGLang's source reads off the counter that a KV pool is given.

    Speculative decoding is refused, so what its workers read is left out.
    """
    import sglang.srt

    name = "layer_transfer_counter"
    found: set[str] = set()
    root = Path(sglang.srt.__file__ or next(iter(sglang.srt.__path__)))
    root = root.parent if root.is_file() else root
    for file in root.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if name not in text or file.is_relative_to(root / "speculative"):
            continue
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef):
                continue
            aliases = {
                target.id
                for node in ast.walk(function)
                if isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Attribute)
                and node.value.attr.endswith(name)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in ast.walk(function):
                if not isinstance(node, ast.Attribute):
                    continue
                owner = node.value
                is_pool_s = isinstance(owner, ast.Attribute) and owner.attr.endswith(
                    name
                )
                if is_pool_s or (isinstance(owner, ast.Name) and owner.id in aliases):
                    found.add(node.attr)
    return sorted(found)


@contextlib.contextmanager
def prefill_backend(backend: str) -> Iterator[None]:
    """Let SGLang have resolved the graph backend of prefills to this one."""
    from sglang.srt.model_executor import cuda_graph_config as graphs

    config = graphs.with_phase(
        graphs.default_cuda_graph_config(), graphs.Phase.PREFILL, backend=backend
    )
    execution = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=config))
    with mock.patch.object(graphs, "get_exec", return_value=execution):
        yield


def joins() -> dict[str, bool]:
    """Return, by ranks, capability and backend, whether forwards wait for offloads."""
    import torch
    from sglang.srt.model_executor import cuda_graph_config as graphs

    from sgl_tiered.engines.sglang import factory

    found = {}
    cases = itertools.product((1, 2), (9, 10), graphs.Backend.ALL)
    for num_ranks, major, backend in cases:
        capable = mock.patch.object(
            torch.cuda, "get_device_capability", lambda device, major=major: (major, 0)
        )
        with prefill_backend(backend), capable:
            found[f"{num_ranks} {major} {backend}"] = factory._joins_offloads(
                torch.device("cuda", 0), num_ranks
            )
    with prefill_backend(graphs.Backend.BREAKABLE):
        found["cpu"] = factory._joins_offloads(torch.device("cpu"), 2)
    return found


def prefills() -> dict[str, list[bool]]:
    """Return, by graph backend, whether loads are waited for whole, and overlap.

    On a device with streams, and as SGLang has resolved the backend: no flag is given.
    """
    from sglang.srt.model_executor import cuda_graph_config as graphs

    from sgl_tiered.engines.sglang import factory

    def answer(backend: str, *, is_generation: bool = True) -> list[bool]:
        ctx = SimpleNamespace(model_config=SimpleNamespace(is_generation=is_generation))
        streams: Any = SimpleNamespace(waiter_copies=False)
        host: Any = SimpleNamespace(health=lambda: SimpleNamespace(emulated=False))
        with prefill_backend(backend):
            whole = factory._forward_skips_layers(ctx)
            overlaps = factory._loads_overlap(
                streams, host, waits_whole=whole, is_cuda=True
            )
        return [whole, overlaps]

    found = {backend: answer(backend) for backend in graphs.Backend.ALL}
    found["embedding"] = answer(graphs.Backend.BREAKABLE, is_generation=False)
    return found


def symbols() -> dict[str, Any]:
    """Describe what the plugin stands on, then take parts of it away."""
    import torch
    from sglang.srt.managers.cache_controller import LayerDoneCounter
    from sglang.srt.mem_cache import base_prefix_cache as base
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sgl_tiered.engines.sglang import seams
    from sgl_tiered.engines.sglang.cache import TieredRadixCache
    from sgl_tiered.engines.sglang.factory import refuse_unsupported
    from sgl_tiered.errors import EngineCompatibilityError
    from sgl_tiered.serving.layer_counter import LayerCounter

    overridden = {
        name: [parameters(getattr(UnifiedRadixCache, name)), parameters(ours)]
        for name, ours in vars(TieredRadixCache).items()
        if inspect.isfunction(ours)
        and not name.startswith("__")
        and hasattr(UnifiedRadixCache, name)
    }
    pool = MHATokenToKVPool(
        size=64,
        page_size=16,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    asked: list[int] = []

    class Recorder:
        def wait_until(self, layer: int) -> None:
            asked.append(layer)

    pool.register_layer_transfer_counter(Recorder())
    pool.get_key_buffer(0)
    pool.get_value_buffer(1)
    pool.get_kv_buffer(2)
    pool.register_layer_transfer_counter(None)

    out: dict[str, Any] = {
        "seams": [[r.name, r.found, r.detail] for r in seams.check_seams()],
        "versions": [seams.TESTED_VERSION, importlib.metadata.version("sglang")],
        "overridden": overridden,
        "defined": sorted(
            name
            for name, value in vars(TieredRadixCache).items()
            if inspect.isfunction(value) and not name.startswith("_")
        ),
        "match_result": list(base.MatchResult._fields),
        "evict_params": parameters(base.EvictParams),
        "load_back_params": parameters(base.InitLoadBackParams),
        "pool": {
            "k": [list(buffer.shape) for buffer in pool.k_buffer],
            "v": [list(buffer.shape) for buffer in pool.v_buffer],
            "contiguous": all(b.is_contiguous() for b in pool.k_buffer + pool.v_buffer),
        },
        "asked_layers": asked,
        "counter": {
            name: [
                parameters(getattr(LayerDoneCounter, name)),
                parameters(getattr(LayerCounter, name)),
            ]
            for name in ("wait_until", "set_consumer")
        },
        "joins": joins(),
        "prefill": prefills(),
        "counter_reads": counter_reads(),
        "counter_has": [name for name in dir(LayerCounter(3)) if name[0] != "_"],
        "missing": {},
        "refused": {},
    }

    def without(owner: Any, name: str) -> str:
        kept = inspect.getattr_static(owner, name)
        delattr(owner, name)
        try:
            seams.require_seams(http=False)
        except EngineCompatibilityError as error:
            return str(error)
        finally:
            setattr(owner, name, kept)
        return ""

    def warned_of(version: str) -> list[str]:
        with (
            mock.patch("importlib.metadata.version", return_value=version),
            mock.patch.object(seams.logger, "warning") as warning,
        ):
            seams.require_seams(http=False)
        return [call.args[0] % call.args[1:] for call in warning.call_args_list]

    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache import registry

    out["missing"]["method"] = without(
        UnifiedRadixCache, "finish_external_linker_loads"
    )
    out["missing"]["function"] = without(registry, "create_unified_radix_cache")
    out["missing"]["class"] = without(
        sys.modules[UnifiedRadixCache.__module__], "UnifiedRadixCache"
    )
    out["missing"]["hook"] = without(Scheduler, "_record_step_counters")
    kept = registry.create_unified_radix_cache
    registry.create_unified_radix_cache = lambda context: None  # renamed parameters
    try:
        seams.require_seams(http=False)
        out["missing"]["parameter"] = ""
    except EngineCompatibilityError as error:
        out["missing"]["parameter"] = str(error)
    registry.create_unified_radix_cache = kept
    out["warned"] = warned_of("0.0.1"), warned_of(seams.TESTED_VERSION)

    for name, changes in {
        "supported": {},
        "mamba": {"is_hybrid_ssm": True},
        "window": {"is_hybrid_swa": True},
        "window of the model": {"sliding_window_size": 512},
        "latent": {"attention_arch": "MLA"},
        "other pool": {"kv": object()},
    }.items():
        try:
            refuse_unsupported(context(pool, **changes))
            out["refused"][name] = ""
        except EngineCompatibilityError as error:
            out["refused"][name] = str(error)
    return out


def context(pool: Any, **changes: Any) -> Any:
    """Return the part of SGLang's build context that the refusals look at."""

    from sglang.srt.configs.model_config import AttentionArch

    arch = AttentionArch[changes.get("attention_arch", "MHA")]
    kv = changes.get("kv", pool)
    return SimpleNamespace(
        is_hybrid_ssm=changes.get("is_hybrid_ssm", False),
        is_hybrid_swa=changes.get("is_hybrid_swa", False),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["SomeForCausalLM"]),
            sliding_window_size=changes.get("sliding_window_size"),
            attention_arch=arch,
        ),
        params=SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kv)
        ),
    )


def flags(model: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Parse command lines as the server's main process does."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt import server_args

    out: dict[str, Any] = {
        "server_args": server_args.ServerArgs.__name__,
        "engine": Engine.server_args_class.__name__,
        "parsed": [parse(model, case) for case in cases],
        "help": "",
    }
    with (
        contextlib.redirect_stdout(io.StringIO()) as text,
        contextlib.suppress(SystemExit),
    ):
        server_args.prepare_server_args(["--help"])
    out["help"] = text.getvalue()
    return out


def parse(model: str, case: dict[str, Any]) -> dict[str, Any]:
    """Parse one command line; say its exit code, its last words and its values."""
    from sglang.srt import server_args

    from sgl_tiered.serving.option_reader import flag_values

    for name, value in case.get("env", {}).items():
        os.environ[name] = value
    errors = io.StringIO()
    code: Any = 0
    values: dict[str, Any] = {}
    with contextlib.redirect_stderr(errors):
        try:
            argv = ["--model-path", model, *case["argv"]]
            parsed = server_args.prepare_server_args(argv)
            values = flag_values(parsed)
        except SystemExit as leaving:
            code = leaving.code
        except Exception as error:  # noqa: BLE001 - the test shows what it was
            code, values = f"{type(error).__name__}: {error}", {}
    for name in case.get("env", {}):
        del os.environ[name]
    return {"code": code, "stderr": errors.getvalue(), "values": values}


def broken(model: str) -> dict[str, Any]:
    """Take a seam away before the plugin is loaded, as an SGLang update might."""
    from sglang.srt.managers import scheduler
    from sglang.srt.mem_cache.registry import get_radix_cache_factory
    from sglang.srt.plugins import load_plugins

    del scheduler.Scheduler._record_step_counters
    load_plugins()
    factory = get_radix_cache_factory("tiered")
    out: dict[str, Any] = {"registered": factory is not None, "tiered": ""}
    try:
        assert factory is not None
        factory(None)
    except Exception as error:  # noqa: BLE001 - the test shows what it was
        out["tiered"] = f"{type(error).__name__}: {error}"
    from sglang.srt import server_args

    plain = server_args.prepare_server_args(["--model-path", model])
    out["plain"] = [type(plain).__name__, plain.radix_cache_backend]
    return out


def main() -> None:
    """Run one mode and print one line of JSON behind everything else."""
    mode = sys.argv[1]
    if mode == "symbols":
        out = symbols()
    elif mode == "flags":
        with open(sys.argv[3]) as file:
            out = flags(sys.argv[2], json.load(file))
    else:
        out = broken(sys.argv[2])
    print("\n" + json.dumps(out))


if __name__ == "__main__":
    main()
