"""What ``sgl-tiered simulate`` is asked to serve: a trace file or a synthetic load.

The simulator knows no trace formats and the workloads package no simulator; this file
is where the one becomes the other.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
from sgl_tiered_workloads.arrivals import OpenLoop
from sgl_tiered_workloads.params import WorkloadError
from sgl_tiered_workloads.registry import make_workload as named_workload
from sgl_tiered_workloads.traces.base import Trace, TraceError, TraceRequest
from sgl_tiered_workloads.traces.mooncake import read_mooncake
from sgl_tiered_workloads.traces.weka import read_weka
from sgl_tiered_workloads.workload import Workload

from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder
from sgl_tiered.sim.settings import refusal
from sgl_tiered.sim.spec import SimSpec
from sgl_tiered.sim.synthetic import of_lengths, shared_prefixes

__all__ = ["from_sessions", "from_trace", "make_workload", "read_trace"]

_VOCAB_TOKENS = 32_000
"""Of the prompts; the simulated answers' ids lie above, so that none repeats."""


def make_workload(spec: SimSpec) -> SimWorkload:
    """Return the workload of a spec.

    Raises:
        ConfigError: the trace cannot be used, there is no load, or a setting says
            nothing of the load that is given.
    """
    _check_load(spec)
    if spec.trace:
        return from_trace(read_trace(spec), spec)
    if spec.workload:
        return from_sessions(_by_name(spec), spec.page_size)
    if spec.rate <= 0:
        raise refusal(
            "rate",
            "a synthetic workload has no arrivals",
            "give requests per second (--rate), or a trace",
        )
    rng = np.random.default_rng(spec.seed)
    if spec.num_prefixes:
        return shared_prefixes(
            spec.num_requests,
            spec.rate,
            spec.num_prefixes,
            spec.prefix_tokens,
            spec.prompt_tokens - spec.prefix_tokens,
            spec.output_tokens,
            spec.page_size,
            rng,
        )
    prompts = np.full(spec.num_requests, spec.prompt_tokens)
    outputs = np.full(spec.num_requests, spec.output_tokens)
    return of_lengths(prompts, outputs, spec.rate, spec.page_size, rng)


_OF_TRACES = ("limit", "max_prompt_tokens", "slowdown", "sessions")
_OF_SYNTHETIC = (
    "num_requests",
    "prompt_tokens",
    "output_tokens",
    "num_prefixes",
    "prefix_tokens",
)


def _check_load(spec: SimSpec) -> None:
    """Refuse settings that would do nothing with this load."""
    if spec.trace and spec.workload:
        raise refusal("workload", "a trace is given as well", "give one of them")
    load = "a synthetic load"
    foreign: tuple[str, ...] = ("params", *_OF_TRACES)
    if spec.trace:
        load, foreign = "a trace", ("params", *_OF_SYNTHETIC)
    elif spec.workload:
        load = f"the workload {spec.workload}, which has --params"
        foreign = ("rate", *_OF_TRACES, *_OF_SYNTHETIC)
    for name in foreign:
        if getattr(spec, name) != getattr(SimSpec(), name):
            raise refusal(name, f"says nothing of {load}", "leave it out")


def read_trace(spec: SimSpec) -> Trace:
    """Read the spec's trace; its format is told by the first line.

    Raises:
        ConfigError: it is none of the known formats, or damaged.
    """
    path = Path(spec.trace)
    first = _first_object(path)
    try:
        if "hash_ids" in first:
            trace = read_mooncake(path, limit=spec.limit or None)
        elif "block_size" in first:
            trace = read_weka(path, max_prompt_tokens=spec.max_prompt_tokens or None)
        else:
            raise ConfigError(
                "trace",
                f"{path} is neither a Mooncake nor a WEKA trace",
                "give JSON lines with hash_ids, or conversations with block_size",
            )
    except TraceError as error:
        raise ConfigError("trace", str(error), "correct the file") from None
    requests = trace.requests[: spec.limit or None]
    return Trace(trace.name, trace.block_tokens, requests)


def from_trace(trace: Trace, spec: SimSpec) -> SimWorkload:
    """Turn a trace into the simulator's requests; see ``SimSpec`` for the scaling."""
    builder = WorkloadBuilder(spec.page_size)
    pages = builder.number_blocks(
        [request.block_ids for request in trace.requests], trace.block_tokens
    )
    slowdown = spec.slowdown
    span_s = trace.requests[-1].arrival_s - trace.requests[0].arrival_s
    if spec.rate > 0 and span_s > 0:
        slowdown = len(trace.requests) / spec.rate / span_s
    latest: dict[int, int] = {}
    for request, ids in zip(trace.requests, pages, strict=True):
        after = latest.get(request.session, -1) if spec.sessions else -1
        index = builder.add(
            request.arrival_s * slowdown if after < 0 else 0.0,
            request.num_prompt_tokens,
            request.num_output_tokens,
            # The last block may be partial, and then its end is no whole page.
            prefix=ids[: request.num_prompt_tokens // spec.page_size],
            after=after,
            think_s=_think_s(request) * slowdown if after >= 0 else 0.0,
        )
        if request.session >= 0:
            latest[request.session] = index
    return builder.build(trace.name)


def from_sessions(workload: Workload, page_tokens: int) -> SimWorkload:
    """Play a workload of the harness against answers that repeat nothing.

    The simulator sees what a server would: prompts that carry the answers before them,
    pauses, arrivals or a closed loop. The sessions are used up.
    """
    builder = WorkloadBuilder(page_tokens)
    arrivals = workload.arrivals
    starts = arrivals.times_s if isinstance(arrivals, OpenLoop) else ()
    next_token = _VOCAB_TOKENS
    for number, session in enumerate(workload.as_sessions()):
        after, think_s = -1, 0.0
        while not session.finished:
            request = session.next_request()
            stop = next_token + request.max_new_tokens
            answer, next_token = range(next_token, stop), stop
            tokens = np.array((*request.prompt, *answer[:-1]), np.int32)
            after = builder.add(
                float(starts[number]) if starts and after < 0 else 0.0,
                len(request.prompt),
                request.max_new_tokens,
                prefix=builder.number_tokens(tokens),
                after=after,
                think_s=think_s,
            )
            session.record_answer(answer)
            think_s = session.think_s
    return builder.build(workload.name, workload.concurrency or 0)


def _by_name(spec: SimSpec) -> Workload:
    try:
        params = json.loads(spec.params or "{}")
        if not isinstance(params, dict):
            raise ConfigError("params", "it is no JSON object", "such as '{}'")
        return named_workload(spec.workload, params, spec.seed, _VOCAB_TOKENS)
    except (WorkloadError, TraceError) as error:
        raise ConfigError("workload", str(error), "correct the workload") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("params", f"{error}", "give a JSON object") from None


def _think_s(request: TraceRequest) -> float:
    return 0.0 if np.isnan(request.think_s) else request.think_s


def _first_object(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            is_zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if is_zipped else path.open("rb") as lines:
            first = json.loads(lines.readline())
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(
            "trace",
            f"{path} cannot be read ({error})",
            "give JSON lines, gzipped or not",
        ) from None
    if not isinstance(first, dict):
        raise ConfigError("trace", f"{path} holds no objects", "give JSON lines")
    return first
