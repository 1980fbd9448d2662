"""What makes K and V of a layer in SGLang's loaded model, tried before it is trusted.

A layer is taken by its shape (a fused, plain ``qkv_proj`` below an attention), and then
its own forward is run as far as its attention, on random input: what it hands to
attention has to be what rebuilding from the projection's input gives. Whatever else a
model does on the way (norms of keys, other rotations, packed or quantised weights)
shows there, and is refused.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from sgl_tiered_kernels.kv_gen import KVProjection, Rotary, rebuild_kv

from sgl_tiered.errors import EngineCompatibilityError

__all__ = ["LayerProjections", "find_projections", "projected_modules"]

_NUM_TOKENS = 40
_MAX_POSITION = 4096
_SEED = 2411
_TRIAL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Of a layer that needs more than its input: there is no batch in a trial."""


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """A projection, and what it was made of."""

    projection: KVProjection
    weights: int
    table: torch.Tensor | None


class LayerProjections:
    """The projections of all layers, over the weights that the model computes with.

    Args:
        modules: of the layers' attention, in order.
        layer_params: parameters of one layer, all of it.
    """

    def __init__(self, modules: list[Any], layer_params: int) -> None:
        self._modules = modules
        # Read and replaced as a whole: several threads rebuild.
        self._made: list[_Made | None] = [None] * len(modules)
        self.layer_params = layer_params

    def __len__(self) -> int:
        return len(self._modules)

    def module(self, layer: int) -> Any:
        """Return the ``qkv_proj`` of a layer."""
        return self._modules[layer].qkv_proj

    @property
    def hidden(self) -> int:
        """Numbers of an activation."""
        return self[0].hidden

    @property
    def dtype(self) -> torch.dtype:
        """Type of an activation, which is that of the weights."""
        return self[0].weight.dtype

    def __getitem__(self, layer: int) -> KVProjection:
        """Return the projection of a layer, over its tables as they are now.

        SGLang puts longer tables in the place of those that are too short.

        Raises:
            ValueError: the weights are no fused projection.
        """
        module, known = self._modules[layer], self._made[layer]
        linear = module.qkv_proj
        turn: Any = getattr(module, "rotary_emb", None)
        table = None if turn is None else turn.cos_sin_cache
        weights = linear.weight.data_ptr()
        if known is not None and known.table is table and known.weights == weights:
            return known.projection
        made = KVProjection.from_fused(
            linear.weight,
            getattr(linear, "bias", None),
            module.attn.tp_k_head_num,
            module.attn.qk_head_dim,
            None if table is None else Rotary(table, turn.is_neox_style),
        )
        self._made[layer] = _Made(made, weights, table)
        return made


def find_projections(
    model: torch.nn.Module, num_layers: int, kv_dtype: torch.dtype
) -> LayerProjections:
    """Return the projections of a loaded model, each of them tried.

    Args:
        model: SGLang's.
        num_layers: of the KV pool.
        kv_dtype: that it holds.

    Raises:
        EngineCompatibilityError: one sentence that says what cannot be rebuilt.
    """
    named = _attentions(model)
    modules = {layer: module for layer, (_, module) in named.items()}
    if sorted(modules) != list(range(num_layers)):
        raise _refused(
            f"{len(modules)} layers of {type(model).__name__} with an attention and a "
            f"fused qkv projection that are known here, where its KV has {num_layers}"
        )
    around = model.get_submodule(named[0][0].rpartition(".")[0])
    projections = LayerProjections(
        [modules[layer] for layer in range(num_layers)],
        sum(int(one.numel()) for one in around.parameters()),
    )
    for layer, module in sorted(modules.items()):
        reason = _refused_shape(module)
        if reason is not None:
            raise _refused(f"{reason} in layer {layer} of {type(model).__name__}")
    if projections.dtype != kv_dtype:
        raise _refused(f"KV of {kv_dtype} and weights of {projections.dtype}")
    for layer in range(num_layers):
        reason = _tried(projections, modules[layer], layer)
        if reason is not None:
            raise _refused(f"{reason} in layer {layer} of {type(model).__name__}")
    return projections


def projected_modules(model: torch.nn.Module) -> list[Any]:
    """Return the fused projections of a model, layer by layer; empty for none."""
    return [module.qkv_proj for _, (_, module) in sorted(_attentions(model).items())]


