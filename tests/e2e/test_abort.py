"""Requests that are aborted while their pages are on the way, over slowed tiers."""

import threading
import time

import numpy as np
import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import (
    ANSWER_TOKENS,
    PATIENCE_S,
    Case,
    drop,
    pinned,
    sequential,
    settle,
    stats,
    wait_until,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

FULL = pytest.mark.full
CASE = Case(16, overlap=False)


@pytest.fixture(scope="module")
def spec(model, tmp_path_factory):
    tiers = Tiers(32 * MB, tmp_path_factory.mktemp("disk"), 64 * MB)
    flags = (
        "--tiered-load-policy=always",
        "--tiered-staging-size=8MB",
        # A layer from the host takes 0.2 s and a read from disk 1.5 s: long enough
        # for an abort to fall into it.
        "--tiered-emulate=host:latency=0.2;disk:latency=1.5",
    )
    return tiered_spec(CASE.device(model), tiers, "slow", flags=flags)


@pytest.fixture(scope="module")
def plain(reference):
    return reference(CASE)


@pytest.fixture
def server(servers, spec, plain):
    server = servers.get(spec)
    server.flush_cache()
    return server


def prompt(seed):
    tokens = random_tokens(np.random.default_rng(seed), 485, VOCAB_TOKENS)
    return PlannedRequest(f"a{seed}", tokens, ANSWER_TOKENS)


class Sent:
    """A request under way in a thread of its own."""

    def __init__(self, server, request, rid):
        self.answer = None
        self.error = None
        self._rid = rid

        def ask():
            try:
                self.answer = server.generate(
                    request.prompt, request.max_new_tokens, rid=rid
                )
            except RuntimeError as error:
                # SGLang answers some aborts with an HTTP error.
                self.error = error

        self._thread = threading.Thread(target=ask, daemon=True)
        self._thread.start()

    def join(self):
        """Wait for the end; return whether it was an abort."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "an aborted request got no answer"
        if self.error is not None:
            return True
        return self.answer["meta_info"]["finish_reason"]["type"] == "abort"


def assert_right_and_idle(server, plain, cold, request):
    """Demand that nothing is left behind and that the prompt is answered right."""
    state = settle(server)
    assert pinned(state) == 0
    assert state["flows"] == 0
    (again,) = sequential(server, [request])
    result = check_equality(
        [cold], [again], page_size=CASE.page_size, spread=plain.spread, forced=False
    )
    assert result.passed, result.summary()
    assert pinned(settle(server)) == 0


def test_abort_while_reading_from_disk(server, plain):
    """A request aborted during its read leaves nothing behind."""
    request = prompt(1)
    (cold,) = sequential(server, [request])
    drop(server, "device", "host")
    sent = Sent(server, request, "reading")
    wait_until(lambda: pinned(stats(server)) > 0, "the read has begun")
    server.post("/abort_request", {"rid": "reading"})
    assert sent.join()
    assert_right_and_idle(server, plain, cold, request)


def test_abort_of_one_of_two_readers(server, plain):
    """A request that waits for the same pages as an aborted one is answered right."""
    request = prompt(2)
    (cold,) = sequential(server, [request])
    drop(server, "device", "host")
    first = Sent(server, request, "first")
    wait_until(lambda: pinned(stats(server)) > 0, "the read has begun")
    second = Sent(server, request, "second")
    server.post("/abort_request", {"rid": "first"})
    assert first.join()
    assert not second.join()
    assert tuple(second.answer["output_ids"]) == cold.output
    assert_right_and_idle(server, plain, cold, request)


@pytest.mark.parametrize(
    "delay_s", [pytest.param(0.1, marks=FULL), 0.5, pytest.param(1.0, marks=FULL)]
)
def test_abort_while_layers_arrive(server, plain, delay_s):
    """A request aborted while its layers arrive leaves nothing behind."""
    request = prompt(3)
    (cold,) = sequential(server, [request])
    drop(server, "device")
    sent = Sent(server, request, "loading")
    # The scheduler is inside the forward then and cannot be asked, so time decides
    # where in the load the abort falls; whatever it hits, the same must hold.
    time.sleep(delay_s)
    server.post("/abort_request", {"rid": "loading"})
    sent.join()
    assert_right_and_idle(server, plain, cold, request)


def test_abort_all_while_a_crowd_waits(server, plain):
    """Aborting everything while many wait for disk and host leaves nothing behind."""
    requests = [prompt(seed) for seed in (4, 5)]
    colds = sequential(server, requests)
    drop(server, "device", "host")
    sent = [
        Sent(server, request, f"crowd{i}-{k}")
        for i, request in enumerate(requests)
        for k in range(3)
    ]
    wait_until(lambda: pinned(stats(server)) > 0, "a read has begun")
    server.post("/abort_request", {"abort_all": True})
    for one in sent:
        one.join()
    for cold, request in zip(colds, requests, strict=True):
        assert_right_and_idle(server, plain, cold, request)
