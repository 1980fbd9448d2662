"""One prefill and one decode server with tiers on both, our transport between them.

The modes one by one, and faults, are in tests/cluster.
"""

import numpy as np
import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.sessions import ChatShape, random_tokens
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.disagg_support import PAGE, pair_flags, play_sessions, start_pair
from tests.e2e.e2e_support import (
    REFERENCE_POOL_TOKENS,
    edge,
    pinned,
    record_reference,
    settle,
    wait_until,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

SHAPE = ChatShape(
    num_sessions=5,
    num_turns=3,
    system_tokens=64,
    first_tokens=250,
    user_tokens=40,
    answer_tokens=20,
)
POOL_TOKENS = 1024
"""Holds two requests at a time on either side: others wait, and the prefill server's
tiers serve what its pool has lost."""


@pytest.fixture(scope="module")
def plain(servers, model):
    device = Device(model, REFERENCE_POOL_TOKENS, PAGE)
    found = record_reference(servers.get(plain_spec(device, "plain-pd")), SHAPE)
    servers.stop()
    return found


@pytest.fixture(scope="module")
def pair(plain, model, tmp_path_factory):
    """Mode 3: both keep what they have, only what decode lacks is sent, and answers go
    back to the prefill server's host tier."""
    device = Device(model, POOL_TOKENS, PAGE)
    folder = tmp_path_factory.mktemp("pair")
    flags = (
        *pair_flags(3, Tiers(64 * MB)),
        "--tiered-pool",
        f"file:{folder / 'pool'}",
        # The planner may find an answer of a page not worth a load.
        "--tiered-load-policy",
        "always",
    )
    pair = start_pair(device, folder, flags)
    yield pair
    pair.stop()


def prompt(seed, num_tokens=200):
    rng = np.random.default_rng(seed)
    return [int(token) for token in random_tokens(rng, num_tokens, VOCAB_TOKENS)]


def test_a_second_turn_sends_only_what_decode_lacks(pair):
    """Decode has the first turn whole; so has prefill, once the answer is back."""
    first = prompt(1)
    before = pair.transfers(pair.decode)
    _, answer = pair.ask(first, 20)
    # 200 tokens are 13 pages, the last one begun.
    told = pair.transfers(pair.decode)
    assert told["pages"] - before["pages"] == 13
    wait_until(
        lambda: pair.transfers(pair.decode)["returns"] == before["returns"] + 1,
        "the answer is back at the prefill server",
    )
    # Of the answer's last token there is no KV; of the prompt prefill has 12 pages.
    held = (200 + 20 - 1) // PAGE * PAGE
    returned = pair.transfers(pair.decode)["pages_returned"]
    assert returned - before["pages_returned"] == held // PAGE - 12
    second = first + answer["output_ids"] + prompt(2, 30)
    by_prefill, by_decode = pair.ask(second, 4)
    assert by_prefill["meta_info"]["cached_tokens"] == held
    assert by_decode["meta_info"]["cached_tokens"] == held
    after = pair.transfers(pair.decode)
    assert after["tokens_held_by_decode"] - told["tokens_held_by_decode"] == held
    assert after["pages"] - told["pages"] == -(-(250 - held) // PAGE)
    theirs = pair.transfers(pair.prefill)
    assert theirs["pages"] == after["pages"]
    assert theirs["bytes_pushed"] > 0
    assert theirs["pushes_failed"] == 0


def test_sessions_at_once_equal_plain(pair, plain):
    """Twice, with pools too small for all of it: answers are plain SGLang's."""
    sessions = {}
    for record in plain.chat:
        sessions.setdefault(record.key.partition(".")[0], []).append(record)
    for _ in range(2):
        played = play_sessions(pair, list(sessions.values()))
        result = check_equality(
            plain.chat, played, page_size=PAGE, spread=plain.spread, forced=False
        )
        assert result.passed, result.summary()
    for server in (pair.prefill, pair.decode):
        state = settle(server)
        assert pinned(state) == 0
        assert edge(state, "device->host") > 0
        told = pair.transfers(server)
        assert (told["rooms_unsettled"], told["releases_held"]) == (0, 0)
        assert told["returns_failed"] == 0
    # What its pool had lost came back to the prefill server from its host tier.
    assert edge(settle(pair.prefill), "host->device") > 0
    assert edge(settle(pair.decode), "host->device") == 0
