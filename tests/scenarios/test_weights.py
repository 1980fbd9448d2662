"""Weights that come as tensors, and a restart on the model that they were saved as.

As a trainer does it: a session is opened, the tensors are sent, the session is closed.
Updates from disk and adapters are in ``tests/e2e/test_weights.py``.
"""

import base64
import io
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import pytest
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec, tiered_spec

from tests.e2e.e2e_support import (
    MODELS,
    change_weights,
    drop,
    pinned,
    settle,
    stats,
    wait_until,
)
from tests.scenarios.scenario_support import (
    PAGE,
    PLAIN_POOL,
    body,
    cached,
    prompt,
    same,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

FLAGS = ("--sleep-on-idle",)
NUM_PAGES = 20
PROMPTS = [prompt(980 + number, NUM_PAGES * PAGE + 5) for number in range(4)]
HIT = NUM_PAGES * PAGE


@pytest.fixture(scope="module")
def trained():
    """A model of the tiny Llama's shape with other weights."""
    return make_model(replace(PRESETS["tiny"], seed=1), MODELS)


def as_payload(folder):
    """Return a model's tensors as SGLang takes them over HTTP: by name, in memory.

    The tensors are returned as well: who receives them maps their memory.
    """
    import torch.multiprocessing as sharing
    from safetensors.torch import load_file

    (path,) = folder.glob("*.safetensors")
    tensors = [
        (name, tensor.share_memory_()) for name, tensor in load_file(path).items()
    ]
    before = sharing.get_sharing_strategy()
    # By file names: descriptors go to children of this process only.
    sharing.set_sharing_strategy("file_system")
    try:
        data = io.BytesIO()
        ForkingPickler(data).dump(tensors)
    finally:
        sharing.set_sharing_strategy(before)
    return base64.b64encode(data.getvalue()).decode(), tensors


def update(server, folder, *, flush):
    """Send a model's tensors to a server, within a session."""
    payload, tensors = as_payload(folder)
    sent = {"serialized_named_tensors": [payload], "flush_cache": flush}
    for call, asked in (
        ("begin_weight_update", {}),
        ("update_weights_from_tensor", sent),
        ("end_weight_update", {}),
    ):
        told = change_weights(server, call, asked)
        assert told["success"], told
    del tensors


def known(server):
    """Wait until the server knows its weights; return what it says of them."""
    wait_until(lambda: stats(server)["weights"]["fingerprint"], "weights are read")
    return stats(server)["weights"]


@pytest.fixture(scope="module")
def plain(servers, model, trained):
    """Plain SGLang's answers under both weights, cold and again."""
    server = servers.get(plain_spec(Device(model, PLAIN_POOL, PAGE, FLAGS), "plain-w"))
    found = {}
    for weights in (model, trained):
        update(server, weights, flush=True)
        found[weights] = [
            [server.post("/generate", body(tokens)) for tokens in PROMPTS]
            for _ in range(2)
        ]
    assert all(cached(answer) == {} for answer in found[trained][0])
    servers.stop()
    return found


def test_tensors_change_the_weights(servers, model, trained, plain, tmp_path):
    """KV is found by the weights that computed it, wherever those came from."""

    def spec(folder):
        tiers = Tiers(16 * MB, tmp_path / "disk", 64 * MB)
        flags = ("--tiered-load-policy=always", "--tiered-disk-admission=all")
        return tiered_spec(Device(folder, 2048, PAGE, FLAGS), tiers, "tensors", flags)

    def ask(server, weights, number, where):
        """Demand plain's answer, and where its prompt came from."""
        answer = server.post("/generate", body(PROMPTS[number]))
        assert cached(answer) == ({where: HIT} if where else {})
        wanted = plain[weights][1 if where else 0][number]
        same([PROMPTS[number]], [wanted], [answer])

    server = servers.restart(spec(model))
    first = known(server)
    ask(server, model, 0, "")
    drop(server, "device", "host")
    ask(server, model, 0, "disk")

    # The flush that is SGLang's default.
    update(server, trained, flush=True)
    told = known(server)
    assert told["fingerprint"] != first["fingerprint"]
    assert told["is_settled"]
    ask(server, trained, 0, "")
    ask(server, trained, 1, "")
    drop(server, "device", "host")
    ask(server, trained, 1, "disk")

    # Without it SGLang goes on with what its device has, and nobody keeps that.
    server.flush_cache()
    ask(server, trained, 2, "")
    before = settle(server)["cache"]["pages_stored"]
    update(server, model, flush=False)
    told = known(server)
    assert told["fingerprint"] == first["fingerprint"]
    assert not told["is_settled"]
    mixed = server.post("/generate", body(PROMPTS[2]))
    assert list(cached(mixed)) == ["device"]
    assert settle(server)["cache"]["pages_stored"] == before
    server.flush_cache()
    assert known(server)["is_settled"]
    ask(server, model, 2, "")

    # Flushed before, so that an update without one leaves nothing of the old weights.
    server.flush_cache()
    update(server, trained, flush=False)
    assert known(server)["is_settled"]
    ask(server, trained, 3, "")
    assert pinned(settle(server)) == 0

    # The weights that came as tensors, this time from the disk; then the old ones.
    server = servers.restart(spec(trained))
    ask(server, trained, 3, "disk")
    server = servers.restart(spec(model))
    for number in range(len(PROMPTS)):
        ask(server, model, number, "")
    servers.stop()
