"""The hash of weights: equal for equal ones, different for any others."""

import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sgl_tiered.engines.device import fingerprint  # noqa: E402
from sgl_tiered.engines.device.fingerprint import (  # noqa: E402
    adapter_tensors,
    hash_tensors,
    weights_reader,
)
from sgl_tiered.serving.weights import HashStopped  # noqa: E402


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


def of(net, engine="sglang 1", num_threads=1, **config):
    read = weights_reader(lambda: net, Config(**config), engine)()
    return read(num_threads, threading.Event()).digest


def of_tensor(tensor):
    return hash_tensors(b"", {"weight": tensor}).digest


def test_equal_models_have_equal_hashes():
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
    """A small step on every weight, as training makes it, gives another hash."""
    net = model()
    before = of(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.001)
    assert of(net) != before


def test_a_single_changed_row_shows():
    """Any one row of an embedding, as an edit of single tokens leaves it."""
    net = torch.nn.ModuleDict({"embed": torch.nn.Embedding(32_000, 16)})
    before = of(net)
    unseen = []
    with torch.no_grad():
        for row in range(0, 32_000, 800):
            old = net["embed"].weight[row].clone()
            net["embed"].weight[row] += 1.0
            if of(net) == before:
                unseen.append(row)
            net["embed"].weight[row] = old
    assert unseen == []
    assert of(net) == before


def test_renamed_tensors_show():
    """The same numbers under other names are another model."""
    net = model()
    other = torch.nn.Sequential(net, torch.nn.Identity())
    assert of(net) != of(other)


def test_empty_tensors_are_no_obstacle():
    """A model with an empty tensor has a hash like any other."""
    net = model()
    net.register_buffer("nothing", torch.empty(0))
    assert len(of(net)) == 32


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_how_it_is_read_does_not_matter(monkeypatch, num_threads):
    """Any number of threads gives the same hash, also of tensors of several spans."""
    monkeypatch.setattr(fingerprint, "_SPAN_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "_PIECE_BYTES", 300)
    net = model(width=333)
    assert of(net, num_threads=num_threads) == of(net)
    before = of(net, num_threads=num_threads)
    with torch.no_grad():
        net[1].weight[1, -1] += 1.0
    assert of(net, num_threads=num_threads) != before


def test_bytes_between_two_tensors_belong_to_one_of_them():
    """Equal bytes cut otherwise are other weights."""
    flat = torch.arange(8, dtype=torch.uint8)
    cut = hash_tensors(b"", {"a": flat[:3], "b": flat[3:]}).digest
    assert cut != hash_tensors(b"", {"a": flat[:5], "b": flat[5:]}).digest


def test_reading_stops_when_nobody_wants_it():
    """A read that was stopped ends with the piece under way."""
    stop = threading.Event()
    stop.set()
    with pytest.raises(HashStopped):
        hash_tensors(b"", {"weight": torch.ones(8)}, stop=stop)


DENSE = torch.arange(64 * 32, dtype=torch.float32).reshape(64, 32) / 7.0
ELEMENTS = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "bfloat16",
    "float64",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "uint4",
    "bits8",
]


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_type_of_elements_is_read(name):
    """Each type, the packed ones too, shows a changed byte."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    raw = torch.zeros(64, dtype=torch.uint8)
    changed = raw.clone()
    changed[-1] = 1
    read = [hash_tensors(b"", {"w": each.view(dtype)}) for each in (raw, changed)]
    assert read[0].num_bytes == 64
    assert read[0].digest != read[1].digest


class Packed(torch.Tensor):
    """Wraps other tensors, as quantised weights of torchao do."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data, scale):
        self.data_, self.scale_ = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale_"], {"bits": 8}

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("it can only be multiplied with")


class Sealed(Packed):
    """Does not even say what it wraps."""

    __tensor_flatten__ = None


def scaled(tensor, by):
    return torch.quantize_per_tensor(tensor, by, 0, torch.qint8)


def by_channel(tensor, by):
    scales = torch.full((64,), by)
    return torch.quantize_per_channel(tensor, scales, torch.zeros(64), 0, torch.qint8)


