"""The GPU session: its runner on small processes, and its stages' parts on a CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from sgl_tiered.cli.gpu_report import write_page
from sgl_tiered.engines.device.pools import CpuDevicePool
from sgl_tiered.pipelines.stream_pool import LoadWay

FOLDER = Path(__file__).parents[3] / "benchmarks/gpu"
_OURS = ("carry", "session", "stages", "engine", "movement")


@pytest.fixture
def load(monkeypatch):
    """Import a module of the session, with its folder on the path as when it is run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in list(sys.modules):
        if name.partition(".")[0] in _OURS:
            del sys.modules[name]


@pytest.fixture
def session(load):
    """The program as a module."""
    return load("session")


def entry(session, name, code, share=1.0, most_s=30.0, shows=()):
    """Return a stage that is a line of Python; it gets its file and its seconds."""
    return session.Entry(name, share, most_s, shows, (sys.executable, "-c", code))


OK = 'print(\'{"figures": {"a": 1}}\')'
WRITES = (
    "import sys, json, pathlib, time; pathlib.Path(sys.argv[1]).write_text("
    "json.dumps({'figures': {'half': 1}, 'records': [{'kind': 'first'}]})); "
)


def test_stages_that_end_badly_are_told_and_stop_nothing(session, tmp_path, capsys):
    """One fails, one hangs, one crashes, one prints no JSON; the last one runs."""
    entries = [
        entry(session, "fails", "print('before'); raise SystemExit('it broke')"),
        entry(session, "hangs", WRITES + "print('begun', flush=True); time.sleep(60)"),
        entry(session, "crashes", "import os; os.abort()"),
        entry(session, "mute", "print('done')"),
        entry(session, "absent", 'print(\'{"not_there": "no GPU"}\')'),
        entry(session, "good", OK),
    ]
    entries[1] = session.Entry("hangs", 1.0, 3.0, (), entries[1].command)
    summary = session.run_session(entries, tmp_path, 120.0, dry_run=True)
    assert summary["stages"] == {
        "fails": "failed",
        "hangs": "timed out",
        "crashes": "failed",
        "mute": "failed",
        "absent": "not there",
        "good": "ok",
    }
    assert summary["figures"] == {"a": 1}
    assert summary["why"]["fails"] == "exit status 1: it broke"
    assert summary["why"]["hangs"] == "killed after 3 s"
    assert "signal 6" in summary["why"]["crashes"]
    assert summary["why"]["mute"] == "it printed no JSON object at its end"
    assert summary["why"]["absent"] == "no GPU"
    told = json.loads((tmp_path / "session.json").read_text())
    assert told["header"]["dry_run"] is True
    assert told["header"]["source"]
    stages = told["stages"]
    assert "before" in stages["fails"]["tail"]
    # What one that was killed had found is kept; its figures are no results.
    assert stages["hangs"]["records"] == [{"kind": "first"}]
    assert stages["hangs"]["figures_so_far"] == {"half": 1}
    assert stages["hangs"]["figures"] == {}
    assert "begun" in stages["hangs"]["tail"]
    assert "tail" not in stages["good"]
    assert "==== mute" in (tmp_path / "log.txt").read_text()
    # However many stages there are, two files come back.
    assert {path.name for path in tmp_path.iterdir()} == {"session.json", "log.txt"}
    assert "timed out" in capsys.readouterr().out


def test_what_one_stage_leaves_of_its_time_is_for_the_next(session, tmp_path):
    """Limits are shares of what is left, and none is more than a stage's most."""
    code = 'import sys; print(\'{"figures": {"limit": %s}}\' % sys.argv[2])'
    entries = [
        entry(session, "one", code, share=3.0, most_s=20.0),
        entry(session, "two", code, share=1.0),
    ]
    session.run_session(entries, tmp_path, 45.0, dry_run=True)
    told = json.loads((tmp_path / "session.json").read_text())["stages"]
    assert told["one"]["limit_s"] == 20.0
    assert 20.0 < told["two"]["limit_s"] <= 30.0


