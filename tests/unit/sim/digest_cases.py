"""Thirty named runs of the simulator: every feature, workload and policy at least once.

Their digests are kept (``digests.py`` says how). Names of policies are written out here
and not taken from the registries: a new policy changes no case, and asks for one.
What a run uses is read from the settings that it ran with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from sgl_tiered_workloads.registry import make_workload as named_workload

from sgl_tiered.cache.tiered_cache import TierConfig
from sgl_tiered.cli.simulate_workload import from_sessions, make_workload
from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.policies.routing.registry import make_routing
from sgl_tiered.sim.capacity import capacity_plan
from sgl_tiered.sim.config import LayerSetup, SchedulerConfig, ServerConfig, TierSetup
from sgl_tiered.sim.exclusive import ExclusiveTier
from sgl_tiered.sim.hardware import LinkSpeed, find_hardware
from sgl_tiered.sim.models import find_model
from sgl_tiered.sim.opt import OptBound
from sgl_tiered.sim.replay import (
    ReplayResult,
    ServedPolicies,
    replay_exclusive,
    replay_served,
)
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder
from sgl_tiered.sim.server import SimServer
from sgl_tiered.sim.spec import SimSpec
from sgl_tiered.sim.stack import LRUCurve
from sgl_tiered.sim.synthetic import fixed_lengths
from sgl_tiered.sim.times import DeviceTimes
from tests.unit.sim.replay_support import PAGE_TOKENS, spell_trace
from tests.unit.sim.sim_loads import PAGE, chats
from tests.unit.workloads import sample_support as samples

# As pytest's settings have it; ``python -m tests.unit.sim.digests`` has not.
sys.path.append(str(Path(__file__).parents[3] / "benchmarks/sim"))
from batch_model import BatchSetup, Context, simulate_batch
from cluster_model import (
    COLOCATED,
    DECODE,
    PREFILL,
    ClusterConfig,
    simulate_cluster,
)

from tests.unit.benchmarks.cluster_loads import sessions

__all__ = ["CASES", "Row", "Run"]

Row = tuple[float, str, int, float, float]
Make = Callable[[Path], list["Run"]]

PAGE_BYTES = 4_096
TIMES = DeviceTimes(
    prefill_overhead_s=1e-3,
    prefill_token_s=1e-4,
    prefill_pair_s=1e-7,
    decode_overhead_s=1e-3,
    decode_request_s=1e-4,
    decode_context_token_s=1e-6,
)
FAST = LinkSpeed(1e9, 1e-6, "made up")
MEDIUM = LinkSpeed(5e8, 2e-6, "made up")
SLOW = LinkSpeed(1e8, 1e-5, "made up")


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one run.

    Attributes:
        name: within its case; empty where the case has one run only.
        rows: the event log.
        figures: a few numbers to be read in the file.
        details: all else that came out, of JSON's kinds; kept as a digest.
        uses: ``what:name`` of each feature, workload and policy that took part.
    """

    name: str
    rows: Sequence[Row]
    figures: Mapping[str, Any]
    details: Any
    uses: set[str] = field(default_factory=set)


CASES: dict[str, Make] = {}
"""By name; each makes its runs, in an empty folder."""


def _case(make: Make) -> Make:
    """Enter a case under its function's name."""
    CASES[make.__name__.replace("_", "-")] = make
    return make


# -- Servers and requests --------------------------------------------------------------


def _server(
    device: int = 100,
    host: int = 0,
    cxl: int = 0,
    disk: int = 0,
    *,
    link: LinkSpeed = FAST,
    scheduler: Mapping[str, Any] | None = None,
    **settings: Any,
) -> ServerConfig:
    """Return a server: pages of each tier, then settings of ``ServerConfig``.

    All pages are copied if nothing else is said.
    """
    settings.setdefault("write_policy", "write-through")
    chunks = {"chunk_tokens": 64, "max_prefill_tokens": 128}
    tiers = [
        TierSetup(tier, num_pages * PAGE_BYTES, speed, speed)
        for tier, num_pages, speed in (
            (TierId.HOST, host, link),
            (TierId.CXL, cxl, MEDIUM),
            (TierId.DISK, disk, SLOW),
        )
        if num_pages
    ]
    return ServerConfig(
        times=TIMES,
        page_tokens=PAGE,
        num_layers=4,
        kv_token_bytes=PAGE_BYTES // PAGE,
        device_tokens=device * PAGE,
        tiers=tuple(tiers),
        scheduler=SchedulerConfig(**{**chunks, **(scheduler or {})}),
        **settings,
    )


