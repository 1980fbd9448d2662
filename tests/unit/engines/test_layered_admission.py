"""Room for layers beside TPOT targets in SGLang's adder, and steps that find room."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.decode import DecodeCost
from sgl_tiered.cost.streaming import StreamingCost
from sgl_tiered.engines.sglang.decoders import Decoders
from sgl_tiered.engines.sglang.layered.admission import (
    LayerAdmission,
    _layered_adder_class,
)
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.driver import LayerDriver, NoRoomError
from sgl_tiered.engines.sglang.layered.facts import LayerFacts
from sgl_tiered.engines.sglang.layered.forecasting import LayerForecast
from sgl_tiered.engines.sglang.layered.turns import DecodeTurns
from sgl_tiered.engines.sglang.lengths import LengthReader
from sgl_tiered.engines.sglang.slo_admission import ServedAdmission, _slo_adder_class
from sgl_tiered.layered.base import PassRequest
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.policies.layers.registry import make_turns
from sgl_tiered.policies.layers.turns import TurnPlan
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.length.constant import ConstantLength
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.options import LayerKv, Options, Slo
from sgl_tiered.testing.fake_layers import FakeLayerCopier

LAYERS, PAGE, LENGTH = 4, 4, 31
TOKEN_S, STEP_S, TPOT_S = 1e-3, 0.02, 0.05
NOW_S = 200.0
HALF = 20


class AddReqResult(enum.Enum):
    """SGLang's verdicts."""

    OTHER = 3


class Chosen(NamedTuple):
    """SGLang's shape of a prefill, by its names."""

    prefix_len: int
    extend_len: int
    max_new_tokens: int
    is_chunked: bool
    replay_len: int


class FakeAdder:
    """Admits whole prompts, or a chunk of them."""

    def __init__(self, running: list[Any]) -> None:
        self.running_batch = SimpleNamespace(reqs=running, is_empty=lambda: not running)
        self.rem_chunk_tokens = 512
        self.rem_input_tokens = 16_384
        self.new_chunked_req = None
        self.chunked_req_limit = None
        self.dllm_config = None
        self.can_run_list: list[Any] = []
        self.continued: list[tuple[str, int | None]] = []
        self.refuses = False

    def _select_prefill_admission(self, req: Any, **facts: Any) -> Chosen:
        num_tokens = len(req.full_untruncated_fill_ids) - req.prefix_len
        return Chosen(req.prefix_len, num_tokens, 8, False, 0)

    def _commit_prefill_admission(self, req: Any, chosen: Chosen) -> None:
        self.can_run_list.append(req)

    def add_one_req(self, req: Any, num_asks: int = 1) -> bool:
        """Ask so often, as after loads that failed; refuse or admit it then."""
        for _ in range(num_asks):
            found = self._select_prefill_admission(req)
        if isinstance(found, AddReqResult) or self.refuses:
            return False
        self._commit_prefill_admission(req, found)
        return True

    def add_chunked_req(self, req: Any) -> Any:
        if self.refuses:
            return req
        self.continued.append((req.rid, self.chunked_req_limit))
        self.can_run_list.append(req)
        return None


def request(
    rid: str, num_prompt: int = 400, num_out: int = 0, max_new: int = 30
) -> Any:
    return SimpleNamespace(
        rid=rid,
        kv=SimpleNamespace(kv_committed_len=num_prompt + max(num_out - 1, 0)),
        origin_input_ids=[7] * num_prompt,
        output_ids=[8] * num_out,
        full_untruncated_fill_ids=[7] * num_prompt,
        prefix_len=0,
        extra_key=None,
        cache_salt=None,
        sampling_params=SimpleNamespace(max_new_tokens=max_new, custom_params=None),
        time_stats=SimpleNamespace(
            prefill_finished_time=NOW_S, scheduler_recv_time=NOW_S
        ),
        finished=lambda: False,
        to_finish=None,
    )


