"""The simulator's explanations: they agree with the run's own records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sgl_tiered.sim.config import SchedulerConfig, ServerConfig
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder
from sgl_tiered.sim.server import SimServer, simulate

Make = Callable[..., ServerConfig]
MakeChats = Callable[..., SimWorkload]
PAGE = 4


def test_explanations_agree_with_the_records(
    make_config: Make, make_chats: MakeChats
) -> None:
    """Queue time, time to first token and sources of every request are the record's,
    the waits by reason add up, and being explained changes nothing of the run."""
    workload = make_chats(80, rate_per_s=120.0)
    config = make_config(device=120, host=60, disk=400)
    plain = simulate(config, workload)
    server = SimServer(replace(config, explain=True), workload)
    result = server.run()
    assert result.log.digest() == plain.log.digest()
    told = {int(one["rid"]): one for one in server.ledger.explanations()}
    assert sorted(told) == list(range(len(workload.requests)))
    reasons = set()
    for record in result.records:
        one = told[record.request]
        assert one["state"] == "finished"
        assert one["tokens"].get("device", 0) == record.device_tokens
        assert one["tokens"].get("host", 0) == record.host_tokens
        assert one["tokens"].get("disk", 0) == record.disk_tokens
        assert one["tokens"]["computed"] == record.computed_tokens
        parts = one["wait"]["by_reason_s"]
        assert sum(parts.values()) == pytest.approx(one["wait"]["total_s"], abs=1e-5)
        # The record begins when the client sends, the ledger in the queue.
        assert one["ttft"]["real_s"] <= record.ttft_s + 1e-6
        if not record.num_retractions:
            assert one["wait"]["total_s"] <= record.queue_s + 1e-6
        reasons |= parts.keys()
        num_missing = sum(span["tokens"] for span in one["missing"])
        assert num_missing <= record.num_prompt_tokens
    assert {"budget", "pass"} <= reasons
    causes = {span["cause"] for one in told.values() for span in one["missing"]}
    assert "never seen" in causes
    moved = {name for one in told.values() for name in one["edges"]}
    assert "host->device" in moved


def test_a_lone_request_takes_what_was_predicted(make_config: Make) -> None:
    """Nothing before it and nothing cached: the prediction is the cost model's, and
    that is what the simulated device takes."""
    builder = WorkloadBuilder(PAGE)
    builder.add(0.0, 48, 2)
    server = SimServer(make_config(explain=True), builder.build("one"))
    server.run()
    (one,) = server.ledger.explanations()
    assert one["ttft"]["predicted_s"] == pytest.approx(one["ttft"]["real_s"], rel=0.02)
    assert one["wait"]["total_s"] == 0.0


def test_a_full_batch_is_told_as_slots(make_config: Make) -> None:
    """With one request at a time the second waits for the slot, and says so."""
    builder = WorkloadBuilder(PAGE)
    for _ in range(2):
        builder.add(0.0, 20, 30)
    scheduler = SchedulerConfig(chunk_tokens=64, max_prefill_tokens=128, max_running=1)
    config = make_config(explain=True, scheduler=scheduler)
    server = SimServer(config, builder.build("two"))
    server.run()
    second = server.ledger.explanations()[1]
    waited = second["wait"]["by_reason_s"]
    assert max(waited, key=waited.__getitem__) == "slot"


def test_an_evicted_prefix_is_explained(make_config: Make) -> None:
    """A prompt comes back after others took its place everywhere: evicted, by whom."""
    builder = WorkloadBuilder(PAGE)
    for number in range(12):
        prefix = builder.prefix(number % 11, 20)
        builder.add(float(number), 84, 2, prefix=prefix)
    config = make_config(device=60, host=60, load_policy="always", explain=True)
    server = SimServer(config, builder.build("again"))
    server.run()
    (miss, *_) = server.ledger.explanations()[-1]["missing"]
    assert miss["cause"] == "evicted"
    assert miss["tier"] == "host"
    assert "by lru" in miss["text"]
    assert 0 < miss["age_s"] < 12


def test_requests_that_cannot_run_are_told(make_config: Make) -> None:
    """One that is longer than the pool is aborted, and the ledger says so."""
    builder = WorkloadBuilder(PAGE)
    builder.add(0.0, 900, 5)
    server = SimServer(make_config(host=8, explain=True), builder.build("long"))
    server.run()
    (one,) = server.ledger.explanations()
    assert one["state"] == "aborted"
