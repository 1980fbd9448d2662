"""Rebuilt K and V equal the reference, and no slot is written but those asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sgl_tiered_kernels.kv_gen import (  # noqa: E402
    KVProjection,
    Rotary,
    rebuild_kv,
)
from sgl_tiered_kernels.kv_gen.reference import rebuild_reference  # noqa: E402

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ROTATIONS = ("none", "neox", "gptj", "neox half", "gptj half")
PLACES = ("pool", "staging", "heads apart")
NUM_POSITIONS = 300


@dataclass(frozen=True)
class Shape:
    """What is rebuilt, and how it lies in memory."""

    tokens: int = 7
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    hidden: int = 96
    rotation: str = "neox"
    bias: bool = False
    place: str = "pool"
    run: bool = False
    dtype: torch.dtype = torch.float32
    cache: torch.dtype = torch.float32
    numbers: torch.dtype = torch.int64


class Case:
    """Inputs and outputs; what must not be read or written holds NaN."""

    def __init__(self, shape, seed=0, device="cpu"):
        self.shape = shape
        gen = torch.Generator().manual_seed(seed)
        rows, slots = shape.tokens + 5, shape.tokens + 6
        self.rows = torch.randperm(rows, generator=gen)[: shape.tokens]
        self.slots = torch.randperm(slots, generator=gen)[: shape.tokens]
        if shape.run:
            self.rows = torch.arange(2, 2 + shape.tokens)
            self.slots = torch.arange(3, 3 + shape.tokens)
        self.rows, self.slots = (
            self.rows.to(shape.numbers),
            self.slots.to(shape.numbers),
        )
        self.positions = torch.randint(NUM_POSITIONS, (shape.tokens,), generator=gen)
        self.positions = self.positions.to(shape.numbers)
        acts = torch.full((rows, shape.hidden + 3), math.nan)
        acts[self.rows.long(), : shape.hidden] = torch.randn(
            (shape.tokens, shape.hidden), generator=gen
        )
        self.acts = acts.to(shape.dtype).to(device)[:, : shape.hidden]
        width = (shape.heads + 2 * shape.kv_heads) * shape.dim
        weight = torch.randn((width, shape.hidden), generator=gen)
        weight *= shape.hidden**-0.5
        weight[: shape.heads * shape.dim] = math.nan
        bias = torch.randn(width, generator=gen)
        bias[: shape.heads * shape.dim] = math.nan
        self.projection = KVProjection.from_fused(
            weight.to(shape.dtype).to(device),
            bias.to(shape.dtype).to(device) if shape.bias else None,
            shape.kv_heads,
            shape.dim,
            rotary_of(shape, device),
        )
        self.buffers, self.outs = outs_of(shape, slots, device)
        for name in ("rows", "slots", "positions"):
            setattr(self, name, getattr(self, name).to(device))

    def run(self, form=None):
        """Rebuild by the entry, or by a module with the kernel."""
        run = rebuild_kv if form is None else form.rebuild_kv
        given = (self.acts, self.rows, self.projection, *self.outs, self.slots)
        run(*given, None if self.projection.rotary is None else self.positions)

    def check(self):
        """Compare with the reference; raises on a difference, or on a stray write."""
        projection = on_cpu(self.projection)
        positions = None if projection.rotary is None else self.positions.cpu()
        wanted = rebuild_reference(
            self.acts.cpu(), self.rows.cpu(), projection, positions
        )
        eps = torch.finfo(self.shape.dtype).eps
        # A number of about 4 is rounded up to five times, its cosine once; and Triton's
        # interpreter cuts to bfloat16 where a device rounds.
        atol = 8 * eps if eps > 1e-6 else 1e-5
        slots = self.slots.long()
        for out, expected in zip(self.outs, wanted, strict=True):
            found = out[slots].float().cpu()
            torch.testing.assert_close(found, expected.float(), atol=atol, rtol=0)
            out[slots] = math.nan
        assert all(torch.isnan(buffer).all() for buffer in self.buffers)


def on_cpu(projection):
    rotary = projection.rotary
    return KVProjection(
        projection.weight.cpu(),
        None if projection.bias is None else projection.bias.cpu(),
        projection.num_kv_heads,
        projection.head_dim,
        None if rotary is None else Rotary(rotary.cos_sin.cpu(), rotary.neox),
    )


def rotary_of(shape, device):
    """A table as SGLang makes it; half of the head is rotated where it says so."""
    if shape.rotation == "none":
        return None
    dim = shape.dim // 2 if shape.rotation.endswith("half") else shape.dim
    steps = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.outer(torch.arange(NUM_POSITIONS).float(), steps)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return Rotary(table.to(shape.cache).to(device), shape.rotation.startswith("neox"))


def outs_of(shape, slots, device):
    """Return what must hold NaN but for the slots, and K's and V's views of it."""
    kind = {"dtype": shape.dtype, "device": device}
    many, heads, dim = slots, shape.kv_heads, shape.dim
    if shape.place == "staging":
        rows = torch.full((many, 2, heads, dim), math.nan, **kind)
        return (rows, rows), (rows[:, 0], rows[:, 1])
    if shape.place == "heads apart":
        rows = [torch.full((heads, many, dim), math.nan, **kind) for _ in "kv"]
        return rows, [row.transpose(0, 1) for row in rows]
    rows = [torch.full((many, heads, dim), math.nan, **kind) for _ in "kv"]
    return rows, rows


shapes = st.builds(
    Shape,
    tokens=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([32, 48, 64, 80, 128]),
    hidden=st.integers(1, 130),
    rotation=st.sampled_from(ROTATIONS),
    bias=st.booleans(),
    place=st.sampled_from(PLACES),
    run=st.booleans(),
    dtype=st.sampled_from(list(TYPES.values())),
    cache=st.sampled_from(list(TYPES.values())),
    numbers=st.sampled_from([torch.int64, torch.int32]),
    heads=st.just(6),
)


CUT_ROWS = Shape(tokens=17, dim=64, hidden=50, run=True, dtype=TYPES["bf16"], heads=6)
"""No whole number of tiles, by which oneDNN reads where there are units for them."""


@settings(max_examples=60)
@example(shape=CUT_ROWS, seed=0)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_the_cpu_form_equals_the_reference(shape, seed):
    """Whatever the shape, the rotation, the type and where rows and slots lie."""
    case = Case(shape, seed)
    case.run()
    case.check()


@pytest.mark.parametrize("run", [True, False], ids=["run", "apart"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES.keys())
def test_slots_in_a_run_and_apart_give_the_same_bits(dtype, rotation, place, run):
    """How many products there are and where they go changes no bit; nor do rows."""
    shape = Shape(
        tokens=33,
        kv_heads=3,
        heads=6,
        dim=48,
        rotation=rotation,
        bias=True,
        place=place,
        run=run,
        dtype=dtype,
    )
    case, plain = Case(shape), Case(shape)
    case.run()
    keys, values = direct(plain)
    slots = case.slots.long()
    assert torch.equal(case.outs[0][slots], keys)
    assert torch.equal(case.outs[1][slots], values)


def direct(case):
    """Return K and V as plain torch has them, each rotation a new tensor."""
    inputs = case.acts[case.rows.long()]
    projection, rotary = case.projection, case.projection.rotary
    both = torch.nn.functional.linear(inputs, projection.weight, projection.bias)
    shape = (len(both), projection.num_kv_heads, projection.head_dim)
    keys, values = (part.reshape(shape) for part in both.chunk(2, dim=-1))
    if rotary is None:
        return keys, values
    half = rotary.rotary_dim // 2
    table = rotary.cos_sin[case.positions.long()].to(keys.dtype).unsqueeze(1)
    cos, sin = table[..., :half], table[..., half:]
    turned = keys.clone()
    one = slice(0, half) if rotary.neox else slice(0, 2 * half, 2)
    other = slice(half, 2 * half) if rotary.neox else slice(1, 2 * half, 2)
    turned[..., one] = keys[..., one] * cos - keys[..., other] * sin
    turned[..., other] = keys[..., other] * cos + keys[..., one] * sin
    return turned, values


def test_a_rotation_turns_pairs_and_keeps_their_length():
    """At position 0 nothing turns; elsewhere the pairs' lengths stay, not the keys."""
    for rotation in ROTATIONS[1:]:
        shape = Shape(tokens=3, rotation=rotation, run=True)
        still, moved, plain = Case(shape), Case(shape), Case(shape)
        still.positions, moved.positions = torch.tensor([0, 0, 0]), torch.arange(1, 4)
        plain.projection = KVProjection(still.projection.weight, None, 2, 32)
        for case in (still, moved, plain):
            case.run()
        keys, turned, bare = (c.outs[0][3:6] for c in (still, moved, plain))
        assert torch.equal(keys, bare)
        assert (turned - keys).abs().max() > 0.1
        dim = still.projection.rotary.rotary_dim
        axis = -2 if rotation.startswith("neox") else -1
        split = (2, dim // 2) if axis == -2 else (dim // 2, 2)
        lengths = [
            part[..., :dim].unflatten(-1, split).norm(dim=axis)
            for part in (keys, turned)
        ]
        torch.testing.assert_close(*lengths)
        assert torch.equal(keys[..., dim:], turned[..., dim:])


def check_infinite(form=None, device="cpu"):
    """Let what is not rotated be infinite; raises if another number minds."""
    case = Case(Shape(rotation="neox half"), device=device)
    case.projection.weight[16:32].zero_()
    case.projection.weight[16:32, 0] = math.inf
    case.acts[:, 0] = 1.0
    case.run(form)
    keys = case.outs[0][case.slots]
    assert torch.isposinf(keys[:, 0, 16:]).all()
    assert torch.isfinite(keys[:, 0, :16]).all()


def test_numbers_beyond_the_rotated_part_may_be_infinite():
    """What is left alone stays what it is, and harms no other number of its head."""
    check_infinite()


def test_nothing_writes_nothing():
    """No tokens, with or without a row to take them from."""
    case = Case(Shape(tokens=0))
    case.run()
    case.check()


def given_arguments():
    case = Case(Shape(tokens=4, run=True))
    return case, {
        "acts": case.acts,
        "rows": case.rows,
        "projection": case.projection,
        "k_out": case.outs[0],
        "v_out": case.outs[1],
        "slots": case.slots,
        "positions": case.positions,
    }


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("acts", lambda t: t[0], "acts must be"),
        ("acts", lambda t: t[:, 1:], "acts must be"),
        ("acts", lambda t: t.to(torch.float16), "acts must be torch.float32"),
        ("acts", lambda t: t.to("meta"), "acts is on meta"),
        ("acts", lambda t: t.T.contiguous().T, "acts must have no gaps"),
        ("rows", lambda t: t + 6, "rows holds 11"),
        ("rows", lambda t: t - 3, "rows holds -1"),
        ("rows", lambda t: t.float(), "rows must be int64"),
        ("rows", lambda t: t[None], "rows must be"),
        ("rows", lambda t: t.repeat(2)[::2], "contiguous"),
        ("rows", lambda t: t[:3], "slots must be"),
        ("slots", lambda t: t + 4, "slots holds 10"),
        ("slots", lambda t: t.to(torch.int16), "slots must be int64"),
        ("slots", lambda t: t.to("meta"), "slots is on meta"),
        ("positions", lambda t: None, "positions are needed"),
        ("positions", lambda t: t + 300, "positions holds"),
        ("positions", lambda t: t[:2], "positions must be"),
        ("k_out", lambda t: t[:, :1], "k_out must be"),
        ("k_out", lambda t: t[:, :, :16], "k_out must be"),
        ("k_out", lambda t: t[:9], "k_out has 9 slots, and v_out 10"),
        ("v_out", lambda t: t.bfloat16(), "v_out must be torch.float32"),
        ("v_out", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "v_out"),
        ("v_out", lambda t: t.to("meta"), "v_out is on meta"),
    ],
)
def test_what_does_not_fit_is_refused(name, change, words):
    """One sentence says what; nothing is written."""
    case, arguments = given_arguments()
    with pytest.raises(ValueError, match=words):
        rebuild_kv(**arguments | {name: change(arguments[name])})
    assert all(torch.isnan(buffer).all() for buffer in case.buffers)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": torch.zeros(64, 8)}, "no fused projection"),
        ({"weight": torch.zeros(80, 8)}, "no fused projection"),
        ({"weight": torch.zeros(192)}, "no fused projection"),
        ({"num_kv_heads": 0}, "no fused projection"),
        ({"head_dim": 15, "weight": torch.zeros(90, 8)}, "must be even"),
        ({"weight": torch.zeros(192, 8, dtype=torch.int8)}, "weight must not be"),
        ({"weight": torch.zeros(8, 192).T}, "contiguous"),
        ({"bias": torch.zeros(64)}, "bias must be"),
        ({"bias": torch.zeros(192, dtype=torch.float16)}, "bias must be"),
        ({"bias": torch.zeros(192, device="meta")}, "bias is on meta"),
        ({"rotary": Rotary(torch.zeros(4, 18))}, "rotary_dim is 18"),
        ({"rotary": Rotary(torch.zeros(4, 16, device="meta"))}, "cos_sin is on meta"),
    ],
)
def test_a_projection_that_does_not_fit_is_refused(changes, words):
    """Before any activation is there; the same things fit as they should be."""
    arguments = {
        "weight": torch.zeros(192, 8),
        "bias": None,
        "num_kv_heads": 2,
        "head_dim": 16,
    }
    assert KVProjection.from_fused(**arguments).weight.shape == (64, 8)
    with pytest.raises(ValueError, match=words):
        KVProjection.from_fused(**arguments | changes)


