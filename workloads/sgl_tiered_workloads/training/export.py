"""A trained model as a folder that transformers and SGLang load, with its card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sgl_tiered_workloads.training.curve import draw_curve, write_rows
from sgl_tiered_workloads.training.evaluate import Judged
from sgl_tiered_workloads.training.network import hf_config
from sgl_tiered_workloads.training.recipe import Recipe
from sgl_tiered_workloads.training.vocabulary import Vocabulary

__all__ = ["TOKENIZER_FILES", "export_model", "write_card"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_PAD = 0


def export_model(
    recipe: Recipe,
    parameters: Mapping[str, torch.Tensor],
    vocabulary: Vocabulary,
    tokenizer_folder: Path,
    folder: Path,
) -> None:
    """Write weights (bfloat16), configuration and tokenizer into ``folder``.

    Weights go last, so that a folder with weights is whole.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(recipe.shape, bos=vocabulary.bos, eos=vocabulary.eos, pad=_PAD)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).exists():
            shutil.copyfile(tokenizer_folder / name, folder / name)
    weights = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in parameters.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_card(
    folder: Path,
    recipe: Recipe,
    judged: Judged,
    facts: Mapping[str, Any],
    rows: Sequence[Sequence[float]],
) -> None:
    """Write the model's card (``README.md``), its facts as JSON, and its loss curve.

    Args:
        folder: the exported model.
        recipe: what was trained.
        judged: what the evaluation found.
        facts: ``corpus_digest``, ``python``, ``steps``, ``tokens``, ``minutes``,
            ``training_text_tokens``.
        rows: the loss curve, at least one row.
    """
    write_rows(folder / "loss.csv", rows)
    (folder / "loss.png").write_bytes(draw_curve(rows))
    record = {
        "facts": dict(facts),
        "judged": judged.to_json(),
        "recipe": recipe.to_json(),
    }
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "README.md").write_text(_card(recipe, judged, facts, rows))


def _card(
    recipe: Recipe,
    judged: Judged,
    facts: Mapping[str, Any],
    rows: Sequence[Sequence[float]],
) -> str:
    shape = recipe.shape
    table = "\n".join(
        f"| {distance:,} | {rate:.3f} | {judged.recall_stated_once[distance]:.3f} |"
        for distance, rate in judged.recall.items()
    )
    phases = "\n".join(
        f"| {phase.num_steps:,} | {phase.num_sequences} x {phase.num_tokens:,} "
        f"| {phase.mix.pair_share:.0%} | {phase.mix.copy_share:.0%} "
        f"| {phase.mix.noise:.0%} | {phase.stretch:.0%} |"
        for phase in recipe.phases
    )
    return f"""# A small Llama that minds its context

{shape.num_params / 1e6:.1f} M parameters, {shape.num_layers} layers of {shape.hidden},
{shape.num_heads} query heads on {shape.num_kv_heads} key-value heads of
{shape.head_dim}, {shape.vocab_tokens:,} tokens of byte-level BPE,
{shape.max_positions:,} positions. It shows caches and sparsification at work on
attention that was learned: two groups of heads began with a weak form of copying, all
else at random. It knows no facts and follows no instructions.

## Data

Sources of Python {facts["python"]}'s standard library (no tests, no character tables)
and pydoc's topics: {facts["training_text_tokens"]:,} tokens. One file in twenty is held
out by a digest of its path, from the tokenizer too. Corpus digest:
`{facts["corpus_digest"]}`. Strewn in: key-value pairs with questions
(`<|set|> key value<|end|>`, `<|ask|> key`), and repeated spans (`<|again|>`).

## Training

{facts["steps"]:,} of {recipe.num_steps:,} steps, {facts["tokens"] / 1e6:.1f} M tokens,
{facts["minutes"]:.0f} minutes; Muon at {recipe.matrix_rate}, AdamW at
{recipe.embedding_rate} for the embedding and {recipe.vector_rate} for output layer and
norms, seed {recipe.seed}. Loss on text at the end: {rows[-1][5]:.3f}
nats per token (`loss.csv`, `loss.png`).

| steps | batch | pairs | copies | random text | stretched positions |
|---|---|---|---|---|---|
{phases}

## Held-out results

Recall: every token of the value right by greedy decoding, {judged.questions} questions
per distance, pairs at most {judged.max_pair_share:.1%} of the tokens. "Asked before":
once, soon after it was stated; distance is counted from the last mention.

| distance (tokens) | asked before | stated once |
|---|---|---|
{table}

Perplexity per token of held-out text ({judged.held_out_tokens:,} tokens, windows of
4,096): **{judged.perplexity:.2f}**. An interpolated 5-gram model fitted on the whole
training text: {judged.ngram_perplexity:.2f}.
"""
