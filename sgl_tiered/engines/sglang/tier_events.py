"""KV events of the tiers below the device, in the stream of SGLang's own.

With ``--kv-events-config`` SGLang publishes which pages its tree stores and removes.
Here the tiers add theirs: the same two events with the medium of the tier, in the same
batches, so that numbers and replay are SGLang's. The names are those of the device's
events: a page that the device gives up and host memory keeps stays one name for those
who listen, held elsewhere. Without a publisher nothing of this exists.

SGLang takes the events of a step at its end, on the scheduler's thread. A call tells a
bounded number of pages, more where nothing runs; the rest waits for the next.

Pages under an ``extra_key`` are told only if it belongs to an adapter with a public
name: events cannot say such a key, and a router would think them anybody's. That leaves
out the KV that was altered (``serving/lossy.py``), which is kept under such a key.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
from sglang.srt.disaggregation.kv_events import (
    BlockRemoved,
    BlockStored,
    StorageMedium,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_tiered.cache.copy_watch import STATE_BYTES, Gained
from sgl_tiered.core.ids import TierId
from sgl_tiered.engines.sglang.runtime import TieredRuntime

__all__ = ["AnnouncingRadixCache", "TierEvents"]

MEDIA: dict[TierId, str] = {
    TierId.HOST: StorageMedium.CPU.value,
    TierId.CXL: "CXL",  # SGLang has no word for it
    TierId.DISK: StorageMedium.DISK.value,
}
_SALT_TAG = b"sglang-cache-salt-v1\0"
"""What SGLang puts before a tenant's salt."""
_PAGES_PER_STEP = 128
"""Named and told between two passes. To find and to name 128 pages of 16 tokens takes
0.15 ms (p50; 0.6 ms p99, SHA-256 by hashlib), and 1 us where nothing changed."""
_PAGES_IDLE = 2048
"""The same where nothing runs: what a disk kept over a restart is told so."""


class _EventNames:
    """Names of pages as SGLang's recorders have them (``tests/contract`` compares).

    SGLang hashes in Rust, or in C++ that it compiles where it is first asked. A
    scheduler must not wait for a compiler, so the hashes are taken here: SHA-256 over
    the page before and the page's tokens, 32 bits each.
    """

    def __init__(self, runtime: TieredRuntime, params: Any, page_size: int) -> None:
        self._runtime = runtime
        self._lora_names = params.kv_event_lora_names
        self._is_dynamo = params.dynamo_kv_event_format
        self._page_size = page_size
        # A namespace without adapter and salt is there before any request.
        self._plain = runtime.namespace(None, None)

    def refresh(self) -> list[bytes]:
        """Return the namespaces that were named since the last call."""
        return self._runtime.namespaces.take_new()

    def lora_name(self, digest: bytes) -> str | None:
        """Return the public name of a namespace's adapter."""
        extra_key, _ = self._keys(digest)
        if self._is_dynamo:
            name: str | None = self._lora_names.resolve(extra_key)
        else:
            name = self._lora_names.get(extra_key)
        return name

    def salt(self, digest: bytes) -> str | None:
        """Return the tenant's salt of a namespace."""
        return self._keys(digest)[1]

    def chain(self, digest: bytes, before: bytes | None, raw: bytes) -> bytes | None:
        """Return the SHA-256 of each page, all in front of it included."""
        if digest != self._plain and self._runtime.namespaces.names_of(digest) is None:
            return None
        extra_key, salt = self._keys(digest)
        if extra_key is not None and self.lora_name(digest) is None:
            return None
        last = before
        if last is None:
            last = b"" if salt is None else sha256(_SALT_TAG + salt.encode()).digest()
        states = []
        page_bytes = 4 * self._page_size
        for start in range(0, len(raw), page_bytes):
            last = sha256(last + raw[start : start + page_bytes]).digest()
            states.append(last)
        return b"".join(states)

    def names(self, digest: bytes, states: bytes) -> list[int]:
        """Return the first 64 bits of each, and SGLang's seed over them, if any."""
        extra_key, salt = self._keys(digest)
        if self._is_dynamo:
            seed = kv_event_namespace_seed(extra_key=extra_key, cache_salt=salt)
        else:
            seed = kv_event_namespace_seed(extra_key=extra_key, cache_salt=None)
        words = np.frombuffer(states, ">i8").reshape(-1, STATE_BYTES // 8)[:, 0]
        if seed is None:
            return [int(word) for word in words]
        return [namespaced_block_hash(int(w), namespace_seed=seed) for w in words]

    def forget(self) -> None:
        """Take note that digests have changed."""
        self._plain = self._runtime.namespace(None, None)

    def _keys(self, digest: bytes) -> tuple[str | None, str | None]:
        """Return adapter and salt of a namespace that was named."""
        extra_key, salt = self._runtime.namespaces.names_of(digest) or ("", "")
        return extra_key or None, salt or None


class TierEvents:
    """The tiers' events of one rank.

    Args:
        runtime: whose tiers.
        params: SGLang's construction facts of the tree above them.
        page_size: tokens in a page.
    """

    def __init__(self, runtime: TieredRuntime, params: Any, page_size: int) -> None:
        self._runtime = runtime
        self._page_size = page_size
        self._names = _EventNames(runtime, params, page_size)
        self._names.refresh()
        self._watch = runtime.cache.watch_copies(self._names)
        runtime.on_renewed = self._names.forget

    def take(self) -> list[Any]:
        """Return the events since the last call, as many as one step may tell."""
        for digest in self._names.refresh():
            self._watch.retell(digest)
        limit = _PAGES_IDLE if self._runtime.engine_idle() else _PAGES_PER_STEP
        return [
            self._stored(change)
            if isinstance(change, Gained)
            else BlockRemoved(list(change.names), medium=MEDIA[change.tier])
            for change in self._watch.take(limit)
        ]

    def clear(self) -> None:
        """Begin anew after SGLang's own event that everything is gone."""
        self._watch.clear()
        self._names.forget()

    def _stored(self, change: Gained) -> BlockStored:
        return BlockStored(
            block_hashes=list(change.names),
            parent_block_hash=change.parent,
            token_ids=np.frombuffer(change.raw, np.int32).tolist(),
            block_size=self._page_size,
            lora_id=None,
            medium=MEDIA[change.tier],
            cache_salt=self._names.salt(change.digest),
            lora_name=self._names.lora_name(change.digest),
        )


class AnnouncingRadixCache(UnifiedRadixCache):
    """SGLang's tree, whose events tell of the tiers below as well."""

    # Set here, as the parent's constructor already resets.
    tier_events: TierEvents | None = None

    def announce_tiers(self, runtime: TieredRuntime, params: Any) -> None:
        """Tell of the tiers from now on, if this server has a publisher of events."""
        if params.enable_kv_cache_events:
            self.tier_events = TierEvents(runtime, params, int(self.page_size))

    def take_events(self) -> list[Any]:
        """Return the device's events and then the tiers'.

        In this order a page below has heard of the device's page in front of it.
        """
        events = list(super().take_events())
        if self.tier_events is not None:
            events += self.tier_events.take()
        return events

    def reset(self) -> None:
        """Forget every page; the device's tree says so for all."""
        super().reset()
        if self.tier_events is not None:
            self.tier_events.clear()
