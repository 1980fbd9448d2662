"""A real cache over a real host tier and a disk that can be held up."""

import threading
import time

import numpy as np

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import ManualClock, SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue
from sgl_tiered.pipelines.staging import StagingReader
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.serving.coordinator import LoadCoordinator
from sgl_tiered.testing.fakes import FakeTier
from sgl_tiered.testing.strategies import spell
from sgl_tiered.testing.tier_kit import make_pages
from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.host import HostTier

LAYOUT = PageLayout(num_layers=4, page_tokens=2, token_bytes=96)
SLOT = LAYOUT.slot_bytes
NUM_SLOTS = 16
PATIENCE_S = 20.0
"""Upper bound of every wait: only a defect makes a test wait so long."""
LONG_S = 1e6
"""Longer than any patience of the coordinator's."""


class StepTier(FakeTier):
    """A disk of which each read ends when it is let; ``order`` has their addresses."""

    def __init__(self):
        super().__init__(SLOT, NUM_SLOTS)
        self.steps = threading.Semaphore(0)
        self.is_stepped = False
        self.order = []

    def load(self, io):
        """Read, once the next step is taken."""
        if self.is_stepped:
            self.started.release()
            self.steps.acquire()
        self.order.append(io.addresses.tolist())
        return super().load(io)

    def close(self):
        """Let everybody go."""
        self.is_stepped = False
        for _ in range(NUM_SLOTS):
            self.steps.release()
        super().close()


class Rig:
    """A coordinator with everything below it; ``contents`` says what a page holds."""

    def __init__(
        self,
        staging_rows=8,
        *,
        load_policy="always",
        page_compute_s=None,
        page_read_s=None,
        part_pages=None,
        act_page_bytes=0,
    ):
        self.clock = ManualClock()
        self.host = HostTier(SLOT, NUM_SLOTS)
        self.disk = FakeTier(SLOT, NUM_SLOTS) if part_pages is None else StepTier()
        links = {tier: LinkCost(1e-4, 1e9) for tier in (TierId.HOST, TierId.DISK)}
        if page_read_s is not None:
            links[TierId.DISK] = LinkCost(1e-6, LAYOUT.page_bytes / page_read_s)
        prefill = PrefillCost(1000, 4, 64, 1e9)
        if page_compute_s is not None:
            token_s = page_compute_s / LAYOUT.page_tokens
            prefill = PrefillCost.from_coefficients(1e-4, token_s, 1e-9)
        self.cache = TieredCache(
            CacheConfig(
                layout=LAYOUT,
                tiers=(
                    TierConfig(TierId.HOST, NUM_SLOTS),
                    TierConfig(TierId.DISK, NUM_SLOTS),
                ),
                load_policy=load_policy,
                act_page_bytes=act_page_bytes,
            ),
            cost=CostModel(prefill, links),
            eviction={TierId.HOST: LRUPolicy(), TierId.DISK: LRUPolicy()},
            clock=self.clock,
        )
        self.digest = self.cache.open_namespace(Namespace("model", "bfloat16", 2))
        self.completions = CompletionQueue()
        self.stager = StagingReader(
            self.disk,
            staging_rows,
            self.completions,
            SystemClock(),
            MetricsRegistry(),
            num_threads=1,
            part_pages=part_pages,
        )
        self.coordinator = LoadCoordinator(
            self.cache, {TierId.HOST: self.host}, self.stager, self.clock
        )
        self.contents = {}

    def close(self):
        """End the threads."""
        self.disk.close()
        self.stager.close(PATIENCE_S)
        self.host.close()

    def keep(self, word, kinds=None):
        """Put a prompt's pages into host and disk."""
        tokens = spell(word, LAYOUT.page_tokens)
        plan = self.cache.plan_offload(self.digest, tokens, kinds=kinds)
        pages = make_pages(NUM_SLOTS, SLOT, seed=len(self.contents))
        for position, address in zip(plan.positions, plan.addresses, strict=True):
            page = pages[int(address)]
            self.host.region[address] = page
            self.contents[word[: position + 1]] = page
        done = np.ones(len(plan.pages), np.bool_)
        zeros = np.zeros(len(plan.pages), np.uint64)
        self.cache.finish_offload(plan, TransferResult(done, 0, 0.0, zeros))
        demote = self.cache.plan_demote(NUM_SLOTS)
        self.cache.finish_demote(
            demote,
            self.disk.store(
                TierIO(
                    demote.target_addresses,
                    self.host.region,
                    demote.source_addresses,
                    demote.records,
                )
            ),
        )
        assert self.disk.started.acquire(timeout=PATIENCE_S)

    def keep_on_disk(self, word):
        """Put a prompt's pages on disk only."""
        self.keep(word)
        self.cache.drop_tier(TierId.HOST)

    def spoil(self, prefix):
        """Change the bytes on disk of the page at which ``prefix`` ends."""
        page = self.contents[prefix].tobytes()
        (address,) = [a for a, kept in self.disk._pages.items() if kept == page]
        self.disk._pages[address] = bytes([page[0] ^ 1]) + page[1:]

    def track(self, rid, word):
        """Announce a prompt whose whole pages may all be reused."""
        tokens = spell(word, LAYOUT.page_tokens, tail=1)
        return self.coordinator.track(rid, self.digest, tokens, len(word))

    def pump(self):
        """Wait for the reads to end and hand their ends to the coordinator."""
        assert self.stager.drain(PATIENCE_S)
        for event in self.completions.drain():
            self.coordinator.stage_finished(event.plan, event.positions, event.result)

    def step(self, staged, num_parts=1):
        """Let parts of a read end, and wait until they have arrived."""
        wanted = len(staged.arrived) + num_parts
        for _ in range(num_parts):
            self.disk.steps.release()
        give_up_s = time.monotonic() + PATIENCE_S
        while len(staged.arrived) < wanted:
            assert time.monotonic() < give_up_s, "the parts never came"
            time.sleep(1e-3)

    def landed_bytes(self, job):
        """Return uint8 [n, slot_bytes]: what the job brings, in the plan's order."""
        out = np.zeros((len(job.device_pages), SLOT), np.uint8)
        filled = np.zeros(len(job.device_pages), np.int64)
        for segment in job.segments:
            out[segment.positions] = segment.region[segment.rows, :SLOT]
            filled[segment.positions] += 1
        assert (filled == 1).all(), "each page comes from one place"
        return out

    def expected(self, word, first=0):
        """Return what the pages of a prompt from ``first`` on must hold."""
        return np.stack([self.contents[word[: n + 1]] for n in range(first, len(word))])

    def num_pinned(self):
        """Return the pinned slots of both tiers."""
        tiers = (TierId.HOST, TierId.DISK)
        return sum(self.cache.occupancy(tier).pinned_slots for tier in tiers)
