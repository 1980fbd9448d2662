"""LoRA adapters by what is in them: whose KV a request's pages are.

SGLang names an adapter by an id that follows from its name and path, or from nothing,
and puts it behind the request's ``extra_key``. Neither says what the adapter is: it may
be trained anew under the same path, and another machine may have other files there. So
the tiers know an adapter by a hash of its tensors, taken when it is loaded; equal ones
share their KV, over restarts, between peers and under whatever name.

SGLang loads an adapter that it had put aside anew under its old id, and its device's
tree knows KV by the id. Where the content is another by then, what the tree has may be
of either, and of both one behind the other: the tiers neither find nor keep KV under
this id until the device has been emptied. So it is where the content is not known, or
was not, as a part of it could not be read.

Each rank loads an adapter whole, and at the same point of its requests, so all ranks
agree on the hash there. On the scheduler's thread, where SGLang loads as well.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import xxhash

from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.lossy import has_no_adapter

__all__ = ["Adapters"]

logger = logging.getLogger(__name__)

_ID_CHARS = 32


class Adapters:
    """The adapters that are loaded.

    Args:
        manager: SGLang's ``LoRAManager``; None where the server has no adapters.
        agreement: between the ranks.
        metrics: counts adapters that cannot be read, or a part of them
            (``adapters_unreadable``), and those of which nothing is kept or found until
            the device is empty (``adapters_mixed``).
    """

    def __init__(
        self,
        manager: Any,
        agreement: Agreement,
        metrics: MetricsRegistry | None = None,
    ) -> None:
        self._metrics = metrics
        self._manager = manager
        self._agreement = agreement
        self._hashes: dict[str, str] = {}
        # Of adapters whose KV may be on the device, the first content, empty where that
        # is not known; and those that have come with another since, or may have.
        self._on_device: dict[str, str] = {}
        self._mixed: set[str] = set()
        # Those that are loaded and could not be read, or a part of them.
        self._unread: set[str] = set()
        for lora_id in sorted(self._loaded):
            self.loaded(lora_id)

    @property
    def has_manager(self) -> bool:
        """Whether the server may have adapters, now or later."""
        return self._manager is not None

    def loaded(self, lora_id: str) -> bool:
        """Take note of an adapter that SGLang has loaded, or failed to load.

        All ranks call it at the same point.

        Args:
            lora_id: SGLang's.

        Returns:
            Whether the device may have KV of another content under this id.
        """
        # Ranks on other machines may have been given other files.
        told = self._agreement.gathered(self._read(lora_id))
        # Also where it could not be unloaded before.
        self.unloaded(lora_id)
        if not any(told):
            return False
        is_read = all(one and one[1] for one in told)
        content = ""
        if all(one and one[0] for one in told):
            joined = "".join(digest for digest, _ in told)
            content = xxhash.xxh3_128(joined.encode()).hexdigest()
            self._hashes[lora_id] = content
        if not is_read:
            self._unread.add(lora_id)
            # Chance, if anything: the next one will not be equal to it.
            content = ""
        if lora_id not in self._on_device:
            self._on_device[lora_id] = content
            return False
        former = self._on_device[lora_id]
        if content and former == content:
            return False
        self._mixed.add(lora_id)
        self._count("adapters_mixed")
        logger.warning(
            "sgl-tiered: adapter %s was loaded again, %s, and SGLang may still have KV "
            "of the former on the device: until the cache is flushed (POST "
            "/flush_cache), nothing of it is kept or found below",
            lora_id,
            "with another content than before"
            if content and former
            else "whether with the same content is not known, since some of it could "
            "not be read",
        )
        return True

    def emptied(self) -> None:
        """Note that no KV is left on the device."""
        self._mixed.clear()
        self._on_device = {**self._hashes, **dict.fromkeys(self._unread, "")}

    def unloaded(self, lora_id: str) -> None:
        """Take note of an adapter that SGLang has no longer."""
        self._hashes.pop(lora_id, None)
        self._unread.discard(lora_id)

    def parted(self, extra_key: str) -> tuple[str, str] | None:
        """Return a key without its adapter, and the adapter's hash; empty for none.

        None where SGLang has an adapter whose hash is not known, or the device may have
        KV of another under its id, or something stands behind the id, as with elastic
        expert parallelism: that KV is nobody's.
        """
        if has_no_adapter(extra_key):
            return extra_key, ""
        lora_id = extra_key[-_ID_CHARS:]
        content = self._hashes.get(lora_id)
        if content is not None and lora_id not in self._mixed:
            return extra_key[:-_ID_CHARS], content
        has_one = any(lora_id in extra_key for lora_id in self._loaded)
        return None if has_one or lora_id in self._mixed else (extra_key, "")

    @property
    def _loaded(self) -> Mapping[str, Any]:
        """SGLang's adapters by id."""
        return {} if self._manager is None else self._manager.loras

    def _read(self, lora_id: str) -> list[Any]:
        """Return an adapter's hash, and whether that is of all of it; [] without it.

        The hash is empty where nothing can be read, and chance where a part cannot.
        """
        adapter = self._loaded.get(lora_id)
        if adapter is None:
            return []
        from sgl_tiered.engines.device.fingerprint import adapter_tensors, hash_tensors

        try:
            settings, tensors = adapter_tensors(adapter)
            found = hash_tensors(settings + self._served(), tensors)
        except Exception:
            # A server that keeps no KV of an adapter is better than none.
            logger.exception(
                "sgl-tiered: adapter %s could not be read; its KV is not kept", lora_id
            )
            self._count("adapters_unreadable")
            return ["", False]
        if found.num_unreadable:
            self._count("adapters_unreadable")
        return [found.digest, not found.num_unreadable]

    def _count(self, what: str) -> None:
        if self._metrics is not None:
            self._metrics.add(what)

    def _served(self) -> bytes:
        """Return what of the server's settings shapes an adapter's part."""
        modules = getattr(self._manager, "target_modules", None) or ()
        backend = getattr(getattr(self._manager, "lora_backend", None), "name", "")
        return json.dumps([sorted(map(str, modules)), str(backend)]).encode()
