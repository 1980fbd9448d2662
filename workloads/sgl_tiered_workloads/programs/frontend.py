"""The one place of this package that meets ``sglang``, when a program is run.

SGLang's frontend language (``sgl.function``, ``gen``, ``select``, ``fork``) talks to a
server through ``sgl.RuntimeEndpoint``. The endpoint made here also adds up what the
server says of every request: those that ``select`` and ``fork`` send on their own too,
which a program's state does not show.
"""

from __future__ import annotations

import threading
from typing import Any

from sgl_tiered_workloads.usage import Usage, total_usage, usage_of

__all__ = ["FrontendError", "Meter", "connect", "load_frontend"]


_FAILURES = (OSError, RuntimeError, KeyError, ValueError)
"""No connection, a refusal, and answers of another form than SGLang's."""


class FrontendError(RuntimeError):
    """SGLang is not installed, or its server does not answer; one clear sentence."""


class Meter:
    """Adds up what requests used; safe to use from the threads of a fork.

    Attributes:
        failure: what a request failed with; None while all went well.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._lock = threading.Lock()
        self._parts: list[Usage] = []

    def add(self, meta: dict[str, Any]) -> None:
        """Take the ``meta_info`` of one answer."""
        with self._lock:
            self._parts.append(usage_of(meta))

    @property
    def num_requests(self) -> int:
        """Answers so far."""
        with self._lock:
            return len(self._parts)

    def total(self) -> Usage:
        """Return the sum so far."""
        with self._lock:
            return total_usage(self._parts)


def load_frontend() -> Any:
    """Return the ``sglang`` module.

    Raises:
        FrontendError: it is not installed.
    """
    try:
        import sglang
    except ModuleNotFoundError as error:
        raise FrontendError(
            "the frontend programs need SGLang: pip install 'sgl-tiered[sglang]'"
        ) from error
    return sglang


def connect(url: str, meter: Meter) -> Any:
    """Return an endpoint of the server at ``url`` that tells ``meter`` of requests.

    Raises:
        FrontendError: SGLang is not installed, or the server does not answer.
    """
    load_frontend()
    # sgl.RuntimeEndpoint is a lazy name for this class, and cannot be a base.
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
    from sglang.lang.choices import ChoicesDecision

    class MeteredEndpoint(RuntimeEndpoint):  # type: ignore[misc]
        """SGLang's endpoint, counting.

        SGLang 0.5.23 waits for ever for a program whose request failed after more
        was queued. So a failure is told to the meter, and what follows it gets empty
        answers until the program ends.
        """

        def generate(self, s: Any, sampling_params: Any) -> Any:
            if meter.failure is None:
                try:
                    text, meta = super().generate(s, sampling_params)
                    meter.add(meta)
                    return text, meta
                except _FAILURES as error:
                    meter.failure = error
            return "", {}

        def select(self, s: Any, choices: list[str], *rest: Any) -> Any:
            if meter.failure is None:
                try:
                    return super().select(s, choices, *rest)
                except _FAILURES as error:
                    meter.failure = error
            return ChoicesDecision(decision=choices[0], meta_info={})

        def commit_lazy_operations(self, s: Any) -> None:
            # What a fork sends first, so that its branches find their prefix.
            if meter.failure is None:
                try:
                    self._generate_http_request(
                        s, {"text": s.text_, "sampling_params": {"max_new_tokens": 0}}
                    )
                except _FAILURES as error:
                    meter.failure = error

        def _generate_http_request(self, s: Any, data: dict[str, Any]) -> Any:
            answer = super()._generate_http_request(s, data)
            for one in answer if isinstance(answer, list) else [answer]:
                meter.add(one["meta_info"])
            return answer

    try:
        return MeteredEndpoint(url.rstrip("/"))
    except (OSError, RuntimeError) as error:
        raise FrontendError(f"the server at {url} does not answer: {error}") from error
