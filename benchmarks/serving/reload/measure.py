"""Reloads on real servers, one server at a time: answers compared, then times taken.

First plain SGLang: its answers, and how long it takes to compute a prompt, by which the
link is set. Then each arm has a server of its own, in one order and in the other, so
that a slow moment of the machine does not decide. On the first dense server and on the
first that drops tokens, answers to who does not allow it are compared with plain's, bit
for bit; answers to who allows it must be seen to differ.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from movement.tools import answered, drop, stats, use_policy
from reload.arms import (
    ALLOW,
    ARMS,
    COMPARED,
    LOAD_POLICY,
    REFERENCE_POOL_TOKENS,
    REFUSE,
    Arm,
    ModelFacts,
    device_of,
    link_bytes_per_s,
    link_flag,
    spec_of,
)
from reload.results import Findings, block_of
from reload.schedule import PAGE, Scale, Schedule
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.gate import (
    NegativeControlError,
    check_equality,
    negative_control,
)
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.harness.turns import bytes_by_edge, settle
from sgl_tiered_workloads.records import RequestRecord, make_header, write_records
from sgl_tiered_workloads.server import ServerSpec, SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.systems import plain_spec

__all__ = ["Options", "Reloads", "arms_of_repeat"]

_EDGE = "host->device"
_TRIED = 3
"""Requests that are computed, and for which the planner chooses."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, and where.

    Attributes:
        model: its folder.
        out: logs and records go there.
        scale: how much.
        minutes: after which only the arms that are compared go on.
        first_port: of the servers; None for any free ones.
    """

    model: Path
    out: Path
    scale: Scale
    minutes: float = 20.0
    first_port: int | None = None


def arms_of_repeat(repeat: int, arms: Sequence[Arm] = ARMS) -> list[Arm]:
    """Return the arms there, and back in the next repeat."""
    return list(arms if repeat % 2 == 0 else reversed(arms))


class Reloads:
    """One run.

    Args:
        options: what to measure.
        say: takes progress lines.
    """

    def __init__(self, options: Options, say: Callable[[str], None] = print) -> None:
        self._options = options
        self._begin_s = time.monotonic()
        self._print = say
        self._model = ModelFacts.of(options.model)
        self._schedule = Schedule(self._model.vocabulary)
        self._reference: list[RequestRecord] = []
        self._link = 0.0
        self.findings = Findings()

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        self._print(f"[{time.monotonic() - self._begin_s:5.0f} s] {text}")

    async def run(self) -> Findings:
        """Measure all arms; return what was seen.

        Raises:
            ServerStartError: a server did not start.
            RuntimeError: a request failed.
        """
        options = self._options
        device = device_of(options.model)
        plain = plain_spec(device.with_pool(REFERENCE_POOL_TOKENS), "reload-plain")
        async with self._served(plain) as server:
            await self._learn(server)
        arms = ARMS
        if options.scale.is_quick:
            arms = tuple(arm for arm in ARMS if arm.name in COMPARED)
        for repeat in range(options.scale.repeats):
            for arm in arms_of_repeat(repeat, arms):
                if arm.name not in COMPARED and self._left_s < 0:
                    self.say(f"no time for {arm.name}")
                    continue
                spec = spec_of(arm, device, self._model, self._link)
                async with self._served(spec) as server:
                    await self._arm(server, arm, repeat)
        return self.findings

    @property
    def _left_s(self) -> float:
        return 60.0 * self._options.minutes - (time.monotonic() - self._begin_s)

    @asynccontextmanager
    async def _served(self, spec: ServerSpec) -> AsyncIterator[SglangServer]:
        """Let one server run, warmed up and empty."""
        options = self._options
        logs = options.out.resolve() / "logs"
        warm_up = PlannedRequest("warm", tuple(range(100, 900)), 4)
        self.say(spec.name)
        with Fleet({spec.name: spec}, logs, options.first_port, self.say) as fleet:
            await fleet.only([spec.name], warm_up)
            yield fleet.servers[spec.name]

    # -- Plain SGLang ----------------------------------------------------------

    async def _learn(self, server: SglangServer) -> None:
        """Take plain SGLang's answers and the time of computing; set the link."""
        scale, schedule, facts = self._options.scale, self._schedule, self._model
        requests = self._gate_requests()
        self._reference = await self._ask(server, requests, logprobs=True)
        alone = [schedule.request("alone", n, 0) for n in range(scale.alone)]
        records = await self._ask(server, alone)
        computed_s = float(np.median([record.ttft_s for record in records]))
        num_bytes = schedule.prefix_tokens * facts.token_bytes
        self._link = link_bytes_per_s(num_bytes, computed_s)
        self.findings.dense_bytes = num_bytes
        self.findings.facts |= {
            "serving_model": self._options.model.name,
            "prefix_tokens": schedule.prefix_tokens,
            "tail_tokens": schedule.tail_tokens,
            "plain_ttft_s": round(computed_s, 4),
            "emulated_links": link_flag(self._link),
            "load_policy": LOAD_POLICY,
            "is_quick": scale.is_quick,
        }
        self.say(
            f"  plain computes {schedule.prefix_tokens} + {schedule.tail_tokens} "
            f"tokens in {computed_s:.3f} s; link throttled to "
            f"{self._link / 1e6:.2f} MB/s"
        )

    def _gate_requests(self) -> list[PlannedRequest]:
        """Return each prefix once, and then each again with other tails."""
        scale = self._options.scale
        num = scale.gate_prefixes * (1 + scale.gate_turns)
        return self._schedule.turns("gate", scale.gate_prefixes, num)

    # -- An arm ----------------------------------------------------------------

    async def _arm(self, server: SglangServer, arm: Arm, repeat: int) -> None:
        """Compare an arm's answers on its first server, and time its reloads."""
        if repeat == 0 and arm.name in COMPARED:
            await self._compare(server, arm)
        await self._time(server, arm, repeat)
        if repeat == 0 and arm.is_sparse:
            await self._count_rows(server, arm)
        if repeat == 0 and arm.wishes is None:
            await self._try_policies(server)

    async def _compare(self, server: SglangServer, arm: Arm) -> None:
        """Ask for plain SGLang's bits; who allows less must be seen to differ."""
        requests = self._gate_requests()
        wishes = REFUSE if arm.is_sparse else None
        records = await self._ask(
            server, requests, wishes, from_host=True, logprobs=True
        )
        result = check_equality(
            self._reference, records, page_size=PAGE, must_cover=("host",)
        )
        who = "refuse" if arm.is_sparse else "off"
        self.findings.identical[who] = result.passed
        self.say(f"  {who}: {result.summary()}")
        if not result.passed:
            self.findings.problems.append(f"serving, {who}: the gate is red")
        if not arm.is_sparse:
            return
        records = await self._ask(
            server, requests, ALLOW, from_host=True, logprobs=True
        )
        result = check_equality(
            self._reference, records, page_size=PAGE, min_exact_fraction=0.0
        )
        try:
            negative_control({"dropped tokens": result})
        except NegativeControlError as error:
            self.findings.problems.append(f"serving: {error}")
            return
        self.say(f"  who allows it is seen to differ: {result.differences[-1].reason}")
        self.findings.facts["allowed_answers_differ"] = len(
            {found.key for found in result.differences if found.position >= 0}
        )

    async def _time(self, server: SglangServer, arm: Arm, repeat: int) -> None:
        """Bring the prefixes in, and ask for each again and again."""
        scale, schedule = self._options.scale, self._schedule
        num = scale.prefixes
        first = schedule.turns("hit", num, num)
        # The device is dropped here too: that waits until the last one was stored.
        await self._ask(server, first, arm.wishes, from_host=True)
        warm = schedule.turns("hit", num, scale.warm, first=num)
        await self._ask(server, warm, arm.wishes, from_host=True)
        before = await self._loaded_bytes(server)
        hits = schedule.turns("hit", num, scale.hits, first=num + scale.warm)
        records = await self._ask(server, hits, arm.wishes, from_host=True)
        loaded = await self._loaded_bytes(server) - before
        block = block_of(arm.name, repeat, records, schedule.prefix_tokens, loaded)
        self.findings.blocks.append(block)
        self._write(server, block.arm, repeat, records)
        p50_s = float(np.median(block.ttft_s)) if block.ttft_s else float("nan")
        self.say(
            f"  {len(block.ttft_s)} reloads, TTFT p50 {p50_s * 1e3:.0f} ms, "
            f"{loaded / scale.hits / 1e6:.2f} MB each; {block.num_missed} others"
        )

    async def _count_rows(self, server: SglangServer, arm: Arm) -> None:
        """Compare the rows on the device after reloads for who refuses and allows."""
        used = {"refuse": 0, "allow": 0}
        for number in range(self._options.scale.room_prefixes):
            for word in used:
                wishes = {"lossy": word}
                first, again = (
                    self._schedule.request("room", number, turn) for turn in (0, 1)
                )
                await self._ask(server, [first], wishes, from_host=True)
                await self._ask(server, [again], wishes, from_host=True)
                await settle(server, None)
                state = await asyncio.to_thread(stats, server)
                used[word] += int(state["sparsity"]["rows_used"])
        share = used["allow"] / used["refuse"]
        self.findings.device_share[arm.name] = share
        self.say(f"  rows on the device after a reload: {share:.1%} of a dense one's")

    async def _try_policies(self, server: SglangServer) -> None:
        """Compute what could be loaded, and see what the planner would choose."""
        schedule, scale = self._schedule, self._options.scale
        done = scale.prefixes + scale.warm + scale.hits
        seen: dict[str, list[RequestRecord]] = {}
        for policy in ("never", "auto"):
            await asyncio.to_thread(use_policy, server, policy)
            requests = schedule.turns("hit", scale.prefixes, _TRIED, first=done)
            seen[policy] = await self._ask(server, requests, from_host=True)
            done += _TRIED
        computed_s = float(np.median([record.ttft_s for record in seen["never"]]))
        num_loads = sum(
            record.cached_by_tier.get("host", 0) > 0 for record in seen["auto"]
        )
        self.findings.facts |= {
            "computed_ttft_s": round(computed_s, 4),
            "planner_loads": f"{num_loads} of {_TRIED}",
        }
        self.say(
            f"  computed instead: TTFT {computed_s * 1e3:.0f} ms; the planner loads "
            f"{num_loads} of {_TRIED}"
        )

    # -- Private ---------------------------------------------------------------

    async def _ask(
        self,
        server: SglangServer,
        requests: Sequence[PlannedRequest],
        wishes: Mapping[str, str] | None = None,
        *,
        from_host: bool = False,
        logprobs: bool = False,
    ) -> list[RequestRecord]:
        """Send requests one by one; ``from_host``: each finds the device empty."""
        records = []
        for order, request in enumerate(requests):
            if from_host:
                await asyncio.to_thread(drop, server, "device")
            # A new client each: an idle connection may have been closed.
            async with StreamingClient(server.url, logprobs, wishes=wishes) as client:
                records.append(answered(await client.send(request, order)))
        return records

    async def _loaded_bytes(self, server: SglangServer) -> int:
        edges = await asyncio.to_thread(bytes_by_edge, server)
        return edges.get(_EDGE, 0)

    def _write(
        self,
        server: SglangServer,
        arm: str,
        repeat: int,
        records: Sequence[RequestRecord],
    ) -> None:
        """Write an arm's records; the prompts follow from the schedule."""
        facts: dict[str, Any] = {
            "flags": list(server.spec.flags),
            "repeat": repeat,
            **self.findings.facts,
        }
        short = [
            replace(record, prompt=(), prompt_tokens=len(record.prompt), repeat=repeat)
            for record in records
        ]
        path = self._options.out / "records" / f"{arm}-{repeat}.jsonl"
        write_records(path, make_header(server.spec.name, facts), short)
