"""Whether a peer may still write here, after a conversation with it is over.

A conversation of two incarnations is over when the lease of either is. What a process
had begun before may go on: it was only stopped, say, or cut off from the registry. So
blocks lent to it are kept until it has said, as whatever incarnation it is by then,
that nothing of that time writes any more; or until the ``ReleaseWatch`` knows that its
process is over, or that its machine has been silent for long.

``Fences`` asks, ``Words`` answers. Nothing new begins within a conversation that is
over, so one question is enough for all that was lent in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from sgl_tiered.core.clock import Clock
from sgl_tiered.pool.channel import CONTROL
from sgl_tiered.pool.facts import Fact, Facts
from sgl_tiered.pool.membership import Member, View
from sgl_tiered.pool.messages import Answer, AskDone, Incarnation
from sgl_tiered.pool.requests import Request, Requests
from sgl_tiered.pool.transfer import Transfer
from sgl_tiered.transport.endpoints import tcp_endpoint
from sgl_tiered.transport.knocking import Place
from sgl_tiered.transport.process import Process
from sgl_tiered.transport.release import ReleaseWatch

__all__ = ["NOT_YET", "PROCESS", "Fence", "Fences", "Words"]

PROCESS = "process"
"""Name of a member's processes among its endpoints, one per rank, by commas."""

_MAX_RECORDS = 4096
"""Entries of incarnations that are kept, so that those that are over can be found."""
_PAUSE_S = 1.0
"""Between two questions to who is not done yet."""
NOT_YET = "something of that time may still write"


@dataclass(slots=True, eq=False)
class Fence:
    """The end of all that a peer began in one conversation.

    Attributes:
        mine, peer: the incarnations that talked.
        member: the peer's entry in the registry; None if it was never seen.
        asked: the incarnations of the last question: as who we asked, and whom.
        due_s: when they may be asked again.
        request: the question.
        has_word: the peer has said that it is done.
        safe: whether all ranks' watches know that nothing of it writes any more.
        has_passed: nothing of it writes here any more.
    """

    mine: Incarnation
    peer: Incarnation
    member: Member | None
    asked: tuple[Incarnation, Incarnation] | None = None
    due_s: float = 0.0
    request: Request | None = None
    has_word: bool = False
    safe: Fact | None = None
    has_passed: bool = False

    @property
    def key(self) -> tuple[Incarnation, Incarnation]:
        """What the watch knows it by."""
        return (self.mine, self.peer)


