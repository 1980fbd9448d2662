"""``--tiered-activations auto`` on CUDA: figures of a device that tests play."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sgl_tiered.core.clock import ManualClock  # noqa: E402
from sgl_tiered.core.layout import PageLayout  # noqa: E402
from sgl_tiered.cost.calibration import FitQuality, TokensFit  # noqa: E402
from sgl_tiered.engines.device import (  # noqa: E402
    device_figures,
    rebuild_probe,
)
from sgl_tiered.engines.device.device_figures import (  # noqa: E402
    DeviceFigures,
    TorchWork,
    sample_work,
)
from sgl_tiered.engines.sglang.layered.activations import choosing, projections  # noqa: E402
from sgl_tiered.engines.sglang.layered.activations.choosing import (  # noqa: E402
    Links,
    choose,
)
from sgl_tiered.errors import EngineCompatibilityError  # noqa: E402
from sgl_tiered.policies.activations.base import LayerFacts, PageLine  # noqa: E402
from sgl_tiered.policies.activations.choice import choose_share  # noqa: E402
from sgl_tiered.serving.option_reader import read_options  # noqa: E402
from sgl_tiered.serving.options import Loads  # noqa: E402

LAYERS, PAGE, HIDDEN, HEADS, DIM = 4, 16, 4096, 32, 128
DEVICE_TOKENS, HOST_PAGES = 4096, 2048
LAYOUT = PageLayout(LAYERS, PAGE, HEADS * DIM * 2)
GEN = TokensFit(10e-6, 0.4e-6, FitQuality(1.0, 0.0, 0.0, 3))
LINK = DeviceFigures(5e-6, 25e9, 2e12, 40e-6)
"""PCIe 4, and a rebuild that takes two thirds of a load."""
FAST = DeviceFigures(5e-6, 4e12, 2e12, 40e-6)
PROJECTION = 3 * HIDDEN * HIDDEN


class Played:
    """A server's start on CUDA, without CUDA: what was asked of the device."""

    def __init__(self, monkeypatch, figures=LINK, num_kv_heads=HEADS):
        self.probed, self.sampled = [], []
        self.figures = figures
        weight = torch.empty((3 * HIDDEN, HIDDEN), dtype=torch.float16, device="meta")
        linear = SimpleNamespace(weight=weight)
        shape = (HIDDEN, num_kv_heads, DIM, torch.float16, True, False)
        found = SimpleNamespace(
            shape=projections.LayerShape(*shape),
            hidden=HIDDEN,
            dtype=torch.float16,
            device=torch.device("cuda"),
            layer_params=4 * PROJECTION,
            offloaded=None,
            linears=[linear] * LAYERS,
            module=lambda layer: linear,
        )
        self.layout = PageLayout(LAYERS, PAGE, num_kv_heads * DIM * 2)
        monkeypatch.setattr(projections, "find_projections", lambda *args: found)
        monkeypatch.setattr(rebuild_probe, "probe_kv_gen", self._probe)
        monkeypatch.setattr(device_figures, "sample_device", self._sample)

    def _probe(self, *shape, device, **more):
        self.probed.append(device.type)
        return GEN

    def _sample(self, device, weights, num_rows):
        self.sampled.append((device.type, len(weights), num_rows))
        if isinstance(self.figures, Exception):
            raise self.figures
        return self.figures

    def choose(self, ranks=None, **settings):
        args = {"chunked_prefill_size": 2048, "max_running_requests": 8}
        configurator = SimpleNamespace(
            model=None,
            kv_cache_dtype=torch.float16,
            device="cuda",
            server_args=SimpleNamespace(resolved_dict=lambda: args),
            model_config=SimpleNamespace(context_len=4096),
        )
        given = {
            "layerkv": "on",
            "activations": "auto",
            "layerkv_host_size": str(HOST_PAGES * self.layout.slot_bytes),
        }
        loads = Loads(calibration=settings.pop("calibration", None))
        told = replace(read_options({**given, **settings}), loads=loads)
        return choose(configurator, told, self.layout, DEVICE_TOKENS, ranks)


