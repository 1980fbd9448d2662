"""The OpenAI client records what a server streams, and keeps failures as values."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sgl_tiered_workloads.harness import openai_client
from sgl_tiered_workloads.harness.openai_client import OpenAIClient
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest

from tests.unit.workloads.harness.harness_support import (
    LetterTokenizer,
    StandIn,
    answer_ids,
)

PROMPT = (10, 11, 12)
ASK = PlannedRequest("a", PROMPT, 4, start_s=0.0)


def ask(stand_in: StandIn, **options: Any) -> RequestRecord:
    """Send one request to the stand-in."""

    async def run() -> RequestRecord:
        async with (
            stand_in.serve() as server,
            OpenAIClient(server.url, "m", **options) as client,
        ):
            return await client.send(ASK, 3)

    return asyncio.run(run())


def test_completions_send_ids_and_record_ids() -> None:
    """The prompt goes out as ids, and each token of the answer has its time."""
    stand_in = StandIn(cached={"any": 2})
    found = ask(stand_in)
    assert found.error is None
    assert found.output == tuple(answer_ids(PROMPT, 4))
    assert len(found.token_times_s) == 4
    assert list(found.token_times_s) == sorted(found.token_times_s)
    assert found.started_s <= found.token_times_s[0]
    assert (found.prompt_tokens, found.output_tokens) == (77, 4)
    assert found.order == 3
    (body,) = stand_in.bodies
    assert body["prompt"] == list(PROMPT)
    assert body["max_tokens"] == 4
    assert body["ignore_eos"] is True
    assert body["stream_options"]["include_usage"] is True


def test_a_hit_without_a_tier_is_credited_to_none() -> None:
    """OpenAI's usage tells how much was cached, not where."""
    assert ask(StandIn(cached={"any": 2})).cached_by_tier == {"unattributed": 2}


def test_the_disk_of_a_tiered_server_counts_once() -> None:
    """It tells it as ``storage`` too; the cached tokens are no more than they were."""
    details = {"host": 2, "disk": 3, "storage": 3, "storage_backend": "x"}
    answer = openai_client._Answer()
    answer.take({"sglext": {"cached_tokens_details": details}}, 0.0)
    assert answer.tiers == {"host": 2, "disk": 3}


def test_several_tokens_of_one_event_have_one_time() -> None:
    """Their ids tell how many came."""
    found = ask(StandIn(per_event=2))
    assert len(found.token_times_s) == 4
    assert found.token_times_s[0] == found.token_times_s[1]


def test_without_extensions_an_event_with_text_is_a_token() -> None:
    """A strict server gets no unknown field and is measured by its text."""
    stand_in = StandIn(tells_ids=False)
    found = ask(stand_in, extensions=False, tokenizer=LetterTokenizer())
    assert found.error is None
    assert len(found.token_times_s) == 4
    assert found.output == tuple(answer_ids(PROMPT, 4))
    (body,) = stand_in.bodies
    assert set(body) == {
        "model",
        "temperature",
        "max_tokens",
        "stream",
        "stream_options",
        "prompt",
    }
    assert body["stream_options"] == {"include_usage": True}


def test_tpot_counts_the_tokens_that_usage_tells() -> None:
    """Where an event holds two tokens and does not say so, the usage does."""
    found = ask(StandIn(tells_ids=False, per_event=2), extensions=False)
    first_s, last_s = found.token_times_s
    assert found.num_output_tokens == 4
    assert found.tpot_s == pytest.approx((last_s - first_s) / 3)


def test_chat_sends_text_and_ignores_the_role_event() -> None:
    """The first event of a chat names the role and brings no token."""
    stand_in = StandIn()
    found = ask(stand_in, api="openai-chat", tokenizer=LetterTokenizer())
    assert found.error is None
    assert len(found.token_times_s) == 4
    assert len(found.output) == 4
    assert found.num_prompt_tokens == 77
    (body,) = stand_in.bodies
    text = LetterTokenizer().decode(list(PROMPT))
    assert body["messages"] == [{"role": "user", "content": text}]
    # SGLang refuses it on this endpoint when it streams.
    assert "return_token_ids" not in body


def test_chat_without_a_tokenizer_is_refused() -> None:
    """Ids cannot be sent as a message."""
    with pytest.raises(ValueError, match="tokenizer"):
        OpenAIClient("http://127.0.0.1:1", "m", "openai-chat")


def test_a_refusal_is_a_value() -> None:
    """A server without room gives a record that says so."""
    found = ask(StandIn(status=503))
    assert found.error is not None
    assert "no room" in found.error
    assert found.token_times_s == ()


def test_a_cut_stream_keeps_what_had_arrived() -> None:
    """Two tokens came before the connection broke."""
    found = ask(StandIn(cut_after=2))
    assert found.error is not None
    assert len(found.token_times_s) == 2


def test_nobody_listening_is_a_value() -> None:
    """So is a server that is not there."""

    async def run() -> RequestRecord:
        async with OpenAIClient("http://127.0.0.1:9", "m") as client:
            return await client.send(ASK)

    error = asyncio.run(run()).error
    assert error is not None
    assert "Connection" in error


def test_a_client_that_was_not_entered_says_so() -> None:
    """Its connections live in the context."""
    client = OpenAIClient("http://127.0.0.1:9", "m")
    with pytest.raises(RuntimeError, match="enter the client"):
        asyncio.run(client.send(ASK))
