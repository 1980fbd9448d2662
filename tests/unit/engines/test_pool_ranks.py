"""Servers of two ranks in one pool, without SGLang: real sockets, copies, agreement."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.core.addresses import slots_of
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.engines.sglang.pooled.server import join_pool
from sgl_tiered.errors import ConfigError, TransportUnavailableError
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.options import Pool
from sgl_tiered.transport.loopback import open_loopback
from tests.unit.engines.ranks_support import PAGE, Meeting, Rank, on_two_ranks

TOKENS = np.arange(8 * PAGE, dtype=np.int32)
NUM_PAGES = 8
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def loopback():
    """Skip where the kernel copies nothing between processes."""
    try:
        open_loopback().close()
    except TransportUnavailableError as error:
        pytest.skip(f"not run: {error}")


class Server:
    """One rank of a server in a pool."""

    def __init__(self, url, name, number, seat):
        self.agreement = Agreement(SystemClock(), seat)
        self.rank = Rank(number, 3, SystemClock(), self.agreement)
        self.number = number
        self.runtime = self.rank.runtime
        self.served = self.runtime.pool = join_pool(
            Pool(url, name, transport="loopback"),
            self.runtime,
            SimpleNamespace(host="127.0.0.1", port=1),
            2,
        )

    def turns(self, is_done):
        """Do turns until rank 0 is done."""
        until_s = self.agreement.own_clock.now() + PATIENCE_S
        while True:
            late = self.agreement.own_clock.now() > until_s
            told = self.agreement.meet({"done": is_done(), "late": late})
            self.served.rest(self.runtime.completions)
            self.served.poll()
            if told[0]["done"]:
                return
            assert not told[0]["late"], "waited in vain"
            self.served.node.wait(0.01)

    def page(self, position):
        """Return this rank's part of a page of the prompt."""
        draw = np.random.default_rng([self.number, position])
        return draw.integers(0, 256, self.rank.host.region.shape[1], np.uint8)

    def keep(self):
        """Offload the prompt."""
        plan = self.rank.cache.plan_offload(self.rank.digest, TOKENS)
        for position, slot in zip(plan.positions, plan.addresses, strict=True):
            self.rank.host.region[slot] = self.page(int(position))
        done = np.ones(NUM_PAGES, np.bool_)
        self.rank.cache.finish_offload(plan, TransferResult(done, 0, 0.0))

    def found(self):
        """Return how many pages memory has; all are right."""
        store = self.served.store
        blocks = store.match(self.rank.digest, TOKENS)
        num_bytes = self.runtime.parts.device.layout.page_bytes
        for position, slot in enumerate(slots_of(blocks).tolist()):
            kept = self.rank.host.region[slot][:num_bytes]
            assert (kept == self.page(position)[:num_bytes]).all()
        return len(blocks)

    def close(self):
        """Leave the pool and close the tiers."""
        self.served.close()
        self.rank.host.close()


def play(url, over, found, errors):
    """Start the ranks of a holder and of a puller; wait for all."""

    def hold(number, seat):
        server = Server(url, "holder", number, seat)
        server.keep()
        server.turns(over.is_set)
        server.close()

    def pull(number, seat):
        server = Server(url, "puller", number, seat)
        server.turns(lambda: len(server.served.node.view.members) == 2)
        server.rank.cache.use_load_policy("always")
        pulls = server.served.pulls
        pulls.arrived("r", server.rank.digest, TOKENS, 0, NUM_PAGES)
        server.turns(lambda: not pulls.should_wait("r") and not pulls.num_under_way)
        found[number] = (server.found(), pulls.wanted("r").as_dict())
        server.rank.cache.check()
        if number == 0:
            over.set()
        server.close()

    def run(work, number, seat):
        try:
            work(number, seat)
        except BaseException as error:  # noqa: BLE001 - it is asserted on
            errors.append(error)
            over.set()

    threads = []
    for work in (hold, pull):
        meeting = Meeting(2)
        threads += [
            threading.Thread(target=run, args=(work, number, meeting.seat(number)))
            for number in range(2)
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_every_rank_has_its_part_of_what_was_pulled(tmp_path):
    """Equal reports on both, though each measures by itself."""
    found, errors = {}, []
    play(f"file:{tmp_path / 'pool'}", threading.Event(), found, errors)
    assert not errors, errors
    assert found[0][0] == found[1][0] == NUM_PAGES
    assert found[0][1] == found[1][1]
    assert (found[0][1]["holder"], found[0][1]["pages"]) == ("holder", NUM_PAGES)


def test_a_pool_that_cannot_be_entered_ends_all_ranks(tmp_path):
    """Each says why."""

    def work(number, seat):
        with pytest.raises((ConfigError, OSError)) as caught:
            Server(f"file:{tmp_path}", "one", number, seat)
        return str(caught.value)

    texts = on_two_ranks(work)
    assert texts[1].startswith("rank 0 cannot enter the pool: ")
    assert texts[0] in texts[1]
