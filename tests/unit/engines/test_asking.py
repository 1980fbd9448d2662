"""Questions to the own model: when they are put, where, and what becomes of them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.engines.sglang.asking import (
    LEAST_ALLOWED_TOKENS,
    MAX_OPEN,
    PATIENCE_PASSES,
    LengthAsks,
    Questions,
)
from sgl_tiered.engines.sglang.lengths import LengthReader
from sgl_tiered.metrics.ledger import RequestLedger
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.length.llm import QUESTION, LLMLengths
from sgl_tiered.policies.length.online import OnlineLengths


class Req:
    """As much of SGLang's request as is read; hashable by identity, like that."""

    def __init__(
        self, rid: str, prompt: list[int] | None = None, **fields: Any
    ) -> None:
        self.rid = rid
        self.origin_input_ids = prompt or [1, 2, 3]
        self.output_ids: list[int] = []
        self.reason: str | None = None
        self.cached_tokens = 0
        self.finished_output: bool | None = None
        self.lora_id = self.multimodal_inputs = self.input_embeds = None
        self.session = self.priority = self.extra_key = None
        self.cache_salt: str | None = None
        self.skip_radix_cache_insert = False
        self.sampling_params = SimpleNamespace(max_new_tokens=200, custom_params=None)
        for name, value in fields.items():
            setattr(self, name, value)

    @property
    def output_ids_through_stop(self) -> list[int]:
        """All of them, here."""
        return self.output_ids

    @property
    def finished_reason(self) -> Any:
        """As SGLang spells it."""
        return SimpleNamespace(to_json=lambda: {"type": self.reason})

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.reason is not None


class Scheduler:
    """A queue, slots, and a tokenizer whose ids are characters."""

    def __init__(self) -> None:
        self.waiting_queue: list[Req] = []
        self.running_batch = SimpleNamespace(batch_is_full=False, reqs=[])
        self.num_slots = 8
        self.max_queued_requests: int | None = None
        self.max_req_input_len = 1000
        self.random_seed = 7
        self.refuses = False
        self.released: list[str] = []
        self.tokenizer = Tokenizer()

    def get_num_allocatable_reqs(self, num_running: int, *, running_batch: Any) -> int:
        """Free slots."""
        assert running_batch is self.running_batch
        return self.num_slots - num_running

    def handle_generate_request(self, made: Req) -> None:
        """Queue it, at the end."""
        if not self.refuses:
            self.waiting_queue.append(made)

    def _release_aborted_request(self, req: Req) -> None:
        self.released.append(req.rid)

    def take(self) -> Req:
        """Admit the head of the queue."""
        return self.waiting_queue.pop(0)


