"""SGLang's scheduler in this process, over a CUDA device that is played.

The scheduler is SGLang's, with the product's hooks on it, and so are its batches, its
allocator, its rows of slots, its tree and the loop of its overlap schedule; the tiers
are built by the product's factory. Played are the streams and events, which run what is
queued late and in any order that they allow (``cuda_stand_ins.py``); the tensors of
slots and of KV, which say that they are CUDA's (``host_waits.py``); and the forward,
which is queued layer by layer, of whole numbers: a wrong byte of KV changes every
token behind it (``benchmarks/gpu/engine/model.py``).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cuda_stand_ins import PlayedCuda
from host_waits import CUDA, DeviceTensor, HostWaits, asking, on_device

from sgl_tiered.testing.fake_streams import FakeDevice, FakeEvent, FakeStream

ROOT = Path(__file__).parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "benchmarks" / "gpu")]

from engine.model import Model, Shape  # noqa: E402

__all__ = ["PAGE", "Asked", "PlayedScheduler"]

PAGE = 16
_MOST_TURNS = 20_000
_HELD_S, _LOOK_S = 10.0, 1.0
"""After so long in one wait the scheduler's thread is let go; looked at so often."""
_IDLE_S, _NAP_S = 0.002, 0.0005


class Stream(FakeStream):
    """A stream as the scheduler uses it."""

    def wait_stream(self, stream: FakeStream) -> None:
        """Hold later work back until what another holds has passed."""
        self.wait_event(stream.record_event())


@dataclass(eq=False)
class Asked:
    """A request, and what has come of it.

    Attributes:
        tokens: of its answer, as they came.
        finish: why it has ended; None while it has not.
        cached: of its prompt, as it was told.
        logprobs_from: the first token of its prompt whose logprob is asked for; None
            for none.
        logprobs: of its prompt, as they came.
    """

    rid: str
    prompt: list[int]
    most_new: int
    tokens: list[int] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    cached: int = 0
    logprobs_from: int | None = None
    logprobs: list[Any] = field(default_factory=list)


