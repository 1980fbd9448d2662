"""Our flags in SGLang's command line: known, checked, refused in one sentence."""

import json
import re
import subprocess
import sys

import pytest

from sgl_tiered.serving.option_clashes import RUST_ENV
from sgl_tiered.serving.option_reader import FAULT_ENV
from sgl_tiered.serving.options import CONFIG, OPTIONS
from tests.contract.story_support import told_once

pytestmark = pytest.mark.sglang

ON = ["--radix-cache-backend", "tiered"]
PD = ["--disaggregation-transfer-backend=tiered"]
GOOD = {
    "all": [
        *ON,
        "--tiered-host-size=64MB",
        "--tiered-cxl=emulate:memory",
        "--tiered-cxl-size=32MB",
        "--tiered-disk-path={tmp}/disk",
        "--tiered-disk-size=1GB",
        "--tiered-disk-threads=4",
        "--tiered-disk-io=threads",
        "--tiered-staging-size=8MiB",
        "--tiered-eviction-policy=fifo",
        "--tiered-write-policy=on-evict",
        "--tiered-offload-threshold=0.8",
        "--tiered-disk-admission=second-hit",
        "--tiered-demote-policy=on-evict",
        "--tiered-load-policy=always",
        "--tiered-order=cost",
        "--tiered-prefetch=car",
        "--tiered-prefetch-to=device",
        "--tiered-log-interval=5",
        "--tiered-seed=3",
        "--tiered-explain-last=50",
        "--tiered-encoding=int4",
        "--tiered-lossy-default=allow",
        "--tiered-emulate=host:latency=0.001",
    ],
    "pool ranks": [*ON, "--tiered-pool=local", "--tp-size=2"],
    "layerkv on": [
        *ON,
        "--page-size=16",
        "--disable-overlap-schedule",
        "--tiered-layerkv=on",
        "--tiered-layerkv-host-size=64MB",
        "--tiered-layerkv-decode=stream",
        "--tiered-layerkv-retain=2",
        "--tiered-layerkv-staging-size=1MB",
        "--tiered-layerkv-guard=off",
    ],
    "activations": [
        *ON,
        "--page-size=16",
        "--disable-overlap-schedule",
        "--tiered-layerkv=on",
        "--tiered-activations=0.5",
        "--tiered-activations-device-size=1MB",
        "--tiered-emulate=host:bandwidth=1GB",
        "--tiered-emulate-weights=2MB",
    ],
    "activations auto": [
        *ON,
        "--page-size=16",
        "--disable-overlap-schedule",
        "--tiered-layerkv=on",
        "--tiered-activations=auto",
    ],
    "sparse": [
        *ON,
        "--page-size=16",
        "--tiered-sparsity=load",
        "--tiered-sparsity-keep=0.25",
        "--tiered-sparsity-policy=snapkv",
        "--tiered-sparsity-queries=512",
    ],
    "sparse encoded": [
        *ON,
        "--page-size=64",
        "--tiered-sparsity=store",
        "--tiered-encoding=int8",
    ],
    "pool": [
        *ON,
        "--tiered-pool=file:{tmp}/pool",
        "--tiered-pool-name=b-1",
        "--tiered-pool-host=127.0.0.1",
        "--tiered-pool-transport=loopback",
        "--tiered-pool-keys={tmp}",
    ],
    "prefill": [*PD, "--disaggregation-mode=prefill", "--tiered-pd-caching=0"],
    "decode": [
        *ON,
        *PD,
        "--disaggregation-mode=decode",
        "--tiered-pd-caching=3",
        "--tiered-pd-transport=loopback",
        "--tiered-pd-returns=always",
        "--tiered-pool=file:{tmp}/pool",
    ],
    "prefill layerkv": [
        *ON,
        *PD,
        "--disaggregation-mode=prefill",
        "--page-size=16",
        "--tiered-layerkv=on",
    ],
    "file": [*ON, "--tiered-config={tmp}/good.toml"],
    "plain": [],
}
# Name -> arguments, the flag that the sentence names.
BAD = {
    "diffusion": ([*ON, "--dllm-algorithm=LowConfidence"], "--dllm-algorithm"),
    "other role": ([*ON, "--enable-pd-role-switch"], "--enable-pd-role-switch"),
    "target floor": (
        [*ON, "--tiered-admission=slo", "--tiered-slo-ttft=1", "--tiered-slo-floor=2"],
        "--tiered-slo-floor",
    ),
    "lossy word alone": (
        [*ON, "--tiered-lossy-default=allow"],
        "--tiered-lossy-default",
    ),
    "encoding layerkv": (
        [
            *ON,
            "--page-size=16",
            "--disable-overlap-schedule",
            "--tiered-layerkv=on",
            "--tiered-encoding=int8",
        ],
        "--tiered-encoding",
    ),
    "layerkv off": ([*ON, "--tiered-layerkv-retain=2"], "--tiered-layerkv-retain"),
    "activations alone": ([*ON, "--tiered-activations=1"], "--tiered-activations:"),
    "activations share": (
        [*ON, "--page-size=16", "--tiered-layerkv=on", "--tiered-activations=2"],
        "--tiered-activations:",
    ),
    "activations lora": (
        [
            *ON,
            "--page-size=16",
            "--disable-overlap-schedule",
            "--tiered-layerkv=on",
            "--tiered-activations=1",
            "--enable-lora",
        ],
        "--tiered-activations: does not go with --enable-lora",
    ),
    "weights": (
        [
            *ON,
            "--page-size=16",
            "--disable-overlap-schedule",
            "--tiered-layerkv=on",
            "--tiered-emulate-weights=2MB",
        ],
        "--tiered-emulate-weights: needs an emulated link",
    ),
    "layerkv pages": (
        [*ON, "--tiered-layerkv=on", "--page-size=1"],
        "--tiered-layerkv",
    ),
    "sparse off": ([*ON, "--tiered-sparsity-keep=0.5"], "--tiered-sparsity-keep"),
    "sparse budget": (
        [*ON, "--tiered-sparsity=load", "--tiered-sparsity-budget=0.1"],
        "--tiered-sparsity-budget: needs a profile",
    ),
    "sparse profile": (
        [*ON, "--tiered-sparsity=load", "--tiered-sparsity-profile={tmp}/none.json"],
        "--tiered-sparsity-profile",
    ),
    "sparse pages": (
        [*ON, "--tiered-sparsity=load", "--page-size=1"],
        "--tiered-sparsity",
    ),
    "sparse ranks": (
        [*ON, "--tiered-sparsity=load", "--tp-size=2"],
        "--tiered-sparsity: does not go with --tp-size",
    ),
    "sparse and layerkv": (
        [*ON, "--tiered-sparsity=load", "--tiered-layerkv=on", "--page-size=16"],
        "--tiered-sparsity",
    ),
    "pool alone": (["--tiered-pool=local"], "--tiered-pool: has no effect without"),
    "pool off": ([*ON, "--tiered-pool-name=a"], "--tiered-pool-name"),
    "pool url": ([*ON, "--tiered-pool=redis://a"], "--tiered-pool: 'redis"),
    "pool name": (
        [*ON, "--tiered-pool=local", "--tiered-pool-name=a b"],
        "--tiered-pool-name",
    ),
    "pool host": (
        [*ON, "--tiered-pool=local", "--tiered-pool-host=10.0.0.1"],
        "--tiered-pool-host: 10.0.0.1 can be reached from other machines",
    ),
    "pool keys": (
        [*ON, "--tiered-pool=local", "--tiered-pool-keys={tmp}/none"],
        "--tiered-pool-keys",
    ),
    "pool transport": (
        [
            *ON,
            "--tiered-pool=local",
            "--tiered-pool-transport=loopback",
            "--tiered-pool-host=10.0.0.1",
            "--tiered-pool-keys={tmp}",
        ],
        "--tiered-pool-transport",
    ),
    "pool activations": (
        [
            *ON,
            "--page-size=16",
            "--disable-overlap-schedule",
            "--tiered-layerkv=on",
            "--tiered-activations=1",
            "--tiered-pool=local",
        ],
        "--tiered-pool: does not go with --tiered-activations",
    ),
    "pool sparse": (
        [*ON, "--page-size=16", "--tiered-sparsity=load", "--tiered-pool=local"],
        "--tiered-pool: does not go with --tiered-sparsity",
    ),
    "no backend": (["--tiered-host-size=1GB"], "--tiered-host-size"),
    "size": ([*ON, "--tiered-host-size=lots"], "--tiered-host-size"),
    "zero": ([*ON, "--tiered-host-size=0"], "--tiered-host-size"),
    "too large": ([*ON, "--tiered-host-size=9000TB"], "--tiered-host-size"),
    "cxl": ([*ON, "--tiered-cxl=tape", "--tiered-cxl-size=1MB"], "--tiered-cxl:"),
    "cxl without place": ([*ON, "--tiered-cxl-size=1GB"], "--tiered-cxl-size"),
    "disk without path": ([*ON, "--tiered-disk-size=1GB"], "--tiered-disk-size"),
    "disk path": ([*ON, "--tiered-disk-path={tmp}/a-file"], "--tiered-disk-path"),
    "disk size": (
        [*ON, "--tiered-disk-path={tmp}/disk", "--tiered-disk-size=big"],
        "--tiered-disk-size",
    ),
    "threads": ([*ON, "--tiered-disk-threads=0"], "--tiered-disk-threads"),
    "staging": ([*ON, "--tiered-staging-size=0"], "--tiered-staging-size"),
    "prefetch to": ([*ON, "--tiered-prefetch-to=device"], "--tiered-prefetch-to"),
    "interval": ([*ON, "--tiered-log-interval=-1"], "--tiered-log-interval"),
    "interval nan": ([*ON, "--tiered-log-interval=nan"], "--tiered-log-interval"),
    "seed": ([*ON, "--tiered-seed=-1"], "--tiered-seed"),
    "explain": ([*ON, "--tiered-explain-last=-1"], "--tiered-explain-last"),
    "threshold": (
        [*ON, "--tiered-offload-threshold=90"],
        "--tiered-offload-threshold",
    ),
    "emulate": ([*ON, "--tiered-emulate=tape:latency=1"], "--tiered-emulate"),
    "calibration": (
        [*ON, "--tiered-calibration={tmp}/good.toml"],
        "--tiered-calibration",
    ),
    "fault": ([*ON, "--tiered-fault-corrupt=zero"], "--tiered-fault-corrupt"),
    "emulated fault": ([*ON, "--tiered-emulate=host:fault=error"], "--tiered-emulate"),
    "file missing": ([*ON, "--tiered-config={tmp}/none.toml"], "--tiered-config"),
    "file key": ([*ON, "--tiered-config={tmp}/key.toml"], "--tiered-config"),
    "file syntax": ([*ON, "--tiered-config={tmp}/syntax.toml"], "--tiered-config"),
    "file value": ([*ON, "--tiered-config={tmp}/value.toml"], "--tiered-load-policy"),
    "pdmux": ([*ON, "--enable-pdmux"], "--enable-pdmux"),
    "hicache": ([*ON, "--enable-hierarchical-cache"], "--enable-hierarchical-cache"),
    "no radix cache": ([*ON, "--disable-radix-cache"], "--disable-radix-cache"),
    "two orders": (
        [*ON, "--tiered-order=car", "--schedule-policy=lpm"],
        "--tiered-order: car and --schedule-policy lpm both",
    ),
    "order and priorities": (
        [*ON, "--tiered-order=cost", "--enable-priority-scheduling"],
        "--tiered-order",
    ),
    "caching alone": ([*ON, "--tiered-pd-caching=1"], "--tiered-pd-caching: is for"),
    "caching of theirs": (
        ["--disaggregation-mode=prefill", "--tiered-pd-caching=1"],
        "--tiered-pd-caching: is for",
    ),
    "tiers over theirs": (
        [*ON, "--disaggregation-mode=prefill"],
        "--radix-cache-backend: tiered was tested with our transfer backend only",
    ),
    "decode layerkv": (
        [
            *ON,
            *PD,
            "--disaggregation-mode=decode",
            "--page-size=16",
            "--tiered-layerkv=on",
        ],
        "--tiered-layerkv: does not go with --disaggregation-mode decode",
    ),
    "prefill activations": (
        [
            *ON,
            *PD,
            "--disaggregation-mode=prefill",
            "--page-size=16",
            "--tiered-layerkv=on",
            "--tiered-activations=0.5",
        ],
        "--tiered-activations: does not go with --disaggregation-mode prefill",
    ),
    "returns without returns": (
        [
            *ON,
            *PD,
            "--disaggregation-mode=decode",
            "--tiered-pd-caching=2",
            "--tiered-pd-returns=never",
        ],
        "--tiered-pd-returns: chooses among the returns",
    ),
    "decode on-evict": (
        [
            *ON,
            *PD,
            "--disaggregation-mode=decode",
            "--tiered-write-policy=on-evict",
        ],
        "--tiered-write-policy: does not go with --disaggregation-mode decode",
    ),
    "several machines": ([*ON, "--nnodes=2", "--tp-size=2"], "--nnodes"),
    "data parallel": ([*ON, "--dp-size=2"], "--dp-size"),
}
# These are argparse's own: it prints the usage first.
CHOICES = {
    row.flag: row.kind.choices
    for row in OPTIONS.values()
    if row.kind.choices and row.kind.word is str
}
BAD_CHOICES = {flag: [*ON, f"{flag}=no"] for flag in CHOICES}


