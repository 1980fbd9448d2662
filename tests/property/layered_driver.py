"""An engine in small: runs requests on a `LayerManager` and checks all that it reads.

KV is a number that says of which story, position and layer it is, so two requests that
tell the same story share prefixes, and every read is compared with what it has to be.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from sgl_tiered.layered.base import LayerReadError, LayerRoomError, PassRequest
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.testing.fake_layers import FakeLayerCopier

LAYERS, PAGES, TOKENS, FIRST = 3, 24, 2, 1


def kv(story: int, layer: int, positions: np.ndarray) -> np.ndarray:
    """Return the KV of tokens."""
    return story * 1_000_000 + positions * 10 + layer


@dataclass
class Request:
    """One that runs."""

    key: int
    story: int
    goal: int
    """Tokens of its prompt."""
    retained: np.ndarray
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0


class Driver:
    """Logical pages, a prefix cache and forwards."""

    def __init__(
        self,
        num_physical: int = 30,
        half_pages: int = 3,
        *,
        lazy: bool = True,
        sub_unit_pages: int = 2,
        copier_class: type[FakeLayerCopier] = FakeLayerCopier,
    ) -> None:
        self.copier = copier_class(LAYERS, PAGES, num_physical + FIRST, TOKENS)
        self.binding = LayerBinding(LAYERS, PAGES, num_physical, first_physical=FIRST)
        mover = LayerMover(self.copier, 8 * TOKENS, sub_unit_pages=sub_unit_pages)
        self.manager = LayerManager(self.binding, mover, TOKENS, half_pages, lazy=lazy)
        self.uses = np.zeros(PAGES, int)
        """Of logical pages, by requests and by the cache; 0 is free."""
        self.pinned = np.zeros(PAGES, int)
        self.requests: dict[int, Request] = {}
        self.cached: list[tuple[int, list[int]]] = []
        """Story and full pages, from the story's beginning."""
        self.num_keys = 0
        self.num_reads = 0
        self.num_refused = 0
        self.num_broken = 0

    def start(
        self, story: int, goal: int, retained: np.ndarray, *, share: bool
    ) -> Request:
        """Let a request arrive; it may begin with somebody's pages of its story."""
        self.num_keys += 1
        request = Request(self.num_keys, story, goal, retained)
        if share:
            found = [pages for of, pages in self.cached if of == story]
            found += [
                one.pages[: one.num_tokens // TOKENS]
                for one in self.requests.values()
                if one.story == story
            ]
            pages = max(found, key=len, default=[])[: (goal - 1) // TOKENS]
            request.pages = list(pages)
            request.num_tokens = len(pages) * TOKENS
            self.uses[pages] += 1
        self.requests[request.key] = request
        return request

    def forward(
        self, keys: list[int], chunk: int, lost: Collection[int] = ()
    ) -> list[int]:
        """Run some requests, prefill or decode; return those that got on.

        Those in ``lost`` are in the batch, and do not.
        """
        batch = []
        for key in keys:
            request = self.requests[key]
            left = request.goal - request.num_tokens
            num_new = min(left, chunk) if left > 0 else 1
            if self._grow(request, request.num_tokens + num_new):
                batch.append(
                    PassRequest(
                        key,
                        np.array(request.pages, np.int64),
                        request.num_tokens,
                        num_new,
                        request.retained,
                        key in lost,
                    )
                )
        plan = self.manager.begin_pass(batch) if batch else None
        while plan is not None and plan.refused:
            self.num_refused += 1
            self.manager.check()
            refused = plan.refused
            batch = [one for n, one in enumerate(batch) if n not in refused]
            plan = self.manager.begin_pass(batch) if batch else None
        if plan is None:
            return []
        try:
            for layer in range(LAYERS):
                self._write(layer, batch)
                for group, (first, stop) in enumerate(plan.groups):
                    self.manager.wait_unit(layer, group)
                    table = self.manager.table(layer)
                    for n in range(first, stop):
                        mine = table[plan.indptr[n] : plan.indptr[n + 1]]
                        if batch[n].is_lost:
                            assert (mine == FIRST - 1).all()
                        else:
                            self._read(layer, batch[n], mine)
                    self.manager.unit_done(layer, group)
        except (LayerReadError, LayerRoomError):
            self.num_broken += 1
            self.manager.end_pass(ok=False)
            return []
        self.manager.end_pass()
        batch = [one for one in batch if not one.is_lost]
        for one in batch:
            request = self.requests[int(one.key)]  # type: ignore[call-overload]
            request.num_tokens = one.num_context + one.num_new
        return [int(one.key) for one in batch]  # type: ignore[call-overload]

    def merge(self, key: int) -> None:
        """Give a request the cache's pages for what it computed as well."""
        request = self.requests[key]
        num_full = request.num_tokens // TOKENS
        for story, pages in self.cached:
            if story == request.story and num_full:
                num = min(num_full, len(pages))
                new = [n for n in range(num) if pages[n] != request.pages[n]]
                old = [request.pages[n] for n in new]
                if self.pinned[old].any():
                    return
                self.uses[[pages[n] for n in new]] += 1
                for n in new:
                    request.pages[n] = pages[n]
                self._drop(old)
                return

    def end(self, key: int, *, keep: bool) -> None:
        """End a request; its full pages go to the cache, or nowhere."""
        request = self.requests[key]
        if self.pinned[request.pages].any():
            keep = True
        self.manager.finished(key)
        del self.requests[key]
        num_full = request.num_tokens // TOKENS if keep else 0
        if num_full:
            self.cached.append((request.story, request.pages[:num_full]))
        self._drop(request.pages[num_full:])

    def evict(self, index: int) -> None:
        """Let the cache forget something."""
        pages = self.cached[index][1]
        if not self.pinned[pages].any():
            del self.cached[index]
            self._drop(pages)

    def load(self, story: int, num: int, retained: np.ndarray, *, ok: bool) -> None:
        """Let a tier bring pages."""
        free = np.flatnonzero(self.uses == 0)[:num]
        if len(free) < num or not self.manager.open_load(free, retained):
            return
        for layer in range(LAYERS):
            values = kv(story, layer, np.arange(num * TOKENS)).reshape(num, TOKENS)
            values = values if ok else np.full_like(values, -2)
            places = self.manager.where(layer, free)
            there = places >= 0
            self.copier.device[places[there]] = values[there]
            self.copier.host[free[~there], layer] = values[~there]
        self.manager.close_load(free, ok)
        if ok:
            self.uses[free] = 1
            self.cached.append((story, free.tolist()))
        else:
            self.manager.freed(free)

    def check(self) -> None:
        """Compare everything that holds KV with what it has to hold."""
        self.manager.poll()
        self.manager.check()
        owners = [(one.story, one.pages, one.num_tokens) for one in self.all()]
        for story, pages, num_tokens in owners:
            for n in range(num_tokens // TOKENS):
                positions = np.arange(n * TOKENS, (n + 1) * TOKENS)
                for layer in range(LAYERS):
                    self._check_page(layer, pages[n], kv(story, layer, positions))

    def all(self) -> list[Request]:
        """Return the requests, and what is cached as if it were some."""
        nothing = np.zeros(LAYERS, np.bool_)
        cached = [
            Request(0, story, 0, nothing, pages, len(pages) * TOKENS)
            for story, pages in self.cached
        ]
        return [*self.requests.values(), *cached]

    def close(self) -> None:
        """Give everything back, and find that all of it has come back."""
        self.copier.gate.set()
        self.manager.unpin(np.repeat(np.arange(PAGES), self.pinned))
        self.pinned[:] = 0
        for key in list(self.requests):
            self.end(key, keep=False)
        while self.cached:
            self.evict(0)
        assert not self.uses.any()
        while not self.manager.is_idle:
            self.manager.poll()
        self.manager.check()
        room = self.manager.room()
        assert room.free == room.total
        self.manager.close()

    def _check_page(self, layer: int, page: int, expected: np.ndarray) -> None:
        place = self.binding.device[layer, page]
        assert self.binding.filled[layer, page]
        if place >= 0:
            assert np.array_equal(self.copier.device[place], expected)
        if self.binding.on_host[layer, page]:
            assert np.array_equal(self.copier.host[page, layer], expected)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        missing = -(-num_tokens // TOKENS) - len(request.pages)
        # What a broken forward left behind is used again, or given back.
        if missing < 0:
            self._drop(request.pages[missing:])
            del request.pages[missing:]
        free = np.flatnonzero(self.uses == 0)[: max(missing, 0)]
        if len(free) < missing:
            return False
        self.uses[free] += 1
        request.pages += free.tolist()
        return True

    def _drop(self, pages: list[int]) -> None:
        self.uses[pages] -= 1
        gone = [page for page in pages if not self.uses[page]]
        if gone:
            self.manager.freed(gone)

    def _write(self, layer: int, batch: list[PassRequest]) -> None:
        for one in batch:
            story = self.requests[int(one.key)].story  # type: ignore[call-overload]
            positions = np.arange(one.num_context, one.num_context + one.num_new)
            pages = one.pages[positions // TOKENS]
            places = self.manager.pages_for_write(layer, pages)
            if one.is_lost:
                assert (places == FIRST - 1).all()
                continue
            assert (places >= FIRST).all()
            self.copier.device[places, positions % TOKENS] = kv(story, layer, positions)
        self.manager.layer_written(layer)

    def _read(self, layer: int, one: PassRequest, places: np.ndarray) -> None:
        story = self.requests[int(one.key)].story  # type: ignore[call-overload]
        num_tokens = one.num_context + one.num_new
        found = self.copier.device[places].reshape(-1)[:num_tokens]
        expected = kv(story, layer, np.arange(num_tokens))
        assert np.array_equal(found, expected), "read something else than was written"
        self.num_reads += 1
