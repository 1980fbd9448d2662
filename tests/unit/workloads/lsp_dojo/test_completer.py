"""Completions are asked of ``/generate`` so that what was in cache can be told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from sgl_tiered_workloads.lsp_dojo.base import CompleterError, Completions
from sgl_tiered_workloads.lsp_dojo.completer import Sampling, SglangCompleter

from tests.web_servers import end_server

Answer = Callable[[dict[str, Any]], Any]


def sample(text: str, completed: int, cached: int) -> dict[str, Any]:
    meta = {"prompt_tokens": 50, "completion_tokens": completed}
    tiers = {"device": cached - 8, "host": 8}
    return {
        "text": text,
        "meta_info": meta | {"cached_tokens": cached, "cached_tokens_details": tiers},
    }


def serve(body: dict[str, Any]) -> Any:
    """Answer like SGLang: a list for a batch or for n > 1, an object otherwise."""
    drawn = body["sampling_params"]
    if isinstance(drawn, list):
        return [sample(f"s{one['sampling_seed']}", 4, 48) for one in drawn]
    if drawn["max_new_tokens"] == 0:
        return sample("", 0, 16)
    answers = [sample(f"n{index}", 4, 48) for index in range(drawn["n"])]
    return answers if drawn["n"] > 1 else answers[0]


def ask(
    answer: Answer, sampling: Sampling, num_samples: int, times: int = 1
) -> tuple[Completions, list[dict[str, Any]]]:
    """Return the last answer and what the server was asked."""
    bodies: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        answered = answer(bodies[-1])
        if isinstance(answered, str):
            return web.Response(status=400, text=answered)
        return web.json_response(answered)

    async def run() -> Completions:
        app = web.Application()
        app.router.add_post("/generate", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        try:
            async with SglangCompleter(url, sampling) as completer:
                for _ in range(times):
                    completions = await completer.complete("x = ", num_samples)
                return completions
        finally:
            await end_server(runner)

    return asyncio.run(run()), bodies


@pytest.mark.parametrize("num_samples", [1, 3])
def test_the_prompt_is_counted_before_the_samples_fill_the_cache(
    num_samples: int,
) -> None:
    """The first request generates nothing; its hit is what earlier nodes left."""
    sampling = Sampling(max_new_tokens=9, temperature=0.5, stop=("\ndef",))
    completions, bodies = ask(serve, sampling, num_samples)
    assert completions.texts == tuple(f"n{index}" for index in range(num_samples))
    assert completions.prompt.prompt_tokens == 50
    assert completions.prompt.cached_by_tier == {"device": 8, "host": 8}
    assert completions.samples.prompt_tokens == 50 * num_samples
    assert completions.samples.completion_tokens == 4 * num_samples
    assert [body["text"] for body in bodies] == ["x = ", "x = "]
    assert bodies[1]["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "n": num_samples,
        "stop": ["\ndef"],
    }


def test_seeded_samples_have_seeds_of_their_own() -> None:
    """Samples of one ``n`` share a seed, so seeded ones go out as a batch."""
    completions, bodies = ask(serve, Sampling(seed=7), 2, times=2)
    assert completions.texts == ("s9", "s10")
    assert bodies[1]["text"] == ["x = ", "x = "]


def test_a_refusal_is_one_sentence_with_the_servers_words() -> None:
    """The address, the status and what the server said."""
    with pytest.raises(CompleterError, match="HTTP 400: too long"):
        ask(lambda body: "too long", Sampling(), 2)


def test_missing_samples_are_noticed() -> None:
    """A server without ``n`` would give fewer completions in silence."""
    with pytest.raises(CompleterError, match="1 completions instead of 2"):
        ask(lambda body: sample("one", 1, 8), Sampling(), 2)
