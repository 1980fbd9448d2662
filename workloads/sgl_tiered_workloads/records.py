"""What a run leaves behind: one frozen record per request, as JSON lines.

Times are seconds on the client's monotonic clock, zero at the start of the run.
A file starts with one header line (what ran, where, on which commit), so two
files can be compared without asking anybody. Headers name no path, host or user.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from sgl_tiered_workloads.harness import machine

__all__ = [
    "RequestRecord",
    "RunHeader",
    "make_header",
    "read_records",
    "write_records",
]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request and its answer.

    Attributes:
        key: names the request within its schedule, such as ``s3.t1``.
        order: its place in the schedule; requests of one forced batch share it.
        prompt: token ids sent.
        targeted_s: when it should have left.
        started_s: when it left.
        token_times_s: when each output token arrived; the first is TTFT's end.
        output: token ids received.
        logprobs: natural log of the probability of each output token.
        top_logprobs: per output token, (logprob, token id) pairs, best first.
        cached_tokens: prompt tokens that were not computed.
        cached_by_tier: the same, split by where they came from.
        error: why there is no whole answer; None on success.
        repeat: which repeat of the schedule it belongs to, from 0.
        prompt_tokens: prompt length by the server's count, where ``prompt`` is not
            kept or the server made the ids from text; else None.
        output_tokens: the same for the answer.
        output_text: the answer where the server gave text and no ids.
        is_split: a tiered server computed its front in passes of its own, while pages
            behind were read: what was cached is not the beginning of the prompt.
    """

    key: str
    order: int
    prompt: tuple[int, ...]
    targeted_s: float
    started_s: float
    token_times_s: tuple[float, ...] = ()
    output: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[float, int], ...], ...] = ()
    cached_tokens: int = 0
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None
    repeat: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    output_text: str = ""
    is_split: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt) if self.prompt_tokens is None else self.prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Length of the answer."""
        return len(self.output) if self.output_tokens is None else self.output_tokens

    @property
    def client_lag_s(self) -> float:
        """How much later than targeted it left: the client's fault, not a server's."""
        return self.started_s - self.targeted_s

    @property
    def ttft_s(self) -> float:
        """Time to first token from the actual start; infinite without a token."""
        if not self.token_times_s:
            return float("inf")
        return self.token_times_s[0] - self.started_s

    @property
    def e2e_s(self) -> float:
        """Time to the last token from the actual start; infinite without a token."""
        if not self.token_times_s:
            return float("inf")
        return self.token_times_s[-1] - self.started_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; 0 for a single token."""
        # Where events hold several tokens without saying so, the count is larger than
        # the number of times.
        later = max(self.num_output_tokens, len(self.token_times_s)) - 1
        if len(self.token_times_s) < 2:
            return 0.0
        return (self.token_times_s[-1] - self.token_times_s[0]) / later

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens that were computed, new and lost ones alike."""
        return self.num_prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What ran and where.

    Attributes:
        system: short name of what was measured.
        facts: flags, preset, seed and whatever else explains the run.
        commit: git commit of the working tree; empty outside a repository.
        dirty: whether the tree had uncommitted changes.
        versions: of the packages that matter.
        machine: processor, cores, memory in bytes, Python, system, accelerators.
        spec_hash: of the specification that asked for the run; empty without one.
        seed: of the specification.
    """

    system: str
    facts: Mapping[str, Any]
    commit: str
    dirty: bool
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    spec_hash: str = ""
    seed: int = 0


def make_header(
    system: str, facts: Mapping[str, Any], spec_hash: str = "", seed: int = 0
) -> RunHeader:
    """Return the header of a run on this machine and commit."""
    return RunHeader(
        system=system,
        facts=dict(facts),
        commit=machine.commit(),
        dirty=machine.is_dirty(),
        versions=machine.versions(),
        machine=machine.machine_facts(),
        spec_hash=spec_hash,
        seed=seed,
    )


def write_records(
    path: Path, header: RunHeader, records: Iterable[RequestRecord]
) -> None:
    """Write a records file, replacing an older one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    with partial.open("wb") as out:
        out.write(_line("header", asdict(header)))
        for record in records:
            out.write(_line("request", asdict(record)))
    partial.replace(path)


def _line(kind: str, fields: dict[str, Any]) -> bytes:
    # Times may be numpy's floats.
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps({"kind": kind, **fields}, option=option)


def read_records(path: Path) -> tuple[RunHeader, list[RequestRecord]]:
    """Read a records file back, exactly as it was written.

    Raises:
        ValueError: the file has no header or a line of an unknown kind.
    """
    header: RunHeader | None = None
    records: list[RequestRecord] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        fields = orjson.loads(line)
        kind = fields.pop("kind", None)
        if kind == "header":
            header = RunHeader(**fields)
        elif kind == "request":
            records.append(_record(fields))
        else:
            raise ValueError(f"{path.name}:{number}: line of unknown kind {kind!r}")
    if header is None:
        raise ValueError(f"{path.name} has no header line")
    return header, records


def _record(fields: dict[str, Any]) -> RequestRecord:
    for name in ("prompt", "token_times_s", "output", "logprobs"):
        fields[name] = tuple(fields[name])
    fields["top_logprobs"] = tuple(
        tuple((pair[0], pair[1]) for pair in top) for top in fields["top_logprobs"]
    )
    return RequestRecord(**fields)
