"""A load that failed on the device behind accepted work: its requests begin anew.

Under SGLang's overlap schedule that is known when the results of the load's batch are
taken. The next batch has been launched by then and runs on a token of this one, so
there is nothing to repair in place. What the batches bring for these requests is
dropped; once nothing more is put into the batch in flight they are taken out of it,
give back their slots, and wait in SGLang's queue like requests that it retracts: at
its front, which counts where SGLang does not order the queue. They load nothing of
their own from then on: a request meets such a failure once.

Nobody else can have found what the load should have brought, or what was computed on
it: until a load is known to be good, nothing of it or behind it is in the tree. What is
before it may be, as the front of a split prompt is, which was computed: the request
finds it again, and it counts as cached then.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from sgl_tiered.engines.sglang.seams import tiered_runtime

__all__ = ["begins_anew", "drop_results", "end", "requeue", "without_stand_ins"]

logger = logging.getLogger(__name__)


def begins_anew(req: Any) -> bool:
    """Say whether a load of a request has failed: it is computed without another."""
    return bool(getattr(req, "tiered_load_failed", ""))


def drop_results(scheduler: Any, batch: Any, failed: Sequence[Any]) -> None:
    """Take requests whose loads failed out of the results that are about to be taken.

    Those that cannot begin anew end with an error.

    It rests on ``requeue`` in the same turn, which the loop of the overlap schedule
    calls, and no other does.

    Args:
        scheduler: SGLang's.
        batch: what was launched; the copy of it that comes with the results.
        failed: of its requests.
    """
    cache, lost = scheduler.tree_cache, []
    ending: dict[str, list[Any]] = {}
    for req in failed:
        why = _refused(scheduler, req)
        if why or req.to_finish is not None:
            ending.setdefault(why, []).append(req)
        else:
            lost.append(req)
    for why, reqs in ending.items():
        end(reqs, why)
    if scheduler.chunked_req in failed and scheduler.chunked_req not in lost:
        # As SGLang does where a load fails: its next chunk never runs.
        scheduler._pending_chunked_abort_req = scheduler.chunked_req
    if not lost:
        return
    logger.warning(
        "sgl-tiered: a load to the device broke behind accepted work (%s): %d "
        "request(s) are queued again and computed",
        lost[0].tiered_load_failed,
        len(lost),
    )
    cache.tiered.metrics.add("loads_requeued", len(lost))
    for req in lost:
        _tell_nothing_cached(req)
    _put_stand_ins(batch, lost)
    cache.has_stand_ins = True
    cache.lost += [(req, req.retraction_count) for req in lost]


def requeue(result: Any, scheduler: Any, batch_result: Any, launched: Any) -> None:
    """Queue the requests again whose loads failed.

    An AFTER hook on what the loop does last in a turn: by then the batch in flight has
    been launched, and its sampling with it.

    Args:
        result, batch_result: not looked at.
        scheduler: SGLang's.
        launched: the batch in flight; None where there is none.
    """
    del result, batch_result
    cache = scheduler.tree_cache
    if tiered_runtime(cache) is None or not cache.lost:
        return
    # One that SGLang has retracted meanwhile is in its queue already.
    lost = [req for req, count in cache.lost if req.retraction_count == count]
    running = scheduler.running_batch
    for batch in {id(one): one for one in (running, launched) if one}.values():
        kept = [index for index, req in enumerate(batch.reqs) if req not in lost]
        if len(kept) < len(batch.reqs):
            batch.filter_batch(keep_indices=kept)
    for batch, _ in scheduler.result_queue:
        _put_stand_ins(batch, lost)
    if scheduler.chunked_req in lost:
        scheduler.chunked_req = None
    for req in lost:
        _release(scheduler, req)
    cache.lost.clear()
    # They had been admitted before all that wait. An order of the queue sorts anew.
    scheduler.waiting_queue[:0] = lost
    running.batch_is_full = False
    for req in lost:
        req.time_stats.set_wait_queue_entry_time()
        cache.tiered.note_queued(req)


def end(reqs: Sequence[Any], why: str = "") -> None:
    """Let SGLang end requests whose load failed, without this forward's output.

    Args:
        reqs: SGLang's requests.
        why: they cannot begin anew; empty where their forward knew of no other way.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    num_told = 0
    for req in reqs:
        message = f"Cached KV could not be copied to the device: {_reason(req, why)}"
        req.skip_radix_cache_insert = True
        # One that the client has given up ends as such.
        num_told += req.to_finish is None
        req.discard_output_reason = req.to_finish or FINISH_ABORT(
            message, HTTPStatus.SERVICE_UNAVAILABLE
        )
    if num_told:
        logger.error(
            "sgl-tiered: a load to the device broke (%s): %d request(s) end with an "
            "error",
            _reason(reqs[0], why),
            num_told,
        )