class FakeRoom:
    """A layer admission that has room or not, and was asked."""

    def __init__(self) -> None:
        self.has_room = True
        self.asked: list[tuple[str, str, int]] = []

    def begin(self, running: Any) -> None:
        pass

    def admit(self, req: Any, prefix: int, new: int, *, is_alone: bool) -> bool:
        self.asked.append(("admit", req.rid, new))
        return self.has_room

    def goes_on(self, req: Any, new: int, *, is_alone: bool) -> bool:
        self.asked.append(("goes on", req.rid, new))
        return self.has_room

    def commit(self) -> None:
        pass

    def cancel(self) -> None:
        pass


class Both:
    """SLO admission and layers over one decoder that can spare ``slack_s``."""

    def __init__(
        self,
        slack_s: float,
        *,
        slo: bool = True,
        pace_s: Any = None,
        paused_s: Any = None,
    ) -> None:
        self.clock = ManualClock(NOW_S)
        config = Options(slo=Slo("slo", 150.0, TPOT_S, 30.0))
        runtime = SimpleNamespace(
            predicted_pass_s=lambda rid, prefix, new: new * TOKEN_S
        )
        self.slo = ServedAdmission(
            config,
            runtime,
            LengthReader(LengthBook(ConstantLength(51))),
            DecodeCost(STEP_S, 0.0, 0.0),
            self.clock,
            page_tokens=16,
            chunk_tokens=512,
            pace_s=pace_s,
            paused_s=paused_s,
        )
        decoder = request("d", 10, 11, 1_000)
        past_s = TPOT_S * 50 - STEP_S * 40 - slack_s
        decoder.time_stats.prefill_finished_time = NOW_S - past_s
        self.running = [decoder]
        self.room = FakeRoom()
        self.reasons: list[str] = []
        scheduler = SimpleNamespace(
            waiting_queue=[], chunked_req=None, enable_priority_scheduling=False
        )
        base: Any = FakeAdder
        if slo:
            base = _slo_adder_class(
                base, scheduler, self.slo, AddReqResult, self.says("slo")
            )
        room: Any = self.room
        self.make = _layered_adder_class(
            base, scheduler, room, AddReqResult, self.says("layers")
        )

    def says(self, reason: str) -> Any:
        return lambda: self.reasons.append(reason)

    def adder(self) -> Any:
        return self.make(self.running)


def test_layers_are_asked_for_what_the_targets_allow():
    """0.3 s are 288 tokens: room is sought for these and no more."""
    both = Both(0.3)
    assert both.adder()._select_prefill_admission(request("a")).extend_len == 288
    assert both.room.asked == [("admit", "a", 288)]
    adder, long = both.adder(), request("b", 2_000)
    adder.add_chunked_req(long)
    assert adder.continued == [("b", 288)]
    assert both.room.asked[1:] == [("goes on", "b", 288)]


def test_no_layer_leaves_for_a_prompt_that_is_held():
    """The targets are asked first; the reason is theirs."""
    both = Both(0.0)
    adder = both.adder()
    assert adder._select_prefill_admission(request("a")) is AddReqResult.OTHER
    assert adder.add_chunked_req(request("b", 2_000)).rid == "b"
    assert both.room.asked == []
    assert both.reasons == ["slo", "slo"]


@pytest.mark.parametrize("slo", [True, False])
def test_a_prompt_without_room_for_its_layers_says_so(slo: bool):
    """With and without targets; a prompt in progress stays the one in progress."""
    both = Both(1.0, slo=slo)
    both.room.has_room = False
    adder, long = both.adder(), request("b", 2_000)
    assert adder._select_prefill_admission(request("a")) is AddReqResult.OTHER
    assert adder.add_chunked_req(long) is long
    assert (adder.continued, adder.rem_input_tokens) == ([], 0)
    assert both.reasons == ["layers", "layers"]
    assert [kind for kind, _, _ in both.room.asked] == ["admit", "goes on"]


