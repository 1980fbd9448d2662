"""The training loop: batches by step number, checkpoints, a budget, a clean stop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_tiered.core.clock import Clock
from sgl_tiered_workloads.training.checkpoint import Checkpoint
from sgl_tiered_workloads.training.corpus import TextTokens
from sgl_tiered_workloads.training.curve import write_rows
from sgl_tiered_workloads.training.documents import training_document
from sgl_tiered_workloads.training.network import Network, initial_parameters
from sgl_tiered_workloads.training.optimizer import Optimizer
from sgl_tiered_workloads.training.recipe import Phase, Recipe
from sgl_tiered_workloads.training.vocabulary import Vocabulary

__all__ = ["Batch", "Trainer", "make_batch", "stretched_positions"]

_LOG = logging.getLogger(__name__)
_STEPS_PER_ROW = 10
_MAX_JUMPS = 3


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's documents, all arrays [num_sequences, num_tokens + 1].

    ``tokens`` and ``positions`` are int64, ``weights`` float32, the marks bool; marks
    and weights are about predicting the token at their place.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    weights: NDArray[np.float32]
    is_answer: NDArray[np.bool_]
    is_text: NDArray[np.bool_]


def stretched_positions(
    num_tokens: int, max_positions: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return rising positions (int64 [num_tokens]) below ``max_positions`` with jumps.

    Between the jumps they rise by one, so that what is near stays near.
    """
    positions = np.arange(num_tokens, dtype=np.int64)
    spare = int(rng.integers(max_positions - num_tokens + 1))
    num_jumps = int(rng.integers(1, _MAX_JUMPS + 1))
    for part in rng.multinomial(spare, [1 / num_jumps] * num_jumps).tolist():
        positions[int(rng.integers(1, num_tokens)) :] += part
    return positions


def make_batch(
    recipe: Recipe, step: int, text: TextTokens, vocabulary: Vocabulary
) -> Batch:
    """Return the batch of a step: a function of recipe, step and text alone."""
    rng = np.random.default_rng([recipe.seed, step])
    phase = recipe.phase_at(step)
    documents = [
        training_document(text, vocabulary, phase.mix, phase.num_tokens + 1, rng)
        for _ in range(phase.num_sequences)
    ]
    positions = [
        stretched_positions(phase.num_tokens + 1, recipe.shape.max_positions, rng)
        if rng.random() < phase.stretch
        else np.arange(phase.num_tokens + 1, dtype=np.int64)
        for _ in documents
    ]
    return Batch(
        np.stack([document.tokens for document in documents]).astype(np.int64),
        np.stack(positions),
        np.stack([document.weights for document in documents]),
        np.stack([document.is_answer for document in documents]),
        np.stack([document.is_text for document in documents]),
    )


@dataclass(frozen=True, slots=True)
class _Shard:
    """What one thread computed of its sequences of a batch."""

    losses: NDArray[np.float32]
    is_right: NDArray[np.bool_]
    gradients: list[torch.Tensor]


def _pool(num_threads: int) -> ThreadPoolExecutor:
    """Return threads that compute on one core each.

    A thread of its own for half of a batch meets the other once a step. Two threads in
    every operation meet hundreds of times, and each time the slower one is waited for:
    on two busy cores a product ran at 450 GFLOP/s in one thread and at 192 in two.
    """
    return ThreadPoolExecutor(
        num_threads, initializer=torch.set_num_threads, initargs=(1,)
    )


