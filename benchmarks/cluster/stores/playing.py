"""Plays the steps: everyone computes, all rest, everyone is asked, one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.cluster.running import Cluster
from sgl_tiered_workloads.harness.turns import rotated
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS
from stores.arms import RECOMPUTE, Arm
from stores.loads import ANSWER_TOKENS, RESTART_AT, Step, asks

__all__ = ["Played", "play", "warm_up"]

REST_S = 0.3
"""Between a computation and what is measured after it, so that its copies are made."""
_WARM_TOKENS, _WARM_REST_S = 512, 1.0


@dataclass(slots=True)
class Played:
    """What one arm has answered.

    Attributes:
        asked: what was asked, in order.
        computed: the computations.
        num_restarts: of servers, in the middle.
    """

    asked: list[RequestRecord] = field(default_factory=list)
    computed: list[RequestRecord] = field(default_factory=list)
    num_restarts: int = 0


async def play(
    cluster: Cluster,
    arms: Mapping[str, Arm],
    steps: Sequence[Step],
    generator: np.random.Generator,
    say: Callable[[str], None],
) -> dict[str, Played]:
    """Let all arms do the same steps, in turns; one request runs at a time.

    After half of the asks a server of each pair is killed and started again.

    Args:
        cluster: in which all servers run.
        arms: by name.
        steps: of the schedule.
        generator: of what warms up the servers that were started again.
        say: takes progress lines.
    """
    played = {name: Played() for name in arms}
    restart_at = int(RESTART_AT * len(asks(steps)))
    num_asked = 0
    for number, step in enumerate(steps):
        for name, arm in rotated(list(arms.items()), number):
            if name != RECOMPUTE:
                url = cluster.url(arm.members[step.place].name)
                played[name].computed.append(await _send(url, step.compute, number))
        if step.ask is None:
            continue
        await asyncio.sleep(REST_S)
        for name, arm in rotated(list(arms.items()), number):
            # Where nothing is shared, there is one server.
            place = (1 - step.place) % len(arm.members)
            url = cluster.url(arm.members[place].name)
            played[name].asked.append(await _send(url, step.ask, number))
        num_asked += 1
        if num_asked == restart_at:
            await _restart(cluster, arms, played, generator)
            say(f"a server of each pair was started again after {num_asked} asks")
        elif num_asked % 50 == 0:
            say(f"{num_asked} asks each")
    return played


async def warm_up(cluster: Cluster, arm: Arm, generator: np.random.Generator) -> None:
    """Let servers compute, hit, decode and fetch from each other; nothing of it counts.

    Args:
        cluster: in which they run.
        arm: whose servers.
        generator: of prompts that are in no schedule.
    """
    prompts = {
        member.name: random_tokens(generator, _WARM_TOKENS, VOCAB_TOKENS)
        for member in arm.members
    }
    for name, prompt in prompts.items():
        for _ in range(2):
            await _send(cluster.url(name), _warming(prompt), 0)
    await asyncio.sleep(_WARM_REST_S)
    for name in prompts:
        for other, prompt in prompts.items():
            if other != name:
                await _send(cluster.url(name), _warming(prompt), 0)


def _warming(prompt: tuple[int, ...]) -> PlannedRequest:
    return PlannedRequest("warm.n0.compute", prompt, ANSWER_TOKENS)


async def _restart(
    cluster: Cluster,
    arms: Mapping[str, Arm],
    played: Mapping[str, Played],
    generator: np.random.Generator,
) -> None:
    for name, arm in arms.items():
        if len(arm.members) == 1:
            continue
        member = arm.members[-1].name
        cluster.kill(member)
        await asyncio.to_thread(cluster.restart, member)
        await warm_up(cluster, arm, generator)
        played[name].num_restarts += 1


async def _send(url: str, request: PlannedRequest, order: int) -> RequestRecord:
    async with StreamingClient(url) as client:
        return await client.send(request, order)
