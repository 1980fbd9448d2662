"""The servers of a world: started, asked, struck and ended.

A rig hides how many servers answer: one (``Single``), two of a pool of which the second
pulls from the first (``Pooled``), or prefill and decode apart (``Apart``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.model import PRESETS
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerSpec, ServerStartError, SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec

from tests.e2e.conftest import Servers
from tests.e2e.disagg_support import Pair, pair_flags, start_pair
from tests.e2e.e2e_support import (
    PATIENCE_S,
    drop,
    edge,
    open_loop,
    sequential,
    settle,
    stats,
    wait_until,
)
from tests.e2e.test_peer import Pair as PoolPair
from tests.e2e.test_peer import members
from tests.e2e.test_tensor_parallel import on_two_ranks
from tests.equality.plan import World
from tests.equality.reference import Kind, Reference, device
from tests.faults.fault_support import faults
from tests.scenarios.scenario_support import record

__all__ = ["RefusedError", "Rig", "kind_of", "opened"]

ENV = {
    "SGL_TIERED_ALLOW_FAULTS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}
POOL_TOKENS, LAYERED_POOL_TOKENS = 1_536, 2_560
"""Hold two or three of the longest prompts; layer-wise KV stages in a part of it."""
_DECODE_TIMES = 4
"""How many times that a decode server holds, where prompts are to wait before it."""
_STAGED_TOKENS = 640
"""Of one layer, in each half of the staging memory."""
_TIER_BYTES, _LITTLE_BYTES, _DISK_BYTES = 32 * MB, 4 * MB, 128 * MB
_LOGPROBS = {"return_logprob": True, "top_logprobs_num": 5, "logprob_start_len": -1}
_MOST_AT_ONCE = 8
_TPOT_STEPS = (0.9, 1.0, 1.15, 1.35, 1.7, 2.2)
"""Targets of a crowd, in the world's own decode steps. A prompt is held for a decoder
that it would make late, but for none that is late anyway or has time to spare."""
_REFUSAL = re.compile(r"(?:ConfigError|error): (--[a-z].*)")


class RefusedError(Exception):
    """The product refuses this combination; says its sentence."""


class Rig(Protocol):
    """What a world needs of its servers.

    Attributes:
        tiers: that answers can have pages of.
        is_like_plain: requests that are sent one at a time are computed as by plain.
        is_killable: ``kill`` does something.
        outlives_kill: who is asked is not who is killed, and answers every request.
    """

    tiers: tuple[str, ...]
    is_like_plain: bool
    is_killable: bool
    outlives_kill: bool

    def ask(
        self, requests: Sequence[PlannedRequest], *, together: bool
    ) -> list[RequestRecord]:
        """Send requests, one after the other or all at once."""

    def fill(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        """Have prompts answered whose pages are to be reused later."""

    def leave_on(self, tier: str) -> None:
        """Forget every copy above a tier."""

    def struck(self, tier: str, text: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which faults are in force; no text removes the disk."""

    def kill(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        """Kill with these under way, and start again; return what came of them."""

    def evidence(self) -> dict[str, int]:
        """Return how much was done by each feature, by its name."""

    def flush(self) -> None:
        """Forget everything."""

    def stop(self) -> None:
        """End what runs; an AssertionError says that it broke."""

    def abandon(self) -> None:
        """End what runs, whatever its state."""


def kind_of(world: World) -> Kind:
    """Return which of plain SGLang's answers a world is compared with."""
    on = world.on
    return Kind("activations" in on, 2 if "ranks" in on else 1, "splits" in on)


@contextlib.contextmanager
def opened(world: World, reference: Reference, folder: Path) -> Iterator[Rig]:
    """Start a world's servers; whatever happens they are ended.

    Raises:
        RefusedError: the product does not start with these flags, and says why.
    """
    make = Apart if "pd" in world.on else Pooled if "pool" in world.on else Single
    rig: Rig | None = None
    try:
        try:
            rig = make(world, reference, folder)
        except ServerStartError as error:
            sentence = _refusal(error, folder)
            if sentence is None:
                raise
            raise RefusedError(sentence) from None
        yield rig
        rig.stop()
    finally:
        if rig is not None:
            rig.abandon()


class _Sender:
    """Sends requests; with admission a crowd brings targets that make it hold prompts.

    Args:
        world: what is on.
        reference: plain SGLang's answers, and the step that is taken for the world's
            until it was measured.
    """

    def __init__(self, world: World, reference: Reference) -> None:
        self._has_targets = "admission" in world.on
        self._step_s = reference.step_s

    def send(
        self,
        server: SglangServer,
        requests: Sequence[PlannedRequest],
        *,
        together: bool,
    ) -> list[RequestRecord]:
        """Send one after the other, or each at its time; return their records."""
        if not together:
            found = sequential(server, requests)
            steps = [one.tpot_s for one in found if one.error is None and one.tpot_s]
            if steps:
                self._step_s = statistics.median(steps)
            return found
        if not self._has_targets:
            return open_loop(server, requests)
        return asyncio.run(self._with_targets(server, requests))

    async def _with_targets(
        self, server: SglangServer, requests: Sequence[PlannedRequest]
    ) -> list[RequestRecord]:
        num = len(_TPOT_STEPS)

        async def group(place: int) -> list[RequestRecord]:
            wishes = {"tpot_s": _TPOT_STEPS[place] * self._step_s}
            async with StreamingClient(
                server.url, timeout_s=PATIENCE_S, wishes=wishes
            ) as client:
                return await client.run_open_loop(requests[place::num])

        found = await asyncio.gather(*map(group, range(num)))
        by_key = {one.key: one for some in found for one in some}
        return [by_key[request.key] for request in requests]


class Single:
    """One server, of one rank or two."""

    is_like_plain = True
    is_killable = True
    outlives_kill = False

    def __init__(self, world: World, reference: Reference, folder: Path) -> None:
        self.tiers = world.tiers
        self._world = world
        self._sender = _Sender(world, reference)
        self._disk = folder / "disk"
        self._servers = Servers(folder / "logs")
        kind = kind_of(world)
        tiers = _tiers(world, self._disk)
        features = _features(world, kind, reference)
        flags = (*_cxl(world), *features, *_queue(world))
        spec = tiered_spec(device(kind, _pool(world)), tiers, world.pair, flags, ENV)
        self._spec = _ranked(world, spec)
        try:
            self._server = self._servers.get(self._spec)
        except BaseException:
            self._servers.abandon()
            raise

    def ask(
        self, requests: Sequence[PlannedRequest], *, together: bool
    ) -> list[RequestRecord]:
        return self._sender.send(self._server, requests, together=together)

    def fill(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        return self.ask(requests, together=False)

    def leave_on(self, tier: str) -> None:
        drop(self._server, *_above(tier, self.tiers))

    def struck(self, tier: str, text: str) -> contextlib.AbstractContextManager[None]:
        if text:
            return faults(self._server, text)
        return _without_folder(self._disk)

    def kill(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        found: list[RequestRecord] = []
        server = self._server
        written = _written(server)
        _killed_under_load(server, requests, found, lambda: _written(server) > written)
        self._servers.abandon()
        self._server = self._servers.restart(self._spec)
        return found

    def evidence(self) -> dict[str, int]:
        return _evidence(self._world, [stats(self._server)])

    def flush(self) -> None:
        settle(self._server)
        self._server.flush_cache()

    def stop(self) -> None:
        self._servers.stop()

    def abandon(self) -> None:
        self._servers.abandon()


class Pooled:
    """Two servers of one pool: one computes, the other pulls and is asked."""

    is_like_plain = True
    is_killable = True
    outlives_kill = True

    def __init__(self, world: World, reference: Reference, folder: Path) -> None:
        self.tiers = (*world.tiers, "peer")
        self._world = world
        self._sender = _Sender(world, reference)
        self._disk = folder / "disk-of-b"
        kind = kind_of(world)
        features = (*_features(world, kind, reference), *_queue(world))

        def dress(spec: ServerSpec) -> ServerSpec:
            tiers = _cxl(world)
            if spec.name.endswith("-b"):
                tiers += _tiers(world, self._disk).flags
            size = ("--max-total-tokens", str(_pool(world)))
            flags = (*spec.flags, *device(kind, 0).flags, *size, *tiers, *features)
            return _ranked(world, replace(spec, flags=flags, env={**spec.env, **ENV}))

        self._pair = PoolPair(folder, kind.model(), dress)
        try:
            self._wait_for_both()
        except BaseException:
            self.abandon()
            raise

    def ask(
        self, requests: Sequence[PlannedRequest], *, together: bool
    ) -> list[RequestRecord]:
        return self._sender.send(self._pair.b, requests, together=together)

    def fill(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        found = sequential(self._pair.a, requests)
        settle(self._pair.a)
        return found

    def leave_on(self, tier: str) -> None:
        if tier == "peer":
            self.flush()
        else:
            drop(self._pair.b, *_above(tier, self._world.tiers))

    def struck(self, tier: str, text: str) -> contextlib.AbstractContextManager[None]:
        if text:
            return faults(self._pair.b, text)
        return _without_folder(self._disk)

    def kill(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        """Kill the one that is pulled from, with pulls under way; b serves on."""
        self.flush()
        found: list[RequestRecord] = []
        asked = threading.Thread(
            target=lambda: found.extend(open_loop(self._pair.b, requests)), daemon=True
        )
        pulled = edge(stats(self._pair.b), "peer->host")
        asked.start()
        wait_until(
            lambda: (
                edge(stats(self._pair.b), "peer->host") > pulled or not asked.is_alive()
            ),
            "a pull is under way",
        )
        os.killpg(self._pair.a.pid, signal.SIGKILL)
        asked.join(PATIENCE_S)
        self._pair.a.stop()
        self._pair.a = self._pair.start("a")
        self._wait_for_both()
        return found

    def evidence(self) -> dict[str, int]:
        return _evidence(self._world, [stats(self._pair.b)])

    def flush(self) -> None:
        settle(self._pair.b)
        self._pair.b.flush_cache()

    def stop(self) -> None:
        for server in (self._pair.a, self._pair.b):
            if server.exit_code() is not None:
                raise AssertionError(f"it died: {server.log_tail()}")
        self._pair.stop()

    def abandon(self) -> None:
        self._pair.stop()

    def _wait_for_both(self) -> None:
        for server in (self._pair.a, self._pair.b):
            wait_until(lambda s=server: len(members(s)) == 2, "both are in the pool")


class Apart:
    """A prefill and a decode server; an answer has pages of the tiers of either."""

    is_like_plain = False
    is_killable = False
    outlives_kill = False

    def __init__(self, world: World, reference: Reference, folder: Path) -> None:
        has_pool = "pool" in world.on
        self.tiers = (*world.tiers, "peer") if has_pool else world.tiers
        self._world = world
        kind = kind_of(world)
        every = [*pair_flags(3 if has_pool else 2), *_cxl(world)]
        if has_pool:
            every += ["--tiered-pool", f"file:{folder / 'pool'}"]
            every += ["--tiered-pd-returns", "always"]
        features = _features(world, kind, reference)
        # A decode server has no layer-wise KV: layers are sent to it whole.
        decode = _features(
            replace(world, features=tuple(world.on - {"layerwise"})), kind, reference
        )
        if "ranks" in world.on:
            every += ["--tp-size=2"]
        self._disks = [folder / "disk-prefill", folder / "disk-decode"]
        tiers = [_tiers(world, disk).flags for disk in self._disks]
        self._pair: Pair = start_pair(
            device(kind, _pool(world)),
            folder / "logs",
            every,
            (*tiers[0], *features, *_queue(world)),
            (*tiers[1], *decode, *self._room()),
            env=ENV,
        )

    def _room(self) -> tuple[str, ...]:
        """Return flags with which decode takes many prompts: else none wait before."""
        if not _queue(self._world):
            return ()
        size = str(_DECODE_TIMES * _pool(self._world))
        return ("--max-total-tokens", size, "--num-reserved-decode-tokens", "16")

    @property
    def _both(self) -> tuple[SglangServer, SglangServer]:
        return self._pair.prefill, self._pair.decode

    def ask(
        self, requests: Sequence[PlannedRequest], *, together: bool
    ) -> list[RequestRecord]:
        if not together:
            return [self._ask(request) for request in requests]
        with ThreadPoolExecutor(_MOST_AT_ONCE) as some:
            return list(some.map(self._ask, requests))

    def _ask(self, request: PlannedRequest) -> RequestRecord:
        try:
            prefill, decode = self._pair.ask(
                request.prompt, request.max_new_tokens, **_LOGPROBS
            )
        except (OSError, RuntimeError) as error:
            return RequestRecord(
                request.key, 0, request.prompt, 0.0, 0.0, error=str(error)
            )
        theirs = record(request.key, request.prompt, prefill)
        ours = record(request.key, request.prompt, decode)
        tiers = dict(ours.cached_by_tier)
        for tier, count in theirs.cached_by_tier.items():
            tiers[tier] = max(tiers.get(tier, 0), count)
        return replace(ours, cached_by_tier=tiers)

    def fill(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        return self.ask(requests, together=False)

    def leave_on(self, tier: str) -> None:
        if tier == "peer":
            # Decode has the prompts, and prefill nothing but a way to ask it.
            settle(self._pair.decode)
            drop(self._pair.decode, "device")
            drop(self._pair.prefill, "device", *self._world.tiers)
            return
        for server in self._both:
            drop(server, *_above(tier, self._world.tiers))

    @contextlib.contextmanager
    def struck(self, tier: str, text: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for server, disk in zip(self._both, self._disks, strict=True):
                one = faults(server, text) if text else _without_folder(disk)
                stack.enter_context(one)
            yield

    def kill(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        raise NotImplementedError("kills of pairs are in tests/cluster")

    def evidence(self) -> dict[str, int]:
        found = _evidence(self._world, [stats(server) for server in self._both])
        return found | {"pd": int(self._pair.transfers(self._pair.decode)["pages"])}

    def flush(self) -> None:
        for server in self._both:
            settle(server)
            server.flush_cache()

    def stop(self) -> None:
        self._pair.stop()

    def abandon(self) -> None:
        for server in self._both:
            server.stop()


def _features(world: World, kind: Kind, reference: Reference) -> tuple[str, ...]:
    """Return the flags of a world's features."""
    flags = ["--tiered-staging-size=8MB"]
    on = world.on
    token_bytes = _preset(kind).kv_bytes_per_token // kind.num_ranks
    layer_bytes = token_bytes // _preset(kind).num_layers
    if "splits" in on:
        # Reading a page takes as long as computing it: each half of a prompt is worth
        # as much, so that many are split.
        speed = int(token_bytes * reference.prefill_tokens_per_s)
        flags += [
            "--tiered-load-policy=auto",
            f"--tiered-emulate=disk:bandwidth={speed}",
        ]
    else:
        flags += ["--tiered-load-policy=always"]
    if "layerwise" in on:
        flags += [
            "--tiered-layerkv=on",
            "--tiered-layerkv-retain=0",
            "--tiered-layerkv-decode=stream",
            f"--tiered-layerkv-host-size={24_000 * kind.scale * token_bytes}",
            f"--tiered-layerkv-staging-size={2 * _STAGED_TOKENS * layer_bytes}",
        ]
    if "activations" in on:
        flags += ["--tiered-activations=0.5"]
    if "orders" in on:
        flags += ["--tiered-order=cost"]
    if "prefetch" in on:
        flags += ["--tiered-prefetch=car"]
        if world.fetches_to_device:
            flags += ["--tiered-prefetch-to=device"]
    if "admission" in on:
        flags += [
            "--tiered-admission=slo",
            "--tiered-slo-ttft=30",
            # Of requests that bring none.
            f"--tiered-slo-tpot={2.0 * reference.step_s:.4f}",
        ]
    return tuple(flags)


def _queue(world: World) -> tuple[str, ...]:
    """Return flags of the server that computes prompts, so that there is a queue."""
    on = world.on
    if not on & {"orders", "prefetch"}:
        return ()
    if on >= {"orders", "admission"}:
        # Two at a time begin and end together, and none decodes while others wait:
        # nobody is there to be held for. What is held makes a queue as well.
        return ()
    return ("--max-running-requests=2",)


def _preset(kind: Kind) -> Any:
    tiny = PRESETS["tiny"]
    return replace(tiny, num_kv_heads=tiny.num_heads) if kind.is_mha else tiny


def _pool(world: World) -> int:
    tokens = LAYERED_POOL_TOKENS if "layerwise" in world.on else POOL_TOKENS
    return tokens * kind_of(world).scale


def _times(world: World) -> int:
    """Return how many times the memory of a small world this one's pages take."""
    kind = kind_of(world)
    # Long prompts are half as many.
    return (2 if kind.is_mha else 1) * (3 if kind.is_long else 1)


def _tiers(world: World, disk: Path) -> Tiers:
    """Return host and disk; little of the host where the disk alone is below it."""
    has_disk = "disk" in world.tiers
    is_little = world.tiers == ("host", "disk")
    host_bytes = _times(world) * (_LITTLE_BYTES if is_little else _TIER_BYTES)
    return Tiers(host_bytes, disk if has_disk else None, _times(world) * _DISK_BYTES)


def _cxl(world: World) -> tuple[str, ...]:
    if "cxl" not in world.tiers:
        return ()
    size = _times(world) * _TIER_BYTES
    return ("--tiered-cxl=emulate:memory", f"--tiered-cxl-size={size}")


def _ranked(world: World, spec: ServerSpec) -> ServerSpec:
    return on_two_ranks(spec) if "ranks" in world.on else spec


def _above(tier: str, tiers: Sequence[str]) -> tuple[str, ...]:
    return ("device", *tiers[: tiers.index(tier)])


@contextlib.contextmanager
def _without_folder(folder: Path) -> Iterator[None]:
    """Remove the disk's folder; the server makes a new one."""
    shutil.rmtree(folder, ignore_errors=True)
    yield


def _written(server: SglangServer) -> int:
    """Return how many pages have come to the disk, from whatever is above it."""
    edges = stats(server)["edges"]
    return sum(int(edges[name]["pages"]) for name in edges if name.endswith("->disk"))


def _killed_under_load(
    server: SglangServer,
    requests: Sequence[PlannedRequest],
    found: list[RequestRecord],
    is_due: Any,
) -> None:
    """Kill a server while crowds of requests run; append what became of them."""
    over = threading.Event()

    def load() -> None:
        # Crowd after crowd, so that one is under way whenever the kill comes.
        while True:
            found.extend(open_loop(server, requests))
            if any(one.error is not None for one in found):
                break
        over.set()

    sender = threading.Thread(target=load, daemon=True)
    sender.start()
    wait_until(is_due, "pages are written")
    if over.is_set():
        raise AssertionError(f"a request failed before the kill: {found[-1].error}")
    os.killpg(server.pid, signal.SIGKILL)
    if not over.wait(PATIENCE_S):
        raise AssertionError("a request to a killed server never ended")
    sender.join(PATIENCE_S)


def _evidence(world: World, states: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return by feature how much of its work was done, over some servers."""

    def total(part: str, *names: str) -> int:
        found = (state.get(part) or {} for state in states)
        return sum(int(each.get(name, 0)) for each in found for name in names)

    counts = {
        "layerwise": total("layerkv", "layerkv_bytes_streamed"),
        "activations": total("layerkv", "layerkv_act_pages"),
        "orders": total("counters", "queue_rearranged"),
        "prefetch": total("counters", *_prefetched(world)),
        "admission": total("admission", "held"),
        "splits": total("counters", "decisions_split"),
        "pool": sum(edge(state, "peer->host") for state in states),
        "ranks": 2 if "ranks" in world.on else 0,
    }
    return {name: count for name, count in counts.items() if name in world.on}


def _prefetched(world: World) -> tuple[str, ...]:
    """Return what counts the pages of prefetch and of nothing else in a world.

    A decode server fetches what was sent to it, with prefetch or without.
    """
    fetched = ("fetched_pages",) if world.fetches_to_device else ()
    return ("promoted_pages", *fetched)


def _refusal(error: ServerStartError, folder: Path) -> str | None:
    """Return the product's sentence; None where it did not end with one."""
    if error.exit_code in (None, 0):
        return None
    # The first line of a log is the command, which has flags in it too.
    for log in sorted(folder.rglob("*.log")):
        for line in log.read_text(errors="replace").splitlines()[1:]:
            found = _REFUSAL.search(line)
            if found is not None:
                return found[1][:400]
    return None
