"""Runs the equality gate on the systems of a comparison, before anything is timed.

A reference (plain SGLang whose device pool holds the whole gate schedule) plays the
first turns of the workload one at a time and writes the schedule; each system replays
its prompts. Plain SGLang with the systems' own pool gives the rounding that a decision
to recompute may rightly cause. A negative control comes first: a gate that lets a
wrong page pass proves nothing. A system at a foreign address is not judged: its model,
pool and arithmetic are not ours to fix.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.gate import (
    GateResult,
    Spread,
    check_equality,
    negative_control,
    plain_spread,
)
from sgl_tiered_workloads.harness.control import answer_with_swapped_pages, swappable
from sgl_tiered_workloads.harness.errors import GateRedError, HarnessError
from sgl_tiered_workloads.harness.spec import Spec, SystemSpec
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest, replay
from sgl_tiered_workloads.turns import Session

__all__ = [
    "Gate",
    "Served",
    "Verdict",
    "judge",
    "play_in_turns",
    "read_gate",
    "write_gate",
]

Served = Callable[[str], Any]
"""Given a server's name, an async context manager that yields its running server."""
Say = Callable[[str], None]

REFERENCE = "gate-reference"
PLAIN = "gate-plain"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate found on one system."""

    passed: bool
    summary: str
    exact_fraction: float = 0.0
    exact_tokens_by_tier: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gate:
    """The gate of a comparison.

    Attributes:
        kind: ``equality`` or ``off``.
        because: why it is off.
        control: what the negative control caught.
        verdicts: by system; foreign systems have none.
    """

    kind: str
    because: str = ""
    control: str = ""
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def red(self) -> list[str]:
        """Names of the systems that did not pass."""
        return [name for name, item in self.verdicts.items() if not item.passed]

    def status(self, system: str) -> str:
        """Return ``green``, ``red`` or ``not judged``."""
        if system not in self.verdicts:
            return "not judged"
        return "green" if self.verdicts[system].passed else "red"

    def require_green(self) -> None:
        """Refuse to go on.

        Raises:
            GateRedError: a system's answers were not equal.
        """
        if self.red:
            first = self.verdicts[self.red[0]].summary
            raise GateRedError(
                f"The gate is red for {', '.join(self.red)}, so no speed is reported: "
                f"{first}"
            )


def write_gate(path: Path, gate: Gate) -> None:
    """Write what the gate found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(gate), indent=1) + "\n", encoding="utf-8")


def read_gate(path: Path) -> Gate:
    """Read it back.

    Raises:
        GateRedError: there is none, so nobody compared the answers.
    """
    if not path.exists():
        raise GateRedError(
            f"{path.name} is missing, so nobody compared the answers; run the "
            "comparison again."
        )
    fields = json.loads(path.read_text(encoding="utf-8"))
    verdicts = {name: Verdict(**item) for name, item in fields.pop("verdicts").items()}
    return Gate(**fields, verdicts=verdicts)


async def judge(
    spec: Spec, sessions: Sequence[Session], served: Served, say: Say
) -> Gate:
    """Run the gate.

    Args:
        spec: of the comparison.
        sessions: a fresh copy of the workload.
        served: starts and stops the servers, REFERENCE and PLAIN among them.
        say: takes progress lines.

    Raises:
        NegativeControlError: a wrong page was not caught.
        HarnessError: the workload offers no two prompts for the control.
    """
    if spec.gate.kind == "off":
        return Gate("off", spec.gate.because)
    async with served(REFERENCE) as server:
        await asyncio.to_thread(server.flush_cache)
        async with StreamingClient(server.url) as client:
            reference = await play_in_turns(client, sessions, spec.gate.requests)
            say(f"  gate: the reference answered {len(reference)} requests")
            right, wrong = await _control(client, server, reference, spec.page_size)
    requests = replay(reference)
    plain = await _answers(served, _plain_name(spec), requests)
    spread = _spread(reference, plain, spec.page_size)
    caught = check_equality(
        right, wrong, page_size=spec.page_size, spread=spread, min_exact_fraction=0.0
    )
    negative_control({"another prompt's page": caught})
    reason = caught.differences[0].reason
    say(f"  gate: the negative control was caught: {reason}")
    verdicts = {}
    for system in spec.started:
        is_plain = system.name == _plain_name(spec)
        seen = plain if is_plain else await _answers(served, system.name, requests)
        # Plain cannot be judged by the spread that it gives: only what it computed
        # alike counts.
        allowed = None if is_plain else spread
        verdicts[system.name] = _verdict(spec, system, reference, seen, allowed)
        say(f"  gate: {system.name}: {verdicts[system.name].summary}")
    return Gate("equality", control=reason, verdicts=verdicts)


