"""The comparison on one GPU: its plan, cells, checks, table, chart, on small values."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sgl_tiered_workloads.records import RequestRecord, make_header, write_records
from sgl_tiered_workloads.server import ServerSpec, ServerStartError

FOLDER = Path(__file__).parents[3] / "benchmarks/gpu"
_OURS = ("comparison", "llama", "movement")
PAGE = 16
TOKENS = 64
POOL = 160


@pytest.fixture
def load(monkeypatch):
    """Import a module of the program, with its folder on the path as when it is run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield import_module
    for name in list(sys.modules):
        if name.partition(".")[0] in _OURS:
            del sys.modules[name]


@pytest.fixture
def parts(load):
    """All modules, as attributes."""
    names = "settings checks systems plan store loads measure results page chart run"
    return SimpleNamespace(
        **{name: load(f"comparison.{name}") for name in names.split()}
    )


def folder_of_model(path: Path, **config: object) -> Path:
    """Write what is read of a model's folder."""
    path.mkdir(parents=True, exist_ok=True)
    told = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "vocab_size": 500,
        "max_position_embeddings": 4096,
        **config,
    }
    (path / "config.json").write_text(json.dumps(told))
    (path / "model.safetensors").write_bytes(b"0" * 1000)
    return path


def small_sizes(parts):
    """Return sizes that a played server answers at once."""
    shape = parts.settings.LoadShape(64, 16, 4, per_group=2, turns=1, concurrency=2)
    return dataclasses.replace(
        parts.settings.DRY,
        lengths=(TOKENS,),
        hits=3,
        gate_prompts=2,
        shared_prefix=shape,
    )


def shared(parts, **changes):
    """Return what all systems have in common."""
    values = {
        "page_size": PAGE,
        "pool_tokens": 4096,
        "mem_fraction": 0.8,
        "attention_backend": "",
        "host_gb": 0,
        "disk_gb": 1,
    }
    return parts.settings.Shared(**(values | changes))


# The plan.


def test_plain_goes_first_and_runs_without_reuse_are_abba(parts):
    """Plain, ours, ours, plain, next to each other; then all that ours has."""
    sizes = dataclasses.replace(parts.settings.DRY, blocks=2)
    sessions = parts.plan.plan(["tiered", "hicache", "plain"], (512,), sizes)
    starts = [session.system for session in sessions]
    assert starts == [
        "plain",
        "tiered",
        "plain",
        "tiered",
        "plain",
        "tiered",
        "hicache",
    ]
    runs = [
        (cell.system, cell.case)
        for session in sessions
        for cell in session.cells
        if cell.part == "noreuse"
    ]
    assert runs == [
        ("plain", 0),
        ("tiered", 0),
        ("tiered", 1),
        ("plain", 1),
        ("plain", 2),
        ("tiered", 2),
        ("tiered", 3),
        ("plain", 3),
    ]
    names = [cell.name for session in sessions for cell in session.cells]
    assert len(set(names)) == len(names)
    # In the first start of each, the gate comes before anything that is timed.
    assert sessions[0].cells[0].part == "gate"
    assert sessions[-1].cells[0].part == "gate"
    # Another server of plain SGLang answers the gate's prompts once more.
    again = [cell.name for cell in sessions[2].cells if cell.part == "gate"]
    assert again == ["plain.gate.1"]


def test_systems_with_a_disk_are_measured_there_only(parts):
    """Their host level is that of the systems without one."""
    (session,) = parts.plan.plan(["tiered-disk"], (512, 1024), parts.settings.DRY)
    assert [cell.part for cell in session.cells] == ["gate", "disk", "disk"]


def test_without_plain_nothing_is_run_against_it(parts):
    """Throughput without reuse is a ratio."""
    sessions = parts.plan.plan(["tiered", "hicache"], (512,), parts.settings.DRY)
    cells = [cell for session in sessions for cell in session.cells]
    assert not any(cell.part == "noreuse" for cell in cells)


def test_as_many_prompts_as_push_each_other_out(parts):
    """Between two uses of one, more than the pool passes."""
    for length in (512, 1000, 4096):
        count = parts.plan.num_prompts(length, 8192)
        assert (count - 1) * length > 8192


def test_lengths_that_do_not_fit_are_named_with_the_reason(parts, tmp_path):
    """By the context, by the device pool, and by host memory."""
    model = parts.settings.Model.of(folder_of_model(tmp_path))
    fit, left_out = parts.plan.lengths_that_fit(
        (512, 2048, 3072, 4096), model, 4500, 10**7
    )
    assert fit == (512, 2048)
    assert "device pool has 4,500" in left_out[3072]
    assert "context has 4,096" in left_out[4096]
    fit, left_out = parts.plan.lengths_that_fit((512,), model, 4500, 10**6)
    assert fit == ()
    assert "host memory has 0.0 GB" in left_out[512]