def _chats(num_prefixes: int = 20, *, seed: int = 0, longest: int = 40) -> SimWorkload:
    """Return chats that come faster than they are answered."""
    return chats(200, 80.0, num_prefixes, seed, longest=longest)


def _crowd(num_requests: int = 40) -> SimWorkload:
    """Return equal requests that come faster than a small device serves them."""
    rng = np.random.default_rng(0)
    return fixed_lengths(num_requests, 50.0, 100, 60, PAGE, rng)


def _burst() -> SimWorkload:
    """Return long answers, and 60 prompts that come while they are given."""
    builder = WorkloadBuilder(PAGE)
    rng = np.random.default_rng(3)
    for number in range(4):
        builder.add(0.002 * number, 20, 60)
    for number in range(60):
        prompt = int(rng.integers(30, 180))
        builder.add(0.01 + 0.004 * number, prompt, int(rng.integers(2, 30)))
    return builder.build("burst")


def _served(
    config: ServerConfig, workload: SimWorkload, name: str = "", used: str = ""
) -> Run:
    """Run a server; only what any form of the simulator must say is looked at."""
    server = SimServer(config, workload)
    result = server.run()
    figures: dict[str, Any] = {
        "end_s": float(result.end_s),
        "retractions": int(result.num_retractions),
        "peak_pages": int(result.peak_pages),
        "link_bytes": {
            link: int(size) for link, size in sorted(result.link_bytes.items())
        },
    }
    if result.layers is not None:
        figures["layers"] = asdict(result.layers)
    details: dict[str, Any] = {
        "records": [
            [
                record.request,
                float(record.arrival_s),
                float(record.admitted_s),
                float(record.first_token_s),
                float(record.finished_s),
                record.num_output_tokens,
                record.device_tokens,
                record.host_tokens,
                record.cxl_tokens,
                record.disk_tokens,
                record.num_retractions,
                record.aborted,
            ]
            for record in result.records
        ]
    }
    if result.lengths is not None:
        details["lengths"] = asdict(result.lengths)
    if config.explain:
        details["explanations"] = server.ledger.explanations()
    uses = _uses(config, workload) | ({used} if used else set())
    return Run(name, result.log.rows, figures, details, uses)


def _uses(config: ServerConfig, workload: SimWorkload) -> set[str]:
    """Return what took part; a setting without effect does not count."""
    scheduler = config.scheduler
    uses = {
        f"order:{scheduler.order}",
        f"admission:{scheduler.admission}",
        f"slo_admission:{scheduler.slo_admission}",
        f"length_predictor:{config.length_predictor.split(':')[0]}",
        f"chunks:{'on' if scheduler.chunk_tokens else 'off'}",
    }
    if config.device_reuse:
        uses.add(f"device_eviction:{config.device_eviction}")
    if config.layers is not None:
        uses.add(f"turns:{config.layers.decode}")
    if config.explain:
        uses.add("explain:on")
    if workload.num_clients:
        uses.add("arrivals:closed")
    if any(request.after >= 0 for request in workload.requests):
        uses.add("arrivals:sessions")
    tiers = [setup.tier for setup in config.tiers]
    uses |= {f"tier:{tier.label}" for tier in tiers}
    if tiers:
        uses |= {
            f"load_policy:{config.load_policy}",
            f"load_mode:{config.load_mode}",
            f"write_policy:{config.write_policy}",
            f"eviction:{config.eviction}",
            f"link_discipline:{config.link_discipline}",
        }
    if len(tiers) > 1:
        uses.add(f"demote_policy:{config.demote_policy}")
    if TierId.DISK in tiers:
        uses |= {
            f"disk_admission:{config.disk_admission}",
            f"prefetch:{config.prefetch}",
        }
        if config.prefetch == "car":
            uses.add(f"prefetch_to:{config.prefetch_to}")
    return uses


# -- A device alone --------------------------------------------------------------------


@_case
def plain_device(folder: Path) -> list[Run]:
    """Prefixes shared on the device, SGLang's adder, chunks, the order of arrival."""
    return [_served(_server(), _chats())]


@_case
def vllm_adder(folder: Path) -> list[Run]:
    """Whole prompts, admission by room for the prompt, the newest preempted."""
    scheduler = {"admission": "vllm", "chunk_tokens": 0, "max_running": 12}
    config = _server(60, scheduler=scheduler, device_eviction="fifo")
    return [_served(config, _chats(longest=90))]


