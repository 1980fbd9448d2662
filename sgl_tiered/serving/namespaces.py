"""Which namespaces requests have named: digests by adapter and salt, in bounded memory.

A name is kept as long as its namespace has pages, for those who tell others of them.
Without pages it only saves computing the digest again, so few are kept, and none while
the server has nothing to do. A digest can be used whether its name is kept or not.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["MAX_NAME_BYTES", "NamedSpaces", "is_too_long"]

MAX_NAME_BYTES = 1024
"""Bytes of an adapter's name and of a salt, as UTF-8: what is longer is kept by nobody,
and a request with it is served by the device alone."""
_MAX_EMPTY = 1024
"""Names kept without pages: more tenants than have requests in a queue."""

Names = tuple[str, str]
"""SGLang's ``extra_key``, which begins with the adapter, and the tenant's salt."""


def is_too_long(name: str) -> bool:
    """Return whether an adapter's name or a salt has more bytes than are kept."""
    # A character has up to 4 bytes: short names are not encoded for this.
    if len(name) * 4 <= MAX_NAME_BYTES:
        return False
    return len(name.encode(errors="replace")) > MAX_NAME_BYTES


class NamedSpaces:
    """Names and digests of namespaces. On the scheduler's thread.

    Args:
        has_pages: digest -> whether the namespace has a page.
    """

    def __init__(self, has_pages: Callable[[bytes], bool]) -> None:
        self._has_pages = has_pages
        self._digests: dict[Names, bytes] = {}
        # Adapters of equal content share one.
        self._names: dict[bytes, list[Names]] = {}
        self._new: dict[bytes, None] = {}
        # May be without pages, the oldest first: all that were named, or lost their
        # last page, since somebody looked. So a look costs what has changed, and not
        # what there is.
        self._unsure: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def num_empty(self) -> int:
        """Namespaces that are named and have no page."""
        return sum(not self._has_pages(digest) for digest in self._unsure)

    def get(self, names: Names) -> bytes | None:
        """Return the digest of a namespace that is known by name."""
        return self._digests.get(names)

    def add(self, names: Names, digest: bytes) -> None:
        """Keep a name, unless it is too long."""
        if any(is_too_long(name) for name in names):
            return
        if names in self._digests:
            self._forget(names)
        self._digests[names] = digest
        self._names.setdefault(digest, []).append(names)
        self._new[digest] = None
        self._unsure[digest] = None
        if len(self._unsure) > _MAX_EMPTY:
            self._sweep(_MAX_EMPTY // 2)

    def lost_pages(self, digest: bytes) -> None:
        """Note that a namespace has lost its last page."""
        if digest in self._names:
            self._unsure[digest] = None

    def names_of(self, digest: bytes) -> Names | None:
        """Return the last name of a namespace; None where it was not named yet."""
        names = self._names.get(digest)
        return None if names is None else names[-1]

    def take_new(self) -> list[bytes]:
        """Return the namespaces that were named since the last call."""
        new, self._new = list(self._new), {}
        return new

    def drop_empty(self) -> None:
        """Forget the names of all namespaces without pages; O(1) where none came."""
        if self._unsure:
            self._sweep(0)

    def forget_adapter(self, lora_id: str) -> None:
        """Forget the names with an adapter, whose contents may be others now."""
        for names in [names for names in self._digests if names[0].endswith(lora_id)]:
            self._forget(names)

    def clear(self) -> None:
        """Forget every name: digests have changed."""
        self._digests.clear()
        self._names.clear()
        self._new.clear()
        self._unsure.clear()

    def _sweep(self, num_kept: int) -> None:
        """Forget all without pages but the latest so many."""
        empty = [digest for digest in self._unsure if not self._has_pages(digest)]
        num_gone = max(0, len(empty) - num_kept)
        self._unsure = dict.fromkeys(empty[num_gone:])
        for digest in empty[:num_gone]:
            for names in tuple(self._names[digest]):
                self._forget(names)

    def _forget(self, names: Names) -> None:
        """Forget one name, and its namespace with the last."""
        digest = self._digests.pop(names)
        self._names[digest].remove(names)
        if not self._names[digest]:
            del self._names[digest]
            self._new.pop(digest, None)
            self._unsure.pop(digest, None)
