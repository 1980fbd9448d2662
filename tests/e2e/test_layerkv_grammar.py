"""Constrained and penalised answers with layer-wise KV, while some of them wait.

A step computes a part of the running requests. Each of them is to be masked by its own
grammar, which goes on with its own tokens only, and penalised for its own. So all of
them, free ones beside, give plain SGLang's answers whoever waits for whom, and what is
constrained keeps to it. First of all two whose constraints are exchanged.
"""

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from sgl_tiered_workloads.gate import (
    Spread,
    measure_spread,
    widest_spread,
)
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    MB,
    Device,
    Tiers,
    plain_spec,
    tiered_spec,
)
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS
from sgl_tiered_workloads.waves import WaveRun, compare_singly, compare_waves

from tests.e2e.e2e_support import stats

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

PAGE = 16
POOL_TOKENS, REFERENCE_POOL_TOKENS = 1_440, 32_768
HALF_TOKENS = 320
"""Of one layer, in each half of the staging memory: the longest prompt and answer."""
FLAGS = (
    *CPU_FLAGS,
    # No prompt is cut.
    "--chunked-prefill-size=8192",
    "--max-running-requests=8",
    "--constrained-json-disable-any-whitespace",
)
PAUSE = (
    "--tiered-layerkv=on",
    "--tiered-layerkv-host-size=8MB",
    # Keys and values of two heads of 32, two bytes each, two halves.
    f"--tiered-layerkv-staging-size={HALF_TOKENS * 2 * 2 * 32 * 2 * 2}",
    "--tiered-load-policy=never",
    "--tiered-layerkv-decode=pause",
    # A prompt of 200 tokens takes 20 ms of the link, many times a step.
    "--tiered-emulate=host:bandwidth=10MB",
)
ENV = {"TORCHDYNAMO_DISABLE": "1"}
"""SGLang compiles a penalty at its first use, which takes minutes on a busy machine."""
ANSWER_TOKENS = 125
"""More than a constrained answer has letters: it ends by itself."""
FLOOR = Spread(max_logprob=0.05, mean_logprob=0.005, max_gap=0.05, num_tokens=0)
NUM_WAVES = 3

REGEXES = ("(?:[a-f]{3}-[0-9]{4};){6}", "(?:[0-9]{2}:[0-9]{2} (?:am|pm), ){5}end")
ITEMS = 5
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["hot", "warm", "cold"]},
        "code": {"type": "string", "pattern": "^[a-z]{6}[0-9]{6}$"},
        "levels": {
            "type": "array",
            "items": {"enum": ["low", "middle", "high"]},
            "minItems": ITEMS,
            "maxItems": ITEMS,
        },
    },
    "required": ["kind", "code", "levels"],
    "additionalProperties": False,
}
PENALTIES = (
    {"frequency_penalty": 0.6},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 8, "presence_penalty": 0.4},
)
"""Each has one that changes logits. SGLang keeps the kinds in a set and applies them in
its order, another one in each process: a request with two differs from itself.
"""


@dataclass(frozen=True)
class Asked:
    """A request of a wave.

    Attributes:
        key: names it.
        prompt: token ids.
        sampling: what it asks for besides greedy tokens.
    """

    key: str
    prompt: tuple[int, ...]
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def is_constrained(self) -> bool:
        """Whether it has a grammar."""
        return bool({"regex", "json_schema"} & set(self.sampling))

    def is_kept(self, text: str) -> bool:
        """Return whether an answer keeps to what was asked for."""
        if "regex" in self.sampling:
            return re.fullmatch(self.sampling["regex"], text) is not None
        if "json_schema" not in self.sampling:
            return True
        try:
            said = json.loads(text)
        except ValueError:
            return False
        levels = said.get("levels", [])
        return (
            list(said) == ["kind", "code", "levels"]
            and said["kind"] in ("hot", "warm", "cold")
            and re.fullmatch("[a-z]{6}[0-9]{6}", said["code"]) is not None
            and len(levels) == ITEMS
            and set(levels) <= {"low", "middle", "high"}
        )


@dataclass(frozen=True)
class Answered:
    """What came of a wave.

    Attributes:
        run: for the gate.
        texts: of the answers.
        wrong: keys of answers that do not keep to their constraints.
        waited: keys of requests that waited between two of their tokens.
    """

    run: WaveRun
    texts: list[str]
    wrong: list[str]
    waited: set[str]


@pytest.fixture(scope="module")
def wave():
    """Four constrained by a regex, two by a schema, three penalised and three free."""
    generator = np.random.default_rng(83)
    kinds = [
        *({"regex": regex} for regex in REGEXES),
        {"json_schema": json.dumps(SCHEMA)},
        {},
        *PENALTIES[:2],
        {"regex": REGEXES[0]},
        {},
        {"json_schema": json.dumps(SCHEMA)},
        {"regex": REGEXES[1], "frequency_penalty": 0.8},
        PENALTIES[2],
        {},
    ]
    return [
        Asked(
            f"g{n}",
            random_tokens(generator, int(generator.integers(110, 190)), VOCAB_TOKENS),
            kind,
        )
        for n, kind in enumerate(kinds)
    ]


