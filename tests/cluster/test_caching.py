"""What a pair with tiers keeps, sends and returns in modes 1 and 2, by its counters.

The other modes' pairs are asked the same in test_pairs.py, which also has load and
faults.
"""

from __future__ import annotations

import pytest
from sgl_tiered_workloads.systems import MB, Tiers

from tests.cluster.turns_support import as_their_mode_says
from tests.e2e.disagg_support import pair_flags, start_pair

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]


@pytest.mark.parametrize("caching", [1, 2])
def test_a_session_turn_by_turn(device, turns, caching, tmp_path):
    """Answers are plain's, and either side has and sends just what its mode says."""
    tiers = Tiers(64 * MB)
    # A decode server that keeps nothing has no use for tiers.
    flags = pair_flags(caching, tiers if caching > 1 else None)
    prefill = tiers.flags if caching == 1 else ()
    pair = start_pair(device, tmp_path, flags, prefill)
    try:
        as_their_mode_says(pair, caching, turns)
    finally:
        pair.stop()
