"""Questions on long documents: LooGLE's shape, and MemServe's cut of it.

A session is one document: each prompt is the document and one question, the next
question leaves after the previous answer. MemServe takes the first 1k tokens of a
document and its first five questions (``first_tokens = 1024, num_questions = 5``), and
duplicates the set of sessions ``share_ratio`` times.
"""

from __future__ import annotations

from sgl_tiered_workloads.generators.base import (
    SIXTEEN_USERS,
    Scene,
    make_arrivals,
    sessions_workload,
    think_times,
)
from sgl_tiered_workloads.params import Params
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.traces.loogle import read_loogle
from sgl_tiered_workloads.traces.wikitext import read_wikitext
from sgl_tiered_workloads.turns import Turn, TurnSession
from sgl_tiered_workloads.workload import Workload

__all__ = ["long_document"]

Tokens = tuple[int, ...]
_Asked = tuple[Tokens, list[tuple[Tokens, int]]]
"""A document and its questions, each with the length of its answer."""


def long_document(params: Params, scene: Scene) -> Workload:
    """Make ``long_document``.

    Documents come from LooGLE files (``loogle``, a path) or WikiText (``wikitext``),
    whose questions are random, or are random too (``num_documents``,
    ``document_tokens``). Parameters: ``first_tokens`` (of each document, all by
    default), ``num_questions`` (at most, of each), ``question_tokens`` and
    ``answer_tokens`` where the data have none, ``share_ratio`` (copies of the whole
    set, in random order), ``think_s`` (mean pause).

    Raises:
        WorkloadError: a parameter is wrong.
        TraceError: the file cannot be used.
    """
    num_questions = params.integer("num_questions", 5)
    question_tokens = params.integer("question_tokens", 32)
    answer_tokens = params.integer("answer_tokens", 20)
    think_s = params.number("think_s", 0.0)
    draw = scene.generator

    def invented(document: Tokens) -> _Asked:
        return document, [
            (random_tokens(draw, question_tokens, scene.vocab_tokens), answer_tokens)
            for _ in range(num_questions)
        ]

    asked: list[_Asked]
    if params.has("loogle"):
        asked = [
            (
                tuple(scene.encode(document.text)),
                [
                    (
                        tuple(scene.encode(f"\nQuestion: {q.text}\nAnswer:")),
                        max(1, len(scene.encode(q.answer))),
                    )
                    for q in document.questions[:num_questions]
                ],
            )
            for document in read_loogle(params.path("loogle"))
        ]
        asked = [item for item in asked if item[1]]
        if not asked:
            raise params.wrong("loogle", "a file with questions", "one without")
    elif params.has("wikitext"):
        articles = read_wikitext(params.path("wikitext"))
        asked = [invented(tuple(scene.encode(article.text))) for article in articles]
    else:
        length = params.integer("document_tokens", 1024)
        asked = [
            invented(random_tokens(draw, length, scene.vocab_tokens))
            for _ in range(params.integer("num_documents", 80))
        ]
    cut = params.integer("first_tokens", max(len(text) for text, _ in asked))
    copies = params.integer("share_ratio", 1)
    places = [(number, copy) for copy in range(copies) for number in range(len(asked))]
    sessions = []
    for place in draw.permutation(len(places)).tolist():
        number, copy = places[place]
        document, questions = asked[number]
        pauses_s = think_times(think_s, len(questions), draw)
        turns = [
            Turn(question, length, pause_s)
            for (question, length), pause_s in zip(questions, pauses_s, strict=True)
        ]
        sessions.append(
            TurnSession(
                f"d{number}.c{copy}", turns, document[:cut], carries_answers=False
            )
        )
    arrivals = make_arrivals(params, SIXTEEN_USERS, len(sessions), draw)
    return sessions_workload("long_document", sessions, arrivals)
