"""The instances behind the router: added, probed, drained, removed while it serves.

A probe asks for the load often and for the health now and then. An instance whose port
refuses a connection is down at once and what it held is forgotten: its process is gone.
One that merely does not answer in time is down after some failures and keeps its part
of the tree: its process may only be busy. Requests that wait for their first byte there
are given up in either case, so that another instance can serve them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import aiohttp
import msgspec
import zmq.asyncio

from sgl_tiered.core.clock import Clock
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.routing.base import PLACES
from sgl_tiered.router.attempt import is_refusal, read_whole
from sgl_tiered.router.board import LoadBoard
from sgl_tiered.router.config import KINDS, InstanceConfig, RouterConfig
from sgl_tiered.router.feed import EventFeed, FeedSource
from sgl_tiered.router.instances import Instance, LoadReport
from sgl_tiered.router.metrics import RouterMetrics
from sgl_tiered.router.supervised import supervised
from sgl_tiered.router.tree import PromptTree

__all__ = ["Fleet", "sources_of"]

_LOG = logging.getLogger(__name__)
_REPORTS_KEPT = 5
"""A load report counts for so many intervals."""
_MAX_TOLD_BYTES = 16 * 2**20
"""Of what an instance tells of itself."""
_MAX_LOAD = 2**48
"""Requests or tokens in a report: loads of all instances can be added up."""


class Fleet:
    """All instances, and a prompt tree per kind. Lives in one event loop.

    Args:
        config: of the router.
        session: for probes; its headers carry the instances' key.
        metrics: where events and loads are counted.
        clock: time base of loads and of assumptions.
    """

    def __init__(
        self,
        config: RouterConfig,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        clock: Clock,
    ) -> None:
        self.trees = {kind: PromptTree() for kind in KINDS}
        self._config = config
        self._session = session
        self._metrics = metrics
        self._clock = clock
        self._context = zmq.asyncio.Context()
        self._instances: dict[str, Instance] = {}
        max_age_s = _REPORTS_KEPT * config.load_interval_s
        self.boards = {
            kind: LoadBoard(tree, partial(self._of_kind, kind), self.load, max_age_s)
            for kind, tree in self.trees.items()
        }

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._instances.values()))

    def get(self, name: str) -> Instance | None:
        """Return the instance of this name."""
        return self._instances.get(name)

    def has(self, kind: str) -> bool:
        """Return whether there is an instance of a kind to which a request may go."""
        return bool(self.boards[kind].columns(self._clock.now()).instances)

    async def add(self, config: InstanceConfig) -> Instance:
        """Add an instance, probe it once, and follow it from then on.

        Raises:
            ConfigError: there is one of this name or of this address.
        """
        instance = self.put(config)
        await instance.probed.wait()
        return instance

    def put(self, config: InstanceConfig) -> Instance:
        """Add an instance; ``probed`` is set once it was asked for the first time.

        Raises:
            ConfigError: there is one of this name or of this address.
        """
        for other in self._instances.values():
            if config.name == other.name or config.url == other.config.url:
                raise ConfigError("--instance", f"{config.name} is there", "rename it")
        instance = Instance(config)
        instance.on_load = self._metrics.under_way.labels(config.name).set
        instance.on_change = self.boards[config.kind].note_load
        self._instances[config.name] = instance
        for source in config.sources:
            self._follow(instance, source)
        if not instance.holders:
            instance.holders.append(
                self._tree(instance).add_holder(config.name, self._config.page_tokens)
            )
        self._show(instance)

        def failed(task: str) -> None:
            self._metrics.fail(task)
            self._down(instance, is_gone=False)

        watching = supervised("watch", partial(self._watch, instance), failed)
        instance.tasks.append(asyncio.create_task(watching))
        return instance

    def drain(self, instance: Instance, *, is_draining: bool = True) -> None:
        """Send no further requests there, or do so again; those there go on."""
        instance.is_draining = is_draining
        self._show(instance)

    def lost(self, instance: Instance) -> None:
        """Note that its process is gone, or another one: what it held is forgotten.

        Who waits for a first byte there is given to another instance.
        """
        self._down(instance, is_gone=True)

    async def remove(self, instance: Instance) -> None:
        """Forget an instance; requests that it still answers go on to their end."""
        instance.is_draining = True
        # A task that was cancelled before it ran sets nothing.
        instance.probed.set()
        self._instances.pop(instance.name, None)
        self.boards[instance.config.kind].changed()
        await _cancel(instance.tasks)
        for holder in instance.holders:
            self._tree(instance).remove_holder(holder)
        instance.holders.clear()
        instance.on_load = instance.on_change = None
        self._metrics.forget(instance.name, instance.config.kind)

    async def close(self) -> None:
        """Remove all instances and close what was opened for them."""
        for instance in list(self._instances.values()):
            await self.remove(instance)
        self._context.destroy(linger=0)

    def failed(self, instance: Instance, *, is_gone: bool) -> None:
        """Note that a request failed there.

        Args:
            instance: where it failed.
            is_gone: its port refused the connection, so that no process is there. Else
                the next probe finds out.
        """
        if is_gone and self._instances.get(instance.name) is instance:
            self._down(instance, is_gone=True)

    def expire(self) -> None:
        """End the assumptions that are too old; called about once a second.

        Loads that are too old are given up as well, so that no request has to.
        """
        for kind, tree in self.trees.items():
            tree.expire(self._clock.now())
            self.boards[kind].columns(self._clock.now())
            self._metrics.nodes.labels(kind).set(len(tree))

    def load(self, instance: Instance) -> tuple[int, int]:
        """Return (prompt tokens that wait there, requests under way there)."""
        max_age_s = _REPORTS_KEPT * self._config.load_interval_s
        return instance.load(self._clock.now(), max_age_s)

    def state(self) -> dict[str, Any]:
        """Return what ``/router/state`` shows of the instances and of the trees."""
        shown = {}
        for instance in self._instances.values():
            tree = self._tree(instance)
            counts = [0] * len(PLACES)
            for holder in instance.holders:
                for place, pages in enumerate(tree.count(holder)):
                    counts[place] += pages
            shown[instance.name] = {
                **instance.state(*self.load(instance)),
                "page_tokens": instance.holders[0].page_tokens,
                "pages": dict(zip(PLACES, counts, strict=True)),
            }
        nodes = {kind: len(tree) for kind, tree in self.trees.items()}
        return {"instances": shown, "nodes": nodes}

    def _tree(self, instance: Instance) -> PromptTree:
        return self.trees[instance.config.kind]

    def _of_kind(self, kind: str) -> Iterator[Instance]:
        return (each for each in self._instances.values() if each.config.kind == kind)

    def _follow(self, instance: Instance, source: FeedSource) -> None:
        """Begin to follow a publisher of events."""
        tree = self._tree(instance)
        if instance.feeds or not instance.holders:
            holder = tree.add_holder(instance.name, self._config.page_tokens)
            instance.holders.append(holder)
        else:
            holder = instance.holders[0]  # that of a server without events, so far
        counter = self._metrics.events

        def count(what: str) -> None:
            counter.labels(instance.name, what).inc()

        feed = EventFeed(
            tree,
            holder,
            source,
            self._context,
            on_count=count,
            on_failure=self._metrics.fail,
        )
        instance.feeds.append(feed)
        instance.tasks.append(asyncio.create_task(feed.run()))

    async def _watch(self, instance: Instance) -> None:
        """Probe an instance until it is removed."""
        try:
            await self._probe(instance, with_health=True)
        finally:
            instance.probed.set()
        per_health = self._config.health_interval_s / self._config.load_interval_s
        rounds = 0
        while True:
            await asyncio.sleep(self._config.load_interval_s)
            rounds += 1
            is_doubtful = not instance.is_up or instance.num_failures > 0
            due = is_doubtful or rounds >= per_health
            if due:
                rounds = 0
            await self._probe(instance, with_health=due)

    async def _probe(self, instance: Instance, *, with_health: bool) -> None:
        try:
            if with_health:
                await self._get(instance, "/health")
            await self._ask_load(instance)
            wants_events = instance.config.discovers_events and not instance.feeds
            if with_health and wants_events:
                await self._discover(instance)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._miss(instance, error)
        except Exception as error:  # noqa: BLE001 - an answer may be anything
            self._metrics.refuse("answer")
            self._miss(instance, error)
        else:
            if with_health:  # a server that tells its load may be ill all the same
                instance.num_failures = 0
            if with_health and not instance.is_up:
                _LOG.info("instance %s is up", instance.name)
                instance.is_up = True
                self._show(instance)

    def _miss(self, instance: Instance, error: Exception) -> None:
        """Note that an instance did not answer, or not what one can believe."""
        instance.num_failures += 1
        is_gone = is_refusal(error)
        if is_gone or instance.num_failures >= self._config.max_failures:
            level = logging.WARNING if instance.is_up else logging.DEBUG
            _LOG.log(level, "%s does not answer as it should: %r", instance.name, error)
            self._down(instance, is_gone=is_gone)

    async def _get(self, instance: Instance, path: str) -> Any:
        """Return what a path answers: JSON, or None; raises for a status of 500 on."""
        timeout = aiohttp.ClientTimeout(total=self._config.health_timeout_s)
        url = instance.config.url + path
        async with self._session.get(
            url, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status >= 500:
                response.raise_for_status()
            if response.status != 200 or response.content_type != "application/json":
                return None
            return msgspec.json.decode(await read_whole(response, _MAX_TOLD_BYTES))

    async def _ask_load(self, instance: Instance) -> None:
        if not instance.tells_load:
            return
        asked_s = self._clock.now()
        instance.ask()
        told = await self._get(instance, "/v1/loads?include=core")
        report = _report(told, asked_s)
        # A server without that path says 404 for ever; one that starts may say so once.
        instance.tells_load = report is not None or not instance.is_up
        instance.take_report(report, self._clock.now())
        self.boards[instance.config.kind].note_report(instance)

    async def _discover(self, instance: Instance) -> None:
        """Ask a server where its events are; it may have none."""
        info = await self._get(instance, "/server_info")
        for source in sources_of(info, instance.config.host):
            self._follow(instance, source)

    def _down(self, instance: Instance, *, is_gone: bool) -> None:
        if instance.is_up:
            _LOG.warning("instance %s is down", instance.name)
        if is_gone:
            for holder in instance.holders:
                self._tree(instance).clear(holder)
            for feed in instance.feeds:
                feed.disconnected()
        instance.is_up = False
        instance.report = None
        instance.give_up()
        self._show(instance)

    def _show(self, instance: Instance) -> None:
        gauge = self._metrics.up.labels(instance.name, instance.config.kind)
        gauge.set(instance.is_available)
        self.boards[instance.config.kind].changed()


def sources_of(info: Any, host: str) -> tuple[FeedSource, ...]:
    """Return where a server publishes its events, by its ``/server_info``.

    Args:
        info: the parsed answer, of any shape.
        host: of the server's address; stands in for the wildcard that it binds.
    """
    told = info.get("kv_events") if isinstance(info, Mapping) else None
    if not isinstance(told, Mapping) or told.get("publisher") != "zmq":
        return ()
    base, ranks = told.get("endpoint_port_base"), told.get("dp_size", 1)
    replay, topic = told.get("replay_endpoint_port_base"), told.get("topic", "")
    if type(base) is not int or type(ranks) is not int or not isinstance(topic, str):
        return ()
    if not 0 < ranks <= 1024 or not 0 < base < 2**16 - ranks:
        return ()
    if type(replay) is int and not 0 < replay < 2**16 - ranks:
        return ()
    at = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    return tuple(
        FeedSource(
            f"{at}:{base + rank}",
            f"{at}:{replay + rank}" if type(replay) is int else None,
            topic,
        )
        for rank in range(ranks)
    )


def _report(told: Any, asked_s: float) -> LoadReport | None:
    """Return what ``/v1/loads`` tells; None where it tells none.

    Raises:
        ValueError: it tells a number that is none.
    """
    loads = told.get("loads") if isinstance(told, Mapping) else None
    if not isinstance(loads, list) or not loads:
        return None
    num_requests = waiting = 0
    for load in loads:
        if not isinstance(load, Mapping):
            return None
        for field in ("num_running_reqs", "num_waiting_reqs"):
            num_requests += _natural(load, field)
        waiting += _natural(load, "num_waiting_uncached_tokens")
    if max(num_requests, waiting) > _MAX_LOAD:
        raise ValueError("/v1/loads tells more requests or tokens than there can be")
    return LoadReport(asked_s, num_requests, waiting)


def _natural(load: Mapping[str, Any], field: str) -> int:
    value = load.get(field)
    if not isinstance(value, int | float):
        return 0
    if not abs(value) <= _MAX_LOAD:
        raise ValueError(f"/v1/loads tells {field} of {value!r}")
    return max(int(value), 0)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    tasks.clear()
