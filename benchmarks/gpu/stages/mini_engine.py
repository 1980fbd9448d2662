"""The mini-engine on a tight pool: answers, controls, first tokens, waits, idle time.

1. Random conversations on a device pool of a third of their KV, with evictions on both
   levels, by the copy engines and by the kernel: all answers equal, bit for bit, those
   of prompts computed at once.
2. Negative controls: one wait, or one lock, is left out. Some answer must be wrong.
3. Single requests: time to the first token of a prompt computed, loaded from the host,
   and found on the device.

In a dry run the device is played, so that the first two show more than a GPU's one
order of events does, and times mean nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from engine.engine import CONTROLS, Engine, Request, Sizes
from engine.machine import CudaMachine, Machine, PlayedMachine
from engine.model import Shape
from engine.work import Conversations, Talk, num_wrong
from stages.stage import Stage

from sgl_tiered.pipelines.stream_pool import LoadWay

__all__ = ["played", "run"]

_PLAYED = (
    Shape(num_layers=3, num_heads=2, head_dim=8, page_tokens=4),
    Sizes(num_pages=40, host_pages=90, max_running=4, max_tokens=96, chunk_tokens=24),
    Talk((8, 30), (4, 16), (1, 7), num_prefixes=4, num_kept=5, longest=72),
)
_CUDA = (
    # Half of Llama-3.1-8B's layers: a page of 16 tokens is 1 MiB, its pieces 32 KiB.
    Shape(
        num_layers=16,
        num_heads=8,
        head_dim=128,
        page_tokens=16,
        hidden=4096,
        intermediate=14336,
    ),
    Sizes(
        num_pages=2048,
        host_pages=3072,
        max_running=8,
        max_tokens=8192,
        chunk_tokens=2048,
    ),
    Talk((512, 3072), (64, 1024), (4, 24), num_prefixes=12, num_kept=16, longest=6144),
)
_CONTROL_PAGES = 1024
"""Of either level where a control is run: pinning more takes longer than the run."""
_CONTROL_SEEDS = 24
_PLAYED_MOST_S = 60.0
_STUCK_STEPS = 20_000
_LAG_S = 0.02
_HELD_UP = ("load_mark", "offload_mark")
"""Controls whose forwards are held up for so long: what should wait for them then has
time to be wrong. In the others the model has to be faster than copies are. Runs whose
answers have to be right are held up as well, for a part."""
_PROMPT_TOKENS = (1024, 4096)
_WAYS = tuple(LoadWay)
_SYNCHRONIZES = "called a synchronizing"
_MUST_CATCH = ("layer_wait", "consumer", "offload_mark")
"""On a GPU. Whether the others are depends on how work of two streams meets there, by
chance: they are told, and all of them are caught on the played device."""


def run(stage: Stage) -> None:
    """Run the parts; raises AssertionError for wrong answers or uncaught controls."""
    if stage.dry_run:
        _play(stage)
        return
    shape, sizes, talk = _CUDA
    wrong = 0
    for way, lag_s in (*((way, 0.0) for way in _WAYS), (LoadWay.KERNEL, _LAG_S)):
        if stage.left_s < 10.0:
            stage.add("skipped", what=f"random, by {way.value}, lag {lag_s}")
            continue
        run = _Run(
            CudaMachine(),
            shape,
            sizes,
            talk,
            way=way,
            lag_s=lag_s,
            newest_first=bool(lag_s),
        )
        most_s = min(stage.left_s / 4, 20.0)
        told = run.talk(60 if lag_s else 200, most_s)
        stage.add("random", way=way.value, lag_s=lag_s, **told)
        wrong += told["wrong"]
        _check_shown(told, ("loads", "offloads"))
        if not lag_s:
            word = way.value
            for name in ("idle_share", "blocked_share", "host_waits"):
                stage.figure(f"mini_{name}_{word}", told[name])
            told = run.first_tokens(_PROMPT_TOKENS)
            stage.add("first_token", way=word, **told)
            stage.figure(f"mini_first_token_ms_{word}", told["median_ms"])
        run.close()
    assert not wrong, f"{wrong} answers are wrong"
    uncaught, not_run = [], []
    small = replace(sizes, num_pages=_CONTROL_PAGES, host_pages=_CONTROL_PAGES)
    for control in CONTROLS:
        if stage.left_s < 5.0:
            not_run.append(control)
            stage.add("skipped", what=f"the control {control}")
            continue
        lag_s = _LAG_S if control in _HELD_UP else 0.0
        run = _Run(
            CudaMachine(),
            shape,
            small,
            talk,
            way=LoadWay.KERNEL,
            dropped=frozenset([control]),
            lag_s=lag_s,
            newest_first=True,
        )
        told = run.talk(60, min(stage.left_s / 3, 8.0))
        run.close()
        stage.add("control", control=control, lag_s=lag_s, **told)
        if not told["wrong"]:
            uncaught.append(control)
    stage.figure("mini_controls_uncaught", uncaught)
    stage.figure("mini_controls_not_run", not_run)
    missed = set(uncaught) & set(_MUST_CATCH)
    assert not missed, f"controls were not caught: {sorted(missed)}"


def _play(stage: Stage) -> None:
    """Run the first two parts on a played device."""
    loads = 0
    for seed, way in itertools.product(range(2), _WAYS):
        told = played(seed, way=way, newest_first=bool(seed % 2))
        stage.add("random", way=way.value, seed=seed, **told)
        loads += told["loads"]
        _check_shown(told, ("loads", "offloads", "device_evicted", "host_evicted"))
        assert not told["wrong"], f"{told['wrong']} answers are wrong"
    stage.figure("mini_loads", loads)
    for control in CONTROLS:
        for seed in range(_CONTROL_SEEDS):
            told = played(100 + seed, way=_WAYS[seed % len(_WAYS)], dropped=control)
            if told["wrong"]:
                break
        stage.add("control", control=control, caught_by_seed=seed, **told)
        assert told["wrong"], f"the control {control} was not caught"
    stage.figure("mini_controls_uncaught", [])
    run = _Run(PlayedMachine(7), *_PLAYED, way=LoadWay.KERNEL)
    stage.add("first_token", is_played=True, **run.first_tokens((48,)))
    run.close()


def _check_shown(told: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raise AssertionError unless the run did what its answers are to show."""
    for name in names:
        assert told[name] > 0, f"nothing was shown: no {name}"


