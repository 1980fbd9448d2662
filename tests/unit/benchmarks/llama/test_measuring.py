"""What is sent to a server, and what a cell keeps, on played servers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from importlib import import_module
from pathlib import Path

import pytest
from sgl_tiered_workloads.records import RequestRecord

from tests.unit.benchmarks.llama.llama_support import (
    PAGE,
    TOKENS,
    PlayedServer,
    cell,
    folder_of_model,
)
from tests.unit.benchmarks.played import TICK_S


def test_hits_are_below_the_device_and_then_on_it(measured):
    """Prompts push each other out; plain computes what the others load."""
    for name, below in (("tiered", "host"), ("plain", "computed")):
        seen = measured(name, "ttft", TOKENS)["requests"]
        states = [one["state"] for one in seen]
        # What comes first does not count.
        assert states == [
            "warm-up",
            *["computed"] * 3,
            *["warm-up"] * 2,
            *[below, "device"] * 3,
        ]
        hits = [one for one in seen if one["state"] == below]
        tiers = {"host": {"host": TOKENS}, "computed": {}}[below]
        assert all(one["cached_by_tier"] == tiers for one in hits)
        on_device = [one for one in seen if one["state"] == "device"]
        assert all(one["cached_by_tier"] == {"device": TOKENS} for one in on_device)


def test_every_system_gets_the_same_prompts(measured):
    """Answers, which follow from the prompt, agree request by request."""
    outputs = [
        [one["output"] for one in measured(name, "ttft", TOKENS)["requests"]]
        for name in ("plain", "tiered", "hicache")
    ]
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_disk_is_hit_with_nothing_above_it(measured):
    """Ours drops device and host; the disk keeps. Each hit tells what was not cold."""
    seen = measured("tiered-disk", "disk", TOKENS)["requests"]
    hits = [one for one in seen if one["state"] == "disk"]
    assert len(hits) == 2
    assert all(one["cached_by_tier"] == {"disk": TOKENS} for one in hits)
    assert [one["resident_share"] for one in hits] == [0.0, 0.0]


def test_how_long_writes_are_waited_for_follows_from_their_bytes(
    parts, measured, monkeypatch
):
    """A store that takes minutes to be written is not given up after one."""
    waited = []

    async def settle(server, store, patience_s):
        waited.append(patience_s)

    monkeypatch.setattr(parts.measure, "settle", settle)
    monkeypatch.setattr(parts.measure, "_SLOWEST_DISK_BYTES_PER_S", 1.0)
    measured("tiered-disk", "disk", TOKENS)
    token_bytes = 2 * 2 * 2 * 2 * 32
    assert waited == [parts.measure.PATIENCE_S + 2 * TOKENS * token_bytes]


def test_a_stream_without_reuse_keeps_its_raw_times(measured):
    """Prompts of a warm-up stream are none of its own; a start has its own prompts."""
    found = measured("plain", "noreuse")
    assert len(found["outputs"]) == 3
    assert found["seconds"] > 0
    assert found["tokens"] == 3 * (256 + 8)
    assert (found["drain_s"], found["moved_bytes"]) == (0.0, {})
    assert measured("plain", "noreuse")["outputs"] == found["outputs"]
    assert measured("plain", "noreuse", start=1)["outputs"] != found["outputs"]


def test_offloads_after_the_last_token_are_charged(measured):
    """The drain ends with the last byte that was moved, and the bytes are told."""
    found = measured("tiered", "noreuse")
    # The first two looks are before the stream and after it, the last offload ends
    # at the fourth.
    assert found["drain_s"] > 2 * TICK_S
    assert found["moved_bytes"] == {"device->host": 30}


def test_a_server_that_never_comes_to_rest_has_no_throughput(measured, monkeypatch):
    """Its stream has no end."""
    looks = itertools.count()

    def get(self, path):
        return [{"edges": {"device->host": {"bytes": next(looks)}}}]

    monkeypatch.setattr(PlayedServer, "get", get)
    with pytest.raises(RuntimeError, match="still offloads"):
        measured("tiered", "noreuse")


def test_a_stream_ends_with_its_first_failed_request(measured, monkeypatch):
    """The requests behind it are not sent: each might wait for its own time-out."""
    asked = []

    def broken(self, request, order, wishes=None):
        asked.append(request.key)
        return dataclasses.replace(
            RequestRecord(request.key, order, request.prompt, 0.0, 0.0), error="no"
        )

    monkeypatch.setattr(PlayedServer, "answer", broken)
    with pytest.raises(RuntimeError, match="no"):
        measured("plain", "noreuse", stream_prompts=80)
    assert len(asked) <= 2


def test_the_first_run_of_a_load_does_not_count(parts, measured, monkeypatch):
    """Each start runs it once more than it tells."""
    runs = []

    async def load(name, *rest):
        runs.append(name)
        return {"number": len(runs)}

    monkeypatch.setattr(parts.measure, "run_load", load)
    assert measured("tiered", "multi_turn")["number"] == 2


def test_a_request_that_fails_ends_the_cell(measured, monkeypatch):
    """With its reason; the next cell goes on."""

    def broken(self, request, order, wishes=None):
        return dataclasses.replace(
            RequestRecord(request.key, order, request.prompt, 0.0, 0.0),
            error="HTTP 500: no",
        )

    monkeypatch.setattr(PlayedServer, "answer", broken)
    with pytest.raises(RuntimeError, match="HTTP 500: no"):
        measured("tiered", "ttft", TOKENS)


def test_the_gate_judges_what_came_from_below(parts, measured, tmp_path, monkeypatch):
    """Equal answers are green; those of a wrong page are red."""
    cells = [
        cell(name, "gate") | measured(name, "gate") for name in ("plain", "tiered")
    ]
    records = tmp_path / "records"
    found = parts.results.find(cells, records, PAGE)
    assert found.gates == {"plain": "the reference", "tiered": "green"}
    assert "compared bit for bit" in found.compared["tiered"]
    assert "host" in found.compared["tiered"]
    answer = PlayedServer.answer

    def wrong(self, request, order, wishes=None):
        record = answer(self, request, order)
        if "host" not in record.cached_by_tier:
            return record
        tops = (((-0.1, 96), (-9.0, 98)),) * len(record.output)
        return dataclasses.replace(
            record, output=(96,) * len(record.output), top_logprobs=tops
        )

    monkeypatch.setattr(PlayedServer, "answer", wrong)
    cells[1] |= measured("tiered", "gate")
    found = parts.results.find(cells, records, PAGE)
    assert found.gates["tiered"] == "red"
    assert found.problems


def test_a_system_that_computes_everything_is_not_green(
    parts, measured, tmp_path, monkeypatch
):
    """Right answers say nothing of pages below the device that nobody loaded."""
    cells = [cell("plain", "gate") | measured("plain", "gate")]
    answer = PlayedServer.answer

    def computed(self, request, order, wishes=None):
        self.below.clear()
        return answer(self, request, order)

    monkeypatch.setattr(PlayedServer, "answer", computed)
    cells.append(cell("tiered", "gate") | measured("tiered", "gate"))
    found = parts.results.find(cells, tmp_path / "records", PAGE)
    assert found.gates["tiered"] == "red"
    assert "answer used the host tier" in found.problems[0]


@pytest.mark.parametrize("moved", [0.0, 0.02])
def test_bits_are_asked_where_plain_gives_them_twice(
    parts, measured, tmp_path, monkeypatch, moved
):
    """Where two servers of plain differ, others are judged by how far they do."""
    cells = [
        cell(name, "gate") | measured(name, "gate") for name in ("plain", "tiered")
    ]
    answer = PlayedServer.answer

    def other(self, request, order, wishes=None):
        record = answer(self, request, order)
        tops = tuple(
            tuple((logprob - moved, token) for logprob, token in top)
            for top in record.top_logprobs
        )
        return dataclasses.replace(record, top_logprobs=tops)

    monkeypatch.setattr(PlayedServer, "answer", other)
    cells.append(cell("plain", "gate", 1) | measured("plain", "gate", start=1))
    assert "spread" not in cells[-1]
    found = parts.results.find(cells, tmp_path / "records", PAGE)
    assert found.gates == {"plain": "the reference", "tiered": "green"}
    told = "near-tie rule holds for all" if moved else "bits twice"
    assert told in found.compared["plain"]
    asked = "4 of 4" if not moved else "0 of 4"
    assert f"{asked} answers compared bit for bit" in found.compared["tiered"]


def test_the_command_of_bench_serving_has_the_loads_shape(parts, tmp_path):
    """A conversation goes through the chat endpoint, all of them at once."""
    sizes = parts.settings.GPU
    module = import_module("importlib.util").find_spec
    if module("sglang") is None:
        pytest.skip("not run: SGLang is not installed")
    line = parts.loads.command(
        sizes.multi_turn, 50, "http://127.0.0.1:1", tmp_path, tmp_path / "x.jsonl"
    )
    given = dict(itertools.pairwise(line))
    assert given["-m"] == "sglang.benchmark.serving"
    assert given["--backend"] == "sglang-oai-chat"
    assert given["--dataset-name"] == "generated-shared-prefix"
    assert given["--gsp-num-turns"] == "4"
    assert given["--max-concurrency"] == "50"
    line = parts.loads.command(
        sizes.shared_prefix, 50, "http://127.0.0.1:1", tmp_path, tmp_path / "x.jsonl"
    )
    given = dict(itertools.pairwise(line))
    assert given["--backend"] == "sglang"
    assert given["--max-concurrency"] == "16"


def bench_result(path: Path, **changes: object) -> Path:
    """Write a result as bench_serving does."""
    told = {
        "duration": 2.0,
        "completed": 2,
        "output_throughput": 5.0,
        "server_info": {"model_path": "/a/path/of/this/machine"},
        "cache_report": {"total_prompt_tokens": 100, "total_cached_tokens": 40},
        "ttfts": [0.5, 0.7],
        "input_lens": [50, 50],
        "output_lens": [4, 4],
        "cached_tokens": [20, 20],
        "errors": ["", ""],
        "generated_texts": ["one", "two"],
        **changes,
    }
    path.write_text(json.dumps(told) + "\n")
    return path


def test_a_result_of_bench_serving_is_kept_without_paths(parts, tmp_path):
    """Figures, raw times, and a name of each answer."""
    found = parts.loads.read_result(bench_result(tmp_path / "x.jsonl"), 2)
    assert found["figures"]["output_throughput"] == 5.0
    assert found["ttfts"] == [0.5, 0.7]
    assert len(set(found["answers"])) == 2
    assert "/a/path" not in json.dumps(found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"completed": 1, "errors": ["", "Traceback\nValueError: no"]}, "ValueError"),
        ({"completed": 1}, "1 of 2"),
    ],
)
def test_a_load_with_failed_requests_is_no_figure(parts, tmp_path, changes, words):
    """The first error is told."""
    with pytest.raises(RuntimeError, match=words):
        parts.loads.read_result(bench_result(tmp_path / "x.jsonl", **changes), 2)


def test_a_load_that_wrote_nothing_says_so(parts, tmp_path):
    """Missing, empty, or no JSON."""
    for content in (None, "", "{"):
        path = tmp_path / "x.jsonl"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        with pytest.raises(RuntimeError, match="wrote no result"):
            parts.loads.read_result(path, 2)


def test_conversations_need_a_chat_template(parts, tmp_path):
    """A base model has none: not there, with what to do."""
    model = parts.settings.Model.of(folder_of_model(tmp_path))
    with pytest.raises(parts.loads.NotThereError, match="Instruct"):
        asyncio.run(
            parts.loads.run_load(
                "multi_turn",
                parts.settings.DRY.multi_turn,
                1.25,
                4096,
                PlayedServer("plain"),
                model,
                tmp_path,
            )
        )