def test_a_load_uses_more_again_than_the_device_holds(parts):
    """Groups of prefixes, or whole conversations."""
    sizes = parts.settings.GPU
    for shape in (sizes.shared_prefix, sizes.multi_turn):
        groups = shape.num_groups(131_072, sizes.load_pools)
        assert groups * shape.group_tokens() >= sizes.load_pools * 131_072
        assert groups * shape.group_tokens() < 2 * 131_072


# The model's folder, and other things that may be wrong before a server starts.


def test_a_bad_model_path_is_one_sentence(parts, tmp_path):
    """No folder, no configuration, another kind of model, no weights."""
    problem = parts.settings.ProblemError
    of = parts.settings.Model.of
    with pytest.raises(problem, match="no folder"):
        of(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(problem, match=r"no config\.json"):
        of(tmp_path / "empty")
    (tmp_path / "empty/config.json").write_text("{}")
    with pytest.raises(problem, match="not that of a Llama"):
        of(tmp_path / "empty")
    whole = folder_of_model(tmp_path / "model")
    assert of(whole).token_bytes == 2 * 2 * 2 * 2 * 32
    (whole / "model.safetensors").unlink()
    with pytest.raises(problem, match="no file with weights") as caught:
        of(whole)
    assert "\n" not in str(caught.value)


def test_a_chat_template_is_found_where_tokenizers_have_it(parts, tmp_path):
    """In a file of its own, or in the tokenizer's configuration."""
    path = folder_of_model(tmp_path)
    assert not parts.settings.Model.of(path).has_chat
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}')
    assert parts.settings.Model.of(path).has_chat
    (path / "tokenizer_config.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ x }}")
    assert parts.settings.Model.of(path).has_chat


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 48}, "--page-size"),
        ({"pool_tokens": 100}, "--pool-tokens"),
        ({"mem_fraction": 1.5}, "--mem-fraction"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(parts, changes, words):
    """Before anything else."""
    with pytest.raises(parts.settings.ProblemError, match=words):
        parts.checks.check_settings(
            shared(parts, **changes), parts.settings.DRY, ["plain"]
        )


def test_lengths_are_whole_pages_and_systems_are_known(parts):
    """What was written wrong is named."""
    sizes = dataclasses.replace(parts.settings.DRY, lengths=(500,))
    with pytest.raises(parts.settings.ProblemError, match="--lengths: 500"):
        parts.checks.check_settings(shared(parts), sizes, ["plain"])
    with pytest.raises(parts.settings.ProblemError, match="no 'vllm'"):
        parts.checks.check_settings(
            shared(parts), parts.settings.DRY, ["plain", "vllm"]
        )


def test_an_occupied_port_is_told_before_a_server_starts(parts, tmp_path, monkeypatch):
    """And how to go on."""

    def taken(candidates):
        raise OSError("no free port among the candidates")

    monkeypatch.setattr(parts.checks, "free_port", taken)
    monkeypatch.setattr(parts.checks.importlib.util, "find_spec", lambda name: True)
    model = parts.settings.Model.of(folder_of_model(tmp_path / "model"))
    with pytest.raises(parts.settings.ProblemError, match="has port 30000"):
        parts.checks.check(
            model, shared(parts), ["plain"], tmp_path, 30000, dry_run=True
        )


def test_no_room_on_the_gpu_is_told_before_a_server_starts(parts, tmp_path):
    """The weights are too large, or others hold the memory."""
    model = parts.settings.Model.of(folder_of_model(tmp_path))
    large = dataclasses.replace(model, weights_bytes=16 << 30)
    room = parts.checks.room_on_gpu
    assert room(large, 0.85, 80 << 30, 1 << 30) == ""
    assert "no room" in room(large, 0.85, 16 << 30, 0)
    told = room(large, 0.85, 80 << 30, 60 << 30)
    assert "other programs hold 60.0 of 80.0 GiB" in told


def test_no_room_in_host_memory_is_told_before_a_server_starts(parts):
    """With what to lower."""
    told = parts.checks.room_in_host(34, 30 * 10**9, shared(parts))
    assert "34 GB" in told
    assert "--pool-tokens" in told
    assert parts.checks.room_in_host(34, 64 * 10**9, shared(parts)) == ""


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (
            "usage: launch_server.py\nlaunch_server.py: error: unrecognized arguments: "
            "--no-such-flag",
            "a flag is wrong: unrecognized arguments: --no-such-flag",
        ),
        (
            "ERROR: [Errno 98] error while attempting to bind on address "
            "('127.0.0.1', 1)",
            "another program has its port",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            "no room on the GPU",
        ),
        (
            "ValueError: Not enough memory. Please try to increase "
            "--mem-fraction-static.",
            "no room on the GPU",
        ),
        ("ValueError: Not enough host memory available.", "no room in host memory"),
        ("Traceback\n  File x\nKeyError: 'strange'\nkilled", "KeyError: 'strange'"),
    ],
)
def test_why_a_server_did_not_start_is_one_sentence(parts, tail, words):
    """Read from the end of its log."""
    error = ServerStartError("server plain ended with code 2 after 9 s", 2, tail)
    told = parts.checks.why_not_started(error)
    assert words in told
    assert told.startswith("server plain ended with code 2 after 9 s: ")
    assert "\n" not in told


