"""The scheduler's choice on columns is the exhaustive one, whatever happened before.

Instances come, go, drain, hold, lose and assume prefixes in several tiers, with pages
of two sizes and one or two ranks, and have this or that to do. After each step every
policy's choice is compared with that of its ``rank`` over facts gathered one by one.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.routing.base import (
    NUM_PLACES,
    FleetFacts,
    InstanceFacts,
    RequestFacts,
)
from sgl_tiered.policies.routing.holders import holders_of_more
from sgl_tiered.policies.routing.registry import ROUTINGS, make_routing
from sgl_tiered.router.board import LoadBoard
from sgl_tiered.router.config import COLOCATED, InstanceConfig
from sgl_tiered.router.instances import Instance, LoadReport
from sgl_tiered.router.prompts import read_prompt
from sgl_tiered.router.scheduler import Scheduler
from sgl_tiered.router.tree import PromptTree

PAGES = (2, 4)
PROMPTS = ([1] * 12, [1] * 8 + [2] * 8, [1] * 4 + [3] * 8, [5] * 8)
MAX_AGE_S = 10.0


class World:
    """A fleet without servers."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.tree = PromptTree()
        self.trees = {COLOCATED: self.tree}
        self.instances: list[Instance] = []
        self.board = LoadBoard(
            self.tree,
            lambda: self.instances,
            lambda i: i.load(self.clock.now(), MAX_AGE_S),
            MAX_AGE_S,
        )
        self.boards = {COLOCATED: self.board}
        self.next_hash = 0
        self.tickets: list = []

    def add(self, page: int, num_ranks: int) -> None:
        name = f"i{self.next_hash}"
        self.next_hash += 1
        holders = [self.tree.add_holder(name, page) for _ in range(num_ranks)]
        instance = Instance(InstanceConfig(name, f"http://{name}"), True, False, 0)
        instance.holders = holders
        instance.on_change = self.board.note_load
        self.instances.append(instance)
        self.board.changed()

    def remove(self, instance: Instance) -> None:
        self.instances.remove(instance)
        for holder in instance.holders:
            self.tree.remove_holder(holder)
        self.board.changed()

    def store(self, holder, prompt: list[int], tier: TierId) -> None:
        page = holder.page_tokens
        tokens = prompt[: len(prompt) // page * page]
        num = len(tokens) // page
        names = list(range(self.next_hash, self.next_hash + num))
        self.next_hash += num
        self.tree.store(holder, names, None, tokens, page, tier)

    def report(self, instance: Instance, num: int, waiting: int) -> None:
        instance.ask()
        report = LoadReport(self.clock.now(), num, waiting)
        instance.take_report(report, self.clock.now())
        self.board.note_report(instance)


def exhaustive(world: World, policy, keys, prompt, tried, turn):
    """Return the choice by facts gathered one by one, and who holds more."""
    there = [i for i in world.instances if i.is_available and i.name not in tried]
    facts = []
    for instance in there:
        cached, confirmed = (0,) * NUM_PLACES, 0
        for holder in instance.holders:
            page = holder.page_tokens
            match = world.tree.match(keys.at(page)).get(holder.number)
            if match is not None:
                here = tuple(page * pages for pages in match.pages)
                sure = page * match.num_confirmed
                if (sum(here), sure) > (sum(cached), confirmed):
                    cached, confirmed = here, sure
        load = instance.load(world.clock.now(), MAX_AGE_S)
        facts.append(InstanceFacts(instance.name, cached, confirmed, *load))
    if not there:
        return None
    request = RequestFacts(prompt.num_tokens, "s", turn)
    best = policy.rank(request, facts)[0]
    holders = holders_of_more(FleetFacts.of(facts), best)
    return facts[best], [(there[h.position].name, h.num_tokens) for h in holders]


@pytest.mark.parametrize("name", ROUTINGS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_choice_is_the_exhaustive_one(name, data) -> None:
    """Instance, its facts and the holders that are named."""
    world, policy = (
        World(),
        make_routing(name, running_cost_tokens=3.5, compute_cost=1.5),
    )
    scheduler = Scheduler(world, policy, 64, world.clock)
    draw = data.draw
    steps = ("add", "store", "assume", "remove", "drain", "open", "close", "report")
    for turn in range(draw(st.integers(1, 14))):
        step = draw(st.sampled_from(steps)) if world.instances else "add"
        prompt = draw(st.sampled_from(PROMPTS))
        last = max(len(world.instances) - 1, 0)
        at = draw(st.integers(0, last))
        some = world.instances[at] if world.instances else None
        if step == "add":
            world.add(draw(st.sampled_from(PAGES)), draw(st.integers(1, 2)))
        elif step == "store":
            holder = some.holders[draw(st.integers(0, len(some.holders) - 1))]
            world.store(holder, prompt, draw(st.sampled_from(list(TierId))))
        elif step == "assume":
            keys = scheduler.keys(read_prompt("/generate", {"input_ids": prompt}, None))
            scheduler.assume(some, keys, 5.0)
        elif step == "remove":
            world.remove(some)
        elif step == "drain":
            some.is_draining = not some.is_draining
            world.board.changed()
        elif step == "open":
            world.tickets.append((some, some.open(world.clock.now(), 4)))
        elif step == "close" and world.tickets:
            instance, ticket = world.tickets.pop()
            instance.answered(ticket)
            if draw(st.booleans()):
                instance.close(ticket)
        elif step == "report":
            world.report(some, draw(st.integers(0, 3)), draw(st.integers(0, 9)))
        world.clock.advance(draw(st.sampled_from((0.0, 0.5, 6.0))))
        world.tree.expire(world.clock.now())
        asked = read_prompt("/generate", {"input_ids": prompt}, None)
        keys = scheduler.keys(asked)
        names = [each.name for each in world.instances]
        tried = draw(st.sets(st.sampled_from(names))) if names else set()
        if draw(st.booleans()):
            tried = set()
        scheduler._turn = turn
        choice = scheduler.choose(asked, keys, COLOCATED, session="s", tried=tried)
        wanted = exhaustive(world, policy, keys, asked, tried, turn)
        if wanted is None:
            assert choice is None
            continue
        facts, holders = wanted
        assert (choice.facts, choice.instance.name) == (facts, facts.name)
        named = [part.split("=")[0] for part in choice.holders.split(", ") if part]
        assert named == [name for name, _ in holders]