LAYOUTS = {
    "transposed": lambda t: t.t(),
    "with gaps": lambda t: t[:, ::2],
    "repeated": lambda t: t[0].expand(9, 32),
    "one row": lambda t: t[:1],
    "one number": lambda t: t[0, 0],
    "parameter": torch.nn.Parameter,
    "sparse": lambda t: t.to_sparse(),
    "sparse rows": lambda t: t.to_sparse_csr(),
    "sparse columns": lambda t: t.to_sparse_csc(),
    "sparse blocks": lambda t: t.to_sparse_bsr((4, 4)),
    "packed for mkldnn": lambda t: t.to_mkldnn(),
    "conjugated": lambda t: torch.complex(t, t).conj(),
    "quantised": lambda t: scaled(t, 0.5),
    "quantised by channel": lambda t: by_channel(t, 0.5),
    "wrapped": lambda t: Packed(t, torch.ones(64)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read(name):
    """Equal weights in the same layout hash alike; a changed one shows."""
    changed = DENSE.clone()
    changed[0, 0] += 100.0
    made = LAYOUTS[name]
    first, again = of_tensor(made(DENSE)), of_tensor(made(DENSE.clone()))
    assert first == again
    assert first != of_tensor(made(changed))


@pytest.mark.filterwarnings("ignore")
def test_scales_of_quantised_weights_show():
    """The same integers with other scales are other weights."""
    ones = torch.ones(64)
    pairs = [
        (scaled(DENSE * 0, 0.5), scaled(DENSE * 0, 0.25)),
        (by_channel(DENSE * 0, 0.5), by_channel(DENSE * 0, 0.25)),
        (Packed(DENSE, ones), Packed(DENSE, ones * 2)),
    ]
    for one, other in pairs:
        assert of_tensor(one) != of_tensor(other)


def test_what_cannot_be_read_is_found_by_nobody(caplog):
    """A tensor that hides its memory is no error: its hash is never the same."""
    sealed = Sealed(DENSE, torch.ones(64))
    found = [hash_tensors(b"", {"a": sealed, "b": DENSE}) for _ in range(2)]
    assert found[0].digest != found[1].digest
    assert found[0].num_unreadable == 1
    assert "cannot be read" in caplog.text


def test_weights_that_are_lent_while_they_are_read_are_their_own():
    """A forward lets a projection lie in a slot, which is another layer's soon."""
    net = model()
    wanted = of(net)
    read = weights_reader(lambda: net, Config(), "sglang 1")()
    home = net[0].weight.data
    net[0].weight.data = torch.zeros_like(home)
    assert read(1, threading.Event()).digest == wanted
    net[0].weight.data = home
    assert of(net) == wanted


def test_what_modules_add_to_their_state_counts():
    """Also what is no tensor."""

    class Counting(torch.nn.Module):
        def __init__(self, count):
            super().__init__()
            self.count = count

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    assert of(Counting(1)) == of(Counting(1))
    assert of(Counting(1)) != of(Counting(2))


def test_memory_elsewhere_is_copied_piece_by_piece(monkeypatch):
    """What does not lie in memory comes through a buffer of bounded size."""
    monkeypatch.setattr(fingerprint, "_STAGE_BYTES", 100)
    asked = []

    class Stage(fingerprint._Stage):
        def fetch(self, flat):
            asked.append(flat.numel())
            return torch.arange(flat.numel(), dtype=torch.uint8)

    flat = torch.empty(250, dtype=torch.uint8, device="meta")
    read = b"".join(fingerprint._pieces(flat, Stage(None)))
    assert asked == [100, 100, 50]
    assert read == bytes([*range(100), *range(100), *range(50)])


def adapter(scaling=2.0, value=1.0, rank=4):
    return SimpleNamespace(
        config=SimpleNamespace(r=rank, target_modules=["q_proj", "v_proj"]),
        scaling=scaling,
        layers=[
            SimpleNamespace(weights={"q_proj.lora_A.weight": torch.full((4, 8), value)})
        ],
        embedding_layers={},
        added_tokens_embeddings={},
    )


def test_adapters_are_told_apart_by_what_is_in_them():
    """Tensors, their scale and their rank count."""
    each = [adapter(), adapter(scaling=1.0), adapter(value=2.0), adapter(rank=8)]
    hashes = [hash_tensors(*adapter_tensors(one)).digest for one in [*each, adapter()]]
    assert len(set(hashes)) == 4
    assert hashes[0] == hashes[-1]
