"""The GPU benchmark's plumbing, on a CPU."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[3] / "benchmarks/gpu/run_all.py"


@pytest.fixture
def script(monkeypatch):
    """The program as a module, with its folder on the path as when it is run."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("gpu_run_all", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_dry_run_writes_every_record(script, tmp_path, capsys):
    """Header, copies both ways by size, the overlap, and one JSON line at the end."""
    assert script.main(["--dry-run", "--out", str(tmp_path)]) == 0
    lines = [
        json.loads(line)
        for line in (tmp_path / "records.jsonl").read_text().splitlines()
    ]
    assert lines[0]["kind"] == "header"
    assert lines[0]["facts"]["dry_run"] is True
    copies = [
        (r["direction"], r["piece_bytes"]) for r in lines[1:] if r["kind"] == "copy"
    ]
    assert copies == [(way, s) for s in (4096, 16384) for way in ("up", "down")]
    (overlap,) = [r for r in lines if r["kind"] == "overlap"]
    assert all(len(overlap[name]) == 2 for name in ("forward_s", "both_s", "load_s"))
    assert overlap["load_bytes"] == 64 * 4 * 2 * 64 * 2
    (layers,) = [r for r in lines if r["kind"] == "layers"]
    assert all(len(layers[name]) == 2 for name in ("forward_s", "both_s", "down_s"))
    assert layers["stream_bytes"] == overlap["load_bytes"]
    (acts,) = [r for r in lines if r["kind"] == "acts"]
    assert acts["act_page_bytes"] * 2 == acts["kv_page_bytes"]
    assert all(len(acts[name]) == 2 for name in ("kv_gen_s", "load_kv_s", "both_s"))
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["dry_run"] is True
    assert summary["acts_overlap"] > 0.0
    assert set(summary["streamed_efficiency"]) == {"pageable"}
    assert set(summary["overlap_efficiency"]) == {"cpu"}


def test_wrong_bytes_end_it_without_figures(script, tmp_path, capsys, monkeypatch):
    """A gate that is red reports no speed and writes no record."""
    from movement.place import Store

    monkeypatch.setattr(Store, "wanted", lambda self, layer: self.layer(layer) ^ 1)
    assert script.main(["--dry-run", "--out", str(tmp_path)]) == 1
    assert "WRONG BYTES" in capsys.readouterr().err
    assert not (tmp_path / "records.jsonl").exists()


def test_a_streamed_forward_that_reads_stale_pages_ends_it(
    script, tmp_path, capsys, monkeypatch
):
    """The check of the layers is one that can fail."""
    from movement.layers import CpuLayerCopier

    load = CpuLayerCopier.to_device

    def stale(self, layer, rows, physical, after):
        if layer != 3 or physical[0] < 16:
            load(self, layer, rows, physical, after)

    monkeypatch.setattr(CpuLayerCopier, "to_device", stale)
    assert script.main(["--dry-run", "--out", str(tmp_path)]) == 1
    assert "another answer" in capsys.readouterr().err


def test_a_rebuild_of_other_kv_ends_it(script, tmp_path, capsys, monkeypatch):
    """The check of what was rebuilt is one that can fail."""
    from movement.acts import CpuActCopier

    rebuild = CpuActCopier.rebuild

    def wrong(self, layer, acts, physical, positions, after):
        rebuild(self, layer, acts, physical, positions - 1, after)

    monkeypatch.setattr(CpuActCopier, "rebuild", wrong)
    assert script.main(["--dry-run", "--out", str(tmp_path)]) == 1
    assert "another K" in capsys.readouterr().err


def test_without_a_device_it_says_what_to_do(script, capsys):
    """A machine without CUDA is told of the dry run."""
    if script.torch.cuda.is_available():
        pytest.skip("not run: there is a device")
    with pytest.raises(SystemExit):
        script.main([])
    assert "--dry-run" in capsys.readouterr().err


def test_efficiency_counts_what_cannot_overlap(script):
    """The longer of both and the first layer's load are the least that is possible."""
    record = {
        "forward_s": [2.0, 1.0, 3.0],
        "load_s": [1.0],
        "first_layer_s": [0.5],
        "both_s": [2.75],
        "forward_beside_offload_s": [2.1],
    }
    assert script._efficiency(record) == pytest.approx(2.75 / 2.5)
    assert script._offload_cost(record) == pytest.approx(1.05)


def test_servers_that_cannot_run_are_named(script, monkeypatch):
    """A machine without SGLang or FlashInfer gets a record that says so."""
    monkeypatch.setattr(script, "what_is_missing", lambda is_cuda: "flashinfer")
    args = SimpleNamespace(dry_run=False, servers="auto", out=None)
    (record,) = script._serve(args)
    assert "flashinfer is not installed" in script._line(record)
    assert script._summary([record]) == {"servers_not_run": "flashinfer"}
    for dry_run, servers in ((True, "auto"), (False, "off")):
        args = SimpleNamespace(dry_run=dry_run, servers=servers, out=None)
        assert list(script._serve(args)) == []


def test_wrong_answers_end_it_without_figures(script, tmp_path, capsys, monkeypatch):
    """A gate that is red reports no speed and writes no record."""

    def differ(out, *, is_cuda, repeats):
        raise AssertionError("an answer differs")
        yield

    monkeypatch.setattr(script, "_measure", lambda place, args: [])
    monkeypatch.setattr(script, "measure_servers", differ)
    monkeypatch.setattr(script, "what_is_missing", lambda is_cuda: "")
    told = ["--dry-run", "--servers", "on", "--out", str(tmp_path)]
    assert script.main(told) == 1
    assert "an answer differs" in capsys.readouterr().err
    assert not (tmp_path / "records.jsonl").exists()


def test_times_of_servers_are_told_over_plain(script):
    """Medians, and what was compared stands before them."""
    record = {
        "kind": "servers",
        "exact_fraction": 1.0,
        "layered": [{"mean_ttft_s": s, "total_s": 4.0} for s in (1.0, 2.0, 9.0)],
        "plain": [{"mean_ttft_s": 4.0, "total_s": 2.0}],
    }
    assert script._summary([record]) == {
        "servers_exact_fraction": 1.0,
        "servers_mean_ttft_s_over_plain": 0.5,
        "servers_total_s_over_plain": 2.0,
    }
    assert "100%" in script._line(record)


def test_a_layered_server_is_started_with_what_cuda_asks_for(script):
    """The flags of the benchmark pass the check that a CUDA server makes."""
    from movement.servers import CUDA_FLAGS, layered_flags

    from sgl_tiered.engines.sglang.layered.settings import read_layerkv, refuse_on_cuda

    given = dict(zip(*[iter(CUDA_FLAGS[:2] + CUDA_FLAGS[3:])] * 2, strict=True))
    names = {flag[2:].replace("-", "_"): value for flag, value in given.items()}
    refuse_on_cuda(SimpleNamespace(disable_overlap_schedule=True, **names))
    flags = dict(flag.split("=") for flag in layered_flags())
    settings = {
        flag.removeprefix("--tiered-").replace("-", "_"): value
        for flag, value in flags.items()
    }
    del settings["load_policy"]
    told = read_layerkv(settings)
    assert told is not None
    assert told.retain == 0
    assert told.staging_bytes * 4 < told.host_bytes
