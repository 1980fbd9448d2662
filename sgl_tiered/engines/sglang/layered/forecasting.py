"""Eq. 5 over SGLang's requests: how many layer-pages will be left in the coming steps.

Requests grow by a page in all layers each stage, and end at their predicted length. So
layers are sent to the host before their room is needed, a prompt keeps no more than
what will be left, and only that is pulled back. A copy that is on the host as well
stays readable on the device until it is dropped, so what was sent too early costs the
link's time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.layered.base import LayerRoom
from sgl_tiered.policies.layers.forecast import RunningPages, taken_ahead
from sgl_tiered.policies.layers.pressure import Pressure

__all__ = ["LayerForecast"]

Relieve = Callable[[Sequence[Any], int], int]


class LayerForecast:
    """Looks ahead for one scheduler; keeps nothing but counts.

    Attributes:
        num_looks: forecasts before decode steps.
        num_below: of them, those that fell below the lower threshold.
        num_releases: requests whose layers left for that, each change counted.
        num_pushed: layer-pages of cached pages that were sent to the host for it.

    Args:
        driver: of the pool.
        tokens_left: predicted for a request, 1 or more.
    """

    def __init__(self, driver: LayerDriver, tokens_left: Callable[[Any], int]) -> None:
        layout = driver.plan.layout
        self._driver = driver
        self._tokens_left = tokens_left
        self._num_layers = layout.num_layers
        self._page_tokens = layout.page_tokens
        self._pressure = Pressure(layout.num_layers, driver.plan.capacity)
        self.num_looks = self.num_below = 0
        self.num_releases = self.num_pushed = 0

    def ahead(self, decoding: Sequence[Any]) -> int:
        """Return the layer-pages that the coming stages take at worst; O(requests).

        What answers that end give back counts from the stage on in which they end.

        Args:
            decoding: SGLang's requests that decode, paused ones left out: they neither
                grow nor end.
        """
        num_layers, page_tokens = self._num_layers, self._page_tokens
        tokens_left = self._tokens_left
        held = self._driver.manager.num_held([req.rid for req in decoding])
        running = []
        for req, num_held in zip(decoding, held, strict=True):
            num_tokens = int(req.kv.kv_committed_len)
            num_pages = num_tokens // page_tokens * num_held
            if num_tokens % page_tokens:
                num_pages += num_layers
            running.append(RunningPages(num_pages, tokens_left(req), num_layers))
        return taken_ahead(running, page_tokens)

    def to_keep(self, running: Sequence[Any], room: LayerRoom) -> int:
        """Return the layer-pages that a new prompt may keep beyond the least.

        Below 0 where there are none. Others' copies count as theirs: they came first.

        Args:
            running: those that run and are not paused.
            room: as it is now.
        """
        return self._pressure.to_keep(room.free + room.cached, self.ahead(running))

    def reserve(self, decoding: Sequence[Any]) -> int:
        """Return the layer-pages to be left to what is decoded, beside open pages.

        Args:
            decoding: those that take part in the step that comes.
        """
        step = sum(map(self._begins_page, decoding)) * self._num_layers
        return self._pressure.reserve(self.ahead(decoding), step)

    def relieve(
        self,
        claims: Sequence[Any],
        decoding: Sequence[Any],
        room: LayerRoom,
        release: Relieve,
    ) -> None:
        """Send layers to the host before the room that they take is needed.

        Args:
            claims: all that run, by their claim to the device, the best first.
            decoding: those that take part in the step that comes.
            room: as it was when this step began: since then layers were sent away, or
                pulled back where there was more than enough.
            release: lets layers of ``claims`` leave until so many layer-pages of
                theirs are on their way; returns how many changes that took.
        """
        self.num_looks += 1
        ahead = self.ahead(decoding)
        if self._missing(room, ahead) <= 0:
            return
        # To count the room takes longer than all the rest.
        room = self._driver.manager.room()
        missing = self._missing(room, ahead)
        if missing <= 0:
            return
        self.num_below += 1
        if room.cached:
            pushed = self._driver.manager.push(min(missing, room.cached))
            self.num_pushed += pushed
            missing -= pushed
        if missing > 0:
            self.num_releases += release(claims, missing)

    def counters(self) -> dict[str, float]:
        """Return the counts, for the metrics."""
        return {
            "layerkv_forecasts": self.num_looks,
            "layerkv_forecasts_below": self.num_below,
            "layerkv_pressure_releases": self.num_releases,
            "layerkv_pressure_pushed_pages": self.num_pushed,
        }

    def _missing(self, room: LayerRoom, ahead: int) -> int:
        # Cached pages are not ready to be taken before they are on the host as well.
        avail = room.free + room.spare + room.landing
        return self._pressure.shortage(avail - ahead)

    def _begins_page(self, req: Any) -> bool:
        return int(req.kv.kv_committed_len) % self._page_tokens == 0
