"""Who is in the pool: leases, incarnations and the view that follows from them.

An instance joins under a name and gets an id (16 bits, part of every address), and an
incarnation number that grows with every start under that name. Its lease ends when it
is not renewed in time; whatever others held for that incarnation is released then. A
name that comes back is a new incarnation and starts clean.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from sgl_tiered.core.addresses import MAX_INSTANCE
from sgl_tiered.errors import ConfigError
from sgl_tiered.transport.endpoints import tcp_endpoint
from sgl_tiered.transport.incidents import Incidents

__all__ = [
    "CONTROL",
    "InstanceKind",
    "Lease",
    "Member",
    "Note",
    "Registry",
    "View",
    "check_endpoints",
    "check_name",
    "default_name",
    "first_free_id",
    "incarnation_after",
    "member_fields",
    "member_from",
    "members_from",
]

MAX_INCARNATION = (1 << 32) - 1
_MAX_NAME = 200
CONTROL = "control"
"""Name of the endpoint in a member's entry that messages go to."""
_MAX_ENDPOINTS = 64
_MAX_ENDPOINT = 1 << 16
"""Characters of one: the processes of some 900 ranks are one."""


class InstanceKind(StrEnum):
    """What an instance does with requests."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class Lease:
    """Right to be in the pool.

    Attributes:
        name: of the instance.
        instance: its id, 0 .. 65535.
        incarnation: number of this start, from 1.
        ttl_s: seconds from one renewal to the end.
        token: what the registry knows the lease by.
    """

    name: str
    instance: int
    incarnation: int
    ttl_s: float
    token: str = ""


@dataclass(frozen=True, slots=True)
class Member:
    """One instance in a view.

    Attributes:
        name, instance, incarnation: as in its lease.
        kind: what it does.
        endpoints: address by purpose, such as ``http`` or ``control``.
        draining: it takes no new requests and will leave.
        memory: how its memory is reached, as ``messages.as_entry`` writes it; empty
            before it has said so.
    """

    name: str
    instance: int
    incarnation: int
    kind: InstanceKind
    endpoints: Mapping[str, str] = field(default_factory=dict)
    draining: bool = False
    memory: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """The members at one moment.

    Attributes:
        version: grows with every change; equal versions are equal views.
        members: by instance id, ascending.
    """

    version: int
    members: tuple[Member, ...] = ()

    def member(self, instance: int) -> Member | None:
        """Return the member with this id, or None."""
        return next((m for m in self.members if m.instance == instance), None)

    def has(self, instance: int, incarnation: int) -> bool:
        """Return whether this very incarnation is a member."""
        member = self.member(instance)
        return member is not None and member.incarnation == incarnation


@dataclass(frozen=True, slots=True)
class Note:
    """A short text that outlives leases.

    Attributes:
        value: the text.
        version: another one with every write.
    """

    value: str
    version: int


class Registry(Protocol):
    """Keeps leases. What it cannot do now is a value: False, or an older view."""

    def join(
        self, name: str, kind: InstanceKind, endpoints: Mapping[str, str]
    ) -> Lease:
        """Begin a new incarnation; a former one under this name is over at once.

        Raises:
            ConfigError: the name or an endpoint cannot be used, or no id is left.
            TransportUnavailableError: the registry cannot be reached.
        """
        ...

    def renew(self, lease: Lease) -> bool:
        """Prolong a lease; False if it is over, or the registry does not answer.

        Who got False must not write to peers any more once ``ttl_s`` have gone by since
        the last True: others may have taken the blocks back.
        """
        ...

    def drain(self, lease: Lease) -> bool:
        """Mark the instance as draining; False if its lease is over."""
        ...

    def publish(self, lease: Lease, memory: str) -> bool:
        """Say how an instance's memory is reached; False if its lease is over."""
        ...

    def leave(self, lease: Lease) -> None:
        """End a lease; nothing if it is over."""
        ...

    def view(self) -> View:
        """Return the members now; the last one known if there is no answer."""
        ...

    def look(self) -> View | None:
        """Return the members now; None if there is no answer."""
        ...

    def watch(self, version: int, timeout_s: float) -> View | None:
        """Wait for a view newer than ``version``; None if none came in time."""
        ...

    def lead(self, role: str, lease: Lease) -> bool:
        """Try to become the leader for a role; True if the lease leads now.

        Leadership ends with the lease. There is at most one leader per role.
        """
        ...

    def leader(self, role: str) -> Member | None:
        """Return the leader for a role, or None."""
        ...

    def notes(self) -> Mapping[str, Note] | None:
        """Return all notes by name; None if there is no answer."""
        ...

    def note(self, name: str, value: str) -> Note | None:
        """Write a note, in place of the last one of this name; None without an answer.

        Raises:
            ConfigError: the name cannot be used.
        """
        ...

    def erase(self, name: str, version: int) -> bool:
        """Remove a note; False if it has another version, or there is no answer."""
        ...

    def close(self) -> None:
        """Let go of connections; leases go on until they end."""
        ...


