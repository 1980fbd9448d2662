"""Tells stories of layer-wise KV on SGLang's own classes; prints what it saw as JSON.

    layered_program.py

Decode batches of SGLang's, over requests that stand in for its own, in a program of its
own, as importing SGLang costs seconds. The last line is one JSON object.
"""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import torch

warnings.simplefilter("ignore")

NUM_REQS = 5


def request(row: int, length: int) -> Any:
    """Return what a decode batch reads of a request."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    one = SimpleNamespace(
        rid=f"r{row}",
        kv=SimpleNamespace(kv_committed_len=length, req_pool_idx=row),
        is_finished=False,
        to_finish=None,
        beam_group=None,
        return_logprob=row % 2 == 0,
        grammar=None,
        origin_input_ids=[9],
        output_ids=[],
        eos_token_ids={8},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=8),
        sampling_params=SimpleNamespace(
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            min_new_tokens=0,
            stop_token_ids=None,
        ),
        return_hidden_states_mode=CaptureHiddenMode.NULL,
    )
    one.finished = lambda: one.is_finished
    return one


def decode_batch(reqs: list[Any]) -> Any:
    """Return a running batch of SGLang's over some requests."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling import penaltylib
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    batch = ScheduleBatch(reqs=reqs)
    batch.device = "cpu"
    batch.spec_algorithm = SpeculativeAlgorithm.NONE
    batch.model_config = SimpleNamespace(is_encoder_decoder=False)
    rows = [req.kv.req_pool_idx for req in reqs]
    lens = [req.kv.kv_committed_len for req in reqs]
    batch.req_pool_indices = batch.req_pool_indices_cpu = torch.tensor(rows)
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor(lens)
    batch.orig_seq_lens = torch.tensor(lens, dtype=torch.int32)
    batch.return_logprob = any(req.return_logprob for req in reqs)
    batch.top_logprobs_nums = list(rows)
    batch.token_ids_logprobs = [[row] for row in rows]
    kinds = {
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedMinNewTokensPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
    }
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(10, batch, kinds)
    batch.sampling_info = SamplingBatchInfo(
        temperatures=torch.tensor(rows, dtype=torch.float32).view(-1, 1),
        top_ps=torch.ones(len(rows)),
        top_ks=torch.ones(len(rows), dtype=torch.int32),
        min_ps=torch.zeros(len(rows)),
        is_all_greedy=True,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=10,
        penalizer_orchestrator=orchestrator,
        device="cpu",
    )
    return batch


class Steps:
    """What SGLang's scheduler does with a prepared batch, as far as lengths go."""

    def __init__(self) -> None:
        self.ran: list[list[str]] = []
        self.has_room = True
        self.retracts = 0

    def update(self, batch: Any) -> Any:
        """Stand in for ``Scheduler.update_running_batch``."""
        if self.retracts:
            keep = list(range(len(batch.reqs) - self.retracts))
            self.retracts = 0
            batch.filter_batch(keep_indices=keep)
        if not batch.reqs:
            return batch
        lens = [req.kv.kv_committed_len for req in batch.reqs]
        assert batch.seq_lens.tolist() == lens, (batch.seq_lens, lens)
        assert batch.seq_lens_cpu.tolist() == lens
        assert batch.orig_seq_lens.tolist() == lens
        rows = [req.kv.req_pool_idx for req in batch.reqs]
        assert batch.req_pool_indices.tolist() == rows
        assert batch.req_pool_indices_cpu.tolist() == rows
        assert batch.sampling_info.temperatures.view(-1).tolist() == rows
        if batch.return_logprob:
            assert batch.top_logprobs_nums == rows
            assert batch.token_ids_logprobs == [[row] for row in rows]
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.orig_seq_lens = batch.orig_seq_lens + 1
        for req in batch.reqs:
            req.kv.kv_committed_len += 1
        self.ran.append([req.rid for req in batch.reqs])
        return batch


