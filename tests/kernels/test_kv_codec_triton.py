"""The Triton form of the encodings equals the reference, bit by bit."""

from __future__ import annotations

import os

import numpy as np
import pytest
from sgl_tiered_kernels.kv_codec import reference

from sgl_tiered.core.encoded import EncodedLayout
from sgl_tiered.core.ids import Encoding

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

CASES = [
    (Encoding.FP8, (256, 256), (4, 2, 40, 2, 20)),
    (Encoding.INT8, (256, 256), (2, 1, 16, 2, 16)),
    (Encoding.INT4, (16, 11), (3, 3, 5, 3, 5)),
    (Encoding.INT4, (8, 16), (2, 5, 64, 2, 64)),
    (Encoding.INT4, (11, 8), (2, 2, 32, 2, 32)),
]
TYPES = {"uint16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def as_tensor(rows, device):
    """Rows of numpy as torch has them: uint16 is bfloat16."""
    if rows.dtype == np.uint16:
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(rows).to(device)


def as_float(tensor):
    return tensor.float().cpu().numpy()


def make_case(case, dtype, seed):
    """Layout, keys and values, with what is no number among them."""
    encoding, levels, (tokens, heads, dim, key_group, value_group) = case
    layout = EncodedLayout(
        2,
        tokens,
        heads * dim * 2,
        encoding,
        heads,
        dim,
        *levels,
        key_group,
        value_group,
    )
    rng = np.random.default_rng(seed)
    both = []
    for _ in range(2):
        sizes = np.exp(rng.normal(0, 2, (heads, dim)))
        shape = (3 * tokens, heads, dim)
        numbers = (rng.normal(1, 2, shape) * sizes).astype(np.float32)
        numbers[1, 0, 0], numbers[tokens, 0, 2] = np.nan, np.inf
        numbers[2 * tokens :, 0, 1] = 0.0
        rows = reference.float_as_rows(numbers, dtype)
        if dtype == "float16":
            rows[tokens, 0, 2] = np.inf
        both.append(rows)
    return layout, *both


def check_all(device, cases=CASES, types=tuple(TYPES)):
    """Encode and decode all cases on one device; raises on a difference."""
    from sgl_tiered_kernels.kv_codec import triton as kernel

    for seed, case in enumerate(cases):
        for dtype in types:
            layout, keys, values = make_case(case, dtype, seed)
            pages, rows = np.array([2, 0, 1]), np.array([3, 1, 0])
            want = np.full((4, layout.page_bytes + 3), 0x5A, np.uint8)
            got = torch.from_numpy(want.copy()).to(device)
            on_device = [torch.tensor(n, device=device) for n in (pages, rows)]
            pool = [as_tensor(r, device) for r in (keys, values)]
            reference.encode_layer(layout, 1, want, rows, keys, values, pages)
            kernel.encode_layer(layout, 1, got, on_device[1], *pool, on_device[0])
            np.testing.assert_array_equal(got.cpu().numpy(), want)
            nan = np.full(keys.shape, np.nan, np.float32)
            back = [reference.float_as_rows(nan, keys.dtype) for _ in "kv"]
            found = [as_tensor(r, device) for r in back]
            reference.decode_layer(layout, 1, *back, pages[:2], want, rows[:2])
            kernel.decode_layer(
                layout, 1, *found, on_device[0][:2], got, on_device[1][:2]
            )
            picked = np.array([layout.page_tokens - 1, 0], np.int8)
            slots = np.array([layout.page_tokens + 2, layout.page_tokens])
            sparse = (slots, want, rows[[2, 0]], picked)
            reference.decode_tokens(layout, 1, *back, *sparse)
            kernel.decode_tokens(
                layout,
                1,
                *found,
                torch.tensor(slots, device=device),
                got,
                torch.tensor(rows[[2, 0]], device=device),
                torch.tensor(picked, device=device),
            )
            for one, other in zip(found, back, strict=True):
                np.testing.assert_array_equal(
                    as_float(one), reference.rows_as_float(other)
                )


def test_the_interpreted_kernel_equals_the_reference(interpreted):
    """All cases, on any machine that has Triton."""
    assert interpreted == ["same"]


def test_what_does_not_fit_is_refused():
    """Before anything runs."""
    from sgl_tiered_kernels.kv_codec import triton as kernel

    layout, keys, values = make_case(CASES[1], "uint16", 0)
    pool = [as_tensor(r, "cpu") for r in (keys, values)]
    one = torch.zeros(1, dtype=torch.int64)
    good = torch.zeros((1, layout.page_bytes), dtype=torch.uint8)
    for layer, region, source in (
        (2, good, pool),
        (0, good[:, :-1].contiguous(), pool),
        (0, good.view(torch.int8), pool),
        (0, good, [pool[0].view(len(pool[0]), -1, 1), pool[1]]),
        (0, good, [pool[0], pool[1].float()]),
        (0, good, [p.double() for p in pool]),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            kernel.encode_layer(layout, layer, region, one, *source, one)
    with pytest.raises(ValueError, match="length"):
        kernel.decode_tokens(layout, 0, *pool, one, good, one, torch.zeros(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_compiled_kernel_equals_the_reference():
    """On a real device, all cases and types."""
    check_all("cuda")


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    check_all("cpu", CASES[:2], ("uint16",))
    check_all("cpu", CASES[2:4], ("uint16",))
    check_all("cpu", CASES[4:], ("float16", "float32"))
    print("same")
