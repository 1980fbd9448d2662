"""What a benchmark printed last is kept where it is asked for; else it just runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import recorded

PROGRAM = """import sys
print("argv", sys.argv[1:])
print({last!r})
sys.exit({code})
"""


def run(
    root: Path, program: Path, *args: str | Path
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts/recorded.py"), "it", str(program)]
    return subprocess.run(
        [*command, *map(str, args)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("code", [0, 3])
def test_the_last_line_is_kept_with_how_it_ended(
    root: Path, tmp_path: Path, code: int
) -> None:
    """Whatever stands around ``--record`` is the program's, as is the exit code."""
    program = tmp_path / "bench.py"
    program.write_text(PROGRAM.format(last='{"a": 1}', code=code))
    done = run(root, program, "--x", "1", "b", "--record", tmp_path / "kept", "-m", "c")
    assert done.returncode == code, done.stderr
    assert done.stdout == "argv ['--x', '1', 'b', '-m', 'c']\n{\"a\": 1}\n"
    (path,) = (tmp_path / "kept").iterdir()
    record = json.loads(path.read_text())
    assert path.name == f"it-{record['source']}.json"
    assert (record["figures"], record["exit_code"]) == ({"a": 1}, code)
    assert record["printed"] == ["argv ['--x', '1', 'b', '-m', 'c']"]
    assert record["command"] == "python bench.py --x 1 b -m c"
    assert record["machine"]["cores"] >= 1


def test_without_a_folder_nothing_is_kept(root: Path, tmp_path: Path) -> None:
    """Its help is the program's own."""
    program = tmp_path / "bench.py"
    program.write_text(PROGRAM.format(last="{}", code=4))
    done = run(root, program, "--help")
    assert (done.returncode, done.stdout) == (4, "argv ['--help']\n{}\n")
    assert list(tmp_path.iterdir()) == [program]


def test_where_the_last_line_is_text_all_of_it_is_kept(
    root: Path, tmp_path: Path
) -> None:
    """As of a report that a person reads."""
    program = tmp_path / "bench.py"
    program.write_text(PROGRAM.format(last="written: a.md", code=0))
    assert run(root, program, "--record", tmp_path / "kept").returncode == 0
    (path,) = (tmp_path / "kept").iterdir()
    record = json.loads(path.read_text())
    assert record["figures"] == {}
    assert record["printed"] == ["argv []", "written: a.md"]


def test_a_record_names_no_folder_of_the_machine(root: Path, tmp_path: Path) -> None:
    """Neither of what it was given nor in what was printed; shares stay as they are."""
    program = tmp_path / "bench.py"
    program.write_text(PROGRAM.format(last='{"a": "/x/y/z"}', code=0))
    given = (f"trace={tmp_path}/a.gz", f"{tmp_path}/b.gz", "1 / 2", "c/d")
    assert run(root, program, *given, "--record", tmp_path / "k").returncode == 0
    (path,) = (tmp_path / "k").iterdir()
    record = json.loads(path.read_text())
    assert record["command"] == "python bench.py trace=a.gz b.gz 1 / 2 c/d"
    assert record["printed"] == ["argv ['trace=a.gz', 'b.gz', '1 / 2', 'c/d']"]
    assert record["figures"] == {"a": "z"}


@pytest.mark.parametrize("place", ["benchmarks/pool", "tests/contract"])
def test_a_record_is_of_the_program_that_made_it_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Figures of one program are not taken for those of another of the same name."""
    monkeypatch.setattr(recorded, "ROOT", tmp_path)
    # A handler would outlive the test.
    monkeypatch.setattr(recorded.signal, "signal", lambda *_: None)
    program, kept = tmp_path / place / "bench.py", tmp_path / "kept"
    program.parent.mkdir(parents=True)
    for text in ("print('{}')\n", "print('{}')  # otherwise\n"):
        program.write_text(text)
        assert recorded.main(["it", str(program), "--record", str(kept)]) == 0
    told = [json.loads(path.read_text()) for path in kept.iterdir()]
    assert len({record["source"] for record in told}) == len(told) == 2


def test_every_bench_takes_record(root: Path) -> None:
    """By the one runner, or by a flag of its own that the same variable sets."""
    recipes = re.findall(
        r"^([a-z-]+): .*\n((?:\t.*\n)+)", (root / "Makefile").read_text(), re.M
    )
    measuring = {
        name: recipe
        for name, recipe in recipes
        if name.startswith("bench-")
        or name in ("demo", "soak", "fuzz", "host-waits", "compile-kernels")
    }
    assert len(measuring) > 20
    for name, recipe in measuring.items():
        assert "$(BENCH)" in recipe or "$(KEEP)" in recipe, name
        if "$(KEEP)" in recipe:
            word = re.search(r"\$\(PY\) (?:-m )?(\S+)", recipe)[1]
            file = word if "/" in word else word.replace(".", "/") + "/__main__.py"
            text = (root / file).read_text()
            assert '"--record"' in text, name
            # The latter writes each run of a call as it comes.
            assert "keep_record(" in text or "self.call.keep(" in text, name
