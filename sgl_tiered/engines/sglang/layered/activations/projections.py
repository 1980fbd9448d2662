"""What makes K and V of a layer in SGLang's loaded model, tried before it is trusted.

A layer is taken by its shape (a fused, plain ``qkv_proj`` below an attention), and then
its own forward is run as far as its attention, on random input: what it hands to
attention has to be what rebuilding from the projection's input gives. Whatever else a
model does on the way (norms of keys, other rotations, packed or quantised weights)
shows there, and is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sgl_tiered_kernels.kv_gen import KVProjection, Rotary, rebuild_kv

from sgl_tiered.engines.sglang.layered.activations.offloaded import (
    OffloadedWeights,
    on_device,
)
from sgl_tiered.errors import EngineCompatibilityError

__all__ = ["LayerProjections", "LayerShape", "find_projections", "projected_modules"]

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


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer's projection looks like, wherever its weights are.

    Attributes:
        hidden: numbers of an activation.
        num_kv_heads: of this rank.
        head_dim: numbers of a head.
        dtype: of an activation, which is that of the weights.
        has_rotary, has_bias: whether it has them.
    """

    hidden: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    has_rotary: bool
    has_bias: bool


class LayerProjections:
    """The projections of all layers, over the weights that the model computes with.

    Args:
        modules: of the layers' attention, in order.
        layer_params: parameters of one layer, all of it.
        device: that computes.
        offloaded: parameters that are in host memory; None where none are.
    """

    def __init__(
        self,
        modules: list[Any],
        layer_params: int,
        device: torch.device,
        offloaded: OffloadedWeights | None = None,
    ) -> None:
        self._modules = modules
        self.device = device
        self.offloaded = offloaded
        # Read and replaced as a whole: several threads rebuild.
        self._made: list[_Made | None] = [None] * len(modules)
        self.layer_params = layer_params

    def __len__(self) -> int:
        return len(self._modules)

    def module(self, layer: int) -> Any:
        """Return the ``qkv_proj`` of a layer."""
        return self._modules[layer].qkv_proj

    @property
    def linears(self) -> list[Any]:
        """The ``qkv_proj`` of all layers."""
        return [module.qkv_proj for module in self._modules]

    @property
    def shape(self) -> LayerShape:
        """What the first layer's looks like, and those of the others."""
        module = self._modules[0]
        linear = module.qkv_proj
        return LayerShape(
            int(linear.weight.shape[1]),
            int(module.attn.tp_k_head_num),
            int(module.attn.qk_head_dim),
            linear.weight.dtype,
            getattr(module, "rotary_emb", None) is not None,
            getattr(linear, "bias", None) is not None,
        )

    @property
    def hidden(self) -> int:
        """Numbers of an activation."""
        return self.shape.hidden

    @property
    def dtype(self) -> torch.dtype:
        """Type of an activation, which is that of the weights."""
        return self.shape.dtype

    def __getitem__(self, layer: int) -> KVProjection:
        """Return the projection of a layer, over its tables as they are now.

        SGLang puts longer tables in the place of those that are too short.

        Raises:
            ValueError: the weights are no fused projection.
        """
        module, known = self._modules[layer], self._made[layer]
        turn: Any = getattr(module, "rotary_emb", None)
        table = None if turn is None else turn.cos_sin_cache
        weights = module.qkv_proj.weight.data_ptr()
        if known is not None and known.table is table and known.weights == weights:
            return known.projection
        made = self.over(layer)
        self._made[layer] = _Made(made, weights, table)
        return made

    def over(
        self,
        layer: int,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> KVProjection:
        """Return the projection of a layer over a copy of its parameters.

        Args:
            layer: which.
            weight, bias: copies; None for the layer's own, if it has them.

        Raises:
            ValueError: the weights are no fused projection.
        """
        module = self._modules[layer]
        linear = module.qkv_proj
        turn: Any = getattr(module, "rotary_emb", None)
        return KVProjection.from_fused(
            linear.weight if weight is None else weight,
            getattr(linear, "bias", None) if bias is None else bias,
            module.attn.tp_k_head_num,
            module.attn.qk_head_dim,
            None if turn is None else Rotary(turn.cos_sin_cache, turn.is_neox_style),
        )

    def forget(self, layer: int) -> None:
        """Let go of what was made of a layer's parameters."""
        self._made[layer] = None


def find_projections(
    model: torch.nn.Module,
    num_layers: int,
    kv_dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> LayerProjections:
    """Return the projections of a loaded model, each of them tried.

    Args:
        model: SGLang's.
        num_layers: of the KV pool.
        kv_dtype: that it holds.
        device: that computes; parameters may be in host memory (``offloaded.py``).

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
    for layer, module in sorted(modules.items()):
        reason = _refused_shape(module)
        if reason is not None:
            raise _refused(f"{reason} in layer {layer} of {type(model).__name__}")
    device = torch.device(device)
    ordered = [modules[layer] for layer in range(num_layers)]
    layers = _decoder_layers(model, [named[layer][0] for layer in range(num_layers)])
    offloaded = OffloadedWeights(layers, [one.qkv_proj for one in ordered], device)
    projections = LayerProjections(
        ordered,
        sum(int(one.numel()) for one in layers[0].parameters()),
        device,
        offloaded if offloaded.away else None,
    )
    if projections.dtype != kv_dtype:
        raise _refused(f"KV of {kv_dtype} and weights of {projections.dtype}")
    for layer in range(num_layers):
        with on_device(modules[layer], device):
            reason = _tried(projections, modules[layer], layer)
        if offloaded.away:
            # It is over copies that end with the trial.
            projections.forget(layer)
        if reason is not None:
            raise _refused(f"{reason} in layer {layer} of {type(model).__name__}")
    return projections


def projected_modules(model: torch.nn.Module) -> list[Any]:
    """Return the fused projections of a model, layer by layer; empty for none."""
    return [module.qkv_proj for _, (_, module) in sorted(_attentions(model).items())]


def _decoder_layers(
    model: torch.nn.Module, names: Sequence[str]
) -> list[torch.nn.Module]:
    """Return the modules that own the attentions of these names."""
    return [model.get_submodule(name.rpartition(".")[0]) for name in names]


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
    if any(one.is_meta for one in linear.parameters()):
        return "a projection whose weights SGLang keeps elsewhere (--offload-mode)"
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
