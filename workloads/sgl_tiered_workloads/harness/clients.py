"""One client for each way of speaking to a server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Protocol, Self, cast

from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.harness.openai_client import Api, OpenAIClient, Tokenizer
from sgl_tiered_workloads.harness.spec import SystemSpec
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest

__all__ = [
    "Client",
    "FolderTokenizer",
    "LazyEncoder",
    "make_client",
    "server_facts",
]

_ASK_S = 5.0


class Client(Protocol):
    """What the harness needs of a client: an async context manager that sends."""

    async def __aenter__(self) -> Self:
        """Connect; the clock starts at zero."""
        ...

    async def __aexit__(self, *details: Any) -> None:
        """Disconnect."""
        ...

    def now_s(self) -> float:
        """Seconds since the client was entered."""
        ...

    async def send(self, request: PlannedRequest, order: int = 0) -> RequestRecord:
        """Send one request and return its record."""
        ...


class FolderTokenizer:
    """The tokenizer in a model's folder, through ``transformers``."""

    def __init__(self, folder: Path) -> None:
        # Not at the top: it takes seconds, and only chat needs it.
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))

    def decode(self, ids: list[int]) -> str:
        """Return the text of ``ids``."""
        return str(self._tokenizer.decode(ids))

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class LazyEncoder:
    """Text to ids by the tokenizer in a folder, loaded when the first text comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: FolderTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        if self._tokenizer is None:
            self._tokenizer = FolderTokenizer(self._folder)
        return self._tokenizer.encode(text)


def make_client(
    system: SystemSpec, url: str, tokenizer: Tokenizer | None = None
) -> Client:
    """Return a client for ``system``, whose server listens at ``url``."""
    if system.api == "generate":
        # Logprobs cost time; only the gate asks for them.
        return StreamingClient(url, logprobs=False)
    return OpenAIClient(
        url, system.model, cast(Api, system.api), tokenizer, system.extensions
    )


def server_facts(url: str) -> dict[str, str]:
    """Return the version that a server tells (vLLM, SGLang); empty if it tells none."""
    for path in ("/version", "/server_info"):
        try:
            with urllib.request.urlopen(url + path, timeout=_ASK_S) as response:
                answer = json.loads(response.read())
        except (OSError, urllib.error.HTTPError, json.JSONDecodeError):
            continue
        if isinstance(answer, dict) and isinstance(answer.get("version"), str):
            return {"version": answer["version"]}
    return {}
