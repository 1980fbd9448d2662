"""Bodies are read by processes that can be ended: hostile ones hold nobody up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.router import readers as readers_module
from sgl_tiered.router.prompts import CHARACTERS, TEMPLATE_KEYS, TOKENS, read_prompt
from sgl_tiered.router.readers import Readers
from sgl_tiered.router.reading import Job, read_request
from sgl_tiered.router.refusals import RefusedError
from tests.unit.router.fake_servers import cluster, fast, scenario, until
from tests.unit.router.toy_tokenizers import Letters

LETTERS = "python:tests.unit.router.toy_tokenizers:letters"
BROKEN = "python:tests.unit.router.toy_tokenizers:broken"
REFUSALS = "sgl_tiered_router_refusals_total"
CHAT = "/v1/chat/completions"


def chat(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


@asynccontextmanager
async def reading(word=LETTERS, timeout_s=0.5, num=2):
    """Give readers, and the troubles that they tell."""
    troubles: list[str] = []
    readers = Readers(word, 4, timeout_s, num, ("mine",), troubles.append)
    try:
        await readers.start()
        yield readers, troubles
    finally:
        await readers.close()


def read(readers, body, path="/generate", sizes=(4,)):
    return readers.read(path, json.dumps(body).encode(), sizes)


def copy_of(readers):
    """Return the number of the one process that has read bodies."""
    assert readers.process is not None
    first = readers.process.pid
    (copy,) = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    return int(copy)


@scenario
async def test_a_process_reads_what_the_function_would():
    """Texts, chats and rows of tokens, by tokens and by pages of several sizes."""
    async with reading(timeout_s=20.0) as (readers, troubles):
        assert readers.name == "letters"
        for path, body in (
            ("/generate", {"text": "some words", "stream": True}),
            ("/generate", {"input_ids": [1] * 9, "cache_salt": "s", "extra_key": "e"}),
            ("/generate", {"text": ["a", "bc"]}),
            ("/v1/completions", {"prompt": "?", "user": "u", "model": "m:l"}),
            (CHAT, chat("hello", chat_template_kwargs={"mine": 1})),
            ("/generate", {}),
        ):
            raw = json.dumps(body).encode()
            keys = TEMPLATE_KEYS | {"mine"}
            expected = read_request(Job(path, (1, 4), 4, keys), raw, Letters())
            found = await readers.read(path, raw, (1, 4))
            assert found.prompt.alphabet == expected.prompt.alphabet
            assert found.names == expected.names
            for field in ("num_prompts", "num_tokens", "is_stream", "is_batch", "lora"):
                one, two = (getattr(each.prompt, field) for each in (found, expected))
                assert one == two, field
        assert troubles == ["tokenizer"]  # the one that has no token
        assert (await readers.read("/generate", b"{", (4,))).trouble


@pytest.mark.parametrize("word", ["loop", "exit", "memory"])
@scenario
async def test_a_hostile_chat_costs_its_process_and_nothing_else(word):
    """More of them than there are turns, and chats of others in between."""
    async with reading() as (readers, troubles):
        hostile = [
            asyncio.create_task(read(readers, chat(word), CHAT)) for _ in range(6)
        ]
        for _ in range(3):
            found = await read(readers, chat("friendly"), CHAT)
            assert not found.trouble
        for found in await asyncio.gather(*hostile):
            assert found.prompt.alphabet == CHARACTERS
        assert len(troubles) >= 6
        # Nobody stands in the way any more.
        found = await read(readers, chat("friendly"), CHAT)
        assert found.prompt.alphabet == TOKENS
        assert found.prompt.num_tokens == len("friendly")


@scenario
async def test_clients_that_leave_make_no_more_processes_than_turns():
    """What reads for nobody any more keeps its turn until it is over."""
    async with reading(num=1) as (readers, troubles):
        for _ in range(3):
            task = asyncio.create_task(read(readers, chat("loop"), CHAT))
            await until(lambda: readers.num_reading == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert readers.num_reading == 1
            await until(lambda: readers.num_reading == 0)
        assert troubles == []
        found = await read(readers, chat("friendly"), CHAT)
        assert found.prompt.alphabet == TOKENS


@scenario
async def test_the_first_process_is_replaced_when_it_is_gone():
    """And those that came of it; the next body finds another one."""
    async with reading(timeout_s=20.0) as (readers, troubles):
        assert readers.process is not None
        os.kill(readers.process.pid, 9)
        readers.process.wait()
        found = [await read(readers, chat("friendly"), CHAT) for _ in range(3)]
        assert [each.prompt.alphabet for each in found] == [TOKENS] * 3
        assert "readers_ended" in troubles


@scenario
async def test_a_copy_that_ended_while_it_waited_costs_no_request():
    """As the system ends one for want of memory: another one takes its place."""
    async with reading(timeout_s=20.0) as (readers, troubles):
        await read(readers, {"text": "one"})
        os.kill(copy_of(readers), signal.SIGKILL)
        await until(lambda: readers._idle[0][0].at_eof())
        found = await read(readers, {"text": "two"})
        assert found.prompt.alphabet == TOKENS
        assert troubles == []


@scenario
async def test_no_more_bodies_wait_than_there_is_room_for(monkeypatch):
    """More are read without, or refused if long, at once; who waits is served."""
    monkeypatch.setattr(readers_module, "_PATIENCE_S", 1000.0)
    room = readers_module._MAX_WAITING
    async with reading(timeout_s=1000.0, num=1) as (readers, troubles):
        await read(readers, chat("friendly"), CHAT)
        copy = copy_of(readers)
        os.kill(copy, signal.SIGSTOP)
        # One more: that which is read, by a process that stands still.
        waiting = [
            asyncio.create_task(read(readers, chat("friendly"), CHAT))
            for _ in range(room + 1)
        ]
        try:
            await until(lambda: readers._num_waiting == room)
            for _ in range(room):
                found = await read(readers, chat("friendly"), CHAT)
                assert found.prompt.alphabet == CHARACTERS
            with pytest.raises(RefusedError, match="try again later") as raised:
                await read(readers, chat("x" * 100_000), CHAT)
            assert (raised.value.status, raised.value.reason) == (503, "readers_busy")
            assert troubles == ["tokenizer_busy"] * (room + 1)
            assert readers._num_waiting == room
            assert readers.num_reading == 1
            assert not any(task.done() for task in waiting)
        finally:
            os.kill(copy, signal.SIGCONT)
        for found in await asyncio.gather(*waiting):
            assert found.prompt.alphabet == TOKENS
        assert readers._num_waiting == 0
        assert len(troubles) == room + 1


@scenario
async def test_a_tokenizer_that_cannot_be_made_ends_the_start():
    """In one sentence, by the flag."""
    for word in (BROKEN, "python:no.such.module:make", "python:sys:exit"):
        with pytest.raises(ConfigError, match="--tokenizer"):
            async with reading(word):
                pass


@scenario
async def test_without_a_tokenizer_only_long_bodies_need_a_process():
    """Short ones are read at once; a long one that costs too much is refused."""
    async with reading("none", timeout_s=0.5) as (readers, _):
        assert (await read(readers, {"text": "short"})).prompt.num_tokens == 2
        assert readers.process is None
        found = await read(readers, {"text": "x" * 100_000})
        assert found.prompt.num_tokens == 25_000
        assert readers.process is not None
        raw = b'{"text":[' + b"[]," * 20_000_000 + b"[]]}"
        with pytest.raises(RefusedError, match="could not be read") as raised:
            await readers.read("/generate", raw, (4,))
        assert (raised.value.status, raised.value.reason) == (400, "body_cost")
        found = await read(readers, {"text": "x" * 100_000})
        assert found.prompt.num_tokens == 25_000


@scenario
async def test_chats_go_on_being_answered_beside_hostile_ones():
    """Through the whole router: all are answered, and the next one by its tokens."""
    config = fast(tokenizer=LETTERS, read_s=0.5)
    async with cluster("a", config) as c:
        assert (await c.state())["tokenizer"] == "letters"
        hostile = [asyncio.create_task(c.post(chat("loop"), CHAT)) for _ in range(6)]
        for _ in range(3):
            assert (await c.post(chat("friendly"), CHAT))[0] == 200
        assert [each[0] for each in await asyncio.gather(*hostile)] == [200] * 6
        before = await c.metric("sgl_tiered_router_prompt_tokens_total")
        await c.post(chat("friendly"), CHAT)
        after = await c.metric("sgl_tiered_router_prompt_tokens_total")
        assert after - before == len("friendly")
        words = ("tokenizer_ended", "tokenizer_busy")
        counted = [await c.metric(REFUSALS, reason=word) for word in words]
        assert sum(counted) >= 6


PROGRAM = (
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("kwargs", "is_taken"),
    [
        (None, True),
        ({}, True),
        ({"enable_thinking": False, "thinking_budget": 100}, True),
        ({"builtin_tools": ["search", "code"]}, True),
        ({"mine": "x"}, True),
        ({"chat_template": PROGRAM}, False),
        ({"chat_template": None}, False),
        ({"tokenize": True}, False),
        ({"tools": []}, False),
        ({"return_tensors": "pt"}, False),
        ({"unknown": 1}, False),
        ({"thinking": "x" * 257}, False),
        ({"thinking": 10**7}, False),
        ({"thinking": -(10**7)}, False),
        ({"thinking": float("inf")}, False),
        ({"thinking": {"a": 1}}, False),
        ({"thinking": [["a"]]}, False),
        ({"builtin_tools": ["a"] * 17}, False),
        ([], False),
        ("thinking", False),
        (dict.fromkeys("abcdefghijklmnopq", 1), False),
    ],
)
def test_a_template_is_handed_few_plain_values_of_known_names(kwargs, is_taken) -> None:
    """A name may be one of the library's own, and one of these is a program."""
    body = chat("hello", chat_template_kwargs=kwargs)
    troubles: list[str] = []
    prompt = read_prompt(
        CHAT,
        body,
        Letters(),
        template_keys=TEMPLATE_KEYS | {"mine"},
        on_trouble=troubles.append,
    )
    assert prompt.alphabet == (TOKENS if is_taken else CHARACTERS)
    assert troubles == ([] if is_taken else ["template_kwargs"])


def test_a_text_of_millions_is_not_tokenized() -> None:
    """It would take longer than the prompt's own prefill, some day."""
    troubles: list[str] = []
    body = {"text": "x" * (2**22 + 1)}
    prompt = read_prompt("/generate", body, Letters(), on_trouble=troubles.append)
    assert (prompt.alphabet, troubles) == (CHARACTERS, ["text_length"])
