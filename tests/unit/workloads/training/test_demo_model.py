"""The model in the repository: what its card says, and that it does it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sgl_tiered_workloads.training.corpus import Corpus, TextTokens
from sgl_tiered_workloads.training.evaluate import LoadedModel, right_answers
from sgl_tiered_workloads.training.prompts import recall_prompt
from sgl_tiered_workloads.training.recipe import RECIPES, Recipe
from sgl_tiered_workloads.training.vocabulary import Vocabulary

tokenizers = pytest.importorskip("tokenizers")

FOLDER = Path(__file__).parents[4] / "workloads/models/demo"
MOST_BYTES = 20_000_000


def test_it_was_trained_by_the_recipe_of_its_name() -> None:
    """All of it, and its weights are small enough to lie here."""
    told = json.loads((FOLDER / "training.json").read_text())
    recipe = RECIPES["demo"]
    assert Recipe.from_json(told["recipe"]) == recipe
    assert told["facts"]["steps"] == recipe.num_steps
    assert (FOLDER / "model.safetensors").stat().st_size <= MOST_BYTES


def test_it_recalls_what_stands_a_thousand_tokens_back() -> None:
    """Most values, each of several tokens; by chance it would be none.

    In float32, which a CPU without instructions for bfloat16 computes in an eighth of
    the time; what is asked is whether the weights can do it.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    vocabulary = Vocabulary.of(tokenizer)
    held_out = TextTokens.encode(Corpus.read().held_out, tokenizer, vocabulary)
    rng = np.random.default_rng(5)
    prompts = [recall_prompt(held_out, vocabulary, 1024, rng) for _ in range(8)]
    model = LoadedModel.read(FOLDER, torch.float32)
    assert right_answers(model, prompts).sum() >= 6
