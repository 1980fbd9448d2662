"""Which tier served which tokens of a request's prompt.

SGLang knows device, host and storage. A page that is loaded from CXL memory is a host
hit to it, and so is one that a peer has sent for the request (``pooled/``): the split
is noted when the load begins.
"""

from __future__ import annotations

from typing import Any

from sgl_tiered.core.ids import TierId
from sgl_tiered.pipelines.layerwise_load import LoadJob

__all__ = ["cached_by_tier", "note_load"]


def note_load(req: Any, job: LoadJob, page_tokens: int) -> None:
    """Note on SGLang's request how much of its load comes from CXL memory.

    SGLang reports what a request found when it was first admitted; loads after it was
    retracted are left out there and here.
    """
    if not req.retracted_stain:
        req.tiered_cxl_tokens = job.num_pages_from(TierId.CXL) * page_tokens


def cached_by_tier(req: Any) -> dict[TierId, int]:
    """Return how many tokens of a request's prompt came from each tier."""
    host = req.cached_tokens_host
    cxl = min(getattr(req, "tiered_cxl_tokens", 0), host)
    peer = min(getattr(req, "tiered_peer_tokens", 0), host - cxl)
    return {
        TierId.DEVICE: req.cached_tokens_device,
        TierId.HOST: host - cxl - peer,
        TierId.CXL: cxl,
        TierId.DISK: req.cached_tokens_storage,
        **({TierId.PEER: peer} if peer else {}),
    }
