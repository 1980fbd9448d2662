"""What a run sends: single requests, or sessions, and when they arrive."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered_workloads.arrivals import Arrivals, ClosedLoop, OpenLoop
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.turns import RequestSession, Session

__all__ = ["Workload"]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A seeded schedule of work. Sessions are used up by a run: make a new one.

    Exactly one of ``requests`` and ``sessions`` is given.

    Attributes:
        name: of the workload in the registry.
        arrivals: start of each request or session, or a closed loop.
        requests: planned requests; under an open loop ``start_s`` of each is its
            arrival.
        sessions: causal sessions; a turn leaves only after the previous answer.
    """

    name: str
    arrivals: Arrivals
    requests: tuple[PlannedRequest, ...] = ()
    sessions: tuple[Session, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.requests) == bool(self.sessions):
            raise ValueError(f"{self.name}: give requests or sessions, and some")
        if isinstance(self.arrivals, OpenLoop):
            found = len(self.arrivals.times_s)
            wanted = len(self.requests) + len(self.sessions)
            if found != wanted:
                raise ValueError(f"{self.name}: {found} arrivals for {wanted} starts")

    @property
    def num_requests(self) -> int:
        """Requests that a run without failures sends in all."""
        return len(self.requests) + sum(s.num_turns for s in self.sessions)

    @property
    def concurrency(self) -> int | None:
        """Users of a closed loop; None in an open one."""
        if isinstance(self.arrivals, ClosedLoop):
            return self.arrivals.concurrency
        return None

    def as_sessions(self) -> tuple[Session, ...]:
        """Return the sessions, single requests as sessions of one turn."""
        return self.sessions or tuple(RequestSession(r) for r in self.requests)
