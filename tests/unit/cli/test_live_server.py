"""A running server that wants keys, as ``calibrate`` and ``profile`` ask it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("aiohttp")

from sgl_tiered_workloads.sessions import PlannedRequest

from sgl_tiered.cli.profiled_server import ProfiledServer
from sgl_tiered.errors import ConfigError

CLIENT, ADMIN = "Bearer of clients", "Bearer of operators"
ADMINS = ("/tiered/drop", "/tiered/profile")
STATE = {"refused": "", "fingerprint": "ab", "sums": None}


class Server(BaseHTTPRequestHandler):
    """SGLang with an API key and another one for operators."""

    def do_GET(self) -> None:
        """Answer what was asked, if the key is right."""
        is_admins = self.path.startswith(ADMINS)
        if self.headers.get("Authorization") != (ADMIN if is_admins else CLIENT):
            self.send_error(401)
            return
        size = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(size)
        answer = STATE if is_admins else [{"served": {}}]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_POST(self) -> None:
        """Answer as to a GET."""
        self.do_GET()

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


def test_each_call_brings_the_key_that_it_needs(url: str) -> None:
    """Requests and state the clients', what changes the server the operators'."""
    server = ProfiledServer(url, "of clients", "of operators")
    assert server.stats() == {"served": {}}
    assert server.drop("host")
    assert server.fingerprint() == "ab"
    server.begin(64)
    server.prefill([1, 2], "salt")
    (record,) = server.send([PlannedRequest("a", (1, 2), 1)])
    assert "401" not in str(record.error)


@pytest.mark.parametrize("keys", [(), ("of clients",)])
def test_a_key_that_is_missing_is_asked_for(url: str, keys: tuple[str, ...]) -> None:
    """In the sentence, in place of the usual remedy."""
    with pytest.raises(ConfigError, match="--admin-api-key"):
        ProfiledServer(url, *keys).drop("host")
    with pytest.raises(ConfigError, match="--admin-api-key"):
        ProfiledServer(url, *keys).fingerprint()