def without_stand_ins(cache: Any, reqs: Sequence[Any]) -> Sequence[Any]:
    """Return requests whose output may leave, of those of a batch."""
    if not cache.has_stand_ins:
        return reqs
    stand_ins = [req for req in reqs if _is_stand_in(req)]
    if not stand_ins:
        return reqs
    silent = [*stand_ins, *stand_ins[0].tiered_unfinished]
    return [req for req in reqs if req not in silent]


def _refused(scheduler: Any, req: Any) -> str:
    """Return why a request cannot begin anew; empty where it can."""
    if not scheduler.enable_overlap:
        return "only SGLang's overlap schedule takes requests out of its batches"
    if scheduler.disaggregation_mode.value != "null":
        return "an instance of a disaggregated pair computes no request again"
    if not scheduler.is_generation:
        return "SGLang takes no request without generation out of a batch"
    if req.beam_group is not None:
        return "SGLang takes no beams out of a batch"
    return ""


def _reason(req: Any, why: str) -> str:
    reason: str = req.tiered_load_failed
    return f"{reason}; {why}" if why else reason


def _release(scheduler: Any, req: Any) -> None:
    """Give back what a request holds, and let it be as if it had not been admitted."""
    from sglang.srt.managers.schedule_batch import release_req

    stain = req.retracted_stain
    release_req(
        req=req,
        remaing_req_count=0,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
    )
    # SGLang tells what a request had found when it was first admitted.
    req.retracted_stain, req._cache_breakdown_computed = stain, False


def _tell_nothing_cached(req: Any) -> None:
    """Take back what a request was to be told of the tiers that it was loaded from."""
    if req.retracted_stain:
        return
    req.cached_tokens = req.cached_tokens_device = 0
    req.cached_tokens_host = req.cached_tokens_storage = 0
    req.storage_hit_length, req.storage_hit_start = 0, None


def _put_stand_ins(batch: Any, lost: Sequence[Any]) -> None:
    """Put stand-ins in the place of requests in a batch whose results are to come.

    SGLang skips a retracted request of a prefill without counting its logprobs of the
    prompt, and gives later requests of the batch wrong ones.
    """
    if not any(req in lost for req in batch.reqs):
        return
    others = [req for req in batch.reqs if req not in lost]
    unfinished = tuple(req for req in others if req.inflight_middle_chunks > 0)
    batch.reqs = [
        _stand_in(req, unfinished) if req in lost else req for req in batch.reqs
    ]


def _stand_in(req: Any, unfinished: tuple[Any, ...]) -> Any:
    """Return what SGLang takes for an aborted request in the middle of its prompt.

    Of such a one it counts what the forward has brought, and keeps and sends nothing.

    Args:
        req: in whose place it is; has the same values but for those changed here.
        unfinished: requests of the batch that are in the middle of their prompts.
            SGLang sends nothing of the last one, which is now the stand-in.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    found = copy.copy(req)
    found.time_stats = type(req.time_stats)()  # counts for nobody
    found.finished_reason, found.finished_output = FINISH_ABORT("queued again"), True
    found.finished_len = len(req.output_ids)
    found.inflight_middle_chunks, found.is_retracted = 1, False
    found.return_logprob, found.grammar = False, None
    # SGLang releases those of a request that has ended.
    found.multimodal_inputs = found.session = None
    found.tiered_unfinished = unfinished
    return found


def _is_stand_in(req: Any) -> bool:
    return getattr(req, "tiered_unfinished", None) is not None
