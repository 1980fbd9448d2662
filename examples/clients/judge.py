"""A program in SGLang's frontend language: one text, several views of it, a verdict.

``fork`` sends the views side by side; all of them share the text, and the verdict
shares the text again. A prefix cache computes it once.
"""

from __future__ import annotations

import argparse
from typing import Any

import sglang as sgl

TEXT = "def mean(values):\n    return sum(values) / len(values)\n\n" * 30
VIEWS = ("correctness", "speed", "names")


@sgl.function
def judge(s: Any, text: str) -> None:
    """Look at a text from several sides, then choose a verdict."""
    s += "Review this code.\n" + text
    forks = s.fork(len(VIEWS))
    for fork, view in zip(forks, VIEWS, strict=True):
        fork += f"\nAbout {view}: " + sgl.gen("said", max_tokens=12, temperature=0)
    for fork, view in zip(forks, VIEWS, strict=True):
        s += f"\n{view}: " + fork["said"]
    s += "\nVerdict:" + sgl.gen("verdict", choices=[" accept", " reject"])


def main() -> int:
    """Run the program twice; the second time its beginning is known."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    args = parser.parse_args()
    sgl.set_default_backend(sgl.RuntimeEndpoint(args.url))
    for number in (1, 2):
        state = judge.run(text=TEXT)
        meta = state.get_meta_info("verdict") or {}
        print(f"run {number}: verdict{state['verdict']}")
        if "cached_tokens" in meta:
            print(f"  cached tokens of the last request: {meta['cached_tokens']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
