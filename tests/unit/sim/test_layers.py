"""Layer-wise memory in the simulated server."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.layers.registry import TURNS
from sgl_tiered.policies.layers.turns import PauseTurns, TurnFacts, TurnPlan, TurnRoom
from sgl_tiered.sim import layers
from sgl_tiered.sim.config import LayerSetup, SchedulerConfig, ServerConfig
from sgl_tiered.sim.events import EventQueue, Priority
from sgl_tiered.sim.hardware import LinkSpeed
from sgl_tiered.sim.layers import LayerMemory, _Layers
from sgl_tiered.sim.records import SimResult
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder
from sgl_tiered.sim.sequence import Sequence
from sgl_tiered.sim.server import SimServer, simulate
from sgl_tiered.sim.summary import summarize
from sgl_tiered.sim.synthetic import fixed_lengths

Make = Callable[..., ServerConfig]
PAGE, TOKEN_BYTES, NUM_LAYERS = 4, 1_024, 4
LINK = LinkSpeed(1e8, 1e-6, "made up")


def layered(config: ServerConfig, **settings: object) -> ServerConfig:
    setup = LayerSetup(40_000, 400, LINK, LINK)
    setup = replace(setup, **settings)  # type: ignore[arg-type]
    return replace(config, device_reuse=False, layers=setup)


def ran(config: ServerConfig, workload: SimWorkload) -> SimResult:
    """Run it; every request ends with all its tokens, and no layer-page is lost."""
    server = SimServer(config, workload)
    result = server.run()
    for record, request in zip(result.records, workload.requests, strict=True):
        assert not record.aborted
        assert record.num_output_tokens == request.num_output_tokens
        times = result.token_times(record)
        assert len(times) == request.num_output_tokens
        assert (np.diff(times) > 0).all()
        assert times[-1] == pytest.approx(record.finished_s)
    assert server.layers is not None
    server.layers.check()
    assert server.tree.private_pages == 0
    return result


def crowd(num: int = 40, rate_per_s: float = 50.0, seed: int = 0) -> SimWorkload:
    rng = np.random.default_rng(seed)
    return fixed_lengths(num, rate_per_s, 100, 60, PAGE, rng)


@pytest.mark.parametrize("decode", TURNS)
def test_with_room_for_all_it_is_the_server_without(
    make_config: Make, decode: str
) -> None:
    """A large device keeps every layer: same tokens at the same times."""
    config = make_config(device=4_000, device_reuse=False)
    plain = simulate(config, crowd())
    result = ran(layered(config, decode=decode), crowd())
    for one, other in zip(plain.records, result.records, strict=True):
        assert result.token_times(other) == pytest.approx(plain.token_times(one))
    assert result.layers is not None
    assert result.layers.streamed_bytes == result.layers.returned_bytes == 0


@pytest.mark.parametrize("decode", TURNS)
def test_a_full_device_admits_at_once(make_config: Make, decode: str) -> None:
    """Plain requests queue for pages; layer-wise they have their first token soon."""
    config = make_config(device=250, device_reuse=False)
    plain = summarize(simulate(config, crowd()))
    result = ran(layered(config, decode=decode), crowd())
    found = summarize(result)
    assert found.ttft.mean < plain.ttft.mean / 3
    assert result.num_retractions == 0
    assert result.layers is not None
    assert result.layers.offloaded_bytes > 0


def test_streaming_costs_what_pausing_saves(make_config: Make) -> None:
    """Where most of the KV is on the host, the paper's form waits for the link."""
    config = make_config(device=250, device_reuse=False)
    streamed = ran(layered(config, decode="stream"), crowd())
    paused = ran(layered(config, decode="pause"), crowd())
    assert streamed.layers is not None
    assert paused.layers is not None
    # Streamed ones wait too where there is no layer-page for their next token.
    assert streamed.layers.num_pauses < paused.layers.num_pauses
    assert streamed.layers.streamed_bytes > 2 * paused.layers.streamed_bytes
    assert paused.end_s < streamed.end_s