def pausing() -> dict[str, Any]:
    """Let parts of a batch decode; whole and part must agree at every step."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sgl_tiered.engines.sglang.layered.pausing import PausingDecode

    steps = Steps()
    ScheduleBatch.check_decode_mem = lambda self, selected_indices=None: steps.has_room
    chosen: list[list[int]] = []

    def choose(reqs: Any) -> list[int]:
        del reqs
        return chosen.pop(0)

    waits: list[bool] = []
    decode = PausingDecode(steps.update, choose, lambda: bool(waits and waits.pop(0)))
    reqs = [request(row, 10 * row + 1) for row in range(NUM_REQS)]
    batch = decode_batch(reqs)
    out: dict[str, Any] = {}

    chosen += [[0, 2], [1], [0, 1, 2, 3, 4]]
    whole = [decode(batch) is batch for _ in range(3)]
    out["plain"] = {"ran": list(steps.ran), "whole": whole, "kept": len(batch.reqs)}

    # Nobody has room: no step is made, also for one that is to end, and all stay.
    steps.ran.clear()
    chosen += [[1], [], [0, 1, 2, 3, 4]]
    decode(batch)
    batch.reqs[0].to_finish = "abort"
    prepared = decode(batch)
    batch.reqs[0].to_finish = None
    kept = len(batch.reqs)
    decode(batch)
    out["none"] = {
        "is_none": prepared is None,
        "ran": list(steps.ran),
        "kept": kept,
    }

    # A new request joins while the lengths of the others are old.
    steps.ran.clear()
    chosen += [[4]]
    decode(batch)
    batch.merge_batch(decode_batch([request(6, 3)]))
    chosen += [[3, 5]]
    decode(batch)
    out["joined"] = {"ran": list(steps.ran), "kept": len(batch.reqs)}

    # One of those that wait ends by an abort, as SGLang does it: once it decodes.
    steps.ran.clear()
    batch.reqs[1].to_finish = "abort"
    chosen += [[2], [1]]
    decode(batch)
    decode(batch)
    batch.reqs[1].is_finished = True
    batch.filter_batch()
    out["aborted"] = {
        "ran": list(steps.ran),
        "kept": [req.rid for req in batch.reqs],
    }

    # One of those that decode is retracted: it leaves the whole as well.
    steps.ran.clear()
    batch.batch_is_full = True
    steps.retracts = 1
    chosen += [[0, 3]]
    decode(batch)
    out["retracted"] = {
        "ran": list(steps.ran),
        "kept": [req.rid for req in batch.reqs],
        "is_full": batch.batch_is_full,
    }

    # Without room for the next tokens SGLang is to choose among all of them.
    steps.ran.clear()
    steps.has_room = False
    chosen += [[0]]
    decode(batch)
    out["no room"] = {"ran": list(steps.ran)}

    # Or those left out are to wait: nobody is retracted, and nobody decodes.
    steps.ran.clear()
    waits += [True, False]
    chosen += [[0], [0], [0, 1, 2, 3]]
    steps.retracts = 1
    prepared = decode(batch)
    out["waits"] = {"is_none": prepared is None, "ran": list(steps.ran)}
    decode(batch)
    out["waits"]["then"] = list(steps.ran)
    steps.has_room = True
    return out


PENALTIES: dict[int, dict[str, float]] = {
    0: {"frequency_penalty": 0.5, "repetition_penalty": 1.25},
    2: {"presence_penalty": 0.75, "min_new_tokens": 3},
    3: {"repetition_penalty": 2.0},
    6: {"frequency_penalty": 1.5, "min_new_tokens": 2},
}
"""By row; the others have none."""


def penalised(rows: list[int]) -> Any:
    """Return a batch of requests of these rows, with their penalties."""
    reqs = [request(row, 4) for row in rows]
    for req in reqs:
        for name, value in PENALTIES.get(req.kv.req_pool_idx, {}).items():
            setattr(req.sampling_params, name, value)
    return decode_batch(reqs)


class Sampler:
    """Samples greedily from logits that only penalties tell apart; notes all of them.

    Attributes:
        seen: by request, what its logits were in each of its steps.
        ran: who was in each step.
    """

    def __init__(self) -> None:
        self.steps = Steps()
        self.seen: dict[str, list[list[float]]] = {}

    def step(self, batch: Any) -> Any:
        """Do with penalties what SGLang does to prepare, to sample and afterwards."""
        self.steps.update(batch)
        if batch.sampling_info.penalizer_orchestrator.is_required:
            batch.cumulate_penalty_output_tokens()
        logits = torch.arange(10).repeat(len(batch.reqs), 1).div(8).sub(0.5)
        batch.sampling_info.copy_for_forward().apply_logits_bias(logits)
        for req, row in zip(batch.reqs, logits, strict=True):
            self.seen.setdefault(req.rid, []).append(row.tolist())
            req.output_ids.append(int(row.argmax()))
        return batch


def counted() -> dict[str, Any]:
    """Let parts of a batch with penalties decode, and each of its requests alone."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sgl_tiered.engines.sglang.layered.pausing import PausingDecode

    ScheduleBatch.check_decode_mem = lambda self, selected_indices=None: True
    sampler = Sampler()
    chosen: list[list[int]] = []
    decode = PausingDecode(sampler.step, lambda reqs: chosen.pop(0))
    batch = penalised([0, 1, 2, 3])
    everyone = [0, 1, 2, 3]
    for keep in ([0, 2], [1], [1, 3], everyone, [0, 3], [2, 3], [0, 1]):
        chosen.append(keep)
        decode(batch)
    # One joins while others wait, and one that has penalties ends.
    batch.merge_batch(penalised([6]))
    for keep in ([4], [1, 2, 4], [0, 3]):
        chosen.append(keep)
        decode(batch)
    batch.reqs[0].is_finished = True
    batch.filter_batch()
    for keep in ([1, 3], [0, 2], everyone, [1, 2, 3]):
        chosen.append(keep)
        decode(batch)
    singly = Sampler()
    for row in (*everyone, 6):
        one = penalised([row])
        for _ in range(len(sampler.seen[f"r{row}"])):
            singly.step(one)
    return {
        "ran": sampler.steps.ran,
        "together": sampler.seen,
        "alone": singly.seen,
        "untouched": torch.arange(10).div(8).sub(0.5).tolist(),
    }


