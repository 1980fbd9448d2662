"""Finds what makes K and V in attentions of SGLang's own models; prints JSON.

    projections_program.py

Layers with weights of chance, in a program of its own, as importing SGLang costs
seconds. The last line is one JSON object: what was found or refused, by name.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

warnings.simplefilter("ignore")

HIDDEN, HEADS, LAYERS = 64, 4, 2
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
MROPE = {"rope_type": "default", "rope_theta": 10000, "mrope_section": [2, 3, 3]}


class Model(torch.nn.Module):
    """Layers of one kind, and nothing else."""

    def __init__(self, make: Callable[[int], torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for layer in range(LAYERS):
            around = torch.nn.Module()
            around.self_attn = make(layer)
            self.layers.append(around)


def start() -> None:
    """Publish a server's settings and groups of one rank."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args(device="cpu").install()
    parallel_state.init_distributed_environment(
        world_size=1,
        rank=0,
        distributed_init_method="tcp://127.0.0.1:0",
        local_rank=0,
        backend="gloo",
    )
    parallel_state.initialize_model_parallel(backend="gloo")


def llama(kv_heads: int, **more: Any) -> Callable[[int], Any]:
    """Return what makes attentions of Llama."""
    from sglang.srt.models.llama import LlamaAttention

    def make(layer: int) -> Any:
        config = SimpleNamespace(head_dim=HIDDEN // HEADS)
        return LlamaAttention(
            config, HIDDEN, HEADS, kv_heads, layer, max_position_embeddings=256, **more
        )

    return make


def qwen2(**more: Any) -> Callable[[int], Any]:
    """Return what makes attentions of Qwen2, which have a bias."""
    from sglang.srt.models.qwen2 import Qwen2Attention

    def make(layer: int) -> Any:
        return Qwen2Attention(
            HIDDEN, HEADS, 2, layer_id=layer, max_position_embeddings=256, **more
        )

    return make


def qwen3(layer: int) -> Any:
    """Return an attention of Qwen3, which norms its keys."""
    from sglang.srt.models.qwen3 import Qwen3Attention

    return Qwen3Attention(
        HIDDEN,
        HEADS,
        4,
        layer_id=layer,
        max_position_embeddings=256,
        head_dim=HIDDEN // HEADS,
        rms_norm_eps=1e-6,
    )


def opt(layer: int) -> Any:
    """Return an attention of OPT, without rotary positions."""
    from sglang.srt.models.opt import OPTAttention

    return OPTAttention(HIDDEN, HEADS, layer)


def scaled_keys(layer: int) -> Any:
    """Return an attention of a model that looks like Llama and is not."""
    # Positions of another length: SGLang gives equal ones out twice.
    module = llama(4, rope_theta=5000)(layer)
    inner = module.rotary_emb.forward

    def turn(positions: Any, query: Any, key: Any) -> Any:
        query, key = inner(positions, query, key)
        return query, key * 1.01

    module.rotary_emb.forward = turn
    return module


def packed(layer: int) -> Any:
    """Return an attention whose weights are packed for AMX."""
    module = llama(4)(layer)
    module.qkv_proj.use_intel_amx_backend = True
    return module


def quantised(layer: int) -> Any:
    """Return an attention with another linear method."""
    module = llama(4)(layer)
    module.qkv_proj.quant_method = object()
    return module


def found(make: Callable[[int], Any], kv_dtype: torch.dtype = torch.float32) -> Any:
    """Return what is known of a model's layers, or the sentence that refuses it."""
    from sgl_tiered.engines.sglang.layered.activations.projections import (
        find_projections,
    )
    from sgl_tiered.errors import EngineCompatibilityError

    gen = torch.Generator().manual_seed(5)
    model = Model(make)
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = torch.randn(parameter.shape, generator=gen) * 0.2
    try:
        layers = find_projections(model, LAYERS, kv_dtype)
    except EngineCompatibilityError as error:
        return str(error)
    one = layers[0]
    left = [len(m.qkv_proj._forward_pre_hooks) for m in attentions(model)]
    told = {
        "layers": len(layers),
        "hidden": layers.hidden,
        "kv_heads": one.num_kv_heads,
        "head_dim": one.head_dim,
        "bias": one.bias is not None,
        "rotary": one.rotary is not None,
        "shares_weights": one.weight.data_ptr() != 0
        and one.weight.untyped_storage().data_ptr()
        == layers.module(0).weight.untyped_storage().data_ptr(),
        "hooks_left": sum(left),
        "layer_params": layers.layer_params,
        "kept": layers[0] is one,
    }
    rotary = getattr(attentions(model)[0], "rotary_emb", None)
    if rotary is not None:
        rotary.cos_sin_cache = rotary.cos_sin_cache.clone()
        told["table_is_new"] = layers[0].rotary.cos_sin is rotary.cos_sin_cache
    return told


def attentions(model: Model) -> list[Any]:
    """Return the attentions of a model."""
    return [around.self_attn for around in model.layers]


def offloaded(make: Callable[[int], Any]) -> Any:
    """Return what is known of a model of which a part is in host memory."""
    from offload_support import offload

    from sgl_tiered.engines.sglang.layered.activations import offloaded as ours
    from sgl_tiered.engines.sglang.layered.activations.projections import (
        find_projections,
    )

    gen = torch.Generator().manual_seed(7)
    model = Model(make)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=gen) * 0.2
    layers = list(model.layers)
    first = sum(one.nbytes for one in layers[0].parameters())
    is_away = ours.is_away
    try:
        num_moved = offload(layers, first)
        before = [one.data_ptr() for one in model.parameters()]
        found = find_projections(model, LAYERS, torch.float32, "cpu")
        assert found.offloaded is not None
        return {
            "moved": num_moved,
            "away": {str(n): sorted(one) for n, one in found.offloaded.away.items()},
            "slot_bytes": found.offloaded.slot_bytes,
            "layer_bytes": found.offloaded.layer_bytes * LAYERS,
            "bytes": first,
            "at_home": before == [one.data_ptr() for one in model.parameters()],
            "kept": [one is not None for one in found._made],
        }
    finally:
        module: Any = ours
        module.is_away = is_away


