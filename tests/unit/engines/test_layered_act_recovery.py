"""A forward whose activations did not come, or were not rebuilt, is run again.

The real manager and mover, and what stands before SGLang's forward; forced, where a
server under load would have to be lucky.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.layered import recovery
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.engines.sglang.layered.recovery import PAUSES_S, RepeatedForward
from sgl_tiered.layered.base import PassRequest
from sgl_tiered.layered.outage import ATTEMPTS
from sgl_tiered.serving.options import LayerKv
from tests.property.layered_driver import LAYERS, PAGES, TOKENS
from tests.unit.layered.act_support import ActDriver, only_acts

HALF, NUM_PHYSICAL = 6, 30
NOTHING = np.zeros(LAYERS, np.bool_)


class Strikes:
    """Fails the first so many attempts of one way."""

    def __init__(self, way, times):
        self.way, self.left = way, times

    def __call__(self, way):
        if way != self.way or not self.left:
            return False
        self.left -= 1
        return True


class Server:
    """Two requests whose KV is on the host only, as activations, and their decodes."""

    def __init__(self):
        self.machine = machine = ActDriver(NUM_PHYSICAL, HALF, choose=only_acts)
        for story in (1, 2):
            key = machine.start(story, 2 * TOKENS, NOTHING, share=False).key
            assert machine.forward([key], 2 * TOKENS) == [key]
        machine.sent_away()
        layout = PageLayout(LAYERS, TOKENS, token_bytes=4)
        settings = LayerKv(retain=0)
        plan = LayerPlan(layout, PAGES - 1, NUM_PHYSICAL, HALF, settings, machine.plan)
        self.driver = LayerDriver(machine.manager, plan)
        self.slept = []
        self.num_forwards = 0
        self.run = RepeatedForward(self._forward, self.driver, sleep=self.slept.append)

    def decode(self):
        """Compute a token of each request; return what became of the batch."""
        reqs = [SimpleNamespace(rid=key) for key in self.machine.requests]
        mode = SimpleNamespace(is_extend=lambda: False)
        done = self.run(SimpleNamespace(reqs=reqs, forward_mode=mode))
        for request in self.machine.requests.values():
            request.num_tokens += 1
        return done

    def _forward(self, batch):
        del batch
        self.num_forwards += 1
        machine, manager = self.machine, self.machine.manager
        parts = []
        for key, request in machine.requests.items():
            assert machine._grow(request, request.num_tokens + 1)
            pages = np.array(request.pages, np.int64)
            parts.append(PassRequest(key, pages, request.num_tokens, 1, NOTHING))
        plan = self.driver.begin_pass(parts)
        for layer in range(LAYERS):
            machine._write(layer, parts)
            for group, (first, stop) in enumerate(plan.groups):
                manager.wait_unit(layer, group)
                table = manager.table(layer)
                for n in range(first, stop):
                    # Compared with the KV that was computed first, number by number.
                    own = table[plan.indptr[n] : plan.indptr[n + 1]]
                    machine._read(layer, parts[n], own)
                manager.unit_done(layer, group)
        self.driver.end_pass()
        return "done"

    @property
    def counters(self):
        return self.driver.counters()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.machine.close()


@pytest.fixture
def aborted(monkeypatch):
    """Whom SGLang is told to end."""
    told = []
    monkeypatch.setattr(
        recovery, "_abort", lambda req, error, *, is_prefill: told.append(req.rid)
    )
    return told


@pytest.mark.parametrize("way", ["acts up", "rebuild"])
@pytest.mark.parametrize("num_broken", [1, len(PAUSES_S)])
def test_a_forward_that_broke_off_is_run_again(server, aborted, way, num_broken):
    """What fails in both attempts costs a repetition and no request."""
    server.machine.copier.fails = lambda found: (
        found == way and server.num_forwards <= num_broken
    )
    assert server.decode() == "done"
    assert server.counters["layerkv_forwards_repeated"] == num_broken
    assert server.counters["layerkv_requests_lost"] == 0
    assert server.slept == list(PAUSES_S[:num_broken])
    assert aborted == []
    assert server.machine.manager.num_rebuilt > 0
    server.machine.check()
    assert server.decode() == "done"


@pytest.mark.parametrize("way", ["acts up", "rebuild"])
def test_one_failure_costs_nothing(server, aborted, way):
    """The second attempt is no repetition of the forward."""
    server.machine.copier.fails = Strikes(way, ATTEMPTS - 1)
    assert server.decode() == "done"
    assert server.counters["layerkv_forwards_repeated"] == 0
    assert aborted == []
