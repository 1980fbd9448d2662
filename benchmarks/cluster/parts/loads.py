"""The three loads of MemServe's evaluation in the shapes that this machine can carry.

Without files the lengths are drawn from what is published of the data; with
``--data`` they are the data's own (``sgl_tiered_workloads.generators``). Drawn ShareGPT
answers are a quarter as long as real ones: the model is small, the machine too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.registry import make_workload
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS
from sgl_tiered_workloads.turns import Session, Turn, TurnSession

__all__ = ["LOADS", "draw_sessions", "replayed", "shared_documents"]

LOADS = ("sharegpt", "loogle", "react")
DOCUMENT_TOKENS, QUESTIONS = 1024, 5
TWO_SHOT_TOKENS = 640
"""Instructions and two examples; six take 1.6k."""
_MAX_TOKENS = 2048
_CHATS = {"turns": 5, "first": 120.0, "later": 26.0, "answer": 104.0}
"""Medians of 5,678 ShareGPT sessions, the answer a quarter of the real one."""
_FILES = {
    "sharegpt": ("lengths", "sharegpt_8k_llama2_lengths.csv.gz"),
    "loogle": ("loogle", "loogle_testdata_shortdep_qa.jsonl.gz"),
    "react": ("sessions", "react_hotpot_sessions.json.gz"),
}


def draw_sessions(
    name: str, num_requests: int, seed: int, data: Path | None = None
) -> list[Session]:
    """Return sessions that send about ``num_requests`` in all, at most one more turn.

    Args:
        name: one of ``LOADS``.
        num_requests: to cut at; the last session may be cut short.
        seed: of all that is drawn.
        data: folder of the traces; None for drawn lengths.
    """
    if name == "sharegpt" and data is None:
        sessions = _chats(num_requests, seed)
    else:
        params = _params(name, num_requests, data)
        workload = {"sharegpt": "sharegpt", "loogle": "long_document", "react": "react"}
        made = make_workload(workload[name], params, seed, VOCAB_TOKENS)
        sessions = list(made.as_sessions())
    kept: list[Session] = []
    for session in sessions:
        if num_requests <= 0:
            break
        kept.append(session)
        num_requests -= session.num_turns
    return kept


def shared_documents(
    num_documents: int, ratio: int, seed: int, answer_tokens: int, think_s: float
) -> list[Session]:
    """Return LooGLE-shaped sessions, each ``ratio`` times: MemServe's share ratio.

    Args:
        num_documents: different ones.
        ratio: sessions per document.
        seed: of all that is drawn.
        answer_tokens: of each answer.
        think_s: mean time between an answer and the next question.
    """
    params = {
        "num_documents": num_documents,
        "document_tokens": DOCUMENT_TOKENS,
        "num_questions": QUESTIONS,
        "share_ratio": ratio,
        "answer_tokens": answer_tokens,
        "think_s": think_s,
    }
    made = make_workload("long_document", params, seed, VOCAB_TOKENS)
    return list(made.as_sessions())


def replayed(records: Sequence[RequestRecord]) -> list[Session]:
    """Return sessions that send exactly the prompts of recorded ones."""
    turns: dict[str, list[RequestRecord]] = {}
    for record in records:
        turns.setdefault(record.key.rpartition(".")[0], []).append(record)
    return [
        TurnSession(
            name,
            [Turn(record.prompt, len(record.output)) for record in told],
            carries_answers=False,
        )
        for name, told in turns.items()
    ]


def _params(name: str, num_requests: int, data: Path | None) -> dict[str, Any]:
    params: dict[str, Any] = {}
    if name == "loogle":
        params = {"num_questions": QUESTIONS}
        if data is None:
            params["document_tokens"] = DOCUMENT_TOKENS
            params["num_documents"] = -(-num_requests // QUESTIONS)
        else:
            params["first_tokens"] = DOCUMENT_TOKENS
            params["share_ratio"] = 4
    elif name == "react":
        if data is None:
            params = {"few_shot_tokens": TWO_SHOT_TOKENS, "num_sessions": num_requests}
        else:
            params = {"num_shots": 2}
    elif data is not None:
        params = {"max_tokens": _MAX_TOKENS, "num_sessions": num_requests}
    if data is not None:
        key, file = _FILES[name]
        params[key] = str(data / file)
    return params


def _chats(num_requests: int, seed: int) -> list[Session]:
    """Draw chats: log-normal lengths around the published medians, each with a cap."""
    draw = np.random.default_rng(seed)

    def length(median: float, sigma: float, most: int) -> int:
        drawn = int(draw.lognormal(np.log(median), sigma))
        return min(max(drawn, 4), most)

    def tokens(count: int) -> tuple[int, ...]:
        return random_tokens(draw, count, VOCAB_TOKENS)

    sessions: list[Session] = []
    total = 0
    while total < num_requests:
        num_turns = int(draw.integers(2, 2 * _CHATS["turns"] - 1))
        turns = []
        for place in range(min(num_turns, 2 * _CHATS["turns"])):
            median = _CHATS["later"] if place else _CHATS["first"]
            message = tokens(length(median, 1.0, 400))
            turns.append(Turn(message, length(_CHATS["answer"], 0.5, 200)))
        sessions.append(TurnSession(f"s{len(sessions)}", turns))
        total += num_turns
    return sessions
