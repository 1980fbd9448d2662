"""The HTTP front with fake servers behind it: answers, streams, failures, keys."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from sgl_tiered.router.config import parse_instance
from tests.unit.router.fake_servers import (
    answer,
    begin,
    break_off,
    cluster,
    event,
    fast,
    hang,
    scenario,
    status,
    stream,
    until,
)


def lines(text):
    """Stream one event."""

    async def behave(server, request, body):
        del server, body
        response = await begin(request)
        await response.write(event(text))
        return response

    return behave


PROMPT = {"input_ids": list(range(16))}
STREAM = {**PROMPT, "stream": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 3}}),
        ("/generate", {"text": ["a", "b"], "rid": "r"}),
        ("/v1/completions", {"prompt": [1, 2, 3], "model": "m"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/chat/completions", {"messages": "what the server will refuse"}),
    ],
)
@scenario
async def test_a_request_reaches_a_server_as_it_was_sent(path, body):
    """The body is passed on unchanged, and the answer comes back."""
    async with cluster("a") as c:
        code, headers, got = await c.post(body, path)
        assert (code, got) == (200, {"served_by": "a", "body": body})
        assert headers["X-Tiered-Instance"] == "a"
        assert headers["X-Tiered-Attempts"] == "1"


@scenario
async def test_a_stream_is_passed_on_piece_by_piece():
    """An event that has come is not held back until the next one comes."""
    async with cluster("a") as c:
        c["a"].behaviour = hang(event("first"))
        async with c.client.post("/generate", json=STREAM) as response:
            assert response.content_type == "text/event-stream"
            assert await response.content.readany() == event("first")
        await until(lambda: c["a"].num_gone == 1)
        c["a"].behaviour = stream(3)
        assert (await c.post(STREAM))[2] == b"".join(
            [event("a-0"), event("a-1"), event("a-2"), b"data: [DONE]\n\n"]
        )


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "failure", [break_off(None), break_off(b""), status(503), status(500)]
)
@scenario
async def test_another_instance_is_tried_before_the_first_byte(failure, is_stream):
    """A broken connection, before or after the headers, and a status of a server."""
    async with cluster("ab") as c:
        for server in c.servers:
            server.scripted.append(failure)
        c["b"].scripted.clear()
        for _ in range(2):  # the turn begins with each once
            code, headers, _ = await c.post({**PROMPT, "stream": is_stream})
            assert code == 200
        assert len(c["a"].seen) + len(c["b"].seen) == 3
        assert headers["X-Tiered-Attempts"] in "12"
        assert not c["a"].scripted


@scenario
async def test_a_failure_that_all_share_is_told():
    """The last answer is passed on; nobody is asked twice."""
    async with cluster("abc", fast(max_attempts=2)) as c:
        for server in c.servers:
            server.behaviour = status(503)
        code, headers, body = await c.post(PROMPT)
        assert code == 503
        assert body["served_by"] in "abc"
        assert headers["X-Tiered-Attempts"] == "2"
        assert sum(len(server.seen) for server in c.servers) == 2


ABORTED = (
    '{{"text":"","meta_info":{{"completion_tokens":{tokens},"finish_reason":'
    '{{"type":"abort","message":"prefill is gone","status_code":{code}}}}}}}'
)
OPENAI_ERROR = '{{"error":{{"message":"prefill is gone","code":{code}}}}}'


@pytest.mark.parametrize("text", [ABORTED, OPENAI_ERROR])
@scenario
async def test_a_stream_that_begins_with_a_failure_has_not_begun(text):
    """SGLang says 200 before it knows: its abort is no answer, and others are tried."""
    failing = break_off(event(text.format(code=500, tokens=0)))
    async with cluster("ab") as c:
        c["a"].behaviour = failing
        for _ in range(2):
            code, headers, raw = await c.post(STREAM)
            assert (code, headers["X-Tiered-Instance"]) == (200, "b")
            assert raw.startswith(event("b-0"))
        c["b"].behaviour = failing
        code, _, body = await c.post(STREAM)
        assert code == 500
        assert body["error"]["message"] == "prefill is gone"


@pytest.mark.parametrize(
    "text",
    [
        ABORTED.format(code=500, tokens=3),
        ABORTED.format(code="null", tokens=0),
        ABORTED.format(code=400, tokens=0),
        OPENAI_ERROR.format(code=400),
        '{"text":"an \\"error\\" and an \\"abort\\"","meta_info":{}}',
        '{"error": half',
    ],
)
@scenario
async def test_a_stream_that_begins_otherwise_is_passed_on(text):
    """Tokens, a request's own fault, an abort by wish, and what only looks like one."""
    async with cluster("ab") as c:
        for server in c.servers:
            server.behaviour = lines(text)
        code, headers, raw = await c.post(STREAM)
        assert (code, headers["X-Tiered-Attempts"]) == (200, "1")
        assert raw == event(text)


