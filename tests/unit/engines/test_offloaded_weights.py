"""Projections that SGLang keeps in host memory: copied ahead, lent, and given back."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sgl_tiered.engines.sglang.layered.activations import offloaded  # noqa: E402
from sgl_tiered.engines.sglang.layered.activations.offloaded import (  # noqa: E402
    OffloadedWeights,
    hook_offloaded,
    on_device,
)
from sgl_tiered.pipelines.stream_weights import WeightSlots  # noqa: E402

LAYERS, HIDDEN, WIDTH = 3, 16, 24
CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    """A decoder layer as far as its projection, which may be broken before it."""

    def __init__(self, *, bias=True):
        super().__init__()
        self.qkv_proj = torch.nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.mlp = torch.nn.Linear(HIDDEN, HIDDEN)
        self.breaks = False
        self.read = []

    def forward(self, inputs):
        if self.breaks:
            raise ArithmeticError("broken before its projection")
        self.read.append(self.qkv_proj.weight.data_ptr())
        return self.qkv_proj(inputs)


@pytest.fixture
def away(monkeypatch):
    """Parameters that count as being in host memory, by identity."""
    found = set()
    monkeypatch.setattr(offloaded, "is_away", lambda one, device: id(one) in found)
    return found


def make(away, *, device=CPU):
    """Return layers, of which the first has everything away, the second its weight."""
    layers = [Layer().requires_grad_(False) for _ in range(LAYERS)]
    away |= {id(one) for one in layers[0].parameters()}
    away.add(id(layers[1].qkv_proj.weight))
    linears = [layer.qkv_proj for layer in layers]
    weights = OffloadedWeights(layers, linears, device)
    weights.allocate()
    return layers, linears, weights


class Slots:
    """Layer n is in slot n % 2, or in none; says in which order it was asked."""

    def __init__(self, weights, has=(0, 1)):
        self._weights, self._has = weights, has
        self.asked = []
        self.num_bytes = 7

    def lend(self, layer):
        self.asked.append(("lend", layer))
        return layer % 2 if layer in self._has else None

    def take_back(self):
        # From now on others may be written there: nobody's weights lie in a slot.
        at_home = not self._weights._home
        self.asked.append(("take back", at_home))

    def forget(self):
        self.asked.append(("forget", None))


def fill(weights, layer, slot):
    """Copy a layer's parameters to a slot."""
    for place, own in weights.pairs(layer, slot):
        place.copy_(own)


def test_what_is_away_is_known_by_layer(away):
    """A slot holds the largest; all that a layer has on the host is streamed."""
    layers, _, weights = make(away)
    assert {n: sorted(one) for n, one in weights.away.items()} == {
        0: ["bias", "weight"],
        1: ["weight"],
    }
    assert weights.slot_bytes == (WIDTH * HIDDEN + WIDTH) * 4
    streamed = sum(one.nbytes for one in layers[0].parameters()) + WIDTH * HIDDEN * 4
    assert weights.layer_bytes == streamed // LAYERS
    assert set(weights.places(0, 1)) == {"bias", "weight"}
    assert weights.places(1, 0)["weight"].shape == (WIDTH, HIDDEN)


def test_a_trial_leaves_parameters_where_they_were(away):
    """Also one that fails."""
    layers, _, _ = make(away)
    before = [one.data_ptr() for one in layers[0].parameters()]
    layers[0].breaks = True
    with pytest.raises(ArithmeticError), on_device(layers[0], CPU):
        layers[0](torch.zeros(1, HIDDEN))
    assert [one.data_ptr() for one in layers[0].parameters()] == before


def test_a_layer_is_computed_with_what_was_copied_ahead(away):
    """From its begin to its projection; then its slot may be filled again."""
    layers, linears, weights = make(away)
    slots, driver = Slots(weights), SimpleNamespace()
    hook_offloaded(weights, linears, slots, driver)
    assert driver.weights_brought() == 7
    inputs = torch.randn(2, HIDDEN)
    wanted = [layer.qkv_proj(inputs) for layer in layers]
    for layer in layers:
        layer.read.clear()
    slots.asked.clear()
    with torch.inference_mode():
        for n, layer in enumerate(layers):
            if n < 2:
                fill(weights, n, n % 2)
            home = layer.qkv_proj.weight.data_ptr()
            found = layer(inputs)
            assert torch.equal(found, wanted[n])
            assert (layer.read[0] != home) == (n < 2)
            assert layer.qkv_proj.weight.data_ptr() == home
    assert slots.asked == [
        ("lend", 0),
        ("take back", True),
        ("lend", 1),
        ("take back", True),
    ]


