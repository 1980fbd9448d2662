"""Times of a pool, what it takes, and what it has under way."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.transport.batched import DEFAULT_GRACE_S

__all__ = ["PoolConfig", "PoolUsage"]


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Times of a pool, in seconds, and what it takes.

    Attributes:
        timeout_s: of a transfer or a remote allocation, unless the call says another.
        retry_s: pause before a request is sent again.
        grace_s: how long blocks that an instance may write to stay unused after its
            port began to refuse; longer than what it had handed to the network lives,
            so the same as the transport's.
        locate_s: how long ``locate`` waits for answers.
        keeps_arrivals: whether somebody calls ``take_arrivals``; else only what enters
            the index is taken from others.
    """

    timeout_s: float = 10.0
    retry_s: float = 0.5
    grace_s: float = DEFAULT_GRACE_S
    locate_s: float = 0.25
    keeps_arrivals: bool = True


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """What a pool has under way; all zero when nothing is.

    Attributes:
        num_guest_blocks: blocks here that belong to others.
        num_quarantined_blocks: blocks here that incarnations which are over had, and
            may still write to.
        num_transfers: transfers that have not ended.
        num_endings: ended ones whose blocks a peer or the network may still touch.
        num_requests: requests without an answer.
        num_fetches: fetches that have not ended.
        num_lent_blocks: blocks here that holders write to, or may still write to.
        num_served: fetches of others from here.
        num_fences: conversations that are over, with peers that may still write here.
    """

    num_guest_blocks: int
    num_quarantined_blocks: int
    num_transfers: int
    num_endings: int
    num_requests: int
    num_fetches: int = 0
    num_lent_blocks: int = 0
    num_served: int = 0
    num_fences: int = 0