# The systems.


def test_all_systems_get_the_same_but_for_what_is_compared(parts, tmp_path):
    """Page size, pool, memory fraction and backend in each one's flags."""
    model = parts.settings.Model.of(folder_of_model(tmp_path / "model"))
    asked = shared(parts, attention_backend="fa3", server_flags=("--tp=1",))
    specs = {
        name: parts.systems.spec_of(system, model, asked, 34, tmp_path, dry_run=False)
        for name, system in parts.systems.SYSTEMS.items()
    }
    common = specs["plain"].flags
    assert common == (
        "--page-size",
        "16",
        "--max-total-tokens",
        "4096",
        "--mem-fraction-static",
        "0.8",
        "--attention-backend",
        "fa3",
        "--tp=1",
    )
    for spec in specs.values():
        assert spec.flags[: len(common)] == common
    own = {name: spec.flags[len(common) :] for name, spec in specs.items()}
    assert own["tiered"][own["tiered"].index("--tiered-host-size") + 1] == "34000MB"
    for name in ("hicache", "hicache-direct", "hicache-disk"):
        assert own[name][own[name].index("--hicache-size") + 1] == "34"
        assert "write_through" in own[name]
    assert {"page_first", "kernel"} <= set(own["hicache"])
    assert {"page_first_direct", "direct"} <= set(own["hicache-direct"])
    assert "--enable-lmcache" in own["lmcache"]
    # What is written down of flags has no path of the machine.
    told = [flag for spec in specs.values() for flag in parts.systems.told_flags(spec)]
    assert not [flag for flag in told if flag.startswith("/")]


def test_host_memory_is_two_device_pools_unless_it_is_given(parts):
    """As HiCache takes by itself."""
    assert shared(parts).host_gb_of(131_072, 131_072) == 35
    assert shared(parts, host_gb=50).host_gb_of(131_072, 131_072) == 50
    assert shared(parts).host_gb_of(10, 10) == 1


def test_lmcache_that_is_not_there_says_why(parts, monkeypatch):
    """In a dry run always; else where the package is not installed."""
    absent = parts.systems.absent
    assert absent("tiered", dry_run=True) == ""
    assert "needs CUDA" in absent("lmcache", dry_run=True)

    def missing(name):
        raise parts.systems.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(parts.systems.importlib.metadata, "version", missing)
    assert "not installed" in absent("lmcache", dry_run=False)


# The cells on disk.


def header_of(parts, path, **changes):
    """Return a header as a run makes it."""
    model = parts.settings.Model.of(folder_of_model(path))
    told = parts.settings.header(
        model, shared(parts), parts.settings.DRY, ["plain"], dry_run=True
    )
    return told | changes


def test_a_finished_cell_is_a_file_at_once_and_is_not_measured_again(parts, tmp_path):
    """What failed or is not there is tried again."""
    store = parts.store.Store(tmp_path / "out")
    store.begin(header_of(parts, tmp_path / "model"))
    done = parts.plan.Cell("plain", "ttft", 512)
    failed = parts.plan.Cell("hicache", "ttft", 512)
    gone = parts.plan.Cell("lmcache", "gate")
    store.put(done, "ok", requests=[1])
    store.put(failed, "failed", "it broke")
    store.put(gone, "not there", "absent")
    later = parts.store.Store(tmp_path / "out")
    assert later.is_done(done)
    assert not later.is_done(failed)
    assert not later.is_done(gone)
    later.path(done).write_text('{"status": "ok"')
    assert not later.is_done(done)
    found, broken = later.every()
    assert broken == ["plain.ttft.512.json"]
    assert {cell["status"] for cell in found} == {"failed", "not there"}


def test_cells_of_another_run_are_not_mixed_in(parts, tmp_path):
    """Another model, page size or source is refused; more systems are not."""
    out, first = tmp_path / "out", header_of(parts, tmp_path / "model")
    store = parts.store.Store(out)
    store.begin(first | {"began": "then"})
    # Nothing is measured yet: what is asked for may still change.
    store.begin(first | {"source": "other"})
    store.begin(first)
    store.put(parts.plan.Cell("plain", "gate"), "ok")
    both = store.begin(first | {"systems": ["tiered"]})
    assert both["systems"] == ["plain", "tiered"]
    for name, words in (("source", "source"), ("shared", "another setting")):
        with pytest.raises(parts.settings.ProblemError, match=words):
            store.begin(first | {name: "other"})


