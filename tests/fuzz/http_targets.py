"""What clients and operators send over HTTP: to the router, and to ``/tiered/*``."""

from __future__ import annotations

import asyncio
import json
import math
import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.router import config as router_config
from sgl_tiered.router import prompts, reading
from sgl_tiered.router.bootstrap import with_bootstrap
from sgl_tiered.router.config import KINDS, parse_instance
from sgl_tiered.router.prompts import PATHS, PromptKeys
from sgl_tiered.router.reading import Job, Reading, read_request
from sgl_tiered.router.refusals import RefusedError
from tests.fuzz.kit import (
    Fault,
    Rng,
    Target,
    as_json,
    demand,
    is_sentence,
    mangled,
    mutated,
    pick,
)

__all__ = ["RouterBodies", "RouterInstances", "TieredBodies"]

ASGI_TYPES = "application/json"


class RouterBodies(Target):
    """Bodies of requests: what the router reads of one, and of which tenant it is."""

    name = "router bodies"
    faults = (
        Fault(
            "the salt keeps nobody apart",
            lambda patch: patch.setattr(
                prompts,
                "root_key",
                lambda *args, cache_salt, **kwargs: ROOT_KEY(
                    *args, cache_salt="", **kwargs
                ),
            ),
        ),
        Fault(
            "token ids have no bounds",
            lambda patch: patch.setattr(prompts, "_MAX_TOKEN", 2**80),
        ),
        Fault(
            "a body need not be an object",
            lambda patch: patch.setattr(
                reading, "isinstance", lambda value, kinds: True, raising=False
            ),
        ),
    )
    right: tuple[dict[str, Any], ...] = (
        {"input_ids": list(range(40)), "cache_salt": "a", "stream": True},
        {"text": "some words that are long enough for pages" * 3, "cache_salt": "a"},
        {
            "model": "m:adapter",
            "prompt": [list(range(20)), list(range(30))],
            "user": "u",
            "extra_key": "k",
        },
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hello there " * 20}],
            "tools": [{"type": "function"}],
            "chat_template_kwargs": {"enable_thinking": True},
            "session_params": {"id": "s"},
            "cache_salt": "b",
        },
    )

    def inputs(self, rng: Rng) -> Iterator[tuple[str, bytes]]:
        """Bodies of all three paths, nearly right."""
        while True:
            body = pick(rng, self.right)
            kind = int(rng.integers(8))
            if kind == 0:
                raw = mangled(rng, as_json(body))
            elif kind == 1 and rng.random() < 0.1:
                raw = b'{"text":' + b"[" * int(rng.integers(1, 5000))
            elif kind == 1:
                key = pick(rng, ("text", "messages", "prompt", "tools"))
                deep: Any = "x"
                for _ in range(int(rng.integers(1, 300))):
                    deep = [deep]
                raw = as_json({**body, key: deep})
            elif kind == 2:
                raw = as_json(pick(rng, ([], [body], "x", 3, None, True)))
            else:
                raw = as_json(mutated(rng, body))
            yield pick(rng, PATHS), raw

    def check(self, given_input: tuple[str, bytes]) -> bool:
        """One sentence, or a prompt whose pages another tenant's never match."""
        path, raw = given_input
        job = Job(path, (4, 16), 8)
        found = read_request(job, raw, None)
        try:
            body = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError):
            body = None
        if found.trouble:
            demand(is_sentence(found.trouble), f"no sentence: {found.trouble}")
            return False
        demand(isinstance(body, dict), "no object was taken")
        prompt = found.prompt
        demand(0 <= prompt.num_tokens < 2**40, f"{prompt.num_tokens} tokens")
        demand(prompt.num_prompts >= 1, "no prompt at all")
        for page, joined in found.names.items():
            demand(page > 0 and len(joined) % 16 == 0, "names are cut off")
        for text in (prompt.session, prompt.lora, prompt.cache_salt, prompt.extra_key):
            demand(isinstance(text, str), "a name that is no text")
        keys = found.keys(job.page_characters)
        demand(isinstance(keys, PromptKeys), "no keys")
        other = {**body, "cache_salt": "salt of another tenant"}
        self._shares_nothing(found, read_request(job, as_json(other), None))
        self._goes_on(raw, prompt)
        return True

    def _shares_nothing(self, one: Reading, other: Reading) -> None:
        if other.trouble or one.prompt.cache_salt == other.prompt.cache_salt:
            return
        for page, names in one.names.items():
            ours = {names[at : at + 16] for at in range(0, len(names), 16)}
            joined = other.names.get(page, b"")
            theirs = {joined[at : at + 16] for at in range(0, len(joined), 16)}
            demand(not ours & theirs, "two tenants have a page of one name")

    def _goes_on(self, raw: bytes, prompt: prompts.Prompt) -> None:
        try:
            sent = json.loads(with_bootstrap(raw, prompt, PREFILL, ROOMS))
        except RefusedError as refused:
            demand(400 <= refused.status < 500, f"status {refused.status}")
            return
        rooms = sent["bootstrap_room"]
        num = len(rooms) if isinstance(rooms, list) else 1
        demand(num == prompt.num_prompts, f"{num} rooms")
        for name, value in json.loads(raw).items():
            if not name.startswith("bootstrap_"):
                same = json.dumps(sent[name]) == json.dumps(value)
                demand(same, f"{name} is changed on its way")


