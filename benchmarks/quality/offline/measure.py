"""One case under many methods: the prefix is computed once, then compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from offline.cases import Case, RecallCase
from offline.llama import LayerKV, Llama
from offline.prefix import Prefix, compute_prefix, keep

from sgl_tiered.policies.sparsity.base import KeepSets, Selection
from sgl_tiered.policies.sparsity.solver import HeldCurves

__all__ = ["DENSE", "Codec", "Method", "Score", "grid", "measure"]

RAW = "raw"


@dataclass(frozen=True, slots=True)
class Codec:
    """An encoding, as far as quality goes: what comes back, and the bytes' share.

    Attributes:
        round_trip: dense KV of a layer to what a reader gets.
        bytes_ratio: encoded bytes over all raw ones, of so many tokens of which these
            are kept (None: all): what a load of them reads, scales that they share
            with others included.
    """

    round_trip: Callable[[LayerKV], LayerKV]
    bytes_ratio: Callable[[int, KeepSets | None], float]


@dataclass(frozen=True, slots=True)
class Method:
    """A selection at a share of the layer-tokens, in an encoding."""

    selection: str
    keep_share: float
    encoding: str = RAW


DENSE = Method("dense", 1.0)


@dataclass(frozen=True, slots=True)
class Score:
    """What a method did on a case.

    Attributes:
        bytes_ratio: of the prefix's KV, over dense raw KV.
        nll: sum of negative log-likelihoods of the scored tokens, nats.
        num_tokens: tokens scored, all behind the prefix.
        is_right: the greedy answer is the right one, whole; None for a text.
    """

    bytes_ratio: float
    nll: float
    num_tokens: int
    is_right: bool | None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "bytes_ratio": self.bytes_ratio,
            "nll": self.nll,
            "num_tokens": self.num_tokens,
            "is_right": self.is_right,
        }


def grid(selections: Sequence[str], shares: Sequence[float]) -> list[Method]:
    """Return every selection at every share, raw."""
    return [Method(name, share) for name in selections for share in shares]


def measure(
    model: Llama,
    case: Case,
    methods: Sequence[Method],
    selections: Mapping[str, Selection],
    curves: HeldCurves | None = None,
    codecs: Mapping[str, Codec] | None = None,
) -> Iterator[tuple[Method, Score]]:
    """Yield the score of every method on a case.

    Args:
        model: to ask.
        case: its prefix is computed densely; nothing behind it is seen until the
            prefix's KV was compressed.
        methods: ``DENSE`` among them, or not.
        selections: by the names that the methods have.
        curves: for selections that plan by layers.
        codecs: by the names of the encodings.
    """
    tokens = torch.from_numpy(case.tokens)
    prefix = compute_prefix(model, tokens[: case.num_prefix], [*selections.values()])
    encoded: dict[str, list[LayerKV]] = {RAW: prefix.kv}
    ratios = {RAW: _raw_ratio}
    for name, codec in (codecs or {}).items():
        encoded[name] = [codec.round_trip(layer) for layer in prefix.kv]
        ratios[name] = codec.bytes_ratio
    for method in methods:
        kv, kept = encoded[method.encoding], None
        if method.selection != DENSE.selection:
            kept = _choose(prefix, selections[method.selection], method, curves)
            kv = keep(kv, kept)
        ratio = ratios[method.encoding](prefix.num_tokens, kept)
        yield method, _score(model, case, kv, ratio)


def _raw_ratio(num_tokens: int, kept: KeepSets | None) -> float:
    return 1.0 if kept is None else sum(map(len, kept)) / (num_tokens * len(kept))


def _choose(
    prefix: Prefix, selection: Selection, method: Method, curves: HeldCurves | None
) -> Any:
    return selection.keep(prefix.facts(selection, method.keep_share, curves))


def _score(
    model: Llama, case: Case, kv: Sequence[LayerKV], bytes_ratio: float
) -> Score:
    """Score what follows the prefix, but its first token: the prefix predicts that."""
    after = torch.from_numpy(case.tokens[case.num_prefix :])
    first = 0
    if isinstance(case, RecallCase):
        # Only the answer is scored; the question is given.
        first = len(after) - case.num_answer - 1
    logits, _ = model.run(
        after[None, :-1], first_position=case.num_prefix, past=kv, logits_from=first
    )
    wanted = after[first + 1 :]
    logs = torch.log_softmax(logits[0], dim=-1)
    nll = -logs.gather(1, wanted[:, None]).sum()
    is_right = None
    if isinstance(case, RecallCase):
        # Given the right tokens so far, the greedy answer is right if each choice is.
        is_right = bool((logs.argmax(dim=-1) == wanted).all())
    return Score(bytes_ratio, float(nll), len(wanted), is_right)