# Measuring, on played servers.


class PlayedServer:
    """A cache of prompts on the device, the host and a disk, least recent out."""

    def __init__(self, name: str, pool_tokens: int) -> None:
        self.spec = ServerSpec(name, Path("model"), ("tiered",) if name else ())
        self.spec = dataclasses.replace(self.spec, flags=self._flags(name))
        self.pool_tokens = pool_tokens
        self.device: list[tuple[int, ...]] = []
        self.below: list[tuple[int, ...]] = []
        self.dropped: list[str] = []

    @staticmethod
    def _flags(name: str) -> tuple[str, ...]:
        return ("tiered",) if name.startswith("tiered") else ()

    @property
    def url(self) -> PlayedServer:
        """Itself: the played client asks it directly."""
        return self

    def exit_code(self) -> None:
        return None

    def flush_cache(self) -> None:
        self.device.clear()
        if not self.spec.name.endswith("disk"):
            self.below.clear()

    def get(self, path: str) -> list[dict[str, object]]:
        assert path == "/tiered/stats"
        return [{"edges": {"device->host": {"bytes": 10}}}]

    def post(self, path: str, body: object) -> None:
        self.dropped.append(path)
        if path.endswith("tier=device"):
            self.device.clear()

    def answer(self, request, order: int) -> RequestRecord:
        """Answer what depends on the prompt alone, and say where it was found."""
        prompt = request.prompt
        tier = "device" if prompt in self.device else ""
        if not tier and prompt in self.below:
            tier = "disk" if self.spec.name.endswith("disk") else "host"
        if prompt in self.device:
            self.device.remove(prompt)
        self.device.append(prompt)
        while sum(len(one) for one in self.device) > self.pool_tokens:
            self.device.pop(0)
        if self.spec.name != "plain" and prompt not in self.below:
            self.below.append(prompt)
        cached = (len(prompt) - 1) // PAGE * PAGE if tier else 0
        num = request.max_new_tokens
        token = sum(prompt) % 97
        return RequestRecord(
            key=request.key,
            order=order,
            prompt=prompt,
            targeted_s=0.0,
            started_s=0.0,
            token_times_s=tuple(
                {"": 2.0, "device": 0.1, "host": 0.5, "disk": 0.9}[tier] + n / 100
                for n in range(num)
            ),
            output=(token,) * num,
            logprobs=(-0.1,) * num,
            top_logprobs=(((-0.1 - token / 10, token), (-9.0, 98)),) * num,
            cached_tokens=cached,
            cached_by_tier={tier: cached} if tier else {},
        )


class PlayedClient:
    """Hands requests to their server."""

    def __init__(self, url, logprobs=True, timeout_s=0.0) -> None:
        self.server = url

    async def __aenter__(self):
        return self

    async def __aexit__(self, *failure) -> None:
        return None

    async def send(self, request, order=0):
        return self.server.answer(request, order)

    async def run_sequential(self, requests):
        return [self.server.answer(one, order) for order, one in enumerate(requests)]

    async def run_open_loop(self, requests):
        return await self.run_sequential(requests)


async def at_rest(server, store) -> None:
    """A played server writes at once."""


@pytest.fixture
def measured(parts, tmp_path, monkeypatch):
    """Return a function that measures a cell of a system on a played server."""
    monkeypatch.setattr(parts.measure, "StreamingClient", PlayedClient)
    monkeypatch.setattr(
        import_module("sgl_tiered_workloads.harness.control"),
        "StreamingClient",
        PlayedClient,
    )
    monkeypatch.setattr(parts.measure, "settle", at_rest)
    monkeypatch.setattr(parts.measure, "make_cold", lambda store: 0.0)
    model = parts.settings.Model.of(folder_of_model(tmp_path / "model"))

    def measure(name: str, part: str, case: int = 0):
        import asyncio

        cells = parts.measure.Measure(
            parts.systems.SYSTEMS[name],
            PlayedServer(name, POOL),
            model,
            small_sizes(parts),
            PAGE,
            POOL,
            tmp_path / "records",
            tmp_path / "store",
            lambda text: None,
        )
        return asyncio.run(cells.run(parts.plan.Cell(name, part, case)))

    return measure


def test_hits_are_below_the_device_and_then_on_it(measured):
    """Prompts push each other out; plain computes what the others load."""
    for name, below in (("tiered", "host"), ("plain", "computed")):
        seen = measured(name, "ttft", TOKENS)["requests"]
        states = [one["state"] for one in seen]
        assert states == ["computed"] * 4 + [below, "device"] * 3
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
    """Ours drops device and host; the disk keeps."""
    seen = measured("tiered-disk", "disk", TOKENS)["requests"]
    hits = [one for one in seen if one["state"] == "disk"]
    assert len(hits) == 2
    assert all(one["cached_by_tier"] == {"disk": TOKENS} for one in hits)


