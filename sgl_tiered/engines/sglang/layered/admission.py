"""Physical room as a further word in SGLang's admission: who may be computed now.

SGLang admits by logical pages, of which there are many. A prompt is computed here where
about two layers of its pages fit on the device, and the layers that it is to retain.
Held prompts keep their place, and those behind them theirs. Where nothing runs, room is
made for the first, so that somebody always goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import TierId
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.engines.sglang.layered.forecasting import LayerForecast
from sgl_tiered.engines.sglang.prefetching import tokens_to_come
from sgl_tiered.metrics.ledger import WaitReason
from sgl_tiered.policies.layers.pressure import LayersHeld, Pressure
from sgl_tiered.policies.layers.retention import (
    layer_offload_s,
    least_retained,
    retained_in_room,
    retained_layers,
)

if TYPE_CHECKING:
    # It needs SGLang at import, and nothing else here does.
    from sgl_tiered.engines.sglang.layered.cache import LayeredRuntime

__all__ = ["LayerAdmission", "layered_adder_class"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Reserved:
    """What a request has of a pass that it has not joined yet.

    Attributes:
        rid: the request.
        num_left, num_spare: layer-pages of ``_left`` and ``_spare``.
        num_new: pages that it begins.
    """

    rid: str
    num_left: int
    num_spare: int
    num_new: int


class LayerAdmission:
    """Compares what prompts need with the layer-pages that are left.

    ``admit`` and ``goes_on`` reserve what a prompt needs, for the one that asked last.
    ``commit`` says that it has joined the pass. ``cancel`` gives it back, as does the
    next question: SGLang may ask twice, and may refuse whom we have let in. Room that
    was made for it stays made.

    Args:
        driver: of the pool.
        runtime: predicts passes and knows the link.
        forecast: says what will be left.
        keeps_none: of what it is free to choose, a prompt retains no layer: it is
            decoded elsewhere.
    """

    def __init__(
        self,
        driver: LayerDriver,
        runtime: LayeredRuntime,
        forecast: LayerForecast,
        *,
        keeps_none: bool = False,
    ) -> None:
        self._keeps_none = keeps_none
        self._driver = driver
        self._runtime = runtime
        self._forecast = forecast
        self._num_layers = driver.plan.layout.num_layers
        self._page_tokens = driver.plan.layout.page_tokens
        self._pressure = Pressure(self._num_layers, driver.plan.num_layer_pages)
        self._left = self._spare = 0
        # Pages that the pass begins, as far as it is put together.
        self._new_pages = 0
        self._reserved: _Reserved | None = None
        self._running: Sequence[Any] = ()

    def see(self, running: Sequence[Any]) -> None:
        """Note who decodes or waits to: their layers may have to leave."""
        self._running = [req for req in running if not req.finished()]

    def begin(self, running: Sequence[Any]) -> None:
        """Begin a search for prompts, beside requests that decode."""
        self._driver.manager.poll()
        self.see(running)
        self.cancel()
        # Each will begin another page, in all layers.
        self._new_pages = len(self._running)
        growth = len(self._running) * self._num_layers
        room = self._driver.manager.room()
        self._left = room.free + room.spare + room.landing + room.cached - growth
        # Those that wait came first: what is free is theirs.
        self._spare = 0
        if not self._driver.num_paused:
            self._spare = self._forecast.to_keep(self._running, room)

    def room(self) -> int:
        """Return the layer-pages that can be had now."""
        room = self._driver.manager.room()
        return int(room.free + room.spare + room.landing + room.cached)

    def admit(self, req: Any, prefix: int, new: int, *, is_alone: bool) -> bool:
        """Return whether a prompt may join the pass; reserve room if so.

        Args:
            req: SGLang's request, of which nothing was computed in an earlier pass.
            prefix: tokens that it finds, those that are to be loaded included.
            new: tokens to be computed in this pass.
            is_alone: nobody else runs or was admitted: it may have all there is.
        """
        self.cancel()
        retained = self._retained(req, prefix, new)
        need = self._need(req, prefix, new, retained)
        num_new = self._begun(prefix, new)
        need += self._stuck(num_new)
        if need > self._left:
            # Others' layers leave for it; what was promised in this pass stays so.
            reserved = self.room() - self._left
            is_sure = is_alone and not self._driver.stores
            if not self.make_room(need + reserved) and not is_sure:
                # If alone: its pages are read by offloads, which end.
                return False
            self._left = self.room() - reserved
        self._reserve(_Reserved(req.rid, need, need, num_new))
        # A load, which comes before the commit, reads it.
        self._driver.decide(req.rid, retained)
        return True

    def goes_on(self, req: Any, new: int, *, is_alone: bool) -> bool:
        """Return whether an unfinished prompt may have its next ``new`` tokens.

        If so, room for them is reserved.
        """
        self.cancel()
        held = self._driver.manager.held(req.rid)
        need = self._driver.manager.needed(req.prefix_len, new, held)
        num_new = self._begun(req.prefix_len, new)
        need += self._stuck(num_new)
        reserved = self.room() - self._left
        fits = need <= self.room() or self.make_room(need)
        if not fits and (not is_alone or self._driver.stores):
            return False
        self._left = self.room() - reserved
        self._reserve(_Reserved(req.rid, need, 0, num_new))
        return True

    def commit(self) -> None:
        """Note that who has reserved room joins the pass."""
        self._reserved = None

    def cancel(self) -> None:
        """Give back what is reserved: that request does not join the pass."""
        given, self._reserved = self._reserved, None
        if given is None:
            return
        self._left += given.num_left
        self._spare += given.num_spare
        self._new_pages -= given.num_new
        self._driver.undecide(given.rid)

    def _reserve(self, asked: _Reserved) -> None:
        self._left -= asked.num_left
        self._spare -= asked.num_spare
        self._new_pages += asked.num_new
        self._reserved = asked

    def make_room(self, wanted: int) -> bool:
        """Let layers leave until ``wanted`` layer-pages can be had; say whether so."""
        if wanted <= self._driver.manager.binding.num_free:
            return True
        missing = wanted - self.room()
        if missing <= 0:
            return True
        self.relieve(self._running, missing)
        return self.room() >= wanted

    def relieve(self, claims: Sequence[Any], missing: int) -> int:
        """Let retained layers leave, halves first; return how many changes that took.

        Args:
            claims: requests, the last to leave first.
            missing: layer-pages.
        """
        manager = self._driver.manager
        reqs = [req for req in claims if self.may_leave(req)]
        held = [
            LayersHeld(num, self.whole_pages(req))
            for num, req in zip(
                manager.num_held([req.rid for req in reqs]), reqs, strict=True
            )
        ]
        changes = self._pressure.offloads(held, missing)
        for change in changes:
            kept = retained_layers(self._num_layers, change.num_layers)
            leaves = np.ones(self._num_layers, np.bool_)
            leaves[list(kept)] = False
            manager.release(reqs[change.position].rid, leaves)
        return len(changes)

    def may_leave(self, req: Any) -> bool:
        """Return whether layers of a request may leave the device."""
        is_known = req.rid in self._driver.known
        return is_known and self._driver.can_leave(self._pages_to_come(req))

    def whole_pages(self, req: Any) -> int:
        """Return the pages of a request that can move, in one layer."""
        return int(req.kv.kv_committed_len) // self._page_tokens

    def _pages_to_come(self, req: Any) -> int:
        return int(-(-tokens_to_come(req) // self._page_tokens))

    def _begun(self, context: int, new: int) -> int:
        """Return the pages that new tokens begin."""
        page_tokens = self._page_tokens
        return -(-(context + new) // page_tokens) - -(-context // page_tokens)

    def _stuck(self, num_new: int) -> int:
        """Return the layer-pages of new pages that will not find a host row.

        Where pages are of two kinds, rows of KV and places for activations may be out:
        such pages stay in all layers, whatever else their request retains.
        """
        manager, before = self._driver.manager, self._new_pages
        stuck = manager.num_rowless(before + num_new) - manager.num_rowless(before)
        return stuck * self._num_layers

    def _need(self, req: Any, prefix: int, new: int, retained: Bools) -> int:
        need = int(self._driver.manager.needed(prefix, new, retained))
        # What it retains of its prefix is nobody else's room from now on, be it on the
        # device as a cached page, or to be loaded or brought back to it.
        need += int(retained.sum()) * (prefix // self._page_tokens)
        # What it retains of later chunks is to have room as well.
        rest = len(req.origin_input_ids) + len(req.output_ids) - prefix - new
        return need + int(retained.sum()) * (max(rest, 0) // self._page_tokens)

    def _retained(self, req: Any, prefix: int, new: int) -> Bools:
        """Return which layers stay: as many as must, and as many more as fit."""
        num_layers, settings = self._num_layers, self._driver.plan.settings
        if not self._driver.can_leave(self._pages_to_come(req)):
            return np.ones(num_layers, np.bool_)
        if settings.retain is not None:
            number = min(settings.retain, num_layers)
        elif self._keeps_none:
            number = 0
        else:
            layout = self._driver.plan.layout
            _, bytes_per_s = self._runtime.cost.link_figures(TierId.HOST)
            offload_s = layer_offload_s(new, 2 * layout.token_bytes, bytes_per_s)
            prefill_s = self._runtime.predicted_pass_s(req.rid, prefix, new)
            least = least_retained(num_layers, offload_s, prefill_s)
            prompt_pages = -(-(len(req.origin_input_ids) + 1) // self._page_tokens)
            # Not the room of others' copies, which came first.
            number = retained_in_room(num_layers, least, prompt_pages, self._spare)
        retained = np.zeros(num_layers, np.bool_)
        retained[list(retained_layers(num_layers, number))] = True
        return retained


def layered_adder_class(base: Any, scheduler: Any, runtime: LayeredRuntime) -> Any:
    """Return an adder on top of ``base`` that asks for room on the device.

    Args:
        base: SGLang's ``PrefillAdder``, or a class on top of it.
        scheduler: whose queue it is.
        runtime: of its cache; the scheduler was attached to it.
    """
    from sglang.srt.managers.schedule_policy import AddReqResult

    def held() -> None:
        runtime.explainer.stops_for(WaitReason.LAYERS)

    admission = runtime.layer_admission
    return _layered_adder_class(base, scheduler, admission, AddReqResult, held)


def _layered_adder_class(
    base: Any,
    scheduler: Any,
    admission: LayerAdmission,
    verdicts: Any,
    held: Callable[[], None],
) -> Any:
    """Return it.

    Args:
        base: as above.
        scheduler: as above.
        admission: asked for each prompt.
        verdicts: SGLang's ``AddReqResult``.
        held: told when a search ends because layers have no room.
    """
    # A base that may take less of a prompt asks for the room of what it takes.
    is_asked = getattr(base, "asks_for_room", False)

    class LayeredPrefillAdder(base):
        """Holds what has no room for its layers."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            batch = self.running_batch
            admission.begin([] if batch is None else batch.reqs)

        def _nobody_runs(self) -> bool:
            batch = self.running_batch
            return batch is None or bool(batch.is_empty())

        def _has_room(self, req: Any, prefix: int, new: int, *, is_begun: bool) -> bool:
            """Return whether layers of so much of a prompt have room; say so if not."""
            is_alone = self._nobody_runs()
            if is_begun:
                fits = admission.goes_on(req, new, is_alone=is_alone)
            else:
                is_alone &= not self.can_run_list and scheduler.chunked_req is None
                fits = admission.admit(req, prefix, new, is_alone=is_alone)
            if not fits:
                held()
            return fits

        def _select_prefill_admission(self, req: Any, **facts: Any) -> Any:
            """Hold a prompt whose layers have no room."""
            chosen = super()._select_prefill_admission(req, **facts)
            if is_asked or isinstance(chosen, verdicts):
                return chosen
            prefix, new = chosen.prefix_len, chosen.extend_len
            if self._has_room(req, prefix, new, is_begun=False):
                return chosen
            return verdicts.OTHER

        def _commit_prefill_admission(self, req: Any, chosen: Any, *rest: Any) -> None:
            """Keep the room of who joins the pass."""
            super()._commit_prefill_admission(req, chosen, *rest)
            admission.commit()

        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            """Give back the room of a prompt that SGLang refuses after us."""
            verdict = super().add_one_req(req, *args, **kwargs)
            admission.cancel()
            return verdict

        def add_chunked_req(self, req: Any) -> Any:
            """Let the unfinished prompt go on where its next part has room."""
            left = len(req.full_untruncated_fill_ids) - req.prefix_len
            chunk = self.rem_chunk_tokens
            new = left if chunk is None else min(left, chunk)
            if (
                not is_asked
                and new > 0
                and not self._has_room(req, req.prefix_len, new, is_begun=True)
            ):
                # Nobody passes it: SGLang has one unfinished prompt at a time.
                self.rem_input_tokens = 0
                return req
            begun = super().add_chunked_req(req)
            if any(added is req for added in self.can_run_list):
                admission.commit()
            else:
                admission.cancel()
            return begun

    return LayeredPrefillAdder
