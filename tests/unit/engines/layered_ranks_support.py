"""Layers on the ranks of a tensor-parallel server: same requests, all else its own.

Each rank has the real manager, mover, driver, admission and turns. When its copies end
and which of them fail, its clock and the times of its steps are drawn from a generator
of its own; copies are numbers.
"""

from __future__ import annotations

import threading
import time
import zlib
from types import SimpleNamespace

import numpy as np

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.decode import DecodeCost
from sgl_tiered.cost.streaming import StreamingCost
from sgl_tiered.engines.sglang.decoders import Decoders
from sgl_tiered.engines.sglang.layered.admission import LayerAdmission
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.engines.sglang.layered.facts import LayerFacts
from sgl_tiered.engines.sglang.layered.forecasting import LayerForecast
from sgl_tiered.engines.sglang.layered.turns import DecodeTurns
from sgl_tiered.engines.sglang.lengths import LengthReader
from sgl_tiered.errors import TieredError
from sgl_tiered.layered.base import LayerRoomError, PassRequest
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.layered.outage import Outage
from sgl_tiered.policies.layers.turns import PauseTurns
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.length.registry import make_length_predictor
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.layered.ranks import SharedMover
from sgl_tiered.serving.options import LayerKv, Options
from sgl_tiered.testing.fake_layers import FakeLayerCopier
from tests.unit.engines.ranks_support import in_threads

LAYOUT = PageLayout(num_layers=4, page_tokens=4, token_bytes=8)
PAGE = LAYOUT.page_tokens
PAGES, LAYER_PAGES, HALF = 90, 150, 12
MAX_RUNNING = 7
FAILS = 0.15
"""Of copies that leave or return, tried twice each: on this rank alone."""


class Copier(FakeLayerCopier):
    """Takes its time, which is another on each rank, and fails now and then.

    What a forward waits for does not fail: that ends a server, with or without ranks.
    """

    def __init__(self, rng, fails):
        super().__init__(LAYOUT.num_layers, PAGES + 1, LAYER_PAGES + 1, PAGE)
        # One for each thread.
        self.rngs = dict(zip(("down", "up"), rng.spawn(2), strict=True))
        self.share = fails
        self.num_failed = 0
        self.fails = self.does_fail

    def does_fail(self, direction):
        if threading.current_thread().name.startswith("layers-stream"):
            return False
        rng = self.rngs[direction]
        time.sleep(float(rng.exponential(3e-4)))
        failed = rng.random() < self.share
        self.num_failed += failed
        return failed


class OwnMover(LayerMover):
    """Copies have landed for a rank when they have landed there."""

    def __init__(self, agreement, *args):
        super().__init__(*args)


class OwnOutages(SharedMover):
    """Each rank holds copies back where its own have failed, until one works."""

    def __init__(self, *args):
        super().__init__(*args)
        # On a clock that stands still, however long passes take on this machine.
        self._own = tuple(Outage("of this rank", ManualClock()) for _ in self._own)
        self.to_device, self.to_host = self._own

    def _merged(self, number):
        # How it ended on all ranks is not to reach what this one holds back by.
        self.to_device = self.to_host = Outage("of all ranks", ManualClock())
        landing = super()._merged(number)
        self.to_device, self.to_host = self._own
        return landing


class Request:
    """A request that all ranks get, as SGLang's."""

    def __init__(self, number, common):
        self.rid = f"r{number}"
        self.origin_input_ids = [1] * int(common.integers(8, 44))
        self.num_out = int(common.integers(4, 40))
        self.output_ids = []
        self.pages = []
        self.kv = SimpleNamespace(kv_committed_len=0)
        self.extra_key = self.cache_salt = None
        target = {"tpot_s": float(common.uniform(0.2, 2.0))} if number % 2 else {}
        self.sampling_params = SimpleNamespace(
            max_new_tokens=self.num_out, custom_params={"tiered": target}
        )
        self.time_stats = SimpleNamespace(prefill_finished_time=0.0)
        self.finished_reason = SimpleNamespace(to_json=lambda: {"type": "stop"})
        self.is_gone = False
        self.to_finish = None

    @property
    def output_ids_through_stop(self):
        return self.output_ids

    def finished(self):
        return self.is_gone or len(self.output_ids) >= self.num_out


