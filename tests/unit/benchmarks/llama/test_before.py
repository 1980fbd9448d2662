"""What is planned, and what may be wrong before a server starts."""

from __future__ import annotations

import dataclasses

import pytest
from sgl_tiered_workloads.server import ServerStartError

from tests.unit.benchmarks.llama.llama_support import (
    folder_of_model,
    header_of,
    shared,
)


def test_servers_run_in_one_order_and_then_in_the_opposite_one(parts):
    """Plain goes first; each start has its own cells, the gate before what is timed."""
    sizes = parts.settings.DRY
    sessions = parts.plan.plan(["tiered", "hicache", "plain"], (512,), sizes)
    starts = [(session.system, session.start) for session in sessions]
    assert starts == [
        ("plain", 0),
        ("tiered", 0),
        ("hicache", 0),
        ("hicache", 1),
        ("tiered", 1),
        ("plain", 1),
    ]
    names = [cell.name for session in sessions for cell in session.cells]
    assert len(set(names)) == len(names)
    assert all(session.cells[0].part == "gate" for session in sessions[:3])
    for session in sessions:
        timed = [cell.part for cell in session.cells if cell.part != "gate"]
        assert timed == ["noreuse", "ttft", "shared_prefix", "multi_turn"]
    # Another server of plain SGLang answers the gate's prompts once more.
    again = [cell.name for cell in sessions[-1].cells if cell.part == "gate"]
    assert again == ["plain.gate.0.1"]
    assert not [cell for cell in sessions[3].cells if cell.part == "gate"]


def test_systems_with_a_disk_are_measured_there_only(parts):
    """Their host level is that of the systems without one."""
    session, _ = parts.plan.plan(["tiered-disk"], (512, 1024), parts.settings.DRY)
    assert [cell.part for cell in session.cells] == ["gate", "disk", "disk"]


def test_without_reuse_every_system_is_measured_that_has_no_disk(parts):
    """What a cache costs where it gives nothing is a figure of each."""
    measured = {
        name for name, one in parts.systems.SYSTEMS.items() if "noreuse" in one.parts
    }
    assert measured == {
        "plain",
        "plain-uncapped",
        "tiered",
        "hicache",
        "hicache-direct",
        "lmcache",
    }


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
    assert fit == [512, 2048]
    assert "device pool has 4,500" in left_out["3,072"]
    assert "context has 4,096" in left_out["4,096"]
    fit, left_out = parts.plan.lengths_that_fit((512,), model, 4500, 10**6)
    assert fit == []
    assert "host memory has 0.0 GB" in left_out["512"]


def test_a_load_uses_more_again_than_the_device_holds(parts):
    """Groups of prefixes, or whole conversations."""
    sizes = parts.settings.GPU
    for shape in (sizes.shared_prefix, sizes.multi_turn):
        groups = shape.num_groups(131_072, sizes.load_pools)
        assert groups * shape.group_tokens() >= sizes.load_pools * 131_072
        assert groups * shape.group_tokens() < 2 * 131_072


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
        parts.checks.check(model, shared(parts), ["plain"], tmp_path, 30000)


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
            "error: unrecognized arguments: --no-such-flag",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\nend",
            "OutOfMemoryError: CUDA out of memory",
        ),
        ("Traceback\n  File x\nKeyError: 'strange'\nkilled", "KeyError: 'strange'"),
        ("it just ended", "it just ended"),
    ],
)
def test_why_a_server_did_not_start_is_one_sentence(parts, tail, words):
    """Read from the end of its log."""
    error = ServerStartError("server plain ended with code 2 after 9 s", 2, tail)
    told = parts.checks.why_not_started(error)
    assert words in told
    assert told.startswith("server plain ended with code 2 after 9 s: ")
    assert "\n" not in told