@pytest.fixture(scope="session")
def seen(look, model, tmp_path_factory):
    """What came of every command line, by name."""
    tmp = tmp_path_factory.mktemp("flags")
    return told_once("all command lines", lambda: tell(look, model, tmp))


def tell(look, model, tmp):
    """Try every command line."""
    (tmp / "a-file").write_text("")
    (tmp / "good.toml").write_text('host-size = "32MB"\nload-policy = "never"\n')
    (tmp / "key.toml").write_text("host_sise = 1\n")
    (tmp / "syntax.toml").write_text("host_size = \n")
    (tmp / "value.toml").write_text('load-policy = "perhaps"\n')
    names, cases = [], []

    def add(name, argv, env=None):
        names.append(name)
        argv = [word.replace("{tmp}", str(tmp)) for word in argv]
        cases.append({"argv": argv, "env": env or {}})

    for name, argv in GOOD.items():
        add(name, argv)
    for name, (argv, _) in BAD.items():
        add(name, argv)
    for name, argv in BAD_CHOICES.items():
        add(name, argv)
    add("fault allowed", BAD["fault"][0], {FAULT_ENV: "1"})
    add("rust", GOOD["prefill"], {RUST_ENV: "1"})
    file = tmp / "cases.json"
    file.write_text(json.dumps(cases))
    out = look("flags", model, file)
    out["parsed"] = dict(zip(names, out["parsed"], strict=True))
    return out


