"""What is refused in which words, and what is taken: a line of the file a case.

A case has what was given of ours, fields of SGLang's arguments, the device, and the
sentence; an empty one where nothing is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.serving.option_clashes import RUST_ENV
from sgl_tiered.serving.option_reader import FAULT_ENV, FIELD_PREFIX, read_server

LINES = Path(__file__).with_name("refusals.jsonl").read_text().splitlines()
THEIRS = {
    "radix_cache_backend": "tiered",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
}


@pytest.mark.parametrize("line", LINES, ids=[str(n) for n in range(1, len(LINES) + 1)])
def test_the_sentence_is_the_one_of_the_file(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of what is wrong, with what to do; or nothing."""
    for name in (FAULT_ENV, RUST_ENV):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "a-file").write_text("")
    case: dict[str, Any] = json.loads(line.replace("{tmp}", str(tmp_path)))
    device = case.get("device", "cpu")
    fields = {FIELD_PREFIX + name: value for name, value in case["given"].items()}
    theirs = {"device": None if device == "cuda" else device, **case.get("theirs", {})}
    server_args = SimpleNamespace(**{**THEIRS, **theirs, **fields})
    said = ""
    try:
        read_server(server_args, device, lambda args: args)
    except ConfigError as error:
        said = str(error)
    assert said == case["says"]
