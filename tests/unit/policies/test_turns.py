"""Who decodes, who is streamed, who is paused and who makes room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgl_tiered.policies.admission.base import NO_TARGET, RunningFacts
from sgl_tiered.policies.layers.join import JoinTurns
from sgl_tiered.policies.layers.registry import TURNS, make_turns
from sgl_tiered.policies.layers.turns import (
    LINK_SHARE,
    PauseTurns,
    StreamTurns,
    TurnFacts,
    TurnPlan,
    TurnRoom,
    Turns,
)
from sgl_tiered.policies.length.base import LengthPrediction

STEP_S = 0.02
RATE = 1e9
ROOM = TurnRoom(lambda batch, contexts: STEP_S, RATE)
IN_TIME = int(STEP_S * RATE * LINK_SHARE)
"""Bytes that stream within what steps leave the link for that."""
HERE = TurnFacts(100, 0, 50_000_000, 0.0, 64)
AWAY = TurnFacts(100, 50_000_000, 0, 1.0, 0)


def paused(allowance_s: float, **settings: object) -> TurnFacts:
    return replace(AWAY, allowance_s=allowance_s, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TURNS)
def test_they_are_turns(name: str) -> None:
    """With nobody away all decode, in order; nobody is nobody."""
    turns = make_turns(name)
    assert isinstance(turns, Turns)
    assert turns.name == name
    assert turns.choose([HERE] * 3, ROOM) == TurnPlan((0, 1, 2), (0, 1, 2))
    assert turns.choose([], ROOM) == TurnPlan((), ())


def test_the_paper_streams_everybody() -> None:
    """Nobody waits, whatever the link has to carry."""
    plan = StreamTurns().choose([AWAY, HERE, AWAY], ROOM)
    assert plan == TurnPlan((0, 1, 2), (0, 1, 2))


def test_who_does_not_stream_in_time_is_paused() -> None:
    """First come first back, behind nobody's back."""
    plan = PauseTurns().choose([AWAY, HERE, AWAY], ROOM)
    assert plan == TurnPlan((1,), (1, 0, 2), (0, 2))


