"""The flags of disaggregated serving: what they ask of SGLang, and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_tiered.cost.returning import RETURN_POLICIES
from sgl_tiered.errors import ConfigError
from sgl_tiered.serving.disagg.caching import declare_caching, read_pd
from sgl_tiered.serving.option_clashes import refuse_pd
from sgl_tiered.serving.option_reader import read_options
from sgl_tiered.serving.options import Options, PdCaching

RADIX = "disaggregation_decode_enable_radix_cache"


def args(mode: str = "prefill", caching: int | None = None, **others: object):
    given = {
        "disaggregation_mode": mode,
        "disaggregation_transfer_backend": "tiered",
        "tiered_pd_caching": caching,
        "tiered_pd_transport": None,
        "radix_cache_backend": None,
        **others,
    }
    return SimpleNamespace(**given)


def tiers(**settings: object) -> Options:
    return read_options({"host_size": "1MB", **settings})


def refusal(server_args: object, config: Options | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_pd(server_args, config)
    return str(caught.value)


@pytest.mark.parametrize("caching", list(PdCaching))
def test_a_mode_sets_who_keeps(caching: PdCaching) -> None:
    """Prefill from 1 on, decode from 2 on."""
    assert declare_caching(args("prefill", int(caching))) == {
        "disable_radix_cache": caching == 0
    }
    assert declare_caching(args("decode", int(caching))) == {RADIX: caching >= 2}


def test_without_a_mode_sglangs_flags_hold() -> None:
    """But a decode instance with tiers keeps what they are to hold."""
    for mode in ("null", "prefill", "decode"):
        assert declare_caching(args(mode)) == {}
    with_tiers = args("decode", radix_cache_backend="tiered")
    assert read_pd(with_tiers).caching is PdCaching.BOTH
    assert declare_caching(with_tiers) == {RADIX: True}


@pytest.mark.parametrize(
    "given", [{"tiered_pd_caching": 0}, {"tiered_pd_transport": "nixl"}]
)
@pytest.mark.parametrize(
    "server",
    [
        {"mode": "null"},
        {"disaggregation_transfer_backend": "mooncake"},
    ],
)
def test_flags_without_use_are_refused(given: dict, server: dict) -> None:
    """Where nothing is transferred, and where SGLang's own backends do it."""
    text = refusal(args(**{**server, **given}))
    assert text.startswith(f"--{next(iter(given)).replace('_', '-')}:")
    assert "--disaggregation-transfer-backend tiered" in text


def test_nothing_is_refused_where_nothing_is_asked() -> None:
    """Plain servers, tiered ones, and SGLang's own disaggregation."""
    refuse_pd(args("null"), None)
    refuse_pd(args("null", radix_cache_backend="tiered"), tiers())
    sglangs = args(disaggregation_transfer_backend="mooncake")
    refuse_pd(sglangs, None)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_what_goes_together(mode: str) -> None:
    """Every mode without tiers but the one that needs them; 2 with tiers."""
    for caching in (None, 0, 1, 2):
        refuse_pd(args(mode, caching), None)
    with_tiers = args(mode, 2, radix_cache_backend="tiered")
    refuse_pd(with_tiers, tiers())
    for policy in (None, *RETURN_POLICIES):
        returned = args(mode, 3, radix_cache_backend="tiered", tiered_pd_returns=policy)
        refuse_pd(returned, tiers(pool="local"))
        assert read_pd(returned).returns == (policy or "auto")


def test_prefill_may_place_layers_one_by_one() -> None:
    """Layers are sent from where they are; what is no KV there is not sent."""
    layered = args("prefill", 2, radix_cache_backend="tiered")
    refuse_pd(layered, tiers(layerkv="on", layerkv_retain="0"))


@pytest.mark.parametrize(
    ("server", "settings", "flag"),
    [
        (args(caching=3), None, "--tiered-pd-caching"),
        (args(caching=3), {}, "--tiered-pd-caching"),
        (args(caching=0), {}, "--tiered-pd-caching"),
        (args("decode", 1), {}, "--tiered-pd-caching"),
        (
            args(disaggregation_transfer_backend="nixl"),
            {},
            "--radix-cache-backend",
        ),
        (
            args(enable_memory_saver=True),
            None,
            "--disaggregation-transfer-backend",
        ),
        (
            args(enable_pd_role_switch=True),
            None,
            "--disaggregation-transfer-backend",
        ),
        (
            args(disaggregation_decode_host_receive_threshold=0.5),
            None,
            "--disaggregation-transfer-backend",
        ),
        (args("decode", 2), {"layerkv": "on"}, "--tiered-layerkv"),
        (
            args(caching=2),
            {"layerkv": "on", "activations": "0.5"},
            "--tiered-activations",
        ),
        (
            args(caching=2, disaggregation_enable_kv_checksum=True),
            {"layerkv": "on"},
            "--tiered-layerkv",
        ),
        (args(caching=2, tiered_pd_returns="never"), {}, "--tiered-pd-returns"),
        (args(tiered_pd_returns="always"), None, "--tiered-pd-returns"),
        (args(caching=2), {"sparsity": "load"}, "--tiered-sparsity"),
        (args(caching=2), {"encoding": "int8"}, "--tiered-encoding"),
        (
            args("decode", 2),
            {"write_policy": "on-evict"},
            "--tiered-write-policy",
        ),
        (args(caching=2, tp_size=2), {}, "--disaggregation-mode"),
    ],
)
def test_what_does_not_go_together(server, settings, flag: str) -> None:
    """One sentence that names the flag and what to do."""
    text = refusal(server, None if settings is None else tiers(**settings))
    assert text.startswith(flag + ":")
    assert text.endswith(".")
    assert "\n" not in text


def test_sglangs_rust_server_does_not_prefill(monkeypatch) -> None:
    """Its bootstrap registry stands where ours would say which start this is."""
    for value in ("1", "True"):
        monkeypatch.setenv("SGLANG_RUST_SERVER", value)
        text = refusal(args("prefill"))
        assert text.startswith("--disaggregation-transfer-backend: tiered")
        assert "SGLANG_RUST_SERVER" in text
        refuse_pd(args("decode"), None)
        sglangs = args("prefill", disaggregation_transfer_backend="mooncake")
        refuse_pd(sglangs, None)
    monkeypatch.setenv("SGLANG_RUST_SERVER", "false")
    refuse_pd(args("prefill"), None)
