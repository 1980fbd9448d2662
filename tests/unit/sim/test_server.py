"""The simulated server: what must hold of every run, and runs counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.cache.config import WRITE_POLICIES
from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.order.registry import ORDERS
from sgl_tiered.sim.config import SchedulerConfig, ServerConfig
from sgl_tiered.sim.records import SimResult
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder
from sgl_tiered.sim.server import SimServer, simulate

Make = Callable[..., ServerConfig]
MakeChats = Callable[..., SimWorkload]
PAGE = 4


def one_request(prompt: int, output: int, count: int = 1) -> SimWorkload:
    builder = WorkloadBuilder(PAGE)
    for _ in range(count):
        builder.add(0.0, prompt, output)
    return builder.build("one")


def check_conservation(result: SimResult, workload: SimWorkload) -> None:
    for record, request in zip(result.records, workload.requests, strict=True):
        assert not record.aborted
        assert record.num_output_tokens == request.num_output_tokens
        assert record.arrival_s <= record.admitted_s < record.first_token_s
        assert record.first_token_s <= record.finished_s
        assert record.computed_tokens >= 1
        times = result.token_times(record)
        assert len(times) == request.num_output_tokens
        assert times[0] == pytest.approx(record.first_token_s)
        assert times[-1] == pytest.approx(record.finished_s)
        assert (np.diff(times) > 0).all()


def test_one_request_takes_what_the_formulas_say(make_config: Make) -> None:
    """A prompt of one chunk and its decode steps, added up by hand."""
    config = make_config()
    result = simulate(config, one_request(50, 5))
    record = result.records[0]
    prefill_s = 1e-3 + 50 * 1e-4 + 1e-7 * 50 * 51 / 2
    steps_s = sum(1e-3 + 1e-4 + 1e-6 * context for context in (51, 52, 53, 54))
    assert record.ttft_s == pytest.approx(prefill_s)
    assert record.e2e_s == pytest.approx(prefill_s + steps_s)


def test_a_long_prompt_runs_in_chunks(make_config: Make) -> None:
    """150 tokens are passes of 64, 64 and 22 with growing contexts."""
    config = make_config()
    result = simulate(config, one_request(150, 1))
    expected_s = sum(
        config.times.prefill_s([part]) for part in ((0, 64), (64, 64), (128, 22))
    )
    assert [done.num_tokens for done in result.passes] == [64, 64, 22]
    assert result.records[0].ttft_s == pytest.approx(expected_s)


def test_a_waiting_prompt_goes_before_decode_steps(make_config: Make) -> None:
    """An arrival cuts the decode at the step's end, and its prefill runs next."""
    builder = WorkloadBuilder(PAGE)
    builder.add(0.0, 20, 100)
    builder.add(0.02, 20, 1)
    result = simulate(make_config(), builder.build("two"))
    first = result.segments[0]
    assert first.num_steps < 100
    assert result.passes[1].start_s == pytest.approx(
        first.start_s + first.seconds(first.num_steps)
    )
    assert 0.0 <= result.passes[1].start_s - 0.02 < 2e-3
    assert max(np.diff(result.token_times(result.records[0]))) > 3e-3


@pytest.mark.parametrize(("host", "disk"), [(0, 0), (60, 0), (60, 400)])
def test_every_request_ends_with_all_its_tokens(
    make_config: Make, make_chats: MakeChats, host: int, disk: int
) -> None:
    """Tokens add up, and times are in order, with and without tiers."""
    workload = make_chats()
    server = SimServer(make_config(device=80, host=host, disk=disk), workload)
    result = server.run()
    check_conservation(result, workload)
    assert result.peak_pages <= 80
    server.tree.check()
    assert server.tree.private_pages == 0
    assert server.tree.evictable_pages == server.tree.tree_pages
    if server.lower is not None:
        server.lower.cache.check()
        assert server.lower.stats.pages_stored[server.lower._memory[0]] > 0


