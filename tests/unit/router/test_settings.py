"""What the command line and request bodies say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sgl_tiered.cli.main import main
from sgl_tiered.cli.router import parse_credits
from sgl_tiered.errors import ConfigError
from sgl_tiered.router.bootstrap import with_bootstrap
from sgl_tiered.router.config import (
    InstanceConfig,
    RouterConfig,
    is_loopback,
    parse_instance,
)
from sgl_tiered.router.feed import FeedSource
from sgl_tiered.router.prompts import CHARACTERS, TOKENS, read_prompt
from sgl_tiered.router.proxy import whole_events
from sgl_tiered.router.refusals import RefusedError
from sgl_tiered.router.tokenizers import make_tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "http://127.0.0.1:30000",
            InstanceConfig("127.0.0.1:30000", "http://127.0.0.1:30000"),
        ),
        (
            "https://h:1/, kind=prefill, name=p, bootstrap=9, events=none",
            InstanceConfig("p", "https://h:1", "prefill", False, (), 9),
        ),
        (
            "http://h:1,events=tcp://h:5,replay=tcp://h:6,events=tcp://[::1]:7,topic=k",
            InstanceConfig(
                "h:1",
                "http://h:1",
                discovers_events=False,
                sources=(
                    FeedSource("tcp://h:5", "tcp://h:6", "k"),
                    FeedSource("tcp://[::1]:7", None, "k"),
                ),
            ),
        ),
    ],
)
def test_an_instance_in_words(text, expected) -> None:
    """URL, then what differs from the defaults."""
    assert parse_instance(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("127.0.0.1:30000", "no address"),
        ("http://h:1/v1", "more than host and port"),
        ("http://user@h:1", "more than host and port"),
        ("http://h:1,prefill", "no KEY=VALUE"),
        ("http://h:1,kind=both", "kind 'both'"),
        ("http://h:1,color=red", "'color' is not known"),
        ("http://h:1,kind=decode,kind=decode", "said before"),
        ("http://h:1,name=a/b", "name 'a/b'"),
        ("http://h:1,bootstrap=0", "bootstrap '0'"),
        ("http://h:1,replay=tcp://h:6", "replay stands alone"),
        ("http://h:1,events=h:5", "no endpoint"),
        ("http://h:1,events=tcp://*:5", "what the server binds"),
        ("http://h:1,events=tcp://0.0.0.0:5", "what the server binds"),
    ],
)
def test_a_wrong_instance_is_refused_in_a_sentence(text, says) -> None:
    """It says what is wrong with which part."""
    with pytest.raises(ConfigError, match=r".") as raised:
        parse_instance(text)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_beyond_loopback_a_key_is_needed(host, expected) -> None:
    """Whatever is not surely loopback counts as reachable."""
    assert is_loopback(host) is expected
    if expected:
        RouterConfig(host=host)
    else:
        with pytest.raises(ConfigError, match="there is no key"):
            RouterConfig(host=host)
    RouterConfig(host=host, api_key="k")


ALL_FILES = ("empty", "mine", "open", "group")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--host", "0.0.0.0"],
        ["--host", "0.0.0.0", "--api-key-file", "{empty}"],
        ["--api-key-file", "{missing}"],
        ["--instance", "nowhere"],
        ["--credits", "moon"],
        ["--max-attempts", "0"],
        ["--tokenizer", "python:no.such.module:make"],
        ["--api-key-file", "{open}"],
        ["--admin-api-key-file", "{open}"],
        ["--instance-api-key-file", "{group}"],
        ["--api-key-file", "{mine}", "--admin-api-key-file", "{mine}"],
        ["--allow-host", "http://h"],
        ["--max-connections", "0"],
        ["--max-held-mb", "1"],
        ["--readers", "0"],
        ["--port", "99999"],
        ["--port", "-1"],
        ["--running-cost", "nan"],
        ["--compute-cost", "inf"],
        ["--ttl", "nan"],
        ["--load-interval", "0"],
        ["--health-interval", "inf"],
        ["--health-timeout", "-1"],
        ["--idle-timeout", "nan"],
        ["--connect-timeout", "0"],
    ],
)
def test_wrong_flags_end_in_a_sentence(arguments, tmp_path, capsys) -> None:
    """Exit code 2, and no server."""
    for name, text, mode in (
        ("empty", "\n", 0o600),
        ("mine", "key", 0o400),
        ("open", "key", 0o644),
        ("group", "key", 0o640),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    places = {name: str(tmp_path / name) for name in (*ALL_FILES, "missing")}
    code = main(["router", *(each.format(**places) for each in arguments)])
    assert code == 2
    assert capsys.readouterr().err.startswith("sgl-tiered: --")


def test_credits_in_words() -> None:
    """Pairs, in any number."""
    assert parse_credits("") == {}
    assert parse_credits("device=1, host=0.5") == {"device": 1.0, "host": 0.5}


class Letters:
    """A tokenizer: a token per letter; chats that name a tool fail."""

    name = "letters"

    def encode(self, text):
        if "?" in text:
            raise ValueError("no such letter")
        return [ord(letter) for letter in text]

    def encode_chat(self, body):
        if "tools" in body:
            raise KeyError("template")
        return self.encode("".join(each["content"] for each in body["messages"]))


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "tokenizer", "alphabet", "units", "num_prompts"),
    [
        ("/generate", {"text": "ab"}, Letters(), TOKENS, [97, 98], 1),
        ("/generate", {"text": "?"}, Letters(), CHARACTERS, [63], 1),
        ("/generate", {"text": "aé"}, None, CHARACTERS, [97, 233], 1),
        ("/generate", {"text": "\ud800"}, None, CHARACTERS, [0xD800], 1),
        ("/generate", {"input_ids": [5, 6]}, None, TOKENS, [5, 6], 1),
        ("/generate", {"input_ids": [[5], [6]]}, None, TOKENS, [5], 2),
        ("/generate", {"text": ["ab", "c"]}, Letters(), TOKENS, [97, 98], 2),
        ("/generate", {"input_embeds": [[0.1]]}, None, CHARACTERS, [], 1),
        ("/generate", {"input_ids": [-1]}, None, CHARACTERS, [], 1),
        ("/generate", {"input_ids": [True]}, None, CHARACTERS, [], 1),
        ("/generate", {"input_ids": [1, "x"]}, None, CHARACTERS, [], 1),
        ("/generate", {"text": 5}, None, CHARACTERS, [], 1),
        ("/v1/completions", {"prompt": []}, None, CHARACTERS, [], 1),
        ("/v1/completions", {"prompt": [7, 8]}, None, TOKENS, [7, 8], 1),
        ("/v1/chat/completions", CHAT, Letters(), TOKENS, [104, 105], 1),
        ("/v1/chat/completions", {}, Letters(), CHARACTERS, [], 1),
    ],
)
def test_prompts_in_bodies(path, body, tokenizer, alphabet, units, num_prompts) -> None:
    """Token ids as they are, texts by the tokenizer or by characters."""
    prompt = read_prompt(path, body, tokenizer)
    assert (prompt.alphabet, list(prompt.units)) == (alphabet, units)
    assert prompt.num_prompts == num_prompts


def test_a_chat_without_a_template_falls_back_to_characters() -> None:
    """And chats of one beginning share a prefix there, too."""
    longer = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "x"}]}
    for tokenizer in (None, Letters()):
        first = read_prompt("/v1/chat/completions", {**CHAT, "tools": [1]}, tokenizer)
        second = read_prompt(
            "/v1/chat/completions", {**longer, "tools": [1]}, tokenizer
        )
        assert first.alphabet == second.alphabet == CHARACTERS
        shared = len(first.units) - 2  # the closing brackets
        assert list(first.units[:shared]) == list(second.units[:shared])


def test_what_else_a_body_says() -> None:
    """Namespaces, session, stream, and a length where none is known exactly."""
    body = {
        "prompt": "12345",
        "model": "base:adapter",
        "cache_salt": "s",
        "extra_key": "e",
        "user": "u",
        "stream": True,
    }
    prompt = read_prompt("/v1/completions", body, None)
    assert (prompt.lora, prompt.cache_salt, prompt.extra_key) == ("adapter", "s", "e")
    assert (prompt.session, prompt.is_stream, prompt.num_tokens) == ("u", True, 2)
    assert (
        read_prompt("/generate", {"session_params": {"id": "i"}}, None).session == "i"
    )
    assert read_prompt("/generate", {"lora_path": "l"}, None).lora == "l"


def letters() -> Letters:
    """Make a tokenizer, as a user's module would."""
    return Letters()


