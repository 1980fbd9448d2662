"""Tiny files of our own making in the formats of public data sets."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

LENGTHS = """num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
10,5,15,2.0
20,4,24,5.0
30,6,36,5.0
12,3,15,4.0
15,1,16,15.0
"""
"""Rows 1 to 3 are a conversation; the fourth and fifth are one each."""

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.5000000,40,2
2023-11-17 00:00:01.0000001,60,9
"""

WIKITEXT = (
    " \n = Lighthouse = \n \n A tower with a lamp . \n = = Use = = \n"
    " It warns ships .\n = Tea ( drink ) = \n Leaves in hot water . \n"
)

LOOGLE = [
    {
        "input": "A long tale of two towers. " * 40,
        "title": "Towers",
        "qa_pairs": str(
            [
                {"Q": f"Which tower is number {n}?", "A": "the tall one", "S": ["x"]}
                for n in range(7)
            ]
        ),
        "output": "None",
    },
    {
        "input": "A paper on lamps. " * 30,
        "title": "Lamps",
        "qa_pairs": "none",
        "output": "Lamps are bright.",
    },
]

REACT = {
    "few_shot": "Solve it.\nQuestion: a?\nThought 1: b\nQuestion: c?\nThought: d",
    "sessions": [
        {
            "question": "Who lit the lamp?",
            "steps": [
                {
                    "llm": "Thought 1: look. Action 1: Search[lamp]",
                    "obs": "Obs: a lamp",
                },
                {"llm": "Thought 2: done. Action 2: Finish[she]", "obs": "Obs: right"},
            ],
        },
        {"question": "Why?", "steps": [{"llm": "Finish[because]", "obs": "Obs: no"}]},
    ],
}

TAU_BENCH = [
    {
        "task_id": 3,
        "trial": 1,
        "traj": [
            {"role": "system", "content": "You sell tickets."},
            {"role": "user", "content": "One ticket, please."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "x", "function": {"name": "book", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "content": "booked", "tool_call_id": "x", "name": "book"},
            {"role": "assistant", "content": "Here it is."},
            {"role": "user", "content": "Thanks."},
        ],
    }
]

HUMAN_EVAL = [
    {
        "task_id": f"HumanEval/{n}",
        "prompt": f"def add_{n}(a, b):\n",
        "canonical_solution": f"    return a + b + {n}\n",
        "entry_point": f"add_{n}",
    }
    for n in range(4)
]

MBPP = [
    {
        "task_id": n,
        "text": f"Write a function that adds {n}.",
        "code": f"def f(x):\n    return x + {n}",
        "test_list": [f"assert f(0) == {n}"],
    }
    for n in range(5)
]

MT_BENCH = [
    {"question_id": 81, "category": "x", "turns": ["Write a poem.", "Make it longer."]}
]

SHAREGPT_TEXTS = [
    {"input": "How are lamps made?", "output_length": "12"},
    {"input": "And towers?", "output_length": 3},
]

HOTPOT = [{"question": "Who?", "answer": "she", "type": "bridge"}]

MOONCAKE = [
    {
        "timestamp": 1000 * n,
        "input_length": 512 * 2 + 100,
        "output_length": 10,
        "hash_ids": [0, 10 + n % 3, 20 + n],
    }
    for n in range(6)
]

SERVEGEN_TRACE = "".join(
    f"{600 * n},{rate},{cv},{family},{shape},1.0\n"
    for n, (rate, cv, family, shape) in enumerate(
        [(0, 0, "", 0), (0.5, 2.0, "Gamma", 0.25), (1.5, 1.4, "Weibull", 0.7)]
    )
)

SERVEGEN_LENGTHS = {
    "0": {
        "input_tokens": "{10: 0.5, 30: 0.5}",
        "output_tokens": "{0: 0.25, 7: 0.75}",
        "reason_ratio": "{0.5: 1.0}",
    },
    "1200": {
        "input_tokens": "{99: 1.0}",
        "output_tokens": "{5: 1.0}",
        "reason_ratio": "{}",
    },
    "21600": {"input_tokens": "{}", "output_tokens": "{}", "reason_ratio": "{}"},
}


def write_text(path: Path, text: str, zipped: bool = False) -> Path:
    """Write a text, gzipped if asked."""
    data = text.encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write one JSON value."""
    return write_text(path, json.dumps(value), zipped=True)


def write_lines(path: Path, values: list[Any]) -> Path:
    """Write one JSON value a line."""
    return write_text(path, "".join(json.dumps(value) + "\n" for value in values))


def write_servegen(
    path: Path,
    trace: str = SERVEGEN_TRACE,
    lengths: Any = None,
    num_clients: int = 2,
) -> Path:
    """Write an archive of equal clients."""
    table = SERVEGEN_LENGTHS if lengths is None else lengths
    with tarfile.open(path, "w:gz") as archive:
        for number in range(num_clients):
            for name, text in (
                (f"chunk-{number}-trace.csv", trace),
                (f"chunk-{number}-dataset.json", json.dumps(table)),
            ):
                data = text.encode()
                member = tarfile.TarInfo(f"reason/x/{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path