class Grammar:
    """Allows one token, and a higher one after each that it took."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.finished = False

    def is_terminated(self) -> bool:
        """Say that it goes on."""
        return False

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: str) -> Any:
        """Return a mask that allows everything."""
        del device
        return torch.ones(batch_size, vocab_size, dtype=torch.bool)

    def fill_vocab_mask_batched(self, rows: Any, mask: Any) -> None:
        """Write the rows of a mask."""
        for one in rows:
            mask[one.row] = False
            mask[one.row, one.grammar.token] = True

    def move_vocab_mask(self, mask: Any, device: str) -> Any:
        """Return it: it is there."""
        del device
        return mask


def constrained() -> dict[str, Any]:
    """Let parts of a batch with grammars, biases and processors sample."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import ProcessorEntry

    from sgl_tiered.engines.sglang.layered.pausing import PausingDecode

    ScheduleBatch.check_decode_mem = lambda self, selected_indices=None: True
    reqs = [request(row, 4) for row in range(NUM_REQS)]
    for row in (1, 2, 4):
        reqs[row].grammar = Grammar(row)
    batch = decode_batch(reqs)
    batch.has_grammar = True
    info = batch.sampling_info
    info.logit_bias = torch.arange(NUM_REQS).view(-1, 1).repeat(1, 10).float()
    info.has_custom_logit_processor = True
    entry = ProcessorEntry(processor="p", rows=[0, 2], indices=torch.tensor([0, 2]))
    info.custom_logit_processor = {1: entry}
    info.custom_params = [{"row": row} for row in range(NUM_REQS)]
    steps = Steps()
    seen: list[dict[str, Any]] = []

    def step(part: Any) -> Any:
        steps.update(part)
        told = part.sampling_info
        # What ForwardBatch.init_new and the sampler do before each forward.
        grammars = [req.grammar for req in part.reqs] if part.has_grammar else None
        told.grammars = grammars
        told.update_regex_vocab_mask()
        mask = None if told.grammar_mask is None else told.grammar_mask.vocab_mask
        seen.append(
            {
                "rids": [req.rid for req in part.reqs],
                "allowed": None
                if mask is None
                else [row.nonzero().view(-1).tolist() for row in mask],
                "bias": told.logit_bias[:, 0].tolist(),
                "processed": {
                    str(key): one.rows
                    for key, one in told.custom_logit_processor.items()
                },
                "params": [one["row"] for one in told.custom_params],
            }
        )
        # Result processing accepts the token in the requests that took part.
        for req in part.reqs:
            if req.grammar is not None:
                req.grammar.token += 5
        return part

    chosen = [[0, 1, 4], [2, 3], [0, 3], [0, 1, 2, 3, 4]]
    decode = PausingDecode(step, lambda reqs: chosen.pop(0))
    for _ in range(4):
        decode(batch)
    return {"seen": seen, "has_grammar": batch.has_grammar}


