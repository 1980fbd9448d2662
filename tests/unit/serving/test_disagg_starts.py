"""Which start of a prefill instance a decode instance knows."""

from __future__ import annotations

import threading
from contextlib import closing
from socket import create_server

import pytest

from sgl_tiered.serving.disagg import starts

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 32\r\nTiered-Proves: 1\r\n\r\n"


@pytest.mark.parametrize("then", ["stalls", "ends"])
def test_an_answer_that_does_not_come_is_none(then, monkeypatch):
    """Whatever breaks off behind the headers is raised to nobody."""
    monkeypatch.setattr(starts, "_TIMEOUT_S", 0.2)
    is_over = threading.Event()
    with closing(create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            taken, _ = server.accept()
            with closing(taken):
                taken.recv(1 << 16)
                taken.sendall(HEAD)
                if then == "stalls":
                    is_over.wait(60.0)

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        try:
            assert starts.start_of(f"127.0.0.1:{port}") is None
        finally:
            is_over.set()
            thread.join(60.0)
