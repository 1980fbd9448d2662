"""``make equality`` without servers: plan, judge, what adds up, what goes on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from sgl_tiered_workloads.gate import Spread
from sgl_tiered_workloads.records import RequestRecord

from tests.equality import rigs
from tests.equality.ledger import Ledger
from tests.equality.plan import (
    CHAINS,
    FAULTS,
    FEATURES,
    INERT,
    MIN_PER_CELL,
    TIERS,
    World,
    empty_cells,
    next_worlds,
    pair_name,
    pairs,
)
from tests.equality.playing import Player
from tests.equality.reference import PAGE, Kind, Reference, requests
from tests.equality.tally import (
    LONG_MINUTES,
    is_right,
    read_calls,
    summary,
    times_run,
    write_call,
)

SPREAD = Spread(max_logprob=0.05, mean_logprob=0.005, max_gap=0.05, num_tokens=100)
TOP = ((-0.5, 11), (-1.5, 12), (-2.5, 13), (-3.5, 14), (-4.5, 15))


def answer(key: str, prompt: tuple[int, ...], **fields: Any) -> RequestRecord:
    return RequestRecord(
        key=key,
        order=0,
        prompt=prompt,
        targeted_s=0.0,
        started_s=0.0,
        output=(11, 11, 11),
        logprobs=(-0.5, -0.5, -0.5),
        top_logprobs=(TOP, TOP, TOP),
        **fields,
    )


def whole_pages(prompt: tuple[int, ...]) -> int:
    return (len(prompt) - 1) // PAGE * PAGE


def moved(record: RequestRecord, by: float) -> RequestRecord:
    top = tuple((logprob + by, token) for logprob, token in TOP)
    return replace(record, top_logprobs=(top, TOP, TOP))


@pytest.fixture
def reference() -> Reference:
    # One of each family: what plain found in its cache is left out here.
    cold = {
        request.key: answer(request.key, request.prompt)
        for request in requests(1, Kind())
        if request.key.endswith(".0")
    }
    late = answer("late0", tuple(range(100, 200)))
    cold[late.key] = late
    warm = {
        key: replace(record, cached_tokens=whole_pages(record.prompt))
        for key, record in cold.items()
    }
    return Reference(cold, warm, ("late0",), SPREAD, 10_000.0, 0.004)


class Toy:
    """A server that answers as plain SGLang does; ``spoil`` makes an answer another."""

    is_like_plain = True
    is_killable = True
    outlives_kill = False

    def __init__(self, reference: Reference, tiers: tuple[str, ...]) -> None:
        self.tiers = tiers
        self.spoil: Callable[[RequestRecord], RequestRecord] = lambda record: record
        self.is_lying = False
        self._reference = reference
        self._cached: dict[str, str] = {}

    def ask(self, requests: Any, *, together: bool) -> list[RequestRecord]:
        return [self._answer(request) for request in requests]

    def fill(self, requests: Any) -> list[RequestRecord]:
        return self.ask(requests, together=False)

    def _answer(self, request: Any) -> RequestRecord:
        known = self._reference.cold[request.key]
        tier = self._cached.get(request.key)
        self._cached[request.key] = "device"
        if request.prompt != known.prompt or (self.is_lying and tier != "device"):
            known = moved(known, 1.0)
        if tier is not None:
            cached = whole_pages(known.prompt)
            known = replace(known, cached_tokens=cached, cached_by_tier={tier: cached})
        return self.spoil(replace(known, prompt=request.prompt))

    def leave_on(self, tier: str) -> None:
        self._cached = dict.fromkeys(self._cached, tier)

    @contextlib.contextmanager
    def struck(self, tier: str, text: str) -> Any:
        self.is_lying = "zero/" in text or "swap/" in text
        yield
        self.is_lying = False

    def kill(self, requests: Any) -> list[RequestRecord]:
        found = self.ask(requests, together=True)
        broken = replace(found[0], output=(11,), error="ClientPayloadError: gone")
        self.leave_on("disk")
        return [broken, *found[1:]]

    def evidence(self) -> dict[str, int]:
        return {"orders": 3}

    def flush(self) -> None:
        self._cached.clear()

    def stop(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def played(toy: Toy, reference: Reference, world: World) -> dict[str, Any]:
    player = Player(world, toy, reference, math.inf, print)
    player.play()
    return {
        "pair": world.pair,
        "tiers": world.tiers,
        "on": sorted(world.on),
        **player.outcome(),
    }


WORLD = World(
    ("orders", "prefetch"),
    CHAINS[0],
    (("disk", "failing"), ("cxl", "slow")),
    is_killed=True,
    is_planted=True,
)


# -- The plan -------------------------------------------------------------------------


def test_every_pair_is_planned_once_and_early_ones_cover_all_features() -> None:
    """Who stops after ten worlds has seen each feature."""
    worlds = next_worlds({})
    assert len({world.pair for world in worlds}) == len(worlds) == len(pairs())
    assert len(worlds) == 1 + math.comb(len(FEATURES), 2)
    assert frozenset().union(*(world.on for world in worlds[:10])) == set(FEATURES)


@pytest.mark.parametrize("times", range(4))
def test_worlds_name_tiers_and_faults_that_there_are(times: int) -> None:
    """In every turn a fault is one of a tier that the world has."""
    for world in next_worlds({pair_name(pair): times for pair in pairs()}):
        assert world.tiers in CHAINS
        assert world.faults
        for tier, kind in world.faults:
            assert tier in world.tiers
            assert world.fault_text(tier, kind) or kind == "removed"
        assert not world.is_killed or "disk" in world.tiers


@pytest.mark.parametrize("times", range(4))
def test_every_world_has_the_tiers_that_its_features_work_on(times: int) -> None:
    """A split reads from disk, and so does prefetch that ends at the host."""
    for world in next_worlds({pair_name(pair): times for pair in pairs()}):
        ends_at_host = "prefetch" in world.on and not world.fetches_to_device
        if "splits" in world.on or ends_at_host:
            assert "disk" in world.tiers


def test_inert_pairs_name_features_that_are_on_and_a_reason() -> None:
    """Nothing else can be left out of what has to act."""
    named = {pair_name(pair): pair for pair in pairs()}
    for pair, reasons in INERT.items():
        assert set(reasons) <= set(named[pair])
        assert all(reasons.values())


def test_a_pair_meets_other_tiers_and_faults_when_it_runs_again() -> None:
    """Several calls see every chain and every fault with it."""
    seen: dict[str, set[Any]] = {}
    for times in range(24):
        counts = {pair_name(pair): times for pair in pairs()}
        for world in next_worlds(counts):
            found = seen.setdefault(world.pair, set())
            found.add(world.tiers)
            found.update(world.faults)
    wanted = {(tier, kind) for tier, kinds in FAULTS.items() for kind in kinds}
    assert wanted | set(CHAINS) <= seen["orders+prefetch"]


def test_what_ran_least_comes_first() -> None:
    """So that calls add up."""
    first = [world.pair for world in next_worlds({})]
    again = [world.pair for world in next_worlds(dict.fromkeys(first[:5], 1))]
    assert again == [*first[5:], *first[:5]]


def test_enough_worlds_are_killed() -> None:
    """Six kills a call and more, even if it ends half way."""
    half = next_worlds({})[: len(pairs()) // 2]
    assert sum(world.is_killed for world in half) >= 6


def test_cells_are_empty_below_their_least_and_where_not_refused() -> None:
    """What no pool can have is no empty cell."""
    cells = {tier: dict.fromkeys(FEATURES, MIN_PER_CELL) for tier in TIERS}
    cells["disk"]["orders"] -= 1
    cells["peer"]["activations"] = 0
    both = ["disk x orders", "peer x activations"]
    assert empty_cells(cells, ()) == both
    assert empty_cells(cells, {"activations+pool"}) == both[:1]


# -- The judge ------------------------------------------------------------------------


def test_equal_answers_are_compared_bit_for_bit(reference: Reference) -> None:
    """What one server answers as plain does is strict, exact and counted by tier."""
    ledger = Ledger(reference)
    toy = Toy(reference, CHAINS[0])
    asked = reference.requests()
    ledger.add("first", toy.fill(asked), like_plain=True)
    toy.leave_on("cxl")
    ledger.add("again", toy.ask(asked, together=False), like_plain=True)
    found = ledger.verdict()
    assert (found.judged, found.compared) == (2 * len(asked), len(asked))
    assert found.exact == found.compared
    assert found.by_tier == found.exact_by_tier == {"cxl": len(asked)}
    assert found.strict == found.judged
    assert (found.wrong, found.errors) == (0, 0)


@pytest.mark.parametrize(
    ("by", "like_plain", "wrong"),
    [(0.01, True, 1), (0.01, False, 0), (0.5, False, 1)],
)
def test_bits_are_asked_for_where_they_must_agree(
    reference: Reference, by: float, like_plain: bool, wrong: int
) -> None:
    """Elsewhere plain's spread is allowed, and no more; neither is exact."""
    ledger = Ledger(reference)
    first, *_ = reference.requests()
    reused = {"cached_by_tier": {"host": PAGE}}
    off = moved(replace(reference.cold[first.key], **reused), by)
    ledger.add("first", [off], like_plain=like_plain)
    found = ledger.verdict()
    assert (found.compared, found.exact, found.wrong) == (1, 0, wrong)
    assert len(found.told) == wrong