def alone() -> dict[str, Any]:
    """Let a single request decode: its layers are moved as well."""
    from sgl_tiered.engines.sglang.layered.pausing import PausingDecode

    asked: list[int] = []

    def choose(reqs: Any) -> list[int]:
        asked.append(len(reqs))
        return [0]

    steps = Steps()
    decode = PausingDecode(steps.update, choose)
    batch = decode_batch([request(3, 7)])
    is_whole = decode(batch) is batch
    return {"asked": asked, "ran": steps.ran, "whole": is_whole}


def napping() -> dict[str, Any]:
    """Let a scheduler with layers choose nobody, or have those left out wait."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sgl_tiered.core.clock import ManualClock
    from sgl_tiered.engines.sglang.layered import build
    from sgl_tiered.serving.agreement import Agreement
    from sgl_tiered.serving.options import Options

    chosen, waits = [[0, 1], [], [0], [0], [0]], [True, False]
    turns = SimpleNamespace(
        choose=lambda reqs: chosen.pop(0), waits=lambda: waits.pop(0)
    )
    # What it decides by has tests of its own.
    for name in ("LayerForecast", "LayerAdmission", "LayerFacts"):
        setattr(build, name, lambda *parts, **more: SimpleNamespace(counters=dict))
    build.DecodeTurns = lambda *parts: turns  # type: ignore[assignment, misc]
    clock, steps = ManualClock(1.0), Steps()
    naps: list[int] = []
    plan = SimpleNamespace(
        longest_tokens=100, acts=None, settings=SimpleNamespace(decode="stream")
    )
    manager = SimpleNamespace(bytes_streamed=0, stall_s=0.0)
    prefill = SimpleNamespace(overhead_s=0.0, token_s=0.0, pair_s=0.0)
    runtime: Any = SimpleNamespace(
        layers=SimpleNamespace(plan=plan, manager=manager),
        config=Options(),
        agreement=Agreement(clock),
        cost=SimpleNamespace(prefill=prefill),
        lengths=None,
        sources=None,
        clock=clock,
        attach=lambda *parts: None,
        nap=lambda: naps.append(len(steps.ran)),
    )
    scheduler = SimpleNamespace(
        max_req_len=100,
        update_running_batch=steps.update,
        tp_worker=SimpleNamespace(forward_batch_generation=None),
    )
    build.attach_scheduler(scheduler, runtime)
    batch = decode_batch([request(row, 4) for row in range(2)])
    ScheduleBatch.check_decode_mem = lambda self, selected_indices=None: steps.has_room
    for _ in range(3):
        scheduler.update_running_batch(batch)
    steps.has_room = False
    for _ in range(2):
        scheduler.update_running_batch(batch)
    return {"naps_after": naps, "ran": steps.ran}


def main() -> None:
    """Print the stories."""
    stories = {
        "pausing": pausing(),
        "constrained": constrained(),
        "counted": counted(),
        "alone": alone(),
        "napping": napping(),
    }
    print(json.dumps(stories))


if __name__ == "__main__":
    main()
