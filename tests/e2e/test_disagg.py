"""One prefill and one decode server with tiers on both, our transport between them.

The modes one by one, and faults, are in tests/cluster.
"""

from dataclasses import replace

import numpy as np
import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.sessions import ChatShape, PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import CPU_FLAGS, MB, Device, Tiers, plain_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.disagg_support import (
    PAGE,
    join_prefill,
    pair_flags,
    play_sessions,
    start_pair,
)
from tests.e2e.e2e_support import (
    MODELS,
    REFERENCE_POOL_TOKENS,
    change_weights,
    drop,
    edge,
    pinned,
    record_reference,
    sequential,
    settle,
    stats,
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
NUM_LONG, LONG_PROMPT, LONG_ANSWER = 3, 200, 250
"""Answers that do not fit into that pool together, though all of them may begin."""
LAYERED_TOKENS = 512
LAYERKV = (
    "--tiered-layerkv",
    "on",
    # A half holds one layer of 480 tokens: 30 pages of 16 x 64 x 2 x 2 bytes.
    "--tiered-layerkv-staging-size",
    str(2 * 30 * 4096),
)


@pytest.fixture(scope="module")
def plain(servers, model):
    device = Device(model, REFERENCE_POOL_TOKENS, PAGE, CPU_FLAGS)
    server = servers.get(plain_spec(device, "plain-pd"))
    found = record_reference(server, SHAPE)
    long = [
        PlannedRequest(f"l{n}", tuple(prompt(50 + n, LONG_PROMPT)), LONG_ANSWER)
        for n in range(NUM_LONG)
    ]
    answers = sequential(server, long)
    servers.stop()
    return found, answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def pair(plain, model, folder, may_fork):
    """Mode 3: both keep what they have, only what decode lacks is sent, and answers go
    back to the prefill server's host tier."""
    device = Device(model, POOL_TOKENS, PAGE)
    # Room for more requests than can be answered at a time.
    decode = ("--num-reserved-decode-tokens", "16")
    pair = start_pair(device, folder, flags_of(folder), decode=decode, fork=may_fork)
    yield pair
    for server in (pair.prefill, pair.decode):
        # Each took all that the other said for the other's.
        assert pair.transfers(server)["refused"] == {}
    pair.stop()


def flags_of(folder):
    return (
        *pair_flags(3, Tiers(64 * MB)),
        "--tiered-pool",
        f"file:{folder / 'pool'}",
        # The planner may find an answer of a page not worth a load, or a return.
        "--tiered-load-policy",
        "always",
        "--tiered-pd-returns",
        "always",
    )


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
    # Both instances' figures are behind the decision, though here it is forced.
    decided = pair.transfers(pair.decode)["returning"]["last"][-1]
    assert decided["missing_tokens"] == decided["num_tokens"] == held - 12 * PAGE
    assert decided["figures"] == "planner"
    assert decided["cost_s"] > 0
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


def test_decode_loads_what_its_own_tiers_hold(pair):
    """Its device has lost a first turn: that is loaded, and not sent again."""
    first = prompt(11)
    _, answer = pair.ask(first, 20)
    held = (200 + 20 - 1) // PAGE * PAGE
    drop(pair.decode, "device")
    before, loaded = pair.transfers(pair.decode), settle(pair.decode)
    _, by_decode = pair.ask(first + answer["output_ids"] + prompt(12, 30), 4)
    assert by_decode["meta_info"]["cached_tokens"] == held
    after = pair.transfers(pair.decode)
    assert after["tokens_held_by_decode"] - before["tokens_held_by_decode"] == held
    assert after["pages"] - before["pages"] == -(-(250 - held) // PAGE)
    num_loaded = edge(settle(pair.decode), "host->device") - edge(
        loaded, "host->device"
    )
    assert num_loaded == held // PAGE


def sessions_of(records):
    sessions = {}
    for record in records:
        sessions.setdefault(record.key.partition(".")[0], []).append(record)
    return list(sessions.values())


def assert_equal(plain, records, played):
    result = check_equality(
        records, played, page_size=PAGE, spread=plain.spread, forced=False
    )
    assert result.passed, result.summary()


def test_answers_outgrow_the_decode_servers_pool(pair, plain):
    """Requests are retracted there and go on later: answers are plain SGLang's."""
    reference, long = plain
    assert NUM_LONG * (LONG_PROMPT + LONG_ANSWER) > POOL_TOKENS
    before = pair.decode.log_path.read_text().count("Retract requests")
    played = play_sessions(pair, sessions_of(long))
    assert_equal(reference, long, played)
    assert pair.decode.log_path.read_text().count("Retract requests") > before
    # What they left is found again, whole.
    settle(pair.decode)
    told = pair.transfers(pair.decode)["tokens_held_by_decode"]
    # Of what was answered here: at a near tie that may be another token than alone.
    for record in played:
        longer = [*record.prompt, *record.output, *prompt(60, 20)]
        _, by_decode = pair.ask(longer, 2)
        held = (LONG_PROMPT + LONG_ANSWER - 1) // PAGE * PAGE
        assert by_decode["meta_info"]["cached_tokens"] == held
        told += held
    assert pair.transfers(pair.decode)["tokens_held_by_decode"] == told


def test_layers_are_sent_from_where_they_are(pair, plain, model, folder):
    """A prefill server with layer-wise KV and a device too small for one prompt in all
    layers: what has left it is sent from host rows, and answers are plain SGLang's."""
    reference, _ = plain
    device = Device(model, LAYERED_TOKENS, PAGE)
    layered = join_prefill(pair, device, folder, (*flags_of(folder), *LAYERKV))
    try:
        _layers_are_sent(layered, reference)
    finally:
        layered.stop(keep_decode=True)


def _layers_are_sent(layered, reference):
    state = stats(layered.prefill)["layerkv"]
    # All but the staging memory, in layer-pages of keys and values.
    room = state["layer_pages"]["total"]
    staging = state["layer_pages"]["staging"]
    num_layers = (room + staging) // (LAYERED_TOKENS // PAGE)
    num_pages = 380 // PAGE
    assert num_pages * num_layers > room, "it would fit with all its layers"
    ended = num_decided(layered)
    _, answer = layered.ask(prompt(21, 380), 8)
    assert len(answer["output_ids"]) == 8
    told = layered.transfers(layered.prefill)
    sent = told["bytes_from_host_rows"] + told["bytes_from_device"]
    assert sent % ((num_pages + 1) * num_layers) == 0
    layer_page = sent // ((num_pages + 1) * num_layers)
    least = num_pages * num_layers - room
    assert told["bytes_from_host_rows"] >= least * layer_page
    assert told["pushes_failed"] == 0
    played = play_sessions(layered, sessions_of(reference.chat))
    assert_equal(reference, reference.chat, played)
    after = settle(layered.prefill)
    assert pinned(after) == 0
    told = layered.transfers(layered.prefill)
    assert (told["rooms_unsettled"], told["pushes_failed"]) == (0, 0)
    assert after["layerkv"]["layerkv_requests_lost"] == 0
    # Nothing is on its way to a server that is stopped now.
    ended += 1 + len(reference.chat)
    wait_until(lambda: num_decided(layered) == ended, "answers are back or dropped")


def num_decided(pair):
    """Return how many answers have gone back, or will not."""
    told = pair.transfers(pair.decode)
    names = ("returns", "returns_dropped", "returns_failed", "returns_declined")
    return sum(told[name] for name in names)


def test_sessions_at_once_equal_plain(pair, plain):
    """Twice, with pools too small for all of it: answers are plain SGLang's."""
    reference, _ = plain
    for _ in range(2):
        played = play_sessions(pair, sessions_of(reference.chat))
        assert_equal(reference, reference.chat, played)
    for server in (pair.prefill, pair.decode):
        state = settle(server)
        assert pinned(state) == 0
        assert edge(state, "device->host") > 0
        told = pair.transfers(server)
        assert (told["rooms_unsettled"], told["releases_held"]) == (0, 0)
        assert told["returns_failed"] == 0
    # What its pool had lost came back to the prefill server from its host tier.
    assert edge(settle(pair.prefill), "host->device") > 0


def test_kv_of_other_weights_is_kept_by_nobody(pair, model):
    """Prefill was updated first: decode's tiers rest until both are flushed."""
    trained = make_model(replace(PRESETS["tiny"], seed=1), MODELS)

    def update(weights):
        body = {"model_path": str(weights), "flush_cache": True}
        told = change_weights(pair.prefill, "update_weights_from_disk", body)
        assert told["success"], told

    def stored():
        return settle(pair.decode)["cache"]["pages_stored"]

    assert stats(pair.decode)["weights"]["is_settled"]
    settle(pair.prefill)
    update(trained)
    before = stored()
    pair.ask(prompt(70), 20)
    wait_until(
        lambda: (
            stats(pair.decode)["weights"]["is_mixed"]
            or stats(pair.decode)["weights"]["num_unnamed"]
        ),
        "decode has heard of other weights",
    )
    # The first may have come while prefill was still reading them.
    wait_until(
        lambda: stats(pair.prefill)["weights"]["fingerprint"], "prefill knows them"
    )
    pair.ask(prompt(71), 20)
    assert stats(pair.decode)["weights"]["is_mixed"]
    assert stored() == before
    settle(pair.prefill)
    update(model)
    wait_until(
        lambda: stats(pair.prefill)["weights"]["fingerprint"], "prefill knows them"
    )
    pair.decode.flush_cache()
    pair.ask(prompt(72), 20)
    assert stats(pair.decode)["weights"]["is_settled"]
    assert stored() != before
