"""Loads of SGLang's own bench_serving: shared prefixes, and conversations.

Both are its data set ``generated-shared-prefix``; with several turns each prompt is a
conversation that goes through the chat endpoint, answers of the model in it. The wheel
of SGLang 0.5.23 has no other program for conversations.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comparison.settings import LoadShape, Model
from sgl_tiered_workloads.server import SglangServer

__all__ = ["SEED", "NotThereError", "command", "read_result", "run_load"]

SEED = 42
_MODULES = ("sglang.benchmark.serving", "sglang.bench_serving")
"""The second is the name in older versions."""
_KEPT = (
    "duration",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "input_throughput",
    "output_throughput",
    "total_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "median_e2e_latency_ms",
    "max_concurrent_requests",
)
_LISTS = ("ttfts", "input_lens", "output_lens", "cached_tokens")


class NotThereError(RuntimeError):
    """A load cannot be run with what is here; the message says what is missing."""


def command(
    shape: LoadShape, groups: int, url: str, model: Path, result: Path
) -> list[str]:
    """Return the command line of bench_serving.

    Args:
        shape: of the load.
        groups: of prompts.
        url: of the server.
        model: its folder.
        result: file that gets the figures.
    """
    is_chat = shape.turns > 1
    numbers = {
        "--gsp-num-groups": groups,
        "--gsp-prompts-per-group": shape.per_group,
        "--gsp-system-prompt-len": shape.prefix_tokens,
        "--gsp-question-len": shape.question_tokens,
        "--gsp-output-len": shape.answer_tokens,
        "--gsp-num-turns": shape.turns,
        "--max-concurrency": shape.concurrency or groups * shape.per_group,
        "--seed": SEED,
        "--warmup-requests": 1,
    }
    arguments = [text for flag, n in numbers.items() for text in (flag, str(n))]
    return [
        sys.executable,
        "-m",
        _module(),
        "--backend",
        "sglang-oai-chat" if is_chat else "sglang",
        "--base-url",
        url,
        "--model",
        str(model),
        "--dataset-name",
        "generated-shared-prefix",
        *arguments,
        "--request-rate",
        "inf",
        "--flush-cache",
        "--cache-report",
        "--disable-tqdm",
        "--output-details",
        "--output-file",
        str(result),
    ]


def _module() -> str:
    for name in _MODULES:
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except ModuleNotFoundError:
            continue
    raise NotThereError("not there: this SGLang brings no bench_serving")


async def run_load(
    name: str,
    shape: LoadShape,
    num_pools: float,
    pool_tokens: int,
    server: SglangServer,
    model: Model,
    folder: Path,
) -> dict[str, Any]:
    """Run a load and return its figures.

    Args:
        name: of the load.
        shape: of it.
        num_pools: KV that comes again, in device pools.
        pool_tokens: of the device.
        server: that answers.
        model: its model.
        folder: for what bench_serving prints and keeps.

    Raises:
        NotThereError: bench_serving, or the model's chat template, is missing.
        RuntimeError: it failed; says with what.
    """
    if shape.turns > 1 and not model.has_chat:
        raise NotThereError(
            "not there: the model has no chat template, which bench_serving's "
            "conversations need (take the Instruct form of the model)"
        )
    groups = shape.num_groups(pool_tokens, num_pools)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{server.spec.name}.{name}"
    result, log = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
    result.unlink(missing_ok=True)
    if "--enable-lmcache" in server.spec.flags:
        # What LMCache's own server holds outlives a flush.
        await asyncio.to_thread(server.post, "/hicache/storage-backend/clear", {})
    line = command(shape, groups, server.url, model.path, result)
    limit_s = shape.limit_s(groups)
    code = await asyncio.to_thread(_run, line, _environment(folder), log, limit_s)
    text = log.read_text(encoding="utf-8", errors="replace")
    if code != 0:
        lines = [one.strip() for one in text.splitlines() if one.strip()]
        last = lines[-1][:300] if lines else "it printed nothing"
        raise RuntimeError(f"bench_serving ended with code {code}: {last}")
    expected = groups * shape.per_group * shape.turns
    found = read_result(result, expected)
    # It is in the cell now, and has paths of the machine in it.
    result.unlink(missing_ok=True)
    return {"groups": groups, **found}


def _run(
    line: list[str], environment: Mapping[str, str], log: Path, limit_s: float
) -> int:
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                line,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"bench_serving was not done after {limit_s:.0f} s"
            ) from None
    return done.returncode


def _environment(folder: Path) -> dict[str, str]:
    """Return the variables of bench_serving.

    It keeps prompts below the home folder by the name of the tokenizer's class, which
    another model's may have too. So it gets a home folder of its own.
    """
    home = Path.home()
    named = os.environ.get("HF_HOME", str(home / ".cache" / "huggingface"))
    environment = {**os.environ, "HOME": str(folder.resolve()), "HF_HOME": named}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def read_result(path: Path, expected: int) -> dict[str, Any]:
    """Read the file of bench_serving: figures, raw times, and a name of each answer.

    Args:
        path: of the file.
        expected: requests that must have been answered.

    Raises:
        RuntimeError: it holds no result, or some requests failed.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        lists = {name: told.get(name) or [] for name in _LISTS}
        errors = [error for error in told["errors"] if error]
        texts = told["generated_texts"]
    except (OSError, IndexError, KeyError, ValueError) as problem:
        raise RuntimeError(
            f"bench_serving wrote no result ({type(problem).__name__}: {problem})"
        ) from None
    if errors or told["completed"] != expected:
        first = str(errors[0]).strip().splitlines()[-1][:300] if errors else "no error"
        raise RuntimeError(
            f"bench_serving: {told['completed']} of {expected} requests were answered; "
            f"the first error: {first}"
        )
    report = told.get("cache_report") or {}
    return {
        "figures": {name: told.get(name) for name in _KEPT},
        **lists,
        "cache_report": report,
        "answers": [_digest(text) for text in texts],
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
