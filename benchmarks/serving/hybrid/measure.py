"""The parts of the bench, in order; what they share is measured first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from hybrid.arms import (
    ARMS,
    HALF_PAGES,
    MODEL,
    PAGE,
    TOKEN_BYTES,
    Arm,
    Link,
    Scale,
    batch_of,
    resident_spec,
    spec_of,
)
from hybrid.calibrated import write_served
from hybrid.relation import BatchFacts, Relation, bound_of, paper_relation
from hybrid.results import Findings, device_bytes
from hybrid.servers import Decode, Servers, decode, reload
from hybrid.window import WindowError

from sgl_tiered.cost.calibration import TokensFit

__all__ = ["PARTS", "Hybrid", "Options", "measure_kv_gen"]

PARTS = ("a", "reload", "b", "regret")
LOAD_OVER_GEN = 1.25
"""(A): T_load_kv / T_kv_gen for equal tokens."""
REBUILT_TOKENS = HALF_PAGES * PAGE // 2
"""About what is rebuilt at once: the overhead of one is in the relation."""
_PROBE_S = 4.0
_COMPARED = ("kv_only", "hybrid")


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, and where.

    Attributes:
        model: its folder.
        logs: folder of the servers' logs.
        parts: some of ``PARTS``.
        scale: how much.
        share: of activations, instead of what ``auto`` chooses; None for that.
        minutes: after which no second server of an arm is started.
        first_port: of the servers; None for any free ones.
        seed: of prompts.
    """

    model: Path
    logs: Path
    parts: tuple[str, ...]
    scale: Scale
    share: float | None = None
    minutes: float = 25.0
    first_port: int | None = None
    seed: int = 11


