"""The sparsity profile: what is written is read, and what does not fit is refused."""

import json
import stat

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.sparsity.profile import (
    FRACTIONS,
    PROFILE_VERSION,
    SparsityProfile,
    held_curve,
)

CURVES = [[0.5, 0.8, 1.0], [0.1, 0.5, 1.0]]


def fields(**changes):
    return {
        "model": "m",
        "fingerprint": "ab12",
        "num_kv_heads": 2,
        "num_tokens": 1000,
        "num_prompts": 3,
        "local_tokens": 64,
        "small_share": [[0.1, 0.2, 0.3, 0.4], [0.9, 0.8, 0.7, 0.65]],
        "fractions": [0.1, 0.5, 1.0],
        "held_by_top": CURVES,
        "held_later": [[0.4, 0.7, 1.0], [0.1, 0.4, 1.0]],
        "long_share": [0.25, 0.75],
        "engine": "sglang 0",
        "created": "2026-01-01T00:00:00+00:00",
    } | changes


def test_what_is_written_is_read(tmp_path):
    """A file gives the same profile back; only its owner may read it."""
    path = tmp_path / "p.json"
    profile = SparsityProfile(**fields())
    profile.save(path)
    found = SparsityProfile.load(path)
    assert found.to_dict() == profile.to_dict()
    assert (found.num_layers, found.num_heads) == (2, 4)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["version"] == PROFILE_VERSION
    assert [item.name for item in tmp_path.iterdir()] == ["p.json"]


def test_what_was_not_measured_stays_out(tmp_path):
    """Without a second part of the prompts there is no curve of it, and no zeros."""
    path = tmp_path / "p.json"
    SparsityProfile(**fields(held_later=None, long_share=None)).save(path)
    found = SparsityProfile.load(path)
    assert found.held_later is None
    assert found.long_share is None


def test_a_profile_does_not_change():
    """Its arrays are copies of what was given, and read-only."""
    given = np.array(CURVES)
    profile = SparsityProfile(**fields(held_by_top=given))
    given[:] = 0
    assert profile.held_by_top[0, 0] == 0.5
    with pytest.raises(ValueError, match="read-only"):
        profile.held_by_top[0, 0] = 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"small_share": [[0.1, 1.2, 0, 0], [0, 0, 0, 0]]}, "no share"),
        ({"small_share": [[0.1, float("nan"), 0, 0], [0, 0, 0, 0]]}, "no share"),
        ({"small_share": [0.1, 0.2]}, "no table"),
        ({"small_share": [[0.1], [0.2, 0.3]]}, "no array"),
        ({"small_share": None}, "missing"),
        ({"num_kv_heads": 3}, "do not share"),
        ({"num_kv_heads": True}, "whole number"),
        ({"num_tokens": 0}, "whole number"),
        ({"local_tokens": -1}, "whole number"),
        ({"model": 5}, "not a text"),
        ({"fractions": [0.1, 0.5, 0.9]}, "fractions"),
        ({"fractions": [0.5, 0.1, 1.0]}, "fractions"),
        ({"fractions": [0.0, 0.5, 1.0]}, "fractions"),
        ({"fractions": [0.1, 0.5, 1.0 + 1e-10]}, "fractions"),
        ({"held_by_top": None}, "missing"),
        ({"held_by_top": CURVES[:1]}, "shape"),
        ({"held_by_top": [[0.5, 0.4, 1.0], CURVES[1]]}, "falls"),
        ({"held_later": [[0.5, 0.6, 0.7], CURVES[1]]}, "end at 1"),
        ({"long_share": [0.5]}, "shape"),
        ({"long_share": [0.5, -0.1]}, "no share"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    """One sentence says which field, before anybody plans with it."""
    with pytest.raises(ConfigError, match=words):
        SparsityProfile(**fields(**changes))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "no JSON object"),
        ("{", "not JSON"),
        ('{"version": 0}', "version is 0"),
        ('{"version": true}', "version is True"),
        ('{"version": 1}', "lacks model"),
        (json.dumps({"version": 1, "more": 2} | fields()), "unknown key more"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, text, words):
    """Other JSON, other versions and other keys are no profile."""
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        SparsityProfile.load(path)


def test_paths_are_refused_in_a_sentence(tmp_path):
    """No file to read, no folder to write to."""
    path = tmp_path / "none" / "p.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        SparsityProfile.load(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        SparsityProfile(**fields()).save(path)


def test_the_curve_of_known_mass():
    """Tokens are taken by score, as many as the fraction rounded up, mass is summed."""
    mass = np.array([5.0, 1.0, 3.0, 1.0])
    np.testing.assert_allclose(held_curve(mass, mass, [0.25, 0.5, 1]), [5, 8, 10])
    np.testing.assert_allclose(held_curve(mass, mass, [0.1, 0.3]), [5, 8])
    np.testing.assert_allclose(held_curve(-mass, mass, [0.25, 0.5, 1]), [1, 2, 10])


def test_the_curve_takes_no_token_too_many():
    """0.15 of 20 tokens are 3, although the product is a little more; equal scores go
    by position."""
    mass = np.arange(20.0)[::-1]
    ones = np.ones(20)
    assert held_curve(mass, ones, FRACTIONS)[FRACTIONS.index(0.15)] == 3
    np.testing.assert_allclose(held_curve(ones, mass, [0.1]), [19 + 18])
