"""SGLang's own prefill adder below ours: what a split prompt's rest keeps of the room.

The budget, its checks and the charges are SGLang's; requests, pool and tree stand in.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.sglang,
    # SGLang warns when it is imported without a GPU.
    pytest.mark.filterwarnings("ignore"),
]

PAGE, CHUNK, POOL = 16, 4_096, 2_160
PROMPT, ANSWER = 640, 32


class Request(SimpleNamespace):
    """A request by SGLang's names."""

    @property
    def extend_len(self) -> int:
        return int(self.extend_end - self.prefix_len)


def request(rid: str, num_prompt: int = PROMPT, *, num_output: int = 0) -> Any:
    return Request(
        rid=rid,
        origin_input_ids=[7] * num_prompt,
        output_ids=[8] * num_output,
        full_untruncated_fill_ids=[7] * num_prompt,
        prefix_len=0,
        extend_end=0,
        host_hit_length=0,
        swa_host_hit_length=0,
        auxiliary_swa_host_hit_length=0,
        last_node=0,
        lock=None,
        retracted_stain=False,
        needs_host_load_back=lambda: False,
        kv=SimpleNamespace(holds_mamba=False, req_pool_idx=None, cache_protected_len=0),
        sampling_params=SimpleNamespace(max_new_tokens=ANSWER, ignore_eos=True),
    )