def test_flashinfer_has_the_time_to_start(session):
    """Its import and its kernels take most of a minute; also where all use theirs."""
    left_s, limits = 540.0 - session._RESERVE_S, {}
    shares = sum(one.share for one in session.ENTRIES)
    for one in session.ENTRIES:
        limits[one.name] = min(one.most_s, left_s * one.share / shares)
        left_s, shares = left_s - limits[one.name], shares - one.share
    assert limits["flashinfer"] > 75.0
    assert min(limits.values()) > 20.0


def test_a_stage_without_time_is_told(session, tmp_path):
    """The budget is spent: nothing is begun, and the status says so."""
    entries = [entry(session, "late", OK)]
    summary = session.run_session(entries, tmp_path, 6.0, dry_run=True)
    assert summary["stages"] == {"late": "timed out"}
    assert summary["why"] == {"late": "no time was left of the budget"}


@pytest.mark.parametrize(
    ("kinds", "status", "why"),
    [
        (["answers", "control"], "ok", None),
        (["answers"], "failed", "shows no ['control']"),
        ([], "failed", "shows no ['answers', 'control']"),
        (["answers", "skipped"], "timed out", "no time was left for ['control']"),
    ],
)
def test_a_stage_that_shows_less_than_it_is_for_is_not_ok(
    session, tmp_path, kinds, status, why
):
    """Whatever it says of itself: one that did nothing has nothing wrong."""
    told = json.dumps({"figures": {}, "records": [{"kind": kind} for kind in kinds]})
    code = f"import sys, pathlib; pathlib.Path(sys.argv[1]).write_text({told!r}); {OK}"
    one = entry(session, "one", code, shows=("answers", "control"))
    summary = session.run_session([one], tmp_path, 60.0, dry_run=True)
    assert summary["stages"] == {"one": status}
    assert (why or "") in summary["why"].get("one", "")
    assert summary["figures"] == ({} if status == "failed" else {"a": 1})


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("orjson", "the Python module orjson is not installed"),
        ("cuda.bindings", "the Python module cuda.bindings is not installed"),
        ("sgl_tiered.gone", None),
        ("sgl_tiered_kernels.gone", None),
        ("sgl_tiered_workloads.gone", None),
        ("tests.gone", None),
    ],
)
def test_a_module_of_ours_that_is_gone_is_no_reason_to_be_not_there(
    session, module, told
):
    """Another package may be absent from a machine; not a part of the checkout."""
    assert session.not_installed(ModuleNotFoundError(name=module)) == told


def test_the_dry_run_is_green_and_shows_what_each_stage_is_for(
    session, tmp_path, capsys
):
    """As a user runs it: every stage, each control caught, and a page of it."""
    status = session.main(["--out", str(tmp_path), "--dry-run", "--budget", "540"])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    wanted = {one.name: "ok" for one in session.ENTRIES} | {"servers": "not there"}
    assert summary["stages"] == wanted, summary["why"]
    assert status == 0
    stages = json.loads((tmp_path / "session.json").read_text())["stages"]
    engine = stages["mini_engine"]["records"]
    controls = {one["control"]: one["wrong"] for one in engine if "control" in one}
    assert {"consumer", "layer_wait"} < set(controls)
    assert all(controls.values())
    assert sum(one["loads"] for one in engine if one["kind"] == "random") > 0
    assert stages["gpu_tests"]["figures"]["gpu_tests_collected"] > 20
    ways = {one["way"] for one in stages["copies"]["records"] if "way" in one}
    assert {"plain", "engines", "kernel_by_layer", "pages_scatter"} <= ways
    assert {"kernel_64_streams", "kernel_64_wide", "kernel_64_wide_streams"} <= ways
    tiles = {one["tile"] for one in stages["kv_gen"]["records"] if "tile" in one}
    assert {"64x64", "128x64", "128x64_4_stages"} <= tiles
    written, page = write_page(tmp_path)
    assert tmp_path / "report.md" in written
    assert page.num_stages == len(session.ENTRIES)
    assert "cannot be read" not in page.text
    assert page.text.count("Nothing was measured") == 1