@pytest.mark.parametrize("seed", range(30))
def test_no_setting_loses_a_request(
    make_config: Make, make_chats: MakeChats, seed: int
) -> None:
    """Drawn settings, small pools and slow disks: all requests end, laws hold."""
    rng = np.random.default_rng(seed)
    scheduler = SchedulerConfig(
        admission=str(rng.choice(["sglang", "vllm"])),
        chunk_tokens=int(rng.choice([0, 8, 64])),
        max_prefill_tokens=int(rng.choice([16, 128])),
        max_running=int(rng.choice([2, 100])),
        ignore_eos=bool(rng.integers(2)),
        order=str(rng.choice(ORDERS)),
    )
    config = make_config(
        device=int(rng.integers(32, 80)),
        host=int(rng.choice([3, 40, 300])),
        cxl=int(rng.choice([0, 60])),
        disk=int(rng.choice([0, 50, 1_000])),
        scheduler=scheduler,
        load_mode=str(rng.choice(["layerwise", "waiter"])),
        load_policy=str(rng.choice(["auto", "always", "never"])),
        demote_policy=str(rng.choice(["write-through", "on-evict"])),
        write_policy=str(rng.choice(WRITE_POLICIES)),
        disk_admission=str(rng.choice(["all", "second-hit", "reuse"])),
        offload_threshold=float(rng.choice([0.3, 0.9])),
        eviction=str(rng.choice(["lru", "fifo", "random"])),
        link_discipline=str(rng.choice(["fair", "fifo"])),
        prefetch=str(rng.choice(["none", "arrival", "car"])),
        prefetch_window=int(rng.choice([1, 16])),
        staging_bytes=int(rng.choice([0, 5])) * 4_096,
        max_offloads=int(rng.choice([0, 64])),
        seed=seed,
    )
    workload = make_chats(num_requests=80, rate_per_s=60.0, seed=seed)
    server = SimServer(config, workload)
    result = server.run()
    check_conservation(result, workload)
    server.tree.check()
    assert result.peak_pages <= config.capacity_pages
    assert server.tree.private_pages == 0
    assert server.tree.evictable_pages == server.tree.tree_pages
    assert server.lower is not None
    server.lower.cache.check()


def test_a_chain_of_three_serves_from_each_tier(
    make_config: Make, make_chats: MakeChats
) -> None:
    """Host, CXL and disk hit, each over its own link, and every token is accounted."""
    workload = make_chats(num_requests=200, num_prefixes=60)
    config = make_config(device=60, host=80, cxl=160, disk=2_000)
    server = SimServer(config, workload)
    result = server.run()
    check_conservation(result, workload)
    assert server.lower is not None
    server.lower.cache.check()
    assert sum(record.host_tokens for record in result.records) > 0
    assert sum(record.cxl_tokens for record in result.records) > 0
    assert sum(record.disk_tokens for record in result.records) > 0
    assert result.link_bytes["cxl>device"] > 0
    assert result.link_bytes["cxl>disk"] > 0
    stored = server.lower.stats.pages_stored
    assert result.link_bytes["host>cxl"] == stored[TierId.CXL] * 4_096


def test_links_of_a_pass_are_used_side_by_side(make_config: Make) -> None:
    """Pages from host and CXL take as long as the slower of the two."""
    config = make_config(device=60, host=8, cxl=30, load_policy="always")
    server = SimServer(config, one_request(8, 1))
    lower = server.lower
    assert lower is not None
    ended: list[float] = []
    lower.load(5_000_000, 1_000_000, lambda: ended.append(server.queue.now()))
    lower.load(1_000_000, 1_000_000, lambda: ended.append(server.queue.now()))
    server.queue.run()
    # 4 MB over the host's link at 1 GB/s; beside it two loads of 1 MB share 0.5 GB/s.
    assert len(ended) == 2
    assert ended == pytest.approx([4e-3, 4e-3], rel=0.01)


def test_on_evict_copies_less_and_what_it_saves_is_hit(
    make_config: Make, make_chats: MakeChats
) -> None:
    """Fewer bytes leave the device than with write-through, and hits are there."""
    workload = make_chats(num_requests=150, num_prefixes=12)
    figures = {}
    for policy in ("write-through", "on-evict"):
        config = make_config(
            device=150, host=500, write_policy=policy, offload_threshold=0.5
        )
        server = SimServer(config, workload)
        result = server.run()
        check_conservation(result, workload)
        server.tree.check()
        assert server.tree.evictable_pages == server.tree.tree_pages
        hits = sum(record.host_tokens for record in result.records)
        figures[policy] = (result.link_bytes["device>host"], hits)
    assert 0 < figures["on-evict"][0] < figures["write-through"][0]
    assert figures["on-evict"][1] > 0


