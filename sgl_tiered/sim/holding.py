"""The simulated server's SLO admission: sequences in, tokens per pass out."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from sgl_tiered.policies.admission.base import NO_TARGET, RunningFacts
from sgl_tiered.policies.admission.control import AdmissionControl, Waiter
from sgl_tiered.policies.admission.pieces import LEAST_PIECE_SHARE
from sgl_tiered.policies.admission.registry import make_admission
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.layers import LayerMemory
from sgl_tiered.sim.sequence import Sequence

__all__ = ["Holding"]


class Holding:
    """Asks the admission that the engine asks, with the device's true times.

    Args:
        config: of the server.
        book: what is predicted of the requests under way.
        layers: layer-wise memory, or None.
    """

    def __init__(
        self,
        config: ServerConfig,
        book: LengthBook,
        layers: LayerMemory | None = None,
    ) -> None:
        self._layers = layers
        scheduler = config.scheduler
        self._times = config.times
        self._chunk_tokens = scheduler.chunk_tokens
        self._ttft_slo_s = scheduler.ttft_slo_s or NO_TARGET
        self._tpot_slo_s = scheduler.tpot_slo_s or NO_TARGET
        self._book = book
        self.control = AdmissionControl(
            make_admission(scheduler.slo_admission),
            config.page_tokens,
            int(scheduler.chunk_tokens * LEAST_PIECE_SHARE),
        )

    @property
    def is_on(self) -> bool:
        """Whether anything may be held."""
        return self.control.is_on

    def begin_pass(
        self,
        running: Seq[Sequence],
        begun: Sequence | None,
        waiting: Seq[Sequence],
        now_s: float,
    ) -> None:
        """Begin a pass while ``running`` decode; ``begun`` has part of its prompt."""
        batch = len(running)
        contexts = sum(seq.kv_tokens for seq in running) + batch

        def step_s(num_added: int) -> float:
            grown = (batch + num_added) / max(batch, 1)
            if self._layers is not None:
                return self._layers.pace_s(batch + num_added, int(contexts * grown))
            return self._times.decode_step_s(batch + num_added, int(contexts * grown))

        read = (self._facts(seq, now_s) for seq in running)
        facts = [one for one in read if one is not None]
        self.control.begin_pass(facts, step_s, now_s)
        queue = [*waiting] if begun is None else [begun, *waiting]
        self.control.see_queue(
            [str(seq.index) for seq in queue],
            lambda n: self._waiter(queue[n], queue[n].kv_tokens),
        )

    def due_first(self, waiting: list[Sequence]) -> list[Sequence]:
        """Return the queue with the most overdue request, if any, at its head."""
        rids = [str(seq.index) for seq in waiting]
        first = self.control.first_due(rids, lambda n: self._waiter(waiting[n], 0))
        if not first:
            return waiting
        return [waiting[first], *waiting[:first], *waiting[first + 1 :]]

    def commit(self, seq: Sequence) -> None:
        """Note that what ``fit`` has let in last of a request joins the pass."""
        self.control.commit(str(seq.index))

    def fit(self, seq: Sequence, context: int, new: int) -> int:
        """Return how many of ``new`` tokens after ``context`` to compute now."""

        def pass_s(num_tokens: int) -> float:
            return self._times.prefill_s([(context, num_tokens)])

        waiter = self._waiter(seq, context)
        return self.control.fit(waiter, pass_s, new, can_cut=self._chunk_tokens > 0)

    def _waiter(self, seq: Sequence, context: int) -> Waiter:
        left = seq.input_tokens - context
        return Waiter(
            str(seq.index),
            seq.arrival_s,
            self._ttft_slo_s,
            self._times.prefill_s([(context, left)]),
            is_resumed=seq.first_token_s >= 0,
        )

    def _facts(self, seq: Sequence, now_s: float) -> RunningFacts | None:
        """Return what it is like without its pauses; None for one that is paused."""
        paused_s = 0.0 if self._layers is None else self._layers.paused_s(seq)
        if paused_s is None:
            return None
        prediction = self._book.prediction(seq.index, seq.outputs)
        assert prediction is not None, "every request that is queued enters the book"
        return RunningFacts.at(
            now_s - paused_s,
            str(seq.index),
            seq.outputs,
            seq.first_token_s,
            self._tpot_slo_s,
            prediction,
        )
