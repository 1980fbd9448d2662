"""Ranks of a tensor-parallel server on stand-ins: same requests, all else its own.

Each rank has the real runtime (cache, coordinator, prefetcher, breakers), order,
admission, length predictor and device ranking. Its clock, its links, and when and how
its transfers end are drawn from a generator of its own.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.device_ranking import DeviceRanking
from sgl_tiered.cache.foresight import foresee
from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.cost.decode import DecodeCost
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.engines.device.probe import common_costs
from sgl_tiered.engines.sglang.lengths import LengthReader
from sgl_tiered.engines.sglang.prefetching import QueuePrefetch
from sgl_tiered.engines.sglang.runtime import Parts, TieredRuntime
from sgl_tiered.engines.sglang.slo_admission import ServedAdmission
from sgl_tiered.errors import RanksPartedError
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import (
    CompletionQueue,
    DemoteFinished,
    LoadFigures,
    LoadFinished,
    OffloadFinished,
    PromoteFinished,
    StageFinished,
)
from sgl_tiered.pipelines.promote import PromotedRead
from sgl_tiered.pipelines.staging import StagedRead
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.length.registry import make_length_predictor
from sgl_tiered.policies.order.base import Location
from sgl_tiered.policies.order.queue import Outlook, QueueOrder
from sgl_tiered.policies.order.registry import make_order
from sgl_tiered.serving.agreement import ARRIVED, Agreement
from sgl_tiered.serving.options import Observe, Options, Queue, Slo
from sgl_tiered.serving.weights import WeightsIdentity
from sgl_tiered.sim.device_tree import DeviceTree
from sgl_tiered.testing.emulator import Emulator
from sgl_tiered.testing.fakes import FakeDevicePool, FakeTier
from sgl_tiered.tiers.host import HostTier
from tests.unit.engines.weights_support import FakeWeights

LAYOUT = PageLayout(num_layers=2, page_tokens=2, token_bytes=96)
PAGE = LAYOUT.page_tokens
DEVICE_PAGES, HOST_SLOTS, DISK_SLOTS, STAGING_ROWS = 60, 40, 160, 16
MAX_PER_PASS, MAX_RUNNING = 3, 6
SERIES = 40
"""Requests that do not come again, of more pages than are trusted; then of families."""
BAD_SHARE = 0.02
"""Of transfers, or of pages read from disk: they fail on this rank alone."""
MEETING_TIMEOUT_S = 20.0
"""Only ranks that have parted wait so long for each other."""


class Meeting:
    """Ranks of threads of one process, and how often they met."""

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=MEETING_TIMEOUT_S)
        self.told = [b""] * num_ranks
        self.num_messages = 0

    def seat(self, rank):
        """Return one rank's view."""
        return SimpleNamespace(
            rank=rank,
            num_ranks=self.num_ranks,
            gather=lambda message: self.gather(rank, message),
        )

    def gather(self, rank, message):
        """Exchange; also an exchange of nothing is one."""
        self.told[rank] = message
        self.barrier.wait()
        told = list(self.told)
        if rank == 0:
            self.num_messages += 1
        self.barrier.wait()
        return told


