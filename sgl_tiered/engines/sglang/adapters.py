"""LoRA adapters by what is in them: whose KV a request's pages are.

SGLang names an adapter by an id that follows from its name and path, or from nothing,
and puts it behind the request's ``extra_key``. Neither says what the adapter is: it may
be trained anew under the same path, and another machine may have other files there. So
the tiers know an adapter by a hash of its tensors, taken when it is loaded; equal ones
share their KV, over restarts, between peers and under whatever name.

Each rank loads an adapter whole, and at the same point of its requests, so all ranks
agree on the hash there. On the scheduler's thread, where SGLang loads as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from sgl_tiered.engines.sglang.agreement import Agreement

__all__ = ["Adapters"]

_ID_CHARS = 32


class Adapters:
    """The adapters that are loaded.

    Args:
        manager: SGLang's ``LoRAManager``; None where the server has no adapters.
        agreement: between the ranks.
    """

    def __init__(self, manager: Any, agreement: Agreement) -> None:
        self._manager = manager
        self._agreement = agreement
        self._hashes: dict[str, str] = {}
        for lora_id in sorted(self._loaded):
            self.loaded(lora_id)

    def loaded(self, lora_id: str) -> None:
        """Take note of an adapter that SGLang has loaded, or failed to load.

        All ranks call it at the same point.

        Args:
            lora_id: SGLang's.
        """
        adapter = self._loaded.get(lora_id)
        found = ""
        if adapter is not None:
            from sgl_tiered.engines.sglang.fingerprint import (
                adapter_tensors,
                hash_tensors,
            )

            settings, tensors = adapter_tensors(adapter)
            found = hash_tensors(settings + self._served(), tensors).digest
        # Ranks on other machines may have been given other files.
        told = self._agreement.gathered(found)
        if all(told):
            self._hashes[lora_id] = xxhash.xxh3_128("".join(told).encode()).hexdigest()

    def unloaded(self, lora_id: str) -> None:
        """Take note of an adapter that SGLang has no longer."""
        self._hashes.pop(lora_id, None)

    def parted(self, extra_key: str) -> tuple[str, str] | None:
        """Return a key without its adapter, and the adapter's hash; empty for none.

        None where SGLang has an adapter whose hash is not known: its KV is nobody's.
        """
        lora_id = extra_key[-_ID_CHARS:]
        content = self._hashes.get(lora_id)
        if content is not None:
            return extra_key[:-_ID_CHARS], content
        return None if lora_id in self._loaded else (extra_key, "")

    @property
    def _loaded(self) -> Mapping[str, Any]:
        """SGLang's adapters by id."""
        return {} if self._manager is None else self._manager.loras

    def _served(self) -> bytes:
        """Return what of the server's settings shapes an adapter's part."""
        modules = getattr(self._manager, "target_modules", None) or ()
        backend = getattr(getattr(self._manager, "lora_backend", None), "name", "")
        return json.dumps([sorted(map(str, modules)), str(backend)]).encode()