class Rig:
    """A pool with nothing to evict, and one prompt that is computed in parts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.managers import schedule_policy
        from sglang.srt.mem_cache.prefill_budget import PrefillBudget

        from sgl_tiered.engines.sglang import splitting

        monkeypatch.setattr(schedule_policy, "mamba_prefill_chunk_grid", lambda: 1)
        monkeypatch.setattr(schedule_policy, "_use_exact_chunk_fill", lambda: False)
        monkeypatch.setattr(
            schedule_policy, "page_interleave_shard_size", lambda allocator: 1
        )
        self.free = POOL
        self.crowds = False
        self.part_ends: dict[str, int] = {}
        self.verdicts = schedule_policy.AddReqResult
        cache = SimpleNamespace(
            disable=False,
            supports_mamba=lambda: False,
            evictable_size=lambda: 0,
            lock=lambda node: None,
            unlock=lambda lock: None,
            inc_lock_ref=lambda node: SimpleNamespace(to_dec_params=lambda: None),
            dec_lock_ref=lambda node, params: None,
            load_back_is_cache_owned=lambda: False,
            split_end=lambda req: self.part_ends.get(req.rid),
            resume_split=lambda req: 0,
            keep_back=lambda req: None,
            undo_back=lambda req: None,
        )
        self.allocator = SimpleNamespace(
            page_size=PAGE,
            available_size=lambda: self.free,
            request_slot_reserve=lambda **facts: 0,
            create_prefill_budget=lambda tree, **facts: PrefillBudget(
                self.allocator, tree, **facts
            ),
        )
        runtime = SimpleNamespace(
            coordinator=SimpleNamespace(
                begin_pass=lambda *queue, **facts: None,
                crowds=lambda prefix, new: self.crowds,
                admitted=lambda *facts: None,
                state=lambda rid: None,
            ),
            explainer=SimpleNamespace(
                begin_pass=lambda: None,
                admitted=lambda *facts: None,
                looked_at=lambda name: None,
            ),
            lookahead=None,
            agreement=SimpleNamespace(note=lambda *facts: None),
        )
        monkeypatch.setattr(splitting, "tiered_runtime", lambda tree: runtime)
        scheduler = SimpleNamespace(
            tree_cache=cache, chunked_req=None, waiting_queue=[]
        )
        self.make = splitting.prefill_adder_class(
            lambda _: schedule_policy.PrefillAdder, scheduler
        )
        # What reads SGLang's global settings, or a tree.
        for name, value in {
            "_lock_node": nullcontext(),
            "_account_prefill_cache_admission": None,
            "_replay_len": 0,
        }.items():
            monkeypatch.setattr(
                schedule_policy.PrefillAdder, name, lambda *a, value=value, **k: value
            )
        self.cache = cache

    def adder(self, running: list[Any] | None = None) -> Any:
        running = running or []
        batch = SimpleNamespace(
            reqs=running, is_empty=lambda: not running, batch_size=lambda: len(running)
        )
        return self.make(PAGE, self.cache, self.allocator, batch, 1.0, 16_384, CHUNK)

    def add(self, adder: Any, req: Any, *, behind_chunk: bool = False) -> str:
        return str(adder.add_one_req(req, behind_chunk, None).name)

    def run(self, adder: Any) -> None:
        """Take the slots of what a pass admitted."""
        for req in adder.can_run_list:
            self.free -= req.extend_end - req.prefix_len
            req.prefix_len = req.extend_end
        assert self.free >= 0, "SGLang ends the server here"


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_nobody_takes_the_room_of_a_split_prompts_rest(rig: Rig) -> None:
    """A pool for three: after a part of one prompt there is room for two others."""
    rig.part_ends["s"] = 48
    adder, split = rig.adder(), request("s")
    rig.add(adder, split)
    assert split.extend_end == 48
    for n in range(4):
        rig.add(adder, request(f"o{n}"), behind_chunk=True)
    assert [req.rid for req in adder.can_run_list] == ["s", "o0", "o1"]
    rig.run(adder)

    # A later pass: its next part, and again nobody behind it.
    running = [request(f"o{n}", num_output=1) for n in range(2)]
    rig.part_ends["s"] = 144
    adder = rig.adder(running)
    adder.chunked_req_limit = 96
    assert adder.add_chunked_req(split) is split
    rig.add(adder, request("late"), behind_chunk=True)
    assert [req.rid for req in adder.can_run_list] == ["s"]
    rig.run(adder)

    adder = rig.adder(running)
    assert adder.add_chunked_req(split) is None
    rig.run(adder)
    assert split.extend_end == PROMPT


def test_a_part_that_does_not_fit_waits_for_the_decoders(rig: Rig) -> None:
    """And nobody passes it; with no decoder left it goes on as in SGLang."""
    split = request("s")
    split.prefix_len = split.extend_end = 320
    rig.part_ends["s"] = PROMPT
    rig.free = 304
    adder = rig.adder([request("d", num_output=4)])
    assert adder.add_chunked_req(split) is split
    assert rig.add(adder, request("o", 16)) == "OTHER"
    assert adder.can_run_list == []
    rig.free = 384
    adder = rig.adder([request("d", num_output=4)])
    assert adder.add_chunked_req(split) is None
    rig.free = 0
    assert rig.adder().add_chunked_req(split) is None


def test_nobody_is_kept_off_for_a_split_prompt_that_sglang_refuses(rig: Rig) -> None:
    """Who would crowd it joins a pass that it is not in; behind one that is, not."""
    rig.crowds = True
    rig.part_ends["s"] = 48
    adder = rig.adder()
    asked = dict.fromkeys(("host_hit_length", "swa_host_hit_length"), 0)
    asked |= {"total_tokens": 700, "truncation_align_size": None}
    for _ in range(2):
        # As where nothing could be loaded: it does not crowd itself.
        assert adder._select_prefill_admission(request("s"), **asked).extend_len == 48
    delayer = SimpleNamespace(negotiate_should_allow_prefill=lambda **facts: False)
    adder.prefill_delayer_single_pass = delayer
    assert rig.add(adder, request("s")) == "OTHER"
    adder.prefill_delayer_single_pass = None
    rig.add(adder, request("o"))
    assert [req.rid for req in adder.can_run_list] == ["o"]

    adder = rig.adder()
    rig.add(adder, request("s"))
    assert rig.add(adder, request("o"), behind_chunk=True) == "OTHER"
    assert [req.rid for req in adder.can_run_list] == ["s"]
