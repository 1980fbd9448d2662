"""SGLang's KV events, decoded by hand and applied to a prompt tree.

A batch is msgpack: ``[timestamp, [event, ...], rank]``; an event is a map whose
``type`` is ``BlockStored``, ``BlockRemoved`` or ``AllBlocksCleared`` (SGLang 0.5.23,
``disaggregation/kv_events.py``). Fields that are not known here are passed over. What
comes over a socket is not trusted: a batch of any other shape raises ``EventError``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sgl_tiered.core.ids import TierId
from sgl_tiered.router.tree import Holder, PromptTree

__all__ = ["TIERS", "Cleared", "EventError", "Removed", "Stored", "apply", "decode"]

TIERS: Mapping[str | None, TierId] = {
    None: TierId.DEVICE,
    "GPU": TierId.DEVICE,
    "CPU_PINNED": TierId.HOST,
    "CXL": TierId.CXL,
    "DISK": TierId.DISK,
    "EXTERNAL": TierId.PEER,
}
"""Medium in events -> tier. Without one it is the device, as in SGLang's recorder."""

_MAX_TOKEN = 2**31
_MAX_BLOCK_TOKENS = 2**20
"""A page of more tokens than any prompt has, and lengths in tokens stay numbers."""


class EventError(ValueError):
    """A batch is not one of SGLang's; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A chain of blocks that was stored.

    Attributes:
        block_hashes: their names, shape [num_blocks].
        parent_hash: of the block in front of them; None at the start of a prompt.
        tokens: shape [num_blocks * block_tokens].
        block_tokens: tokens in one block.
        tier: where; None for a medium that is not known here.
        lora: name of the adapter, empty for none.
        cache_salt: the tenant's salt, empty for none.
    """

    block_hashes: tuple[int, ...]
    parent_hash: int | None
    tokens: tuple[int, ...]
    block_tokens: int
    tier: TierId | None
    lora: str
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that were given up in one tier; None for a medium not known here."""

    block_hashes: tuple[int, ...]
    tier: TierId | None


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything was given up."""


Event = Stored | Removed | Cleared


def decode(payload: bytes) -> list[Event]:
    """Return the events of one batch.

    Raises:
        EventError: it is no batch of SGLang's.
    """
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventError(f"not msgpack: {error}") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise EventError("a batch is [timestamp, events, ...]")
    return [_event(event) for event in batch[1]]


def apply(tree: PromptTree, holder: Holder, event: Event) -> int:
    """Change the tree as an event of this holder says; returns the orphans in it."""
    if isinstance(event, Cleared):
        tree.clear(holder)
        holder.is_complete = True
        return 0
    if event.tier is None:
        return 0
    if isinstance(event, Removed):
        tree.remove(holder, event.block_hashes, event.tier)
        return 0
    return tree.store(
        holder,
        event.block_hashes,
        event.parent_hash,
        event.tokens,
        event.block_tokens,
        event.tier,
        lora=event.lora,
        cache_salt=event.cache_salt,
    )


def _event(event: Any) -> Event:
    if not isinstance(event, dict):
        raise EventError("an event is a map")
    kind = event.get("type")
    if kind == "AllBlocksCleared":
        return Cleared()
    medium = event.get("medium")
    if medium is not None and not isinstance(medium, str):
        raise EventError(f"medium {medium!r} is no word")
    tier = TIERS.get(medium)
    hashes = _integers(event, "block_hashes")
    if kind == "BlockRemoved":
        return Removed(hashes, tier)
    if kind != "BlockStored":
        raise EventError(f"{kind!r} is no kind of event")
    parent = event.get("parent_block_hash")
    block_tokens = event.get("block_size")
    if parent is not None and type(parent) is not int:
        raise EventError("parent_block_hash is no integer")
    if type(block_tokens) is not int or not 0 < block_tokens <= _MAX_BLOCK_TOKENS:
        raise EventError(f"block_size {block_tokens!r} is no length")
    tokens = event.get("token_ids")
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        # Speculative decoding stores pairs of neighbours; their firsts are the prompt.
        if not all(isinstance(pair, list) for pair in tokens):
            raise EventError("token_ids is no list of pairs")
        event = {**event, "token_ids": [pair[0] for pair in tokens if pair]}
    tokens = _integers(event, "token_ids")
    if len(tokens) != len(hashes) * block_tokens:
        raise EventError(
            f"{len(tokens)} tokens in {len(hashes)} blocks of {block_tokens}"
        )
    if any(not -_MAX_TOKEN <= token < _MAX_TOKEN for token in tokens):
        raise EventError("a token is no 32-bit integer")
    return Stored(
        hashes,
        parent,
        tokens,
        block_tokens,
        tier,
        _word(event, "lora_name"),
        _word(event, "cache_salt"),
    )


def _integers(event: Mapping[str, Any], field: str) -> tuple[int, ...]:
    values = event.get(field)
    if not isinstance(values, list) or not all(type(each) is int for each in values):
        raise EventError(f"{field} is no list of integers")
    return tuple(values)


def _word(event: Mapping[str, Any], field: str) -> str:
    value = event.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise EventError(f"{field} is no word")
    return value
