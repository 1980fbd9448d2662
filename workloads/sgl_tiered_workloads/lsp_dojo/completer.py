"""Completions from any SGLang server's ``/generate``.

A node is one prompt and N samples of it. SGLang computes the prompt of an ``n > 1``
request once, before the samples, and does not report that pass: each sample then
claims nearly the whole prompt as cached, on every server. So the prompt is first sent
with no token to generate, which costs what that pass would have cost, and tells what
was in cache; the ``n`` samples follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from sgl_tiered_workloads.connected import Connected
from sgl_tiered_workloads.lsp_dojo.base import (
    CompleterError,
    Completions,
    PromptRefusedError,
)
from sgl_tiered_workloads.usage import total_usage, usage_of

__all__ = ["Sampling", "SglangCompleter"]

_DETAIL_CHARS = 300
_BAD_REQUEST = 400


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a completion is drawn.

    Attributes:
        max_new_tokens: its greatest length.
        temperature: above 0, or all samples of a node are the same.
        seed: of the first sample of the first node; each later one counts on. None
            leaves it to the server. SGLang heeds it only with
            ``--enable-deterministic-inference``.
        stop: texts that end a completion.
    """

    max_new_tokens: int = 256
    temperature: float = 0.8
    seed: int | None = None
    stop: tuple[str, ...] = ()


class SglangCompleter(Connected[aiohttp.ClientSession]):
    """A server's model as a ``Completer``; an async context manager.

    Args:
        url: the server's address, such as ``http://127.0.0.1:30000``.
        sampling: how to draw.
        timeout_s: of one request.
    """

    def __init__(
        self, url: str, sampling: Sampling | None = None, timeout_s: float = 600.0
    ) -> None:
        super().__init__()
        self._url = url.rstrip("/")
        self._sampling = Sampling() if sampling is None else sampling
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._drawn = 0

    def _connect(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=self._timeout)

    async def complete(self, prompt: str, num_samples: int) -> Completions:
        """Return ``num_samples`` continuations of ``prompt``."""
        first = await self._generate(prompt, {"max_new_tokens": 0, "temperature": 0.0})
        answers = await self._sample(prompt, num_samples)
        if len(answers) != num_samples:
            raise CompleterError(
                f"the server at {self._url} gave {len(answers)} completions "
                f"instead of {num_samples}"
            )
        return Completions(
            texts=tuple(str(answer["text"]) for answer in answers),
            prompt=total_usage(usage_of(answer["meta_info"]) for answer in first),
            samples=total_usage(usage_of(answer["meta_info"]) for answer in answers),
        )

    async def _sample(
        self, prompt: str, num_samples: int
    ) -> Sequence[Mapping[str, Any]]:
        drawn = self._sampling
        parameters: dict[str, Any] = {
            "max_new_tokens": drawn.max_new_tokens,
            "temperature": drawn.temperature,
        }
        if drawn.stop:
            parameters["stop"] = list(drawn.stop)
        if drawn.seed is None:
            return await self._generate(prompt, {**parameters, "n": num_samples})
        # Samples of one ``n`` share one seed and would all be the same.
        first = drawn.seed + self._drawn
        self._drawn += num_samples
        seeded = [
            {**parameters, "sampling_seed": first + number}
            for number in range(num_samples)
        ]
        return await self._generate([prompt] * num_samples, seeded)

    async def _generate(
        self,
        prompt: str | Sequence[str],
        parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    ) -> Sequence[Mapping[str, Any]]:
        session = self.session
        body = {"text": prompt, "sampling_params": parameters}
        try:
            async with session.post(self._url + "/generate", json=body) as reply:
                text = await reply.text()
                status = reply.status
        except TimeoutError as error:
            raise CompleterError(
                f"the server at {self._url} gave no completion "
                f"in {self._timeout.total:g} s"
            ) from error
        except aiohttp.ClientError as error:
            raise CompleterError(
                f"the server at {self._url} cannot be asked: {error}"
            ) from error
        if status != 200:
            kind = PromptRefusedError if status == _BAD_REQUEST else CompleterError
            raise kind(
                f"the server at {self._url} answered HTTP {status}: "
                f"{text[:_DETAIL_CHARS]}"
            )
        answers = json.loads(text)
        return answers if isinstance(answers, list) else [answers]
