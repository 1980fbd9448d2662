"""The prompts of a call, and what plain SGLang answers to them.

Plain SGLang has a pool that holds everything and the flags that decide what is computed
together: page size, chunks, schedule. Its answers do not depend on what is below the
device, so they are recorded once for each model and number of ranks and kept on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from sgl_tiered_workloads.gate import Spread, measure_spread, widest_spread
from sgl_tiered_workloads.harness.machine import machine_facts, versions
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.records import (
    RequestRecord,
    make_header,
    read_records,
    write_records,
)
from sgl_tiered_workloads.server import ServerSpec, SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens, replay
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, plain_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import (
    FLOOR,
    MODELS,
    REFERENCE_POOL_TOKENS,
    open_loop,
    sequential,
)

__all__ = ["PAGE", "Kind", "Reference", "device", "get_reference", "requests"]

PAGE = 16
CHUNK_TOKENS = 8192
"""Cuts no prompt, so that what is computed together follows from the hits alone."""
ANSWER_TOKENS = 8
FAMILY_SIZE = 3
_NEXT_TOKENS = 35
"""Of a second turn, behind the answer of the first."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What decides the bits of an answer, besides the prompt.

    Attributes:
        is_mha: the model has as many KV heads as heads, as activations need it.
        num_ranks: that share a layer: sums are added in another order.
        is_long: prompts are of a length whose half is worth a pass of its own.
    """

    is_mha: bool = False
    num_ranks: int = 1
    is_long: bool = False

    @property
    def name(self) -> str:
        """Short name for logs."""
        length = "-long" if self.is_long else ""
        return f"{'mha' if self.is_mha else 'gqa'}-{self.num_ranks}{length}"

    @property
    def num_families(self) -> int:
        """Families of prompts; fewer where each takes longer."""
        return 8 // ((2 if self.num_ranks > 1 else 1) * (2 if self.is_long else 1))

    @property
    def lengths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Tokens that a family shares, and that a prompt has of its own."""
        if self.is_long:
            return (600, 1_200), (1_500, 2_500)
        return (150, 300), (40, 280)

    @property
    def scale(self) -> int:
        """How many times the room of a short prompt one takes, roughly."""
        return 6 if self.is_long else 1

    def model(self) -> Path:
        """Return the folder of the model, made if it is not there."""
        tiny = PRESETS["tiny"]
        return make_model(
            replace(tiny, num_kv_heads=tiny.num_heads) if self.is_mha else "tiny",
            MODELS,
        )


@dataclass(frozen=True, slots=True)
class Reference:
    """Plain SGLang's answers.

    Attributes:
        cold: by key, in the order sent: each prompt for the first time. A second turn
            begins with an answer of the first pass.
        warm: the same prompts when all pages are cached.
        late: keys that worlds do not send before they are killed.
        spread: of plain SGLang against itself: in other batches, and with prefixes
            reused whole, by half and not at all.
        prefill_tokens_per_s: of prompts that were computed whole.
        step_s: of decoding, one request at a time.
    """

    cold: dict[str, RequestRecord]
    warm: dict[str, RequestRecord]
    late: tuple[str, ...]
    spread: Spread
    prefill_tokens_per_s: float
    step_s: float

    def requests(self, *, late: bool = False) -> list[PlannedRequest]:
        """Return the prompts in the order of the first pass."""
        return replay(
            record for key, record in self.cold.items() if (key in self.late) == late
        )


def device(kind: Kind, pool_tokens: int) -> Device:
    """Return the device level of a server, plain or tiered."""
    flags = (*CPU_FLAGS, "--chunked-prefill-size", str(CHUNK_TOKENS))
    return Device(kind.model(), pool_tokens, PAGE, flags)


def requests(seed: int, kind: Kind) -> list[PlannedRequest]:
    """Draw prompts: families that share a beginning, in random order."""
    draw = np.random.default_rng([seed, 17])
    shared_ends, own_ends = kind.lengths
    found = []
    for family in range(kind.num_families):
        shared = _tokens(draw, shared_ends)
        for member in range(FAMILY_SIZE):
            prompt = shared + _tokens(draw, own_ends)
            found.append(PlannedRequest(f"f{family}.{member}", prompt, ANSWER_TOKENS))
    return [found[place] for place in draw.permutation(len(found))]


