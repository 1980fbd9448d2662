"""Which tier served a request: SGLang's figures, with CXL told from the host."""

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.pipelines.layerwise_load import LoadJob, Segment
from sgl_tiered.serving.attribution import cached_by_tier, note_load


def request(device=0, host=0, storage=0, *, retracted=False):
    return SimpleNamespace(
        cached_tokens_device=device,
        cached_tokens_host=host,
        cached_tokens_storage=storage,
        retracted_stain=retracted,
    )


def job(**pages):
    """Return a load of so many pages from each tier."""
    region = np.zeros((8, 4096), np.uint8)
    segments, start = [], 0
    for name, count in pages.items():
        rows = np.arange(count)
        source = TierId[name.upper()]
        segments.append(Segment(region, rows, start + rows, None, source))
        start += count
    return LoadJob(None, tuple(segments), np.arange(start))


def test_without_a_load_nothing_is_from_cxl():
    """SGLang's own figures stand as they are."""
    assert cached_by_tier(request(device=32, storage=16)) == {
        TierId.DEVICE: 32,
        TierId.HOST: 0,
        TierId.CXL: 0,
        TierId.DISK: 16,
    }


@pytest.mark.parametrize(
    ("pages", "host", "cxl"),
    [({"host": 3}, 48, 0), ({"cxl": 3}, 0, 48), ({"host": 1, "cxl": 2}, 16, 32)],
)
def test_a_host_hit_is_split(pages, host, cxl):
    """What the load took from CXL memory is not the host's."""
    req = request(device=16, host=48)
    note_load(req, job(**pages), 16)
    found = cached_by_tier(req)
    assert (found[TierId.HOST], found[TierId.CXL]) == (host, cxl)
    assert sum(found.values()) == 64


def test_the_last_load_before_admission_counts():
    """A load that was prepared again replaces the earlier one."""
    req = request(host=32)
    note_load(req, job(cxl=2), 16)
    note_load(req, job(host=2), 16)
    assert cached_by_tier(req)[TierId.CXL] == 0


def test_loads_after_a_retraction_are_left_out():
    """SGLang reports what was found at first, and so do we."""
    req = request(host=32)
    note_load(req, job(cxl=1, host=1), 16)
    req.retracted_stain = True
    note_load(req, job(cxl=2), 16)
    assert cached_by_tier(req)[TierId.CXL] == 16


def test_never_more_than_sglang_counts():
    """A hit that SGLang cut short is not given back by the split."""
    req = request(host=16)
    note_load(req, job(cxl=4), 16)
    found = cached_by_tier(req)
    assert (found[TierId.HOST], found[TierId.CXL]) == (0, 16)
