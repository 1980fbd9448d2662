"""The doctor's output and exit code, and what it makes of SGLang and torch."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_tiered.cli import advice, doctor, engine, machine, main
from sgl_tiered.cli.advice import Facts
from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.devdax import DaxDevice


@dataclass(frozen=True)
class Seam:
    """What SGLang's room reports."""

    name: str
    found: bool
    detail: str


@pytest.fixture
def machine_is(monkeypatch: pytest.MonkeyPatch):
    """Make the doctor find given facts."""

    def use(facts: advice.Facts) -> None:
        monkeypatch.setattr(doctor, "gather", lambda path: facts)
        monkeypatch.delenv("SGLANG_PLUGINS", raising=False)

    return use


def test_a_good_machine_exits_0_with_a_command(good: Facts, machine_is, capsys) -> None:
    """The last line can be pasted."""
    machine_is(good)
    assert main.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("  python -m sglang.launch_server")
    assert "seams             2 of 2 found" in lines


def test_what_was_found_is_one_line_and_what_is_missing_is_named(
    good: Facts, machine_is, capsys
) -> None:
    """Dozens of lines that say "found" hide the one that does not."""
    first, second = good.engine.seams
    missing = replace(second, found=False)
    machine_is(replace(good, engine=replace(good.engine, seams=(first, missing))))
    assert main.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert f"MISSING {second.name}" in text
    assert "found   " not in text
    assert main.main(["doctor", "--all"]) == 1
    assert f"found   {first.name}" in capsys.readouterr().out


def test_a_model_says_how_many_tokens_fit(good: Facts, machine_is, capsys) -> None:
    """131,072 bytes a token of Llama-3.1-8B; half of that on each of two ranks."""
    machine_is(good)
    assert main.main(["doctor", "--model", "Llama-3.1-8B", "--tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("65,536 bytes of KV a token at 16 bits" in line for line in lines)
    assert any(
        f"host 25.0 GB: {25 * advice.GB // 65_536:,} tokens" in line for line in lines
    )
    assert "--model-path Llama-3.1-8B --tp 2" in lines[-1]


@pytest.mark.parametrize("words", [["--tp", "0"], ["--model", "no/such"]])
def test_a_wrong_model_or_number_of_ranks_is_refused(words, capsys) -> None:
    """Before fifteen seconds of looking."""
    assert main.main(["doctor", *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_an_obstacle_exits_1_with_the_reason(good: Facts, machine_is, capsys) -> None:
    """No command is suggested that would not run."""
    machine_is(replace(good, engine=replace(good.engine, plugin_registered=False)))
    assert main.main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "Not possible: The plugin is not installed" in output
    assert "Suggested" not in output


def test_cxl_candidates_are_shown(good: Facts, machine_is, capsys) -> None:
    """Nodes without cores and DAX devices, with their sizes and what they are for."""
    devices = [
        DaxDevice("dax0.0", 64 * advice.GB, 2**21, 2, is_system_ram=False),
        DaxDevice("dax1.0", 32 * advice.GB, 2**21, 1, is_system_ram=True),
    ]
    node = machine.NumaNode(1, "", 32 * advice.GB, 30 * advice.GB)
    machine_is(replace(good, dax_devices=devices, numa_nodes=[node]))
    assert main.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "no cores (CXL memory?), 30.0 GB free of 32.0 GB" in text
    assert "/dev/dax0.0, 64.0 GB, units of 2 MiB; would be NUMA node 2" in text
    assert "/dev/dax1.0, 32.0 GB, units of 2 MiB; in use as NUMA node 1" in text
    assert "--tiered-cxl node:1 --tiered-cxl-size 27GB" in text


def test_json_is_one_object_that_says_the_same(good: Facts, machine_is, capsys) -> None:
    """A program can read the facts, the verdict and the suggestion."""
    machine_is(good)
    assert main.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["serving_possible"] is True
    assert found["obstacles"] == []
    assert found["disk"]["direct_io"] is True
    assert found["suggestion"]["host_bytes"] == 50 * advice.GB


def test_the_path_is_handed_to_the_probe(
    good: Facts, monkeypatch, capsys, tmp_path: Path
) -> None:
    """--path picks the disk."""
    seen = []

    def gather(path: Path) -> advice.Facts:
        seen.append(path)
        return good

    monkeypatch.setattr(doctor, "gather", gather)
    main.main(["doctor", "--path", str(tmp_path)])
    assert seen == [tmp_path]
    capsys.readouterr()


def test_a_wrong_setting_exits_2_with_one_sentence(monkeypatch, capsys) -> None:
    """Errors of ours are shown without a traceback."""

    def refuse(path: Path) -> advice.Facts:
        raise ConfigError("--path", "is wrong", "give another")

    monkeypatch.setattr(doctor, "gather", refuse)
    assert main.main(["doctor"]) == 2
    assert capsys.readouterr().err == "sgl-tiered: --path: is wrong; give another.\n"


def test_missing_torch_is_a_fact() -> None:
    """A machine without torch, or with a broken one, is described all the same."""

    def absent() -> object:
        raise ImportError("No module named 'torch'")

    facts = engine.accelerator_facts(absent)
    assert facts.torch_version is None
    assert facts.kind is None
    assert "No module named 'torch'" in facts.detail


def test_accelerators_are_listed_with_their_memory() -> None:
    """Every device has a name and a size."""
    torch = SimpleNamespace(
        __version__="2.14",
        accelerator=SimpleNamespace(
            is_available=lambda: True,
            current_accelerator=lambda: SimpleNamespace(type="cuda"),
            device_count=lambda: 2,
        ),
        cuda=SimpleNamespace(
            get_device_properties=lambda i: SimpleNamespace(
                name=f"GPU {i}", total_memory=10 + i
            )
        ),
    )
    facts = engine.accelerator_facts(lambda: torch)
    assert facts == engine.AcceleratorFacts(
        "2.14", "cuda", ("GPU 0", "GPU 1"), (10, 11)
    )


def test_a_missing_sglang_is_named_with_the_remedy(monkeypatch) -> None:
    """The version to install is said."""

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(engine.importlib.metadata, "version", absent)
    facts = engine.engine_facts("0.5.23", list)
    assert facts.version is None
    assert facts.detail == "SGLang is not installed: pip install sglang==0.5.23"


def test_only_import_errors_of_others_are_tolerated(monkeypatch) -> None:
    """A missing module of our own is a fault of ours and must not be hidden."""
    monkeypatch.setattr(engine.importlib.metadata, "version", lambda name: "0.5.23")

    def broken(name: str):
        def check() -> list[Seam]:
            raise ImportError(f"cannot import {name}", name=name)

        return check

    assert "cannot import torch" in engine.engine_facts("1", broken("torch")).detail
    with pytest.raises(ImportError, match="sgl_tiered"):
        engine.engine_facts("1", broken("sgl_tiered.engines.sglang.seams"))


def test_what_sglang_prints_at_import_stays_out_of_the_output(
    monkeypatch, capsys
) -> None:
    """One JSON object must stay one JSON object."""
    monkeypatch.setattr(engine.importlib.metadata, "version", lambda name: "0.5.23")

    def noisy() -> list[Seam]:
        print("a banner")
        return [Seam("flags", True, "a.b")]

    facts = engine.engine_facts("0.5.23", noisy)
    assert facts.seams == (engine.SeamFacts("flags", True, "a.b"),)
    assert capsys.readouterr().out == ""
