"""Why pages of a prompt were no hit: what is known of each at its admission.

Reads the index, the sightings and the tombstones of one cache, and changes nothing.
Asks only in the request's own namespace, and in those that the request's sender could
have asked himself (``siblings``): what he is told he could have found out by sending
the same prompt there. See metrics/EXPLAIN.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_tiered.cache.chain import Chain
from sgl_tiered.cache.config import CacheConfig
from sgl_tiered.cache.store import PageStore
from sgl_tiered.cache.tombstones import Cause
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import page_keys
from sgl_tiered.core.plans import Bools, Int32s, UInt8s

__all__ = ["MissReader", "MissSpan"]

_MAX_SPANS = 8
"""Spans that are told; the pages of the others are told as one. Copies come and go by
runs, so a prompt with more has been looked at from many sides already."""
_MICRO = 6


@dataclass(frozen=True, slots=True)
class MissSpan:
    """Pages of a prompt that were no hit, and why.

    Attributes:
        first_page, num_pages: which.
        cause: one of the words of metrics/EXPLAIN.md.
        text: a clause for people.
        tier: where the last copy was, where that is known.
        age_s: seconds since it was lost; None where nothing was.
    """

    first_page: int
    num_pages: int
    cause: str
    text: str
    tier: str | None = None
    age_s: float | None = None

    def as_dict(self, page_tokens: int) -> dict[str, Any]:
        """Return a JSON-able value, in tokens."""
        told: dict[str, Any] = {
            "first_token": self.first_page * page_tokens,
            "tokens": self.num_pages * page_tokens,
            "cause": self.cause,
            "text": self.text,
        }
        if self.tier is not None:
            told["tier"] = self.tier
        if self.age_s is not None:
            told["age_s"] = round(self.age_s, _MICRO)
        return told


class MissReader:
    """Answers for one cache.

    Args:
        store: pages and tombstones.
        chain: sightings.
        config: policies, by name.
        clock: ages.
    """

    def __init__(
        self, store: PageStore, chain: Chain, config: CacheConfig, clock: Clock
    ) -> None:
        self._store = store
        self._chain = chain
        self._config = config
        self._clock = clock

    def explain(
        self,
        digest: bytes,
        tokens: Int32s,
        first_page: int,
        end_page: int,
        *,
        held: str = "",
        siblings: Mapping[str, bytes] | None = None,
    ) -> list[MissSpan]:
        """Say why pages were no hit.

        Hashes the prompt up to ``end_page``: half a microsecond per page.

        Args:
            digest: the request's namespace, open.
            tokens: int32, the prompt.
            first_page, end_page: pages to explain.
            held: why pages that a tier has are not taken: one clause.
            siblings: other open namespaces that the sender could have asked, by what
                is different about them.
        """
        store = self._store
        if first_page >= end_page or store.tombstones is None:
            return []
        page = store.page_tokens
        raw = tokens[: end_page * page].tobytes()
        rows = store.index.rows_of(digest, raw)
        keys = page_keys(digest, tokens[: end_page * page], page)[first_page:]
        is_held = np.zeros(end_page - first_page, np.bool_)
        known = rows[first_page:end_page]
        is_held[: len(known)] = store.table.copies[known] > 0
        elsewhere = {
            name: len(store.index.rows_of(other, raw))
            for name, other in (siblings or {}).items()
        }
        return self._spans(first_page, keys, is_held, held, elsewhere)

    def lost(self, digest: bytes, tokens: Int32s, first_page: int) -> None:
        """Note that the device lost pages before their copies were due."""
        tombstones = self._store.tombstones
        if tombstones is not None:
            keys = page_keys(digest, tokens, self._store.page_tokens)[first_page:]
            now_s = self._clock.now()
            tombstones.add(keys, Cause.NEVER_COPIED, TierId.DEVICE, now_s)

    def _spans(
        self,
        first_page: int,
        keys: UInt8s,
        is_held: Bools,
        held: str,
        elsewhere: Mapping[str, int],
    ) -> list[MissSpan]:
        tombstones = self._store.tombstones
        assert tombstones is not None
        causes, tiers, times = tombstones.find(keys)
        codes = causes.astype(np.int32) << 8 | tiers
        codes[is_held] = -1
        blank = codes == 0
        if self._chain.sightings is not None:
            codes[blank & (self._chain.sightings.count(keys) > 0)] = -2
        ends = np.flatnonzero(np.diff(codes)) + 1
        starts = np.concatenate([[0], ends])
        stops = np.concatenate([ends, [len(codes)]])
        now_s = self._clock.now()
        spans: list[MissSpan] = []
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            first, num = first_page + start, stop - start
            if len(spans) == _MAX_SPANS - 1 and stop < len(codes):
                num = len(codes) - start
                text = f"{num} more pages, for different reasons"
                spans.append(MissSpan(first, num, "various", text))
                break
            code = int(codes[start])
            age_s = max(0.0, now_s - float(times[start]))
            spans.append(self._span(first, num, code, age_s, held, elsewhere))
        return spans

    def _span(
        self,
        first: int,
        num: int,
        code: int,
        age_s: float,
        held: str,
        elsewhere: Mapping[str, int],
    ) -> MissSpan:
        if code == -1:
            return MissSpan(first, num, "not taken", held or "it was not asked for")
        for name, num_there in elsewhere.items():
            if num_there > first:
                text = f"the same tokens are cached {name}, which is another namespace"
                return MissSpan(first, num, "other namespace", text)
        if code == -2:
            text = (
                "seen once before and not kept: "
                f"write policy {self._config.write_policy}, "
                f"disk admission {self._config.disk_admission}"
            )
            if self._config.write_policy == "auto":
                text = (
                    "seen once before, and no copy is remembered: write policy auto "
                    "copies nothing new while nothing comes again"
                )
            return MissSpan(first, num, "not admitted", text)
        if code == 0:
            return MissSpan(first, num, "never seen", "no copy is remembered")
        cause, tier = Cause(code >> 8), TierId(code & 0xFF)
        text = self._text(cause, tier, age_s)
        return MissSpan(first, num, cause.label, text, tier.label, age_s)

    def _text(self, cause: Cause, tier: TierId, age_s: float) -> str:
        ago, where = f"{age_s:.1f} s ago", tier.label
        match cause:
            case Cause.EVICTED:
                number = self._store.tiers.index(tier)
                policy = self._store.evictors[number].policy.name
                below = ""
                if number + 1 < len(self._store.tiers):
                    target = self._store.tiers[number + 1]
                    below = f"; {target.label} had no copy by then"
                    if target is TierId.DISK:
                        below += f" (admission {self._config.disk_admission})"
                return f"evicted from {where} by {policy} {ago}{below}"
            case Cause.FAILED_CHECK:
                return f"the copy on {where} failed its check {ago}"
            case Cause.NOT_WRITTEN:
                return f"its copy did not arrive on {where} {ago}"
            case Cause.BACK_PRESSURE:
                return f"it was not copied to {where} {ago}: back-pressure"
            case Cause.NO_ROOM:
                return f"it was not copied to {where} {ago}: no room"
            case Cause.DROPPED:
                return f"the {where} tier was emptied {ago}"
            case Cause.NEVER_COPIED:
                return f"the device lost it {ago}, before its copy was due"