def test_what_finds_no_room_has_not_been_let_in():
    """A due prompt is let in out of turn once, and not kept waiting for its failure."""
    both = Both(0.0)
    late = request("a")
    late.time_stats.scheduler_recv_time = NOW_S - 150.0
    both.room.has_room = False
    assert not both.adder().add_one_req(late)
    assert both.slo.stats()["hurried"] == 0
    both.room.has_room = True
    assert both.adder().add_one_req(late)
    assert both.slo.stats()["hurried"] == 1


def test_eq_2_reckons_with_the_turns():
    """The decoder can spare 0.5 s if it is in each step, 0.1 s if in two of three."""
    assert Both(0.5).adder()._select_prefill_admission(request("a")).extend_len == 400
    both = Both(0.5, pace_s=lambda num, contexts: 1.5 * STEP_S)
    assert both.adder()._select_prefill_admission(request("a")).extend_len == 96


def test_prefill_is_not_charged_for_pauses():
    """One that waits for a turn holds nobody, and what it waited is not its past."""
    for paused_s, new in ((None, 400), (0.3, 288), (0.0, 0)):
        both = Both(0.0, paused_s=lambda rid, paused_s=paused_s: paused_s)
        found = both.adder()._select_prefill_admission(request("a"))
        assert getattr(found, "extend_len", 0) == new


