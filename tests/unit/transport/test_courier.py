"""Messages without an answer, where a connection cannot be made."""

from __future__ import annotations

import errno
import threading
import time

import pytest
import zmq

from sgl_tiered.pool.messages import AskDone, Envelope
from sgl_tiered.transport.control import ControlServer
from sgl_tiered.transport.courier import Courier
from sgl_tiered.transport.keys import make_keys
from sgl_tiered.transport.messages import MessageSet

PATIENCE_S = 30.0


@pytest.mark.parametrize("fails", ["socket", "monitor"])
def test_without_open_files_a_message_is_refused_and_the_next_one_goes(
    monkeypatch, caplog, fails
):
    """The thread that sends lives on, and nothing stays open of what failed."""
    courier = Courier(MessageSet(Envelope, max_bytes=1 << 20))
    context, made = courier._context, []
    real = context.socket

    def refuse(*args):
        raise zmq.ZMQError(errno.EMFILE)

    def socket(kind):
        found = real(kind)
        made.append(found)
        found.get_monitor_socket = refuse
        return found

    endpoint = "tcp://127.0.0.1:22999"
    message = Envelope((0, 1), (1, 1), 1, 0, AskDone(1), 1)
    with monkeypatch.context() as patch:
        patch.setattr(context, "socket", refuse if fails == "socket" else socket)
        for _ in range(2):
            assert "Too many open files" in courier.send(endpoint, "", message)
    assert all(each.closed for each in made)
    assert "Too many open files" in courier.troubles()[endpoint]
    assert len(caplog.records) == 1, "said once"
    assert courier.send(endpoint, "", message) == ""
    assert courier.troubles() == {}
    courier.close()


def test_a_server_that_refused_our_key_is_asked_anew(tmp_path):
    """It has begun anew, with our key among those it admits, at the same endpoint."""
    messages = MessageSet(Envelope, max_bytes=1 << 20)
    keys, ours = make_keys(tmp_path / "server"), make_keys(tmp_path / "ours")
    message = Envelope((0, 1), (1, 1), 1, 0, AskDone(1), 1)
    came = threading.Event()

    def server(endpoint, *admitted):
        return ControlServer(
            endpoint,
            messages,
            lambda request: came.set(),
            keys=keys,
            admitted=frozenset(admitted),
        )

    first = server("tcp://127.0.0.1:*")
    endpoint, place = first.endpoint, (first.endpoint, keys.public)
    courier = Courier(messages, keys=ours, admitted=None)
    try:
        assert courier.send(*place, message) == ""
        deadline_s = time.monotonic() + PATIENCE_S
        while endpoint not in courier.troubles():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        first.close()
        first = server(endpoint, ours.public)
        courier.keep({place})
        assert courier.send(*place, message) == ""
        assert came.wait(PATIENCE_S)
        assert courier.troubles() == {}
    finally:
        courier.close()
        first.close()
