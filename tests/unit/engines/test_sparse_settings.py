"""The flags of sparse KV, and what they refuse in a sentence."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.core.ids import Encoding
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.sparsity.profile import (
    FRACTIONS,
    SparsityProfile,
    refuse_other_model,
)
from sgl_tiered.policies.sparsity.registry import SELECTIONS
from sgl_tiered.serving.option_clashes import refuse_clashes
from sgl_tiered.serving.option_reader import FAULT_ENV, read_options
from sgl_tiered.serving.options import KEEP_FAULT, Options, Sparsity
from sgl_tiered.serving.sparse_report import SparseLoad, shares_by_layer

HOST = {"host_size": "1MB"}
FLAG = "--tiered-sparsity-profile"


def test_off_is_the_default_and_alters_nothing():
    """Without the flag, and with it off, no KV is lossy."""
    for given in ({}, {"sparsity": "off"}):
        config = read_options({**HOST, **given})
        assert config.sparsity is None
        assert not config.is_lossy


def test_on_is_lossy():
    """With a share of a half, or the one that was given."""
    config = read_options({**HOST, "sparsity": "load"})
    assert config.sparsity.keep == 0.5
    assert config.is_lossy
    config = read_options({**HOST, "sparsity": "load", "sparsity_keep": 1})
    assert config.sparsity.keep == 1.0
    assert config.sparsity.policy == "car"


@pytest.mark.parametrize("name", SELECTIONS)
def test_every_selection_can_be_named(name):
    """By the word that the registry has for it."""
    config = read_options({**HOST, "sparsity": "load", "sparsity_policy": name})
    assert config.sparsity.policy == name


PROFILE = SparsityProfile(
    model="demo",
    fingerprint="ab" * 16,
    num_kv_heads=2,
    num_tokens=100,
    num_prompts=1,
    local_tokens=64,
    small_share=np.full((4, 8), 0.5),
    fractions=np.array(FRACTIONS),
    held_by_top=np.tile(np.array(FRACTIONS) ** 0.5, (4, 1)),
)


@pytest.fixture
def profile_file(tmp_path):
    path = tmp_path / "p.json"
    PROFILE.save(path)
    return str(path)


def test_a_profile_is_read_with_a_budget_or_a_share(profile_file):
    """Bytes or quality; the file is read at the start."""
    given = {**HOST, "sparsity": "load", "sparsity_profile": profile_file}
    config = read_options({**given, "sparsity_budget": 0.05})
    assert config.sparsity.budget == 0.05
    assert config.sparsity.profile.model == "demo"
    config = read_options({**given, "sparsity_keep": 0.25, "sparsity_queries": 128})
    assert (config.sparsity.budget, config.sparsity.keep) == (None, 0.25)
    assert config.sparsity.queries == 128


def test_a_budget_and_a_share_are_too_much(profile_file):
    """Both say how much is kept."""
    given = {"sparsity": "load", "sparsity_profile": profile_file}
    both = {"sparsity_budget": 0.1, "sparsity_keep": 0.5}
    with pytest.raises(ConfigError, match=r"-budget: and .*-keep both"):
        read_options({**HOST, **given, **both})


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    """By the flag's name; so is one that is not there."""
    path = tmp_path / "p.json"
    for text in (None, "{}", "nothing"):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match="--tiered-sparsity-profile"):
            read_options({**HOST, "sparsity": "load", "sparsity_profile": str(path)})


SERVED = {
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 2,
    "fingerprint": "ab" * 16,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 6}, "4 layers, and the server's model has 6"),
        ({"num_heads": 4}, "8 query heads, and the server's model has 4"),
        ({"num_kv_heads": 4}, "2 KV heads, and the server's model has 4"),
        ({"fingerprint": "cd" * 16}, "weights, configuration or engine"),
    ],
)
def test_a_profile_of_another_model_is_refused(changes, words):
    """The sentence says what differs."""
    with pytest.raises(ConfigError, match="--tiered-sparsity-profile") as caught:
        refuse_other_model(PROFILE, FLAG, **{**SERVED, **changes})
    assert words in str(caught.value)
    assert "demo" in str(caught.value)


def test_a_profile_of_this_model_is_taken():
    """Also where its digest is not known."""
    refuse_other_model(PROFILE, FLAG, **SERVED)
    unknown = replace(PROFILE, fingerprint="")
    refuse_other_model(unknown, FLAG, **{**SERVED, "fingerprint": "cd" * 16})


