"""What a release is made of: lock, workflows, versions, and the wheels themselves."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project(root: Path, folder: str = ".") -> dict[str, Any]:
    text = (root / folder / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]


def workflows(root: Path) -> dict[str, dict[str, Any]]:
    return {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in (root / ".github/workflows").glob("*.yml")
    }


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.fixture(scope="module")
def locked(root: Path) -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each package in the lock."""
    found = {}
    text = (root / "scripts/requirements.lock").read_text(encoding="utf-8")
    for entry in re.split(r"\n(?=\S)", text):
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[.*\])?==(\S+)", entry)
        if match:
            hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry)
            found[canonical(match[1])] = (match[2], len(hashes))
    return found


def test_the_lock_has_hashes_and_the_tested_versions(
    root: Path, locked: dict[str, tuple[str, int]]
) -> None:
    """Every package, in the version that the tests ran with."""
    tested = dict(
        line.split("==")
        for line in (root / "scripts/constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert len(locked) > 100
    assert [name for name, (_, hashes) in locked.items() if not hashes] == []
    differing = {
        name: (version, tested[name])
        for name, (version, _) in locked.items()
        if name in tested and tested[name] != version
    }
    assert differing == {}


def test_the_lock_has_what_the_package_asks_for(
    root: Path, locked: dict[str, tuple[str, int]]
) -> None:
    """With SGLang; a dependency that is added has to be locked."""
    told = project(root)
    wanted = told["dependencies"] + told["optional-dependencies"]["sglang"]
    names = {canonical(re.match(r"[A-Za-z0-9._-]+", line)[0]) for line in wanted}
    assert names <= set(locked)


def test_workflows_run_what_the_makefile_has(root: Path) -> None:
    """And nothing that only they know; each job ends by itself."""
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    found = workflows(root)
    assert set(found) == {"lint", "tests", "docs", "release"}
    called = [
        target
        for workflow in found.values()
        for step in steps(workflow)
        for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))
    ]
    assert set(called) == {"lint", "docs", "wheels", "compile-kernels"}
    assert set(called) <= targets
    assert ".ci/run" in [step.get("run") for step in steps(found["tests"])]
    for workflow in found.values():
        assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_a_release_is_published_by_trust_and_not_by_a_secret(root: Path) -> None:
    """Only the job that publishes may ask for an identity; all else reads."""
    for path in (root / ".github/workflows").glob("*.yml"):
        assert "secrets." not in path.read_text(encoding="utf-8"), path.name
    found = workflows(root)
    assert all(each["permissions"] == {"contents": "read"} for each in found.values())
    publish = found["release"]["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    used = [step.get("uses", "") for step in publish["steps"]]
    assert any(name.startswith("pypa/gh-action-pypi-publish@") for name in used)
    assert not any(name.startswith("actions/checkout@") for name in used)


def test_what_is_called_stable_is_there(root: Path) -> None:
    """Every module and name of the page; one that is renamed is missed here first."""
    text = (root / "docs/reference/stability.md").read_text(encoding="utf-8")
    table = text.split("<!-- names -->")[1].split("<!-- /names -->")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", table, re.M)
    assert len(rows) > 5
    for module, names in rows:
        found = importlib.import_module(module)
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(found, name), f"{module}.{name}"


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_wheels_work_in_a_clean_environment(root: Path, tmp_path: Path) -> None:
    """Built, checked and installed from a copy of the sources; asks a package index."""
    sources = tmp_path / "sources"
    left_out = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "out"
    )
    shutil.copytree(root, sources, ignore=left_out)
    done = subprocess.run(
        ["bash", "scripts/wheels.sh"],
        cwd=sources,
        env={**os.environ, "PYTHON": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = sorted(path.name for path in (sources / "out/dist").iterdir())
    version = project(root)["version"]
    assert names == [
        f"sgl_tiered-{version}-py3-none-any.whl",
        f"sgl_tiered-{version}.tar.gz",
        f"sgl_tiered_platform-{version}-py3-none-any.whl",
        f"sgl_tiered_platform-{version}.tar.gz",
    ]
