"""Seeded generators of the prompts that the benches and tests send.

All prompts are token ids, so nothing depends on a tokenizer's round trip. Ids
are drawn uniformly above the special tokens; a generator is a function of its
arguments and a ``numpy.random.Generator``, nothing else.

``ChatSession`` is causal: a turn's prompt holds the model's own earlier answers,
so turn t+1 exists only after the answer to turn t is recorded. To force the same
schedule on a second server, replay the first server's prompts (``replay``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sgl_tiered_workloads.records import RequestRecord

__all__ = [
    "FIRST_PLAIN_TOKEN",
    "ChatSession",
    "ChatShape",
    "PlannedRequest",
    "chat_sessions",
    "cyclic_working_set",
    "no_reuse",
    "random_tokens",
    "replay",
    "shared_prefix",
    "swap_page",
]

FIRST_PLAIN_TOKEN = 7
"""Ids below are the tokenizer's special tokens."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send.

    Attributes:
        key: names it within its schedule.
        prompt: token ids.
        max_new_tokens: length of the answer.
        start_s: when it should leave, from the start of the run.
        salt: of its tenant, whose pages no other one finds; empty for none.
    """

    key: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    start_s: float = 0.0
    salt: str = ""


def random_tokens(
    generator: np.random.Generator, num_tokens: int, vocab_tokens: int
) -> tuple[int, ...]:
    """Draw ``num_tokens`` ids, none of them special."""
    drawn = generator.integers(FIRST_PLAIN_TOKEN, vocab_tokens, num_tokens)
    return tuple(int(token) for token in drawn)


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Sizes of a multi-turn chat workload, in tokens.

    Attributes:
        num_sessions: users.
        num_turns: turns of each.
        system_tokens: system prompt that all sessions share.
        first_tokens: a session's own opening (a pasted document, say).
        user_tokens: each later user message.
        answer_tokens: each answer.
    """

    num_sessions: int
    num_turns: int
    system_tokens: int
    first_tokens: int
    user_tokens: int
    answer_tokens: int

    @property
    def working_set_tokens(self) -> int:
        """Distinct tokens whose KV the whole workload leaves behind."""
        own = self.first_tokens + (self.num_turns - 1) * self.user_tokens
        answers = self.num_turns * self.answer_tokens
        return self.system_tokens + self.num_sessions * (own + answers)


@dataclass(slots=True)
class ChatSession:
    """One conversation that grows by the model's own answers.

    Call ``next_request``, send it, and hand the answer to ``record_answer``;
    asking for the next turn before that is an error. ``think_s`` is the user's pause
    after each answer.
    """

    name: str
    messages: tuple[tuple[int, ...], ...]
    answer_tokens: int
    history: tuple[int, ...] = ()
    think_s: float = 0.0
    _turn: int = 0
    _waiting: bool = field(default=False, repr=False)

    @property
    def num_turns(self) -> int:
        """Requests that it will send in all."""
        return len(self.messages)

    @property
    def finished(self) -> bool:
        """Whether every turn is answered."""
        return self._turn == len(self.messages)

    def next_request(self) -> PlannedRequest:
        """Return the next turn's request, which carries the whole history."""
        if self._waiting:
            raise RuntimeError(f"session {self.name}: turn {self._turn} is unanswered")
        if self.finished:
            raise RuntimeError(f"session {self.name} is finished")
        self.history = self.history + self.messages[self._turn]
        self._waiting = True
        key = f"{self.name}.t{self._turn}"
        return PlannedRequest(key, self.history, self.answer_tokens)

    def record_answer(self, answer: Sequence[int]) -> None:
        """Append the model's answer; it becomes part of the next prompt."""
        if not self._waiting:
            raise RuntimeError(f"session {self.name}: no turn is waiting")
        self.history = self.history + tuple(answer)
        self._turn += 1
        self._waiting = False