def test_failed_requests_are_errors_but_under_a_kill(reference: Reference) -> None:
    """Of what broke off then, the beginning is judged."""
    first, second, *_ = reference.requests()
    failed = replace(reference.cold[first.key], error="HTTP 500", output=())
    ledger = Ledger(reference)
    ledger.add("first", [failed], like_plain=True)
    assert ledger.verdict().errors == 1
    ledger = Ledger(reference)
    begun = replace(reference.cold[second.key], error="gone", output=(11,))
    ledger.add_broken("killed", [failed, begun])
    found = ledger.verdict()
    assert (found.errors, found.wrong, found.parts, found.judged) == (0, 0, 1, 0)
    ledger.add_broken("killed", [replace(begun, output=(99,))])
    assert ledger.verdict().wrong == 1


# -- A world --------------------------------------------------------------------------


def test_a_world_is_played_to_its_end(reference: Reference) -> None:
    """All tiers are reused, faults strike, a kill, and planted pages are caught."""
    told = played(Toy(reference, WORLD.tiers), reference, WORLD)
    assert (told["wrong"], told["errors"], told["kills"]) == (0, 0, 1)
    assert set(told["by_tier"]) == set(WORLD.tiers)
    assert told["struck"] == ["disk failing", "cxl slow"]
    assert told["planted"] == told["planted_caught"] == 6
    assert told["exact"] == told["compared"] >= 6 * 8


