"""What is served here, in words and numbers: for reports and calibration files."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.calibration import MachineFacts, ModelFacts
from sgl_tiered.engines.device.probe import num_params

__all__ = [
    "attention_width",
    "machine_facts",
    "model_facts",
    "projection_facts",
    "report",
]


def model_facts(ctx: Any, layout: PageLayout) -> ModelFacts:
    """Read the facts off SGLang's ``TreeCacheBuildContext``."""
    config = ctx.model_config
    # The fields themselves are what was given; None where SGLang chose.
    args: dict[str, Any] = ctx.server_args.resolved_dict()
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    chunk = args["chunked_prefill_size"]
    return ModelFacts(
        # The default name is the path of the model, which is nobody's business.
        name=Path(str(args["served_model_name"] or args["model_path"])).name,
        architecture=str(config.hf_config.architectures[0]),
        dtype=_dtype(config.dtype),
        kv_dtype=_dtype(pool.dtype),
        attention_backend=str(args["attention_backend"] or ""),
        num_layers=layout.num_layers,
        attention_width=attention_width(config),
        num_params=num_params(ctx.tp_worker.model_runner.model),
        kv_bytes_per_token=2 * layout.token_bytes * layout.num_layers,
        page_tokens=layout.page_tokens,
        chunk_tokens=int(chunk) if chunk and chunk > 0 else None,
    )


def machine_facts(device: torch.device) -> MachineFacts:
    """Name the machine without saying whose it is."""
    accelerator = "none"
    if device.type == "cuda":
        accelerator = str(torch.cuda.get_device_name(device))
    elif device.type != "cpu":
        accelerator = device.type
    return MachineFacts(
        accelerator=accelerator,
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.machine()}",
    )


def report(
    ctx: Any, model: ModelFacts, machine: MachineFacts, engine: str
) -> dict[str, Any]:
    """Return all of it as JSON can write it, with the limits that a prompt meets."""
    return {
        "engine": engine,
        "model": asdict(model),
        "machine": asdict(machine),
        "projection": projection_facts(ctx),
        "vocab_tokens": int(ctx.model_config.vocab_size),
        "context_tokens": int(ctx.model_config.context_len),
        "pool_tokens": int(ctx.params.token_to_kv_pool_allocator.size),
    }


def projection_facts(ctx: Any) -> dict[str, Any] | None:
    """Return the shape of a layer's K and V projection, for T_kv_gen.

    Returns:
        What ``rebuild_probe.probe_kv_gen`` is to be given, of this rank, and torch's
        threads here; None where K and V are not plain heads of the weights' type.
    """
    config = ctx.model_config
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    sizes = (
        getattr(config, "hidden_size", None),
        getattr(pool, "head_num", None),
        getattr(pool, "head_dim", None),
    )
    if not all(isinstance(size, int) for size in sizes) or pool.dtype != config.dtype:
        return None
    hidden, num_kv_heads, head_dim = sizes
    model = ctx.tp_worker.model_runner.model
    return {
        "hidden": hidden,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "has_rotary": any(hasattr(one, "cos_sin_cache") for one in model.modules()),
        "has_bias": any(
            name.endswith("qkv_proj.bias") for name, _ in model.named_parameters()
        ),
        "num_threads": torch.get_num_threads(),
    }


def attention_width(model_config: Any) -> int:
    """Return query heads times head size."""
    return int(model_config.num_attention_heads * model_config.head_dim)


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
