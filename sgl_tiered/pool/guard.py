"""Who may say what: the one check of all that comes from other instances.

A message is from whom it says only if it came under the public key in that instance's
entry in the registry; CURVE proves the key. An answer is one to a request of ours only
if it has the request's nonce, which follows from the request and a secret of this
process: so who shares a key with the peer, but has not got the request, cannot answer.
What its fields must be, each message checks itself when it is read (``messages.py``).
What is refused is counted by reason (``Incidents``), and never raises.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import msgspec

from sgl_tiered.pool.membership import CONTROL, View
from sgl_tiered.pool.messages import Answer, Envelope, Incarnation
from sgl_tiered.transport.incidents import Incidents

__all__ = ["CONTROL", "CONTROL_KEY", "Guard"]

CONTROL_KEY = "control_key"
"""Name of a member's public key in its entry, beside its endpoint ``CONTROL``."""
_NONCE_BYTES = 8


class Guard:
    """Stamps what goes out and checks what comes in; all but ``hears`` by one thread.

    Args:
        incidents: counts what is refused.
    """

    def __init__(self, incidents: Incidents) -> None:
        self._incidents = incidents
        self._secret = os.urandom(32)
        self._key_of: Mapping[int, str] = {}
        self._keys: frozenset[str] = frozenset()

    def see(self, view: View) -> None:
        """Learn who is there, and under which key."""
        self._key_of = {
            member.instance: member.endpoints[CONTROL_KEY]
            for member in view.members
            if member.endpoints.get(CONTROL_KEY)
        }
        self._keys = frozenset(self._key_of.values())

    def hears(self, key: str) -> bool:
        """Return whether anything of this key's is read; any thread may ask."""
        return key in self._keys

    def stamp(self, envelope: Envelope) -> Envelope:
        """Return a message as it goes out."""
        if isinstance(envelope.body, Answer):
            return envelope
        nonce = self._nonce(envelope.sender, envelope.receiver[0], envelope.request)
        return msgspec.structs.replace(envelope, nonce=nonce)

    def admits(self, envelope: Envelope, key: str) -> bool:
        """Return whether a message is from whom it says, and an answer to a request.

        Args:
            envelope: what came.
            key: under which it came.
        """
        who = f"instance {envelope.sender[0]}"
        if not key or self._key_of.get(envelope.sender[0]) != key:
            self._incidents.note("stranger", f"a message of {who} has another's key")
            return False
        if isinstance(envelope.body, Answer) and envelope.nonce != self._nonce(
            envelope.receiver, envelope.sender[0], envelope.request
        ):
            self._incidents.note("nonce", f"an answer of {who} is to no request")
            return False
        return True

    def _nonce(self, sender: Incarnation, receiver: int, request: int) -> int:
        # Not of the receiver's incarnation: a later one refuses what it was asked.
        text = f"{sender} {receiver} {request}".encode()
        digest = hashlib.blake2b(text, digest_size=_NONCE_BYTES, key=self._secret)
        return int.from_bytes(digest.digest())
