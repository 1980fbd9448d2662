"""Makes the fleet what it should be, whenever flags, registry or operators change it.

All changes take one way, with a registry or without one: they are put among the changes
(``wanted.py``), the whole is reckoned anew, and the fleet is made so. Lives in the
event loop; what waits for a registry is done by threads (``discovery.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sgl_tiered.errors import ConfigError
from sgl_tiered.router.access import Hosts
from sgl_tiered.router.config import InstanceConfig, RouterConfig
from sgl_tiered.router.discovery import Discovery
from sgl_tiered.router.fleet import Fleet
from sgl_tiered.router.instances import Instance
from sgl_tiered.router.metrics import RouterMetrics
from sgl_tiered.router.supervised import supervised
from sgl_tiered.router.wanted import (
    FLAG,
    REGISTRY,
    Change,
    Entry,
    wanted_instances,
)

__all__ = ["Following"]

_LOG = logging.getLogger(__name__)
_START_S = 5.0
"""For the first look at the registry; what comes later is added while it serves."""


class Following:
    """Keeps the fleet as it is wanted. ``start``, ``lead``, then ``close``.

    Args:
        config: of the router; without a registry nothing is noted or followed.
        fleet: to keep.
        given: instances of the flags.
        metrics: where it is shown who leads.
    """

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        given: Sequence[InstanceConfig],
        metrics: RouterMetrics,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._given = tuple(given)
        self._metrics = metrics
        self._hosts = Hosts(config, given)
        self._discovery: Discovery | None = None
        self._changes: Mapping[str, Change] = {}
        self._entries: Mapping[str, Entry] = {}
        self._troubles: tuple[str, ...] = ()
        self._adding = asyncio.Lock()
        self._applying = asyncio.Lock()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Put the first instances into the fleet, each asked once.

        Raises:
            ConfigError: two instances of the flags have one name or address.
        """
        found = wanted_instances(self._given, (), {})
        if found.troubles:
            raise ConfigError("--instance", found.troubles[0], "rename it")
        if self._config.registry is not None:
            loop = asyncio.get_running_loop()
            self._discovery = Discovery(
                self._config.registry,
                self._config.lease_s,
                lambda: _call(loop, self._news.set),
                self._metrics.fail,
            )
            self._metrics.show_registry(True)
            await asyncio.to_thread(self._discovery.start, _START_S)
        await self._apply()
        for instance in self._fleet:
            await instance.probed.wait()
        if self._discovery is not None:
            following = supervised("follow", self._follow, self._failed)
            self._task = asyncio.create_task(following)

    def lead(self, name: str, url: str) -> None:
        """Take part among the replicas, once it is known where this one serves."""
        if self._discovery is not None:
            self._discovery.lead(name, {"http": url})

    async def close(self) -> None:
        """Leave the registry; the fleet stays as it is."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._discovery is not None:
            await asyncio.to_thread(self._discovery.close)

    async def add(self, config: InstanceConfig, words: str) -> tuple[Instance, bool]:
        """Add an instance by request; returns it and whether that is noted.

        Raises:
            ConfigError: there is one of this name or of this address, or it is on a
                host that nobody allowed.
        """
        trouble = self._hosts.trouble(config)
        if trouble:
            self._metrics.refuse("host")
            raise ConfigError("instance", trouble, "start with --allow-host HOST")
        async with self._adding:
            for other in self._fleet:
                if config.name == other.name or config.url == other.config.url:
                    raise ConfigError(
                        "instance", f"{config.name} is there", "rename it"
                    )
            is_noted = await self._change({config.name: Change(words=words)})
        instance = self._fleet.get(config.name)
        if instance is None:
            raise ConfigError(
                "instance",
                f"{config.name} was left out: others changed the fleet as well",
                "see /router/state, and add it again",
            )
        await instance.probed.wait()
        return instance, is_noted

    async def remove(self, instance: Instance) -> bool:
        """Remove an instance, whoever named it; returns whether that is noted."""
        entry = self._entries.get(instance.name)
        changes: dict[str, Change] = {}
        if entry is None:  # it is on its way out
            return True
        if entry.source == FLAG:
            changes[instance.name] = Change(removed=True)
        elif entry.source != REGISTRY:
            changes[instance.name] = Change()
        if entry.member and entry.source != FLAG:
            changes[entry.member] = Change(removed=True, incarnation=entry.incarnation)
        return await self._change(changes)

    async def drain(self, instance: Instance, *, is_draining: bool = True) -> bool:
        """Send no further requests there, or do so again; returns whether it is noted.

        What the registry drains goes on draining: it will leave.
        """
        entry = self._entries.get(instance.name)
        if entry is None:  # it is on its way out
            return True
        known = self._known.get(instance.name, Change())
        incarnation = entry.incarnation if entry.source == REGISTRY else 0
        change = Change(words=known.words)
        if is_draining:
            change = Change(known.words, True, False, incarnation)
        return await self._change({instance.name: change})

    def state(self) -> dict[str, Any] | None:
        """Return what ``/router/state`` shows of the registry; None without one."""
        if self._discovery is None:
            return None
        return {**self._discovery.state(), "left_out": list(self._troubles)}

    def shown(self, name: str) -> dict[str, Any]:
        """Return what ``/router/state`` shows of an instance besides."""
        entry = self._entries.get(name)
        if entry is None:
            return {}
        return {"source": entry.source, "incarnation": entry.incarnation or None}

    @property
    def _known(self) -> Mapping[str, Change]:
        return self._changes if self._discovery is None else self._discovery.changes

    async def _change(self, changes: Mapping[str, Change]) -> bool:
        """Let changes count, and have them noted; returns whether all are."""
        if self._discovery is None:
            self._changes = {**self._changes, **changes}
        else:
            for name, change in changes.items():
                self._discovery.change(name, change)
        await self._apply()
        if self._discovery is None:
            return False
        noted = [
            await asyncio.to_thread(self._discovery.flush, name) for name in changes
        ]
        return all(noted)

    async def _follow(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            discovery = self._discovery
            assert discovery is not None
            self._metrics.show_registry(not discovery.trouble)
            self._metrics.show_leader(discovery.leader, leads=discovery.leads)
            await self._apply()

    def _failed(self, task: str) -> None:
        self._metrics.fail(task)
        self._news.set()  # what could not be applied is tried again

    async def _apply(self) -> None:
        """Make the fleet what it should be now."""
        async with self._applying:
            members = () if self._discovery is None else self._discovery.members
            self._hosts.name(each.endpoints.get("http", "") for each in members)
            found = wanted_instances(self._given, members, self._known, self._hosts)
            for trouble in found.troubles:
                if trouble not in self._troubles:
                    _LOG.warning("%s", trouble)
            former, self._entries = self._entries, found.entries
            self._troubles = found.troubles
            there = {(each.name, each.incarnation) for each in members}
            for instance in self._fleet:
                known = former.get(instance.name)
                lease = (known.member, known.incarnation) if known else ("", 0)
                has_ended = lease != ("", 0) and lease not in there
                await self._adjust(
                    instance, found.entries.get(instance.name), has_ended=has_ended
                )
            for name, entry in found.entries.items():
                instance = self._fleet.get(name) or self._fleet.put(entry.config)
                if instance.is_draining != entry.is_draining:
                    self._fleet.drain(instance, is_draining=entry.is_draining)

    async def _adjust(
        self, instance: Instance, entry: Entry | None, *, has_ended: bool
    ) -> None:
        """Take out what is not there any more, or what was known of it.

        Args:
            instance: that is in the fleet.
            entry: what it should be; None if it should not be there.
            has_ended: its lease is over: nobody is there, or somebody else.
        """
        if has_ended:
            _LOG.info("the lease of %s is over", instance.name)
            self._fleet.lost(instance)
        is_anew = has_ended and entry is not None and entry.source == REGISTRY
        if entry is None or entry.config != instance.config or is_anew:
            await self._fleet.remove(instance)


def _call(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call something on the loop from a thread; nothing where the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
