"""Who goes first, with a clock that moves when told to."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.pipelines.shares import BandwidthShares, Share

TENTH = {Share.LOAD: 1.0, Share.PROMOTE: 0.5, Share.DEMOTE: 0.1}


class Links:
    """Shares, their clock, and which classes are active."""

    def __init__(self, **settings: float) -> None:
        self.clock = ManualClock()
        self.shares = BandwidthShares(self.clock, guaranteed=TENTH, **settings)
        self.active: set[Share] = set()
        for share in Share:
            self.shares.watch(share, lambda share=share: share in self.active)

    def chunk(self, share: Share, seconds: float) -> None:
        self.clock.advance(seconds)
        self.shares.used(share, seconds)


def test_alone_nobody_waits() -> None:
    """Chunk after chunk, while no better class is active."""
    links = Links()
    links.active = {Share.DEMOTE}
    for _ in range(3):
        links.chunk(Share.DEMOTE, 0.002)
        assert links.shares.delay_s(Share.DEMOTE) == 0.0


def test_a_worse_class_pauses_in_proportion() -> None:
    """A tenth of the time: 18 ms after a chunk of 2 ms; a half: 2 ms."""
    links = Links()
    links.active = {Share.LOAD}
    links.chunk(Share.DEMOTE, 0.002)
    assert links.shares.delay_s(Share.DEMOTE) == pytest.approx(0.018)
    links.chunk(Share.PROMOTE, 0.002)
    assert links.shares.delay_s(Share.PROMOTE) == pytest.approx(0.002)
    assert links.shares.delay_s(Share.LOAD) == 0.0


def test_promotions_go_before_demotions_and_after_loads() -> None:
    """An active promotion holds a demotion and no load; a demotion holds nobody."""
    links = Links()
    for share in Share:
        links.chunk(share, 0.001)
    links.active = {Share.PROMOTE}
    assert links.shares.delay_s(Share.DEMOTE) > 0.0
    assert links.shares.delay_s(Share.LOAD) == 0.0
    links.active = {Share.DEMOTE}
    assert all(links.shares.delay_s(share) == 0.0 for share in Share)


def test_a_pause_ends_with_the_better_transfer() -> None:
    """The wait is for those who are waited for, not a fine."""
    links = Links()
    links.active = {Share.LOAD}
    links.chunk(Share.DEMOTE, 0.002)
    links.active.clear()
    assert links.shares.delay_s(Share.DEMOTE) == 0.0


def test_no_chunk_is_held_for_longer_than_the_bound() -> None:
    """A chunk of a second on a broken disk does not stop demotions for nine."""
    links = Links(max_pause_s=0.05)
    links.active = {Share.LOAD}
    links.chunk(Share.DEMOTE, 1.0)
    assert links.shares.delay_s(Share.DEMOTE) == pytest.approx(0.05)
    links.clock.advance(0.05)
    assert links.shares.delay_s(Share.DEMOTE) == 0.0


@given(chunks=st.lists(st.floats(1e-4, 4e-3), min_size=5, max_size=40))
def test_a_class_gets_its_share_and_no_more(chunks: list[float]) -> None:
    """Whatever the chunks, a tenth of the time while loads never end."""
    links = Links(max_pause_s=1.0)
    links.active = {Share.LOAD}
    for seconds in chunks:
        links.clock.advance(links.shares.delay_s(Share.DEMOTE))
        links.chunk(Share.DEMOTE, seconds)
    total_s = links.clock.now() + links.shares.delay_s(Share.DEMOTE)
    assert sum(chunks) / total_s == pytest.approx(0.1)


def test_waiting_ends_with_the_pause_or_with_stop() -> None:
    """True where the chunk may go; False where the worker is to close."""
    links = Links()
    links.active = {Share.LOAD}
    stop = threading.Event()
    assert links.shares.wait(Share.DEMOTE, stop)
    links.chunk(Share.DEMOTE, 0.002)
    asked = []

    def ends() -> bool:
        asked.append(len(asked))
        links.clock.advance(0.01)
        return True

    links.shares.watch(Share.LOAD, ends)
    links.active.clear()
    assert links.shares.wait(Share.DEMOTE, stop)
    assert len(asked) == 2
    assert links.shares.paused_s[Share.DEMOTE] == pytest.approx(0.02)
    links.chunk(Share.DEMOTE, 0.004)
    stop.set()
    assert not links.shares.wait(Share.DEMOTE, stop)


def test_a_share_of_nothing_is_refused() -> None:
    """It would pin its sources for ever."""
    with pytest.raises(ValueError, match="above 0"):
        BandwidthShares(ManualClock(), guaranteed={**TENTH, Share.DEMOTE: 0.0})