PREFILL = parse_instance("http://127.0.0.1:1,kind=prefill")
ROOMS = np.random.default_rng(1)
ROOT_KEY = prompts.root_key


class RouterInstances(Target):
    """Bodies of ``POST /router/instances``: where prompts are sent."""

    name = "router instances"
    faults = (
        Fault(
            "any kind is known",
            lambda patch: patch.setattr(router_config, "KINDS", _Everything()),
        ),
        Fault(
            "any endpoint is one",
            lambda patch: patch.setattr(
                router_config, "_endpoint", lambda value, setting: value
            ),
        ),
    )
    parts: tuple[str, ...] = (
        "kind=prefill",
        "kind=decode",
        "name=a.b-c",
        "events=tcp://127.0.0.1:5557",
        "events=auto",
        "events=none",
        "replay=tcp://127.0.0.1:5558",
        "topic=kv",
        "bootstrap=8998",
    )
    hosts: tuple[str, ...] = (
        "http://127.0.0.1:30000",
        "https://host.example",
        "http://[::1]:30000",
        "http://a:1/",
    )

    def inputs(self, rng: Rng) -> Iterator[str]:
        """Texts of an instance, nearly right."""
        while True:
            parts = [pick(rng, self.hosts)]
            parts += [pick(rng, self.parts) for _ in range(int(rng.integers(4)))]
            if rng.random() < 0.7:
                parts = mutated(rng, parts, num=1)
            if rng.random() < 0.3:
                part = pick(rng, self.parts).partition("=")[0]
                odd = pick(rng, ("", "0", "9" * 5000, "\u0663", "tcp://", "x" * 300))
                parts = [*_list(parts), f"{part}={odd}"]
            text = ",".join(map(_text, _list(parts)))
            if rng.random() < 0.3:
                text = mangled(rng, text.encode("utf-8", "replace")).decode(
                    "utf-8", "replace"
                )
            yield text

    def check(self, given_input: str) -> bool:
        """One sentence, or an address that a request can be sent to."""
        try:
            found = parse_instance(given_input, "instance")
            host, port = found.host, _port(found.url)
        except ConfigError as error:
            demand(is_sentence(repr(str(error))), f"no sentence: {error}")
            return False
        demand(found.kind in KINDS, f"kind {found.kind!r}")
        demand(bool(host), "no host")
        demand(port is None or 0 <= port < 65536, "no port")
        demand(0 < found.bootstrap_port < 65536, "no bootstrap port")
        demand(found.url.startswith(("http://", "https://")), "no address")
        demand(len(found.name) > 0 and found.name.isascii(), "no name")
        for source in found.sources:
            for address in (source.endpoint, source.replay_endpoint):
                demand(
                    address is None or address.startswith(("tcp://", "ipc://")),
                    f"{address!r} is no endpoint",
                )
        return True


