"""A language server over stdio as a ``Checker``, through pygls' client.

One document, in a folder of its own unless the user names a root, is opened once and
replaced whole for each program. Servers that answer ``textDocument/diagnostic`` are
asked; the others publish, and what they publish counts when it carries the version
that was sent (or none, after a moment in which nothing newer came). A server that
ends, hangs or is not installed gives a ``LanguageServerError`` of one sentence; it
never leaves a request waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from lsprotocol import types as lsp

from sgl_tiered_workloads.lsp_dojo.base import Finding, LanguageServerError
from sgl_tiered_workloads.lsp_dojo.cut import code_lines
from sgl_tiered_workloads.lsp_dojo.protocol_client import ProtocolClient, greeting

__all__ = ["DEFAULT_COMMAND", "LanguageServer"]

DEFAULT_COMMAND = ("pyrefly", "lsp")
"""A type checker for Python from PyPI; in the extra ``bench``."""

_Answer = TypeVar("_Answer")


class LanguageServer:
    """One running language server; an async context manager.

    Args:
        command: program and arguments.
        root: the project that the code belongs to; an empty folder if None.
        timeout_s: of each answer, the first included, for which it may load a lot.
        name: the document's file name in ``root``; nothing is written there.
        language_id: LSP's name of the language.
        severity: worst severity that counts, LSP's number: 1 errors, 2 warnings.
    """

    def __init__(
        self,
        command: Sequence[str] = DEFAULT_COMMAND,
        root: Path | None = None,
        timeout_s: float = 60.0,
        name: str = "lsp_dojo_candidate.py",
        language_id: str = "python",
        severity: int = 1,
    ) -> None:
        self._command = tuple(command)
        self._root = root
        self._timeout_s = timeout_s
        self._name = name
        self._language_id = language_id
        self._severity = severity
        self._folder = contextlib.ExitStack()
        self._client: ProtocolClient | None = None
        self._uri = ""
        self._version = 0
        self._source: str | None = None
        self._utf16 = True
        self._pulls = False

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    async def check(self, source: str) -> tuple[Finding, ...]:
        """Return the errors of ``source``, in reading order."""
        client = self._running()
        await self._show(client, source)
        if self._pulls:
            document = lsp.TextDocumentIdentifier(self._uri)
            report = await self._wait(
                client.text_document_diagnostic_async(
                    lsp.DocumentDiagnosticParams(document)
                ),
                "diagnostics",
            )
            found: Sequence[lsp.Diagnostic] = getattr(report, "items", None) or ()
        else:
            found = await self._wait(client.published(self._version), "diagnostics")
        lines = code_lines(source)
        findings = [
            self._finding(item, lines)
            for item in found
            if (item.severity or lsp.DiagnosticSeverity.Error) <= self._severity
        ]
        return tuple(sorted(findings, key=lambda f: (f.line, f.character)))

    async def offer(
        self, source: str, line: int, character: int, wrong: str
    ) -> tuple[str, ...]:
        """Return the names that the server completes with where ``wrong`` stands.

        Servers leave out what is unlike the name under the cursor, and a misspelt
        name is unlike the right one. So they are also asked with only its first
        letter there.
        """
        lines = code_lines(source)
        text = lines[line]
        names = await self._complete(source, line, text[:character])
        lines[line] = text[: character + 1] + text[character + len(wrong) :]
        names += await self._complete("".join(lines), line, text[: character + 1])
        return tuple(dict.fromkeys(names))

    async def _complete(self, source: str, line: int, before: str) -> list[str]:
        """Ask for completions in ``line``, after the text ``before``."""
        client = self._running()
        await self._show(client, source)
        document = lsp.TextDocumentIdentifier(self._uri)
        position = lsp.Position(line, self._units(before))
        answer = await self._wait(
            client.text_document_completion_async(
                lsp.CompletionParams(document, position)
            ),
            "completions",
        )
        items = answer.items if isinstance(answer, lsp.CompletionList) else answer
        ordered = sorted(items or (), key=lambda item: item.sort_text or item.label)
        return [item.label for item in ordered]

    async def _start(self) -> None:
        program = shutil.which(
            self._command[0],
            # Installed beside this Python, whether or not its folder is on the path.
            path=os.pathsep.join(
                [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
            ),
        )
        if program is None:
            raise LanguageServerError(
                f"the language server {self._command[0]!r} is not installed: "
                "pip install 'sgl-tiered[bench]' brings pyrefly, and "
                "--language-server takes another command"
            )
        root = self._root
        if root is None:
            root = Path(self._folder.enter_context(tempfile.TemporaryDirectory()))
        client = ProtocolClient()
        self._client = client
        await client.start_io(program, *self._command[1:], start_new_session=True)
        client.drain_stderr()
        uri = root.resolve().as_uri()
        result = await self._wait(
            client.initialize_async(greeting(uri)), "capabilities"
        )
        client.initialized(lsp.InitializedParams())
        self._utf16 = (
            result.capabilities.position_encoding != lsp.PositionEncodingKind.Utf32
        )
        self._pulls = result.capabilities.diagnostic_provider is not None
        self._uri = f"{uri}/{self._name}"

    async def _stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.end()
        self._folder.close()

    def _running(self) -> ProtocolClient:
        if self._client is None:
            raise RuntimeError("enter the language server first: `async with server:`")
        return self._client

    async def _show(self, client: ProtocolClient, source: str) -> None:
        if source == self._source:
            return
        first = self._source is None
        self._source = source
        self._version += 1
        if client.ended.done():
            raise LanguageServerError(self._ended(client))
        if first:
            document = lsp.TextDocumentItem(
                self._uri, self._language_id, self._version, source
            )
            client.text_document_did_open(lsp.DidOpenTextDocumentParams(document))
            return
        client.text_document_did_change(
            lsp.DidChangeTextDocumentParams(
                lsp.VersionedTextDocumentIdentifier(
                    version=self._version, uri=self._uri
                ),
                [lsp.TextDocumentContentChangeWholeDocument(source)],
            )
        )

    async def _wait(self, answer: Awaitable[_Answer], what: str) -> _Answer:
        client = self._running()
        task = asyncio.ensure_future(answer)
        either: set[asyncio.Future[Any]] = {task, client.ended}
        done, _ = await asyncio.wait(
            either,
            timeout=self._timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if client.ended in done:
            task.cancel()
            # The client fails its pending requests when the process ends.
            await asyncio.gather(task, return_exceptions=True)
            raise LanguageServerError(self._ended(client))
        if task not in done:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise LanguageServerError(
                f"the language server {shlex.join(self._command)!r} gave no {what} "
                f"in {self._timeout_s:g} s"
            )
        try:
            return task.result()
        except Exception as error:
            # Whatever the server or the library makes of an answer ends up here.
            raise LanguageServerError(
                f"the language server {shlex.join(self._command)!r} answered the "
                f"request for {what} with an error: {error}"
            ) from error

    def _ended(self, client: ProtocolClient) -> str:
        last = client.stderr.decode(errors="replace").strip().splitlines()[-1:]
        said = f", having said: {last[0]}" if last else ""
        return (
            f"the language server {shlex.join(self._command)!r} ended with code "
            f"{client.ended.result()}{said}"
        )

    def _finding(self, item: lsp.Diagnostic, lines: Sequence[str]) -> Finding:
        start, end = item.range.start, item.range.end
        text = lines[start.line] if start.line < len(lines) else ""
        message = item.message.strip().splitlines()
        one_line = end.line == start.line
        return Finding(
            line=start.line,
            character=self._index(text, start.character),
            end_character=self._index(text, end.character)
            if one_line
            else len(text.rstrip("\r\n")),
            message=message[0] if message else "error",
            code="" if item.code is None else str(item.code),
        )

    def _units(self, text: str) -> int:
        return len(text.encode("utf-16-le")) // 2 if self._utf16 else len(text)

    def _index(self, text: str, units: int) -> int:
        if not self._utf16:
            return units
        head = text.encode("utf-16-le")[: 2 * units]
        return len(head.decode("utf-16-le", errors="ignore"))