def test_a_layer_without_a_slot_is_left_to_sglang(away):
    """It copies for itself, and reads what is in host memory."""
    layers, linears, weights = make(away)
    hook_offloaded(weights, linears, Slots(weights, has=()), SimpleNamespace())
    with torch.inference_mode():
        layers[0](torch.zeros(1, HIDDEN))
    assert layers[0].read == [linears[0].weight.data_ptr()]


def test_a_call_inside_a_call_changes_nothing(away):
    """SGLang calls a layer once more, on copies of its parameters."""
    layers, linears, weights = make(away)
    slots = Slots(weights)
    hook_offloaded(weights, linears, slots, SimpleNamespace())
    fill(weights, 0, 0)
    layer = layers[0]
    copies = {name: one.detach() for name, one in layer.named_parameters()}

    def forward(inputs):
        del layer.forward
        taken = {name: one.detach() for name, one in layer.named_parameters()}
        assert (
            taken["qkv_proj.weight"].data_ptr() != copies["qkv_proj.weight"].data_ptr()
        )
        try:
            return torch.func.functional_call(layer, taken, (inputs,))
        finally:
            layer.forward = forward

    layer.forward = forward
    with torch.inference_mode():
        layer(torch.zeros(1, HIDDEN))
    assert slots.asked == [("lend", 0), ("take back", True)]
    slot = weights.places(0, 0)["weight"].data_ptr()
    assert layer.read == [slot]
    assert linears[0].weight.data_ptr() == copies["qkv_proj.weight"].data_ptr()


def test_what_a_broken_forward_had_comes_home(away):
    """Before the next one's copies begin, or at the latest in its first such layer."""
    layers, linears, weights = make(away)
    driver = SimpleNamespace()
    slots = Slots(weights)
    hook_offloaded(weights, linears, slots, driver)
    homes = [linear.weight.data_ptr() for linear in linears]
    layers[0].breaks = True
    for heals in (driver_begins, other_layer):
        with pytest.raises(ArithmeticError):
            layers[0](torch.zeros(1, HIDDEN))
        assert linears[0].weight.data_ptr() != homes[0]
        heals(driver, layers)
        assert [linear.weight.data_ptr() for linear in linears] == homes
    assert ("forget", None) in slots.asked


def driver_begins(driver, layers):
    driver.on_begin()


def other_layer(driver, layers):
    layers[1](torch.zeros(1, HIDDEN))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_weights_come_to_the_device_under_other_work():
    """From pinned memory, through both slots, while the forward's stream is busy."""
    device = torch.device("cuda")
    layers = [Layer().requires_grad_(False) for _ in range(LAYERS)]
    for layer in layers:
        for one in layer.parameters():
            one.data = one.data.pin_memory()
    linears = [layer.qkv_proj for layer in layers]
    weights = OffloadedWeights(layers, linears, device)
    weights.allocate()

    class Ops:
        def new_stream(self, *, urgent):
            return torch.cuda.Stream()

        def current_stream(self):
            return torch.cuda.current_stream()

        def bring_weights(self, stream, layer, slot):
            with torch.cuda.stream(stream):
                for to, frm in weights.pairs(layer, slot):
                    to.copy_(frm, non_blocking=True)
            return 1

    slots, read = WeightSlots(Ops(), weights.away), []
    for layer in (0, 1, 2, 0, 2):
        stream = torch.cuda.current_stream()
        slot = slots.use(layer, stream)
        torch.cuda._sleep(20_000_000)
        read.append((layer, weights.places(layer, slot)["weight"].clone()))
        slots.read(slot, stream.record_event())
    for layer, found in read:
        assert torch.equal(found.cpu(), linears[layer].weight)