def test_some_stream_in_time() -> None:
    """Some layers' worth of bytes each: as many as a step carries."""
    part = replace(AWAY, host_bytes=IN_TIME // 2)
    plan = PauseTurns().choose([HERE, part, part, part], ROOM)
    assert plan == TurnPlan((0, 1, 2), (0, 1, 2, 3), (3,))


def test_less_is_streamed_where_steps_stalled() -> None:
    """Half of what the link should carry: one of the two that would be in time."""
    part = replace(AWAY, host_bytes=IN_TIME // 2)
    room = replace(ROOM, stream_share=0.6)
    assert PauseTurns().choose([HERE, part, part], room).decode == (0, 1)


def test_who_slows_the_others_more_than_it_adds_is_paused() -> None:
    """Two decode at 100 tokens/s; a third that makes the step 30 ms adds nothing more.

    Copies take cores and memory bandwidth from the step, as measured.
    """
    part = replace(AWAY, host_bytes=IN_TIME // 2)
    just = 0.010 / (IN_TIME // 2)
    for byte_s, decode in ((0.9 * just, (0, 1, 2)), (1.1 * just, (0, 1))):
        room = replace(ROOM, byte_s=byte_s)
        assert PauseTurns().choose([HERE, HERE, part], room).decode == decode


def test_those_streamed_do_not_allow_more_streaming() -> None:
    """However long a step of more is said to be: it was learned from few."""
    room = replace(ROOM, step_s=lambda batch, contexts: STEP_S * batch)
    part = replace(AWAY, host_bytes=int(0.6 * IN_TIME))
    assert PauseTurns().choose([HERE, part, part], room).decode == (0, 1)


def test_who_came_first_has_the_claim_though_it_is_away() -> None:
    """And who yields has none."""
    assert PauseTurns().choose([AWAY, HERE, AWAY], ROOM).claims == (0, 1, 2)
    here = [replace(HERE, allowance_s=value) for value in (2.0, 9.0, 4.0)]
    assert PauseTurns().choose([*here, paused(0.1)], ROOM).claims == (3, 0, 2, 1)


def test_somebody_always_decodes() -> None:
    """With all layers of all on the host the first is streamed."""
    plan = PauseTurns().choose([AWAY, AWAY], ROOM)
    assert plan == TurnPlan((0,), (0, 1), (1,))


def test_the_first_without_time_to_wait_goes_first() -> None:
    """A turn of 32 steps is 0.64 s: less allowance than that presses."""
    here = replace(HERE, allowance_s=0.05)
    waiting = [paused(5.0), paused(0.5), paused(0.1)]
    plan = PauseTurns().choose([here, *waiting], ROOM)
    assert plan.paused == (3, 2, 1)


def test_who_is_late_in_any_case_comes_last() -> None:
    """Its allowance is the least, and nobody makes room for it."""
    lost = paused(-9.0, is_hopeless=True)
    plan = PauseTurns().choose([HERE, lost, paused(5.0)], ROOM)
    assert plan == TurnPlan((0,), (0, 2, 1), (2, 1))


def test_who_can_wait_longest_makes_room() -> None:
    """And only as many as it takes: 50 MB are wanted, each has as much."""
    here = [replace(HERE, allowance_s=value) for value in (2.0, 9.0, 4.0)]
    plan = PauseTurns().choose([*here, paused(0.1)], ROOM)
    assert plan == TurnPlan((0, 2), (0, 2, 3, 1), (3, 1), (1,))


def test_nobody_makes_room_in_vain() -> None:
    """Who has had no turn yet stays; what the others have is not enough."""
    here = [HERE, replace(HERE, turn_tokens=3)]
    wanted = paused(0.1, host_bytes=80_000_000)
    plan = PauseTurns().choose([*here, wanted], ROOM)
    assert plan == TurnPlan((0, 1), (1, 0, 2), (2,))
    roomy = replace(ROOM, free_bytes=30_000_000)
    assert PauseTurns().choose([*here, wanted], roomy).yields == (0,)
    enough = replace(ROOM, free_bytes=80_000_000)
    assert PauseTurns().choose([*here, wanted], enough).yields == ()


def test_what_has_room_goes_over_the_link_first() -> None:
    """Streaming gets what returns leave, and nobody yields while they are behind."""
    part = replace(AWAY, host_bytes=IN_TIME // 2)
    some = replace(ROOM, coming_bytes=IN_TIME // 2)
    assert PauseTurns().choose([HERE, part, part], some).decode == (0, 1)
    wanted = paused(0.1)
    in_step = replace(ROOM, coming_bytes=int(STEP_S * RATE))
    assert PauseTurns().choose([HERE, wanted], in_step).yields == (0,)
    behind = replace(ROOM, coming_bytes=int(STEP_S * RATE * 1.1))
    assert PauseTurns().choose([HERE, wanted], behind) == TurnPlan((0,), (0, 1), (1,))


def test_those_with_room_join_in_order() -> None:
    """As many as come within a step; nobody passes, nobody yields."""
    part = replace(AWAY, host_bytes=int(STEP_S * RATE) // 2, allowance_s=-1.0)
    plan = JoinTurns().choose([part, HERE, part, part], ROOM)
    assert plan == TurnPlan((0, 1, 2), (0, 1, 2, 3), (3,))
    small = replace(AWAY, host_bytes=1)
    late = replace(AWAY, waited_s=1e6, allowance_s=0.0)
    assert JoinTurns().choose([HERE, late, small], ROOM).paused == (1, 2)
    assert JoinTurns().choose([late, late], ROOM) == TurnPlan((0,), (0, 1), (1,))


def test_who_can_wait_less_does_not_yield() -> None:
    """Two that press do not take the device from each other."""
    here = replace(HERE, allowance_s=0.05)
    plan = PauseTurns().choose([here, paused(0.1)], ROOM)
    assert plan.yields == ()


def test_who_waited_too_long_decodes_at_any_cost() -> None:
    """One a step, the longest wait first; and somebody makes room for the next."""
    turns = PauseTurns(wait_limit_s=2.0, turn_tokens=1)
    here = replace(HERE, allowance_s=-5.0)
    waits = [paused(NO_TARGET, waited_s=value) for value in (2.5, 3.9)]
    plan = turns.choose([here, *waits], ROOM)
    assert plan == TurnPlan((2,), (2, 1, 0), (1, 0), (0,))
    both = [here, here, *waits]
    assert turns.choose(both, ROOM) == TurnPlan((0,), (0, 3, 2, 1), (3, 2, 1), (1,))
    late = [paused(NO_TARGET, waited_s=value) for value in (4.5, 6.0)]
    plan = turns.choose([here, *late], ROOM)
    assert plan == TurnPlan((2,), (2, 1, 0), (1, 0), (0,))


def test_a_turn_is_had_to_its_end() -> None:
    """With an empty device one is streamed until its layers are there, not each once.

    Whoever's layers have come goes before it, and on a device that somebody decodes
    from nobody is streamed for a turn.
    """
    turns = PauseTurns(wait_limit_s=2.0, turn_tokens=4)
    due = paused(NO_TARGET, waited_s=3.0)
    begun = paused(NO_TARGET, waited_s=0.0, turn_tokens=1)
    plan = turns.choose([due, begun, due], ROOM)
    assert (plan.decode, plan.claims) == ((1,), (1, 0, 2))
    over = replace(begun, turn_tokens=4)
    assert turns.choose([due, over, due], ROOM).decode == (0,)
    here = replace(HERE, turn_tokens=0)
    plan = turns.choose([due, begun, due, here], ROOM)
    assert (plan.decode, plan.claims) == ((3,), (3, 0, 2, 1))
    # In the end it does not hold up the one that has waited longest.
    late = replace(due, waited_s=30.0)
    assert turns.choose([due, begun, late], ROOM).decode == (2,)


def test_one_after_the_other_yields_to_those_that_are_due() -> None:
    """The rest decode from the device until they yield in their turn."""
    turns = PauseTurns(wait_limit_s=2.0, turn_tokens=1)
    here = replace(HERE, allowance_s=-5.0)
    due = [paused(NO_TARGET, waited_s=value) for value in (2.6, 2.9)]
    plan = turns.choose([AWAY, here, here, here, *due], ROOM)
    assert plan.yields == (3,)
    assert plan.claims == (1, 2, 5, 4, 0, 3)


def test_a_crowd_is_due_later() -> None:
    """8 that are away need 9 turns of 0.64 s and 8 moves of 50 ms: 6.16 s a round."""
    turns = PauseTurns(wait_limit_s=2.0)
    here = replace(HERE, allowance_s=-5.0)
    crowd = [paused(NO_TARGET, waited_s=value) for value in (12.3, *[1.0] * 7)]
    assert turns.choose([here, *crowd], ROOM).yields == ()
    crowd[0] = replace(crowd[0], waited_s=12.4)
    assert turns.choose([here, *crowd], ROOM).yields == (0,)
    busy = replace(here, turn_tokens=3)
    crowd[0] = replace(crowd[0], waited_s=24.6)
    assert turns.choose([busy, *crowd], ROOM).decode == (0,)
    crowd[0] = replace(crowd[0], waited_s=24.7)
    assert turns.choose([busy, *crowd], ROOM).decode == (0, 1)


def test_a_claim_to_the_device() -> None:
    """A turn first, then who presses, then first come; who is lost comes last."""
    here = [
        replace(HERE, is_hopeless=True),
        HERE,
        replace(HERE, allowance_s=0.3),
        replace(HERE, turn_tokens=3),
    ]
    assert PauseTurns().choose([*here, AWAY], ROOM).order == (3, 2, 1, 0, 4)


def test_paces_by_hand() -> None:
    """20 requests of 100 tokens, room for 500 of them; a token is a megabyte."""
    room = TurnRoom(
        lambda batch, contexts: 0.01 + 1e-3 * batch + 1e-5 * contexts,
        RATE,
        device_tokens=500,
        token_bytes=1_000_000,
    )
    # The 1,500 tokens without room stream for 1.5 s; or 5 decode, and 15 wait.
    assert StreamTurns().pace_s(20, 2_000, room) == pytest.approx(1.5)
    for waiting in (PauseTurns(), JoinTurns()):
        assert waiting.pace_s(20, 2_000, room) == pytest.approx(0.02)
    for turns in (StreamTurns(), PauseTurns()):
        assert turns.pace_s(4, 400, room) == pytest.approx(0.018)


def test_facts_with_a_target() -> None:
    """Eq. 1 by hand: 9 + 10 tokens of 50 ms, less 0.3 s and 10 steps of 20 ms."""
    running = RunningFacts("r", 9, 0.3, 0.05, LengthPrediction(20, 30, 40))
    found = HERE.with_target(running, STEP_S)
    assert found.allowance_s == pytest.approx(19 * 0.05 - 0.3 - 10 * STEP_S)
    assert not found.is_hopeless
    late = HERE.with_target(replace(running, past_s=5.0), STEP_S)
    assert late.is_hopeless
    free = replace(running, tpot_slo_s=NO_TARGET)
    assert HERE.with_target(free, STEP_S) == HERE