def test_a_wrong_answer_in_a_world_is_seen(reference: Reference) -> None:
    """One answer out of hundreds."""
    toy = Toy(reference, WORLD.tiers)
    num_asked = 0

    def spoil(record: RequestRecord) -> RequestRecord:
        nonlocal num_asked
        num_asked += 1
        return moved(record, 0.3) if num_asked == 100 else record

    toy.spoil = spoil
    told = played(toy, reference, replace(WORLD, is_planted=False))
    assert told["wrong"] == 1
    assert len(told["told"]) == 1


def test_a_gate_that_sees_nothing_is_told(reference: Reference) -> None:
    """A planted fault that changes no answer counts as missed."""
    toy = Toy(reference, WORLD.tiers)
    toy.spoil = lambda record: replace(record, top_logprobs=(TOP, TOP, TOP))
    told = played(toy, reference, WORLD)
    assert (told["planted"], told["planted_caught"]) == (6, 0)


def test_late_worlds_begin_nothing_new(reference: Reference) -> None:
    """What was asked until then counts."""
    player = Player(WORLD, Toy(reference, WORLD.tiers), reference, -math.inf, print)
    player.play()
    told = player.outcome()
    assert told["judged"] == len(reference.requests())
    assert told["kills"] == told["planted"] == 0


# -- What makes features act, and how that is counted ---------------------------------


class Client:
    """Takes requests as SGLang's client does; keeps with which wishes each came."""

    sent: ClassVar[list[tuple[str, float]]] = []

    def __init__(self, url: str, timeout_s: float, wishes: Any = None) -> None:
        self._tpot_s = wishes["tpot_s"]

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def run_open_loop(self, requests: Any) -> list[RequestRecord]:
        self.sent += [(request.key, self._tpot_s) for request in requests]
        return [answer(request.key, request.prompt) for request in requests]


