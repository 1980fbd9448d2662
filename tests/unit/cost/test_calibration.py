"""The calibration file: written and read back, and refused where it is wrong."""

import copy
import json
import stat
from dataclasses import replace

import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.calibrated import calibrated_links, calibrated_prefill
from sgl_tiered.cost.calibration import (
    calibration_from_dict,
    calibration_to_dict,
    read_calibration,
    write_calibration,
)
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.errors import ConfigError
from tests.unit.cost.calibration_support import CALIBRATION


def test_a_written_file_is_read_back(tmp_path):
    """Reading gives the value that was written, also where parts are missing."""
    path = tmp_path / "calibration.json"
    write_calibration(path, CALIBRATION)
    assert read_calibration(path) == CALIBRATION
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    fields = calibration_to_dict(CALIBRATION)
    fields.update(prefill=None, decode=None, request_overhead_s=None, links=[])
    partial = calibration_from_dict(fields)
    write_calibration(path, partial)
    assert read_calibration(path) == partial
    assert list(tmp_path.iterdir()) == [path]


def test_an_older_file_has_no_time_per_token_of_context():
    """What was not measured when a file was written counts as 0."""
    raw = changed(["prefill", "context_token_s"], ...)
    assert calibration_from_dict(raw).prefill.context_token_s == 0.0


def test_the_forms():
    """Each fit predicts by its written form, and nothing to do takes no time."""
    reading = replace(CALIBRATION.prefill, context_token_s=1e-6)
    added_s = reading.seconds(100, 10) - CALIBRATION.prefill.seconds(100, 10)
    assert added_s == pytest.approx(1e-4)
    assert CALIBRATION.prefill.seconds(100, 10) == pytest.approx(
        0.002 + 10 * 1e-4 + 1e-8 * (10 * 100 + 55)
    )
    assert CALIBRATION.decode.seconds(3, 1000) == pytest.approx(0.004 + 3e-3 + 1e-4)
    assert CALIBRATION.link("host", "device").seconds(5 * 10**9) == pytest.approx(
        1.0001
    )
    assert CALIBRATION.link("device", "host") is None
    assert CALIBRATION.prefill.seconds(100, 0) == 0
    assert CALIBRATION.decode.seconds(0, 0) == 0
    assert CALIBRATION.link("disk", "host").seconds(0) == 0


def changed(path, value):
    raw = json.loads(json.dumps(calibration_to_dict(CALIBRATION)))
    target = raw
    *parents, last = path
    for key in parents:
        target = target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = copy.deepcopy(value)
    return raw


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["version"], 2, "version is 2, not 1"),
        (["version"], ..., "version is None"),
        (["version"], True, "version is True"),
        (["prefill", "token_s"], ..., "lacks prefill.token_s"),
        (["model"], ..., "lacks model"),
        (["more"], 1, "unknown key more"),
        (["links", 0, "speed"], 1, r"unknown key links\[0\].speed"),
        (["prefill", "token_s"], -1e-9, "prefill.token_s is negative"),
        (["prefill", "token_s"], "1", "prefill.token_s is '1', not a number"),
        (["prefill", "token_s"], True, "not a number"),
        (["prefill", "token_s"], float("nan"), "not a finite number"),
        (["prefill", "token_s"], 10**400, "not a finite number"),
        (["model", "num_layers"], 4.5, "model.num_layers is 4.5, not a whole number"),
        (["model", "num_layers"], 0, "must be positive"),
        (["model", "name"], 7, "model.name is 7, not a text"),
        (["model"], [], "model is not an object"),
        (["links"], {}, "links is not a list"),
        (["links", 0, "emulated"], 1, "not a boolean"),
        (["links", 0, "bytes_per_s"], 0, "has no bandwidth"),
        (["links", 1, "source"], "tape", "'tape' to 'host' is no link"),
        (["links", 1, "source"], "disk\n", "to 'host' is no link"),
        (["decode", "quality", "r2"], -0.5, None),
    ],
)
def test_what_is_wrong_is_named(path, value, words):
    """A wrong version, key, type or number is refused in one sentence."""
    raw = changed(path, value)
    if words is None:
        calibration_from_dict(raw)
        return
    with pytest.raises(ConfigError, match=words) as caught:
        calibration_from_dict(raw)
    assert "\n" not in str(caught.value)


def test_an_edge_has_one_fit():
    """The same link twice is refused: which one would be meant?"""
    raw = calibration_to_dict(CALIBRATION)
    raw["links"] = [raw["links"][0]] * 2
    with pytest.raises(ConfigError, match="host to device is there twice"):
        calibration_from_dict(raw)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "no JSON object"),
        ('{"version": 1e999}', "is not JSON"),
        ('{"\\ud800": 1}', "is not JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(tmp_path, text, words):
    """A file of something else is refused, however deep it is nested."""
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_calibration(path)


def test_paths_that_do_not_work_are_refused(tmp_path):
    """No file to read, and no folder to write to, is said with the path."""
    path = tmp_path / "none" / "calibration.json"
    with pytest.raises(ConfigError, match=r"calibration\.json cannot be read"):
        read_calibration(path)
    with pytest.raises(ConfigError, match=r"calibration\.json cannot be written"):
        write_calibration(path, CALIBRATION)
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match="folder cannot be written"):
        write_calibration(folder, CALIBRATION)
    assert list(tmp_path.iterdir()) == [folder]


def test_the_planner_starts_from_the_file_and_trusts_it():
    """One slow load moves a measured link less than a guessed one; many move both."""
    link = calibrated_links(CALIBRATION, [TierId.HOST])[TierId.HOST]
    guess = LinkCost(1e-4, 5e9)
    num_bytes = 10**9
    calm_s = CALIBRATION.link("host", "device").seconds(num_bytes)
    assert link.seconds(num_bytes) == pytest.approx(calm_s)
    for cost in (link, guess):
        cost.observe(num_bytes, 5 * calm_s)
    assert link.seconds(num_bytes) < 2 * calm_s < guess.seconds(num_bytes)
    for _ in range(30):
        link.observe(num_bytes, 5 * calm_s)
    assert link.seconds(num_bytes) == pytest.approx(5 * calm_s, rel=0.1)


def test_the_planner_s_prefill_is_the_fit():
    """The cost of recomputing is the file's form, and a fitted 0 stays above zero."""
    fit = CALIBRATION.prefill
    cost = calibrated_prefill(CALIBRATION)
    assert cost.seconds(100, 50) == pytest.approx(fit.seconds(100, 50))
    zeros = replace(fit, overhead_s=0.0, pair_s=0.0)
    cost = calibrated_prefill(replace(CALIBRATION, prefill=zeros))
    assert cost.seconds(100, 50) == pytest.approx(50 * fit.token_s, rel=1e-3)
    assert cost.snapshot().pair_s > 0
    assert calibrated_prefill(replace(CALIBRATION, prefill=None)) is None