def test_the_exit_status_is_of_the_stages(session, tmp_path, monkeypatch, capsys):
    """0 where all ran or are not there; the last line is one JSON object."""
    ran = {"entries": [entry(session, "one", OK)]}
    monkeypatch.setattr(session, "ENTRIES", ran["entries"])
    assert session.main(["--out", str(tmp_path), "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["stages"] == {
        "one": "ok"
    }
    monkeypatch.setattr(session, "ENTRIES", [entry(session, "one", "1 / 0")])
    assert session.main(["--out", str(tmp_path), "--dry-run"]) == 1
    with pytest.raises(SystemExit):
        session.main(["--only", "two"])


@pytest.mark.full
def test_every_stage_can_be_imported_without_what_a_bare_machine_lacks(session):
    """No SGLang, orjson, xxhash, msgspec or zmq: stand-ins, or nothing of theirs."""
    names = [one.name for one in session.ENTRIES if one.name != "servers"]
    code = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
absent = ("sglang", "orjson", "xxhash", "msgspec", "zmq", "flashinfer", "transformers")
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent and not stand_ins:
            raise ModuleNotFoundError(name, name=name)
stand_ins = []
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in absent else find(name, *a)
from stages import stage
stage.find_spec = importlib.util.find_spec
stage.use_checkout()
missing = stage.add_stand_ins()
blocked = set(absent) - set(missing)
absent = tuple(blocked)
sys.path = [p for p in sys.path if p]
for name in missing:
    sys.modules.pop(name, None)
    spec = importlib.util.spec_from_file_location(
        name, stage._STAND_INS / (name + ".py"))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
sys.meta_path.insert(0, Finder())
for name in {names!r}:
    importlib.import_module("stages." + name)
print(sorted(missing))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[0] == "['orjson', 'xxhash']"


def test_stand_ins_do_what_is_asked_of_them(load, monkeypatch):
    """Values of JSON come back, and hashes differ where bytes do."""
    import numpy as np

    folder = FOLDER / "stand_ins"
    modules = {}
    for name in ("orjson", "xxhash"):
        path = folder / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"stand_in_{name}", path)
        modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    json_form, hashes = modules["orjson"], modules["xxhash"]
    value = {"a": [1, 2.5, None, "ü"]}
    assert json_form.loads(json_form.dumps(value)) == value
    option = json_form.OPT_SERIALIZE_NUMPY | json_form.OPT_APPEND_NEWLINE
    assert json_form.dumps({"n": np.float32(0.5)}, option=option) == b'{"n":0.5}\n'
    page = np.arange(64, dtype=np.int32).reshape(4, 16)
    other = page.copy()
    other[3, 15] += 1
    digests = {hashes.xxh3_128_digest(one) for one in (page, other, page)}
    assert {len(one) for one in digests} == {16}
    assert len(digests) == 2
    assert 0 <= hashes.xxh3_64_intdigest(page) < 1 << 64
    told = hashes.xxh3_128(seed=3)
    told.update(page)
    assert len(told.digest()) == 16


def test_all_files_with_tests_for_a_gpu_are_run(load):
    """Those that only write about the marker are not."""
    stage = load("stages.gpu_tests")
    root = FOLDER.parents[1]
    marked = {
        path.relative_to(root)
        for path in (root / "tests").rglob("test_*.py")
        if "@pytest." + "mark.gpu" in path.read_text()
    }
    house = Path("tests/unit/house/test_conftest_rules.py")
    assert set(stage.test_files()) == marked - {house, _this_file(root)}
    assert Path("tests/unit/engines/test_offloaded_weights.py") in stage.test_files()


def _this_file(root):
    return Path(__file__).relative_to(root)


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize("way", LoadWay)
def test_the_played_engine_answers_right(load, way, newest_first):
    """Random hits and evictions on a tight pool, in an order that streams allow."""
    engine = load("stages.mini_engine")
    told = engine.played(11, way=way, newest_first=newest_first, num_requests=24)
    assert told["wrong"] == 0
    assert told["requests"] == 24
    assert told["loads"] > 0
    assert told["device_evicted"] > 0