def test_turns_are_told_what_is_on_its_way(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it they let layers leave for others that the link has no time for."""
    seen = []
    choose = PauseTurns.choose

    def watched(self: PauseTurns, running: Seq[TurnFacts], room: TurnRoom) -> TurnPlan:
        seen.append(room.coming_bytes)
        return choose(self, running, room)

    monkeypatch.setattr(PauseTurns, "choose", watched)
    ran(layered(make_config(device=250, device_reuse=False), decode="pause"), crowd())
    # A request has 160 tokens at most, and the last one is returned before the end.
    assert 0 < max(seen) < 40 * 160 * TOKEN_BYTES
    assert seen[-1] == 0


def test_pauses_are_not_charged_to_prefill(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eq. 2 looks at those that decode, and at the time in which they do.

    Else it holds prompts because others wait for their turns, and gives those nothing.
    """
    config = make_config(
        device=250,
        device_reuse=False,
        length_predictor="oracle",
        scheduler=SchedulerConfig(tpot_slo_s=0.02, ttft_slo_s=3.0),
    )
    held = replace(config, scheduler=replace(config.scheduler, slo_admission="slo"))
    free = summarize(ran(layered(config), crowd(120)))
    found = summarize(ran(layered(held), crowd(120)))
    assert found.ttft.mean < 1.5 * free.ttft.mean
    monkeypatch.setattr(LayerMemory, "paused_s", lambda self, seq: 0.0)
    charged = summarize(ran(layered(held), crowd(120)))
    assert charged.ttft.mean > 3.0 * free.ttft.mean


@pytest.mark.parametrize("rate", [3e7, 5e7])
def test_turns_of_long_requests_do_not_empty_the_device(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    """Three have room, 37 wait for their turns, and all are due again and again.

    If each step streamed another, whose layers then came in vain, as nobody decodes
    from the device, tokens would take half as long again.
    """
    link = LinkSpeed(rate, 1e-6, "made up")
    config = make_config(device=400, device_reuse=False)
    workload = fixed_lengths(40, 200.0, 240, 150, PAGE, np.random.default_rng(0))
    joined = ran(layered(config, decode="join", up=link, down=link), workload)
    monkeypatch.setattr(layers, "make_turns", lambda name: PauseTurns(0.2))
    turned = ran(layered(config, decode="pause", up=link, down=link), workload)
    assert turned.layers is not None
    assert turned.layers.num_pauses > 100
    assert turned.end_s < 1.2 * joined.end_s


def test_what_is_on_its_way_turns_back_by_layers(make_config: Make) -> None:
    """The last layers first; what has landed, and what goes on, keeps its place."""
    config = layered(make_config(device=250, device_reuse=False), up=LINK)
    queue = EventQueue()
    memory = LayerMemory(config, queue, None, lambda: None)
    one = memory._of[0] = _Layers(0, num_pages=10)
    free = memory.free
    memory._return(one, 4)
    assert (memory.free, one.coming) == (free - 40, 4)
    layer_bytes = 10 * PAGE * TOKEN_BYTES / 4
    assert memory._host_bytes(one) == 4 * layer_bytes
    # A layer and a half of the link's time.
    queue.at(1.5 * layer_bytes / LINK.bytes_per_s, Priority.WAKE, lambda: None)
    queue.run()
    memory._end_returns(queue.now())
    assert (one.coming, memory._host_bytes(one)) == (3, 3 * layer_bytes)
    memory._keep(one, 3)
    assert (memory.free, one.coming) == (free - 30, 2)
    assert memory._returns[0].bytes_left == pytest.approx(2 * layer_bytes)
    memory._keep(one, 0)
    assert (memory.free, one.coming, len(memory._returns)) == (free, 0, 0)


def test_what_returns_has_a_share_of_a_link_that_a_step_waits_for(
    make_config: Make,
) -> None:
    """A tenth: the step takes a ninth longer."""
    slow = LinkSpeed(1e5, 1e-6, "made up")
    config = layered(make_config(device=250, device_reuse=False), up=slow)
    memory = LayerMemory(config, EventQueue(), None, lambda: None)
    seq = Sequence(0, crowd(1).requests[0], 0.0)
    seq.kv_tokens = 100
    memory._of[0] = _Layers(0, num_pages=25)
    alone = memory.shape([seq])
    memory._return(_Layers(0, num_pages=10), 4)
    shared = memory.shape([seq])
    assert shared.stream_bytes == alone.stream_bytes == 100 * TOKEN_BYTES
    assert shared.first_s == pytest.approx(alone.first_s * 10 / 9, rel=1e-3)


def test_a_streamed_step_by_hand(make_config: Make) -> None:
    """One prompt that the device cannot hold: its steps take as long as their bytes."""
    builder = WorkloadBuilder(PAGE)
    builder.add(0.0, 200, 3)
    # 40 pages of 4 layers, less 2 x 51 for staging: 58 layer-pages for 50 pages.
    config = layered(
        make_config(device=40, device_reuse=False, scheduler=SchedulerConfig()),
        max_context_tokens=204,
        low_share=0.0,
        return_share=0.0,
        up=LinkSpeed(1e6, 1e-6, "made up"),
    )
    with pytest.raises(AssertionError):
        # Two layers' pages for the copies, and those that are written, do not fit.
        ran(config, builder.build("one"))
    config = replace(config, device_tokens=60 * PAGE)
    result = ran(config, builder.build("one"))
    first = result.segments[0]
    assert first.first_s == pytest.approx(200 * TOKEN_BYTES / 1e6, rel=0.02)
    # Two layers find room afterwards.
    assert result.layers is not None
    assert result.layers.returned_bytes == 2 * 200 * TOKEN_BYTES / 4


@pytest.mark.parametrize("decode", TURNS)
@pytest.mark.parametrize("admission", ["sglang", "vllm"])
@pytest.mark.parametrize("seed", range(6))
def test_no_setting_loses_a_request(
    make_config: Make, seed: int, decode: str, admission: str
) -> None:
    """Drawn pools, links, chunks and thresholds: all end, and laws hold."""
    rng = np.random.default_rng(seed)
    builder = WorkloadBuilder(PAGE)
    now_s = 0.0
    for _ in range(60):
        now_s += float(rng.exponential(0.02))
        builder.add(now_s, int(rng.integers(1, 200)), int(rng.integers(1, 90)))
    rate = float(rng.choice([1e6, 1e7, 1e9]))
    speed = LinkSpeed(rate, 1e-6, "made up")
    low = float(rng.choice([0.0, 0.05]))
    slo = bool(rng.integers(2))
    config = layered(
        make_config(
            device=int(rng.integers(250, 500)),
            length_predictor=str(rng.choice(["online", "oracle"])) if slo else "none",
            scheduler=SchedulerConfig(
                admission=admission,
                chunk_tokens=int(rng.choice([0, 64])),
                max_prefill_tokens=256,
                max_running=int(rng.choice([10, 100])),
                slo_admission="slo" if slo else "none",
                ttft_slo_s=0.3,
                tpot_slo_s=float(rng.choice([0.0, 0.01])),
            ),
        ),
        down=speed,
        up=speed,
        decode=decode,
        low_share=low,
        return_share=low + float(rng.choice([0.0, 0.1])),
        host_tokens=int(rng.choice([2_000, 100_000])),
    )
    workload = builder.build("drawn")
    result = ran(config, workload)
    assert result.log.digest() == simulate(config, workload).log.digest()


@pytest.mark.parametrize(
    "wrong",
    [
        {"decode": "maybe"},
        {"max_context_tokens": 0},
        {"host_tokens": 100},
        {"low_share": 0.5},
    ],
)
def test_wrong_settings_are_refused(
    make_config: Make, wrong: dict[str, object]
) -> None:
    """In one sentence, when they are made."""
    with pytest.raises(ConfigError):
        layered(make_config(), **wrong)


def test_shared_prefixes_are_refused(make_config: Make) -> None:
    """They are not modelled."""
    with pytest.raises(ConfigError, match="reuse"):
        replace(layered(make_config()), device_reuse=True)
