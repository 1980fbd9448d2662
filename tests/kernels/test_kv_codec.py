"""The encodings: all forms equal the reference, errors are bounded, NaN stays NaN."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from sgl_tiered_kernels import kv_codec
from sgl_tiered_kernels.kv_codec import reference

from sgl_tiered.core.encoded import LEVELS, EncodedLayout, encoded_layout
from sgl_tiered.core.ids import Encoding
from sgl_tiered.core.layout import PageLayout

pytest.importorskip("numba")

# page_tokens, kv_heads, head_dim, key_group, value_group: some are no power of two, and
# some no whole unit of 16.
SHAPES = [
    (16, 4, 64, 16, 64),
    (16, 1, 16, 16, 16),
    (32, 2, 128, 16, 32),
    (64, 2, 64, 64, 64),
    (3, 3, 5, 3, 5),
    (6, 1, 40, 2, 8),
    (1, 1, 1, 1, 1),
]
CODES = [
    (Encoding.FP8, 256, 256),
    (Encoding.INT8, 256, 256),
    (Encoding.INT4, 16, 16),
    (Encoding.INT4, 16, 11),
    (Encoding.INT4, 11, 8),
    (Encoding.INT4, 8, 16),
]
TYPES = ["uint16", "float16", "float32"]


def make_layout(shape, code, *, layers=2, itemsize=2):
    tokens, heads, dim, key_group, value_group = shape
    return EncodedLayout(
        layers,
        tokens,
        heads * dim * itemsize,
        code[0],
        heads,
        dim,
        key_levels=code[1],
        value_levels=code[2],
        key_group=key_group,
        value_group=value_group,
    )


def make_pool(layout, num_pages, dtype, seed=0, spread=2.0):
    """Numbers whose sizes differ from channel to channel, and channels off zero."""
    rng = np.random.default_rng(seed)
    shape = (num_pages * layout.page_tokens, layout.kv_heads, layout.head_dim)
    sizes = np.exp(rng.normal(0, spread, shape[1:]))
    both = []
    for _ in range(2):
        numbers = rng.normal(rng.normal(0, 1, shape[1:]), 1, shape) * sizes
        numbers[0, 0] = 0.0
        both.append(reference.float_as_rows(numbers.astype(np.float32), dtype))
    return both


def empty_pool(like):
    """A pool full of NaN, so that what is not written is seen."""
    nan = np.full(like.shape, np.nan, np.float32)
    return reference.float_as_rows(nan, like.dtype)


def encoded(form, layout, keys, values, pages, rows, num_rows=7):
    region = np.full((num_rows, layout.page_bytes + 5), 0xA5, np.uint8)
    for layer in range(layout.num_layers):
        form.encode_layer(layout, layer, region, rows, keys, values, pages)
    return region


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_encoded_bytes_are_the_references(shape, code):
    """Bit by bit, in chosen rows, and nothing else of the region is touched."""
    layout = make_layout(shape, code)
    for dtype in TYPES:
        keys, values = make_pool(layout, 4, dtype)
        rows, pages = np.array([5, 0, 3]), np.array([2, 3, 0])
        got = encoded(kv_codec, layout, keys, values, pages, rows)
        want = encoded(reference, layout, keys, values, pages, rows)
        np.testing.assert_array_equal(got, want)
        assert (got[[1, 2, 4, 6]] == 0xA5).all()
        assert (got[:, layout.page_bytes :] == 0xA5).all()


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoded_numbers_are_the_references(shape, code):
    """Of bytes that mean something, and of any bytes at all."""
    layout = make_layout(shape, code)
    rng = np.random.default_rng(1)
    for dtype in TYPES:
        keys, values = make_pool(layout, 3, dtype)
        rows, pages = np.array([4, 1]), np.array([2, 0])
        region = encoded(reference, layout, keys, values, pages, rows)
        noise = rng.integers(0, 256, region.shape, np.uint8)
        if layout.key_levels == 11 or layout.value_levels == 11:
            noise = region
        for data in (region, noise):
            got, want = ([empty_pool(keys), empty_pool(values)] for _ in range(2))
            kv_codec.decode_layer(layout, 1, *got, pages, data, rows)
            reference.decode_layer(layout, 1, *want, pages, data, rows)
            for one, other in zip(got, want, strict=True):
                assert one.dtype == keys.dtype
                np.testing.assert_array_equal(
                    reference.rows_as_float(one), reference.rows_as_float(other)
                )
                untouched = one[layout.page_tokens : 2 * layout.page_tokens]
                assert np.isnan(reference.rows_as_float(untouched)).all()


@pytest.mark.parametrize("code", CODES, ids=str)
def test_a_number_changes_by_half_a_step_at_most(code):
    """A step is the scale of its group, which is at most an eighth larger than needed.

    The steps of fp8 grow with the number: it is a sixteenth of it that may change.
    """
    layout = make_layout((32, 2, 64, 16, 32), code, layers=1)
    keys, values = make_pool(layout, 2, "float32", spread=3.0)
    rows = pages = np.arange(2)
    region = encoded(kv_codec, layout, keys, values, pages, rows)
    back = [empty_pool(keys), empty_pool(values)]
    kv_codec.decode_layer(layout, 0, *back, pages, region, rows)
    for source, found, levels, axis, group in (
        (keys, back[0], layout.key_levels, 1, (-1, 16, 128)),
        (values, back[1], layout.value_levels, 2, (64, -1, 32)),
    ):
        before, after = source.reshape(group), found.reshape(group)
        low, high = before.min(axis, keepdims=True), before.max(axis, keepdims=True)
        largest = np.maximum(abs(low), abs(high))
        if code[0] is Encoding.FP8:
            bound = np.maximum(abs(before) / 16, largest / 448 * 2.0**-9)
        else:
            bound = np.maximum((high - low) / (levels - 1), largest / 127) * 1.125 / 2
        assert (abs(after - before) <= bound * 1.001 + 1e-6).all()


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("evil", [np.nan, np.inf, -np.inf, 1e9])
def test_what_is_no_number_never_becomes_one(code, dtype, evil):
    """Its group comes back as NaN, and no other group is touched by it."""
    if evil == 1e9 and dtype == "float16":
        evil = np.inf
    layout = make_layout((16, 2, 32, 16, 16), code, layers=1)
    keys, values = make_pool(layout, 1, dtype)
    bad = np.array([evil], np.float32)
    keys[5, 1, 7] = values[3, 0, 20] = (
        bad.astype(np.float16) if dtype == "float16" else _raw(bad, dtype)
    )[0]
    rows = pages = np.zeros(1, np.int64)
    for form in (kv_codec, reference):
        region = encoded(form, layout, keys, values, pages, rows)
        back = [empty_pool(keys), empty_pool(values)]
        form.decode_layer(layout, 0, *back, pages, region, rows)
        key_nan, value_nan = (np.isnan(reference.rows_as_float(b)) for b in back)
        assert key_nan[:, 1, 7].all()
        assert key_nan.sum() == 16
        assert value_nan[3, 0, 16:].all()
        assert value_nan.sum() == 16


def _raw(values, dtype):
    if dtype == "uint16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values


@pytest.mark.parametrize("code", CODES, ids=str)
def test_single_tokens_are_those_of_whole_pages(code):
    """In any order, to any slot, and the others are left alone."""
    layout = make_layout((16, 2, 64, 8, 64), code)
    keys, values = make_pool(layout, 4, "uint16")
    rows, pages = np.array([6, 2, 3, 0]), np.arange(4)
    region = encoded(kv_codec, layout, keys, values, pages, rows)
    whole = [empty_pool(keys), empty_pool(values)]
    kv_codec.decode_layer(layout, 1, *whole, pages, region, rows)
    picked = np.random.default_rng(3).permutation(64)[:21]
    slots = np.random.default_rng(4).permutation(30)[:21]
    for form in (kv_codec, reference):
        few = [empty_pool(keys[:31]), empty_pool(values[:31])]
        form.decode_tokens(
            layout,
            1,
            *few,
            slots,
            region,
            rows[picked // 16],
            (picked % 16).astype(np.int8),
        )
        for one, other in zip(few, whole, strict=True):
            np.testing.assert_array_equal(one[slots], other[picked])
            left = np.setdiff1d(np.arange(31), slots)
            assert np.isnan(reference.rows_as_float(one[left])).all()


def test_zeros_and_equal_numbers_come_back_as_they_are():
    """A group without a range has no step to be wrong by, but its scale's."""
    layout = make_layout((16, 1, 16, 16, 16), CODES[2], layers=1)
    rows = np.zeros(1, np.int64)
    for number in (0.0, 1.0, -127.0, 2.0**-6):
        keys = np.full((16, 1, 16), number, np.float32)
        back = [empty_pool(keys), empty_pool(keys)]
        region = encoded(kv_codec, layout, keys, keys, rows, rows)
        kv_codec.decode_layer(layout, 0, *back, rows, region, rows)
        assert abs(back[0] - number).max() <= abs(number) / 127
        assert abs(back[1] - number).max() <= abs(number) / 127