@pytest.mark.parametrize("code", [400, 404, 422, 429])
@scenario
async def test_a_status_that_speaks_of_the_request_is_final(code):
    """What one server refuses, another one would as well."""
    async with cluster("ab") as c:
        for server in c.servers:
            server.behaviour = status(code)
        assert (await c.post(STREAM))[0] == code
        assert len(c["a"].seen) + len(c["b"].seen) == 1


@pytest.mark.parametrize(
    ("sent", "passed"),
    [
        (event("one"), event("one")),
        (event("one") + b"data: tw", event("one")),  # no half event
    ],
)
@scenario
async def test_no_retry_after_the_first_byte(sent, passed):
    """A stream that breaks off ends with an error and without an end mark."""
    async with cluster("ab") as c:
        for server in c.servers:
            server.behaviour = break_off(sent)
        code, _, raw = await c.post(STREAM)
        assert code == 200
        assert raw.startswith(passed)
        (error,) = [e for e in raw.removeprefix(passed).split(b"\n\n") if e]
        assert b"broke off" in error
        assert error.startswith(b'data: {"object":"error"')
        assert len(c["a"].seen) + len(c["b"].seen) == 1
        outcome = {"path": "/generate", "outcome": "broken"}
        assert await c.metric("sgl_tiered_router_requests_total", **outcome) == 1


@scenario
async def test_silence_before_the_first_byte_goes_on_to_another_instance():
    """The first is given up, so that it stops computing."""
    async with cluster("ab", fast(first_byte_s=0.3)) as c:
        c["a"].behaviour = hang()
        for _ in range(2):
            code, headers, _ = await c.post(STREAM)
            assert (code, headers["X-Tiered-Instance"]) == (200, "b")
        await until(lambda: c["a"].num_gone == len(c["a"].seen) == 1)


@pytest.mark.parametrize("is_stream", [False, True])
@scenario
async def test_silence_everywhere_is_a_time_out(is_stream):
    """504, and nothing is left running."""
    async with cluster("ab", fast(first_byte_s=0.2, whole_s=0.2)) as c:
        for server in c.servers:
            server.behaviour = hang()
        assert (await c.post({**PROMPT, "stream": is_stream}))[0] == 504
        await until(lambda: c["a"].num_gone == c["b"].num_gone == 1)


@scenario
async def test_silence_in_a_stream_ends_it_with_an_error():
    """After the first byte there is no second try here either."""
    async with cluster("ab", fast(idle_s=0.2)) as c:
        for server in c.servers:
            server.behaviour = hang(event("one"))
        code, _, raw = await c.post(STREAM)
        assert code == 200
        assert raw.startswith(event("one"))
        assert b"broke off" in raw
        assert len(c["a"].seen) + len(c["b"].seen) == 1


@pytest.mark.parametrize("is_stream", [False, True])
@scenario
async def test_a_client_that_leaves_frees_the_server(is_stream):
    """The connection to the server is closed, whether a byte has come or not."""
    # No time-out of the router's may do it instead.
    never = {"first_byte_s": 1e6, "idle_s": 1e6, "whole_s": 1e6}
    async with cluster("a", fast(**never)) as c:
        c["a"].behaviour = hang(event("one") if is_stream else None)
        body = {**PROMPT, "stream": is_stream}
        async with aiohttp.ClientSession() as client:
            url = f"http://127.0.0.1:{c.router.port}/generate"
            sent = asyncio.create_task(client.post(url, json=body))
            await until(lambda: c["a"].seen)
            if is_stream:
                response = await sent
                await response.content.readany()
                response.close()
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)
        await until(lambda: c["a"].num_gone == 1)
        instance = c.router.fleet.get("a")
        await until(lambda: instance.num_under_way == 0)


