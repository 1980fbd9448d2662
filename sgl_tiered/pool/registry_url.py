"""Registries by their URLs.

    local                                the file of this user on this machine
    file:PATH                            another file
    etcd://HOST:PORT[,HOST:PORT]/POOL    etcd; the pool's name may be left out

``etcd+https`` speaks TLS; ``?access=DIR`` behind it names a folder with certificates
and a user (``etcd_access.py``). Whoever may write to a registry says where KV is sent
and under which keys messages are heard: so a file has to be its user's alone, and of an
etcd that others reach, writing below ``/sgl-tiered/`` should need a user.

A file belongs to one machine: leases are timed by its clock. Who serves a pool without
being in it (routers) has a part of its own beside the pool's: a file PATH.PART, or a
pool POOL.PART of etcd.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from sgl_tiered.core.clock import Clock
from sgl_tiered.errors import ConfigError
from sgl_tiered.pool.local_registry import LocalRegistry
from sgl_tiered.pool.membership import Registry
from sgl_tiered.transport.incidents import Incidents

__all__ = ["LEADER", "ROUTERS", "check_url", "local_path", "open_registry"]

ROUTERS = "routers"
"""The part of those that serve a pool without being in it."""
LEADER = "router"
"""The role of the one of them that leads."""

_SETTING = "pool registry"
_FORMS = "local, file:PATH or etcd://HOST:PORT[,HOST:PORT]/POOL[?access=DIR]"


def open_registry(
    url: str,
    *,
    part: str = "",
    ttl_s: float = 3.0,
    clock: Clock | None = None,
    incidents: Incidents | None = None,
) -> Registry:
    """Return the registry that a URL names; a file is made where there is none.

    Args:
        url: as above.
        part: beside the pool's own; empty for that.
        ttl_s: seconds from one renewal of a lease to its end.
        clock: for leases in a file; one that all processes of the machine share.
        incidents: counts what went wrong, and entries that are passed over.

    Raises:
        ConfigError: the URL names none, or a file that is none of ours.
        TransportUnavailableError: a file that cannot be used.
    """
    behind = f".{part}" if part else ""
    path, hosts, pool, folder = _parse(url)
    if path is not None:
        path = Path(f"{path}{behind}")
        return LocalRegistry(path, ttl_s=ttl_s, clock=clock, incidents=incidents)
    try:
        # Only here: one machine needs no httpx.
        from sgl_tiered.pool.etcd_access import read_access
        from sgl_tiered.pool.etcd_registry import EtcdRegistry
    except ImportError as error:
        raise ConfigError(
            _SETTING, f"etcd needs {error.name}", "pip install 'sgl-tiered[etcd]'"
        ) from error
    return EtcdRegistry(
        *hosts,
        pool=pool + behind,
        ttl_s=ttl_s,
        clock=clock,
        access=None if folder is None else read_access(folder),
        incidents=incidents,
    )


def check_url(url: str) -> None:
    """Check what can be without a registry: the URL's form.

    Raises:
        ConfigError: it names none.
    """
    _parse(url)


def _parse(url: str) -> tuple[Path | None, list[str], str, Path | None]:
    """Return a file; else None, the URLs of etcd's hosts, pool and folder there."""
    scheme, colon, rest = url.partition(":")
    if url == "local":
        return local_path(), [], "", None
    if colon and scheme == "file" and rest:
        return Path(rest.removeprefix("//")), [], "", None
    found = re.fullmatch(
        r"etcd(\+https)?://([^/?]+?)(?:/([^/?]*))?/?(?:\?access=(.+))?", url
    )
    if found is None:
        raise ConfigError(_SETTING, f"{url!r} names none", f"write {_FORMS}")
    hosts = found[2].split(",")
    if not all(re.fullmatch(r"[^:]+:\d+|\[[^]]+\]:\d+", host) for host in hosts):
        raise ConfigError(
            _SETTING, f"{found[2]!r} is no list of HOST:PORT", f"write {_FORMS}"
        )
    http = "https" if found[1] else "http"
    folder = None if found[4] is None else Path(found[4]).expanduser()
    return None, [f"{http}://{host}" for host in hosts], found[3] or "default", folder


def local_path() -> Path:
    """Return the file of ``local``, in a folder that only this user can look into.

    Raises:
        ConfigError: somebody else has made that folder.
    """
    folder = Path(tempfile.gettempdir()) / f"sgl-tiered-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) & 0o077
    ):
        raise ConfigError(
            _SETTING,
            f"{folder} is not a folder of this user's alone",
            "remove it, or name a file with file:PATH",
        )
    return folder / "pool.json"
