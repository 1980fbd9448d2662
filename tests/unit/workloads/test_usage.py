"""What servers say of tokens is read and added without inventing anything."""

from __future__ import annotations

import pytest
from sgl_tiered_workloads.usage import Usage, tokens_by_tier, total_usage, usage_of

TIERED = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "cached_tokens": 60,
    "cached_tokens_details": {
        "device": 10,
        "host": 30,
        "disk": 20,
        "storage": 20,
        "storage_backend": "x",
    },
}


def test_the_word_storage_does_not_count_the_disk_twice() -> None:
    """The split adds up to the cached tokens, and names that are no counts go."""
    usage = usage_of(TIERED)
    assert usage.cached_by_tier == {"device": 10, "host": 30, "disk": 20}
    assert sum(usage.cached_by_tier.values()) == usage.cached_tokens
    assert usage.cached_share == pytest.approx(0.6)


def test_a_server_without_a_disk_keeps_its_storage() -> None:
    """HiCache's level below host is called so; a disk of 0 tokens hides nothing."""
    assert tokens_by_tier({"host": 1, "storage": 2}) == {"host": 1, "storage": 2}
    assert tokens_by_tier({"disk": 0, "storage": 2})["storage"] == 2


def test_unknown_is_not_zero() -> None:
    """A server that tells nothing gives no share; one that computed all gives 0."""
    assert usage_of({"prompt_tokens": 5}).cached_share is None
    assert usage_of({"prompt_tokens": 5, "cached_tokens": 0}).cached_share == 0.0
    assert "does not tell" in Usage(prompt_tokens=5).describe()


def test_usages_add_up_by_tier() -> None:
    """The total is the sum of each field, tiers one by one."""
    plain = usage_of({"prompt_tokens": 50, "completion_tokens": 1, "cached_tokens": 0})
    total = total_usage([usage_of(TIERED), plain])
    assert (total.prompt_tokens, total.completion_tokens) == (150, 8)
    assert total.cached_share == pytest.approx(0.4)
    assert total.cached_by_tier["host"] == 30
    assert "40.0% of the prompt tokens from cache" in total.describe()
    assert total_usage([]).cached_share is None
