"""The comparison of stores: its steps, its memory and its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from against import intervals
from against.model import TOKEN_BYTES
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.records import RequestRecord
from stores import arms, loads, report


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw few times: what is drawn from is the same in every document."""
    monkeypatch.setattr(intervals, "NUM_DRAWS", 20)


def test_each_document_is_asked_about_once_and_elsewhere() -> None:
    """By the server that has not computed it, after it was computed."""
    steps = loads.draw(3, 60, alive=12)
    home: dict[str, int] = {}
    asked: set[str] = set()
    for number, step in enumerate(steps):
        assert step.place == number % 2
        home[step.compute.key.removesuffix(".compute")] = step.place
        if step.ask is not None:
            name = step.ask.key.removesuffix(".ask")
            # The other server of this step is asked, so this one has computed it.
            assert home[name] == step.place
            assert step.age >= 1
            assert name not in asked
            asked.add(name)
    assert len(asked) == len(loads.asks(steps)) == 60


def test_an_ask_has_the_document_and_another_question() -> None:
    """What is shared is the document, and no more."""
    steps = loads.draw(3, 20, alive=8)
    computed = {s.compute.key.removesuffix(".compute"): s.compute for s in steps}
    for ask in loads.asks(steps):
        first = computed[ask.key.removesuffix(".ask")]
        length = loads.length_of(ask.key)
        assert ask.prompt[:length] == first.prompt[:length]
        assert ask.prompt[length:] != first.prompt[length:]
        assert len(ask.prompt) == length + loads.QUESTION_TOKENS
        assert length % arms.PAGE == 0