@pytest.mark.parametrize("levels", LEVELS)
def test_codes_survive_packing(levels):
    """Every code in every place, in as many bytes as the layout says."""
    codes = np.random.default_rng(0).integers(0, levels, (40, 48), np.uint8)
    data = reference.pack(codes, levels)
    assert data.shape[1] * 16 == 48 * LEVELS[levels]
    np.testing.assert_array_equal(reference.unpack(data, levels), codes)


def test_fp8_is_torchs_e4m3():
    """Every code, and numbers between them, rounded as torch rounds them."""
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    values = np.append(reference._FP8, np.float32(np.nan))
    np.testing.assert_array_equal(np.concatenate([values, -values]), want)
    rng = np.random.default_rng(0)
    numbers = rng.normal(0, 1, 5000) * np.exp(rng.normal(0, 3, 5000))
    numbers = numbers.clip(-448, 448).astype(np.float32)
    exact = np.concatenate([want[:127], (want[1:127] + want[:126]) / 2])
    numbers = np.concatenate([numbers, exact, -exact])
    rounded = torch.from_numpy(numbers).to(torch.float8_e4m3fn).view(torch.uint8)
    np.testing.assert_array_equal(reference._as_fp8(numbers), rounded.numpy())


def test_int4_takes_four_bits_or_less():
    """Everything included, whatever the page, wherever the encoding is offered."""
    for tokens in (16, 32, 48, 64, 128):
        for dim in (16, 32, 64, 80, 128):
            raw = PageLayout(2, tokens, 4 * dim * 2)
            assert encoded_layout(raw, Encoding.INT4, 4, dim).ratio >= 4.0
            assert encoded_layout(raw, Encoding.INT8, 4, dim).ratio > 1.7


