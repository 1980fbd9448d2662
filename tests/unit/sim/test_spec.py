"""Specs: files, flags, profiles and calibrations become one server."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.models import find_model
from sgl_tiered.sim.spec import SETTINGS, SimSpec, read_spec
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


@pytest.mark.parametrize("ranks", [3, 64, 1 << 32])
def test_devices_that_do_not_divide_the_heads_are_refused(ranks: int) -> None:
    """As SGLang refuses them."""
    with pytest.raises(ConfigError, match="do not divide the 32 heads"):
        SimSpec(tensor_parallel=ranks).server()


_NUMBERS = [field.name for field in fields(SimSpec) if field.type in ("int", "float")]


@pytest.mark.parametrize("name", _NUMBERS)
@pytest.mark.parametrize("value", [-3, float("nan"), float("inf"), 1 << 70])
def test_no_number_is_negative_or_none(name: str, value: float) -> None:
    """Each is refused by name, from a file, from flags, and in Python."""
    with pytest.raises(ConfigError, match=name):
        SimSpec().with_values({name: value})
    with pytest.raises(ConfigError, match=name):
        SimSpec(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [name for name, setting in SETTINGS.items() if setting.choices]
)
def test_a_word_that_is_no_choice_is_refused(name: str) -> None:
    """Whether or not a tier is there that would read it; the choices are named."""
    with pytest.raises(ConfigError, match=f"{name}.*xyz.*{SETTINGS[name].choices[-1]}"):
        SimSpec().with_values({name: "xyz"})


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"num_prefixes": 4, "prefix_tokens": 9_000}, "prefix_tokens"),
        ({"prefix_tokens": 100}, "--num-prefixes"),
        ({"num_prefixes": 4}, "--prefix-tokens"),
        ({"length_predictor": "tarot"}, "tarot"),
        ({"hardware": "H1OO"}, "H1OO"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    values: dict[str, Any], word: str
) -> None:
    """Instead of plausible figures."""
    with pytest.raises(ConfigError, match=word):
        SimSpec().with_values(values)


@pytest.mark.parametrize("tier", ["host_gb", "cxl_gb", "disk_gb"])
def test_a_tier_without_room_for_a_page_is_refused(tier: str) -> None:
    """It was given one page."""
    values = {"host_gb": 1.0} | {tier: 1e-6}
    with pytest.raises(ConfigError, match=f"{tier}.*no page"):
        SimSpec().with_values(values).server()


def test_a_calibration_without_prefill_is_of_the_same_model() -> None:
    """The links of one model and the computing of another make no server."""
    shape = find_model("Llama-3.1-8B")
    links = replace(
        CALIBRATION,
        method="process",
        prefill=None,
        decode=None,
        model=replace(
            CALIBRATION.model,
            num_layers=shape.num_layers,
            attention_width=shape.attention_width,
            chunk_tokens=None,
        ),
    )
    spec = SimSpec(host_gb=1.0, device_gb=0.1)
    # Nobody measured how prompts are cut, so the spec's own size stays.
    assert spec.server(links).scheduler.chunk_tokens == spec.chunk_tokens
    other = replace(links, model=replace(links.model, num_layers=7))
    with pytest.raises(ConfigError, match="7 layers"):
        spec.server(other)


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