def test_the_classes_are_replaced(seen):
    """The server's and the offline engine's arguments are our subclass."""
    assert seen["server_args"] == "TieredServerArgs"
    assert seen["engine"] == "TieredServerArgs"


def test_help_shows_the_flags(seen):
    """--help lists those flags of ours that are no keys of a file first."""
    shown = re.findall(r"\[(--tiered-[a-z-]+)", seen["help"])
    rows = [CONFIG, *OPTIONS.values()]
    assert shown == [row.flag for row in rows if row.place == "flag"]


@pytest.mark.parametrize("name", [*GOOD, "fault allowed"])
def test_good_lines_are_accepted(seen, name):
    """Values that can work are accepted and kept as given."""
    parsed = seen["parsed"][name]
    assert parsed["code"] == 0, parsed["stderr"]
    if name == "all":
        assert parsed["values"]["host_size"] == "64MB"
        assert parsed["values"]["disk_threads"] == 4
        assert len(parsed["values"]) == len(GOOD["all"]) - len(ON)
    if name == "plain":
        assert parsed["values"] == {}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines_are_refused_in_one_sentence(seen, name):
    """Exit code 2, and one line on stderr that names the flag and a remedy."""
    parsed = seen["parsed"][name]
    assert parsed["code"] == 2, parsed
    errors = [line for line in parsed["stderr"].splitlines() if line.startswith("err")]
    assert len(errors) == 1, parsed["stderr"]
    assert errors[0].startswith(f"error: {BAD[name][1]}")
    assert errors[0].endswith(".")
    assert "Traceback" not in parsed["stderr"]


