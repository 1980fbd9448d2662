"""Some of the running requests decode, the others wait, and SGLang sees all as running.

SGLang's running batch keeps every request: aborts, health, idleness, the bound on
running requests, flushes, retraction and metrics look there, and so count who waits. A
step runs on a part of it, a batch of its own over the same requests, their rows and
their memory. What a step changes it changes in the requests and by row, so before the
next one the tensors of the whole are made again from the requests. Penalties alone
cannot be: they count tokens in tensors of the batch, so a part counts in its rows of
them, which are written back. Grammars need nothing: each request has its own, and a
forward asks its requests for them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["PausingDecode", "can_be_split", "give_back", "part_of", "refresh"]

Choose = Callable[[Sequence[Any]], Sequence[int]]


def _never() -> bool:
    return False


class PausingDecode:
    """Stands before ``Scheduler.update_running_batch`` of one scheduler.

    Args:
        original: SGLang's method, bound.
        choose: returns the positions of those that decode next, ascending; empty where
            no step is to be made now. Called with requests that all may wait or decode.
        waits: returns whether those that it left out are to wait rather than decode
            with the others, where SGLang is to retract.
    """

    def __init__(
        self,
        original: Callable[[Any], Any],
        choose: Choose,
        waits: Callable[[], bool] = _never,
    ) -> None:
        self._original = original
        self._choose = choose
        self._waits = waits
        self._is_stale = False

    def __call__(self, batch: Any) -> Any:
        """Prepare the next decode step; return its batch, a part or all of ``batch``.

        Returns:
            None or an empty batch where no step is to be made now.
        """
        if self._is_stale:
            refresh(batch)
            self._is_stale = False
        keep = self._chosen(batch)
        if not keep and batch.reqs:
            return None
        if len(keep) == len(batch.reqs):
            return self._original(batch)
        part = part_of(batch, keep)
        if not part.check_decode_mem():
            # Who is retracted is to be chosen among all, not among those at work; and
            # who is not decodes then.
            if self._waits():
                return None
            return self._original(batch)
        self._is_stale = True
        before = list(part.reqs)
        prepared = self._original(part)
        give_back(part, batch)
        gone = [req for req in before if not _holds(part.reqs, req)]
        if gone:
            batch.filter_batch(reqs_to_exclude=gone)
            batch.batch_is_full = False
        return prepared

    def _chosen(self, batch: Any) -> list[int]:
        everyone = list(range(len(batch.reqs)))
        if not everyone or not can_be_split(batch):
            return everyone
        # Of one alone as well: its layers may have to leave, or can come back.
        return list(self._choose(batch.reqs))


def can_be_split(batch: Any) -> bool:
    """Return whether steps over parts of a batch leave nothing of it behind.

    A beam's rows stand behind those of the batch, and nobody would move them.
    """
    return (
        batch.spec_algorithm.is_none()
        and not batch.model_config.is_encoder_decoder
        and all(req.beam_group is None for req in batch.reqs)
    )


def part_of(batch: Any, keep: Sequence[int]) -> Any:
    """Return a batch of some requests of another one, which stays as it is.

    Args:
        batch: a decode batch for which ``can_be_split``.
        keep: positions, ascending.
    """
    part = copy.copy(batch)
    # Filtering rebinds what the copies hold, and changes nothing of it in place.
    part.sampling_info = copy.copy(batch.sampling_info)
    if part.sampling_info.penalizer_orchestrator.is_required:
        _count_apart(part)
    part.filter_batch(keep_indices=list(keep))
    return part


def give_back(part: Any, batch: Any) -> None:
    """Write what the penalties of a part have counted into those of the whole.

    A penalty that nobody of the part has counts nothing that matters to the others.

    Args:
        part: as ``part_of`` made it, prepared for its step since.
        batch: the whole; it still has all requests of the part.
    """
    counted = part.sampling_info.penalizer_orchestrator
    if not counted.is_required or not part.reqs:
        return
    places = {id(req): n for n, req in enumerate(batch.reqs)}
    rows = torch.tensor([places[id(req)] for req in part.reqs], device=batch.device)
    whole = batch.sampling_info.penalizer_orchestrator
    for kind, penalty in counted.penalizers.items():
        if not penalty.is_prepared():
            continue
        for name, value in vars(penalty).items():
            if isinstance(value, torch.Tensor):
                getattr(whole.penalizers[kind], name)[rows] = value


def refresh(batch: Any) -> None:
    """Make the lengths of a decode batch again from its requests.

    The next input tokens come from SGLang's relay, which is indexed by row.
    """
    lens = [req.kv.kv_committed_len for req in batch.reqs]
    batch.seq_lens_cpu = torch.tensor(lens, dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu.to(batch.device)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = None
    batch.input_ids = None
    batch.out_cache_loc = None


def _count_apart(part: Any) -> None:
    """Give a part penalties of its own, before it is filtered."""
    counted = copy.copy(part.sampling_info.penalizer_orchestrator)
    counted.batch = part
    counted.penalizers = {
        kind: copy.copy(penalty) for kind, penalty in counted.penalizers.items()
    }
    for penalty in counted.penalizers.values():
        # They ask it for the requests.
        penalty._orchestrator_ref = weakref.ref(counted)
    part.sampling_info.penalizer_orchestrator = counted


def _holds(reqs: Sequence[Any], wanted: Any) -> bool:
    return any(req is wanted for req in reqs)
