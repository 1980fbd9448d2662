"""Has bodies read by processes that can be ended, so that none holds the router.

A chat's template is a program with a client's data, a tokenizer is anybody's code, and
even JSON can be made to cost much. What does not end in time is ended with its process,
and a copy of the first process takes its place (``reader_process.py``).

A chat or a text whose tokens could not be had is read by characters, as without a
tokenizer: it is routed a little worse and answered all the same. At most so many bodies
are tokenized at one time; others wait for a moment, and are then read so as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import msgspec

from sgl_tiered.errors import ConfigError
from sgl_tiered.router.prompts import TEMPLATE_KEYS
from sgl_tiered.router.reader_process import HEAD, LENGTH, Hello
from sgl_tiered.router.reading import Job, Reading, read_request
from sgl_tiered.router.refusals import RefusedError

__all__ = ["Readers"]

_MAX_SHORT_BYTES = 16 * 2**10
"""A body without a tokenizer up to this is read here: a millisecond at most."""
_MAX_WAITING = 256
_PATIENCE_S = 1.0
"""For which a chat waits for its turn with the tokenizer."""
_LOAD_S = 600.0
_LATE_S = 5.0
"""After a process should have ended itself."""
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _BusyError(Exception):
    """Nobody was free in time."""


class _LostError(Exception):
    """The process that read a body is no more."""


class Readers:
    """Reads bodies. ``start``, then ``close``, in one event loop.

    Args:
        tokenizer: a word for ``make_tokenizer``.
        page_characters: in a page, where units are characters.
        timeout_s: for one body.
        num: bodies that are tokenized at one time; as many others are read without.
        template_keys: that ``chat_template_kwargs`` may have besides the usual ones.
        on_trouble: called with one word where a tokenizer was not asked, or failed.

    Attributes:
        name: of the tokenizer, once started; empty for none.
        process: the first one; None before it is needed.
    """

    def __init__(
        self,
        tokenizer: str,
        page_characters: int,
        timeout_s: float,
        num: int,
        template_keys: tuple[str, ...],
        on_trouble: Callable[[str], None],
    ) -> None:
        self.name = ""
        self._word = tokenizer
        self._page_characters = page_characters
        self._timeout_s = timeout_s
        self._template_keys = TEMPLATE_KEYS.union(template_keys)
        self._on_trouble = on_trouble
        self._tokenizing = asyncio.Semaphore(num)
        self._parsing = asyncio.Semaphore(num)
        self._num_waiting = 0
        self._idle: list[_Connection] = []
        self._tasks: set[asyncio.Task[Reading]] = set()
        self._starting = asyncio.Lock()
        self._control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def num_reading(self) -> int:
        """Bodies that are being read by processes."""
        return len(self._tasks)

    async def start(self) -> None:
        """Load the tokenizer, if there is one.

        Raises:
            ConfigError: it cannot be loaded; says why.
        """
        if self._word != "none":
            await self._started()

    async def warm(self) -> None:
        """Start the first process now, and not for the first long body.

        Raises:
            ConfigError: it cannot be started.
        """
        await self._started()

    async def close(self) -> None:
        """End all processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()
        async with self._starting:
            await asyncio.to_thread(self._end)

    async def read(
        self, path: str, raw: bytes, page_tokens: tuple[int, ...]
    ) -> Reading:
        """Return what a body says.

        Args:
            path: of the request.
            raw: the body.
            page_tokens: sizes of pages for which names are wanted.

        Raises:
            RefusedError: it is too long to be read here, and was not read elsewhere.
        """
        job = Job(path, page_tokens, self._page_characters, self._template_keys)
        if self._word != "none":
            try:
                found = await self._ask(job, raw, self._tokenizing, _PATIENCE_S)
            except _BusyError:
                self._on_trouble("tokenizer_busy")
            except _LostError:
                self._on_trouble("tokenizer_ended")
            else:
                for word in found.troubles:
                    self._on_trouble(word)
                return found
            job = replace(job, uses_tokenizer=False)
        if len(raw) <= _MAX_SHORT_BYTES:
            return read_request(job, raw, None)
        try:
            return await self._ask(job, raw, self._parsing, self._timeout_s)
        except _BusyError:
            raise RefusedError(
                503, "readers_busy", "too many long bodies at a time: try again later"
            ) from None
        except _LostError:
            raise RefusedError(
                400,
                "body_cost",
                f"the body could not be read in {self._timeout_s:g} s: send a simpler "
                "one, or raise --read-timeout",
            ) from None

    async def _ask(
        self, job: Job, raw: bytes, turn: asyncio.Semaphore, patience_s: float
    ) -> Reading:
        """Have a body read by a process, when it is its turn.

        Raises:
            _BusyError: it was not its turn in time.
            _LostError: the process ended.
        """
        if self._num_waiting >= _MAX_WAITING:
            raise _BusyError
        self._num_waiting += 1
        try:
            async with asyncio.timeout(patience_s):
                await turn.acquire()
        except TimeoutError:
            raise _BusyError from None
        finally:
            self._num_waiting -= 1
        # Of its own: a client that leaves must not give the turn away while the process
        # still reads for it, or there would be more of them than turns.
        task = asyncio.create_task(self._run(job, raw, turn))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task)

    async def _run(self, job: Job, raw: bytes, turn: asyncio.Semaphore) -> Reading:
        connection: _Connection | None = None
        try:
            connection = self._kept() or await self._connected()
            reader, writer = connection
            asked = msgspec.msgpack.encode(job)
            async with asyncio.timeout(self._timeout_s + _LATE_S):
                writer.writelines((HEAD.pack(len(asked), len(raw)), asked, raw))
                await writer.drain()
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                answer = await reader.readexactly(length)
            found = msgspec.msgpack.decode(answer, type=Reading)
            self._idle.append(connection)
            connection = None
            return found
        except (OSError, EOFError, ConfigError, msgspec.DecodeError) as error:
            raise _LostError from error
        finally:
            if connection is not None:
                connection[1].close()
            turn.release()

    def _kept(self) -> _Connection | None:
        """Return a socket to a process that waits; None where there is none."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            # It has been ended, by the system for want of memory, say.
            writer.close()
        return None

    async def _connected(self) -> _Connection:
        """Return a socket to a new copy of the first process."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                for _ in range(2):
                    control = await self._started()
                    try:
                        socket.send_fds(control, [b"f"], [theirs.fileno()])
                        break
                    except OSError:
                        await self._lost(control)
            return await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise

    async def _started(self) -> socket.socket:
        """Start the first process where there is none.

        Raises:
            ConfigError: the tokenizer cannot be loaded.
        """
        async with self._starting:
            if self._control is None:
                hello = await asyncio.to_thread(self._start)
                if hello.error is not None:
                    await asyncio.to_thread(self._end)
                    raise ConfigError(*hello.error)
                self.name = hello.name
            assert self._control is not None
            return self._control

    async def _lost(self, control: socket.socket) -> None:
        """Note that the first process is no more; whoever is next starts another."""
        async with self._starting:
            if self._control is control:
                self._on_trouble("readers_ended")
                await asyncio.to_thread(self._end)

    def _start(self) -> Hello:
        ours, theirs = socket.socketpair()
        number = str(theirs.fileno())
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "sgl_tiered.router.reader_process"),
                    *(number, self._word, str(self._timeout_s)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # an interrupt is for the router
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "TOKENIZERS_PARALLELISM": "false",
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )
        self._control = ours
        ours.settimeout(_LOAD_S)
        try:
            with ours.makefile("rb") as told:
                (length,) = LENGTH.unpack(told.read(LENGTH.size))
                return msgspec.msgpack.decode(told.read(length), type=Hello)
        except Exception as error:
            raise ConfigError(
                "--tokenizer",
                f"the process that loads {self._word!r} has ended ({error})",
                "see its last words above",
            ) from error

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_LATE_S)
            self.process.kill()
            self.process.wait()
            self.process = None