def test_sglangs_rust_server_does_not_prefill_with_our_transfers(seen):
    """Ours says so, before a server without our bootstrap server starts."""
    parsed = seen["parsed"]["rust"]
    assert parsed["code"] == 2, parsed
    assert f"unset {RUST_ENV}" in parsed["stderr"]


@pytest.mark.parametrize("name", BAD_CHOICES)
def test_unknown_choices_are_refused(seen, name):
    """A choice that there is not is refused with those that there are."""
    parsed = seen["parsed"][name]
    assert parsed["code"] == 2
    last = parsed["stderr"].strip().splitlines()[-1]
    for choice in CHOICES[name]:
        assert choice in last


@pytest.mark.full
def test_the_real_command_line_refuses_in_one_sentence(model):
    """launch_server itself ends with code 2 and one sentence, without a traceback."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    done = subprocess.run(
        [*command, "--tiered-host-size", "1GB"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    sentences = [line for line in done.stderr.splitlines() if "--tiered-" in line]
    assert len(sentences) == 1, done.stderr[-2000:]
    assert "without the tiered cache" in sentences[0]


def test_a_plugin_that_cannot_attach_stops_tiered_servers_only(look, model):
    """With a seam gone a tiered server says so and ends; a plain one starts."""
    seen = look("broken", model)
    assert seen["registered"]
    assert seen["tiered"].startswith("EngineCompatibilityError: ")
    assert "could not attach" in seen["tiered"]
    assert "_record_step_counters" in seen["tiered"]
    assert seen["plain"] == ["ServerArgs", None]
