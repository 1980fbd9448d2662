"""Files that one of our commands writes and others read: one checked JSON object each.

Read whole, never executed; written beside the old one and put in its place, for its
owner's eyes only. What is wrong with one is said in one sentence. What the object must
hold is its owner's to check.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from sgl_tiered.errors import ConfigError

__all__ = ["JsonFile", "OutOfReachError"]


class OutOfReachError(ConfigError):
    """A file cannot be read or written now, whatever it holds."""


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A kind of file.

    Attributes:
        what: it is, as errors call it.
        command: that writes it.
        version: that is written, and the only one that is read.
        max_bytes: no such file is larger.
    """

    what: str
    command: str
    version: int
    max_bytes: int

    def read(self, path: Path) -> object:
        """Return what a file holds, unchecked.

        Raises:
            OutOfReachError: it cannot be read.
            ConfigError: it is too large or no JSON; infinite numbers and half
                surrogates are none.
        """
        try:
            if path.stat().st_size > self.max_bytes:
                raise self.wrong(f"{path} is larger than any {self.what}")
            # Stricter than ``json``: what it reads can be written again.
            found: object = orjson.loads(path.read_bytes())
        except OSError as error:
            raise OutOfReachError(
                self.what,
                f"{path} cannot be read ({error.strerror})",
                f"give the path of a file that {self.command} wrote",
            ) from None
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise self.wrong(f"{path} is not JSON") from None
        return found

    def fields(self, raw: object) -> dict[str, Any]:
        """Return an object's fields without its version.

        Raises:
            ConfigError: it is no object, or of another version.
        """
        if not isinstance(raw, Mapping):
            raise self.wrong("it holds no JSON object")
        version = raw.get("version")
        if version != self.version or isinstance(version, bool):
            raise self.wrong(f"its version is {version!r}, not {self.version}")
        return {name: value for name, value in raw.items() if name != "version"}

    def write(self, path: Path, fields: Mapping[str, Any]) -> None:
        """Write fields and version; a former file is replaced whole.

        Raises:
            OutOfReachError: the file cannot be written.
        """
        whole = {"version": self.version, **fields}
        text = json.dumps(whole, indent=1, allow_nan=False)
        draft = None
        try:
            handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            os.replace(draft, path)
        except OSError as error:
            if draft is not None:
                Path(draft).unlink(missing_ok=True)
            raise OutOfReachError(
                self.what,
                f"{path} cannot be written ({error.strerror})",
                "give a path in a folder that this user may write to",
            ) from None

    def wrong(self, problem: str) -> ConfigError:
        """Return the error that says so, and how to get a right one."""
        return ConfigError(self.what, problem, f"write a new one with {self.command}")