class Pipelines:
    """Every transfer of a rank: ends some passes later, as its generator says."""

    def __init__(self, rng):
        self.rng = rng
        self.completions = CompletionQueue()
        self.waiting = []
        self.staged = []
        self.promoted = []
        self.region = np.zeros((STAGING_ROWS, LAYOUT.slot_bytes), np.uint8)
        self.is_free = np.ones(STAGING_ROWS, np.bool_)
        self.largest_read_pages = STAGING_ROWS
        self.num_offloads = 0

    def step(self):
        """Let a pass go by."""
        self.waiting = [(left - 1, event) for left, event in self.waiting]
        for left, event in self.waiting:
            if left <= 0:
                self.num_offloads -= isinstance(event, OffloadFinished)
                self.completions.post(event)
        self.waiting = [item for item in self.waiting if item[0] > 0]
        for read in list(self.staged):
            self.read_on(read)
        for read in list(self.promoted):
            self.promote_on(read)

    def seconds(self):
        """Return how long something took here."""
        return float(self.rng.uniform(0.001, 0.02))

    def result(self, num_pages, *, checksums=False):
        """Return the result of a transfer of which a page may be bad."""
        ok = self.rng.random(num_pages) >= BAD_SHARE
        sums = np.zeros(num_pages if checksums else 0, np.uint64)
        num_bytes = int(ok.sum()) * LAYOUT.page_bytes
        error = "" if ok.all() else "told to fail"
        return TransferResult(ok, num_bytes, self.seconds(), sums, error)

    def after_a_while(self, event):
        """Post it one to six passes later."""
        self.waiting.append((int(self.rng.integers(1, 7)), event))

    # As a StagingReader, whose progress is seen page by page.

    @property
    def num_free_rows(self):
        return int(self.is_free.sum())

    def try_submit_read(self, plan, positions):
        if len(positions) > self.num_free_rows:
            return None
        rows = np.flatnonzero(self.is_free)[: len(positions)]
        self.is_free[rows] = False
        read = StagedRead(plan, positions, self.region, rows, 1)
        self.staged.append(read)
        return read

    def read_on(self, read):
        read._is_alone = bool(self.rng.integers(2))
        for _ in range(int(self.rng.integers(0, 5))):
            part = read._take()
            if part is None:
                positions, result = read._summed()
                read.result = replace(result, seconds=self.seconds())
                self.staged.remove(read)
                if read._released:
                    self.is_free[read.rows] = True
                event = StageFinished(read.plan, positions, read, read.result)
                self.completions.post(event)
                return
            read._put(part, self.result(part.stop - part.start))

    def release(self, read):
        if read._released:
            return
        read._released = True
        read.cancel()
        if read.done:
            self.is_free[read.rows] = True

    # As a PromoteWorker.

    def submit_promotion(self, plan):
        read = PromotedRead(plan)
        self.promoted.append(read)
        return read

    def promote_on(self, read):
        if not read._is_cancelled.is_set():
            read._num_done += int(self.rng.integers(0, 4))
        if read.num_left > 0:
            return
        self.promoted.remove(read)
        num_read = min(read._num_done, read.plan.num_pages)
        positions = np.arange(num_read, dtype=np.int32)
        alone = bool(self.rng.integers(2))
        event = PromoteFinished(read.plan, positions, self.result(num_read), alone)
        self.completions.post(event)

    # As the others.

    def try_submit_offload(self, plan, device_pages, after):
        if self.num_offloads >= 64:
            return False
        self.num_offloads += 1
        result = self.result(len(plan.pages), checksums=True)
        self.after_a_while(OffloadFinished(plan, result))
        return True

    def submit_demotion(self, plan):
        result = self.result(len(plan.pages), checksums=True)
        self.after_a_while(DemoteFinished(plan, result))

    def submit_load(self, jobs):
        landed = bool(self.rng.random() >= 5 * BAD_SHARE)
        seconds = self.seconds()
        num_bytes = sum(len(j.device_pages) for j in jobs) * LAYOUT.page_bytes
        ticket = SimpleNamespace(wait=lambda: landed, stall_s=0.0)
        host = TierId.HOST
        figures = LoadFigures(
            {host: (num_bytes, seconds)},
            frozenset([host]),
            None if landed else host,
        )
        plans = tuple(job.plan for job in jobs)
        error = "" if landed else "told to fail"
        self.after_a_while(
            LoadFinished(ticket, plans, landed, num_bytes, seconds, error, figures)
        )
        return ticket

    def part(self, **methods):
        """Return a worker of these methods that never is stuck and ends at once."""
        return SimpleNamespace(
            stuck_s=lambda: 0.0,
            drain=lambda *a: True,
            close=lambda *a: None,
            **methods,
        )


