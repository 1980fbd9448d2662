"""How the members of a pool are built, as their entries in the registry say.

That is where pages are written to and read from: what a peer's messages say of memory,
hosts and ports would be taken from whoever sends them, so they say nothing of it.
"""

from __future__ import annotations

from sgl_tiered.pool.membership import View
from sgl_tiered.pool.messages import Incarnation, PoolInfo, from_entry
from sgl_tiered.transport.incidents import Incidents

__all__ = ["Entries"]


class Entries:
    """The memory of all members. One thread calls it.

    Args:
        incidents: counts entries that cannot be used.
    """

    def __init__(self, incidents: Incidents) -> None:
        self._incidents = incidents
        self._known: dict[Incarnation, tuple[str, PoolInfo | None]] = {}

    def see(self, view: View) -> None:
        """Learn of those who are there; those who are not are known still."""
        for member in view.members:
            peer = (member.instance, member.incarnation)
            if self._known.get(peer, ("", None))[0] != member.memory:
                self._known[peer] = (member.memory, self._read(member.memory, peer))

    def forget(self, view: View) -> None:
        """Forget those who are not there."""
        for peer in [peer for peer in self._known if not view.has(*peer)]:
            del self._known[peer]

    def info(self, peer: Incarnation) -> PoolInfo | None:
        """Return how a member is built; None where that is not known, or not yet."""
        return self._known.get(peer, ("", None))[1]

    def _read(self, text: str, peer: Incarnation) -> PoolInfo | None:
        try:
            return from_entry(text)
        except (ValueError, RecursionError) as error:
            self._incidents.note("entry", f"the memory of instance {peer[0]}: {error}")
            return None