class PlayedScheduler:
    """One rank of a server, without its other processes.

    Args:
        seed: of the order in which streams go on.
        flags: of the server, besides those that it needs here.
        waits: counts, from the building of the pools on.
        core: which of SGLang's tree cores; SGLang's choice if empty.
        plays: whether the copies and the forward are the device's. If not they are the
            CPU platform's, and tensors of slots alone say that they are CUDA's.
        link: seconds and bytes per second of a load, as the planner is told; slow by
            default, so that what is to be read ahead is begun at once.

    Attributes:
        engine: SGLang's scheduler.
        held: where threads stood when the device had to be let go.
        delays_loads: the device runs loads only where a forward waits for them.
        num_retracted: requests that were put back into the queue.
        most_passes: with loads that were in flight at a time.
        too_early: requests of which a token left before their loads were known good.
    """

    def __init__(
        self,
        seed: int,
        flags: Sequence[str],
        waits: HostWaits,
        core: str = "",
        *,
        plays: bool = True,
        link: tuple[float, float] = (1.0, 1e10),
    ) -> None:
        from sgl_tiered_workloads.model import make_model

        self.waits, self._core, self._plays, self._link = waits, core, plays, link
        self.held: list[dict[str, list[str]]] = []
        self.delays_loads = False
        self.num_retracted = self.most_passes = 0
        self.too_early: list[str] = []
        self._rng = np.random.default_rng(seed)
        self.played = PlayedCuda(seed)
        self.device = self.played.device
        self._is_strict = False
        self._takes_results = False
        self._thread = threading.get_ident()
        self._play_streams()
        model = make_model("tiny", ROOT / ".cache" / "models")
        words = [
            *("--model-path", str(model), "--device", "cpu"),
            *("--page-size", str(PAGE), "--radix-cache-backend", "tiered"),
            *("--skip-tokenizer-init", "--random-seed", "1", *flags),
        ]
        self.engine = self._build(words)
        self.tree = self.engine.tree_cache
        self.runtime = self.tree.tiered
        self.asked: dict[str, Asked] = {}
        self._to_send: list[Any] = []
        self._take_messages()
        self._take_results()
        waits.watch(FakeEvent, "synchronize")
        waits.watch(FakeStream, "synchronize")

    # -- The device ------------------------------------------------------------

    def _play_streams(self) -> None:
        """Put streams of the device in the place of the CPU's, which do nothing."""
        played, device, waits = self.played, self.device, self.waits

        def new_stream(*args: Any, **kwargs: Any) -> Stream:
            stream: Any = Stream(device, f"engine-{len(device.streams)}")
            device.streams.append(stream)
            return stream

        class Event(FakeEvent):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(device)

            def record(self, stream: Any = None) -> None:
                (stream or played.engine).record_event(self)

            def wait(self, stream: Any = None) -> None:
                (stream or played.engine).wait_event(self)

        @contextlib.contextmanager
        def on(stream: Any) -> Iterator[None]:
            before: Any = played.engine
            played.engine = stream
            try:
                yield
            finally:
                played.engine = before

        class StreamContext:
            """May be entered again and again, as SGLang does."""

            def __init__(self, stream: Any) -> None:
                self.stream = stream
                self._entered: list[Any] = []

            def __enter__(self) -> None:
                entered = on(self.stream)
                entered.__enter__()
                self._entered.append(entered)

            def __exit__(self, *problem: Any) -> None:
                self._entered.pop().__exit__(None, None, None)

        def step(device: FakeDevice) -> bool:
            """Run a piece of work that may run now; False where there is none."""
            with waits.held(), device.lock:
                able = [s for s in device.streams if s.queue and s.queue[0][0]()]
                if self.delays_loads:
                    others = [s for s in able if s.name != "load"]
                    able = others or (able if self._needs_loads() else [])
                if not able:
                    return False
                stream = able[int(self._rng.integers(len(able)))]
                stream.queue.popleft()[1]()
                return True

        def run_until(device: FakeDevice, reached: Callable[[], bool]) -> None:
            """Step until something is reached; others may have to queue more for it."""
            while not reached():
                device.going.wait()
                if not step(device):
                    time.sleep(_NAP_S)

        FakeDevice.step = step  # type: ignore[method-assign]
        FakeDevice.run_until = run_until  # type: ignore[method-assign]
        played.engine = new_stream()  # type: ignore[assignment]
        cpu: Any = torch.cpu
        cpu.Stream, cpu.Event = new_stream, Event
        cpu.StreamContext = cpu.stream = StreamContext
        cpu.current_stream = lambda *args: played.engine

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Let the device run while results are taken, or nothing is launched, only.

        Whoever waits for it elsewhere, or for a thread that does, stands still; after
        some time it is let go, which ``held`` tells.
        """
        self._is_strict = True
        self._let_go(False)
        has_ended = threading.Event()
        threading.Thread(target=self._watch, args=(has_ended,), daemon=True).start()
        try:
            yield
        finally:
            has_ended.set()
            self._is_strict = False
            self._let_go(True)

    def _let_go(self, going: bool) -> None:
        """Let the device run, or stop it."""
        if going:
            self.device.going.set()
        else:
            self.device.going.clear()

    def _watch(self, has_ended: threading.Event) -> None:
        """Let the device go where the scheduler's thread has waited for too long."""
        while not has_ended.wait(_LOOK_S):
            since = self.waits.waiting_since
            is_stopped = since is not None and not self.device.going.is_set()
            if is_stopped and time.monotonic() - (since or 0.0) >= _HELD_S:
                self._note_held()

    def _note_held(self) -> None:
        frames = sys._current_frames()
        found = {"scheduler": asking(frames[self._thread])}
        for thread in threading.enumerate():
            if thread.name.startswith("tiered-") and thread.ident in frames:
                places = asking(frames[thread.ident])
                if "worker.py:_run" not in places[:1]:
                    found[thread.name] = places
        self.held.append(found)
        self.delays_loads = False
        self.device.going.set()

    def _needs_loads(self) -> bool:
        """Whether a forward or its results wait for them, or nothing was launched."""
        if self._takes_results and self.tree._passes:
            return True
        if self.engine.last_batch is None and not self._takes_results:
            return True
        ours = ("load", "store")
        return any(s.queue for s in self.device.streams if s.name not in ours)

    def _pass_time(self) -> None:
        """Let some of what is queued run, as time does."""
        for _ in range(int(self._rng.integers(0, 12))):
            if not self.device.step():
                return

    def _take_results(self) -> None:
        """Let the device run where the scheduler takes results, which it waits for."""
        process = self.engine.process_batch_result

        def take(*args: Any, **kwargs: Any) -> Any:
            self._let_go(True)
            self._takes_results = True
            try:
                return process(*args, **kwargs)
            finally:
                self._takes_results = False
                self._let_go(not self._is_strict)

        def moment() -> str:
            if self._takes_results:
                return "results"
            is_idle = self.engine.last_batch is None
            return "idle" if is_idle else "in flight"

        from sglang.srt.managers.schedule_batch import ScheduleBatch

        retract = ScheduleBatch.retract_decode

        def count(batch: Any, *args: Any, **kwargs: Any) -> Any:
            found = retract(batch, *args, **kwargs)
            self.num_retracted += len(found[0])
            return found

        ScheduleBatch.retract_decode = count  # type: ignore[method-assign]
        self.waits.moment = moment

        self.engine.process_batch_result = take

    # -- Building --------------------------------------------------------------

    def _build(self, words: list[str]) -> Any:
        import sglang.srt.managers.scheduler as module
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs, prepare_server_args

        load_plugins()
        self._play_factory()
        args = prepare_server_args(words)
        ranks = module.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        publish(args, role="scheduler", ranks=ranks)
        engine = module.Scheduler(args, PortArgs.init_new(args))
        engine._war_barrier_enabled = True
        runner = engine.tp_worker.model_runner
        self.model = PlayedModel(self, runner, engine.model_config.vocab_size)
        if self._plays:
            runner.forward, runner.sample = self.model.forward, self.model.sample
        return engine

    def _play_factory(self) -> None:
        """Let the tiers be built for the device."""
        from sgl_tiered.core.ids import TierId
        from sgl_tiered.cost.links import LinkCost
        from sgl_tiered.cost.model import CostModel
        from sgl_tiered.cost.prefill import PrefillCost
        from sgl_tiered.engines.sglang import factory
        from sgl_tiered.pipelines.stream_pool import StreamPool

        module: Any = factory
        played, build = self.played, factory.build_cache

        def device_pool(
            pool: Any, layout: Any, forward_stream: Any, *_: Any, **how: Any
        ) -> Any:
            assert how == {"stores_between_forwards": False}
            ops = played.pool_ops_class()(pool, layout, forward_stream)
            return StreamPool(ops, staging=ops)

        def costs(**facts: Any) -> Any:
            links = {tier: LinkCost(*self._link) for tier in TierId}
            cost: Any = CostModel(PrefillCost(10**6, 4, 64, 1e10), links)
            cost.observe_load = cost.observe_prefill = lambda *args: None
            return cost, {}

        def build_played(ctx: Any) -> Any:
            allocator = ctx.params.token_to_kv_pool_allocator
            pool = allocator.get_kvcache()
            DeviceTensor.says = CUDA if self._plays else torch.device("cpu")
            both = (pool.k_buffer, pool.v_buffer) if self._plays else ()
            self.buffers = [
                [one.view(len(one), -1).view(torch.int32) for one in buffers]
                for buffers in both
            ]
            for buffers in both:
                buffers[:] = [on_device(one) for one in buffers]
            rows = ctx.params.req_to_token_pool
            rows.req_to_token = on_device(rows.req_to_token)
            allocator.free_pages = on_device(allocator.free_pages)
            ctx.params.tree_core_backend = self._core or None
            cache = build(ctx)
            self._mark_tensors_of(cache.tree_core)
            return cache

        module.build_cache = build_played
        if not self._plays:
            return
        module.make_device_pool = device_pool
        module.measure_costs = costs
        module.cuda_register = played.register
        module.use_device_in_threads = lambda device: None
        module.numa_node = lambda device: None
        module.machine_facts = lambda device: SimpleNamespace()
        module.report = lambda *args: {}

    @staticmethod
    def _mark_tensors_of(core: Any) -> None:
        """Let a core that keeps tensors in its own memory give the device's."""
        collect = core.collect_full_device_indices
        core.collect_full_device_indices = lambda *args: on_device(collect(*args))

    # -- Requests --------------------------------------------------------------

    def ask(
        self,
        rid: str,
        prompt: Sequence[int],
        most_new: int = 4,
        lossy: str = "",
        logprobs_from: int | None = None,
    ) -> Asked:
        """Send a request with the next turn; ``lossy`` is its word on that."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        asked = self.asked[rid] = Asked(
            rid, list(prompt), most_new, logprobs_from=logprobs_from
        )
        params = SamplingParams(
            max_new_tokens=most_new, ignore_eos=True, temperature=0.0
        )
        if lossy:
            params.custom_params = {"tiered": {"lossy": lossy}}
        params.normalize(None)
        params.verify(self.model.num_tokens)
        self._to_send.append(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text=None,
                input_ids=array("q", prompt),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=params,
                return_logprob=logprobs_from is not None,
                logprob_start_len=-1 if logprobs_from is None else logprobs_from,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=True,
            )
        )
        return asked

    @staticmethod
    def retracts(every_third: bool) -> None:
        """Let the scheduler put a request back with every third forward, or not."""
        import sglang.srt.managers.scheduler as module

        module.TEST_RETRACT = every_third

    def abort(self, rid: str) -> None:
        """Abort a request with the next turn."""
        from sglang.srt.managers.io_struct import AbortReq

        self._to_send.append(AbortReq(rid=rid))

    def pause(self) -> None:
        """Stop with the next turn; what runs is put back into the queue."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._to_send.append(PauseGenerationReqInput(mode="retract"))

    def go_on(self) -> None:
        """Go on with the next turn."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._to_send.append(ContinueGenerationReqInput(torch_empty_cache=False))

    def run(self, *steps: tuple[Callable[[], bool], Callable[[], None]]) -> None:
        """Go round in SGLang's loop until all requests have ended.

        Args:
            steps: what to do once something holds, one after the other.
        """
        engine, left = self.engine, list(steps)
        num_turns = 0

        def is_over() -> bool:
            if engine.last_batch is not None or left:
                return False
            return all(one.finish is not None for one in self.asked.values())

        def take(receiver: Any, local_reqs: Any = None) -> list[Any]:
            nonlocal num_turns
            num_turns += 1
            with self.waits.held():
                assert num_turns < _MOST_TURNS, "the scheduler goes round in vain"
                self._turn()
                while left and left[0][0]():
                    left.pop(0)[1]()
                sent, self._to_send = self._to_send, []
                engine.gracefully_exit = not sent and is_over()
            return sent

        receiver: Any = type(engine.request_receiver)
        receiver.recv_requests = take
        engine.gracefully_exit = False
        with torch.no_grad(), torch.cpu.StreamContext(engine.schedule_stream):
            if engine.enable_overlap:
                engine.event_loop_overlap()
            else:
                engine.event_loop_normal()
        engine.gracefully_exit = False

    def _turn(self) -> None:
        """Let time pass before a turn, as far as the device may run."""
        is_idle = self.engine.last_batch is None
        runs = is_idle or not self._is_strict
        self._let_go(runs)
        if runs:
            self._pass_time()
        if is_idle and self._is_strict:
            time.sleep(_IDLE_S)
        self._let_go(not self._is_strict)

    def recover(self) -> None:
        """Let copies work again, also those of streams that have failed."""
        self.played.fails = self.played.refuses = False
        for stream in self.device.streams:
            stream.error = ""

    def settle(self) -> None:
        """Let all transfers, and what follows from them, end."""
        from tests.draining import drain

        with self.waits.held():
            for _ in range(6):
                drain(self.runtime)
                self.tree.check_hicache_events()

    def drop(self, *tiers: str) -> None:
        """Let tiers forget what they have, once all transfers have ended.

        Nothing of it is left in the device's memory either: slots that are read before
        a load has come hold numbers of nobody.
        """
        from sgl_tiered.core.ids import TierId

        self.settle()
        with self.waits.held():
            for tier in tiers:
                self.tree.drop(TierId[tier.upper()])
            if "device" in tiers and self.tree._is_device_empty:
                for buffers in self.buffers:
                    for buffer in buffers:
                        buffer.random_()

    def wrong(self) -> list[str]:
        """Return the requests whose answers are not those of their prompts."""
        with self.waits.held():
            return [rid for rid, one in self.asked.items() if not self._is_right(one)]

    def _is_right(self, asked: Asked) -> bool:
        if not asked.tokens:
            return True
        sequence = torch.tensor(asked.prompt + asked.tokens[:-1], dtype=torch.int64)
        states = self.model.truth.recompute(sequence, len(asked.tokens))
        return bool(self.model.pick(states).tolist() == asked.tokens)

    def wrong_logprobs(self) -> list[str]:
        """Return the requests that got others than those of their prompts."""
        return [
            rid
            for rid, one in self.asked.items()
            if one.tokens and one.logprobs_from is not None
            if one.logprobs
            != [None, *self.model.logprobs(one.prompt[one.logprobs_from + 1 :])]
        ]

    def _is_in_doubt(self, rid: str) -> bool:
        """Whether a load of a request is not known to have ended."""
        loads = [load for one in self.tree._passes for load in one.loads]
        return any(load.req.rid == rid for load in loads)

    def _count_passes(self) -> None:
        launch = self.engine.run_batch

        def count(*args: Any, **kwargs: Any) -> Any:
            result = launch(*args, **kwargs)
            self.most_passes = max(self.most_passes, len(self.tree._passes))
            return result

        self.engine.run_batch = count

    def _take_messages(self) -> None:
        engine = self.engine

        def take(output: Any, *args: Any) -> None:
            for number, rid in enumerate(getattr(output, "rids", None) or ()):
                asked = self.asked.get(rid)
                if asked is None:
                    continue
                if getattr(output, "output_ids", None) is not None:
                    if len(output.output_ids[number]) and self._is_in_doubt(rid):
                        self.too_early.append(rid)
                    asked.tokens.extend(output.output_ids[number])
                    asked.cached = output.cached_tokens[number]
                    logprobs = getattr(output, "input_token_logprobs_val", None)
                    if logprobs and logprobs[number]:
                        asked.logprobs.extend(logprobs[number])
                if output.finished_reasons[number] is not None:
                    asked.finish = dict(output.finished_reasons[number])

        self._count_passes()

        def told(output: Any, *args: Any) -> None:
            asked = self.asked.get(getattr(output, "rid", None) or "")
            if asked is not None:
                asked.finish = dict(getattr(output, "finished_reason", None) or {})

        channels = engine.ipc_channels
        channels.send_to_detokenizer.send_output = take
        channels.send_to_tokenizer.send_output = told


class PlayedModel:
    """The forward: queued on the forward's stream, and of whole numbers.

    Args:
        server: owner.
        runner: SGLang's.
        num_tokens: of the vocabulary.
    """

    def __init__(self, server: PlayedScheduler, runner: Any, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._server, self._runner = server, runner
        pool = runner.token_to_kv_pool
        num_heads, head_dim = pool.k_buffer[0].shape[1:]
        shape = Shape(len(pool.k_buffer), num_heads, head_dim, PAGE)
        self.truth = Model(shape, torch.device("cpu"))
        # What each request's row will compute next; known to the device only.
        self._future: dict[int, int] = {}
        # What the rows of a launch that decode were given: SGLang looks it up once, and
        # a forward that runs again has the same, though the future has gone on.
        self._launch, self._given = 0, dict[int, int]()
        self.num_forwards = 0

    @staticmethod
    def logprobs(tokens: Sequence[int]) -> list[float]:
        """Return numbers that stand for the logprobs of a prompt's tokens."""
        return [-float(token) for token in tokens]

    def pick(self, states: torch.Tensor) -> torch.Tensor:
        """Return the next token of each last state."""
        return self.truth.pick(states).remainder(self.num_tokens)

    def forward(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Queue a forward, as attention does: layer by layer."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        self.num_forwards += 1
        stream: Any = self._server.played.engine
        with self._server.waits.held():
            spans = self._spans(batch)
        if self._launch != self._server.engine.forward_ct:
            self._launch, self._given = self._server.engine.forward_ct, {}
        given = self._given
        self._runner.shared_read_done_event = stream.record_event()
        states: list[Any] = [None] * len(spans)

        def embed() -> None:
            for number, span in enumerate(spans):
                ids = span.ids
                if ids is None:
                    token = given.setdefault(span.row, self._future[span.row])
                    ids = torch.tensor([token], dtype=torch.int64)
                states[number] = self.truth.embed(ids)

        def layer_work(layer: int) -> None:
            for number, span in enumerate(spans):
                states[number] = self._layer(layer, span, states[number])

        stream.run(embed)
        pool = self._runner.token_to_kv_pool
        for layer in range(self.truth.shape.num_layers):
            pool.get_key_buffer(layer)
            stream.run(partial(layer_work, layer), cost_ms=1.0)
        batch.played = spans, states
        logits = LogitsProcessorOutput(next_token_logits=torch.zeros(len(spans), 1))
        if batch.return_logprob:
            logits.next_token_logprobs = torch.zeros(len(spans))
            if batch.forward_mode.is_extend():
                ids = batch.extend_input_logprob_token_ids_gpu
                logits.input_token_logprobs = torch.tensor(
                    self.logprobs(ids.as_subclass(torch.Tensor).tolist())
                )
        return SimpleNamespace(
            logits_output=logits,
            can_run_graph=False,
            expert_distribution_metrics=None,
            routed_experts_output=None,
            indexer_topk_output=None,
        )

    def sample(self, logits: Any, batch: Any) -> torch.Tensor:
        """Queue the choice of the next tokens; return where they will be."""
        del logits
        spans, states = batch.played
        tokens = torch.full((len(spans),), -1, dtype=torch.int64)

        def choose() -> None:
            tokens.copy_(self.pick(torch.cat([x[-1:] for x in states])))
            for span, token in zip(spans, tokens.tolist(), strict=True):
                self._future[span.row] = token

        stream: Any = self._server.played.engine
        stream.run(choose)
        return tokens

    def _spans(self, batch: Any) -> list[Any]:
        """Read what schedule and forward share, as work on this stream would."""
        table = self._runner.req_to_token_pool.req_to_token.as_subclass(torch.Tensor)
        rows = batch.req_pool_indices.as_subclass(torch.Tensor).tolist()
        if batch.forward_mode.is_extend():
            news = list(batch.extend_seq_lens_cpu)
            begins = list(batch.extend_prefix_lens_cpu)
        else:
            news = [1] * len(rows)
            begins = [int(length) - 1 for length in batch.seq_lens_cpu]
        spans, at = [], 0
        # In a batch that does both, those that decode come last. What a load did not
        # bring is computed for one request of a batch at a time.
        launched = self._server.engine.cur_batch_for_debug
        is_whole = len(rows) == len(launched.reqs)
        decoders = launched.decoding_reqs if is_whole else None
        first_decoder = len(rows) - len(decoders or ())
        for number, (row, begin, new) in enumerate(
            zip(rows, begins, news, strict=True)
        ):
            ids = None
            if batch.forward_mode.is_extend():
                if number < first_decoder:
                    ids = batch.input_ids[at : at + new]
                    ids = ids.as_subclass(torch.Tensor).clone()
                at += new
            slots = table[row, : begin + new].long()
            spans.append(SimpleNamespace(row=row, begin=begin, slots=slots, ids=ids))
        return spans

    def _layer(self, layer: int, span: Any, x: torch.Tensor) -> torch.Tensor:
        all_keys, all_values = (part[layer] for part in self._server.buffers)
        before, here = span.slots[: span.begin], span.slots[span.begin :]
        keys, values = self.truth.kv(layer, x)
        all_keys[here], all_values[here] = keys, values
        seen = self.truth.before(all_keys[before], all_values[before], None)
        return self.truth.mix(x, seen, keys, values, span.begin)