def test_the_engine_begins_when_all_of_its_host_tier_is_pinned(load, monkeypatch):
    """Its cache has all slots at once, and a kernel cannot read what is not pinned."""
    stage, engine = load("stages.mini_engine"), load("engine.engine")
    monkeypatch.setattr("sgl_tiered.tiers.pinning.PIN_BYTES", 1 << 16)
    machine = load("engine.machine").PlayedMachine(3)
    pinned, starting = [], threading.current_thread()

    def register(address, num_bytes):
        if threading.current_thread() is not starting:
            time.sleep(0.02)
        pinned.append(num_bytes)
        return lambda: None

    monkeypatch.setattr(machine, "register", lambda setting: register)
    shape, sizes, _ = stage._PLAYED
    one = engine.Engine(machine, shape, sizes, way=LoadWay.KERNEL)
    assert len(pinned) > 2
    assert sum(pinned) == one.host.num_slots * one.host.slot_bytes
    one.close()


@pytest.mark.parametrize("dropped", ["layer_wait", "load_mark"])
def test_a_wait_that_is_left_out_is_caught(load, dropped):
    """The negative controls: some order of the device shows a wrong answer."""
    engine = load("stages.mini_engine")
    seeds = iter(range(200, 240))
    caught = any(
        engine.played(seed, way=list(LoadWay)[seed % 3], dropped=dropped)["wrong"]
        for seed in seeds
    )
    assert caught


def stage_of(load, tmp_path):
    """Return a stage in a dry run, with time enough."""
    return load("stages.stage").Stage(tmp_path / "one.json", 600.0, dry_run=True)


def test_a_stage_tells_each_record_at_once(load, tmp_path):
    """Raw seconds of both forwards, and a file that is whole at any time."""
    stage = stage_of(load, tmp_path)
    load("stages.layerkv").run(stage)
    told = json.loads((tmp_path / "one.json").read_text())
    kinds = [record["kind"] for record in told["records"]]
    assert kinds == ["layers", "acts"]
    assert all(len(told["records"][0][name]) == 2 for name in ("forward_s", "both_s"))
    assert set(told["figures"]) >= {"streamed_pageable", "acts_overlap", "kv_gen_ms"}


def test_a_streamed_forward_that_reads_stale_pages_ends_it(load, tmp_path, monkeypatch):
    """The check of the layers is one that can fail."""
    copier = load("movement.layers").CpuLayerCopier
    copy = copier.to_device

    def stale(self, layer, rows, physical, after):
        if layer != 3 or physical[0] < 16:
            copy(self, layer, rows, physical, after)

    monkeypatch.setattr(copier, "to_device", stale)
    with pytest.raises(AssertionError, match="another answer"):
        load("stages.layerkv").run(stage_of(load, tmp_path))


def test_a_rebuild_of_other_kv_ends_it(load, tmp_path, monkeypatch):
    """The check of what was rebuilt is one that can fail."""
    copier = load("movement.acts").CpuActCopier
    rebuild = copier.rebuild

    def wrong(self, layer, acts, physical, positions, after):
        rebuild(self, layer, acts, physical, positions - 1, after)

    monkeypatch.setattr(copier, "rebuild", wrong)
    with pytest.raises(AssertionError, match="another K"):
        load("stages.layerkv").run(stage_of(load, tmp_path))


def test_a_load_under_a_forward_is_measured(load, tmp_path):
    """The longer of both and the first layer's load are the least that is possible."""
    stage = load("stages.overlap")
    record = {
        "forward_s": [2.0, 1.0, 3.0],
        "load_s": [1.0],
        "first_layer_s": [0.5],
        "both_s": [2.75],
    }
    assert stage._efficiency(record) == pytest.approx(2.75 / 2.5)
    told = stage_of(load, tmp_path)
    stage.run(told)
    (overlap,) = told.records
    assert len(overlap["both_s"]) == 2
    assert overlap["load_bytes"] == 64 * 4 * 2 * 64 * 2


