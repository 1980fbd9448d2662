"""One client for each way of speaking to a server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
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
    """Return what a server tells of itself.

    ``version`` (vLLM, SGLang) and ``emulated``, what a tiered server slows down or
    makes fail on purpose; each only where it is told.
    """
    facts = {}
    for path in ("/version", "/server_info"):
        answer = _ask(url + path)
        if isinstance(answer, dict) and isinstance(answer.get("version"), str):
            facts["version"] = answer["version"]
            break
    state = _ask(url + "/tiered/stats")
    if isinstance(state, list) and state and isinstance(state[0], dict):
        told = emulated(state[0])
        if told:
            facts["emulated"] = told
    return facts


def emulated(state: Mapping[str, Any]) -> str:
    """Return what is emulated on a tiered server, by its statistics."""
    return "; ".join(
        f"{tier}: {medium.get('emulation') or medium.get('detail') or 'yes'}"
        for tier, medium in state.get("media", {}).items()
        if medium.get("emulated")
    )


def _ask(url: str) -> Any:
    """Return a JSON answer, None where there is none."""
    try:
        with urllib.request.urlopen(url, timeout=_ASK_S) as response:
            return json.loads(response.read())
    except (OSError, urllib.error.HTTPError, json.JSONDecodeError):
        return None