class Fences:
    """All fences that have not passed. One thread calls it.

    Args:
        me: this incarnation.
        requests: to others.
        watch: looks for their processes.
        clock: for pauses between questions.
        facts: what ranks tell each other of what their watches know.
    """

    def __init__(
        self,
        me: Incarnation,
        requests: Requests,
        watch: ReleaseWatch,
        clock: Clock,
        facts: Facts,
    ) -> None:
        self._me = me
        self._facts = facts
        self._clock = clock
        self._requests = requests
        self._watch = watch
        self._view = View(0)
        self._records: OrderedDict[Incarnation, Member] = OrderedDict()
        self._open: dict[tuple[Incarnation, Incarnation], Fence] = {}

    @property
    def num_open(self) -> int:
        """Conversations that are over, with peers that may still write here."""
        return len(self._open)

    def see(self, view: View) -> None:
        """Learn who is there, before anything is done about those who are not."""
        self._view = view
        for member in view.members:
            self._records[(member.instance, member.incarnation)] = member
            self._records.move_to_end((member.instance, member.incarnation))
        while len(self._records) > max(_MAX_RECORDS, len(view.members)):
            self._records.popitem(last=False)
        for fence in self._open.values():
            if fence.member is not None and _has_port_of(view.members, fence.member):
                self._watch.note_over(fence.key)

    def begin_anew(self, me: Incarnation) -> None:
        """Go on as another incarnation; call it when all has been lent for the last."""
        self._me = me

    def open(self, peer: Incarnation) -> Fence:
        """Begin to find out when a peer writes no more; the conversation is over."""
        key = (self._me, peer)
        fence = self._open.get(key)
        if fence is None:
            member = self._records.get(peer)
            fence = Fence(self._me, peer, member)
            self._watch.hold(key, _places(member))
            fence.safe = self._facts.watch(partial(self._is_safe, fence))
            self._open[key] = fence
        return fence

    def poll(self) -> None:
        """Ask who can be asked, and take note of who writes no more."""
        for key, fence in list(self._open.items()):
            if not fence.has_word:
                self._ask(fence)
            if fence.safe is not None and fence.safe.is_common:
                fence.has_passed = True
                self._watch.forget(key)
                del self._open[key]
                if fence.request is not None:
                    self._requests.give_up(fence.request, "it is known by now")

    def _is_safe(self, fence: Fence) -> bool | None:
        """Return whether this rank's watch knows that it is over; None for not yet."""
        return self._watch.is_safe(fence.key, has_word=fence.has_word) or None

    def _ask(self, fence: Fence) -> None:
        request = fence.request
        if request is not None and request.answer is not None:
            fence.request = None
            fence.has_word = not request.answer.refusal
            if request.answer.refusal == NOT_YET:
                fence.asked = None
                fence.due_s = self._clock.now() + _PAUSE_S
        member = self._view.member(fence.peer[0])
        if fence.has_word or fence.request is not None or member is None:
            return
        now = (member.instance, member.incarnation)
        # Who has refused once would do so again.
        if fence.asked != (self._me, now) and fence.due_s <= self._clock.now():
            fence.asked = (self._me, now)
            body = AskDone(fence.peer[1])
            fence.request = self._requests.ask(now, body, is_question=True)


class Words:
    """The answers to others' questions. One thread calls it.

    Args:
        incarnation: of this instance, now.
        left_for: returns what has ended, one way or the other, and may still write to
            the instance of this incarnation.
    """

    def __init__(
        self, incarnation: int, left_for: Callable[[Incarnation], Sequence[Transfer]]
    ) -> None:
        self._mine = {incarnation}
        self._left_for = left_for
        # By who asks and about which incarnation of ours: what was left when it first
        # asked. What fails later is of another conversation.
        self._left: dict[tuple[Incarnation, int], Sequence[Transfer]] = {}

    def begin_anew(self, incarnation: int) -> None:
        """Go on as another incarnation, with what the former ones have begun."""
        self._mine.add(incarnation)
        self._left.clear()

    def see(self, view: View) -> None:
        """Forget the questions of those who are gone."""
        gone = [key for key in self._left if not view.has(*key[0])]
        for key in gone:
            del self._left[key]

    def answer(self, peer: Incarnation, incarnation: int) -> Answer:
        """Say whether all of a former conversation with a peer has settled."""
        if incarnation not in self._mine:
            return Answer("another process was that incarnation")
        key = (peer, incarnation)
        left = self._left.get(key)
        if left is None:
            left = self._left[key] = self._left_for(peer)
        if not all(transfer.is_settled for transfer in left):
            return Answer(NOT_YET)
        del self._left[key]
        return Answer()


def _places(member: Member | None) -> tuple[Place, ...]:
    """Return where the process of an entry can be looked for."""
    if member is None:
        return ()
    try:
        endpoint = tcp_endpoint(member.endpoints.get(CONTROL, ""))
    except ValueError:
        return ()
    names = member.endpoints.get(PROCESS, "").split(",")
    return tuple(dict.fromkeys(Place(endpoint, Process.named(name)) for name in names))


def _has_port_of(members: Sequence[Member], former: Member) -> bool:
    """Return whether another process has the port of one that has left."""
    control = former.endpoints.get(CONTROL, "")
    process = former.endpoints.get(PROCESS, "")
    return bool(control and process) and any(
        member.endpoints.get(CONTROL) == control
        and member.endpoints.get(PROCESS, process) != process
        for member in members
    )
