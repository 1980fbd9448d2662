"""Weights and adapters that change under a server and between servers.

Each answer is compared with plain SGLang under the same weights. Two models of one
shape stand for the weights before and after a training step.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, plain_spec, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.cpu_server import CPU_SERVER
from tests.e2e.e2e_support import (
    MODELS,
    Case,
    change_weights,
    drop,
    settle,
    stats,
    wait_until,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE, PLAIN_CASE = Case(16), Case(16, overlap=False)
NUM_PAGES = 20
ANSWER_TOKENS = 12
HOST_BYTES, DISK_BYTES = 4 * MB, 64 * MB


@pytest.fixture(scope="module")
def trained():
    """A model of the tiny Llama's shape with other weights."""
    return make_model(replace(PRESETS["tiny"], seed=1), MODELS)


@pytest.fixture(scope="module")
def prompts():
    """Prompts of whole pages and a bit."""
    rng = np.random.default_rng(3)
    num_tokens = NUM_PAGES * CASE.page_size + 5
    return [random_tokens(rng, num_tokens, VOCAB_TOKENS) for _ in range(4)]


def ask(server, prompt, **fields):
    """Return an answer's tokens, and how many of the prompt's came from where."""
    answer = server.generate(prompt, ANSWER_TOKENS, **fields)
    details = answer["meta_info"].get("cached_tokens_details") or {}
    return answer["output_ids"], {k: v for k, v in details.items() if v}


def update(server, model, *, flush):
    """Load other weights into a server."""
    body = {"model_path": str(model), "flush_cache": flush}
    told = change_weights(server, "update_weights_from_disk", body)
    assert told["success"], told


def known(server):
    """Wait until the server knows its weights; return what it says of them."""
    wait_until(lambda: stats(server)["weights"]["fingerprint"], "weights are read")
    return stats(server)["weights"]


def stored(server):
    """Return how many pages came to each tier so far."""
    return settle(server)["cache"]["pages_stored"]


@pytest.fixture(scope="module")
def plain_answers(servers, model, trained, prompts):
    """What plain SGLang answers with each of the weights."""
    server = servers.get(plain_spec(PLAIN_CASE.device(model)))
    answers = {}
    for weights in (model, trained):
        update(server, weights, flush=True)
        for number, prompt in enumerate(prompts):
            answers[weights, number] = ask(server, prompt)[0]
    servers.stop()
    assert answers[model, 0] != answers[trained, 0]
    return answers


def test_weights_change_with_and_without_a_flush_and_between_starts(
    servers, model, trained, prompts, plain_answers, tmp_path
):
    """KV is found by the weights that computed it, from disk too, and by no others."""

    def spec(weights):
        return tiered_spec(
            CASE.device(weights),
            Tiers(HOST_BYTES, tmp_path / "disk", DISK_BYTES),
            flags=("--tiered-load-policy=always", "--tiered-disk-admission=all"),
        )

    def right(server, weights, number):
        """Ask a prompt; its answer is plain SGLang's. Return where it came from."""
        found, where = ask(server, prompts[number])
        assert found == plain_answers[weights, number]
        return where

    server = servers.restart(spec(model))
    first = known(server)
    assert right(server, model, 0) == {}
    drop(server, "device", "host")
    assert "disk" in right(server, model, 0)

    # A trainer's update with its default, a flush.
    update(server, trained, flush=True)
    assert right(server, trained, 0) == {}
    assert known(server)["fingerprint"] != first["fingerprint"]
    assert right(server, trained, 1) == {}
    drop(server, "device", "host")
    assert "disk" in right(server, trained, 1)

    # One without: SGLang reuses what its device has, and nobody keeps that.
    server.flush_cache()
    assert right(server, trained, 2) == {}
    before = stored(server)
    update(server, model, flush=False)
    told = known(server)
    assert told["fingerprint"] == first["fingerprint"]
    assert (told["is_mixed"], told["is_settled"]) == (True, False)
    _, where = ask(server, prompts[2])
    assert list(where) == ["device"], "SGLang's own tree, of both weights"
    assert right(server, model, 3) == {}
    assert stored(server) == before
    server.flush_cache()
    assert known(server)["is_settled"]
    for number in (2, 3):
        assert right(server, model, number) == {}
    drop(server, "device", "host")
    assert "disk" in right(server, model, 2)

    # Flush first, then an update without one.
    server.flush_cache()
    update(server, trained, flush=False)
    assert known(server)["is_settled"]
    assert right(server, trained, 0) == {}
    settle(server)

    server = servers.restart(spec(trained))
    assert "disk" in right(server, trained, 0)
    server = servers.restart(spec(model))
    for number in range(3):
        assert right(server, model, number) == {}
    assert "to other weights" in server.log_path.read_text()
    servers.stop()


