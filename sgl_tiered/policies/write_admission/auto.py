"""Everything is written, until traffic has shown that nothing comes again."""

from __future__ import annotations

import numpy as np

from sgl_tiered.core.plans import Bools
from sgl_tiered.policies.write_admission.base import WriteFacts

__all__ = ["AutoAdmission"]

MIN_REUSE_RATE = 0.02
"""Below it a write brings less than it costs on any disk: fifty pages are written for
one that is not computed."""
TRUST = 4
"""Pages to see before they are judged, in sizes of the memory above the disk: traffic
that comes again at all does so at shorter distances too."""


class AutoAdmission:
    """Writes all pages; without reuse only what was seen twice.

    Seeing needs no writes, so reuse that begins later is noticed all the same: the
    pages of the first prompts that come again are written then.
    """

    name = "auto"
    needs_sightings = True

    def admit(self, facts: WriteFacts) -> Bools:
        """Admit all while too little was seen or enough came again."""
        is_young = facts.num_seen < TRUST * facts.memory_pages
        if is_young or facts.num_again >= MIN_REUSE_RATE * facts.num_seen:
            return np.ones(len(facts.num_sightings), np.bool_)
        admitted: Bools = np.asarray(facts.num_sightings >= 2, np.bool_)
        return admitted
