"""The disk tier of one rank: its folders, and what a former server left in them."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace

from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.agreement import Agreement
from sgl_tiered.engines.sglang.config import TieredConfig, rank_folder
from sgl_tiered.tiers.base import Tier
from sgl_tiered.tiers.disk_striped import open_disk_tier
from sgl_tiered.tiers.emulator import Emulator

__all__ = ["adopt", "disk_fingerprint", "open_disk"]

logger = logging.getLogger(__name__)


def open_disk(
    config: TieredConfig,
    layout: PageLayout,
    namespace: Namespace,
    emulator: Emulator,
    agreement: Agreement,
) -> Tier | None:
    """Open the disk tier of a rank; None where there is none.

    Args:
        config: names its folders.
        layout: shape of a page.
        namespace: of all ranks; a folder belongs to one and to the rank.
        emulator: slows it down where that was asked for.
        agreement: between the ranks.

    Raises:
        ConfigError: a size is wrong.
        TierUnavailableError: a folder cannot be used.
    """
    if not config.disk_paths:
        return None
    rank, num_ranks = agreement.rank, agreement.num_ranks
    # One folder has one user.
    paths = [rank_folder(path, rank, num_ranks) for path in config.disk_paths]
    disk = open_disk_tier(
        paths,
        slot_bytes=layout.slot_bytes,
        page_bytes=layout.page_bytes,
        page_tokens=layout.page_tokens,
        max_bytes=config.disk_bytes,
        fingerprint=disk_fingerprint(namespace, agreement),
        num_threads=config.disk_threads,
        io=config.disk_io,
        calls=emulator.calls(TierId.DISK),
    )
    return emulator.wrap(disk)


def disk_fingerprint(namespace: Namespace, agreement: Agreement) -> str:
    """Return what a folder of this rank's is marked with.

    Args:
        namespace: of all ranks, without adapter and salt.
        agreement: between the ranks.
    """
    if agreement.is_shared:
        # Each rank keeps its own heads' part of a page.
        shard = f"{agreement.rank}/{agreement.num_ranks}"
        namespace = replace(namespace, shard=shard)
    return namespace.digest().hex()


def adopt(cache: TieredCache, disk: Tier, agreement: Agreement) -> None:
    """Take over what a former server left, after the checks that need no payload.

    Only where it is the same on all ranks: a crash may have cut them off apart.
    """
    adopted = refused = 0
    found = list(disk.recover())
    seen = hashlib.blake2b(digest_size=16)
    for records in found if agreement.is_shared else ():
        seen.update(records.keys.tobytes() + records.addresses.tobytes())
    if len(set(agreement.gathered(seen.hexdigest()))) > 1:
        for records in found:
            disk.forget(records.addresses)
            refused += len(records.addresses)
        found = []
    for records in found:
        count, orphans = cache.adopt(disk.tier_id, records)
        disk.forget(orphans)
        adopted += count
        refused += len(orphans)
    if adopted or refused:
        logger.info(
            "sgl-tiered: %d pages from a former run are on disk, %d more were unusable",
            adopted,
            refused,
        )
