"""One server with a small host and a disk: what might make its answers wrong.

The tests share the server and start from an empty cache each.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens, replay
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from sgl_tiered.tiers.disk_format import (
    INDEX_NAME,
    META_NAME,
    read_records,
    record_dtype,
    slab_name,
)
from tests.e2e.e2e_support import (
    ANSWER_TOKENS,
    BURST_PREFIX_TOKENS,
    PATIENCE_S,
    Case,
    burst_requests,
    drop,
    edge,
    open_loop,
    pinned,
    sequential,
    settle,
    stats,
    wait_until,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16)
# 122 pages of 16 KiB: less than half of the chats' 263.
HOST_BYTES = 2 * MB
PROMPT_PAGES = 30


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def spec(model, disk):
    # Random eviction leaves a prompt's pages on both tiers, in any mixture.
    flags = (
        "--tiered-load-policy=always",
        "--tiered-eviction-policy=random",
        "--tiered-staging-size=8MB",
    )
    tiers = Tiers(HOST_BYTES, disk, 64 * MB)
    return tiered_spec(CASE.device(model), tiers, flags=flags)


@pytest.fixture(scope="module")
def plain(reference):
    return reference(CASE)


@pytest.fixture
def server(servers, spec, plain):
    server = servers.get(spec)
    server.flush_cache()
    return server


def fresh_prompt(seed):
    """Return a prompt of its own, a few tokens longer than its pages."""
    tokens = random_tokens(
        np.random.default_rng(seed), PROMPT_PAGES * CASE.page_size + 5, VOCAB_TOKENS
    )
    return PlannedRequest(f"fresh{seed}", tokens, ANSWER_TOKENS)


def assert_same(plain, before, after):
    """Demand equal answers up to what plain SGLang differs from itself."""
    result = check_equality(
        before, after, page_size=CASE.page_size, spread=plain.spread, forced=False
    )
    assert result.passed, result.summary()


def left_on_disk_only(server, request):
    """Send a request and leave its pages on disk alone; return the answer."""
    (cold,) = sequential(server, [request])
    assert cold.error is None
    drop(server, "device", "host")
    return cold


def test_chats_equal_plain(server, plain):
    """Chats larger than device and host together get plain SGLang's answers."""
    answers = sequential(server, replay(plain.chat))
    result = check_equality(
        plain.chat,
        answers,
        page_size=CASE.page_size,
        spread=plain.spread,
        min_exact_fraction=0.5,
        must_cover=("host", "disk"),
    )
    assert result.passed, result.summary()
    state = settle(server)
    assert pinned(state) == 0
    assert edge(state, "host->device") > 0
    assert edge(state, "disk->host") > 0


@pytest.mark.parametrize("dropped", [("device",), ("device", "host")])
def test_one_transfer_serves_all_who_wait(server, plain, dropped):
    """Requests for one prefix that come together cause one transfer of it."""
    requests = burst_requests()
    prefix = requests[0].prompt[:BURST_PREFIX_TOKENS]
    sequential(server, [PlannedRequest("prime", prefix, 1)])
    drop(server, *dropped)
    before = stats(server)
    answers = open_loop(server, requests)
    after = settle(server)
    assert_same(plain, plain.burst, answers)
    # The prompt's last page is computed while its last token has to be.
    num_pages = BURST_PREFIX_TOKENS // CASE.page_size
    for name in ("host->device", *(["disk->host"] if "host" in dropped else [])):
        moved = edge(after, name) - edge(before, name)
        assert 0 < moved <= num_pages, (name, moved)
    assert pinned(after) == 0


def test_tenants_are_apart(server):
    """A prompt under another cache salt is no hit, on no tier, and answers alike."""
    prompt = fresh_prompt(1).prompt

    def ask(salt):
        answer = server.generate(prompt, ANSWER_TOKENS, cache_salt=salt)
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]

    first, cached = ask("a")
    assert cached == 0
    drop(server, "device")
    other, cached = ask("b")
    assert cached == 0
    assert other == first
    drop(server, "device", "host")
    _, cached = ask("c")
    assert cached == 0
    drop(server, "device", "host")
    _, cached = ask("a")
    assert cached == PROMPT_PAGES * CASE.page_size


def test_flush_cache_forgets_every_tier(server):
    """After /flush_cache nothing is found anywhere, and the answer is the same."""
    request = fresh_prompt(2)
    (cold,) = sequential(server, [request])
    settle(server)
    server.flush_cache()
    state = stats(server)
    assert {name: tier["used"] for name, tier in state["occupancy"].items()} == {
        "host": 0,
        "disk": 0,
    }
    (again,) = sequential(server, [request])
    assert again.cached_tokens == 0
    assert again.output == cold.output
    assert again.top_logprobs == cold.top_logprobs


def test_policy_and_counters_are_visible(server, spec):
    """Flags are in /server_info, and a prompt's tokens in the statistics."""
    info = server.server_info()
    assert info["radix_cache_backend"] == "tiered"
    assert info["tiered_eviction_policy"] == "random"
    assert info["tiered_disk_path"] == str(
        spec.flags[spec.flags.index("--tiered-disk-path") + 1]
    )
    before = stats(server)["counters"]
    request = fresh_prompt(3)
    sequential(server, [request])
    after = settle(server)["counters"]
    grown = after["tokens_total"] - before.get("tokens_total", 0)
    assert grown == len(request.prompt)