class Stager:
    """The staging reader's face of the pipelines."""

    def __init__(self, pipelines):
        self._pipelines = pipelines
        self.try_submit = pipelines.try_submit_read
        self.release = pipelines.release
        self.largest_read_pages = STAGING_ROWS

    @property
    def num_free_rows(self):
        return self._pipelines.num_free_rows

    def stuck_s(self):
        return 0.0


class Request:
    """A request that all ranks get, as SGLang's; families share their beginnings.

    Args:
        number: its own.
        common: draws the same on all ranks.
        is_unique: nobody else's beginning, instead of a family's.
    """

    def __init__(self, number, common, *, is_unique=False):
        family = int(common.integers(1, 14))
        num_shared = int(common.integers(4, 14))
        own = 1_000 + 64 * number + np.arange(int(common.integers(1, 3)))
        start = 1_000_000 + 64 * number if is_unique else 100 * family
        shared = start + np.arange(num_shared)
        self.pages = np.concatenate([shared, own]).astype(np.int32)
        self.tokens = np.repeat(self.pages, PAGE).astype(np.int32)
        self.num_out = int(common.integers(2, 16)) + 4 * (family % 3)
        self.rid = f"r{number}"
        self.origin_input_ids = self.tokens.tolist()
        self.output_ids = []
        self.extra_key = self.cache_salt = None
        self.sampling_params = SimpleNamespace(
            max_new_tokens=64, custom_params={"tiered": {"group": f"g{family % 3}"}}
        )
        self.time_stats = SimpleNamespace(
            prefill_finished_time=0.0, scheduler_recv_time=0.0
        )
        self.finished_reason = SimpleNamespace(to_json=lambda: {"type": "stop"})

    @property
    def output_ids_through_stop(self):
        return self.output_ids

    def finished(self):
        return len(self.output_ids) >= self.num_out