def test_a_tokenizer_of_the_users_own(monkeypatch) -> None:
    """A function by its module, or nothing at all."""
    assert make_tokenizer("none") is None
    monkeypatch.setattr(json, "letters", letters, raising=False)
    made = make_tokenizer("python:json:letters")
    assert made is not None
    assert made.name == "letters"


@pytest.mark.parametrize(
    ("body", "is_batch"),
    [
        ({"text": "a"}, False),
        ({"input_ids": [1, 2]}, False),
        ({"text": ["a"]}, True),
        ({"input_ids": [[1], [2]]}, True),
        ({"prompt": ["a", "b"]}, True),
    ],
)
def test_pairs_share_a_room_per_prompt(body, is_batch) -> None:
    """Lists for a batch, be it of one; single values otherwise."""
    config = InstanceConfig("p", "http://[::1]:5", "prefill", bootstrap_port=77)
    num = 2 if is_batch and len(next(iter(body.values()))) == 2 else 1
    prompt = read_prompt(
        "/v1/completions" if "prompt" in body else "/generate", body, None
    )
    assert (prompt.is_batch, prompt.num_prompts) == (is_batch, num)
    raw = json.dumps(body).encode() + b" \n"
    sent = json.loads(with_bootstrap(raw, prompt, config, np.random.default_rng(0)))
    assert {name: sent[name] for name in body} == body
    if is_batch:
        assert sent["bootstrap_host"] == ["::1"] * num
        assert sent["bootstrap_port"] == [77] * num
        assert len(set(sent["bootstrap_room"])) == num
    else:
        assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("::1", 77)
        assert isinstance(sent["bootstrap_room"], int)