def test_a_crowd_brings_targets_around_its_servers_own_pace(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slower and faster ones, whatever plain's pace is; answers come in their order."""
    times_s = (0.0, 0.5, 1.0)
    monkeypatch.setattr(rigs, "StreamingClient", Client)
    monkeypatch.setattr(
        rigs,
        "sequential",
        lambda server, requests: [
            answer(one.key, one.prompt, token_times_s=times_s) for one in requests
        ],
    )
    monkeypatch.setattr(Client, "sent", [])
    asked = reference.requests()
    server: Any = SimpleNamespace(url="")
    sender = rigs._Sender(World(("admission", "pool"), CHAINS[0]), reference)
    sender.send(server, asked, together=False)
    found = sender.send(server, asked, together=True)
    assert [one.key for one in found] == [one.key for one in asked]
    targets = [tpot_s for _, tpot_s in Client.sent]
    assert len(targets) == len(asked)
    assert min(targets) < 0.5 < max(targets)
    assert max(targets) < 5 * min(targets)


@pytest.mark.parametrize(
    ("features", "pages"),
    [
        (("prefetch", "pd"), 3),
        (("layerwise", "prefetch"), 3),
        (("orders", "prefetch"), 10),
    ],
)
def test_what_a_decode_server_fetches_is_no_prefetch(
    features: tuple[str, str], pages: int
) -> None:
    """It is counted where prefetch goes on to the device, and nowhere else."""
    counters = {"promoted_pages": 3, "fetched_pages": 7}
    state: dict[str, Any] = {"counters": counters, "edges": {}}
    found = rigs._evidence(World(features, CHAINS[0]), [state])
    assert found["prefetch"] == pages


# -- Records --------------------------------------------------------------------------


def test_calls_on_one_source_add_up(reference: Reference, tmp_path: Path) -> None:
    """Totals are of all calls, other figures of the last; another source counts not."""
    world = played(Toy(reference, WORLD.tiers), reference, WORLD)
    refused = {"pair": "activations+pool", "refused": "--tiered-pool: no.", "on": []}
    calls = [
        {"source": source, "minutes": 4.0, "worlds": [world, refused]}
        for source in ("a", "a", "b")
    ]
    for number, call in enumerate(calls):
        write_call(tmp_path / f"{number}.json", call)
    found = read_calls(tmp_path, "a")
    assert len(found) == 2
    assert times_run(found) == {"orders+prefetch": 2, "activations+pool": 2}
    told = summary(found)
    assert told["compared"] == world["compared"]
    assert told["compared_total"] == 2 * world["compared"]
    assert (told["kills"], told["kills_total"]) == (1, 2)
    assert told["exact_share"] == 1.0
    assert told["pairs_refused"] == {"activations+pool": "--tiered-pool: no."}
    assert told["cells"]["cxl"]["orders"] == 2 * world["by_tier"]["cxl"]
    assert told["idle_features"] == ["prefetch"]
    assert told["idle_pairs"] == ["orders+prefetch: prefetch"]
    assert told["cells_empty"] == len(told["empty"]) > 0
    assert is_right(told)
    assert not is_right({**told, "wrong": 1})
    assert not is_right({**told, "planted_caught": 5})


def world(pair: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    """Return the record of a world in which nothing happened but what is given."""
    counts = ("judged", "compared", "exact", "strict", "wrong", "errors", "kills")
    return {
        "pair": pair_name(pair),
        "on": sorted(World(pair, CHAINS[0]).on),
        **dict.fromkeys((*counts, "planted", "planted_caught", "split"), 0),
        "by_tier": {"host": 100},
        "evidence": {},
        "struck": [],
        **fields,
    }


def told_of(*worlds: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return summary([{"source": "a", "minutes": 1.0, "worlds": list(worlds), **fields}])


def test_a_world_counts_for_the_features_that_acted_in_it() -> None:
    """What was on and idle has no answers of its cell; a split prompt is an act."""
    cells = told_of(
        world(("orders", "admission"), evidence={"orders": 2, "admission": 0}),
        world(("layerwise", "splits"), evidence={"layerwise": 1}, split=3),
        world(("activations", "pool"), evidence={"activations": 1, "pool": 1}),
    )["cells"]["host"]
    acted = ("orders", "layerwise", "splits", "activations", "pool")
    assert cells == {name: 100 * (name in acted) for name in FEATURES}


def test_a_pair_is_idle_until_each_of_its_features_acted() -> None:
    """In one of its worlds at least; a feature that acted elsewhere says nothing."""
    idle = world(("orders", "admission"), evidence={"orders": 2, "admission": 0})
    other = world(("admission", "pool"), evidence={"admission": 9, "pool": 1})
    told = told_of(idle, other)
    assert told["idle_features"] == []
    assert told["idle_pairs"] == ["orders+admission: admission"]
    acts = {**idle, "evidence": {"admission": 1}}
    assert told_of(idle, other, acts)["idle_pairs"] == []


def test_what_cannot_act_is_told_with_its_reason() -> None:
    """It is no idle pair, and counts for no cell; its partner still has to act."""
    told = told_of(world(("splits", "pd"), evidence={"splits": 0, "pd": 0}))
    assert told["pairs_inert"] == {"splits+pd": INERT["splits+pd"]["splits"]}
    assert told["idle_pairs"] == ["splits+pd: pd"]
    assert told["cells"]["host"]["splits"] == 0


@pytest.mark.parametrize(
    ("asked", "whole"),
    [
        ({"minutes": LONG_MINUTES, "pairs": []}, True),
        ({"minutes": 4.0, "pairs": []}, False),
        ({"minutes": LONG_MINUTES, "pairs": ["orders+pd"]}, False),
    ],
)
def test_a_whole_call_has_to_fill_its_cells(asked: dict[str, Any], whole: bool) -> None:
    """One of 45 minutes over all pairs is not right with idle ones or empty cells."""
    told = told_of(world(("orders", "pd"), compared=1), asked=asked)
    assert told["is_whole"] is whole
    assert is_right(told) is not whole
    full = {"empty": [], "idle_features": [], "idle_pairs": []}
    assert is_right({**told, **full})
    for name in full:
        assert is_right({**told, **full, name: ["orders"]}) is not whole
