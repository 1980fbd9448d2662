"""What etcd may want of who asks it: TLS with certificates, a user with a password.

A folder, named in the registry's URL (``?access=DIR``), has those files that are
needed, so that no secret stands on a command line:

    ca.pem                who has signed etcd's certificate
    cert.pem, key.pem     this client's own certificate
    user                  NAME:PASSWORD, one line

``key.pem`` and ``user`` must be this user's alone.
"""

from __future__ import annotations

import ssl
import stat
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import httpx

from sgl_tiered.errors import ConfigError

__all__ = ["EtcdAccess", "read_access"]

_SETTING = "pool registry"
_REFUSED = (400, 401)
"""What etcd's gateway says without a token, and of one that is over."""


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """How to speak to an etcd.

    Attributes:
        context: for TLS; None for the system's authorities.
        auth: adds a user's token to each request; None for no user.
    """

    context: ssl.SSLContext | None = None
    auth: httpx.Auth | None = None


class _User(httpx.Auth):
    """A user of etcd's: a token from its password, and another when that is over."""

    def __init__(self, name: str, password: str) -> None:
        self._login = {"name": name, "password": password}
        self._token = ""

    def sync_auth_flow(
        self, request: httpx.Request
    ) -> Generator[httpx.Request, httpx.Response, None]:
        """Send a request with the token, and again with a new one if it is refused."""
        # What comes of the request itself may be a stream without an end.
        if self._token:
            request.headers["Authorization"] = self._token
            response = yield request
            if response.status_code not in _REFUSED:
                return
        where = request.url.copy_with(raw_path=b"/v3/auth/authenticate")
        answer = yield httpx.Request("POST", where, json=self._login)
        if answer.is_success:
            answer.read()
            self._token = str(answer.json()["token"])
            request.headers["Authorization"] = self._token
        yield request


def read_access(folder: Path) -> EtcdAccess:
    """Read the files above.

    Raises:
        ConfigError: there are none of them, one cannot be used, or others may read it.
    """
    ca, cert, key, user = (
        folder / name for name in ("ca.pem", "cert.pem", "key.pem", "user")
    )
    if not any(path.exists() for path in (ca, cert, user)):
        raise ConfigError(
            _SETTING,
            f"{folder} has neither ca.pem, cert.pem nor user",
            "put what etcd wants there, or leave ?access out",
        )
    for secret in (key, user):
        if secret.exists() and stat.S_IMODE(secret.stat().st_mode) & 0o077:
            raise ConfigError(str(secret), "others may read it", f"chmod 600 {secret}")
    context = None
    try:
        if ca.exists() or cert.exists():
            context = ssl.create_default_context(cafile=ca if ca.exists() else None)
        if context is not None and cert.exists():
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            str(folder), f"its certificates cannot be used ({error})", "check the files"
        ) from None
    return EtcdAccess(context, _read_user(user) if user.exists() else None)


def _read_user(path: Path) -> httpx.Auth:
    try:
        name, colon, password = path.read_text(encoding="utf-8").strip().partition(":")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"unreadable ({error})", "fix the file") from None
    if not (name and colon and password):
        raise ConfigError(
            str(path), "it is not NAME:PASSWORD", "write one line like that"
        )
    return _User(name, password)