def get_reference(
    kind: Kind, seed: int, source: str, folder: Path, spec: ServerSpec | None = None
) -> Reference | None:
    """Return what is kept on disk; None where nothing is.

    Args:
        kind: of model and ranks.
        seed: of the prompts.
        source: hash of the product's source: its CPU attention computes here too.
        folder: where references are kept.
        spec: of the server; that of ``plain`` if None.
    """
    path = _path(spec or plain(kind), seed, source, folder)
    if not path.exists():
        return None
    header, records = read_records(path)
    by_pass: dict[str, dict[str, RequestRecord]] = {"cold": {}, "warm": {}}
    for record in records:
        name, _, key = record.key.partition(":")
        by_pass[name][key] = replace(record, key=key)
    facts = header.facts
    return Reference(
        by_pass["cold"],
        by_pass["warm"],
        tuple(facts["late"]),
        Spread(**facts["spread"]),
        facts["prefill_tokens_per_s"],
        facts["step_s"],
    )


def plain(kind: Kind) -> ServerSpec:
    """Return plain SGLang, before it is spread over ranks."""
    pool_tokens = kind.scale * REFERENCE_POOL_TOKENS
    return plain_spec(device(kind, pool_tokens), f"plain-{kind.name}")


def record_reference(
    server: SglangServer, kind: Kind, seed: int, source: str, folder: Path
) -> None:
    """Ask a plain server and keep what it says.

    Raises:
        RuntimeError: it failed to answer.
    """
    first = requests(seed, kind)
    late = _late(seed, kind)
    server.flush_cache()
    cold = _checked(sequential(server, first))
    draw = np.random.default_rng([seed, 18])
    second = [
        PlannedRequest(
            f"{record.key}.next",
            record.prompt
            + record.output
            + random_tokens(draw, _NEXT_TOKENS, VOCAB_TOKENS),
            ANSWER_TOKENS,
        )
        for record in cold[::4]
    ]
    cold += _checked(sequential(server, [*second, *late]))
    warm = _checked(sequential(server, replay(cold)))
    alone, halved = [], []
    chosen = cold[::4]
    for request in replay(chosen):
        server.flush_cache()
        alone += sequential(server, [request])
        server.flush_cache()
        half = request.prompt[: len(request.prompt) // 2]
        halved += sequential(server, [PlannedRequest("half", half, 1), request])[1:]
    server.flush_cache()
    together = open_loop(server, replay(cold))
    spread = widest_spread(
        [
            measure_spread(cold, warm),
            measure_spread(chosen, _checked(alone)),
            measure_spread(chosen, _checked(halved)),
            measure_spread(cold, _checked(together)),
            FLOOR,
        ]
    )
    speeds = [len(record.prompt) / record.ttft_s for record in alone]
    facts = {
        "spread": asdict(spread),
        "late": [one.key for one in late],
        "prefill_tokens_per_s": float(np.median(speeds)),
        "step_s": float(np.median([record.tpot_s for record in warm])),
    }
    write_records(
        _path(server.spec, seed, source, folder),
        make_header(server.spec.name, facts, seed=seed),
        [
            replace(record, key=f"{name}:{record.key}")
            for name, records in (("cold", cold), ("warm", warm))
            for record in records
        ],
    )


def _late(seed: int, kind: Kind) -> list[PlannedRequest]:
    draw = np.random.default_rng([seed, 19])
    return [
        PlannedRequest(f"late{n}", _tokens(draw, kind.lengths[1]), ANSWER_TOKENS)
        for n in range(kind.num_families)
    ]


def _tokens(draw: np.random.Generator, ends: tuple[int, int]) -> tuple[int, ...]:
    return random_tokens(draw, int(draw.integers(*ends, endpoint=True)), VOCAB_TOKENS)


def _checked(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    for record in records:
        if record.error is not None:
            raise RuntimeError(f"plain SGLang failed at {record.key}: {record.error}")
    return list(records)


def _path(spec: ServerSpec, seed: int, source: str, folder: Path) -> Path:
    """Return where the answers of a plain server are kept."""
    facts = [*spec.flags, spec.model.name, seed, source, versions(), machine_facts()]
    # What draws and sends the prompts counts as well.
    facts.append(Path(__file__).read_text())
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return folder / f"{spec.name}-{digest[:16]}.jsonl"
