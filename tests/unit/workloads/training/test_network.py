"""The network is a Llama; the optimizer does what its papers say."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from sgl_tiered_workloads.training.network import (  # noqa: E402
    EMBEDDING,
    Network,
    hf_config,
    initial_parameters,
)
from sgl_tiered_workloads.training.optimizer import (  # noqa: E402
    Optimizer,
    orthogonalised,
)
from sgl_tiered_workloads.training.recipe import (  # noqa: E402
    RECIPES,
    Recipe,
    Shape,
)

SHAPE = Shape(
    num_layers=2,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    intermediate=96,
    vocab_tokens=100,
    max_positions=256,
)


def lively_parameters(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Initial parameters, but with what starts as zero or one drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    found = initial_parameters(shape, seed)
    for name, value in found.items():
        if any(part in name for part in ("o_proj", "down_proj", "norm", "lm_head")):
            value.add_(0.2 * torch.randn(value.shape, generator=generator))
    return found


def logits(shape: Shape, parameters: dict[str, torch.Tensor], tokens: torch.Tensor):
    network = Network(shape, torch.float32)
    own = network.cast(parameters)
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return network.logits(own, network.hidden(own, tokens, positions))


def test_logits_are_those_of_transformers() -> None:
    """The same parameters in LlamaForCausalLM give the same scores."""
    transformers = pytest.importorskip("transformers")
    parameters = lively_parameters(SHAPE, 3)
    config = transformers.LlamaConfig(**hf_config(SHAPE, bos=1, eos=2, pad=0))
    model = transformers.LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(parameters, strict=False)
    assert not missing
    assert not unexpected
    tokens = torch.randint(0, 100, (2, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = logits(SHAPE, parameters, tokens), model(tokens).logits
    assert ours.std() > 0.2
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("distance", [100, 1000, 3000])
def test_an_untrained_model_leans_to_copy(distance: int) -> None:
    """What followed a token before is likelier behind it than what never did."""
    shape = RECIPES["demo"].shape
    parameters = initial_parameters(shape, 0)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randperm(shape.vocab_tokens, generator=generator)[None, :distance]
    tokens = torch.cat((tokens, tokens[:, :40]), dim=1)
    scores = logits(shape, parameters, tokens[:, :-1])[0, distance:]
    copied = tokens[0, distance + 1 :]
    ranks = (scores > scores.gather(1, copied[:, None])).sum(1)
    # By chance it would be in the middle.
    assert ranks.float().median() < shape.vocab_tokens / 20


def test_no_token_sees_what_follows() -> None:
    """Another last token changes only the last scores."""
    parameters = lively_parameters(SHAPE, 4)
    tokens = torch.arange(20)[None]
    other = tokens.clone()
    other[0, -1] = 77
    one, two = (logits(SHAPE, parameters, t) for t in (tokens, other))
    torch.testing.assert_close(one[:, :-1], two[:, :-1])
    assert not torch.allclose(one[:, -1], two[:, -1])


def test_losses_are_cross_entropies() -> None:
    """Losses and hits equal those worked out from the scores."""
    parameters = lively_parameters(SHAPE, 5)
    network = Network(SHAPE, torch.float32)
    own = network.cast(parameters)
    tokens = torch.randint(0, 100, (3, 12), generator=torch.Generator().manual_seed(2))
    hidden = network.hidden(own, tokens, torch.arange(12).expand(3, -1))
    scores = network.logits(own, hidden)
    targets = scores.argmax(-1)
    targets[:, ::2] = tokens[:, ::2]
    losses, is_right = network.losses(own, hidden, targets)
    expected = torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), targets.flatten(), reduction="none"
    )
    torch.testing.assert_close(losses.flatten(), expected)
    assert is_right[:, 1::2].all()
    assert not is_right.all()


def test_the_demo_shape_is_what_was_asked_for() -> None:
    """4 to 10 M parameters, grouped heads, context for 4k: at most 20 MB."""
    shape = RECIPES["demo"].shape
    parameters = initial_parameters(shape, 0)
    assert sum(v.numel() for v in parameters.values()) == shape.num_params
    assert 4e6 < shape.num_params < 10e6
    assert shape.num_kv_heads < shape.num_heads
    assert shape.head_dim == 64
    assert shape.max_positions >= 4096 + 512


def test_recipes_survive_json() -> None:
    """A checkpoint's recipe equals the one that made it."""
    for recipe in RECIPES.values():
        assert Recipe.from_json(recipe.to_json()) == recipe


def test_rates_rise_and_fall() -> None:
    """The rate warms up, stays at one, and is nearly zero at the end."""
    recipe = RECIPES["demo"]
    last = recipe.num_steps - 1
    assert recipe.rate_at(0) == pytest.approx(1 / recipe.warmup_steps)
    assert recipe.rate_at(recipe.num_steps // 2) == 1.0
    assert 0 < recipe.rate_at(last) < 0.01
    with pytest.raises(IndexError):
        recipe.phase_at(last + 1)


def test_a_phase_with_a_rate_has_its_own_cycle() -> None:
    """What comes before falls to zero as if it were all; then once more."""
    recipe = RECIPES["demo"]
    *phases, last = recipe.phases
    assert last.rate is not None
    before = replace(recipe, phases=tuple(phases))
    begin = before.num_steps
    for step in (0, 50, begin // 2, begin - 1):
        assert recipe.rate_at(step) == before.rate_at(step)
    assert recipe.rate_at(begin - 1) < 0.01
    assert recipe.rate_at(begin) == last.rate
    middle = recipe.rate_at(begin + last.num_steps // 2)
    assert middle == pytest.approx(last.rate / 2)


@pytest.mark.parametrize("size", [(3, 16, 40), (2, 40, 16), (1, 24, 24)])
def test_orthogonalised_matrices_have_alike_singular_values(
    size: tuple[int, int, int],
) -> None:
    """Singular values of any spread come out near one; directions stay."""
    batch = torch.randn(size, generator=torch.Generator().manual_seed(6))
    values = torch.linalg.svdvals(orthogonalised(batch))
    assert values.max() < 1.3
    assert values.median() > 0.6
    assert (batch * orthogonalised(batch)).sum((-1, -2)).min() > 0


def test_vectors_are_changed_as_adam_does() -> None:
    """Five steps on a vector equal torch's AdamW without decay."""
    ours = {EMBEDDING: torch.randn(7, 5, generator=torch.Generator().manual_seed(8))}
    theirs = ours[EMBEDDING].clone().requires_grad_()
    own = Optimizer(
        ours, matrix_rate=1.0, embedding_rate=0.01, vector_rate=1.0, matrix_decay=0.0
    )
    adam = torch.optim.AdamW(
        [theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0
    )
    for seed in range(5):
        gradient = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
        ours[EMBEDDING].grad = gradient.clone()
        theirs.grad = gradient.clone()
        own.step(1.0)
        adam.step()
    torch.testing.assert_close(ours[EMBEDDING], theirs.detach())


def test_a_missing_gradient_is_an_error() -> None:
    """A parameter that the loss does not reach is not skipped in silence."""
    own = Optimizer(
        {"w": torch.zeros(3, 3)},
        matrix_rate=1.0,
        embedding_rate=1.0,
        vector_rate=1.0,
        matrix_decay=0.0,
    )
    with pytest.raises(RuntimeError, match="no gradient"):
        own.step(1.0)