@pytest.mark.parametrize(
    "table",
    [
        torch.zeros(16),
        torch.zeros(4, 15),
        torch.zeros(4, 0),
        torch.zeros(4, 16, dtype=torch.int32),
        torch.zeros(16, 4).T,
    ],
)
def test_a_table_that_does_not_fit_is_refused(table):
    """Cosines and sines come in pairs, as numbers, row by row."""
    with pytest.raises(ValueError, match="cos_sin must"):
        Rotary(table)


def test_the_projection_is_a_view():
    """No weight is copied, and none keeps a graph."""
    weight = torch.zeros(192, 8, requires_grad=True)
    projection = KVProjection.from_fused(weight, weight[:, 0].contiguous(), 2, 16)
    assert projection.weight.data_ptr() == weight[128:].data_ptr()
    assert not projection.weight.requires_grad
    assert not projection.bias.requires_grad


TRITON_SHAPES = [
    Shape(tokens=1, kv_heads=1, heads=1, hidden=33, rotation="none", bias=True),
    Shape(tokens=67, kv_heads=3, heads=6, dim=48, rotation="gptj half"),
    Shape(tokens=5, dim=128, hidden=65, rotation="neox half", bias=True),
    Shape(tokens=40, dim=80, rotation="gptj", place="staging", dtype=TYPES["bf16"]),
    Shape(tokens=65, rotation="neox", place="heads apart", dtype=TYPES["f16"]),
    Shape(tokens=9, dim=64, run=True, numbers=torch.int32, dtype=TYPES["f16"]),
    Shape(tokens=9, bias=True, dtype=TYPES["bf16"], cache=TYPES["bf16"]),
]