def test_runs_without_reuse_keep_raw_times_and_moved_bytes(measured):
    """Of each run: seconds, tokens, and the answers."""
    found = measured("tiered", "noreuse", 1)
    assert len(found["runs"]) == 3
    assert all(run["seconds"] > 0 and run["tokens"] > 0 for run in found["runs"])
    assert found["moved_bytes"] == {"device->host": 0}


def test_a_request_that_fails_ends_the_cell(measured, monkeypatch):
    """With its reason; the next cell goes on."""

    def broken(self, request, order):
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
        {"system": name, "part": "gate", "case": 0, "status": "ok", "why": ""}
        | measured(name, "gate")
        for name in ("plain", "tiered")
    ]
    records = tmp_path / "records"
    found = parts.results.find(cells, records, PAGE)
    assert found.gates == {"plain": "the reference", "tiered": "green"}
    assert "compared bit for bit" in found.compared["tiered"]
    assert "host" in found.compared["tiered"]
    answer = PlayedServer.answer

    def wrong(self, request, order):
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


@pytest.mark.parametrize("moved", [0.0, 0.02])
def test_bits_are_asked_where_plain_gives_them_twice(
    parts, measured, tmp_path, monkeypatch, moved
):
    """Where two servers of plain differ, others are judged by how far they do."""
    cells = [
        {"system": name, "part": "gate", "case": case, "status": "ok", "why": ""}
        | measured(name, "gate", case)
        for name, case in (("plain", 0), ("tiered", 0))
    ]
    answer = PlayedServer.answer

    def other(self, request, order):
        record = answer(self, request, order)
        tops = tuple(
            tuple((logprob - moved, token) for logprob, token in top)
            for top in record.top_logprobs
        )
        return dataclasses.replace(record, top_logprobs=tops)

    monkeypatch.setattr(PlayedServer, "answer", other)
    again = {"system": "plain", "part": "gate", "case": 1, "status": "ok", "why": ""}
    cells.append(again | measured("plain", "gate", 1))
    assert "spread" not in cells[-1]
    found = parts.results.find(cells, tmp_path / "records", PAGE)
    assert found.gates == {"plain": "the reference", "tiered": "green"}
    told = "near-tie rule holds for all" if moved else "bits twice"
    assert told in found.compared["plain"]
    asked = "4 of 4" if not moved else "0 of 4"
    assert f"{asked} answers compared bit for bit" in found.compared["tiered"]


# bench_serving.


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
    import asyncio

    model = parts.settings.Model.of(folder_of_model(tmp_path))
    with pytest.raises(parts.loads.NotThereError, match="Instruct"):
        asyncio.run(
            parts.loads.run_load(
                "multi_turn",
                parts.settings.DRY.multi_turn,
                1.25,
                4096,
                PlayedServer("plain", POOL),
                model,
                tmp_path,
            )
        )


# Figures, table and chart.


def request(state: str, prompt: int, ttft_s: float, tier: str = "", output=(1, 2)):
    """Return one request of a cell."""
    return {
        "state": state,
        "prompt": prompt,
        "ttft_s": ttft_s,
        "e2e_s": ttft_s,
        "cached_tokens": TOKENS if tier else 0,
        "cached_by_tier": {tier: TOKENS} if tier else {},
        "output": list(output),
    }


MEMORY = {
    "pool_tokens": 4096,
    "pool_gib": 0.5,
    "weights_gib": 15.0,
    "graphs_gib": 0.1,
    "host_gb": 34,
    "disk": "",
    "attention_backend": "fa3",
    "page_size": 16,
    "mem_fraction": 0.8,
    "start_s": 30.0,
    "flags": [],
}


def cell(system: str, part: str, case: int, **found: object) -> dict[str, object]:
    """Return a finished cell."""
    told = {"system": system, "part": part, "case": case, "status": "ok", "why": ""}
    return {**told, "memory": MEMORY, **found}


def ttft_cell(system: str, below_s: float, wrong: int = 0):
    """Return six hits; of some the answer differs from plain's."""
    tier = "" if system == "plain" else "host"
    state = "host" if tier else "computed"
    seen = [request("computed", n, 2.0 + n / 100) for n in range(6)]
    for n in range(6):
        output = (9, 9) if n < wrong else (1, 2)
        seen.append(request(state, n, below_s + n / 1000, tier, output))
        seen.append(request("device", n, 0.1, "device"))
    return cell(system, "ttft", TOKENS, hit_tokens=TOKENS, requests=seen)


def no_reuse_cell(system: str, case: int, seconds: float):
    """Return three runs."""
    runs = [
        {"seconds": seconds, "tokens": 100, "ttft_s": [1.0], "outputs": [[1], [2]]}
        for _ in range(3)
    ]
    return cell(system, "noreuse", case, runs=runs, moved_bytes={})


