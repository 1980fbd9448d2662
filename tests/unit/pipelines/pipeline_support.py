"""What the pipelines' tests share: small layouts and plans."""

import numpy as np

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import DemotePlan, LoadPlan, OffloadPlan
from sgl_tiered.testing.tier_kit import make_records

LAYOUT = PageLayout(num_layers=4, page_tokens=2, token_bytes=96)
SLOT = LAYOUT.slot_bytes
PATIENCE_S = 20.0
"""Upper bound of every wait: only a defect makes a test wait so long."""


def load_plan(addresses, *, tier=TierId.HOST, checksums=None, plan_id=1):
    """Return a plan for pages at these addresses."""
    slots = np.asarray(addresses, np.int64)
    return LoadPlan(
        plan_id=plan_id,
        first_page=0,
        pages=np.arange(len(slots), dtype=np.int32),
        tiers=np.full(len(slots), tier, np.uint8),
        addresses=slots,
        checksums=np.zeros(len(slots), np.uint64) if checksums is None else checksums,
        predicted_s=0.0,
    )


def offload_plan(addresses, plan_id=1):
    """Return a plan for pages to go to these addresses of the host."""
    slots = np.asarray(addresses, np.int64)
    numbers = np.arange(len(slots), dtype=np.int32)
    return OffloadPlan(plan_id, TierId.HOST, numbers, numbers, slots)


def demote_plan(sources, targets, plan_id=1):
    """Return a plan for pages to go from host to disk."""
    slots = np.asarray(targets, np.int64)
    return DemotePlan(
        plan_id=plan_id,
        source=TierId.HOST,
        target=TierId.DISK,
        pages=np.arange(len(slots), dtype=np.int32),
        source_addresses=np.asarray(sources, np.int64),
        target_addresses=slots,
        records=make_records(slots, LAYOUT.page_tokens, seed=plan_id),
    )
