"""SGLang's own orders of the queue: they match whole prompts, and less is reused.

Prompts of whole pages come back from disk under a policy that sorts by prefixes, some
with logprobs of their own tokens. Each answer is compared with plain SGLang's.
"""

import numpy as np
import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, plain_spec, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import (
    ANSWER_TOKENS,
    REFERENCE_POOL_TOKENS,
    Case,
    drop,
    edge,
    open_loop,
    pinned,
    sequential,
    settle,
    stats,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE, PLAIN_CASE = Case(16), Case(16, overlap=False)
POOL_TOKENS = 3000
NUM_PROMPTS = 24
TOLD_FROM = (0, 20, 160, 319)
"""First prompt tokens whose logprobs are asked for: no page, one, ten, all but one."""


def prompts():
    """Return prompts of 20 to 59 whole pages."""
    draw = np.random.default_rng(17)
    sizes = CASE.page_size * draw.integers(20, 60, size=NUM_PROMPTS)
    return [
        PlannedRequest(
            f"p{n}", random_tokens(draw, int(size), VOCAB_TOKENS), ANSWER_TOKENS
        )
        for n, size in enumerate(sizes)
    ]


def told(server, request, first):
    """Return an answer, and the logprobs of the prompt's tokens from one on."""
    body = {
        "input_ids": list(request.prompt),
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
        },
        "return_logprob": True,
        "logprob_start_len": first,
    }
    answer = server.post("/generate", body)
    # The first one of all has none.
    logprobs = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
    return answer["output_ids"], logprobs[first == 0 :], answer["meta_info"]


@pytest.fixture(scope="module")
def plain(servers, model, reference):
    """Plain SGLang's answers, its spread, and its logprobs of a prompt."""
    spread = reference(CASE).spread
    device = PLAIN_CASE.device(model, REFERENCE_POOL_TOKENS)
    server = servers.get(plain_spec(device, "plain-policies"))
    server.flush_cache()
    answers = sequential(server, prompts())
    known = [told(server, prompts()[0], first) for first in TOLD_FROM]
    return answers, spread, known


@pytest.fixture(scope="module")
def server(servers, model, plain, tmp_path_factory):
    """A server that sorts its queue by prefixes, and that sleeps while idle."""
    tiers = Tiers(2 * MB, tmp_path_factory.mktemp("disk"), 64 * MB)
    flags = (
        "--schedule-policy=lpm",
        "--tiered-load-policy=always",
        "--tiered-disk-admission=all",
    )
    device = CASE.device(model, POOL_TOKENS)
    yield servers.restart(tiered_spec(device, tiers, "lpm", flags))
    servers.stop()


def assert_plain(plain, answers):
    """Demand plain's answers, up to what plain differs from itself."""
    known, spread, _ = plain
    assert [answer.error for answer in answers] == [None] * len(answers)
    result = check_equality(
        known,
        answers,
        page_size=CASE.page_size,
        spread=spread,
        forced=False,
    )
    assert result.passed, result.summary()


def test_whole_pages_come_back_from_disk(server, plain):
    """All at once, so that the queue is sorted: each prompt's last page is computed."""
    open_loop(server, prompts())
    drop(server, "device", "host")
    before = stats(server)
    answers = open_loop(server, prompts())
    assert_plain(plain, answers)
    assert sum(answer.cached_by_tier.get("disk", 0) for answer in answers) > 0
    for answer, request in zip(answers, prompts(), strict=True):
        assert answer.cached_tokens < len(request.prompt)
    after = settle(server)
    assert edge(after, "disk->host") > edge(before, "disk->host")
    assert pinned(after) == 0


def test_prompts_with_logprobs_come_back_from_disk(server, plain):
    """Nothing from where they are asked for is reused, and they are plain's."""
    _, spread, known = plain
    request = prompts()[0]
    sequential(server, [request])
    for first, (output, logprobs, _) in zip(TOLD_FROM, known, strict=True):
        drop(server, "device", "host")
        again, own, meta = told(server, request, first)
        assert meta["cached_tokens"] == first // CASE.page_size * CASE.page_size
        assert again == output
        assert len(own) == len(request.prompt) - max(first, 1)
        assert own == pytest.approx(logprobs, abs=1.5 * spread.max_logprob)
    assert pinned(settle(server)) == 0
