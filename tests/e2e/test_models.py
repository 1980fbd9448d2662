"""Other model families, and other ways in: ``sglang serve``, the offline engine."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.server import ServerStartError
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import (
    ANSWER_TOKENS,
    MODELS,
    POOL_TOKENS,
    START_TIMEOUT_S,
    Case,
    drop,
    sequential,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16)
NUM_PAGES = 40
PROGRAM = Path(__file__).parent / "engine_program.py"


def prompt(seed):
    tokens = NUM_PAGES * CASE.page_size + 3
    return random_tokens(np.random.default_rng(seed), tokens, VOCAB_TOKENS)


@pytest.mark.parametrize(
    "family", ["opt", pytest.param("mistral", marks=pytest.mark.full)]
)
def test_a_loaded_prefix_answers_like_a_kept_one(servers, family, may_fork):
    """A prefix from the host gives the bits of the same prefix on the device.

    With ``--full`` OPT is started by ``sglang serve``: this way in is to work too.
    """
    model = make_model(f"{family}-tiny", MODELS)
    spec = tiered_spec(
        CASE.device(model),
        Tiers(32 * MB),
        f"tiered-{family}",
        flags=("--tiered-load-policy=always",),
    )
    if family == "opt" and not may_fork:
        sglang = str(Path(sys.executable).with_name("sglang"))
        spec = replace(spec, program=(sglang, "serve"))
    server = servers.get(spec)
    request = PlannedRequest("r", prompt(1), ANSWER_TOKENS)
    _, kept = sequential(server, [request, replace(request, key="again")])
    drop(server, "device")
    (loaded,) = sequential(server, [request])
    assert kept.cached_by_tier["device"] == NUM_PAGES * CASE.page_size
    assert loaded.cached_by_tier["host"] == NUM_PAGES * CASE.page_size
    assert loaded.output == kept.output
    assert loaded.top_logprobs == kept.top_logprobs
    servers.stop()


@pytest.mark.full
def test_the_offline_engine(servers, tmp_path):
    """``sgl.Engine(radix_cache_backend="tiered", ...)`` keeps KV below the device."""
    servers.stop()
    model = make_model("qwen2-tiny", MODELS)
    job = tmp_path / "job.json"
    others = [prompt(seed) for seed in (2, 3, 4)]
    job.write_text(
        json.dumps(
            {
                "engine": {
                    "page_size": CASE.page_size,
                    "max_total_tokens": POOL_TOKENS,
                    "radix_cache_backend": "tiered",
                    "tiered_host_size": "32MB",
                    "tiered_load_policy": "always",
                },
                # Twice the first, then enough others to push it off the device.
                "prompts": [prompt(1), prompt(1), *others, prompt(1)],
                "max_new_tokens": ANSWER_TOKENS,
            }
        )
    )
    servers.num_starts += 1
    answers = run_program(PROGRAM, model, job)
    kept, loaded = answers[1], answers[-1]
    assert kept["details"]["device"] == NUM_PAGES * CASE.page_size
    assert loaded["details"]["host"] == NUM_PAGES * CASE.page_size
    assert loaded["output"] == kept["output"]
    assert loaded["top"] == kept["top"]


def test_a_sliding_window_is_refused_in_one_sentence(servers, tmp_path):
    """A model with sliding windows stops the server with a sentence that says so."""
    model = tmp_path / "windowed"
    shutil.copytree(make_model("qwen2-tiny", MODELS), model)
    path = model / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": 64,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    }
    path.write_text(json.dumps(config))
    spec = tiered_spec(
        CASE.device(model),
        Tiers(32 * MB),
        "windowed",
        # Our own attention backend would refuse the model before the cache does.
        flags=("--load-format=dummy", "--attention-backend=torch_native"),
    )
    with pytest.raises(ServerStartError) as caught:
        servers.get(spec)
    assert caught.value.exit_code not in (None, 0)
    log = next(servers.log_dir.glob("*/windowed-*.log")).read_text(errors="replace")
    lines = [line for line in log.splitlines() if "does not support" in line]
    assert lines, log[-3000:]
    assert "sliding-window attention" in lines[0]
    assert "without --radix-cache-backend tiered" in lines[0]


def run_program(program, *args):
    """Run a program in a process group of its own and return its last line's JSON."""
    process = subprocess.Popen(
        [sys.executable, str(program), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=START_TIMEOUT_S)
    finally:
        # Its children too, if it had to leave them behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, errors[-4000:]
    return json.loads(out.splitlines()[-1])
