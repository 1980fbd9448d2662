"""Weights that SGLang quantises, as far as a CPU can compute with them.

The kernels for fp8 are Triton's and torch's. Triton's interpreter
(``TRITON_INTERPRET=1``) runs the former on a CPU, slowly; it has to be chosen before
Triton is imported, so these servers start by the command line. Each kind that
``--quantization`` lists is tried on a plain model, without a server: one that comes to
run on a CPU, or a new one, is seen.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec, tiered_spec

from tests.e2e.e2e_support import pinned, settle
from tests.scenarios.scenario_support import (
    PAGE,
    PLAIN_POOL,
    body,
    cached,
    forget,
    prompt,
    same,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

INTERPRETED = {"TRITON_INTERPRET": "1"}
COMPUTED = ("fp8", "w8a8_fp8", "quark_int4fp8_moe")
"""In fp8; the last one would have int4 for experts, which the tiny model has not."""
NOTHING_DONE = ("unquant", "modelopt_fp4", "humming")
"""Of a model that is not stored so."""
NO_CONFIG = "Cannot find the config file for"
UNKNOWN = "Unknown quantization method"
REFUSED = {
    "auto-round": NO_CONFIG,
    "auto-round-int8": "No module named 'auto_round'",
    "awq": NO_CONFIG,
    "awq_marlin": NO_CONFIG,
    "bitsandbytes": "Please install bitsandbytes",
    "compressed-tensors": "missing 5 required positional arguments",
    "gguf": "uninitialized parameter",
    "gptq": UNKNOWN,
    "gptq_marlin": NO_CONFIG,
    "mlx_q4": UNKNOWN,
    "mlx_q8": UNKNOWN,
    "modelopt": NO_CONFIG,
    "modelopt_fp8": NO_CONFIG,
    "modelopt_mixed": NO_CONFIG,
    "modelslim": NO_CONFIG,
    "moe_wna16": NO_CONFIG,
    "mxfp4": UNKNOWN,
    "mxfp8": "Only weight_block_size[0] == weight_block_size[1] is supported",
    "mxfp_w4a8": "only implemented for the Ascend NPU",
    "nvfp4_online": "only on NVIDIA Blackwell",
    "petit_nvfp4": NO_CONFIG,
    "quark": "Either quant_config or online_scheme must be provided",
    "quark_mxfp4": "requires an AMD ROCm device",
    "w4afp8": "not divisible by weight quantization block_n",
    "w8a8_int8": "InterpreterError",
}
"""What SGLang says of the others here."""
NUM_PAGES = 6
PROMPTS = [prompt(850 + number, NUM_PAGES * PAGE + 7) for number in range(3)]
HIT = NUM_PAGES * PAGE
TIERS = ("device", "host", "disk")


def ask(server, tier):
    """Ask for all prompts over pages that lie on one tier alone."""
    answers = []
    for tokens in PROMPTS:
        forget(server, tier)
        answers.append(server.post("/generate", body(tokens)))
    return answers


def found(answers):
    """Return how many tokens of each prompt came from which tier."""
    return [cached(answer) for answer in answers]


def test_weights_that_are_quantised(servers, model, tmp_path):
    """Answers are plain's from each tier; pages are found by these weights alone."""
    flags = ("--sleep-on-idle",)
    quantised = (*flags, "--quantization=fp8")
    tiers = Tiers(16 * MB, tmp_path, 64 * MB)
    always = ("--tiered-load-policy=always", "--tiered-disk-admission=all")

    def plain(flags):
        return plain_spec(Device(model, PLAIN_POOL, PAGE, flags), "plain-quantised")

    def tiered(flags):
        return tiered_spec(Device(model, 2048, PAGE, flags), tiers, "quantised", always)

    def by_command(spec):
        return replace(spec, env={**spec.env, **INTERPRETED}, fork=False)

    server = servers.get(plain(flags))
    whole = ask(server, "device")
    server = servers.restart(by_command(plain(quantised)))
    wants = [ask(server, tier) for tier in TIERS]
    # They are other weights: so a page of the others would be seen.
    assert [one["output_ids"] for one in wants[0]] != [
        one["output_ids"] for one in whole
    ]

    server = servers.restart(by_command(tiered(quantised)))
    for tier, want in zip(TIERS, wants, strict=True):
        answers = ask(server, tier)
        same(PROMPTS, want, answers)
        expected = {} if tier == "device" else {tier: HIT}
        assert found(answers) == [expected] * len(PROMPTS)
    assert pinned(settle(server)) == 0

    # The sum over the weights is that of the same ones, quantised once more.
    server = servers.restart(by_command(tiered(quantised)))
    answers = ask(server, "device")
    same(PROMPTS, wants[1], answers)
    assert found(answers) == [{"disk": HIT}] * len(PROMPTS)

    server = servers.restart(tiered(flags))
    answers = ask(server, "device")
    same(PROMPTS, whole, answers)
    assert found(answers) == [{}] * len(PROMPTS)
    servers.stop()


@pytest.fixture(scope="module")
def tried(model, tmp_path_factory):
    """What came of each kind on the tiny model."""
    program = Path(__file__).with_name("quantised_program.py")
    file = tmp_path_factory.mktemp("kinds") / "found.json"
    command = [sys.executable, str(program), str(model), str(file)]
    env = {**os.environ, **INTERPRETED}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(file.read_text())


def test_these_are_all_kinds(tried):
    """A kind that SGLang comes to offer is to be tried here."""
    assert set(tried) == {*COMPUTED, *NOTHING_DONE, *REFUSED}


@pytest.mark.parametrize("kind", [*COMPUTED, *NOTHING_DONE])
def test_a_kind_that_a_cpu_computes(tried, kind):
    """The model has computed, with tensors of fp8 or with what was stored."""
    types = tried[kind].get("types")
    assert types is not None, tried[kind]
    assert ("torch.float8_e4m3fn" in types) == (kind in COMPUTED)
    assert (types == ["torch.bfloat16"]) == (kind in NOTHING_DONE)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_kind_that_no_cpu_computes(tried, kind):
    """SGLang says why."""
    assert REFUSED[kind] in tried[kind].get("error", "")
