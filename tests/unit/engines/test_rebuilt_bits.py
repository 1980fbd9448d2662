"""K and V rebuilt from activations have the bits that SGLang gave them on a CPU."""

from __future__ import annotations

import warnings

import pytest

pytestmark = pytest.mark.sglang
torch = pytest.importorskip("torch")

from sgl_tiered_kernels.kv_gen import (  # noqa: E402
    KVProjection,
    Rotary,
    rebuild_kv,
)

HIDDEN, HEADS, DIM, NUM_POSITIONS = 320, 6, 64, 512
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
ROTATIONS = {
    "neox": (DIM, True, None, None),
    "gptj": (DIM, False, None, None),
    "neox half": (DIM // 2, True, None, None),
    "gptj half": (DIM // 2, False, None, None),
    "llama3": (DIM, True, LLAMA3, None),
    "wide table": (DIM, True, None, torch.float32),
    "none": None,
}
"""Numbers rotated, style, scaling, the table's type (the model's if None)."""


@pytest.fixture(scope="module")
def get_rope():
    """SGLang's own maker of rotary embeddings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, where there is no CUDA
        from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope


@pytest.mark.parametrize("place", ["run", "apart"])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("kv_heads", [6, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_the_bits_are_those_of_the_fused_projection(
    get_rope, dtype, kv_heads, rotation, place
):
    """As many tokens in one product give the same K and V, whichever columns it has."""
    gen = torch.Generator().manual_seed(kv_heads)
    width = (HEADS + 2 * kv_heads) * DIM
    weight = (torch.randn((width, HIDDEN), generator=gen) * HIDDEN**-0.5).to(dtype)
    bias = torch.randn(width, generator=gen).to(dtype) if rotation == "none" else None
    turn = rotary = None
    if ROTATIONS[rotation] is not None:
        dim, neox, scaling, table = ROTATIONS[rotation]
        turn = get_rope(DIM, dim, NUM_POSITIONS, 10000, neox, scaling, table or dtype)
        rotary = Rotary(turn.cos_sin_cache, neox)
    projection = KVProjection.from_fused(weight, bias, kv_heads, DIM, rotary)
    for count in (1, 3, 16, 77, 200):
        acts = torch.randn((count, HIDDEN), generator=gen).to(dtype)
        positions = torch.randint(NUM_POSITIONS, (count,), generator=gen)
        slots = torch.arange(2, count + 2)
        if place == "apart":
            slots = torch.randperm(count + 4, generator=gen)[:count]
        outs = [torch.zeros((count + 4, kv_heads, DIM), dtype=dtype) for _ in "kv"]
        rows = torch.arange(count)
        rebuild_kv(acts, rows, projection, *outs, slots, positions)
        qkv = torch.nn.functional.linear(acts, weight, bias)
        size = kv_heads * DIM
        query, keys, values = qkv.split([HEADS * DIM, size, size], dim=-1)
        part = torch.nn.functional.linear(acts, projection.weight, projection.bias)
        same = torch.equal(part, qkv[:, HEADS * DIM :])
        if turn is not None:
            _, keys = turn.forward_native(positions, query, keys)
        eps = torch.finfo(dtype).eps
        for out, wanted in zip(outs, (keys, values), strict=True):
            wanted = wanted.reshape(count, kv_heads, DIM)
            torch.testing.assert_close(out[slots], wanted, atol=20 * eps, rtol=eps)
            assert not same or torch.equal(out[slots], wanted)
        if not same:
            pytest.skip("this machine's products depend on how many columns they have")
