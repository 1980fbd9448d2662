"""Specs: files, flags, profiles and calibrations become one server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.spec import SimSpec, read_spec
from tests.unit.cost import calibration_support

CALIBRATION = replace(
    calibration_support.CALIBRATION,
    model=replace(
        calibration_support.CALIBRATION.model, kv_bytes_per_token=4096, chunk_tokens=512
    ),
    links=calibration_support.CALIBRATION.links[:1],
)


def test_a_file_gives_what_it_says(tmp_path: Path) -> None:
    """Sections are for the reader, and whole numbers may stand for real ones."""
    path = tmp_path / "spec.toml"
    path.write_text(
        '[server]\nhardware = "L20"\nmodel = "llama-2-7b"\npage_size = 32\n'
        "[tiers]\nhost_gb = 64\n[workload]\nrate = 2.5\n"
    )
    spec = read_spec(path)
    assert (spec.hardware, spec.page_size, spec.host_gb) == ("L20", 32, 64.0)
    server = spec.server()
    assert [setup.tier for setup in server.tiers] == [TierId.HOST]
    assert server.page_bytes == 32 * 2**19
    assert server.device_tokens == pytest.approx(
        (48e9 * 0.88 - 2 * 6.74e9) / 2**19, rel=0.01
    )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[server]\nhardwear = 'L20'\n", "hardwear"),
        ("[tears]\nhost_gb = 1\n", "tears"),
        ("[tiers]\nhost_gb = 'much'\n", "host_gb"),
        ("[server\n", "spec.toml"),
        ("[server]\npage_size = 0\n", "page_size"),
        ("[tiers]\nhost_medium = 'tape'\n", "tape"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    tmp_path: Path, text: str, word: str
) -> None:
    """One sentence, with the word to look for."""
    path = tmp_path / "spec.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        read_spec(path)


def test_a_model_that_does_not_fit_is_refused() -> None:
    """70B on one L20 has no room for KV."""
    with pytest.raises(ConfigError, match="cannot hold"):
        SimSpec(hardware="L20", model="Llama-3.1-70B").server()


def test_more_devices_than_bytes_of_a_token_are_refused() -> None:
    """No device's share of a token's KV is a byte."""
    with pytest.raises(ConfigError, match="more than a token's KV has bytes"):
        SimSpec(tensor_parallel=1 << 32).server()


def test_tensor_parallelism_divides_sizes() -> None:
    """Each rank has its part of the tiers, and L20s share their PCIe link in pairs."""
    one = SimSpec(hardware="L20", model="Yi-34B-200K", tensor_parallel=2, host_gb=64)
    server = one.server()
    assert server.kv_token_bytes == 2 * 2 * 60 * 8 * 128 // 2
    assert server.tiers[0].size_bytes == 32 * 10**9
    alone = SimSpec(hardware="L20", model="Llama-2-7B", host_gb=64).server()
    assert server.tiers[0].read.bytes_per_s == alone.tiers[0].read.bytes_per_s / 2


def test_cxl_takes_the_place_of_the_host() -> None:
    """With CaR's 64 GB/s."""
    server = SimSpec(host_gb=64.0, host_medium="cxl").server()
    assert server.tiers[0].tier is TierId.CXL
    assert server.tiers[0].read.bytes_per_s == 64e9


def test_cxl_below_the_host_is_a_tier_of_its_own() -> None:
    """Between host and disk; not both in place of the host and below it."""
    server = SimSpec(
        host_gb=64.0, cxl_gb=128.0, disk_gb=500.0, disk_admission="second-hit"
    ).server()
    tiers = [setup.tier for setup in server.tiers]
    assert tiers == [TierId.HOST, TierId.CXL, TierId.DISK]
    assert server.disk_admission == "second-hit"
    with pytest.raises(ConfigError, match="cxl_gb"):
        SimSpec().with_values({"host_medium": "cxl", "host_gb": 1, "cxl_gb": 1})
    with pytest.raises(ConfigError, match="offload_threshold"):
        SimSpec(host_gb=1.0, offload_threshold=1.5).server()


def test_a_calibration_replaces_the_profile() -> None:
    """What was measured counts; an edge that was not keeps the profile's guess."""
    spec = SimSpec(host_gb=1.0, device_gb=0.1)
    server = spec.server(CALIBRATION)
    prefill, decode = CALIBRATION.prefill, CALIBRATION.decode
    assert prefill is not None
    assert decode is not None
    assert server.times.prefill_s([(100, 50)]) == pytest.approx(
        prefill.seconds(100, 50)
    )
    assert server.times.decode_step_s(3, 400) == pytest.approx(decode.seconds(3, 400))
    assert server.times.request_s == 0.005
    assert server.tiers[0].read.bytes_per_s == 5e9
    assert server.tiers[0].write == spec.server().tiers[0].write
    assert server.kv_token_bytes == 4096
    assert server.scheduler.chunk_tokens == 512
    assert server.load_mode == "waiter"


@pytest.mark.parametrize(
    "text",
    [
        "[slo]\ntpot_s = 1" + "0" * 400,
        "[workload]\nrate = inf",
        "[scheduler]\nmax_running = 1" + "0" * 30,
        "[params]\nday = 1979-05-27",
        "[params]\nx = " + "[" * 100_000,
    ],
)
def test_odd_values_are_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    """Numbers beyond 64 bits, what JSON has no word for, and nesting without end."""
    file = tmp_path / "spec.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_spec(file)
