"""What is shipped: built as a user would get it, from a copy of the sources."""

from __future__ import annotations

import configparser
import email
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGES = {
    "sgl_tiered": "sgl_tiered",
    "sgl_tiered_kernels": "kernels/sgl_tiered_kernels",
    "sgl_tiered_workloads": "workloads/sgl_tiered_workloads",
}
BUILD = "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"


@dataclass(frozen=True)
class Wheel:
    """The names in a wheel, its entry points and its metadata."""

    names: frozenset[str]
    entry_points: configparser.ConfigParser
    requirements: tuple[str, ...]


def build_wheel(sources: Path, target: Path) -> Wheel:
    """Build with the installed setuptools, so that nothing is downloaded."""
    target.mkdir()
    command = [sys.executable, "-c", BUILD, str(target)]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        parser = configparser.ConfigParser()
        parser.read_string(archive.read(f"{info}/entry_points.txt").decode())
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    return Wheel(
        frozenset(names), parser, tuple(metadata.get_all("Requires-Dist") or ())
    )


@pytest.fixture(scope="module")
def sources(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that a build leaves nothing in it."""
    target = tmp_path_factory.mktemp("wheel") / "sources"
    left_out = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "out"
    )
    shutil.copytree(root, target, ignore=left_out)
    return target


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Wheel:
    """The wheel of the product."""
    return build_wheel(sources, sources.parent / "main")


@pytest.fixture(scope="module")
def platform_wheel(sources: Path) -> Wheel:
    """The wheel of the CPU platform."""
    return build_wheel(sources / "platform_dist", sources.parent / "platform")


def top_level(wheel: Wheel) -> set[str]:
    tops = {name.split("/")[0] for name in wheel.names}
    return {name for name in tops if not name.endswith(".dist-info")}


def test_only_our_packages_are_shipped(wheel: Wheel, platform_wheel: Wheel) -> None:
    """A top-level ``kernels`` would overwrite a package that SGLang needs."""
    assert top_level(wheel) == set(PACKAGES)
    assert top_level(platform_wheel) == {"sgl_tiered_platform"}


def test_every_module_of_the_sources_is_shipped(wheel: Wheel, root: Path) -> None:
    """A folder without ``__init__.py`` would be left out in silence."""
    modules = {
        f"{package}/{path.relative_to(root / folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in (root / folder).rglob("*.py")
    }
    assert modules <= wheel.names


def test_types_are_shipped(wheel: Wheel) -> None:
    """Without ``py.typed`` a type checker ignores all annotations."""
    assert {f"{package}/py.typed" for package in PACKAGES} <= wheel.names


def test_the_plugin_and_the_platform_are_in_different_wheels(
    wheel: Wheel, platform_wheel: Wheel
) -> None:
    """SGLang drops the plugins of a distribution whose platform was not chosen."""
    assert dict(wheel.entry_points["sglang.srt.plugins"]) == {
        "sgl_tiered": "sgl_tiered.engines.sglang.plugin:activate"
    }
    assert "sglang.srt.platforms" not in wheel.entry_points
    assert dict(platform_wheel.entry_points["sglang.srt.platforms"]) == {
        "sgl_tiered_cpu": "sgl_tiered_platform:activate"
    }
    assert "sglang.srt.plugins" not in platform_wheel.entry_points


def test_the_command_is_installed(wheel: Wheel) -> None:
    """``sgl-tiered`` starts the command line."""
    scripts = dict(wheel.entry_points["console_scripts"])
    assert scripts == {"sgl-tiered": "sgl_tiered.cli.main:main"}


def test_the_base_dependencies_stay_light(wheel: Wheel) -> None:
    """The decisions must be usable without torch and without SGLang."""
    base = [line for line in wheel.requirements if "extra ==" not in line]
    names = {line.split(">")[0].split("=")[0].strip() for line in base}
    assert names == {"numpy", "orjson", "xxhash"}
