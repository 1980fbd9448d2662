"""The mixed load of the comparison of routers: a third each of three kinds.

Chats carry their own answers; documents are asked about by two users each, five
questions a user; ReAct's steps carry thoughts and observations behind examples that all
agents share. Every session's name begins with its kind, so that no two are one, and the
kinds' working sets add up to about ``WORKING_SET_TOKENS``. Pauses keep most sessions
under way at one time: without them a session's KV is never given up before its next
turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.registry import make_workload
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS
from sgl_tiered_workloads.turns import Session, Turn, TurnSession

__all__ = [
    "KINDS",
    "NUM_REQUESTS",
    "PAUSES_S",
    "WORKING_SET_TOKENS",
    "cut",
    "document_of",
    "draw",
    "draw_pauses",
    "kind_of",
    "rate_of",
    "scripts",
    "working_set",
]

NUM_REQUESTS = 300
"""Of a run, as many of each kind."""
WORKING_SET_TOKENS = 36_864
MAX_TURNS = 6
SHARES: Mapping[str, Mapping[str, Any]] = {
    "chats": {
        "name": "chat",
        "num_turns": 5,
        "system_tokens": 128,
        "first_tokens": 300,
        "user_tokens": 60,
        "answer_tokens": 12,
    },
    "documents": {
        "name": "long_document",
        "document_tokens": 1024,
        "num_questions": 5,
        "question_tokens": 32,
        "share_ratio": 2,
        "answer_tokens": 4,
    },
    "react": {
        "name": "react",
        "few_shot_tokens": 640,
        "question_tokens": 30,
        "thought_tokens": 12,
        "observation_tokens": 150,
    },
}
"""What each kind is made of, in the words of the generators."""
KINDS = tuple(SHARES)
PAUSES_S: Mapping[str, float] = {"chats": 6.0, "documents": 3.0, "react": 4.0}
"""Mean time between an answer and the next turn: a user reads, a tool runs."""
_LEAST_TURNS = 2.0
"""Of a session in the mean, at least: so many sessions are drawn that they suffice."""


class _Named:
    """A session under a name of its kind; all else is the session's own."""

    def __init__(self, kind: str, session: Session) -> None:
        self._kind = kind
        self._session = session

    @property
    def name(self) -> str:
        return f"{self._kind}-{self._session.name}"

    @property
    def num_turns(self) -> int:
        return self._session.num_turns

    @property
    def finished(self) -> bool:
        return self._session.finished

    @property
    def think_s(self) -> float:
        return self._session.think_s

    def next_request(self) -> PlannedRequest:
        request = self._session.next_request()
        return replace(request, key=f"{self._kind}-{request.key}")

    def record_answer(self, answer: Sequence[int]) -> None:
        self._session.record_answer(answer)


def draw(seed: int, num_requests: int) -> list[Session]:
    """Return sessions of all kinds, mixed, that send at least so many requests.

    Args:
        seed: of all that is drawn.
        num_requests: that the schedule is to have, as many of each kind.

    Raises:
        ValueError: they cannot be divided by the kinds.
    """
    each, left = divmod(num_requests, len(KINDS))
    if left or not each:
        raise ValueError(f"{num_requests} requests are not {len(KINDS)} equal parts")
    made: list[Session] = [
        _Named(kind, session)
        for number, kind in enumerate(KINDS)
        for session in _of_kind(kind, len(KINDS) * seed + number, each)
    ]
    places = np.random.default_rng(seed).permutation(len(made))
    return [made[place] for place in places]


def cut(records: Sequence[RequestRecord], num_requests: int) -> list[RequestRecord]:
    """Return the first turns of each session, ``MAX_TURNS`` at most, in order.

    Sessions of a kind are taken in order until there are as many of its requests as
    asked for; the last one may end early.
    """
    each = num_requests // len(KINDS)
    kept: list[RequestRecord] = []
    for kind in KINDS:
        own: list[RequestRecord] = []
        for name, told in _by_session(records).items():
            own += told[:MAX_TURNS] if kind_of(name) == kind else []
        kept += own[:each]
    return sorted(kept, key=lambda record: record.order)


def draw_pauses(records: Iterable[RequestRecord], seed: int) -> list[float]:
    """Return a pause before each request, exponential around its kind's mean."""
    means_s = [PAUSES_S[kind_of(record.key)] for record in records]
    return [float(each) for each in np.random.default_rng(seed).exponential(means_s)]


def scripts(
    records: Sequence[RequestRecord], pauses_s: Sequence[float]
) -> list[Session]:
    """Return sessions that send exactly the recorded prompts, with pauses.

    Args:
        records: of the reference.
        pauses_s: before each request; that before a first turn does not count.
    """
    pauses = dict(zip((record.key for record in records), pauses_s, strict=True))
    return [
        TurnSession(
            name,
            [
                Turn(
                    record.prompt, len(record.output), pauses[record.key] if n else 0.0
                )
                for n, record in enumerate(told)
            ],
            carries_answers=False,
        )
        for name, told in _by_session(records).items()
    ]


def rate_of(records: Sequence[RequestRecord]) -> float:
    """Return the answers/s of busy users, until the last session begins."""
    began = [record.started_s for record in records if record.key.endswith(".t0")]
    since_s, until_s = min(began), max(began)
    ended = [record.token_times_s[-1] for record in records if record.error is None]
    return sum(end_s <= until_s for end_s in ended) / (until_s - since_s)


def document_of(key: str) -> str:
    """Return what a request is about: ``documents-d3`` of ``documents-d3.c1.t0``.

    Both users of a document are one: what one of them finds the other has computed.
    """
    return key.partition(".")[0]


def kind_of(key: str) -> str:
    """Return the kind of a request, session or document by its name."""
    return key.partition("-")[0]


def working_set(records: Sequence[RequestRecord], page_size: int) -> int:
    """Return the tokens in different pages of all prompts and answers."""
    seen: set[int] = set()
    for record in records:
        tokens = (*record.prompt, *record.output)
        chain = 0
        for start in range(0, len(tokens) - page_size + 1, page_size):
            chain = hash((chain, tokens[start : start + page_size]))
            seen.add(chain)
    return len(seen) * page_size


def _of_kind(kind: str, seed: int, num_requests: int) -> list[Session]:
    params = dict(SHARES[kind])
    name = str(params.pop("name"))
    if kind == "documents":
        per_document = params["num_questions"] * params["share_ratio"]
        params["num_documents"] = -(-num_requests // per_document)
    elif kind == "chats":
        params["num_sessions"] = -(-num_requests // params["num_turns"])
    else:
        params["num_sessions"] = int(num_requests / _LEAST_TURNS)
    made = list(make_workload(name, params, seed, VOCAB_TOKENS).as_sessions())
    kept, total = [], 0
    for session in made:
        if total >= num_requests:
            break
        kept.append(session)
        total += min(session.num_turns, MAX_TURNS)
    return kept


def _by_session(
    records: Sequence[RequestRecord],
) -> Mapping[str, Sequence[RequestRecord]]:
    told: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda each: each.order):
        told[record.key.rpartition(".")[0]].append(record)
    return told
