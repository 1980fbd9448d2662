"""The processes that read bodies, started by ``readers.py``.

    python -m sgl_tiered.router.reader_process FD TOKENIZER SECONDS

The first one loads the tokenizer, then makes a copy of itself for every socket that it
is sent over ``FD``, which costs milliseconds. A copy reads bodies for as long as its
socket is open, one at a time, within a time and a memory: its own alarm ends it, in
whatever code of a template or of a library it is. It ends as well when its socket is
closed, so that none outlives the router.

On a socket: lengths of the job and of the body (4 bytes each, big endian), the job in
msgpack, the body; back comes the length of the answer, and the answer in msgpack.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

import msgspec

from sgl_tiered.errors import ConfigError
from sgl_tiered.router.prompts import Tokenizer
from sgl_tiered.router.reading import Job, read_request
from sgl_tiered.router.tokenizers import make_tokenizer

__all__ = ["HEAD", "LENGTH", "Hello", "main"]

HEAD = struct.Struct(">II")
LENGTH = struct.Struct(">I")
_MEMORY_BYTES = 2 * 2**30
"""That a copy may take beside what the first one has: 30 times the longest body."""


class Hello(msgspec.Struct, frozen=True):
    """What the first process says once.

    Attributes:
        name: of the tokenizer; empty for none.
        error: setting, problem and remedy, where it cannot be loaded.
    """

    name: str = ""
    error: tuple[str, str, str] | None = None


def main(arguments: list[str]) -> int:
    """Serve until the router closes the socket."""
    control = socket.socket(fileno=int(arguments[0]))
    timeout_s = float(arguments[2])
    try:
        tokenizer = make_tokenizer(arguments[1])
        hello = Hello("" if tokenizer is None else tokenizer.name)
    except ConfigError as error:
        tokenizer = None
        hello = Hello(error=(error.setting, error.problem, error.remedy))
    _send(control, msgspec.msgpack.encode(hello))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the copies
    gc.collect()
    gc.freeze()  # what is shared with the copies stays shared
    while True:
        word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            return 0
        if os.fork() == 0:
            try:
                control.close()
                _serve(socket.socket(fileno=descriptors[0]), tokenizer, timeout_s)
            finally:  # also for want of memory: the router sees the socket close
                os._exit(0)
        os.close(descriptors[0])


def _serve(asked: socket.socket, tokenizer: Tokenizer | None, timeout_s: float) -> None:
    """Read bodies until the socket is closed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it does
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while head := _received(asked, HEAD.size):
        job_bytes, body_bytes = HEAD.unpack(head)
        job = msgspec.msgpack.decode(_received(asked, job_bytes), type=Job)
        body = _received(asked, body_bytes)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        answer = msgspec.msgpack.encode(read_request(job, body, tokenizer))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(asked, answer)


def _received(asked: socket.socket, num_bytes: int) -> bytes:
    """Return so many bytes; none where the socket was closed."""
    found = bytearray()
    while len(found) < num_bytes:
        piece = asked.recv(min(num_bytes - len(found), 2**20))
        if not piece:
            return b""
        found += piece
    return bytes(found)


def _send(asked: socket.socket, data: bytes) -> None:
    asked.sendall(LENGTH.pack(len(data)) + data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
