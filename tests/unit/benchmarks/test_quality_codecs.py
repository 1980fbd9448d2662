"""What the quality bench reads back from an encoding is what the product would."""

from __future__ import annotations

import pytest
import torch
from offline.llama import LlamaShape

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
