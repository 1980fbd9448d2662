"""What the quality bench reads back from an encoding is what the product would."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from offline.llama import LlamaShape

from sgl_tiered.core.encoded import encoded_layout, kept_bytes
from sgl_tiered.core.ids import Encoding
from sgl_tiered.core.layout import PageLayout

SHAPE = LlamaShape(2, 4, 2, 32, 1e-5, 10_000.0)


@pytest.fixture
def codecs(monkeypatch):
    """The three encodings for pages of 16 tokens."""
    from offline.codecs import make_codecs

    return make_codecs(("fp8", "int8", "int4"), SHAPE)


@pytest.fixture
def layer():
    """Keys and values of 40 tokens: two whole pages and a half."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(40, 2, 32, generator=generator) for _ in range(2))


def test_fewer_bits_are_further_off(codecs, layer) -> None:
    """Close at 8 bits, not at 4, and each number of whole pages went through."""
    errors = {}
    for name, codec in codecs.items():
        back = codec.round_trip(layer)
        assert [part.shape for part in back] == [part.shape for part in layer]
        differences = [(new - old)[:32] for new, old in zip(back, layer, strict=True)]
        errors[name] = max(float(d.square().mean().sqrt()) for d in differences)
        assert all((d != 0.0).float().mean() > 0.5 for d in differences)
    assert errors["int8"] < errors["fp8"] < errors["int4"] < 0.3


def test_a_page_that_is_not_full_stays_raw(codecs, layer) -> None:
    """As the cache stores whole pages only; its bytes count as raw ones."""
    for codec in codecs.values():
        for new, old in zip(codec.round_trip(layer), layer, strict=True):
            assert torch.equal(new[32:], old[32:])
        whole = codec.bytes_ratio(32)
        assert codec.bytes_ratio(40) == pytest.approx((32 * whole + 8) / 40)


def test_int4_is_a_quarter(codecs) -> None:
    """Scales included, of long pages."""
    assert codecs["int4"].bytes_ratio(2048) <= 0.3
    assert codecs["int8"].bytes_ratio(2048) <= 0.6


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_kept_tokens_have_the_bytes_that_a_sparse_load_reads(codecs, name) -> None:
    """The scales of a page's keys come as a whole, whatever is kept of it."""
    ratio = codecs[name].bytes_ratio
    kept = [np.arange(0, 40, 2), np.array([3, 33])]
    layout = encoded_layout(PageLayout(1, 16, 128), Encoding[name.upper()], 2, 32)
    pages = np.zeros((2, 2, 16), np.bool_)
    pages.reshape(2, 32)[0, ::2] = pages[1, 0, 3] = True
    read = sum(int(kept_bytes(layout, layer[None]).sum()) for layer in pages)
    # And of the page that is not full, 4 tokens and 1, as they are.
    assert ratio(40, kept) == pytest.approx((read + 5 * 256) / (2 * 40 * 256))
    half = ratio(32, [np.arange(0, 32, 2)])
    assert 0.5 * ratio(32) < half < ratio(32)
    assert ratio(40, [np.arange(40)] * 2) == pytest.approx(ratio(40))