@pytest.mark.parametrize(
    "raw", [b"{}", b"{ }", b' {"bootstrap_room": 5, "a": [{}]} \n']
)
def test_rooms_stand_last_in_any_object(raw) -> None:
    """There they win over what a client says of them."""
    config = InstanceConfig("p", "http://h:5", "prefill")
    prompt = read_prompt("/generate", json.loads(raw), None)
    sent = with_bootstrap(raw, prompt, config, np.random.default_rng(0))
    found = json.loads(sent)
    assert found["bootstrap_host"] == "h"
    assert found["bootstrap_room"] != 5
    assert set(found) >= set(json.loads(raw))


def test_more_prompts_than_rooms_are_refused() -> None:
    """Before any is drawn."""
    prompt = read_prompt("/generate", {"text": ["a"] * 20_000}, None)
    config = InstanceConfig("p", "http://h:5", "prefill")
    with pytest.raises(RefusedError, match="20000 prompts") as raised:
        with_bootstrap(b"{}", prompt, config, np.random.default_rng(0))
    assert raised.value.status == 413


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", (b"", b"")),
        (b"data: a", (b"", b"data: a")),
        (b"data: a\n\n", (b"data: a\n\n", b"")),
        (b"data: a\n\ndata: b\n\ndata", (b"data: a\n\ndata: b\n\n", b"data")),
    ],
)
def test_events_are_passed_on_whole(data, expected) -> None:
    """What has no end yet is held back, up to a bound."""
    assert whole_events(data) == expected
    long = b"x" * 2_000_000
    assert whole_events(long) == (long, b"")


@pytest.mark.parametrize(
    "text",
    [
        "http://[::1",
        "http://:1]:30000",
        "http://h:99999",
        "http://h:0",
        "http://h:1,bootstrap=" + "9" * 5000,
    ],
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    """In a sentence: it may come from whoever may add instances."""
    with pytest.raises(ConfigError) as raised:
        parse_instance(text)
    assert len(str(raised.value)) < 500
