"""Who speaks: each message between a pair proves a key that only the two know.

A decode instance gives each place that it registers with, which is one rank of a
prefill instance, a name and a key of its own; both come from a secret of its start. All
that follows, either way, ends with a proof: a MAC over what was said. So who reaches a
port, or is one half of another pair, speaks for nobody else. Who listens on the wire
learns the keys. Any thread may call both.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Asked", "Asking", "StrangerError"]

Message = Sequence[bytes]

_KEY_BYTES = 32
"""Of SHA-256: a key, and a proof."""
_HASH = "sha256"
_TO_PREFILL, _TO_DECODE = b"to prefill", b"to decode"
_REGISTRATION, _ABORT = b"None", b"ABORT"
_SESSION_PART, _KEY_PART = 3, 21
"""Of a registration; the session is there in what asks for KV as well."""
_MOST_ROOMS = 4096
_MOST_SESSIONS = 1024


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
        said = list(message)
        session = self._session(place)
        if said[0] == _REGISTRATION:
            said[_SESSION_PART] = session
            return [*said, self._key(place)]
        if not _has_tag(said):
            said[_SESSION_PART] = session
        return [*said, _proof(self._key(place), _TO_PREFILL, said) + session]

    def hear(self, message: Message) -> list[bytes]:
        """Return what a prefill instance says, without its proof.

        Raises:
            StrangerError: none that was asked for this room says it.
            ValueError: no room is named.
        """
        *said, proof = message
        room = _room_of(said)
        with self._lock:
            places = self._asked.get(room, ())
        for place in places:
            right = _proof(self._key(place), _TO_DECODE, said)
            if hmac.compare_digest(proof, right):
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
                ended = (each for each in self._asked if not self._is_live(each))
                self._asked.pop(next(ended, room))

    def _key(self, place: str) -> bytes:
        return hmac.digest(self._secret, b"key " + place.encode(), _HASH)

    def _session(self, place: str) -> bytes:
        """Return by which name a place knows this start; no other place does."""
        name = hmac.digest(self._secret, b"session " + place.encode(), _HASH)
        # SGLang takes what follows the last colon for a port, and shares work by it.
        (port,) = struct.unpack(">H", name[-2:])
        return f"{name[:16].hex()}:{port}".encode()


@dataclass(frozen=True, slots=True)
class _Known:
    """A session that has registered.

    Attributes:
        place: where its decode instance listens.
        key: empty where none was given, by SGLang's own backend or an older version:
            it is sent no KV, but told so.
    """

    place: str
    key: bytes


@dataclass(frozen=True, slots=True)
class _Room:
    """Who speaks of a room.

    Attributes:
        speakers: by the place that is answered: the session.
        askers: sessions that have asked for it.
    """

    speakers: dict[str, str] = field(default_factory=dict)
    askers: set[str] = field(default_factory=set)


class Asked:
    """The keys that a prefill instance was given, and by whom rooms are asked for.

    Args:
        is_live: whether something is still to be said of a room.
        place_of: where who has this host and port is spoken to.
    """

    def __init__(
        self, is_live: Callable[[int], bool], place_of: Callable[[str, int], str]
    ) -> None:
        self._is_live = is_live
        self._place_of = place_of
        self._lock = threading.Lock()
        # The one that was heard last stands last.
        self._sessions: OrderedDict[str, _Known] = OrderedDict()
        self._rooms: OrderedDict[int, _Room] = OrderedDict()

    def has_key(self, session: str) -> bool:
        """Return whether a session has given a key."""
        with self._lock:
            known = self._sessions.get(session)
        return known is not None and bool(known.key)

    def hear(self, message: Message) -> tuple[str, list[bytes]]:
        """Return which session says a message, and it without its proof.

        Raises:
            StrangerError: it is not proved.
            ValueError: it names no session.
        """
        if message[0] == _REGISTRATION:
            return message[_SESSION_PART].decode("ascii"), list(message)
        *said, last = message
        proof, session = last[:_KEY_BYTES], last[_KEY_BYTES:].decode("ascii", "replace")
        with self._lock:
            known = self._sessions.get(session)
        if known is not None and known.key:
            right = _proof(known.key, _TO_PREFILL, said)
            is_named = _has_tag(said) or said[_SESSION_PART] == session.encode()
            if is_named and hmac.compare_digest(proof, right):
                return session, said
        return self._keyless(message), list(message)

    def admit(
        self, session: str, message: Message, rooms: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Take note of what a session says, and SGLang can read.

        Args:
            session: that says it.
            message: without its proof.
            rooms: by room, and session: who has asked SGLang for it.

        Raises:
            StrangerError: it is not the session's to say.
            ValueError: it names no place.
        """
        if message[0] == _REGISTRATION:
            key = message[_KEY_PART] if len(message) > _KEY_PART else b""
            self._register(session, _Known(self._place_in(message), key))
            return
        room, place = _room_of(message), self._place_in(message)
        asking = rooms.get(room) or {}
        first = next(iter(asking.values()), None)
        most = 1 if first is None else first.required_dst_info_num
        with self._lock:
            known = self._sessions.get(session)
            if known is None or known.place != place:
                raise StrangerError(
                    f"{_kind(message)} of room {room} names a place that is not its own"
                )
            its = self._rooms.get(room) or _Room()
            askers = its.askers | asking.keys()
            other = its.speakers.get(place, session)
            is_place_taken = other != session and other in askers
            if session not in askers and (is_place_taken or len(askers) >= most):
                raise StrangerError(f"{_kind(message)}: room {room} is of others")
            self._sessions.move_to_end(session)
            its.speakers[place] = session
            if message[0] != _ABORT:
                its.askers.add(session)
            self._rooms[room] = its
            self._rooms.move_to_end(room)
            if len(self._rooms) > _MOST_ROOMS:
                ended = (each for each in self._rooms if not self._is_live(each))
                self._rooms.pop(next(ended, room))

    def end(self, room: int) -> None:
        """Let a room be asked for by others: its request has ended."""
        with self._lock:
            its = self._rooms.get(room)
            if its is not None:
                its.askers.clear()

    def say(self, place: str, message: Message) -> list[bytes]:
        """Return what goes to a decode instance, with its proof where it gave a key."""
        said = list(message)
        with self._lock:
            its = self._rooms.get(_room_of(said))
            session = "" if its is None else its.speakers.get(place, "")
            known = self._sessions.get(session)
        if known is None or not known.key:
            return said
        return [*said, _proof(known.key, _TO_DECODE, said)]

    def _register(self, session: str, known: _Known) -> None:
        if len(known.key) not in (0, _KEY_BYTES):
            raise StrangerError(f"{session}: a key of {len(known.key)} bytes")
        with self._lock:
            former = self._sessions.setdefault(session, known)
            if not hmac.compare_digest(former.key, known.key):
                raise StrangerError(f"{session} registers again, with another key")
            self._sessions[session] = known
            self._sessions.move_to_end(session)
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)

    def _keyless(self, message: Message) -> str:
        """Return whose message without a proof this is: of one that gave no key."""
        if _has_tag(message):
            place = self._place_in(message)
            with self._lock:
                found = [
                    session
                    for session, known in self._sessions.items()
                    if known.place == place and not known.key
                ]
            if found:
                return found[-1]
        else:
            session = message[_SESSION_PART].decode("ascii")
            with self._lock:
                known = self._sessions.get(session)
            if known is not None and not known.key:
                return session
        raise StrangerError(f"{_kind(message)} comes from no session that is known")

    def _place_in(self, message: Message) -> str:
        """Return where its sender says that it listens."""
        at = 2 if _has_tag(message) and message[0] != _REGISTRATION else 1
        try:
            host, port = message[at : at + 2]
        except ValueError:
            raise ValueError("it names no place") from None
        return self._place_of(host.decode("ascii"), int(port.decode("ascii")))


def _proof(key: bytes, way: bytes, message: Message) -> bytes:
    """Return the MAC of a message that goes one way; no two are read alike."""
    mac = hmac.new(key, way, _HASH)
    for part in message:
        mac.update(struct.pack("<Q", len(part)))
        mac.update(part)
    return mac.digest()


def _has_tag(message: Message) -> bool:
    """Return whether its first part says what it is; else that is its room."""
    return message[0][:1].isalpha()


def _room_of(message: Message) -> int:
    try:
        return int(message[1 if _has_tag(message) else 0].decode("ascii"))
    except IndexError:
        raise ValueError("it names no room") from None


def _kind(message: Message) -> str:
    """Return what a message is, for a sentence."""
    return repr(message[0][:40]) if _has_tag(message) else "a word"