def played(
    seed: int,
    *,
    way: LoadWay,
    dropped: str = "",
    newest_first: bool = True,
    num_requests: int = 40,
) -> dict[str, Any]:
    """Serve conversations on a played device; return what was seen.

    Args:
        seed: of the conversations, and of the order of the device's streams.
        way: how loads go.
        dropped: of ``CONTROLS``, or nothing.
        newest_first: what was used last is dropped first.
        num_requests: in all.
    """
    run = _Run(
        PlayedMachine(seed),
        *_PLAYED,
        way=way,
        dropped=frozenset([dropped] if dropped else []),
        seed=seed,
        newest_first=newest_first,
        lag_s=_LAG_S if dropped in _HELD_UP else 0.0,
    )
    try:
        return run.talk(num_requests, _PLAYED_MOST_S)
    finally:
        run.close()


class _Run:
    """An engine and its conversations."""

    def __init__(
        self,
        machine: Machine,
        shape: Shape,
        sizes: Sizes,
        talk: Talk,
        *,
        way: LoadWay,
        dropped: frozenset[str] = frozenset(),
        lag_s: float = 0.0,
        newest_first: bool = False,
        seed: int = 0,
    ) -> None:
        self._machine = machine
        self._engine = Engine(
            machine,
            shape,
            sizes,
            way=way,
            dropped=dropped,
            lag_s=lag_s,
            newest_first=newest_first,
        )
        self._talk = Conversations(talk, seed)
        self._rng = np.random.default_rng(seed)
        self._sizes = sizes

    def close(self) -> None:
        self._engine.close()

    def talk(self, num_requests: int, most_s: float) -> dict[str, Any]:
        """Serve conversations for so long; return what was seen."""
        engine, began_s = self._engine, time.perf_counter()
        num_added = num_taken = 0
        with _Waits(self._machine) as waits:
            while True:
                over = time.perf_counter() - began_s > most_s
                while (
                    num_added < num_requests
                    and not over
                    and num_added - num_taken < 2 * self._sizes.max_running
                ):
                    engine.add(self._talk.next())
                    num_added += 1
                engine.step()
                if isinstance(self._machine, PlayedMachine):
                    self._machine.pass_time()
                for request in engine.ended[num_taken:]:
                    self._talk.took(request)
                    num_taken += 1
                if engine.is_idle and (over or num_added == num_requests):
                    break
                assert engine.num_steps < _STUCK_STEPS, "nothing goes on"
        total_s = time.perf_counter() - began_s
        engine.drain()
        self._machine.synchronize()
        wrong = num_wrong(engine.model, engine.ended)
        return {
            "requests": len(engine.ended),
            "wrong": wrong,
            "loads": engine.num_loads,
            "offloads": engine.num_offloads,
            "pending": engine.num_pending,
            "loaded_pages": sum(one.loaded_pages for one in engine.ended),
            "device_hit_pages": sum(one.device_pages for one in engine.ended),
            "device_evicted": engine.tree.num_evicted,
            "host_evicted": int(sum(engine.cache.stats.pages_evicted.values())),
            "steps": engine.num_steps,
            "total_s": total_s,
            "scheduler_s": {key: round(s, 6) for key, s in engine.seconds.items()},
            "blocked_share": round(
                sum(engine.seconds.get(name, 0.0) for name in _BLOCKS) / total_s, 5
            ),
            "load_stall_s": engine.stall_s,
            "idle_share": self._idle_share(),
            "host_waits": waits.count,
            "host_waits_at": waits.places,
            "first_token_s": [one.first_token_s for one in engine.ended],
        }

    def _idle_share(self) -> float:
        """Return the share of the device's time in which no forward ran."""
        forwards = self._engine.forwards
        if len(forwards) < 2:
            return 0.0
        gaps = [
            max(end.elapsed_time(begin), 0.0)
            for (_, end), (begin, _) in itertools.pairwise(forwards)
        ]
        total = forwards[0][0].elapsed_time(forwards[-1][1])
        return float(round(sum(gaps) / max(total, 1e-9), 4))

    def first_tokens(
        self, lengths: tuple[int, ...], repeats: int = 3
    ) -> dict[str, Any]:
        """Serve single prompts thrice: computed, from the host, from the device."""
        seconds: dict[str, list[float]] = {}
        for tokens, _ in itertools.product(lengths, range(repeats)):
            prompt = self._rng.integers(0, 32_000, tokens).astype(np.int32)
            for way in ("computed", "host", "device"):
                if way == "host":
                    self._engine.drain()
                    self._engine.forget_device()
                request = Request(f"{way}{tokens}", prompt, 2)
                self._serve(request)
                found = (request.device_pages, request.loaded_pages)
                wanted = {"computed": (False, False), "host": (False, True)}
                is_found = tuple(count > 0 for count in found)
                assert is_found == wanted.get(way, (True, False)), f"{way}: {found}"
                name = f"{way}_{tokens}"
                seconds.setdefault(name, []).append(request.first_token_s)
        assert not num_wrong(self._engine.model, self._engine.ended), "a wrong answer"
        median = {name: statistics.median(many) for name, many in seconds.items()}
        return {
            "kv_token_bytes": self._engine.model.shape.token_bytes,
            "seconds": seconds,
            "median_ms": {name: round(1e3 * one, 3) for name, one in median.items()},
        }

    def _serve(self, request: Request) -> None:
        self._machine.synchronize()
        self._engine.add(request)
        while not self._engine.is_idle:
            self._engine.step()


_BLOCKS = ("wait_queued", "wait_landed")
"""Waits on the scheduler's thread that are the loads'; that for a result is
SGLang's."""


class _Waits:
    """Counts what makes a thread wait for the device, where torch tells of it.

    Attributes:
        count: of such calls; None where the device is played.
        places: where they are, and how many there.
    """

    def __init__(self, machine: Machine) -> None:
        self._is_cuda = machine.torch.type == "cuda"
        self.count: int | None = None
        self.places: dict[str, int] = {}

    def __enter__(self) -> _Waits:
        self._stack = contextlib.ExitStack()
        self._seen = self._stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if self._is_cuda:
            torch.cuda.set_sync_debug_mode("warn")
            self._stack.callback(torch.cuda.set_sync_debug_mode, "default")
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        if not self._is_cuda:
            return
        self.count = 0
        for one in self._seen or []:
            if _SYNCHRONIZES in str(one.message):
                self.count += 1
                place = f"{one.filename.rpartition('/')[2]}:{one.lineno}"
                self.places[place] = self.places.get(place, 0) + 1
