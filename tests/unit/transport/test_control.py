"""Control messages between two ends, and everything that is refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from sgl_tiered.errors import ConfigError, TransportUnavailableError
from sgl_tiered.transport.control import (
    ControlClient,
    ControlServer,
    Request,
    set_limits,
)
from sgl_tiered.transport.keys import KeyPair, make_keys
from sgl_tiered.transport.messages import (
    VERSION,
    Message,
    MessageSet,
    Part,
    Refused,
    Reply,
    Times,
)

LONG_S = 30.0
"""Long enough on a busy machine; only a test that fails waits as long."""
SHORT_S = 0.3
LOOPBACK = "tcp://127.0.0.1:*"


class Ask(Message, frozen=True):
    """What the tests ask."""

    text: str = ""
    data: bytes = b""


class Answer(Message, frozen=True):
    """What the tests' server answers."""

    text: str
    sender: str = ""
    data: bytes = b""


MESSAGES = MessageSet(Ask, Answer, max_bytes=4096)


def answer(request: Request) -> Message | None:
    assert isinstance(request.message, Ask)
    text = request.message.text
    if text == "fail":
        raise ValueError("on purpose")
    if text == "silence":
        return None
    if text == "late":
        threading.Thread(target=request.reply, args=(Answer("later"),)).start()
        return None
    if text == "long":
        return Answer("long", data=bytes(5000))
    if text == "other":
        return Reply()
    return Answer(text, request.sender)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def server(stack: ExitStack) -> ControlServer:
    server = ControlServer(LOOPBACK, MESSAGES, answer)
    stack.callback(server.close)
    return server


@pytest.fixture
def client(stack: ExitStack, server: ControlServer) -> ControlClient:
    client = ControlClient(server.endpoint, MESSAGES)
    stack.callback(client.close)
    return client


def reason(reply: Message) -> str:
    assert isinstance(reply, Refused), reply
    return reply.reason


def test_a_request_gets_its_reply(client: ControlClient) -> None:
    """What the handler returns comes back."""
    assert client.ask(Ask("hello"), Answer, LONG_S) == Answer("hello")


def test_a_reply_may_come_later_from_another_thread(client: ControlClient) -> None:
    """A handler that returns None replies when it likes."""
    assert client.ask(Ask("late"), Answer, LONG_S) == Answer("later")


def test_many_threads_get_their_own_replies(client: ControlClient) -> None:
    """Replies are told apart by request id."""
    found: dict[int, list[Message]] = {}

    def work(number: int) -> None:
        asks = [f"{number}-{turn}" for turn in range(30)]
        found[number] = [client.ask(Ask(text), Answer, LONG_S) for text in asks]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        assert found[number] == [Answer(f"{number}-{turn}") for turn in range(30)]


def test_a_handler_that_raises_is_a_refusal(client: ControlClient) -> None:
    """The server lives on, and the text of the error stays with it."""
    reply = client.ask(Ask("fail"), Answer, LONG_S)
    assert reason(reply) == "failed"
    assert "on purpose" not in str(reply)
    assert client.ask(Ask("still there"), Answer, LONG_S) == Answer("still there")


def test_another_reply_than_expected_is_a_refusal(client: ControlClient) -> None:
    """Who asks never gets a value of another type."""
    assert reason(client.ask(Ask("other"), Answer, LONG_S)) == "unexpected"


def test_silence_ends_with_the_deadline(client: ControlClient) -> None:
    """No reply is a timeout, and the next request is not disturbed by it."""
    assert reason(client.ask(Ask("silence"), Answer, SHORT_S)) == "timeout"
    assert client.ask(Ask("next"), Answer, LONG_S) == Answer("next")


def test_nobody_there_ends_with_the_deadline(stack: ExitStack) -> None:
    """A server that was never there is a timeout too."""
    client = ControlClient("tcp://127.0.0.1:9", MESSAGES)
    stack.callback(client.close)
    reply = client.ask(Ask("hello"), Answer, SHORT_S)
    assert reason(reply) == "timeout"
    assert "nobody could be reached" in str(reply)


def test_a_server_that_returns_is_found_again(stack: ExitStack) -> None:
    """The client connects again by itself, at the same endpoint."""
    first = ControlServer(LOOPBACK, MESSAGES, answer)
    client = ControlClient(first.endpoint, MESSAGES)
    stack.callback(client.close)
    assert client.ask(Ask("one"), Answer, LONG_S) == Answer("one")
    first.close()
    assert reason(client.ask(Ask("two"), Answer, SHORT_S)) == "timeout"
    second = ControlServer(first.endpoint, MESSAGES, answer)
    stack.callback(second.close)
    assert client.ask(Ask("three"), Answer, LONG_S) == Answer("three")


def test_closing_answers_who_waits(stack: ExitStack, server: ControlServer) -> None:
    """``close`` of the client ends a wait at once, and so does asking later."""
    client = ControlClient(server.endpoint, MESSAGES)
    assert client.ask(Ask("up"), Answer, LONG_S) == Answer("up")
    found: list[Message] = []
    thread = threading.Thread(
        target=lambda: found.append(client.ask(Ask("silence"), Answer, LONG_S))
    )
    thread.start()
    client.close()
    client.close()
    thread.join()
    assert reason(found[0]) == "closed"
    assert reason(client.ask(Ask("later"), Answer, LONG_S)) == "closed"


