"""What a soak sends: rounds of requests, drawn from a seed, and how they are sent.

Every request has an id and, but for those that come again, a salt that nobody had
before. A round holds four kinds:

- *fresh*: a prompt under a salt of its own;
- *again*: prompt and salt of a former round, whose pages have gone down by then;
- *dropped*: a long answer; the client closes the connection at some moment;
- *aborted*: a long answer, ended by ``/abort_request`` at some moment.

All servers get the same requests in the same order, at most ``CONCURRENCY`` at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

__all__ = ["Drawer", "Kind", "Planned", "decoders", "send_round"]

CONCURRENCY = 8
NUM_FRESH, NUM_AGAIN, NUM_DROPPED, NUM_ABORTED = 150, 40, 5, 5
PROMPT_TOKENS = (24, 200)
"""Least and most; drawn evenly."""
ANSWER_TOKENS = 3
LONG_ANSWER_TOKENS = 300
MOST_DELAY_S = 0.5
"""Until a request is aborted; drawn evenly, so that it hits every state."""
ROUNDS_BACK = (2, 8)
"""How long ago prompts that come again were sent, at least and at most."""
BATCH, STEPS = 4, 192
DECODER_TOKENS = 16
TIMEOUT_S = 120.0


class Kind(Enum):
    """What is done with a request."""

    FRESH = "fresh"
    AGAIN = "again"
    DROPPED = "dropped"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Planned:
    """A request of a round.

    Attributes:
        request: what is sent; its key is its id on the server.
        kind: what is done with it.
        after_s: when it is aborted, from its sending.
        again_of: id of the same prompt in a former round; empty for none.
    """

    request: PlannedRequest
    kind: Kind
    after_s: float = 0.0
    again_of: str = ""

    @property
    def is_answered(self) -> bool:
        """Whether its whole answer is waited for."""
        return self.kind in (Kind.FRESH, Kind.AGAIN)


class Drawer:
    """Draws rounds; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._number = 0
        self._former: deque[list[PlannedRequest]] = deque(maxlen=ROUNDS_BACK[1])

    def next_round(self) -> list[Planned]:
        """Return the next round, in the order in which it is to be sent."""
        drawn = [self._new(Kind.FRESH, ANSWER_TOKENS) for _ in range(NUM_FRESH)]
        fresh = [each.request for each in drawn]
        for kind, num in ((Kind.DROPPED, NUM_DROPPED), (Kind.ABORTED, NUM_ABORTED)):
            drawn += [self._new(kind, LONG_ANSWER_TOKENS) for _ in range(num)]
        drawn += self._again()
        self._former.append(fresh)
        self._generator.shuffle(drawn)
        return drawn

    def _new(self, kind: Kind, num_answer: int) -> Planned:
        least, most = PROMPT_TOKENS
        num_tokens = int(self._generator.integers(least, most + 1))
        prompt = random_tokens(self._generator, num_tokens, VOCAB_TOKENS)
        name = self._name()
        request = PlannedRequest(name, prompt, num_answer, salt=f"salt-{name}")
        delay_s = float(self._generator.uniform(0.0, MOST_DELAY_S))
        return Planned(request, kind, delay_s)

    def _again(self) -> list[Planned]:
        # The youngest stay on the device; of the others each is asked once more.
        old = list(self._former)[: 1 - ROUNDS_BACK[0]]
        if not old:
            return []
        found = []
        for _ in range(NUM_AGAIN):
            requests = old[self._generator.integers(len(old))]
            former = requests[self._generator.integers(len(requests))]
            request = replace(former, key=self._name())
            found.append(Planned(request, Kind.AGAIN, again_of=former.key))
        return found

    def _name(self) -> str:
        self._number += 1
        return f"soak-{self._number:08d}"


def decoders(seed: int, number: int) -> list[PlannedRequest]:
    """Return requests that decode together, ``BATCH`` of them, ``STEPS`` steps long."""
    generator = np.random.default_rng([seed, number])
    names = [f"decode-{number}-{place}" for place in range(BATCH)]
    return [
        PlannedRequest(
            name,
            random_tokens(generator, DECODER_TOKENS, VOCAB_TOKENS),
            STEPS + 1,
            salt=f"salt-{name}",
        )
        for name in names
    ]


async def send_round(
    server: SglangServer, planned: Sequence[Planned]
) -> dict[str, RequestRecord]:
    """Send a round to one server; return what was answered, by id.

    What was to be aborted has no record, however it ended.
    """
    found: dict[str, RequestRecord] = {}
    waiting = iter(enumerate(planned))
    async with StreamingClient(server.url, timeout_s=TIMEOUT_S) as client:

        async def user() -> None:
            for order, each in waiting:
                sending = client.send_batch([each.request], order, named=True)
                if each.is_answered:
                    (found[each.request.key],) = await sending
                else:
                    await _end_early(client, server, each, asyncio.create_task(sending))

        await asyncio.gather(*(user() for _ in range(CONCURRENCY)))
    return found


async def _end_early(
    client: StreamingClient,
    server: SglangServer,
    planned: Planned,
    sent: asyncio.Task[list[RequestRecord]],
) -> None:
    await asyncio.wait([sent], timeout=planned.after_s)
    if planned.kind is Kind.ABORTED:
        body = {"rid": planned.request.key}
        async with client.session.post(server.url + "/abort_request", json=body) as got:
            await got.read()
    else:
        sent.cancel()
    await asyncio.wait([sent])
