"""The reload bench on played servers: what it sends, and what it makes of answers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from reload import measure
from reload.measure import Options, Reloads
from reload.results import summary
from reload.schedule import NORMAL, PAGE, QUICK, Schedule
from sgl_tiered_workloads.records import RequestRecord, read_records
from sgl_tiered_workloads.server import ServerSpec

from tests.unit.benchmarks.played import PlayedClient, at_rest, played_fleet

PREFIX, TAIL = 64, 8
LAYERS, TOKEN_BYTES = 2, 2 * 2 * 2 * 2 * 32
COMPUTED_S, LOADED_S, REST_S = 2.0, 1.0, 0.05
CONFIG = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "hidden_size": 64,
    "vocab_size": 500,
}
SHORT = {"--tiered-sparsity-keep=0.5": 0.5, "--tiered-sparsity-keep=0.25": 0.25}


@dataclass
class PlayedServer:
    """A server as far as the bench sees it.

    Attributes:
        spec: how it would be started.
        ignores_wishes: drops tokens of everybody's KV.
        keeps_all: drops none.
    """

    spec: ServerSpec
    ignores_wishes: bool = False
    keeps_all: bool = False
    policy: str = "always"
    host: set[Any] = field(default_factory=set)
    device: dict[Any, int] = field(default_factory=dict)
    loaded_bytes: int = 0

    @property
    def url(self) -> PlayedServer:
        """Itself: the played client asks it directly."""
        return self

    @property
    def is_tiered(self) -> bool:
        return "tiered" in self.spec.flags

    def share(self, allows: bool) -> float:
        """Return what of a prefix a load brings."""
        if self.keeps_all or not (allows or self.ignores_wishes):
            return 1.0
        flags = [flag for flag in self.spec.flags if flag in SHORT]
        int4 = 0.25 if "--tiered-encoding=int4" in self.spec.flags else 1.0
        return SHORT[flags[0]] if flags else int4

    def post(self, path: str, body: Any) -> None:
        assert self.is_tiered
        if path == "/tiered/drop?tier=device":
            self.device.clear()
        else:
            self.policy = path.removeprefix("/tiered/load-policy?policy=")
            assert self.policy in ("never", "auto", "always")

    def get(self, path: str) -> list[dict[str, Any]]:
        assert path == "/tiered/stats"
        return [
            {
                "edges": {"host->device": {"bytes": self.loaded_bytes}},
                "sparsity": {"rows_used": sum(self.device.values())},
            }
        ]

    def answer(self, request: Any, order: int, wishes: Any) -> RequestRecord:
        """Compute, load or reuse a prefix; what was dropped moves a logprob."""
        allows = (wishes or {}).get("lossy") == "allow"
        key = (allows, request.prompt[:PREFIX])
        share = self.share(allows)
        tier, seconds, moved = "", COMPUTED_S, 0.0
        if key in self.device:
            tier, seconds = "device", 0.0
        elif key in self.host and self.policy != "never":
            tier, seconds = "host", share * LOADED_S
            self.loaded_bytes += int(share * PREFIX * TOKEN_BYTES)
            moved = 1.0 - share
        self.device.setdefault(key, LAYERS * int(share * PREFIX) if tier else 0)
        if self.is_tiered:
            self.host.add(key)
        num = request.max_new_tokens
        return RequestRecord(
            key=request.key,
            order=order,
            prompt=request.prompt,
            targeted_s=0.0,
            started_s=0.0,
            token_times_s=(seconds + REST_S,) * num,
            output=(7,) * num,
            logprobs=(-0.5 - moved,) * num,
            top_logprobs=(((-0.5 - moved, 7), (-2.0, 8)),) * num,
            cached_tokens=PREFIX if tier else 0,
            cached_by_tier={tier: PREFIX} if tier else {},
        )


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function that runs the bench on played servers."""
    monkeypatch.setattr(measure, "StreamingClient", PlayedClient)
    monkeypatch.setattr(measure, "settle", at_rest)
    schedule = partial(Schedule, prefix_tokens=PREFIX, tail_tokens=TAIL)
    monkeypatch.setattr(measure, "Schedule", schedule)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def played(scale=NORMAL, minutes=20.0, **faults):
        fleet = played_fleet(lambda spec: PlayedServer(spec, **faults))
        monkeypatch.setattr(measure, "Fleet", fleet)
        options = Options(tmp_path, tmp_path / "out", scale, minutes)
        findings = asyncio.run(Reloads(options, lambda _: None).run())
        result = summary(findings, scale.min_hits)
        result["started"] = fleet.started
        return result, findings

    return played


def test_every_arm_is_timed_and_compared(run, tmp_path) -> None:
    """There and back; figures are those of the played servers."""
    assert PREFIX % PAGE == 0
    result, findings = run()
    assert result["problems"] == []
    assert result["missed"] == []
    assert result["outputs_identical_off"] is True
    assert result["outputs_identical_refuse"] is True
    assert result["allowed_answers_differ"] == 8
    there = ["reload-dense", "reload-at_50", "reload-at_25", "reload-int4"]
    assert result["started"] == ["reload-plain", *there, *there[::-1]]
    for arm, share in (("at_50", 0.5), ("at_25", 0.25), ("int4", 0.25)):
        gain = (LOADED_S + REST_S) / (share * LOADED_S + REST_S)
        assert result[f"ttft_speedup_{arm}"] == pytest.approx(gain, abs=1e-3)
        assert result["reloads"][arm]["bytes_share"] == share
    assert result["reloads"]["dense"]["hits"] == NORMAL.hits * NORMAL.repeats
    assert result["device_kv_share_at_50"] == 0.5
    assert "device_kv_share_int4" not in result
    assert result["computed_ttft_s"] == COMPUTED_S + REST_S
    assert result["planner_loads"] == "3 of 3"
    assert findings.dense_bytes == PREFIX * TOKEN_BYTES
    header, records = read_records(tmp_path / "out" / "records" / "at_50-1.jsonl")
    assert header.facts["emulated_links"] == result["emulated_links"]
    assert [record.num_prompt_tokens for record in records] == [PREFIX + TAIL] * 24


def test_who_refuses_and_gets_less_turns_the_run_red(run) -> None:
    """Then there is no speed."""
    result, _ = run(QUICK, ignores_wishes=True)
    assert result["outputs_identical_refuse"] is False
    assert any("refuse: the gate is red" in problem for problem in result["problems"])
    assert "ttft_speedup_at_50" not in result


def test_a_comparison_that_sees_nothing_is_a_problem(run) -> None:
    """Who allows it is given everything: the control finds no difference."""
    result, _ = run(QUICK, keeps_all=True)
    assert result["outputs_identical_refuse"] is True
    assert any("dropped tokens" in problem for problem in result["problems"])
    assert result["ttft_speedup_at_50"] == 1.0
    assert result["missed"] == ["ttft_speedup_at_50", "device_kv_share_at_50"]


def test_out_of_time_only_the_compared_arms_go_on(run) -> None:
    """Both of them in every repeat."""
    result, findings = run(minutes=0.0)
    assert findings.arms() == ["dense", "at_50"]
    assert len(result["started"]) == 5
    assert result["problems"] == []