def facts(figures, latency_s=0.0):
    """Return a layer of the full server, worked out by hand."""
    latency_s += figures.latency_s
    kv_bytes, act_bytes = 2 * HEADS * DIM * 2 * PAGE, HIDDEN * 2 * PAGE
    up = figures.upload_bytes_per_s
    return LayerFacts(
        num_pages=HOST_PAGES,
        device_bytes=DEVICE_TOKENS // PAGE * kv_bytes,
        kv_page_bytes=kv_bytes,
        act_page_bytes=act_bytes,
        kv_gen=PageLine(GEN.overhead_s, GEN.token_s * PAGE),
        load_kv=PageLine(latency_s, kv_bytes / up),
        load_act=PageLine(latency_s, act_bytes / up),
        load_weights_s=0.0,
        compute_s=4 * figures.projection_s
        + HOST_PAGES * kv_bytes / figures.memory_bytes_per_s,
    )


def test_a_slow_link_makes_activations_pay(monkeypatch):
    """The share is the policy's, of device, link and rebuild as they were sampled."""
    server = Played(monkeypatch)
    told = server.choose()
    wanted = choose_share(facts(LINK), HIDDEN, HEADS, DIM)
    assert 0.3 < wanted.share < 1.0
    assert (told.share, told.reason) == (wanted.share, wanted.reason)
    assert told.demand.share == wanted.share
    assert told.load_kv == facts(LINK).load_kv
    assert server.probed == ["cuda"]
    assert server.sampled == [("cuda", LAYERS, 8)]


def test_a_slower_device_keeps_fewer(monkeypatch):
    """What memory and projections take is time that is not there for rebuilds."""
    slow = DeviceFigures(LINK.latency_s, LINK.upload_bytes_per_s, 0.2e12, 400e-6)
    shares = [Played(monkeypatch, one).choose().share for one in (LINK, slow)]
    assert 0.0 < shares[1] < shares[0]


def test_an_idle_link_is_left_to_kv(monkeypatch):
    """And the sentence says so; nothing is built."""
    told = Played(monkeypatch, FAST).choose()
    assert (told.share, told.demand) == (0.0, None)
    assert "the link is idle" in told.reason


def test_grouped_queries_are_refused_before_anything_is_sampled(monkeypatch):
    """Their activations are the larger ones whatever the device does."""
    server = Played(monkeypatch, num_kv_heads=8)
    told = server.choose()
    assert told.share == 0.0
    assert "nothing would be saved" in told.reason
    assert not server.probed
    assert not server.sampled


def test_a_device_that_cannot_be_sampled_keeps_kv(monkeypatch):
    """A start with too little memory goes on, and says why there are none."""
    told = Played(monkeypatch, RuntimeError("CUDA out of memory")).choose()
    assert (told.share, told.demand) == (0.0, None)
    assert "CUDA out of memory" in told.reason


def test_a_share_that_is_asked_for_samples_no_link(monkeypatch):
    """It would change nothing."""
    server = Played(monkeypatch, RuntimeError("sampled"))
    assert server.choose(activations="0.5").share == 0.5
    assert not server.sampled


def test_a_model_that_cannot_be_rebuilt_is_an_answer(monkeypatch):
    """As on a CPU: auto leaves activations out."""
    server = Played(monkeypatch)

    def refuse(*args):
        raise EngineCompatibilityError("norms of keys")

    monkeypatch.setattr(projections, "find_projections", refuse)
    told = server.choose()
    assert (told.share, told.reason) == (0.0, "norms of keys")


@pytest.mark.parametrize("has_decode", [False, True])
def test_a_calibrated_link_is_believed(monkeypatch, has_decode):
    """Nothing is sampled where link and decode are in the file."""
    link = SimpleNamespace(latency_s=1e-6, bytes_per_s=10e9)
    decode = SimpleNamespace(seconds=lambda rows, tokens: LAYERS * 0.002)
    calibration = SimpleNamespace(
        rebuild=None,
        decode=decode if has_decode else None,
        link=lambda source, target: link,
    )
    monkeypatch.setattr(choosing, "read_calibration", lambda path: calibration)
    server = Played(monkeypatch)
    told = server.choose(calibration="a.json")
    assert told.load_kv.overhead_s == 1e-6
    assert told.load_kv.page_s == LAYOUT.layer_page_bytes / 10e9
    assert len(server.sampled) == (not has_decode)
    assert told.share > 0.0


def test_the_first_rank_decides(monkeypatch):
    """A rank whose own device could not be sampled does as it is told."""
    said = json.dumps([0.5, "the first rank", 1e-6, 2e-6]).encode()
    ranks = SimpleNamespace(gather=lambda own: [said, own])
    told = Played(monkeypatch, RuntimeError("full")).choose(ranks)
    assert (told.share, told.reason) == (0.5, "the first rank")
    assert told.kv_gen == PageLine(1e-6, 2e-6)


