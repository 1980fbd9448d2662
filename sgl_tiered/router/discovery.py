"""What a pool's registry says, read and written by threads: members, changes, leader.

A registry is a file with a lock or an etcd behind HTTP: its calls wait, so none of them
is made on the event loop. One thread watches the members of the pool, and what replicas
of the router have noted; another keeps this replica's lease and asks to lead. What they
find is put into attributes whole, and the loop is told that there is something new.

The replicas do not join the pool itself (its servers would ask them for pages): their
leases, their leader and their notes are in a part of the registry of their own.

**Changes.** What an operator changes at a replica is noted under the name of the
instance, the whole of it in one write, and the last write wins; all replicas follow. A
change that cannot be noted counts here at once and is noted as soon as it can be.

**The leader** is the one replica that takes notes away, those that mean nothing any
more. Two leaders at a time (one was stopped, its lease ended, and it goes on before it
notices) do no harm: what ``is_over`` finds over is over for good, whoever looks and
whenever, as no incarnation ever comes again; members are looked up after the notes were
read, so that nobody mistakes a member that has just come for one that is gone; and a
note that was written anew since has another version and is not erased. Requests are
routed by every replica for itself, leader or not.

**Trouble.** A registry that cannot be used is one sentence, in the log when it begins
and in ``trouble`` as long as it lasts. Until it is back, what was known stays true.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sgl_tiered.errors import ConfigError, TieredError
from sgl_tiered.pool.membership import (
    InstanceKind,
    Lease,
    Member,
    Note,
    Registry,
    View,
)
from sgl_tiered.pool.registry_url import LEADER, ROUTERS, open_registry
from sgl_tiered.router.wanted import Change, change_from, change_text, is_over

__all__ = ["Discovery"]

_LOG = logging.getLogger(__name__)
_WATCH_S = 0.5
"""A note of another replica is seen after so long at most, a member at once."""
_AGAIN_S = 1.0
"""Between two tries while the registry cannot be used."""
_RENEWALS = 4
"""Renewals of a lease in its time: three may be lost."""
_UNUSABLE = (TieredError, OSError, ValueError)
"""What a registry says that cannot be used, or that holds what is not known here."""


class Discovery:
    """A replica's view of a registry. ``start``, ``lead``, then ``close``.

    Args:
        url: of the registry (``pool/registry_url.py``).
        lease_s: seconds from one renewal of its lease to its end.
        on_news: called by a thread when an attribute has changed.
        on_failure: called by a thread with its name when it failed and begins again.

    Attributes:
        members: of the pool; those that the registry has forgotten included.
        changes: by name of the instance, those not noted yet included.
        name: of this replica, once it has been given one.
        leader: name of the replica that leads; empty while there is none.
        leads: whether it is this one.
        replicas: names of the replicas with a lease.
    """

    def __init__(
        self,
        url: str,
        lease_s: float,
        on_news: Callable[[], None],
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.url = url
        self.name = ""
        self.members: tuple[Member, ...] = ()
        self.leader = ""
        self.leads = False
        self.replicas: tuple[str, ...] = ()
        self._lease_s = lease_s
        self._on_news = on_news
        self._on_failure = on_failure or (lambda name: None)
        self._pool: Registry | None = None
        self._own: Registry | None = None
        self._opening = threading.Lock()
        self._writing = threading.Lock()
        self._expecting = threading.Lock()  # never while something waits
        self._notes: Mapping[str, Note] = {}
        self._unnoted: dict[str, Change] = {}
        self._troubles = {"lease": "", "watch": ""}
        self._forgotten: tuple[str, ...] = ()
        self._version = -1
        self._looked = threading.Event()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def trouble(self) -> str:
        """One sentence: what is wrong with the registry; empty for nothing."""
        return next(filter(None, self._troubles.values()), "")

    @property
    def changes(self) -> Mapping[str, Change]:
        """See the class."""
        found = {}
        for key, note in self._notes.items():
            change = change_from(note.value)
            if change is not None:
                found[_name(key)] = change
        return {**found, **self._unnoted}

    def start(self, timeout_s: float) -> bool:
        """Begin to watch; returns whether there has been a look in time.

        It waits: not for the event loop.
        """
        self._run("watch", self._watch)
        return self._looked.wait(timeout_s)

    def lead(self, name: str, endpoints: Mapping[str, str]) -> None:
        """Take a lease, and lead where nobody does; does not wait.

        Args:
            name: of this replica; no other one has it.
            endpoints: its addresses, for its entry.
        """
        self.name = name
        self._run("lease", lambda: self._keep_lease(endpoints))

    def change(self, name: str, change: Change) -> None:
        """Let a change count from now on; it is noted by the next ``flush``."""
        with self._expecting:
            self._unnoted = {**self._unnoted, name: change}

    def flush(self, name: str) -> bool:
        """Note what is not noted yet; returns whether a change on this name now is.

        It waits: not for the event loop. What fails is tried again by itself.
        """
        with contextlib.suppress(*_UNUSABLE):
            self._write()
        return name not in self._unnoted

    def state(self) -> dict[str, Any]:
        """Return what ``/router/state`` shows, as plain values."""
        return {
            "url": self.url,
            "trouble": self.trouble,
            "name": self.name,
            "leads": self.leads,
            "leader": self.leader or None,
            "replicas": list(self.replicas),
            "members": [each.name for each in self.members],
            "forgotten": list(self._forgotten),
            "unnoted": sorted(self._unnoted),
        }

    def close(self) -> None:
        """End the lease and the threads; waits for calls under way."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for registry in (self._pool, self._own):
            if registry is not None:
                registry.close()

    def _run(self, name: str, run: Callable[[], None]) -> None:
        def again_and_again() -> None:
            while not self._closing.is_set():
                try:
                    run()
                except Exception as error:  # noqa: BLE001 - it must go on
                    _LOG.exception("the thread %s failed, and begins again", name)
                    self._on_failure(f"registry_{name}")
                    self._say(name, self._unusable(error))
                    self._closing.wait(_AGAIN_S)

        thread = threading.Thread(
            target=again_and_again, name=f"tiered-router-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _open(self) -> tuple[Registry, Registry]:
        """Return the registry of the pool, and the part of the routers.

        Raises:
            TieredError: the URL names none, or it cannot be used.
        """
        with self._opening:
            if self._pool is None:
                self._pool = open_registry(self.url, ttl_s=self._lease_s)
            if self._own is None:
                self._own = open_registry(self.url, part=ROUTERS, ttl_s=self._lease_s)
            return self._pool, self._own

    def _say(self, what: str, trouble: str) -> None:
        """Note the trouble of a thread; told once as it begins, and when it is over."""
        former, self._troubles[what] = self._troubles[what], trouble
        others = [each for other, each in self._troubles.items() if other != what]
        if trouble and trouble != former and not any(others):
            _LOG.warning("%s", trouble)
        elif former and not trouble and not self.trouble:
            _LOG.info("the registry %s answers again", self.url)
        if former != trouble:
            self._on_news()

    def _silent(self) -> str:
        return (
            f"the registry {self.url} does not answer: what is known of it stays; "
            "start it, or give --registry the URL of one that runs."
        )

    def _unusable(self, error: Exception) -> str:
        return f"the registry {self.url} cannot be used: {error}"

    # The thread that watches.

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                answers = self._look()
            except _UNUSABLE as error:
                self._say("watch", self._unusable(error))
                answers = False
            self._looked.set()
            if not answers:
                self._closing.wait(_AGAIN_S)

    def _look(self) -> bool:
        """Wait for something new, for a moment; False if there is no answer."""
        pool, own = self._open()
        if self._looked.is_set() and not self._troubles["watch"]:
            pool.watch(self._version, _WATCH_S)
        # A watch may give an old view where there is no answer; a look does not.
        view = pool.look()
        is_read = self._read(own)
        if view is None or not is_read:
            self._say("watch", self._silent())
            return False
        self._say("watch", "")
        self._see(view)
        return True

    def _read(self, own: Registry) -> bool:
        """Read the notes; False if there is no answer."""
        with self._writing:
            found = own.notes()
            if found is None:
                return False
            is_new = found != self._notes
            self._notes = found
        if is_new:
            self._on_news()
        return True

    def _see(self, view: View) -> None:
        if view.version < self._version:
            # Its file or its data was taken away under it. Servers that find
            # themselves forgotten serve on, so they are not dropped for that.
            kept = tuple(each.name for each in self.members)
            _LOG.warning(
                "the registry %s has forgotten its members: those that were there are "
                "served on until they join again; DELETE those that are gone",
                self.url,
            )
            self._forgotten = kept
        there = {each.name for each in view.members}
        self._forgotten = tuple(name for name in self._forgotten if name not in there)
        self._version = view.version
        members = (*self._kept_on(), *view.members)
        if members != self.members:
            self.members = members
            self._on_news()

    def _kept_on(self) -> tuple[Member, ...]:
        """Return the members that the registry has forgotten."""
        return tuple(each for each in self.members if each.name in self._forgotten)

    def _write(self) -> None:
        """Note what is not noted yet; what cannot be noted stays.

        Raises:
            TieredError: the registry cannot be used.
        """
        _, own = self._open()
        with self._writing:
            for name, change in self._unnoted.items():
                try:
                    note = own.note(_key(name), change_text(change))
                except ConfigError:
                    continue  # too long a name: it counts at this replica only
                if note is None:
                    return
                self._notes = {**self._notes, _key(name): note}
                with self._expecting:
                    left = dict(self._unnoted)
                    if left[name] is change:  # and not a later one
                        del left[name]
                    self._unnoted = left

    # The thread that keeps the lease.

    def _keep_lease(self, endpoints: Mapping[str, str]) -> None:
        lease: Lease | None = None
        while not self._closing.is_set():
            try:
                lease = self._renewed(lease, endpoints)
                self._govern(lease)
            except _UNUSABLE as error:
                self._say("lease", self._unusable(error))
                self._led(None, "", ())
            self._closing.wait(self._lease_s / _RENEWALS)
        if lease is not None and self._own is not None:
            with contextlib.suppress(*_UNUSABLE):
                self._own.leave(lease)

    def _renewed(
        self, lease: Lease | None, endpoints: Mapping[str, str]
    ) -> Lease | None:
        """Return a lease that was renewed or taken anew; None while there is none."""
        _, own = self._open()
        if self._troubles["lease"] and own.look() is None:
            return lease
        if lease is not None:
            if own.renew(lease):
                self._say("lease", "")
                return lease
            view = own.look()
            if view is None:
                self._say("lease", self._silent())
                return lease
            member = view.member(lease.instance)
            if member is not None and member.incarnation != lease.incarnation:
                self._say(
                    "lease",
                    f"another router has joined {self.url} as {self.name}: give every "
                    "replica a --name of its own.",
                )
                return lease
        # A router has no memory that others could take for another one's.
        found = own.join(self.name, InstanceKind.COLOCATED, endpoints)
        self._say("lease", "")
        return found

    def _govern(self, lease: Lease | None) -> None:
        """Write what waits, find out who leads, and tidy up where it is this one."""
        _, own = self._open()
        self._write()
        leads = lease is not None and own.lead(LEADER, lease)
        leader, view = own.leader(LEADER), own.look()
        names = () if view is None else tuple(each.name for each in view.members)
        self._led(
            lease if leads else None, "" if leader is None else leader.name, names
        )
        if leads:
            self._tidy()

    def _led(self, lease: Lease | None, leader: str, replicas: tuple[str, ...]) -> None:
        found = (lease is not None, leader, replicas)
        if found != (self.leads, self.leader, self.replicas):
            if found[0] != self.leads:
                _LOG.info("%s %s", self.name, "leads" if found[0] else "leads no more")
            self.leads, self.leader, self.replicas = found
            self._on_news()

    def _tidy(self) -> None:
        """Erase the notes that are over."""
        pool, own = self._open()
        # In this order, see the module.
        notes = own.notes()
        view = pool.look()
        if notes is None or view is None:
            return
        members = (*self._kept_on(), *view.members)
        for key, note in notes.items():
            change = change_from(note.value)
            if change is not None and is_over(change, _name(key), members):
                own.erase(key, note.version)


def _key(name: str) -> str:
    """Return an instance's name as the name of a note, which has fewer characters."""
    return re.sub(r"[^A-Za-z0-9.:-]", lambda found: f"_{ord(found[0]):02x}_", name)


def _name(key: str) -> str:
    return re.sub(r"_([0-9a-f]{2})_", lambda found: chr(int(found[1], 16)), key)
