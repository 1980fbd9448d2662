"""Which instances there should be: what flags, a registry and operators say, as one.

A pure function of three things, so that all replicas of the router that know the same
come to the same, in whatever order they heard of it:

- *given*: the instances of this replica's own ``--instance``;
- *members*: the servers that are in the pool, with a lease;
- *changes*: the last word of an operator on each name (``POST /router/instances`` and
  its kin), at whichever replica it was said.

An operator's instance comes before one of a flag, and that before one of the pool; of
two with one name or address the first stays. A member of the pool that a flag names as
well (by its address, or its name) keeps the flag's words; the lease adds when it drains
and when its process is another one. A change that was meant for a start of a pool's
member (``incarnation``) ends with that start: who comes again comes clean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from sgl_tiered.errors import ConfigError
from sgl_tiered.pool.membership import Member
from sgl_tiered.router.access import Hosts
from sgl_tiered.router.config import (
    InstanceConfig,
    host_of,
    is_loopback,
    parse_instance,
)

__all__ = [
    "FLAG",
    "REGISTRY",
    "REQUEST",
    "Change",
    "Entry",
    "Wanted",
    "change_from",
    "change_text",
    "config_of",
    "is_over",
    "wanted_instances",
]

FLAG = "flag"
REGISTRY = "registry"
REQUEST = "request"


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last word of an operator on a name; without any content it says nothing.

    Attributes:
        words: what ``POST /router/instances`` added, as after ``--instance``.
        draining: no further requests are to go there.
        removed: it is not to be served, whoever names it.
        incarnation: the start of the pool's member that this is about; 0 for any.
    """

    words: str = ""
    draining: bool = False
    removed: bool = False
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """An instance that should be there.

    Attributes:
        config: of it.
        source: who says so: ``FLAG``, ``REGISTRY`` or ``REQUEST``.
        is_draining: it is to get no further requests.
        drains_itself: because the registry says so.
        member: its name in the pool; empty where it is in none.
        incarnation: of its lease; 0 without one.
    """

    config: InstanceConfig
    source: str
    is_draining: bool = False
    drains_itself: bool = False
    member: str = ""
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The outcome.

    Attributes:
        entries: by name.
        troubles: a sentence for each that cannot be served.
    """

    entries: Mapping[str, Entry]
    troubles: tuple[str, ...] = ()


def change_text(change: Change) -> str:
    """Return a change as it is kept in a registry."""
    return msgspec.json.encode(change).decode()


def change_from(text: str) -> Change | None:
    """Return a change as it was kept; None for what is none."""
    try:
        return msgspec.json.decode(text.encode(), type=Change)
    except (msgspec.DecodeError, UnicodeError):
        return None


def config_of(member: Member) -> InstanceConfig:
    """Return what the router has to know of a member of the pool.

    Raises:
        ConfigError: its entry lacks an address, or has one that cannot be used here.
    """
    setting = f"{member.name} in the registry"
    told = member.endpoints
    url = told.get("http", "")
    if not url:
        raise ConfigError(setting, "it tells no HTTP address", "start it anew")
    control = host_of(told.get("control", ""))
    is_near = is_loopback(host_of(url))
    if is_near and control and not is_loopback(control):
        # Here that address would be another server, or none.
        raise ConfigError(
            setting,
            f"{url} is its own loopback, and it may be on another machine",
            "start it with --host and an address that the router can reach",
        )
    words = [url, f"kind={member.kind.value}", f"name={member.name}"]
    words += [
        f"{word}={told[word]}"
        for word in ("events", "replay", "topic", "bootstrap")
        if word in told
    ]
    return parse_instance(",".join(words), setting)


def is_over(change: Change, name: str, members: Sequence[Member]) -> bool:
    """Whether a change means nothing any more, now and for ever.

    Args:
        change: what was said.
        name: of the instance.
        members: of the pool, seen after the change was read.
    """
    if change.words:
        return False
    if not (change.draining or change.removed):
        return True
    if not change.incarnation:
        return False
    return not any(
        each.name == name and each.incarnation == change.incarnation for each in members
    )


def wanted_instances(
    given: Sequence[InstanceConfig],
    members: Sequence[Member],
    changes: Mapping[str, Change],
    hosts: Hosts | None = None,
) -> Wanted:
    """Return which instances there should be.

    Args:
        given: by flags; names and addresses differ.
        members: of the pool.
        changes: by name of the instance.
        hosts: that an operator may add; None for any.
    """
    entries: dict[str, Entry] = {}
    names: dict[str, str] = {}  # by address
    troubles: list[str] = []
    hidden: set[str] = set()  # addresses of flags that an operator has removed

    def put(entry: Entry) -> None:
        config = entry.config
        holder = names.get(config.url, config.name)
        if holder in entries:
            taken = entries[holder]
            troubles.append(
                f"{config.name} at {config.url} ({entry.source}) is left out: "
                f"{holder} at {taken.config.url} ({taken.source}) is there"
            )
            return
        entries[config.name] = entry
        names[config.url] = config.name

    for name in sorted(changes):
        change = changes[name]
        if change.words and not change.removed:
            try:
                config = parse_instance(change.words, f"{name}, added by request")
            except ConfigError as error:
                troubles.append(str(error))
                continue
            trouble = "" if hosts is None else hosts.trouble(config)
            if trouble:
                troubles.append(f"{config.name} is left out: {trouble}")
                continue
            put(Entry(config, REQUEST, change.draining))
    for config in given:
        change = changes.get(config.name, _NOTHING)
        if change.words and not change.removed:
            continue  # an operator has put another one in its place
        if change.removed and not change.incarnation:
            hidden.add(config.url)
        else:
            is_draining = change.draining and not change.incarnation
            put(Entry(config, FLAG, is_draining))
    for member in sorted(members, key=lambda each: each.name):
        url = member.endpoints.get("http", "").rstrip("/")
        named = names.get(url) or (member.name if member.name in entries else None)
        if named is not None and _is_merged(entries[named], url):
            entries[named] = _with_lease(entries[named], member)
            continue
        change = changes.get(member.name, _NOTHING)
        if change.incarnation not in (0, member.incarnation):
            change = _NOTHING
        if change.removed or url in hidden:
            continue
        try:
            config = config_of(member)
        except ConfigError as error:
            troubles.append(str(error))
            continue
        put(_with_lease(Entry(config, REGISTRY, change.draining), member))
    return Wanted(entries, tuple(troubles))


_NOTHING = Change()


def _is_merged(entry: Entry, url: str) -> bool:
    """Whether a member at this address is the one that somebody named himself."""
    return entry.source != REGISTRY and entry.config.url == url


def _with_lease(entry: Entry, member: Member) -> Entry:
    return replace(
        entry,
        is_draining=entry.is_draining or member.draining,
        drains_itself=member.draining,
        member=member.name,
        incarnation=member.incarnation,
    )