class Tokenizer:
    """One id per character; a chat template if it is given a way to render."""

    def __init__(self, render: Any = None) -> None:
        self.chat_template = "a template" if render else None
        self.render = render

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the characters' numbers."""
        assert not add_special_tokens
        return [ord(char) for char in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text again."""
        assert skip_special_tokens
        return "".join(map(chr, ids))

    def apply_chat_template(self, turns: Any, **how: Any) -> str:
        """Render the turns."""
        return str(self.render(turns, how["add_generation_prompt"]))


class Rig:
    """A reader that asks a scheduler's model."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.clock = ManualClock(5.0)
        self.ledger = RequestLedger(16, self.clock)
        self.metrics = MetricsRegistry()
        self.reader = LengthReader(LengthBook(LLMLengths()))
        self.reader.watch(self.scheduler, self.ledger, self.metrics, self.clock)
        assert self.reader.asks is not None
        self.asks: LengthAsks = self.reader.asks
        self.asks._make = lambda req, rid, prompt: Req(
            rid, list(prompt), cache_salt=req.cache_salt
        )

    def runs(self, rid: str, **fields: Any) -> Req:
        """Let a request's prompt have been computed."""
        req = Req(rid, **fields)
        self.ledger.queued(rid, 3)
        self.scheduler.running_batch.reqs.append(req)
        self.reader.computed(req)
        return req

    def waits(self, rid: str = "waiting") -> Req:
        """Let a request wait."""
        self.scheduler.waiting_queue.append(Req(rid))
        return self.scheduler.waiting_queue[-1]

    def replies(self, text: str, reason: str = "stop") -> Req:
        """Take the question at the head of the queue, and let it end."""
        question = self.scheduler.take()
        question.output_ids = [ord(char) for char in text]
        question.reason = reason
        question.cached_tokens = 3
        self.clock.advance(0.5)
        self.reader.released(question)
        return question

    def cost(self) -> dict[str, Any]:
        """The bill, as it is told."""
        told = json.loads(json.dumps(self.reader.stats()))
        return dict(told["asking"])


@pytest.fixture
def rig() -> Rig:
    """A scheduler with eight slots."""
    return Rig()


def test_the_reply_changes_the_prediction(rig: Rig) -> None:
    """The prompt with the question behind it, in its namespace, at the queue's head;
    the reply is used, billed and told."""
    req = rig.runs("r", cache_salt="tenant")
    rig.waits()
    before = rig.reader.prediction(req)
    rig.asks.between_passes()
    question = rig.scheduler.waiting_queue[0]
    assert question.rid in rig.asks
    assert question.cache_salt == "tenant"
    text = "".join(map(chr, question.origin_input_ids[3:]))
    assert question.origin_input_ids[:3] == req.origin_input_ids
    assert text == QUESTION
    assert question.skip_radix_cache_insert
    assert rig.reader.prediction(req) == before
    rig.replies("about 120")
    after = rig.reader.prediction(req)
    assert abs(after.median - 120) < abs(before.median - 120)
    cost = rig.cost()
    assert cost["num_asked"] == 1
    assert cost["output_tokens"] == len("about 120")
    assert cost["prompt_tokens"] == 3 + len(QUESTION)
    assert cost["cached_tokens"] == 3
    assert cost["seconds"] == 0.5
    told = rig.ledger.get("r")
    assert told is not None
    assert told["length_asked"]["said_tokens"] == 120
    assert rig.metrics.snapshot()["counters"]["length_asks"] == 1


def test_what_was_said_is_learned_from(rig: Rig) -> None:
    """The predictor is told of the answer with the model's word about it, and of the
    question nothing."""
    req = rig.runs("r")
    rig.waits()
    rig.asks.between_passes()
    rig.replies("120")
    seen = []
    rig.reader.book.predictor.observe = lambda *facts: seen.append(facts)  # type: ignore[method-assign]
    req.output_ids, req.reason = [0] * 90, "stop"
    rig.reader.released(req)
    ((facts, num_tokens),) = seen
    assert (facts.said_tokens, num_tokens) == (120, 90)
    assert rig.reader.book.score().num_answers == 1


@pytest.mark.parametrize("text", ["", "no idea", "\x00\ufffd", "0"])
def test_nonsense_is_counted_and_harmless(rig: Rig, text: str) -> None:
    """A reply without a length leaves the prediction as it was."""
    req = rig.runs("r")
    rig.waits()
    before = rig.reader.prediction(req)
    rig.asks.between_passes()
    rig.replies(text, reason="length")
    assert rig.reader.prediction(req) == before
    assert rig.cost()["num_unclear"] == 1
    assert rig.cost()["num_failed"] == 0


def test_nobody_is_asked_while_nobody_waits(rig: Rig) -> None:
    """Nor while only a question waits, nor once the request is over."""
    req = rig.runs("r")
    rig.asks.between_passes()
    assert rig.scheduler.waiting_queue == []
    rig.runs("s")
    rig.waits()
    rig.asks.between_passes()
    rig.scheduler.waiting_queue = rig.scheduler.waiting_queue[:1]
    rig.asks.between_passes()
    assert len(rig.scheduler.waiting_queue) == 1
    req.reason = "stop"
    rig.reader.released(req)
    rig.waits()
    rig.asks.between_passes()
    assert len(rig.scheduler.waiting_queue) == 2


def test_no_slot_is_taken_from_those_that_wait(rig: Rig) -> None:
    """One free slot is theirs, and so is the last place in a bounded queue; but what is
    full for them may have room for a question."""
    rig.runs("r")
    rig.waits()
    rig.scheduler.num_slots = 2
    rig.asks.between_passes()
    rig.scheduler.num_slots = 8
    rig.scheduler.max_queued_requests = 2
    rig.asks.between_passes()
    assert len(rig.scheduler.waiting_queue) == 1
    rig.scheduler.max_queued_requests = None
    rig.scheduler.running_batch.batch_is_full = True
    rig.asks.between_passes()
    assert len(rig.scheduler.waiting_queue) == 2
    assert not rig.scheduler.running_batch.batch_is_full


def test_few_are_open_and_each_is_asked_about_once(rig: Rig) -> None:
    """The latest first, a bounded number at a time, never again."""
    for number in range(MAX_OPEN + 2):
        rig.runs(f"r{number}")
    rig.waits()
    for _ in range(8):
        rig.asks.between_passes()
    assert len(rig.scheduler.waiting_queue) == 1 + MAX_OPEN
    asked = []
    while len(rig.scheduler.waiting_queue) > 1:
        rig.replies("9")
        rig.asks.between_passes()
    for number in range(MAX_OPEN + 2):
        told = rig.ledger.get(f"r{number}")
        asked.append(told is not None and "length_asked" in told)
    assert asked == [True] * (MAX_OPEN + 2)
    assert rig.cost()["num_asked"] == MAX_OPEN + 2


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_id": "adapter"},
        {"multimodal_inputs": object()},
        {"input_embeds": [[0.0]]},
        {"session": object()},
        {"skip_radix_cache_insert": True},
        {
            "sampling_params": SimpleNamespace(
                max_new_tokens=LEAST_ALLOWED_TOKENS - 1, custom_params=None
            )
        },
        {
            "sampling_params": SimpleNamespace(
                max_new_tokens=200, custom_params={"tiered": {"output_len": 70}}
            )
        },
        {"origin_input_ids": [1] * 990},
        {"output_ids": [1, 2, 3]},
    ],
)
def test_some_requests_are_not_asked_about(rig: Rig, fields: dict[str, Any]) -> None:
    """What ids do not tell, what allows little, what the client has said, what is too
    long for a question, what was retracted."""
    rig.runs("r", **fields)
    rig.waits()
    rig.asks.between_passes()
    assert len(rig.scheduler.waiting_queue) == 1


