"""Few-shot classification: one long template for many short bodies.

The Berkeley report's text analysis, as a frontend program: the instruction and the
examples are the same in every request, and ``select`` picks the label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["LABELS", "SIZES", "few_shot"]

LABELS = ("positive", "negative")
SIZES = {"examples": 16, "questions": 24}
"""Examples in the template, and sentences to classify."""

_THINGS = ("kettle", "lamp", "train ride", "novel", "camera", "soup", "hotel", "chair")
_WORDS = {
    "positive": ("a delight", "better than promised", "worth every coin", "perfect"),
    "negative": ("a letdown", "broken on arrival", "a waste of money", "too loud"),
}


def few_shot(
    sgl: Any, endpoint: Any, generator: np.random.Generator, sizes: Mapping[str, int]
) -> list[str]:
    """Classify ``sizes["questions"]`` sentences and return the labels."""
    template = "Classify each sentence as positive or negative.\n\n"
    for _ in range(sizes["examples"]):
        sentence, label = _sentence(generator)
        template += f"Sentence: {sentence}\nSentiment: {label}\n\n"

    def classify(s: Any, sentence: str) -> None:
        s += template
        s += f"Sentence: {sentence}\nSentiment:"
        s += sgl.gen("label", choices=[f" {label}" for label in LABELS])

    program = sgl.function(classify)
    labels = []
    for _ in range(sizes["questions"]):
        state = program.run(_sentence(generator)[0], backend=endpoint)
        labels.append(str(state["label"]).strip())
    return labels


def _sentence(generator: np.random.Generator) -> tuple[str, str]:
    label = LABELS[int(generator.integers(len(LABELS)))]
    thing = _THINGS[int(generator.integers(len(_THINGS)))]
    words = _WORDS[label][int(generator.integers(len(_WORDS[label])))]
    day = int(generator.integers(1, 366))
    return f"On day {day} of owning it, I find the {thing} {words}.", label