def test_what_is_dropped_on_store_is_nobodys_exact_page():
    """Then all that the tiers hold is altered, as where it is encoded; both go."""
    config = read_options({**HOST, "sparsity": "load", "encoding": "int4"})
    assert config.sparsity is not None
    assert config.alters_all
    assert not config.sparsity.on_store
    assert not read_options({**HOST, "sparsity": "load"}).alters_all
    config = read_options({**HOST, "sparsity": "store", "sparsity_keep": 0.3})
    assert config.sparsity.on_store
    assert config.alters_all
    assert config.sparsity.tokens_of(16) == 5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sparsity": "drop"}, "'drop' is unknown"),
        ({"sparsity_keep": 0.5}, "no effect"),
        ({"sparsity_policy": "h2o"}, "no effect"),
        ({"sparsity_profile": "p.json"}, "no effect"),
        ({"sparsity_budget": 0.1}, "no effect"),
        ({"sparsity_queries": 512}, "no effect"),
        ({"sparsity": "load", "sparsity_policy": "best"}, "pyramidkv"),
        ({"sparsity": "load", "sparsity_budget": 0.1}, "needs a profile"),
        ({"sparsity": "store", "sparsity_policy": "h2o"}, "chooses in pages"),
        ({"sparsity": "store", "sparsity_profile": "p.json"}, "as many tokens"),
        ({"sparsity": "load", "sparsity_budget": 1.0}, "not a share"),
        ({"sparsity": "load", "sparsity_budget": "low"}, "not a share"),
        ({"sparsity": "load", "sparsity_queries": 64}, "no number"),
        ({"sparsity": "load", "sparsity_queries": 512.5}, "no number"),
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
        read_options({**HOST, **given})
    assert words in str(caught.value)


def test_the_wrong_choice_has_to_be_allowed(monkeypatch):
    """It makes the server answer wrongly on purpose."""
    given = {**HOST, "sparsity": "load", "fault_corrupt": "keep"}
    monkeypatch.delenv(FAULT_ENV, raising=False)
    with pytest.raises(ConfigError, match="on purpose"):
        read_options(given)
    monkeypatch.setenv(FAULT_ENV, "1")
    config = read_options(given)
    assert config.experiment.fault == KEEP_FAULT
    assert config.experiment.emulate == ()


SPARSE = Options(sparsity=Sparsity())


def server_args(**changes):
    facts = {"page_size": 16, "device": "cpu", "disable_overlap_schedule": True}
    return SimpleNamespace(**{**facts, **changes})


def test_a_plain_server_is_served():
    """On a CPU, with pages of several tokens."""
    refuse_clashes(SPARSE, server_args())


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
        refuse_clashes(SPARSE, server_args(**changes))


def test_a_gpu_is_refused():
    """Attention over rows is the CPU platform's."""
    with pytest.raises(ConfigError, match="CPU only"):
        refuse_clashes(SPARSE, server_args(), "cuda")


def test_a_load_is_reported():
    """By layer, in rows and bytes; counters add up over loads."""
    load = SparseLoad(100, [50, 100, 25], 44_800, 76_800, "h2o", Encoding.INT4)
    told = load.as_dict()
    assert told["policy"] == "h2o"
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


def test_two_loads_of_a_request_are_reported_as_one():
    """What came and what was left out are those of both."""
    front = SparseLoad(64, [32, 64], 96, 128, "car")
    back = SparseLoad(32, [8, 8], 16, 64, "car")
    both = back.with_earlier(front)
    assert both == SparseLoad(96, [40, 72], 112, 192, "car")
    assert both.rows_dropped == front.rows_dropped + back.rows_dropped
    assert back.with_earlier(None) is back


def test_before_any_load_there_is_no_share():
    """Least of all one of nothing."""
    assert shares_by_layer([0, 0], 0) == []
    assert shares_by_layer([0, 16], 32) == [0.0, 0.5]


@pytest.mark.parametrize(
    ("keep", "page_tokens", "count"),
    [(0.55, 20, 11), (0.07, 100, 7), (0.5, 16, 8), (0.51, 16, 9), (1.0, 48, 48)],
)
def test_a_share_of_a_page_is_rounded_up_but_not_for_a_rounding(
    keep, page_tokens, count
):
    """0.07 * 100 is a little more than 7 in floating point, and means 7."""
    assert Sparsity(keep).tokens_of(page_tokens) == count
