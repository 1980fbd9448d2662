"""A chat of several turns; after each answer, where its prompt's KV came from.

Each turn sends all turns before it, so all but the newest words can come from a cache.
With ``--drop device`` the device's cache is emptied before the last turn, as other
requests would do in time: the KV then comes from the tiers below.
"""

from __future__ import annotations

import urllib.request

from asking import ask, client_of, parser_of, sources

SYSTEM = "You write short Python functions. " * 40
QUESTIONS = (
    "def fibonacci(n):\n    '''Return the n-th Fibonacci number.'''",
    "def factorial(n):\n    '''Return the product of 1 to n.'''",
    "def gcd(a, b):\n    '''Return the greatest common divisor.'''",
)


def main() -> int:
    """Chat."""
    parser = parser_of(__doc__)
    parser.add_argument("--drop", choices=("device",), help="before the last turn")
    args = parser.parse_args()
    client = client_of(args.url)
    messages = [{"role": "system", "content": SYSTEM}]
    for number, question in enumerate(QUESTIONS, 1):
        if args.drop and number == len(QUESTIONS):
            url = f"{args.url}/tiered/drop?tier={args.drop}"
            urllib.request.urlopen(urllib.request.Request(url, method="POST"))
        messages.append({"role": "user", "content": question})
        text, tiers, prompt_tokens = ask(client, messages, max_tokens=48)
        messages.append({"role": "assistant", "content": text})
        print(f"turn {number}: {sources(tiers, prompt_tokens)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
