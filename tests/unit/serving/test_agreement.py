"""Ranks agree: every decision alike over thousands of passes, and not without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.engines.device.ranks import group_ranks
from sgl_tiered.errors import RanksPartedError
from sgl_tiered.serving.agreement import Agreement
from tests.unit.engines.ranks_support import on_two_ranks, parting, run_ranks

NUM_RANKS = 2


class OwnClock(Agreement):
    """Each rank reads its own clock."""

    def now(self) -> float:
        return self.own_clock.now()


class OwnEnds(Agreement):
    """A transfer has ended for a rank when it has ended there."""

    def meet(self, facts):
        met = super().meet({k: v for k, v in facts.items() if k != "ended"})
        return [{**told, "ended": facts.get("ended", {})} for told in met]


class OwnMeasures(Agreement):
    """Each rank learns from what it has measured itself."""

    def learned(self, observe):
        return observe


class OwnMoments(Agreement):
    """Each rank knows by its own clock when requests came and had their first token."""

    def moment_s(self, rid, name, own_s):
        return own_s


class OwnVerdicts(Agreement):
    """A load to the device has failed where it has failed."""

    def all(self, fact):
        return fact


class OwnStart(Agreement):
    """Costs start from each rank's own figures."""

    def first(self, value):
        super().first(value)
        return value


@pytest.mark.parametrize(
    ("num_ranks", "seed"), [(2, 3), pytest.param(2, 4, marks=pytest.mark.full), (3, 5)]
)
def test_ranks_decide_alike(num_ranks: int, seed: int) -> None:
    """Clocks, links, measurements and ends of transfers of their own; one log: order,
    admissions, waits, loads, offloads, evictions (by the cache's digest), lengths."""
    num_passes = 800
    ranks, errors, meeting = run_ranks(num_ranks, num_passes, seed)
    assert not errors
    first = ranks[0]
    assert first.counts["loads"] > 20
    assert first.counts["held"] > 20
    assert first.counts["waits"] > 20
    assert first.counts["reordered"] > 20
    assert first.runtime.prefetcher.num_started > 5
    assert first.tree.num_evicted_pages > 100
    for other in ranks[1:]:
        assert other.log == first.log
        assert other.runtime.cost.snapshot() == first.runtime.cost.snapshot()
    for rank in ranks:
        rank.cache.check()
    # One message per pass, one per load to the device, and three at the start: costs,
    # what is on disk, and whose weights these are.
    assert meeting.num_messages <= num_passes + first.counts["loads"] + 3


def test_ranks_stop_copying_and_begin_again_alike() -> None:
    """Write policy and disk admission ``auto``, as served: with the same requests what
    is copied is the same, while none come again and when some do."""
    ranks, errors, _ = run_ranks(NUM_RANKS, 600, 3, write_policy="auto")
    assert not errors
    assert ranks[0].copied[:3] == [True, False, True]
    assert ranks[0].counts["loads"] > 0
    for rank in ranks:
        assert rank.log == ranks[0].log
        assert rank.copied == ranks[0].copied
        rank.cache.check()


def test_ranks_that_agree_on_nothing_part() -> None:
    """The negative control: the rigs do differ in what they see."""
    ranks, errors, _ = run_ranks(NUM_RANKS, 300, 3, meets=False)
    assert not errors
    assert ranks[0].log != ranks[1].log


@pytest.mark.parametrize(
    "kind", [OwnClock, OwnEnds, OwnMeasures, OwnMoments, OwnVerdicts, OwnStart]
)
def test_every_fact_is_needed(kind: type[Agreement]) -> None:
    """Leave one out, and the ranks part; they are told so rather than go on."""
    _, errors, _ = run_ranks(NUM_RANKS, 1_000, 3, kind=kind)
    assert any(isinstance(error, RanksPartedError) for error in errors), errors


def test_a_single_rank_sends_nothing() -> None:
    """It reads its own clock, learns by itself and gets its own facts back."""
    clock = ManualClock(1.0)
    alone = Agreement(clock)
    assert not alone.is_shared
    clock.advance(1.0)
    assert alone.now() == 2.0
    facts = {"a": 1}
    assert alone.meet(facts) == [facts]
    assert alone.meet(facts)[0] is facts

    def observe(seconds: float) -> None:
        raise AssertionError(seconds)

    assert alone.learned(observe) is observe
    assert alone.moment_s("r", "arrived", 7.0) == 7.0
    assert alone.all(True)
    assert not alone.all(False)
    assert alone.first([3]) == [3]
    alone.note("anything")
    assert (alone._noted, alone._moments) == (0, {}), "nothing is kept either"


def test_a_single_rank_is_alone_without_a_group() -> None:
    """No group, no ranks; and the runtime of one asks its pipelines directly."""
    assert group_ranks(None) is None
    ranks, errors, meeting = run_ranks(1, 20, 3, meets=False)
    assert not errors
    assert meeting.num_messages == 0
    transfers = ranks[0].runtime.transfers
    assert transfers.take == ranks[0].runtime.completions.drain
    assert ranks[0].runtime.observe_prefill == ranks[0].runtime.cost.observe_prefill