def set_aside(layer: int) -> Any:
    """Return an attention whose weights are nowhere that we know of."""
    module = llama(4)(layer)
    module.qkv_proj.weight = torch.nn.Parameter(
        module.qkv_proj.weight.data.to("meta"), requires_grad=False
    )
    return module


def second_offloader() -> str:
    """Return what SGLang's other offloader says to a model that names no experts."""
    from sglang.srt.utils.offloader import OffloaderV2

    offloader = object.__new__(OffloaderV2)
    offloader.group_size = offloader.num_in_group = 1
    offloader.offloaders = []
    theirs = OffloaderV2.wrap_modules.__globals__
    there = theirs["get_stream"]
    theirs["get_stream"] = lambda name: None
    try:
        offloader.wrap_modules(iter([torch.nn.Linear(2, 2)]))
    except TypeError as error:
        return f"TypeError: {error}"
    finally:
        theirs["get_stream"] = there
    return "taken"


def untouched() -> bool:
    """Return whether the first offloader leaves a layer on a CPU as it is."""
    from sglang.srt.utils.offloader import OffloaderV1

    layer = torch.nn.Linear(2, 2)
    before = [one.data_ptr() for one in layer.parameters()]
    (same,) = OffloaderV1(1 << 30).wrap_modules(iter([layer]))
    after = [one.data_ptr() for one in same.parameters()]
    return same is layer and before == after and "forward" not in vars(layer)


def chosen(make: Callable[[int], Any], kv_heads: int, **settings: Any) -> Any:
    """Return how activations are used for a model, or the sentence that refuses it."""
    from sgl_tiered.core.layout import PageLayout
    from sgl_tiered.engines.sglang.layered.activations.choosing import choose
    from sgl_tiered.errors import TieredError
    from sgl_tiered.serving.option_reader import read_options

    args = {"chunked_prefill_size": 256, "max_running_requests": None}
    configurator = SimpleNamespace(
        model=Model(make),
        kv_cache_dtype=torch.float32,
        device="cpu",
        server_args=SimpleNamespace(resolved_dict=lambda: args),
        model_config=SimpleNamespace(context_len=1024),
    )
    gen = torch.Generator().manual_seed(6)
    for parameter in configurator.model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=gen) * 0.2
    layout = PageLayout(LAYERS, 16, kv_heads * HIDDEN // HEADS * 4)
    config = read_options({"layerkv": "on", **settings})
    try:
        told = choose(configurator, config, layout, 1024, None)
    except TieredError as error:
        return str(error)
    if told is None:
        return None
    demand = told.demand
    asked = None if demand is None else [demand.token_bytes, demand.chunk_pages]
    return {**told.stats(), "asked": asked}


def main() -> None:
    """Look at all of them."""
    start()
    cases: dict[str, Callable[[int], Any]] = {
        "llama": llama(4),
        "llama gqa": llama(2),
        "llama gptj": llama(4, rope_is_neox_style=False),
        "llama3": llama(4, rope_scaling=LLAMA3),
        "qwen2": qwen2(),
        "opt": opt,
        "qwen3": qwen3,
        "mrope": qwen2(rope_scaling=MROPE),
        "scaled keys": scaled_keys,
        "packed": packed,
        "quantised": quantised,
        "set aside": set_aside,
        "other": lambda layer: torch.nn.Linear(2, 2),
    }
    told = {name: found(make) for name, make in cases.items()}
    told["offloaded"] = {"llama": offloaded(llama(4)), "opt": offloaded(opt)}
    told["other offloader"] = second_offloader()
    told["untouched on a CPU"] = untouched()
    told["kv dtype"] = found(llama(4), torch.bfloat16)
    slow = {"emulate": "host:bandwidth=1MB"}
    told["chosen"] = {
        "off": chosen(llama(4), 4),
        "half": chosen(llama(4), 4, activations="0.5"),
        "auto": chosen(llama(4), 4, activations="auto", **slow),
        "auto gqa": chosen(llama(2), 2, activations="auto", **slow),
        "auto unknown": chosen(qwen3, 4, activations="auto", **slow),
        "unknown": chosen(qwen3, 4, activations="1"),
        "larger": chosen(llama(1), 1, activations="1"),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
