"""A running server as ``profile`` sees it: tokens, prompts, and sums of attention."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.cli.live_server import LiveServer
from sgl_tiered.errors import ConfigError

__all__ = ["AttentionReport", "Profiled", "ProfiledServer", "read_report"]

_PREFILL_TIMEOUT_S = 1800.0
_TRIES = 120
_REST_S = 0.25
_UPDATE = "update its plugin"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionReport:
    """What one prompt, or a part of it, was summed up to. L layers, H query heads.

    Attributes:
        num_kv_heads: of each layer.
        first: position of the first query.
        num_queries: that were summed up.
        num_skipped: passes of others that were not.
        visible: entries of the score matrix of each head.
        small: ``[L, H]`` int64, of these below 1 % of their row's maximum.
        mass: ``[L, tokens]`` float64, long-range attention that each token received.
    """

    num_kv_heads: int
    first: int
    num_queries: int
    num_skipped: int
    visible: int
    small: npt.NDArray[np.int64]
    mass: npt.NDArray[np.float64]


class Profiled(Protocol):
    """What ``profile`` asks of a server."""

    def served(self) -> Mapping[str, Any]:
        """Return what ``GET /tiered/stats`` says is served."""
        ...

    def fingerprint(self) -> str:
        """Return the model's; raises ConfigError where it cannot be profiled."""
        ...

    def tokens(self, text: str) -> list[int]:
        """Return a text's token ids."""
        ...

    def begin(self, local_tokens: int) -> None:
        """Begin sums from nothing."""
        ...

    def end(self) -> None:
        """End them."""
        ...

    def prefill(self, prompt: Sequence[int], salt: str) -> None:
        """Compute a prompt; what equal salts computed before is reused."""
        ...

    def report(self) -> AttentionReport:
        """Return the sums."""
        ...


class ProfiledServer(LiveServer):
    """The server at a URL."""

    def served(self) -> Mapping[str, Any]:
        """Return what is served."""
        served: Mapping[str, Any] = self.stats()["served"]
        return served

    def fingerprint(self) -> str:
        """Return the model's fingerprint.

        Raises:
            ConfigError: this server cannot be profiled; the server says why.
        """
        return str(self._state()["fingerprint"])

    def tokens(self, text: str) -> list[int]:
        """Return a text's token ids, by the server's tokenizer."""
        remedy = "give token ids by --prompts"
        answer = self._ask("/v1/tokenize", remedy, {"prompt": text})
        try:
            return [int(token) for token in answer["tokens"]]
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                "--url", "the server makes no tokens of a text", remedy
            ) from None

    def begin(self, local_tokens: int) -> None:
        """Begin sums, as soon as the server rests.

        Raises:
            ConfigError: it does not.
        """
        for _ in range(_TRIES):
            if self._switch(f"local={local_tokens}"):
                return
            self._state()
            self.rest_s(_REST_S)
        raise ConfigError(
            "--url",
            "the server is busy with other requests",
            "measure while nobody else uses it",
        )

    def end(self) -> None:
        """End the sums; a server that is busy or gone keeps them."""
        for _ in range(_TRIES):
            if self._switch("on=false"):
                return
            self.rest_s(_REST_S)

    def prefill(self, prompt: Sequence[int], salt: str) -> None:
        """Compute a prompt and one token."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": 1,
                "ignore_eos": True,
            },
            "cache_salt": salt,
        }
        remedy = "see the server's log"
        self._ask("/generate", remedy, body, _PREFILL_TIMEOUT_S)

    def report(self) -> AttentionReport:
        """Return the sums of the time since ``begin``."""
        sums = self._state()["sums"]
        if sums is None:
            raise ConfigError(
                "--url", "somebody else ended the measurement", "run it again"
            )
        return read_report(sums)

    def _state(self) -> Mapping[str, Any]:
        state = self._ask("/tiered/profile", _UPDATE, as_admin=True)
        if not isinstance(state, dict) or "refused" not in state:
            raise ConfigError("--url", "the server knows no profile", _UPDATE)
        if state["refused"]:
            raise ConfigError(
                "--url", state["refused"], "serve the model as that needs it"
            )
        return state

    def _switch(self, query: str) -> bool:
        """Return whether the server did it; False while it is busy."""
        return self._tell(f"/tiered/profile?{query}", _UPDATE)


def read_report(sums: Mapping[str, Any]) -> AttentionReport:
    """Return the sums that a server's JSON holds.

    Raises:
        ConfigError: it holds others.
    """
    try:
        mass = [np.frombuffer(base64.b64decode(text), "<f4") for text in sums["mass"]]
        return AttentionReport(
            num_kv_heads=int(sums["num_kv_heads"]),
            first=int(sums["first"]),
            num_queries=int(sums["num_queries"]),
            num_skipped=int(sums["num_skipped"]),
            visible=int(sums["visible"]),
            small=np.array(sums["small"], np.int64),
            mass=np.array(mass, np.float64),
        )
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            "--url", "the server tells its sums in other words", _UPDATE
        ) from None
