"""The flags of sparse KV, and what they refuse in a sentence."""

from types import SimpleNamespace

import pytest

from sgl_tiered.core.ids import Encoding
from sgl_tiered.engines.sglang.config import FAULT_ENV, read_config
from sgl_tiered.engines.sglang.sparse.report import SparseLoad
from sgl_tiered.engines.sglang.sparse.settings import (
    refuse_device,
    refuse_with_sparsity,
)
from sgl_tiered.errors import ConfigError

HOST = {"host_size": "1MB"}


def test_off_is_the_default_and_alters_nothing():
    """Without the flag, and with it off, no KV is lossy."""
    for given in ({}, {"sparsity": "off"}):
        config = read_config({**HOST, **given})
        assert config.sparsity is None
        assert not config.is_lossy


def test_on_is_lossy():
    """With a share of a half, or the one that was given."""
    config = read_config({**HOST, "sparsity": "load"})
    assert config.sparsity.keep == 0.5
    assert config.is_lossy
    config = read_config({**HOST, "sparsity": "load", "sparsity_keep": 1})
    assert config.sparsity.keep == 1.0


def test_what_is_dropped_on_store_is_nobodys_exact_page():
    """Then all that the tiers hold is altered, as where it is encoded; both go."""
    config = read_config({**HOST, "sparsity": "load", "encoding": "int4"})
    assert config.sparsity is not None
    assert config.alters_all
    assert not config.sparsity.on_store
    assert not read_config({**HOST, "sparsity": "load"}).alters_all
    config = read_config({**HOST, "sparsity": "store", "sparsity_keep": 0.3})
    assert config.sparsity.on_store
    assert config.alters_all
    assert config.sparsity.tokens_of(16) == 5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sparsity": "drop"}, "'drop' is unknown"),
        ({"sparsity_keep": 0.5}, "no effect"),
        ({"sparsity": "load", "sparsity_keep": 0.0}, "not a share"),
        ({"sparsity": "load", "sparsity_keep": 1.5}, "not a share"),
        ({"sparsity": "load", "sparsity_keep": "half"}, "not a share"),
        ({"sparsity": "load", "sparsity_keep": float("nan")}, "not a share"),
        ({"sparsity": "load", "layerkv": "on"}, "--tiered-layerkv on"),
        ({"sparsity": "load", "write_policy": "on-evict"}, "write-policy on-evict"),
        (
            {"sparsity": "load", "prefetch": "car", "prefetch_to": "device"},
            "prefetch-to device",
        ),
    ],
)
def test_what_does_not_go_together_is_named(given, words):
    """One sentence, with the other flag in it."""
    with pytest.raises(ConfigError, match="--tiered-sparsity") as caught:
        read_config({**HOST, **given})
    assert words in str(caught.value)


def test_the_wrong_choice_has_to_be_allowed(monkeypatch):
    """It makes the server answer wrongly on purpose."""
    given = {**HOST, "sparsity": "load", "fault_corrupt": "keep"}
    monkeypatch.delenv(FAULT_ENV, raising=False)
    with pytest.raises(ConfigError, match="on purpose"):
        read_config(given)
    monkeypatch.setenv(FAULT_ENV, "1")
    config = read_config(given)
    assert config.keeps_wrong
    assert config.emulate == ()


def server_args(**changes):
    facts = {"page_size": 16, "tp_size": 1, "disable_overlap_schedule": True}
    return SimpleNamespace(**{**facts, **changes})


def test_a_plain_server_is_served():
    """On a CPU, with pages of several tokens."""
    refuse_with_sparsity(server_args())
    refuse_device("cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 1}, "pages of several tokens"),
        ({"tp_size": 2}, "--tp-size"),
        ({"disable_overlap_schedule": False}, "overlap"),
        ({"enable_mixed_chunk": True}, "enable-mixed-chunk"),
        ({"enable_memory_saver": True}, "enable-memory-saver"),
    ],
)
def test_what_was_not_shown_to_work_is_refused(changes, words):
    """Each in its own words."""
    with pytest.raises(ConfigError, match=words):
        refuse_with_sparsity(server_args(**changes))


def test_a_gpu_is_refused():
    """Attention over rows is the CPU platform's."""
    with pytest.raises(ConfigError, match="CPU only"):
        refuse_device("cuda")


def test_a_load_is_reported():
    """By layer, in rows and bytes; counters add up over loads."""
    load = SparseLoad(100, [50, 100, 25], 44_800, 76_800, Encoding.INT4)
    told = load.as_dict()
    assert told["kept_share_by_layer"] == [0.5, 1.0, 0.25]
    assert told["kept_share"] == round(175 / 300, 4)
    assert told["rows_dropped"] == 125
    assert told["encoding"] == "int4"
    assert (told["bytes_loaded"], told["bytes_saved"]) == (44_800, 32_000)
    assert load.counters() == {
        "sparsity_loads": 1,
        "sparsity_rows_dropped": 125,
        "sparsity_bytes_saved": 32_000,
    }