@_case
def retracted_and_aborted(folder: Path) -> list[Run]:
    """Answers that outgrow the pool, fixed lengths, and a prompt too long for it."""
    builder = WorkloadBuilder(PAGE)
    for number in range(30):
        builder.add(0.003 * number, 20 + number, 90 + number % 7)
    builder.add(0.05, 1_000, 5)
    workload = builder.build("outgrown")
    config = _server(70, device_reuse=False)
    fixed = _server(70, scheduler={"ignore_eos": True})
    return [
        _served(config, workload, "free"),
        _served(fixed, workload, "ignore_eos"),
    ]


# -- Tiers -----------------------------------------------------------------------------


@_case
def host_explained(folder: Path) -> list[Run]:
    """A link that is hardly faster than computing, and what the ledger tells."""
    slow = LinkSpeed(1.2e7, 1e-4, "made up")
    return [_served(_server(60, host=150, link=slow, explain=True), _chats())]


@_case
def host_cxl_disk(folder: Path) -> list[Run]:
    """Three tiers below the device; pages go down when they are evicted."""
    config = _server(
        60,
        host=60,
        cxl=90,
        disk=900,
        demote_policy="on-evict",
        eviction="fifo",
        device_eviction="fifo",
        explain=True,
    )
    return [_served(config, _chats())]


@_case
def disk_at_arrival(folder: Path) -> list[Run]:
    """Reads begin when a request arrives, through room for 16 pages."""
    config = _server(
        60, host=60, disk=900, staging_bytes=16 * PAGE_BYTES, disk_admission="all"
    )
    return [_served(config, _chats())]


@_case
def no_prefetch(folder: Path) -> list[Run]:
    """Reads begin at admission; copies by the thread that computes; links in turn."""
    config = _server(
        60,
        host=60,
        disk=900,
        prefetch="none",
        disk_admission="second-hit",
        load_policy="always",
        load_mode="waiter",
        link_discipline="fifo",
        eviction="random",
        device_eviction="random",
        seed=5,
    )
    return [_served(config, _chats())]


@_case
def car_to_the_host(folder: Path) -> list[Run]:
    """The queue's head is read ahead from disk; disk pages by expected reuse."""
    config = _server(
        60,
        host=90,
        disk=1_200,
        prefetch="car",
        prefetch_window=4,
        disk_admission="reuse",
        explain=True,
    )
    return [_served(config, _chats())]


@_case
def car_to_the_device(folder: Path) -> list[Run]:
    """As far as the device, in CaR's order, room for more than those that run."""
    config = _server(
        160,
        host=200,
        disk=1_500,
        prefetch="car",
        prefetch_to="device",
        load_policy="always",
        scheduler={"order": "car", "max_running": 4},
    )
    return [_served(config, _chats())]


@_case
def copied_on_evict(folder: Path) -> list[Run]:
    """Copies are put off until half of the device is full; CaR's score evicts."""
    config = _server(
        80,
        host=200,
        disk=900,
        write_policy="on-evict",
        offload_threshold=0.5,
        eviction="score",
        device_eviction="score",
        length_predictor="online",
    )
    return [_served(config, _chats())]


@_case
def selective_by_cost(folder: Path) -> list[Run]:
    """Pages used twice are copied; the cost of computing them again evicts.

    And without reuse: after a while nothing goes to disk, nor, where that is asked, to
    the host.
    """
    config = _server(
        60,
        host=90,
        disk=900,
        write_policy="selective",
        eviction="cost",
        device_eviction="cost",
        explain=True,
    )
    every = replace(config, write_policy="write-through")
    return [
        _served(config, _chats(), "reuse"),
        _served(every, _chats(num_prefixes=100_000), "no-reuse"),
        _served(
            replace(config, write_policy="auto"),
            _chats(num_prefixes=100_000),
            "auto-no-reuse",
        ),
    ]


@_case
def offloads_lost(folder: Path) -> list[Run]:
    """A link too slow for the copies: some are dropped; nothing is loaded."""
    slow = LinkSpeed(1e6, 1e-5, "made up")
    config = _server(60, host=400, link=slow, load_policy="never", max_offloads=0)
    return [_served(config, _chats())]


# -- Orders of the queue ---------------------------------------------------------------


def _ordered(order: str, **settings: Any) -> list[Run]:
    scheduler = {"order": order, "max_running": 6}
    config = _server(
        60, host=90, disk=900, scheduler=scheduler, explain=True, **settings
    )
    return [_served(config, _chats())]


