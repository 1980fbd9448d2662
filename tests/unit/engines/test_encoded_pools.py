"""SGLang's pool over encoded pages: what comes back is near what went down."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sgl_tiered.cache.table import CacheTable  # noqa: E402
from sgl_tiered.core.encoded import EncodedLayout  # noqa: E402
from sgl_tiered.core.ids import Encoding, TierId  # noqa: E402
from sgl_tiered.engines.device.encoded_pools import EncodedCpuPool, encoded_pool_layout  # noqa: E402
from sgl_tiered.engines.device.pools import page_layout  # noqa: E402
from sgl_tiered.engines.sglang.page_forms import page_form  # noqa: E402
from sgl_tiered.errors import ConfigError, EngineCompatibilityError  # noqa: E402
from sgl_tiered.serving.lossy import kept_exact, marked_key  # noqa: E402
from sgl_tiered.serving.option_reader import read_options  # noqa: E402
from sgl_tiered.serving.options import Lossy, Options  # noqa: E402

NUM_LAYERS, HEADS, HEAD_DIM, NUM_PAGES, PAGE = 3, 2, 32, 8, 16
ENCODINGS = [Encoding.FP8, Encoding.INT8, Encoding.INT4]
ERRORS = {Encoding.FP8: 0.04, Encoding.INT8: 0.01, Encoding.INT4: 0.2}
"""Root mean square of what changes, over that of normal numbers."""


def fake_pool(page_tokens=PAGE, dtype=torch.bfloat16):
    torch.manual_seed(0)
    shape = ((NUM_PAGES + 1) * page_tokens, HEADS, HEAD_DIM)

    def buffers():
        return [torch.randn(shape).to(dtype) for _ in range(NUM_LAYERS)]

    return SimpleNamespace(k_buffer=buffers(), v_buffer=buffers())


def encoded_pool(encoding, page_tokens=PAGE, dtype=torch.bfloat16):
    pool = fake_pool(page_tokens, dtype)
    layout = encoded_pool_layout(pool, page_layout(pool, page_tokens), encoding)
    return pool, layout, EncodedCpuPool(pool, layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_pages_come_back_nearly_as_they_were(encoding, dtype):
    """In all layers, elsewhere in the pool, and nothing else moves."""
    pool, layout, device = encoded_pool(encoding, dtype=dtype)
    assert device.layout is layout
    memory = np.full((5, layout.slot_bytes), 0xEE, np.uint8)
    rows, sources, targets = (np.array(n) for n in ([4, 0], [1, 5], [7, 2]))
    before = [b.clone() for b in pool.k_buffer + pool.v_buffer]
    device.store_pages(memory, rows, sources, device.mark())
    assert (memory[[1, 2, 3]] == 0xEE).all()
    assert (memory[:, layout.page_bytes :] == 0xEE).all()
    for layer in range(NUM_LAYERS):
        device.load_layer(layer, memory, rows, targets, by_waiter=layer == 1)
    others = np.setdiff1d(np.arange(NUM_PAGES + 1), targets)
    for after, old in zip(pool.k_buffer + pool.v_buffer, before, strict=True):
        paged, former = (b.view(NUM_PAGES + 1, PAGE, -1) for b in (after, old))
        assert torch.equal(paged[others], former[others])
        error = (paged[targets].float() - former[sources].float()).pow(2).mean().sqrt()
        assert 0 < error < ERRORS[encoding]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_second_journey_changes_as_little_as_the_first(encoding):
    """Pages that were loaded, then offloaded again, do not wear away."""
    pool, layout, device = encoded_pool(encoding)
    memory = np.zeros((2, layout.slot_bytes), np.uint8)
    first = [b[PAGE : 2 * PAGE].clone() for b in pool.k_buffer + pool.v_buffer]
    row, page = np.zeros(1, np.int64), np.ones(1, np.int64)
    for _ in range(4):
        device.store_pages(memory, row, page, None)
        for layer in range(NUM_LAYERS):
            device.load_layer(layer, memory, row, page)
    for after, old in zip(pool.k_buffer + pool.v_buffer, first, strict=True):
        error = (after[PAGE : 2 * PAGE].float() - old.float()).pow(2).mean().sqrt()
        assert error < 1.5 * ERRORS[encoding]


def test_pages_are_smaller_below_the_device():
    """As the layout says, and tiers get as many more of them."""
    pool = fake_pool(64)
    raw = page_layout(pool, 64)
    assert raw.encoding is Encoding.RAW
    for encoding, ratio in zip(ENCODINGS, (1.9, 1.85, 4.0), strict=True):
        layout = encoded_pool_layout(pool, raw, encoding)
        assert layout.encoding is encoding
        assert raw.page_bytes / layout.page_bytes >= ratio
        assert raw.slot_bytes > layout.slot_bytes
        assert layout.token_bytes == raw.token_bytes
        ends = [layout.key_offset(n) for n in range(NUM_LAYERS)]
        assert np.diff(ends).tolist() == [layout.layer_page_bytes] * (NUM_LAYERS - 1)


def test_forms_that_differ_have_names_that_differ():
    """A namespace holds the name, so that no bytes are read as what they are not."""
    pool = fake_pool(32)
    raw = page_layout(pool, 32)
    forms = [encoded_pool_layout(pool, raw, encoding).form for encoding in ENCODINGS]
    layout = encoded_pool_layout(pool, raw, Encoding.INT4)
    for change in ({"key_levels": 16}, {"key_group": 16}, {"value_group": 16}):
        fields = {name: getattr(layout, name) for name in layout.__dataclass_fields__}
        forms.append(EncodedLayout(**(fields | change)).form)
    assert len(set(forms)) == len(forms)


def test_what_cannot_be_encoded_is_refused_in_a_sentence():
    """Other devices, other numbers, and pages too small to gain anything."""
    pool = fake_pool()
    raw = page_layout(pool, PAGE)
    pool.k_buffer = [buffer.to("meta") for buffer in pool.k_buffer]
    with pytest.raises(EngineCompatibilityError, match="on the CPU platform only"):
        encoded_pool_layout(pool, raw, Encoding.INT8)
    doubles = fake_pool(dtype=torch.float64)
    with pytest.raises(EngineCompatibilityError, match="float64"):
        encoded_pool_layout(doubles, page_layout(doubles, PAGE), Encoding.INT8)
    small = fake_pool(8)
    with pytest.raises(ConfigError, match="--page-size 16 or more"):
        encoded_pool_layout(small, page_layout(small, 8), Encoding.INT8)


def test_an_encoding_is_a_setting():
    """Off by default; with it, who says nothing refuses."""
    plain = read_options({"host_size": "1MB"})
    assert plain.lossy.encoding is Encoding.RAW
    assert not plain.is_lossy
    config = read_options({"host_size": "1MB", "encoding": "int4"})
    assert config.lossy.encoding is Encoding.INT4
    assert config.is_lossy
    assert config.lossy_default == "refuse"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, None),
        ({"encoding": "int8"}, "refuse"),
        ({"encoding": "int8", "lossy_default": "allow"}, "allow"),
        ({"sparsity": "load"}, "refuse"),
        ({"sparsity": "store", "lossy_default": "allow"}, "allow"),
    ],
)
def test_a_server_says_who_speaks_for_requests_that_do_not(settings, told):
    """Wherever KV may be altered, be it only on its way up."""
    pool = fake_pool()
    config = read_options({"host_size": "1MB", **settings})
    form = page_form(pool, page_layout(pool, PAGE), config)
    assert form.facts(config).get("lossy_default") == told


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"encoding": "sparse"}, "--tiered-encoding"),
        ({"lossy_default": "allow"}, "--tiered-lossy-default"),
        ({"encoding": "int8", "lossy_default": "yes"}, "--tiered-lossy-default"),
        ({"encoding": "int8", "layerkv": "on"}, "--tiered-encoding"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, flag):
    """In a sentence that names the flag."""
    with pytest.raises(ConfigError, match=flag):
        read_options({"host_size": "1MB", **settings})


def test_who_refuses_is_served_without_encoded_tiers():
    """And with raw ones, whatever else the server may do to KV of others."""
    exact = SimpleNamespace(extra_key="key")
    lossy = SimpleNamespace(extra_key=marked_key("key", allows=True))
    encoded = Options(lossy=Lossy(Encoding.FP8))
    assert kept_exact(exact, encoded)
    assert not kept_exact(lossy, encoded)
    assert not kept_exact(exact, Options())


def test_copies_of_a_table_are_in_its_encoding():
    """A whole page is one in the tiers' own encoding, and no other."""
    table = CacheTable((TierId.HOST,), (4,), 2, 100, Encoding.INT8)
    rows = table.alloc_rows(2)
    addresses = table.slots[0].alloc(2)
    entries = table.add_copies(0, rows[:1], addresses[:1])
    assert table.encoding[entries].tolist() == [Encoding.INT8]
    assert table.entry_of[0][rows[0]] == entries[0]
    table.add_copies(0, rows[1:], addresses[1:], encoding=Encoding.RAW)
    assert table.entry_of[0][rows[1]] == -1
