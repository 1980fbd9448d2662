"""SLO admission in SGLang's prefill adder, on stand-ins for SGLang's objects."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.cost.decode import DecodeCost
from sgl_tiered.engines.sglang.lengths import LengthReader
from sgl_tiered.engines.sglang.slo_admission import (
    ServedAdmission,
    _slo_adder_class,
)
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.length.constant import ConstantLength
from sgl_tiered.serving.options import Options, Slo


class AddReqResult(enum.Enum):
    """SGLang's verdicts."""

    CONTINUE = 1
    NO_TOKEN = 2
    OTHER = 3


class Admission(NamedTuple):
    """SGLang's shape of a prefill, by its names."""

    prefix_len: int
    extend_len: int
    max_new_tokens: int
    is_chunked: bool
    replay_len: int


TOKEN_S, STEP_S, TPOT_S = 1e-3, 0.02, 0.05
PAGE, CHUNK = 16, 512


def request(rid, num_prompt=400, num_out=0, first_s=0.0, arrived_s=100.0, **custom):
    params = {"tiered": custom} if custom else None
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[7] * num_prompt,
        output_ids=[8] * num_out,
        full_untruncated_fill_ids=[7] * num_prompt,
        prefix_len=0,
        extra_key=None,
        cache_salt=None,
        sampling_params=SimpleNamespace(max_new_tokens=1_000, custom_params=params),
        time_stats=SimpleNamespace(
            prefill_finished_time=first_s, scheduler_recv_time=arrived_s
        ),
        finished=lambda: False,
    )


class FakeAdder:
    """Admits whole prompts, or a chunk of them."""

    def __init__(self, running):
        self.running_batch = SimpleNamespace(reqs=running)
        self.rem_chunk_tokens = CHUNK
        self.rem_input_tokens = 16_384
        self.new_chunked_req = None
        self.chunked_req_limit = None
        self.dllm_config = None
        self.can_run_list = []
        self.continued = []
        self.refuses = False

    def _select_prefill_admission(self, req, **facts):
        num_tokens = len(req.full_untruncated_fill_ids) - req.prefix_len
        room = self.rem_chunk_tokens or num_tokens
        is_chunked = num_tokens > room
        num_tokens = min(num_tokens, room)
        return Admission(req.prefix_len, num_tokens, 8, is_chunked, 0)

    def _commit_prefill_admission(self, req, admission):
        self.can_run_list.append(req)

    def add_one_req(self, req, num_asks=1):
        """Ask so often, as after loads that failed; refuse or admit it then."""
        for _ in range(num_asks):
            found = self._select_prefill_admission(req)
        if isinstance(found, AddReqResult) or self.refuses:
            return AddReqResult.OTHER
        self._commit_prefill_admission(req, found)
        return AddReqResult.CONTINUE

    def add_chunked_req(self, req):
        if self.refuses:
            return req
        self.continued.append((req.rid, self.chunked_req_limit))
        self.can_run_list.append(req)
        return None


class Rig:
    """An admission whose decoder of 51 tokens can spare ``slack_s``."""

    def __init__(self, slack_s, *, priorities=False, admission="slo", floor_s=0.0):
        self.clock = ManualClock(200.0)
        config = Options(slo=Slo(admission, 150.0, TPOT_S, floor_s))
        runtime = SimpleNamespace(
            predicted_pass_s=lambda rid, prefix, new: new * TOKEN_S
        )
        self.admission = ServedAdmission(
            config,
            runtime,
            LengthReader(LengthBook(ConstantLength(51))),
            DecodeCost(STEP_S, 0.0, 0.0),
            self.clock,
            page_tokens=PAGE,
            chunk_tokens=CHUNK,
        )
        past_s = TPOT_S * 50 - STEP_S * 40 - slack_s
        self.running = [request("d", 10, 11, self.clock.now() - past_s)]
        self.scheduler = SimpleNamespace(
            waiting_queue=[],
            chunked_req=None,
            enable_priority_scheduling=priorities,
        )
        self.num_told = 0
        self.make = _slo_adder_class(
            FakeAdder, self.scheduler, self.admission, AddReqResult, self.tell
        )

    def tell(self):
        self.num_told += 1

    def adder(self):
        return self.make(self.running)