@_case
def order_fpf(folder: Path) -> list[Run]:
    """The longest prefix that is there first."""
    return _ordered("fpf")


@_case
def order_relaxed_fpf(folder: Path) -> list[Run]:
    """The same, and nobody waits for ever."""
    return _ordered("relaxed-fpf")


@_case
def order_cost(folder: Path) -> list[Run]:
    """By what is left to compute and to load, on copies put off."""
    return _ordered("cost", write_policy="on-evict")


@_case
def order_car(folder: Path) -> list[Run]:
    """CaR's order without its prefetch."""
    return _ordered("car")


# -- Admission by targets --------------------------------------------------------------


def _guarded(admission: str, predictor: str, **settings: Any) -> ServerConfig:
    scheduler = {"slo_admission": admission, "ttft_slo_s": 0.5, "tpot_slo_s": 0.004}
    return _server(
        2_000, scheduler=scheduler, length_predictor=predictor, explain=True, **settings
    )


@_case
def slo_online(folder: Path) -> list[Run]:
    """Prompts are held for the decoders' sake; lengths are learnt."""
    return [_served(_guarded("slo", "online"), _burst())]


@_case
def goodput_oracle(folder: Path) -> list[Run]:
    """Who can still meet its targets goes first; lengths are known."""
    return [_served(_guarded("goodput", "oracle"), _burst())]


@_case
def slo_llm(folder: Path) -> list[Run]:
    """A model is asked for the length before a request is queued."""
    return [_served(_guarded("slo", "llm", seed=7), _burst())]


@_case
def goodput_constant_tiers(folder: Path) -> list[Run]:
    """With tiers below, pages on their way, and one length for all."""
    config = replace(
        _guarded("goodput", "constant:40", prefetch="car"),
        device_tokens=70 * PAGE,
        tiers=_server(host=90, disk=900).tiers,
    )
    return [_served(config, _chats())]


# -- Layer-wise memory -----------------------------------------------------------------


def _layered(decode: str, rate: float = 1e8, **settings: Any) -> ServerConfig:
    link = LinkSpeed(rate, 1e-6, "made up")
    setup = LayerSetup(40_000, 400, link, link, decode=decode)
    return _server(250, device_reuse=False, layers=setup, **settings)


@_case
def layers_pause(folder: Path) -> list[Run]:
    """Who has layers on the host waits until they are back."""
    return [
        _served(_layered("pause"), _crowd(), "fast"),
        _served(_layered("pause", 2e7, explain=True), _crowd(), "slow"),
    ]


@_case
def layers_stream(folder: Path) -> list[Run]:
    """Layers on the host are read for each step."""
    return [_served(_layered("stream"), _crowd())]


@_case
def layers_join(folder: Path) -> list[Run]:
    """Who has layers on the host joins where the step does not take longer."""
    return [_served(_layered("join"), _crowd())]


@_case
def layers_guarded(folder: Path) -> list[Run]:
    """Both admissions over layer-wise memory, with SGLang's adder and vLLM's."""
    runs = []
    for admission, adder in (("slo", "sglang"), ("goodput", "vllm")):
        scheduler = {
            "admission": adder,
            "slo_admission": admission,
            "ttft_slo_s": 3.0,
            "tpot_slo_s": 0.02,
        }
        config = _layered("pause", scheduler=scheduler, length_predictor="oracle")
        runs.append(_served(config, _crowd(60), admission))
    return runs


# -- Workloads by name -----------------------------------------------------------------


def _named(name: str, config: ServerConfig, **params: Any) -> Run:
    workload = from_sessions(
        named_workload(name, params, 1, 32_000), config.page_tokens
    )
    return _served(config, workload, name, f"workload:{name}")


@_case
def chat_in_a_closed_loop(folder: Path) -> list[Run]:
    """Users who talk in turns and think between them."""
    sizes = {"num_sessions": 12, "num_turns": 4, "system_tokens": 40}
    lengths = {"first_tokens": 30, "user_tokens": 12, "answer_tokens": 10}
    arrivals = {"process": "closed", "concurrency": 5}
    return [
        _named(
            "chat",
            _server(120, host=300, disk=900),
            **sizes,
            **lengths,
            think_s=0.05,
            arrivals=arrivals,
        )
    ]


