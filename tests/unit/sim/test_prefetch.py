"""Reading ahead in simulated time, by the very objects that the engine uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.config import SchedulerConfig, ServerConfig
from sgl_tiered.sim.records import SimResult
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder
from sgl_tiered.sim.server import SimServer, simulate
from sgl_tiered.sim.synthetic import shared_prefixes

Make = Callable[..., ServerConfig]
PAGE = 4
SCHEDULER = SchedulerConfig(
    chunk_tokens=256, max_prefill_tokens=512, max_running=2, ignore_eos=True
)


def read_pages(result: SimResult) -> int:
    return result.link_bytes["disk>host"] // 4_096


def templates(num_requests: int = 200) -> SimWorkload:
    """Return closed-loop clients over more prefixes than memory holds."""
    return shared_prefixes(
        num_requests,
        float("inf"),
        24,
        160,
        16,
        8,
        PAGE,
        np.random.default_rng(1),
        num_clients=8,
        keep_bodies=False,
    )


def run(make_config: Make, workload: SimWorkload, prefetch: str) -> SimResult:
    config = make_config(
        device=200,
        host=300,
        disk=2_000,
        prefetch=prefetch,
        scheduler=SCHEDULER,
        load_policy="always",
    )
    server = SimServer(config, workload)
    result = server.run()
    assert server.lower is not None
    server.lower.cache.check()
    occupancies = [server.lower.cache.occupancy(t.tier) for t in config.tiers]
    assert sum(occupancy.pinned_slots for occupancy in occupancies) == 0
    return result


def test_reading_ahead_serves_the_queue_sooner(make_config: Make) -> None:
    """More comes from the host, and the run ends before that without prefetch."""
    workload = templates()
    none, car = (run(make_config, workload, name) for name in ("none", "car"))
    assert car.end_s < none.end_s
    host = [sum(r.host_tokens for r in result.records) for result in (none, car)]
    assert host[1] > host[0]


def test_a_page_that_many_wait_for_is_read_once(make_config: Make) -> None:
    """Requests for one prefix that queue together cost one read of it."""
    builder = WorkloadBuilder(PAGE)
    prefix = builder.prefix("shared", 40)
    others = [builder.prefix(name, 40) for name in range(12)]
    # It is computed, pushed out of device and host by others, and asked for again
    # while two long answers keep the server busy.
    builder.add(0.0, 161, 1, prefix=prefix)
    for place, other in enumerate(others):
        builder.add(1.0 + place, 161, 1, prefix=other)
    for _ in range(2):
        builder.add(50.0, 9, 300)
    for _ in range(5):
        builder.add(50.1, 161, 1, prefix=prefix)
    result = run(make_config, builder.build("again"), "car")
    assert read_pages(result) == 40
    assert [pages for _, pages in promotions(result)] == [40]
    last = result.records[-5:]
    assert all(record.computed_tokens == 1 for record in last)


def promotions(result: SimResult) -> list[tuple[float, float]]:
    """Return time and pages of each promotion that ended."""
    return [(row[0], row[3]) for row in result.log.rows if row[1] == "promoted"]


def test_a_read_begins_when_it_is_due(make_config: Make) -> None:
    """With long answers ahead the data comes shortly before the first of them ends."""
    builder = WorkloadBuilder(PAGE)
    prefix = builder.prefix("shared", 40)
    builder.add(0.0, 161, 1, prefix=prefix)
    for place in range(12):
        builder.add(1.0 + place, 161, 1, prefix=builder.prefix(place, 40))
    for _ in range(2):
        builder.add(50.0, 9, 300)
    builder.add(50.1, 161, 1, prefix=prefix)
    result = run(make_config, builder.build("due"), "car")
    first_end_s = min(record.finished_s for record in result.records[-3:-1])
    ((promoted_s, _),) = promotions(result)
    waited_s = first_end_s - 50.1
    assert 50.1 + 0.7 * waited_s < promoted_s <= first_end_s


@pytest.mark.parametrize(
    "settings", [{"prefetch": "soon"}, {"prefetch_window": 0}], ids=str
)
def test_wrong_settings_are_refused(make_config: Make, settings: dict) -> None:
    """One sentence each."""
    with pytest.raises(ConfigError, match="prefetch"):
        replace(make_config(), **settings)


@pytest.mark.parametrize("prefetch", ["none", "arrival", "car"])
def test_equal_runs_have_equal_logs(make_config: Make, prefetch: str) -> None:
    """Nothing depends on chance or on the identity of objects."""
    digests = set()
    for _ in range(2):
        config = make_config(
            device=200, host=300, disk=2_000, prefetch=prefetch, scheduler=SCHEDULER
        )
        digests.add(simulate(config, templates(60)).log.digest())
    assert len(digests) == 1


def spacious(prefetch_to: str, make_config: Make, **settings: object) -> SimServer:
    """Run clients on a device with room for more than those that run."""
    config = make_config(
        device=500,
        host=1_000,
        disk=2_000,
        prefetch="car",
        prefetch_to=prefetch_to,
        scheduler=SCHEDULER,
        load_policy="always",
        **settings,
    )
    server = SimServer(config, templates())
    server.result = server.run()
    server.tree.check()
    assert server.tree.lent_pages == 0
    assert server.lower is not None
    server.lower.cache.check()
    return server


def test_pages_are_on_the_device_before_their_turn(make_config: Make) -> None:
    """Where the device has room, more is found there, and no run is longer for it."""
    host, device = (spacious(to, make_config) for to in ("host", "device"))
    hits = [
        sum(r.device_tokens for r in server.result.records) for server in (host, device)
    ]
    assert hits[1] > hits[0]
    assert device.lower.prefetcher.device.num_landed > 0
    assert device.result.end_s <= 1.01 * host.result.end_s
    computed = [
        sum(r.computed_tokens for r in server.result.records)
        for server in (host, device)
    ]
    assert computed[1] <= 1.02 * computed[0]


def test_a_full_device_takes_nothing_ahead(make_config: Make) -> None:
    """Where those that run need all of it, the run is the same as without."""
    logs = []
    for to in ("host", "device"):
        config = make_config(
            device=90,
            host=1_000,
            disk=2_000,
            prefetch="car",
            prefetch_to=to,
            scheduler=SCHEDULER,
            load_policy="always",
        )
        server = SimServer(config, templates(60))
        logs.append(server.run().log.digest())
        assert server.tree.lent_pages == 0
    assert logs[0] == logs[1]


@pytest.mark.parametrize("settings", [{"prefetch": "arrival"}, {"prefetch_to": "tape"}])
def test_only_what_looks_ahead_goes_to_the_device(
    make_config: Make, settings: dict
) -> None:
    """One sentence for each other setting."""
    with pytest.raises(ConfigError, match="prefetch_to"):
        replace(
            make_config(), **{"prefetch_to": "device", "prefetch": "car"} | settings
        )
