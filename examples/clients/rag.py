"""Questions about documents: the document stands first, so its KV is used again.

Each document is asked about several times, in turns with the others, so that by the
time it comes again the device may have lost it. Documents here are sources of Python's
own standard library; ``--file`` takes yours.
"""

from __future__ import annotations

import bisect
import heapq
import inspect
import shlex
import textwrap
import types
from collections import Counter
from pathlib import Path

from asking import ask, client_of, parser_of, sources

MODULES: tuple[types.ModuleType, ...] = (bisect, heapq, shlex, textwrap)
QUESTIONS = (
    "What does it export?",
    "Which function is the longest?",
    "Name one error.",
)
MAX_CHARACTERS = 6000


def main() -> int:
    """Ask every question about every document, in turns."""
    parser = parser_of(__doc__)
    parser.add_argument("--file", type=Path, action="append", help="may be repeated")
    args = parser.parse_args()
    if args.file:
        documents = {path.name: path.read_text() for path in args.file}
    else:
        documents = {each.__name__: inspect.getsource(each) for each in MODULES}
    client = client_of(args.url)
    counted: Counter[str] = Counter()
    for question in QUESTIONS:
        for name, text in documents.items():
            # What is the same for all questions stands first, the question last.
            messages = [
                {"role": "system", "content": "Answer from the document alone."},
                {"role": "user", "content": text[:MAX_CHARACTERS] + "\n\n" + question},
            ]
            _, tiers, prompt_tokens = ask(client, messages, max_tokens=16)
            counted.update(tiers)
            counted["computed"] += prompt_tokens - sum(tiers.values())
            print(f"{name}: {sources(tiers, prompt_tokens)}", flush=True)
    total = sum(counted.values())
    shares = ", ".join(f"{name} {num / total:.0%}" for name, num in counted.items())
    print(f"{total} prompt tokens: {shares}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