def test_an_offload_beside_a_forward_that_moves_nothing_ends_it(
    load, tmp_path, monkeypatch
):
    """A forward beside nothing is as fast as one by itself, which says nothing."""
    monkeypatch.setattr(CpuDevicePool, "store_pages", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="other bytes were offloaded"):
        load("stages.overlap").run(stage_of(load, tmp_path))


def test_copies_of_other_bytes_end_it(load, tmp_path, monkeypatch):
    """A gate that is red reports no speed."""
    copies = load("stages.copies")
    monkeypatch.setattr(
        load("stages.clocks").Device, "memmove", staticmethod(lambda *_: 0)
    )
    stage = stage_of(load, tmp_path)
    with pytest.raises(AssertionError, match="other bytes"):
        copies.run(stage)
    assert not any(one.get("way") == "engines" for one in stage.records)


def test_the_products_pool_is_told_all_bytes_that_it_moved(load):
    """Of all layers in both directions: a way that brings two at once is no faster."""
    place = load("movement.place").Place("cpu")
    copies = load("movement.copies")
    records = list(copies.measure_copies(place, [2048], 16 << 10, 1))
    assert [record["direction"] for record in records] == ["up", "down"]
    for record in records:
        assert record["num_bytes"] == record["pieces"] * record["piece_bytes"]
        assert record["pieces"] == 2 * copies.LAYERS * record["pages_moved"]


class PlayedHiCache:
    """SGLang's kernels as far as the stage calls them, by torch on a CPU."""

    def __init__(self, hicache, *, moves=True):
        self.calls = []
        self._hicache, self._moves = hicache, moves

    def can_use_hicache_jit_kernel(self, element_size, page_size):
        return True

    def can_use_write_back_jit_kernel(self, element_size):
        return element_size == 64

    def transfer_hicache_one_layer(self, k, v, at, from_k, from_v, from_at, page_size):
        self.calls.append("one")
        k[at], v[at] = from_k[from_at], from_v[from_at]

    def transfer_hicache_all_layer_staged_lf_pf(self, **given):
        self.calls.append("all")
        for part, name in enumerate("kv"):
            by_address = {one.data_ptr(): one for one in self._hicache._there[part]}
            for layer, address in enumerate(given[f"{name}_ptr_src"].tolist()):
                if self._moves:
                    given[f"dst_{name}"][given["dst_indices"], layer] = by_address[
                        address
                    ][given["src_indices"]]
        assert given["staging_k"].shape == (3 * 16, 4, 32)


def prepared(load, **changes):
    """Return HiCache's baseline over played kernels, in memory of this machine."""
    import numpy as np
    import torch

    device = load("stages.clocks").Device(True)
    hicache = load("stages.hicache").HiCache(device)
    hicache._kernels = PlayedHiCache(hicache, **changes)
    num_bytes = 2 * 4 * 6 * 16 * 64
    host = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    there = torch.zeros(num_bytes, dtype=torch.uint8)
    sizes = {"layers": 4, "pages": 3, "page_tokens": 16, "token_bytes": 64}
    assert hicache.prepare(host, there, **sizes) == ""
    return hicache


def test_hicache_moves_as_sglang_does(load):
    """Up a launch per layer; down all layers in one, to a token's layers in a row."""
    hicache = prepared(load)
    up, down = (hicache.copy(direction, None) for direction in ("up", "down"))
    assert hicache.is_right(up, "up")
    assert hicache._kernels.calls == ["one"] * 4
    hicache._kernels.calls.clear()
    hicache._there += 1
    assert hicache.is_right(down, "down")
    assert hicache._kernels.calls == ["all"]
    # page_first: the second layer of a token lies right behind its first one.
    assert hicache._kept.stride()[1:] == (4 * 32, 32, 1)


def test_a_baseline_that_moves_nothing_is_found_out(load):
    """Its speed would be endless."""
    hicache = prepared(load, moves=False)
    assert not hicache.is_right(hicache.copy("down", None), "down")


