"""A copy to the device that failed: the pages are computed after all.

The forward that needed the pages has run by then, on slots without their content, so
its result is worth nothing. But the slots are there and the prompt's tokens are known:
an extra prefill over the missing span writes the keys and values into these very
slots, and the forward is run again. The scheduler never learns of it, no request fails,
and it costs the time of the recompute.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from sgl_tiered.serving.loading_pass import MissingSpan

__all__ = ["compute_missing"]


def compute_missing(runner: Any, batch: Any, spans: Iterable[MissingSpan]) -> int:
    """Compute the spans into the slots that the batch has for them.

    Args:
        runner: SGLang's ``ModelRunner``; its current stream is the batch's.
        batch: the ``ScheduleBatch`` whose loads failed.
        spans: what is missing.

    Returns:
        How many tokens were computed.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
    )

    chunk = runner.server_args.resolved_dict()["chunked_prefill_size"] or 0
    num_tokens = 0
    for span in spans:
        # No more at a time than the server was sized for.
        step = chunk if chunk > 0 else span.end - span.begin
        for begin in range(span.begin, span.end, max(step, 1)):
            end = min(begin + step, span.end)
            part = ForwardBatch.init_new(
                _part(runner, batch, MissingSpan(span.index, begin, end)),
                runner,
                capture_hidden_mode=CaptureHiddenMode.NULL,
                return_hidden_states_before_norm=False,
            )
            runner.forward(part)
            num_tokens += end - begin
    return num_tokens


def _part(runner: Any, batch: Any, span: MissingSpan) -> Any:
    """Return a batch that prefills one span of one request and samples nothing."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    req = batch.reqs[span.index]
    row = batch.req_pool_indices[span.index : span.index + 1]
    slots = runner.req_to_token_pool.req_to_token[row[0], span.begin : span.end]
    tokens = list(req.full_untruncated_fill_ids[span.begin : span.end])
    device = runner.device
    seq_lens = torch.tensor([span.end], dtype=torch.int64)
    fields: dict[str, Any] = {
        "reqs": [req],
        "forward_mode": ForwardMode.EXTEND,
        "decoding_reqs": None,
        "input_ids": torch.tensor(tokens, dtype=torch.int64, device=device),
        "prefill_input_ids_cpu": None,
        "req_pool_indices": row,
        "req_pool_indices_cpu": batch.req_pool_indices_cpu[span.index : span.index + 1],
        "prefix_lens": [span.begin],
        "extend_lens": [len(tokens)],
        "extend_num_tokens": len(tokens),
        "seq_lens": seq_lens.to(device),
        "seq_lens_cpu": seq_lens,
        "seq_lens_sum": span.end,
        "orig_seq_lens": seq_lens.to(device),
        "out_cache_loc": slots.to(torch.int64),
        "hicache_consumer_index": -1,
        "input_embeds": None,
        "replace_embeds": None,
        "replace_positions": None,
        "multimodal_inputs": [None],
        "return_logprob": False,
        "top_logprobs_nums": None,
        "token_ids_logprobs": None,
        "extend_logprob_start_lens": [len(tokens)],
        "extend_input_logprob_token_ids": None,
        "is_prefill_only": True,
        "sampling_info": None,
        "spec_info": None,
        "has_grammar": False,
    }
    part = copy.copy(batch)
    for name, value in fields.items():
        setattr(part, name, value)
    return part