def load_cell(system: str, repeat: int, answers: list[str]):
    """Return a load."""
    return cell(
        system,
        "shared_prefix",
        repeat,
        groups=2,
        figures={"output_throughput": 50.0 + repeat},
        ttfts=[0.1, 0.2, 0.3, 0.4, 0.5],
        cache_report={
            "total_prompt_tokens": 100,
            "total_cached_tokens": 60,
            "device_cached_tokens": 20,
            "host_cached_tokens": 40,
        },
        answers=answers,
    )


def all_cells():
    """Return cells of two systems."""
    cells = [ttft_cell("plain", 2.0), ttft_cell("tiered", 0.5, wrong=3)]
    for case in (0, 1):
        cells.append(no_reuse_cell("plain", case, 1.0))
        cells.append(no_reuse_cell("tiered", case, 1.25))
    cells += [load_cell("plain", n, ["a", "b"]) for n in range(2)]
    cells += [load_cell("tiered", n, ["a", "c"]) for n in range(2)]
    return cells


def test_figures_are_medians_beside_identical_shares(parts, tmp_path):
    """By where the KV lay; answers against plain's to the same prompts."""
    found = parts.results.find(all_cells(), tmp_path, PAGE)
    assert not found.problems
    rows = {(row.figure, row.system): row for row in found.rows}
    host = rows["TTFT, 64 tokens, host", "tiered"]
    assert host.value == pytest.approx(502.5)
    assert host.samples == 6
    assert host.source == "host 100%"
    assert host.identical == pytest.approx(0.5)
    assert host.low is not None
    assert host.low <= host.value <= host.high
    computed = rows["TTFT, 64 tokens, computed", "plain"]
    assert computed.samples == 12
    assert computed.identical is None
    assert rows["TTFT, 64 tokens, device", "plain"].identical == 1.0
    ratio = rows["without reuse, throughput over plain's", "tiered"]
    assert ratio.value == pytest.approx(0.8)
    assert ratio.samples == 6
    load = rows["shared-prefix, TTFT p50", "tiered"]
    assert load.value == pytest.approx(300.0)
    assert load.source == "device 20%, host 40%, computed 40%"
    assert load.identical == pytest.approx(0.5)
    # Plain's second run against its first one.
    assert rows["shared-prefix, TTFT p50", "plain"].identical == 1.0


def test_rows_of_one_figure_stand_together(parts, tmp_path):
    """In the order of the systems."""
    found = parts.results.find(all_cells()[::-1], tmp_path, PAGE)
    figures = [row.figure for row in found.rows]
    firsts = list(dict.fromkeys(figures))
    assert figures == sorted(figures, key=firsts.index)
    pair = [row.system for row in found.rows if row.figure.endswith("device")]
    assert pair == ["plain", "tiered"]


def test_a_red_system_has_no_figures(parts, tmp_path):
    """They are withheld in the table, the JSON and the last line."""
    found = parts.results.Findings(gates={"tiered": "red"})
    parts.results._find_ttft(found, all_cells())
    rows = [row for row in found.rows if row.system == "tiered"]
    assert rows
    assert all(row.value is None and row.low is None for row in rows)
    header = header_of(parts, tmp_path / "model")
    text = parts.page.markdown(header, found, {})
    assert "withheld" in text
    line = parts.page.last_line(header, found)
    assert line["figures"]["dry_run: TTFT, 64 tokens, host (ms)"] == {"tiered": None}


def test_systems_that_did_not_get_the_same_are_a_problem(parts, tmp_path):
    """Another pool, or another attention backend."""
    cells = all_cells()
    cells[1] = cells[1] | {"memory": MEMORY | {"pool_tokens": 4000}}
    found = parts.results.find(cells[:2], tmp_path, PAGE)
    assert found.problems == ["tiered has pool_tokens 4000, plain 4096"]


def test_what_failed_and_what_is_not_there_is_told(parts, tmp_path):
    """The one is a problem, the other is not; both are on the page."""
    cells = [
        cell("hicache", "ttft", 64) | {"status": "failed", "why": "it broke"},
        cell("hicache", "gate", 0) | {"status": "failed", "why": "it broke"},
        cell("lmcache", "gate", 0) | {"status": "not there", "why": "absent"},
    ]
    found = parts.results.find(cells, tmp_path, PAGE)
    assert found.problems == ["hicache: it broke"]
    header = header_of(parts, tmp_path / "model")
    text = parts.page.markdown(header, found, {"32,768": "the context has 8,192"})
    assert "- hicache.ttft.64, hicache.gate.0: it broke" in text
    assert "- lmcache.gate.0: absent" in text
    assert "- 32,768 tokens: the context has 8,192" in text
    assert "Nothing was measured." in text


