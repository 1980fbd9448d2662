"""Requests that are aborted in a read from disk and in a split, on one and two ranks.

The disk is slowed down: a read takes as long as computing the same prompt, so that its
front is computed while its back is read. Aborts of loads from host memory are in
``tests/e2e/test_abort.py``.
"""

import os
import time
from dataclasses import replace

import pytest
from sgl_tiered_workloads.model import PRESETS
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec, tiered_spec

from tests.e2e.e2e_support import pinned, settle, stats, wait_until
from tests.scenarios.scenario_support import (
    PAGE,
    PLAIN_POOL,
    Live,
    body,
    cached,
    forget,
    prompt,
    same,
)
from tests.scenarios.test_ranks import on_two_ranks

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

FLAGS = ("--sleep-on-idle",)
NUM_PAGES = 240
LONG = prompt(1400, NUM_PAGES * PAGE + 5)
PROMPT_BYTES = NUM_PAGES * PAGE * PRESETS["tiny"].kv_bytes_per_token
MANY = 100
"""Tokens of an answer that is not over before an abort meets it."""
FIRST = 0.1
"""Share of a split prompt's time after which the first abort comes."""
MAX_ABORTS = 40
MET = 4


def timed(server, request):
    """Return an answer and how many seconds it took."""
    began_s = time.monotonic()
    answer = server.post("/generate", request)
    return answer, time.monotonic() - began_s


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def ranks(request):
    """Return what makes of a server's spec one of so many ranks.

    One has SGLang's overlap schedule, two do without: both, in half of the time.
    """
    if request.param == 1:
        return lambda spec: spec
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("each rank needs a core")

    def of_two(spec):
        return on_two_ranks(
            replace(spec, flags=(*spec.flags, "--disable-overlap-schedule"))
        )

    return of_two


@pytest.fixture(scope="module")
def plain(servers, model, ranks):
    """Plain SGLang's answers, computed whole and again, and the time of the former."""
    spec = plain_spec(Device(model, PLAIN_POOL, PAGE, FLAGS), "plain-aborts")
    server = servers.get(ranks(spec))
    server.post("/generate", body(prompt(1401, len(LONG)), 1))
    _, seconds = timed(server, body(LONG, 1))
    server.flush_cache()
    cold = server.post("/generate", body(LONG))
    again = server.post("/generate", body(LONG))
    servers.stop()
    return cold, again, seconds


@pytest.fixture(scope="module")
def started(servers, model, ranks, plain, tmp_path_factory):
    tiers = Tiers(64 * MB, tmp_path_factory.mktemp("disk"), 128 * MB)
    _, _, seconds = plain
    flags = (
        "--tiered-disk-admission=all",
        f"--tiered-emulate=disk:bandwidth={PROMPT_BYTES / seconds:.0f}",
    )
    spec = tiered_spec(Device(model, 8192, PAGE, FLAGS), tiers, "aborts", flags)
    server = servers.restart(ranks(spec))
    server.post("/generate", body(LONG, 1))
    settle(server)
    yield server
    servers.stop()


def load_by(server, policy):
    """Load by a policy, once nothing runs any more."""
    settle(server)
    server.post(f"/tiered/load-policy?policy={policy}", {})


def demand_plain(server, wanted):
    """Demand that nothing is left behind, and plain's answer to the same prompt."""
    assert pinned(settle(server)) == 0
    forget(server, "disk")
    answer = server.post("/generate", body(LONG))
    same([LONG], [wanted], [answer])
    assert cached(answer).get("disk", 0) > 0
    assert pinned(settle(server)) == 0


def test_aborts_in_a_disk_read(started, plain):
    """Those of a crowd that wait for one read may go; who stays is answered."""
    load_by(started, "always")
    _, again, _ = plain
    for gone in ((0, 2), (0, 1, 2)):
        forget(started, "disk")
        lives = [
            Live(started, body(LONG, MANY, rid=f"read{len(gone)}-{n}"))
            for n in range(3)
        ]
        wait_until(lambda: pinned(stats(started)) > 0, "the read has begun")
        for number in gone:
            rid = f"read{len(gone)}-{number}"
            started.post("/abort_request", {"rid": rid})
        for number, live in enumerate(lives):
            answer = live.join()
            if number in gone:
                assert live.num_tokens == 0
            else:
                assert cached(answer) == {"disk": NUM_PAGES * PAGE}
                assert live.num_tokens == MANY
        assert pinned(settle(started)) == 0
    demand_plain(started, again)


def test_aborts_in_a_split(started, plain):
    """Wherever an abort meets a prompt that is computed at its front and read at its
    back, nothing is left behind, and the same prompt is answered right."""
    cold, _, seconds = plain
    load_by(started, "auto")

    def num_split():
        return stats(started)["counters"].get("decisions_split", 0)

    for _ in range(3):
        # What is known of the disk comes from reads.
        forget(started, "disk")
        before = num_split()
        answer, split_s = timed(started, body(LONG, 1))
        print(cached(answer), num_split() - before, split_s, seconds)
    assert num_split() > before, "nothing was split"
    num_met, after_s = 0, FIRST * split_s
    for number in range(MAX_ABORTS):
        if num_met >= MET:
            break
        forget(started, "disk")
        before = num_split()
        rid = f"split{number}"
        live = Live(started, body(LONG, MANY, rid=rid))
        time.sleep(after_s)
        started.post("/abort_request", {"rid": rid})
        live.join()
        assert pinned(settle(started)) == 0
        # Counted once the front was computed; and no token, so that it never ended.
        is_front = num_split() > before
        print(after_s, is_front, live.num_tokens)
        num_met += is_front and live.num_tokens == 0
        # A prompt takes longer under load: what came early comes later next.
        after_s *= 0.9 if live.num_tokens else 1.1 if is_front else 1.25
    assert num_met > 0, "no abort met a prompt behind its front"
    demand_plain(started, cold)
    started.flush_cache()
    assert {each["used"] for each in stats(started)["occupancy"].values()} == {0}