def check_triton(device):
    """Compare the Triton form on one device; raises on a difference."""
    from sgl_tiered_kernels.kv_gen import triton as form

    for seed, shape in enumerate(TRITON_SHAPES):
        case = Case(shape, seed, device)
        case.run(form)
        case.check()
    check_infinite(form, device)


def test_the_interpreted_kernel_equals_the_reference(interpreted):
    """All shapes, on any machine that has Triton."""
    assert interpreted == ["triton"]


@pytest.mark.parametrize(
    ("kind", "rotary_dim", "neox"),
    [("bf16", 64, True), ("fp16", 0, True), ("fp32", 32, False)],
)
def test_the_kernel_compiles_where_no_device_is(
    monkeypatch, tmp_path, kind, rotary_dim, neox
):
    """For sm_89, with its tensor cores; what it computes is tested elsewhere."""
    triton = pytest.importorskip("triton")
    from sgl_tiered_kernels.kv_gen import triton as form
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {
        "HEAD_DIM": 64,
        "ROTARY_DIM": rotary_dim,
        "NEOX": neox,
        "HAS_BIAS": rotary_dim == 0,
        "WIDEN": False,
        "TOKENS": 64,
        "PAIRS": 64,
        "DEPTH": 32,
    }
    pointers = dict.fromkeys(("rows", "slots", "positions"), "*i64")
    pointers |= dict.fromkeys(("acts", "weight", "bias", "k_out", "v_out"), f"*{kind}")
    pointers["cos_sin"] = "*fp32"
    names = [parameter.name for parameter in form._rebuild_kernel.params]
    kinds = {name: pointers.get(name, "i32") for name in names}
    source = ASTSource(
        form._rebuild_kernel, kinds | dict.fromkeys(constants, "constexpr"), constants
    )
    made = triton.compile(source, target=GPUTarget("cuda", 89, 32))
    assert ("mma.sync" in made.asm["ptx"]) == (kind != "fp32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_compiled_kernel_equals_the_reference():
    """On a real device, through the kernel and through the entry."""
    check_triton("cuda")
    large = Shape(130, 32, 8, 128, 1024, bias=True, dtype=torch.bfloat16)
    case = Case(large, device="cuda")
    case.run()
    case.check()


if __name__ == "__main__":
    check_triton("cpu")
    print("triton")
