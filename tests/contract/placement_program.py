"""Attends over a layered pool and over SGLang's own, side by side; prints what it saw.

    placement_program.py

The same keys, values and queries go to both pools, in prefills, chunks, shared prefixes
and decode steps of random parts; the outputs must be equal bit for bit. The layered
pool has room for a fifth of it. Some keep pages as activations: whole numbers that are
projected and turned by quarters, so that the bits are the same however they are summed.
The last line is one JSON object.
"""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

warnings.simplefilter("ignore")

PAGE, LAYERS, KV_HEADS, HEADS, DIM = 16, 4, 2, 4, 32
DEVICE_PAGES, HALF_PAGES, NUM_PAGES = 24, 12, 160
PREFIX_PAGES = 3
MAX_ROWS = 12
MAX_TOKENS = 64 * PAGE
STEPS = 80
SHARES = (0.5, 1.0)


class Mode:
    """SGLang's forward mode, as far as attention asks."""

    def __init__(self, *, is_decode: bool) -> None:
        self._is_decode = is_decode

    def is_decode_or_idle(self) -> bool:
        return self._is_decode


class Projections:
    """What makes K and V of whole numbers, and the modules that a model would call."""

    hidden = KV_HEADS * DIM

    def __init__(self, rng: torch.Generator) -> None:
        from sgl_tiered_kernels.kv_gen import KVProjection, Rotary

        quarter = torch.arange(MAX_TOKENS) % 4
        turns = torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]])[quarter]
        table = turns.repeat_interleave(DIM // 2, dim=1).bfloat16()
        shape = (2 * KV_HEADS * DIM, self.hidden)
        self.made = [
            KVProjection(
                torch.randint(-1, 2, shape, generator=rng).bfloat16(),
                None,
                KV_HEADS,
                DIM,
                Rotary(table),
            )
            for _ in range(LAYERS)
        ]
        self.modules = [torch.nn.Identity() for _ in range(LAYERS)]

    def __len__(self) -> int:
        return LAYERS

    def __getitem__(self, layer: int) -> Any:
        return self.made[layer]

    def module(self, layer: int) -> torch.nn.Module:
        return self.modules[layer]

    def project(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> Any:
        """Do what a model does with a layer's input; return K and V."""
        from sgl_tiered_kernels.kv_gen import rebuild_kv

        self.modules[layer](x)
        rows = torch.arange(len(x))
        both = [torch.zeros((len(x), KV_HEADS, DIM)).bfloat16() for _ in "kv"]
        rebuild_kv(x, rows, self.made[layer], both[0], both[1], rows, positions)
        return both


def plan_with(share: float, projections: Projections) -> Any:
    """Return the plan of a pool that keeps a share of its pages as activations."""
    from sgl_tiered.core.layout import PageLayout
    from sgl_tiered.engines.sglang.layered.activations.choosing import Chosen
    from sgl_tiered.engines.sglang.layered.capacity import plan_layers
    from sgl_tiered.policies.activations.base import PageLine
    from sgl_tiered.serving.layered.act_sizes import Demand
    from sgl_tiered.serving.options import LayerKv

    layout = PageLayout(LAYERS, PAGE, KV_HEADS * DIM * 2)
    # A third of the pool is for activations.
    settings = LayerKv(
        host_bytes=(NUM_PAGES + 1) * layout.slot_bytes,
        staging_bytes=2 * HALF_PAGES * layout.layer_page_bytes,
    )
    demand = Demand(share, projections.hidden * 2, MAX_ROWS, 8)
    line = PageLine(0.0, 1e-4)
    chosen = Chosen(share, "A story.", demand, line, line, projections)  # type: ignore[arg-type]
    tokens = DEVICE_PAGES * 3 // 2 * PAGE
    return plan_layers(layout, tokens, 4096, settings, demand=demand, chosen=chosen)


class Bench:
    """Two pools, their attention, and requests over both."""

    def __init__(
        self,
        seed: int,
        retain: int | None,
        *,
        share: float = 0.0,
        breaks: bool = False,
    ) -> None:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from sgl_tiered.core.clock import SystemClock
        from sgl_tiered.core.layout import PageLayout
        from sgl_tiered.engines.sglang.cpu_attention import TieredCpuAttention
        from sgl_tiered.engines.sglang.layered.allocator import LayeredAllocator
        from sgl_tiered.engines.sglang.layered.attention import LayeredCpuAttention
        from sgl_tiered.engines.sglang.layered.build import connect
        from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
        from sgl_tiered.engines.sglang.layered.pool import LayeredPool
        from sgl_tiered.serving.options import LayerKv

        self.rng = np.random.default_rng(seed)
        self.torch_rng = torch.Generator().manual_seed(seed)
        self.retain = retain
        layout = PageLayout(LAYERS, PAGE, KV_HEADS * DIM * 2)
        plan = LayerPlan(
            layout, NUM_PAGES, DEVICE_PAGES * LAYERS, HALF_PAGES, LayerKv()
        )
        self.projections: Projections | None = None
        if share:
            self.projections = Projections(self.torch_rng)
            plan = plan_with(share, self.projections)
        shape: dict[str, Any] = {
            "page_size": PAGE,
            "dtype": torch.bfloat16,
            "head_num": KV_HEADS,
            "head_dim": DIM,
            "layer_num": LAYERS,
            "device": "cpu",
            "enable_memory_saver": False,
        }
        size = plan.num_pages * PAGE
        self.slots = size
        self.plain = MHATokenToKVPool(size, **shape)
        planned = type("Planned", (LayeredPool,), {"plan": plan})
        self.pool = planned(size, **shape)
        placed = connect(self.pool, plan, SystemClock(), None, breaks_staging=breaks)
        self.driver = placed.driver
        self.allocator = LayeredAllocator(
            size,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=self.pool,
            need_sort=False,
        )
        table = torch.zeros(MAX_ROWS, MAX_TOKENS, dtype=torch.int32)
        self.rows = SimpleNamespace(req_to_token=table)
        self.ours = LayeredCpuAttention(self.rows, self.pool)
        self.theirs = TieredCpuAttention(self.rows, self.plain)
        self.reqs: dict[str, Any] = {}
        self.prefix: Any = None
        self.num = {"passes": 0, "differ": 0, "refused": 0, "prefills": 0}
        self.reports: list[Any] = []

    def forward(self, parts: list[tuple[Any, int]]) -> bool:
        """Compute so many new tokens of some requests; False where they do not fit."""
        from sgl_tiered.layered.base import PassRequest

        table = self.rows.req_to_token
        locs, wanted = [], []
        for req, new in parts:
            need = -(-(req.length + new) // PAGE) - req.num_pages
            if need > 0:
                slots = self.allocator.alloc(need * PAGE)
                assert slots is not None
                begin = req.num_pages * PAGE
                table[req.row, begin : begin + need * PAGE] = slots.to(torch.int32)
                req.num_pages += need
            locs.append(table[req.row, req.length : req.length + new].to(torch.int64))
            pages = table[req.row, : req.length + new : PAGE].numpy() // PAGE
            wanted.append(
                PassRequest(
                    req.rid, pages.astype(np.int64), req.length, new, req.retained
                )
            )
        manager = self.driver.manager
        if manager.begin_pass(wanted).refused:
            self.num["refused"] += 1
            return False
        manager.end_pass(ok=False)
        for req, _ in parts:
            if req.retained is not None:
                self.driver.decide(req.rid, req.retained)
                req.retained = None
        lens = [req.length + new for req, new in parts]
        batch = SimpleNamespace(
            rids=[req.rid for req, _ in parts],
            seq_lens=torch.tensor(lens),
            extend_seq_lens=torch.tensor([new for _, new in parts]),
            req_pool_indices=torch.tensor([req.row for req, _ in parts]),
            out_cache_loc=torch.cat(locs),
            forward_mode=Mode(is_decode=all(new == 1 for _, new in parts)),
        )
        self.ours.init_forward_metadata(batch)
        self.theirs.init_forward_metadata(batch)
        count = sum(new for _, new in parts)
        positions = torch.cat(
            [torch.arange(req.length, req.length + new) for req, new in parts]
        )
        equal = True
        for number in range(LAYERS):
            layer = SimpleNamespace(
                layer_id=number, tp_q_head_num=HEADS, qk_head_dim=DIM, scaling=0.2
            )
            q, k, v = (
                torch.randn(count, heads, DIM, generator=self.torch_rng).bfloat16()
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            if self.projections is not None:
                shape = (count, self.projections.hidden)
                x = torch.randint(-1, 2, shape, generator=self.torch_rng).bfloat16()
                k, v = self.projections.project(number, x, positions)
            ours = self.ours.forward_extend(q.view(count, -1), k, v, layer, batch)
            theirs = self.theirs.forward_extend(q.view(count, -1), k, v, layer, batch)
            equal = equal and torch.equal(ours, theirs)
        self.num["passes"] += 1
        self.num["differ"] += not equal
        for req, new in parts:
            req.length += new
        return True

    def start(self) -> None:
        """Begin a request, every other one behind the shared prefix."""
        row = next(n for n in range(MAX_ROWS) if n not in self.used_rows())
        retained = None
        if self.retain is not None:
            retained = np.zeros(LAYERS, np.bool_)
            retained[self.rng.permutation(LAYERS)[: self.retain]] = True
        req = SimpleNamespace(
            rid=f"r{self.num['prefills']}",
            row=row,
            length=0,
            num_pages=0,
            shared=0,
            retained=retained,
            left=int(self.rng.integers(5, 8 * PAGE)),
        )
        self.num["prefills"] += 1
        if self.prefix is not None and self.rng.random() < 0.5:
            count = PREFIX_PAGES * PAGE
            self.rows.req_to_token[row, :count] = self.prefix
            req.length, req.num_pages, req.shared = count, PREFIX_PAGES, PREFIX_PAGES
        self.reqs[req.rid] = req

    def used_rows(self) -> set[int]:
        return {req.row for req in self.reqs.values()}

    def prefill(self, req: Any) -> None:
        new = req.left if self.rng.random() < 0.5 else max(req.left // 2, 1)
        if self.forward([(req, new)]):
            req.left -= new

    def decode(self) -> None:
        ready = [req for req in self.reqs.values() if not req.left]
        some = [req for req in ready if self.rng.random() < 0.6]
        if some:
            self.forward([(req, 1) for req in some])

    def finish(self, req: Any) -> None:
        row = self.rows.req_to_token[req.row, : req.num_pages * PAGE].to(torch.int64)
        own = row[req.shared * PAGE :]
        if self.prefix is None and req.num_pages > PREFIX_PAGES and not req.left:
            # Its first pages stay, as in SGLang's tree.
            self.prefix = row[: PREFIX_PAGES * PAGE].to(torch.int32)
            own = row[PREFIX_PAGES * PAGE :]
        if len(own):
            self.allocator.free(own)
        self.driver.finished(req.rid)
        told = self.driver.take_report(req.rid)
        if told is not None:
            self.reports.append(told)
        del self.reqs[req.rid]

    def step(self) -> None:
        self.driver.manager.poll()
        open_ones = [req for req in self.reqs.values() if req.left]
        what = self.rng.random()
        if open_ones and what < 0.6:
            self.prefill(open_ones[0])
        elif not open_ones and len(self.reqs) < MAX_ROWS - 2 and what < 0.3:
            self.start()
        elif self.reqs and what > 0.9:
            self.finish(
                list(self.reqs.values())[int(self.rng.integers(len(self.reqs)))]
            )
        else:
            self.decode()
            if self.reqs and self.rng.random() < 0.2:
                rid = next(iter(self.reqs))
                if not self.reqs[rid].left and not self.reqs[rid].retained is not None:
                    self.driver.manager.release(rid, np.ones(LAYERS, np.bool_))

    def end(self) -> dict[str, Any]:
        for req in list(self.reqs.values()):
            self.finish(req)
        if self.prefix is not None:
            self.allocator.free(self.prefix.to(torch.int64))
        manager = self.driver.manager
        while not manager.is_idle:
            manager.poll()
        manager.poll()
        manager.check()
        room = manager.room()
        out = {
            **self.num,
            "free": room.free,
            "total": room.total,
            "streamed": sum(r["bytes_streamed"] for r in self.reports),
            "offloaded": sum(r["bytes_offloaded"] for r in self.reports),
            "retained": [r["layers_retained"] for r in self.reports],
            "free_slots": self.allocator.available_size(),
            "slots": self.slots,
        }
        acts = self.driver.plan.acts
        if acts is not None:
            kinds = manager.binding.kinds
            assert kinds is not None
            told = [report["activations"] for report in self.reports]
            staged = 2 * acts.half_acts + acts.up_acts
            out["acts"] = {
                "pages": sum(one["act_pages"] for one in told),
                "kv_pages": sum(one["kv_pages"] for one in told),
                "saved": sum(one["bytes_saved"] for one in told),
                "rebuild_s": manager.rebuild_s,
                "free": kinds.places.num_free,
                "total": acts.num_acts - staged,
                "free_rows": list(kinds.num_free_rows),
                "rows": [self.driver.plan.num_kv_rows, acts.num_act_rows],
            }
        manager.close()
        return out


def story(
    seed: int, retain: int | None, *, share: float = 0.0, breaks: bool = False
) -> dict[str, Any]:
    """Run random steps."""
    bench = Bench(seed, retain, share=share, breaks=breaks)
    for _ in range(STEPS):
        bench.step()
    return bench.end()


def refused() -> dict[str, str]:
    """Call what a layered pool refuses."""
    bench = Bench(0, None)
    told = {}
    for name in ("get_contiguous_buf_infos", "get_device_pool_infos", "get_cpu_copy"):
        try:
            getattr(bench.pool, name)()
        except Exception as error:  # noqa: BLE001 - the kind is what is told
            told[name] = f"{type(error).__name__}: {error}"
    bench.end()
    return told


def main() -> None:
    """Print the stories."""
    told: dict[str, Any] = {
        f"{retain} {seed}": story(seed, retain)
        for retain in (None, 0, 1, 3)
        for seed in range(4)
    }
    for share in SHARES:
        for seed in (1, 2, 3):
            told[f"act {share} {seed}"] = story(seed, 0, share=share)
        told[f"act {share} some"] = story(9, 2, share=share)
    told["broken"] = story(1, 0, breaks=True)
    told["broken act"] = story(1, 0, share=1.0, breaks=True)
    told["refused"] = refused()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