def test_tiers_give_more_hits_than_the_device_alone(
    make_config: Make, make_chats: MakeChats
) -> None:
    """Pages that the device evicted come back from the host, then from disk."""
    workload = make_chats(num_requests=150, num_prefixes=30)
    reused = []
    for host, disk in ((0, 0), (120, 0), (120, 2_000)):
        result = simulate(make_config(device=60, host=host, disk=disk), workload)
        computed = sum(record.computed_tokens for record in result.records)
        reused.append(1 - computed / sum(r.num_prompt_tokens for r in result.records))
        if disk:
            assert sum(record.disk_tokens for record in result.records) > 0
    assert reused[0] < reused[1] < reused[2]


def test_equal_seeds_give_equal_logs(make_config: Make, make_chats: MakeChats) -> None:
    """The same run twice is the same; another seed of the workload is another."""
    config = make_config(device=60, host=60, disk=300, eviction="random", seed=3)
    digests = [
        simulate(config, make_chats(seed=seed)).log.digest() for seed in (1, 1, 2)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_full_pool_retracts_and_all_end_nevertheless(make_config: Make) -> None:
    """Answers that outgrow the pool send requests back, which then resume."""
    scheduler = SchedulerConfig(admission="vllm", chunk_tokens=0)
    config = make_config(device=60, scheduler=scheduler, device_reuse=False)
    workload = one_request(20, 100, count=6)
    server = SimServer(config, workload)
    result = server.run()
    check_conservation(result, workload)
    assert result.num_retractions > 0
    assert sum(record.num_retractions for record in result.records) == (
        result.num_retractions
    )
    assert result.peak_pages <= 60
    server.tree.check()
    assert server.tree.tree_pages == server.tree.private_pages == 0


def test_reserved_answers_are_not_retracted(make_config: Make) -> None:
    """With SGLang's rule for fixed lengths the pool never runs out."""
    scheduler = SchedulerConfig(chunk_tokens=64, ignore_eos=True)
    result = simulate(
        make_config(device=60, scheduler=scheduler), one_request(20, 100, count=6)
    )
    assert result.num_retractions == 0
    queued = [record.queue_s for record in result.records]
    assert max(queued) > min(record.e2e_s for record in result.records) / 2


def test_a_request_that_never_fits_is_refused(make_config: Make) -> None:
    """It is marked, and the others run."""
    builder = WorkloadBuilder(PAGE)
    builder.add(0.0, 1_000, 5)
    builder.add(0.0, 20, 5)
    result = simulate(make_config(device=50), builder.build("mixed"))
    assert [record.aborted for record in result.records] == [True, False]


def test_a_turn_leaves_after_the_answer_before_it(make_config: Make) -> None:
    """``after`` and ``think_s`` order the requests of a conversation."""
    builder = WorkloadBuilder(PAGE)
    first = builder.add(0.0, 30, 10)
    builder.add(0.0, 30, 10, after=first, think_s=0.5)
    one, two = simulate(make_config(), builder.build("chat")).records
    assert two.arrival_s == pytest.approx(one.finished_s + 0.5)


def test_a_client_sends_its_next_request_when_it_has_its_answer(
    make_config: Make,
) -> None:
    """Three clients: never more than three in the system, and soon three again."""
    builder = WorkloadBuilder(PAGE)
    for number in range(12):
        builder.add(0.0, 20, 5 + 7 * (number % 3))
    result = simulate(make_config(), builder.build("loop", num_clients=3))
    arrivals = sorted(record.arrival_s for record in result.records)
    ends = sorted(record.finished_s for record in result.records)
    assert arrivals[:3] == [0.0] * 3
    assert arrivals[3:] == ends[:9]


def test_a_layerwise_load_hides_under_the_prefill(make_config: Make) -> None:
    """Overlapped it costs the last layer's share at most; a copying thread adds it."""
    builder = WorkloadBuilder(PAGE)
    prefix = builder.prefix("shared", 20)
    other = builder.prefix("other", 28)
    first = builder.add(0.0, 100, 1, prefix=prefix)
    second = builder.add(0.0, 112, 1, prefix=other, after=first, think_s=0.1)
    builder.add(0.0, 100, 1, prefix=prefix, after=second, think_s=0.1)
    workload = builder.build("reload")
    results = {}
    for mode in ("layerwise", "waiter"):
        config = make_config(device=30, host=200, load_mode=mode, load_policy="always")
        result = simulate(config, workload)
        record = result.records[2]
        assert record.host_tokens > 0
        results[mode] = (record.ttft_s, result.passes[-1], config)
    ttft_s, done, config = results["waiter"]
    load_s = 1e-6 + done.loaded_bytes / 1e9
    reused = results["waiter"][1].num_tokens
    compute_s = config.times.prefill_s([(100 - reused, reused)])
    assert ttft_s == pytest.approx(load_s + compute_s)
    overlapped_s = max(compute_s, load_s + compute_s / config.num_layers)
    assert results["layerwise"][0] == pytest.approx(overlapped_s)


def test_fastest_prefix_first_prefers_what_is_near(make_config: Make) -> None:
    """Of two waiting requests the one with a prefix on the device goes first."""
    builder = WorkloadBuilder(PAGE)
    warm = builder.prefix("warm", 5)
    builder.add(0.0, 21, 1, prefix=warm)
    builder.add(0.02, 60, 30)
    builder.add(0.021, 61, 1)
    builder.add(0.022, 21, 1, prefix=warm)
    workload = builder.build("two")
    for order, goes_first in (("fcfs", 2), ("fpf", 3)):
        scheduler = SchedulerConfig(chunk_tokens=64, max_prefill_tokens=64, order=order)
        result = simulate(make_config(scheduler=scheduler), workload)
        admitted = [result.records[index].admitted_s for index in (2, 3)]
        assert (2 if admitted[0] < admitted[1] else 3) == goes_first


def test_poisson_arrivals_wait_as_in_an_md1_queue(make_config: Make) -> None:
    """Equal prompts one at a time: Lindley's recursion exactly, the formula's mean."""
    scheduler = SchedulerConfig(chunk_tokens=0, max_prefill_tokens=1)
    config = make_config(scheduler=scheduler, device=10_000)
    service_s = config.times.prefill_s([(0, 40)])
    rng = np.random.default_rng(5)
    load = 0.3
    builder = WorkloadBuilder(PAGE, keep_answers=False)
    arrivals = np.cumsum(rng.exponential(service_s / load, size=8_000))
    for arrival_s in arrivals.tolist():
        builder.add(arrival_s, 40, 1)
    result = simulate(config, builder.build("md1"))
    waited = np.array([record.queue_s for record in result.records])
    expected = [0.0]
    for gap_s in np.diff(arrivals).tolist():
        expected.append(max(0.0, expected[-1] + service_s - gap_s))
    assert waited == pytest.approx(np.array(expected), abs=1e-9)
    # Pollaczek-Khinchine for a fixed service time.
    assert waited.mean() == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.08)


def test_littles_law(make_config: Make, make_chats: MakeChats) -> None:
    """Mean number in the system = rate * mean time, counted from the event log."""
    result = simulate(make_config(device=200), make_chats(num_requests=200))
    changes = []
    for record in result.records:
        changes += [(record.arrival_s, 1), (record.finished_s, -1)]
    changes.sort()
    area = present = 0.0
    last_s = 0.0
    for time_s, change in changes:
        area += present * (time_s - last_s)
        present += change
        last_s = time_s
    assert area == pytest.approx(sum(record.e2e_s for record in result.records))


def test_requests_are_admitted_up_to_the_limit(make_config: Make) -> None:
    """No decode batch is larger than ``max_running``."""
    scheduler = SchedulerConfig(chunk_tokens=64, max_running=3)
    config = replace(make_config(device=400), scheduler=scheduler)
    result = simulate(config, one_request(20, 50, count=10))
    assert max(segment.batch for segment in result.segments) == 3
