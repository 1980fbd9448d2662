"""A server of known coefficients, in virtual time: what it answers can be computed."""

from dataclasses import asdict
from itertools import pairwise

import numpy as np
from sgl_tiered_workloads.records import RequestRecord

from sgl_tiered.cost.calibration import MachineFacts, ModelFacts

MODEL = ModelFacts(
    name="synthetic",
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    attention_backend="some",
    num_layers=4,
    attention_width=256,
    num_params=10_000_000,
    kv_bytes_per_token=4096,
    page_tokens=16,
    chunk_tokens=1024,
)
REQUEST_S, PASS_S, TOKEN_S, PAIR_S = 0.004, 0.003, 2e-4, 3e-8
STEP_S, BATCH_S, CONTEXT_S = 0.0025, 5e-4, 1e-7
LINKS = {
    "device->host": (2e-4, 4e9),
    "host->device": (1e-4, 8e9),
    "host->cxl": (3e-4, 3e9),
    "cxl->device": (5e-4, 2e9),
    "cxl->disk": (4e-3, 4e8),
    "host->disk": (2e-3, 5e8),
    "disk->host": (1e-3, 1e9),
    "peer->host": (2e-3, 2e8),
}


class SyntheticServer:
    """Answers like a tiered server with the constants above.

    Args:
        noise: how far a time may be off, as a share; seeded.
        disk, cxl: whether it has such a tier.
        load: whether its planner loads at all.
        projection: of a layer's K and V, as a server tells it.
        foreign_tokens: prompt tokens that somebody else sends per request of ours.
        loads_take_time: a request waits for what it loads.
        peer: another one, whose pages it may pull.
    """

    def __init__(
        self,
        noise=0.0,
        disk=True,
        load=True,
        foreign_tokens=0,
        model=MODEL,
        cxl=False,
        projection=None,
        loads_take_time=False,
        peer=None,
    ):
        self.rng = np.random.default_rng(5)
        self.noise, self.load, self.foreign_tokens = noise, load, foreign_tokens
        self.model = model
        self.projection = projection
        self.loads_take_time, self.peer = loads_take_time, peer
        self.memory_bytes = 10**9
        self.time_s = 100.0
        self.media = ["host"] + ["cxl"] * cxl + ["disk"] * disk
        self.held = {tier: set() for tier in ("device", *self.media)}
        self.edges, self.moved_s = {}, 0.0
        self.tokens_total = 0
        self.dropped = []
        self.error = None
        self.busy_drops = 0

    def now_s(self):
        return self.time_s

    def rest_s(self, seconds):
        self.time_s += seconds

    def stats(self):
        self.time_s += 1e-3
        return {
            "media": {name: {"emulated": name == "disk"} for name in self.media},
            "edges": {name: dict(counters) for name, counters in self.edges.items()},
            "counters": {"tokens_total": self.tokens_total},
            "probe": {"flops_per_s": 2e11, "host_bandwidth_bytes_per_s": 1.6e10},
            "served": {
                "engine": "synthetic 1",
                "model": asdict(self.model),
                "machine": asdict(MachineFacts("none", 2, self.memory_bytes, "Linux")),
                "projection": self.projection,
                "vocab_tokens": 50_000,
                "context_tokens": 32768,
                "pool_tokens": 16384,
            },
        }

    def drop(self, tier):
        if self.busy_drops:
            self.busy_drops -= 1
            return False
        self.dropped.append(tier)
        self.held[tier].clear()
        return True

    def send(self, requests):
        started_s = self.time_s
        records, num_new, pairs = [], 0, 0.0
        for request in requests:
            cached, tiers = self._place(request.prompt)
            new = len(request.prompt) - cached
            num_new += new
            pairs += new * (cached + (new + 1) / 2)
            records.append((request, cached, tiers))
            self.tokens_total += len(request.prompt) + self.foreign_tokens
        passes = -(-num_new // (self.model.chunk_tokens or 10**9))
        self.time_s += self._off(
            REQUEST_S + PASS_S * passes + TOKEN_S * num_new + PAIR_S * pairs
        )
        times = [[self.time_s] for _ in requests]
        num_tokens = requests[0].max_new_tokens
        mean_context = sum(len(r.prompt) + num_tokens / 2 for r in requests)
        for _ in range(num_tokens - 1):
            step_s = STEP_S + BATCH_S * len(requests) + CONTEXT_S * mean_context
            self.time_s += self._off(step_s)
            for tokens in times:
                tokens.append(self.time_s)
        return [
            RequestRecord(
                key=request.key,
                order=0,
                prompt=request.prompt,
                targeted_s=0.0,
                started_s=started_s,
                token_times_s=tuple(tokens),
                cached_tokens=cached,
                cached_by_tier=tiers,
                error=self.error,
            )
            for (request, cached, tiers), tokens in zip(records, times, strict=True)
        ]

    def _place(self, prompt):
        """Find the longest run of pages in the fastest tier, load it, keep all."""
        size = self.model.page_tokens
        pages, key = [], 0
        for start in range(0, (len(prompt) - 1) // size * size, size):
            key = hash((key, prompt[start : start + size]))
            pages.append(key)
        found = {
            tier: sum(1 for page in pages if page in held)
            for tier, held in self.held.items()
        }
        if self.peer is not None:
            held = self.peer.held["device"]
            found["peer"] = sum(1 for page in pages if page in held)
        tier = max(found, key=lambda name: (found[name], name == "device"))
        count = found[tier] if tier == "device" or self.load else found["device"]
        before_s = self.moved_s
        if tier in ("disk", "peer") and count:
            self._move(f"{tier}->host", count)
        if tier != "device" and count:
            self._move("cxl->device" if tier == "cxl" else "host->device", count)
        if self.loads_take_time:
            self.time_s += self.moved_s - before_s
        new_on_host = sum(1 for page in pages if page not in self.held["host"])
        for name, held in self.held.items():
            if name not in ("device", "host"):
                continue
            held.update(pages)
        if new_on_host and count < len(pages):
            self._move("device->host", new_on_host)
        for source, target in pairwise(self.media):
            num_new = sum(1 for page in pages if page not in self.held[target])
            self.held[target].update(pages)
            if num_new:
                self._move(f"{source}->{target}", num_new)
        return count * size, {tier: count * size} if count else {}

    def _move(self, edge, num_pages):
        num_bytes = num_pages * self.model.page_tokens * self.model.kv_bytes_per_token
        latency_s, bandwidth = LINKS[edge]
        counters = self.edges.setdefault(
            edge, {"ops": 0, "bytes": 0, "seconds": 0.0, "failures": 0}
        )
        counters["ops"] += 1
        counters["bytes"] += num_bytes
        seconds = self._off(latency_s + num_bytes / bandwidth)
        counters["seconds"] += seconds
        self.moved_s += seconds

    def _off(self, seconds):
        return seconds * (1 + self.rng.uniform(-self.noise, self.noise))
