"""Judges a trained model on what it never saw: recall by distance, and perplexity.

``python -m sgl_tiered_workloads.training.evaluate MODEL`` prints one JSON object. A
question counts as answered if every token of the value is what greedy decoding gives;
since a wrong token ends a right answer, one pass over prefix, question and answer
decides it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_tiered_workloads.training.corpus import Corpus, TextTokens
from sgl_tiered_workloads.training.network import Network
from sgl_tiered_workloads.training.ngram import NgramModel
from sgl_tiered_workloads.training.prompts import RecallPrompt, recall_prompt
from sgl_tiered_workloads.training.recipe import Shape
from sgl_tiered_workloads.training.vocabulary import Vocabulary

__all__ = [
    "DISTANCES",
    "Judged",
    "LoadedModel",
    "evaluate",
    "main",
    "right_answers",
    "text_losses",
]

DISTANCES = (1024, 2048, 3072, 4096)
"""Tokens between a pair's last mention and the question about it."""

_SEED = 20_000
_WINDOW_TOKENS = 4096
_BATCH_TOKENS = 10_000


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model to judge: parameters as ``Network.cast`` gives them."""

    shape: Shape
    network: Network
    own: dict[str, torch.Tensor]

    @staticmethod
    def of(
        shape: Shape,
        parameters: dict[str, torch.Tensor],
        dtype: torch.dtype = torch.bfloat16,
    ) -> LoadedModel:
        """Take parameters in memory."""
        network = Network(shape, dtype)
        with torch.no_grad():
            return LoadedModel(shape, network, network.cast(parameters))

    @staticmethod
    def read(folder: Path, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
        """Read an exported model's ``config.json`` and ``model.safetensors``."""
        from safetensors.torch import load_file

        config = json.loads((folder / "config.json").read_text())
        shape = Shape(
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            intermediate=config["intermediate_size"],
            vocab_tokens=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            rope_theta=config["rope_theta"],
            norm_eps=config["rms_norm_eps"],
        )
        return LoadedModel.of(shape, load_file(folder / "model.safetensors"), dtype)


@dataclass(frozen=True, slots=True)
class Judged:
    """What ``evaluate`` found; rates are of ``questions`` per distance.

    ``recall``: the pair was asked for once before, soon after its statement;
    ``recall_stated_once``: its statement is its only mention. Perplexities are per
    token over ``held_out_tokens`` tokens of held-out text, read in windows of 4,096
    tokens.
    """

    recall: dict[int, float]
    recall_stated_once: dict[int, float]
    questions: int
    max_pair_share: float
    perplexity: float
    ngram_perplexity: float
    held_out_tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {name: getattr(self, name) for name in Judged.__slots__}


def right_answers(
    model: LoadedModel, prompts: Sequence[RecallPrompt]
) -> NDArray[np.bool_]:
    """Return which prompts greedy decoding answers right, bool [num_prompts]."""
    right: list[bool] = []
    per_batch = max(1, _BATCH_TOKENS // max(len(p.tokens) for p in prompts))
    for start in range(0, len(prompts), per_batch):
        some = prompts[start : start + per_batch]
        longest = max(len(prompt.tokens) for prompt in some)
        # Behind the end stands anything: attention looks back only.
        tokens = torch.zeros(len(some), longest, dtype=torch.int64)
        for row, prompt in enumerate(some):
            tokens[row, : len(prompt.tokens)] = torch.from_numpy(prompt.tokens)
        positions = torch.arange(longest).expand(len(some), -1)
        with torch.inference_mode():
            hidden = model.network.hidden(model.own, tokens, positions)
            for row, prompt in enumerate(some):
                stop = len(prompt.tokens) - 1
                asked = hidden[row, stop - len(prompt.answer) : stop]
                given = model.network.logits(model.own, asked).argmax(-1)
                right.append(given.tolist() == prompt.answer.tolist())
    return np.array(right)


def text_losses(
    model: LoadedModel,
    tokens: NDArray[np.int32],
    bos: int,
    window_tokens: int = _WINDOW_TOKENS,
) -> NDArray[np.float32]:
    """Return the loss of every token in nats, given those before it in its window.

    Shape [num_windows, window_tokens]; ``bos`` stands before each window, and a last
    piece shorter than a window is left out.
    """
    found = []
    for start in range(0, len(tokens) - window_tokens + 1, window_tokens):
        window = torch.from_numpy(tokens[start : start + window_tokens]).long()[None]
        given = torch.cat((torch.full_like(window[:, :1], bos), window[:, :-1]), dim=1)
        positions = torch.arange(window_tokens)[None]
        with torch.inference_mode():
            hidden = model.network.hidden(model.own, given, positions)
            losses, _ = model.network.losses(model.own, hidden, window)
            found.append(losses[0].numpy())
    return np.stack(found)


def evaluate(
    model: LoadedModel,
    training: TextTokens,
    held_out: TextTokens,
    vocabulary: Vocabulary,
    *,
    distances: Sequence[int] = DISTANCES,
    questions: int = 120,
    window_tokens: int = _WINDOW_TOKENS,
) -> Judged:
    """Judge a model; the text of every prompt is held-out text.

    Args:
        model: what to judge.
        training: text that the 5-gram model is fitted on.
        held_out: text to judge by.
        vocabulary: of their tokenizer.
        distances: see ``Judged.recall``.
        questions: per distance and kind.
        window_tokens: of the perplexity.
    """
    recall: tuple[dict[int, float], dict[int, float]] = ({}, {})
    share = 0.0
    for distance in distances:
        for once, found in enumerate(recall):
            rng = np.random.default_rng([_SEED, distance, once])
            prompts = [
                recall_prompt(held_out, vocabulary, distance, rng, read_again=not once)
                for _ in range(questions)
            ]
            found[distance] = float(right_answers(model, prompts).mean())
            shares = (p.pair_tokens / len(p.prefix) for p in prompts)
            share = max(share, *shares)
    window_tokens = min(window_tokens, len(held_out.tokens))
    losses = text_losses(model, held_out.tokens, vocabulary.bos, window_tokens)
    ngram = NgramModel(training.tokens, vocabulary.num_tokens)
    logs = ngram.log_probabilities(held_out.tokens[: losses.size])
    return Judged(
        recall=recall[0],
        recall_stated_once=recall[1],
        questions=questions,
        max_pair_share=share,
        perplexity=math.exp(float(losses.mean(dtype=np.float64))),
        ngram_perplexity=math.exp(-float(logs.mean())),
        held_out_tokens=int(losses.size),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Judge an exported model and print the result as JSON."""
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description="judge a trained model")
    parser.add_argument("model", type=Path, help="an exported model's folder")
    parser.add_argument("--questions", type=int, default=120)
    parser.add_argument("--distances", type=int, nargs="+", default=DISTANCES)
    args = parser.parse_args(argv)
    load: Any = Tokenizer.from_file
    tokenizer = load(str(args.model / "tokenizer.json"))
    vocabulary = Vocabulary.of(tokenizer)
    corpus = Corpus.read()
    judged = evaluate(
        LoadedModel.read(args.model),
        TextTokens.encode(corpus.training, tokenizer, vocabulary),
        TextTokens.encode(corpus.held_out, tokenizer, vocabulary),
        vocabulary,
        distances=args.distances,
        questions=args.questions,
    )
    print(json.dumps(judged.to_json()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