def _port(url: str) -> int | None:
    return urlsplit(url).port


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    try:
        return str(value)
    except ValueError:
        return "9" * 5000


class _Everything(tuple):
    def __contains__(self, value: object) -> bool:
        return True


class TieredBodies(Target):
    """Calls of ``/tiered/*``: what reaches the schedulers is what they can take.

    The routes are the plugin's on a real application; the token manager behind them is
    a stand-in that notes what reaches it.
    """

    name = "/tiered/* bodies"
    faults = (
        Fault(
            "any fault may be emulated",
            lambda patch: patch.setattr(
                "sgl_tiered.engines.sglang.http.parse_emulation", lambda *args: ()
            ),
        ),
        Fault(
            "numbers have no bounds",
            lambda patch: patch.setattr(
                "sgl_tiered.engines.sglang.http._MAX_NUMBER", 10**30
            ),
        ),
        Fault(
            "any page may call",
            lambda patch: patch.setattr(
                "sgl_tiered.engines.sglang.http.is_foreign", lambda *args: False
            ),
        ),
    )
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("GET", "/tiered/explain", {"last": 1, "slowest": 2}),
        ("GET", "/tiered/explain/some", {}),
        ("GET", "/tiered/stats", {}),
        ("GET", "/tiered/profile", {}),
        ("POST", "/tiered/profile", {"local": 64, "on": "true"}),
        ("POST", "/tiered/drop", {"tier": "host"}),
        ("POST", "/tiered/faults", {"emulate": "disk:fault=error@0.5"}),
        ("POST", "/tiered/load-policy", {"policy": "auto"}),
    )
    origins = (
        None,
        None,
        None,
        "http://here:30000",
        "https://elsewhere",
        "null",
        "http://[",
    )

    def __enter__(self) -> TieredBodies:
        """Put the routes on an application."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of SGLang's own
            from fastapi import FastAPI
            from sglang.srt.entrypoints import http_server

        from sgl_tiered.engines.sglang import http
        from sgl_tiered.serving.option_reader import FAULT_ENV

        self.reached: list[Any] = []
        os.environ[FAULT_ENV] = "1"
        self._former = getattr(http_server, "_global_state", None), http_server.app
        http_server._global_state = SimpleNamespace(tokenizer_manager=_Manager(self))
        self.app = http_server.app = FastAPI()
        http._add_endpoints(
            SimpleNamespace(
                radix_cache_backend="tiered", api_key=None, admin_api_key=None
            )
        )
        self._loop = asyncio.new_event_loop()
        return self

    def __exit__(self, *error: object) -> None:
        """Put back what was there."""
        from sglang.srt.entrypoints import http_server

        from sgl_tiered.serving.option_reader import FAULT_ENV

        http_server._global_state, http_server.app = self._former
        os.environ.pop(FAULT_ENV)
        self._loop.close()

    def inputs(self, rng: Rng) -> Iterator[tuple[str, str, bytes, str | None, bytes]]:
        """Questions and bodies, nearly right, from pages of all origins."""
        while True:
            method, path, values = pick(rng, self.calls)
            if rng.random() < 0.1:
                method = pick(rng, ("GET", "POST", "PUT", "DELETE"))
            if path.endswith("/some"):
                path += pick(rng, ("", "\0", "/../..", "x" * 300, '"', "\n", "\u0663"))
            values = mutated(rng, values, num=int(rng.integers(3)))
            if not isinstance(values, dict):
                values = {}
            if values and rng.random() < 0.3:
                odd = (-1, 0, 10**6, 10**6 + 1, 2**31, 2**63, 10**29, 10**31, "", "nan")
                values[pick(rng, list(values))] = pick(rng, odd)
            query = "&".join(
                "=".join(quote(_text(each), errors="replace") for each in pair)
                for pair in values.items()
            ).encode()
            if rng.random() < 0.1:
                query = mangled(rng, query)
            body = as_json(values) if rng.random() < 0.2 else b""
            yield method, path, query, pick(rng, self.origins), body

    def check(self, given_input: tuple[str, str, bytes, str | None, bytes]) -> bool:
        """A refusal in a sentence; or an answer, and what reached a scheduler fits."""
        method, path, query, origin, body = given_input
        self.reached.clear()
        status, raw = self._loop.run_until_complete(
            self._call(method, path, query, origin, body)
        )
        known = (200, 400, 403, 404, 405, 409, 422)
        demand(status in known, f"status {status}")
        if origin not in (None, "http://here:30000"):
            demand(status != 200 and not self.reached, "a foreign page was served")
        if status != 200:
            demand(not self.reached or status == 404, "refused, but it reached them")
            said = json.loads(raw)["detail"]
            demand(said and (not isinstance(said, str) or is_sentence(said)), "no word")
        for each in self.reached:
            self._can_be_taken(each)
        return status == 200

    def _can_be_taken(self, sent: Any) -> None:
        from sgl_tiered.cache.config import LOAD_POLICIES
        from sgl_tiered.engines.sglang import http
        from sgl_tiered.serving.emulation import parse_emulation as parse

        if isinstance(sent, str):
            if sent.startswith(http.EXPLAIN_KEY):
                question = json.loads(sent.removeprefix(http.EXPLAIN_KEY))
                (value,) = question.values()
                is_number = type(value) is int and 0 <= value <= 10**6
                demand(is_number or "rid" in question, f"asked for {value}")
            else:
                demand(sent == http.PROFILE_KEY, "an unknown question")
            return
        ((name, number),) = sent.items()
        demand(type(number) in (int, float) and math.isfinite(number), "no number")
        if name.startswith(http.FAULTS_KEY):
            tiers = (TierId.HOST, TierId.CXL, TierId.DISK)
            parse(name.removeprefix(http.FAULTS_KEY), tiers, "emulate")
        elif name == http.LOAD_POLICY_KNOB:
            demand(0 <= number < len(LOAD_POLICIES), "no load policy")
        elif name == http.PROFILE_KNOB:
            demand(-1 <= number <= 10**6, f"{number} local tokens")
        else:
            demand(name in http.DROP_KNOBS.values(), f"the knob {name}")

    async def _call(
        self, method: str, path: str, query: bytes, origin: str | None, body: bytes
    ) -> tuple[int, bytes]:
        headers = [(b"host", b"here:30000"), (b"content-type", ASGI_TYPES.encode())]
        if origin is not None:
            headers.append((b"origin", origin.encode()))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": quote(path).encode(),
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("here", 30000),
        }
        answer: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            answer.append(message)

        await self.app(scope, receive, send)
        text = b"".join(each.get("body", b"") for each in answer[1:])
        return answer[0]["status"], text


class _Manager:
    """Stands in for SGLang's token manager."""

    def __init__(self, target: TieredBodies) -> None:
        self._target = target

    def auto_create_handle_loop(self) -> None:
        """Nothing to start."""

    async def get_internal_state_communicator(self, request: Any) -> Any:
        self._target.reached.append(request.rid)
        told = {"tiered_profile": {}, "tiered_explain": []}
        return [SimpleNamespace(internal_state=told)]

    async def get_internal_state(self) -> Any:
        return [{"tiered": {}}]

    async def set_internal_state(self, request: Any) -> Any:
        self._target.reached.append(request.server_args)
        return [True]
