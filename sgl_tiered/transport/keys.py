"""CURVE keys: who may send control messages, and to whom.

A key file holds one pair and has mode 0600. A cluster may give all its instances one
pair (copy the file), or each its own, and list the public keys that a server admits.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from sgl_tiered.errors import ConfigError

__all__ = [
    "KeyPair",
    "Keyring",
    "is_loopback",
    "load_keyring",
    "load_keys",
    "make_keys",
    "new_keys",
]

_Z85_CHARS = 40


@dataclass(frozen=True, slots=True, repr=False)
class KeyPair:
    """A CURVE pair, each 40 characters of Z85. The secret is in no ``repr``.

    Attributes:
        public: may be shown to anybody.
        secret: may not.
    """

    public: str
    secret: str

    def __post_init__(self) -> None:
        if len(self.public) != _Z85_CHARS or len(self.secret) != _Z85_CHARS:
            raise ValueError("a CURVE key has 40 characters")

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def new_keys() -> KeyPair:
    """Make a pair that no file has: of one process."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def make_keys(path: Path) -> KeyPair:
    """Make a pair and write it to a new file of mode 0600.

    Raises:
        FileExistsError: the file exists; keys are never overwritten.
    """
    keys = new_keys()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(msgspec.json.encode(keys) + b"\n")
    return keys


def load_keys(path: Path) -> KeyPair:
    """Read a pair.

    Raises:
        ConfigError: no such file, not a key file, or others may read it.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(4096)
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "unreadable", _MAKE) from error
    if mode & 0o077:
        remedy = f"chmod 600 {path}, and make new keys if others could read it"
        raise ConfigError(str(path), f"mode {mode:04o} lets others read it", remedy)
    try:
        keys = msgspec.json.decode(data, type=KeyPair)
        if zmq.curve_public(keys.secret.encode()).decode() != keys.public:
            raise ValueError("public and secret key do not belong together")
    except (msgspec.DecodeError, ValueError, zmq.ZMQError) as error:
        raise ConfigError(str(path), f"is no key file ({error})", _MAKE) from error
    return keys


@dataclass(frozen=True, slots=True)
class Keyring:
    """An instance's own pair, and whom it talks to.

    Attributes:
        keys: its pair.
        admitted: public keys of all instances, its own included.
    """

    keys: KeyPair
    admitted: frozenset[str]


def load_keyring(folder: Path) -> Keyring:
    """Read ``pool.key`` of a folder, and ``admitted`` if it is there.

    ``admitted`` has a public key per line. Without it only instances with this very
    pair, a copy of the file, are talked to.

    Raises:
        ConfigError: a file is missing, is none of ours, or others may read the pair.
    """
    keys = load_keys(folder / "pool.key")
    listed = folder / "admitted"
    try:
        found = listed.read_text().split() if listed.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            str(listed), str(error), "write a public key per line"
        ) from None
    wrong = [each for each in found if len(each) != _Z85_CHARS]
    if wrong:
        raise ConfigError(
            str(listed),
            f"{wrong[0][:_Z85_CHARS]!r} is no public key of {_Z85_CHARS} characters",
            "write a public key per line",
        )
    return Keyring(keys, frozenset({keys.public, *found}))


_MAKE = "make one with sgl-tiered pool keys DIR, or transport.keys.make_keys"


def is_loopback(endpoint: str) -> bool:
    """Return whether nobody outside this machine can reach a ZeroMQ endpoint."""
    if endpoint.startswith(("inproc://", "ipc://")):
        return True
    host = re.fullmatch(r"tcp://(.*):(?:\d+|\*)", endpoint)
    if host is None:
        return False
    name = host[1].strip("[]")
    return re.fullmatch(r"127(\.\d{1,3}){3}|::1|localhost", name) is not None
