"""``sgl-tiered explain``: tables of what a server tells, a sentence for the rest."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import unquote

import pytest

from sgl_tiered.cli.main import main

TOLD: dict[str, Any] = {
    "rid": "chat-[1]/x",
    "state": "finished",
    "queued_s_ago": 3.0,
    "prompt_tokens": 128,
    "ttft": {"predicted_s": 0.25, "real_s": 1.5},
    "total_s": 2.0,
    "wait": {"total_s": 1.25, "by_reason_s": {"budget": 1.0, "load": 0.25}},
    "retractions": 0,
    "tokens": {"host": 64, "computed": 64},
    "edges": {"host->device": {"bytes": 4096, "s": 0.001}},
    "missing": [
        {
            "first_token": 64,
            "tokens": 48,
            "cause": "evicted",
            "text": "evicted from disk by lru 9.0 s ago",
        }
    ],
    "decision": {
        "reason": "loading is cheaper",
        "predicted": {"load_s": 0.001, "total_s": 0.25},
        "replans": ["the disk was late"],
    },
}
WAITING: dict[str, Any] = {
    "rid": "w",
    "state": "waiting",
    "prompt_tokens": 5,
    "ttft": {"predicted_s": 0.5, "real_s": None},
    "wait": {"total_s": 0.0, "by_reason_s": {}},
}


class Server(BaseHTTPRequestHandler):
    """Knows one request; wants the key ``k``."""

    def do_GET(self) -> None:
        """Answer as the plugin's endpoints do."""
        path = unquote(self.path)
        code, answer = 404, json.dumps({"detail": "'x' is not known: gone."})
        if self.headers.get("Authorization") != "Bearer k":
            code, answer = 401, "{}"
        elif path == "/tiered/explain/chat-[1]/x":
            code, answer = 200, json.dumps(TOLD)
        elif path in ("/tiered/explain?last=2", "/tiered/explain?slowest=2"):
            code, answer = 200, json.dumps([TOLD, WAITING])
        elif path == "/tiered/explain?last=3":
            code, answer = 200, "no JSON"
        elif path == "/tiered/explain?last=4":
            code, answer = 404, "{}"
        self.send_response(code)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    """The address of the server."""
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def explain(url: str, *words: str) -> int:
    return main(["explain", *words, "--url", url, "--api-key", "k"])


def test_one_request_is_told_in_tables(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Waits by reason, misses, edges and the decision; its id is not markup."""
    assert explain(url, TOLD["rid"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "chat-[1]/x",
        "host 64, computed 64",
        "budget 1.000, load 0.250",
        "evicted from disk by lru 9.0 s ago",
        "host->device",
        "4096",
        "loading is cheaper",
        "the disk was late",
    ):
        assert text in shown


@pytest.mark.parametrize("flag", ["--last", "--slowest"])
def test_several_are_told_in_one_table(
    url: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that still waits has no first token yet."""
    assert explain(url, flag, "2") == 0
    shown = capsys.readouterr().out
    assert "chat-[1]/x" in shown
    assert "waiting" in shown
    assert "Why these tokens" not in shown


def test_json_is_what_the_server_said(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is added and nothing is left out."""
    assert explain(url, TOLD["rid"], "--json") == 0
    assert json.loads(capsys.readouterr().out) == TOLD


def test_an_unknown_request_is_code_1(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a sentence that says why it may be unknown."""
    assert explain(url, "nobody") == 1
    assert "--tiered-explain-last" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--last", "3"], "is no JSON"),
        (["--last", "4"], "answers 404"),
        (["--last", "2", "--api-key", "wrong"], "answers 401"),
        (["--last", "2", "--url", "ftp://x"], "is no address"),
        (["--last", "2", "--url", "http://127.0.0.1:9"], "no server answers"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    url: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what to do about it."""
    assert main(["explain", "--url", url, "--api-key", "k", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_the_package_for_tables_there_is_json(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The base installation has no rich: tables are refused in a sentence, JSON not."""
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert explain(url, "--last", "2") == 2
    assert "give --json" in capsys.readouterr().err
    assert explain(url, "--last", "2", "--json") == 0
