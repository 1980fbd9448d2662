"""The client records what a server streams, and keeps failures as values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import web
from sgl_tiered_workloads.client import StreamingClient, run_chat
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import ChatShape, PlannedRequest, chat_sessions

from tests.web_servers import end_server

ASK = PlannedRequest("a", (10, 11, 12), 3)


def event(ids: list[int], count: int, last: bool, index: int = 0) -> dict[str, Any]:
    """Return one streamed event as SGLang sends it."""
    return {
        "index": index,
        "output_ids": ids,
        "meta_info": {
            "completion_tokens": count,
            "cached_tokens": 16,
            "cached_tokens_details": {"device": 4, "host": 12, "storage_backend": "x"},
            "finish_reason": {"type": "length"} if last else None,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "output_top_logprobs": [
                [[-0.5, token, None], [-1, 0, None]] for token in ids
            ],
        },
    }


Script = Callable[[dict[str, Any]], list[dict[str, Any]]]


def play(
    script: Script,
    use: Callable[[StreamingClient], Awaitable[list[RequestRecord]]],
    wishes: dict[str, Any] | None = None,
) -> tuple[list[RequestRecord], list[dict[str, Any]]]:
    """Run ``use`` against a server that streams what ``script`` returns."""
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        bodies.append(body)
        events = script(body)
        if not events:
            return web.Response(status=503, text="no room")
        response = web.StreamResponse()
        await response.prepare(request)
        for item in events:
            await response.write(f"data: {json.dumps(item)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def run() -> list[RequestRecord]:
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with StreamingClient(url, wishes=wishes) as client:
                return await use(client)
        finally:
            await end_server(runner)

    return asyncio.run(run()), bodies


def test_cumulative_events_give_one_whole_answer() -> None:
    """SGLang repeats the answer so far; each token is recorded once."""
    events = [event([7], 1, False), event([7, 8], 2, False), event([7, 8, 9], 3, True)]
    (record,), bodies = play(lambda _: events, lambda c: c.run_sequential([ASK]))
    assert record.error is None
    assert record.output == (7, 8, 9)
    assert record.logprobs == (-0.5, -0.5, -0.5)
    assert record.top_logprobs[2] == ((-0.5, 9), (-1.0, 0))
    assert record.cached_tokens == 16
    assert record.cached_by_tier == {"device": 4, "host": 12}
    assert len(record.token_times_s) == 3
    assert record.started_s <= record.token_times_s[0] <= record.token_times_s[2]
    assert bodies[0]["input_ids"] == [10, 11, 12]
    assert bodies[0]["logprob_start_len"] == -1


def test_tokens_from_disk_count_once() -> None:
    """A server that reports disk repeats it as SGLang's ``storage``."""
    last = event([7], 1, True)
    details = {"device": 4, "host": 4, "disk": 8, "storage": 8}
    last["meta_info"]["cached_tokens_details"] = details
    (record,), _ = play(lambda _: [last], lambda c: c.run_sequential([ASK]))
    assert record.cached_by_tier == {"device": 4, "host": 4, "disk": 8}
    assert sum(record.cached_by_tier.values()) == record.cached_tokens


def test_incremental_events_are_appended() -> None:
    """With --incremental-streaming-output each event has only the new tokens."""
    events = [event([7], 1, False), event([8], 2, False), event([9], 3, True)]
    (record,), _ = play(lambda _: events, lambda c: c.run_sequential([ASK]))
    assert record.output == (7, 8, 9)
    assert len(record.top_logprobs) == 3


def test_a_batch_is_one_http_request_with_its_answers_told_apart() -> None:
    """A forced batch goes out whole; answers are matched by their index."""
    events = [event([7], 1, True, index=1), event([9], 1, True, index=0)]
    pair = [PlannedRequest("a", (1,), 1), PlannedRequest("b", (2,), 1)]
    records, bodies = play(lambda _: events, lambda c: c.run_batches([pair]))
    assert len(bodies) == 1
    assert bodies[0]["input_ids"] == [[1], [2]]
    assert [(r.key, r.output, r.order) for r in records] == [
        ("a", (9,), 0),
        ("b", (7,), 0),
    ]


def test_requests_have_their_keys_as_names_only_if_asked() -> None:
    """A named request can be aborted by its key; one alone is sent as one."""
    events = [event([7], 1, True, index=1), event([9], 1, True, index=0)]
    pair = [PlannedRequest("a", (1,), 1), PlannedRequest("b", (2,), 1)]
    _, plain = play(lambda _: events, lambda c: c.send_batch(pair))
    _, named = play(lambda _: events, lambda c: c.send_batch(pair, named=True))
    _, single = play(lambda _: events[1:], lambda c: c.send_batch(pair[:1], named=True))
    assert "rid" not in plain[0]
    assert named[0]["rid"] == ["a", "b"]
    assert single[0]["rid"] == "a"


