"""Every launch of a Triton kernel by the product, seen without a device.

The product's own functions are called with small CPU tensors of the shapes and types of
service, and a recorder in the place of each kernel notes with what it would have been
launched. So the list follows the code: a variant is what Triton would compile. What a
kernel names in ``do_not_specialize`` makes no variants: neither by its alignment, nor
where it is 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from sgl_tiered_kernels.attention_mass import triton as mass
from sgl_tiered_kernels.kv_codec import triton as codec
from sgl_tiered_kernels.kv_gen import KVProjection, Rotary
from sgl_tiered_kernels.kv_gen import triton as kv_gen
from sgl_tiered_kernels.page_copy import triton as page_copy

from sgl_tiered.core.encoded import encoded_layout
from sgl_tiered.core.ids import Encoding
from sgl_tiered.core.layout import PageLayout

__all__ = ["Variant", "all_variants", "launches_of"]

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}
_ALIGNED = 16
_DIVISIBLE = [["tt.divisibility", _ALIGNED]]
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_IN_SAMPLE = 1
"""Variants of each name's kernel that the short check compiles."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One program that Triton compiles.

    Attributes:
        name: unique.
        kernel: the jitted function.
        signature: type of each argument.
        constants: value of each constexpr, and of arguments that are 1.
        attributes: what is divisible by 16, as Triton says it.
        options: of the compiler.
        arguments: what it was launched with, by name.
        is_sample: one of the few that the short check compiles.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    arguments: dict[str, Any]
    is_sample: bool = False

    @property
    def key(self) -> str:
        """Equal for equal programs."""
        parts = (self.signature, self.constants, self.attributes, self.options)
        return f"{self.kernel.__name__} {parts}"


@dataclass
class _Recorder:
    """Stands for a kernel and notes its launches."""

    kernel: Any
    launches: list[Variant] = field(default_factory=list)
    forced: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        del grid
        return self._note

    def _note(self, *args: Any, **named: Any) -> None:
        options = {key: named.pop(key) for key in _OPTIONS if key in named}
        values = dict(zip(self.kernel.arg_names, args, strict=False)) | named
        values |= {key: one for key, one in self.forced.items() if key in values}
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        for index, parameter in enumerate(self.kernel.params):
            name, at = parameter.name, (index,)
            value, is_special = values[name], not parameter.do_not_specialize
            is_one = is_special and type(value) is int and value == 1
            if parameter.is_constexpr or is_one:
                signature[name], constants[at] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[name] = _POINTERS[value.dtype]
                is_divisible = value.data_ptr() % _ALIGNED == 0
            elif isinstance(value, float):
                signature[name], is_divisible = "fp32", False
            else:
                signature[name] = "i32" if abs(value) < 1 << 31 else "i64"
                is_divisible = value % _ALIGNED == 0
            if parameter.do_not_specialize_on_alignment:
                is_divisible = False
            if is_divisible and is_special:
                attributes[at] = _DIVISIBLE
        self.launches.append(
            Variant("", self.kernel, signature, constants, attributes, options, values)
        )


def all_variants() -> list[Variant]:
    """Return the programs of all launches, each once, by the name of its first one."""
    found: dict[str, Variant] = {}
    taken: dict[str, int] = {}
    samples: dict[str, int] = {}
    for launch, variant in _launches():
        if variant.key in found:
            continue
        kernel = variant.kernel.__name__.strip("_").removesuffix("_kernel")
        name = f"{kernel}:{launch}"
        number = taken[name] = taken.get(name, 0) + 1
        if number > 1:
            name = f"{name}:{number}"
        is_sample = samples.get(kernel, 0) < _IN_SAMPLE
        samples[kernel] = samples.get(kernel, 0) + is_sample
        found[variant.key] = replace(variant, name=name, is_sample=is_sample)
    return list(found.values())


def launches_of(
    module: Any, run: Callable[[], None], *, is_wide: bool = False
) -> list[Variant]:
    """Return what is launched of a module's kernels while something runs; unnamed.

    Args:
        module: that holds the kernels, and the functions that launch them.
        run: calls those.
        is_wide: numbers are widened before they are multiplied, where that is asked.
    """
    kernels = [name for name in vars(module) if name.endswith("_kernel")]
    originals = {kernel: getattr(module, kernel) for kernel in kernels}
    # As on a GPU, where types are multiplied as they are; two types are widened.
    recorders = [
        _Recorder(one, forced={"WIDEN": is_wide}) for one in originals.values()
    ]
    for kernel, recorder in zip(kernels, recorders, strict=True):
        setattr(module, kernel, recorder)
    try:
        run()
    finally:
        for kernel, one in originals.items():
            setattr(module, kernel, one)
    return [launch for recorder in recorders for launch in recorder.launches]


