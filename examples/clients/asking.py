"""What the examples share: a client, and where a prompt's KV came from."""

from __future__ import annotations

import argparse
import os
from typing import Any

import openai

__all__ = ["ask", "client_of", "parser_of", "sources"]

Message = dict[str, str]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows the server."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="default %(default)s"
    )
    return parser


def client_of(url: str) -> openai.OpenAI:
    """Return an OpenAI client of a server; its key comes from the environment."""
    return openai.OpenAI(
        base_url=url.rstrip("/") + "/v1",
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        timeout=600.0,
    )


def ask(
    client: openai.OpenAI, messages: list[Message], max_tokens: int, **words: Any
) -> tuple[str, dict[str, int], int]:
    """Ask; return the answer, cached tokens by tier, and the prompt's tokens.

    Args:
        client: of the server.
        messages: of the chat so far.
        max_tokens: of the answer.
        words: further fields of SGLang's, such as ``cache_salt``.
    """
    answer = client.chat.completions.create(
        model="default",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"return_cached_tokens_details": True, **words},
    )
    told = (answer.model_extra or {}).get("sglext") or {}
    details = told.get("cached_tokens_details") or {}
    # Of this field OpenAI clients get SGLang's three: host has CXL memory in it, and
    # storage is the disk. /generate and `sgl-tiered explain` tell all tiers apart.
    names = {"device": "device", "host": "host", "storage": "disk"}
    tiers = {ours: int(details[it]) for it, ours in names.items() if details.get(it)}
    prompt_tokens = answer.usage.prompt_tokens if answer.usage else 0
    return answer.choices[0].message.content or "", tiers, prompt_tokens


def sources(tiers: dict[str, int], prompt_tokens: int) -> str:
    """Say where a prompt's KV came from."""
    parts = [f"{count} from {tier}" for tier, count in tiers.items()]
    parts.append(f"{prompt_tokens - sum(tiers.values())} computed")
    return f"{prompt_tokens} prompt tokens: " + ", ".join(parts)
