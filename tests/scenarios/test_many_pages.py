"""Many tenants and many pages, with metrics on."""

import pytest
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec, tiered_spec

from benchmarks.disk.bench_restart import MODEL as SMALL
from benchmarks.disk.bench_restart import (
    SLOT_BYTES,
    fill_folder,
    make_cache,
    open_tier,
)
from benchmarks.disk.bench_restart import fill as fill_tier
from sgl_tiered.cache.adoption import arrange
from sgl_tiered.core.ids import TierId
from sgl_tiered.serving.namespaces import NamedSpaces
from sgl_tiered.tiers.disk_format import META_NAME, DiskMeta, record_dtype
from tests.draining import give_back
from tests.e2e.e2e_support import (
    MODELS,
    PATIENCE_S,
    drop,
    edge,
    pinned,
    settle,
    stats,
    wait_until,
)
from tests.scenarios.scenario_support import (
    PAGE,
    PLAIN_POOL,
    at_once,
    body,
    cached,
    counter,
    forget,
    prompt,
    same,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

NUM_SALTS = 500
NUM_PAGES = 3
TOKENS = prompt(900, NUM_PAGES * PAGE + 1)
CHECKED = range(0, NUM_SALTS, 50)
FLAGS = ("--sleep-on-idle", "--enable-metrics")
AT_ONCE = 25
ALWAYS = ("--tiered-load-policy=always", "--tiered-disk-admission=all")

NUM_TENANTS, BATCH, RUNNING = 100_000, 1000, 32
"""No more end at once than copies to the host may wait: what is more is not kept."""
NUM_NAMESPACES = 100_000
TENANTS = range(7, NUM_TENANTS, NUM_TENANTS // 40)
"""Some that are asked again."""
NUM_MILLIONS = 2_000_000
SLOT_AND_RECORD = SLOT_BYTES + record_dtype(PAGE).itemsize


def fill(server):
    """Ask one prompt under every salt."""
    for first in range(0, NUM_SALTS, AT_ONCE):
        salts = range(first, first + AT_ONCE)
        answers = at_once(server, [body(TOKENS, 1, cache_salt=f"t{n}") for n in salts])
        for answer in answers:
            assert cached(answer) == {}, "a tenant saw another one's pages"
        settle(server)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_many_salts(servers, model, tmp_path, tier):
    """Each tenant finds its own pages below the device, and no one else's."""
    spec = plain_spec(Device(model, PLAIN_POOL, PAGE, FLAGS), "plain-salts")
    server = servers.get(spec)
    server.post("/generate", body(TOKENS))
    want = server.post("/generate", body(TOKENS))
    servers.stop()
    host = 64 * MB if tier == "host" else 2 * MB
    tiers = Tiers(host, tmp_path, 64 * MB)
    flags = (
        "--tiered-load-policy=always",
        "--tiered-disk-admission=all",
        "--tiered-staging-size=8MB",
    )
    device = Device(model, 2048, PAGE, FLAGS)
    server = servers.restart(tiered_spec(device, tiers, f"salts-{tier}", flags))
    fill(server)
    forget(server, tier)
    state = settle(server)
    assert state["occupancy"][tier]["used"] >= NUM_SALTS * NUM_PAGES
    answers = [
        server.post("/generate", body(TOKENS, cache_salt=f"t{n}")) for n in CHECKED
    ]
    assert [cached(a) for a in answers] == [{tier: NUM_PAGES * PAGE}] * len(answers)
    same([TOKENS] * len(answers), [want] * len(answers), answers)
    state = settle(server)
    assert pinned(state) == 0
    assert edge(state, "host->device") == len(answers) * NUM_PAGES
    # What the metrics say is what the statistics say; published once a second.
    wait_until(
        lambda: all(
            counter(server, "sgl_tiered:edge_pages_total", edge=name) == each["pages"]
            for name, each in state["edges"].items()
        ),
        "the metrics are published",
    )
    # What SGLang's main process counts, a server that is forked does not tell.
    computed = counter(server, "sglang:realtime_tokens_total", mode="prefill_compute")
    assert computed >= NUM_SALTS * len(TOKENS)
    servers.stop()


@pytest.fixture(scope="module")
def small():
    """A model whose pages of 16 tokens take 4 KiB."""
    return make_model(SMALL, MODELS)


def plain_answers(servers, small, prompts):
    """Return plain SGLang's answers to prompts that it has computed before."""
    spec = plain_spec(Device(small, PLAIN_POOL, PAGE, FLAGS), "plain-small")
    server = servers.get(spec)
    for tokens in prompts:
        server.post("/generate", body(tokens))
    answers = [server.post("/generate", body(tokens)) for tokens in prompts]
    servers.stop()
    return answers


def num_series(server):
    """Return how many series the metrics have."""
    return len(str(server.get("/metrics", PATIENCE_S)).splitlines())


@pytest.mark.timeout(2400)  # 100,000 prompts, at some 150 a second
def test_a_hundred_thousand_salts(servers, small, tmp_path):
    """Each has a page on disk and finds it, also after a restart; without pages no name
    of them is kept, and none is in the metrics."""
    tokens = prompt(901, PAGE + 1)
    wanted = plain_answers(servers, small, [tokens]) * len(TENANTS)
    tiers = Tiers(64 * MB, tmp_path, NUM_TENANTS * SLOT_AND_RECORD * 21 // 20)
    device = Device(small, 16384, PAGE, (*FLAGS, f"--max-running-requests={RUNNING}"))
    spec = tiered_spec(device, tiers, "tenants", ALWAYS)

    def ask_some(server):
        forget(server, "disk")
        answers = [
            server.post("/generate", body(tokens, cache_salt=f"tenant {n}"))
            for n in TENANTS
        ]
        assert [cached(one) for one in answers] == [{"disk": PAGE}] * len(TENANTS)
        same([tokens] * len(TENANTS), wanted, answers)

    server = servers.restart(spec)
    # SGLang's first request of itself has a page, and no salt.
    server.flush_cache()
    before = 0
    for first in range(0, NUM_TENANTS, BATCH):
        salts = [f"tenant {n}" for n in range(first, first + BATCH)]
        request = body([list(tokens)] * BATCH, 1, cache_salt=salts)
        del request["return_logprob"], request["top_logprobs_num"]
        answers = server.post("/generate", request)
        assert [cached(one) for one in answers] == [{}] * BATCH
        settle(server)
        before = before or num_series(server)
    state = settle(server)
    assert not state["counters"].get("offload_dropped_pages")
    assert (state["namespaces"], state["empty_namespaces"]) == (NUM_TENANTS, 0)
    assert state["occupancy"]["disk"]["used"] == NUM_TENANTS
    assert num_series(server) <= before + 50
    ask_some(server)

    server = servers.restart(spec)
    wait_until(
        lambda: stats(server)["adoption"]["adopted"] == NUM_TENANTS,
        "all pages are adopted",
    )
    ask_some(server)
    drop(server, "device", "host", "disk")
    state = settle(server)
    assert (state["namespaces"], state["empty_namespaces"]) == (0, 0)
    assert pinned(state) == 0
    servers.stop()


def test_a_hundred_thousand_namespaces(tmp_path):
    """Without a server: as many, of one page each, are adopted from disk, and their
    names are kept as long as the pages."""
    tier = open_tier(tmp_path, NUM_NAMESPACES, "salts")
    assert fill_tier(tier, NUM_NAMESPACES, 0, 1, 1) == NUM_NAMESPACES
    tier.close()
    tier = open_tier(tmp_path, NUM_NAMESPACES, "salts")
    found = tier.recover()
    cache = make_cache(tier.num_slots)
    names = NamedSpaces(cache.has_pages)
    cache.watch_namespaces(names.lost_pages)
    adoption = cache.begin_adoption(TierId.DISK, arrange(found))
    while adoption.step(4096):
        pass
    assert adoption.num_adopted == cache.num_namespaces == NUM_NAMESPACES
    for number, digest in enumerate(found.namespaces):
        names.add(("", f"tenant {number}"), digest.tobytes())
    assert (len(names), names.num_empty) == (NUM_NAMESPACES, 0)
    cache.check()
    cache.drop_tier(TierId.DISK)
    give_back(cache)
    names.drop_empty()
    assert (cache.num_namespaces, len(names)) == (0, 0)
    tier.close()


def test_metrics_over_millions_of_pages(servers, small, tmp_path):
    """A server that adopts them answers, tells its metrics, and forgets them again."""
    prompts = [prompt(910 + number, 40 * PAGE + 1) for number in range(8)]
    wanted = plain_answers(servers, small, prompts)
    # The room of a folder that is filled so.
    disk_bytes = int(1.02 * NUM_MILLIONS + 1024) * SLOT_AND_RECORD
    tiers = Tiers(64 * MB, tmp_path / "disk", disk_bytes)
    spec = tiered_spec(Device(small, 8192, PAGE, FLAGS), tiers, "millions", ALWAYS)
    servers.restart(spec)
    servers.stop()
    meta = DiskMeta.from_json((tmp_path / "disk" / META_NAME).read_text())
    num_pages = fill_folder(tmp_path / "disk", meta, NUM_MILLIONS)

    # Not ``restart``, which waits until the pages are adopted.
    server = servers.get(spec)
    num_looks = 0
    for number in range(10_000):
        tokens = prompts[number % len(prompts)]
        answer = server.post("/generate", body(tokens))
        same([tokens], [wanted[number % len(prompts)]], [answer])
        adoption = stats(server)["adoption"]
        found = counter(server, "sgl_tiered:occupancy_pages", tier="disk", state="used")
        # Their slots are in use from the first one on.
        num_looks += 0 < adoption["adopted"] < num_pages <= found
        if adoption["state"] == "done":
            break
    assert num_looks > 0, "the metrics were not asked while pages were adopted"
    state = settle(server)
    used = state["occupancy"]["disk"]["used"]
    assert used >= num_pages + len(prompts) * 40
    assert state["adoption"]["adopted"] == num_pages
    wait_until(
        lambda: (
            counter(server, "sgl_tiered:occupancy_pages", tier="disk", state="used")
            == used
        ),
        "the metrics are published",
    )
    for tokens, want in zip(prompts, wanted, strict=True):
        forget(server, "disk")
        answer = server.post("/generate", body(tokens))
        assert cached(answer) == {"disk": 40 * PAGE}
        same([tokens], [want], [answer])
    server.flush_cache(PATIENCE_S)
    state = settle(server)
    assert {tier["used"] for tier in state["occupancy"].values()} == {0}
    answer = server.post("/generate", body(prompts[0]))
    assert cached(answer) == {}
    same(prompts[:1], wanted[:1], [answer])
    servers.stop()