def test_stats_name_a_way_of_loads_only_where_one_was_chosen(server):
    """The ways are those of a device with streams (``contract/test_waits.py``); here
    layers are copied by a core, and there is nothing to choose."""
    request = fresh_prompt(4)
    sequential(server, [request])
    drop(server, "device")
    before = stats(server)
    (again,) = sequential(server, [request])
    after = settle(server)
    loaded = edge(after, "host->device") - edge(before, "host->device")
    assert loaded == again.cached_tokens // CASE.page_size == PROMPT_PAGES
    assert "loads_by" not in after["served"]
    assert after["served"]["machine"]["accelerator"] == "none"


def test_restart_on_a_kept_disk(servers, server, spec, plain):
    """A new server on the same folder serves the old one's pages, and answers right."""
    requests = [fresh_prompt(seed) for seed in (10, 11, 12)]
    before = sequential(server, requests)
    settle(server)
    server = servers.restart(spec)
    after = sequential(server, requests)
    for record in after:
        on_disk = record.cached_by_tier.get("disk", 0)
        assert on_disk == PROMPT_PAGES * CASE.page_size, record.cached_by_tier
    assert_same(plain, before, after)


def test_admin_calls_while_requests_run(server, plain):
    """Clear the disk and ask for a flush, wrong settings and a drop: every answer is
    right, and the server is idle and empty afterwards."""
    requests = [fresh_prompt(seed) for seed in range(40, 52)]
    before = sequential(server, requests)
    drop(server, "device", "host")
    num_read = edge(stats(server), "disk->host")
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(open_loop, server, requests)
        wait_until(
            lambda: edge(stats(server), "disk->host") > num_read or answers.done(),
            "pages are read from disk",
        )
        server.post("/hicache/storage-backend/clear", {})
        wrong = {"server_args": {"tiered_load_policy": 99, "tiered_profile": -7}}
        assert server.post("/set_internal_state", wrong) == [False]
        flushed = pool.submit(server.post, f"/flush_cache?timeout={PATIENCE_S}", {})
        assert_same(plain, before, answers.result())
        flushed.result()
    state = settle(server)
    assert pinned(state) == 0
    assert {name: tier["used"] for name, tier in state["occupancy"].items()} == {
        "host": 0,
        "disk": 0,
    }
    assert_same(plain, before, sequential(server, requests))


@pytest.mark.parametrize("victim", [0, PROMPT_PAGES // 2, PROMPT_PAGES - 1])
def test_a_flipped_bit_is_a_miss(server, plain, disk, victim):
    """One wrong bit on disk costs the pages from there on, and no wrong token."""
    request = fresh_prompt(20 + victim)
    cold = left_on_disk_only(server, request)
    flip_bit(disk, page_tokens(request, victim))
    before = stats(server)
    (again,) = sequential(server, [request])
    after = settle(server)
    assert again.cached_by_tier.get("disk", 0) == victim * CASE.page_size
    assert_same(plain, [cold], [again])
    failed = [edge(state, "disk->host", "failed_pages") for state in (before, after)]
    assert failed[1] == failed[0] + 1
    assert pinned(after) == 0


def test_a_wholly_damaged_disk_is_a_miss(server, plain, disk):
    """Where every byte on disk is wrong the prompt is computed, and right."""
    request = fresh_prompt(61)
    cold = left_on_disk_only(server, request)
    for slab in disk.glob("tiered-slab-*.kv"):
        content = np.fromfile(slab, np.uint8)
        write_over(slab, 0, (content ^ 0xFF).tobytes())
    (again,) = sequential(server, [request])
    assert_same(plain, [cold], [again])
    assert again.cached_by_tier.get("disk", 0) == 0
    assert pinned(settle(server)) == 0


def test_a_read_error_is_a_miss(server, plain, disk):
    """Where the files can no longer be read the prompt is computed, and right."""
    request = fresh_prompt(62)
    cold = left_on_disk_only(server, request)
    before = stats(server)
    for slab in disk.glob("tiered-slab-*.kv"):
        os.truncate(slab, 0)
    (again,) = sequential(server, [request])
    after = settle(server)
    assert_same(plain, [cold], [again])
    assert again.cached_by_tier.get("disk", 0) == 0
    failures = [edge(state, "disk->host", "failures") for state in (before, after)]
    assert failures[1] > failures[0]
    assert pinned(after) == 0


def page_tokens(request, page):
    size = CASE.page_size
    return request.prompt[page * size : (page + 1) * size]


def flip_bit(folder, tokens):
    """Flip one bit in the middle of the page that holds ``tokens``."""
    meta = json.loads((folder / META_NAME).read_text())
    dtype = record_dtype(meta["page_tokens"])
    raw = np.fromfile(folder / INDEX_NAME, dtype)
    records = read_records(raw, 0)
    (match,) = np.flatnonzero((records["tokens"][:, : len(tokens)] == tokens).all(1))
    slot = int(records["slot"][match])
    slab = folder / slab_name(slot // meta["slots_per_slab"])
    offset = slot % meta["slots_per_slab"] * meta["slot_bytes"]
    offset += meta["page_bytes"] // 2
    with slab.open("rb") as file:
        file.seek(offset)
        (byte,) = file.read(1)
    write_over(slab, offset, bytes([byte ^ 4]))


def write_over(path, offset, content):
    """Write into a file and make sure that direct reads see it."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
