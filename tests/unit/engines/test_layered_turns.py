"""Targets, the forecast and pauses of layer-wise KV in SGLang, on stand-ins."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.decoders import Decoders
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.facts import LayerFacts
from sgl_tiered.engines.sglang.layered.forecasting import LayerForecast
from sgl_tiered.engines.sglang.layered.turns import DecodeTurns
from sgl_tiered.engines.sglang.lengths import LengthReader
from sgl_tiered.layered.base import LayerRoom
from sgl_tiered.policies.admission.base import NO_TARGET, RunningFacts
from sgl_tiered.policies.admission.slo import allowance_s
from sgl_tiered.policies.layers.registry import make_turns
from sgl_tiered.policies.length.base import LengthPrediction
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.length.constant import ConstantLength
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.layered.pauses import PauseLog
from sgl_tiered.serving.options import LayerKv, Options, Slo

LAYERS, PAGE, LENGTH = 4, 16, 101
LAYOUT = PageLayout(LAYERS, PAGE, token_bytes=8)
PLAN = LayerPlan(LAYOUT, 1_000, 1_020, 10, LayerKv())
NOW_S, STEP_S, LINK = 100.0, 0.02, 1e6
PAGES = 6
"""Of each prompt, whole ones."""


COST: Any = SimpleNamespace(
    seconds=lambda batch, contexts: STEP_S, byte_s=0.0, share=1.0
)


def request(
    rid: str, num_out: int = 1, first_s: float = NOW_S, tail: int = 1, **custom: Any
) -> Any:
    params = {"tiered": custom} if custom else None
    return SimpleNamespace(
        rid=rid,
        kv=SimpleNamespace(kv_committed_len=PAGES * PAGE + tail),
        origin_input_ids=[7] * (PAGES * PAGE),
        output_ids=[8] * num_out,
        extra_key=None,
        cache_salt=None,
        sampling_params=SimpleNamespace(max_new_tokens=1_000, custom_params=params),
        time_stats=SimpleNamespace(prefill_finished_time=first_s),
        finished=lambda: False,
        to_finish=None,
    )


class FakeLayers:
    """Manager, driver and admission in one: says what it was told to, and notes."""

    def __init__(self, clock: ManualClock) -> None:
        self.manager = self
        self.plan = PLAN
        self.binding = SimpleNamespace(num_adrift=0)
        self.facts = LayerRoom(free=500, spare=0, landing=0, cached=0, total=1_000)
        self.is_away: dict[str, int] = {}
        self.kept: dict[str, Any] = {}
        self.pauses = PauseLog(clock)
        self.released: list[str] = []
        self.pulled: list[str] = []
        self.pushed: list[int] = []
        self.relieved: list[tuple[list[str], int]] = []

    def poll(self) -> None:
        pass

    def see(self, reqs: Any) -> None:
        pass

    def room(self) -> LayerRoom:
        return self.facts

    def away(self, rids: list[str]) -> Any:
        return np.array([self.is_away.get(rid, 0) for rid in rids], np.int64)

    def whole_pages(self, req: Any) -> int:
        return PAGES

    def may_leave(self, req: Any) -> bool:
        return True

    def held(self, rid: str) -> Any:
        return self.kept.get(rid, np.ones(LAYERS, np.bool_))

    def num_held(self, rids: list[str]) -> list[int]:
        return [int(self.held(rid).sum()) for rid in rids]

    def missing(self, rid: str) -> int:
        return self.is_away.get(rid, 0)

    def make_room(self, wanted: int) -> bool:
        return self.facts.free >= wanted

    def release(self, rid: str, layers: Any) -> int:
        self.released.append(rid)
        self.kept[rid] = self.held(rid) & ~layers
        return 0

    def relieve(self, claims: Any, missing: int) -> int:
        self.relieved.append(([req.rid for req in claims], missing))
        return 2

    def hold(self, rid: str, layers: Any) -> int:
        self.kept[rid] = self.held(rid) | layers
        return 0

    def pull(self, rid: str, most: int | None = None) -> int:
        assert most is None, "nobody begins a page"
        self.pulled.append(rid)
        return self.is_away[rid]

    def push(self, count: int) -> int:
        self.pushed.append(count)
        return count

    def paused(self, rids: list[str]) -> None:
        self.pauses.left_out(rids)


class Rig:
    """Turns over requests of six pages, in steps of 20 ms."""

    def __init__(
        self, tpot_s: float = 0.0, *, predicts: bool = True, decode: str = "pause"
    ) -> None:
        self.clock = ManualClock(NOW_S)
        self.layers = FakeLayers(self.clock)
        config = Options(slo=Slo(slo_tpot_s=tpot_s))
        reader = LengthReader(LengthBook(ConstantLength(LENGTH)))
        self.decoders = Decoders(
            config, reader if predicts else None, Agreement(self.clock)
        )
        layers: Any = self.layers
        policy = make_turns(decode)
        self.facts = LayerFacts(
            layers, PLAN, policy, self.decoders, COST, lambda: LINK, self.clock
        )
        self.forecast = LayerForecast(layers, self.decoders.tokens_left)
        self.turns = DecodeTurns(layers, layers, policy, self.facts, self.forecast)

    def told(self, *reqs: Any) -> Any:
        reading = self.facts.read(reqs)
        return self.facts.turns(reqs, reading, self.facts.turn_room(reading))

    def room(self, **counts: int) -> None:
        self.layers.facts = replace(self.layers.facts, **counts)


def test_a_server_s_target_gives_every_request_its_allowance():
    """Eq. 1 by hand: 10 of 100 further tokens in 3 s, 90 more of 20 ms, 50 ms each."""
    (told,) = Rig(0.05).told(request("a", 11, NOW_S - 3.0))
    assert told.allowance_s == pytest.approx(0.05 * 100 - 3.0 - 0.02 * 90)
    assert not told.is_hopeless
    running = RunningFacts("a", 10, 3.0, 0.05, LengthPrediction(LENGTH, LENGTH, LENGTH))
    assert told.allowance_s == allowance_s(running, STEP_S)


def test_a_request_s_own_target_goes_before_the_server_s():
    """One asks for more, one for none, one for what cannot be met any more."""
    reqs = [
        request("a", 11, NOW_S - 3.0, tpot_s=0.1),
        request("b", 11, NOW_S - 3.0, tpot_s=None),
        request("c", 11, NOW_S - 3.0, tpot_s=0.01),
    ]
    more, none, lost = Rig(0.05).told(*reqs)
    assert more.allowance_s == pytest.approx(0.1 * 100 - 3.0 - 0.02 * 90)
    assert (none.allowance_s, none.is_hopeless) == (NO_TARGET, False)
    assert lost.is_hopeless


def test_without_a_target_nothing_is_worked_out():
    """No target, or nobody who predicts lengths: no Eq. 1, and no prediction asked."""
    rig = Rig()
    rig.decoders.running = None  # type: ignore[assignment, method-assign]
    (told,) = rig.told(request("a"))
    assert told.allowance_s == NO_TARGET
    (told,) = Rig(0.05, predicts=False).told(request("a"))
    assert told.allowance_s == NO_TARGET


def test_who_must_not_wait_takes_the_place_of_who_can():
    """The same two requests, with the targets the one way and the other."""
    for wanted, patient, yields in ((0.021, 1.0, ["a"]), (1.0, 0.021, [])):
        rig = Rig()
        rig.layers.is_away["b"] = LAYERS * PAGES
        rig.layers.kept["b"] = np.zeros(LAYERS, np.bool_)
        rig.turns._usable = 8 + 28 + LAYERS * PAGES
        reqs = [
            request("a", tpot_s=patient),
            request("b", 2, NOW_S - 0.01, tpot_s=wanted),
        ]
        # Over a link that takes a second for b's layers.
        rig.facts._link = lambda: 10_000.0
        rig.turns.choose(reqs)
        assert rig.layers.released == yields


def test_t_future_is_the_step_of_those_that_have_room():
    """Pauses are not charged (Eq. 1's past leaves them out as well)."""
    rig = Rig()
    tokens = (1_000 - 20) // LAYERS * PAGE
    for num, contexts in ((8, tokens), (8, 4 * tokens), (0, 0)):
        assert rig.facts.pace_s(num, contexts) == pytest.approx(STEP_S)


def test_the_forecast_by_hand():
    """Two stages of a page in all layers each; who ends gives back what it holds."""
    rig = Rig()
    assert rig.forecast.ahead([]) == 0
    assert rig.forecast.ahead([request("a"), request("b")]) == 2 * 2 * LAYERS
    # b ends within the first stage, a within the second.
    ending = [request("a", LENGTH - 20), request("b", LENGTH - 3)]
    assert rig.forecast.ahead(ending) == 0
    # One that holds but a layer gives less than the other takes.
    rig.layers.kept["b"] = np.zeros(LAYERS, np.bool_)
    some = [request("a"), request("b", LENGTH - 3, tail=0), request("c"), request("d")]
    assert rig.forecast.ahead(some) == 2 * 3 * LAYERS


def test_without_a_predictor_an_answer_ends_at_its_allowance():
    """Which is all that is known of it; without an allowance it does not end."""
    rig = Rig(predicts=False)
    one = request("a", 990)
    assert rig.decoders.tokens_left(one) == 10
    one.sampling_params.max_new_tokens = None
    assert rig.decoders.tokens_left(one) > 1_000_000


def test_a_prompt_keeps_what_will_be_left():
    """Free and cached pages, less two stages of those that run, less the threshold."""
    rig = Rig()
    room = replace(rig.layers.facts, free=100, cached=30, spare=500, landing=500)
    assert rig.forecast.to_keep([], room) == 130 - 20
    assert rig.forecast.to_keep([request("a")], room) == 130 - 20 - 2 * LAYERS


def test_layers_leave_before_their_room_is_needed():
    """Cached pages go first, then as much of requests as is missing, the last first."""
    rig = Rig()
    reqs = [request("a"), request("b")]
    rig.room(free=36)
    assert rig.turns.choose(reqs) == [0, 1]
    assert (rig.layers.relieved, rig.layers.pushed) == ([], [])
    rig.room(free=25)
    rig.turns.choose(reqs)
    # 25 - 16 are 11 below the threshold of 20.
    assert rig.layers.relieved == [(["a", "b"], 11)]
    rig.room(free=25, cached=4)
    rig.turns.choose(reqs)
    assert rig.layers.pushed == [4]
    assert rig.layers.relieved[-1] == (["a", "b"], 7)
    # What is on its way to the host counts: nothing is sent twice.
    rig.room(free=25, cached=0, landing=11)
    rig.turns.choose(reqs)
    assert len(rig.layers.relieved) == 2
    assert rig.forecast.counters() == {
        "layerkv_forecasts": 4,
        "layerkv_forecasts_below": 2,
        "layerkv_pressure_releases": 4,
        "layerkv_pressure_pushed_pages": 4,
    }


def test_only_what_will_have_room_is_pulled_back():
    """Three have 24 layer-pages each, and an open page of 4.

    Two that decode will take 16 more, and 20 stay free.
    """
    others = 12 + 16 + 20
    for room, num_kept in (
        (others + 72, LAYERS),
        (others + 71, LAYERS - 1),
        (others + 48 + 5, 0),
    ):
        rig = Rig()
        rig.layers.is_away["c"] = LAYERS * PAGES
        rig.layers.kept["c"] = np.zeros(LAYERS, np.bool_)
        rig.facts._link = lambda: 10_000.0
        rig.turns._usable = room
        chosen = rig.turns.choose([request("a"), request("b"), request("c")])
        assert chosen == [0, 1]
        assert rig.layers.num_held(["a", "b", "c"]) == [LAYERS, LAYERS, num_kept]
        assert rig.layers.pulled == ["c"] * (num_kept > 0)
        assert rig.layers.released == []


def test_who_came_last_leaves_where_room_is_short():
    """Evenly, a layer at a time, and then the one before it."""
    reqs = [request("a"), request("b"), request("c")]
    for room, kept in (
        (24, [4, 4, 4]),
        (23, [4, 4, 3]),
        (5, [4, 4, 0]),
        (-1, [4, 3, 0]),
    ):
        rig = Rig()
        rig.turns._usable = 12 + 24 + 20 + 48 + room
        assert rig.turns.choose(reqs) == [0, 1, 2]
        assert rig.layers.num_held(["a", "b", "c"]) == kept


def test_what_the_next_step_takes_is_not_given_away():
    """Who ends soon leaves a great deal, but has its next page before that."""
    rig = Rig()
    ending = [request("a", LENGTH - 3, tail=0)]
    assert rig.forecast.reserve(ending) == 20 + LAYERS
    assert rig.forecast.reserve(ending * 11) == 20 + 11 * LAYERS


def test_pauses_are_counted_and_timed():
    """From the step that one is left out of to the forward that it is in."""
    clock = ManualClock(5.0)
    log = PauseLog(clock)
    for _ in range(2):
        log.left_out(["a"])
        clock.advance(0.5)
        log.takes_part(["b"])
    assert (log.of("a"), log.of("b"), log.num_steps) == ((2, 1.0), (0, 0.0), 2)
    log.takes_part(["a", "b"])
    clock.advance(9.0)
    assert log.of("a") == (2, 1.0)
    log.left_out(["a"])
    clock.advance(0.25)
    assert log.of("a") == (3, 1.25)
    log.forget("a")
    assert (log.of("a"), log.seconds) == ((0, 0.0), 1.25)
    log.takes_part(["a"])


def test_those_left_out_are_told():
    """Who waits for its layers is noted, step by step."""
    rig = Rig()
    rig.layers.is_away["b"] = LAYERS * PAGES
    rig.facts._link = lambda: 10_000.0
    reqs = [request("a"), request("b")]
    for _ in range(3):
        assert rig.turns.choose(reqs) == [0]
        rig.clock.advance(0.02)
    assert rig.layers.pauses.of("b") == (3, pytest.approx(0.06))
