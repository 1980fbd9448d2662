"""Copies of layers under tensor parallelism: they have landed when all ranks' have.

Each rank has a pool of its own, of its heads, and copies in its own time. What a rank
may decide by is where its layers are: who decodes, who is admitted, what leaves. So a
copy counts as landed once it has on every rank, and what failed on one has failed on
all (as ``transfers.py`` has it for the tiers). The tables of all ranks are then the
same at every call, and with them all that is decided, without a word on the decisions.

What has landed here is told at the meeting of each pass. Who waits for room meets the
others for it, and all of them do, since they are all short of the same. What another
rank tells is of the flights of this one, or the two have parted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_tiered.errors import RanksPartedError
from sgl_tiered.layered.binding import Flight
from sgl_tiered.layered.mover import CALLED_OFF, Landing, LayerMover
from sgl_tiered.layered.outage import Outage
from sgl_tiered.serving.agreement import Agreement

__all__ = ["SharedMover"]


class SharedMover(LayerMover):
    """The threads that copy on one rank of several.

    Args:
        agreement: between the ranks.
        args, kwargs: as of `LayerMover`.
    """

    def __init__(self, agreement: Agreement, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._agreement = agreement
        # What the copies of this rank did; what they did on all decides what is tried.
        self._own = (self.to_device, self.to_host)
        self.to_device = Outage("to the device of some rank", agreement)
        self.to_host = Outage("to the host of some rank", agreement)
        self._num_begun = 0
        # By number, which all ranks count alike: not landed everywhere; landed here; on
        # which ranks it has; positions that failed on any.
        self._flying: dict[int, Flight] = {}
        self._here: dict[int, Landing] = {}
        self._told: dict[int, set[int]] = {}
        self._bad: dict[int, set[int]] = {}
        self._failed: dict[int, str] = {}
        self._numbers: dict[int, int] = {}
        self._unsaid: list[int] = []
        self._everywhere: list[Landing] = []
        agreement.tell("layers", self._news, self._hear)

    @property
    def num_flights(self) -> int:
        """Flights handed in whose landing was not collected."""
        return len(self._flying) + len(self._everywhere)

    def start(self, flight: Flight) -> None:
        """Queue a flight; its landing is collected later. On the engine's thread."""
        self._flying[self._num_begun] = flight
        self._numbers[id(flight)] = self._num_begun
        self._num_begun += 1
        super().start(flight)

    def collect(self) -> list[Landing]:
        """Take what has landed on all ranks, as far as all have been told."""
        taken, self._everywhere = self._everywhere, []
        return taken

    def wait(self) -> bool:
        """Block until there is a landing to collect; False if none is to come.

        A message to the others, unless one has landed: the oldest flight has on all
        ranks when they have met.

        Raises:
            RanksPartedError: it has not, or one tells of what is no flight here.
        """
        if self._everywhere or not self._flying:
            return bool(self._everywhere)
        oldest = next(iter(self._flying))
        self._take()
        while oldest not in self._here:
            super().wait()
            self._take()
        self._agreement.ask("layers")
        if not self._everywhere:
            num_ranks = self._agreement.num_ranks
            silent = set(range(num_ranks)) - self._told[oldest]
            raise RanksPartedError(min(silent), num_ranks)
        return True

    def _take(self) -> None:
        """Take note of what has landed here."""
        for landing in super().collect():
            number = self._numbers.pop(id(landing.flight))
            self._here[number] = landing
            self._unsaid.append(number)

    def _news(self) -> Any:
        """Return what the others were not told: runs of numbers, and what failed."""
        self._take()
        if not self._unsaid:
            return None
        runs: list[list[int]] = []
        bad = []
        for number in sorted(self._unsaid):
            if runs and runs[-1][1] == number - 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
            landing = self._here[number]
            missing = np.flatnonzero(~landing.ok)
            if len(missing):
                error = "" if landing.error == CALLED_OFF else landing.error
                bad.append([number, missing.tolist(), error])
        self._unsaid.clear()
        return [runs, bad]

    def _hear(self, told: list[Any]) -> None:
        """Take note of what has landed on each rank; None from one without news."""
        for rank, news in enumerate(told):
            if news is not None:
                self._hear_of(rank, *news, num_ranks=len(told))
        # Alone at the end: what has landed here has landed.
        everywhere = [
            number
            for number, ranks in self._told.items()
            if len(ranks) >= len(told) and number in self._here
        ]
        for number in sorted(everywhere):
            del self._flying[number], self._told[number]
            self._everywhere.append(self._merged(number))

    def _hear_of(
        self, rank: int, runs: list[Any], bad: list[Any], *, num_ranks: int
    ) -> None:
        """Take note of what has landed on one rank, if this one has begun the same."""
        for first, last in runs:
            for number in range(first, last + 1):
                if number not in self._flying:
                    raise RanksPartedError(rank, num_ranks)
                self._told.setdefault(number, set()).add(rank)
        for number, positions, error in bad:
            if max(positions) >= len(self._flying[number]):
                raise RanksPartedError(rank, num_ranks)
            self._bad.setdefault(number, set()).update(positions)
            if error:
                self._failed.setdefault(number, error)

    def _merged(self, number: int) -> Landing:
        landing, bad = self._here.pop(number), self._bad.pop(number, None)
        error = self._failed.pop(number, "")
        outage = self.to_device if landing.flight.is_up else self.to_host
        if error:
            outage.failed(RuntimeError(error), is_last=True)
        elif not bad:
            outage.succeeded()
        if not bad:
            return landing
        ok = landing.ok.copy()
        ok[list(bad)] = False
        return Landing(landing.flight, ok, error or CALLED_OFF)

    def _outage(self, *, is_store: bool) -> Outage:
        return self._own[is_store]