def _launches() -> Iterator[tuple[str, Variant]]:
    for module, cases in (
        (page_copy, _page_copies),
        (kv_gen, _rebuilds),
        (mass, _masses),
        (codec, _codecs),
    ):
        for name, run, is_wide in cases():
            for launch in launches_of(module, run, is_wide=is_wide):
                yield name, launch


Case = tuple[str, Callable[[], None], bool]


def _rows(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


def _page_copies() -> Iterator[Case]:
    """Parts of a page per buffer: K and V of a layer up, all layers down."""

    def parts(
        part_bytes: int,
        num_parts: int,
        count: int,
        *,
        up: bool,
        first: int = 0,
        alignment: int = 16,
        form: str = "",
    ) -> None:
        row_bytes = -(-(num_parts * part_bytes) // 4096) * 4096
        if part_bytes % 4:
            row_bytes = num_parts * part_bytes + 1
        whole = torch.empty((count, row_bytes), dtype=torch.uint8)
        table, rows = _rows(num_parts), _rows(count)
        # A slice of the page numbers: its address is a multiple of 8 only.
        pages = _rows(count + first)[first:]
        ways: Any = {"alignment": alignment, "form": page_copy.FORMS[form]}
        if up:
            page_copy.scatter_parts(table, pages, whole, rows, 0, part_bytes, **ways)
        else:
            page_copy.gather_parts(whole, rows, 0, table, pages, part_bytes, **ways)

    def rows(nbytes: int) -> None:
        left, right = torch.empty((4, nbytes)), torch.empty((4, nbytes))
        page_copy.copy_rows(
            left.to(torch.uint8),
            _rows(4),
            0,
            right.to(torch.uint8),
            _rows(4),
            0,
            nbytes,
        )

    kib = 1 << 10
    for up in (True, False):
        word = "up" if up else "down"
        # Most of them are the same program: numbers of pages and layers make none.
        for name, size, num_parts, count, first, alignment in (
            ("llama8b_page16", 32 * kib, 2, 256, 0, 16),
            ("llama8b_page16_all_layers", 32 * kib, 64, 8, 0, 16),
            ("llama8b_page16_one_page", 32 * kib, 2, 1, 0, 16),
            ("llama8b_page16_sliced_pages", 32 * kib, 2, 256, 1, 16),
            ("llama8b_page64", 128 * kib, 2, 64, 0, 16),
            ("llama70b_tp4_page16", 8 * kib, 2, 255, 0, 16),
            ("one_block_odd_items", 2 * kib, 2, 3, 0, 16),
            ("one_part", 64 * kib, 1, 16, 0, 16),
            ("small_heads", 4 * 20, 2, 16, 0, 16),
            ("words", 4 * 21, 2, 16, 0, 16),
            ("words_at_odd_addresses", 32 * kib, 2, 256, 0, 4),
            ("bytes", 6, 2, 3, 0, 16),
        ):
            run = partial(
                parts, size, num_parts, count, up=up, first=first, alignment=alignment
            )
            yield f"{word}_{name}", run, False
        for form in filter(None, page_copy.FORMS):
            run = partial(parts, 32 * kib, 2, 256, up=up, form=form)
            yield f"{word}_{form}", run, False
    for name, nbytes in (("words", 32 * kib), ("odd_words", 4 * 33), ("bytes", 30)):
        yield name, partial(rows, nbytes), False


def _rebuilds() -> Iterator[Case]:
    """Llama, Qwen2.5, GPT-J, Phi-2, and OPT, whose positions are in the input."""
    models = (
        ("llama8b", 4096, 8, 128, 128, True, False),
        ("llama7b", 4096, 32, 128, 128, True, False),
        ("qwen7b", 3584, 4, 128, 128, True, True),
        ("gptj", 4096, 16, 256, 64, False, False),
        ("half_rotary", 2048, 32, 64, 32, True, True),
        ("opt7b", 4096, 32, 128, 0, True, True),
        ("phi2", 2560, 32, 80, 32, True, True),
    )
    for (kind, dtype), (
        name,
        hidden,
        heads,
        dim,
        turned,
        neox,
        has_bias,
    ) in itertools.product(_TYPES.items(), models):

        def run(
            dtype: torch.dtype = dtype,
            shape: tuple[int, int, int] = (hidden, heads, dim),
            turned: int = turned,
            neox: bool = neox,
            has_bias: bool = has_bias,
            tile: kv_gen.Tile | None = None,
        ) -> None:
            hidden, heads, dim = shape
            width = 2 * heads * dim
            rotary = Rotary(torch.empty((64, turned)), neox) if turned else None
            projection = KVProjection(
                torch.empty((width, hidden), dtype=dtype),
                torch.empty(width, dtype=dtype) if has_bias else None,
                heads,
                dim,
                rotary,
            )
            out = torch.empty((32, heads, dim), dtype=dtype)
            acts = torch.empty((32, hidden), dtype=dtype)
            numbers = _rows(32)
            kv_gen.rebuild_kv(
                acts, numbers, projection, out, out.clone(), numbers, _rows(32), tile
            )

        yield f"{kind}_{name}", run, False
        if (kind, name) == ("bf16", "llama8b"):
            for word, tile in kv_gen.TILES.items():
                yield f"{kind}_{name}_{word}", partial(run, tile=tile), False


def _masses() -> Iterator[Case]:
    """Attention received per key, statistics of rows, and small entries."""
    shapes = (
        ("llama8b", 32, 8, 128),
        ("small", 8, 4, 64),
        ("odd", 3, 3, 80),
    )
    for (kind, dtype), (name, heads, kv_heads, dim), has_positions in itertools.product(
        _TYPES.items(), shapes, (False, True)
    ):

        def run(
            dtype: torch.dtype = dtype,
            shape: tuple[int, int, int] = (heads, kv_heads, dim),
            has_positions: bool = has_positions,
            key_dtype: torch.dtype = dtype,
        ) -> None:
            heads, kv_heads, dim = shape
            query = torch.empty((48, heads, dim), dtype=dtype)
            keys = torch.empty((80, kv_heads, dim), dtype=key_dtype)
            positions = _rows(80) if has_positions else None
            out = torch.empty((kv_heads, 80))
            counts = torch.zeros(heads, dtype=torch.int64)
            mass.attention_mass(query, keys, None, 32, 0.1, out, 2, positions)
            mass.small_entries(query, keys, None, 32, 0.1, counts, -4.6, positions)

        yield f"{kind}_{name}{'_positions' if has_positions else ''}", run, False
        if name == "llama8b" and dtype is torch.bfloat16:
            wide = partial(run, key_dtype=torch.float32)
            word = "_positions" if has_positions else ""
            yield f"{kind}_{name}_fp32_keys{word}", wide, True


def _codecs() -> Iterator[Case]:
    """Every encoding, of every type of a pool."""
    heads, dim, tokens = 8, 128, 16
    for (kind, dtype), (name, encoding, steps) in itertools.product(
        _TYPES.items(),
        (
            ("fp8", Encoding.FP8, (None, None)),
            ("int8", Encoding.INT8, (None, None)),
            *(
                (f"int4_k{keys}v{values}", Encoding.INT4, (keys, values))
                for keys, values in ((16, 16), (11, 11), (8, 8))
            ),
        ),
    ):
        size = torch.empty((), dtype=dtype).element_size()
        layout = encoded_layout(
            PageLayout(2, tokens, heads * dim * size),
            encoding,
            heads,
            dim,
            key_levels=steps[0],
            value_levels=steps[1],
        )

        def run(dtype: torch.dtype = dtype, layout: Any = layout) -> None:
            region = torch.empty((4, layout.slot_bytes), dtype=torch.uint8)
            keys = torch.empty((4 * tokens, heads, dim), dtype=dtype)
            values = torch.empty_like(keys)
            codec.encode_layer(layout, 1, region, _rows(4), keys, values, _rows(4))
            codec.decode_layer(layout, 1, keys, values, _rows(4), region, _rows(4))

        yield f"{kind}_{name}", run, False
