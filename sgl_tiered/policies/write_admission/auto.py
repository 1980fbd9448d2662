"""Everything is written, until traffic has shown that nothing comes again."""

from __future__ import annotations

import numpy as np

from sgl_tiered.core.plans import Bools
from sgl_tiered.policies.write_admission.base import WriteFacts

__all__ = ["AutoAdmission"]


class AutoAdmission:
    """Writes all pages; without reuse only what was seen twice.

    Seeing needs no writes, so reuse that begins later is noticed all the same: the
    pages of the first prompts that come again are written then.
    """

    name = "auto"
    needs_sightings = True

    def admit(self, facts: WriteFacts) -> Bools:
        """Admit all while prompts come again."""
        if facts.comes_again:
            return np.ones(len(facts.num_sightings), np.bool_)
        admitted: Bools = np.asarray(facts.num_sightings >= 2, np.bool_)
        return admitted
