"""Measures a running server by sending it requests: prefill, decode, links, caching.

Prompts are random, so that nothing is cached but what a point needs. Each part has a
share of the time; what does not fit into it is left out and said. Every point waits
until the server copies nothing, so that the copies of one do not slow the next down.
The links are what the server itself counts on each edge (``GET /tiered/stats``).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.caching_fitting import CachingSample
from sgl_tiered.cost.fitting import DecodeSample, LinkSample, PrefillSample
from sgl_tiered.errors import ConfigError

__all__ = ["Limits", "Measured", "Measurer", "Server"]

_TINY_TOKENS = 4
_FAST_LENGTHS = (16, 64, 128, 256, 512, 1024, 2048)
_LONG_LENGTHS = (4096, 8192, 16384, 32768)
_PREFILL_BATCHES = ((4, 64), (8, 128), (4, 256))
_AFTER_CONTEXT = (64, 256, 1024)
_DECODE_POINTS = (
    *((1, 64), (1, 512), (8, 64), (4, 512), (1, 2048), (4, 64), (2, 512)),
    *((16, 64), (2, 64), (2, 2048), (8, 512), (4, 2048), (16, 512)),
)
"""Requests and tokens of each: the first few alone tell all three coefficients."""
_DECODE_TOKENS = 17
_LINK_PAGES = (4, 16, 48, 96)
_CACHED_POINTS = (
    *((1, 1024, 0.5), (1, 512, 0.9), (4, 256, 0.5), (1, 1536, 0.9), (1, 256, 0.25)),
    *((4, 256, 0.9), (1, 1536, 0.25), (1, 512, 0.5), (2, 512, 0.75)),
)
"""Requests, tokens of each, share of them that is cached."""
_REPEATS = 3
_MANY_REPEATS = 7
_LINK_REPEATS = 5
_SLOW_POINT_S = 1.0
_QUIET_POLLS = 3
_POLL_S = 0.03
_QUIET_TIMEOUT_S = 10.0
_SHARES = {"prefill": 0.45, "decode": 0.2, "links": 0.2, "caching": 0.15}
_FOREIGN_SHARE = 0.02
_FIRST_TOKEN_GUESS_S = 1e-3
_LONGER = 1.5

Edge = tuple[str, str]


class Server(Protocol):
    """What is measured; a real one over HTTP, or a synthetic one in tests."""

    def send(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        """Send requests as one message, wait for all of them."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return ``GET /tiered/stats`` of the first scheduler."""
        ...

    def drop(self, tier: str) -> bool:
        """Forget the pages of a tier; False where the server is busy."""
        ...

    def now_s(self) -> float:
        """Return a monotonic time."""
        ...

    def rest_s(self, seconds: float) -> None:
        """Wait."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt may be, in tokens."""

    vocab_tokens: int
    pool_tokens: int
    context_tokens: int
    page_tokens: int
    chunk_tokens: int | None

    @property
    def most_tokens(self) -> int:
        """Tokens that requests may have in flight: half of the pool."""
        return min(self.context_tokens - 2 * _DECODE_TOKENS, self.pool_tokens // 2)

    def num_passes(self, new_tokens: int) -> int:
        """Return the forward passes that this many new tokens take."""
        if self.chunk_tokens is None:
            return 1
        return -(-new_tokens // self.chunk_tokens)


@dataclass(slots=True)
class Measured:
    """All points, and what a reader of the figures must know, in sentences."""

    prefill: list[PrefillSample] = field(default_factory=list)
    decode: list[DecodeSample] = field(default_factory=list)
    links: dict[Edge, list[LinkSample]] = field(default_factory=dict)
    caching: list[CachingSample] = field(default_factory=list)
    tiny_s: float | None = None
    tiny_tokens: int = _TINY_TOKENS
    notes: list[str] = field(default_factory=list)


class Measurer:
    """Measures one server.

    Args:
        server: what is measured; nobody else should use it meanwhile.
        limits: of its prompts.
        rng: for the prompts.
        budget_s: time that the whole may take; a single point may overrun it.
        peer: another server of the same pool, whose KV this one may pull; or None.
    """

    def __init__(
        self,
        server: Server,
        limits: Limits,
        rng: np.random.Generator,
        budget_s: float,
        peer: Server | None = None,
    ) -> None:
        self._server = server
        self._peer = peer
        self._limits = limits
        self._rng = rng
        self._budget_s = budget_s
        # Of the longest prompt computed whole so far, to know what the next will take.
        self._token_s = _FIRST_TOKEN_GUESS_S
        self._longest_tokens = 0
        self._sent_tokens = 0
        self._measured = Measured()

    def run(self) -> Measured:
        """Measure everything."""
        before = self._tokens_seen()
        for num_tokens in (_TINY_TOKENS, 64, 512):
            # The first of a size pays for what is made on demand.
            self._send_one(self._fresh(min(num_tokens, self._limits.most_tokens)))
        self._prefill(self._deadline("prefill"))
        self._decode(self._deadline("decode"))
        self._links(self._deadline("links"))
        self._caching(self._deadline("caching"))
        seen = self._tokens_seen() - before
        if seen > self._sent_tokens * (1 + _FOREIGN_SHARE):
            self._measured.notes.append(
                f"The server saw {seen:.0f} prompt tokens and {self._sent_tokens} were "
                "ours: somebody else used it, so the figures are too high."
            )
        return self._measured

    def _deadline(self, part: str) -> float:
        return self._server.now_s() + self._budget_s * _SHARES[part]

    def _prefill(self, deadline_s: float) -> None:
        limits, most = self._limits, self._limits.most_tokens
        times = [self._first_token(self._fresh(_TINY_TOKENS))[0] for _ in range(5)]
        self._measured.tiny_s = statistics.median(times)
        page = limits.page_tokens
        contexts = sorted({most // 8 // page * page, most // 2 // page * page} - {0})
        points = [(0, n) for n in _FAST_LENGTHS]
        points += [(c, n) for c in contexts for n in _AFTER_CONTEXT]
        if limits.chunk_tokens is not None:
            # Two passes and three tell what a pass costs.
            points += [(0, round(limits.chunk_tokens * x)) for x in (1.5, 2.5)]
        points += [(0, n) for n in _LONG_LENGTHS]
        for batch, new in _PREFILL_BATCHES:
            if batch * new <= most:
                self._prefill_batch_point(batch, new)
        left_out = []
        prefix: tuple[int, ...] = ()
        for context, new in points:
            if context + new > most:
                continue
            known = len(prefix) == context
            to_compute = _REPEATS * new + (0 if known else context)
            if self._server.now_s() + self._expected_s(to_compute) > deadline_s:
                left_out.append(f"{new} tokens after {context}")
                continue
            if context and not known:
                prefix = self._fresh(context)
                self._send_one(prefix)
            self._prefill_point(prefix if context else (), new)
        if left_out:
            self._measured.notes.append(
                f"Prefill: no time for {', '.join(left_out)}; longer prompts than "
                "those measured are extrapolated."
            )

    def _prefill_point(self, prefix: tuple[int, ...], new: int) -> None:
        """Take the median of a few prompts that reuse ``prefix``."""
        found: dict[tuple[int, int], list[float]] = {}
        started_s = self._server.now_s()
        repeats = _MANY_REPEATS
        for count in range(_MANY_REPEATS):
            if count >= repeats:
                break
            seconds, record = self._first_token(prefix + self._fresh(new))
            slow = self._server.now_s() - started_s > _SLOW_POINT_S
            repeats = _REPEATS if slow else _MANY_REPEATS
            cached = record.cached_tokens
            if cached != record.cached_by_tier.get("device", cached):
                continue  # Part of the context had to be loaded.
            computed = len(record.prompt) - cached
            found.setdefault((cached, computed), []).append(seconds)
        for (context, computed), times in found.items():
            if 2 * len(times) > repeats:
                self._measured.prefill.append(
                    PrefillSample(
                        context,
                        computed,
                        self._limits.num_passes(computed),
                        statistics.median(times),
                    )
                )

    def _prefill_batch_point(self, batch: int, new: int) -> None:
        """Take the median of a few messages of several prompts."""
        times = []
        for _ in range(_REPEATS):
            self._quiet()
            records = self._send([self._fresh(new) for _ in range(batch)], 1)
            times.append(_last_first_token_s(records))
        num_passes = self._limits.num_passes(batch * new)
        self._measured.prefill.append(
            PrefillSample(0, new, num_passes, statistics.median(times), batch)
        )

    def _decode(self, deadline_s: float) -> None:
        left_out = []
        for batch, context in _DECODE_POINTS:
            num_tokens = batch * (context + _DECODE_TOKENS)
            if num_tokens > self._limits.most_tokens:
                continue
            if self._server.now_s() + self._expected_s(num_tokens) > deadline_s:
                left_out.append(f"{batch} requests of {context}")
                continue
            self._decode_point(batch, context)
        if left_out:
            self._measured.notes.append(f"Decode: no time for {', '.join(left_out)}.")

    def _decode_point(self, batch: int, context: int) -> None:
        """Compare long answers with answers of one token, to prompts already cached.

        Not the times between tokens: a client that was away reads several at once.
        """
        prompts = [self._fresh(context) for _ in range(batch)]
        self._send(prompts, 1)
        short_s: list[float] = []
        long_s: list[float] = []
        for _ in range(_REPEATS):
            for num_tokens, times in ((1, short_s), (_DECODE_TOKENS, long_s)):
                self._quiet()
                records = self._send(prompts, num_tokens)
                ends_s = max(record.started_s + record.e2e_s for record in records)
                times.append(ends_s - min(record.started_s for record in records))
        num_steps = _DECODE_TOKENS - 1
        step_s = (statistics.median(long_s) - statistics.median(short_s)) / num_steps
        if step_s <= 0:
            self._measured.notes.append(
                f"Decode: {batch} requests of {context} tokens took no time that could "
                "be told from noise."
            )
            return
        self._measured.decode.append(
            DecodeSample(batch, batch * (context + _DECODE_TOKENS / 2), step_s)
        )

    def _links(self, deadline_s: float) -> None:
        media = self._server.stats()["media"]
        lower = [name for name in ("host", "cxl", "disk") if name in media]
        page = self._limits.page_tokens
        for repeat in range(_LINK_REPEATS):
            for num_pages in _LINK_PAGES:
                num_tokens = num_pages * page + page // 2 + 1
                expected_s = self._expected_s(3 * num_tokens)
                late = self._server.now_s() + expected_s > deadline_s
                if num_tokens > self._limits.most_tokens or (late and repeat):
                    continue
                prompt = self._fresh(num_tokens)
                for _ in range(2):
                    # A server that has stopped copying copies what comes again.
                    self._link_point(prompt, ())
                for depth in range(len(lower)):
                    # What is above a tier is forgotten, so that the tier is read.
                    self._link_point(prompt, ("device", *lower[:depth]))
        for edge, points in self._measured.links.items():
            self._measured.links[edge] = _medians(points)
        wanted = [*pairwise(["device", *lower])]
        # A page from disk is staged in host memory.
        wanted += [(name, "host" if name == "disk" else "device") for name in lower]
        for source, target in wanted:
            if (source, target) not in self._measured.links:
                self._measured.notes.append(
                    f"Links: the server moved nothing from {source} to {target}: its "
                    "planner found it cheaper to recompute, or a policy forbids it. "
                    "With --tiered-load-policy always it loads whatever it finds."
                )

    def _link_point(self, prompt: tuple[int, ...], drop: Sequence[str]) -> None:
        """Send a prompt after forgetting tiers; note what moved on every edge."""
        for tier in drop:
            self._drop(tier)
        before = self._quiet()
        self._send_one(prompt)
        after = self._quiet()
        for name, counters in after.items():
            old: Mapping[str, float] = before.get(name, {})
            ops, num_bytes, seconds = (
                counters[key] - old.get(key, 0) for key in ("ops", "bytes", "seconds")
            )
            failed = counters["failures"] - old.get("failures", 0)
            if ops > 0 and num_bytes > 0 and seconds > 0 and not failed:
                source, _, target = name.partition("->")
                samples = self._measured.links.setdefault((source, target), [])
                samples.append(LinkSample(num_bytes / ops, seconds / ops))

    def _caching(self, deadline_s: float) -> None:
        """Prefill prompts whose beginnings lie in one place below the device each."""
        media = self._server.stats()["media"]
        lower = [name for name in ("host", "cxl", "disk") if name in media]
        places = [(tier, ("device", *lower[:i])) for i, tier in enumerate(lower)]
        if self._peer is not None:
            places.append(("peer", ("device", *lower)))
        page, left_out = self._limits.page_tokens, []
        for batch, num_tokens, share in _CACHED_POINTS:
            cached = int(share * num_tokens) // page * page
            if not cached or batch * num_tokens > self._limits.most_tokens:
                continue
            for tier, drops in places:
                expected_s = self._expected_s(3 * batch * num_tokens)
                if self._server.now_s() + expected_s > deadline_s:
                    left_out.append(f"{batch} of {num_tokens} tokens ({tier})")
                    continue
                self._cached_point(tier, drops, batch, num_tokens, cached)
        if left_out:
            self._measured.notes.append(f"Caching: no time for {', '.join(left_out)}.")

    def _cached_point(
        self, tier: str, drops: Sequence[str], batch: int, num_tokens: int, cached: int
    ) -> None:
        """Take the median of a few messages; what was not all found there is none."""
        # One token more, so that the last page is cached whole.
        beginnings = [self._fresh(cached + 1) for _ in range(batch)]
        for _ in range(2):
            # A server that has stopped copying copies what comes again.
            self._send(beginnings, 1, self._peer if tier == "peer" else None)
        times = []
        for _ in range(_REPEATS):
            self._quiet()
            for dropped in drops:
                self._drop(dropped)
            rests = [self._fresh(num_tokens - cached) for _ in beginnings]
            prompts = [a[:cached] + b for a, b in zip(beginnings, rests, strict=True)]
            records = self._send(prompts, 1)
            if all(r.cached_by_tier == {tier: cached} for r in records):
                times.append(_last_first_token_s(records))
        if 2 * len(times) > _REPEATS:
            self._measured.caching.append(
                CachingSample(
                    num_tokens,
                    cached,
                    TierId[tier.upper()],
                    statistics.median(times),
                    self._limits.page_tokens,
                    batch,
                    self._limits.chunk_tokens,
                )
            )

    def _drop(self, tier: str) -> None:
        give_up_at_s = self._server.now_s() + _QUIET_TIMEOUT_S
        while not self._server.drop(tier):
            if self._server.now_s() > give_up_at_s:
                raise ConfigError(
                    "--url",
                    "the server is busy with other requests",
                    "calibrate a server that nobody else uses",
                )
            self._server.rest_s(_POLL_S)

    def _quiet(self) -> dict[str, Any]:
        """Wait until nothing is copied; return the counters of the edges."""
        give_up_at_s = self._server.now_s() + _QUIET_TIMEOUT_S
        edges: dict[str, Any] = self._server.stats()["edges"]
        same = 0
        while same < _QUIET_POLLS and self._server.now_s() < give_up_at_s:
            self._server.rest_s(_POLL_S)
            found: dict[str, Any] = self._server.stats()["edges"]
            same = same + 1 if found == edges else 0
            edges = found
        return edges

    def _expected_s(self, num_tokens: int) -> float:
        """Return what so many tokens may take; attention makes long prompts slower."""
        return _LONGER * self._token_s * num_tokens

    def _fresh(self, num_tokens: int) -> tuple[int, ...]:
        return random_tokens(self._rng, num_tokens, self._limits.vocab_tokens)

    def _first_token(self, prompt: tuple[int, ...]) -> tuple[float, RequestRecord]:
        self._quiet()
        record = self._send_one(prompt)
        return record.ttft_s, record

    def _send_one(self, prompt: tuple[int, ...]) -> RequestRecord:
        return self._send([prompt], 1)[0]

    def _send(
        self,
        prompts: Sequence[tuple[int, ...]],
        max_new_tokens: int,
        peer: Server | None = None,
    ) -> list[RequestRecord]:
        """Send one message to the server, or to its peer."""
        requests = [PlannedRequest("calibrate", p, max_new_tokens) for p in prompts]
        if peer is None:
            self._sent_tokens += sum(len(prompt) for prompt in prompts)
        records = (peer or self._server).send(requests)
        for record in records:
            if record.error is not None:
                raise ConfigError(
                    "--url",
                    f"the server failed a request ({record.error})",
                    "look at its log",
                )
        if len(records) == 1 and records[0].recomputed_tokens > self._longest_tokens:
            self._longest_tokens = records[0].recomputed_tokens
            self._token_s = records[0].ttft_s / self._longest_tokens
        return records

    def _tokens_seen(self) -> float:
        return float(self._server.stats()["counters"].get("tokens_total", 0))


def _last_first_token_s(records: Sequence[RequestRecord]) -> float:
    """Return the time from sending a message to its last request's first token."""
    started_s = min(record.started_s for record in records)
    return max(record.started_s + record.ttft_s for record in records) - started_s


def _medians(points: Sequence[LinkSample]) -> list[LinkSample]:
    """Return one point per size, smallest first."""
    by_size: dict[float, list[float]] = {}
    for point in points:
        by_size.setdefault(point.num_bytes, []).append(point.seconds)
    return [
        LinkSample(num_bytes, statistics.median(times))
        for num_bytes, times in sorted(by_size.items())
    ]
