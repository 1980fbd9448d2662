"""What is done to a world: pages are left on each tier, reused, and made to fail.

Every step asks prompts of the reference and enters the answers in a ledger. Steps end
early when the time is up; what was asked until then counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest, swap_page

from tests.equality.ledger import Ledger, is_caught, tiers_of
from tests.equality.plan import World
from tests.equality.reference import PAGE, Reference
from tests.equality.rigs import Rig

__all__ = ["Player"]

NUM_PLANTED = 6
"""Prompts of each planted fault; their first pages are of different families."""
_WRONG_PAGE = 2
_STAGGER_S = 0.3
"""Within which requests of a crowd leave."""


class Player:
    """Plays one world.

    Args:
        world: to play.
        rig: its servers, which have answered nothing yet.
        reference: plain SGLang's answers.
        end_s: on the monotonic clock, when no further step begins.
        say: takes progress lines.
    """

    def __init__(
        self,
        world: World,
        rig: Rig,
        reference: Reference,
        end_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._world = world
        self._rig = rig
        self._reference = reference
        self._end_s = end_s
        self._say = say
        self._ledger = Ledger(reference)
        self._requests = reference.requests()
        self._draw = np.random.default_rng(len(self._requests))
        self._is_untouched = True
        self._kills = 0
        self._struck: list[str] = []
        self._planted: dict[str, bool] = {}
        self._evidence: dict[str, int] = {}

    def play(self) -> None:
        """Do all of it, as far as there is time; an exception ends it."""
        self._enter("first", self._rig.fill(self._requests))
        for tier in self._rig.tiers:
            self._reuse(tier)
        if self._world.is_killed and self._rig.is_killable:
            self._killed()
        for tier, kind in self._world.faults:
            self._under_fault(tier, kind)
        self._note()
        if self._world.is_planted:
            self._plant()

    def outcome(self) -> dict[str, Any]:
        """Return what came of it, as JSON-able values."""
        return {
            **asdict(self._ledger.verdict()),
            "kills": self._kills,
            "struck": self._struck,
            "planted": len(self._planted),
            "planted_caught": sum(self._planted.values()),
            "planted_missed": [n for n, found in self._planted.items() if not found],
            "evidence": self._evidence,
        }

    # -- Steps --------------------------------------------------------------------

    def _reuse(self, tier: str) -> None:
        """Reuse what lies on a tier and below, one at a time and all at once."""
        for together in (False, True):
            if self._is_late():
                return
            self._rig.leave_on(tier)
            self._ask(f"from {tier}", self._requests, together=together)

    def _under_fault(self, tier: str, kind: str) -> None:
        """Reuse while a tier is struck, and once more when that is over."""
        if self._is_late():
            return
        text = self._world.fault_text(tier, kind)
        self._is_untouched = False
        self._rig.leave_on(tier)
        half = self._requests[::2]
        with self._rig.struck(tier, text):
            self._ask(f"{tier} {kind}", half, together=False)
            self._ask(f"{tier} {kind}", self._requests, together=True)
        self._struck.append(f"{tier} {kind}")
        self._rig.leave_on("host")
        self._ask(f"after {tier} {kind}", half, together=True)

    def _killed(self) -> None:
        """Kill under load, start again, and reuse what the disk has kept."""
        if self._is_late():
            return
        self._note()
        self._is_untouched = False
        crowd = [*self._reference.requests(late=True), *self._requests[::3]]
        answers = self._rig.kill(crowd)
        if self._rig.outlives_kill:
            self._ledger.add("killed", answers, like_plain=False)
        else:
            self._ledger.add_broken("killed", answers)
        self._kills += 1
        everything = [*self._requests, *self._reference.requests(late=True)]
        self._ask("restarted", everything, together=False)
        if not self._is_late():
            self._rig.leave_on("disk")
            self._ask("restarted", everything, together=True)

    def _plant(self) -> None:
        """Let it answer with wrong pages, each of which has to be caught."""
        chosen = self._planted_requests()
        for tier in ("host", "cxl"):
            for kind in ("zero", "swap"):
                if tier in self._rig.tiers and not self._is_late():
                    self._plant_in_memory(tier, kind, chosen)
        if self._is_late():
            return
        self._rig.flush()
        for name, spoil in (
            ("other prompt's page", _other),
            ("shifted page", _shifted),
        ):
            wrong = [
                spoil(request, chosen[(place + 1) % len(chosen)])
                for place, request in enumerate(chosen)
            ]
            answers = self._rig.ask(wrong, together=False)
            self._catch(name, answers, chosen)

    def _plant_in_memory(
        self, tier: str, kind: str, chosen: Sequence[PlannedRequest]
    ) -> None:
        """Let each copy of a page out of memory be a wrong one."""
        self._rig.flush()
        self._rig.fill(chosen)
        self._rig.ask(chosen, together=False)
        self._rig.leave_on(tier)
        with self._rig.struck(tier, f"{tier}:fault={kind}/load"):
            answers = self._rig.ask(chosen, together=False)
        if any(tier in tiers_of(answer) for answer in answers):
            self._catch(f"{tier} {kind}", answers, chosen)

    def _catch(
        self,
        name: str,
        answers: Sequence[RequestRecord],
        chosen: Sequence[PlannedRequest],
    ) -> None:
        wrong = [
            replace(answer, prompt=request.prompt)
            for answer, request in zip(answers, chosen, strict=True)
        ]
        known = [self._reference.warm[request.key] for request in chosen]
        self._planted[name] = is_caught(self._reference, known, wrong)

    # -- Small things -------------------------------------------------------------

    def _ask(
        self, phase: str, requests: Sequence[PlannedRequest], *, together: bool
    ) -> None:
        if together:
            starts = self._draw.uniform(0.0, _STAGGER_S, len(requests))
            requests = [
                replace(request, start_s=float(start))
                for request, start in zip(requests, starts, strict=True)
            ]
            phase += ", together"
        answers = self._rig.ask(requests, together=together)
        self._enter(phase, answers, together=together)

    def _enter(
        self, phase: str, answers: Sequence[RequestRecord], *, together: bool = False
    ) -> None:
        is_alike = self._rig.is_like_plain and self._is_untouched and not together
        self._ledger.add(phase, answers, like_plain=is_alike)

    def _note(self) -> None:
        """Add up what was done: a server that was killed counts from 0 again."""
        for name, count in self._rig.evidence().items():
            self._evidence[name] = self._evidence.get(name, 0) + count

    def _planted_requests(self) -> list[PlannedRequest]:
        """Return a few prompts of different families, first turns only."""
        found: dict[str, PlannedRequest] = {}
        for request in self._requests:
            family, _, member = request.key.partition(".")
            if "next" not in member:
                found.setdefault(family, request)
        return list(found.values())[:NUM_PLANTED]

    def _is_late(self) -> bool:
        return time.monotonic() > self._end_s


def _other(request: PlannedRequest, donor: PlannedRequest) -> PlannedRequest:
    """Return a prompt with a page of another one."""
    return swap_page(request, donor.prompt, _WRONG_PAGE, PAGE)


def _shifted(request: PlannedRequest, donor: PlannedRequest) -> PlannedRequest:
    """Return a prompt with a page whose tokens are one position off."""
    del donor
    begin, end = _WRONG_PAGE * PAGE, (_WRONG_PAGE + 1) * PAGE
    page = request.prompt[begin:end]
    moved = request.prompt[:begin] + page[-1:] + page[:-1] + request.prompt[end:]
    return replace(request, prompt=moved)
