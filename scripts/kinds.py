"""Kinds of records: where they lie, which command makes one, whose source it is of."""

from __future__ import annotations

from dataclasses import dataclass

from recorded import sources_of
from sgl_tiered_workloads.harness.machine import NOT_IN_SERVERS

__all__ = ["BENCHES", "KINDS", "MICROS", "PRINTS", "RECORDS", "Bench", "Kind"]

RECORDS = "benchmarks/results"
"""Where ``make ... RECORD=benchmarks/results`` keeps records of every kind."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of record.

    Attributes:
        pattern: of its files that are not in ``RECORDS``, or of all.
        command: that makes one.
        folders, without: whose source decides what is measured.
    """

    pattern: str
    command: str
    folders: tuple[str, ...]
    without: tuple[str, ...] = NOT_IN_SERVERS


_PRODUCT = ("sgl_tiered", "kernels", "platform_dist")
_WORKLOADS = "workloads/sgl_tiered_workloads"
KINDS: dict[str, Kind] = {
    "demo": Kind(
        f"{RECORDS}/demo-*.json",
        "make demo",
        _PRODUCT,
    ),
    "equality": Kind(
        "tests/equality/records/*.json",
        "make equality",
        ("sgl_tiered", "kernels", "platform_dist", "tests/equality"),
    ),
    "soak": Kind(
        "tests/soak/records/*.json",
        "make soak",
        ("sgl_tiered", _WORKLOADS, "tests/soak"),
    ),
    "fuzz": Kind(
        "tests/fuzz/records/*.json",
        "make fuzz",
        ("sgl_tiered", _WORKLOADS, "tests/fuzz"),
        (),
    ),
    "restart": Kind(
        "benchmarks/disk/records/restart-*.json",
        "make bench-restart",
        ("sgl_tiered", "benchmarks/disk"),
    ),
    "reuse": Kind(
        f"{RECORDS}/reuse-*.json",
        "make bench-reuse",
        (*_PRODUCT, "benchmarks/serving/bench_reuse.py", "benchmarks/serving/reuse"),
    ),
    "no-reuse": Kind(
        f"{RECORDS}/no-reuse-*.json",
        "make bench-no-reuse",
        (
            *_PRODUCT,
            "benchmarks/serving/bench_no_reuse.py",
            "benchmarks/serving/no_reuse",
        ),
    ),
    "router": Kind(
        "benchmarks/cluster/records/router-*.jsonl", "make bench-router", _PRODUCT
    ),
    "store": Kind(
        "benchmarks/cluster/records/store-*.jsonl", "make bench-store", _PRODUCT
    ),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """A benchmark whose last line ``recorded.py`` keeps.

    Attributes:
        title: what it measures.
        program: its path, which says whose source decides what is measured.
        keys: of its last line, those that are shown.
        command: if it is no ``make bench-NAME``.
    """

    title: str
    program: str
    keys: tuple[str, ...] = ()
    command: str = ""


_SERVING = "benchmarks/serving"
BENCHES = {
    "chat": Bench("a chat by the harness; the report is in the record", "-m"),
    "tree": Bench(
        "LSPDojo's tree search: the share of prompt tokens from a cache",
        f"{_SERVING}/lsp_tree.py",
        ("cached_share",),
    ),
    "disk": Bench(
        "the disk tier against `fio`",
        "benchmarks/disk/bench_disk.py",
        ("read_vs_fio", "write_vs_fio"),
    ),
    "pipeline": Bench(
        "loads under a forward, over an emulated link; offloads under prefill",
        f"{_SERVING}/bench_pipeline.py",
        ("pipeline_efficiency_worst", "offload_throughput_vs_off"),
    ),
    "planner": Bench(
        "the planner against always and never loading, over emulated links",
        f"{_SERVING}/bench_planner.py",
        ("planner_regret_worst", "planner_gain_mixed"),
    ),
    "orders": Bench(
        "the order `cost` against fcfs; text analysis with it and with prefetch, the "
        "disk throttled",
        f"{_SERVING}/bench_orders.py",
        (
            "worst_mean_ttft_vs_fcfs",
            "worst_p99_ttft_vs_fcfs",
            "text_analysis_throughput_vs_plain",
            "text_analysis_throughput_vs_own_fcfs",
        ),
    ),
    "layerkv": Bench(
        "layer-wise KV against plain SGLang, over an emulated link",
        f"{_SERVING}/bench_layerkv.py",
        (
            "mean_ttft_speedup_at_knee",
            "p99_ttft_speedup_at_knee",
            "throughput_vs_plain",
        ),
    ),
    "activations": Bench(
        "activations beside KV, over an emulated link",
        f"{_SERVING}/bench_activations.py",
        (
            "throughput_vs_kv_only",
            "throughput_vs_act_only",
            "traffic_vs_kv_only",
            "reload_ttft_vs_kv_only",
            "balance_efficiency",
            "auto_regret",
        ),
    ),
    "slo": Bench(
        "SLO admission off and on",
        f"{_SERVING}/bench_slo.py",
        (
            "tpot_violation_off",
            "tpot_violation_on",
            "ttft_violation_off",
            "ttft_violation_on",
            "throughput_vs_off",
        ),
    ),
    "sparsity": Bench(
        "what dropping and encoding KV costs and gains, over an emulated link",
        "benchmarks/quality/bench_sparsity.py",
        (
            "ppl_increase_at_50",
            "recall_ratio_at_50",
            "ppl_increase_at_4x",
            "ttft_speedup_at_50",
            "ttft_speedup_int4",
        ),
    ),
    "pool": Bench(
        "calls of the memory pool; transfers against their transport",
        "benchmarks/pool/bench_pool.py",
        ("alloc_us", "insert_4k_ms", "match_4k_ms", "transfer_vs_transport"),
    ),
    "cluster": Bench(
        "routers, and prefill/decode pairs, where memory is not short",
        "benchmarks/cluster/bench_cluster.py",
        (
            "router_p99_vs_session",
            "router_p99_vs_sglang_router",
            "cc_ttft_gain_worst",
            "cc_ttft_vs_sglang_pd",
        ),
    ),
    "fidelity": Bench(
        "the simulator against a real server",
        "benchmarks/sim/fidelity.py",
        ("runs", "misses", "limits"),
    ),
    "host-waits": Bench(
        "what would hold the scheduler on a CUDA device, counted on a CPU",
        "tests/contract/count_waits.py",
        ("host_waits_on_scheduler", "pinned_allocations", "held", "planted_caught"),
        "make host-waits",
    ),
    "gpu": Bench(
        "all that has to be seen on a GPU",
        "benchmarks/gpu/session.py",
        ("stages",),
    ),
    "llama": Bench(
        "plain SGLang, HiCache, LMCache and tiers on one GPU; the table is in the "
        "record",
        "benchmarks/gpu/llama.py",
        ("gates",),
    ),
}
MICROS = (
    "explain",
    "host_hit",
    "length",
    "lookup",
    "ordering",
    "request_path",
    "routing",
)
"""Of benchmarks/micro, those whose times are shown."""
PRINTS = {
    "activations": ("activations", False),
    "chain": ("chain", True),
    "cluster_plan": ("cluster", False),
    "eviction": ("eviction", True),
    "figures": ("index", False),
    "layerkv_cpu": ("layerkv", False),
    "layerkv_tables": ("layerkv", False),
    "lengths": ("lengths", True),
    "memserve": ("memserve", False),
    "orders": ("orders", True),
    "prefetch": ("prefetch", False),
    "slo": ("slo", True),
    "theory": ("theory", True),
}
"""Programs of benchmarks/sim whose print is shown: the page, and whether of traces."""


def _kept(name: str, program: str, command: str) -> Kind:
    """Return the kind of record that ``recorded.py`` keeps of a program."""
    return Kind(f"{RECORDS}/{name}-*.json", command, sources_of(program), ())


KINDS |= {
    name: _kept(name, bench.program, bench.command or f"make bench-{name}")
    for name, bench in BENCHES.items()
}
KINDS |= {
    f"micro-{name}": _kept(
        f"micro-{name}", f"benchmarks/micro/{name}.py", "make bench-micro"
    )
    for name in MICROS
}
KINDS |= {
    f"sim-{name}": _kept(
        f"sim-{name}",
        f"benchmarks/sim/{name}.py",
        f'make bench-sim ARGS="{name}"' + (" TRACES=folder" if of_traces else ""),
    )
    for name, (_, of_traces) in PRINTS.items()
}