def test_a_question_that_nobody_takes_is_given_up(rig: Rig) -> None:
    """After some passes, and at once when its request is over."""
    rig.runs("r")
    rig.waits()
    for _ in range(PATIENCE_PASSES):
        rig.asks.between_passes()
    assert len(rig.scheduler.waiting_queue) == 2
    rig.asks.between_passes()
    assert [req.rid for req in rig.scheduler.waiting_queue] == ["waiting"]
    assert len(rig.scheduler.released) == 1
    req = rig.runs("s")
    rig.asks.between_passes()
    req.reason = "stop"
    rig.reader.released(req)
    rig.asks.between_passes()
    assert [req.rid for req in rig.scheduler.waiting_queue] == ["waiting"]
    cost = rig.cost()
    assert (cost["num_asked"], cost["num_failed"], cost["num_late"]) == (2, 2, 1)
    assert (cost["prompt_tokens"], cost["num_open"]) == (0, 0)


def test_a_running_question_is_left_alone(rig: Rig) -> None:
    """Its reply is short; when it comes late it is billed and not used."""
    req = rig.runs("r")
    rig.waits()
    rig.asks.between_passes()
    question = rig.scheduler.take()
    for _ in range(PATIENCE_PASSES + 2):
        rig.asks.between_passes()
    assert question.rid in rig.asks
    req.reason = "stop"
    rig.reader.released(req)
    rig.scheduler.waiting_queue.insert(0, question)
    rig.replies("50")
    assert rig.cost()["num_late"] == 1
    assert rig.cost()["output_tokens"] == 2
    assert len(rig.reader.book) == 0