def _plain_name(spec: Spec) -> str:
    """Name of a compared system that is plain already, or of one of our own."""
    plain = [s.name for s in spec.started if not s.flags and not s.env]
    return plain[0] if plain else PLAIN


def _spread(
    reference: Sequence[RequestRecord], plain: Sequence[RequestRecord], page_size: int
) -> Spread:
    """Measure plain against itself; see ``plain_spread``.

    Raises:
        HarnessError: plain failed, so there is nothing to measure.
    """
    for record in plain:
        if record.error is not None:
            raise HarnessError(
                f"Plain SGLang failed on {record.key} of the gate ({record.error}); "
                "see its log."
            )
    return plain_spread(reference, plain, page_size)


async def _answers(
    served: Served, name: str, requests: Sequence[PlannedRequest]
) -> list[RequestRecord]:
    async with served(name) as server:
        await asyncio.to_thread(server.flush_cache)
        async with StreamingClient(server.url) as client:
            return await client.run_sequential(requests)


async def play_in_turns(
    client: StreamingClient, sessions: Sequence[Session], num_requests: int
) -> list[RequestRecord]:
    """Play first turns, then second ones, one at a time, there and back.

    Each session rests while the others speak, so its KV must come back from below.

    Raises:
        HarnessError: the reference itself failed.
    """
    records: list[RequestRecord] = []
    # As many sessions as leave each of them a second turn, where there are any.
    alive = list(sessions)[: max(2, num_requests // 2)]
    while alive and len(records) < num_requests:
        for session in list(alive):
            if len(records) == num_requests:
                break
            record = await client.send(session.next_request(), len(records))
            if record.error is not None:
                raise HarnessError(
                    f"The gate's reference failed on {record.key} ({record.error}); "
                    "see its log."
                )
            records.append(record)
            session.record_answer(record.output)
            if session.finished:
                alive.remove(session)
        alive.reverse()
    return records


async def _control(
    client: StreamingClient,
    server: Any,
    reference: Sequence[RequestRecord],
    page_size: int,
) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """Return right and wrong answers to two cold prompts."""
    found = swappable(reference, page_size)
    if found is None:
        raise HarnessError(
            "No two prompts of the gate differ in two whole pages, so it cannot be "
            "shown to catch a wrong one; raise gate.requests or lengthen the prompts."
        )
    first, second, page = found
    pair = replay([first, second])
    await asyncio.to_thread(server.flush_cache)
    right = await client.run_sequential(pair)
    await asyncio.to_thread(server.flush_cache)
    wrong = await answer_with_swapped_pages(client, right[0], right[1], page, page_size)
    return right, wrong


def _verdict(
    spec: Spec,
    system: SystemSpec,
    reference: Sequence[RequestRecord],
    seen: Sequence[RequestRecord],
    spread: Spread | None,
) -> Verdict:
    result: GateResult = check_equality(
        reference,
        seen,
        page_size=spec.page_size,
        spread=spread,
        # Plain with a small pool recomputes what the reference reuses, no fault.
        min_exact_fraction=0.0 if spread is None else spec.gate.min_exact_fraction,
        must_cover=system.must_cover,
    )
    return Verdict(
        result.passed,
        result.summary(),
        result.exact_fraction,
        dict(result.exact_tokens_by_tier),
    )