class Trainer:
    """Trains one recipe on one text, in a folder that it can go on from.

    Args:
        recipe: what to train and how.
        text: training text only.
        vocabulary: of the tokenizer that made ``text``.
        corpus_digest: kept in checkpoints; going on with another corpus is refused.
        folder: gets ``checkpoint.pt`` and ``loss.csv``.
        clock: measures the budget.
        dtype: what to compute in; parameters stay float32.
    """

    def __init__(
        self,
        recipe: Recipe,
        text: TextTokens,
        vocabulary: Vocabulary,
        *,
        corpus_digest: str,
        folder: Path,
        clock: Clock,
        dtype: torch.dtype,
    ) -> None:
        self._recipe = recipe
        self._text = text
        self._vocabulary = vocabulary
        self._corpus_digest = corpus_digest
        self._folder = folder
        self._clock = clock
        self._network = Network(recipe.shape, dtype)
        self.parameters = initial_parameters(recipe.shape, recipe.seed)
        for value in self.parameters.values():
            value.requires_grad_()
        self._optimizer = Optimizer(
            self.parameters,
            matrix_rate=recipe.matrix_rate,
            embedding_rate=recipe.embedding_rate,
            vector_rate=recipe.vector_rate,
            matrix_decay=recipe.matrix_decay,
            dtype=dtype,
        )
        self.step = 0
        self.elapsed_s = 0.0
        self.rows: list[list[float]] = []
        self._pending = [0.0] * 6
        self.num_tokens = 0

    @property
    def checkpoint_path(self) -> Path:
        """Where the state is kept."""
        return self._folder / "checkpoint.pt"

    @property
    def is_finished(self) -> bool:
        """All steps of the recipe are done."""
        return self.step >= self._recipe.num_steps

    def resume(self) -> None:
        """Go on from the folder's checkpoint.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is of another recipe or another corpus.
        """
        found = Checkpoint.load(self.checkpoint_path)
        if Recipe.from_json(found.recipe) != self._recipe:
            raise ValueError(f"{self.checkpoint_path} is of another recipe")
        if found.corpus_digest != self._corpus_digest:
            raise ValueError(
                f"{self.checkpoint_path} is of corpus {found.corpus_digest}, "
                f"and this machine's is {self._corpus_digest}"
            )
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(found.parameters[name])
        self._optimizer.load(found.optimizer)
        self.step, self.elapsed_s = found.step, found.elapsed_s
        self.rows, self._pending = found.rows, found.pending
        self.num_tokens = sum(
            phase.num_tokens * phase.num_sequences
            for phase in map(self._recipe.phase_at, range(self.step))
        )

    def save(self) -> None:
        """Write checkpoint and loss curve."""
        Checkpoint(
            recipe=self._recipe.to_json(),
            corpus_digest=self._corpus_digest,
            step=self.step,
            elapsed_s=self.elapsed_s,
            parameters={k: v.detach() for k, v in self.parameters.items()},
            optimizer=self._optimizer.state(),
            rows=self.rows,
            pending=self._pending,
        ).save(self.checkpoint_path)
        write_rows(self._folder / "loss.csv", self.rows)

    def run(
        self,
        stop: Event,
        *,
        budget_s: float = float("inf"),
        save_every_s: float = 180.0,
        after_step: Callable[[int], None] | None = None,
    ) -> bool:
        """Train until the recipe's end, the budget's end or ``stop``; always saves.

        Args:
            stop: set it (in a signal handler, say) to stop behind the running step.
            budget_s: seconds of training, those before a resume counted.
            save_every_s: seconds between checkpoints.
            after_step: told the number of finished steps.

        Returns:
            Whether the recipe is finished.
        """
        saved_at = last = self._clock.now()
        with _pool(self._recipe.num_shards) as pool:
            while not (self.is_finished or stop.is_set()) and self.elapsed_s < budget_s:
                self._one_step(pool)
                now = self._clock.now()
                self.elapsed_s += now - last
                last = now
                if self.step % _STEPS_PER_ROW == 0 or self.is_finished:
                    self._end_row()
                if now - saved_at >= save_every_s:
                    self.save()
                    saved_at = now
                if after_step is not None:
                    after_step(self.step)
        self.save()
        return self.is_finished

    def _one_step(self, pool: Executor) -> None:
        batch = make_batch(self._recipe, self.step, self._text, self._vocabulary)
        total = float(batch.weights[:, 1:].sum())
        rows = np.array_split(np.arange(len(batch.tokens)), self._recipe.num_shards)
        shards = list(pool.map(lambda some: self._shard(batch, some, total), rows))
        for at, parameter in enumerate(self.parameters.values()):
            parameter.grad = shards[0].gradients[at]
            for shard in shards[1:]:
                parameter.grad += shard.gradients[at]
        self._optimizer.step(self._recipe.rate_at(self.step), pool)
        self.step += 1
        self.num_tokens += batch.tokens[:, 1:].size
        self._gather(
            np.concatenate([shard.losses for shard in shards]),
            np.concatenate([shard.is_right for shard in shards]),
            batch,
        )

    def _shard(self, batch: Batch, rows: NDArray[np.int64], total: float) -> _Shard:
        """Compute losses and gradients of some of a batch's sequences."""
        tokens = torch.from_numpy(batch.tokens[rows])
        positions = torch.from_numpy(batch.positions[rows])
        weights = torch.from_numpy(batch.weights[rows])
        own = self._network.cast(self.parameters)
        hidden = self._network.hidden(own, tokens[:, :-1], positions[:, :-1])
        losses, is_right = self._network.losses(own, hidden, tokens[:, 1:])
        loss = (losses * weights[:, 1:]).sum() / total
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        return _Shard(losses.detach().numpy(), is_right.numpy(), list(gradients))

    def _gather(
        self, losses: NDArray[np.float32], is_right: NDArray[np.bool_], batch: Batch
    ) -> None:
        answers = batch.is_answer[:, 1:]
        texts = batch.is_text[:, 1:] & (batch.weights[:, 1:] > 0)
        for at, value in enumerate(
            (
                losses[texts].sum(),
                texts.sum(),
                losses[answers].sum(),
                is_right[answers].sum(),
                answers.sum(),
                1.0,
            )
        ):
            self._pending[at] += float(value)

    def _end_row(self) -> None:
        text_loss, texts, answer_loss, right, answers, _ = self._pending
        self._pending = [0.0] * 6
        phase: Phase = self._recipe.phase_at(self.step - 1)
        row = [
            self.step,
            self.num_tokens,
            self.elapsed_s,
            phase.num_tokens,
            self._recipe.rate_at(self.step - 1),
            text_loss / max(1.0, texts),
            answer_loss / max(1.0, answers),
            right / max(1.0, answers),
        ]
        self.rows.append([float(value) for value in row])
        _LOG.info(
            "step %d/%d, %.2f M tokens, %.0f s, length %d, rate %.2f: "
            "text %.3f, answers %.3f, right %.3f",
            self.step,
            self._recipe.num_steps,
            self.num_tokens / 1e6,
            *row[2:],
        )