def make_adapter(folder, seed):
    """Write a LoRA adapter for the tiny Llama's attention, strong enough to be seen."""
    import torch
    from safetensors.torch import save_file

    shape, rank = PRESETS["tiny"], 4
    head_dim = shape.hidden // shape.num_heads
    widths = {
        "q_proj": shape.num_heads * head_dim,
        "k_proj": shape.num_kv_heads * head_dim,
        "v_proj": shape.num_kv_heads * head_dim,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.num_layers):
        for name, width in widths.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, size in {
                "lora_A": (rank, shape.hidden),
                "lora_B": (width, rank),
            }.items():
                noise = torch.randn(size, generator=generator)
                tensors[f"{place}.{part}.weight"] = noise.to(torch.bfloat16) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(widths),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


LORA_FLAGS = (
    "--enable-lora",
    "--lora-backend=torch_native",
    "--max-lora-rank=4",
    "--max-loras-per-batch=2",
    "--lora-target-modules",
    "q_proj",
    "k_proj",
    "v_proj",
)


@pytest.mark.full
def test_adapters_are_told_apart_by_their_weights(servers, model, prompts, tmp_path):
    """Loaded, unloaded, under another name, and trained anew under the same path."""
    paths = {name: tmp_path / name for name in ("sql", "poems")}
    for seed, path in enumerate(paths.values()):
        make_adapter(path, seed)
    named = [f"{name}={path}" for name, path in paths.items()]
    flags = (*LORA_FLAGS, "--lora-paths", *named)
    prompt = prompts[0]

    plain = plain_spec(CASE.device(model), flags=flags)
    plain = servers.restart(replace(plain, program=CPU_SERVER))
    wanted = {name: ask(plain, prompt, lora_path=name)[0] for name in (None, *paths)}
    assert len({tuple(answer) for answer in wanted.values()}) == 3
    trained = make_adapter(tmp_path / "third", 7)
    load = {"lora_name": "third", "lora_path": str(trained)}
    assert plain.post("/load_lora_adapter", load)["success"]
    wanted["third"] = ask(plain, prompt, lora_path="third")[0]

    spec = tiered_spec(
        CASE.device(model),
        Tiers(HOST_BYTES, tmp_path / "disk", DISK_BYTES),
        flags=("--tiered-load-policy=always", "--tiered-disk-admission=all", *flags),
    )
    spec = replace(spec, program=CPU_SERVER)

    def right(server, name, *, like=None):
        found, where = ask(server, prompt, lora_path=name)
        assert found == wanted[like or name]
        return where

    server = servers.restart(spec)
    for name in wanted:
        if name != "third":
            assert right(server, name) == {}
    drop(server, "device", "host")
    for name in wanted:
        if name != "third":
            assert "disk" in right(server, name)

    # The same adapter under another name, and one of other weights.
    copy = {"lora_name": "copy", "lora_path": str(paths["sql"])}
    assert server.post("/unload_lora_adapter", {"lora_name": "sql"})["success"]
    assert server.post("/load_lora_adapter", copy)["success"]
    assert "host" in right(server, "copy", like="sql")
    assert server.post("/load_lora_adapter", load)["success"]
    assert right(server, "third") == {}
    settle(server)

    # Trained anew in place: the path and the name are those of before.
    make_adapter(paths["sql"], 7)
    server = servers.restart(spec)
    assert "disk" in right(server, "sql", like="third")
    assert "disk" in right(server, "poems")
    assert "disk" in right(server, None)
    servers.stop()