def test_too_long_a_request_is_not_sent(client: ControlClient) -> None:
    """The sender refuses it, by its length with envelope."""
    assert reason(client.ask(Ask(data=bytes(4096)), Answer, LONG_S)) == "too-big"
    assert client.ask(Ask("next"), Answer, LONG_S) == Answer("next")


def test_too_long_a_reply_is_refused(client: ControlClient) -> None:
    """The server says so in place of the reply."""
    assert reason(client.ask(Ask("long"), Answer, LONG_S)) == "too-big"


def test_a_sender_that_knows_no_limit_is_cut_off(
    stack: ExitStack, server: ControlServer, client: ControlClient
) -> None:
    """Its message is never read, its connection ends, and the others are served."""
    context = stack.enter_context(zmq.Context())
    socket = stack.enter_context(context.socket(zmq.DEALER))
    monitor = stack.enter_context(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
    socket.linger = 0
    socket.connect(server.endpoint)
    socket.send(bytes(5000))
    assert monitor.poll(int(LONG_S * 1000)) == zmq.POLLIN
    socket.disable_monitor()
    assert client.ask(Ask("next"), Answer, LONG_S) == Answer("next")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (MESSAGES.encode(7, Part.REQUEST, Ask("hi"), Times(1.0), version=9), "version"),
        (msgspec.msgpack.encode([9, 7, {"other": "shape"}]), "version"),
        (
            msgspec.msgpack.encode([VERSION, 7, 0, [1.0], {"type": "Unknown"}]),
            "unreadable",
        ),
        (
            msgspec.msgpack.encode([VERSION, 7, 0, [1.0], {"type": "Ask", "text": 5}]),
            "unreadable",
        ),
        (
            msgspec.msgpack.encode([VERSION, 7, 0, [1.0], {"type": "Ask", "evil": 5}]),
            "unreadable",
        ),
        (msgspec.msgpack.encode([VERSION, 7]), "unreadable"),
    ],
)
def test_what_cannot_be_read_is_refused(
    stack: ExitStack, server: ControlServer, data: bytes, expected: str
) -> None:
    """Another version, an unknown message, a wrong field: one reason each."""
    context = stack.enter_context(zmq.Context())
    socket = stack.enter_context(context.socket(zmq.DEALER))
    socket.connect(server.endpoint)
    socket.send(data)
    assert socket.poll(int(LONG_S * 1000)) == zmq.POLLIN
    read = MESSAGES.decode(socket.recv())
    assert not isinstance(read, Refused)
    envelope, reply = read
    assert envelope.request_id == 7
    assert reason(reply) == expected


def test_noise_does_not_stop_the_server(
    stack: ExitStack, server: ControlServer, client: ControlClient
) -> None:
    """Random bytes and wrong numbers of frames are passed over."""
    context = stack.enter_context(zmq.Context())
    socket = stack.enter_context(context.socket(zmq.DEALER))
    socket.linger = 0
    socket.connect(server.endpoint)
    for size in (0, 1, 7, 100):
        socket.send(os.urandom(size))
        socket.send_multipart([b"a", b"b", b"c"])
    assert client.ask(Ask("next"), Answer, LONG_S) == Answer("next")


def keyed(
    stack: ExitStack, server_keys: KeyPair, client_keys: KeyPair, server_key: str
) -> ControlClient:
    server = ControlServer(LOOPBACK, MESSAGES, answer, keys=server_keys)
    stack.callback(server.close)
    client = ControlClient(
        server.endpoint, MESSAGES, keys=client_keys, server_key=server_key
    )
    stack.callback(client.close)
    return client


def test_with_keys_the_sender_is_known(stack: ExitStack, tmp_path: Path) -> None:
    """The handler learns whose key it was."""
    keys = make_keys(tmp_path / "key")
    client = keyed(stack, keys, keys, keys.public)
    assert client.ask(Ask("hi"), Answer, LONG_S) == Answer("hi", keys.public)


def test_a_key_that_is_not_admitted_is_refused(
    stack: ExitStack, tmp_path: Path
) -> None:
    """Knowing the server's public key is not enough."""
    keys, others = make_keys(tmp_path / "key"), make_keys(tmp_path / "other")
    client = keyed(stack, keys, others, keys.public)
    for _ in range(2):
        # The second time it is known before anything is asked.
        assert reason(client.ask(Ask("hi"), Answer, LONG_S)) == "not-admitted"


def test_another_key_is_admitted_when_it_is_listed(
    stack: ExitStack, tmp_path: Path
) -> None:
    """Each instance may have a pair of its own."""
    keys, others = make_keys(tmp_path / "key"), make_keys(tmp_path / "other")
    server = ControlServer(
        LOOPBACK, MESSAGES, answer, keys=keys, admitted=frozenset({others.public})
    )
    stack.callback(server.close)
    client = ControlClient(
        server.endpoint, MESSAGES, keys=others, server_key=keys.public
    )
    stack.callback(client.close)
    assert client.ask(Ask("hi"), Answer, LONG_S) == Answer("hi", others.public)


