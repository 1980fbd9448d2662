"""What the router does not do, in one sentence for the client and one word for metrics.

Whoever refuses raises ``RefusedError``; the front counts it and writes the answer.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

__all__ = ["RefusedError", "error_body", "error_response"]


class RefusedError(Exception):
    """A request that is refused.

    Attributes:
        status: of HTTP.
        reason: one word, the label in ``sgl_tiered_router_refusals``.
        sentence: what is wrong, and what to do.
    """

    def __init__(self, status: int, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason
        self.sentence = sentence


def error_response(status: int, message: str) -> web.Response:
    """Return an error in the form of the OpenAI API, as SGLang has it as well."""
    return web.Response(
        status=status,
        body=msgspec.json.encode(error_body(status, message)),
        content_type="application/json",
    )


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return what an error says, for an answer or for an event of a stream."""
    return {
        "object": "error",
        "error": {"message": message, "type": "RouterError", "code": status},
    }
