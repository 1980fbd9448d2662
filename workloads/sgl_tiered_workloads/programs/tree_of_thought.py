"""Tree of thought: fork into proposals, judge each, go on from the best.

Every branch repeats the problem and the thoughts before it, so all that a level adds
is one thought per branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["SIZES", "VERDICTS", "tree_of_thought"]

SIZES = {"problems": 2, "branches": 3, "levels": 3, "thought_tokens": 48}
"""Problems, proposals per level, levels, and tokens of one thought."""

VERDICTS = (" sure", " likely", " impossible")
"""Best first."""

_RULES = (
    "You combine four numbers with + - * / and brackets so that the result is the "
    "target. Each number is used exactly once. Work in steps: each step takes two of "
    "the numbers that are left, combines them, and names the numbers that remain.\n"
    "Example: numbers 4 9 10 13, target 24. Step: 13 - 9 = 4, left 4 4 10. "
    "Step: 10 - 4 = 6, left 4 6. Step: 4 * 6 = 24, left 24. Done.\n\n"
)


def tree_of_thought(
    sgl: Any, endpoint: Any, generator: np.random.Generator, sizes: Mapping[str, int]
) -> list[str]:
    """Search ``sizes["problems"]`` problems and return the chosen chains of thought."""

    def solve(s: Any, problem: str) -> None:
        s += _RULES + problem
        for level in range(sizes["levels"]):
            forks = s.fork(sizes["branches"])
            for branch, fork in enumerate(forks):
                fork += f"Step {level + 1}, idea {branch + 1}:"
                fork += sgl.gen(
                    "thought",
                    max_tokens=sizes["thought_tokens"],
                    temperature=0.0,
                    stop="\n",
                )
                fork += "\nCan this still reach the target?"
                fork += sgl.gen("verdict", choices=list(VERDICTS))
            forks.join()
            best = min(
                range(sizes["branches"]),
                key=lambda branch: VERDICTS.index(forks[branch]["verdict"]),
            )
            chosen = str(forks[best]["thought"])
            s += f"Step {level + 1}, idea {best + 1}:{chosen}\n"

    program = sgl.function(solve)
    chains = []
    for _ in range(sizes["problems"]):
        numbers = " ".join(str(int(n)) for n in generator.integers(1, 14, 4))
        problem = f"Numbers {numbers}, target 24.\n"
        state = program.run(problem, backend=endpoint)
        chains.append(state.text()[len(_RULES) :])
    return chains