def test_a_prompt_that_fits_is_left_alone():
    """SGLang's own choice stands."""
    rig = Rig(1.0)
    found = rig.adder()._select_prefill_admission(request("a"))
    assert found == Admission(0, 400, 8, False, 0)
    assert rig.num_told == 0


def test_a_prompt_is_cut_to_whole_pages():
    """0.3 s are 288 tokens; as a chunk it reserves nothing for its answer."""
    found = Rig(0.3).adder()._select_prefill_admission(request("a"))
    assert found == Admission(0, 288, 0, True, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"rem_chunk_tokens": None},
        {"new_chunked_req": object()},
        {"dllm_config": object()},
    ],
)
def test_what_cannot_be_cut_is_held(change):
    """OTHER ends the search, so that nobody overtakes."""
    rig = Rig(0.3)
    adder = rig.adder()
    vars(adder).update(change)
    assert adder._select_prefill_admission(request("a")) is AddReqResult.OTHER
    assert rig.num_told == 1


def test_what_sglang_refused_stays_refused():
    """And is not counted as held."""
    rig = Rig(0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            FakeAdder,
            "_select_prefill_admission",
            lambda self, req, **facts: AddReqResult.NO_TOKEN,
        )
        found = rig.adder()._select_prefill_admission(request("a"))
    assert found is AddReqResult.NO_TOKEN
    assert rig.admission.stats()["held"] == 0


def test_an_unfinished_prompt_goes_on_by_less():
    """The chunk's bound is what the decoders can spare, or SGLang's if that is less."""
    rig = Rig(0.3)
    adder, req = rig.adder(), request("a", 2_000)
    assert adder.add_chunked_req(req) is None
    assert adder.continued == [("a", 288)]
    adder = rig.adder()
    adder.chunked_req_limit = 64
    adder.add_chunked_req(req)
    assert adder.continued == [("a", 64)]


def test_an_unfinished_prompt_is_left_out_of_a_pass():
    """It stays the unfinished one, and the pass has no room for anybody else."""
    adder, req = Rig(0.0).adder(), request("a", 2_000)
    assert adder.add_chunked_req(req) is req
    assert adder.continued == []
    assert adder.rem_input_tokens == 0


def test_nothing_is_held_when_nothing_decodes():
    """So a loop with held requests always has a decode step to do."""
    rig = Rig(0.0)
    rig.running = []
    adder = rig.adder()
    assert adder._select_prefill_admission(request("a")).extend_len == 400
    assert adder.add_chunked_req(request("b", 2_000)) is None
    gone = request("d", 10, 11, 1.0)
    gone.finished = lambda: True
    rig.running = [gone]
    assert rig.adder()._select_prefill_admission(request("c")).extend_len == 400


def test_a_prompt_that_is_asked_for_again_is_counted_once():
    """SGLang asks again where nothing could be loaded: 0.3 s are 288 tokens."""
    rig = Rig(0.3)
    adder = rig.adder()
    assert adder.add_one_req(request("a"), num_asks=2) is AddReqResult.CONTINUE
    assert rig.admission.stats()["cut"] == 1
    assert adder.add_one_req(request("b", 16)) is AddReqResult.OTHER
    assert rig.admission.stats()["held"] == 1


def test_a_prompt_that_sglang_refuses_after_us_is_not_counted():
    """Nor has it spent the decoders' patience, as a part of a prompt or whole."""
    rig = Rig(0.3)
    adder = rig.adder()
    adder.refuses = True
    assert adder.add_one_req(request("a")) is AddReqResult.OTHER
    long = request("b", 2_000)
    assert adder.add_chunked_req(long) is long
    assert rig.admission.stats()["cut"] == 0
    adder.refuses = False
    assert adder.add_one_req(request("c", 288)) is AddReqResult.CONTINUE
    assert adder.add_one_req(request("d", 288)) is AddReqResult.OTHER
    adder = rig.adder()
    assert adder.add_chunked_req(long) is None
    assert rig.admission.stats()["cut"] == 1
    assert adder.add_one_req(request("e", 288)) is AddReqResult.OTHER