@scenario
async def test_a_killed_instance_is_left_out_and_comes_back():
    """Requests before their first byte survive; the next ones go elsewhere."""
    async with cluster("ab") as c:
        c["a"].behaviour = hang()
        sent = [asyncio.create_task(c.post(STREAM)) for _ in range(4)]
        await until(lambda: len(c["a"].seen) >= 1 and len(c["b"].seen) >= 1)
        await c["a"].kill()
        for code, headers, _ in await asyncio.gather(*sent):
            assert (code, headers["X-Tiered-Instance"]) == (200, "b")
        instance = c.router.fleet.get("a")
        await until(lambda: not instance.is_up)
        assert (await c.post(PROMPT))[1]["X-Tiered-Attempts"] == "1"
        c["a"].behaviour = answer
        await c["a"].start()  # at its old port
        await until(lambda: instance.is_up)
        served = {
            (await c.post({"text": f"{n}" * 9}))[2]["served_by"] for n in range(4)
        }
        assert served == {"a", "b"}


@pytest.mark.parametrize("is_stream", [False, True])
@scenario
async def test_who_waits_for_a_silent_instance_is_given_to_another(is_stream):
    """As for a stopped process: the port is open and nothing answers any more."""
    async with cluster("ab", fast(health_timeout_s=0.2)) as c:
        c["a"].behaviour = hang(b"" if is_stream else None)
        sent = [
            asyncio.create_task(c.post({"text": f"{n}" * 9, "stream": is_stream}))
            for n in range(2)
        ]
        await until(lambda: c["a"].seen)
        c["a"].is_stopped = True
        for code, headers, _ in await asyncio.gather(*sent):
            assert (code, headers["X-Tiered-Instance"]) == (200, "b")
        assert not c.router.fleet.get("a").is_up
        c["a"].is_stopped = False
        await until(lambda: c.router.fleet.get("a").is_up)


@scenario
async def test_an_instance_that_is_removed_while_it_is_added_leaves_nothing():
    """Its first probe is cancelled; no task and no holder stays behind."""
    async with cluster("ab") as c:
        c["b"].is_stopped = True
        fleet = c.router.fleet
        await fleet.remove(fleet.get("b"))
        config = parse_instance(f"{c['b'].url},name=new")
        adding = asyncio.create_task(fleet.add(config))
        await until(lambda: fleet.get("new"))
        instance = fleet.get("new")
        await fleet.remove(instance)
        await adding
        assert (instance.tasks, instance.holders) == ([], [])
        assert len(list(fleet.trees["colocated"].holders)) == 1


@scenario
async def test_an_instance_that_is_not_healthy_gets_nothing():
    """503 from ``/health``, as while SGLang starts or ends."""
    async with cluster("ab") as c:
        c["a"].health = 503
        instance = c.router.fleet.get("a")
        await until(lambda: not instance.is_up)
        for n in range(3):
            assert (await c.post({"text": f"{n}"}))[2]["served_by"] == "b"
        c["a"].health = 200
        await until(lambda: instance.is_up)


@scenario
async def test_nobody_there_is_said():
    """503 at once, for requests and for the router's own health."""
    async with cluster("") as c:
        code, _, body = await c.post(PROMPT)
        assert (code, body["error"]["message"]) == (503, "no instance is available")
        async with c.client.get("/health") as response:
            assert response.status == 503


@scenario
async def test_draining_lets_requests_end_and_takes_no_more():
    """And ``resume`` takes some again."""
    async with cluster("ab") as c:
        c["a"].behaviour = hang(event("one"))
        async with c.client.post("/generate", json=STREAM) as response:
            assert response.headers["X-Tiered-Instance"] == "a"
            await response.content.readany()
            code, _, told = await c.post({}, "/router/instances/a/drain")
            assert (code, told) == (200, {"name": "a", "under_way": 1})
            for n in range(4):
                assert (await c.post({"text": f"{n}"}))[2]["served_by"] == "b"
            assert c["a"].num_gone == 0
        c["a"].behaviour = answer
        await c.post({}, "/router/instances/a/resume")
        served = {
            (await c.post({"text": f"{n}" * 9}))[2]["served_by"] for n in range(4)
        }
        assert served == {"a", "b"}


@scenario
async def test_instances_come_and_go_while_it_serves():
    """Added, used, removed; a stream on a removed one goes on to its end."""
    async with cluster("ab") as c:
        async with c.client.delete("/router/instances/b") as response:
            assert response.status == 200
        assert set((await c.state())["instances"]) == {"a"}
        added = {"instance": f"{c['b'].url},name=new,events=none"}
        assert (await c.post(added, "/router/instances"))[0] == 201
        assert (await c.post(added, "/router/instances"))[0] == 400
        go_on = asyncio.Event()

        async def slow(server, request, body):
            response = await stream(1, b"")(server, request, body)
            await go_on.wait()
            await response.write(event("last"))
            return response

        c["a"].behaviour = c["b"].behaviour = slow
        async with c.client.post("/generate", json=STREAM) as response:
            first = response.headers["X-Tiered-Instance"]
            async with c.client.delete(f"/router/instances/{first}") as removed:
                assert await removed.json() == {"name": first, "under_way": 1}
            go_on.set()
            assert (await response.read()).endswith(event("last"))
        assert first not in (await c.state())["instances"]
        async with c.client.delete("/router/instances/nobody") as response:
            assert response.status == 404