def test_calls_run_without_the_gil():
    """Another thread counts on while one call decodes for a while."""
    layout = make_layout((64, 8, 128, 64, 128), CODES[3], layers=1)
    kv_codec.prepare()
    keys = np.zeros((64 * 64, 8, 128), np.uint16)
    region = np.zeros((64, layout.page_bytes), np.uint8)
    rows = np.tile(np.arange(64), 4)
    seen = []

    def decode():
        for _ in range(4):
            kv_codec.decode_layer(
                layout, 0, keys, keys.copy(), np.arange(64), region, rows[:64]
            )
        seen.append(count)

    count = 0
    thread = threading.Thread(target=decode)
    thread.start()
    while thread.is_alive():
        count += 1
    thread.join()
    assert seen[0] > 0


def _good():
    layout = make_layout((16, 2, 32, 16, 32), CODES[1])
    keys, values = make_pool(layout, 2, "uint16")
    region = np.zeros((3, layout.page_bytes), np.uint8)
    return layout, keys, values, region


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer": 2},
        {"layer": -1},
        {"rows": [3]},
        {"rows": [-1]},
        {"rows": [0.5]},
        {"pages": [2]},
        {"pages": [0, 1]},
        {"region": "narrow"},
        {"region": "signed"},
        {"keys": "heads"},
        {"keys": "float64"},
        {"keys": "short"},
        {"keys": "strided"},
    ],
    ids=str,
)
def test_what_lies_outside_is_refused_before_the_first_byte(wrong):
    """In both directions."""
    layout, keys, values, region = _good()
    args = {"layer": 0, "rows": [1], "pages": [1], "region": region, "keys": keys}
    odd = {
        "narrow": region[:, :-1].copy(),
        "signed": region.view(np.int8),
        "heads": keys.reshape(32, 1, 64),
        "float64": keys.astype(np.float64),
        "short": keys[:16],
        "strided": np.repeat(keys, 2, axis=0)[::2],
    }
    args |= {k: odd.get(v, v) if isinstance(v, str) else v for k, v in wrong.items()}
    layer, data = args["layer"], args["region"]
    pool = (args["keys"], values)
    with pytest.raises(ValueError, match=r"\w"):
        kv_codec.encode_layer(layout, layer, data, args["rows"], *pool, args["pages"])
    with pytest.raises(ValueError, match=r"\w"):
        kv_codec.decode_layer(layout, layer, *pool, args["pages"], data, args["rows"])
    assert not region.any()


@pytest.mark.parametrize(
    "wrong", [{"tokens": [16]}, {"slots": [32]}, {"rows": [3]}, {"tokens": [1, 2]}]
)
def test_a_token_that_is_not_there_is_refused(wrong):
    """Before anything is written."""
    layout, keys, values, region = _good()
    args = {"slots": [1], "rows": [1], "tokens": [1]} | wrong
    before = keys.copy()
    with pytest.raises(ValueError, match=r"\w"):
        kv_codec.decode_tokens(
            layout, 0, keys, values, args["slots"], region, args["rows"], args["tokens"]
        )
    np.testing.assert_array_equal(keys, before)


def test_layouts_that_cut_something_off_are_refused():
    """Groups that do not divide, unknown steps, and encodings without codes."""
    raw = PageLayout(1, 16, 256)
    for options in (
        {"key_group": 5},
        {"value_group": 48},
        {"key_levels": 9},
    ):
        with pytest.raises(ValueError, match=r"\w"):
            encoded_layout(raw, Encoding.INT4, 2, 64, **options)
    with pytest.raises(ValueError, match="no 96 numbers"):
        encoded_layout(raw, Encoding.INT8, 2, 48)
    with pytest.raises(ValueError, match="RAW"):
        encoded_layout(raw, Encoding.RAW, 2, 64)