def test_the_most_overdue_goes_to_the_head():
    """Unless priorities say who may overtake whom."""
    for priorities, wanted in ((False, ["c", "a", "b"]), (True, ["a", "b", "c"])):
        rig = Rig(0.0, priorities=priorities)
        rig.scheduler.waiting_queue += [
            request("a", arrived_s=190.0),
            request("b", arrived_s=195.0, ttft_s=4.5),
            request("c", arrived_s=195.0, ttft_s=1.0),
        ]
        rig.adder()
        assert [req.rid for req in rig.scheduler.waiting_queue] == wanted


@pytest.mark.parametrize(("arrived_s", "head"), [(199.0, "a"), (194.0, "b")])
def test_nobody_overtakes_by_a_target_of_nothing(arrived_s, head):
    """A wish below the server's floor of 5 s counts as the floor, and is counted."""
    rig = Rig(0.0, floor_s=5.0)
    rig.scheduler.waiting_queue += [
        request("a", arrived_s=190.0),
        request("b", arrived_s=arrived_s, ttft_s=1e-9),
    ]
    rig.adder()
    assert rig.scheduler.waiting_queue[0].rid == head
    assert rig.admission.stats()["bad_targets"] == 1


def test_all_that_waits_is_weighed_the_begun_prompt_first():
    """What a policy that counts both sides is told of SGLang's queue."""
    rig = Rig(0.2, admission="goodput")
    told = []
    rig.admission.control.policy.see_queue = told.append
    rig.scheduler.waiting_queue.append(request("a", arrived_s=199.0))
    rig.adder()
    rig.scheduler.chunked_req = request("b", 1_000)
    rig.adder()
    assert [list(queue.rids) for queue in told] == [["a"], ["b", "a"]]
    assert told[1].prefill_s.tolist() == pytest.approx([1.0, 0.4])
    assert told[1].due_in_s[1] == pytest.approx(150.0 - 0.4 - 1.0)


def test_a_request_s_own_target_counts():
    """A decoder that asked for no TPOT target holds nobody."""
    rig = Rig(0.0)
    rig.running[0].sampling_params.custom_params = {"tiered": {"tpot_s": None}}
    assert rig.adder()._select_prefill_admission(request("a")).extend_len == 400


def test_nonsense_is_counted_once():
    """However many passes look at the request."""
    rig = Rig(0.0)
    rig.scheduler.waiting_queue.append(request("a", ttft_s="soon"))
    for _ in range(3):
        rig.adder()
    assert rig.admission.stats()["bad_targets"] == 1
    rig.admission.forget("a")


def step(iteration, launch_s, batch, *, decode=True):
    mode = SimpleNamespace(is_decode=lambda: decode)
    reqs = [request(f"r{n}", 100, 10) for n in range(batch)]
    return SimpleNamespace(
        forward_mode=mode,
        forward_iter=iteration,
        launch_ts=launch_s,
        after_idle_gap=False,
        reqs=reqs,
    )


def test_steps_are_learned_between_launches():
    """Of two decode steps in a row; a prefill or a gap between them teaches nothing."""
    admission = Rig(0.0).admission
    admission.observe_step(step(1, 1.0, 2))
    admission.observe_step(step(2, 1.1, 2))
    assert admission.stats()["steps_observed"] == 1
    admission.observe_step(step(3, 1.2, 2, decode=False))
    admission.observe_step(step(4, 1.9, 2))
    admission.observe_step(step(6, 2.0, 2))
    assert admission.stats()["steps_observed"] == 1
    admission.observe_step(step(7, 2.1, 2))
    assert admission.stats()["steps_observed"] == 2
    assert admission.stats()["step_s"]["batch_1"] > STEP_S
