"""The instances of one kind to which a request may go, as columns kept up to date.

A decision must not look at a thousand objects one by one. Loads are written here when
they change (a request begins, is answered, ends; a report comes or gets too old), and
who is there is written anew when an instance comes, goes or changes its mind, which is
rare. The loop's own; nothing locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from sgl_tiered.core.plans import Int64s
from sgl_tiered.router.instances import Instance, LoadReport
from sgl_tiered.router.tree import PromptTree

__all__ = ["Columns", "LoadBoard"]


@dataclass(slots=True, eq=False)
class Columns:
    """Who could serve now.

    Attributes:
        instances: in the order in which they were added, shape [num_instances].
        names: theirs.
        waiting_tokens: shape [num_instances], see ``Instance.load``.
        num_running: shape [num_instances].
        positions: size of a page in tokens -> int64 by holder number, the position of
            its instance if it is one of these and has such pages, else -1.
    """

    instances: list[Instance]
    names: list[str]
    waiting_tokens: Int64s
    num_running: Int64s
    positions: dict[int, Int64s]


class LoadBoard:
    """The columns of one kind.

    Args:
        tree: prompts that the instances hold.
        instances: gives all instances of the kind, in the order of adding.
        load: of one now: prompt tokens that wait, requests under way.
        max_age_s: a load report counts for so long, in seconds.
    """

    def __init__(
        self,
        tree: PromptTree,
        instances: Callable[[], Iterable[Instance]],
        load: Callable[[Instance], tuple[int, int]],
        max_age_s: float,
    ) -> None:
        self._tree = tree
        self._instances = instances
        self._load = load
        self._max_age_s = max_age_s
        self._columns: Columns | None = None
        self._tree_version = -1
        self._at: dict[str, int] = {}
        # Reports in the order in which they were asked for, hence get too old.
        self._reports: deque[tuple[Instance, LoadReport]] = deque()

    def changed(self) -> None:
        """Note that an instance came, went, or may or may not be sent to any more."""
        self._columns = None

    def note_load(self, instance: Instance) -> None:
        """Note that an instance has more or less to do."""
        at = self._at.get(instance.name)
        if self._columns is None or at is None:
            return
        waiting, running = self._load(instance)
        self._columns.waiting_tokens[at] = waiting
        self._columns.num_running[at] = running

    def note_report(self, instance: Instance) -> None:
        """Note that an instance told its load."""
        if instance.report is not None:
            self._reports.append((instance, instance.report))
        self.note_load(instance)

    def columns(self, now_s: float) -> Columns:
        """Return who could serve now; O(1) unless something changed."""
        while self._reports and now_s - self._reports[0][1].asked_s > self._max_age_s:
            instance, report = self._reports.popleft()
            if instance.report is report:
                self.note_load(instance)
        if self._columns is None or self._tree_version != self._tree.version:
            self._columns = self._written()
        return self._columns

    def _written(self) -> Columns:
        there = [each for each in self._instances() if each.is_available]
        self._at = {each.name: at for at, each in enumerate(there)}
        loads = [self._load(each) for each in there]
        self._tree_version = self._tree.version
        num_numbers = 1 + max((h.number for h in self._tree.holders), default=-1)
        positions: dict[int, Int64s] = {}
        for at, each in enumerate(there):
            for holder in each.holders:
                column = positions.get(holder.page_tokens)
                if column is None:
                    column = np.full(num_numbers, -1, np.int64)
                    positions[holder.page_tokens] = column
                column[holder.number] = at
        return Columns(
            there,
            [each.name for each in there],
            np.array([waiting for waiting, _ in loads], np.int64),
            np.array([running for _, running in loads], np.int64),
            positions,
        )
