"""SGLang's queue, as the prefetcher sees it.

The queue is looked at when a prefill has been put together (what is left of it waits
for that pass at least), and between decode steps while nobody can be admitted. When the
coming pass will look at the queue itself, nothing is started: what it takes is read for
it, before all that is read ahead. Looks happen at most every few milliseconds, unless
a read has ended: SGLang's loop turns thousands of times a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_tiered.cache.prefetcher import Prefetcher, measured_tpot_s
from sgl_tiered.core.clock import Clock
from sgl_tiered.policies.prefetch.base import Decoding
from sgl_tiered.serving.coordinator import LoadCoordinator, RequestState

if TYPE_CHECKING:
    from sgl_tiered.engines.sglang.fetching import DeviceFetcher

__all__ = ["QueuePrefetch", "allowed_tokens", "tokens_to_come"]

_MOST_S = 0.02
_LEAST_S = 0.002
"""Between two looks; one takes 0.3 ms with 16 requests, see micro/prefetch.py."""


def allowed_tokens(req: Any) -> int:
    """Return the longest answer that a request allows; 0 where it sets no bound."""
    return int(req.sampling_params.max_new_tokens or 0)


def tokens_to_come(req: Any) -> int:
    """Return the tokens that a request will hold in the end, as far as is known."""
    return len(req.origin_input_ids) + allowed_tokens(req)


class QueuePrefetch:
    """Feeds one scheduler's queue to the prefetcher.

    Args:
        scheduler: SGLang's.
        coordinator: knows the prompts of requests that wait.
        prefetcher: decides.
        clock: of the runtime.
        fetcher: of pages that go on to the device; None where they do not.
    """

    def __init__(
        self,
        scheduler: Any,
        coordinator: LoadCoordinator,
        prefetcher: Prefetcher,
        clock: Clock,
        fetcher: DeviceFetcher | None = None,
    ) -> None:
        self._fetcher = fetcher
        self._scheduler = scheduler
        self._coordinator = coordinator
        self._prefetcher = prefetcher
        self._clock = clock
        # Request -> when it was first seen decoding, and its tokens then.
        self._timers: dict[str, tuple[float, int]] = {}
        self._look_at_s = 0.0
        # Predicts the length of a request's answer, in tokens.
        self.predict = allowed_tokens

    def changed(self) -> None:
        """Note that a read has ended: the next look is due."""
        self._look_at_s = 0.0

    def pass_built(self, keys: dict[str, Any]) -> None:
        """Look ahead while the prefill that was just put together will run.

        Args:
            keys: by request, its prompt as SGLang's tree knows it.
        """
        self._look(keys, self._coordinator.pass_compute_s, is_built=True)

    def between_passes(self, keys: dict[str, Any]) -> None:
        """Look ahead while nobody can be admitted, and see who has gone."""
        queue = self._scheduler.waiting_queue
        if not queue and not self._prefetcher.is_busy:
            return
        if self._clock.now() < self._look_at_s:
            return
        if self._scheduler.running_batch.batch_is_full:
            self._look(keys, 0.0)
        else:
            self._prefetcher.advance((), others=self._states(queue))
            self._look_at_s = self._clock.now() + _LEAST_S

    def _look(
        self, keys: dict[str, Any], busy_s: float, *, is_built: bool = False
    ) -> None:
        scheduler, prefetcher = self._scheduler, self._prefetcher
        queue = scheduler.waiting_queue
        head: list[tuple[RequestState, int]] = []
        known: list[tuple[Any, Any]] = []
        for req in queue[: prefetcher.window]:
            state, key = self._coordinator.state(req.rid), keys.get(req.rid)
            if state is not None and key is not None:
                head.append((state, self._device_pages(key)))
                known.append((req, key))
        room: dict[str, Any] = {}
        if self._fetcher is not None:
            self._fetcher.keys = {
                state: key for (state, _), (_, key) in zip(head, known, strict=True)
            }
            room = self._room([req for req, _ in known], is_built=is_built)
        others = self._states(queue[prefetcher.window :]) if prefetcher.is_busy else []
        passed, decoding = self._progress()
        now_s = self._clock.now()
        due_s = prefetcher.advance(
            head,
            others=others,
            busy_s=busy_s,
            is_blocked=scheduler.running_batch.batch_is_full,
            tpot_s=measured_tpot_s(passed),
            decoding=decoding,
            **room,
        )
        self._look_at_s = now_s + min(max(due_s, _LEAST_S), _MOST_S)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // int(self._scheduler.tree_cache.page_size))

    def _room(self, head: list[Any], *, is_built: bool) -> dict[str, Any]:
        """Return what the head of the queue and those that run will take of the pool.

        SGLang takes the slots of a pass that was just built after this look.
        """
        reserved = sum(
            self._pages(max(self.predict(req) - len(req.output_ids), 0)) + 1
            for req in self._scheduler.running_batch.reqs
            if not req.finished()
        )
        if is_built:
            reserved += self._pages(self._coordinator.pass_tokens)
        sizes = [
            self._pages(len(req.origin_input_ids) + self.predict(req)) for req in head
        ]
        return {"sizes": sizes, "reserved_pages": reserved}

    def _states(self, reqs: list[Any]) -> list[RequestState]:
        states = (self._coordinator.state(req.rid) for req in reqs)
        return [state for state in states if state is not None]

    def _device_pages(self, key: Any) -> int:
        """Return the pages of a prompt in SGLang's tree; not a use of them."""
        tree = self._scheduler.tree_cache
        num_tokens: int = tree.tree_core.match_full_device_prefix(key)[0]
        return num_tokens // int(tree.page_size)

    def _progress(self) -> tuple[list[tuple[int, float]], list[Decoding]]:
        """Return of each request that decodes its tokens, time, and predicted end."""
        now_s = self._clock.now()
        timers: dict[str, tuple[float, int]] = {}
        passed, decoding = [], []
        for req in self._scheduler.running_batch.reqs:
            num_tokens = len(req.output_ids)
            if req.finished() or not num_tokens:
                continue
            began_s, num_before = self._timers.get(req.rid, (now_s, num_tokens))
            timers[req.rid] = began_s, num_before
            passed_s = now_s - began_s
            # Counted from when it was first seen, both of them.
            passed.append((num_tokens - num_before + 1, passed_s))
            num_left = max(self.predict(req) - num_before, 1)
            decoding.append(Decoding(num_left, passed_s))
        self._timers = timers
        return passed, decoding