def test_a_cell_that_lacks_something_does_not_end_the_page(parts, tmp_path):
    """It is a problem, and the rest is told."""
    cells = [ttft_cell("plain", 2.0), cell("tiered", "shared_prefix", 0)]
    found = parts.results.find(cells, tmp_path, PAGE)
    assert found.rows
    assert "does not have what it should" in found.problems[0]


def test_every_figure_of_a_dry_run_says_so(parts, tmp_path):
    """At the top, in each cell with a figure, and in each name in the JSON."""
    found = parts.results.find(all_cells(), tmp_path, PAGE)
    header = header_of(parts, tmp_path / "model")
    text = parts.page.markdown(header, found, {})
    assert "**A dry run**" in text.splitlines()[2]
    rows = [line for line in text.splitlines() if line.startswith(("| TTFT", "| sh"))]
    assert rows
    assert all("(dry run)" in line for line in rows)
    line = parts.page.last_line(header, found)
    assert all(name.startswith("dry_run: ") for name in line["figures"])
    real = header | {"dry_run": False}
    assert "dry run" not in parts.page.markdown(real, found, {}).lower()
    assert str(tmp_path) not in json.dumps(parts.page.result(header, found, {}))


def test_the_chart_is_drawn_from_the_same_figures(parts, tmp_path):
    """Also of nothing: equal cells give equal files."""
    pytest.importorskip("matplotlib")
    header = header_of(parts, tmp_path / "model")
    found = parts.results.find(all_cells(), tmp_path, PAGE)
    empty = parts.results.Findings()
    for name, findings in (("a", found), ("b", found), ("c", empty)):
        parts.chart.draw(tmp_path / f"{name}.png", header, findings)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_identical_shares_count_what_can_be_compared(parts):
    """What has no reference does not count; nothing at all is no share."""
    share = parts.results.identical_share
    assert share([1, 2, 3], [1, 2, None]) == 1.0
    assert share([1, 2], [1, 3]) == 0.5
    assert share([1], [None]) is None


# The run, on played systems.


class PlayedFleet:
    """Starts one played server; two at a time are a mistake."""

    broken: tuple[str, ...] = ()
    started: tuple[str, ...] = ()
    running = 0

    def __init__(self, specs, logs, first_port, say) -> None:
        self.servers: dict[str, PlayedServer] = {}
        self._names = list(specs)

    def __enter__(self):
        assert PlayedFleet.running == 0
        PlayedFleet.running += 1
        return self

    def __exit__(self, *failure) -> None:
        PlayedFleet.running -= 1

    async def only(self, names, warm_up) -> None:
        (name,) = names
        PlayedFleet.started += (name,)
        if name in PlayedFleet.broken:
            raise ServerStartError(
                f"server {name} ended with code 1 after 2 s",
                1,
                "error: unrecognized arguments: --odd",
            )
        self.servers[name] = PlayedServer(name, POOL)


@pytest.fixture
def comparison(parts, measured, tmp_path, monkeypatch):
    """Return a function that runs a comparison of played systems."""
    import asyncio

    async def no_load(name, *rest):
        return {
            "groups": 1,
            "figures": {"output_throughput": 1.0},
            "ttfts": [0.1],
            "cache_report": {},
            "answers": ["a"],
        }

    monkeypatch.setattr(parts.run, "Fleet", PlayedFleet)
    monkeypatch.setattr(parts.run, "memory", lambda *_: MEMORY | {"pool_tokens": POOL})
    monkeypatch.setattr(parts.measure, "run_load", no_load)
    monkeypatch.setattr(PlayedFleet, "started", ())
    monkeypatch.setattr(PlayedFleet, "broken", ())
    model = parts.settings.Model.of(folder_of_model(tmp_path / "model"))
    sizes = small_sizes(parts)
    said: list[str] = []

    def run(*systems: str):
        store = parts.store.Store(tmp_path / "out")
        header = parts.settings.header(
            model, shared(parts), sizes, systems, dry_run=True
        )
        header = store.begin(header)
        one = parts.run.Comparison(
            model, shared(parts), sizes, systems, store, None, header, said.append
        )
        asyncio.run(one.run())
        line, text = one.finish()
        return SimpleNamespace(line=line, text=text, store=store, said=said)

    return run


