"""What is likely to be read again is written."""

from __future__ import annotations

from sgl_tiered.core.plans import Bools
from sgl_tiered.policies.write_admission.base import WriteFacts

__all__ = ["ReuseAdmission"]

MIN_REUSE_RATE = 0.1
"""One page in ten read again: the write of ten pages for one that is not recomputed."""


class ReuseAdmission:
    """Writes what was seen twice, and what lies where prompts were seen again before.

    Traffic whose prompts part after a common beginning has a high rate near the start
    and a low one behind it; traffic without reuse writes next to nothing.
    """

    name = "reuse"
    needs_sightings = True

    def admit(self, facts: WriteFacts) -> Bools:
        """Admit what was seen twice or has a rate of ``MIN_REUSE_RATE`` at least."""
        admitted: Bools = (facts.num_sightings >= 2) | (
            facts.reuse_rates >= MIN_REUSE_RATE
        )
        return admitted
