"""What the scenarios share: prompts, calls, and the comparison with plain SGLang.

A scenario is a function that makes the same calls to plain SGLang and to the server
with tiers. Plain's pool holds everything, so where the server with tiers loads pages,
plain finds them on its device: both compute the same tokens.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from sgl_tiered_workloads.gate import Spread, check_equality
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerSpec, ServerStartError, SglangServer
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS
from sgl_tiered_workloads.usage import usage_of

from tests.e2e.e2e_support import PATIENCE_S, drop

__all__ = [
    "PAGE",
    "PLAIN_POOL",
    "SPREAD",
    "Live",
    "at_once",
    "body",
    "cached",
    "counter",
    "forget",
    "prompt",
    "record",
    "same",
    "same_tokens",
    "start_plain",
]

PAGE = 16
PLAIN_POOL = 16384
"""Tokens on plain SGLang's device: more than any file here asks."""
SPREAD = Spread(max_logprob=0.1, mean_logprob=0.01, max_gap=0.1, num_tokens=0)
"""Plain SGLang against itself moved a logprob by 0.095; one wrong page moves the tiny
model's by 0.29 and more (see the model maker)."""
TOP_LOGPROBS = 5


def prompt(seed: int, num_tokens: int) -> tuple[int, ...]:
    """Return token ids, the same ones for the same arguments."""
    return random_tokens(np.random.default_rng(seed), num_tokens, VOCAB_TOKENS)


def body(
    tokens: Sequence[int], max_new_tokens: int = 8, **fields: Any
) -> dict[str, Any]:
    """Return a greedy request with logprobs; ``sampling`` adds to its parameters."""
    sampling = fields.pop("sampling", {})
    return {
        "input_ids": list(tokens),
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
            **sampling,
        },
        "return_logprob": True,
        "top_logprobs_num": TOP_LOGPROBS,
        **fields,
    }


def start_plain(servers: Any, spec: ServerSpec, needs: str = "") -> SglangServer:
    """Return a plain server, or skip with what SGLang said while it did not start.

    Args:
        servers: starts it.
        spec: of the server.
        needs: what is missing where it does not start, as far as that is known.
    """
    try:
        server: SglangServer = servers.get(spec)
    except ServerStartError as error:
        lines = [line for line in error.log_tail.splitlines() if "Error" in line]
        if not lines:
            raise
        missing = f"; it needs {needs}" if needs else ""
        pytest.skip(f"plain SGLang does not start here{missing}: {lines[-1]}")
    return server


def at_once(server: SglangServer, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    """Send requests together; return the answers, an error in place of one."""

    def one(request: dict[str, Any]) -> Any:
        try:
            return server.post("/generate", request)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(one, bodies))


def forget(server: SglangServer, tier: str) -> None:
    """Leave pages on one tier alone: ``device``, ``host`` or ``disk``.

    Plain SGLang has its device only, and keeps what is there.
    """
    if "--radix-cache-backend" not in server.spec.flags:
        return
    above = {"device": (), "host": ("device",), "disk": ("device", "host")}[tier]
    drop(server, *above)


def cached(answer: Mapping[str, Any]) -> dict[str, int]:
    """Return how many prompt tokens came from which tier; tiers without any left out.

    Plain SGLang does not say where from: all of it is the device's.
    """
    usage = usage_of(answer["meta_info"])
    tiers = usage.cached_by_tier or {"device": usage.cached_tokens or 0}
    return {name: count for name, count in tiers.items() if count}


def record(
    key: str, tokens: Sequence[int], answer: dict[str, Any], order: int = 0
) -> RequestRecord:
    """Return an answer with logprobs as the gate reads it."""
    meta = answer["meta_info"]
    usage = usage_of(meta)
    return RequestRecord(
        key=key,
        order=order,
        prompt=tuple(tokens),
        targeted_s=0.0,
        started_s=0.0,
        output=tuple(answer["output_ids"]),
        logprobs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
        top_logprobs=tuple(
            tuple((float(entry[0]), int(entry[1])) for entry in top)
            for top in meta["output_top_logprobs"]
        ),
        cached_tokens=usage.cached_tokens or 0,
        cached_by_tier=usage.cached_by_tier,
        error=None
        if meta["finish_reason"]["type"] != "abort"
        else str(meta["finish_reason"]),
    )


def same(
    prompts: Sequence[Sequence[int]],
    plain: Sequence[dict[str, Any]],
    tiered: Sequence[dict[str, Any]],
) -> None:
    """Demand plain SGLang's answers, up to what plain differs from itself."""
    for answer in (*plain, *tiered):
        assert not isinstance(answer, Exception), answer
    sides = [
        [
            record(f"r{n}", tokens, answer, n)
            for n, (tokens, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        for answers in (plain, tiered)
    ]
    result = check_equality(*sides, page_size=PAGE, spread=SPREAD, forced=False)
    assert result.passed, result.summary()


def same_tokens(
    plain: Sequence[dict[str, Any]],
    tiered: Sequence[dict[str, Any]],
    skipped: int = 0,
) -> None:
    """Demand plain's tokens where plain's answers are longer, or have logprobs alone.

    A token may differ where plain's best two were as near as plain is to itself; what
    comes behind it is not compared.

    Args:
        plain: answers with top logprobs.
        tiered: shorter answers to the same prompts; plain's further ones are left out.
        skipped: tokens of plain's answers that belong to the prompts of the others.
    """
    num_compared = 0
    for theirs, ours in zip(plain, tiered, strict=False):
        assert not isinstance(ours, Exception), ours
        tops = theirs["meta_info"]["output_top_logprobs"][skipped:]
        expected = theirs["output_ids"][skipped:]
        for top, want, token in zip(tops, expected, ours["output_ids"], strict=False):
            num_compared += 1
            if token != want:
                known = {entry[1]: entry[0] for entry in top}
                gap = known[want] - known.get(token, float("-inf"))
                assert gap <= 1.5 * SPREAD.max_gap, (token, want, top)
                break
    assert num_compared >= 20


def counter(server: SglangServer, name: str, **labels: str) -> float:
    """Return the sum of a Prometheus counter or gauge over its other labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    lines = str(server.get("/metrics", PATIENCE_S)).splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.partition("{")[0].partition(" ")[0] == name
        and all(each in line for each in wanted)
    )


class Live:
    """A request whose answer is streamed, so that one knows when it has begun."""

    def __init__(self, server: SglangServer, request: dict[str, Any]) -> None:
        self.event: dict[str, Any] = {}
        self.error: OSError | None = None
        self._begun = threading.Event()
        self._done = threading.Event()
        data = json.dumps({**request, "stream": True}).encode()
        self._request = urllib.request.Request(
            server.url + "/generate", data, server.spec.headers()
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=PATIENCE_S) as lines:
                for line in lines:
                    if line.startswith(b"data: {"):
                        self.event = json.loads(line[6:])
                        self._begun.set()
        except OSError as error:
            # SGLang answers some aborts with an HTTP error.
            self.error = error
        finally:
            self._begun.set()
            self._done.set()

    @property
    def num_tokens(self) -> int:
        """How many tokens have come."""
        return len(self.event.get("output_ids", ()))

    def begun(self) -> Live:
        """Wait for the first token."""
        assert self._begun.wait(PATIENCE_S), "no token came"
        assert self.event, "no token came"
        return self

    def join(self) -> dict[str, Any]:
        """Wait for the end; return the answer."""
        assert self._done.wait(PATIENCE_S), "the answer did not end"
        return self.event