def test_all_systems_get_the_same_but_for_what_is_compared(parts, tmp_path):
    """Page size, pool, memory fraction and backend in each one's flags."""
    model = parts.settings.Model.of(folder_of_model(tmp_path / "model"))
    asked = shared(parts, attention_backend="fa3", server_flags=("--tp=1",))
    specs = {
        name: parts.systems.spec_of(system, model, asked, 34, tmp_path, dry_run=False)
        for name, system in parts.systems.SYSTEMS.items()
    }
    common = specs["plain"].flags
    # One has no limit of its pool; that is all.
    without = list(common)
    del without[2:4]
    assert specs.pop("plain-uncapped").flags == tuple(without)
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
    told = [flag for spec in specs.values() for flag in parts.memory.told_flags(spec)]
    assert not [flag for flag in told if flag.startswith("/")]


def test_a_dry_run_is_on_a_cpu_also_where_there_is_a_gpu(parts, tmp_path):
    """Each server is told to see none: then the CPU platform serves."""
    model = parts.settings.Model.of(folder_of_model(tmp_path / "model"))
    asked = shared(parts, mem_fraction=None)
    for name in parts.systems.DEFAULT_DRY:
        system = parts.systems.SYSTEMS[name]
        spec = parts.systems.spec_of(system, model, asked, 1, tmp_path, dry_run=True)
        assert spec.env["CUDA_VISIBLE_DEVICES"] == ""
        real = parts.systems.spec_of(system, model, asked, 1, tmp_path, dry_run=False)
        assert "CUDA_VISIBLE_DEVICES" not in real.env


def test_host_memory_is_two_device_pools_unless_it_is_given(parts):
    """As HiCache takes by itself."""
    assert shared(parts).host_gb_of(131_072, 131_072) == 35
    assert shared(parts, host_gb=50).host_gb_of(131_072, 131_072) == 50
    assert shared(parts).host_gb_of(10, 10) == 1


def test_lmcache_that_is_not_there_says_why(parts, monkeypatch):
    """In a dry run always; else where the package is not installed."""
    absent = parts.systems.absent
    assert absent("tiered", dry_run=True) == ""
    assert "device memory" in absent("plain-uncapped", dry_run=True)
    assert "needs CUDA" in absent("lmcache", dry_run=True)

    def missing(name):
        raise parts.systems.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(parts.systems.importlib.metadata, "version", missing)
    assert "not installed" in absent("lmcache", dry_run=False)


def test_a_finished_cell_is_a_file_at_once_and_is_not_measured_again(parts, tmp_path):
    """What failed or is not there is tried again."""
    store = parts.store.Store(tmp_path / "out")
    store.begin(header_of(parts, tmp_path / "model"))
    done = parts.plan.Cell("plain", "ttft", 0, 512)
    failed = parts.plan.Cell("hicache", "ttft", 0, 512)
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
    assert broken == ["plain.ttft.512.0.json"]
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
    for name in ("source", "shared"):
        with pytest.raises(parts.settings.ProblemError, match=f"differs in {name}"):
            store.begin(first | {name: "other"})


def test_a_cell_keeps_its_failed_attempts_and_its_day(parts, tmp_path):
    """Also when it was measured in the end."""
    store = parts.store.Store(tmp_path)
    cell = parts.plan.Cell("hicache", "gate")
    for why in ("it broke", "it broke again"):
        store.put(cell, "failed", why)
    store.put(cell, "not there", "absent")
    told = store.put(cell, "ok", records="x")
    assert told["failed"] == ["it broke", "it broke again"]
    assert len(told["date"]) == len("2026-01-02")
    assert store.is_done(cell)


def test_how_long_a_request_may_take_follows_from_its_tokens(parts):
    """Minutes, so that one that hangs costs no hour."""
    patience_s = parts.settings.patience_s
    assert 60 <= patience_s(0) < patience_s(32_768) <= 300
    sizes = parts.settings.GPU
    for shape in (sizes.shared_prefix, sizes.multi_turn):
        groups = shape.num_groups(131_072, sizes.load_pools)
        assert 600 < shape.limit_s(groups) <= 1200