def test_wishes_go_with_every_request_and_only_if_there_are_any() -> None:
    """A plain server gets no ``custom_params``."""
    events = [event([7], 1, True)]
    wishes = {"lossy": "allow"}
    _, told = play(lambda _: events, lambda c: c.run_sequential([ASK, ASK]), wishes)
    _, silent = play(lambda _: events, lambda c: c.run_sequential([ASK]))
    for body in told:
        assert body["sampling_params"]["custom_params"] == {"tiered": wishes}
        assert body["sampling_params"]["max_new_tokens"] == 3
    assert "custom_params" not in silent[0]["sampling_params"]


def test_failures_are_values() -> None:
    """Refusal, a cut stream, an error event and an abort all give a record."""
    aborted = event([7], 1, True)
    aborted["meta_info"]["finish_reason"] = {"type": "abort", "message": "gone"}
    scripts: dict[str, list[dict[str, Any]]] = {
        "HTTP 503: no room": [],
        "the stream ended before": [event([7], 1, False)],
        "out of memory": [{"error": {"message": "out of memory"}}],
        "aborted: gone": [aborted],
    }
    for reason, events in scripts.items():
        (record,), _ = play(lambda _, e=events: e, lambda c: c.run_sequential([ASK]))
        assert record.error is not None
        assert reason in record.error


def test_a_session_is_named_by_the_key_up_to_the_turn() -> None:
    """A router that goes by sessions is told of them; nobody else is."""
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("X-Session-Id"))
        return web.Response(status=503)

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        for tells, prefix in ((True, ""), (True, "7."), (False, "7.")):
            async with StreamingClient(
                url, tells_session=tells, session_prefix=prefix
            ) as client:
                await client.send(PlannedRequest("0/s3.t1", (5,), 1))
        await end_server(runner)

    asyncio.run(run())
    assert seen == ["0/s3", "7.0/s3", None]


def test_an_absent_server_is_a_value_too() -> None:
    """A refused connection gives records, not an exception."""

    async def run() -> RequestRecord:
        async with StreamingClient("http://127.0.0.1:9") as client:
            return await client.send(ASK)

    record = asyncio.run(run())
    assert record.error is not None
    assert record.ttft_s == float("inf")


def test_open_loop_keeps_targeted_and_actual_start() -> None:
    """Each request leaves no earlier than planned, and both times are kept."""
    asks = [PlannedRequest(f"o{i}", (5,), 1, start_s=0.05 * i) for i in range(3)]
    records, _ = play(lambda _: [event([7], 1, True)], lambda c: c.run_open_loop(asks))
    assert [record.targeted_s for record in records] == [0.0, 0.05, 0.1]
    assert all(record.started_s >= record.targeted_s for record in records)


def test_chat_goes_there_and_back_and_feeds_answers_back() -> None:
    """All first turns come first, the second ones in the opposite order the answers."""
    sessions = chat_sessions(ChatShape(2, 2, 4, 4, 2, 2), np.random.default_rng(0), 99)
    records, bodies = play(
        lambda body: [event([len(body["input_ids"]), 50], 2, True)],
        lambda c: run_chat(c, sessions),
    )
    assert [record.key for record in records] == ["s0.t0", "s1.t0", "s1.t1", "s0.t1"]
    assert [record.order for record in records] == [0, 1, 2, 3]
    assert bodies[2]["input_ids"][8:10] == [8, 50]


def test_chat_drops_a_session_whose_turn_failed() -> None:
    """A failed turn ends its session; the others go on."""
    sessions = chat_sessions(ChatShape(2, 2, 4, 4, 2, 2), np.random.default_rng(0), 99)
    broken = sessions[0].messages[0]

    def script(body: dict[str, Any]) -> list[dict[str, Any]]:
        return [] if tuple(body["input_ids"]) == broken else [event([8, 9], 2, True)]

    records, _ = play(script, lambda c: run_chat(c, sessions))
    assert [record.key for record in records] == ["s0.t0", "s1.t0", "s1.t1"]


def test_salts_of_tenants_are_told() -> None:
    """One salt for one request, one each in a batch, and none where nobody has any."""
    asks = [PlannedRequest("a", (10,), 1, salt="mine"), PlannedRequest("b", (11,), 1)]

    async def use(client: StreamingClient) -> list[RequestRecord]:
        await client.send_batch(asks)
        return await client.run_sequential(asks)

    _, bodies = play(lambda _: [event([7], 1, True)], use)
    assert [body.get("cache_salt") for body in bodies] == [["mine", ""], "mine", None]
