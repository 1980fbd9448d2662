"""Answer lengths on a real server: every answer is learned from, as it was told."""

import contextlib
import threading

import numpy as np
import pytest
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import Case, stats, wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]


@pytest.fixture(scope="module")
def server(servers, model):
    flags = ("--tiered-length-predictor=online",)
    # The overlap schedule computes a token beyond the answer's end: not to be counted.
    device = Case(16, overlap=True).device(model)
    return servers.get(tiered_spec(device, Tiers(4 * MB), "lengths", flags=flags))


def body(seed, max_new_tokens, **sampling):
    tokens = random_tokens(np.random.default_rng(seed), 40, VOCAB_TOKENS)
    return {
        "rid": f"r{seed}",
        "input_ids": list(tokens),
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": max_new_tokens,
            "custom_params": {"tiered": {"group": "chat"}},
            **sampling,
        },
    }


def learned(server):
    """Return how many answers were learned from, and their tokens together."""
    told = stats(server)["lengths"]
    return told["num_answers"], round(told["num_answers"] * told["mean_output_tokens"])


def test_answers_that_end_are_learned_and_aborted_ones_are_not(server):
    """Counts and lengths agree with what the clients got, stopped early or not."""
    # SGLang asks something itself when it starts.
    num_before, sum_before = learned(server)
    counts = []
    for seed in range(4):
        answer = server.post("/generate", body(seed, 24, ignore_eos=True))
        counts.append(answer["meta_info"]["completion_tokens"])
    assert counts == [24] * 4
    # The same prompt again, which now ends at a token that its answer is known to have.
    stop = answer["output_ids"][9]
    answer = server.post("/generate", body(3, 24, stop_token_ids=[stop]))
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    counts.append(answer["meta_info"]["completion_tokens"])
    assert counts[-1] <= 10

    def ask():
        # SGLang answers some aborts with an HTTP error.
        with contextlib.suppress(RuntimeError):
            server.post("/generate", body(9, 900, ignore_eos=True))

    endless = threading.Thread(target=ask, daemon=True)
    endless.start()

    def aborted():
        server.post("/abort_request", {"rid": "r9"})
        endless.join(0.2)
        return not endless.is_alive()

    wait_until(aborted, "the request was aborted")
    wait_until(
        lambda: learned(server)[0] >= num_before + len(counts),
        "all answers were learned from",
    )
    told = stats(server)["lengths"]
    assert told["predictor"] == "online"
    assert told["num_under_way"] == 0
    assert learned(server) == (num_before + len(counts), sum_before + sum(counts))
    assert sum(told["weights"].values()) == pytest.approx(1.0)
