"""Lets loads fail behind work that the device had accepted; prints JSON.

    overlap_program.py CORE [STORY ...]

SGLang's scheduler and the loop of its overlap schedule run in this process, over a CUDA
device that is played (``played_scheduler.py``): a batch is launched before the results
of the one before are taken, and its forward runs late. A token of the played forward is
made of every byte of KV before it. The last line is one JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from host_waits import HostWaits
from played_scheduler import PAGE, Asked, PlayedScheduler

warnings.simplefilter("ignore")

FLAGS = (
    *("--max-total-tokens", str(96 * PAGE), "--max-running-requests", "6"),
    *("--chunked-prefill-size", "256", "--tiered-host-size", "4MB"),
    *("--tiered-load-policy", "always", "--tiered-explain-last", "0"),
)
TURNS = 40


class Stories:
    """Each begins with prompts that the host has and the device has not."""

    def __init__(self, core: str) -> None:
        self.waits = HostWaits().__enter__()
        self.server = PlayedScheduler(0, FLAGS, self.waits, core)
        self.rng = np.random.default_rng(2)
        self.num_asked = 0
        self.prompts: list[list[int]] = []
        self.counted: dict[str, int] = {}

    def begin(self, num_prompts: int = 3) -> None:
        """Offload prompts, and forget everything else."""
        server = self.server
        server.recover()
        server.settle()
        server.drop("device", "host")
        self.let_tiers_rest_no_more()
        server.runtime.pump()
        self.prompts = [self.prompt(7 * PAGE + 3) for _ in range(num_prompts)]
        for prompt in self.prompts:
            self.ask(prompt)
        server.run()
        server.drop("device")
        server.asked.clear()
        server.most_passes = 0
        self.counted = self.counters()

    def let_tiers_rest_no_more(self) -> None:
        """Use a tier that has failed again and again as if it were well."""
        for breaker in self.server.runtime._breakers.values():
            breaker.record("")

    def prompt(self, num_tokens: int) -> list[int]:
        """Return tokens of chance."""
        found: list[int] = self.rng.integers(0, 500, num_tokens).tolist()
        return found

    def ask(
        self, prompt: list[int], most_new: int = 4, logprobs_from: int | None = None
    ) -> Asked:
        """Send a request."""
        self.num_asked += 1
        return self.server.ask(
            f"r{self.num_asked}", prompt, most_new, logprobs_from=logprobs_from
        )

    def counters(self) -> dict[str, int]:
        """Return what the server has counted since its start."""
        with self.waits.held():
            found = self.server.runtime.metrics_snapshot()["counters"]
        return {name: int(number) for name, number in found.items()}

    def has_dropped(self) -> bool:
        """Whether a load of this story is known to have failed behind its batch."""
        return self.counters().get("loads_requeued", 0) > self.counted.get(
            "loads_requeued", 0
        )

    def is_loading(self) -> bool:
        """Whether a pass with a load was launched whose results are to come."""
        return bool(self.server.tree._passes)

    def let_loads_fail(self, yes: bool = True) -> None:
        """Let loads that are launched from now on fail on the device, or not."""
        self.server.played.fails, self.server.played.fails_on = yes, ("load",)

    def fails(self, *later: tuple[Callable[[], bool], Callable[[], None]]) -> None:
        """Let the loads of the first pass fail on the device, and no other."""
        self.let_loads_fail()
        with self.server.stopped():
            self.server.run(
                (self.is_loading, lambda: self.let_loads_fail(False)), *later
            )

    def ended(self, *asked: Asked) -> dict[str, Any]:
        """Say how a story has ended; everything of it is let end."""
        server = self.server
        server.recover()
        server.settle()
        with self.waits.held():
            occupancy = server.runtime.metrics_snapshot()["occupancy"]
        counters = self.counters()
        server.runtime.cache.check()
        return {
            "ends": [one.finish and one.finish["type"] for one in asked],
            "codes": [one.finish and one.finish.get("status_code") for one in asked],
            "tokens": [len(one.tokens) for one in asked],
            "wrong": server.wrong(),
            "too_early": server.too_early,
            "held": server.held,
            "most_passes": server.most_passes,
            "repaired": counters.get("loads_repaired", 0),
            "requeued": counters.get("loads_requeued", 0)
            - self.counted.get("loads_requeued", 0),
            "cached": [one.cached for one in asked],
            "wrong_logprobs": server.wrong_logprobs(),
            "pinned": sum(tier["pinned"] for tier in occupancy.values()),
            "passes": len(server.tree._passes),
            "flows": server.tree.num_flows,
        }

    # -- What happens ----------------------------------------------------------

    def two_passes(self) -> dict[str, Any]:
        """Two passes with loads are in flight, and none fails."""
        self.begin()
        first = self.ask(self.prompts[0])
        others: list[Asked] = []

        def more() -> None:
            others.append(self.ask(self.prompts[1]))

        with self.server.stopped():
            self.server.run((self.is_loading, more))
        return self.ended(first, *others)

    def fails_alone(self) -> dict[str, Any]:
        """The one load of a pass fails."""
        self.begin()
        asked = self.ask(self.prompts[0])
        self.fails()
        return self.ended(asked)

    def fails_behind_another(self) -> dict[str, Any]:
        """Of two passes that are in flight the second one's load fails."""
        self.begin()
        first = self.ask(self.prompts[0])
        others: list[Asked] = []

        def more() -> None:
            self.server.played.fails = True
            others.append(self.ask(self.prompts[1]))

        self.server.played.fails_on = ("load",)
        with self.server.stopped():
            self.server.run((self.is_loading, more))
        return self.ended(first, *others)

    def fails_before_a_chunk(self) -> dict[str, Any]:
        """The prompt goes on behind it, and its next chunk is launched already."""
        self.begin()
        asked = self.ask(self.prompts[0] + self.prompt(30 * PAGE))
        self.fails()
        return self.ended(asked)

    def fails_and_is_asked_again(self) -> dict[str, Any]:
        """Another request has the same prompt, and then a third one."""
        self.begin()
        first = self.ask(self.prompts[0])
        others: list[Asked] = []

        def more() -> None:
            others.append(self.ask(self.prompts[0] + self.prompt(PAGE)))

        self.fails((self.is_loading, more))
        self.server.recover()
        others.append(self.ask(self.prompts[0]))
        self.server.run()
        return self.ended(first, *others)

    def fails_and_is_aborted(self) -> dict[str, Any]:
        """The request goes while its load is in flight."""
        self.begin()
        asked = self.ask(self.prompts[0], 8)
        self.fails((lambda: True, lambda: self.server.abort(asked.rid)))
        again = self.ask(self.prompts[0])
        self.server.recover()
        self.server.run()
        return self.ended(asked, again)

    def fails_at_its_only_token(self) -> dict[str, Any]:
        """SGLang has taken the request out of what runs: it ends with this pass."""
        self.begin()
        asked = [self.ask(self.prompts[0], 1), self.ask(self.prompts[1], 1)]
        self.fails()
        return self.ended(*asked)

    def fails_again_and_again(self) -> dict[str, Any]:
        """No load of the story comes: a request tries it once."""
        self.begin()
        asked = [self.ask(prompt) for prompt in (*self.prompts, self.prompts[0])]
        self.let_loads_fail()
        with self.server.stopped():
            self.server.run()
        return self.ended(*asked)

    def fails_for_several(self) -> dict[str, Any]:
        """Requests with one prompt come together, as of one request with ``n``."""
        self.begin()
        asked = [self.ask(self.prompts[0], 3) for _ in range(3)]
        self.fails()
        return self.ended(*asked)

    def fails_and_is_aborted_in_the_queue(self) -> dict[str, Any]:
        """The request goes when its failure is known."""
        self.begin()
        asked = self.ask(self.prompts[0], 8)
        other = self.ask(self.prompts[1], 8)
        self.fails((self.has_dropped, lambda: self.server.abort(asked.rid)))
        return self.ended(asked, other)

    def fails_where_the_queue_is_full(self) -> dict[str, Any]:
        """No more requests may wait: who had been admitted is not turned away."""
        self.begin()
        asked = self.ask(self.prompts[0])
        engine = self.server.engine

        def close() -> None:
            engine.max_queued_requests = 0

        try:
            self.fails((self.is_loading, close))
        finally:
            engine.max_queued_requests = None
        return self.ended(asked)

    def fails_and_is_retracted(self) -> dict[str, Any]:
        """SGLang puts requests back meanwhile, also those whose loads fail."""
        self.begin()
        decoder = self.ask(self.prompt(40), 24)
        asked: list[Asked] = []

        def go() -> None:
            self.server.retracts(True)
            asked.extend(self.ask(prompt, 12) for prompt in self.prompts)

        self.let_loads_fail()
        try:
            with self.server.stopped():
                self.server.run((lambda: len(decoder.tokens) > 2, go))
        finally:
            self.server.retracts(False)
        return self.ended(decoder, *asked)

    def fails_while_all_is_paused(self) -> dict[str, Any]:
        """SGLang stops, and puts all that runs back."""
        self.begin()
        asked = [self.ask(self.prompts[0]), self.ask(self.prompts[1])]
        server = self.server
        self.fails(
            (self.is_loading, server.pause),
            (lambda: bool(server.engine._engine_paused), server.go_on),
        )
        return self.ended(*asked)

    def fails_in_a_mixed_batch(self) -> dict[str, Any]:
        """Decoders run in the batches that compute prompts, also in the next one."""
        self.begin()
        self.server.engine.is_mixed_chunk = True
        try:
            decoder = self.ask(self.prompt(40), 24)
            asked: list[Asked] = []

            def go() -> None:
                asked.append(self.ask(self.prompts[0], 12))
                self.let_loads_fail()

            def more() -> None:
                self.let_loads_fail(False)
                asked.append(self.ask(self.prompt(20 * PAGE)))

            with self.server.stopped():
                self.server.run(
                    (lambda: len(decoder.tokens) > 2, go), (self.is_loading, more)
                )
        finally:
            self.server.engine.is_mixed_chunk = False
        return self.ended(decoder, *asked)

    def fails_for_front_and_back(self) -> dict[str, Any]:
        """A request has loads in two passes: it runs again as the second one fails."""
        self.begin()
        split = self.ask(self.prompts[0] + self.prompt(20 * PAGE))
        asked: list[Asked] = []
        loads: list[Any] = []
        tree = self.server.tree

        def more() -> None:
            loads.extend(tree._passes[0].loads)
            asked.append(self.ask(self.prompts[1]))

        def add_back() -> None:
            # As if the second pass had been launched with one of the prompt's back.
            tree.tiered.coordinator.load_begins(loads[0].state)
            tree._passes[0].loads.extend(loads)

        self.let_loads_fail()
        with self.server.stopped():
            self.server.run((self.is_loading, more), (self.has_dropped, add_back))
        return self.ended(split, *asked)

    def fails_before_a_chunk_that_waits(self) -> dict[str, Any]:
        """The next chunk is put together, and launched after the results are taken."""
        from sglang.srt.environ import envs

        with envs.SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP.override(True):
            return self.fails_before_a_chunk()

    def fails_where_none_begins_anew(self) -> dict[str, Any]:
        """What cannot be taken out of its batch ends with an error, as is logged."""
        from sgl_tiered.engines.sglang import requeue

        module: Any = requeue
        real, lines = module._refused, list[str]()
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: lines.append(  # type: ignore[method-assign]
            record.getMessage()
        )
        refused = real(SimpleNamespace(enable_overlap=False), None)
        module._refused = lambda *args: refused
        module.logger.addHandler(handler)
        try:
            self.begin()
            asked = [self.ask(self.prompts[0]), self.ask(self.prompts[1])]
            self.fails()
        finally:
            module._refused = real
            module.logger.removeHandler(handler)
        return {**self.ended(*asked), "refused": refused, "lines": lines}

    def fails_beside_logprobs(self) -> dict[str, Any]:
        """Requests of the batch, before it and behind it, want those of prompts."""
        self.begin()
        first = self.ask(self.prompt(30), logprobs_from=0)
        failing = self.ask(self.prompts[0], logprobs_from=7 * PAGE)
        others = [self.ask(self.prompt(20), logprobs_from=n) for n in (0, 5)]
        self.fails()
        return self.ended(first, failing, *others)

    def fails_before_a_chunk_with_logprobs(self) -> dict[str, Any]:
        """The same, of a prompt that goes on, and of one that comes behind its end."""
        self.begin()
        long = self.prompts[0] + self.prompt(20 * PAGE)
        failing = self.ask(long, logprobs_from=7 * PAGE)
        others: list[Asked] = []

        def more() -> None:
            others.extend(self.ask(self.prompt(20), logprobs_from=0) for _ in range(2))

        self.fails((self.is_loading, more))
        return self.ended(failing, *others)

    def fails_beside_a_decoder(self) -> dict[str, Any]:
        """One that decodes meanwhile, and one that is computed, notice nothing."""
        self.begin()
        decoder = self.ask(self.prompt(40), 24)
        asked: list[Asked] = []

        def go() -> None:
            asked.append(self.ask(self.prompts[0]))
            asked.append(self.ask(self.prompt(40)))

        played = self.server.played
        played.fails, played.fails_on = True, ("load",)
        with self.server.stopped():
            self.server.run((lambda: len(decoder.tokens) > 2, go))
        return self.ended(decoder, *asked)

    def refused(self) -> dict[str, Any]:
        """Copies cannot be queued: what they lack is computed, behind a decoder."""
        self.begin()
        decoder = self.ask(self.prompt(40), 24)
        asked: list[Asked] = []

        def go() -> None:
            self.server.played.refuses = True
            asked.append(self.ask(self.prompts[0]))
            asked.append(self.ask(self.prompts[1]))

        self.server.played.fails_on = ("load",)
        self.server.run((lambda: len(decoder.tokens) > 2, go))
        return self.ended(decoder, *asked)

    def mixed_crowd(self) -> dict[str, Any]:
        """The same in batches that also decode."""
        self.server.engine.is_mixed_chunk = True
        try:
            return self.crowd()
        finally:
            self.server.engine.is_mixed_chunk = False

    def crowd(self) -> dict[str, Any]:
        """Requests of chance come and go, and loads fail now and then."""
        self.begin(20)
        server, rng = self.server, self.rng
        # The first load fails behind its batch for certain; later ones as it comes.
        asked = [self.ask(self.prompts[0], 8)]

        def more() -> None:
            asked.extend(self.ask(self.prompt(6 * PAGE), 8) for _ in range(3))

        self.fails((self.is_loading, more))
        aborted: list[str] = []

        def turn() -> None:
            if not server.tree._passes:
                server.recover()
            self.let_tiers_rest_no_more()
            server.played.fails = bool(rng.random() < 0.3)
            server.played.refuses = bool(rng.random() < 0.2)
            for _ in range(int(rng.integers(0, 3))):
                base = self.prompts[int(rng.integers(len(self.prompts)))]
                cut = base[: int(rng.integers(PAGE, len(base) + 1))]
                more = self.prompt(int(rng.integers(1, 2 * PAGE)))
                asked.append(self.ask(cut + more, int(rng.integers(1, 9))))
            if asked and rng.random() < 0.2:
                one = asked[int(rng.integers(len(asked)))]
                # SGLang aborts all whose names begin like this one.
                aborted.extend(a.rid for a in asked if a.rid.startswith(one.rid))
                server.abort(one.rid)
            server.retracts(bool(rng.random() < 0.2))

        def is_time() -> bool:
            return bool(rng.random() < 0.5)

        def end() -> None:
            server.recover()
            server.retracts(False)

        server.run(*[(is_time, turn)] * TURNS, (is_time, end))
        told = self.ended(*asked)
        told["given_up"] = [
            one.rid
            for one in asked
            if one.rid not in aborted and len(one.tokens) != one.most_new
        ]
        told["ends"] = told["codes"] = told["cached"] = []
        told["tokens"] = sum(told["tokens"])
        return told

    # -- What is left out on purpose -------------------------------------------

    def nobody_asks_how_loads_ended(self) -> dict[str, Any]:
        """Negative control: results are taken as if all had landed."""
        from sgl_tiered.engines.sglang.cache import TieredRadixCache

        real = TieredRadixCache.end_passes
        kind: Any = TieredRadixCache
        kind.end_passes = lambda tree, batch: []
        try:
            self.begin()
            asked = self.ask(self.prompts[0])
            self.fails()
            found = {"wrong": self.server.wrong(), "early": self.server.too_early[:]}
        finally:
            kind.end_passes = real
        self.server.too_early.clear()
        with self.waits.held():
            for loading in list(self.server.tree._passes):
                self.server.tree._end_pass(loading)
        self.server.recover()
        return {"tokens": len(asked.tokens), **found}

    def nobody_drops_the_next_result(self) -> dict[str, Any]:
        """Negative control: what runs on a token that was dropped is taken.

        It leaves a request that has more tokens than KV: nothing runs after it.
        """
        from sgl_tiered.engines.sglang import requeue

        module: Any = requeue
        real = module._put_stand_ins

        def put(batch: Any, lost: Any) -> None:
            queue = self.server.engine.result_queue
            if not any(batch is one for one, _ in queue):
                real(batch, lost)

        module._put_stand_ins = put
        try:
            self.begin()
            self.ask(self.prompts[0])
            self.fails()
            return {"wrong": self.server.wrong()}
        finally:
            module._put_stand_ins = real

    def nobody_counts_what_is_dropped(self) -> dict[str, Any]:
        """Negative control: SGLang is shown a request that it retracted."""
        from sgl_tiered.engines.sglang import requeue

        module: Any = requeue
        real = module._stand_in

        def retracted(*args: Any) -> Any:
            found = real(*args)
            found.is_retracted = True
            return found

        module._stand_in = retracted
        try:
            return {"wrong": self.fails_beside_logprobs()["wrong_logprobs"]}
        finally:
            module._stand_in = real

    def nobody_waits_for_layers(self) -> dict[str, Any]:
        """Negative control: forwards read layers that have not come."""
        from sgl_tiered.pipelines.layerwise_load import LoadTicket
        from sgl_tiered.serving.layer_counter import LayerCounter

        real = LayerCounter.wait_until, LoadTicket.wait_last_layer
        counter: Any = LayerCounter
        ticket: Any = LoadTicket
        counter.wait_until = lambda counter, layer: None
        ticket.wait_last_layer = lambda ticket: None
        try:
            self.begin()
            self.server.delays_loads = True
            decoder = self.ask(self.prompt(40), 24)

            def go() -> None:
                self.ask(self.prompts[0])

            self.server.run((lambda: len(decoder.tokens) > 2, go))
            wrong = self.server.wrong()
        finally:
            counter.wait_until, ticket.wait_last_layer = real
            self.server.delays_loads = False
        return {"wrong": wrong}


