"""Rules of the house that no linter knows: folders, READMEs, links, versions."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from sgl_tiered.engines.sglang import seams

FOLDERS = ("benchmarks", "kernels", "tests", "workloads")
CODE = ("docs", "examples", "sgl_tiered", "platform_dist", *FOLDERS)
ROOT = Path(__file__).parents[3]
GENERATED = {"__pycache__", "build", "dist"}


def python_files(*folders: str) -> list[Path]:
    """List the sources, without what tools made of them."""
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not GENERATED & set(path.parts)
    )


def rooms() -> list[Path]:
    """List the packages whose docstring sends the reader to a README."""
    return [
        path.parent
        for path in python_files("sgl_tiered", "kernels", "workloads")
        if path.name == "__init__.py"
        and path.parent != ROOT / "sgl_tiered"  # the README of the whole
        and ": see README.md." in path.read_text()
    ]


def documents() -> list[Path]:
    """List the Markdown files of the house."""
    top = [path for path in ROOT.glob("*.md") if not path.name.startswith(".")]
    return sorted(
        top
        + [
            path
            for folder in CODE
            for path in (ROOT / folder).rglob("*.md")
            if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        ]
    )


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_top_folders_are_no_packages() -> None:
    """``kernels/__init__.py`` would break SGLang's own import of ``kernels``."""
    found = [ROOT / folder / "__init__.py" for folder in FOLDERS]
    assert [path for path in found if path.exists()] == []
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("room", rooms(), ids=lambda path: path.name)
def test_a_room_has_a_readme(room: Path) -> None:
    """A package, or the one that holds it, says what belongs there."""
    found = [folder / "README.md" for folder in (room, room.parent)]
    readme = next((path for path in found if path.exists()), None)
    assert readme is not None, f"{room.relative_to(ROOT)} has no README.md"


@pytest.mark.parametrize("folder", ["benchmarks", "platform_dist", "tests"])
def test_a_folder_has_a_readme(folder: str) -> None:
    """So do the folders that are no packages."""
    assert (ROOT / folder / "README.md").read_text().strip()


def test_links_lead_somewhere() -> None:
    """A link from one document to a file of the house finds it."""
    links = [
        (document, target)
        for document in documents()
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
        if "://" not in target
    ]
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document, target in links
        if not (document.parent / target).exists()
    ]
    assert links
    assert broken == []


def test_documented_commands_are_targets() -> None:
    """``make demo`` and ``make test`` are documented, and so is nothing else wrong."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    readme = (ROOT / "README.md").read_text()
    assert {"demo", "test"} <= set(re.findall(r"make ([a-z0-9-]+)", readme))
    for document in documents():
        commands = r"(?:`|^ {4})make ([a-z0-9-]+)"
        named = set(re.findall(commands, document.read_text(), re.M))
        assert named <= targets, document.name


def test_ci_runs_the_documented_test_command() -> None:
    """CI and the README's reader run the same thing."""
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert any(re.match(r"make (--[\w-]+ )*test\b", line) for line in lines)


def test_versions_agree() -> None:
    """The changelog names this version, and the tested SGLang is the pinned one."""
    main = project()
    platform = tomllib.loads((ROOT / "platform_dist/pyproject.toml").read_text())
    assert platform["project"]["version"] == main["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(str(main['version']))}\]", changelog, re.M)
    assert (
        f"tested SGLang versions: {seams.TESTED_VERSION}"
        in changelog.lower().replace("sglang", "SGLang")
    )
    extras = main["optional-dependencies"]
    assert f"sglang=={seams.TESTED_VERSION}" in extras["sglang"]
