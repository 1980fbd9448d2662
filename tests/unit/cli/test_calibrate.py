"""``sgl-tiered calibrate``: known servers give known figures, and faults are said."""

import json
import stat
from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.cli import main as cli
from sgl_tiered.cli.calibrate import calibrate_server, render
from sgl_tiered.cli.measure import Limits, Measurer
from sgl_tiered.cost.calibration import read_calibration
from sgl_tiered.errors import ConfigError
from tests.unit.cli import synthetic_server as synthetic

CREATED = "2026-01-01T00:00:00+00:00"


def calibrate(server, budget_s=170.0):
    return calibrate_server(server, np.random.default_rng(0), budget_s, CREATED)


def test_known_coefficients_are_recovered():
    """Prefill, decode, request and every link come back as the server has them."""
    found, notes = calibrate(synthetic.SyntheticServer())
    assert found.prefill.overhead_s == pytest.approx(synthetic.PASS_S, rel=1e-3)
    assert found.prefill.token_s == pytest.approx(synthetic.TOKEN_S, rel=1e-3)
    assert found.prefill.pair_s == pytest.approx(synthetic.PAIR_S, rel=1e-3)
    assert found.prefill.alpha == pytest.approx(2e-4 * 2e11 / 2e7, rel=1e-3)
    assert found.prefill.quality.r2 > 0.9999
    assert found.decode.step_s == pytest.approx(synthetic.STEP_S, rel=1e-3)
    assert found.decode.request_s == pytest.approx(synthetic.BATCH_S, rel=1e-3)
    assert found.decode.context_token_s == pytest.approx(synthetic.CONTEXT_S, rel=1e-2)
    assert found.request_overhead_s == pytest.approx(synthetic.REQUEST_S, rel=1e-3)
    edges = {f"{link.source}->{link.target}" for link in found.links}
    assert edges == {"device->host", "host->device", "host->disk", "disk->host"}
    for link in found.links:
        latency_s, bandwidth = synthetic.LINKS[f"{link.source}->{link.target}"]
        assert link.latency_s == pytest.approx(latency_s, rel=1e-3)
        assert link.bytes_per_s == pytest.approx(bandwidth, rel=1e-3)
        assert link.emulated == ("disk" in (link.source, link.target))
    assert found.link("host", "device").beta == pytest.approx(2.0, rel=1e-3)
    assert found.link("device", "host").beta == pytest.approx(4.0, rel=1e-3)
    assert found.link("disk", "host").beta is None
    assert notes == []


def test_the_links_of_a_cxl_tier_are_measured():
    """Every edge of a chain of three tiers comes back, none is missed or mixed up."""
    found, notes = calibrate(synthetic.SyntheticServer(cxl=True))
    edges = {f"{link.source}->{link.target}" for link in found.links}
    assert edges == set(synthetic.LINKS) - {"host->disk", "peer->host"}
    for link in found.links:
        latency_s, bandwidth = synthetic.LINKS[f"{link.source}->{link.target}"]
        assert link.latency_s == pytest.approx(latency_s, rel=1e-3)
        assert link.bytes_per_s == pytest.approx(bandwidth, rel=1e-3)
    assert notes == []


def test_noise_is_averaged_and_shown():
    """With 3 % noise the predictions are within 5 %, and the table shows the noise."""
    found, notes = calibrate(synthetic.SyntheticServer(noise=0.03))
    for context, new in ((0, 64), (0, 1000), (2048, 512)):
        truth = (
            synthetic.PASS_S
            + synthetic.TOKEN_S * new
            + synthetic.PAIR_S * new * (context + (new + 1) / 2)
        )
        assert found.prefill.seconds(context, new) == pytest.approx(truth, rel=0.05)
    assert found.link("disk", "host").bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert found.prefill.quality.max_relative_residual > 1e-3
    text = "\n".join(render(found, notes))
    for words in ("prefill pass", "decode step", "disk -> host", "GB/s", "EMULATED"):
        assert words in text
    assert "warning" not in text


def test_cached_prompts_are_fitted_by_place():
    """Each place costs what its links do; a peer is asked for nothing it has not."""
    peer = synthetic.SyntheticServer()
    server = synthetic.SyntheticServer(cxl=True, loads_take_time=True, peer=peer)
    rng = np.random.default_rng(0)
    found, notes = calibrate_server(server, rng, 170.0, CREATED, peer)
    fit = found.caching
    assert fit.message_s == pytest.approx(synthetic.REQUEST_S, rel=1e-3)
    assert fit.pass_s == pytest.approx(synthetic.PASS_S, rel=1e-3)
    assert fit.token_s == pytest.approx(synthetic.TOKEN_S, rel=1e-3)
    assert fit.quality.r2 > 0.9999
    ways = {
        "host": ["host->device"],
        "cxl": ["cxl->device"],
        "disk": ["disk->host", "host->device"],
        "peer": ["peer->host", "host->device"],
    }
    assert [place.location for place in fit.locations] == list(ways)
    token_bytes = synthetic.MODEL.kv_bytes_per_token
    for place in fit.locations:
        links = [synthetic.LINKS[edge] for edge in ways[place.location]]
        latency_s = sum(link[0] for link in links)
        token_s = token_bytes * sum(1 / link[1] for link in links)
        assert place.request_s == pytest.approx(latency_s, rel=1e-2)
        assert place.token_s == pytest.approx(token_s, rel=1e-2)
        assert not place.overlaps
    text = "\n".join(render(found, notes))
    assert "cached in peer" in text
    assert "pays from" in text


