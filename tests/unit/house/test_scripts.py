"""The scripts behind ``make``: exit codes, order, and words to the user."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A checkout with our scripts and no environment; its path has a space."""
    target = tmp_path / "my checkout"
    shutil.copytree(root / "scripts", target / "scripts")
    for folder in ("unit", "e2e"):
        (target / "tests" / folder).mkdir(parents=True)
        (target / "tests" / folder / "test_x.py").write_text("")
    return target


def program(path: Path, text: str) -> None:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run(
    checkout: Path, script: str, *args: str, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"scripts/{script}", *args],
        cwd=checkout,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("codes", "args", "expected"),
    [
        ((0, 0), (), 0),
        ((1, 0), (), 1),
        ((0, 1), (), 1),
        ((5, 0), (), 1),
        ((5, 0), ("-k", "a and b"), 0),
    ],
)
def test_all_parts_run_and_any_failure_counts(
    checkout: Path, codes: tuple[int, int], args: tuple[str, ...], expected: int
) -> None:
    """No test at all (5) is a failure, unless arguments select the tests."""
    cases = f"*tests/unit*) code={codes[0]};; *tests/e2e*) code={codes[1]};;"
    pytest_stub = f'case "$*" in {cases} esac\necho "pytest: $*"\nexit $code'
    program(checkout / "my venv/bin/python", pytest_stub)
    done = run(checkout, "test.sh", "my venv", "fast e2e", *args)
    assert done.returncode == expected, done.stderr
    ran = [line for line in done.stdout.splitlines() if line.startswith("pytest:")]
    assert len(ran) == 3
    assert "tests/unit" in ran[0]
    assert all(line.endswith(" ".join(args)) for line in ran[:2])
    failed = [
        part
        for part, code in zip(("fast", "e2e"), codes, strict=True)
        if code == 1 or (code == 5 and not args)
    ]
    # Nothing may follow the closing line, which the summary writes.
    assert done.stdout.splitlines()[-1] == ran[2]
    assert "test_summary.py" in ran[2]
    assert ran[2].split()[4:] == failed


@pytest.mark.parametrize("code", [0, 1])
def test_lint_is_shown_whole_after_the_part_beside_it(
    checkout: Path, code: int
) -> None:
    """Its lines are not mixed with pytest's; its failure counts."""
    python = f'echo "did $*"\ncase "$*" in *ruff*) exit {code};; esac'
    program(checkout / "venv/bin/python", python)
    program(checkout / "venv/bin/lint-imports", "echo contracts")
    done = run(checkout, "test.sh", "venv", "lint fast e2e")
    assert done.returncode == code
    order = ["tests/unit", "ruff check", "contracts", "tests/e2e", "test_summary.py"]
    places = [done.stdout.index(text) for text in order]
    assert places == sorted(places)
    assert done.stdout.splitlines()[-1].endswith(" lint") == bool(code)


def test_long_brings_in_what_is_left_out(checkout: Path) -> None:
    """Both kinds of tests, and more examples, but where the caller says how many."""
    program(checkout / "venv/bin/python", 'echo "did $HYPOTHESIS_PROFILE $*"')
    done = run(checkout, "test.sh", "venv", "fast", "--long", HYPOTHESIS_PROFILE="")
    assert "did full " in done.stdout
    assert "--full --faults-long" in done.stdout
    done = run(checkout, "test.sh", "venv", "fast", "--long", HYPOTHESIS_PROFILE="ci")
    assert "did ci " in done.stdout


def test_servers_are_one_run_of_both_folders(checkout: Path) -> None:
    """Files in the order of their collection, and two processes more than cores."""
    shutil.copytree(checkout / "tests/e2e", checkout / "tests/faults")
    program(checkout / "venv/bin/python", 'echo "did $*"')
    program(checkout / "bin/nproc", "echo 2")
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    done = run(checkout, "test.sh", "venv", "servers", PATH=path)
    assert done.returncode == 0
    (ran,) = [line for line in done.stdout.splitlines() if "-m pytest" in line]
    assert ran.endswith(
        "-n 4 --dist loadfile --no-loadscope-reorder tests/e2e tests/faults"
    )
    assert ".cache/test/servers.xml" in ran


def test_lint_runs_every_tool_and_names_the_one_that_failed(checkout: Path) -> None:
    """A red formatter does not hide what the type checker has to say."""
    stub = 'echo "$*"\ncase "$*" in *ruff*format*) exit 1;; esac'
    program(checkout / "venv/bin/python", stub)
    program(checkout / "venv/bin/lint-imports", "echo contracts")
    done = run(checkout, "lint.sh", "venv")
    assert done.returncode == 1
    assert "contracts" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("FAILED: ruff format --check")


def test_an_old_python_is_refused_in_one_sentence(checkout: Path) -> None:
    """Nothing is made, and the remedy is said."""
    old = checkout / "old python"
    program(old, '[ "$1" = --version ] && echo "Python 3.9.1"; exit 1')
    done = run(checkout, "install.sh", ".venv", PYTHON=str(old))
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed" in done.stderr
    assert "Python 3.9.1" in done.stderr
    assert not (checkout / ".venv").exists()
