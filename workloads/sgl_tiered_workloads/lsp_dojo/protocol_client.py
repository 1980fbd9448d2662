"""pygls' language client, made fit for servers that die, talk or know notebooks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import typing
from collections.abc import Sequence
from typing import Any

from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient
from pygls.protocol import default_converter

__all__ = ["ProtocolClient", "greeting"]

_SETTLE_S = 0.3
"""How long a server that publishes without versions must be silent to be believed."""
_STOP_S = 1.0
_STDERR_BYTES = 4096

# Without a project file pyrefly reports unknown names but not unknown attributes.
_SETTINGS: dict[str, Any] = {"pyrefly": {"displayTypeErrors": "force-on"}}


class ProtocolClient(LanguageClient):
    """pygls' client, with the server's end, stderr and publications kept."""

    def __init__(self) -> None:
        super().__init__("sgl-tiered-lsp-dojo", "1", converter_factory=_converter)
        self.ended: asyncio.Future[int | None] = (
            asyncio.get_running_loop().create_future()
        )
        self.stderr = b""
        self._reader: asyncio.Task[None] | None = None
        self._latest: lsp.PublishDiagnosticsParams | None = None
        self._news = asyncio.Event()

        # pygls marks what it registers, and a bound method takes no marks.
        def take(params: lsp.PublishDiagnosticsParams) -> None:
            self._latest = params
            self._news.set()

        self.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(take)
        self.feature(lsp.WORKSPACE_CONFIGURATION)(_configure)
        # Asked of every client; there is nothing to do about them here.
        for name in (
            lsp.CLIENT_REGISTER_CAPABILITY,
            lsp.WINDOW_WORK_DONE_PROGRESS_CREATE,
            lsp.WINDOW_LOG_MESSAGE,
            lsp.WINDOW_SHOW_MESSAGE,
            lsp.WORKSPACE_DIAGNOSTIC_REFRESH,
        ):
            self.feature(name)(_nothing)

    async def server_exit(self, server: asyncio.subprocess.Process) -> None:
        """Note the server's end; pygls calls this."""
        if not self.ended.done():
            self.ended.set_result(server.returncode)

    def drain_stderr(self) -> None:
        """Read the server's stderr: a full pipe would block it."""
        self._reader = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        stream = self._server.stderr if self._server is not None else None
        while stream is not None and (read := await stream.read(_STDERR_BYTES)):
            self.stderr = (self.stderr + read)[-_STDERR_BYTES:]

    async def published(self, version: int) -> Sequence[lsp.Diagnostic]:
        """Wait for the diagnostics of ``version``."""
        while True:
            latest = self._latest
            self._news.clear()
            if latest is not None and latest.version is not None:
                if latest.version >= version:
                    return latest.diagnostics
            elif latest is not None:
                try:
                    await asyncio.wait_for(self._news.wait(), _SETTLE_S)
                except TimeoutError:
                    self._latest = None
                    return latest.diagnostics
                continue
            await self._news.wait()

    async def end(self) -> None:
        """Say goodbye; kill what does not go."""
        server = self._server
        if server is None:
            return
        # A server that hangs or is gone gives an error here; it is killed below.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.shutdown_async(None), _STOP_S)
            self.exit(None)
            await asyncio.wait_for(server.wait(), _STOP_S)
        # Some servers are started through a wrapper; the group has them all.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        await super().stop()  # type: ignore[no-untyped-call]
        if self._reader is not None:
            await self._reader


def greeting(root_uri: str) -> lsp.InitializeParams:
    """Return what this client says of itself and of the folder ``root_uri``."""
    document = lsp.TextDocumentClientCapabilities(
        synchronization=lsp.TextDocumentSyncClientCapabilities(),
        publish_diagnostics=lsp.PublishDiagnosticsClientCapabilities(
            version_support=True
        ),
        diagnostic=lsp.DiagnosticClientCapabilities(),
        completion=lsp.CompletionClientCapabilities(
            completion_item=lsp.ClientCompletionItemOptions(snippet_support=False)
        ),
    )
    return lsp.InitializeParams(
        process_id=os.getpid(),
        root_uri=root_uri,
        workspace_folders=[lsp.WorkspaceFolder(root_uri, "lsp_dojo")],
        initialization_options=_SETTINGS,
        capabilities=lsp.ClientCapabilities(
            workspace=lsp.WorkspaceClientCapabilities(configuration=True),
            text_document=document,
            general=lsp.GeneralClientCapabilities(
                position_encodings=[
                    lsp.PositionEncodingKind.Utf32,
                    lsp.PositionEncodingKind.Utf16,
                ]
            ),
        ),
    )


def _configure(params: lsp.ConfigurationParams) -> list[Any]:
    return [_SETTINGS for _ in params.items]


def _nothing(params: Any) -> None:
    return None


def _converter() -> Any:
    """pygls' converter, able to read notebook selectors.

    lsprotocol 2025.0.0 registers no hook for this union with None in it, so that a
    server with notebook support (pyrefly is one) could not even be greeted.
    """
    converter: Any = default_converter()  # type: ignore[no-untyped-call]
    for kind in (
        lsp.NotebookDocumentFilterWithNotebook,
        lsp.NotebookDocumentFilterWithCells,
    ):
        union = typing.get_type_hints(kind)["notebook"]
        converter.register_structure_hook(union, lambda value, _: value)
    return converter