def test_a_wrong_server_key_gets_no_word(stack: ExitStack, tmp_path: Path) -> None:
    """A client does not talk to a server that is not the one it wants."""
    keys, others = make_keys(tmp_path / "key"), make_keys(tmp_path / "other")
    client = keyed(stack, keys, keys, others.public)
    assert reason(client.ask(Ask("hi"), Answer, 1.0)) == "timeout"


def test_a_client_without_keys_gets_no_word(stack: ExitStack, tmp_path: Path) -> None:
    """A server with keys does not serve plain connections."""
    keys = make_keys(tmp_path / "key")
    server = ControlServer(LOOPBACK, MESSAGES, answer, keys=keys)
    stack.callback(server.close)
    client = ControlClient(server.endpoint, MESSAGES)
    stack.callback(client.close)
    assert reason(client.ask(Ask("hi"), Answer, 1.0)) == "timeout"


def test_without_keys_only_loopback() -> None:
    """A port that others can reach needs keys, on both sides."""
    with pytest.raises(ConfigError, match="has no keys"):
        ControlServer("tcp://*:*", MESSAGES, answer)
    with pytest.raises(ConfigError, match="there are no keys"):
        ControlClient("tcp://10.0.0.1:5000", MESSAGES)


def test_an_endpoint_in_use_is_said(server: ControlServer) -> None:
    """Two servers do not share a port."""
    with pytest.raises(TransportUnavailableError, match="cannot be bound"):
        ControlServer(server.endpoint, MESSAGES, answer)


STOPPED_SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from test_control import MESSAGES, LOOPBACK, Answer, ControlServer
handled = []
def handle(request):
    handled.append(request.message.text)
    return Answer(",".join(handled))
print(ControlServer(LOOPBACK, MESSAGES, handle).endpoint, flush=True)
sys.stdin.read()
"""


def started(stack: ExitStack, program: str) -> subprocess.Popen[str]:
    """Run a program that imports this file; it is killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def test_a_stopped_server_skips_what_nobody_waits_for(stack: ExitStack) -> None:
    """After SIGCONT a request whose deadline has passed is not carried out."""
    process = started(stack, STOPPED_SERVER)
    assert process.stdout is not None
    client = ControlClient(process.stdout.readline().strip(), MESSAGES)
    stack.callback(client.close)
    assert client.ask(Ask("one"), Answer, LONG_S) == Answer("one")
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert reason(client.ask(Ask("two"), Answer, SHORT_S)) == "timeout"
    process.send_signal(signal.SIGCONT)
    assert client.ask(Ask("three"), Answer, LONG_S) == Answer("one,three")


def test_the_kernel_looks_for_dead_machines(server: ControlServer) -> None:
    """Nothing else does. Seen at the end that connects; a server sets the same."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        set_limits(dealer, server.endpoint, MESSAGES.max_bytes)
        monitor = dealer.get_monitor_socket(zmq.EVENT_CONNECTED)
        dealer.connect(server.endpoint)
        assert monitor.poll(1000 * LONG_S)
        number = recv_monitor_message(monitor)["value"]
        with socket.socket(fileno=os.dup(number)) as raw:
            kept = raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle_s, user_ms = (
                raw.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT)
            )
        dealer.disable_monitor()
        monitor.close(linger=0)
    assert (kept, idle_s, user_ms) == (1, 2, 5000)


HELD_SERVER = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from test_control import MESSAGES, LOOPBACK, Answer, ControlServer
goes_on = threading.Event()
def handle(request):
    if request.message.text == "hold":
        print("held", flush=True)
        goes_on.wait()
    return Answer(request.message.text)
print(ControlServer(LOOPBACK, MESSAGES, handle).endpoint, flush=True)
sys.stdin.readline()
goes_on.set()
sys.stdin.read()
"""


def test_a_full_connection_that_breaks_does_not_end_the_process(
    stack: ExitStack,
) -> None:
    """ZeroMQ's heartbeats aborted it: their timer writes to a connection that has
    broken while nothing was read from it as too much was unread."""
    process = started(stack, HELD_SERVER)
    assert process.stdout is not None
    assert process.stdin is not None
    endpoint = process.stdout.readline().strip()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = dealer.sndhwm = 0
        dealer.connect(endpoint)
        for text in ("hold", *["more"] * 1000):
            data = MESSAGES.encode(1, Part.REQUEST, Ask(text), Times(LONG_S))
            assert isinstance(data, bytes)
            dealer.send(data)
            if text == "hold":
                assert process.stdout.readline().strip() == "held"
        # What fits has arrived; the rest waits here, and is dropped.
        time.sleep(0.5)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3.0)
    process.stdin.write("\n")
    process.stdin.flush()
    client = ControlClient(endpoint, MESSAGES)
    stack.callback(client.close)
    assert client.ask(Ask("there"), Answer, LONG_S) == Answer("there")