def test_what_is_recomputed_all_the_same_is_no_sample():
    """A planner that loads nothing leaves computing alone in the model."""
    found, _ = calibrate(synthetic.SyntheticServer(load=False))
    assert found.caching.locations == ()
    assert found.caching.token_s == pytest.approx(synthetic.TOKEN_S, rel=1e-3)


def test_a_poor_fit_is_warned_about():
    """Times that no line explains are written, and the table says so."""
    found, _ = calibrate(synthetic.SyntheticServer(noise=0.9))
    text = "\n".join(render(found, []))
    assert "the fit is poor" in text


def test_a_server_without_disk_or_loads():
    """What did not move is no link, and the notes say which."""
    found, notes = calibrate(synthetic.SyntheticServer(disk=False, load=False))
    assert found.link("host", "device") is None
    assert found.link("host", "disk") is None
    assert found.link("device", "host") is not None
    assert [note for note in notes if "host to device" in note]
    assert not [note for note in notes if "disk" in note]


def test_time_is_kept():
    """A short budget leaves points out, names them, and is about kept."""
    slow = synthetic.SyntheticServer()
    found, notes = calibrate(slow, 20.0)
    assert slow.time_s - 100.0 < 30.0
    assert [note for note in notes if note.startswith("Prefill: no time for")]
    assert found.prefill is not None


def test_without_chunks_the_decode_step_is_the_pass():
    """Where every prompt is one pass, a decode step says what a pass costs."""
    model = replace(synthetic.MODEL, chunk_tokens=None)
    found, _ = calibrate(synthetic.SyntheticServer(model=model))
    one_step_s = synthetic.STEP_S + synthetic.BATCH_S
    assert found.prefill.overhead_s == pytest.approx(one_step_s, rel=1e-2)
    assert found.prefill.overhead_s + found.request_overhead_s == pytest.approx(
        synthetic.PASS_S + synthetic.REQUEST_S, rel=1e-2
    )


def test_somebody_else_is_noticed():
    """Prompt tokens that are not ours make a note."""
    _, notes = calibrate(synthetic.SyntheticServer(foreign_tokens=500))
    assert [note for note in notes if "somebody else used it" in note]


def test_a_failing_request_ends_it():
    """A request that the server refuses is no measurement."""
    server = synthetic.SyntheticServer()
    server.error = "HTTP 500: out of memory"
    with pytest.raises(ConfigError, match="out of memory"):
        calibrate(server)


def test_a_busy_server_is_waited_for_and_given_up():
    """A drop is tried again while requests run, but not for ever."""
    server = synthetic.SyntheticServer()
    server.busy_drops = 3
    calibrate(server)
    assert server.dropped
    server.busy_drops = 10**9
    with pytest.raises(ConfigError, match="busy with other requests"):
        calibrate(server)


def test_a_plugin_of_another_version_is_refused():
    """A server that describes its model otherwise is refused in a sentence."""
    server = synthetic.SyntheticServer()
    stats = server.stats()
    stats["served"]["model"]["more"] = 1
    server.stats = lambda: stats
    with pytest.raises(ConfigError, match="same version"):
        calibrate(server)


@pytest.mark.parametrize("pool_tokens", [64, 200])
def test_a_tiny_pool_is_no_crash(pool_tokens):
    """A pool that holds few points gives what it can."""
    limits = Limits(100, pool_tokens, 32768, 16, None)
    rng = np.random.default_rng(0)
    measured = Measurer(synthetic.SyntheticServer(), limits, rng, 170.0).run()
    assert measured.tiny_s > 0
    assert all(s.new_tokens <= pool_tokens // 2 for s in measured.prefill)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_in_process_the_links_are_measured(tmp_path, model, capsys):
    """Without a server a file of links is written, and what is missing is said."""
    out, disk = tmp_path / "c.json", tmp_path / "disk"
    argv = ["calibrate", "--model", str(model), "--disk-path", str(disk)]
    assert cli.main([*argv, "--out", str(out)]) == 0
    found = read_calibration(out)
    assert found.method == "process"
    assert found.prefill is None
    assert found.decode is None
    assert found.model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert found.link("disk", "host").bytes_per_s > 0
    assert found.link("host", "disk").bytes_per_s > 0
    assert list(disk.iterdir()) == []
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert "need a server" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--url", "nowhere"], "is no address"),
        (["--url", "http://127.0.0.1:9"], "no server answers"),
        (["--model", "{tmp}"], "config.json cannot be read"),
        (["--model", "{tmp}/tiny", "--kv-dtype", "int3"], "--kv-dtype"),
        (["--model", "{tmp}/tiny", "--page-size", "0"], "below 1"),
        (["--model", "{tmp}/tiny", "--disk-path", "{tmp}/file"], "--disk-path"),
        (["--model", "{tmp}/tiny", "--out", "{tmp}/no/c.json"], "--out"),
    ],
)
def test_wrong_use_is_one_sentence(tmp_path, model, capsys, argv, words):
    """What cannot work ends with code 2 and a sentence, and writes nothing."""
    (tmp_path / "file").write_text("")
    argv = [word.replace("{tmp}", str(tmp_path)) for word in argv]
    out = tmp_path / "c.json"
    assert cli.main(["calibrate", "--out", str(out), *argv]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_a_config_that_says_nothing_is_refused(tmp_path, model, capsys):
    """A config.json of another kind is refused with its path."""
    (model / "config.json").write_text('["x"]')
    out = tmp_path / "c.json"
    assert cli.main(["calibrate", "--model", str(model), "--out", str(out)]) == 2
    assert "is not understood" in capsys.readouterr().err
