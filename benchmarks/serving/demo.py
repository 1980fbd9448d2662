"""The demo: the same chats on SGLang without and with tiers, and a picture.

Three servers play one multi-turn workload whose KV is more than four times the device
pool, one request at a time:

- ``reference``: plain SGLang with a pool that holds everything. It writes the
  chats (each turn carries the model's own answers) and is what the answers of the
  tiered server must equal bit for bit. It also shows the best possible TTFT.
- ``plain``: plain SGLang with the small pool.
- ``tiered``: the same small pool, with host memory and disk below it.

The model is the small Llama that this repository trained (``make model``). Each turn
asks for a value that was stated thousands of tokens before, so right answers can be
counted.

The last two replay the reference's prompts side by side, turn by turn, so that whatever
else the machine does meets both. Before the gate counts, a negative
control proves that it can fail: two prompts in which the pages that state what is
asked are another prompt's stand for a cache that serves wrong pages. (A model that
learned hardly minds a page that it need not read.)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from sgl_tiered_workloads.client import StreamingClient, run_chat
from sgl_tiered_workloads.gate import (
    GateResult,
    check_equality,
    negative_control,
    plain_spread,
)
from sgl_tiered_workloads.harness.keeping import keep_record, run_facts
from sgl_tiered_workloads.records import RequestRecord, make_header, write_records
from sgl_tiered_workloads.report import draw_demo, format_table, summarise
from sgl_tiered_workloads.server import (
    ServerSpec,
    ServerStartError,
    SglangServer,
    exit_on_signals,
)
from sgl_tiered_workloads.sessions import (
    ChatShape,
    PlannedRequest,
    random_tokens,
    replay,
    swap_page,
)
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    MB,
    Device,
    Tiers,
    plain_spec,
    tiered_spec,
)
from sgl_tiered_workloads.training.chats import RecallChats, recall_chats
from sgl_tiered_workloads.training.corpus import Corpus, TextTokens
from sgl_tiered_workloads.training.pairs import KEY_TOKENS, MAX_VALUE_TOKENS
from sgl_tiered_workloads.training.vocabulary import Vocabulary
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "workloads/models/demo"
SOURCES = ("sgl_tiered", "kernels", "platform_dist")
"""Folders whose source decides what is measured."""
PAGE_SIZE = 16
POOL_TOKENS = 7168
REFERENCE_POOL_TOKENS = 65536
SHAPE = ChatShape(
    num_sessions=10,
    num_turns=4,
    system_tokens=512,
    first_tokens=3000,
    user_tokens=48,
    answer_tokens=24,
)
SEED = 7
TITLES = {
    "plain": "plain SGLang",
    "tiered": "SGLang + tiers",
    "reference": "plain, pool for all",
}
# Less than the working set, so that the disk has work too.
HOST_BYTES = 48 * MB
DISK_BYTES = 500 * MB


@dataclass(slots=True)
class Progress:
    """Prints lines with the time since the start."""

    begin: float

    def __call__(self, text: str) -> None:
        """Print one line."""
        print(f"[{time.monotonic() - self.begin:4.0f} s] {text}", flush=True)


def main() -> int:
    """Run the demo; 0 if the gate is green."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--port", type=int, help="default: a free one")
    parser.add_argument(
        "--server-flag",
        action="append",
        default=[],
        help="a further flag for every server; may be repeated",
    )
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER", help="keep a copy of the record there"
    )
    args = parser.parse_args()
    exit_on_signals()
    try:
        return asyncio.run(_demo(args, Progress(time.monotonic())))
    except ServerStartError as error:
        print(error, file=sys.stderr)
        return 1


