"""The model fingerprint: equal for equal models, different for any others."""

import pytest

torch = pytest.importorskip("torch")

from sgl_tiered.engines.sglang.fingerprint import model_fingerprint  # noqa: E402


class Config:
    """The part of a Hugging Face configuration that is read."""

    def __init__(self, **values):
        self.values = values

    def to_dict(self):
        return dict(self.values)


def model(seed=0, width=8, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))
    return layers.to(dtype)


def of(net, engine="sglang 1", **config):
    return model_fingerprint(net, Config(**config), engine)


def test_equal_models_have_equal_fingerprints():
    """The same weights and configuration give the same 32 digits."""
    first = of(model(), rope=1.0)
    assert first == of(model(), rope=1.0)
    assert len(first) == 32
    assert int(first, 16) >= 0


def test_where_the_model_lies_does_not_matter():
    """The path of the model and the version that wrote it are left out."""
    paths = {"_name_or_path": "/a", "transformers_version": "1"}
    assert of(model(), rope=1.0) == of(model(), rope=1.0, **paths)


def test_any_difference_shows():
    """Weights, shapes, element types, settings and engine all count."""
    nets = [model(), model(seed=1), model(width=9), model(dtype=torch.bfloat16)]
    prints = [of(net, rope=1.0) for net in nets]
    prints += [of(model(), rope=2.0), of(model(), engine="sglang 2", rope=1.0)]
    assert len(set(prints)) == len(prints)


def test_training_and_updated_weights_show():
    """A small step on every weight, as training makes it, gives another fingerprint."""
    net = model()
    before = of(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.001)
    assert of(net) != before


def test_renamed_tensors_show():
    """The same numbers under other names are another model."""
    net = model()
    other = torch.nn.Sequential(net, torch.nn.Identity())
    assert of(net) != of(other)


def test_empty_tensors_are_no_obstacle():
    """A model with an empty tensor has a fingerprint like any other."""
    net = model()
    net.register_buffer("nothing", torch.empty(0))
    assert len(of(net)) == 32
