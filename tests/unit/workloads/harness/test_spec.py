"""A specification is checked whole, refused in one sentence, and named by its hash."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from sgl_tiered_workloads.harness.errors import SpecError
from sgl_tiered_workloads.harness.spec import load_spec, parse_spec
from sgl_tiered_workloads.registry import make_workload

GOOD: dict[str, Any] = {
    "name": "x",
    "seed": 7,
    "repeats": 2,
    "model": {"preset": "demo"},
    "device": {"pool_tokens": 4096},
    "workload": {"name": "chat", "params": {"num_sessions": 3}},
    "arrivals": {"process": "poisson", "rate_per_s": 0.5},
    "window": {"warmup_s": 2},
    "slo": {"ttft_s": 0.5},
    "systems": {
        "plain": {},
        "tiered": {"flags": ["--tiered-disk-path", "{store}"], "must_cover": ["host"]},
        "peer": {
            "url": "http://127.0.0.1:8000",
            "api": "openai-completions",
            "model": "llama",
        },
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the good specification with one entry set."""
    spec = copy.deepcopy(GOOD)
    *folders, last = path.split(".")
    table = spec
    for name in folders:
        table = table.setdefault(name, {})
    table[last] = value
    return spec


def test_a_good_specification_is_understood() -> None:
    """Entries land where they belong, and what is missing has its default."""
    spec = parse_spec(GOOD)
    assert spec.workload.params == {
        "num_sessions": 3,
        "arrivals": {"process": "poisson", "rate_per_s": 0.5},
    }
    assert spec.window.warmup_s == 2.0
    assert spec.slos.given() == {"ttft": 0.5}
    assert [system.name for system in spec.started] == ["plain", "tiered"]
    assert spec.systems[2].external
    assert not spec.together


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("repeat", 3, "repeat: this key is unknown; did you mean repeats"),
        ("window.warm_up_s", 3, "window.warm_up_s: this key is unknown; did you mean"),
        ("systems.tiered.flag", [], "systems.tiered.flag: this key is unknown"),
        ("systems.peer.flags", [], "systems.peer.flags: this key is unknown"),
        ("systems.plain.api", "grpc", "use one of generate, openai-completions"),
        ("systems.a/b", {}, "the name does not fit"),
        ("systems", {}, "systems: none is given"),
        ("seed", "7", "seed: '7' does not fit; give a whole number"),
        ("repeats", 0, "repeats: 0 is too small; give 1 or more"),
        ("repeats", True, "repeats: True does not fit"),
        ("slo.ttft_s", 0, "slo.ttft_s: 0 is too small"),
        ("window.cooldown_s", -1, "window.cooldown_s: -1 is negative"),
        ("model", {}, "model: it is missing"),
        ("model", {"path": "x"}, "model.vocab_tokens: it is missing"),
        ("gate.min_exact_fraction", 50, "50 is no share"),
        ("gate.kind", "maybe", "use one of equality, off"),
        ("gate", {"kind": "off"}, "gate.because: it is missing"),
        ("gate.reference_pool_tokens", 100, "smaller than the systems'"),
        ("workload.params.arrivals", {}, "have arrivals as well"),
        ("systems.plain", 3, "systems.plain: it is no table"),
    ],
)
def test_a_wrong_entry_is_refused_in_one_sentence(
    path: str, value: Any, words: str
) -> None:
    """The sentence names the entry, the problem and the remedy."""
    with pytest.raises(SpecError) as caught:
        parse_spec(changed(path, value))
    text = str(caught.value)
    assert words in text
    assert text.endswith(".")
    assert "\n" not in text


def test_foreign_systems_alone_need_no_gate_and_no_model() -> None:
    """But the gate must be switched off by hand, with a reason."""
    spec = copy.deepcopy(GOOD)
    spec["systems"] = {"peer": GOOD["systems"]["peer"]}
    del spec["model"]
    with pytest.raises(SpecError, match="nothing can be compared"):
        parse_spec(spec)
    spec["gate"] = {"kind": "off", "because": "another engine"}
    assert parse_spec(spec).gate.because == "another engine"


def test_the_hash_names_the_experiment_and_not_the_place() -> None:
    """Addresses and folders do not count; seeds and flags do."""
    name = parse_spec(GOOD).hash
    assert parse_spec(changed("systems.peer.url", "http://10.0.0.1:1")).hash == name
    at_home = changed("model", {"path": "/home/a/llama", "vocab_tokens": 9})
    away = changed("model", {"path": "/srv/llama", "vocab_tokens": 9})
    assert parse_spec(at_home).hash == parse_spec(away).hash
    assert parse_spec(changed("seed", 8)).hash != name
    assert parse_spec(changed("systems.plain.flags", ["--x"])).hash != name


def test_what_is_published_holds_no_path_and_no_address() -> None:
    """Records name the experiment, not the machine."""
    spec = changed("device.flags", ["--chat-template", "/home/a/template"])
    spec["systems"]["peer"]["url"] = "http://secret:1"
    text = str(parse_spec(spec).public())
    assert "/home" not in text
    assert "secret" not in text
    assert "template" in text


def test_every_specification_of_the_house_is_good() -> None:
    """The examples that we ship can be read, and their work can be made."""
    folder = Path(__file__).parents[4] / "benchmarks/specs"
    found = sorted(folder.glob("*.toml"))
    assert found
    for path in found:
        spec = load_spec(path)
        work = make_workload(spec.workload.name, spec.workload.params, spec.seed, 4096)
        assert work.num_requests >= spec.gate.requests


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Absent or no TOML, the sentence says which."""
    with pytest.raises(SpecError, match="No such file"):
        load_spec(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    with pytest.raises(SpecError, match="no TOML"):
        load_spec(broken)