@scenario
async def test_the_key_guards_everything_but_the_health():
    """And the instances get their own key, never the client's."""
    config = fast(api_key="secret", instance_api_key="inner")
    async with cluster("a", config, key="secret") as c:
        assert (await c.post(PROMPT))[0] == 200
        assert c["a"].headers[0]["Authorization"] == "Bearer inner"
        for wrong in (
            {},
            {"Authorization": "Bearer secre"},
            {"Authorization": "secret"},
        ):
            async with aiohttp.ClientSession(headers=wrong) as client:
                url = f"http://127.0.0.1:{c.router.port}"
                for path in ("/metrics", "/router/state", "/v1/models", "/nothing"):
                    async with client.get(url + path) as response:
                        assert response.status == 401
                async with client.post(url + "/generate", json=PROMPT) as response:
                    assert response.status == 401
                async with client.get(url + "/health") as response:
                    assert response.status == 200
        assert len(c["a"].seen) == 1


@scenario
async def test_headers_are_passed_on_but_for_ours():
    """A client cannot claim who holds more; without keys its own key goes through."""
    async with cluster("a") as c:
        headers = {
            "X-Tiered-Holders": "me",
            "X-Other": "1",
            "Authorization": "Bearer k",
        }
        await c.post(PROMPT, headers=headers)
        got = c["a"].headers[0]
        assert got["X-Other"] == "1"
        assert got["Authorization"] == "Bearer k"
        assert "X-Tiered-Holders" not in got


@scenario
async def test_bad_bodies_are_refused_here():
    """No JSON, no object, too long; and changes of the fleet want JSON."""
    async with cluster("a", fast(max_body_bytes=1000)) as c:
        for data, code in ((b"{", 400), (b"[1]", 400), (b'"' + b"x" * 2000, 413)):
            async with c.client.post("/generate", data=data) as response:
                assert response.status == code
        assert c["a"].seen == []
        async with c.client.post("/router/instances/a/drain", data=b"x") as response:
            assert response.status == 415
        assert (await c.post({"instance": "ftp://x"}, "/router/instances"))[0] == 400


@scenario
async def test_any_instance_answers_what_is_the_same_on_all():
    """The list of models, as clients of the OpenAI API ask for it."""
    async with (
        cluster("ab") as c,
        c.client.get("/v1/models") as response,
    ):
        assert (await response.json())["data"][0]["id"] in "ab"


@scenario
async def test_pairs_of_prefill_and_decode():
    """Both get the same request with the same room; the decode instance answers."""
    words = {"p": ",kind=prefill,bootstrap=9000", "d": ",kind=decode"}
    async with cluster("pd", words=words) as c:
        _, headers, raw = await c.post(STREAM)
        assert raw.startswith(event("d-0"))
        assert headers["X-Tiered-Instance"] == "d"
        assert headers["X-Tiered-Prefill"] == "p"
        assert c["p"].seen == c["d"].seen
        sent = c["p"].seen[0]
        assert sent["bootstrap_host"] == "127.0.0.1"
        assert sent["bootstrap_port"] == 9000
        assert 0 <= sent["bootstrap_room"] < 2**63
        await c.post({"text": ["a", "b"]})
        rooms = c["d"].seen[1]["bootstrap_room"]
        assert len({sent["bootstrap_room"], *rooms}) == 3


@scenario
async def test_a_pair_that_fails_is_replaced():
    """A prefill that fails ends the wait of its decode instance."""
    words = {"p": ",kind=prefill", "q": ",kind=prefill", "d": ",kind=decode"}
    async with cluster("pqd", words=words) as c:
        c["p"].behaviour = status(500)
        c["q"].behaviour = answer
        c["d"].scripted.extend([hang(), answer])
        code, headers, _ = await c.post(STREAM)
        assert (code, headers["X-Tiered-Prefill"]) == (200, "q")
        await until(lambda: c["d"].num_gone == 1)


@scenario
async def test_without_a_pair_the_colocated_serve():
    """Half a pair serves nobody."""
    words = {"p": ",kind=prefill"}
    async with cluster("pa", words=words) as c:
        assert (await c.post(PROMPT))[2]["served_by"] == "a"