class LayeredRank:
    """One rank's scheduler.

    Args:
        rank: its number.
        seed: of the requests; with the number, of all that is its own.
        agreement: with the others; of a single rank where it is to be left out.
        mover: class of its mover.
        fails: share of copies.
    """

    def __init__(self, rank, seed, agreement, mover=SharedMover, fails=FAILS):
        self.own = np.random.default_rng([seed, rank])
        self.common = np.random.default_rng(seed)
        self.agreement = agreement
        self.log = []
        self.counts = dict.fromkeys(("held", "paused", "broken", "streamed"), 0)
        self.number = 0
        self.queue, self.running = [], []
        self.free = list(range(PAGES, 0, -1))
        self.copier = Copier(self.own, fails)
        self.mover = mover(agreement, self.copier, LAYOUT.layer_page_bytes)
        layers = LAYOUT.num_layers
        binding = LayerBinding(layers, PAGES + 1, LAYER_PAGES, first_physical=1)
        self.manager = LayerManager(binding, self.mover, PAGE, HALF)
        plan = LayerPlan(LAYOUT, PAGES, LAYER_PAGES, HALF, LayerKv())
        self.driver = LayerDriver(self.manager, plan)
        # A page of all layers takes half a step.
        bytes_per_s = LAYOUT.page_bytes / 5e-3
        self.runtime = SimpleNamespace(
            cost=SimpleNamespace(link_figures=lambda tier: (0.0, bytes_per_s)),
            predicted_pass_s=lambda rid, prefix, new: 1e-3 * new,
        )
        decode = DecodeCost(0.008, 0.0005, 1e-5)
        self.learn = agreement.learned(decode.observe)
        self.lengths = LengthReader(LengthBook(make_length_predictor("online")))
        decoders = Decoders(Options(), self.lengths, agreement)
        forecast = LayerForecast(self.driver, decoders.tokens_left)
        self.admission = LayerAdmission(self.driver, self.runtime, forecast)
        policy = PauseTurns()
        facts = LayerFacts(
            self.manager,
            plan,
            policy,
            decoders,
            StreamingCost(decode),
            lambda: bytes_per_s,
            agreement,
        )
        self.turns = DecodeTurns(self.driver, self.admission, policy, facts, forecast)

    def run(self, num_passes):
        """Run, and return the log."""
        for _ in range(num_passes):
            self.step()
        return self.log

    def step(self):
        """One turn of the scheduler's loop."""
        self.agreement.own_clock.advance(float(self.own.uniform(0.05, 0.5)))
        self.agreement.meet({})
        self.receive()
        batch = self.admitted()
        if batch:
            self.forward([(req, len(req.origin_input_ids)) for req in batch])
            self.running += [req for req in batch if not req.is_gone]
        elif self.running:
            chosen = self.turns.choose(self.running)
            self.agreement.note(chosen)
            self.log.append(tuple(self.running[n].rid for n in chosen))
            self.counts["paused"] += len(chosen) < len(self.running)
            self.decode([self.running[n] for n in chosen])
        for req in [req for req in self.running if req.finished()]:
            self.running.remove(req)
            self.end(req)
        room = self.manager.room()
        where = zlib.crc32(self.manager.binding.device.tobytes())
        self.log.append((room.free, room.spare, room.landing, room.cached, where))

    def receive(self):
        """Take what arrives in this pass, and what is aborted."""
        if len(self.queue) < 4 and self.common.random() < 0.3:
            self.number += 1
            self.queue.append(Request(self.number, self.common))
        if self.running and self.common.random() < 0.03:
            req = self.running[int(self.common.integers(len(self.running)))]
            req.is_gone = True

    def admitted(self):
        """Search the queue as SGLang's adder does."""
        batch = []
        self.admission.begin(self.running)
        for req in list(self.queue):
            new = len(req.origin_input_ids)
            num_pages = -(-(new + req.num_out) // PAGE)
            promised = sum(
                -(-(len(one.origin_input_ids) + one.num_out) // PAGE) - len(one.pages)
                for one in [*self.running, *batch]
            )
            is_full = len(self.running) + len(batch) >= MAX_RUNNING
            if is_full or promised + num_pages > len(self.free):
                break
            is_alone = not self.running and not batch
            if not self.admission.admit(req, 0, new, is_alone=is_alone):
                self.counts["held"] += 1
                self.log.append(("held", req.rid))
                break
            self.admission.commit()
            self.queue.remove(req)
            batch.append(req)
            self.log.append((req.rid, tuple(self.driver._decided[req.rid])))
        return batch

    def decode(self, reqs):
        """Compute a token of each."""
        if not self.forward([(req, 1) for req in reqs]):
            return
        contexts = sum(req.kv.kv_committed_len for req in reqs)
        self.learn(len(reqs), contexts, float(self.own.uniform(0.004, 0.04)))

    def forward(self, parts):
        """Run a pass over so many new tokens of requests; False where it broke off."""
        passes = []
        for req, new in parts:
            total = req.kv.kv_committed_len + new
            while len(req.pages) * PAGE < total:
                req.pages.append(self.free.pop())
            pages = np.array(req.pages, np.int64)
            retained = self.driver.decided(req.rid)
            passes.append(
                PassRequest(req.rid, pages, req.kv.kv_committed_len, new, retained)
            )
        try:
            plan = self.driver.begin_pass(passes)
            self.counts["streamed"] += plan.num_units > 0
            self.compute(plan, passes)
        except (LayerRoomError, TieredError) as error:
            self.broken(parts, error)
            return False
        self.driver.end_pass()
        for req, new in parts:
            req.kv.kv_committed_len += new
            req.output_ids.append(0)
            if not req.time_stats.prefill_finished_time:
                own_s = self.agreement.own_clock.now()
                req.time_stats.prefill_finished_time = own_s
        return True

    def compute(self, plan, passes):
        """Write and read all layers."""
        written = np.concatenate(
            [one.pages[one.num_context // PAGE :] for one in passes]
        )
        for layer in range(LAYOUT.num_layers):
            self.manager.pages_for_write(layer, written)
            self.manager.layer_written(layer)
            for group in range(len(plan.groups)):
                self.manager.wait_unit(layer, group)
                self.manager.unit_done(layer, group)

    def broken(self, parts, error):
        """Abort what a pass had no room for, as copies failed on some rank."""
        self.counts["broken"] += 1
        self.log.append(("broken", type(error).__name__))
        if isinstance(error, LayerRoomError):
            self.manager.end_pass(ok=False)
            self.driver._is_open = False
        for req, _ in parts:
            req.is_gone = True
            if req not in self.running:
                self.end(req)

    def end(self, req):
        """Give all of a request back."""
        self.driver.finished(req.rid)
        self.lengths.released(req)
        self.agreement.forget(req.rid)
        self.driver.freed(np.array(req.pages, np.int64))
        self.free += req.pages[::-1]
        self.log.append(("ended", req.rid))


def run_layered(num_ranks, num_passes, seed, *, kind=Agreement, meets=True, **own):
    """Run ranks in threads; return them, what ended any, and the meeting.

    Args:
        num_ranks: how many.
        num_passes: of each.
        seed: of the requests, and of what each rank draws.
        kind: of the agreement.
        meets: False leaves each rank alone.
        own: as of ``LayeredRank``.
    """

    def work(number, seat):
        clock = ManualClock(300.0 * number)
        agreement = kind(clock, seat if meets else None)
        rank = LayeredRank(number, seed, agreement, **own)
        try:
            rank.run(num_passes)
            rank.manager.check()
        finally:
            agreement.leave()
            rank.manager.close()
        return rank

    return in_threads(num_ranks, work)
