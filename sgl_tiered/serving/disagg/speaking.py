"""Who speaks: each message between a pair carries a key that only the two know.

A decode instance has a key for each place that it speaks to, which is one rank of a
prefill instance, from a secret of its start. Its session is named there by a hash of
that key: so whoever gives the key is the session, nobody can take its name, and a
prefill instance that has forgotten it, or has started anew, believes it all the same.
The key stands behind whatever is said, either way. So who reaches a port, or is one
half of another pair, speaks for nobody else. Who listens on the wire learns keys, or
where a prefill instance has listened before. Any thread may call both.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = [
    "Asked",
    "Asking",
    "StrangerError",
    "gives_key",
    "has_tag",
    "proved",
    "room_of",
]

Message = Sequence[bytes]

_KEY_BYTES = 32
_HASH = "sha256"
_OURS = "tiered-"
"""A session of such a name has a key; others are of SGLang's own backend or an older
version. They are sent no KV, but told so."""
_REGISTRATION, _ABORT, _ABORT_ACK = b"None", b"ABORT", b"ABORT_ACK"
_SESSION_PART, _KEY_PART = 3, 21
"""Of a registration; the session is there in what asks for KV as well."""
_MOST_ROOMS = 4096
_MOST_RANKS = 256
"""Of a decode instance that ask a prefill rank for one room."""


class StrangerError(Exception):
    """A message that does not come from whom it says; in one clause."""


class Asking:
    """The keys that a decode instance gives, and who is asked for what.

    Args:
        is_live: whether a message of a room would still change anything.
    """

    def __init__(self, is_live: Callable[[int], bool]) -> None:
        self._secret = secrets.token_bytes(_KEY_BYTES)
        self._is_live = is_live
        self._lock = threading.Lock()
        # By room: the places that were asked for it.
        self._asked: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def say(self, room: int, place: str, message: Message) -> list[bytes]:
        """Return what goes to a prefill instance.

        Args:
            room: of the request that it is sent for.
            place: where it goes.
            message: as SGLang made it, and our address behind a registration.
        """
        self._note(room, place)
        said, key = list(message), self._key(place)
        if said[0] == _REGISTRATION or not has_tag(said):
            said[_SESSION_PART] = _name(key).encode()
        return [*said, key]

    def hear(self, message: Message) -> list[bytes]:
        """Return what a prefill instance says, without the key.

        Raises:
            StrangerError: none that was asked for this room says it.
            ValueError: no room is named.
        """
        *said, key = message
        room = room_of(said)
        with self._lock:
            places = self._asked.get(room, ())
        if any(hmac.compare_digest(key, self._key(place)) for place in places):
            return said
        raise StrangerError(
            f"{_kind(said)} of room {room} comes from none that was asked for it"
        )

    def _note(self, room: int, place: str) -> None:
        with self._lock:
            places = self._asked.get(room, ())
            if place not in places:
                self._asked[room] = (*places, place)
            self._asked.move_to_end(room)
            if len(self._asked) > _MOST_ROOMS:
                # As many as are live are kept: SGLang has a bound for those.
                ended = (each for each in self._asked if not self._is_live(each))
                self._asked.pop(next(ended, -1), None)

    def _key(self, place: str) -> bytes:
        return hmac.digest(self._secret, place.encode(), _HASH)


class Asked:
    """By whom rooms are asked for, of a prefill instance.

    Args:
        place_of: where who has this host and port is spoken to.
    """

    def __init__(self, place_of: Callable[[str, int], str]) -> None:
        self._place_of = place_of
        self._lock = threading.Lock()
        # By room, and place that is answered: the key of who has asked, which is empty
        # where it gives none. As long as SGLang notes who has asked.
        self._rooms: dict[int, dict[str, bytes]] = {}
        # By room and place: the key of who had asked when the request ended, as a word
        # may still be on its way.
        self._ended: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        # By room and place: the key of who said last that the room be ended. Who waits
        # for the answer says it again.
        self._aborters: OrderedDict[tuple[int, str], bytes] = OrderedDict()

    def hear(self, message: Message) -> tuple[bytes, list[bytes]]:
        """Return the key of who says a message, and it without the key.

        Raises:
            StrangerError: it names another.
            ValueError: it names no session.
        """
        is_registration = message[0] == _REGISTRATION
        named = None
        if is_registration or not has_tag(message):
            named = message[_SESSION_PART].decode("ascii")
            if not gives_key(named):
                return b"", list(message)
        at = _KEY_PART if is_registration else len(message) - 1
        key = b"".join(message[at:])
        if len(key) != _KEY_BYTES and named is None:
            return b"", list(message)
        if named is not None and not hmac.compare_digest(named, _name(key)):
            raise StrangerError(f"{_kind(message)}: {named} has another key")
        return key, list(message[:at])

    def admit(
        self, key: bytes, message: Message, rooms: Mapping[int, Mapping[str, Any]]
    ) -> bool:
        """Take note of what is said of a room, and SGLang can read.

        Args:
            key: of who says it.
            message: without the key.
            rooms: by room, and session: who has asked SGLang for it.

        Returns:
            Whether SGLang is to hear it. If not, others have or had asked for it.

        Raises:
            ValueError: it names no place.
        """
        room, place = room_of(message), self._place_in(message)
        first = next(iter(rooms.get(room, {}).values()), None)
        most = 1 if first is None else min(first.required_dst_info_num, _MOST_RANKS)
        with self._lock:
            speakers = self._rooms.get(room, {})
            is_its = hmac.compare_digest(speakers.get(place, key), key)
            may = is_its and (place in speakers or len(speakers) < most)
            if message[0] == _ABORT:
                _keep(self._aborters, (room, place), key)
            elif first is not None and not speakers:
                # Of who has left, or of a request that is being forgotten: SGLang would
                # send there as well, or forget who asks now.
                may = False
            elif may:
                self._rooms[room] = speakers
                speakers[place] = key
        return may

    def end(self, room: int) -> None:
        """Let a room be asked for by others: its request has ended."""
        with self._lock:
            for place, key in self._rooms.pop(room, {}).items():
                _keep(self._ended, (room, place), key)

    def leave(self, message: Message) -> None:
        """Forget that who says a message has asked for its room."""
        room, place = room_of(message), self._place_in(message)
        with self._lock:
            speakers = self._rooms.get(room, {})
            speakers.pop(place, None)
            if not speakers:
                self._rooms.pop(room, None)

    def say(self, place: str, message: Message) -> list[bytes]:
        """Return what goes to a decode instance, with its key where it gave one.

        Raises:
            StrangerError: nobody there has asked for this room, or that it be ended.
        """
        room = room_of(message)
        with self._lock:
            if message[0] == _ABORT_ACK:
                key = self._aborters.get((room, place))
            else:
                had_asked = self._ended.get((room, place))
                key = self._rooms.get(room, {}).get(place, had_asked)
        if key is None:
            raise StrangerError(f"nobody at {place} has asked for room {room}")
        return proved(message, key)

    def _place_in(self, message: Message) -> str:
        """Return where its sender says that it listens."""
        at = 2 if has_tag(message) else 1
        try:
            host, port = message[at : at + 2]
        except ValueError:
            raise ValueError("it names no place") from None
        return self._place_of(host.decode("ascii"), int(port.decode("ascii")))


def proved(message: Message, key: bytes) -> list[bytes]:
    """Return a message with the key of the pair, which is empty where there is none."""
    return [*message, key] if key else list(message)


def gives_key(session: str) -> bool:
    """Return whether a session of this name has a key."""
    return session.startswith(_OURS)


def room_of(message: Message) -> int:
    """Return which room a message is about, if it is no registration.

    Raises:
        ValueError: it names none.
    """
    try:
        return int(message[1 if has_tag(message) else 0].decode("ascii"))
    except IndexError:
        raise ValueError("it names no room") from None


def _keep(
    keys: OrderedDict[tuple[int, str], bytes], at: tuple[int, str], key: bytes
) -> None:
    """Note a key as the last one."""
    keys[at] = key
    keys.move_to_end(at)
    if len(keys) > _MOST_ROOMS:
        keys.popitem(last=False)


def _name(key: bytes) -> str:
    """Return the name of the session that has a key; it does not tell the key."""
    name = hashlib.sha256(b"session " + key).digest()
    # SGLang takes what follows the last colon for a port, and shares work by it.
    (port,) = struct.unpack(">H", name[-2:])
    return f"{_OURS}{name[:16].hex()}:{port}"


def has_tag(message: Message) -> bool:
    """Return whether its first part says what it is; else that is its room."""
    return message[0][:1].isalpha()


def _kind(message: Message) -> str:
    """Return what a message is, for a sentence."""
    return repr(message[0][:40]) if has_tag(message) else "a word"