@_case
def recorded_workloads(folder: Path) -> list[Run]:
    """Those that read data: tiny files in the formats of public data sets."""
    config = _server(2_000, host=2_000, disk=4_000, explain=True)
    closed = {"process": "closed", "concurrency": 3}
    bursty = {"process": "bursty", "rate_per_s": 20.0, "cv": 3.0}
    even = {"process": "even", "rate_per_s": 30.0}
    mt_bench = samples.write_lines(folder / "mt_bench", samples.MT_BENCH)
    mbpp = samples.write_lines(folder / "mbpp", samples.MBPP)
    react = samples.write_json(folder / "react", samples.REACT)
    tau_bench = samples.write_json(folder / "tau_bench", samples.TAU_BENCH)
    lengths = samples.write_text(folder / "lengths", samples.LENGTHS)
    servegen = samples.write_servegen(folder / "servegen")
    mooncake = samples.write_lines(folder / "mooncake", samples.MOONCAKE)
    return [
        _named("mt_bench", config, path=str(mt_bench), arrivals=closed),
        _named("problems", config, mbpp=str(mbpp), num_shots=2, arrivals=even),
        _named("react", config, sessions=str(react), tool_s=0.1, arrivals=closed),
        _named("tau_bench", config, path=str(tau_bench), think_s=0.2, arrivals=closed),
        _named("sharegpt", config, lengths=str(lengths), think_s=0.1, arrivals=bursty),
        _named(
            "servegen",
            config,
            path=str(servegen),
            start_s=600.0,
            duration_s=60.0,
            rate_scale=2.0,
        ),
        _named(
            "trace",
            config,
            format="mooncake",
            path=str(mooncake),
            arrivals={"process": "trace", "slowdown": 0.1},
        ),
        _named(
            "system_chat",
            config,
            num_requests=30,
            system_tokens=60,
            user_tokens=20,
            answer_tokens=8,
            arrivals=bursty,
        ),
    ]


@_case
def papers_workloads(folder: Path) -> list[Run]:
    """Those of the papers, on a device and a model by name, as specs say them."""
    poisson = {"process": "poisson", "rate_per_s": 4.0}
    sizes = {"device_gb": 1.0, "host_gb": 1.0, "disk_gb": 8.0}
    sizes["write_policy"] = "write-through"
    mooncake = samples.write_lines(folder / "mooncake", samples.MOONCAKE)

    def spelt(name: str, params: Mapping[str, Any], **values: Any) -> Run:
        text = json.dumps(params)
        spec = SimSpec().with_values(
            {**sizes, "workload": name, "params": text, **values}
        )
        return _served(spec.server(), make_workload(spec), name, f"workload:{name}")

    def spec_run(name: str, **values: Any) -> Run:
        spec = SimSpec().with_values({**sizes, **values})
        return _served(spec.server(), make_workload(spec), name)

    shape = {"num_prefixes": 8, "num_requests": 60, "body_tokens": 200}
    documents = {"num_documents": 6, "document_tokens": 1_500, "share_ratio": 2}
    lengths = {"num_requests": 8, "min_tokens": 500, "max_tokens": 4_000}
    sweep = {"prompt_lengths": [128, 1_024], "num_repeats": 4, "num_passes": 2}
    fixed = {"prompt_tokens": 1_024, "answer_tokens": 100, "num_requests": 20}
    return [
        spelt("text_analysis", shape | {"arrivals": poisson}, order="fpf"),
        spelt("long_document", documents | {"think_s": 0.2}, host_medium="cxl"),
        spelt("longalign", lengths, tensor_parallel=2),
        spelt("length_sweep", sweep, hardware="A100-40G", model="Llama-2-7B"),
        spelt("fixed_lengths", fixed | {"arrivals": poisson}, slo_admission="slo"),
        spec_run("prefixes", rate=4.0, num_prefixes=8, prefix_tokens=1_024, cxl_gb=1.0),
        spec_run("file", trace=str(mooncake), sessions=True, slowdown=0.1),
    ]


# -- Without a server ------------------------------------------------------------------