def test_so_many_documents_wait_to_be_asked_about() -> None:
    """The working set keeps its size, and newer documents are asked about more."""
    steps = loads.draw(3, 300)
    waiting = 0
    for step in steps:
        waiting += 1
        if step.ask is not None:
            assert waiting == loads.ALIVE + 1
            waiting -= 1
    ages = [step.age for step in steps if step.ask is not None]
    near = sum(age <= loads.ALIVE // 4 for age in ages) / len(ages)
    assert 0.3 < near < 0.8
    assert max(ages) > loads.ALIVE


def test_a_seed_gives_the_same_steps() -> None:
    """And another one others."""
    assert loads.draw(3, 5, alive=4) == loads.draw(3, 5, alive=4)
    assert loads.draw(3, 5, alive=4) != loads.draw(4, 5, alive=4)


def test_lengths_come_equally_often() -> None:
    """In each four documents each length comes once."""
    steps = loads.draw(3, 4, alive=8)
    lengths = [loads.length_of(step.compute.key) for step in steps]
    for start in range(0, len(lengths), 4):
        assert sorted(lengths[start : start + 4]) == list(loads.LENGTHS)


def made(tmp_path: Path) -> dict[str, arms.Arm]:
    return arms.make_arms(arms.ARMS, tmp_path / "model", Ports(1), tmp_path)


def test_all_have_the_same_memory(tmp_path: Path) -> None:
    """Two host tiers of ours are two host pools of HiCache's and the segment.

    Those of the smaller pool are the segment alone.
    """
    every = made(tmp_path)
    assert arms.shared_tokens() * 4 == loads.working_set_tokens()
    theirs = 2 * arms.POOL_TOKENS + arms.shared_tokens()
    for name in arms.POOLS:
        whole = theirs if name != arms.QUARTER else arms.shared_tokens()
        assert whole - 2 * arms.PAGE <= 2 * arms.host_tokens(name) <= whole
    assert arms.host_tokens(arms.QUARTER) == 5_760
    for arm in every.values():
        for member in arm.members:
            flags = member.spec.flags
            assert flags[flags.index("--max-total-tokens") + 1] == str(arms.POOL_TOKENS)
            assert flags[flags.index("--page-size") + 1] == str(arms.PAGE)
            assert "--sleep-on-idle" in flags


def test_mooncake_store_is_as_its_authors_have_it(tmp_path: Path) -> None:
    """A master, a store process with the segment, servers that give no memory."""
    arm = made(tmp_path)[arms.MOONCAKE_STORE]
    master, store = arm.services
    assert "mooncake_master" in master.command[0]
    assert store.command[1:3] == ("-m", "mooncake.mooncake_store_service")
    (path,) = (w for w in store.command if w.startswith("--config="))
    given = json.loads(Path(path.removeprefix("--config=")).read_text())
    assert given["global_segment_size"] == arms.shared_tokens() * TOKEN_BYTES
    assert given["local_buffer_size"] == 0
    flags = arm.members[0].spec.flags
    config = json.loads(
        flags[flags.index("--hicache-storage-backend-extra-config") + 1]
    )
    assert config["global_segment_size"] == 0
    assert config["protocol"] == "tcp"
    assert given["master_server_address"] == config["master_server_address"]
    assert flags[flags.index("--hicache-storage-prefetch-policy") + 1] == "timeout"


def test_pools_differ_by_their_transport(tmp_path: Path) -> None:
    """Each has a registry of its own, so that they do not find each other."""
    every = made(tmp_path)
    told = []
    for name in arms.POOLS:
        flags = every[name].members[0].spec.flags
        transport = flags[flags.index("--tiered-pool-transport") + 1]
        assert transport == ("nixl" if name == "pool-nixl" else "mooncake")
        told.append(flags[flags.index("--tiered-pool") + 1])
        host = flags[flags.index("--tiered-host-size") + 1]
        assert int(host) == arms.host_tokens(name) * TOKEN_BYTES
    assert len(set(told)) == len(arms.POOLS)
    assert len(every[arms.RECOMPUTE].members) == 1


def block(repeat: int = 0, **counts: int) -> dict[str, Any]:
    """Make a block in which ours take half of what recomputing takes."""
    factors = {arms.RECOMPUTE: 1.0, arms.MOONCAKE_STORE: 0.8}
    told = {}
    for name in arms.ARMS:
        factor = factors.get(name, 0.5)
        times = {
            f"d{n}.n{length}": factor * length
            for n, length in enumerate(loads.LENGTHS * 3)
        }
        hits = 0 if name == arms.RECOMPUTE else 1
        told[name] = {
            "ttft_ms": times,
            "cached_tokens": {key: hits * loads.length_of(key) for key in times},
            "by_tier": {},
            "lost": 0,
            "wrong": 0,
            "judged": 12,
            **counts,
        }
    return {"repeat": repeat, "alone": True, "arms": told}


def test_figures_of_blocks() -> None:
    """Means of all asks, ours over theirs, and by length."""
    blocks = [block(repeat) for repeat in range(report.WANTED_REPEATS)]
    told = report.summary(blocks)
    assert told["ttft_vs_recompute"] == pytest.approx(0.5)
    assert told["ttft_nixl_vs_mooncake_store_p99"] == pytest.approx(0.625)
    assert told["ttft_vs_mooncake_store_interval"] == pytest.approx([0.625, 0.625])
    assert set(told["ttft_vs_recompute_by_length"]) == {str(n) for n in loads.LENGTHS}
    assert told["shared_hits_by_arm"][arms.RECOMPUTE] == 0.0
    assert told["shared_hits_by_arm"][arms.POOLS[0]] == 1.0
    assert told["complete"] is True
    assert told["targets_missed"] == []
    json.dumps(told)
    lines = list(report.table(blocks))
    assert len(lines) == 1 + len(arms.ARMS) * (3 + len(loads.LENGTHS))


@pytest.mark.parametrize("fault", ["wrong", "lost"])
def test_what_must_not_be(fault: str) -> None:
    """A wrong answer, or one that is missing."""
    blocks = [block(repeat) for repeat in range(report.WANTED_REPEATS)]
    blocks[3]["arms"][arms.QUARTER][fault] = 1
    assert report.summary(blocks)["targets_missed"] == [fault]


@pytest.mark.parametrize("name", [arms.POOLS[1], arms.MOONCAKE_STORE])
def test_who_never_shared_is_no_rival(name: str) -> None:
    """Figures of an arm that found nothing at its neighbour say nothing of sharing."""
    idle = block()
    idle["arms"][name]["cached_tokens"] = dict.fromkeys(
        idle["arms"][name]["cached_tokens"], 0
    )
    assert "shared_hits_by_arm" in report.summary([idle])["targets_missed"]


def test_no_block_is_no_result() -> None:
    """A call in which nothing was measured is not right."""
    missed = report.summary([])["targets_missed"]
    assert {"ttft_vs_recompute", "judged", "complete"} <= set(missed)


def test_a_pool_that_is_not_faster() -> None:
    """Than Mooncake Store, by a tenth in the mean."""
    blocks = [block(repeat) for repeat in range(report.WANTED_REPEATS)]
    for each in blocks:
        times = each["arms"][arms.MOONCAKE_STORE]["ttft_ms"]
        times.update({key: 0.6 * value for key, value in times.items()})
    assert report.summary(blocks)["targets_missed"] == ["ttft_vs_mooncake_store"]


def test_an_ask_without_an_answer_is_left_out_for_all() -> None:
    """Figures compare answers to the same asks."""
    lame = block()
    del lame["arms"][arms.POOLS[0]]["ttft_ms"]["d3.n2048"]
    told = report.summary([lame])
    assert told["ttft_vs_recompute"] == pytest.approx(0.5)


def test_what_is_written_down_of_an_ask() -> None:
    """Its time, what was not computed, and where that came from."""
    records = [
        RequestRecord(
            "d1.n256.ask",
            0,
            (1,) * 288,
            0.0,
            1.0,
            (1.25,),
            (1,),
            cached_tokens=256,
            cached_by_tier={"peer": 256},
        ),
        RequestRecord("d2.n256.ask", 1, (1,) * 288, 0.0, 1.0, error="gone"),
    ]
    assert report.arm_block(records) == {
        "ttft_ms": {"d1.n256": 250.0},
        "cached_tokens": {"d1.n256": 256},
        "by_tier": {"peer": 256},
    }