def test_a_comparison_runs_to_its_page_and_goes_on_where_it_stopped(
    comparison, tmp_path
):
    """Each system once more only where something is left to measure."""
    ran = comparison("plain", "tiered", "tiered-disk")
    assert not ran.line["problems"]
    # Plain, ours, plain without reuse between; then ours, then the disk.
    assert PlayedFleet.started == ("plain", "tiered", "plain", "tiered", "tiered-disk")
    assert ran.line["gates"]["tiered"] == "green"
    names = set(ran.line["figures"])
    assert "dry_run: TTFT, 64 tokens, host (ms)" in names
    assert "dry_run: TTFT, 64 tokens, disk (ms)" in names
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} >= {
        "cells",
        "chart.png",
        "facts.json",
        "header.json",
        "records",
        "result.json",
        "table.md",
    }
    PlayedFleet.started = ()
    again = comparison("plain", "tiered", "tiered-disk")
    assert PlayedFleet.started == ()
    assert again.text == ran.text
    (out / "cells/tiered.ttft.64.json").unlink()
    comparison("plain", "tiered", "tiered-disk")
    assert PlayedFleet.started == ("tiered",)


def test_a_system_that_does_not_start_stops_no_other(comparison):
    """It is tried once, told with its reason, and the others are measured."""
    PlayedFleet.broken = ("tiered",)
    ran = comparison("plain", "tiered", "hicache", "lmcache")
    assert PlayedFleet.started.count("tiered") == 1
    told = "a flag is wrong: unrecognized arguments: --odd"
    assert all(told in why for why in ran.line["problems"])
    assert ran.line["gates"]["hicache"] == "green"
    assert any(
        name.startswith("lmcache.") and "needs CUDA" in why
        for name, why in ran.line["not_measured"].items()
    )


def test_without_plain_others_are_measured_and_not_judged(comparison):
    """There is nothing to compare their answers with."""
    PlayedFleet.broken = ("plain",)
    ran = comparison("plain", "tiered")
    assert "plain SGLang has no answers" in ran.line["gates"]["tiered"]
    figures = ran.line["figures"]["dry_run: TTFT, 64 tokens, host (ms)"]
    assert figures == {"tiered": pytest.approx(500.0)}


def test_nothing_that_starts_is_a_page_too(comparison):
    """With the reason of each."""
    PlayedFleet.broken = ("plain", "tiered")
    ran = comparison("plain", "tiered")
    assert ran.line["figures"] == {}
    told = "a flag is wrong: unrecognized arguments: --odd"
    assert len(ran.line["problems"]) == 2
    assert all(told in problem for problem in ran.line["problems"])
    assert len(ran.line["not_measured"]) > 2
    assert "No system came up." in ran.text


# The program.


def test_wrong_arguments_are_one_sentence_and_exit_status_2(
    load, parts, tmp_path, capsys, monkeypatch
):
    """Nothing is started."""
    program = load("llama")
    monkeypatch.setattr(program, "make_model", lambda *_: pytest.fail("a model"))
    absent = str(tmp_path / "absent")
    file = tmp_path / "file"
    file.write_text("x")
    for arguments in (
        ["--model", absent],
        ["--dry-run", "--model", absent],
        ["--dry-run", "--systems", "plain", "odd"],
        ["--dry-run", "--lengths", "100"],
    ):
        assert program.main([*arguments, "--out", str(tmp_path / "out")]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("llama.py: --")
        assert captured.err.count("\n") == 1
        assert "Traceback" not in captured.err
    assert not (tmp_path / "out").exists()
    model = folder_of_model(tmp_path / "model")
    monkeypatch.setattr(program, "make_model", lambda *_: model)
    assert program.main(["--dry-run", "--out", str(file)]) == 2
    assert "is a file" in capsys.readouterr().err


def test_without_a_model_a_run_is_refused(load, parts, tmp_path, capsys):
    """A dry run makes its own one."""
    program = load("llama")
    assert program.main(["--out", str(tmp_path / "out")]) == 2
    assert "--model: name the folder" in capsys.readouterr().err


def test_records_that_cannot_be_read_are_not_judged(parts, tmp_path):
    """A gate without records is said to have judged nothing."""
    spread = {"max_logprob": 0.1, "mean_logprob": 0.1, "max_gap": 0.1, "num_tokens": 1}
    cells = [
        cell("plain", "gate", 0, records="plain.jsonl", spread=spread),
        cell("tiered", "gate", 0, records="absent.jsonl"),
    ]
    record = RequestRecord("g", 0, (1,), 0.0, 0.0)
    write_records(tmp_path / "plain.jsonl", make_header("plain", {}), [record])
    found = parts.results.find(cells, tmp_path, PAGE)
    assert found.gates["tiered"].startswith("not judged: its records cannot be read")
    cells[0] = cell("plain", "gate", 0, spread=None, why_no_spread="it passed")
    found = parts.results.find(cells, tmp_path, PAGE)
    assert found.gates["tiered"] == "not judged: it passed"


def test_the_interval_of_a_ratio_needs_no_distribution(parts):
    """Fewer than six samples have none."""
    values = list(np.linspace(0.9, 1.1, 5))
    few = parts.results._interval(values, "ratio")
    assert few.low == few.high
    many = parts.results._interval([*values, 1.05, 0.95], "ratio")
    assert many.low < many.value < many.high