@_case
def clusters(folder: Path) -> list[Run]:
    """Each routing over each kind of instances and each way to keep KV."""
    times = DeviceTimes(0.5, 0.1, 0.0, 0.25, 0.0, 0.01)
    link = LinkSpeed(100.0, 2.0, "made up")
    fleets = ((COLOCATED,) * 3, (PREFILL, DECODE, DECODE), (PREFILL, PREFILL, DECODE))
    runs = []
    for routing in ("least-load", "session", "prompt-tree"):
        rows: list[Row] = []
        figures: dict[str, Any] = {"sent_pages": [], "stored_pages": [], "end_s": []}
        uses = {f"routing:{routing}"}
        for kinds in fleets:
            for caching in (0, 1, 2, 3):
                uses |= {f"caching:{caching}", *(f"instance:{kind}" for kind in kinds)}
                config = ClusterConfig(kinds, times, 30, PAGE, 50, link, caching)
                found = simulate_cluster(
                    config, sessions(caching, 14), make_routing(routing)
                )
                columns = (found.ttft_s, found.jct_s, found.tpot_s, found.cached_tokens)
                for number, (ttft, jct, tpot, cached) in enumerate(
                    zip(*columns, strict=True)
                ):
                    rows.append((ttft, "cluster-first", number, cached, caching))
                    rows.append((jct, "cluster-end", number, tpot, caching))
                figures["sent_pages"].append(int(found.sent_pages))
                figures["stored_pages"].append(int(found.stored_pages))
                figures["end_s"].append(float(found.end_s))
        runs.append(Run(routing, rows, figures, None, uses))
    return runs


@_case
def batches(folder: Path) -> list[Run]:
    """One batch with weights and context streamed, each way to keep the context.

    The regressions below it are solved by the machine's linear algebra, so numbers are
    kept to nine digits.
    """
    setup = BatchSetup(
        find_hardware("RTX-4090"), find_model("OPT-30B"), 128, 1_920, 128, 882e9
    )
    runs = []
    for context in (
        Context.KV,
        Context.ACT,
        Context.EVEN,
        Context.HYBRID,
        Context.BALANCED,
    ):
        found = asdict(simulate_batch(setup, context))
        figures = {
            name: f"{value:.9g}" if isinstance(value, float) else value
            for name, value in found.items()
        }
        name = context.name.lower()
        runs.append(Run(name, [], figures, None, {f"context:{name}"}))
    return runs


@_case
def replays(folder: Path) -> list[Run]:
    """Traces without time: both hierarchies, both bounds and the capacity plan."""
    rng = np.random.default_rng(9)
    words: list[str] = []
    for _ in range(150):
        start = words[int(rng.integers(len(words)))][:4] if words else ""
        tail = "".join("abc"[int(rng.integers(3))] for _ in range(rng.integers(1, 5)))
        words.append(start[: int(rng.integers(5))] + tail)
    trace = spell_trace(words)
    sizes = {TierId.DEVICE: 12, TierId.HOST: 20, TierId.DISK: 60}
    figures: dict[str, Any] = {}
    uses = {"replay:exclusive", "replay:served", "replay:bounds"}
    for eviction in ("lru", "fifo", "random", "score", "cost"):
        for visible in (0, 5):
            tiers = [
                ExclusiveTier(tier, num, make_eviction_policy(eviction, rng))
                for tier, num in sizes.items()
            ]
            found = replay_exclusive(trace, tiers, visible)
            figures[f"exclusive {eviction} {visible}"] = _hits(found)
    lower = [TierConfig(tier, num) for tier, num in list(sizes.items())[1:]]
    for policies in (
        ServedPolicies(),
        ServedPolicies(write_policy="selective", disk_admission="second-hit"),
        ServedPolicies(write_policy="on-evict", disk_admission="reuse"),
        ServedPolicies(demote_policy="on-evict", disk_admission="auto"),
    ):
        found = replay_served(trace, 12, lower, policies)
        name = f"{policies.write_policy} {policies.disk_admission}"
        figures[f"served {name}"] = _hits(found)
    curve, bound = LRUCurve(trace), OptBound(trace)
    for num_pages in (5, 12, 32, 92):
        figures[f"lru and opt of {num_pages}"] = [
            curve.hit_tokens(num_pages),
            curve.pushed_pages(num_pages),
            bound.hit_tokens(num_pages),
        ]
    token_bytes = 10
    choice = {tier: num * PAGE_TOKENS * token_bytes + 7 for tier, num in sizes.items()}
    (plan,) = capacity_plan(trace, token_bytes, [choice], {TierId.HOST: 3.0})
    figures["plan"] = [
        float(plan.token_hit_rate),
        float(plan.opt_hit_rate),
        float(plan.cost),
    ]
    return [Run("", [], figures, None, uses)]


def _hits(found: ReplayResult) -> list[dict[str, int]]:
    counts = (
        found.hit_tokens,
        found.hit_pages,
        found.lost_pages,
        found.resident_pages,
        found.stored_pages,
    )
    return [
        {tier.label: int(number) for tier, number in count.items()} for count in counts
    ]