def test_refused_and_aborted_questions_are_failures(rig: Rig) -> None:
    """Nothing stays open, and the request is predicted as before."""
    req = rig.runs("r")
    rig.waits()
    before = rig.reader.prediction(req)
    rig.scheduler.refuses = True
    rig.asks.between_passes()
    rig.scheduler.refuses = False
    rig.runs("s")
    rig.asks.between_passes()
    rig.reader.left(rig.scheduler.take().rid)
    rig.runs("t")
    rig.asks.between_passes()
    rig.replies("77", reason="abort")
    cost = rig.cost()
    assert (cost["num_asked"], cost["num_failed"], cost["num_open"]) == (3, 3, 0)
    assert rig.reader.prediction(req) == before


def test_outputs_of_questions_are_nobodys(rig: Rig) -> None:
    """Neither while they grow nor when they have ended and given their slots back."""
    req = rig.runs("r")
    assert rig.asks.without_ours([req]) == [req]
    rig.waits()
    rig.asks.between_passes()
    question = rig.scheduler.waiting_queue[0]
    assert rig.asks.without_ours([req, question]) == [req]
    assert not question.finished_output
    rig.replies("40")
    assert rig.asks.without_ours([question, req]) == [req]
    assert question.finished_output


def test_a_retracted_question_is_one_still(rig: Rig) -> None:
    """Its slots are gone, and it comes back to the queue."""
    rig.runs("r")
    rig.waits()
    rig.asks.between_passes()
    question = rig.scheduler.waiting_queue[0]
    rig.reader.released(question)
    assert question.rid in rig.asks


def test_names_agree_on_all_ranks_and_are_secret() -> None:
    """Two schedulers name the same question alike, another server does not."""
    names = []
    for seed in (7, 7, 8):
        rig = Rig()
        rig.scheduler.random_seed = seed
        rig.reader.watch(rig.scheduler, rig.ledger, rig.metrics, rig.clock)
        assert rig.reader.asks is not None
        rig.reader.asks._make = lambda req, rid, prompt: Req(rid, list(prompt))
        rig.runs("r")
        rig.waits()
        rig.reader.asks.between_passes()
        names.append(rig.scheduler.waiting_queue[0].rid)
    assert names[0] == names[1] != names[2]


def test_only_llm_asks() -> None:
    """Nor does it without a tokenizer."""
    scheduler, clock = Scheduler(), ManualClock()
    ledger, metrics = RequestLedger(4, clock), MetricsRegistry()
    online = LengthReader(LengthBook(OnlineLengths()))
    online.watch(scheduler, ledger, metrics, clock)
    assert online.asks is None
    scheduler.tokenizer = None  # type: ignore[assignment]
    mute = LengthReader(LengthBook(LLMLengths()))
    mute.watch(scheduler, ledger, metrics, clock)
    assert mute.asks is None
    assert "asking" not in mute.stats()


def render(turns: list[dict[str, str]], opened: bool) -> str:
    """A chat template like many."""
    text = "".join(f"<{t['role']}>{t['content']}</>" for t in turns)
    return text + ("<assistant>" if opened else "")


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_a_chat_is_asked_as_its_user_would() -> None:
    """The model says a short word, and the question is the user's next turn; behind
    another prompt it stands alone."""
    questions = Questions.of(Tokenizer(render))
    behind = questions.behind(ids("<user>Write a poem.</><assistant>"))
    text = "".join(map(chr, behind))
    assert text == (f"One moment.</><user>{QUESTION.strip()}</><assistant>")
    assert questions.behind(ids("Once upon a time")) == ids(QUESTION)
    assert questions.behind(()) == ids(QUESTION)


def refuse(turns: list[dict[str, str]], opened: bool) -> str:
    raise ValueError("roles must alternate")


@pytest.mark.parametrize(
    "template",
    [
        None,
        refuse,
        # No opening; and an opening that later turns take back.
        lambda turns, opened: render(turns, False),
        lambda turns, opened: render(turns, opened) if len(turns) == 1 else "other",
    ],
)
def test_a_template_that_does_not_fit_is_left_alone(template: Any) -> None:
    """The question then stands alone behind every prompt."""
    questions = Questions.of(Tokenizer(template))
    assert questions == Questions(ids(QUESTION))