@dataclass(frozen=True)
class Plain:
    """Plain SGLang's answers.

    Attributes:
        together: all in flight.
        spread: of its answers, one at a time and in flight.
        has_equal_rows: on this machine a request's bits do not depend on its batch.
    """

    together: Answered
    spread: Spread
    has_equal_rows: bool

    def judge(self, answered):
        """Compare by bits where that is right here."""
        if self.has_equal_rows:
            return compare_singly(
                [self.together.run],
                [answered.run],
                page_size=PAGE,
                spread=self.spread,
                min_exact_fraction=1.0,
            )
        return compare_waves(
            [self.together.run],
            [answered.run],
            page_size=PAGE,
            spread=self.spread,
            forced=False,
        )


@pytest.fixture(scope="module")
def plain(servers, model, wave):
    """Plain SGLang's answers, and how to compare with them."""
    device = Device(model, REFERENCE_POOL_TOKENS, PAGE, FLAGS)
    server = servers.get(replace(plain_spec(device, "plain-grammar"), env=ENV))
    together = send(server, wave)
    alone = [send(server, [one]) for one in wave]
    free = [send(server, [replace(one, sampling={})]) for one in wave]
    servers.stop()
    assert not together.wrong
    singly = WaveRun(tuple(one.run.records[0] for one in alone))
    # Else nothing here would show that penalties count.
    changed = [
        asked.key
        for asked, one, other in zip(wave, alone, free, strict=True)
        if one.run.records[0].output != other.run.records[0].output
    ]
    assert set(changed) >= {one.key for one in wave if one.is_constrained}
    assert len(changed) > sum(one.is_constrained for one in wave)
    moved = measure_spread(together.run.records, singly.records)
    spread = widest_spread([moved, FLOOR])
    same = compare_singly([together.run], [singly], page_size=PAGE, spread=spread)
    return Plain(together, spread, same.passed and same.num_exact > 0)


def send(server, wave):
    """Send a wave as one message, to a server whose cache is emptied."""
    server.flush_cache()
    asked = {
        "input_ids": [list(one.prompt) for one in wave],
        "sampling_params": [
            {
                "temperature": 0.0,
                "max_new_tokens": ANSWER_TOKENS,
                "ignore_eos": True,
                **one.sampling,
            }
            for one in wave
        ],
        "return_logprob": True,
        "top_logprobs_num": 5,
        "logprob_start_len": -1,
    }
    answers = server.post("/generate", asked)
    pairs = list(zip(wave, answers, strict=True))
    waited = set()
    for one, answer in pairs:
        (told,) = answer["meta_info"].get("tiered") or ({},)
        if told.get("layerkv", {}).get("steps_paused", 0):
            waited.add(one.key)
    return Answered(
        WaveRun(tuple(recorded(one, answer) for one, answer in pairs)),
        [answer["text"] for answer in answers],
        [one.key for one, answer in pairs if not one.is_kept(answer["text"])],
        waited,
    )


def ranked(top):
    """Return the best tokens of a position; masked ones have no logprob.

    Without the last place: of equals, which one gets it depends on the batch.
    """
    told = [(lp, token) for lp, token, *_ in top if lp is not None and lp > -1e4]
    least = min((lp for lp, _ in told), default=0.0)
    if len(told) == len(top):
        told = [pair for pair in told if pair[0] > least]
    return tuple(sorted(told, key=lambda pair: (-pair[0], pair[1])))


def recorded(one, answer):
    """Return a record for the gate."""
    meta = answer["meta_info"]
    return RequestRecord(
        key=one.key,
        order=0,
        prompt=one.prompt,
        targeted_s=0.0,
        started_s=0.0,
        output=tuple(answer["output_ids"]),
        logprobs=tuple(item[0] for item in meta["output_token_logprobs"]),
        top_logprobs=tuple(map(ranked, meta["output_top_logprobs"])),
        cached_tokens=meta["cached_tokens"],
    )


def pausing(servers, model):
    """Return a server with layer-wise KV whose device holds a part of a wave."""
    env = {**ENV, "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    device = Device(model, POOL_TOKENS, PAGE, FLAGS)
    return servers.get(tiered_spec(device, Tiers(32 * MB), "grammar", PAUSE, env))


@pytest.mark.full
def test_exchanged_constraints_are_caught(servers, model, wave, plain):
    """Two with each other's grammar: both checks are red, and name just these two."""
    first, second, *others = wave
    exchanged = [
        replace(first, sampling=second.sampling),
        replace(second, sampling=first.sampling),
        *others,
    ]
    answered = send(pausing(servers, model), exchanged)
    assert not answered.wrong
    kept = [one.is_kept(said) for one, said in zip(wave, answered.texts, strict=True)]
    assert kept == [False, False, *[True] * len(others)]
    result = plain.judge(answered)
    # Not the control of the harness: other lengths are no damage that it knows.
    assert not result.passed
    assert {one.key for one in result.differences} == {first.key, second.key}


def test_they_keep_to_their_grammars_and_equal_plains_while_some_wait(
    servers, model, wave, plain
):
    """Thrice, as who waits depends on the time that copies take."""
    server = pausing(servers, model)
    waited = set()
    for _ in range(NUM_WAVES):
        answered = send(server, wave)
        assert not answered.wrong
        result = plain.judge(answered)
        assert result.passed, result.summary()
        waited |= answered.waited
    by_key = {one.key: one for one in wave}
    penalised = [key for key in waited if "_penalty" in str(by_key[key].sampling)]
    assert sum(by_key[key].is_constrained for key in waited) >= 2
    assert penalised
    assert stats(server)["layerkv"]["layerkv_steps_paused"] > 0
