"""The engine in small with pages of activations: bytes of both kinds are compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sgl_tiered.core.clock import Clock
from sgl_tiered.layered.base import ActPlan, Pace, PassRequest
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.testing.fake_acts import FakeActCopier, kv_of
from sgl_tiered.testing.fake_layers import FakeLayerCopier
from tests.property.layered_driver import FIRST, LAYERS, PAGES, TOKENS, Driver

__all__ = ["ACT_BYTES", "KV_BYTES", "ActDriver", "alternate", "only_acts"]

KV_BYTES, ACT_BYTES = 16, 6


def alternate(num_act: int, num_kv: int, num_new: int) -> np.ndarray:
    """Choose every second page, whatever the request has begun with."""
    return (num_act + num_kv + np.arange(num_new)) % 2 == 0


def only_acts(num_act: int, num_kv: int, num_new: int) -> np.ndarray:
    """Choose all."""
    del num_act, num_kv
    return np.ones(num_new, np.bool_)


def act_of(story: int, layer: int, positions: np.ndarray) -> np.ndarray:
    """Return the activations of tokens."""
    return story * 10_000 + positions * 10 + layer


def truth(story: int, layer: int, positions: np.ndarray) -> np.ndarray:
    """Return their KV."""
    return kv_of(act_of(story, layer, positions), positions, layer)


class ActDriver(Driver):
    """A `Driver` some of whose pages are kept as activations."""

    def __init__(
        self,
        num_physical: int = 30,
        half_pages: int = 6,
        *,
        plan: ActPlan | None = None,
        choose: Callable[[int, int, int], np.ndarray] = alternate,
        lazy: bool = True,
        sub_unit_pages: int = 2,
        act_class: type[FakeActCopier] = FakeActCopier,
        pace: Pace | None = None,
        weight_bytes: int = 0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(num_physical, half_pages)
        self.manager.close()
        plan = plan or ActPlan(PAGES // 2, 40, 4, 2, ACT_BYTES)
        self.plan = plan
        self.copier = FakeLayerCopier(
            LAYERS, PAGES - plan.num_act_rows, num_physical + FIRST, TOKENS
        )
        self.acts = act_class(self.copier, LAYERS, plan.num_act_rows, plan.num_acts)
        self.binding = LayerBinding(
            LAYERS, PAGES, num_physical, first_physical=FIRST, acts=plan
        )
        self.mover = LayerMover(
            self.copier,
            KV_BYTES,
            clock,
            pace=pace,
            sub_unit_pages=sub_unit_pages,
            acts=self.acts,
            act_page_bytes=ACT_BYTES,
            weight_bytes=weight_bytes,
        )
        self.manager = LayerManager(
            self.binding, self.mover, TOKENS, half_pages, lazy=lazy, choose=choose
        )
        self.num_captured = 0

    def settle(self) -> None:
        """Wait until no copy is under way."""
        while not self.manager.is_idle:
            self.mover.wait()
            self.manager.poll()

    def sent_away(self) -> None:
        """Leave everything on the host only that can leave."""
        for key, request in self.requests.items():
            if self.manager.report(key).num_passes:
                self.manager.release(key, np.ones(LAYERS, np.bool_))
                request.retained = self.manager.held(key)
        self.settle()
        self.manager._room.drop(self.binding.num_physical)
        self.manager._room.drop_acts(self.plan.num_acts)

    def load_kinds(self, story: int, is_act: np.ndarray, *, ok: bool = True) -> bool:
        """Let a tier bring pages of both kinds."""
        num = len(is_act)
        free = np.flatnonzero(self.uses == 0)[:num]
        retained = np.array([True, False, True])
        if len(free) < num or not self.manager.open_load(free, retained, is_act):
            return False
        assert np.array_equal(self.binding.is_act[free], is_act)
        rows = self.binding.row[free]
        for layer in range(LAYERS):
            positions = np.arange(num * TOKENS).reshape(num, TOKENS)
            places = self.manager.where(layer, free)
            assert (places[is_act] < 0).all()
            here, away = places >= 0, (places < 0) & ~is_act
            values = truth(story, layer, positions)
            self.copier.device[places[here]] = values[here]
            self.copier.host[rows[away], layer] = values[away]
            acts = act_of(story, layer, positions)
            self.acts.host[rows[is_act], layer] = acts[is_act]
        self.manager.close_load(free, ok)
        if ok:
            self.uses[free] = 1
            self.cached.append((story, free.tolist()))
        else:
            self.manager.freed(free)
        return True

    def load(self, story: int, num: int, retained: np.ndarray, *, ok: bool) -> None:
        """Let a tier bring pages, of which each second one is of activations."""
        del retained
        self.load_kinds(story, np.arange(num) % 2 == 0, ok=ok)

    def check(self) -> None:
        """Compare everything that holds KV or activations with what it has to hold."""
        self.manager.poll()
        self.manager.check()
        for one in self.all():
            for n in range(one.num_tokens // TOKENS):
                positions = np.arange(n * TOKENS, (n + 1) * TOKENS)
                for layer in range(LAYERS):
                    self._check_both(one.story, layer, one.pages[n], positions)

    def _check_both(
        self, story: int, layer: int, page: int, positions: np.ndarray
    ) -> None:
        binding = self.binding
        kv, act = truth(story, layer, positions), act_of(story, layer, positions)
        assert binding.filled[layer, page]
        place = binding.device[layer, page]
        if place >= 0:
            assert np.array_equal(self.copier.device[place], kv)
        if binding.act[layer, page] >= 0:
            assert np.array_equal(self.acts.area[binding.act[layer, page]], act)
        if binding.on_host[layer, page]:
            host = self.acts.host if binding.is_act[page] else self.copier.host
            expected = act if binding.is_act[page] else kv
            assert np.array_equal(host[binding.row[page], layer], expected)

    def close(self) -> None:
        """Give everything back, and find that all of it has come back."""
        self.acts.held.set()
        kinds = self.binding.kinds
        assert kinds is not None
        super().close()
        assert sum(kinds.num_free_rows) == PAGES
        aside = 2 * self.plan.half_acts + self.plan.up_acts
        assert kinds.places.num_free == self.plan.num_acts - aside

    def _write(self, layer: int, batch: list[PassRequest]) -> None:
        manager = self.manager
        for one in batch:
            story = self.requests[int(one.key)].story  # type: ignore[call-overload]
            positions = np.arange(one.num_context, one.num_context + one.num_new)
            pages, offsets = one.pages[positions // TOKENS], positions % TOKENS
            acts = manager.acts_for_write(layer, pages)
            captured = acts >= 0
            values = act_of(story, layer, positions)
            self.acts.area[acts[captured], offsets[captured]] = values[captured]
            self.num_captured += int(np.count_nonzero(captured))
            places = manager.pages_for_write(layer, pages)
            if one.is_lost:
                assert (places == FIRST - 1).all()
                assert not captured.any()
                continue
            assert np.array_equal(captured, self.binding.is_act[pages])
            values = truth(story, layer, positions)
            self.copier.device[places, offsets] = values
        manager.layer_written(layer)

    def _read(self, layer: int, one: PassRequest, places: np.ndarray) -> None:
        story = self.requests[int(one.key)].story  # type: ignore[call-overload]
        num_tokens = one.num_context + one.num_new
        found = self.copier.device[places].reshape(-1)[:num_tokens]
        expected = truth(story, layer, np.arange(num_tokens))
        assert np.array_equal(found, expected), "read something else than was written"
        self.num_reads += 1
