"""Who of the running requests decodes in the next step, and who waits.

A request with layers on the host needs them all at every step. LayerKV (papers:
layerkv, section 4) streams them: everybody decodes, and the step waits for the link.
That is ``StreamTurns``. It costs link time per step and token, for as long as the
request lives.

``PauseTurns`` is ours. Moving a whole request back to the device costs that time once.
So those whose layers are on the device decode, with as many of the others as stream
within the time of their step and do not slow it more than they add; the rest is paused
until there is room to pull it back.
First come, first decoded, with three exceptions:

- Whose Eq. 1 allowance (``admission/slo.py``) is used up goes before those who can
  still wait, and makes one of these, of those on the device who has had a turn, yield:
  its layers leave, the other's come.
- Who will miss its target in any case comes last; holding others for it saves nothing.
- Who has waited for ``wait_limit_s`` goes first, and others yield to it; if it is not
  back after as long again, one such request a step is streamed at any cost.

A turn that has begun is had to its end, also by one that is streamed because nobody is
on the device. And to those that waited too long the others yield one after the other:
if all that had their turns left at once, nobody would decode while the next ones come.
Without either, each step streams another request whole, whose layers then have the best
claim and are on their way until the next step gives it to somebody else: the device
stands empty and the link is full.

The limit is not below two rounds of turns: a round is a turn for as many as have room
at a time, after each other, and the moves of their layers. With more requests than can
have a turn within ``wait_limit_s`` all would be due at once, and streamed one a step.

Bound: with n requests running, none waits longer between two tokens than twice the
limit and n steps: then each step serves the one that has waited longest, and nobody
else can come to have waited longer. Somebody always decodes, as far as the policy goes;
the engine lets nobody decode for a while where stores read all room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from sgl_tiered.policies.admission.base import NO_TARGET, RunningFacts
from sgl_tiered.policies.admission.slo import allowance_s, is_hopeless

__all__ = [
    "LINK_SHARE",
    "TURN_TOKENS",
    "WAIT_LIMIT_S",
    "BatchTime",
    "PauseTurns",
    "StreamTurns",
    "TurnFacts",
    "TurnPlan",
    "TurnRoom",
    "Turns",
    "device_step_s",
]

WAIT_LIMIT_S = 15.0
"""For requests without a TPOT target, or late in any case. Turns cost moves of layers:
in the simulator, with 6 times as many requests as have room, 15 s give 5 % fewer tokens
than no limit, 10 s give 8 % and 5 s give 39 % fewer."""
TURN_TOKENS = 32
"""Tokens before one may be made to yield: two moves of its layers, of about a step
each on a PCIe link, are then a sixteenth of its turn."""

LINK_SHARE = 0.9
"""Of a step's time, for streaming; simulated, more requests that decode are worth more
than layers that are back sooner (0.5: 5 % fewer tokens)."""

BatchTime = Callable[[int, int], float]
"""Seconds of a step of so many requests with so many tokens of context in all."""


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """A running request: paused or not, its prompt is computed.

    Attributes:
        context_tokens: that its next step attends to.
        host_bytes: of its layers that are on the host alone; 0 for one that decodes
            from the device.
        device_bytes: that come free if its layers leave the device.
        waited_s: since its last token.
        turn_tokens: tokens since it was last paused; of one that never was, any large
            number.
        allowance_s: Eq. 1; ``NO_TARGET`` without a target.
        is_hopeless: it misses its target in any case.
    """

    context_tokens: int
    host_bytes: int
    device_bytes: int
    waited_s: float
    turn_tokens: int
    allowance_s: float = NO_TARGET
    is_hopeless: bool = False

    def with_target(self, facts: RunningFacts, step_s: float) -> TurnFacts:
        """Return them with what Eq. 1 says, if its steps take ``step_s`` each."""
        if facts.tpot_slo_s == NO_TARGET:
            return self
        # Not ``replace``, which costs three times as much: this is done at every step.
        return TurnFacts(
            self.context_tokens,
            self.host_bytes,
            self.device_bytes,
            self.waited_s,
            self.turn_tokens,
            allowance_s(facts, step_s),
            is_hopeless(facts, step_s),
        )


@dataclass(frozen=True, slots=True)
class TurnRoom:
    """What they share.

    Attributes:
        step_s: of the device's computation.
        bytes_per_s: of the link, host to device.
        free_bytes: of the device, for layers that come back.
        device_tokens: whose layers all are on the device at most.
        token_bytes: keys and values of a token over all layers.
        byte_s: that a step takes longer for each byte streamed under it, though the
            link keeps up: copies share memory, and on a CPU the cores.
        coming_bytes: that have room on the device and wait for the link.
        stream_share: of what the link should carry, what it does without a stall.
    """

    step_s: BatchTime
    bytes_per_s: float
    free_bytes: int = 0
    device_tokens: int = 0
    token_bytes: int = 0
    byte_s: float = 0.0
    coming_bytes: int = 0
    stream_share: float = 1.0


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """Who does what; positions in what was shown.

    Attributes:
        decode: ascending; who takes part in the next step. Those of them with layers
            on the host are streamed.
        order: all, those that decode first: layers are pulled back from the front of
            it, and leave from its end (``pressure.py``).
        paused: those that do not decode, in that order.
        yields: of the paused, those whose layers are to leave the device for the first
            of ``paused``.
        claims: all, by their claim to the device, whether they are on it now or not;
            those that yield last (``allotment.py``).
    """

    decode: tuple[int, ...]
    order: tuple[int, ...]
    paused: tuple[int, ...] = ()
    yields: tuple[int, ...] = ()
    claims: tuple[int, ...] = field(default=(), compare=False)


@runtime_checkable
class Turns(Protocol):
    """Decides before each decode step."""

    @property
    def name(self) -> str:
        """The word used in flags and reports."""
        ...

    @property
    def needs_targets(self) -> bool:
        """Whether it looks at Eq. 1; without, it need not be worked out."""
        ...

    def choose(self, running: Sequence[TurnFacts], room: TurnRoom) -> TurnPlan:
        """Return who decodes; somebody does where anybody runs.

        Args:
            running: all, first come first.
            room: what they share.
        """
        ...

    def pace_s(self, num_running: int, context_tokens: int, room: TurnRoom) -> float:
        """Return what a token takes each that takes part (Eq. 1's T_future).

        In turns a request has two clocks. Prefill is charged to the time in which it
        takes part: ``RunningFacts.past_s`` without its pauses, and this. How long it
        waits for a turn, and who waits, is up to ``choose``; to hold a prompt gives a
        turn to nobody. Where nobody is paused, that is Eq. 1 as it stands.

        Args:
            num_running: 1 or more, paused ones included.
            context_tokens: of all of them.
            room: what they share.
        """
        ...


def device_step_s(num_running: int, context_tokens: int, room: TurnRoom) -> float:
    """Return the step of those of so many that have room on the device."""
    share = min(room.device_tokens / max(context_tokens, 1), 1.0)
    decoding = max(int(num_running * share), 1)
    return room.step_s(decoding, int(context_tokens * share))


class StreamTurns:
    """The paper's: everybody decodes, and layers on the host are streamed."""

    name = "stream"
    needs_targets = False

    def choose(self, running: Sequence[TurnFacts], room: TurnRoom) -> TurnPlan:
        """Return all of them."""
        del room
        everybody = tuple(range(len(running)))
        return TurnPlan(everybody, everybody, claims=everybody)

    def pace_s(self, num_running: int, context_tokens: int, room: TurnRoom) -> float:
        """Return a step that waits for what the device has no room for."""
        over = max(context_tokens - room.device_tokens, 0)
        link_s = over * room.token_bytes / room.bytes_per_s
        return max(room.step_s(num_running, context_tokens), link_s)


class PauseTurns:
    """Decodes who is on the device, or streams in time; pauses the others.

    Args:
        wait_limit_s: half of the bound on the wait between two tokens, for a crowd
            whose turns fit into it.
        turn_tokens: tokens before one on the device may be made to yield.
        link_share: of the step's time, for streaming; the rest is for pulling back.
    """

    name = "pause"
    needs_targets = True

    def __init__(
        self,
        wait_limit_s: float = WAIT_LIMIT_S,
        turn_tokens: int = TURN_TOKENS,
        link_share: float = LINK_SHARE,
    ) -> None:
        assert wait_limit_s > 0.0, wait_limit_s
        assert 0.0 <= link_share <= 1.0, link_share
        self._wait_limit_s = wait_limit_s
        self._turn_tokens = turn_tokens
        self._link_share = link_share

    def choose(self, running: Sequence[TurnFacts], room: TurnRoom) -> TurnPlan:
        """Return who decodes; O(n log n)."""
        resident = [n for n, one in enumerate(running) if not one.host_bytes]
        away = [n for n, one in enumerate(running) if one.host_bytes]
        contexts = sum(running[n].context_tokens for n in resident)
        turn_s = self._turn_tokens * room.step_s(max(len(resident), 1), contexts)

        limit_s = self._limit_s(running, len(resident), away, turn_s, room)
        is_empty = not resident

        def rank(position: int) -> tuple[int, float]:
            facts = running[position]
            if self._has_turn(facts, is_empty=is_empty):
                return 0, 0.0
            return self._rank(position, facts, turn_s, limit_s)

        def claim(position: int) -> tuple[int, float]:
            if is_any_due and not running[position].host_bytes:
                return 0, 0.0
            return rank(position)

        away.sort(key=rank)
        is_any_due = any(running[n].waited_s >= limit_s for n in away)
        decode = self._with_streamed(running, resident, away, room, limit_s)
        paused = [n for n in away if n not in decode]
        yields: list[int] = []
        # Who yields while the link is behind leaves room that nobody uses.
        step_s = room.step_s(max(len(decode), 1), contexts)
        is_behind = room.coming_bytes > step_s * room.bytes_per_s
        first = running[paused[0]] if paused else None
        if first and not is_behind and self._is_pressing(first, turn_s, limit_s):
            is_due = first.waited_s >= limit_s
            yields = self._yielding(running, resident, first, room, is_due=is_due)
            decode.difference_update(yields)
        if not decode and away:
            # Never all of them.
            decode.add(away[0])
            paused.remove(away[0])
        waiting = (*paused, *yields)
        order = (*sorted(decode, key=rank), *waiting)
        staying = (n for n in range(len(running)) if n not in yields)
        claims = (*sorted(staying, key=claim), *yields)
        return TurnPlan(tuple(sorted(decode)), order, waiting, tuple(yields), claims)

    def pace_s(self, num_running: int, context_tokens: int, room: TurnRoom) -> float:
        """Return the step of those that have room."""
        return device_step_s(num_running, context_tokens, room)

    def _limit_s(
        self,
        running: Sequence[TurnFacts],
        num_resident: int,
        away: Sequence[int],
        turn_s: float,
        room: TurnRoom,
    ) -> float:
        """Return the wait limit: not below two rounds of turns, moves included."""
        moved_s = sum(running[n].host_bytes for n in away) / room.bytes_per_s
        round_s = turn_s * (1.0 + len(away) / max(num_resident, 1)) + moved_s
        return max(self._wait_limit_s, 2.0 * round_s)

    def _has_turn(self, facts: TurnFacts, *, is_empty: bool) -> bool:
        """Return whether it was pulled back for a turn, or is streamed for one."""
        if facts.turn_tokens >= self._turn_tokens:
            return False
        return not facts.host_bytes or (is_empty and facts.turn_tokens > 0)

    def _rank(
        self, position: int, facts: TurnFacts, turn_s: float, limit_s: float
    ) -> tuple[int, float]:
        """Return a sort key: whose claim to a turn is the best."""
        if facts.waited_s >= limit_s:
            return 1, -facts.waited_s
        if facts.is_hopeless:
            return 4, float(position)
        if self._is_pressing(facts, turn_s, limit_s):
            return 2, facts.allowance_s
        return 3, float(position)

    def _is_pressing(self, facts: TurnFacts, turn_s: float, limit_s: float) -> bool:
        """Return whether it must not wait for a turn of another."""
        if facts.waited_s >= limit_s:
            return True
        return not facts.is_hopeless and facts.allowance_s < turn_s

    def _with_streamed(
        self,
        running: Sequence[TurnFacts],
        resident: Sequence[int],
        away: Sequence[int],
        room: TurnRoom,
        wait_limit_s: float,
    ) -> set[int]:
        """Return the residents, and of the others those that stream in time and pay."""
        decode = set(resident)
        contexts = sum(running[n].context_tokens for n in resident)
        num_bytes = 0
        # The one that has waited longest, in the end whatever it costs: a step that
        # waits for a whole request is several times as long.
        longest = max(away, key=lambda n: running[n].waited_s, default=-1)
        seconds = room.step_s(len(decode), contexts) if decode else 0.0
        # Not the longer step with the streamed ones in it: what was learned at few
        # requests says little of many, and each streamed one would allow the next.
        limit_s = self._link_share * room.step_s(max(len(decode), 1), contexts)
        # Layers that have room come first: until they are there it serves nobody.
        limit_s -= room.coming_bytes / room.bytes_per_s
        limit_s *= room.stream_share
        for n in away:
            facts = running[n]
            contexts_then = contexts + facts.context_tokens
            bytes_then = num_bytes + facts.host_bytes
            step_s = room.step_s(len(decode) + 1, contexts_then)
            seconds_then = step_s + bytes_then * room.byte_s
            in_time = bytes_then / room.bytes_per_s <= limit_s
            # Tokens per second: not fewer than without it.
            pays = seconds_then * len(decode) <= seconds * (len(decode) + 1)
            is_due = n == longest and facts.waited_s >= 2.0 * wait_limit_s
            if is_due or (in_time and pays):
                decode.add(n)
                contexts, num_bytes, seconds = contexts_then, bytes_then, seconds_then
        return decode

    def _yielding(
        self,
        running: Sequence[TurnFacts],
        resident: Sequence[int],
        wanted: TurnFacts,
        room: TurnRoom,
        *,
        is_due: bool,
    ) -> list[int]:
        """Return residents that make room for one, those that can wait longest first.

        None where all that may yield are too few: they would wait for nothing.
        """
        missing = wanted.host_bytes - room.free_bytes
        able = [
            n
            for n in resident
            if running[n].turn_tokens >= self._turn_tokens
            and (is_due or _patience(running[n]) > _patience(wanted))
        ]
        able.sort(key=lambda n: (-_patience(running[n]), -n))
        chosen: list[int] = []
        for n in able:
            if missing <= 0:
                break
            chosen.append(n)
            missing -= running[n].device_bytes
        return chosen if missing <= 0 else []


def _patience(facts: TurnFacts) -> float:
    return NO_TARGET if facts.is_hopeless else facts.allowance_s