class Hybrid:
    """One run.

    Args:
        options: what to measure.
        say: takes progress lines.
        kv_gen: samples T_kv_gen on this machine, one thread.
    """

    def __init__(
        self,
        options: Options,
        say: Callable[[str], None] = print,
        kv_gen: Callable[[], TokensFit] | None = None,
    ) -> None:
        self._options = options
        self._begin_s = time.monotonic()
        self._print = say
        self._kv_gen = (kv_gen or measure_kv_gen)()
        self._servers = Servers(options.logs, options.first_port, self.say)
        self._batch = batch_of(options.scale, np.random.default_rng(options.seed))
        self._compute_s = 0.0
        self.findings = Findings()

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        self._print(f"[{time.monotonic() - self._begin_s:5.0f} s] {text}")

    @property
    def _left_s(self) -> float:
        return 60.0 * self._options.minutes - (time.monotonic() - self._begin_s)

    async def run(self) -> Findings:
        """Measure the parts that were asked for.

        Raises:
            ServerStartError: a server did not start.
            RuntimeError: a request failed.
        """
        parts, fit = self._options.parts, self._kv_gen
        self.findings.facts |= {
            "model": "MHA, 12 layers, hidden 512, float32, random weights",
            "kv_gen": {
                "overhead_us": round(fit.overhead_s * 1e6, 2),
                "token_us": round(fit.token_s * 1e6, 3),
                "r2": round(fit.quality.r2, 5),
            },
        }
        self.say(
            f"T_kv_gen: {fit.overhead_s * 1e6:.0f} us + {fit.token_s * 1e6:.2f} us a "
            f"token (R2 {fit.quality.r2:.4f})"
        )
        if set(parts) - {"regret"}:
            await self._served_kv_gen()
        if "a" in parts or "b" in parts:
            await self._resident()
        if "a" in parts or "reload" in parts:
            await self._part_a()
        if "b" in parts:
            await self._part_b()
        if "regret" in parts:
            await self._regret()
        return self.findings

    def _arm(self, name: str, link: Link) -> Arm:
        share = self._options.share
        if name == "hybrid" and share is not None:
            return Arm(name, str(share))
        if name == "hybrid" and link.bytes_per_s:
            path = self._options.logs.parent / "calibration.json"
            write_served(path, self._kv_gen, link.bytes_per_s)
            return replace(ARMS[name], calibration=path)
        return ARMS[name]

    async def _served_kv_gen(self) -> None:
        """Take T_kv_gen from a server that rebuilds all of the batch at every step.

        Its link is as fast as memory. There the thread that rebuilds shares caches and
        memory with the model, as in the arms; the sample has them for itself.
        """
        options = self._options
        spec = spec_of(ARMS["act_only"], options.model, options.scale, Link())
        async with self._servers.running(spec) as (server,):
            found = await decode(server, self._batch)
        token_s = found.moved.rebuild_token_s
        self._kv_gen = replace(self._kv_gen, overhead_s=0.0, token_s=token_s)
        self.findings.facts["served_kv_gen_token_us"] = round(token_s * 1e6, 3)
        self.say(f"T_kv_gen in a server: {token_s * 1e6:.2f} us a token")

    async def _resident(self) -> None:
        """Time a step that streams nothing: what the layers compute."""
        options = self._options
        async with self._servers.running(
            resident_spec(options.model, options.scale)
        ) as (server,):
            found = await decode(server, self._batch)
        self._compute_s = found.window.step_s / MODEL.num_layers
        self.findings.resident = found
        self.findings.facts["resident_step_s"] = round(found.window.step_s, 4)
        self._said("resident", found)
        if found.moved.to_device_bytes:
            self.findings.problems.append(
                f"the resident server has streamed {found.moved.to_device_bytes:.0f} "
                "bytes"
            )

    async def _part_a(self) -> None:
        """Serve the batch, and reload prefixes, by each arm in turn."""
        options, findings = self._options, self.findings
        link = self._link(Relation(LOAD_OVER_GEN))
        findings.facts["a_link_mb_per_s"] = round(link.bytes_per_s / 1e6, 2)
        findings.facts["a_load_over_gen"] = LOAD_OVER_GEN
        self.say(f"(A): link emulated, {link.bytes_per_s / 1e6:.1f} MB/s")
        arms = list(ARMS) if "a" in options.parts else list(_COMPARED)
        for repeat in range(options.scale.repeats):
            if repeat and self._left_s < 0:
                self.say("no time for another repeat of (A)")
                break
            for name in arms[:: -1 if repeat % 2 else 1]:
                await self._arm_of_a(name, repeat, link)
        if "a" in options.parts and findings.a.get("hybrid"):
            _, share = self._bound(findings.a["hybrid"][-1], link)
            findings.balance_share["a"] = share

    async def _arm_of_a(self, name: str, repeat: int, link: Link) -> None:
        options, findings = self._options, self.findings
        reloads = "reload" in options.parts and name in _COMPARED
        spec = spec_of(
            self._arm(name, link), options.model, options.scale, link, reloads=True
        )
        async with self._servers.running(spec) as (server,):
            if "a" in options.parts:
                found = await decode(server, self._batch)
                findings.a.setdefault(name, []).append(found)
                self._said(name, found)
            if not reloads:
                return
            # The same prefixes for all arms, other ones for each repeat.
            generator = np.random.default_rng((options.seed, repeat))
            again = await reload(server, options.scale, generator)
            findings.reloads.setdefault(name, []).append(again)
            self.say(
                f"  {name}: reload TTFT p50 {again.p50_s * 1e3:.0f} ms, "
                f"{again.bytes_each / 1e6:.1f} MB each"
            )

    async def _part_b(self) -> None:
        """Serve the batch with OPT-30B's proportions on an RTX 4090."""
        options, findings = self._options, self.findings
        relation = paper_relation()
        link = self._link(relation)
        findings.facts |= {
            "b_link_mb_per_s": round(link.bytes_per_s / 1e6, 2),
            "b_load_over_gen": round(relation.load_over_gen, 4),
            "b_weights_over_load": round(relation.weights_over_load, 4),
            "b_weight_mb": round(link.weight_bytes / 1e6, 3),
        }
        self.say(
            f"(B): link emulated, {link.bytes_per_s / 1e6:.1f} MB/s, weights of "
            f"{link.weight_bytes / 1e6:.2f} MB a layer"
        )
        for name in ("hybrid", "kv_only"):
            if name != "hybrid" and self._left_s < 0:
                self.say("no time for KV-only in (B)")
                break
            spec = spec_of(self._arm(name, link), options.model, options.scale, link)
            async with self._servers.running(spec) as (server,):
                found = await decode(server, self._batch)
            findings.b.setdefault(name, []).append(found)
            self._said(name, found)
        bound_s, share = self._bound(findings.b["hybrid"][-1], link)
        findings.bound_s = bound_s
        findings.balance_share["b"] = share

    async def _regret(self) -> None:
        """Compare auto with off where no link is emulated, run by run."""
        options, findings = self._options, self.findings
        self.say("no emulated link: auto against off, in turns")
        # Both at once, the other one asleep: of two starts no 2 % could be told.
        specs = [
            spec_of(self._arm(name, Link()), options.model, options.scale, Link())
            for name in _COMPARED
        ]
        async with self._servers.running(*specs) as servers:
            for server in servers:
                await decode(server, self._batch)
            for number in range(options.scale.pairs):
                rates = [0.0, 0.0]
                for place in (0, 1) if number % 2 else (1, 0):
                    found = await decode(servers[place], self._batch)
                    rates[place] = found.tokens_per_s
                findings.pairs.append((rates[0], rates[1]))
                self.say(f"  off {rates[0]:.2f}, auto {rates[1]:.2f} tokens/s")
                acts = found.layers.get("activations", {})
        findings.facts["regret_share"] = acts.get("share", 0.0)

    def _link(self, relation: Relation) -> Link:
        return Link(
            relation.bytes_per_s(self._kv_gen, REBUILT_TOKENS, TOKEN_BYTES),
            relation.weight_bytes(sum(self._options.scale.contexts), TOKEN_BYTES),
        )

    def _bound(self, hybrid: Decode, link: Link) -> tuple[float, float]:
        """Return the shortest step by the regressions, and its activations' share."""
        scale = self._options.scale
        batch = BatchFacts(
            scale.contexts,
            PAGE,
            TOKEN_BYTES,
            self._kv_gen,
            link.bytes_per_s,
            link.weight_bytes,
            self._compute_s,
            device_bytes(hybrid.layers, scale.num_requests),
        )
        bound_s, split = bound_of(batch, MODEL.num_layers)
        share = split.num_act / (split.num_act + split.num_kv)
        self.say(
            f"  by the regressions a step takes {bound_s:.3f} s at best, {share:.2f} "
            "of the pages as activations"
        )
        return bound_s, share

    def _said(self, name: str, found: Decode) -> None:
        window = found.window
        overlap = found.moved.overlap
        self.say(
            f"  {name}: {window.tokens_per_s:.2f} tokens/s over {window.num_steps} "
            f"steps of {window.step_s * 1e3:.0f} ms, "
            f"{found.bytes_per_token / 1e6:.2f} MB a token"
            + ("" if overlap is None else f", overlap {overlap:.2f}")
        )


def measure_kv_gen() -> TokensFit:
    """Return T_kv_gen of the model's shape as servers run it: on one thread."""
    import torch

    from sgl_tiered.engines.device.rebuild_probe import probe_kv_gen

    torch.set_num_threads(1)
    return probe_kv_gen(
        MODEL.hidden,
        MODEL.num_kv_heads,
        MODEL.hidden // MODEL.num_heads,
        torch.float32,
        PAGE,
        budget_s=_PROBE_S,
    )


def run_parts(options: Options, say: Callable[[str], None] = print) -> Findings:
    """Measure; a batch without a decode phase is a problem, not an end.

    Raises:
        ServerStartError: a server did not start.
    """
    hybrid = Hybrid(options, say)
    try:
        return asyncio.run(hybrid.run())
    except WindowError as error:
        hybrid.findings.problems.append(str(error))
        return hybrid.findings


def parts_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the parts by the names on the command line, in their order."""
    wanted = set(PARTS) if "all" in names or not names else set(names)
    return tuple(part for part in PARTS if part in wanted)
