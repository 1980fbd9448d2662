"""Other kinds of models and a mode, where SGLang serves them on this machine.

Each is tried with plain SGLang first. Where that does not start, the test is skipped
with what SGLang said; so a skip names what is missing, and ends when it is there.
"""

import json
import shutil

import numpy as np
import pytest
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec, tiered_spec

from tests.e2e.e2e_support import edge, pinned, settle, stats
from tests.scenarios.scenario_support import (
    PAGE,
    PLAIN_POOL,
    body,
    cached,
    forget,
    prompt,
    same,
    start_plain,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

NUM_PAGES = 20
PROMPTS = [prompt(800 + number, NUM_PAGES * PAGE + 7) for number in range(3)]


@pytest.fixture(scope="module")
def reward_model(model, tmp_path_factory):
    """A head of one label, with weights of its own, on the tiny Llama."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("reward") / "model"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    config["id2label"] = {"0": "reward"}
    config["label2id"] = {"reward": 0}
    (folder / "config.json").write_text(json.dumps(config))
    (path,) = folder.glob("*.safetensors")
    weights = {k: v for k, v in load_file(path).items() if k != "lm_head.weight"}
    head = torch.randn(1, config["hidden_size"], generator=torch.manual_seed(8))
    weights["score.weight"] = head.to(torch.bfloat16)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def specs(model, name, flags, disk):
    """Return plain SGLang and a server with tiers of the same flags."""
    flags = (*flags, "--sleep-on-idle")
    tiers = Tiers(16 * MB, disk, 64 * MB)
    always = ("--tiered-load-policy=always", "--tiered-disk-admission=all")
    return (
        plain_spec(Device(model, PLAIN_POOL, PAGE, flags), f"plain-{name}"),
        tiered_spec(Device(model, 2048, PAGE, flags), tiers, name, always),
    )


@pytest.mark.parametrize("kind", ["embedding", "reward"])
def test_vectors(servers, model, reward_model, tmp_path, kind):
    """Embeddings and rewards over pages from host and disk are plain's."""
    folder = model if kind == "embedding" else reward_model
    plain, tiered = specs(folder, kind, ("--is-embedding",), tmp_path)
    path = "/encode" if kind == "embedding" else "/classify"

    def ask(server, tier):
        forget(server, tier)
        told = [server.post(path, {"input_ids": list(tokens)}) for tokens in PROMPTS]
        return [np.atleast_1d(answer["embedding"]) for answer in told]

    server = start_plain(servers, plain)
    wants = [ask(server, tier) for tier in ("device", "host", "disk")]
    apart = min(relative(a, b) for a, b in zip(wants[0], wants[0][1:], strict=False))
    server = servers.restart(tiered)
    for tier, want in zip(("device", "host", "disk"), wants, strict=True):
        before = settle(server)
        found = ask(server, tier)
        after = settle(server)
        for mine, other in zip(found, want, strict=True):
            assert mine.shape == other.shape
            # Other prompts are far away: so this can fail.
            assert relative(mine, other) < min(0.05, apart / 2)
        loaded = {
            name: edge(after, name) - edge(before, name)
            for name in ("host->device", "disk->host")
        }
        num_pages = len(PROMPTS) * NUM_PAGES
        assert loaded["host->device"] == (0 if tier == "device" else num_pages)
        assert loaded["disk->host"] == (num_pages if tier == "disk" else 0)
        assert pinned(after) == 0
    servers.stop()


def relative(mine, other):
    """Return how far a vector is from another one, relative to that."""
    return float(np.linalg.norm(mine - other) / np.linalg.norm(other))


def test_deterministic_mode(servers, model, tmp_path):
    """Its answers over pages from host and disk are plain's in that mode."""
    flags = ("--enable-deterministic-inference",)
    plain, tiered = specs(model, "deterministic", flags, tmp_path)

    def ask(server, tier):
        answers = []
        for tokens in PROMPTS:
            forget(server, tier)
            answers.append(server.post("/generate", body(tokens)))
        return answers

    needs = "an attention backend that SGLang has on accelerators only"
    server = start_plain(servers, plain, needs)
    wants = [ask(server, tier) for tier in ("device", "host", "disk")]
    if not any(cached(answer) for answer in wants[1]):
        servers.stop()
        pytest.skip("plain SGLang reuses no prefix in this mode here")
    server = servers.restart(tiered)
    for tier, want in zip(("device", "host", "disk"), wants, strict=True):
        answers = ask(server, tier)
        same(PROMPTS, want, answers)
        expected = {} if tier == "device" else {tier: NUM_PAGES * PAGE}
        assert [cached(answer) for answer in answers] == [expected] * len(PROMPTS)
    assert pinned(stats(server)) == 0
    servers.stop()