class Rank:
    """One rank's scheduler.

    Args:
        rank: its number.
        seed: of the requests; with the number, of all that is its own.
        clock: its own.
        agreement: with the others; of a single rank where it is to be left out.
        write_policy: and disk admission; under ``auto`` series of requests that do
            not come again alternate with the families.
    """

    def __init__(self, rank, seed, clock, agreement, write_policy="write-through"):
        self.own = np.random.default_rng([seed, rank, 1])
        self.common = np.random.default_rng(seed)
        self.clock = clock
        self.agreement = agreement
        self.log = []
        self.number = 0
        self.queue, self.running = [], []
        self.pipes = Pipelines(self.own)
        self.counts = dict.fromkeys(("loads", "held", "waits", "reordered"), 0)
        self.has_series = write_policy == "auto"
        # Whether new pages were copied, each time that this changed.
        self.copied = [True]
        decision_clock = agreement if agreement.is_shared else clock
        links = {
            tier: LinkCost(1e-4, LAYOUT.page_bytes / page_s * self.own.uniform(0.5, 2))
            for tier, page_s in ((TierId.HOST, 2e-4), (TierId.DISK, 2e-3))
        }
        token_s = 4e-3 * float(self.own.uniform(0.5, 2))
        prefill = PrefillCost.from_coefficients(1e-3, token_s, 1e-7)
        cost = common_costs(CostModel(prefill, links), agreement)
        policies = np.random.default_rng(seed)
        lookahead = QueueLookahead(PAGE)
        self.cache = TieredCache(
            CacheConfig(
                layout=LAYOUT,
                tiers=(
                    TierConfig(TierId.HOST, HOST_SLOTS),
                    TierConfig(TierId.DISK, DISK_SLOTS),
                ),
                write_policy=write_policy,
                disk_admission="auto" if write_policy == "auto" else "all",
            ),
            cost=cost,
            eviction={
                TierId.HOST: make_eviction_policy("cost", policies),
                TierId.DISK: make_eviction_policy("random", policies),
            },
            clock=decision_clock,
            lookahead=lookahead,
        )
        self.host = HostTier(LAYOUT.slot_bytes, HOST_SLOTS)
        self.config = Options(
            queue=Queue(prefetch="car"),
            slo=Slo("slo", slo_ttft_s=2.0, slo_tpot_s=0.025),
            observe=Observe(explain_last=0),
        )
        pipes = self.pipes
        self.weights = FakeWeights()
        metrics = MetricsRegistry()
        weights = WeightsIdentity(self.weights.begin, agreement, metrics)
        self.runtime = TieredRuntime(
            Parts(
                config=self.config,
                namespace=Namespace("model", "bfloat16", PAGE, "0/2"),
                weights=weights,
                clock=decision_clock,
                cost=cost,
                cache=self.cache,
                device=FakeDevicePool(LAYOUT, 4),
                host=self.host,
                cxl=None,
                disk=FakeTier(LAYOUT.slot_bytes, DISK_SLOTS),
                emulator=Emulator(),
                metrics=metrics,
                completions=pipes.completions,
                loader=pipes.part(submit=pipes.submit_load),
                offloader=pipes.part(try_submit=pipes.try_submit_offload),
                demoters={
                    (TierId.HOST, TierId.DISK): pipes.part(submit=pipes.submit_demotion)
                },
                stager=Stager(pipes),
                promoter=pipes.part(submit=pipes.submit_promotion),
                lookahead=lookahead,
                deferred=None,
                probe={},
                served={},
                lengths=LengthReader(LengthBook(make_length_predictor("online"))),
                agreement=agreement,
            ),
            wait_whole=False,
        )
        self.digest = self.runtime.namespace(None, None)
        ranking = DeviceRanking(
            make_eviction_policy("cost", policies),
            DEVICE_PAGES,
            1,
            None,
            real_page_tokens=PAGE,
        )
        self.tree = DeviceTree(DEVICE_PAGES, ranking, self.digest)
        self.order = QueueOrder(make_order("cost"), self, num_looks=6)
        self.runtime.admission = self.admission = ServedAdmission(
            self.config,
            self.runtime,
            self.runtime.lengths,
            DecodeCost.guessed(cost.prefill),
            decision_clock,
            page_tokens=PAGE,
            chunk_tokens=None,
            agreement=agreement,
        )
        # As QueuePrefetch sees SGLang's scheduler and its tree.
        self.page_size = PAGE
        self.tree_cache = self.tree_core = self
        self.running_batch = SimpleNamespace(reqs=self.running, batch_is_full=False)
        self.prefetch = QueuePrefetch(
            self, self.runtime.coordinator, self.runtime.prefetcher, decision_clock
        )
        self.prefetch.predict = lambda q: self.runtime.lengths.prediction(q).median

    @property
    def waiting_queue(self):
        return self.queue

    def match_full_device_prefix(self, raw):
        return self.tree.find(raw)[1] * PAGE, None, None

    # What the order asks.

    def num_prompt_tokens(self, req_id):
        return len(self.by_rid[req_id].tokens)

    def kin(self, req_id):
        return int(self.by_rid[req_id].pages[0])

    def guess(self, req_id):
        num = len(self.by_rid[req_id].tokens)
        empty = np.zeros(0, np.uint8)
        service_s = self.cache.planner.service_s(empty, 0, num)
        return Outlook(Location.NOWHERE, num, service_s, has_history=False)

    def look(self, req_id):
        req = self.by_rid[req_id]
        # As SGLang's tree does it: to look is to use.
        on_device = self.tree.match(self.raw(req))[1]
        state = self.runtime.coordinator.state(req_id)
        return foresee(self.cache, state, on_device, len(req.tokens))

    # One pass.

    def run(self, num_passes):
        """Run, and return the log."""
        for _ in range(num_passes):
            self.step()
        return self.log

    def step(self):
        """One turn of the scheduler's loop."""
        self.clock.advance(float(self.own.uniform(0.002, 0.02)))
        self.pipes.step()
        self.runtime.pump()
        self.prefetch.between_passes({q.rid: self.raw(q) for q in self.queue})
        self.receive()
        self.arrange()
        batch = self.admit()
        self.prefetch.pass_built({q.rid: self.raw(q) for q in self.queue})
        self.forward(batch)
        if len(self.log) % 10 == 0:
            self.log.append(self.cache.state_digest().hex())

    def receive(self):
        """Take what arrives in this pass, and what is aborted."""
        for _ in range(int(self.common.poisson(0.36))):
            self.number += 1
            is_unique = self.has_series and self.number // SERIES % 2 == 0
            req = Request(self.number, self.common, is_unique=is_unique)
            req.time_stats.scheduler_recv_time = self.clock.now()
            self.queue.append(req)
            self.runtime.lookahead.entered(req.rid, self.digest, req.tokens)
            usable = (len(req.tokens) - 1) // PAGE
            coordinator = self.runtime.coordinator
            coordinator.track(req.rid, self.digest, req.tokens, usable)
            self.agreement.moment_s(req.rid, ARRIVED, 0.0)
        if self.queue and self.common.random() < 0.02:
            req = self.queue.pop(int(self.common.integers(len(self.queue))))
            self.runtime.lengths.book.left(req.rid)
            self.runtime.forget_request(req.rid)
            self.log.append(("aborted", req.rid))

    def arrange(self):
        """Put the queue in order."""
        self.by_rid = {req.rid: req for req in self.queue}
        rids = list(self.by_rid)
        positions = self.order.arrange(rids, self.runtime.clock.now())
        self.counts["reordered"] += list(positions) != sorted(positions)
        self.queue[:] = [self.queue[i] for i in positions]
        self.log.append(tuple(req.rid for req in self.queue))

    def admit(self):
        """Search the queue as SGLang's adder does."""
        coordinator, runtime = self.runtime.coordinator, self.runtime
        coordinator.begin_pass()
        self.admission.begin_pass(self.running, None, self.queue)
        self.admission.bring_due_first(self.queue)
        batch, jobs = [], []
        for req in list(self.queue):
            if len(batch) == MAX_PER_PASS or len(self.running) >= MAX_RUNNING:
                break
            state = coordinator.state(req.rid)
            node, on_device = self.tree.match(self.raw(req))
            if not coordinator.prepare(state, on_device):
                self.counts["waits"] += 1
                self.log.append(("waits", req.rid))
                continue
            num_loaded = coordinator.loadable_pages(state, on_device)
            prefix = (on_device + num_loaded) * PAGE
            new = len(req.tokens) - prefix
            if not self.admission.fit(req, prefix, new, can_cut=False):
                self.counts["held"] += 1
                self.log.append(("held", req.rid))
                break
            self.tree.lock(node)
            if not self.tree.take_private(len(req.pages) - on_device):
                self.tree.unlock(node)
                self.log.append(("no room", req.rid))
                break
            if num_loaded:
                pages = np.arange(num_loaded, dtype=np.int64)
                job = coordinator.begin(state, pages)
                if job is None:
                    num_loaded, prefix = 0, on_device * PAGE
                else:
                    jobs.append(job)
            req.node, req.owned = node, on_device
            req.prefix, req.new = prefix, len(req.tokens) - prefix
            self.queue.remove(req)
            self.running.append(req)
            batch.append(req)
            self.admission.commit(req.rid)
            coordinator.admitted(prefix, req.new)
            runtime.lookahead.running(req.rid)
            runtime.agreement.note(req.rid, prefix, req.new)
            self.counts["loads"] += num_loaded > 0
            self.log.append((req.rid, on_device, num_loaded))
        self.running_batch.batch_is_full = len(self.running) >= MAX_RUNNING
        self.ticket = self.runtime.loader.submit(jobs) if jobs else None
        return batch

    def forward(self, batch):
        """Compute, take the ends of loads, publish, offload, decode."""
        runtime, coordinator = self.runtime, self.runtime.coordinator
        landed = self.ticket is None or runtime.transfers.landed(self.ticket)
        self.log.append(landed)
        for req in batch:
            state = coordinator.state(req.rid)
            if state.started:
                if landed:
                    coordinator.landed(state)
                else:
                    coordinator.settle(state, landed=False)
            req.time_stats.prefill_finished_time = self.clock.now()
            self.publish(req, state)
        if len(batch) == 1:
            seconds = 5 * self.pipes.seconds()
            runtime.observe_prefill(batch[0].prefix, batch[0].new, seconds)
        self.admission.observe_step(
            SimpleNamespace(
                reqs=list(self.running),
                forward_mode=SimpleNamespace(is_decode=lambda: not batch),
                forward_iter=len(self.log),
                launch_ts=self.clock.now(),
                after_idle_gap=False,
            )
        )
        for req in list(self.running):
            req.output_ids.append(0)
            if req.finished():
                self.running.remove(req)
                self.tree.unlock(req.node)
                runtime.lengths.released(req)
                runtime.forget_request(req.rid)
                self.log.append(("done", req.rid))

    def publish(self, req, state):
        """Put a prompt's pages into the tree, and offload them."""
        end, _ = self.tree.insert(req.pages.tobytes(), req.owned)
        self.tree.lock(end)
        self.tree.unlock(req.node)
        self.tree.note(end, req.pages, 0)
        req.node = end
        self.runtime.coordinator.published(state, len(req.pages))
        plan = self.cache.plan_offload(self.digest, req.tokens)
        if self.cache.copies_at_once != self.copied[-1]:
            self.copied.append(self.cache.copies_at_once)
        if plan is not None:
            self.log.append(("offload", plan.plan_id, len(plan.pages)))
            self.runtime.offload(plan, plan.positions.astype(np.int64))

    def raw(self, req):
        """Return the pages that may be reused, as the device's tree knows them."""
        return req.pages[: (len(req.tokens) - 1) // PAGE].tobytes()


def in_threads(num_ranks, work):
    """Run ``work(rank, seat)`` for each rank in a thread of its own.

    Returns:
        What it returned (None where it raised), what ended any, and the meeting.
    """
    meeting = Meeting(num_ranks)
    found, errors = [None] * num_ranks, []

    def run(rank):
        try:
            found[rank] = work(rank, meeting.seat(rank))
        except Exception as error:  # noqa: BLE001 - what it is, is asserted on
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, errors, meeting


def on_two_ranks(work):
    """Run ``work(rank, seat)`` on two ranks; return what it returned, or raise."""
    found, errors, _ = in_threads(2, work)
    if errors:
        raise errors[0]
    return found


def parting(call, *args):
    """Call; return in which words that found the ranks parted, empty if it did not."""
    try:
        call(*args)
    except RanksPartedError as error:
        return str(error)
    return ""


def run_ranks(
    num_ranks,
    num_passes,
    seed,
    *,
    kind=Agreement,
    meets=True,
    write_policy="write-through",
):
    """Run ranks in threads; return them, what ended any, and the meeting.

    Args:
        num_ranks: how many.
        num_passes: of each.
        seed: of the requests, and of what each rank draws.
        kind: of the agreement.
        meets: False leaves each rank alone.
        write_policy: of the ranks' caches.
    """

    def work(number, seat):
        # Clocks that began hundreds of seconds apart.
        clock = ManualClock(300.0 * number)
        agreement = kind(clock, seat if meets else None)
        rank = Rank(number, seed, clock, agreement, write_policy)
        try:
            rank.run(num_passes)
        finally:
            rank.host.close()
        return rank

    return in_threads(num_ranks, work)