def chat_sessions(
    shape: ChatShape, generator: np.random.Generator, vocab_tokens: int
) -> list[ChatSession]:
    """Return the sessions of a chat workload, all with one system prompt."""
    system = random_tokens(generator, shape.system_tokens, vocab_tokens)
    sessions = []
    for index in range(shape.num_sessions):
        opening = random_tokens(generator, shape.first_tokens, vocab_tokens)
        later = tuple(
            random_tokens(generator, shape.user_tokens, vocab_tokens)
            for _ in range(shape.num_turns - 1)
        )
        messages = (system + opening, *later)
        sessions.append(ChatSession(f"s{index}", messages, shape.answer_tokens))
    return sessions


def shared_prefix(
    num_prefixes: int,
    users_per_prefix: int,
    prefix_tokens: int,
    body_tokens: int,
    answer_tokens: int,
    generator: np.random.Generator,
    vocab_tokens: int,
) -> list[PlannedRequest]:
    """Return requests of ``users_per_prefix`` users on each prefix, shuffled.

    The first user of a prefix finds it cold, the others may hit it.
    """
    prefixes = [
        random_tokens(generator, prefix_tokens, vocab_tokens)
        for _ in range(num_prefixes)
    ]
    pairs = [(p, u) for p in range(num_prefixes) for u in range(users_per_prefix)]
    order = generator.permutation(len(pairs))
    requests = []
    for place in order:
        prefix, user = pairs[int(place)]
        body = random_tokens(generator, body_tokens, vocab_tokens)
        requests.append(
            PlannedRequest(f"p{prefix}.u{user}", prefixes[prefix] + body, answer_tokens)
        )
    return requests


def cyclic_working_set(
    pool_tokens: int,
    num_pools: float,
    prompt_tokens: int,
    answer_tokens: int,
    num_rounds: int,
    generator: np.random.Generator,
    vocab_tokens: int,
) -> list[PlannedRequest]:
    """Return ``num_rounds`` passes over one set of prompts, in the same order.

    The set's KV is ``num_pools`` times a device pool of ``pool_tokens``. A cycle
    longer than an LRU cache never hits it: each reuse must come from below.
    """
    per_prompt = prompt_tokens + answer_tokens
    num_prompts = max(1, round(pool_tokens * num_pools / per_prompt))
    prompts = [
        random_tokens(generator, prompt_tokens, vocab_tokens)
        for _ in range(num_prompts)
    ]
    return [
        PlannedRequest(f"r{turn}.p{index}", prompt, answer_tokens)
        for turn in range(num_rounds)
        for index, prompt in enumerate(prompts)
    ]


def no_reuse(
    num_requests: int,
    prompt_tokens: int,
    answer_tokens: int,
    generator: np.random.Generator,
    vocab_tokens: int,
) -> list[PlannedRequest]:
    """Return requests that share nothing, so a cache can only cost time."""
    return [
        PlannedRequest(
            f"n{index}",
            random_tokens(generator, prompt_tokens, vocab_tokens),
            answer_tokens,
        )
        for index in range(num_requests)
    ]


def replay(records: Iterable[RequestRecord]) -> list[PlannedRequest]:
    """Return the requests of a recorded run, to force them on another server."""
    return [
        PlannedRequest(record.key, record.prompt, len(record.output))
        for record in records
    ]


def swap_page(
    request: PlannedRequest, donor: Sequence[int], page: int, page_size: int
) -> PlannedRequest:
    """Return the request with one page of its prompt taken from ``donor``.

    Sent to any server, it gives the answer of a cache that served a wrong page.

    Raises:
        ValueError: either prompt lacks that page, or the pages are equal.
    """
    begin, end = page * page_size, (page + 1) * page_size
    if end > min(len(request.prompt), len(donor)):
        raise ValueError(f"page {page} of {page_size} tokens is beyond a prompt")
    wrong = tuple(donor[begin:end])
    if wrong == request.prompt[begin:end]:
        raise ValueError(f"page {page} is the same in both prompts")
    prompt = request.prompt[:begin] + wrong + request.prompt[end:]
    return PlannedRequest(request.key, prompt, request.max_new_tokens, request.start_s)
