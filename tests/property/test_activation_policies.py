"""Laws of the activation policies: what fits, what is in balance, who goes where."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from sgl_tiered.core.ids import Representation, TierId
from sgl_tiered.policies.activations.allocation import (
    HostFacts,
    allocate,
    initial_allocation,
    remaining_allocation,
)
from sgl_tiered.policies.activations.balance import (
    balanced_split,
    device_pages,
    split_at,
)
from sgl_tiered.policies.activations.base import LayerFacts, PageLine
from sgl_tiered.policies.activations.batches import (
    BufferPages,
    RequestPages,
    imbalance,
    mini_batches,
)
from sgl_tiered.policies.activations.ratio import PageRatio, next_page
from sgl_tiered.policies.activations.refusal import refusal_of_load

lines = st.builds(PageLine, st.floats(0.0, 2.0), st.floats(1e-3, 5.0))
host_facts = st.builds(
    HostFacts,
    room_bytes=st.integers(-100, 10**6),
    kv_page_bytes=st.integers(2, 200),
    act_page_bytes=st.integers(1, 100),
    num_device_act=st.integers(0, 500),
    load_weights_s=st.floats(0.0, 1_000.0),
    kv_gen=lines,
    load_kv=lines,
)
ratios = st.tuples(st.integers(0, 300), st.integers(0, 300)).filter(any)


@st.composite
def layer_facts(draw: st.DrawFn) -> LayerFacts:
    """Draw a layer whose activations load no slower than its KV."""
    load_kv = draw(lines)
    share = draw(st.floats(0.1, 1.0))
    act_bytes = draw(st.integers(1, 50))
    return LayerFacts(
        num_pages=draw(st.integers(0, 60)),
        device_bytes=draw(st.integers(0, 3_000)),
        kv_page_bytes=act_bytes * draw(st.integers(1, 4)),
        act_page_bytes=act_bytes,
        kv_gen=draw(lines),
        load_kv=load_kv,
        load_act=PageLine(load_kv.overhead_s, load_kv.page_s * share),
        load_weights_s=draw(st.floats(0.0, 100.0)),
        compute_s=draw(st.floats(0.0, 100.0)),
    )


@given(host_facts)
def test_what_is_allocated_fits_and_fills(facts: HostFacts):
    """Never more than there is; no page of KV would fit in addition."""
    found = allocate(facts)
    assert min(found.num_act, found.num_kv) >= 0
    used = found.num_act * facts.act_page_bytes + found.num_kv * facts.kv_page_bytes
    assert used <= max(facts.room_bytes, 0)
    assert used + facts.kv_page_bytes > facts.room_bytes


@given(host_facts)
def test_the_initial_step_leaves_less_than_a_page_of_time(facts: HostFacts):
    """Unless memory is short; and only one kind is added (Algorithm 1, line 18)."""
    initial = initial_allocation(facts)
    assert not (initial.num_act and initial.num_kv)
    gap_s = facts.load_weights_s - facts.kv_gen.seconds(facts.num_device_act)
    used = initial.num_act * facts.act_page_bytes
    used += initial.num_kv * facts.kv_page_bytes
    if used + max(facts.act_page_bytes, facts.kv_page_bytes) > facts.room_bytes:
        return
    one_more_s = (
        facts.kv_gen.seconds(initial.num_act + 1)
        if gap_s >= 0
        else facts.load_kv.seconds(initial.num_kv + 1)
    )
    assert one_more_s > abs(gap_s) * (1 - 1e-9)


@given(host_facts)
@example(HostFacts(5, 2, 3, 0, 0.0, PageLine(0.0, 0.5), PageLine(2.0, 0.5)))
def test_the_remaining_pages_are_in_balance(facts: HostFacts):
    """Within the pages that rounding costs, where both kinds are there.

    Where no more activations fit, what is left is KV though its loads are the longer.
    """
    initial = initial_allocation(facts)
    rest = remaining_allocation(facts, initial)
    if not (rest.num_act and rest.num_kv):
        return
    used = (initial.num_act + rest.num_act) * facts.act_page_bytes
    used += initial.num_kv * facts.kv_page_bytes
    is_full = used + facts.act_page_bytes > facts.room_bytes
    gen_s = facts.kv_gen.seconds(rest.num_act)
    load_s = facts.load_kv.seconds(rest.num_kv)
    pages = 1 + facts.act_page_bytes / facts.kv_page_bytes
    slack_s = facts.kv_gen.page_s + facts.load_kv.page_s * pages
    gap_s = gen_s - load_s if is_full else abs(gen_s - load_s)
    assert gap_s <= slack_s + 1e-6 * gen_s


@given(host_facts, st.floats(1.0, 10.0))
def test_a_slower_link_never_gets_fewer_activations(facts: HostFacts, factor: float):
    """With weights and KV at the same link."""
    load = facts.load_kv
    slow = replace(
        facts,
        load_kv=PageLine(load.overhead_s * factor, load.page_s * factor),
        load_weights_s=facts.load_weights_s * factor,
    )
    before, after = allocate(facts), allocate(slow)
    # Two steps, each rounded down to a page.
    pages = 2 + 2 * facts.kv_page_bytes // facts.act_page_bytes
    assert after.num_act >= before.num_act - pages


@given(ratios, st.integers(0, 200), st.integers(0, 50))
def test_one_page_at_a_time_keeps_the_ratio(
    pair: tuple[int, int], num_pages: int, num_free: int
):
    """As counted for all at once, within half a page; the device is filled first."""
    ratio = PageRatio(*pair)
    num_act = num_kv = 0
    free = num_free
    for _ in range(num_pages):
        place = next_page(ratio, num_act, num_kv, free)
        if place.representation == Representation.KV:
            num_kv += 1
            assert place.tier == TierId.HOST
            continue
        num_act += 1
        assert (place.tier == TierId.DEVICE) == (free > 0)
        free -= place.tier == TierId.DEVICE
        assert free >= 0
    assert num_act == ratio.act_of(num_pages)
    assert abs(2 * (num_act * sum(pair) - num_pages * pair[0])) <= sum(pair)


@given(ratios, st.integers(0, 30), st.integers(0, 30))
def test_who_left_the_ratio_returns(pair: tuple[int, int], num_act: int, num_kv: int):
    """Every page brings it nearer, until it is within half a page."""
    ratio = PageRatio(*pair)

    def off(act: int, kv: int) -> float:
        return abs(act - ratio.act_share * (act + kv))

    for _ in range(20):
        before = off(num_act, num_kv)
        place = next_page(ratio, num_act, num_kv, 0)
        is_act = place.representation == Representation.ACT
        num_act, num_kv = num_act + is_act, num_kv + (not is_act)
        assert off(num_act, num_kv) <= max(before, 0.5) + 1e-9


@given(
    st.lists(
        st.builds(RequestPages, st.integers(0, 12), st.integers(0, 12)), max_size=12
    ),
    st.builds(BufferPages, st.integers(0, 20), st.integers(0, 20)),
    lines,
    lines,
)
def test_mini_batches_part_the_requests(
    requests: list[RequestPages], buffers: BufferPages, gen: PageLine, load: PageLine
):
    """Each is in one, none is empty, and what is not alone fits into the buffers."""
    batches = mini_batches(requests, buffers, gen, load)
    assert sorted(n for batch in batches for n in batch) == list(range(len(requests)))
    assert all(batches)
    left = set(range(len(requests)))
    for batch in batches:
        acts = [requests[n].num_act for n in batch]
        kvs = [requests[n].num_kv for n in batch]
        if len(batch) > 1:
            assert sum(acts) <= buffers.max_act
            assert sum(kvs) <= buffers.max_kv
        # No worse than its first member alone, or than all that were left.
        everything = imbalance(
            sum(requests[n].num_act for n in left),
            sum(requests[n].num_kv for n in left),
            gen,
            load,
        )
        alone = imbalance(acts[0], kvs[0], gen, load)
        here = imbalance(sum(acts), sum(kvs), gen, load)
        assert here <= max(alone, everything) * (1 + 1e-6)
        left -= set(batch)


@given(
    st.builds(RequestPages, st.integers(0, 9), st.integers(0, 9)),
    st.integers(1, 30),
    st.builds(BufferPages, st.integers(9, 40), st.integers(9, 40)),
    lines,
    lines,
)
def test_equal_requests_need_the_fewest_mini_batches(
    pages: RequestPages,
    num: int,
    buffers: BufferPages,
    gen: PageLine,
    load: PageLine,
):
    """Each is filled to the buffer that is full first."""
    each = num
    if pages.num_act:
        each = min(each, buffers.max_act // pages.num_act)
    if pages.num_kv:
        each = min(each, buffers.max_kv // pages.num_kv)
    batches = mini_batches([pages] * num, buffers, gen, load)
    assert len(batches) == -(-num // each)


@given(layer_facts())
def test_no_share_is_better_than_the_balanced_one(facts: LayerFacts):
    """Against all of them."""
    best = balanced_split(facts)
    assert best == split_at(facts, best.num_act)
    every = [split_at(facts, num).seconds for num in range(facts.num_pages + 1)]
    # Equal sums of other terms may differ in their last bit.
    assert best.seconds <= min(every) * (1 + 1e-12)


@given(layer_facts(), st.data())
def test_the_device_holds_no_more_than_it_has(facts: LayerFacts, data: st.DataObject):
    """Activations first: KV is there only where all of them are."""
    num_act = data.draw(st.integers(0, facts.num_pages))
    held = device_pages(facts, num_act)
    used = held.num_act * facts.act_page_bytes + held.num_kv * facts.kv_page_bytes
    assert used <= facts.device_bytes
    assert held.num_act <= num_act
    assert held.num_kv <= facts.num_pages - num_act
    if held.num_act < num_act:
        assert facts.device_bytes - used < facts.act_page_bytes + facts.kv_page_bytes


@given(layer_facts(), st.floats(0.0, 0.5))
def test_what_is_refused_saves_too_little(facts: LayerFacts, least_gain: float):
    """And what is not refused saves as much as was asked for."""
    plain, best = split_at(facts, 0), balanced_split(facts)
    if refusal_of_load(facts, least_gain) is None:
        assert best.num_act > 0
        assert best.seconds <= plain.seconds * (1 - least_gain) + 1e-9
    else:
        assert (
            best.num_act == 0 or best.seconds >= plain.seconds * (1 - least_gain) - 1e-9
        )
