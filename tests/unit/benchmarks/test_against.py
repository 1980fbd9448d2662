"""Records of calls that add up, and ratios with intervals over documents."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from against.answers import Reference, judge
from against.intervals import figure, mean, median_of, percentile, ratio
from against.ports import Range
from against.records import Call, busy_cores, design_hash, read_blocks
from sgl_tiered_workloads.gate import Spread
from sgl_tiered_workloads.records import RequestRecord

DESIGN = {"pool_tokens": 64, "loads": ["chats"]}
SPREAD = Spread(max_logprob=0.1, mean_logprob=0.05, max_gap=0.1, num_tokens=10)


def call(
    folder: Path, design: Mapping[str, object] = DESIGN, busy: float = 0.0
) -> Call:
    """Begin a call of a bench named ``some``."""
    return Call("some", design, folder, {"peer": "1.0"}, busy)


def draws(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_blocks_of_calls_add_up(tmp_path: Path) -> None:
    """A later call of the same design finds what earlier ones have measured."""
    first = call(tmp_path)
    assert first.all_blocks == []
    first.keep({"cell": 1})
    first.keep({"cell": 2})
    first.path.rename(tmp_path / "some-earlier.jsonl")
    second = call(tmp_path)
    second.keep({"cell": 3})
    assert [block["cell"] for block in second.all_blocks] == [1, 2, 3]
    header = json.loads(second.path.read_text().splitlines()[0])
    assert header["sizes"] == DESIGN
    assert header["versions"]["peer"] == "1.0"


@pytest.mark.parametrize("name", ["source", "design", "machine", "bench"])
def test_blocks_of_something_else_do_not_count(tmp_path: Path, name: str) -> None:
    """Another product, design or machine begins anew."""
    before = call(tmp_path)
    before.keep({"cell": 1})
    other = {**before.header, name: "another"}
    assert read_blocks(tmp_path, before.header) != []
    assert read_blocks(tmp_path, other) == []


def test_a_call_beside_others_does_not_count_with_one_alone(tmp_path: Path) -> None:
    """Its figures are of a machine with fewer cores."""
    call(tmp_path, busy=1.5).keep({"cell": 1})
    assert [block["alone"] for block in call(tmp_path, busy=1.0).before] == [False]
    assert call(tmp_path, busy=0.1).before == []


def test_cores_at_work_are_between_none_and_all() -> None:
    """Whatever the machine does just now."""
    assert 0.0 <= busy_cores(0.05) <= (os.cpu_count() or 1)


def test_a_call_that_kept_nothing_leaves_no_file(tmp_path: Path) -> None:
    """So a call that fails at its start is no record."""
    call(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_was_not_ended_is_left_out(tmp_path: Path) -> None:
    """A killed call loses the block under way and no other."""
    made = call(tmp_path)
    made.keep({"cell": 1})
    with made.path.open("a") as out:
        out.write('{"kind": "block", "ce')
    assert [block["cell"] for block in read_blocks(tmp_path, made.header)] == [1]


def test_what_all_came_to_is_the_last_line_and_no_block(tmp_path: Path) -> None:
    """Of a call that has measured something; a later one reads blocks alone."""
    made = call(tmp_path)
    made.end({"lost": 0})
    assert not made.path.exists()
    made.keep({"cell": 1})
    made.end({"lost": 0})
    last = json.loads(made.path.read_text().splitlines()[-1])
    assert last == {"kind": "summary", "figures": {"lost": 0}}
    assert [block["cell"] for block in read_blocks(tmp_path, made.header)] == [1]


def test_designs_differ_by_any_size() -> None:
    """And not by the order in which sizes are named."""
    assert design_hash({"a": 1, "b": 2}) == design_hash({"b": 2, "a": 1})
    assert design_hash({"a": 1}) != design_hash({"a": 2})


def test_a_ratio_is_that_of_the_pooled_times() -> None:
    """P99 of all times of all documents, ours over theirs."""
    ours = {"d0": [1.0, 2.0], "d1": [3.0]}
    theirs = {"d0": [2.0, 4.0], "d1": [6.0]}
    found = ratio(ours, [theirs], percentile(99), draws())
    assert found.value == pytest.approx(0.5)
    assert (found.interval.low, found.interval.high) == pytest.approx((0.5, 0.5))
    assert figure(ours, mean) == pytest.approx(2.0)


@pytest.mark.parametrize("share", [0, 37.5, 95, 99, 100])
def test_a_percentile_is_numpys_of_the_repeated_times(share: float) -> None:
    """Each time as often as it counts."""
    generator = draws(5)
    times = np.sort(generator.exponential(1.0, 40))
    counts = generator.integers(0, 4, 40)
    repeated = np.repeat(times, counts)
    assert percentile(share)(times, counts) == pytest.approx(
        np.percentile(repeated, share)
    )
    assert mean(times, counts) == pytest.approx(np.mean(repeated))


def test_of_several_rivals_the_lowest_counts() -> None:
    """The ratio is over whoever did best."""
    ours = {"d0": [2.0]}
    found = ratio(ours, [{"d0": [4.0]}, {"d0": [1.0]}], mean, draws())
    assert found.value == pytest.approx(2.0)


def test_documents_are_drawn_and_not_requests() -> None:
    """Fifty equal times of one document say no more than one of them."""
    generator = draws(3)
    times = generator.exponential(1.0, 8)
    few = {f"d{n}": [float(t)] for n, t in enumerate(times)}
    many = {name: each * 50 for name, each in few.items()}
    other = {name: [1.0] * len(each) for name, each in few.items()}
    others = {name: [1.0] * len(each) for name, each in many.items()}
    narrow = ratio(few, [other], mean, draws()).interval
    wide = ratio(many, [others], mean, draws()).interval
    assert wide.half_width == pytest.approx(narrow.half_width)
    assert narrow.low < narrow.value < narrow.high


def test_other_documents_are_no_pair() -> None:
    """Systems that served different documents cannot be compared."""
    with pytest.raises(ValueError, match="same documents"):
        ratio({"d0": [1.0]}, [{"d1": [1.0]}], mean, draws())


def test_the_median_of_cells() -> None:
    """Of three cells the middle one, and its draws are medians of draws."""
    found = [
        ratio({"d": [value]}, [{"d": [1.0]}], mean, draws())
        for value in (0.5, 3.0, 0.8)
    ]
    middle = median_of(found)
    assert middle.value == pytest.approx(0.8)
    assert middle.interval.high == pytest.approx(0.8)
    with pytest.raises(ValueError, match="no ratio"):
        median_of([])


def answer(key: str, tokens: tuple[int, ...], logprob: float) -> RequestRecord:
    """Make an answer with one other candidate per token, far behind."""
    top = tuple(((logprob, token), (logprob - 5.0, 99)) for token in tokens)
    return RequestRecord(
        key, 0, (1, 2, 3), 0.0, 0.0, (1.0,) * len(tokens), tokens, top_logprobs=top
    )


def test_a_wrong_token_is_one_wrong_answer() -> None:
    """What rounding explains is not wrong, another token is; a lost one is neither."""
    reference = Reference(
        (answer("a", (5, 6), -0.5), answer("b", (7, 8), -0.5), answer("c", (9,), -0.5)),
        SPREAD,
    )
    lost = RequestRecord("c", 2, (1, 2, 3), 0.0, 0.0, error="gone")
    given = [answer("a", (5, 6), -0.55), answer("b", (7, 4), -0.5), lost]
    found = judge(reference, given, 16)
    assert found.keys == ("b",)
    assert found.judged == 2


def test_ports_come_from_the_range() -> None:
    """A port that somebody listens on is passed over."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = Range(f"{port}-{port}")
        with pytest.raises(OSError, match="no free port"):
            ports.take()
    with pytest.raises(ValueError, match="above the last"):
        Range("5-4")
