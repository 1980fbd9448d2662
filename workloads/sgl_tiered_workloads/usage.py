"""What a server says of one request's tokens, and the sum over many.

SGLang's ``meta_info`` carries ``prompt_tokens``, ``completion_tokens`` and
``cached_tokens``; a server with tiers splits the last one in
``cached_tokens_details``. A server that tells nothing of its cache leaves
``cached_tokens`` None: unknown is not zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Usage", "tokens_by_tier", "total_usage", "usage_of"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one or many requests.

    Attributes:
        prompt_tokens: tokens of the prompts.
        completion_tokens: tokens of the answers.
        cached_tokens: prompt tokens that were not computed; None if no server told.
        cached_by_tier: the same, split by where they came from.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)

    @property
    def cached_share(self) -> float | None:
        """Share of the prompt tokens that were not computed; None if unknown."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    def describe(self) -> str:
        """Return one line for people."""
        text = (
            f"{self.prompt_tokens:,} prompt tokens, "
            f"{self.completion_tokens:,} completion tokens; "
        )
        if self.cached_share is None:
            return text + "the server does not tell what came from cache"
        tiers = ", ".join(
            f"{tier} {tokens / self.prompt_tokens:.1%}"
            for tier, tokens in self.cached_by_tier.items()
        )
        text += f"{self.cached_share:.1%} of the prompt tokens from cache"
        return f"{text} ({tiers})" if tiers else text


def tokens_by_tier(details: Mapping[str, Any]) -> dict[str, int]:
    """Return cached tokens by tier, each token once; what is no count is left out.

    A server with a disk tier repeats ``disk`` as ``storage``, which is SGLang's own
    word for the level below host.
    """
    tiers = {key: num for key, num in details.items() if type(num) is int}
    if tiers.get("disk"):
        tiers.pop("storage", None)
    return tiers


def usage_of(meta: Mapping[str, Any]) -> Usage:
    """Read the ``meta_info`` of one answer."""
    cached = meta.get("cached_tokens")
    return Usage(
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        completion_tokens=int(meta.get("completion_tokens") or 0),
        cached_tokens=None if cached is None else int(cached),
        cached_by_tier=tokens_by_tier(meta.get("cached_tokens_details") or {}),
    )


def total_usage(parts: Iterable[Usage]) -> Usage:
    """Add usages up; the cached share is known if any part knows it."""
    prompt = completion = 0
    cached: int | None = None
    tiers: dict[str, int] = {}
    for part in parts:
        prompt += part.prompt_tokens
        completion += part.completion_tokens
        if part.cached_tokens is not None:
            cached = (cached or 0) + part.cached_tokens
        for tier, tokens in part.cached_by_tier.items():
            tiers[tier] = tiers.get(tier, 0) + tokens
    return Usage(prompt, completion, cached, tiers)
