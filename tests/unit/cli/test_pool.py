"""``sgl-tiered pool``: a registry that does not answer is not an empty one."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from sgl_tiered.cli.main import main


@pytest.fixture
def nobody() -> str:
    """An etcd's URL at a port where nothing listens."""
    pytest.importorskip("httpx")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    return f"etcd://127.0.0.1:{port}/x"


@pytest.mark.parametrize("words", [["list"], ["state"], ["drain", "a"], ["up"]])
def test_a_registry_that_does_not_answer_is_an_error(
    words: list[str], nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence with its address and exit code 2, not "nobody is there"."""
    assert main(["pool", *words, "--registry", nobody]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"--registry: {nobody} does not answer" in said.err


def test_an_empty_registry_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There nobody is there, and that is no error."""
    tmp_path.chmod(0o700)
    url = f"file:{tmp_path / 'pool.json'}"
    assert main(["pool", "list", "--registry", url]) == 0
    assert capsys.readouterr().out == "nobody is there\n"
    assert main(["pool", "state", "--registry", url]) == 0
    assert json.loads(capsys.readouterr().out)["members"] == []
