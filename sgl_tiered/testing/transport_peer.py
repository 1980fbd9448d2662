"""The other process of ``TransportKit``: a transport with memory, told what to do.

    python -m sgl_tiered.testing.transport_peer MODULE:FUNCTION NUM_BYTES

It opens a transport, registers memory, prints its address as one line of JSON, and then
answers each line ``fill SEED`` or ``sums`` with one line. It ends with its input.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import TracebackType

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from sgl_tiered.transport.base import PeerAddress, Transport

__all__ = ["BLOCK_BYTES", "PeerProcess", "block_sums", "fill", "open_transport"]

UInt8s = npt.NDArray[np.uint8]

BLOCK_BYTES = 512
"""``sums`` gives a checksum for each block of this many bytes."""


def open_transport(where: str) -> Transport:
    """Call ``MODULE:FUNCTION`` without arguments."""
    module, _, name = where.partition(":")
    opener: Callable[[], Transport] = getattr(importlib.import_module(module), name)
    return opener()


def fill(memory: UInt8s, seed: int) -> None:
    """Write random bytes all over."""
    rng = np.random.default_rng(seed)
    memory[:] = rng.integers(0, 256, memory.size, np.uint8)


def block_sums(memory: UInt8s) -> list[int]:
    """Return the checksum of each block."""
    blocks = memory.reshape(-1, BLOCK_BYTES)
    return [xxhash.xxh3_64_intdigest(block.data) for block in blocks]


class PeerProcess:
    """A peer in a process of its own, as a context manager that kills it.

    Args:
        where: ``MODULE:FUNCTION`` that opens its transport.
        num_bytes: size of its memory.
        environment: variables to add to this process's own.
    """

    def __init__(
        self, where: str, num_bytes: int, environment: Mapping[str, str] | None = None
    ) -> None:
        command = [sys.executable, "-m", __name__, where, str(num_bytes)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.is_spent = False
        """It was stopped or killed once, so it is of no use for another test."""
        self.address = msgspec.json.decode(self._line(), type=PeerAddress)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill it and let go of its pipes."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def fill(self, seed: int) -> None:
        """Have its memory filled."""
        self._ask(f"fill {seed}")

    def sums(self) -> list[int]:
        """Return the checksums of its memory's blocks."""
        return msgspec.json.decode(self._ask("sums"), type=list[int])

    def stop(self) -> None:
        """Send SIGSTOP, and wait until it has been obeyed."""
        self.is_spent = True
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """Send SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL and wait for its end."""
        self.is_spent = True
        self.process.kill()
        self.process.wait()

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        # A library may write to stdout too.
        for line in self.process.stdout:
            if line.startswith(_MARK):
                return line.removeprefix(_MARK)
        raise EOFError(f"the peer has ended with {self.process.wait()}")


_MARK = "peer: "


def _main(where: str, num_bytes: int) -> None:
    transport = open_transport(where)
    memory = np.zeros(num_bytes, np.uint8)
    transport.register(memory)
    print(_MARK + msgspec.json.encode(transport.address).decode(), flush=True)
    for line in sys.stdin:
        word, _, rest = line.partition(" ")
        answer: object = None
        if word == "fill":
            fill(memory, int(rest))
        else:
            answer = block_sums(memory)
        print(_MARK + msgspec.json.encode(answer).decode(), flush=True)
    transport.close()
    # NIXL may crash when the interpreter takes it down.
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