NAMES = (
    *("two_passes", "fails_alone", "fails_behind_another", "fails_before_a_chunk"),
    *("fails_and_is_asked_again", "fails_and_is_aborted", "fails_beside_a_decoder"),
    *("fails_at_its_only_token", "fails_again_and_again", "fails_for_several"),
    *("fails_and_is_aborted_in_the_queue", "fails_where_the_queue_is_full"),
    *("fails_and_is_retracted", "fails_while_all_is_paused", "fails_in_a_mixed_batch"),
    *("fails_before_a_chunk_that_waits", "fails_beside_logprobs"),
    *("fails_before_a_chunk_with_logprobs", "fails_for_front_and_back"),
    *("fails_where_none_begins_anew", "refused", "crowd", "mixed_crowd"),
    *("nobody_counts_what_is_dropped", "nobody_asks_how_loads_ended"),
    "nobody_waits_for_layers",
)


def main() -> None:
    """Tell all stories."""
    stories = Stories(sys.argv[1])
    core = type(stories.server.tree.tree_core).__name__
    told: dict[str, Any] = {"core": core}
    for name in sys.argv[2:] or NAMES:
        told[name] = getattr(stories, name)()
    stories.waits.__exit__()
    stories.server.runtime.close(stories.server.tree.take_ends)
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    main()
