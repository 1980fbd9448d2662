"""Shells complete what the parsers know."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from sgl_tiered.cli.completion import SHELLS
from sgl_tiered.cli.main import COMMANDS, main


@pytest.fixture
def bash_script(capsys: pytest.CaptureFixture[str]) -> str:
    """What bash is to read."""
    assert main(["completion", "bash"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["simu"], {"simulate"}),
        (["simulate", "--host-g"], {"--host-gb"}),
        (["simulate", "--eviction", ""], {"lru", "fifo", "random", "score", "cost"}),
        (["pool", "dr"], {"drain"}),
        (["pool", "list", "--reg"], {"--registry"}),
        (["completion", ""], {"bash", "zsh", "fish", "-h", "--help"}),
        (["router", "--policy", "prompt"], {"prompt-tree"}),
        (["simulate", "--trace-of-nobody"], set()),
    ],
)
def test_bash_completes(bash_script: str, typed: list[str], expected: set[str]) -> None:
    """Asked as bash asks: the words so far, and the place of the cursor."""
    words = " ".join(f"'{word}'" for word in ["sgl-tiered", *typed])
    program = (
        f"{bash_script}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed)}\n"
        "_sgl_tiered; printf '%s\\n' \"${COMPREPLY[@]}\"\n"
    )
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert set(done.stdout.split()) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_every_subcommand_and_can_be_read(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own shell finds no fault in it, where it is installed."""
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert command.__name__.rsplit(".", 1)[1] in text  # type: ignore[attr-defined]
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)