class Device:
    """Layers of a real manager under requests that decode, and nobody else."""

    def __init__(self, capacity: int, *, looks_ahead: bool = True) -> None:
        self.clock = ManualClock(NOW_S)
        num_layer_pages = 2 * HALF + capacity
        layout = PageLayout(LAYERS, PAGE, token_bytes=8)
        plan = LayerPlan(layout, 200, num_layer_pages, HALF, LayerKv())
        copier = FakeLayerCopier(LAYERS, 201, num_layer_pages + 1, PAGE)
        self.mover = LayerMover(copier, layout.layer_page_bytes, self.clock)
        binding = LayerBinding(LAYERS, 201, num_layer_pages, first_physical=1)
        self.manager = LayerManager(binding, self.mover, PAGE, plan.half_pages)
        self.driver = LayerDriver(self.manager, plan)
        decoders = Decoders(
            Options(),
            LengthReader(LengthBook(ConstantLength(LENGTH))),
            Agreement(self.clock),
        )
        self.forecast = LayerForecast(self.driver, decoders.tokens_left)
        self.driver.decision_counters = self.forecast.counters
        runtime: Any = SimpleNamespace(
            predicted_pass_s=lambda rid, prefix, new: new * TOKEN_S,
            cost=SimpleNamespace(link_figures=lambda tier: (0.0, 1e6)),
        )
        self.admission = LayerAdmission(self.driver, runtime, self.forecast)
        policy = make_turns("pause")
        facts = LayerFacts(
            self.manager,
            plan,
            policy,
            decoders,
            StreamingCost(DecodeCost(STEP_S, 0.0, 0.0)),
            lambda: 1e6,
            self.clock,
        )
        self.turns = DecodeTurns(
            self.driver, self.admission, policy, facts, self.forecast
        )
        if not looks_ahead:
            self.forecast.relieve = lambda *args: None  # type: ignore[method-assign]
            self.forecast.reserve = lambda *args: 0  # type: ignore[method-assign]
        self.next_page = 1
        self.pages: dict[str, list[int]] = {}

    def forward(self, reqs: list[Any], num_new: int | None) -> None:
        """Compute a prompt of each, or one token."""
        batch = []
        for req in reqs:
            context = 0 if num_new is None else int(req.kv.kv_committed_len)
            new = len(req.origin_input_ids) if num_new is None else num_new
            pages = self.pages.setdefault(req.rid, [])
            while len(pages) < -(-(context + new) // PAGE):
                pages.append(self.next_page)
                self.next_page += 1
            req.kv.kv_committed_len = context + new
            req.output_ids = [*req.output_ids, 8]
            retained = self.driver.decided(req.rid)
            batch.append(PassRequest(req.rid, np.array(pages), context, new, retained))
        plan = self.driver.begin_pass(batch)
        for layer in range(LAYERS):
            self.manager.pages_for_write(
                layer, np.concatenate([b.pages for b in batch])
            )
            self.manager.layer_written(layer)
            for group in range(len(plan.groups)):
                self.manager.wait_unit(layer, group)
                self.manager.unit_done(layer, group)
        self.driver.end_pass()
        self.clock.advance(STEP_S)

    def settle(self) -> None:
        """Let copies end: a step takes longer than they do."""
        self.manager.poll()
        while self.mover.num_flights:
            self.mover.wait()
            self.manager.poll()

    def steps_that_wait(self, reqs: list[Any], num_steps: int) -> int:
        """Decode; return the steps whose next pages had no room when they began."""
        num_late = 0
        for _ in range(num_steps):
            decoding = [reqs[n] for n in self.turns.choose(reqs)]
            begins = [r for r in decoding if r.kv.kv_committed_len % PAGE == 0]
            room = self.manager.room()
            num_late += room.free + room.spare < len(begins) * LAYERS
            self.forward(decoding, 1)
            self.settle()
        return num_late


@pytest.mark.parametrize("looks_ahead", [True, False])
def test_a_step_finds_room_for_its_pages(looks_ahead: bool):
    """Layers left before; without a look ahead they leave when the room is needed."""
    device = Device(100, looks_ahead=looks_ahead)
    reqs = [request(f"r{n}", 21 + n) for n in range(3)]
    for req in reqs:
        device.admission.begin([])
        assert device.admission.admit(req, 0, len(req.origin_input_ids), is_alone=True)
        device.forward([req], None)
        device.settle()
    assert device.manager.num_held([req.rid for req in reqs]) == [LAYERS] * 3
    late = device.steps_that_wait(reqs, 24)
    assert late == 0 if looks_ahead else late > 0
    assert min(device.manager.num_held([req.rid for req in reqs])) < LAYERS
    assert looks_ahead == (device.driver.counters()["layerkv_forecasts"] > 0)


def test_a_prompt_keeps_less_where_others_will_grow():
    """The same 56 layer-pages, with nobody beside it and with three that decode."""
    kept = []
    for num in (0, 3):
        device = Device(56 + 8 * num)
        running = [request(f"r{n}", 5) for n in range(num)]
        for req in running:
            device.admission.begin([])
            assert device.admission.admit(req, 0, 5, is_alone=True)
            device.forward([req], None)
        device.settle()
        assert device.manager.room().free == 56
        device.admission.begin(running)
        assert device.admission.admit(request("new", 44), 0, 44, is_alone=False)
        decided = device.driver.decided("new")
        assert decided is not None
        kept.append(int(decided.sum()))
    assert kept == [LAYERS, 0]


def test_a_report_tells_how_long_one_was_paused():
    """Per request, and all together."""
    device = Device(100)
    req = request("a", 9)
    device.forward([req], None)
    device.driver.paused(["a"])
    device.clock.advance(0.25)
    device.forward([req], 1)
    device.driver.finished("a")
    report = device.driver.take_report("a")
    assert report is not None
    assert (report["steps_paused"], report["paused_s"]) == (1, pytest.approx(0.25))
    counts = device.driver.counters()
    assert counts["layerkv_paused_s"] == pytest.approx(0.25)
    assert counts["layerkv_steps_paused"] == 1


def test_an_unfinished_prompt_has_its_room_before_others():
    """What its next part takes is promised to nobody else in the same search."""
    device = Device(3 * LAYERS)
    part, other = request("a", 16), request("b", 8)
    device.admission.begin([])
    # Two pages with all layers, of three: one is left, and the other prompt needs two.
    assert device.admission.goes_on(part, 2 * PAGE, is_alone=False)
    device.admission.commit()
    assert not device.admission.admit(other, 0, 2 * PAGE, is_alone=False)
    device.admission.begin([])
    assert device.admission.admit(other, 0, 2 * PAGE, is_alone=False)


def search(device: Device) -> Any:
    """Return an adder that asks for a device's layers."""
    scheduler = SimpleNamespace(chunked_req=None)
    make = _layered_adder_class(
        FakeAdder, scheduler, device.admission, AddReqResult, lambda: None
    )
    # Somebody decodes, of whom the device knows nothing.
    adder = make([request("d", 1, 1)])
    device.admission.begin([])
    return adder


def test_a_prompt_that_is_asked_for_again_has_its_room_once():
    """SGLang asks again where nothing could be loaded: those behind keep as much."""
    kept = []
    for num_asks in (1, 2):
        device = Device(5 * LAYERS)
        adder = search(device)
        assert adder.add_one_req(request("a", 2 * PAGE), num_asks)
        assert adder.add_one_req(request("b", 2 * PAGE))
        decided = np.array([device.driver.decided(rid) for rid in "ab"])
        kept.append((decided.tolist(), device.admission._left))
    assert kept[0] == kept[1]


def test_a_prompt_that_sglang_refuses_after_us_keeps_no_room():
    """Nor is it decided which of its layers stay, as it is not computed now."""
    kept = []
    for refuses in (False, True):
        device = Device(5 * LAYERS)
        adder = search(device)
        adder.refuses = refuses
        if refuses:
            assert not adder.add_one_req(request("a", 2 * PAGE))
            part = request("b", 4 * PAGE)
            adder.rem_chunk_tokens = 2 * PAGE
            assert adder.add_chunked_req(part) is part
        assert device.driver.decided("a") is None
        adder.refuses = False
        assert adder.add_one_req(request("c", 2 * PAGE))
        decided = device.driver.decided("c")
        assert decided is not None
        kept.append((decided.tolist(), device.admission._left))
    assert kept[0] == kept[1]


def test_nobody_decodes_while_stores_read_all_pages_that_could_leave():
    """No step is begun without room for its page; once the stores end there is one."""
    device = Device(2 * LAYERS)
    req = one_without_room(device, 1)
    assert device.turns.choose([req]) == []
    assert device.driver.num_paused == 0
    assert device.driver.counters()["layerkv_turns_held"] == 1
    with pytest.raises(NoRoomError):
        device.forward([req], 1)
    device.pages["a"].pop()
    req.kv.kv_committed_len -= 1
    device.driver.end_store(1)
    assert device.turns.choose([req]) == [0]
    device.forward([req], 1)


def test_one_decodes_where_stores_leave_it_room():
    """A store alone holds nobody: who goes on within its page needs no room."""
    device = Device(2 * LAYERS)
    req = request("a", 2 * PAGE - 1)
    device.admission.begin([])
    assert device.admission.admit(req, 0, 2 * PAGE - 1, is_alone=True)
    device.forward([req], None)
    device.settle()
    device.driver.begin_store(1, np.array(device.pages["a"]))
    assert device.turns.choose([req]) == [0]
    device.forward([req], 1)


def one_without_room(device: Device, *stores: int) -> Any:
    """Return a request that begins a page while stores read all that could leave."""
    req = request("a", 2 * PAGE)
    device.admission.begin([])
    assert device.admission.admit(req, 0, 2 * PAGE, is_alone=True)
    device.forward([req], None)
    device.settle()
    for number in stores:
        device.driver.begin_store(number, np.array(device.pages["a"]))
    return req


def test_who_has_no_room_waits_for_stores_however_long_they_take():
    """A slow store ends, and a stuck one is given up; both make the room."""
    device = Device(2 * LAYERS)
    req = one_without_room(device, 1, 2)
    for _ in range(3):
        device.clock.advance(60.0)
        assert device.turns.choose([req]) == []
    device.driver.end_store(2)
    assert device.turns.choose([req]) == []
    assert device.driver.counters()["layerkv_turns_held"] == 4
    device.driver.end_store(1)
    assert device.turns.choose([req]) == [0]
    device.forward([req], 1)


def test_nobody_is_held_where_only_the_policy_names_nobody():
    """Nothing would end that: everybody decodes."""
    device = Device(6 * LAYERS)
    reqs = two_that_decode(device, 2 * PAGE - 1, 2 * PAGE - 1)
    device.driver.begin_store(1, np.array(device.pages["r0"]))
    device.turns._policy = SimpleNamespace(
        choose=lambda facts, room: TurnPlan((), (0, 1), (0, 1), (), (0, 1)),
        needs_targets=False,
    )
    assert device.turns.choose(reqs) == [0, 1]
    assert device.driver.counters()["layerkv_turns_held"] == 0


def test_who_was_left_out_for_want_of_room_waits_where_others_are_retracted():
    """For as long as there is a store whose end may make room."""
    device = Device(5 * LAYERS)
    reqs = two_that_decode(device, 2 * PAGE, 2 * PAGE)
    assert device.turns.choose(reqs) == [0, 1]
    assert not device.turns.waits()
    device.driver.begin_store(1, np.array(device.pages["r0"] + device.pages["r1"]))
    for _ in range(3):
        assert len(device.turns.choose(reqs)) == 1
        assert device.turns.waits()
        device.clock.advance(60.0)
    assert device.driver.counters()["layerkv_turns_held"] == 3
    device.driver.end_store(1)
    assert not device.turns.waits()


def two_that_decode(device: Device, *num_prompts: int) -> list[Any]:
    """Return requests, with prompts of so many tokens computed one after the other."""
    reqs = [request(f"r{n}", num) for n, num in enumerate(num_prompts)]
    for req in reqs:
        device.admission.begin([])
        assert device.admission.admit(req, 0, len(req.origin_input_ids), is_alone=True)
        device.forward([req], None)
        device.settle()
    return reqs


def test_who_is_to_end_waits_for_the_room_of_its_page():
    """An abort is carried out in a step, but a step without room would be none."""
    device = Device(4 * LAYERS)
    reqs = two_that_decode(device, 2 * PAGE - 2, 2 * PAGE)
    pages = np.array(device.pages["r0"] + device.pages["r1"])
    device.driver.begin_store(1, pages)
    reqs[1].to_finish = "abort"
    assert device.turns.choose(reqs) == [0]
    device.forward(reqs[:1], 1)
    device.driver.end_store(1)
    assert device.turns.choose(reqs) == [0, 1]
    device.forward(reqs, 1)


@pytest.mark.parametrize(("aborted", "chosen"), [(None, [0]), ("abort", [1])])
def test_who_is_to_end_has_room_before_others(aborted: str | None, chosen: list[int]):
    """It would wait for its turn, or for its page: it leaves more than it takes."""
    device = Device(5 * LAYERS)
    reqs = two_that_decode(device, 2 * PAGE, 2 * PAGE)
    device.driver.begin_store(1, np.array(device.pages["r0"] + device.pages["r1"]))
    reqs[1].to_finish = aborted
    assert device.turns.choose(reqs) == chosen
    device.forward([reqs[n] for n in chosen], 1)


def test_nothing_returns_to_the_room_of_a_page_that_is_begun():
    """What returns stays while a store reads it: the page would have no room then."""
    device = Device(12 * LAYERS)
    reqs = [request(f"r{n}", num) for n, num in enumerate((2, 2, 10))]
    for req in reqs:
        num_tokens = PAGE * len(req.origin_input_ids)
        req.origin_input_ids = [7] * num_tokens
        device.admission.begin([])
        assert device.admission.admit(req, 0, num_tokens, is_alone=True)
        device.forward([req], None)
        if req.rid == "r1":
            device.manager.release(req.rid, np.ones(LAYERS, np.bool_))
        device.settle()
    device.driver.finished("r2")
    device.driver.freed(np.array([device.pages["r2"].pop()]))
    assert device.manager.away(["r1"]).tolist() == [2 * LAYERS]
    assert device.manager.room().free == LAYERS
    device.driver.begin_store(1, np.concatenate(list(device.pages.values())))
    assert device.turns.choose(reqs[:2]) == [0]
    device.forward(reqs[:1], 1)
    device.driver.end_store(1)
