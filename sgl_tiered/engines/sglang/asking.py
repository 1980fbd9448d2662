"""The served model is asked for the lengths of its own answers, inside the scheduler.

For the ``llm`` length predictor. A question is a request of our own whose prompt is a
request's prompt with the question behind it, in the same cache namespace. It is put
into SGLang's queue like any other and nothing waits for it: the reply is used when it
comes, and until then, or where none comes, the request is predicted as by ``online``.

Who is asked about, and when:

- a request whose prompt is computed and in the tree, so that the question costs its own
  tokens and no prompt twice, and its request is never held up by it;
- the latest one first, for its word is of use longest;
- only while somebody waits: else nobody needs to know who ends when;
- only while two more requests could run, so that it takes nobody's slot;
- ``MAX_OPEN`` at a time, at the head of the queue for ``PATIENCE_PASSES`` at most.

A question is no user's request: it is not asked about, learned from, streamed, counted
in the ledger or kept in the tree. All of this follows from SGLang's queue, and from no
clock, so the ranks of a model agree. Everything runs on the scheduler's thread, which
builds the question and reads the reply; the model's work is a request's as any other.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakSet

from sgl_tiered.core.clock import Clock
from sgl_tiered.policies.length.llm import (
    MAX_REPLY_TOKENS,
    QUESTION,
    AskingBill,
    Reply,
)
from sgl_tiered.serving.lossy import ALLOW, REFUSE, is_lossy_key, unmarked_key
from sgl_tiered.serving.targets import PARAMS_KEY

__all__ = [
    "LEAST_ALLOWED_TOKENS",
    "MAX_OPEN",
    "PATIENCE_PASSES",
    "LengthAsks",
    "Questions",
    "tokenized_request",
]

MAX_OPEN = 2
"""Questions at a time."""
PATIENCE_PASSES = 256
"""So often SGLang may pass a question in its queue by: a pool that is full takes nobody
until an answer ends. One whose request is over is given up at once."""
LEAST_ALLOWED_TOKENS = 4 * MAX_REPLY_TOKENS
"""A request that allows less has not much to foretell, and asking costs as much."""
_FREE_SLOTS = 2
_SHORT_WORD = "One moment."
"""The model's turn before the question, where the prompt is a chat's."""


@dataclass(frozen=True, slots=True)
class Questions:
    """The question as token ids, to be put behind a prompt.

    Attributes:
        plain: behind any prompt.
        opening: what a chat's prompt ends with, so that the model speaks; empty where
            the model's template tells none.
        chat: behind such a prompt: a short word of the model, and the question as the
            user's next turn.
    """

    plain: tuple[int, ...]
    opening: tuple[int, ...] = ()
    chat: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> Questions:
        """Return the question in a tokenizer's ids, by its chat template if it can."""
        import jinja2

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        def chat(turns: list[dict[str, str]], *, opened: bool) -> str:
            return str(
                tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=opened
                )
            )

        plain = ids(QUESTION)
        if not getattr(tokenizer, "chat_template", None):
            return cls(plain)
        turns = [
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": _SHORT_WORD},
            {"role": "user", "content": QUESTION.strip()},
        ]
        try:
            bare = chat(turns[:1], opened=False)
            first = chat(turns[:1], opened=True)
            whole = chat(turns, opened=True)
        except (jinja2.TemplateError, ValueError, TypeError, LookupError):
            # A template that takes no such turns.
            return cls(plain)
        opening = first.removeprefix(bare)
        if opening in ("", first) or not whole.startswith(first):
            return cls(plain)
        return cls(plain, ids(opening), ids(whole.removeprefix(first)))

    def behind(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the question for a prompt."""
        num = len(self.opening)
        if num and tuple(prompt[-num:]) == self.opening:
            return self.chat
        return self.plain


@dataclass(slots=True)
class _Open:
    """A question without a reply, and SGLang's request that it is about."""

    about: Any
    asked_s: float
    num_tokens: int
    passes_left: int = PATIENCE_PASSES
    is_late: bool = False


class LengthAsks:
    """The questions of one scheduler.

    Args:
        scheduler: SGLang's; its queue is where questions go.
        questions: what to ask.
        read: makes text of a reply's ids.
        told: called with a request, the reply about it and the length that it names (0
            for none); and whether that request is over.
        clock: for the seconds of the bill.
        make: builds what SGLang takes for a request, from a request, the name of the
            question and its prompt.
        secret: the same on all ranks; without it nobody can guess a question's name.
    """

    def __init__(
        self,
        scheduler: Any,
        questions: Questions,
        read: Callable[[list[int]], str],
        told: Callable[[Any, Reply, int, bool], None],
        clock: Clock,
        *,
        make: Callable[[Any, str, array[int]], Any],
        secret: str = "",
    ) -> None:
        self._scheduler = scheduler
        self._questions = questions
        self._read = read
        self._told = told
        self._clock = clock
        self._make = make
        self._secret = secret.encode()
        self._num_named = 0
        self.bill = AskingBill()
        # Requests that could be asked about, the latest last.
        self._unasked: OrderedDict[str, Any] = OrderedDict()
        self._open: dict[str, _Open] = {}
        self._ours: WeakSet[Any] = WeakSet()

    def __contains__(self, rid: str) -> bool:
        """Whether a question without a reply has this name."""
        return rid in self._open

    def without_ours(self, reqs: list[Any]) -> list[Any]:
        """Return those of SGLang's requests whose outputs are somebody's."""
        if not self._ours:
            return reqs
        theirs = [req for req in reqs if req not in self._ours]
        for req in reqs:
            if req in self._ours and req.finished():
                # What SGLang notes of an output that it has sent.
                req.finished_output = True
        return theirs

    def computed(self, req: Any) -> None:
        """Note a request whose prompt has been computed: it can be asked about."""
        if req.rid in self._open or req.finished() or len(req.output_ids) > 1:
            # Ours, over, or one that was retracted and had its turn.
            return
        allowed = req.sampling_params.max_new_tokens or 0
        # What ids alone do not tell, or what may go away before its question does.
        is_special = (
            req.lora_id is not None
            or req.multimodal_inputs is not None
            or req.input_embeds is not None
            or req.session is not None
            or req.skip_radix_cache_insert
        )
        if allowed >= LEAST_ALLOWED_TOKENS and not is_special:
            self._unasked[req.rid] = req

    def between_passes(self) -> None:
        """Give up what nobody takes, and ask, where that is due."""
        scheduler = self._scheduler
        queue = scheduler.waiting_queue
        if self._open:
            self._lose_patience(queue)
        if not self._unasked or len(self._open) >= MAX_OPEN:
            return
        if all(req.rid in self._open for req in queue):
            return
        running = scheduler.running_batch
        num_free = scheduler.get_num_allocatable_reqs(
            len(running.reqs), running_batch=running
        )
        if num_free < _FREE_SLOTS:
            return
        limit = scheduler.max_queued_requests
        if limit is None or len(queue) + 1 < limit:
            self._ask(self._unasked.popitem()[1])

    def ended(self, req: Any) -> bool:
        """Note a request that gave its slots back; say whether it was a question.

        The reply is read here. A question that was retracted is one still.
        """
        if req.rid not in self._open:
            self.left(req.rid)
            return req in self._ours
        if req.finished():
            ids = list(req.output_ids_through_stop)
            reason = req.finished_reason.to_json()["type"]
            self._close(
                req.rid,
                self._read(ids),
                len(ids),
                num_cached=req.cached_tokens,
                error="it was aborted" if reason == "abort" else "",
            )
        return True

    def left(self, rid: str) -> None:
        """Note a request, or a question, that has gone without a reply."""
        self._unasked.pop(rid, None)
        if rid in self._open:
            self._close(rid, error="it was aborted")
        for ask in self._open.values():
            ask.is_late |= ask.about.rid == rid

    def stats(self) -> dict[str, Any]:
        """Return the bill, JSON-able."""
        return {"num_open": len(self._open), **asdict(self.bill.cost)}

    def _ask(self, req: Any) -> None:
        prompt = array("q", req.origin_input_ids)
        prompt.extend(self._questions.behind(prompt))
        scheduler = self._scheduler
        if len(prompt) + MAX_REPLY_TOKENS >= scheduler.max_req_input_len:
            return
        self._num_named += 1
        name = f"length-question-{self._num_named}-".encode()
        rid = name.decode() + hashlib.blake2b(name + self._secret).hexdigest()[:32]
        self._open[rid] = _Open(req, self._clock.now(), len(prompt))
        scheduler.handle_generate_request(self._make(req, rid, prompt))
        queue = scheduler.waiting_queue
        if not queue or queue[-1].rid != rid:
            self._close(rid, error="it was refused")
            return
        ours = queue.pop()
        self._ours.add(ours)
        # Nobody will send a question's tokens again.
        ours.skip_radix_cache_insert = True
        queue.insert(0, ours)
        # SGLang looks at its queue no more while the pool is full for those in it; a
        # question is small, and may fit.
        scheduler.running_batch.batch_is_full = False

    def _lose_patience(self, queue: list[Any]) -> None:
        for rid, ask in list(self._open.items()):
            if not ask.passes_left:
                continue
            place = next((n for n, req in enumerate(queue) if req.rid == rid), None)
            if place is None or queue[place].output_ids:
                # It runs, or did: it is over soon.
                ask.passes_left = 0
                continue
            ask.passes_left -= 1
            if ask.is_late or not ask.passes_left:
                req = queue.pop(place)
                self._close(rid, error="it was given up")
                self._scheduler._release_aborted_request(req)

    def _close(
        self,
        rid: str,
        text: str = "",
        num_output: int = 0,
        *,
        num_cached: int = 0,
        error: str = "",
    ) -> None:
        ask = self._open.pop(rid)
        seconds = self._clock.now() - ask.asked_s
        num_prompt = ask.num_tokens if num_output else 0
        reply = Reply(text, num_prompt, num_output, seconds, error, num_cached)
        length = self.bill.add(reply, is_late=ask.is_late)
        self._told(ask.about, reply, length, ask.is_late)


def tokenized_request(req: Any, rid: str, prompt: array[int]) -> Any:
    """Return the question as SGLang's tokenizer process would send it; greedy."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(
        max_new_tokens=MAX_REPLY_TOKENS,
        temperature=0.0,
        # It is marked anew as its request was, whose prompt it is to find.
        custom_params={
            PARAMS_KEY: {"lossy": ALLOW if is_lossy_key(req.extra_key) else REFUSE}
        },
    )
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=prompt,
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        priority=req.priority,
        extra_key=unmarked_key(req.extra_key),
        cache_salt=req.cache_salt,
    )
