"""Simulator and engine tell the layer policies the same, and choose and place alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang import layered
from sgl_tiered.engines.sglang.decoders import Decoders
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.facts import LayerFacts, _Turn
from sgl_tiered.engines.sglang.layered.forecasting import LayerForecast
from sgl_tiered.engines.sglang.layered.turns import DecodeTurns
from sgl_tiered.engines.sglang.lengths import LengthReader
from sgl_tiered.layered.base import LayerRoom
from sgl_tiered.policies.layers.allotment import allotted_layers
from sgl_tiered.policies.layers.registry import make_turns
from sgl_tiered.policies.layers.retention import retained_layers
from sgl_tiered.policies.length.base import LengthFacts
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.length.constant import ConstantLength
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.options import LayerKv, Options, Slo
from sgl_tiered.sim import layers
from sgl_tiered.sim.config import LayerSetup, ServerConfig
from sgl_tiered.sim.events import EventQueue
from sgl_tiered.sim.hardware import LinkSpeed
from sgl_tiered.sim.layers import LayerMemory, _Layers

LAYERS, PAGE = 4, 4
LINK = LinkSpeed(1e6, 1e-6, "made up")
NOW_S, TPOT_S = 50.0, 0.01
# Layers on the device, whole pages, tokens out, first token and last one ago.
RUNNING = [
    (4, 10, 20, 0.3, 0.01),
    (4, 8, 5, 0.2, 0.01),
    (2, 6, 3, 0.2, 0.1),
    (0, 9, 1, 0.1, 0.1),
    (0, 2, 9, 3.0, 2.0),
]


@pytest.mark.parametrize("decode", ["pause", "stream"])
@pytest.mark.parametrize("free", [300, 60, 5])
def test_the_same_facts_give_the_same_choice(
    make_config: Callable[..., ServerConfig],
    monkeypatch: pytest.MonkeyPatch,
    decode: str,
    free: int,
) -> None:
    """Targets, waits, bytes and room of five requests, three of them partly away."""
    config = make_config(device=200, device_reuse=False)
    setup = LayerSetup(40_000, 400, LINK, LINK, decode=decode)
    scheduler = replace(config.scheduler, tpot_slo_s=TPOT_S)
    config = replace(config, layers=setup, scheduler=scheduler)
    book = LengthBook(ConstantLength(40))
    queue = EventQueue()
    memory = LayerMemory(config, queue, book, lambda: None)
    memory.free = free
    seqs: list[Any] = []
    reqs: list[Any] = []
    clock = ManualClock(NOW_S)
    reader = LengthReader(LengthBook(ConstantLength(40)))
    told = Options(slo=Slo(slo_tpot_s=TPOT_S))
    decoders = Decoders(told, reader, Agreement(clock))
    away = [(LAYERS - held) * pages for held, pages, *_ in RUNNING]
    room = LayerRoom(free=free, spare=0, landing=0, cached=0, total=memory.capacity)
    kept = {f"r{n}": num for n, (num, *_) in enumerate(RUNNING)}
    manager: Any = SimpleNamespace(
        num_held=lambda rids: [kept[rid] for rid in rids],
        held=lambda rid: mask(kept[rid]),
        hold=lambda rid, layers: None,
        release=lambda rid, layers: None,
        missing=lambda rid: 0,
        away=lambda rids: np.array(away),
        room=lambda: room,
        binding=SimpleNamespace(num_adrift=0),
    )
    staging = 2 * (400 // PAGE)
    plan = LayerPlan(
        PageLayout(LAYERS, PAGE, token_bytes=128),
        1_000,
        memory.capacity + staging,
        staging // 2,
        LayerKv(decode=decode),
    )
    policy = make_turns(decode)
    cost: Any = SimpleNamespace(
        seconds=config.times.decode_step_s, byte_s=0.0, share=1.0
    )
    facts = LayerFacts(
        manager,
        plan,
        policy,
        decoders,
        cost,
        lambda: LINK.bytes_per_s,
        clock,
    )
    for n, (held, pages, outputs, first_s, last_s) in enumerate(RUNNING):
        tokens = pages * PAGE + 1
        book.entered(n, LengthFacts(tokens, 1_000))
        memory._of[n] = _Layers(held, pages, 1, last_token_s=NOW_S - last_s)
        seqs.append(
            SimpleNamespace(
                index=n,
                kv_tokens=tokens,
                outputs=outputs,
                first_token_s=NOW_S - first_s,
            )
        )
        reqs.append(
            SimpleNamespace(
                rid=f"r{n}",
                kv=SimpleNamespace(kv_committed_len=tokens),
                origin_input_ids=[7] * tokens,
                output_ids=[8] * outputs,
                extra_key=None,
                cache_salt=None,
                sampling_params=SimpleNamespace(max_new_tokens=1_000, custom_params={}),
                time_stats=SimpleNamespace(prefill_finished_time=NOW_S - first_s),
            )
        )
        facts._known[f"r{n}"] = _Turn(NOW_S - last_s)

    ours = memory._room()
    contexts = sum(seq.kv_tokens for seq in seqs)
    step_s = memory._turns.pace_s(1, contexts // len(seqs), ours)
    reading = facts.read(reqs)
    theirs = facts.turn_room(reading)
    assert (theirs.free_bytes, theirs.device_tokens, theirs.token_bytes) == (
        ours.free_bytes,
        ours.device_tokens,
        ours.token_bytes,
    )
    shown = [memory._facts(seq, NOW_S, step_s) for seq in seqs]
    assert facts.turns(reqs, reading, theirs) == shown
    assert any(one.is_hopeless for one in shown) == policy.needs_targets
    chosen = policy.choose(facts.turns(reqs, reading, theirs), theirs)
    assert chosen == memory._turns.choose(shown, ours)
    assert facts.pace_s(9, 3 * contexts) == memory.pace_s(9, 3 * contexts)

    placed: list[tuple[int, tuple[int, ...], int]] = []

    def watched(num: int, pages: list[int], room: int) -> tuple[int, ...]:
        placed.append((num, tuple(pages), room))
        return allotted_layers(num, pages, room)

    monkeypatch.setattr(layered.turns, "allotted_layers", watched)
    monkeypatch.setattr(layers, "allotted_layers", watched)
    driver: Any = SimpleNamespace(manager=manager, plan=plan)
    admission: Any = SimpleNamespace(
        may_leave=lambda req: True,
        whole_pages=lambda req: req.kv.kv_committed_len // PAGE,
    )
    forecast = LayerForecast(driver, decoders.tokens_left)
    DecodeTurns(driver, admission, policy, facts, forecast)._move(reqs, chosen, 0)
    memory._place(seqs, chosen)
    assert len(placed) == 2
    assert placed[0] == placed[1]


def mask(num: int) -> np.ndarray:
    found = np.zeros(LAYERS, np.bool_)
    found[list(retained_layers(LAYERS, num))] = True
    return found
