"""Ranks with layers of their own decide alike, and without the agreement they part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.errors import RanksPartedError
from sgl_tiered.layered.binding import Flight
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.serving.agreement import _HEAD, Agreement
from sgl_tiered.serving.layered.ranks import SharedMover
from sgl_tiered.testing.fake_layers import FakeLayerCopier
from tests.unit.engines.layered_ranks_support import (
    FAILS,
    LAYOUT,
    OwnMover,
    OwnOutages,
    run_layered,
)
from tests.unit.engines.ranks_support import on_two_ranks


class OwnMeasures(Agreement):
    """Each rank learns from the steps that it has measured itself."""

    def learned(self, observe):
        return observe


class OwnClock(Agreement):
    """Each rank reads its own clock."""

    def now(self) -> float:
        return self.own_clock.now()


@pytest.mark.parametrize(("num_ranks", "seed"), [(2, 1), (3, 2)])
def test_ranks_place_layers_alike(num_ranks, seed):
    """Copies end and fail on each in its own time; one log: who is admitted and keeps
    what, who decodes, room, and where every layer of every page lies."""
    num_passes = 400
    ranks, errors, meeting = run_layered(num_ranks, num_passes, seed)
    assert not errors
    first = ranks[0]
    for name in ("held", "paused", "streamed"):
        assert first.counts[name] > 10, first.counts
    for rank in ranks:
        assert rank.copier.num_failed > 10
        assert rank.log == first.log
    # Some had to wait for room, and met for it.
    assert meeting.num_messages > num_passes


def test_ranks_that_agree_on_nothing_part():
    """The negative control: what the rigs see does differ."""
    ranks, errors, _ = run_layered(2, 200, 1, meets=False, mover=OwnMover)
    assert not errors
    assert ranks[0].log != ranks[1].log


@pytest.mark.parametrize(("mover", "fails"), [(OwnMover, FAILS), (OwnOutages, 0.4)])
def test_copies_that_are_one_ranks_own_part_them(mover, fails):
    """All else agreed on: they are told so, or place layers in different ways."""
    ranks, errors, _ = run_layered(2, 400, 1, mover=mover, fails=fails)
    if errors:
        assert any(isinstance(error, RanksPartedError) for error in errors), errors
    else:
        assert ranks[0].log != ranks[1].log


def begin_flight(mover, size):
    pages, epochs = np.arange(size), np.zeros(size, np.uint32)
    mover.start(Flight(0, pages, pages.astype(np.int32), epochs, is_up=False))


def play_flights(sizes, fails, end):
    """Let two ranks begin flights, and end by ``end(mover, agreement)``.

    Args:
        sizes: layer-pages of each flight that leaves, by rank.
        fails: which rank's copies do.
        end: whose ``RanksPartedError`` is returned as text, by rank; "" for none.
    """

    def work(rank, seat):
        agreement = Agreement(ManualClock(), seat)
        copier = FakeLayerCopier(LAYOUT.num_layers, 16, 16, LAYOUT.page_tokens)
        copier.fails = lambda direction: rank == fails
        mover = SharedMover(agreement, copier, LAYOUT.layer_page_bytes)
        try:
            for size in sizes[rank]:
                begin_flight(mover, size)
            end(mover, agreement)
        except RanksPartedError as error:
            return str(error)
        finally:
            agreement.leave()
            mover.close()
        return ""

    return on_two_ranks(work)


def wait_for_one(mover, agreement):
    mover.wait()


def land_and_meet(mover, agreement):
    while len(mover._here) < len(mover._flying):
        LayerMover.wait(mover)
        mover._take()
    agreement.meet({})


@pytest.mark.parametrize(
    ("sizes", "end"),
    [
        pytest.param(([3], [6]), wait_for_one, id="other sizes, waited for"),
        pytest.param(([3], [6]), land_and_meet, id="other sizes"),
        pytest.param(([3], [3, 3]), land_and_meet, id="another number"),
    ],
)
def test_ranks_whose_flights_differ_are_told(sizes, end):
    """Before what one has told is used as if it were of the other's flight."""
    first, second = play_flights(sizes, 1, end)
    assert first.startswith("rank 1 of 2 has decided differently")
    assert not second


def test_a_rank_that_is_told_nothing_of_what_it_waits_for_has_parted():
    """The other asks as well, and says of no flight that it has landed."""
    seat = SimpleNamespace(
        rank=0, num_ranks=2, gather=lambda message: [message, message[: _HEAD.size]]
    )
    agreement = Agreement(ManualClock(), seat)
    copier = FakeLayerCopier(LAYOUT.num_layers, 16, 16, LAYOUT.page_tokens)
    mover = SharedMover(agreement, copier, LAYOUT.layer_page_bytes)
    begin_flight(mover, 3)
    with pytest.raises(RanksPartedError, match="rank 1 of 2 has decided differently"):
        mover.wait()
    mover.close()


@pytest.mark.parametrize("kind", [OwnMeasures, OwnClock])
def test_every_fact_is_needed(kind):
    """Leave one out, and the ranks part; they are told so rather than go on."""
    _, errors, _ = run_layered(2, 1_000, 1, kind=kind)
    assert any(isinstance(error, RanksPartedError) for error in errors), errors


PROGRAM = """
import json, sys
import torch.distributed as dist
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.engines.device.ranks import group_ranks
from tests.unit.engines.layered_ranks_support import LayeredRank

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2],
                        rank=rank, world_size=2)
ranks = group_ranks(dist.new_group(backend="gloo"))
server = LayeredRank(rank, 4, Agreement(ManualClock(300.0 * rank), ranks))
server.run(300)
print(json.dumps([repr(server.log), server.counts]), flush=True)
server.agreement.leave()
server.manager.close()
dist.destroy_process_group()
"""


@pytest.mark.sglang
def test_two_processes_over_gloo_place_layers_alike(tmp_path):
    """Over a real group, with hash seeds of their own."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "meet")],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1)},
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=300)[0].splitlines()[-1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert told[0] == told[1]
    _, counts = json.loads(told[0])
    assert counts["paused"] > 10
