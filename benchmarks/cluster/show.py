"""A whole cluster on this machine, a chat of two turns, and who holds what.

One prefill, one decode and one colocated server, a registry and a router that finds the
servers by it, all on free ports of the loopback. The chat goes through the pair; then
the colocated server is asked the same, which it need not compute: the others have it.
The table says which instance holds how many pages in which tier. Then all of it is
ended, or left running with ``--stay``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.cluster.members import (
    COLOCATED,
    DECODE,
    KINDS,
    new_member,
    tiered,
)
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.cluster.running import Cluster, read_json, router
from sgl_tiered_workloads.processes import ServiceError
from sgl_tiered_workloads.server import ServerStartError, exit_on_signals
from sgl_tiered_workloads.systems import CPU_FLAGS, MB, Device, Tiers

MODEL = Path(__file__).resolve().parents[2] / "workloads/models/demo"
PAGE = 16
POOL_TOKENS = 16_384
HOST_BYTES = 200 * MB
CACHING = 3
QUESTIONS = (
    "def fibonacci(n):\n    '''Return the n-th Fibonacci number.'''\n" * 4,
    "def factorial(n):\n",
)
ANSWER_TOKENS = 24
PATIENCE_S = 30.0
"""For what follows an answer: events on their way, copies to the host."""


def make_cluster(out: Path, caching: int) -> Cluster:
    """Return the cluster, not started."""
    ports, logs = Ports(), out.resolve() / "logs"
    device = Device(MODEL, POOL_TOKENS, PAGE, CPU_FLAGS)
    pool = f"file:{out.resolve() / 'pool'}"
    handover = tiered(caching, pool, HOST_BYTES)
    flags = {name: ("--tiered-pool-name", name) for name in KINDS}
    flags[COLOCATED] += (*Tiers(HOST_BYTES).flags, "--tiered-pool", pool)
    if caching == CACHING:
        # Here to be seen: so short an answer is not predicted to pay its way back.
        flags[DECODE] += ("--tiered-pd-returns", "always")
    members = [
        new_member(device, kind, kind, ports, handover=handover, flags=flags[kind])
        for kind in KINDS
    ]
    # With less caching the pair is in no pool: the router is told of it.
    told = [each for each in members if each.kind != COLOCATED and caching < CACHING]
    words = [each.word(f"http://127.0.0.1:{each.port}") for each in told]
    found = ("--tokenizer", str(MODEL), "--registry", pool, "--show-cached-tokens")
    front = router(words, ports.take(), logs, flags=found)
    return Cluster(members, logs, behind=[front], ports=ports)


def ask(url: str, messages: list[dict[str, str]]) -> tuple[str, Mapping[str, str]]:
    """Send a chat; return the answer and the headers.

    Raises:
        OSError: it was not answered.
    """
    body = {
        "model": "default",
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300.0) as response:
        told = json.load(response)
        return told["choices"][0]["message"]["content"] or "", response.headers


def chat(cluster: Cluster) -> None:
    """Play a chat of two turns through the router, and its last turn again."""
    (url,) = cluster.routers
    messages: list[dict[str, str]] = []
    for number, question in enumerate(QUESTIONS, 1):
        messages.append({"role": "user", "content": question})
        answer, headers = ask(url, messages)
        print(
            f"turn {number}: prefill by {headers.get('X-Tiered-Prefill', 'none')}, "
            f"answer by {headers['X-Tiered-Instance']}, "
            f"{headers['X-Tiered-Cached-Tokens']} tokens known before: {answer[:60]!r}"
        )
        messages.append({"role": "assistant", "content": answer})
    again, _ = ask(cluster.url(COLOCATED), messages[:-1])
    same = "the same" if again == messages[-1]["content"] else "ANOTHER"
    print(f"turn {len(QUESTIONS)} on the colocated server: {same} answer")


def rows(cluster: Cluster) -> Iterator[tuple[str, str, str, int, str]]:
    """Give (instance, kind, tier, pages, who says so).

    What is on a device the router knows from the server's events; what is below it, the
    server tells itself. A prefix that was sent and not confirmed yet is ``assumed``.
    """
    (url,) = cluster.routers
    known: Mapping[str, Any] = read_json(url + "/router/state")["instances"]
    for name, server in cluster.servers.items():
        kind, believed = known[name]["kind"], known[name]["pages"]
        yield name, kind, "device", int(believed["device"]), "events"
        (state,) = server.get("/server_info")["internal_states"]
        for tier, slots in (state.get("tiered") or {}).get("occupancy", {}).items():
            yield name, kind, tier, int(slots["used"]), "server"
        if believed["assumed"]:
            yield name, kind, "assumed", int(believed["assumed"]), "router"


def wait_for_events(cluster: Cluster) -> None:
    """Wait until two looks, a second apart, show the same: copies and events end."""
    give_up_s = time.monotonic() + PATIENCE_S
    before: list[Any] = []
    while time.monotonic() < give_up_s:
        seen = list(rows(cluster))
        if seen == before:
            return
        before = seen
        time.sleep(1.0)


def show(cluster: Cluster) -> None:
    """Print the table."""
    print(f"\n{'instance':12s} {'kind':12s} {'tier':8s} {'pages':>6s}  told by")
    for name, kind, tier, pages, source in rows(cluster):
        print(f"{name:12s} {kind:12s} {tier:8s} {pages:6d}  {source}")


def stay(cluster: Cluster) -> int:
    """Wait for Ctrl-C, or until a server ends."""
    (url,) = cluster.routers
    body = {"messages": [{"role": "user", "content": QUESTIONS[1]}], "max_tokens": 32}
    print(
        f"\nlogs: {cluster.log_dir}\n\ncurl -s {url}/v1/chat/completions -H "
        f"'Content-Type: application/json' -d '{json.dumps(body)}'\n"
        f"curl -s {url}/router/state\n\nCtrl-C stops everything.",
        flush=True,
    )
    while True:
        for server in cluster.servers.values():
            if server.exit_code() is not None:
                print(
                    f"{server.spec.name} ended:\n{server.log_tail()}", file=sys.stderr
                )
                return 1
        time.sleep(0.5)


def main() -> int:
    """Run; 0 unless something did not start or answer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/cluster"))
    parser.add_argument("--stay", action="store_true", help="leave it running")
    parser.add_argument(
        "--caching",
        type=int,
        choices=(0, 1, 2, 3),
        default=CACHING,
        help="--tiered-pd-caching of the pair; default %(default)s",
    )
    args = parser.parse_args()
    exit_on_signals()
    try:
        with make_cluster(args.out, args.caching) as cluster:
            chat(cluster)
            wait_for_events(cluster)
            show(cluster)
            return stay(cluster) if args.stay else 0
    except (ServerStartError, ServiceError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
