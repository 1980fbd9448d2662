"""The three loads of the comparison of routers, of about one size.

Chats carry their own answers; documents are asked about by two users each, five
questions a user; ReAct's steps carry thoughts and observations behind examples that all
agents share. The lengths are chosen so that each load's working set is about
``WORKING_SET_TOKENS``, and pauses so that most sessions are under way at one time:
without them a session's KV is never given up before its next turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.registry import make_workload
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS
from sgl_tiered_workloads.turns import Session, Turn, TurnSession

__all__ = [
    "LOADS",
    "NUM_REQUESTS",
    "PAUSES_S",
    "WORKING_SET_TOKENS",
    "cut",
    "document_of",
    "draw",
    "scripts",
    "working_set",
]

NUM_REQUESTS = 300
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
"""What each load is made of, in the words of the generators."""
LOADS = tuple(SHARES)
PAUSES_S: Mapping[str, float] = {"chats": 6.0, "documents": 3.0, "react": 4.0}
"""Mean time between an answer and the next turn: a user reads, a tool runs."""
_LEAST_TURNS = 2.0
"""Of a session in the mean, at least: so many sessions are drawn that they suffice."""


def draw(load: str, seed: int, num_requests: int) -> list[Session]:
    """Return sessions that send at least so many requests.

    Args:
        load: one of ``LOADS``.
        seed: of all that is drawn.
        num_requests: that the schedule is to have.
    """
    params = dict(SHARES[load])
    name = str(params.pop("name"))
    if load == "documents":
        per_document = params["num_questions"] * params["share_ratio"]
        params["num_documents"] = -(-num_requests // per_document)
    elif load == "chats":
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


def cut(records: Sequence[RequestRecord], num_requests: int) -> list[RequestRecord]:
    """Return the first turns of each session, ``MAX_TURNS`` at most.

    Sessions are taken in order until there are as many requests as asked for; the last
    one may end early.
    """
    kept: list[RequestRecord] = []
    for told in _by_session(records).values():
        kept += told[:MAX_TURNS]
    return kept[:num_requests]


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


def document_of(key: str) -> str:
    """Return what a request is about: ``d3`` of ``d3.c1.t0``, ``s3`` of ``s3.t1``.

    Both users of a document are one: what one of them finds the other has computed.
    """
    return key.partition(".")[0]


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


def _by_session(
    records: Sequence[RequestRecord],
) -> Mapping[str, Sequence[RequestRecord]]:
    told: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda each: each.order):
        told[record.key.rpartition(".")[0]].append(record)
    return told
