"""Predicted answer lengths in the simulator: the product's predictors, fed by its ends.

What a simulated client would know is told apart from what only the trace knows. With
``ignore_eos`` the allowance of a request is its answer's length, as in benchmarks;
without, it is out of all proportion and says nothing. The oracle is told the truth, and
``llm`` asks a model that is emulated: it says the truth times a log-normal error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_tiered.policies.length.base import LengthFacts
from sgl_tiered.policies.length.book import LengthBook, LengthScore
from sgl_tiered.policies.length.llm import AskingCost, LengthAsker, LLMLengths, Reply
from sgl_tiered.policies.length.oracle import OracleLength
from sgl_tiered.policies.length.registry import make_length_predictor
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.requests import SimRequest
from sgl_tiered.sim.times import DeviceTimes

__all__ = ["AnswerLengths", "LengthReport", "ModelledAsk"]

_OPEN_ALLOWANCE = 1 << 18
_WORD_SIGMA = 0.7
"""Of the emulated model's error: two thirds of its words are right to a factor of 2.
An assumption, not a measurement."""
_QUESTION_TOKENS = 32
_REPLY_TOKENS = 4


@dataclass(frozen=True, slots=True)
class LengthReport:
    """How well the answers of a run were foretold.

    Attributes:
        predictor: its name.
        score: of the first prediction of each answer.
        asking: the bill of ``llm``; None for others.
    """

    predictor: str
    score: LengthScore
    asking: AskingCost | None = None


class ModelledAsk:
    """An ``Ask`` whose model knows its answers up to an error.

    The instruction is the request's index; the reply takes the time of a prefill of
    prompt and question and of a few decode steps on an idle device. That the device is
    busy with it meanwhile is not modelled.
    """

    def __init__(
        self,
        requests: Sequence[SimRequest],
        times: DeviceTimes,
        rng: np.random.Generator,
    ) -> None:
        self._requests = requests
        self._times = times
        self._factors = np.exp(rng.normal(0.0, _WORD_SIGMA, len(requests)))

    def ask(self, prompt: str, max_tokens: int) -> Reply:
        """Return the length as the model sees it."""
        index = int(prompt.split()[0])
        request = self._requests[index]
        length = max(1, round(request.num_output_tokens * float(self._factors[index])))
        num_prompt = request.num_prompt_tokens + _QUESTION_TOKENS
        num_output = min(_REPLY_TOKENS, max_tokens)
        seconds = self._times.prefill_s([(0, num_prompt)])
        seconds += (num_output - 1) * self._times.decode_step_s(1, num_prompt)
        return Reply(str(length), num_prompt, num_output, seconds)


class AnswerLengths:
    """The book of a simulated server, and what its requests say.

    Attributes:
        book: predictions of the requests under way.
    """

    def __init__(
        self,
        book: LengthBook,
        requests: Sequence[SimRequest],
        asker: LengthAsker | None,
        *,
        ignore_eos: bool,
    ) -> None:
        self.book = book
        self._requests = requests
        self._asker = asker
        self._ignore_eos = ignore_eos
        self._said: dict[int, int] = {}

    @classmethod
    def make(
        cls, config: ServerConfig, requests: Sequence[SimRequest]
    ) -> AnswerLengths | None:
        """Return what the configuration asks for; None without a predictor."""
        predictor = make_length_predictor(config.length_predictor)
        if predictor is None:
            return None
        asker = None
        if isinstance(predictor, LLMLengths):
            rng = np.random.default_rng([config.seed, 1])
            asker = LengthAsker(ModelledAsk(requests, config.times, rng))
        return cls(
            LengthBook(predictor),
            requests,
            asker,
            ignore_eos=config.scheduler.ignore_eos,
        )

    def ask(self, index: int) -> float:
        """Ask the model for a request's length, if it is asked; return the seconds."""
        if self._asker is None:
            return 0.0
        before_s = self._asker.cost.seconds
        self._said[index] = self._asker.length_of(str(index))
        return self._asker.cost.seconds - before_s

    def entered(self, index: int) -> None:
        """Note a request that is queued."""
        request = self._requests[index]
        said = self._said.pop(index, 0)
        if isinstance(self.book.predictor, OracleLength):
            said = request.num_output_tokens
        allowed = request.num_output_tokens if self._ignore_eos else _OPEN_ALLOWANCE
        facts = LengthFacts(
            request.num_prompt_tokens,
            max(allowed, request.num_output_tokens),
            said_tokens=said,
        )
        self.book.entered(index, facts)

    def report(self) -> LengthReport:
        """Return how well it went."""
        return LengthReport(
            predictor=self.book.predictor.name,
            score=self.book.score(),
            asking=None if self._asker is None else self._asker.cost,
        )