def both(work) -> list:
    """Run ``work(rank, agreement, clock)`` on two ranks; return what it returned."""

    def run(rank, seat):
        clock = ManualClock(100.0 * (1 - rank))
        return work(rank, Agreement(clock, seat), clock)

    return on_two_ranks(run)


def test_the_time_is_that_of_rank_0_and_stands_still_between_meetings() -> None:
    """Whoever asks in a pass gets the same time; it never falls."""

    def work(rank, agreement, clock):
        times = [agreement.now()]
        clock.advance(1.0 + rank)
        times.append(agreement.now())
        agreement.meet({})
        times.append(agreement.now())
        return times

    assert both(work) == [[100.0, 100.0, 101.0]] * 2


def test_what_rank_0_measured_is_learned_by_all_at_the_meeting() -> None:
    """Exactly, and nobody learns what another rank measured."""

    def work(rank, agreement, clock):
        seen = []
        observe = agreement.learned(lambda *values: seen.append(values))
        observe(3, 0.1 + rank)
        assert not seen
        agreement.meet({})
        return seen

    assert both(work) == [[(3, 0.1)]] * 2


def test_a_moment_is_a_meeting_s_time_until_it_is_forgotten() -> None:
    """And not what the rank measured itself."""

    def work(rank, agreement, clock):
        found = [agreement.moment_s("r", "arrived", 5.0 + rank)]
        clock.advance(1.0)
        agreement.meet({})
        found.append(agreement.moment_s("r", "arrived", 6.0))
        agreement.forget("r")
        found.append(agreement.moment_s("r", "arrived", 6.0))
        return found

    assert both(work) == [[100.0, 100.0, 101.0]] * 2


def test_ranks_that_noted_different_decisions_are_told() -> None:
    """All of them, at the next meeting."""

    def work(rank, agreement, clock):
        agreement.note("a", 1)
        agreement.meet({})
        agreement.note("a", rank)
        return parting(agreement.meet, {})

    for told in both(work):
        assert told.startswith("rank 1 of 2 has decided differently")


@pytest.mark.parametrize("asks", ["meet", "all", "gathered"])
def test_ranks_at_different_points_are_told(asks) -> None:
    """What one of them sends is no answer to what the other asks."""

    def work(rank, agreement, clock):
        other = "meet" if asks != "meet" else "gathered"
        call = getattr(agreement, other if rank else asks)
        return parting(call, {})

    for told in both(work):
        assert "of 2 has decided differently" in told


def test_ranks_that_learn_different_things_are_told() -> None:
    """Rank 0 measures what rank 1 does not know of."""

    def work(rank, agreement, clock):
        if rank == 0:
            agreement.learned(lambda value: None)(1.0)
        return parting(agreement.meet, {})

    first, second = both(work)
    assert not first
    assert second.startswith("rank 0 of 2 has decided differently")


def test_who_leaves_waits_for_nobody() -> None:
    """At the end of a server each rank goes its own way, by its own clock."""

    def work(rank, agreement, clock):
        agreement.leave()
        clock.advance(1.0)
        return agreement.meet({"a": rank}), agreement.now()

    assert both(work) == [([{"a": 0}], 101.0), ([{"a": 1}], 1.0)]


PROGRAM = """
import json, sys
import torch.distributed as dist
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.engines.device.ranks import group_ranks
from tests.unit.engines.ranks_support import Rank

rank, num_ranks, num_passes = (int(a) for a in sys.argv[1:4])
dist.init_process_group("gloo", init_method="file://" + sys.argv[4],
                        rank=rank, world_size=num_ranks)
ranks = group_ranks(dist.new_group(backend="gloo"))
for size in (0, 1, 251, 252, 253, 5000):
    told = ranks.gather(bytes([rank + 1]) * (size if rank else 3))
    assert told == [bytes([1]) * 3, bytes([2]) * size], size
clock = ManualClock(300.0 * rank)
server = Rank(rank, 3, clock, Agreement(clock, ranks))
server.run(num_passes)
print(json.dumps([server.log, server.counts]))
dist.destroy_process_group()
"""


@pytest.mark.sglang
def test_two_processes_over_gloo_decide_alike(tmp_path: Path) -> None:
    """The same over a real group, with hash seeds of their own: sets of strings have
    another order in each process. Messages of any length arrive."""
    arguments = [str(NUM_RANKS), "400", str(tmp_path / "meet")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1)},
        )
        for rank in range(NUM_RANKS)
    ]
    told = [rank.communicate(timeout=300)[0].splitlines()[-1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * NUM_RANKS
    assert told[0] == told[1]
    _, counts = json.loads(told[0])
    assert counts["loads"] > 0
