"""What the simulated server is asked: lengths, arrivals and the pages of each prompt.

A page of a prompt is represented by one stand-in token, an int32 that is unique for the
page together with all pages before it. So the real radix index and the real cache run
on one int per page, whatever the page size (the index gets ``page_tokens = 1``), and
the real sizes stay in the costs and in the bytes of a page. 145 M tokens at page 16 are
36 MB of stand-ins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.plans import Int32s
from sgl_tiered.errors import ConfigError

__all__ = ["SimRequest", "SimWorkload", "WorkloadBuilder"]

_MAX_STAND_IN = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class SimRequest:
    """One request.

    Attributes:
        arrival_s: when it is sent; where ``after`` is set, not before this.
        num_prompt_tokens: at least 1.
        num_output_tokens: at least 1.
        page_ids: int32, a stand-in for each whole page of the prompt followed by the
            answer (its last token has no KV); equal ids mean equal pages.
        after: index of the request whose answer it waits for; -1 for none.
        think_s: time between that answer and this request.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    page_ids: Int32s
    after: int = -1
    think_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class SimWorkload:
    """Requests, in order of arrival.

    Attributes:
        name: for reports.
        page_tokens: tokens of a page, for which the stand-ins were made.
        requests: all of them.
        num_clients: a closed loop of so many clients, each of which begins the next
            conversation (a request without ``after``) when its own has ended; 0: all
            begin at their arrivals.
    """

    name: str
    page_tokens: int
    requests: tuple[SimRequest, ...]
    num_clients: int = 0


class WorkloadBuilder:
    """Makes stand-ins from block ids, from names of prefixes, or new ones.

    Args:
        page_tokens: tokens of a page.
        keep_answers: give the pages of answers stand-ins of their own. A server keeps
            them, they take room, and no trace says who reads them again.
    """

    def __init__(self, page_tokens: int, *, keep_answers: bool = True) -> None:
        if page_tokens < 1:
            raise ConfigError("page_size", f"{page_tokens} tokens", "give 1 or more")
        self._page_tokens = page_tokens
        self._keep_answers = keep_answers
        self._next_id = 0
        self._prefixes: dict[object, Int32s] = {}
        self._known: dict[tuple[int, bytes], int] = {}
        self._requests: list[SimRequest] = []

    def fresh(self, num_pages: int) -> Int32s:
        """Return stand-ins that nobody else has."""
        first = self._next_id
        self._next_id += num_pages
        if self._next_id > _MAX_STAND_IN:
            raise ConfigError(
                "workload",
                f"{self._next_id} different pages are too many for int32",
                "use larger pages or a part of the trace",
            )
        return np.arange(first, self._next_id, dtype=np.int32)

    def prefix(self, name: object, num_pages: int) -> Int32s:
        """Return the stand-ins of a named prefix; a longer one extends a shorter."""
        known = self._prefixes.get(name, np.zeros(0, np.int32))
        if len(known) < num_pages:
            known = np.concatenate([known, self.fresh(num_pages - len(known))])
            self._prefixes[name] = known
        return known[:num_pages]

    def add(
        self,
        arrival_s: float,
        num_prompt_tokens: int,
        num_output_tokens: int,
        *,
        prefix: Int32s | None = None,
        own_pages: bool = True,
        after: int = -1,
        think_s: float = 0.0,
    ) -> int:
        """Add a request; return its index.

        Pages beyond ``prefix`` are its own; without ``own_pages`` nobody keeps them.
        """
        num_pages = num_prompt_tokens // self._page_tokens
        if self._keep_answers:
            num_tokens = num_prompt_tokens + num_output_tokens - 1
            num_pages = num_tokens // self._page_tokens
        ids = np.zeros(0, np.int32) if prefix is None else prefix[:num_pages]
        if own_pages and len(ids) < num_pages:
            ids = np.concatenate([ids, self.fresh(num_pages - len(ids))])
        self._requests.append(
            SimRequest(
                arrival_s, num_prompt_tokens, num_output_tokens, ids, after, think_s
            )
        )
        return len(self._requests) - 1

    def number_tokens(self, tokens: Int32s) -> Int32s:
        """Turn token ids (int32) into stand-ins: equal prefixes get equal ones."""
        page, known = self._page_tokens, self._known
        raw = np.ascontiguousarray(tokens, np.int32).tobytes()
        found, parent = [], -1
        for start in range(0, len(tokens) // page * page * 4, page * 4):
            key = (parent, raw[start : start + page * 4])
            if key not in known:
                known[key] = self._reserve(1)
            parent = known[key]
            found.append(parent)
        return np.array(found, np.int32)

    def number_blocks(
        self, blocks: Sequence[npt.NDArray[np.int64]], block_tokens: int
    ) -> list[Int32s]:
        """Turn the block ids of all prompts into stand-ins per page.

        Args:
            blocks: per prompt, ids that stand for all tokens up to the block's end.
            block_tokens: tokens of a block; a multiple or a divisor of the page.

        Returns:
            Per prompt, stand-ins of the pages that its blocks cover.
        """
        page = self._page_tokens
        if block_tokens % page and page % block_tokens:
            raise ConfigError(
                "page_size",
                f"{page} tokens do not divide, or consist of, blocks of {block_tokens}",
                "choose a page that does",
            )
        lengths = [len(ids) for ids in blocks]
        joined = np.concatenate(blocks) if blocks else np.zeros(0, np.int64)
        unique, dense = np.unique(joined, return_inverse=True)
        bounds = np.cumsum([0, *lengths])
        parts = [dense[a:b] for a, b in pairwise(bounds.tolist())]
        if page >= block_tokens:
            # The id at a page's end stands for all tokens before it, the page's too.
            step = page // block_tokens
            first = self._reserve(len(unique))
            return [(part[step - 1 :: step] + first).astype(np.int32) for part in parts]
        step = block_tokens // page
        first = self._reserve(len(unique) * step)
        inner = np.arange(step)
        return [
            (part[:, None] * step + inner + first).ravel().astype(np.int32)
            for part in parts
        ]

    def build(self, name: str, num_clients: int = 0) -> SimWorkload:
        """Return the workload; requests are in the order in which they were added."""
        requests = tuple(self._requests)
        return SimWorkload(name, self._page_tokens, requests, num_clients)

    def _reserve(self, num_ids: int) -> int:
        first = self._next_id
        self.fresh(num_ids)
        return first
