"""What predicting the length of an answer costs on the scheduler's thread.

Each predictor first learns from 20,000 answers of 200 groups. Then predictions (new
requests, and answers with tokens out), observations and the book's answers for requests
that run are timed one by one, in CPU time of the thread. Prints p50 and p99 in
microseconds and the memory of the online predictor; the last line is one JSON object.
Wanted: at most 50 us a prediction.

    python benchmarks/micro/length.py [--repeats 5000]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from sgl_tiered.policies.length.base import LengthFacts, LengthPredictor
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.length.registry import make_length_predictor

NAMES = ("online", "llm", "constant:256", "oracle")
NUM_LEARNED = 20_000
NUM_GROUPS = 200


def make_answers(num: int, rng: np.random.Generator) -> list[tuple[LengthFacts, int]]:
    """Return requests of many groups, each with lengths of its own, and answers."""
    typical = rng.lognormal(5.0, 1.0, NUM_GROUPS)
    answers = []
    for group in rng.integers(NUM_GROUPS, size=num).tolist():
        length = int(rng.lognormal(np.log(typical[group]), 0.6)) + 1
        said = int(length * rng.lognormal(0.0, 0.7)) + 1
        prompt = int(rng.lognormal(7.0, 1.2)) + 1
        allowed = int(rng.choice([512, 1024, 4096, 32_768]))
        facts = LengthFacts(prompt, allowed, f"g{group}", said)
        answers.append((facts, min(length, allowed)))
    return answers


class Stopwatch:
    """Collects the time of single calls by name."""

    def __init__(self) -> None:
        self._times_ns: dict[str, list[int]] = defaultdict(list)

    def time(self, name: str, call: Callable[[], object]) -> None:
        """Run and time one call."""
        start = time.thread_time_ns()
        call()
        self._times_ns[name].append(time.thread_time_ns() - start)

    def results(self) -> dict[str, dict[str, float]]:
        """Return p50 and p99 in microseconds by name."""
        rows = {}
        for name, times_ns in self._times_ns.items():
            p50, p99 = np.percentile(times_ns, [50, 99]) / 1e3
            rows[name] = {"p50_us": round(p50, 2), "p99_us": round(p99, 2)}
        return rows


def measure(name: str, repeats: int, watch: Stopwatch) -> float:
    """Time one predictor; return its memory in bytes."""
    rng = np.random.default_rng(1)
    answers = make_answers(NUM_LEARNED + repeats, rng)
    tracemalloc.start()
    predictor: LengthPredictor | None = make_length_predictor(name)
    assert predictor is not None, name
    for facts, length in answers[:NUM_LEARNED]:
        predictor.observe(facts, length)
    gc.collect()
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    for facts, length in answers[NUM_LEARNED:]:
        done = int(rng.integers(1, length + 1)) - 1
        watch.time(f"{name} predict", lambda f=facts: predictor.predict(f))
        watch.time(
            f"{name} predict later", lambda f=facts, d=done: predictor.predict(f, d)
        )
        watch.time(f"{name} observe", lambda f=facts, n=length: predictor.observe(f, n))
    book = LengthBook(predictor)
    for rid, (facts, length) in enumerate(answers[NUM_LEARNED:][:500]):
        book.entered(rid, facts)
        for done in range(1, length):
            watch.time(
                f"{name} book, per token", lambda r=rid, d=done: book.prediction(r, d)
            )
        book.finished(rid, length)
    return float(num_bytes)


def main() -> None:
    """Time all predictors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5000)
    args = parser.parse_args()
    watch = Stopwatch()
    memory = {name: measure(name, args.repeats, watch) for name in NAMES}
    results = watch.results()
    for name, row in results.items():
        print(f"{name:30s} p50 {row['p50_us']:8.2f} us   p99 {row['p99_us']:8.2f} us")
    print(f"online predictor: {memory['online'] / 1e6:.2f} MB")
    print(json.dumps({"memory_bytes": memory, **results}))


if __name__ == "__main__":
    main()