def check_name(name: str) -> None:
    """Raise ConfigError unless a name can be part of a key and of a log line."""
    allowed = set("-_.:")
    if not 1 <= len(name) <= _MAX_NAME or not all(
        c.isascii() and (c.isalnum() or c in allowed) for c in name
    ):
        raise ConfigError(
            "instance name",
            f"{name[:_MAX_NAME]!r} is empty, too long or has other than letters, "
            "digits and -_.:",
            "choose a name such as prefill-0",
        )


def check_endpoints(endpoints: Mapping[str, str]) -> None:
    """Raise ConfigError unless all can be handed to whoever reads them.

    All must be text of one line that can be sent, and ``CONTROL`` one that can be
    connected to; what others mean is for those who use them.
    """
    problem = ""
    if len(endpoints) > _MAX_ENDPOINTS:
        problem = f"there are {len(endpoints)}, and at most {_MAX_ENDPOINTS} are read"
    for name, text in endpoints.items():
        if len(name) > _MAX_NAME or len(text) > _MAX_ENDPOINT:
            problem = f"{name[:_MAX_NAME]!r} is too long"
        # Neither are half surrogates, which no encoder takes.
        elif not (name.isprintable() and text.isprintable()):
            problem = f"{name!r} has other than printable text"
    if CONTROL in endpoints and not problem:
        try:
            tcp_endpoint(endpoints[CONTROL])
        except ValueError as error:
            problem = str(error)
    if problem:
        raise ConfigError(
            "endpoints of an instance",
            problem,
            "give addresses such as tcp://10.0.0.5:5557",
        )


def default_name(port: int) -> str:
    """Return a name for who serves at a port of this machine, one that keeps it."""
    host = socket.gethostname().partition(".")[0] or "host"
    clean = "".join(c if c.isascii() and c.isalnum() else "-" for c in host)
    return f"{clean}-{port}"


def incarnation_after(last: int) -> int:
    """Return the number of the next start.

    Raises:
        ConfigError: all numbers have been used.
    """
    if last >= MAX_INCARNATION:
        raise ConfigError(
            "instance name",
            "it has been used for all 2^32 - 1 starts",
            "choose another name",
        )
    return last + 1


def first_free_id(taken: set[int]) -> int:
    """Return the lowest instance id that no name has.

    Raises:
        ConfigError: all are taken.
    """
    found = next((i for i in range(MAX_INSTANCE + 1) if i not in taken), None)
    if found is None:
        raise ConfigError(
            "pool",
            "all 65,536 instance ids are taken by names used so far",
            "use names again, or start the registry anew",
        )
    return found


def member_fields(member: Member) -> dict[str, Any]:
    """Return a member as JSON values."""
    fields = asdict(member)
    return {**fields, "kind": member.kind.value, "endpoints": dict(member.endpoints)}


def member_from(fields: Mapping[str, Any]) -> Member:
    """Return a member from JSON values; further fields are those of later versions.

    Raises:
        ValueError: they do not describe one.
    """
    try:
        member = msgspec.convert(fields, Member)
        check_name(member.name)
        check_endpoints(member.endpoints)
        member.memory.encode()
    except (msgspec.ValidationError, ConfigError, UnicodeEncodeError) as error:
        raise ValueError(f"no member: {error}") from None
    if not 0 <= member.instance <= MAX_INSTANCE:
        raise ValueError(f"no member: its id is {member.instance}")
    if not 1 <= member.incarnation <= MAX_INCARNATION:
        raise ValueError(f"no member: its incarnation is {member.incarnation}")
    return member


def members_from(
    entries: Mapping[str, Any], incidents: Incidents
) -> tuple[Member, ...]:
    """Return the members of a registry's entries, by id, ascending.

    One that is none that we know, as a later version may write it, is left out and
    counted; it stays in the registry as it is.

    Args:
        entries: JSON values by the id that they stand under.
        incidents: counts those.
    """
    found = []
    for number, fields in entries.items():
        try:
            member = member_from(fields)
            if str(member.instance) != number:
                raise ValueError(f"it is that of instance {member.instance}")
        except ValueError as error:
            incidents.note("entry", f"the entry of instance {number}: {error}")
        else:
            found.append(member)
    return tuple(sorted(found, key=lambda member: member.instance))
