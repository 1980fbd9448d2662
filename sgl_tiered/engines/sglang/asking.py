"""Asking the server's own model, through its OpenAI-compatible endpoint.

For the ``llm`` length predictor. The call blocks until the reply is there, so it
belongs where a request may wait, before it is sent or in the HTTP process, and never on
the scheduler's thread.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from sgl_tiered.core.clock import Clock
from sgl_tiered.policies.length.llm import Reply

__all__ = ["OpenAIAsk"]


class OpenAIAsk:
    """Sends a prompt as one user's message and returns the reply; greedy.

    Every failure is a reply with ``error``: a request whose length could not be asked
    is served without.

    Args:
        url: of the server, such as ``http://127.0.0.1:30000``.
        model: name to send; SGLang takes any.
        api_key: of the server; empty for none.
        clock: for the seconds of the bill.
        timeout_s: for one reply.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        model: str = "default",
        api_key: str = "",
        timeout_s: float = 10.0,
    ) -> None:
        self._url = url.rstrip("/") + "/v1/chat/completions"
        self._clock = clock
        self._model = model
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # The server is meant, and no proxy between.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, prompt: str, max_tokens: int) -> Reply:
        """Return the model's reply, with the tokens that the server counted."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
        }
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), self._headers, method="POST"
        )
        start_s = self._clock.now()
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                document: Any = json.load(answer)
            text = str(document["choices"][0]["message"]["content"] or "")
            usage = document.get("usage") or {}
            num_prompt = int(usage.get("prompt_tokens") or 0)
            num_output = int(usage.get("completion_tokens") or 0)
        except urllib.error.HTTPError as error:
            return self._failed(start_s, f"the server answers {error.code}")
        except OSError as error:
            return self._failed(start_s, f"no server answers ({error})")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return self._failed(start_s, f"the answer is no chat completion ({error})")
        return Reply(text, num_prompt, num_output, self._clock.now() - start_s)

    def _failed(self, start_s: float, error: str) -> Reply:
        return Reply("", seconds=self._clock.now() - start_s, error=error)
