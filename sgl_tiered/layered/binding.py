"""Where each layer of each logical page is: device, host row, both, or being moved.

The engine numbers *logical* pages, the same in all layers. Under them lie *physical*
layer-pages of one device tensor, any of which any layer may use, and a host region with
a row per logical page. ``LayerBinding`` owns the physical layer-pages.

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
        physical: int32 [n], source or target on the device.
        epochs: uint32 [n], of the pages when it began.
        is_up: from host to device.
    """

    layer: int
    pages: Int64s
    physical: Int32s
    epochs: npt.NDArray[np.uint32]
    is_up: bool

    def __len__(self) -> int:
        return len(self.pages)


class LayerBinding:
    """The table of all layer-pages, and the allocator of the physical ones.

    Args:
        num_layers: of the model.
        num_pages: logical pages, numbered from 0.
        num_physical: physical layer-pages, numbered from ``first_physical``.
        first_physical: above 0 where the tensor begins with pages for padding.

    Attributes:
        device: int32 [num_layers, num_pages], the physical layer-page or -1.
        on_host: bool [num_layers, num_pages], whether the host row is valid.
        filled: bool [num_layers, num_pages], whether it holds the KV of tokens.
        copying: bool [num_layers, num_pages], whether a copy uses its host row, be it
            for what the page held before it was forgotten.
        full: bool [num_pages], whether all of its tokens have KV in all layers.
        pinned: int16 [num_pages], readers of the device copies from outside.
        epoch: uint32 [num_pages], counts how often a page was forgotten.

    All of them are to be read only.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_physical: int,
        *,
        first_physical: int = 0,
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
        # A stack, lowest number on top: runs of numbers are copied faster.
        self._free = np.arange(num_physical, dtype=np.int32)[::-1] + first_physical
        self._num_free = num_physical
        self._adrift = np.zeros(num_physical, np.bool_)
        self._set_aside = np.zeros(num_physical, np.bool_)

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
        return len(self._free)

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
        return self._num_free

    @property
    def num_adrift(self) -> int:
        """Physical layer-pages held by copies under way, and bound to nothing."""
        return int(np.count_nonzero(self._adrift))

    def set_aside(self, count: int) -> Int32s:
        """Take physical layer-pages for good, for staging."""
        taken = self._take(count)
        self._set_aside[taken - self._first] = True
        return taken

    def bind(self, layers: Layers, pages: Int64s) -> Int32s:
        """Give layer-pages that have none a place on the device; return the places.

        What was on their host rows is void, as in ``forget``. There has to be room.
        """
        assert not np.any(self.copying[layers, pages]), "a copy uses a host row"
        assert np.all(self.device[layers, pages] < 0), "bound already"
        taken = self._take(len(pages))
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
        self._give(physical)

    def forget(self, pages: Int64s) -> None:
        """Take everything back that these logical pages have.

        Places that a copy uses come back when it ends.
        """
        assert not np.any(self.pinned[pages]), "forgotten while it is read"
        device = self.device[:, pages]
        bound = device >= 0
        adrift = bound & self.copying[:, pages]
        self._adrift[device[adrift] - self._first] = True
        self._give(device[bound & ~adrift])
        self.device[:, pages] = -1
        self.on_host[:, pages] = False
        self.filled[:, pages] = False
        self.full[pages] = False
        self.epoch[pages] += 1

    def depart(self, layer: int, pages: Int64s, *, is_up: bool) -> Flight:
        """Begin a copy between the device and the host rows.

        Args:
            layer: of all of them.
            pages: int64 [n]. Up: valid on host, not bound, and there has to be room.
                Down: bound and filled.
            is_up: from host to device.
        """
        assert not np.any(self.copying[layer, pages]), "copied already"
        assert np.all(self.filled[layer, pages]), "nothing to copy"
        if is_up:
            assert np.all(self.device[layer, pages] < 0), "bound already"
            assert np.all(self.on_host[layer, pages]), "no valid row"
            physical = self._take(len(pages))
            self._adrift[physical - self._first] = True
        else:
            physical = self.device[layer, pages]
            assert np.all(physical >= 0), "not on the device"
        self.copying[layer, pages] = True
        return Flight(layer, pages, physical, self.epoch[pages], is_up)

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
            self._adrift[flight.physical - self._first] = False
            self.device[layer, pages[landed]] = flight.physical[landed]
            self._give(flight.physical[~landed])
        else:
            self.on_host[layer, pages[landed]] = True
            stray = flight.physical[~known]
            self._adrift[stray - self._first] = False
            self._give(stray)
        return landed

    def check(self) -> None:
        """Assert every invariant; O(everything), for tests."""
        free = self._free[: self._num_free] - self._first
        bound = self.device[self.device >= 0] - self._first
        counts = np.zeros(self.num_physical, np.int64)
        for some in (free, bound, self._adrift.nonzero()[0]):
            np.add.at(counts, some, 1)
        counts += self._set_aside
        assert np.all(counts == 1), f"owned {np.flatnonzero(counts != 1)} not once"
        somewhere = (self.device >= 0) | self.on_host
        assert np.all(somewhere[self.filled]), "KV is lost"
        assert not np.any(self.on_host & ~self.filled), "a valid row of nothing"
        assert np.all(self.filled[:, self.full]), "a full page lacks a layer"
        assert np.all(self.pinned >= 0), "unpinned too often"

    def _take(self, count: int) -> Int32s:
        assert count <= self._num_free, f"{count} wanted, {self._num_free} free"
        self._num_free -= count
        taken: Int32s = self._free[self._num_free : self._num_free + count][::-1].copy()
        return taken

    def _give(self, physical: Int32s) -> None:
        self._free[self._num_free : self._num_free + len(physical)] = physical
        self._num_free += len(physical)