async def _demo(args: argparse.Namespace, say: Progress) -> int:
    load_before = os.getloadavg()[0]
    working_set = SHAPE.working_set_tokens
    say(
        f"workload: {SHAPE.num_sessions} chats of {SHAPE.num_turns} turns, "
        f"{working_set:,} tokens of KV, {working_set / POOL_TOKENS:.1f} times the "
        f"device pool of {POOL_TOKENS:,}"
    )
    chats, vocab_tokens = _chats(args.model)
    device = Device(args.model, POOL_TOKENS, PAGE_SIZE, (*CPU_FLAGS, *args.server_flag))
    disk = args.out / "disk"
    shutil.rmtree(disk, ignore_errors=True)
    disk.mkdir(parents=True)
    tiers = Tiers(HOST_BYTES, disk, DISK_BYTES)
    runs: dict[str, list[RequestRecord]] = {}

    def keep(spec: ServerSpec, records: list[RequestRecord]) -> None:
        runs[spec.name] = records
        facts = {"model": args.model.name, "shape": asdict(SHAPE), "seed": SEED}
        facts |= {"pool_tokens": POOL_TOKENS, "working_set_tokens": working_set}
        header = make_header(spec.name, facts)
        write_records(args.out / f"{spec.name}.jsonl", header, records)

    say("reference: plain SGLang whose device pool holds everything")
    spec = plain_spec(device.with_pool(REFERENCE_POOL_TOKENS), "reference")
    with SglangServer(spec, args.out / "logs", args.port, say=say) as server:
        await _warm_up(server, vocab_tokens)
        async with StreamingClient(server.url) as client:
            keep(spec, await run_chat(client, chats.sessions, _Ticker(say, spec.name)))
        say("reference: two prompts with wrong pages, for the negative control")
        wrong = await _wrong_pages(server, runs["reference"])
    requests = replay(runs["reference"])
    specs = (plain_spec(device), tiered_spec(device, tiers))
    say("plain and tiered: the small device pool, in turns")
    with ExitStack() as both:
        servers = [
            both.enter_context(
                SglangServer(
                    spec, args.out / "logs", args.port and args.port + n, say=say
                )
            )
            for n, spec in enumerate(specs)
        ]
        for server in servers:
            await _warm_up(server, vocab_tokens)
        in_turns = await _in_turns(servers, requests, say)
    for spec, records in zip(specs, in_turns, strict=True):
        keep(spec, records)
    shutil.rmtree(disk, ignore_errors=True)
    result = _gate(runs, wrong)
    _report(args.out, runs, result, chats)
    if result.passed:
        record = _record(runs, result, chats) | {"load_before": load_before}
        (args.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
        if args.record is not None:
            keep_record(args.record, "demo", record)
    say(f"records, logs and picture are in {args.out}")
    return 0 if result.passed else 1


def _chats(model: Path) -> tuple[RecallChats, int]:
    """Return chats about text that the model was not trained on, and its vocabulary."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    vocabulary = Vocabulary.of(tokenizer)
    text = TextTokens.encode(Corpus.read().held_out, tokenizer, vocabulary)
    rng = np.random.default_rng(SEED)
    return recall_chats(SHAPE, text, vocabulary, rng), vocabulary.num_tokens


async def _warm_up(server: SglangServer, vocab_tokens: int) -> None:
    """Run each path once (compute, hit, decode), then empty the caches."""
    generator = np.random.default_rng(0)
    prompt = random_tokens(generator, 600, vocab_tokens)
    await _replay(server, [PlannedRequest(f"w{i}", prompt, 8) for i in range(3)])
    await asyncio.to_thread(server.flush_cache)


async def _replay(
    server: SglangServer,
    requests: list[PlannedRequest],
    each: _Ticker | None = None,
) -> list[RequestRecord]:
    async with StreamingClient(server.url) as client:
        return await client.run_sequential(requests, each)


async def _in_turns(
    servers: Sequence[SglangServer], requests: list[PlannedRequest], say: Progress
) -> list[list[RequestRecord]]:
    """Replay each turn of all chats on one server, then on the next; return records.

    Who begins changes from turn to turn. What a server still copies after a turn ends
    before the other one goes on. In the records a server's turns follow each other.
    """
    found: list[list[RequestRecord]] = [[] for _ in servers]
    tickers = [_Ticker(say, server.spec.name) for server in servers]
    size = SHAPE.num_sessions
    for turn, first in enumerate(range(0, len(requests), size)):
        for place in sorted(range(len(servers)), reverse=bool(turn % 2)):
            part = requests[first : first + size]
            answered = await _replay(servers[place], part, tickers[place])
            await _settle(servers[place])
            times_s = [r.token_times_s[-1] for r in found[place] if r.token_times_s]
            at_s = max(times_s, default=0.0)
            found[place] += [_later(record, first, at_s) for record in answered]
    return found


def _later(record: RequestRecord, order: int, at_s: float) -> RequestRecord:
    """Return a record moved to a later place and time of its run."""
    return replace(
        record,
        order=order + record.order,
        targeted_s=at_s + record.targeted_s,
        started_s=at_s + record.started_s,
        token_times_s=tuple(at_s + time_s for time_s in record.token_times_s),
    )


async def _settle(server: SglangServer) -> None:
    """Wait until a server with tiers copies nothing more, for 30 s at most."""
    if "tiered" not in server.spec.flags:
        return
    before: object = None
    for _ in range(30):
        edges = (await asyncio.to_thread(server.get, "/tiered/stats"))[0]["edges"]
        if edges == before:
            return
        before = edges
        await asyncio.sleep(1.0)


async def _wrong_pages(
    server: SglangServer, reference: list[RequestRecord]
) -> list[RequestRecord]:
    """Answer the last two turns as if the pages that they ask about were others.

    The records claim the right prompts, as a server with wrong pages would.
    """
    await asyncio.to_thread(server.flush_cache)
    # The middle session of the first round is none of the last two.
    donor = reference[SHAPE.num_sessions // 2].prompt
    right = replay(reference[-2:])
    damaged = []
    for request in right:
        damaged.append(request)
        for page in _stating_pages(request.prompt):
            damaged[-1] = swap_page(damaged[-1], donor, page, PAGE_SIZE)
    answers = await _replay(server, damaged)
    return [
        replace(answer, prompt=request.prompt, order=record.order)
        for answer, request, record in zip(answers, right, reference[-2:], strict=True)
    ]


def _stating_pages(prompt: tuple[int, ...]) -> list[int]:
    """Return the pages in which the pair that a prompt ends with was mentioned."""
    key = prompt[-KEY_TOKENS:]
    places = [
        place
        for place in range(SHAPE.system_tokens, len(prompt) - KEY_TOKENS)
        if prompt[place : place + KEY_TOKENS] == key
    ]
    length = KEY_TOKENS + MAX_VALUE_TOKENS
    pages = {(place + part) // PAGE_SIZE for place in places for part in (0, length)}
    # The last page is the question's own.
    return sorted(pages - {len(prompt) // PAGE_SIZE})


def _gate(
    runs: dict[str, list[RequestRecord]], wrong: list[RequestRecord]
) -> GateResult:
    reference = runs["reference"]
    spread = plain_spread(reference, runs["plain"], PAGE_SIZE)
    print(
        f"\nplain against itself (recompute or device hit): top-5 logprobs move "
        f"{spread.max_logprob:.3f} at most, {spread.mean_logprob:.4f} on average"
    )
    control = check_equality(
        reference[-2:],
        wrong,
        page_size=PAGE_SIZE,
        spread=spread,
        min_exact_fraction=0.0,
    )
    negative_control({"another prompt's pages": control})
    print("negative control: wrong pages are caught")
    print(f"  {control.differences[0].reason}")
    result = check_equality(
        reference,
        runs["tiered"],
        page_size=PAGE_SIZE,
        spread=spread,
        min_exact_fraction=0.5,
        must_cover=("host", "disk"),
    )
    print(result.summary())
    return result


def _report(
    out: Path,
    runs: dict[str, list[RequestRecord]],
    result: GateResult,
    chats: RecallChats,
) -> None:
    titles = TITLES
    summaries = [summarise(titles[name], runs[name], PAGE_SIZE) for name in titles]
    print("\n" + format_table(summaries))
    right = _right(runs, chats)
    print(
        f"right answers of {len(chats.answers)}: "
        + ", ".join(f"{titles[name]} {number}" for name, number in right.items())
    )
    if not result.passed:
        print("the gate is red: no speed is claimed")
        return
    plain, tiered = summaries[0], summaries[1]
    print(
        f"TTFT of later turns, median: {plain.later_ttft_p50_s * 1e3:.0f} ms without "
        f"tiers, {tiered.later_ttft_p50_s * 1e3:.0f} ms with them: "
        f"{plain.later_ttft_p50_s / tiered.later_ttft_p50_s:.1f} times lower"
    )
    subtitle = (
        f"{SHAPE.num_sessions} chats x {SHAPE.num_turns} turns, one at a time; KV "
        f"{SHAPE.working_set_tokens / POOL_TOKENS:.1f}x the device pool of "
        f"{POOL_TOKENS:,} tokens; a small Llama that learned, CPU"
    )
    draw_demo(
        out / "demo.png", {titles[n]: runs[n] for n in titles}, PAGE_SIZE, subtitle
    )


def _right(runs: dict[str, list[RequestRecord]], chats: RecallChats) -> dict[str, int]:
    """Return how many answers name the right value, by system."""
    return {
        name: chats.num_right({r.key: r.output for r in runs[name]}) for name in TITLES
    }


def _record(
    runs: dict[str, list[RequestRecord]], result: GateResult, chats: RecallChats
) -> dict[str, object]:
    """Return what ``make results`` makes its table and its picture of."""
    summaries = {n: summarise(TITLES[n], runs[n], PAGE_SIZE) for n in TITLES}
    written = {record.key: record.output for record in runs["reference"]}
    return {
        **run_facts("make demo", ROOT, SOURCES),
        "model": MODEL.name,
        "shape": asdict(SHAPE),
        "pool_tokens": POOL_TOKENS,
        "working_set_tokens": SHAPE.working_set_tokens,
        "answers": len(runs["reference"]),
        "equal": sum(r.output == written[r.key] for r in runs["tiered"]),
        "bit_for_bit": result.num_exact,
        "near_ties": result.near_ties,
        "right": _right(runs, chats),
        "summaries": {name: asdict(each) for name, each in summaries.items()},
        "ttft_s": {
            name: {r.key: round(r.ttft_s, 6) for r in runs[name] if r.error is None}
            for name in TITLES
        },
    }


class _Ticker:
    """Says every tenth request what it took."""

    def __init__(self, say: Progress, name: str) -> None:
        self._say = say
        self._name = name
        self._seen = 0

    def __call__(self, record: RequestRecord) -> None:
        self._seen += 1
        if record.error is not None:
            self._say(f"  {self._name}: {record.key} failed: {record.error}")
        elif self._seen % SHAPE.num_sessions == 0:
            total = SHAPE.num_sessions * SHAPE.num_turns
            self._say(
                f"  {self._name}: {self._seen} of {total} requests, the last: TTFT "
                f"{record.ttft_s * 1e3:.0f} ms, {record.cached_tokens} of "
                f"{len(record.prompt)} tokens cached"
            )


if __name__ == "__main__":
    raise SystemExit(main())