def test_plans_that_read_elsewhere_are_told_from_each_other(load, tmp_path):
    """FlashInfer's part, on a stand-in: with and without the layer's own indices."""
    stage = stage_of(load, tmp_path)
    load("stages.flashinfer").run(stage)
    layers = [record for record in stage.records if record["kind"] == "layers"]
    forms = [record["form"] for record in layers]
    assert forms == ["prefill", "decode", "decode_without_tensor_cores"]
    assert all(record["without_indices"] > 0.1 for record in layers)


SIZES = {"page_tokens": 4, "heads": (2, 2), "dim": 8}


def test_flashinfer_reads_what_tiers_load_and_what_is_rebuilt(load, tmp_path):
    """Both forms of both, and other answers before."""
    module, stage = load("stages.flashinfer"), stage_of(load, tmp_path)
    device = load("stages.clocks").Device(True)
    module._measure_kinds(stage, device, "stand-in", **SIZES)
    kinds = [(one["kind"], one["way"], one["form"]) for one in stage.records]
    assert kinds == [
        (*kind, form)
        for kind in (("tiers", "cpu"), ("acts", "rebuilt"))
        for form in ("prefill", "decode")
    ]
    assert all(one["before"] > 0.1 for one in stage.records)


@pytest.mark.parametrize("what", ["load_layer", "rebuild_kv"])
def test_flashinfer_tells_where_nothing_is_brought(load, tmp_path, monkeypatch, what):
    """A load, or a rebuild, that is left out is another answer."""
    module, stage = load("stages.flashinfer"), stage_of(load, tmp_path)
    device = load("stages.clocks").Device(True)
    owner = module if what == "rebuild_kv" else CpuDevicePool
    monkeypatch.setattr(owner, what, lambda *args, **how: None)
    with pytest.raises(AssertionError, match="off"):
        module._measure_kinds(stage, device, "stand-in", **SIZES)
    kinds = {one["kind"] for one in stage.records}
    assert kinds == ({"tiers", "acts"} if what == "rebuild_kv" else {"tiers"})


def test_a_backend_that_keeps_pages_of_its_plan_is_refused(load, tmp_path, monkeypatch):
    """One sentence names it; no figure is told, and the stage goes on."""
    module, stage = load("stages.flashinfer"), stage_of(load, tmp_path)
    monkeypatch.setattr(module._StandIn, "resolved_backend", "cudnn", raising=False)
    device = load("stages.clocks").Device(True)
    module._measure(stage, device, "auto", {"decode": 1}, **SIZES)
    (record,) = stage.records
    assert record["kind"] == "refused"
    assert "auto chooses cudnn, which copies the pages" in record["why"]
    assert not stage.figures


def test_a_backend_that_does_not_run_ends_the_stage_only_if_it_is_sglangs(
    load, tmp_path, monkeypatch
):
    """Of any other it is told, and what was found of SGLang's stays."""
    module, stage = load("stages.flashinfer"), stage_of(load, tmp_path)

    def refuses(*args):
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(module, "_planned", refuses)
    device = load("stages.clocks").Device(True)
    module._measure(stage, device, "auto", {"prefill": 7}, **SIZES)
    (record,) = stage.records
    assert record["kind"] == "refused"
    assert "prefill by auto does not run here" in record["why"]
    with pytest.raises(load("stages.stage").NotThereError, match="no kernel for this"):
        module._measure(stage, device, "fa2", {"prefill": 7}, **SIZES)


class OnCuda:
    """A stage's device in the place of one on CUDA."""

    def __init__(self, dry_run):
        self.is_cuda = not dry_run


