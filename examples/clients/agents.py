"""Agents side by side: one system prompt with tools, conversations with pauses.

What to look at: the system prompt is computed once for all agents, and a conversation
whose KV was pushed out while its tool ran comes back from host memory or disk. The
prompt's stable part comes first; what changes (the tool's result) comes last.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import openai
from asking import ask, client_of, parser_of, sources

TOOLS = "\n".join(
    f"tool_{number}(path: str, line: int) -> str: reads, tests or edits a file; "
    "returns what it saw, or an error that says why."
    for number in range(24)
)
SYSTEM = f"You work on a repository with these tools:\n{TOOLS}\nOne call per answer."


def tool(agent: int, step: int) -> str:
    """Stand for a tool: what agent number ``agent`` reads in its step ``step``."""
    lines = [f"line {n}: value_{agent}_{step} = {n * step + agent}" for n in range(30)]
    return "\n".join(lines)


def work(client: openai.OpenAI, agent: int, steps: int, pause_s: float) -> Counter[str]:
    """Run one agent; return its prompt tokens by where their KV came from."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Task {agent}: find where value_{agent} changes."},
    ]
    counted: Counter[str] = Counter()
    for step in range(steps):
        text, tiers, prompt_tokens = ask(
            client,
            messages,
            max_tokens=24,
            # Lengths of answers are learned apart for each kind of request.
            custom_params={"tiered": {"group": "agents"}},
        )
        counted.update(tiers)
        counted["computed"] += prompt_tokens - sum(tiers.values())
        print(
            f"agent {agent}, step {step}: {sources(tiers, prompt_tokens)}", flush=True
        )
        messages.append({"role": "assistant", "content": text})
        time.sleep(pause_s)
        messages.append({"role": "user", "content": tool(agent, step)})
    return counted


def main() -> int:
    """Run all agents and add up."""
    parser = parser_of(__doc__)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds of a tool")
    args = parser.parse_args()
    client = client_of(args.url)
    with ThreadPoolExecutor(args.agents) as several:
        runs = [
            several.submit(work, client, agent, args.steps, args.pause)
            for agent in range(args.agents)
        ]
        counted = sum((run.result() for run in runs), Counter[str]())
    total = sum(counted.values())
    shares = ", ".join(f"{name} {num / total:.0%}" for name, num in counted.items())
    print(f"{total} prompt tokens: {shares}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
