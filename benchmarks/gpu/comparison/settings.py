"""What a comparison is asked for: sizes, the model, and what all systems share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reload.arms import ModelFacts
from sgl_tiered_workloads.harness import machine

__all__ = [
    "DRY",
    "GPU",
    "LoadShape",
    "Model",
    "ProblemError",
    "Shared",
    "Sizes",
    "header",
    "patience_s",
]

ROOT = Path(__file__).resolve().parents[3]
_SOURCES = ("sgl_tiered", "kernels", "workloads", "benchmarks/gpu")
_START_S, _SLOWEST_TOKENS_PER_S = 120.0, 500.0
_PROGRAM_S, _LOAD_TOKENS_PER_S = 600.0, 2000.0
"""Of bench_serving, which imports SGLang for minutes on two busy cores."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


class ProblemError(ValueError):
    """Something is wrong with what was asked for; the message is one sentence."""


def patience_s(tokens: int) -> float:
    """Return after how long a request is given up, with so many tokens before its end.

    An 8B model on one GPU computes some ten thousand tokens per second, the model of a
    dry run about two thousand: what takes longer than this hangs.
    """
    return _START_S + tokens / _SLOWEST_TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class LoadShape:
    """A load of ``generated-shared-prefix``, in tokens.

    Attributes:
        prefix_tokens: what the prompts of a group begin with.
        question_tokens: of each prompt, or turn.
        answer_tokens: of each answer.
        per_group: prompts of a group.
        turns: of each; more than one is a conversation.
        concurrency: requests at a time; 0 for all conversations at once.
    """

    prefix_tokens: int
    question_tokens: int
    answer_tokens: int
    per_group: int
    turns: int
    concurrency: int

    def group_tokens(self) -> int:
        """Return the KV of a group that may come again."""
        if self.turns == 1:
            return self.prefix_tokens
        turn = self.question_tokens + self.answer_tokens
        return self.prefix_tokens + self.turns * turn

    def limit_s(self, groups: int) -> float:
        """Return after how long a run is given up, its program's start included.

        Counted is every token of prompts and answers, as if none were reused.
        """
        turn = self.question_tokens + self.answer_tokens
        prompts = groups * self.per_group * self.turns
        tokens = prompts * (self.prefix_tokens + self.turns * turn)
        return _PROGRAM_S + tokens / _LOAD_TOKENS_PER_S

    def num_groups(self, pool_tokens: int, num_pools: float) -> int:
        """Return how many groups have the KV of so many device pools."""
        return max(2, -(-int(num_pools * pool_tokens) // self.group_tokens()))


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        starts: of each system's server, in one order and then in the opposite one.
        lengths: of hits, in tokens; whole pages.
        hits: per start and length, below the device and on it. One more goes before
            them and does not count.
        answer_tokens: of these requests.
        disk_prompts, disk_hits: prompts per start and length on disk, and hits of them;
            one more hit does not count.
        gate_prompts, gate_answer_tokens: of the equality gate.
        stream_prompts, stream_prompt_tokens, stream_answer_tokens: of the stream
            without reuse of each start. A quarter as many go before it.
        stream_concurrency: its requests at a time.
        load_repeats: of each load of bench_serving, per start. One more goes before
            them and does not count.
        load_pools: what a load uses again, in device pools.
        shared_prefix, multi_turn: the loads.
    """

    starts: int
    lengths: tuple[int, ...]
    hits: int
    answer_tokens: int
    disk_prompts: int
    disk_hits: int
    gate_prompts: int
    gate_answer_tokens: int
    stream_prompts: int
    stream_prompt_tokens: int
    stream_answer_tokens: int
    stream_concurrency: int
    load_repeats: int
    load_pools: float
    shared_prefix: LoadShape
    multi_turn: LoadShape


GPU = Sizes(
    starts=2,
    lengths=(1024, 4096, 16384, 32768),
    hits=6,
    answer_tokens=4,
    disk_prompts=3,
    disk_hits=4,
    gate_prompts=6,
    gate_answer_tokens=16,
    stream_prompts=192,
    stream_prompt_tokens=2048,
    stream_answer_tokens=64,
    stream_concurrency=32,
    load_repeats=2,
    load_pools=1.25,
    shared_prefix=LoadShape(2048, 128, 64, per_group=4, turns=1, concurrency=16),
    multi_turn=LoadShape(2048, 256, 64, per_group=1, turns=4, concurrency=0),
)
DRY = Sizes(
    starts=2,
    lengths=(512, 1024),
    hits=2,
    answer_tokens=2,
    disk_prompts=2,
    disk_hits=1,
    gate_prompts=3,
    gate_answer_tokens=6,
    stream_prompts=4,
    stream_prompt_tokens=256,
    stream_answer_tokens=8,
    stream_concurrency=2,
    load_repeats=1,
    load_pools=1.25,
    shared_prefix=LoadShape(256, 32, 4, per_group=2, turns=1, concurrency=4),
    multi_turn=LoadShape(256, 32, 8, per_group=1, turns=3, concurrency=0),
)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all systems of one run have in common.

    Attributes:
        page_size: tokens per page.
        pool_tokens: most tokens of the device pool.
        mem_fraction: ``--mem-fraction-static``; None on a CPU, where it says nothing.
        attention_backend: empty for what plain SGLang chooses.
        host_gb: host memory of each system that has some; 0 for two device pools.
        disk_gb: of our disk tier; HiCache's file backend has no limit.
        server_flags: further ones.
    """

    page_size: int
    pool_tokens: int
    mem_fraction: float | None
    attention_backend: str
    host_gb: int
    disk_gb: int
    server_flags: tuple[str, ...] = ()

    def host_gb_of(self, pool_tokens: int, token_bytes: int) -> int:
        """Return the host memory where the device pool has so many tokens.

        Two device pools are what HiCache takes by itself.
        """
        return self.host_gb or max(1, -(-2 * pool_tokens * token_bytes // 10**9))


@dataclass(frozen=True, slots=True)
class Model:
    """What a model's folder says.

    Attributes:
        path: of the folder.
        token_bytes: KV of a token over all layers, in 16-bit numbers.
        vocabulary: number of token ids.
        context_tokens: longest sequence.
        weights_bytes: of its files.
        has_chat: whether its tokenizer has a chat template.
        digest: of its configuration and the sizes of its files.
    """

    path: Path
    token_bytes: int
    vocabulary: int
    context_tokens: int
    weights_bytes: int
    has_chat: bool
    digest: str

    @classmethod
    def of(cls, path: Path) -> Model:
        """Read a folder.

        Raises:
            ProblemError: it holds no model.
        """
        if not path.is_dir():
            raise ProblemError(f"--model: there is no folder {path}.")
        config = path / "config.json"
        try:
            facts = ModelFacts.of(path)
            told = json.loads(config.read_text(encoding="utf-8"))
            context_tokens = int(told["max_position_embeddings"])
        except OSError:
            raise ProblemError(
                f"--model: {path} has no config.json that can be read, so it is no "
                "folder of a model."
            ) from None
        except (KeyError, TypeError, ValueError) as lacks:
            raise ProblemError(
                f"--model: config.json of {path.name} is not that of a Llama or its "
                f"like ({type(lacks).__name__}: {lacks})."
            ) from None
        files = sorted(file for one in _WEIGHTS for file in path.glob(one))
        if not files:
            raise ProblemError(f"--model: {path} has no file with weights.")
        sizes = {file.name: file.stat().st_size for file in files}
        key = config.read_bytes() + json.dumps(sizes).encode()
        return cls(
            path,
            facts.token_bytes,
            facts.vocabulary,
            context_tokens,
            sum(sizes.values()),
            _has_chat(path),
            hashlib.sha256(key).hexdigest()[:16],
        )

    def facts(self) -> dict[str, Any]:
        """Return what may be written down: no path of the machine."""
        return {**asdict(self), "path": self.path.name}


def _has_chat(path: Path) -> bool:
    if (path / "chat_template.jinja").exists():
        return True
    try:
        text = (path / "tokenizer_config.json").read_text(encoding="utf-8")
        return bool(json.loads(text).get("chat_template"))
    except (OSError, ValueError):
        return False


def header(
    model: Model, shared: Shared, sizes: Sizes, systems: Sequence[str], *, dry_run: bool
) -> dict[str, Any]:
    """Return what ran and where."""
    return {
        "kind": "header",
        "bench": "llama",
        "commit": machine.commit(),
        "dirty": machine.is_dirty(),
        "source": machine.source_hash(ROOT, _SOURCES, machine.NOT_IN_SERVERS),
        "versions": machine.versions(),
        "machine": machine.machine_facts(),
        "model": model.facts(),
        # JSON has lists only: a header that was read equals one that was made.
        "shared": json.loads(json.dumps(asdict(shared))),
        "sizes": json.loads(json.dumps(asdict(sizes))),
        "systems": list(systems),
        "dry_run": dry_run,
    }