@pytest.mark.parametrize("compiled", [False, True])
def test_flashinfer_without_a_compiler_loads_kernels_or_is_not_there(
    load, tmp_path, monkeypatch, compiled
):
    """It is told to compile nothing before it is imported, and for which card."""
    stage, missing = load("stages.flashinfer"), load("stages.stage").NotThereError
    for name in ("FLASHINFER_DISABLE_JIT", "FLASHINFER_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(stage, "Device", OnCuda)
    monkeypatch.setattr(stage, "_has_compiler", lambda: False)
    monkeypatch.setattr(stage, "_is_compiled", lambda: compiled)
    monkeypatch.setattr(stage.torch.cuda, "get_device_capability", lambda: (9, 0))
    seen = {}

    class Package:
        """Notes in what environment it is imported, and is not there."""

        def find_spec(self, name, path=None, target=None):
            if name == "flashinfer":
                seen.update(stage.os.environ)
                raise ImportError("as on a machine without it")

    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Package(), *sys.meta_path])
    told = load("stages.stage").Stage(tmp_path / "one.json", 600.0, dry_run=False)
    try:
        with pytest.raises(missing, match="without it" if compiled else "jit-cache"):
            stage.run(told)
    finally:
        for name in ("FLASHINFER_DISABLE_JIT", "FLASHINFER_CUDA_ARCH_LIST"):
            stage.os.environ.pop(name, None)
    assert seen.get("FLASHINFER_DISABLE_JIT") == ("1" if compiled else None)
    assert seen.get("FLASHINFER_CUDA_ARCH_LIST") == ("9.0a" if compiled else None)


def test_a_layered_server_is_started_with_what_cuda_asks_for(load):
    """The flags of the benchmark pass the check that a CUDA server makes."""
    from types import SimpleNamespace

    from sgl_tiered.serving.option_clashes import refuse_on_cuda
    from sgl_tiered.serving.option_reader import read_options

    servers = load("movement.servers")
    flags = servers.CUDA_FLAGS[:2] + servers.CUDA_FLAGS[3:]
    given = dict(zip(*[iter(flags)] * 2, strict=True))
    names = {flag[2:].replace("-", "_"): value for flag, value in given.items()}
    refuse_on_cuda(SimpleNamespace(disable_overlap_schedule=True, **names))
    told = dict(flag.split("=") for flag in servers.layered_flags())
    settings = {
        flag.removeprefix("--tiered-").replace("-", "_"): value
        for flag, value in told.items()
    }
    layers = read_options(settings).layerkv
    assert layers is not None
    assert layers.retain == 0
    assert layers.staging_bytes * 4 < layers.host_bytes


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("5, 1, 16, 16\n4, 4, 8, 16\n", (5, 1, 16, 16)),
        ("[N/A], [N/A], 16, 16", (None, None, 16, 16)),
        ("", (None, None, None, None)),
    ],
)
def test_the_link_is_told_as_far_as_nvidia_smi_knows_it(load, monkeypatch, said, found):
    """Of the first GPU; a report needs its generation and its lanes."""
    facts = load("stages.facts")
    monkeypatch.setattr(facts, "_ask", lambda *command: said)
    link = facts._link()
    assert tuple(link.values()) == found
    assert next(iter(link)) == "generation"


def test_first_tokens_tell_how_much_kv_a_token_has(load):
    """So that a load's time can be set beside the link's."""
    engine = load("stages.mini_engine")
    shape = engine._CUDA[0]
    # A page of 16 tokens is 1 MiB.
    assert shape.page_tokens * shape.token_bytes == 1 << 20
    run = engine._Run(engine.PlayedMachine(7), *engine._PLAYED, way=LoadWay.KERNEL)
    told = run.first_tokens((48,), repeats=1)
    run.close()
    assert told["kv_token_bytes"] == engine._PLAYED[0].token_bytes
    assert set(told["seconds"]) == {"computed_48", "host_48", "device_48"}


def test_what_hicaches_kernels_need_is_carried(load, tmp_path):
    """Their sources, under packages that import nothing else of SGLang."""
    sglang = importlib.util.find_spec("sglang")
    if sglang is None:
        pytest.skip("not run: SGLang is not installed")
    program = load("carry")
    source = Path(sglang.origin).parent
    assert 0 < program.carry(source, tmp_path) < 16 << 20
    package = tmp_path / "sglang"
    assert (package / "kernels/jit/csrc/kvcacheio/hicache.cuh").exists()
    assert (package / "kernels/ops/kvcache/hicache.py").exists()
    assert not (package / "kernels/__init__.py").read_text()
