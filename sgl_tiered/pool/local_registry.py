"""The registry of one machine: a file, its lock, and the machine's monotonic clock.

Every call locks the file, ends the leases whose time is over, and writes the file anew
where something has changed. So it needs no server, and outlives every instance. Names
keep their ids and count their starts for as long as the file exists. After a reboot the
clock begins anew: then no lease of before it lives.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sgl_tiered.core.addresses import MAX_INSTANCE
from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.core.json_file import JsonFile, OutOfReachError
from sgl_tiered.errors import ConfigError, TieredError, TransportUnavailableError
from sgl_tiered.pool.membership import (
    MAX_INCARNATION,
    InstanceKind,
    Lease,
    Member,
    Note,
    View,
    check_endpoints,
    check_name,
    first_free_id,
    incarnation_after,
    member_fields,
    members_from,
)
from sgl_tiered.transport.incidents import Incidents

__all__ = ["LocalRegistry"]

_FILE = JsonFile("pool registry", "sgl-tiered pool up", 1, 64 << 20)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_Number = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,5}$")]
_LOOK_S = 0.05
"""Between two looks of ``watch``; a look is 0.1 ms."""
_State = dict[str, Any]


class _Name(msgspec.Struct):
    """The id of a name, and how often it has started."""

    instance: Annotated[int, msgspec.Meta(ge=0, le=MAX_INSTANCE)]
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=MAX_INCARNATION)]


class _Fields(msgspec.Struct):
    """What the file must hold; what a member's entry does, ``members_from`` says.

    Further fields are those of later versions, and are kept.
    """

    version: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    boot: str
    names: dict[str, _Name]
    members: dict[_Number, Any]
    ends_s: dict[_Number, Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]]
    leaders: dict[str, tuple[int, int]]
    notes: dict[str, tuple[str, int]]


class LocalRegistry:
    """A ``Registry`` for the instances of one machine.

    Args:
        path: the file; its folder must exist. It is for its owner's eyes only.
        ttl_s: seconds from one renewal of a lease to its end.
        clock: one that all processes of the machine share.
        pause: waits so many seconds.
        incidents: counts entries that are passed over.

    Raises:
        ConfigError: the file is there and is none of ours.
    """

    def __init__(
        self,
        path: Path,
        *,
        ttl_s: float = 3.0,
        clock: Clock | None = None,
        pause: Callable[[float], None] = time.sleep,
        incidents: Incidents | None = None,
    ) -> None:
        self._incidents = incidents or Incidents(f"pool registry {path}")
        self._path = path
        self._ttl_s = ttl_s
        self._clock = clock or SystemClock()
        self._pause = pause
        self._last_view = View(0)
        self._demand_own_folder()
        self.view()

    def join(
        self, name: str, kind: InstanceKind, endpoints: Mapping[str, str]
    ) -> Lease:
        """Begin a new incarnation; a former one under this name is over at once."""
        check_name(name)
        check_endpoints(endpoints)
        with self._state() as state:
            known = state["names"].get(name)
            if known is None:
                taken = {each["instance"] for each in state["names"].values()}
                known = {"instance": first_free_id(taken), "incarnation": 0}
            known["incarnation"] = incarnation_after(known["incarnation"])
            state["names"][name] = known
            lease = Lease(name, known["instance"], known["incarnation"], self._ttl_s)
            member = Member(
                name, lease.instance, lease.incarnation, kind, dict(endpoints)
            )
            self._remove(state, lease.instance)
            state["members"][str(lease.instance)] = member_fields(member)
            state["ends_s"][str(lease.instance)] = self._clock.now() + self._ttl_s
        return lease

    def renew(self, lease: Lease) -> bool:
        """Prolong a lease; False if it is over, or the file cannot be used."""
        with contextlib.suppress(OSError), self._state() as state:
            if self._holds(state, lease):
                state["ends_s"][str(lease.instance)] = self._clock.now() + self._ttl_s
                return True
        return False

    def drain(self, lease: Lease) -> bool:
        """Mark the instance as draining; False if its lease is over."""
        with contextlib.suppress(OSError), self._state() as state:
            if self._holds(state, lease):
                state["members"][str(lease.instance)]["draining"] = True
                return True
        return False

    def publish(self, lease: Lease, memory: str) -> bool:
        """Say how an instance's memory is reached; False if its lease is over."""
        with contextlib.suppress(OSError), self._state() as state:
            if self._holds(state, lease):
                state["members"][str(lease.instance)]["memory"] = memory
                return True
        return False

    def leave(self, lease: Lease) -> None:
        """End a lease; nothing if it is over."""
        with contextlib.suppress(OSError), self._state() as state:
            if self._holds(state, lease):
                self._remove(state, lease.instance)

    def view(self) -> View:
        """Return the members now; the last one known if the file cannot be used."""
        self._last_view = self.look() or self._last_view
        return self._last_view

    def look(self) -> View | None:
        """Return the members now; None if the file cannot be used."""
        with contextlib.suppress(OSError), self._state() as state:
            members = members_from(state["members"], self._incidents)
            return View(state["version"], members)
        return None

    def watch(self, version: int, timeout_s: float) -> View | None:
        """Wait for a view newer than ``version``; None if none came in time.

        It looks without the lock, which belongs to those that have something to change.
        """
        until_s = self._clock.now() + timeout_s
        while True:
            now_s = self._clock.now()
            if self._has_changed(version, now_s):
                view = self.view()
                if view.version > version:
                    return view
            left_s = until_s - now_s
            if left_s <= 0:
                return None
            self._pause(min(left_s, _LOOK_S))

    def lead(self, role: str, lease: Lease) -> bool:
        """Try to become the leader for a role; True if the lease leads now."""
        me = [lease.instance, lease.incarnation]
        with contextlib.suppress(OSError), self._state() as state:
            if self._holds(state, lease):
                return bool(state["leaders"].setdefault(role, me) == me)
        return False

    def leader(self, role: str) -> Member | None:
        """Return the leader for a role, or None."""
        with contextlib.suppress(OSError), self._state() as state:
            found = state["leaders"].get(role)
            if found is not None:
                number = str(found[0])
                fields = {number: state["members"].get(number)}
                return next(iter(members_from(fields, self._incidents)), None)
        return None

    def notes(self) -> Mapping[str, Note] | None:
        """Return all notes by name; None if the file cannot be used."""
        with contextlib.suppress(OSError), self._state() as state:
            return {name: Note(*each) for name, each in state["notes"].items()}
        return None

    def note(self, name: str, value: str) -> Note | None:
        """Write a note; None if the file cannot be used."""
        check_name(name)
        with contextlib.suppress(OSError), self._state() as state:
            # The version that this write gives the file.
            note = Note(value, state["version"] + 1)
            state["notes"][name] = [note.value, note.version]
            return note
        return None

    def erase(self, name: str, version: int) -> bool:
        """Remove a note; False if it has another version."""
        with contextlib.suppress(OSError), self._state() as state:
            found = state["notes"].get(name)
            if found is not None and found[1] == version:
                del state["notes"][name]
                return True
        return False

    def close(self) -> None:
        """Nothing is kept open."""

    def _demand_own_folder(self) -> None:
        """Raise ConfigError if other users may put another file into its place."""
        try:
            found = self._path.parent.stat()
        except OSError:
            # The first use says so.
            return
        is_sticky = found.st_mode & stat.S_ISVTX
        if found.st_mode & 0o022 and not is_sticky:
            raise self._of_others(f"others may write to its folder {self._path.parent}")

    def _of_others(self, problem: str) -> ConfigError:
        return ConfigError(
            "pool registry",
            f"whoever writes to {self._path} says where KV is sent, and {problem}",
            "keep it in a folder of this user's alone",
        )

    def _has_changed(self, version: int, now_s: float) -> bool:
        """Return whether there is something newer, or a lease that is over.

        The file is replaced whole, so it can be read at any time.
        """
        try:
            state = self._read()
        except TieredError:
            return False
        ends_s = state["ends_s"].values()
        return state["version"] > version or any(end_s <= now_s for end_s in ends_s)

    @contextlib.contextmanager
    def _state(self) -> Iterator[_State]:
        """Lock, read, end what is over; then write, if anything has changed.

        Raises:
            TransportUnavailableError: that cannot be done now.
            ConfigError: the file is none of ours.
        """
        try:
            lock = os.open(
                self._path.with_name(self._path.name + ".lock"),
                os.O_RDWR | os.O_CREAT,
                0o600,
            )
        except OSError as error:
            raise TransportUnavailableError(
                f"the pool registry {self._path} cannot be used ({error.strerror}); "
                "give a path in a folder that this user may write to"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            former = self._read()
            state = copy.deepcopy(former)
            self._expire(state)
            try:
                yield state
            finally:
                self._write(former, state)
        except OutOfReachError as error:
            raise TransportUnavailableError(str(error)) from None
        finally:
            os.close(lock)

    def _read(self) -> _State:
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        state: _State = {
            "version": 0,
            "boot": boot,
            "names": {},
            "members": {},
            "ends_s": {},
            "leaders": {},
            "notes": {},
        }
        try:
            found_stat = self._path.stat()
        except FileNotFoundError:
            return state
        if found_stat.st_uid != os.getuid() or found_stat.st_mode & 0o022:
            raise self._of_others("it is not this user's alone")
        found = _FILE.fields(_FILE.read(self._path))
        found["version"] = found.pop("view_version", None)
        found.setdefault("notes", {})  # most files have none, and say nothing of them
        try:
            msgspec.convert(found, _Fields)
        except msgspec.ValidationError as error:
            raise ConfigError(
                "pool registry",
                f"{self._path} is not one ({error})",
                "give another path, or remove the file",
            ) from None
        if found["boot"] != boot:
            found.update(
                boot=boot,
                members={},
                ends_s={},
                leaders={},
                version=found["version"] + 1,
            )
        return found

    def _write(self, former: _State, state: _State) -> None:
        if {**state, "ends_s": 0, "version": 0} != {
            **former,
            "ends_s": 0,
            "version": 0,
        }:
            state["version"] = former["version"] + 1
        if state != former or not self._path.exists():
            fields = {**state, "view_version": state["version"]}
            del fields["version"]
            if not fields["notes"]:
                del fields["notes"]
            _FILE.write(self._path, fields)

    def _expire(self, state: _State) -> None:
        now_s = self._clock.now()
        for number, end_s in list(state["ends_s"].items()):
            if end_s <= now_s:
                self._remove(state, int(number))

    def _remove(self, state: _State, instance: int) -> None:
        """End whatever lease an instance has, and its leadership."""
        state["members"].pop(str(instance), None)
        state["ends_s"].pop(str(instance), None)
        leaders = state["leaders"]
        for role in [r for r, leader in leaders.items() if leader[0] == instance]:
            del leaders[role]

    def _holds(self, state: _State, lease: Lease) -> bool:
        fields = state["members"].get(str(lease.instance))
        # Those of a later version may be anything.
        return isinstance(fields, dict) and fields.get("incarnation") == (
            lease.incarnation
        )
