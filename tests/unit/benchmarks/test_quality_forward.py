"""The quality bench's own forward is the model's, dense and with tokens left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from offline import llama
from offline.llama import Llama
from offline.prefix import MassMeter, compute_prefix, keep

from sgl_tiered.policies.sparsity.registry import make_selection

LAYERS, HEADS, KV_HEADS, VOCABULARY = 3, 4, 2, 97
PREFIX, AFTER = 50, 13


@pytest.fixture(scope="module")
def reference():
    """A Llama of transformers with random weights, eager attention, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Attention that prefers some tokens: the usual start is nearly even.
            weight.mul_(6.0 if "q_proj" in name or "k_proj" in name else 1.5)
    return model


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory) -> Path:
    """The same model as a checkpoint."""
    path = tmp_path_factory.mktemp("model")
    reference.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    """The same weights in our forward."""
    return Llama.load(folder)


@pytest.fixture
def tokens() -> torch.Tensor:
    """A sequence."""
    rng = np.random.default_rng(1)
    return torch.from_numpy(rng.integers(VOCABULARY, size=PREFIX + AFTER))


@pytest.fixture(params=[256, 16], ids=["one block", "blocks"])
def row_block(request, monkeypatch):
    """Rows whose scores are computed at a time."""
    monkeypatch.setattr(llama, "ROW_BLOCK", request.param)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("row_block")
def test_dense_logits_are_those_of_transformers(reference, model, tokens) -> None:
    """Grouped heads, rotation and norms included."""
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    close(model.run(tokens[None])[0][0], expected)


@pytest.mark.usefixtures("row_block")
def test_a_kept_past_changes_nothing(model, tokens) -> None:
    """Tokens behind their prefix's KV have the logits of the whole sequence."""
    whole, _ = model.run(tokens[None])
    _, past = model.run(tokens[None, :PREFIX])
    rest, _ = model.run(tokens[None, PREFIX:], first_position=PREFIX, past=past)
    close(rest[0], whole[0, PREFIX:])


def test_a_batch_sees_the_same_past(model, tokens) -> None:
    """Two questions behind one prefix, as if each were alone."""
    _, past = model.run(tokens[None, :PREFIX])
    both = torch.stack([tokens[PREFIX:], tokens[PREFIX:].flip(0)])
    found, _ = model.run(both, first_position=PREFIX, past=past)
    for row, question in zip(found, both, strict=True):
        alone, _ = model.run(question[None], first_position=PREFIX, past=past)
        close(row, alone[0])


@pytest.mark.usefixtures("row_block")
def test_left_out_tokens_are_as_if_masked(reference, model, tokens) -> None:
    """Another keep set per layer, against a mask per layer in eager attention."""
    rng = np.random.default_rng(2)
    kept = [np.sort(rng.permutation(PREFIX)[:count]) for count in (7, 20, 45)]
    _, past = model.run(tokens[None, :PREFIX])
    found, _ = model.run(
        tokens[None, PREFIX:], first_position=PREFIX, past=keep(past, kept)
    )

    count = len(tokens)
    hooks = []
    for layer, positions in zip(reference.model.layers, kept, strict=True):
        visible = torch.ones(count, count, dtype=torch.bool).tril()
        dropped = np.setdiff1d(np.arange(PREFIX), positions)
        visible[PREFIX:, torch.from_numpy(dropped)] = False
        mask = torch.zeros(count, count).masked_fill(~visible, float("-inf"))

        def put(_, args, kwargs, mask=mask):
            return args, kwargs | {"attention_mask": mask[None, None]}

        hooks.append(layer.self_attn.register_forward_pre_hook(put, with_kwargs=True))
    try:
        with torch.no_grad():
            expected = reference(tokens[None]).logits[0, PREFIX:]
            dense = model.run(tokens[None])[0][0, PREFIX:]
    finally:
        for hook in hooks:
            hook.remove()
    close(found[0], expected)
    assert (expected - dense).abs().max() > 1e-2


@pytest.mark.usefixtures("row_block")
@pytest.mark.parametrize(
    ("local", "rows", "power"),
    [(0, None, 1), (9, None, 2), (0, (40, 63), 1), (5, (20, 51), 1)],
)
def test_mass_is_what_attention_gave(
    reference, model, tokens, local, rows, power
) -> None:
    """Against the whole attention matrix of transformers."""
    meter = MassMeter(model.shape, len(tokens), local, rows, power)
    model.run(tokens[None], watch=meter)
    with torch.no_grad():
        attentions = reference(tokens[None], output_attentions=True).attentions
    first, end = rows or (0, len(tokens))
    positions = np.arange(len(tokens))
    counts = positions[:, None] - positions[None, :] >= local
    counts &= ((positions >= first) & (positions < end))[:, None]
    for layer, shares in enumerate(attentions):
        masked = shares[0].numpy() ** power * counts
        groups = masked.reshape(KV_HEADS, HEADS // KV_HEADS, *masked.shape[1:])
        expected = groups.sum(axis=(1, 2))
        np.testing.assert_allclose(meter.mass[layer], expected, atol=1e-4)
    causal = positions[:, None] >= positions[None, :]
    np.testing.assert_array_equal(meter.reads, (counts & causal).sum(axis=0))


def test_a_prefix_is_metered_as_its_selections_ask(model, tokens) -> None:
    """Each is told its own kind of mass, and nothing that it did not ask for."""
    rng = np.random.default_rng(0)
    names = ("car", "h2o", "snapkv", "random")
    selections = {name: make_selection(name, rng) for name in names}
    prefix = compute_prefix(model, tokens, [*selections.values()])
    power = selections["car"].mass_power
    assert set(prefix.meters) == {(64, power, 0), (0, 1, 0), (0, 1, 64)}
    told = {name: prefix.facts(s, 0.5, None) for name, s in selections.items()}
    assert told["car"].mass is prefix.meters[64, power, 0].mass
    assert told["h2o"].mass is prefix.meters[0, 1, 0].mass
    assert told["snapkv"].recent_mass is prefix.meters[0, 1, 64].mass
    assert told["snapkv"].mass is None
    assert told["random"].mass is None
    assert told["random"].budget_tokens == LAYERS * len(tokens) // 2


def test_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    """What the forward cannot compute right is not computed."""
    config = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"llama"', '"qwen2"'))
    with pytest.raises(ValueError, match="no Llama"):
        llama.LlamaShape.read(tmp_path)
    with pytest.raises(ValueError, match="safetensors"):
        Llama.load(tmp_path)
