"""Where each layer of each logical page is: device, host row, both, or being moved.

The engine numbers *logical* pages, the same in all layers. Under them lie *physical*
layer-pages of one device tensor, any of which any layer may use, and a host region with
a row per logical page. ``LayerBinding`` owns the physical layer-pages. Where pages may
be kept as activations (``kinds.py``), a page has a row of its kind while it is in use,
and a copy of its activations does not use its physical layer-pages. Some pages of KV
are *rowless*: they are on the device in all layers, and are never copied.

Invariants (``check``):

- no physical layer-page is bound twice; free + bound + adrift + set aside = all.
  Adrift: held by a copy under way, and bound to nothing;
- a filled layer-page is on the device or valid on its host row;
- nothing that is copied is released before the copy has ended.

A page that is forgotten while it is copied gets a new epoch, so that the copy's end
does not speak for what the page holds then. Its host row is in use: see ``copying``.

One thread. All arguments may be arrays; a layer may be one number or one per page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.layered.base import ActPlan
from sgl_tiered.layered.kinds import PageKinds
from sgl_tiered.layered.places import Places

__all__ = ["Flight", "LayerBinding"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Layers = int | Int64s


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """Layer-pages whose copy is under way.

    Attributes:
        layer: all are of one.
        pages: int64 [n], logical.
        physical: int32 [n], source or target on the device; [0] for activations that
            leave.
        epochs: uint32 [n], of the pages when it began.
        is_up: from host to device.
        rows: int64 [n], of the host region of their kind; None for ``pages``.
        acts: int32 [n], places of activations, -1 for those that only the host has;
            None for KV. All pages are of one kind.
        positions: int64 [n], of the pages' first tokens; for activations only.
    """

    layer: int
    pages: Int64s
    physical: Int32s
    epochs: npt.NDArray[np.uint32]
    is_up: bool
    rows: Int64s | None = None
    acts: Int32s | None = None
    positions: Int64s | None = None

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def host_rows(self) -> Int64s:
        """Host rows, int64 [n]."""
        return self.pages if self.rows is None else self.rows


class LayerBinding:
    """The table of all layer-pages, and the allocator of the physical ones.

    Args:
        num_layers: of the model.
        num_pages: logical pages, numbered from 0.
        num_physical: physical layer-pages, numbered from ``first_physical``.
        first_physical: above 0 where the tensor begins with pages for padding.
        acts: sizes of what holds activations; None where all pages are of KV.

    Attributes:
        device: int32 [num_layers, num_pages], the physical layer-page or -1.
        on_host: bool [num_layers, num_pages], whether the host row is valid.
        filled: bool [num_layers, num_pages], whether it holds the KV of tokens.
        copying: bool [num_layers, num_pages], whether a copy uses its host row, be it
            for what the page held before it was forgotten.
        full: bool [num_pages], whether all of its tokens have KV in all layers.
        pinned: int16 [num_pages], readers of the device copies from outside.
        epoch: uint32 [num_pages], counts how often a page was forgotten.
        plan: as given by ``acts``.
        kinds: of the pages; None where all are of KV. Of it, or what it would say:
        is_act: bool [num_pages], whether a page is kept as activations.
        row: int64 [num_pages], host row of its kind, -1 for none.
        rowless: bool [num_pages], in use as KV without a row.
        act: int32 [num_layers, num_pages], place in the act area, -1 for none.
        position: int64 [num_pages], of its first token, for pages of activations.

    All of them are to be read only.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_physical: int,
        *,
        first_physical: int = 0,
        acts: ActPlan | None = None,
    ) -> None:
        if min(num_layers, num_pages, num_physical) < 1 or first_physical < 0:
            raise ValueError(
                f"no binding of {num_layers} layers, {num_pages} pages and "
                f"{num_physical} layer-pages from {first_physical}"
            )
        shape = (num_layers, num_pages)
        self.device = np.full(shape, -1, np.int32)
        self.on_host = np.zeros(shape, np.bool_)
        self.filled = np.zeros(shape, np.bool_)
        self.copying = np.zeros(shape, np.bool_)
        self.full = np.zeros(num_pages, np.bool_)
        self.pinned = np.zeros(num_pages, np.int16)
        self.epoch = np.zeros(num_pages, np.uint32)
        self._first = first_physical
        self._places = Places(num_physical, first_physical)
        self.plan = acts
        self.kinds = None if acts is None else PageKinds(num_layers, num_pages, acts)
        if self.kinds is None:
            self.is_act = np.zeros(num_pages, np.bool_)
            self.row = np.arange(num_pages)
            self.rowless = np.zeros(num_pages, np.bool_)
            self.act: Int32s = np.broadcast_to(np.int32(-1), shape)
            self.position = np.zeros(num_pages, np.int64)
        else:
            self.is_act, self.row = self.kinds.is_act, self.kinds.row
            self.rowless = self.kinds.rowless
            self.act, self.position = self.kinds.act, self.kinds.position

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.device.shape[0]

    @property
    def num_pages(self) -> int:
        """Logical pages."""
        return self.device.shape[1]

    @property
    def num_physical(self) -> int:
        """Physical layer-pages, those set aside included."""
        return len(self._places)

    @property
    def padding(self) -> int:
        """A physical layer-page of the tensor that is bound to nothing.

        Raises:
            ValueError: the tensor begins with pages that are used.
        """
        if not self._first:
            raise ValueError("the tensor has no layer-page for padding")
        return self._first - 1

    @property
    def num_free(self) -> int:
        """Physical layer-pages that can be taken."""
        return self._places.num_free

    @property
    def num_adrift(self) -> int:
        """Physical layer-pages held by copies under way, and bound to nothing."""
        return self._places.num_adrift

    def set_aside(self, count: int) -> Int32s:
        """Take physical layer-pages for good, for staging."""
        return self._places.set_aside(count)

    def bind(self, layers: Layers, pages: Int64s) -> Int32s:
        """Give layer-pages that have none a place on the device; return the places.

        What was on their host rows is void, as in ``forget``. There has to be room.
        """
        assert not np.any(self.copying[layers, pages]), "a copy uses a host row"
        assert np.all(self.device[layers, pages] < 0), "bound already"
        taken = self._places.take(len(pages))
        self.device[layers, pages] = taken
        self.on_host[layers, pages] = False
        self.filled[layers, pages] = False
        return taken

    def written(self, layers: Layers, pages: Int64s) -> None:
        """Note that the device copies have new KV; the host rows are void."""
        assert np.all(self.device[layers, pages] >= 0), "written, but not bound"
        assert not np.any(self.copying[layers, pages]), "written during a copy"
        self.filled[layers, pages] = True
        self.on_host[layers, pages] = False

    def written_to_host(self, layers: Layers, pages: Int64s) -> None:
        """Note that somebody else has put KV into the host rows."""
        assert not np.any(self.copying[layers, pages]), "written during a copy"
        assert np.all(self.device[layers, pages] < 0), "the device has other bytes"
        self.filled[layers, pages] = True
        self.on_host[layers, pages] = True

    def unbind(self, pages: Int64s) -> None:
        """Release the places of pages without KV."""
        assert not np.any(self.filled[:, pages]), "unbound, but filled"
        device = self.device[:, pages]
        self._places.give(device[device >= 0])
        self.device[:, pages] = -1

    def completed(self, pages: Int64s) -> None:
        """Note that pages have all their tokens, in all layers."""
        self.full[pages] = True

    def void(self, pages: Int64s) -> None:
        """Forget the KV of pages that are computed anew; their places stay theirs."""
        assert not np.any(self.copying[:, pages]), "voided during a copy"
        self.on_host[:, pages] = False
        self.filled[:, pages] = False
        self.full[pages] = False

    def drop(self, layers: Layers, pages: Int64s) -> None:
        """Release device copies whose host rows are valid."""
        physical = self.device[layers, pages]
        assert np.all(physical >= 0), "dropped, but not bound"
        assert np.all(self.on_host[layers, pages]), "the only copy"
        assert not np.any(self.copying[layers, pages]), "dropped during a copy"
        assert not np.any(self.pinned[pages]), "dropped while it is read"
        self.device[layers, pages] = -1
        self._places.give(physical)

    def drop_acts(self, layers: Int64s, pages: Int64s) -> None:
        """Release places of activations whose host rows are valid."""
        assert self.kinds is not None
        assert np.all(self.on_host[layers, pages]), "the only activations"
        assert not np.any(self.copying[layers, pages]), "dropped during a copy"
        assert not np.any(self.pinned[pages]), "dropped while it is read"
        self.kinds.drop(layers, pages)

    def new_kinds(
        self, pages: Int64s, is_act: Bools, rowless: Bools | None = None
    ) -> None:
        """Give pages that come into use kinds and rows.

        Args:
            pages: int64 [n], each once, without KV, of which no copy uses anything.
            is_act: bool [n]; there have to be rows.
            rowless: bool [n], of KV without a row, bound in all layers; None for none.
        """
        assert self.kinds is not None
        assert not np.any(self.filled[:, pages]), "it has KV of its kind"
        if rowless is not None:
            bound = self.device[:, pages[rowless]] >= 0
            assert np.all(bound), "rowless, and not on the device"
        self.kinds.assign(pages, is_act, rowless)

    def no_kinds(self, pages: Int64s) -> None:
        """Take back kinds, rows and places of activations; of pages without KV."""
        if self.kinds is None:
            return
        assert not np.any(self.filled[:, pages]), "it has KV of its kind"
        self.kinds.forget(pages, self.copying[:, pages])

    def by_kind(self, pages: Int64s) -> list[Int64s]:
        """Return pages cut into those of KV and of activations, without empty ones."""
        if self.kinds is None or not self.is_act[pages].any():
            return [pages]
        is_act = self.is_act[pages]
        return [some for some in (pages[~is_act], pages[is_act]) if len(some)]

    def forget(self, pages: Int64s) -> None:
        """Take everything back that these logical pages have.

        Places that a copy uses come back when it ends.
        """
        assert not np.any(self.pinned[pages]), "forgotten while it is read"
        device = self.device[:, pages]
        bound = device >= 0
        adrift = bound & self.copying[:, pages]
        if self.kinds is not None:
            adrift &= ~self.is_act[pages]
            self.kinds.forget(pages, self.copying[:, pages])
        self._places.cut_loose(device[adrift])
        self._places.give(device[bound & ~adrift])
        self.device[:, pages] = -1
        self.on_host[:, pages] = False
        self.filled[:, pages] = False
        self.full[pages] = False
        self.epoch[pages] += 1

    def depart(self, layer: int, pages: Int64s, *, is_up: bool) -> Flight:
        """Begin a copy between the device and the host rows.

        Args:
            layer: of all of them.
            pages: int64 [n], of one kind. Up: valid on host, not bound, and there has
                to be room. Down: bound and filled, or with places of activations.
            is_up: from host to device.
        """
        assert not np.any(self.copying[layer, pages]), "copied already"
        assert np.all(self.filled[layer, pages]), "nothing to copy"
        rows = acts = positions = None
        if self.kinds is not None:
            rows = self.row[pages]
            assert np.all(rows >= 0), "no row to copy to or from"
            if self.is_act[pages].any():
                assert np.all(self.is_act[pages]), "pages of two kinds"
                acts, positions = self.act[layer, pages], self.position[pages]
        if is_up:
            assert np.all(self.device[layer, pages] < 0), "bound already"
            assert np.all(self.on_host[layer, pages]), "no valid row"
            physical = self._places.take(len(pages))
            self._places.cut_loose(physical)
        elif acts is not None:
            assert np.all(acts >= 0), "no activations on the device"
            physical = np.empty(0, np.int32)
        else:
            physical = self.device[layer, pages]
            assert np.all(physical >= 0), "not on the device"
        self.copying[layer, pages] = True
        epochs = self.epoch[pages]
        return Flight(layer, pages, physical, epochs, is_up, rows, acts, positions)

    def arrive(self, flight: Flight, ok: Bools) -> Bools:
        """End a copy; nothing is lost where it failed.

        Args:
            flight: from ``depart``.
            ok: bool [n], what was copied.

        Returns:
            bool [n], what now is on both sides: copied, and not forgotten meanwhile.
        """
        layer, pages = flight.layer, flight.pages
        self.copying[layer, pages] = False
        known = self.epoch[pages] == flight.epochs
        landed: Bools = ok & known
        if flight.is_up:
            self._places.pick_up(flight.physical)
            self.device[layer, pages[landed]] = flight.physical[landed]
            self._places.give(flight.physical[~landed])
        else:
            self.on_host[layer, pages[landed]] = True
            if flight.acts is None:
                stray = flight.physical[~known]
                self._places.pick_up(stray)
                self._places.give(stray)
        if self.kinds is not None and not known.all():
            idle = ~np.any(self.copying[:, pages], axis=0)
            self.kinds.ended(flight.host_rows, flight.acts, ~known, idle)
        return landed

    def check(self) -> None:
        """Assert every invariant; O(everything), for tests."""
        self._places.check(self.device[self.device >= 0])
        somewhere = (self.device >= 0) | self.on_host
        assert np.all(somewhere[self.filled]), "KV is lost"
        assert not np.any(self.on_host & ~self.filled), "a valid row of nothing"
        assert np.all(self.filled[:, self.full]), "a full page lacks a layer"
        assert np.all(self.pinned >= 0), "unpinned too often"
        if self.kinds is not None:
            self.kinds.check(self.on_host, self.full)
            has_row = (self.row >= 0) | self.rowless
            assert np.all(has_row[self.filled.any(axis=0)]), "KV without a row"
            bound = self.device[:, self.rowless] >= 0
            assert np.all(bound), "rowless, and not on the device"
            assert not np.any(self.copying[:, self.rowless]), "rowless, and copied"
