"""``sgl-tiered pool``: the registry of a pool of instances, from outside."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_tiered.errors import ConfigError

if TYPE_CHECKING:
    # The other commands must work without the packages that a pool needs.
    from sgl_tiered.pool.membership import Member, Registry, View

__all__ = ["register"]

_LOOK_S = 0.5


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "pool",
        help="who is in a pool of instances: start a registry, look, drain",
        description="A registry is local (a file of this user on this machine), "
        "file:PATH, or etcd://HOST:PORT[,HOST:PORT]/POOL.",
    )
    commands = parser.add_subparsers(dest="pool_command", required=True)

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(
            name, help=text, description=text
        )
        command.set_defaults(run=_guarded(run))
        return command

    up = add("up", _up, "make a registry, print its URL, and tell of changes")
    listing = add("list", _list, "who is there, and which routers serve it")
    state = add("state", _state, "the same, with all addresses, as one JSON object")
    drain = add("drain", _drain, "let an instance take no new work, so that it can end")
    for command in (up, listing, state, drain):
        command.add_argument(
            "--registry", default="local", metavar="URL", help="default %(default)s"
        )
    drain.add_argument("name", help="of the instance")
    keys = add("keys", _keys, "make a key pair for instances on several machines")
    keys.add_argument("folder", type=Path, help="where pool.key is written")


def _guarded(run: Callable[[argparse.Namespace], int]) -> Any:
    """Say which package is missing, in a sentence."""

    def guarded(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except ModuleNotFoundError as error:
            raise ConfigError(
                "pool", f"needs {error.name}", "pip install 'sgl-tiered[control]'"
            ) from None

    return guarded


def _open(url: str, part: str = "") -> Registry:
    from sgl_tiered.pool.registry_url import open_registry

    return open_registry(url, part=part)


def _up(arguments: argparse.Namespace) -> int:
    """Tell of changes until it is interrupted."""
    registry = _open(arguments.registry)
    stopped = threading.Event()
    former = {
        number: signal.signal(number, lambda *_: stopped.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        view = _look(registry, arguments.registry)
        print(f"sgl-tiered pool: {_url(arguments.registry)}", flush=True)
        seen = _lines(view)
        print("\n".join(seen) or "nobody is there yet", flush=True)
        while not stopped.is_set():
            found = registry.watch(view.version, _LOOK_S)
            if found is not None:
                view = found
                lines = _lines(view)
                for line in seen:
                    if line not in lines:
                        print(f"- {line}", flush=True)
                for line in lines:
                    if line not in seen:
                        print(f"+ {line}", flush=True)
                seen = lines
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        registry.close()
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from sgl_tiered.pool.registry_url import ROUTERS

    view, _ = _view(arguments.registry)
    print("\n".join(_lines(view)) or "nobody is there")
    routers, leader = _view(arguments.registry, ROUTERS)
    for router in routers.members:
        leads = ", leads" if router.name == leader else ""
        print(f"{router.name}: router{leads}, {_addresses(router)}")
    return 0


def _state(arguments: argparse.Namespace) -> int:
    from sgl_tiered.pool.membership import member_fields
    from sgl_tiered.pool.registry_url import ROUTERS

    view, _ = _view(arguments.registry)
    routers, leader = _view(arguments.registry, ROUTERS)
    found = {
        "registry": _url(arguments.registry),
        "version": view.version,
        "members": [member_fields(member) for member in view.members],
        "routers": [
            {
                "name": router.name,
                "leads": router.name == leader,
                "endpoints": dict(router.endpoints),
            }
            for router in routers.members
        ],
    }
    print(json.dumps(found, indent=1))
    return 0


def _drain(arguments: argparse.Namespace) -> int:
    from sgl_tiered.pool.membership import Lease

    registry = _open(arguments.registry)
    try:
        for member in _look(registry, arguments.registry).members:
            if member.name == arguments.name:
                lease = Lease(member.name, member.instance, member.incarnation, 0.0)
                if registry.drain(lease):
                    print(f"{member.name} is draining")
                    return 0
    finally:
        registry.close()
    raise ConfigError(
        "pool drain",
        f"no instance {arguments.name!r} is there",
        "see sgl-tiered pool list",
    )


def _keys(arguments: argparse.Namespace) -> int:
    # Only here: the other commands must work without these packages.
    from sgl_tiered.transport.keys import make_keys

    path = arguments.folder / "pool.key"
    try:
        arguments.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        keys = make_keys(path)
    except FileExistsError:
        raise ConfigError(
            str(path), "it exists", "keys are never overwritten"
        ) from None
    except OSError as error:
        problem = error.strerror or "it cannot be written"
        raise ConfigError(str(path), problem, "name another folder") from None
    print(f"{path}: copy it to every machine of the pool, or write the public keys")
    print(f"of the others, a line each, into {arguments.folder / 'admitted'}.")
    print(f"public key: {keys.public}")
    return 0


def _view(url: str, part: str = "") -> tuple[View, str | None]:
    """Return who is there, and the name of the router that leads, if this is theirs."""
    from sgl_tiered.pool.registry_url import LEADER

    registry = _open(url, part)
    try:
        view = _look(registry, url)
        leader = registry.leader(LEADER)
        return view, None if leader is None else leader.name
    finally:
        registry.close()


def _look(registry: Registry, url: str) -> View:
    """Return who is there.

    Raises:
        ConfigError: the registry does not answer, which is not the same as nobody.
    """
    view = registry.look()
    if view is None:
        raise ConfigError(
            "--registry",
            f"{url} does not answer",
            "start it, or give the address of one that runs",
        )
    return view


def _url(url: str) -> str:
    """Return the URL that any process of this machine can use."""
    from sgl_tiered.pool.registry_url import local_path

    return f"file:{local_path()}" if url == "local" else url


def _lines(view: View) -> list[str]:
    return [
        f"{member.name}: instance {member.instance}.{member.incarnation}, "
        f"{member.kind.value}{', draining' if member.draining else ''}, "
        + _addresses(member)
        for member in view.members
    ]


def _addresses(member: Member) -> str:
    return " ".join(f"{k}={v}" for k, v in sorted(member.endpoints.items()))