def test_an_emulated_latency_is_on_top_of_a_real_link():
    """A bandwidth that is emulated stays; one that is not is sampled."""
    told = {"layerkv": "on", "emulate": "host:latency=0.001"}
    link = Links.known(read_options(told), None).sampled(LINK)
    assert link == Links(0.001 + LINK.latency_s, LINK.upload_bytes_per_s, True)
    told["emulate"] = "host:bandwidth=1GB"
    link = Links.known(read_options(told), None)
    assert link.sampled(LINK) == link


class PlayedWork:
    """Takes a line of time for each kind of work; a first and a busy run take more."""

    def __init__(self, clock):
        self.clock, self.num_calls = clock, 0

    def _take(self, overhead_s, each_s, size):
        # The first round, and later one run in four.
        is_slow = self.num_calls % 12 < 2 or self.num_calls % 4 == 3
        self.num_calls += 1
        self.clock.advance(overhead_s + each_s * size + (0.5 if is_slow else 0.0))

    def upload(self, num_bytes):
        self._take(20e-6, 1 / 25e9, num_bytes)

    def copy(self, num_bytes):
        self._take(10e-6, 1 / 1e12, num_bytes)

    def project(self, num_runs):
        self._take(15e-6, 30e-6, num_runs)


def test_lines_are_found_behind_waits_and_busy_moments():
    """Launches are no work, and a copy in memory reads and writes."""
    clock = ManualClock()
    figures = sample_work(PlayedWork(clock), clock)
    assert figures.latency_s == pytest.approx(20e-6, rel=1e-3)
    assert figures.upload_bytes_per_s == pytest.approx(25e9, rel=1e-3)
    assert figures.memory_bytes_per_s == pytest.approx(2e12, rel=1e-3)
    assert figures.projection_s == pytest.approx(30e-6, rel=1e-3)


def test_a_clock_that_sees_nothing_gives_no_zero():
    """Figures are divided by."""
    work = SimpleNamespace(
        upload=lambda n: None, copy=lambda n: None, project=lambda n: None
    )
    figures = sample_work(work, ManualClock())
    assert figures.latency_s == 0.0
    assert 0.0 < figures.upload_bytes_per_s < float("inf")
    assert figures.projection_s > 0.0


def test_the_work_is_done(monkeypatch):
    """So many bytes up and across, and each layer's weights in turn."""
    weights = [torch.full((6, 4), float(n)) for n in range(3)]
    cpu = torch.device("cpu")
    work = TorchWork(cpu, weights, 2, upload_bytes=64, copy_bytes=128)
    work.upload(40)
    assert work.near.sum() == 40
    work.copy(30)
    assert work.far.sum() == 30
    used = []
    linear = torch.nn.functional.linear

    def seen(inputs, weight):
        assert inputs.shape == (2, 4)
        used.append(int(weight[0, 0]))
        return linear(inputs, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", seen)
    work.project(2)
    work.project(3)
    assert used == [0, 1, 2, 0, 1]


def test_weights_elsewhere_are_not_timed_there():
    """Of layers in other memory; of none that is here, a copy."""
    cpu = torch.device("cpu")
    away = torch.empty((6, 4), device="meta")
    work = TorchWork(cpu, [away, torch.ones(6, 4)], 2, upload_bytes=8, copy_bytes=8)
    assert [one.device.type for one in work._weights] == ["cpu"]
    meta = torch.device("meta")
    moved = TorchWork(meta, [torch.ones(6, 4)], 2, upload_bytes=8, copy_bytes=8)
    assert [one.device.type for one in moved._weights] == ["meta"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_device_is_sampled():
    """Pinned memory, positive figures, and memory that is given back."""
    device = torch.device("cuda")
    weights = [torch.randn((768, 256), device=device) for _ in range(4)]
    work = TorchWork(device, weights, 8, upload_bytes=1 << 20, copy_bytes=1 << 20)
    assert work.host.is_pinned()
    del work
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    figures = device_figures.sample_device(device, weights, 8)
    assert torch.cuda.memory_reserved() <= before + (4 << 20)
    assert figures.latency_s >= 0.0
    assert figures.upload_bytes_per_s > 0.0
    assert figures.memory_bytes_per_s > 0.0
    assert figures.projection_s > 0.0