def _attentions(model: torch.nn.Module) -> dict[int, tuple[str, Any]]:
    """Return names and modules that own a fused projection and an attention."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        attention = getattr(module, "attn", None)
        if isinstance(attention, RadixAttention) and hasattr(module, "qkv_proj"):
            found[attention.layer_id] = (name, module)
    return found


def _refused_shape(module: Any) -> str | None:
    """Say what in a layer is not known here; None if it all is."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    linear, rotary = module.qkv_proj, getattr(module, "rotary_emb", None)
    if not isinstance(getattr(linear, "quant_method", None), UnquantizedLinearMethod):
        return "a projection that is quantised or replaced (LoRA)"
    if getattr(linear, "use_intel_amx_backend", False):
        return "a projection whose weights are packed for AMX"
    if rotary is None:
        return None
    plain = type(rotary).forward_native is RotaryEmbedding.forward_native
    if not plain or hasattr(rotary, "sin_cos_cache"):
        return f"the rotary positions {type(rotary).__name__}"
    return None


class _SeenError(Exception):
    """Ends a trial forward where attention would begin."""


def _tried(projections: LayerProjections, module: Any, layer: int) -> str | None:
    """Compare a layer's own K and V with rebuilt ones; None if they are alike."""
    try:
        projection = projections[layer]
    except ValueError as error:
        return f"a projection that is not plain ({error})"
    gen = torch.Generator().manual_seed(_SEED + layer)
    hidden, dtype = projection.hidden, projection.weight.dtype
    device = projection.weight.device
    inputs = torch.randn((_NUM_TOKENS, hidden), generator=gen).to(device, dtype)
    num_positions = _MAX_POSITION
    if projection.rotary is not None:
        num_positions = projection.rotary.cos_sin.shape[0]
    positions = torch.randint(num_positions, (_NUM_TOKENS,), generator=gen)
    positions[0], positions[-1] = 0, num_positions - 1
    positions = positions.to(device)
    try:
        seen, own = _own(module, inputs, positions)
    except _TRIAL_ERRORS as error:
        return f"an attention that could not be tried ({type(error).__name__}: {error})"
    if seen.shape != inputs.shape:
        return f"an input of {list(seen.shape)} to the projection"
    # The trial may have let the table grow, or change its type.
    projection = projections[layer]
    shape = (_NUM_TOKENS, projection.num_kv_heads, projection.head_dim)
    rebuilt = [torch.zeros(shape, dtype=dtype, device=device) for _ in own]
    rows = torch.arange(_NUM_TOKENS, device=device)
    rebuild_kv(seen, rows, projection, rebuilt[0], rebuilt[1], rows, positions)
    for name, wanted, got in zip(("keys", "values"), own, rebuilt, strict=True):
        if wanted.numel() != got.numel() or wanted.dtype != got.dtype:
            return f"{name} of {list(wanted.shape)} and {wanted.dtype}"
        off = _distance(wanted.reshape(shape), got)
        # Nan is not below it either.
        if not off <= torch.finfo(dtype).eps:
            return f"{name} that its projection's input does not give ({off:.2g} off)"
    return None


def _own(
    module: Any, inputs: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Run an attention up to its core; return the projection's input, and K and V."""
    seen: list[torch.Tensor] = []
    own: list[tuple[torch.Tensor, torch.Tensor]] = []

    def at_projection(_: Any, args: tuple[Any, ...]) -> None:
        seen.append(args[0].detach().clone())

    def at_attention(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip("qkv", args, strict=False)) | kwargs
        own.append((named["k"].detach().clone(), named["v"].detach().clone()))
        raise _SeenError

    given = {
        "positions": positions,
        "hidden_states": inputs.clone(),
        "forward_batch": None,
    }
    names = inspect.signature(module.forward).parameters
    hooks = (
        module.qkv_proj.register_forward_pre_hook(at_projection),
        module.attn.register_forward_pre_hook(at_attention, with_kwargs=True),
    )
    try:
        with torch.inference_mode():
            module(**{name: one for name, one in given.items() if name in names})
    except _SeenError:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != 1 or len(own) != 1:
        raise RuntimeError(f"{len(seen)} projections for {len(own)} attentions")
    return seen[0], own[0]


def _distance(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Return the root of the mean square of the difference, of that of the numbers."""
    scale = wanted.double().square().mean()
    return float(((wanted.double() - got.double()).square().mean() / scale).sqrt())


def _refused(reason: str) -> EngineCompatibilityError:
    return EngineCompatibilityError(
        f"activations cannot be rebuilt for {reason}; leave --tiered-activations out."
    )
