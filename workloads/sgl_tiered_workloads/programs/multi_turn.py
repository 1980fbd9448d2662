"""Multi-turn chats with one system prompt: each turn carries all turns before it.

Turns of different users alternate, so a user's history rests while others speak.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["SIZES", "multi_turn"]

SIZES = {"users": 4, "turns": 4, "system_rules": 24, "answer_tokens": 32}
"""Users, turns of each, rules in the system prompt, and tokens of an answer."""

_TOPICS = ("the tides", "bread", "maps", "bees", "bridges", "clocks", "glass", "paper")
_ASKS = ("What matters most about", "Who first studied", "Give one fact on", "Why care")


def multi_turn(
    sgl: Any, endpoint: Any, generator: np.random.Generator, sizes: Mapping[str, int]
) -> list[str]:
    """Chat with ``sizes["users"]`` users in turn and return all answers in order."""
    rules = "".join(
        f"Rule {number}: when asked about {_pick(generator, _TOPICS)}, answer in "
        f"{int(generator.integers(1, 9))} short sentences.\n"
        for number in range(1, sizes["system_rules"] + 1)
    )

    def chat(s: Any, history: list[tuple[str, str]], question: str) -> None:
        s += sgl.system(rules)
        for asked, answered in history:
            s += sgl.user(asked)
            s += sgl.assistant(answered)
        s += sgl.user(question)
        s += sgl.assistant(
            sgl.gen("answer", max_tokens=sizes["answer_tokens"], temperature=0.0)
        )

    program = sgl.function(chat)
    histories: list[list[tuple[str, str]]] = [[] for _ in range(sizes["users"])]
    answers = []
    for _ in range(sizes["turns"]):
        for history in histories:
            question = f"{_pick(generator, _ASKS)} {_pick(generator, _TOPICS)}?"
            state = program.run(list(history), question, backend=endpoint)
            answer = str(state["answer"])
            history.append((question, answer))
            answers.append(answer)
    return answers


def _pick(generator: np.random.Generator, choices: tuple[str, ...]) -> str:
    return choices[int(generator.integers(len(choices)))]
